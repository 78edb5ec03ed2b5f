"""What the metrics page of the simulated engine and the meters of its devices would have shown: readings of a Run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whywait.core.table import Table
from whywait.physics.kernels import RESOURCES
from whywait.sim.deployment import Deployment
from whywait.sim.power import Drawn, weights_of
from whywait.units import NS_PER_S

if TYPE_CHECKING:
    from whywait.sim.result import Point

Floats = NDArray[np.float64]
LEAST, MOST, HZ = 240, 4000, 4.0  # samples of a load point, and per second where there is room
#: By the link of a machine, what a real one's meter is called; the others have none that is read.
METERED = {
    "NVLink": "nvlink_tx_bytes_per_s",
    "PCIe": "pcie_tx_bytes_per_s",
    "xGMI": "xgmi_tx_bytes_per_s",
}
PAGE, DEVICES = "metrics/0", "gpu/0"


@dataclass
class Counters:
    """Where the counters stood at the end of the point before: an engine's counters never go back."""

    at: dict[str, float] = field(default_factory=dict)


def readings(d: Deployment, p: Point, power: Drawn, span: tuple[int, int], counted: Counters) -> Table:
    """Samples from just before the point to just after it (ns)."""
    seconds = (span[1] - span[0]) / NS_PER_S
    n = int(np.clip(seconds * HZ, LEAST, MOST))
    margin = min(0.4, seconds / n)
    at = np.concatenate(([-margin], np.linspace(0.0, seconds, n), [seconds + margin]))
    look = at + 1e-9  # stamps are rounded to ns: what ends with the point is seen at its end
    series: list[tuple[str, str, str | None, Floats]] = [
        (PAGE, k, None, v) for k, v in {**_gauges(p, look), **_counted(p, look, counted)}.items()
    ]
    series += [(DEVICES, k, _label(d), v) for k, v in _meters(d, power, p, at, counted).items()]
    t = np.rint(at * NS_PER_S).astype(np.int64) + span[0]
    rows = len(at)
    cols: dict[str, list[Any]] = {k: [] for k in ("asked_ns", "answered_ns", "source", "name", "labels", "value")}
    for source, name, label, values in series:
        for key, value in (("source", source), ("name", name), ("labels", label)):
            text = np.empty(rows, dtype=object)
            text[:] = value
            cols[key].append(text)
        cols["asked_ns"].append(t)
        cols["answered_ns"].append(t)
        cols["value"].append(values)
    return Table("readings", {k: np.concatenate(v) for k, v in cols.items()})


def _label(d: Deployment) -> str:
    return json.dumps({"gpu": "all", "name": d.machine.name})


def _gauges(p: Point, at: Floats) -> dict[str, Floats]:
    """Running and waiting by the stamps of the requests; KV by the steps, as the scheduler had it."""
    t, r, w = p.times, p.found, p.prepared.warmed
    stop = np.where(np.isnan(r.last_s[w:]), np.inf, r.last_s[w:] - t.shift_s)
    scheduled = np.where(np.isnan(t.scheduled), np.inf, t.scheduled)
    accepted = t.accepted[~np.isnan(t.accepted)]
    running = _count(scheduled, at) - _count(stop, at)
    waiting = _count(accepted, at) - _count(scheduled[~np.isnan(t.accepted)], at)
    out = {"running": running, "waiting": np.maximum(waiting, 0.0)}
    engines, last = p.prepared.settings.engines, p.prepared.pools[-1]
    first = engines[0] if len(engines) > 1 else 0
    if len(r.steps.t_s):
        held = [_held(p, k, at) for k in range(first, first + engines[-1])]
        out["kv_use"] = np.minimum(np.mean(held, axis=0) / max(last.blocks, 1), 1.0)
    return out


def _count(when: Floats, at: Floats) -> Floats:
    return np.searchsorted(np.sort(when), at, "right").astype(float)


def _held(p: Point, engine: int, at: Floats) -> Floats:
    """Blocks in use at each look: those of the step that runs, none while no step runs and nobody is in work."""
    s = p.found.steps
    mine = np.flatnonzero(s.replica == engine)
    if not len(mine):
        return np.zeros(len(at))
    mine = mine[np.argsort(s.t_s[mine], kind="stable")]
    begin = s.t_s[mine] - p.times.shift_s
    stop, n = begin + s.took_s[mine], np.maximum(s.n[mine], 1)
    i = np.searchsorted(begin, at, "right") - 1
    inside = (i >= 0) & (at <= stop[np.maximum(i, 0)])
    k = np.maximum(i, 0)
    # Over a row of several steps blocks grow evenly to what the next row starts from, where that is more.
    used = s.kv_used[mine].astype(float)
    after = np.append(used[1:], used[-1:])
    share = np.clip((at - begin[k]) / np.maximum(stop - begin, 1e-12)[k], 0, 1)
    grown = used[k] + np.where(n[k] > 1, np.maximum(after[k] - used[k], 0.0) * share, 0.0)
    return np.where(inside, grown, 0.0)


