"""The time of one engine step as a few numbers, so that a simulated step costs nanoseconds.

Everything that depends only on how many tokens the step computes (matrix products, experts, collectives, host work per
token) is a table over that number; attention is linear in what is read and in pairs of tokens. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.errors import UsageError
from whywait.physics.arch import Arch
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import fit_of, host_of, served
from whywait.physics.kernels import COMPUTE, HOST, KV, RESOURCES, WEIGHTS, Kernels
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import Accelerator
from whywait.physics.ops import Operations, operations
from whywait.physics.rooflines import READ

Floats = NDArray[np.float64]
_GRID = np.array([
    1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512,
    640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192, 10240, 12288,
    16384, 24576, 32768, 65536, 131072,
], dtype=np.int64)  # fmt: skip
_LINEAR_SHARE = 0.15  # of the rate that chunked recurrences reach; not in the tables: a guess
_HEAD_ROWS = 256  # sequences over which what a row of the output table adds is taken


class StepCost(NamedTuple):
    """One engine (all devices of one replica together). Seconds throughout.

    A step of ``T`` tokens, of which ``B`` sequences decode over ``K`` tokens of context in all (``Kw`` where layers
    look at most ``window`` tokens back), while ``P`` sequences prefill, whose tokens look back at ``A`` (``Aw``) pairs
    in all, takes

    ``max(step_s + [P > 0] prefill_step_s + linear(T) + seq_s B + kv_s K + window_s Kw + prefill_seq_s P + pair_s A +
    window_pair_s Aw, floor_s + floor_seq_s (B + P))``

    where ``linear`` interpolates ``linear_s`` over ``grid``, linearly between its points and, above the last, along its
    last slope. The second term is the host of an engine that schedules ahead: it hides until it is the longer.
    """

    grid: NDArray[np.int64]  # (n,) token counts, ascending, from 1
    linear_s: NDArray[np.float64]  # (n,)
    step_s: float
    prefill_step_s: float
    seq_s: float
    kv_s: float
    window_s: float
    window: int  # 0: no layer has a window
    prefill_seq_s: float
    pair_s: float
    window_pair_s: float
    floor_s: float = 0.0
    floor_seq_s: float = 0.0


class StepParts(NamedTuple):
    """The same by resource (``kernels.RESOURCES``): ``linear_s`` is (5, n), the others (5,)."""

    grid: NDArray[np.int64]
    linear_s: Floats
    step_s: Floats
    prefill_step_s: Floats
    seq_s: Floats
    kv_s: Floats
    window_s: Floats
    window: int
    prefill_seq_s: Floats
    pair_s: Floats
    window_pair_s: Floats
    floor_s: float
    floor_seq_s: float


class StepWork(NamedTuple):
    """Steps, one per row; names as in ``StepCost``."""

    tokens: Floats
    decode_seqs: Floats
    context: Floats
    window_context: Floats
    prefill_seqs: Floats
    pairs: Floats
    window_pairs: Floats


def step_cost(  # noqa: PLR0917
    arch: Arch,
    machine: Accelerator,
    precision: Precision,
    layout: Layout,
    efficiency: Efficiency,
    tokens_per_seq: int = 1,
) -> StepCost:
    """The cost of the steps of one engine. ``tokens_per_seq``: tokens that a decoding sequence computes in a step (1,
    and drafts when speculating).

    Raises:
        UsageError: the layout cannot be.
    """
    return total(step_parts(arch, machine, precision, layout, efficiency, tokens_per_seq))


def total(parts: StepParts) -> StepCost:
    """Resources added up."""
    p = parts
    step, prefill_step, seq, kv, window, prefill_seq, pair, window_pair = (
        float(v.sum())
        for v in (p.step_s, p.prefill_step_s, p.seq_s, p.kv_s, p.window_s, p.prefill_seq_s, p.pair_s, p.window_pair_s)
    )
    return StepCost(p.grid, p.linear_s.sum(axis=0), step, prefill_step, seq, kv, window, p.window, prefill_seq, pair,
                    window_pair, p.floor_s, p.floor_seq_s)  # fmt: skip


def step_parts(  # noqa: PLR0917
    arch: Arch,
    machine: Accelerator,
    precision: Precision,
    layout: Layout,
    efficiency: Efficiency,
    tokens_per_seq: int = 1,
) -> StepParts:
    """``step_cost`` before its resources are added up.

    Raises:
        UsageError: the layout cannot be, or the devices' link is not known.
    """
    ops = operations(arch, precision, layout)
    if ops.collectives and machine.link_bytes_per_s <= 0:
        raise UsageError(f"the link between devices of {machine.name} is not known", "give link_gbs in its entry")
    e = served(efficiency)
    kernels = _kernels(arch, machine, layout, efficiency)
    host = host_of(e.family)
    unit = np.eye(len(RESOURCES))
    ways = layout.dp * layout.pp  # sequences spread over parts that work at the same time
    found = {
        name: np.zeros(5) for name in ("step", "seq", "kv", "window", "prefill_seq", "token", "pair", "window_pair")
    }
    found["step"] += unit[HOST] * e.step * (host["step_s"] + ops.kernels * kernels.fit.plain["small_s"])
    found["seq"] += unit[HOST] * e.sequence * host["seq_s"]
    found["prefill_seq"] += unit[HOST] * e.sequence * host["seq_s"]
    for a in ops.attention:
        windowed = a.kind in ("window", "sparse")
        of_step, of_seq, of_context = kernels.decode(a, tokens_per_seq)
        of_prefill, of_token, of_pair = kernels.prefill(a)
        found["step"] += of_step * a.times
        for name, value in (("seq", of_seq), ("window" if windowed else "kv", of_context), ("prefill_seq", of_prefill),
                            ("token", of_token), ("window_pair" if windowed else "pair", of_pair)):  # fmt: skip
            found[name] += value * a.times / ways
    found["seq"] += unit[KV] * e.kv * ops.state_bytes / (machine.read_bytes_per_s * READ) / ways
    for p in ops.products:
        if p.rows == "sequences":  # however many tokens a prompt has, its output table is asked for one row
            once, more = (np.reshape(kernels.product(p, np.array([m])), 5) * p.times for m in (1.0, float(_HEAD_ROWS)))
            each = (more - once) / (_HEAD_ROWS - 1) / ways
            found["step"] += once - each
            found["seq"] += each * tokens_per_seq
            found["prefill_seq"] += each
    of_tokens = np.outer(found["token"] + unit[HOST] * e.token * host["token_s"], _GRID)
    linear = _rising(_linear(ops, kernels, layout) + of_tokens)
    window = arch.window if arch.window_layers else arch.index_top
    # Outside of a graph devices are launched one by one, and every collective waits for the last.
    prompts = host["prefill_step_s"] + host["skew_s"] * sum(c.times for c in ops.collectives)
    return StepParts(_GRID, linear, found["step"], unit[HOST] * e.prefill_step * prompts, found["seq"],
                     found["kv"], found["window"], window, found["prefill_seq"], found["pair"], found["window_pair"],
                     e.step * host["floor_s"], e.sequence * host["floor_seq_s"])  # fmt: skip


def _kernels(arch: Arch, machine: Accelerator, layout: Layout, efficiency: Efficiency) -> Kernels:
    """Whose times of operations ``efficiency`` asks for; what an extra brings is imported only then."""
    if efficiency.kernels == "aic":
        from whywait.physics.aic import AicKernels

        return AicKernels(arch, machine, layout, efficiency)
    return Kernels(machine, served(efficiency), fit_of(machine, efficiency.family), efficiency)


def _linear(ops: Operations, kernels: Kernels, layout: Layout) -> Floats:
    """(5, n) over the grid. A pipeline of ``pp`` stages works on ``pp`` parts of the step's tokens at once; ``dp``
    parts have their own attention and dense layers."""
    tokens = _GRID / layout.pp
    mine = np.maximum(tokens / layout.dp, 1.0)
    tokens = np.maximum(tokens, 1.0)
    found = np.zeros((5, len(_GRID)))
    for p in ops.products:
        if p.rows != "sequences":
            found += p.times * kernels.product(p, mine)
    for x in ops.experts:
        found += x.times * kernels.experts(x, tokens)
    found *= np.maximum(1.0, _least(ops, kernels, (mine, tokens)) / (found[WEIGHTS] + found[COMPUTE]))
    for c in ops.collectives:
        found += c.times * kernels.collective(c, mine)
    machine = kernels.machine
    small = ops.token_bytes / (machine.read_bytes_per_s * READ) + ops.linear_flops / (
        machine.flops["bf16"] * _LINEAR_SHARE
    )
    found[COMPUTE] += kernels.factor.compute * mine * small
    return found


def _least(ops: Operations, kernels: Kernels, rows: tuple[Floats, Floats]) -> Floats:
    """Seconds over the grid that products and experts take at the machine's data sheet, of a step of all of which
    nothing is faster. ``rows``: of a product, of experts. What the output table's one row takes counts on both
    sides."""
    found = np.zeros(len(_GRID))
    for p in ops.products:
        if p.rows == "sequences":
            once = kernels.product(p, np.ones(1))[[WEIGHTS, COMPUTE]].sum()
            found += p.times * (kernels.least(p, np.ones(1)) - once)
        else:
            found += p.times * kernels.least(p, rows[0])
    for x in ops.experts:
        found += x.times * kernels.least(x, rows[1])
    return found


def _rising(linear: Floats) -> Floats:
    """``linear`` (5, n) with totals that do not fall when tokens are added: the nearest such in log time (isotonic
    regression: neighbours that fall are pooled at their mean; Barlow et al. 1972).

    Where a fit falls between its knots the high point is as often the wrong one (Mixtral in 4 bits on an L4) as the low
    one (gpt-oss on an H100, where it beats the data sheet), so that a running maximum, or minimum from the end, keeps
    one of the two errors whole. A table nowhere above another stays so. Resources keep their shares; a table that does
    not fall is not touched."""
    total = linear.sum(axis=0)
    if (np.diff(total) >= 0).all():
        return linear
    pools: list[list[float]] = []  # mean, count
    for value in np.log(total):
        pools.append([float(value), 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    level = np.concatenate([np.full(int(n), v) for v, n in pools])
    return np.asarray(linear * (np.exp(level) / total), dtype=float)


def work(parts: StepParts, steps: StepWork) -> Floats:
    """Seconds by resource, (5, rows): they add up to each step's time. What the host takes beyond the device (the
    floor of ``StepCost``) is the host's."""
    t = np.asarray(steps.tokens, dtype=float)
    g, lin = parts.grid.astype(float), parts.linear_s
    at = np.clip(np.searchsorted(g, t, side="right") - 1, 0, len(g) - 2)
    share = (t - g[at]) / (g[at + 1] - g[at])
    found = np.asarray(lin[:, at] + share * (lin[:, at + 1] - lin[:, at]), dtype=float)
    rows = ((parts.step_s, np.ones_like(t)), (parts.prefill_step_s, np.asarray(steps.prefill_seqs) > 0),
            (parts.seq_s, steps.decode_seqs), (parts.kv_s, steps.context), (parts.window_s, steps.window_context),
            (parts.prefill_seq_s, steps.prefill_seqs), (parts.pair_s, steps.pairs),
            (parts.window_pair_s, steps.window_pairs))  # fmt: skip
    for coefficient, count in rows:
        found += coefficient[:, None] * np.asarray(count, dtype=float)
    floor = parts.floor_s + parts.floor_seq_s * (np.asarray(steps.decode_seqs) + np.asarray(steps.prefill_seqs))
    found[HOST] += np.maximum(0.0, floor - found.sum(axis=0))
    return found


