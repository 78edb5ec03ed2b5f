"""From a load, pools and their step costs to the state the kernel runs on, and back to a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whywait.physics.step import StepCost
from whywait.sim.kernel_state import (
    ARRIVES,
    BOTH,
    DECODE,
    KINDS,
    NOBODY,
    PREFILL,
    Engine,
    Event,
    Level,
    Link,
    Node,
    Real,
    Request,
    Row,
    Slot,
    Tier,
    Whole,
    World,
    records,
)
from whywait.sim.state import F8, LLAMA_CPP, LRU, STATIC, Load, Pool, Result, Settings, Steps

KIND: dict[str, Any] = {"t_s": np.float64, "took_s": np.float64, "context_sum": np.float64}
CHUNK = 65_536  # rows of a record that is kept whole, at a time
TABLE = 1 << 17  # most tokens a step's cost is tabled for

_COST = ("step_s", "prefill_step_s", "seq_s", "kv_s", "window_s", "window", "prefill_seq_s", "pair_s", "window_pair_s",
         "floor_s", "floor_seq_s")  # fmt: skip
_LIMITS = ("policy", "max_seqs", "token_budget", "chunked", "blocks", "block", "reserve", "priority", "prefix_cache",
           "max_context", "prompt_tokens", "long_prompt", "mixed", "whole_prompt", "evict", "drafts", "draft_share",
           "ahead", "wait_steps", "wait_share", "receive_every", "ratio_min", "ratio_decay", "reply_s")  # fmt: skip


def put(table: Any, place: Any, values: dict[str, Any]) -> None:
    """Sets fields of one record (or, by a slice, of all), whichever form the records have."""
    for name, value in values.items():
        if table.dtype != object:
            table[name][place] = value
        elif isinstance(place, int):
            setattr(table[place], name, value)
        else:
            given = np.broadcast_to(value, table[place].shape).tolist()
            for record, one in zip(table[place], given, strict=True):
                setattr(record, name, one)


def get(table: Any, name: str) -> Any:
    """A field of all records."""
    if table.dtype == object:
        return np.array([getattr(record, name) for record in table.flat])
    return table[name]


class Tables(NamedTuple):
    """Everything the kernel keeps; its ``world`` knows where the others are."""

    world: Any  # (1,)
    engines: Any  # (engines,)
    slots: Any  # (engines, max_seqs)
    order: Any  # the same
    phase: Any  # (engines, block)
    linear: Any  # (kinds, tokens + 1, and the slope beyond them)
    accept: Any  # (kinds, drafts)
    links: Any  # (m,) of all chains
    nodes: Any  # (engines, ids + runs)
    heap: Any  # (engines, ids), or none where eviction goes by age
    tiers: Any  # (engines, tiers)
    requests: Any  # (n,)
    levels: Any  # (engines, levels + 2)
    due: Any  # (roots,)
    events: Any
    rows: Any


def world(load: Load, pools: Sequence[Pool], costs: Sequence[StepCost], settings: Settings) -> Tables:
    """The state at time 0, nothing having arrived."""
    count = sum(settings.engines)
    one = records(World, 1)
    size = CHUNK if settings.steps < 0 else settings.steps
    requests, levels = requests_of(load, any(pool.priority for pool in pools))
    due, events, closed = arrivals(load, pools, settings, requests)
    engines = engines_of(pools, costs, settings.engines)
    tables = Tables(
        world=one,
        engines=engines,
        **room(pools, costs, count),
        **cache(load, pools, requests, engines),
        requests=requests,
        levels=records(Level, (count, levels + 2)),
        due=due,
        events=events,
        rows=records(Row, size),
    )
    limits = {"seed": settings.seed, "macro": int(settings.macro), "limit_s": settings.limit_s, "whole": size // 2}
    pool = {"frontend_s": pools[0].frontend_s, "frontend_token_s": pools[0].frontend_token_s}
    many = {"engines": count, "first": settings.engines[0], "routing": settings.routing, "left": len(load.prompt)}
    link = {"cap": settings.handover_in_flight, "token_s": settings.handover_token_s}
    more = {"latency_s": settings.handover_latency_s, "drain": int(settings.steps < 0)}
    put(one, 0, {**limits, **pool, **many, **link, **more, **closed})
    return located(tables)


def located(tables: Tables) -> Tables:
    """Tells the world where the tables are: again after one has been replaced."""
    where = {}
    for name, table in zip(tables._fields[1:], tables[1:], strict=True):
        where[f"at_{name}"] = table.reshape(-1) if table.dtype == object else table.ctypes.data
    wide = {"seats": tables.slots, "block": tables.phase, "tokens": tables.linear, "drafts": tables.accept}
    wide.update(nodes=tables.nodes, ids=tables.heap, tiers=tables.tiers, levels=tables.levels)
    widths = {name: table.shape[1] for name, table in wide.items()}
    put(tables.world, 0, {**where, **widths, "size": len(tables.rows)})
    return tables


def engines_of(pools: Sequence[Pool], costs: Sequence[StepCost], counts: Sequence[int]) -> Any:
    engines = records(Engine, sum(counts))
    place = 0
    for kind, pool in enumerate(pools):
        for _ in range(counts[kind]):
            role = BOTH if len(pools) == 1 else (PREFILL, DECODE)[kind]
            put(engines, place, engine_fields(place, kind, role, pool, costs[kind]))
            place += 1
    return engines


def engine_fields(place: int, kind: int, role: int, pool: Pool, cost: StepCost) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(pool, name) for name in _LIMITS}
    fields.update({name: getattr(cost, name) for name in _COST})
    fields.update(id=place, kind=kind, role=role, free=pool.blocks, watermark=int(pool.watermark * pool.blocks),
                  ratio_start=pool.ratio, ratio=pool.ratio, tiers=len(pool.tier_blocks))  # fmt: skip
    fields["blank"] = pool.blocks
    if pool.policy in (LLAMA_CPP, STATIC):
        fields.update(slot_cache=pool.prefix_cache and pool.policy == LLAMA_CPP, prefix_cache=False)
    return {name: int(value) if isinstance(value, bool | np.bool_) else value for name, value in fields.items()}


def room(pools: Sequence[Pool], costs: Sequence[StepCost], engines: int) -> dict[str, Any]:
    """Places for sequences, and what steps cost."""
    seqs = max(pool.max_seqs for pool in pools)
    tokens = max(min(TABLE, max(pool.token_budget, pool.max_seqs * (1 + pool.drafts))) for pool in pools)
    accept = np.zeros((len(pools), max(1, *(pool.drafts for pool in pools), 1)))
    for kind, pool in enumerate(pools):
        given = np.asarray(pool.acceptance, float)[: pool.drafts]
        accept[kind, : len(given)] = given
    order = records(Whole, (engines, seqs))
    costs_s = np.stack([np.append(table(cost, tokens), last_slope(cost)) for cost in costs])
    linear, shares = records(Real, costs_s.shape), records(Real, accept.shape)
    for e in range(engines):
        put(order[e], slice(None), {"n": np.arange(seqs)})
    for kind in range(len(pools)):
        put(linear[kind], slice(None), {"x": costs_s[kind]})
        put(shares[kind], slice(None), {"x": accept[kind]})
    phase = records(Whole, (engines, max(pool.block for pool in pools)))
    return {"slots": records(Slot, (engines, seqs)), "order": order, "phase": phase, "linear": linear, "accept": shares}


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


def cache(load: Load, pools: Sequence[Pool], requests: Any, engines: Any) -> dict[str, Any]:
    """The prefix caches, empty. Where eviction goes by age and there is nothing below the device, only the
    beginning of a chain that other rows have too is kept: what nobody can find again is no different from private
    blocks."""
    n, count = len(load.prompt), len(engines)
    chain, ids = np.zeros(0, np.int64), 0
    if any(pool.prefix_cache for pool in pools) and len(load.chain) > 0:
        at = np.asarray(load.chain_at)
        by_age = all(pool.evict == LRU and not pool.tier_blocks for pool in pools)
        least = 2 if by_age else 1
        alone = np.flatnonzero(np.bincount(load.chain)[load.chain] < least)
        ends = np.append(alone, len(load.chain))[np.searchsorted(alone, at[:n])]
        put(requests, slice(None), {"chain_at": at[:n], "chain_n": np.minimum(ends, at[1:]) - at[:n]})
        used = np.bincount(load.chain) >= least
        names = np.cumsum(used) - 1
        chain, ids = np.where(used, names, 0)[load.chain].astype(np.int64), int(used.sum())
    runs = max(min(pool.blocks, ids + 4 * pool.max_seqs + 64) if pool.prefix_cache else 1 for pool in pools)
    nodes = records(Node, (count, ids + runs))
    put(engines, slice(None), {"shared": ids, "runs": ids})
    for e in range(count):
        after = np.append(np.arange(ids + 1, ids + runs), NOBODY)
        put(nodes[e], slice(ids, None), {"behind": after})
    by_key = any(pool.evict != LRU for pool in pools)
    tiers = records(Tier, (count, max(1, *(len(pool.tier_blocks) for pool in pools), 1)))
    for e in range(count):
        pool = pools[int(get(engines, "kind")[e])]
        for k, blocks in enumerate(pool.tier_blocks):
            link = {"block_s": pool.tier_block_s[k], "latency_s": pool.tier_latency_s[k]}
            put(tiers[e], k, {"blocks": blocks, **link})
    links = records(Link, len(chain))
    put(links, slice(None), {"id": chain})
    heap = records(Whole, (count, ids if by_key else 0))
    return {"links": links, "nodes": nodes, "heap": heap, "tiers": tiers}


def requests_of(load: Load, by_priority: bool) -> tuple[Any, int]:
    """The rows of the load, and the number of priority levels."""
    requests = records(Request, len(load.prompt))
    levels, level = 1, np.zeros(1, np.int64)
    if by_priority and len(load.prompt) > 0:
        values, level = np.unique(load.priority, return_inverse=True)
        levels = len(values)
    put(requests, slice(None), {"prompt": load.prompt, "output": load.output, "think_s": load.think_s, "level": level})
    for row in np.flatnonzero(load.after >= 0)[::-1].tolist():
        parent = int(load.after[row])
        put(
            requests,
            row,
            {"sibling": requests[parent].child if requests.dtype == object else requests["child"][parent]},
        )
        put(requests, parent, {"child": row})
    return requests, levels


def arrivals(load: Load, pools: Sequence[Pool], settings: Settings, requests: Any) -> tuple[Any, Any, dict[str, int]]:
    """Rows that come by themselves, in order, and the heap of events. In a closed loop the first ones come at once
    and each end brings the next."""
    roots, pool = np.flatnonzero(load.after < 0), pools[0]
    several = len(roots) < len(load.after) or len(pools) > 1 or any(pool.tier_blocks for pool in pools)
    closed = settings.concurrency > 0
    sent = np.zeros(len(roots)) if closed else np.asarray(load.arrive_s, float)[roots]
    ready = sent + pool.frontend_s + pool.frontend_token_s * load.prompt[roots]
    first = min(settings.concurrency, len(roots)) if closed else 0
    heap = records(Event, (len(load.after) if several else first) + 1)
    due = records(Event, len(roots))
    if closed:
        put(requests, roots[:first], {"sent_s": 0.0})
        by = np.argsort(ready[:first], kind="stable")
        put(heap, slice(first), {"at": ready[:first][by], "code": roots[:first][by] * KINDS + ARRIVES})
        put(due, slice(None), {"code": roots})
    else:
        put(requests, roots, {"sent_s": sent})
        by = np.argsort(ready, kind="stable")
        put(due, slice(None), {"at": ready[by], "code": roots[by]})
    return due, heap, {"next": first, "arrivals": len(roots), "events": first, "closed": int(closed)}


def steps(w: Tables) -> Steps:
    """The record so far; to be emptied by the caller where all of it is kept."""
    kept = int(get(w.world, "rows")[0])
    return Steps(**{name: np.array(get(w.rows[:kept], name), dtype=KIND.get(name, np.int64)) for name in Steps._fields})


def result(w: Tables, full: Sequence[Steps]) -> Result:
    joined = full[0] if len(full) == 1 else Steps(*(np.concatenate(columns) for columns in zip(*full, strict=True)))
    fields = {name: get(w.requests, name) for name in Request.__dataclass_fields__ if name in Result._fields}
    fields["refused"] = fields["refused"] == 1
    return Result(
        **fields,
        drafted=int(sum(get(w.engines, "drafted"))),
        accepted=int(sum(get(w.engines, "accepted"))),
        end_s=float(get(w.world, "now")[0]),
        steps=joined,
        steps_stride=int(get(w.world, "stride")[0]),
    )
