"""Both accounts of a service that was only watched: no request of ours, but its gauges, counters and histograms.

Request time is split by Little's law (Oper. Res. 9 (1961) 383): the mean number of requests in a state over a window is
the time that all requests spent in it, per second. So the shares of queue, prefill and decode need no request to be
seen, only ``waiting``, ``running`` and what tells prefill from decode; dividing by the requests per second gives means
per request. Client, network and frontend are outside the engine and stay unknown.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from whywait.analyze import traced
from whywait.analyze.counters import Delta, Gauge, Series, delta, gauge, histogram, quantile, series
from whywait.analyze.device_evidence import apply, device_evidence
from whywait.analyze.first_token import KV_FULL
from whywait.analyze.offered import acceptance
from whywait.analyze.phases import PHASES
from whywait.analyze.stats import QUANTILES, Doubt
from whywait.core.run import Run
from whywait.core.table import Array, Table

Span = tuple[int, int]
LATENCIES = {"ttft_ms": "ttft_seconds", "tpot_ms": "tpot_seconds", "itl_ms": "itl_seconds", "e2e_ms": "e2e_seconds"}
UNSTEADY = 0.3  # Little's end-to-end time may differ by this share from that of the requests that ended
ENOUGH = 10  # requests ended, from which that comparison says something
STALE = 3  # a reading speaks for at most this many usual intervals


def is_passive(one: Run) -> bool:
    """Whether a Run of one load point was only watched: nothing planned, nothing sent."""
    return not len(one.requests) and not one.points["planned"].any()


def rate(run: Run, span: Span) -> tuple[float | None, float | None]:
    """Requests that ended in a span, and per second of it; by the counter, else by a histogram's count."""
    for name in ("requests_total", "e2e_seconds_count", "ttft_seconds_count", "queue_seconds_count"):
        found = delta(run.readings, name, span)
        if found is not None:
            return found.value, found.per_s
    return None, None


def arriving(run: Run, span: Span) -> float | None:
    """Requests that came per second: those that ended, and those by which running and waiting grew."""
    _, per_s = rate(run, span)
    if per_s is None:
        return None
    grew = [g.slope_per_s or 0.0 for name in ("running", "waiting") if (g := _gauge(run, name, span)) is not None]
    return max(per_s + sum(grew), 0.0)


def load(run: Run, span: Span) -> tuple[str, float | None]:
    """Mode and target for the points table: requests that came per second where that is known, else those in flight."""
    came = arriving(run, span)
    if came is not None:
        return "rate", _short(came)
    parts = [g.mean for g in (_gauge(run, name, span) for name in ("running", "waiting")) if g is not None]
    return "concurrency", _short(sum(parts)) if parts else None


def figures(run: Run, span: Span) -> tuple[dict[str, Any], list[Doubt]]:
    """What takes the place of a point's own figures in the summary, and the doubts about it.

    Besides the keys of ``analyze.summary`` there is ``passive``: ``requests`` (ended in the window, None unknown),
    ``arriving_per_s``, ``active`` (whether any was in work), ``in_flight`` (mean), ``replicas`` and ``engine`` (steps,
    batch, tokens), ``spans`` and ``slowest`` (see ``traced.py``).
    """
    ended, per_s = rate(run, span)
    states = _states(run, span, per_s)
    tokens = delta(run.readings, "output_tokens_total", span)
    in_flight = None if states is None else sum(states["number"].values())
    account, doubts = _account(run, span, states, per_s, ended)
    out: dict[str, Any] = {
        **{key: latency(run, base, span) for key, base in LATENCIES.items()},
        "output_tokens_per_s": tokens.per_s if tokens else None,
        "requests_per_s": per_s,
        "cached_share": _cached(run, span),
        "acceptance": _share_or_gauge(acceptance(run, span), _gauge(run, "acceptance_rate", span, "mean")),
        "in_flight": {"peak": None if in_flight is None else _peak(run, span), "mean": in_flight},
        "phases": account,
        "occupancy": _devices(run, span, states),
        "passive": {
            "requests": None if ended is None else round(ended),
            "arriving_per_s": arriving(run, span),
            "active": bool(in_flight or ended),
            "in_flight": in_flight,
            "replicas": replicas(run, span),
            "engine": steps(run, span),
        },
    }
    told = traced.figures(run, span)  # of each request by itself: better than what all have together
    for key in ("phases", *LATENCIES):
        out[key] = told.get(key, out[key])
    out["passive"].update(spans=told.get("spans", 0), slowest=told.get("slowest"))
    return out, doubts


