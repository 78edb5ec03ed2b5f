"""What a Run says at each load point that a simulator can be held to: figures with their sampling error.

The same functions take the arrays of a simulated service, so that both are measured alike. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whywait.analyze.counters import gauge, histogram
from whywait.analyze.latency import CLOSED, per_request
from whywait.analyze.stats import t975
from whywait.analyze.streams import content
from whywait.analyze.window import Window, in_flight, starts_inside, token_bins, window_of
from whywait.core.columns import MODES
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_S, load_name

#: What is taken of one value per request, by name.
STATISTICS = {"mean": math.nan, "p50": 0.5, "p90": 0.9}
MIN_P90 = 20  # fewer requests say nothing of the slowest tenth
SMALL = 0.05  # a queue below this share of the TTFT, or KV below this share of the space, is too small to tell anything
_DRAWS = 200
_BLOCKS = 10
_ALONE_SE = 0.25  # log error of a figure from a single request: a guess, wide


class Figure(NamedTuple):
    """A value (ms, tokens/s, or a share; the metric's name says which) and the standard error of its logarithm."""

    value: float
    log_se: float


@dataclass(frozen=True)
class Observed:
    """A load point. ``rows`` are the places in ``run.requests`` of what was counted (``ok``, begun in the window), and
    ``all_rows`` of every request of the point that was sent. Lengths are means in tokens."""

    point: int
    name: str
    mode: str
    target: float | None
    label: str | None
    window: Window
    in_flight: float
    prompt_tokens: float
    output_tokens: float
    rows: Array
    all_rows: Array
    figures: Mapping[str, Figure]

    @property
    def at(self) -> tuple[float, float, float]:
        """Where it lies among loads: logarithms of requests in flight and of the lengths."""
        found = (self.in_flight, self.prompt_tokens, self.output_tokens)
        return (math.log(max(found[0], 0.1)), math.log(max(found[1], 1.0)), math.log(max(found[2], 1.0)))


def observed(run: Run) -> list[Observed]:
    """Every load point at which at least one request ended well; points that were only watched are left out."""
    out = []
    for number in run.points["point"].tolist():
        found = _point(run, number)
        if found is not None:
            out.append(found)
    return out


def statistics(name: str, values: Array) -> dict[str, float]:
    """``name.mean``, ``name.p50`` and, of enough values, ``name.p90``; NaN values are left out."""
    x = values[np.isfinite(values)]
    if not len(x):
        return {}
    return {
        f"{name}.{s}": float(x.mean() if math.isnan(q) else np.quantile(x, q))
        for s, q in STATISTICS.items()
        if s != "p90" or len(x) >= MIN_P90
    }


def _point(run: Run, number: int) -> Observed | None:
    one = run.point(number)
    req = one.requests
    sent = ~np.isnan(req["sent_ns"])
    if not len(req) or not sent.any():
        return None
    w = window_of(one)
    lat = per_request(one)
    inside = np.ones(len(req), dtype=bool) if w.whole else starts_inside(one, w.start_ns, w.end_ns)
    use = lat.ok & inside
    if not use.any():
        return None
    target = float(one.points["target"][0])
    mode, label = MODES[int(one.points["mode"][0])], one.points["label"][0]
    row_of = np.flatnonzero(run.requests["point"] == number)
    order = np.flatnonzero(use)[np.argsort(lat.origin_ns[use], kind="stable")]
    block = _block(len(order), target if mode == MODES[CLOSED] else 1.0)
    figures: dict[str, Figure] = {}
    for name, values in (("ttft_ms", lat.ttft_ms), ("tpot_ms", lat.tpot_ms), ("e2e_ms", lat.e2e_ms)):
        figures.update(_figures(name, values[order], block))
    figures.update(_throughput(one, w, lat.ok))
    figures.update(_stages(run, one, w, order))
    return Observed(
        number, load_name(mode, None if math.isnan(target) else target, label), mode,
        None if math.isnan(target) else target, label, w, in_flight(one, w.start_ns, w.end_ns)[1],
        _mean(req["prompt_tokens"][order]), _mean(req["output_tokens"][order]), row_of[order], row_of[sent], figures,
    )  # fmt: skip


def _figures(name: str, values: Array, block: int) -> dict[str, Figure]:
    x = values[np.isfinite(values) & (values > 0)]
    said = statistics(name, x)
    if not said:
        return {}
    if len(x) == 1:
        return {k: Figure(v, _ALONE_SE) for k, v in said.items()}
    se = _bootstrap(x, min(block, max(len(x) // 2, 1)))
    return {k: Figure(v, se[k.rpartition(".")[2]]) for k, v in said.items() if v > 0}


def _block(n: int, together: float) -> int:
    """Requests that are resampled together: neighbours in time share steps, and in a closed loop a whole wave does."""
    return int(max(1, min(max(round(n ** (1 / 3)), together), n // 4)))


def _bootstrap(x: Array, block: int) -> dict[str, float]:
    """Standard errors of the logarithms, from circular blocks (Politis & Romano 1992); grown by √(k / (k − 1)) of k
    blocks, which is what resampling so few leaves out."""
    n = len(x)
    blocks = -(-n // block)
    rng = np.random.default_rng(n)
    begin = rng.integers(0, n, (_DRAWS, blocks))
    drawn = x[(begin[:, :, None] + np.arange(block)) % n].reshape(_DRAWS, -1)[:, :n]
    grow = math.sqrt(blocks / (blocks - 1)) if blocks > 1 else 2.0
    with np.errstate(divide="ignore"):
        found = {
            s: np.log(drawn.mean(axis=1) if math.isnan(q) else np.quantile(drawn, q, axis=1))
            for s, q in STATISTICS.items()
        }
    return {s: max(float(v.std(ddof=1)) * grow, 1e-3) for s, v in found.items()}


def _throughput(one: Run, w: Window, ok: Array) -> dict[str, Figure]:
    counted, _ = token_bins(one, content(one), w, ok, _BLOCKS)
    if counted is None or not counted.sum() > 0:
        return {}
    mean, sd = float(counted.mean()), float(counted.std(ddof=1))
    # What is left over at the edges of a short window is part of what such a measurement may be off by.
    se = max(sd / math.sqrt(_BLOCKS) / mean * t975(_BLOCKS - 1) / 1.96, 1e-3)
    return {"output_tokens_per_s": Figure(mean * _BLOCKS / ((w.end_ns - w.start_ns) / NS_PER_S), se)}


def _stages(run: Run, one: Run, w: Window, rows: Array) -> dict[str, Figure]:
    """What the engine itself reports: queue and prefill of each request, else of all together; KV space in use."""
    span, out = (w.start_ns, w.end_ns), dict[str, Figure]()
    ttft = (one.requests["first_ns"] - one.requests["sent_ns"])[rows] / 1e6
    usual = float(np.nanmean(ttft)) if np.isfinite(ttft).any() else math.inf
    for name, column, base in (
        ("queue_ms", "engine_queue_ms", "queue_seconds"),
        ("prefill_ms", "engine_prefill_ms", "prefill_seconds"),
    ):
        told = one.requests[column][rows]
        told = told[np.isfinite(told)]
        if len(told) >= max(1, len(rows) // 2):
            mean, se = float(told.mean()), float(told.std(ddof=1)) / math.sqrt(len(told)) if len(told) > 1 else math.inf
        else:
            found = histogram(run.readings, base, span)
            seconds = found.mean if found is not None else None
            mean, se = (seconds * 1e3, 0.1 * seconds * 1e3) if seconds is not None else (math.nan, math.nan)
        if mean > SMALL * usual:
            out[f"{name}.mean"] = Figure(mean, min(max(se / mean, 0.01), 0.5))
    kv = gauge(run.readings, "kv_use", span, combine="mean")
    if kv is not None and kv.mean > SMALL:
        out["kv_use"] = Figure(kv.mean, 0.05)
    return out


def _mean(x: Array) -> float:
    known = x[np.isfinite(x)]
    return float(known.mean()) if len(known) else math.nan
