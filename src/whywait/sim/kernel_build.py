"""From a load, pools and their step costs to the state the kernel runs on, and back to a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whywait.physics.step import StepCost
from whywait.sim.kernel_queue import NOBODY
from whywait.sim.kernel_state import BOTH, DECODE, KINDS, PREFILL, Clock, Engine, Events, Out, Queue, Room, Slot, World
from whywait.sim.kernel_state import ARRIVES, records
from whywait.sim.state import F8, I8, Load, Pool, Settings, Steps

CHUNK = 65_536  # rows of a record that is kept whole, at a time
TABLE = 1 << 17  # most tokens a step's cost is tabled for

_COST = ("step_s", "prefill_step_s", "seq_s", "kv_s", "window_s", "window", "prefill_seq_s", "pair_s", "window_pair_s",
         "floor_s", "floor_seq_s")  # fmt: skip
_LIMITS = ("policy", "max_seqs", "token_budget", "chunked", "blocks", "block", "reserve", "priority", "prefix_cache",
           "max_context", "prompt_tokens", "long_prompt", "mixed", "whole_prompt", "evict", "drafts", "draft_share",
           "ratio_min", "ratio_decay", "reply_s")  # fmt: skip


def put(records_: Any, place: int, values: dict[str, Any]) -> None:
    """Sets fields of one record, whichever form the records have."""
    if records_.dtype == object:
        for name, value in values.items():
            setattr(records_[place], name, value)
    else:
        for name, value in values.items():
            records_[name][place] = value


def get(records_: Any, name: str) -> list[Any]:
    if records_.dtype == object:
        return [getattr(record, name) for record in records_]
    return records_[name].tolist()  # type: ignore[no-any-return]


def world(load: Load, pools: Sequence[Pool], costs: Sequence[StepCost], settings: Settings) -> World:
    """The state at time 0, nothing having arrived."""
    counts = settings.engines
    engines = records(Engine, sum(counts))
    split = len(pools) > 1
    place = 0
    for kind, pool in enumerate(pools):
        for _ in range(counts[kind]):
            role = BOTH if not split else (PREFILL, DECODE)[kind]
            put(engines, place, engine_fields(place, kind, role, pool, costs[kind]))
            place += 1
    n = len(load.prompt)
    out = Out(*(np.full(n, np.nan) for _ in range(5)), *(np.zeros(n, np.int64) for _ in range(3)), np.full(n, -1, np.int64),
              np.full(n, np.nan), np.zeros(n, np.bool_))  # fmt: skip
    clock = records(Clock, 1)
    put(clock, 0, {"engines": sum(counts), "first": counts[0], "routing": settings.routing, "seed": settings.seed,
                   "macro": int(settings.macro), "limit_s": settings.limit_s, "left": n,
                   "frontend_s": pools[0].frontend_s, "frontend_token_s": pools[0].frontend_token_s})  # fmt: skip
    events = arrivals(load, settings, clock, out)
    return World(clock, engines, room(pools, costs, sum(counts)), queue(load, pools, sum(counts)), events, load, out,
                 rows(settings, clock))  # fmt: skip


def engine_fields(place: int, kind: int, role: int, pool: Pool, cost: StepCost) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(pool, name) for name in _LIMITS}
    fields.update({name: getattr(cost, name) for name in _COST})
    fields.update(id=place, kind=kind, role=role, free=pool.blocks, watermark=int(pool.watermark * pool.blocks),
                  ratio_start=pool.ratio, ratio=pool.ratio, tiers=len(pool.tier_blocks))  # fmt: skip
    return {name: int(value) if isinstance(value, bool | np.bool_) else value for name, value in fields.items()}


def room(pools: Sequence[Pool], costs: Sequence[StepCost], engines: int) -> Room:
    seqs = max(pool.max_seqs for pool in pools)
    tokens = max(min(TABLE, max(pool.token_budget, pool.max_seqs * (1 + pool.drafts))) for pool in pools)
    linear = np.stack([table(cost, tokens) for cost in costs])
    slope = np.array([last_slope(cost) for cost in costs])
    accept = np.zeros((len(pools), max(1, *(pool.drafts for pool in pools), 1)))
    for kind, pool in enumerate(pools):
        given = np.asarray(pool.acceptance, float)[: pool.drafts]
        accept[kind, : len(given)] = given
    return Room(
        slots=records(Slot, (engines, seqs)),
        order=np.zeros((engines, seqs), np.int64),
        spare=np.tile(np.arange(seqs, dtype=np.int64), (engines, 1)),
        phase=np.zeros((engines, max(pool.block for pool in pools)), np.int64),
        linear_s=linear,
        slope_s=slope,
        accept=accept,
    )


def table(cost: StepCost, tokens: int) -> F8:
    """``linear`` for 0 … tokens; 0 for no token."""
    at = np.arange(tokens + 1, dtype=np.float64)
    grid = np.asarray(cost.grid, np.float64)
    values = np.interp(at, grid, cost.linear_s)
    past = at > grid[-1]
    values[past] = cost.linear_s[-1] + (at[past] - grid[-1]) * last_slope(cost)
    values[0] = 0.0
    return values


def last_slope(cost: StepCost) -> float:
    if len(cost.grid) < 2:
        return 0.0
    return float((cost.linear_s[-1] - cost.linear_s[-2]) / (cost.grid[-1] - cost.grid[-2]))


def queue(load: Load, pools: Sequence[Pool], engines: int) -> Queue:
    n = len(load.prompt)
    levels, level = 1, np.zeros(n, np.int64)
    if any(pool.priority for pool in pools) and n > 0:
        values, level = np.unique(load.priority, return_inverse=True)
        levels = len(values)
    empty = np.full((engines, levels), NOBODY, np.int64)
    return Queue(empty, empty.copy(), np.full(n, NOBODY, np.int64), level.astype(np.int64), np.zeros(n, np.int64))


def arrivals(load: Load, settings: Settings, clock: Any, out: Out) -> Events:
    """Rows that come by themselves, in order; in a closed loop the first ones come at once and each end brings the next."""
    roots = np.flatnonzero(load.after < 0).astype(np.int64)
    linked = len(roots) < len(load.after)
    pool_s = get(clock, "frontend_s")[0], get(clock, "frontend_token_s")[0]
    closed = settings.concurrency > 0
    first = min(settings.concurrency, len(roots)) if closed else 0
    heap_s, heap = np.zeros(len(load.after) + 1), np.zeros(len(load.after) + 1, np.int64)
    ready = np.zeros(0)
    if closed:
        out.sent_s[roots[:first]] = 0.0
        due = pool_s[0] + pool_s[1] * load.prompt[roots[:first]]
        by = np.lexsort((roots[:first], due))
        heap_s[:first], heap[:first] = due[by], roots[by] * KINDS + ARRIVES
    else:
        out.sent_s[roots] = load.arrive_s[roots]
        ready = load.arrive_s[roots] + pool_s[0] + pool_s[1] * load.prompt[roots]
        by = np.argsort(ready, kind="stable")
        roots, ready = roots[by], ready[by]
    put(clock, 0, {"next": first, "arrivals": len(roots), "events": first, "closed": int(closed)})
    child, sibling = links(load.after) if linked else (np.zeros(0, np.int64), np.zeros(0, np.int64))
    return Events(roots, ready, heap_s, heap, child, sibling)


def links(after: I8) -> tuple[I8, I8]:
    """For each row the first one its end releases, and the next of those in order."""
    child, sibling = np.full(len(after), NOBODY, np.int64), np.full(len(after), NOBODY, np.int64)
    for row in range(len(after) - 1, -1, -1):
        if after[row] >= 0:
            sibling[row] = child[after[row]]
            child[after[row]] = row
    return child, sibling


def rows(settings: Settings, clock: Any) -> Steps:
    size = CHUNK if settings.steps < 0 else settings.steps
    put(clock, 0, {"whole": size // 2, "drain": int(settings.steps < 0)})
    whole = {"t_s": float, "took_s": float, "context_sum": float}
    return Steps(**{name: np.zeros(size, whole.get(name, np.int64)) for name in Steps._fields})