def replicas(run: Run, span: Span) -> list[dict[str, Any]]:
    """Each replica by itself: ``source``, ``instance`` (where a Prometheus says it), its gauges and rates."""
    names = {s for name in ("running", "output_tokens_total") for s in _sources(run.readings, name)}
    out = []
    for source in sorted(names):
        row: dict[str, Any] = {"source": source, "instance": _instance(run.readings, source)}
        for name in ("running", "waiting"):
            found = gauge(run.readings, name, span, source)
            row[name] = None if found is None else found.mean
        kv = gauge(run.readings, "kv_use", span, source, "mean")
        grown = {k: delta(run.readings, n, span, source) for k, n in
                 (("output_tokens_per_s", "output_tokens_total"), ("requests_per_s", "requests_total"))}  # fmt: skip
        row["kv_use"] = None if kv is None else kv.mean
        row |= {k: None if d is None else d.per_s for k, d in grown.items()}
        preempted = delta(run.readings, "preemptions_total", span, source)
        row["preemptions"] = None if preempted is None else preempted.value
        row["restarts"] = _restarts(run, span, source)
        out.append(row)
    return out


def _states(run: Run, span: Span, per_s: float | None) -> dict[str, Any] | None:
    """Mean number of requests in queue, prefill and decode, with how the last two are told apart; None unseen."""
    running, waiting = _gauge(run, "running", span), _gauge(run, "waiting", span)
    if running is None or waiting is None:
        return None
    prefilling, spent = _gauge(run, "slots_prefilling", span), delta(run.readings, "prefill_seconds_total", span)
    if prefilling is not None:
        number: float | None = prefilling.mean
    elif spent is not None:
        number = spent.per_s  # seconds of prefill per second
    else:
        mean_s = _prefill_s(run, span)
        number = None if mean_s is None or per_s is None else mean_s * per_s
    split = {"queue": waiting.mean}
    if number is None:
        return {"number": {**split, "unknown": running.mean}, "how": {"queue": "derived"}}
    number = min(number, running.mean)
    return {"number": {**split, "prefill": number, "decode": running.mean - number},
            "how": dict.fromkeys(("queue", "prefill", "decode"), "derived")}  # fmt: skip


def _peak(run: Run, span: Span) -> float:
    return sum(g.high for name in ("running", "waiting") if (g := _gauge(run, name, span)) is not None)


def _prefill_s(run: Run, span: Span) -> float | None:
    """Mean seconds from the first scheduled step to the first token."""
    own = _mean_s(run, "prefill_seconds", span)
    if own is not None:
        return own
    ttft, queue = _mean_s(run, "ttft_seconds", span), _mean_s(run, "queue_seconds", span)
    return None if ttft is None or queue is None else max(ttft - queue, 0.0)


def _account(
    run: Run, span: Span, states: dict[str, Any] | None, per_s: float | None, ended: float | None
) -> tuple[dict[str, Any], list[Doubt]]:
    """``phases`` of the summary: mean ms per request where the rate is known, and shares of the request time."""
    if states is None:
        means = {"queue": _mean_s(run, "queue_seconds", span), "prefill": _prefill_s(run, span),
                 "decode": _mean_s(run, "decode_seconds", span)}  # fmt: skip
        number = {k: v for k, v in means.items() if v is not None}
        how, scale = dict.fromkeys(number, "derived"), 1e3
    else:
        number, how = states["number"], states["how"]
        scale = 1e3 / per_s if per_s else math.nan
    total = sum(number.values())
    if total <= 0:
        return {}, []
    out: dict[str, dict[str, Any]] = {p: {"ms": None, "share": None, "how": "unknown", "causes": {}} for p in PHASES}
    for phase, value in number.items():
        ms = None if math.isnan(scale) else value * scale
        out[phase] = {"ms": ms, "share": value / total, "how": how.get(phase, "unknown"), "causes": {}}
    return out, _unsteady(run, span, total * scale if states is not None else math.nan, ended)


