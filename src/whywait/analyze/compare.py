"""Two sets of rounds → a table of effects: what B does to each figure, as a ratio and a difference, with intervals.

A round is a Run of one arm; rounds come in pairs (one of A, one of B, next to each other in time, the same schedule and
the same prompts), so that whatever drifts over a trial touches both alike. An effect is the mean over pairs: of
ln(B / A) where a figure is a positive quantity, of B − A where it is a share or was nothing in some round.

Its interval is the wider of two at 95 %: the bootstrap over pairs (the expanded percentile interval, Hesterberg, *Am.
Stat.* 69 (2015), section 5.2) and Student's t. Below six pairs no resampling reaches 95 % (the extremes of four pairs
hold the median with 87 %), so that there t alone says how little is known. These intervals are for a number of pairs
fixed beforehand and for one figure at a time; what is claimed under optional stopping is ``judge/paired.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whywait.analyze.counters import delta, gauge
from whywait.analyze.handover import handovers
from whywait.analyze.occupancy import CATEGORIES
from whywait.analyze.phases import PHASES
from whywait.analyze.stats import Estimate, cluster_bootstrap, t975
from whywait.analyze.streams import content, gaps
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS

HIGHER, LOWER, NEITHER = "higher", "lower", ""
RATIO, DIFFERENCE = "ratio", "difference"
RESOLUTION = 1e-3  # of a figure: two rounds are not told apart better than this, however alike they come out
ENOUGH_PAIRS = 6  # from which the bootstrap over pairs can reach 95 %

Figures = Mapping[str, float | None]


class Metric(NamedTuple):
    """``better`` is ``HIGHER``, ``LOWER`` or ``NEITHER``; ``scale`` says how two rounds are compared."""

    title: str
    unit: str
    better: str
    scale: str = RATIO


#: What a round is told by, and how it is called in a summary's point where it is there as it is.
METRICS: dict[str, Metric] = {
    "goodput_requests_per_s": Metric("goodput", "requests/s", HIGHER),
    "goodput_share": Metric("goodput, share of due", "share", HIGHER, DIFFERENCE),
    "output_tokens_per_s": Metric("output tokens/s", "tokens/s", HIGHER),
    "effective_tokens_per_s": Metric("effective tokens/s", "tokens/s", HIGHER),
    "requests_per_s": Metric("requests/s", "requests/s", HIGHER),
    "ttft_ms.p50": Metric("TTFT p50", "ms", LOWER),
    "ttft_ms.p90": Metric("TTFT p90", "ms", LOWER),
    "ttft_ms.mean": Metric("TTFT mean", "ms", LOWER),
    "ttft_ms.spread": Metric("TTFT p90 − p50", "ms", LOWER, DIFFERENCE),
    "tpot_ms.p50": Metric("TPOT p50", "ms", LOWER),
    "tpot_ms.mean": Metric("TPOT mean", "ms", LOWER),
    "itl_ms.p99": Metric("ITL p99", "ms", LOWER),
    "chunk_gap_ms.p99": Metric("chunk gap p99", "ms", LOWER),
    "chunk_gap_ms.max": Metric("longest chunk gap", "ms", LOWER),
    "e2e_ms.p50": Metric("end to end p50", "ms", LOWER),
    "e2e_ms.mean": Metric("end to end mean", "ms", LOWER),
    "failed_share": Metric("failed, share of sent", "share", LOWER, DIFFERENCE),
    "running": Metric("worked on at once, mean", "requests", NEITHER),
    "running_max": Metric("worked on at once, peak", "requests", NEITHER),
    "preemptions": Metric("preemptions", "times", LOWER, DIFFERENCE),
    "kv_use": Metric("KV space in use, mean", "share", NEITHER, DIFFERENCE),
    "kv_use_max": Metric("KV space in use, peak", "share", NEITHER, DIFFERENCE),
    "kv_tokens": Metric("KV space, tokens", "tokens", HIGHER),
    "cached_share": Metric("prompt tokens cached", "share", NEITHER, DIFFERENCE),
    "model_bytes": Metric("weights", "bytes", LOWER),
    "acceptance": Metric("drafts accepted", "share", NEITHER, DIFFERENCE),
    "tokens_per_step": Metric("tokens per decode step", "tokens", NEITHER),
    "draft_tokens_per_request": Metric("tokens drafted per request", "tokens", NEITHER),
    "step_ms": Metric("decode step of a stream", "ms", LOWER),
    "memory_bytes": Metric("engine memory", "bytes", LOWER),
    "handover_ms.mean": Metric("hand-over, mean", "ms", LOWER),
    "handover_bytes": Metric("KV per hand-over", "bytes", NEITHER),
    "handover_mb_s": Metric("rate of hand-overs, MB/s", "MB/s", HIGHER),
    "handover_save_ms": Metric("hand-over: written out", "ms", LOWER),
    "handover_link_ms": Metric("hand-over: on the link", "ms", LOWER),
    "handover_wait_ms": Metric("hand-over: for a place", "ms", LOWER),
    "handover_restore_ms": Metric("hand-over: read in", "ms", LOWER),
    "handover_blocked_ms": Metric("hand-over: engine blocked", "ms", LOWER),
    "restore_stall_ms": Metric("hand-over: stall beside it", "ms", LOWER, DIFFERENCE),
    "energy_j_per_good_request": Metric("energy per good request", "J", LOWER),
    "energy_j_per_million_effective_tokens": Metric("energy per million effective tokens", "J", LOWER),
}
PHASE, CAUSE, DEVICE, UNTOLD = "phases.", "causes.", "occupancy.", "untold."
CLASS = "classes."
#: Of each class of a mixed workload, as ``classes.CLASS.FIGURE``.
OF_CLASS = ("goodput_share", "ttft_ms.p50", "ttft_ms.mean", "tpot_ms.p50", "tpot_ms.mean", "e2e_ms.p50", "e2e_ms.mean")


@dataclass(frozen=True)
class Effect:
    """What B does to one figure. ``a`` and ``b`` are means over the rounds of ``n`` pairs (geometric ones where
    ``scale`` is ratio); ``higher`` counts the pairs in which B was above A. ``deltas`` are ln(B / A) or B − A, one per
    pair, and ``floor`` is the least spread of theirs that can be told from none. Where no pair knows a figure in both
    arms (drafts accepted, of an arm that drafts none) ``n`` is 0 and the means are of the rounds that know it."""

    name: str
    metric: Metric
    a: float | None
    b: float | None
    n: int
    ratio: Estimate
    difference: Estimate
    higher: int
    deltas: tuple[float, ...]
    scale: str
    floor: float
    note: str = ""
    plain: tuple[float | None, float | None] = (None, None)  # arithmetic means: these add up over parts, a and b do not

    @property
    def interval(self) -> Estimate:
        """On the scale of ``deltas``."""
        return _interval(np.array(self.deltas), self.floor)

    @property
    def moved(self) -> int:
        """1 where its 95 % interval lies above no change, −1 below, else 0."""
        e = self.interval
        if e.lo is None or e.hi is None:
            return 0
        return int(e.lo > 0) - int(e.hi < 0)


def figures(run: Run, point: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of a round from its Run and the summary of one of its points (``analyze.summary``); None unknown.

    Besides ``METRICS``: ``phases.P`` (mean ms per request), ``causes.P.CAUSE`` (the part of it with that cause, where
    any was named), ``occupancy.C`` (share of the device's time) and, of a workload with several classes,
    ``classes.CLASS.FIGURE`` (``OF_CLASS``).
    """
    own = {
        "ttft_ms.spread": _spread(point["ttft_ms"]),
        **{k: run.manifest.engine.get(k) for k in ("model_bytes", "kv_tokens")},
        "step_ms": _step_ms(point),
        **_load_figures(run, point),
        **handovers(run, int(point["point"])),
    }
    out: dict[str, float | None] = {name: own[name] if name in own else _at(point, name) for name in METRICS}
    for p in PHASES:
        found = point["phases"].get(p) or {}
        out[PHASE + p] = found.get("ms")
        for cause, share in (found.get("causes") or {}).items():
            if found["ms"] is not None:
                out[UNTOLD + p if cause == "unknown" else f"{CAUSE}{p}.{cause}"] = found["ms"] * share
    shares = point["occupancy"].get("shares") or {}
    out.update({DEVICE + c: shares.get(c) for c in CATEGORIES})
    classes = point.get("classes") or {}
    for name in classes if len(classes) > 1 else ():
        out.update({f"{CLASS}{name}.{f}": _at(classes[name], f) for f in OF_CLASS})
    ok = run.point(int(point["point"])).requests
    ok = ok.where(ok["outcome"] == 0)
    for name in ("prompt_tokens", "output_tokens"):  # of both arms alike, or they are not the same work
        known = ok[name][~np.isnan(ok[name])]
        out[f"mean_{name}"] = float(known.mean()) if len(known) else None
    return {k: None if v is None or not math.isfinite(v) else float(v) for k, v in out.items()}


