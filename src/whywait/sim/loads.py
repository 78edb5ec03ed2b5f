"""A Schedule and a Deployment as what the kernel runs on: load, pools, step costs and settings."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from whywait.core.schedule import Ints, Schedule
from whywait.errors import UsageError
from whywait.physics import power
from whywait.physics.arch import Arch
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import FAMILIES
from whywait.physics.kernels import COMPUTE, RESOURCES
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import Accelerator
from whywait.physics.memory import kv_bytes_per_token
from whywait.physics.step import StepCost, step_cost
from whywait.sim.capacity import Capacity, capacity
from whywait.sim.chains import chains
from whywait.sim.deployment import Deployment, Split
from whywait.sim.state import POLICY, RESERVE, ROUTE, Load, Pool, Settings
from whywait.units import NS_PER_S

#: Time between what warms the cache and the load: nothing happens in it, so its length does not matter.
AFTER_WARM_S = 1000.0
#: What transfers reach of a wire's rate: 70 to 90 % are seen for large RDMA and pinned copies; the lower end of them.
REACHED = 0.75
MAX_PREFILL = 16384  # SGLang's --max-prefill-tokens (server arguments, docs.sglang.ai)


@dataclass(frozen=True)
class Options:
    """How a load is simulated and what is kept of it. ``keep``: ``none``, ``sample`` of the steps (what power is
    reckoned from), ``steps`` (past 50,000 thinned), or ``chunks``: every step, and a row per token where they are few
    enough. ``timeout_s`` as of the workload; ``send_s`` ends a closed loop; ``limit_s`` the simulation. ``warm``:
    beginnings that come again are in the cache before. ``slo`` by keys as ``ttft_ms``, for all classes."""

    keep: str = "steps"
    timeout_s: float = math.inf
    send_s: float | None = None
    limit_s: float = math.inf
    warm: bool = False
    slo: dict[str, float] = field(default_factory=dict)
    slo_of_classes: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """``warmed`` rows before the schedule's own warm the cache; ``shift_s`` is what arrivals were put off by."""

    schedule: Schedule
    load: Load
    pools: tuple[Pool, ...]
    costs: tuple[StepCost, ...]
    settings: Settings
    capacities: tuple[Capacity, ...]
    warmed: int = 0
    shift_s: float = 0.0
    kv_token_bytes: float = math.nan  # of a split pair: what a token's KV takes on the way


def prepare(d: Deployment, schedule: Schedule, mode: str, target: float, seed: int, *, options: Options) -> Prepared:
    """
    Raises:
        UsageError: the deployment does not fit or its layout is impossible (see ``capacity``), or the mode is unknown.
    """
    if mode not in ("concurrency", "rate", "trace"):
        raise UsageError(f"mode must be concurrency, rate or trace, not {mode!r}")
    longest = float((schedule.prompt_tokens + schedule.output_tokens).max(initial=2))
    capacities = capacities_of(d, longest)
    load, warmed = _load(schedule, d.engine.block, options.warm)
    shift = AFTER_WARM_S if warmed and mode != "concurrency" else 0.0
    if shift:
        load = load._replace(arrive_s=np.concatenate((load.arrive_s[:warmed], load.arrive_s[warmed:] + shift)))
    if d.engine.priority:
        load = load._replace(priority=_priorities(d, schedule, options, warmed))
    # More places than requests change nothing; the kernel makes room for all of them.
    most = min(d.engine.max_seqs, max(len(load.prompt), 1))
    pools = tuple(pool_of(d, c, i)._replace(max_seqs=most) for i, c in enumerate(capacities))
    costs = tuple(cost_of(d, prefill=d.split is not None and i == 0) for i in range(len(pools)))
    settings = _settings(d, mode, target, seed, options)._replace(steps=_rows(load, d.engine.token_budget, options))
    each = kv_bytes_per_token(d.model, d.precision.kv, d.layout)[1] if d.split else math.nan
    return Prepared(schedule, load, pools, costs, settings, capacities, warmed, shift, each)


