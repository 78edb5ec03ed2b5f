"""What fits: weights, working space and KV blocks on a device; refusals that name the nearest choice that would fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whywait.errors import UsageError
from whywait.physics.dtypes import bytes_of
from whywait.physics.layout import Layout
from whywait.physics.memory import kv_bytes_per_token, state_bytes, weights_bytes, window_kv_bytes
from whywait.sim.deployment import Deployment

#: What an engine's process takes on every device beside weights and KV: CUDA context, communicators, graphs. Seen as
#: 1–2.5 GB in the logs of vLLM ("non-torch memory", "CUDA graphs took"); the middle.
OVERHEAD_BYTES = 1.5e9
#: Bytes of activations per token of a step: hidden states and one layer's widest part in 16 bits, twice (in and out).
ACTIVATION_COPIES = 2
#: Length of a sequence by which windowed layers are counted where none is asked for.
USUAL_TOKENS = 4096.0
PRECISIONS = (("fp8", "fp8-weights"), ("int4", "int4-weights"), ("fp4", "fp4-weights"))


@dataclass(frozen=True)
class Capacity:
    """Of one engine (a replica, or one kind of a split pair). Bytes are per device; tokens and blocks of the engine.

    ``concurrency`` is how many requests of the length asked for fit (None: no length asked)."""

    memory_bytes: float
    weight_bytes: float
    working_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    blocks: int
    tokens: int
    told: bool  # the engine's log said so
    concurrency: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def capacity(d: Deployment, request_tokens: float | None = None, prefill: bool = False) -> Capacity:
    """What fits on one engine of ``d``; ``prefill`` for the prefill engines of a split pair.

    Raises:
        UsageError: the layout does not divide the model, the machine has no rate for the type of numbers, or nothing is
            left for KV; the hint names the nearest choice that is feasible.
    """
    layout = (d.split.prefill_layout if prefill and d.split else None) or d.layout
    check_layout(d, layout)
    check_dtype(d)
    check_length(d, request_tokens or 0)
    found = _sizes(d, layout, request_tokens)
    if found.blocks < 1 or found.tokens < max(1.0, request_tokens or 1.0):
        raise _no_room(d, layout, found, request_tokens)
    if request_tokens:
        found = dataclasses.replace(found, concurrency=found.tokens / request_tokens)
    return found


def blocks_of(d: Deployment) -> int:
    """KV blocks of one engine; 0 where nothing is left for them."""
    return max(0, _sizes(d, d.layout).blocks)


def check_layout(d: Deployment, layout: Layout) -> None:
    """
    Raises:
        UsageError: heads, layers or experts cannot be dealt out to so many devices.
    """
    a = d.model
    _divides("tp", layout.tp, a.heads, "attention heads")
    if a.kv_heads and layout.tp > a.kv_heads and layout.tp % a.kv_heads:
        raise UsageError(f"{a.name} has {a.kv_heads} KV heads, which tp={layout.tp} cannot split or repeat evenly",
                         f"nearest: {_near(layout.tp, _divisors(a.heads))}")  # fmt: skip
    _divides("pp", layout.pp, a.layers, "layers")
    if layout.ep > 1:
        if not a.experts:
            raise UsageError(f"{a.name} has no experts to spread over ep={layout.ep} devices", "leave ep out")
        _divides("ep", layout.ep, a.experts, "experts")
        if layout.ep > layout.devices:
            raise UsageError(f"ep={layout.ep} needs as many devices; tp×pp×dp is {layout.devices}",
                             f"ep={layout.devices}, or a larger tp or dp")  # fmt: skip


def check_length(d: Deployment, request_tokens: float) -> None:
    """
    Raises:
        UsageError: a request is longer than the model's context, or than what the engine was told to take.
    """
    most = d.engine.max_context or d.model.max_context
    if most and request_tokens > most:
        raise UsageError(f"a request of {request_tokens:,.0f} tokens is longer than the {most:,} of {d.model.name}",
                         "shorter prompts or answers, or another model")  # fmt: skip
    if d.machine.memory_bytes <= 0 and d.engine.kv_blocks is None:
        raise UsageError(f"the memory of {d.machine.name} is not known, so neither is its room for KV",
                         "give --kv-blocks, or memory_gb in an entry of --catalog")  # fmt: skip


def check_dtype(d: Deployment) -> None:
    """
    Raises:
        UsageError: the machine cannot multiply numbers of that type.
    """
    kind, flops = d.precision.compute, d.machine.flops
    if kind not in flops and kind in ("fp8", "fp4", "int8"):
        narrower = {"fp8": "int8-weights or int4-weights", "fp4": "fp8-weights or int4-weights"}.get(
            kind, "int4-weights"
        )
        raise UsageError(f"{d.machine.name} has no {kind.upper()} units (it has {', '.join(flops)})",
                         f"{narrower}: stored narrow, multiplied in 16 bits; or a machine that has them")  # fmt: skip


def _sizes(d: Deployment, layout: Layout, request: float | None = None) -> Capacity:
    a, e = d.model, d.engine
    memory = d.machine.memory_bytes
    weights = weights_bytes(a, d.precision, layout)
    width = a.hidden + max(a.inter, a.expert_inter * max(a.chosen, 1) + a.shared_inter) / layout.tp
    working = OVERHEAD_BYTES + ACTIVATION_COPIES * 2 * min(e.token_budget, 65536) * width
    if e.policy == "sglang":  # its share leaves the activations out already
        working = OVERHEAD_BYTES
    if d.speculation is not None and d.speculation.kind == "draft":
        working += 0.03 * weights  # an EAGLE head is one layer and a language head of its own
    each = _per_token(d, layout, request or USUAL_TOKENS)
    room = max(0.0, memory * e.memory_share - weights - working)
    if e.policy == "trtllm":  # its share is of what is free after the weights are loaded
        room = max(0.0, (memory - weights - working) * e.memory_share)
    tokens = room / each if each > 0 else float(1 << 40)
    share = d.efficiency.kv_space * d.hardware.kv_space
    blocks = int(tokens * share * layout.dp // e.block)
    if e.kv_blocks is not None:
        blocks = int(e.kv_blocks * share)
    return Capacity(memory, weights, working, room, each, blocks, blocks * e.block, e.kv_blocks is not None)


def _per_token(d: Deployment, layout: Layout, request: float) -> float:
    """KV bytes per token of a sequence of ``request`` tokens on one device: windowed layers keep their window only, and
    the state of linear layers, one per sequence, is dealt out to its tokens (engines page it like KV)."""
    each = kv_bytes_per_token(d.model, d.precision.kv, layout)[0]
    windowed = window_kv_bytes(d.model, d.precision.kv, layout)
    return each - windowed * max(0.0, 1 - d.model.window / request) + state_bytes(d.model, layout) / request


def _no_room(d: Deployment, layout: Layout, found: Capacity, request: float | None) -> UsageError:
    gb = 1e9
    if found.told:
        computed = _sizes(_computed(d), layout, request).blocks
        told = f"the KV space of {d.engine.kv_blocks:,} blocks (--kv-blocks, or a log) is {found.tokens:,} tokens"
        hint = f"leave --kv-blocks out: {computed:,} blocks are computed to fit"
        return UsageError(f"{told}, less than a request of {request or 1:,.0f}", hint)
    what = f"{d.model.name} in {d.precision.weights} does not fit on {layout.devices} × {d.machine.name}"
    if found.weight_bytes + found.working_bytes <= found.memory_bytes * d.engine.memory_share and request:
        what = (f"a request of {request:.0f} tokens does not fit in the KV space of {found.tokens:,} tokens that "
                f"{layout.devices} × {d.machine.name} leave")  # fmt: skip
    else:
        what += (f": {found.weight_bytes / gb:.1f} GB of weights and {found.working_bytes / gb:.1f} GB of working "
                 f"space per device of {found.memory_bytes / gb:.0f} GB (share {d.engine.memory_share:g})")  # fmt: skip
    return UsageError(what, "; or ".join(feasible(d, layout, request)) or "nothing in the catalogue's reach fits")


def feasible(d: Deployment, layout: Layout, request: float | None = None) -> list[str]:
    """The nearest changes that make it fit: the smallest tp, and the first narrower type of weights."""
    out, need = [], max(1.0, request or 1.0)
    for tp in _divisors(d.model.heads):
        wider = dataclasses.replace(layout, tp=tp)
        if tp > layout.tp and tp <= 64 and _sizes(_computed(d), wider, request).tokens >= need:
            across = tp * layout.pp * layout.dp > d.machine.node >= 1
            out.append(f"tp={tp}" + (f" (across nodes of {d.machine.node})" if across else ""))
            break
    for kind, technique in PRECISIONS:
        if kind == d.precision.weights or (kind in ("fp8", "fp4") and kind not in d.machine.flops):
            continue
        narrow = dataclasses.replace(d, precision=dataclasses.replace(d.precision, weights=kind, experts=None))
        if _sizes(_computed(narrow), layout, request).tokens >= need and _narrower(kind, d.precision.weights):
            out.append(technique)
            break
    return out


def smallest_tp(d: Deployment, most: int) -> int:
    """The least tensor parallelism, of at most ``most`` devices, that leaves room for KV of a usual sequence.

    Raises:
        UsageError: none does; what would is named.
    """
    for tp in _divisors(d.model.heads):
        if tp <= most and most % tp == 0 and _sizes(d, dataclasses.replace(d.layout, tp=tp)).tokens >= USUAL_TOKENS:
            return tp
    widest = dataclasses.replace(d.layout, tp=max(k for k in _divisors(d.model.heads) if k <= most))
    raise _no_room(d, widest, _sizes(d, widest), None)


def wider_for(d: Deployment, need: Callable[[Deployment], float]) -> tuple[Deployment, float, float]:
    """``d`` over the same devices with the least tp, of its own and wider ones, whose KV space in all holds ``need``
    tokens (which may depend on the layout); the roomiest where none does. With the tokens that it holds and needs."""
    found: list[tuple[Deployment, float, float]] = []
    for tp in _divisors(d.model.heads):
        if tp < d.layout.tp or d.devices % tp:
            continue
        one = dataclasses.replace(d, layout=dataclasses.replace(d.layout, tp=tp), replicas=d.devices // tp)
        try:
            room = float(capacity(one).tokens * one.replicas)
        except UsageError:  # KV heads that such a tp cannot split, or no room
            continue
        asked = need(one)
        if room >= asked:
            return one, room, asked
        found.append((one, room, asked))
    return max(found, key=lambda x: x[1]) if found else (d, 0.0, need(d))


def _computed(d: Deployment) -> Deployment:
    return dataclasses.replace(d, engine=dataclasses.replace(d.engine, kv_blocks=None))


def _narrower(a: str, b: str) -> bool:
    return bytes_of(a) < bytes_of(b)


def _divides(name: str, n: int, total: int, what: str) -> None:
    if n < 1 or total % n:
        raise UsageError(f"{total} {what} cannot be dealt out to {name}={n}", f"nearest: {_near(n, _divisors(total))}")


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _near(n: int, among: list[int]) -> str:
    """The next smaller and the next larger, where there are such."""
    below, above = [k for k in among if k < n], [k for k in among if k > n]
    return " or ".join(str(k) for k in (*below[-1:], *above[:1]))