def _unsteady(run: Run, span: Span, little_ms: float, ended: float | None) -> list[Doubt]:
    e2e = _mean_s(run, "e2e_seconds", span)
    if e2e is None or math.isnan(little_ms) or (ended or 0) < ENOUGH or abs(little_ms / (e2e * 1e3) - 1) <= UNSTEADY:
        return []
    why = f"requests that ended took {e2e * 1e3:.0f} ms, those in flight and their rate make it {little_ms:.0f} ms"
    return [{"what": "the window was not steady", "why": why, "next": "watch a longer window"}]


def _devices(run: Run, span: Span, states: dict[str, Any] | None) -> dict[str, Any]:
    """``occupancy`` of the summary, from what each replica's gauges were between one look and the next.

    Busy is when a request is running. It is split by ``slots_prefilling``, else (modelled: requests in prefill as a
    Poisson number) by the mean number in prefill. Nothing running while some wait is ``idle_kv_blocked`` where the KV
    space is full, else ``idle_host``. Time without a fresh reading is unknown. Then the devices' own readings take out
    of busy what they say it was not (``device_evidence``).
    """
    from whywait.analyze.occupancy import CATEGORIES

    sources = _sources(run.readings, "running")
    ns = dict.fromkeys(CATEGORIES, 0.0)
    for source in sources:
        for name, length in _timeline(run.readings, source, span).items():
            ns[name] += length
    total = float(span[1] - span[0]) * max(len(sources), 1)
    ns["unknown"] += total - sum(ns.values())
    how = dict.fromkeys(CATEGORIES, "unknown")
    if sources:
        how |= dict.fromkeys(
            ("idle_no_work", "idle_host", "idle_kv_blocked", "prefill_busy", "decode_busy"), "inferred"
        )
        in_prefill = (states or {}).get("number", {}).get("prefill")
        if not ns["prefill_busy"] and in_prefill is not None and _gauge(run, "slots_prefilling", span) is None:
            moved = (ns["decode_busy"]) * (1 - math.exp(-in_prefill / len(sources)))
            ns["prefill_busy"], ns["decode_busy"] = moved, ns["decode_busy"] - moved
            how |= dict.fromkeys(("prefill_busy", "decode_busy"), "modelled")
    # What the devices, threads and control groups say against busy, as in a run of ours.
    exact = {k: round(v) for k, v in ns.items()}
    evidence = device_evidence(run, span, max(len(sources), 1), exact["prefill_busy"] + exact["decode_busy"])
    apply(evidence, exact)
    ns = {k: ns[k] + exact[k] - round(ns[k]) for k in ns}
    how |= {k: v for k, (taken, v) in evidence.take.items() if taken and ns[k]}
    shares = {
        k: None if how[k] == "unknown" and k != "unknown" else v / total if total else None for k, v in ns.items()
    }
    busy = ns["prefill_busy"] + ns["decode_busy"]
    low, high = (busy / total, (busy + ns["unknown"]) / total) if total and sources else (None, None)
    return {"devices": max(len(sources), 1), "wall_ns": span[1] - span[0], "shares": shares, "how": how,
            "busy": [low, high], "notes": evidence.notes}  # fmt: skip


def _timeline(readings: Table, source: str, span: Span) -> dict[str, float]:
    """ns of one replica by category (busy as decode unless some slot was prefilling)."""
    looks = [s.t_ns for s in series(readings, "running", source)]
    if not looks:
        return {}
    t = np.unique(np.concatenate(looks))
    step = float(np.median(np.diff(t))) if len(t) > 1 else 0.0
    begin = np.clip(t, *span)
    end = np.clip(np.minimum(np.append(t[1:], math.inf), t + STALE * step), *span)
    length = np.maximum(end - begin, 0.0)
    value, waiting, kv = (_at(readings, name, source, t) for name in ("running", "waiting", "kv_use"))
    prefilling = _at(readings, "slots_prefilling", source.replace("metrics/", "slots/"), t)
    busy, queued = value > 0, np.nan_to_num(waiting) > 0
    first = busy & (np.nan_to_num(prefilling) > 0)
    full = np.nan_to_num(kv) >= KV_FULL
    parts = {"prefill_busy": first, "decode_busy": busy & ~first, "idle_no_work": ~busy & ~queued & ~np.isnan(waiting),
             "idle_kv_blocked": ~busy & queued & full, "idle_host": ~busy & queued & ~full}  # fmt: skip
    return {name: float(length[mask].sum()) for name, mask in parts.items()}


