"""How much of the machine each phase uses (MBU, MFU), and what a decode step is spent on, by a roofline of the two.

Modelled: bytes and flops follow from the model's shape, rates from a measurement of the machine or its data sheet, and
both are fitted to the point of one sequence at a time, where nothing is shared. The error is how far the model then
misses the step that was measured at the other points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.counters import delta, gauge, series
from whywait.analyze.first_token import prefill_windows
from whywait.analyze.latency import CLOSED, OK
from whywait.analyze.streams import Content, content, gaps
from whywait.analyze.window import Spans, sweep
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.physics.cost import COMPUTE, KV, WEIGHTS, Machine, calibrated, step_bytes, step_terms_s
from whywait.physics.machines import machine_of
from whywait.physics.models import Shape
from whywait.units import NS_PER_S

OTHER = "other"  # what the model does not explain: launching, sampling, waiting for the host
TERMS = (WEIGHTS, KV, COMPUTE, OTHER)
_MIN_GAPS = 16


@dataclass(frozen=True)
class Decode:
    """Decode of a point as seen by the client: median step (s), mean sequences in a step, their mean context (tokens);
    in each of so many ``engines`` (replicas, each with its part of the machine)."""

    step_s: float
    batch: float
    context: float
    engines: int = 1


@dataclass(frozen=True)
class Prefill:
    """Prefill of a point: flops and weight bytes that its prompts took at least, in ``seconds`` of device time."""

    flops: float
    bytes: float
    seconds: float


def roofline(run: Run, number: int) -> dict[str, Any]:
    """MBU, MFU and the parts of a decode step at a load point.

    Returns:
        ``mbu`` and ``mfu``: ``{"prefill", "decode": share or None, "how", "of"}`` where ``of`` says against which rates
        (or why unknown). MBU (memory bandwidth utilisation) is the bytes that a step must read over what the machine
        can read in the step's time; MFU (model flops utilisation) likewise with the model's own flops; of prefill both
        are lower bounds where its time also holds others' decode, and MBU is one: prompts whose windows overlap may
        have had their weights read together, so such are counted once. ``device`` is what the device's own counters say
        over the whole point (share of cycles that memory, or the matrix units, were active), None where not read.
        ``decode_step``: ``{"shares": of a step by ``TERMS``,
        "step_ms", "modelled_ms", "error", "batch", "context", "calibrated", "how", "of"}`` or None; ``error`` is
        (modelled − measured) / measured, None at the point it was calibrated on.
    """
    shape = Shape.from_dict(run.manifest.engine.get("model_shape"))
    machine = machine_for(run)
    dram, tensor = (_active(run, number, name) for name in ("dram_active_share", "tensor_active_share"))
    if shape is None or machine is None:
        missing = " and ".join(
            w for w, x in (("the model's shape", shape), ("the machine's rates", machine)) if x is None
        )
        nothing = {"prefill": None, "decode": None, "how": "unknown", "of": f"{missing} not known"}
        return {"mbu": {**nothing, "device": dram}, "mfu": {**nothing, "device": tensor}, "decode_step": None}
    kv = _kv_dtype(run, shape)
    decode, prefill = decode_seen(run, number), prefill_seen(run, number, shape)
    one = machine if decode is None else _part(machine, decode.engines)
    mbu: dict[str, float | None] = {"prefill": None, "decode": None}
    mfu = dict(mbu)
    if prefill is not None:
        mbu["prefill"] = prefill.bytes / prefill.seconds / machine.read_bytes_per_s
        mfu["prefill"] = prefill.flops / prefill.seconds / machine.flops_per_s
    if decode is not None:
        reads = step_bytes(shape, decode.batch, decode.context, kv)
        mbu["decode"] = reads / decode.step_s / one.read_bytes_per_s
        mfu["decode"] = decode.batch * shape.flops_per_token(decode.context) / decode.step_s / one.flops_per_s
    of = {"how": "modelled", "of": f"{machine.source}; model by {shape.how or 'the manifest'}"}
    step = None if decode is None else _step(run, number, (shape, one, kv), decode)
    return {"mbu": {**mbu, **of, "device": dram}, "mfu": {**mfu, **of, "device": tensor}, "decode_step": step}


def machine_for(run: Run) -> Machine | None:
    """The machine's rates: measured beside the engine, else by the data sheets of the devices it names."""
    m = run.manifest
    rates = m.machine.get("engine_rates")
    if rates:
        return Machine(rates["read_bytes_per_s"], rates["f32_flops_per_s"], rates["how"])
    shape = Shape.from_dict(m.engine.get("model_shape"))
    narrow = shape is not None and shape.bytes_per_param < 1.3
    return machine_of(_devices(run), "fp8" if narrow else "bf16")