def metric_of(name: str) -> Metric:
    """Of any figure's name.

    Raises:
        KeyError: there is no such figure.
    """
    if name in METRICS:
        return METRICS[name]
    if name.startswith(DEVICE) and name.removeprefix(DEVICE) in CATEGORIES:
        return Metric(name.removeprefix(DEVICE), "share", NEITHER, DIFFERENCE)
    of_class = next((f for f in OF_CLASS if name.startswith(CLASS) and name.endswith("." + f)), None)
    if of_class:
        m = METRICS[of_class]
        return m._replace(title=f"{m.title}: {name[len(CLASS) : -len(of_class) - 1]}")
    phase, _, cause = name.partition(".")[2].partition(".")
    if name.startswith((PHASE, CAUSE)) and phase in PHASES:
        return Metric(f"{phase}: {cause}" if cause else phase, "ms", LOWER)
    raise KeyError(name)


_WAITS = (PHASE, CAUSE, DEVICE)


def effects(pairs: Sequence[tuple[Figures, Figures]], seed: int = 1) -> dict[str, Effect]:
    """The effect of B on every figure that any round has, by name. ``pairs`` are (A, B) in the order they were run.

    A pair in which a round does not know a figure is left out of that figure; a cause that a round did not name took no
    time there, if the phase itself is known. Same seed, same figures.
    """
    known = {k for pair in pairs for arm in pair for k in arm}
    names = [n for n in METRICS if n in known] + sorted(k for k in known if k.startswith((CLASS, *_WAITS)))
    order = {p: i for i, p in enumerate((*PHASES, *CATEGORIES))}
    names.sort(key=lambda n: (_group(n), order.get(n.split(".")[1], 0) if _group(n) else 0))
    return {n: effect(n, pairs, seed) for n in names}