def _counted(p: Point, at: Floats, counted: Counters) -> dict[str, Floats]:
    t, r, w = p.times, p.found, p.prepared.warmed
    load = p.prepared.load
    first, last = (np.where(np.isnan(x[w:]), np.inf, x[w:] - t.shift_s) for x in (r.first_s, r.last_s))
    prompt, output = load.prompt[w:].astype(float), load.output[w:].astype(float)
    cached = r.cached[w:].astype(float)
    out = {
        "requests_total": _count(last, at),
        "prompt_tokens_total": _weighted(first, prompt, at),
        "prompt_tokens_computed_total": _weighted(first, prompt - cached, at),
        "cached_tokens_total": _weighted(first, cached, at),
        "output_tokens_total": _weighted(first, np.ones(len(first)), at) + _ramps(first, last, output - 1, at),
        "preemptions_total": _weighted(last, r.preempted[w:].astype(float), at),
    }
    s = r.steps
    if len(s.t_s):
        done = s.t_s + s.took_s - t.shift_s
        own = done > 0
        out["decode_steps_total"] = _ramps(
            s.t_s[own] - t.shift_s, done[own], (s.n * weights_of(p.prepared, r))[own], at
        )
    if p.prepared.pools[0].prefix_cache:
        out["prefix_queries_total"], out["prefix_hits_total"] = out["prompt_tokens_total"], out["cached_tokens_total"]
    pool = p.prepared.pools[-1]
    if pool.drafts and r.drafted:
        rounds = r.drafted / pool.drafts
        share = _ramps(first, last, output - 1, at) / max(float((output - 1).sum()), 1.0)
        out |= {"draft_tokens_total": share * r.drafted, "accepted_tokens_total": share * r.accepted,
                "draft_rounds_total": share * rounds}  # fmt: skip
    return _carried(out, counted)


def _carried(out: dict[str, Floats], counted: Counters) -> dict[str, Floats]:
    found = {k: v + counted.at.get(k, 0.0) for k, v in out.items()}
    counted.at.update({k: float(v[-1]) for k, v in found.items()})
    return found


def _weighted(when: Floats, amount: Floats, at: Floats) -> Floats:
    order = np.argsort(when, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(amount[order])))
    found: Floats = total[np.searchsorted(when[order], at, "right")]
    return found


def _ramps(begin: Floats, end: Floats, amount: Floats, at: Floats) -> Floats:
    """Amounts accrued evenly over begin … end."""
    known = np.isfinite(begin) & np.isfinite(end) & (amount > 0)
    begin, end, amount = begin[known], np.maximum(end[known], begin[known] + 1e-9), amount[known]
    if not len(begin):
        return np.zeros(len(at))
    rate = amount / (end - begin)
    when = np.concatenate((begin, end))
    order = np.argsort(when, kind="stable")
    slope = np.cumsum(np.concatenate((rate, -rate))[order])
    total = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(when[order]))))
    # Sums of rates that cancel leave steps back of 1e-13, which a reader of counters takes for a new start.
    found: Floats = np.interp(at, when[order], np.maximum.accumulate(total))
    return found


def _meters(d: Deployment, power: Drawn, p: Point, at: Floats, counted: Counters) -> dict[str, Floats]:
    """Of all devices together: the share of time in which a kernel ran, bytes over the links, power and energy.

    What a step spends on collectives is told as the bytes that take so long at the link's rate, since that is how it is
    read of real devices.
    """
    s, each = p.found.steps, weights_of(p.prepared, p.found)
    engines = sum(p.prepared.settings.engines)
    begin, end = s.t_s - p.times.shift_s, s.t_s + s.took_s - p.times.shift_s
    gap = np.diff(at)

    def mean(amount: Floats) -> Floats:
        """Per second, over the time since the look before."""
        grown = np.diff(_ramps(begin, end, amount * each, at)) / gap
        return np.concatenate((grown[:1], grown))

    busy = mean(s.took_s - power.host_s) / engines
    held = sum(
        n * (c.weight_bytes + c.working_bytes + c.kv_bytes)
        for n, c in zip(p.prepared.settings.engines, p.prepared.capacities, strict=True)
    )
    out = {
        "busy_share": np.clip(busy, 0.0, 1.0),
        "memory_used_bytes": np.full(len(at), held * d.devices / engines),
    }
    if d.layout.devices > 1 and d.machine.link_bytes_per_s:
        moved = mean(power.parts[RESOURCES.index("link")]) * d.machine.link_bytes_per_s * d.layout.devices
        out[METERED.get(d.machine.link, "link_tx_bytes_per_s")] = moved
    if np.isnan(power.idle_w):
        return out
    more = (power.watts - power.idle_w / engines) * s.took_s
    joules = _ramps(begin, end, np.maximum(more, 0.0) * each, at) + power.idle_w * (at - at[0])
    watts = np.diff(joules) / gap
    out["power_watts"] = np.concatenate((watts[:1], watts))
    return out | _carried({"energy_joules_total": joules}, counted)
