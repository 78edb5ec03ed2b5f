"""What each simulated step spent its time on, and what the devices drew meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.physics.kernels import RESOURCES
from whywait.physics.step import StepParts, StepWork, step_parts, work
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Prepared, cost_inputs
from whywait.sim.state import Result

if TYPE_CHECKING:
    from whywait.sim.service import Times

Floats = NDArray[np.float64]
#: Resources in the words of the accounts.
WORDS = {"weights": "weight reads", "kv": "KV reads", "compute": "compute", "link": "interconnect", "host": "host CPU"}


class Drawn(NamedTuple):
    """Of each row of the steps record: ``parts`` (5, rows) seconds by resource that add up to its length, ``bound_by``
    which of them is longest, ``watts`` of all devices of its engine during it (NaN: not known). ``idle_w`` of all
    devices of the deployment with no step."""

    parts: Floats
    bound_by: NDArray[np.object_]
    watts: Floats
    idle_w: float


def drawn(d: Deployment, p: Prepared, r: Result) -> Drawn:
    """Of every step that was kept."""
    rows = len(r.steps.t_s)
    parts = np.zeros((len(RESOURCES), rows))
    first = p.settings.engines[0] if len(p.pools) > 1 else 0
    for number in range(len(p.pools)):
        prefill = len(p.pools) > 1 and number == 0
        mine = np.flatnonzero(r.steps.replica < first) if prefill else np.flatnonzero(r.steps.replica >= first)
        if len(mine):
            parts[:, mine] = _parts(step_parts(*cost_inputs(d, prefill)), r, mine, d)
    names = np.array([WORDS[x] for x in RESOURCES], dtype=object)
    return Drawn(
        parts, names[np.argmax(parts, axis=0)] if rows else np.zeros(0, object), np.full(rows, np.nan), float("nan")
    )


def _parts(cost: StepParts, r: Result, mine: NDArray[np.int64], d: Deployment) -> Floats:
    """Scaled to the length that the kernel gave the step: of many steps kept as one row the middle one stands for all,
    and drafts made by a model of their own add to it."""
    s = r.steps
    n = np.maximum(s.n[mine], 1)
    decode, seqs = s.decode_seqs[mine].astype(float), s.prefill_seqs[mine].astype(float)
    per_seq = 1 + (d.speculation.drafts if d.speculation else 0)
    context = s.context_sum[mine] + decode * (n - 1) / 2
    window = np.minimum(context, decode * cost.window) if cost.window else np.zeros(len(mine))
    pairs = s.pairs[mine]
    tokens = s.prefill_tokens[mine] + decode * per_seq
    looked = np.minimum(pairs, s.prefill_tokens[mine] * float(cost.window)) if cost.window else np.zeros(len(mine))
    found = work(cost, StepWork(tokens, decode, context, window, seqs, pairs, looked))
    whole = found.sum(axis=0)
    out: Floats = found * (s.took_s[mine] / np.maximum(whole, 1e-300))
    return out


def weights_of(p: Prepared, r: Result) -> Floats:
    """How many steps each row of the record stands for: one in the half kept whole, past it one in so many was kept."""
    number = np.arange(len(r.steps.t_s))
    return np.where((number < p.settings.steps // 2) | (p.settings.steps < 0), 1.0, float(r.steps_stride))


def energy(d: Deployment, p: Prepared, r: Result, t: Times, window: tuple[float, float]) -> dict[str, float | None]:
    """Mean power of all devices over the window (s), and joules per output token of it; None where not known."""
    found = drawn(d, p, r)
    span = window[1] - window[0]
    if np.isnan(found.idle_w) or span <= 0:
        return {"power_w": None, "joules_per_token": None}
    begin, took = r.steps.t_s - t.shift_s, r.steps.took_s
    part = np.clip(np.minimum(begin + took, window[1]) - np.maximum(begin, window[0]), 0.0, None)
    engines = sum(p.settings.engines)
    more = float((part * (found.watts - found.idle_w / engines) * weights_of(p, r)).sum())
    watts = found.idle_w + more / span
    output = p.load.output[p.warmed :].astype(float)
    length = np.maximum(t.last - t.first, 1e-12)
    made = float(
        np.nansum(output * np.clip(np.minimum(t.last, window[1]) - np.maximum(t.first, window[0]), 0, None) / length)
    )
    return {"power_w": watts, "joules_per_token": watts * span / made if made else None}