def _at(readings: Table, name: str, source: str, t: Array) -> Array:
    """A gauge of one source at each look, its engines (label sets) together; NaN where it was not read."""
    found = series(readings, name, source)
    if not found:
        return np.full(len(t), np.nan)
    stack = np.array([_held(s, t) for s in found])
    out: Array = stack.mean(axis=0) if name == "kv_use" else stack.sum(axis=0)
    return out


def _held(s: Series, t: Array) -> Array:
    """The value last read at each time; the first one before."""
    at = np.maximum(np.searchsorted(s.t_ns, t, "right") - 1, 0)
    out: Array = s.values[at]
    return out


def steps(run: Run, span: Span) -> dict[str, Any]:
    """Engine iterations per second, how many tokens each computed, and the batch."""
    done, batch = delta(run.readings, "decode_steps_total", span), _gauge(run, "running", span)
    prompt = delta(run.readings, "prompt_tokens_computed_total", span)
    return {
        "steps_per_s": None if done is None else done.per_s,
        "tokens_per_step": _ratio(delta(run.readings, "iteration_tokens_sum", span), done),
        "batch": None if batch is None else batch.mean,
        "prompt_tokens_per_s": None if prompt is None else prompt.per_s,
    }


def latency(run: Run, base: str, span: Span) -> dict[str, Any]:
    """The engine's own histogram ``base`` over ``span``, as ``stats.summary`` in ms: the interval of a percentile is
    its bucket; the mean is exact."""
    h = histogram(run.readings, base, span)
    out: dict[str, Any] = dict.fromkeys((*QUANTILES, "mean"))
    ci: dict[str, list[float | None]] = {name: [None, None] for name in out}
    for name, q in QUANTILES.items():
        found = quantile(h, q)
        if found is not None:
            out[name] = None if found.value is None else found.value * 1e3
            ci[name] = [found.low * 1e3, None if math.isinf(found.high) else found.high * 1e3]
    mean = _mean_s(run, base, span)
    out["mean"] = None if mean is None else mean * 1e3
    return {**out, "n": round(h.n) if h is not None else 0, "ci": ci}


def _mean_s(run: Run, base: str, span: Span) -> float | None:
    return _ratio(delta(run.readings, base + "_sum", span), delta(run.readings, base + "_count", span))


def _cached(run: Run, span: Span) -> float | None:
    for part, whole in (("cached_tokens_total", "prompt_tokens_total"), ("prefix_hits_total", "prefix_queries_total")):
        found = _ratio(delta(run.readings, part, span), delta(run.readings, whole, span))
        if found is not None:
            return min(found, 1.0)
    return _share_or_gauge(None, _gauge(run, "prefix_hit_rate", span, "mean"))


def _share_or_gauge(share: float | None, found: Gauge | None) -> float | None:
    return share if share is not None or found is None else found.mean


def _ratio(a: Delta | None, b: Delta | None) -> float | None:
    return None if a is None or b is None or b.value <= 0 else a.value / b.value


def _gauge(run: Run, name: str, span: Span, combine: str = "sum") -> Gauge | None:
    return gauge(run.readings, name, span, combine=combine)


def _sources(readings: Table, name: str) -> list[str]:
    return sorted({str(s) for s in readings["source"][readings["name"] == name]})


def _instance(readings: Table, source: str) -> str | None:
    return next((s.labels["instance"] for s in series(readings, "answered", source) if "instance" in s.labels), None)


def _restarts(run: Run, span: Span, source: str) -> int | None:
    found = delta(run.readings, "output_tokens_total", span, source)
    return None if found is None else found.resets


def _short(x: float) -> float:
    return float(f"{x:.3g}")