def effect(name: str, pairs: Sequence[tuple[Figures, Figures]], seed: int = 1) -> Effect:
    """The effect on one figure; see :func:`effects`.

    Raises:
        KeyError: there is no such figure.
    """
    metric = metric_of(name)
    both = [(x, y) for a, b in pairs if (x := _value(a, name)) is not None and (y := _value(b, name)) is not None]
    a, b = (np.array([p[i] for p in both], dtype=np.float64) for i in (0, 1))
    nothing = Estimate(None, None, None, len(both))
    if not both:
        seen = [[x for p in pairs if (x := _value(p[i], name)) is not None] for i in (0, 1)]
        mean_a, mean_b = (float(np.mean(x)) if x else None for x in seen)
        note = "known in one arm only" if any(seen) else "not known"
        return Effect(name, metric, mean_a, mean_b, 0, nothing, nothing, 0, (), metric.scale, 0.0, note)
    positive = bool((a > 0).all() and (b > 0).all())
    logs = np.log(b / a) if positive else np.zeros(0)
    scale = RATIO if metric.scale == RATIO and positive else DIFFERENCE
    size = RESOLUTION * float(np.mean(np.abs(np.concatenate([a, b]))))
    rng = np.random.default_rng(seed)
    ratio = _exp(_interval(logs, RESOLUTION, rng)) if positive else nothing
    usual = [float(np.exp(np.log(x).mean()) if scale == RATIO else x.mean()) for x in (a, b)]
    deltas = logs if scale == RATIO else b - a
    return Effect(
        name, metric, usual[0], usual[1], len(both), ratio, _interval(b - a, size, rng), int((b > a).sum()),
        tuple(deltas.tolist()), scale, RESOLUTION if scale == RATIO else size, _note(len(both)),
        (float(a.mean()), float(b.mean())),
    )  # fmt: skip