def decode_seen(run: Run, number: int) -> Decode | None:
    """What the streams of a point say of its decode steps; None where too little is known of chunks or prompts."""
    one = run.point(number)
    req, c = one.requests, content(one)
    step = _step_s(one, c)
    known = ~np.isnan(req["first_ns"]) & ~np.isnan(req["last_ns"]) & (req["last_ns"] > req["first_ns"])
    length = np.where(known, req["last_ns"] - req["first_ns"], 0.0)
    held = req["prompt_tokens"] + np.nan_to_num(req["output_tokens"]) / 2
    if step is None or not length.sum() or np.isnan(held[known]).any():
        return None
    wide = whole = 0.0
    engines = np.unique(req["replica"][known])
    for e in engines:  # each steps by itself
        mine = known & (req["replica"] == e)
        times, counts = sweep(req["first_ns"][mine], req["last_ns"][mine])
        took = np.diff(np.append(times, times[-1]))
        # Weighted by sequence, as the median of all their gaps is: a wide step is a gap in each of its streams.
        wide, whole = wide + float((took * counts * counts).sum()), whole + float((took * counts).sum())
    context = float(np.average(held[known], weights=length[known]))
    return Decode(step, wide / whole, context, len(engines))


def prefill_seen(run: Run, number: int, shape: Shape) -> Prefill | None:
    """Prompts computed and the time in which they were: the union of the engine's own prefill windows; of one sequence
    at a time also its counter of prefill seconds."""
    part = run.requests["point"] == number
    req = run.requests.where(part)
    cached = np.nan_to_num(req["cached_tokens"])
    tokens = np.where(
        np.isnan(req["engine_prefill_tokens"]), req["prompt_tokens"] - cached, req["engine_prefill_tokens"]
    )
    begin, end = (v[part] for v in prefill_windows(run))
    timed = ~np.isnan(begin) & ~np.isnan(end) & ~np.isnan(tokens)
    if timed.any():
        spans = Spans.of(begin[timed].astype(np.int64), end[timed].astype(np.int64))
        seconds, mine = float((spans.stops - spans.starts).sum()) / NS_PER_S, timed
    else:
        seconds, mine = _counted_prefill(run, number, tokens, req["first_ns"])
    if seconds <= 0 or not mine.any():
        return None
    flops = sum(
        shape.prompt_flops(max(float(n), 0.0), float(k)) for n, k in zip(tokens[mine], cached[mine], strict=True)
    )
    alone = mine.copy()
    for e in np.unique(req["replica"][mine]) if timed.any() else ():
        own = mine & (req["replica"] == e)
        alone[own] = _apart(begin[own], end[own])
    reads = sum(shape.read_bytes(max(float(n), 1.0)) for n in tokens[alone])
    return Prefill(float(flops), float(reads), seconds)


def _apart(begin: Array, end: Array) -> Array:
    """The most windows of which no two overlap, as a mask: prompts that surely were not read weights for together."""
    chosen, free = np.zeros(len(begin), dtype=bool), -np.inf
    for i in np.argsort(end, kind="stable"):
        if begin[i] >= free:
            chosen[i], free = True, end[i]
    return chosen


def _part(machine: Machine, engines: int) -> Machine:
    """What one of so many engines has of it."""
    n = max(engines, 1)
    return dataclasses.replace(
        machine, read_bytes_per_s=machine.read_bytes_per_s / n, flops_per_s=machine.flops_per_s / n
    )


def apportion(total: int, shares: dict[str, float]) -> dict[str, int]:
    """``total`` by ``shares`` (which add up to about 1) in whole numbers that add up to it exactly."""
    edges = np.rint(np.cumsum([0.0, *shares.values()]) / max(sum(shares.values()), 1e-12) * total).astype(np.int64)
    edges[-1] = total
    return {k: int(b - a) for k, a, b in zip(shares, edges[:-1], edges[1:], strict=True)}