def capacities_of(d: Deployment, request_tokens: float | None = None) -> tuple[Capacity, ...]:
    """Of each kind of engine: of a split pair the prefill engines first.

    Raises:
        UsageError: see ``capacity``; or a static batch is asked to be split.
    """
    if d.split is not None and d.engine.policy == "static":
        raise UsageError("static batching has no split into prefill and decode engines: a batch stays where it began",
                         "another engine, or no pd")  # fmt: skip
    if d.split is None:
        return (capacity(d, request_tokens),)
    return capacity(d, request_tokens, prefill=True), capacity(d, request_tokens)


def efficiency_of(d: Deployment) -> Efficiency:
    """What times are multiplied by: the service's own efficiency times what techniques changed of the hardware."""
    factors: dict[str, Any] = {
        f.name: getattr(d.efficiency, f.name) * getattr(d.hardware, f.name)
        for f in fields(Efficiency)
        if isinstance(f.default, float)
    }
    if d.power_cap_w is not None:
        slower = cap_factor(d.machine, d.power_cap_w)
        factors["compute"], factors["pairs"] = factors["compute"] * slower, factors["pairs"] * slower
    return replace(d.efficiency, **factors, family=family_of(d))


def cap_factor(machine: Accelerator, cap_w: float) -> float:
    """By what computing takes longer under a cap on each device, for steps that compute all the time: decode that reads
    hides it.

    Raises:
        UsageError: the rated power is not known, or the cap is below what the device draws idle.
    """
    busy = np.zeros((len(RESOURCES), 1))
    busy[COMPUTE] = 1.0
    return float(power.capped(machine, busy, cap_w)[COMPUTE, 0])


def family_of(d: Deployment) -> str:
    """Whose kernels and host the fits are taken of."""
    return d.engine.policy if d.engine.policy in FAMILIES else "vllm"


def cost_of(d: Deployment, prefill: bool = False) -> StepCost:
    """The step cost of one engine."""
    return step_cost(*cost_inputs(d, prefill))


def cost_inputs(d: Deployment, prefill: bool = False) -> tuple[Arch, Accelerator, Precision, Layout, Efficiency, int]:
    """What ``physics.step`` asks for, of one engine: in decode a sequence computes a token and its drafts."""
    layout = (d.split.prefill_layout if prefill and d.split else None) or d.layout
    drafts = d.speculation.drafts if d.speculation and not prefill else 0
    return d.model, d.machine, d.precision, layout, efficiency_of(d), 1 + drafts


@functools.lru_cache(maxsize=64)
def _load(s: Schedule, block: int, warm: bool) -> tuple[Load, int]:
    """The kernel's rows, and how many of them, before the schedule's own, only warm the cache."""
    at, ids = chains(s, block, warm)
    load = Load(
        np.where(s.due_ns >= 0, s.due_ns, 0) / NS_PER_S,
        s.after_rows(),
        s.think_ns / NS_PER_S,
        np.maximum(s.prompt_tokens, 1),
        np.maximum(s.output_tokens, 1),
        np.zeros(len(s), np.int64),
        s.klass,
        at,
        ids,
    )
    return _warmed(load, s, block) if warm and len(ids) else (load, 0)