def _interval(d: Array, floor: float, rng: np.random.Generator | None = None) -> Estimate:
    """The mean of ``d`` over pairs with its 95 % interval; see the module."""
    n = len(d)
    if not n:
        return Estimate(None, None, None, 0)
    mean = float(d.mean())
    if n < 2:
        return Estimate(mean, None, None, n)
    half = t975(n - 1) * max(float(d.std(ddof=1)), floor) / math.sqrt(n)
    rng = np.random.default_rng(1) if rng is None else rng
    lo, hi = cluster_bootstrap(n, lambda drawn: drawn @ d / n, rng)
    return Estimate(mean, min(float(lo), mean - half), max(float(hi), mean + half), n)


def _exp(e: Estimate) -> Estimate:
    value, lo, hi = (None if v is None else math.exp(min(v, 700.0)) for v in e[:3])
    return Estimate(value, lo, hi, e.n)


def _note(n: int) -> str:
    if n < 2:
        return "one pair has no interval"
    if n < ENOUGH_PAIRS:
        return f"{n} pairs are too few for the bootstrap to reach 95 %; the interval is Student's t"
    return ""


def _value(f: Figures, name: str) -> float | None:
    whole = f.get(PHASE + name.split(".")[1]) if name.startswith(CAUSE) else None
    if whole is None:
        return f.get(name)
    # Of a phase that is mostly not told apart a cause may have taken any part, more than what is named of it too.
    return None if (f.get(UNTOLD + name.split(".")[1]) or 0.0) > whole / 2 else f.get(name, 0.0)


def _group(name: str) -> int:
    return next((i for i, start in enumerate(_WAITS, 1) if name.startswith(start)), 0)


def _at(point: Mapping[str, Any], name: str) -> float | None:
    found: Any = point
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def _spread(ttft: Mapping[str, Any]) -> float | None:
    return None if ttft["p90"] is None or ttft["p50"] is None else ttft["p90"] - ttft["p50"]


def _load_figures(run: Run, point: Mapping[str, Any]) -> dict[str, float | None]:
    """What the load met: failures, how many the engine worked on at once, preemptions, the longest silence of a stream.

    Who was never sent, or was still under way when the point ended, did not fail.
    """
    one = run.point(int(point["point"]))
    counts, window = dict(point["counts"]), point["window"]
    tried = sum(counts.values()) - sum(counts.get(k, 0) for k in ("never_sent", "censored", "cancelled"))
    running = gauge(run.readings, "running", (window["start_ns"], window["end_ns"]))
    # Read off over the whole point: who is pushed out in its last second counts too.
    pushed = delta(run.readings, "preemptions_total", (int(one.points["start_ns"][0]), int(one.points["end_ns"][0])))
    c = content(one)
    g = gaps(c)
    long = g.value[(one.requests["outcome"] == 0)[g.row]]
    return {
        "failed_share": 1 - counts.get("ok", 0) / tried if tried else None,
        "running": running.mean if running else None,
        "running_max": running.high if running else None,
        "preemptions": pushed.value if pushed else None,
        "chunk_gap_ms.max": float(long.max()) / NS_PER_MS if len(long) else None,
    }


def _step_ms(point: Mapping[str, Any]) -> float | None:
    """One decode step as a stream sees it: with speculation it gives several tokens, so TPOT is only a part of it."""
    tokens, tpot = point.get("tokens_per_step"), point["tpot_ms"]["mean"]
    return None if tokens is None or tpot is None else tokens * tpot