def _step(run: Run, number: int, parts: tuple[Shape, Machine, str], seen: Decode) -> dict[str, Any]:
    shape, machine, kv = parts
    base, own = _calibration(run), machine
    if base is not None:
        one, before = decode_seen(run, base), prefill_seen(run, base, shape)
        if one is None:
            base = None
        else:
            rate = before.flops / before.seconds if before else None
            own = calibrated(shape, machine, (one.step_s, one.context), rate, kv)
    terms = step_terms_s(shape, own, seen.batch, seen.context, kv)
    modelled = sum(terms.values())
    whole = max(modelled, seen.step_s)
    shares = {k: v / whole for k, v in terms.items()}
    shares[OTHER] = max(0.0, 1.0 - sum(shares.values()))
    return {
        "shares": shares,
        "step_ms": seen.step_s * 1e3,
        "modelled_ms": modelled * 1e3,
        "error": None if base == number else modelled / seen.step_s - 1,
        "batch": seen.batch,
        "context": seen.context,
        "calibrated": base is not None,
        "how": "modelled",
        "of": own.source,
    }


def _active(run: Run, number: int, name: str) -> float | None:
    row = int(np.flatnonzero(run.points["point"] == number)[0])
    window = (int(run.points["start_ns"][row]), int(run.points["end_ns"][row]))
    found = gauge(run.readings, name, window, "gpu", combine="mean")
    return None if found is None else found.mean


def _calibration(run: Run) -> int | None:
    """The point of one sequence at a time, of the plain workload if there is one."""
    pts = run.points
    one = [(bool(label), int(p)) for p, mode, target, label in
           zip(pts["point"], pts["mode"], pts["target"], pts["label"], strict=True)
           if mode == CLOSED and target == 1]  # fmt: skip
    return min(one)[1] if one else None


def _step_s(one: Run, c: Content) -> float | None:
    """The median time of a step (s): of the exact gaps of ``ok`` requests; by token where chunks carry several and no
    speculation makes them."""
    g = gaps(c)
    use = (one.requests["outcome"] == OK)[g.row] & ~g.coalesced & (g.value > 0)
    if use.sum() < _MIN_GAPS or use.sum() < 0.5 * len(g.row):
        return None
    value, tokens = g.value[use], g.tokens[use]
    span = (int(one.points["start_ns"][0]), int(one.points["end_ns"][0]))
    if delta(one.readings, "draft_tokens_total", span) is None and np.isfinite(tokens).all() and tokens.mean() > 1.05:
        value = value / np.maximum(tokens, 1)
    return float(np.median(value)) / NS_PER_S


def _counted_prefill(run: Run, number: int, tokens: Array, first_ns: Array) -> tuple[float, Array]:
    row = int(np.flatnonzero(run.points["point"] == number)[0])
    mine = ~np.isnan(tokens)
    if run.points["mode"][row] != CLOSED or run.points["target"][row] != 1:
        return 0.0, mine
    found = delta(
        run.readings, "prefill_seconds_total", (int(run.points["start_ns"][row]), int(run.points["end_ns"][row]))
    )
    if found is None:
        return 0.0, mine
    return found.high, mine & found.covers(first_ns)


def _kv_dtype(run: Run, shape: Shape) -> str:
    said = str(run.manifest.engine.get("kv_dtype") or run.manifest.engine.get("cache_dtype") or "")
    return said if said not in ("", "auto") else "f32" if shape.bytes_per_param > 3 else "f16"


def _devices(run: Run) -> list[str]:
    """The names of those that the engine uses, where the manifest says how many."""
    names = device_names(run)
    told = run.manifest.machine.get("gpus")
    return names[: int(run.manifest.engine.get("devices") or len(names))] if told else names


def device_names(run: Run) -> list[str]:
    """What the machine's devices call themselves: by the manifest, else by the labels of their readings."""
    named: Iterable[Any] = run.manifest.machine.get("gpus") or ()
    names = [str(n.get("name", "") if isinstance(n, dict) else n) for n in named]
    if names:
        return names
    found = {}
    for name in ("busy_share", "power_watts"):
        for s in series(run.readings, name, "gpu"):
            said = s.labels.get("name") or s.labels.get("modelName")
            if said:
                found[s.labels.get("gpu", said)] = said
    return list(found.values())