def _warmed(load: Load, s: Schedule, block: int) -> tuple[Load, int]:
    """One request before all others per chain that comes again, with a single token of answer."""
    at, ids = load.chain_at, load.chain
    first: dict[int, int] = {}
    for row in range(len(s)):
        if at[row + 1] > at[row]:
            head = int(ids[at[row]])
            best = first.get(head)
            if best is None or at[row + 1] - at[row] > at[best + 1] - at[best]:
                first[head] = row
    rows = np.array([r for r in first.values() if (load.after[r] < 0)], np.int64)
    w = len(rows)
    if not w:
        return load, 0
    lengths = np.minimum(at[rows + 1] - at[rows], load.prompt[rows] // block)
    parts = [ids[at[r] : at[r] + n] for r, n in zip(rows.tolist(), lengths.tolist(), strict=True)]
    one = np.ones(w, np.int64)
    joined = (np.concatenate(p) for p in (
        (np.zeros(w), load.arrive_s), (-one, np.where(load.after >= 0, load.after + w, -1)),
        (np.zeros(w), load.think_s), (np.maximum(lengths * block, 1), load.prompt), (one, load.output),
        (0 * one, load.priority), (0 * one, load.klass),
        (np.concatenate(([0], np.cumsum(lengths))), at[1:] + int(lengths.sum())), (*parts, ids)))  # fmt: skip
    return Load(*joined), w


def _priorities(d: Deployment, s: Schedule, options: Options, warmed: int) -> Ints:
    """By class: the one named goes first; with none named, in the order of their SLO for the first token."""
    names = list(s.class_names)
    if d.priority_class and d.priority_class not in names:
        raise UsageError(f"priority: there is no class {d.priority_class!r}", f"classes: {', '.join(names)}")
    bounds = [options.slo_of_classes.get(n, {}).get("ttft_ms", math.inf) for n in names]
    order = sorted(range(len(names)), key=lambda i: (names[i] != d.priority_class, bounds[i], i))
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return np.concatenate((np.zeros(warmed, np.int64), rank[s.klass]))


def pool_of(d: Deployment, c: Capacity, number: int) -> Pool:
    e, spec = d.engine, d.speculation
    decodes = d.split is None or number == 1
    each = kv_bytes_per_token(d.model, d.precision.kv, d.layout)[1] * e.block
    return Pool(
        policy=POLICY[e.policy], max_seqs=e.max_seqs, token_budget=e.token_budget, chunked=e.chunked, blocks=c.blocks,
        block=e.block, reserve=RESERVE[e.reserve], priority=e.priority, prefix_cache=e.prefix_cache,
        max_context=e.max_context, ahead=e.ahead, wait_steps=e.wait_steps, wait_share=e.wait_share,
        receive_every=e.receive_every, drafts=spec.drafts if spec and decodes else 0,
        acceptance=spec.acceptance if spec and decodes else (),
        draft_share=spec.draft_share if spec and decodes else 0.0,
        frontend_s=e.frontend_s * efficiency_of(d).frontend if number == 0 else 0.0,
        frontend_token_s=e.frontend_token_s * efficiency_of(d).frontend if number == 0 else 0.0,
        prompt_tokens=MAX_PREFILL if e.policy == "sglang" else 0, reply_s=e.reply_s,
        tier_blocks=tuple(int(t.bytes // each) for t in d.tiers),
        tier_block_s=tuple(each / t.bytes_per_s for t in d.tiers), tier_latency_s=tuple(t.latency_s for t in d.tiers),
    )  # fmt: skip


def handover_bytes_per_s(d: Deployment, split: Split) -> float:
    """The rate at which one prefill engine sends KV: as said, or by the NICs of its devices (PCIe where those are not
    known), each at ``REACHED`` of its data sheet."""
    rate = split.bytes_per_s
    if not rate:
        nic = d.machine.nic_bytes_per_s or d.machine.host_bytes_per_s or 25e9
        rate = REACHED * nic * (split.prefill_layout or d.layout).devices
    return rate / d.hardware.link


def _rows(load: Load, budget: int, options: Options) -> int:
    """Rows that the record of steps gets. Of so many the kernel keeps the first half whole and thins what follows."""
    most = {"none": 0, "sample": 4_000, "steps": 100_000, "chunks": -1}.get(options.keep)
    if most is None:
        raise UsageError(f"keep must be none, sample, steps or chunks, not {options.keep!r}")
    # A step makes a token, or computes a part of a prompt; twice that leaves room for work done again.
    bound = 4 * int(load.output.sum() + len(load.output) + 2 * load.prompt.sum() // max(budget, 1)) + 64
    return bound if most < 0 and bound < 400_000 else min(most, bound)


def _settings(d: Deployment, mode: str, target: float, seed: int, options: Options) -> Settings:
    found = Settings(
        concurrency=max(1, round(target)) if mode == "concurrency" else 0, seed=seed,
        limit_s=options.limit_s, routing=ROUTE[d.routing], engines=(d.replicas,),
    )  # fmt: skip
    if d.split is None:
        return found
    per_token = kv_bytes_per_token(d.model, d.precision.kv, d.layout)[1]
    return found._replace(
        engines=(d.replicas * d.split.prefill, d.replicas * d.split.decode),
        handover_token_s=per_token * (1 - d.split.overlap) / handover_bytes_per_s(d, d.split),
        handover_latency_s=d.split.latency_s, handover_in_flight=d.split.in_flight,
    )  # fmt: skip