def seconds(cost: StepCost, steps: StepWork) -> Floats:
    """The time of each step, (rows,): what the simulator's kernel computes one by one."""
    t = np.asarray(steps.tokens, dtype=float)
    g, lin = cost.grid.astype(float), cost.linear_s
    at = np.clip(np.searchsorted(g, t, side="right") - 1, 0, len(g) - 2)
    slope = (lin[at + 1] - lin[at]) / (g[at + 1] - g[at])
    device = (cost.step_s + cost.prefill_step_s * (np.asarray(steps.prefill_seqs) > 0) + lin[at] + slope * (t - g[at])
              + cost.seq_s * steps.decode_seqs + cost.kv_s * steps.context + cost.window_s * steps.window_context
              + cost.prefill_seq_s * steps.prefill_seqs + cost.pair_s * steps.pairs
              + cost.window_pair_s * steps.window_pairs)  # fmt: skip
    floor = cost.floor_s + cost.floor_seq_s * (np.asarray(steps.decode_seqs) + np.asarray(steps.prefill_seqs))
    return np.asarray(np.maximum(device, floor), dtype=float)


def bound_by(found: Floats) -> list[str]:
    """Which resource takes most of each step of ``work``."""
    return [RESOURCES[int(i)] for i in np.argmax(found, axis=0)]
