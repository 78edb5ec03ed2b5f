"""What each simulated step spent its time on, and what the devices drew and moved meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.physics import power as physics
from whywait.physics.fitted import host_of
from whywait.physics.kernels import HOST, RESOURCES
from whywait.physics.step import StepParts, StepWork, step_parts, work
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Prepared, cost_inputs, efficiency_of, family_of
from whywait.sim.state import Result

if TYPE_CHECKING:
    from whywait.sim.service import Times

Floats = NDArray[np.float64]
#: Resources in the words of the accounts.
WORDS = {"weights": "weight reads", "kv": "KV reads", "compute": "compute", "link": "interconnect", "host": "host CPU"}


class Drawn(NamedTuple):
    """Of each row of the steps record: ``parts`` (5, rows) seconds by resource that add up to its length, ``bound_by``
    which of them is longest, ``host_s`` the part in which the device has nothing to run, ``watts`` of all devices of
    its engine during it. ``idle_w`` of all devices of the deployment with no step. Watts are NaN where the rated power
    is not known."""

    parts: Floats
    bound_by: NDArray[np.object_]
    host_s: Floats
    watts: Floats
    idle_w: float


def drawn(d: Deployment, p: Prepared, r: Result) -> Drawn:
    """Of every step that was kept."""
    rows = len(r.steps.t_s)
    parts, host, watts = np.zeros((len(RESOURCES), rows)), np.zeros(rows), np.full(rows, np.nan)
    first = p.settings.engines[0] if len(p.pools) > 1 else 0
    for number in range(len(p.pools)):
        prefill = len(p.pools) > 1 and number == 0
        mine = np.flatnonzero(r.steps.replica < first) if prefill else np.flatnonzero(r.steps.replica >= first)
        if not len(mine):
            continue
        inputs = cost_inputs(d, prefill)
        parts[:, mine], host[mine] = _parts(step_parts(*inputs), r, mine, d)
        if d.machine.tdp_w is not None:
            each = physics.watts(d.machine, parts[:, mine])
            watts[mine] = np.minimum(each, d.power_cap_w or np.inf) * inputs[3].devices
    names = np.array([WORDS[x] for x in RESOURCES], dtype=object)
    bound = names[np.argmax(parts, axis=0)] if rows else np.zeros(0, object)
    idle = physics.idle_w(d.machine) * d.devices if d.machine.tdp_w is not None else float("nan")
    return Drawn(parts, bound, host, watts, idle)


def _parts(cost: StepParts, r: Result, mine: NDArray[np.int64], d: Deployment) -> tuple[Floats, Floats]:
    """Scaled to the length that the kernel gave the step: of many steps kept as one row the middle one stands for all,
    and drafts made by a model of their own add to it. The second: seconds of the host alone."""
    s = r.steps
    n = np.maximum(s.n[mine], 1)
    decode, seqs = s.decode_seqs[mine].astype(float), s.prefill_seqs[mine].astype(float)
    per_seq = 1 + (d.speculation.drafts if d.speculation else 0)
    context = s.context_sum[mine] + decode * (n - 1) / 2
    window = np.minimum(context, decode * cost.window) if cost.window else np.zeros(len(mine))
    pairs = s.pairs[mine]
    tokens = s.prefill_tokens[mine] + decode * per_seq
    looked = np.minimum(pairs, s.prefill_tokens[mine] * float(cost.window)) if cost.window else np.zeros(len(mine))
    steps = StepWork(tokens, decode, context, window, seqs, pairs, looked)
    found = work(cost, steps)
    hidden = work(cost._replace(floor_s=0.0, floor_seq_s=0.0), steps)
    e, of = efficiency_of(d), host_of(family_of(d))
    alone = e.step * of["step_s"] + e.sequence * of["seq_s"] * (decode + seqs) + e.token * of["token_s"] * tokens
    alone = alone + e.prefill_step * of["prefill_step_s"] * (seqs > 0) + found[HOST] - hidden[HOST]
    scale = s.took_s[mine] / np.maximum(found.sum(axis=0), 1e-300)
    return found * scale, np.minimum(alone, found[HOST]) * scale


def weights_of(p: Prepared, r: Result) -> Floats:
    """How many steps each row of the record stands for: one in the half kept whole, past it one in so many was kept."""
    number = np.arange(len(r.steps.t_s))
    return np.where((number < p.settings.steps // 2) | (p.settings.steps < 0), 1.0, float(r.steps_stride))


def energy(d: Deployment, p: Prepared, r: Result, t: Times, window: tuple[float, float]) -> dict[str, float | None]:
    """Mean power of all devices over the window (s), and joules per output token of it; None where not known."""
    found = drawn(d, p, r)
    low, high = window
    if np.isnan(found.idle_w) or high <= low:
        return {"power_w": None, "joules_per_token": None}
    begin, took = r.steps.t_s - t.shift_s, r.steps.took_s
    part = np.clip(np.minimum(begin + took, high) - np.maximum(begin, low), 0.0, None)
    more = float((part * (found.watts - found.idle_w / sum(p.settings.engines)) * weights_of(p, r)).sum())
    watts = found.idle_w + more / (high - low)
    inside = np.clip(np.minimum(t.last, high) - np.maximum(t.first, low), 0.0, None)
    made = float(np.nansum(p.load.output[p.warmed :] * inside / np.maximum(t.last - t.first, 1e-12)))
    return {"power_w": watts, "joules_per_token": watts * (high - low) / made if made else None}
