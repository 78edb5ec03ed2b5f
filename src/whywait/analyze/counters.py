"""Readings over a window: counters as deltas, gauges as time-weighted means, histograms as quantiles with bounds.

Pure functions over a ``readings`` table. Give them the *whole* run's readings and a window, not a slice: the samples
just outside the window are what bounds it. A window is (start_ns, end_ns). Where nothing was read the answer is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.core.table import Table

Window = tuple[int, int]
Floats = NDArray[np.float64]
PAGES = ("metrics/", "promql/")
#: Readings of these are shares; a little above 1 may be rounding, more is another unit, and no reading of a share.
SHARES = ("kv_use", "slot_kv_use_max", "prefix_hit_rate", "acceptance_rate")
MOST_SHARE = 1.05
TOGETHER = 0.8  # series that were read over this share of their union are compared over what they have in common
_COMBINE: Mapping[str, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max}


class Series(NamedTuple):
    """One source, one name, one set of labels; in the order of time, nulls left out."""

    source: str
    labels: dict[str, str]
    asked_ns: Floats
    answered_ns: Floats
    values: Floats

    @property
    def t_ns(self) -> Floats:
        """When the value held: somewhere between asking and answer; the middle."""
        return (self.asked_ns + self.answered_ns) / 2


class Delta(NamedTuple):
    """Growth of a counter. ``value`` is read off straight lines between samples at the window's edges; the truth lies
    in [``low``, ``high``]. ``start_ns``..``end_ns`` is the part of the window the samples cover: compare them."""

    value: float
    low: float
    high: float
    start_ns: float
    end_ns: float
    resets: int

    @property
    def per_s(self) -> float:
        return self.value / (self.end_ns - self.start_ns) * 1e9

    def covers(self, t_ns: Floats) -> NDArray[np.bool_]:
        """Which instants lie in the part that was read: what a counter that fell silent grew by is of those only."""
        return (t_ns >= self.start_ns) & (t_ns <= self.end_ns)


class Gauge(NamedTuple):
    """``mean`` is weighted by time; ``slope_per_s`` is a least-squares line through the samples (None below three)."""

    mean: float
    low: float
    high: float
    last: float
    slope_per_s: float | None
    n: int


class Histogram(NamedTuple):
    """Growth of a histogram: ``counts[i]`` events in (``bounds[i-1]``, ``bounds[i]``]; the last bound is +Inf."""

    bounds: Floats
    counts: Floats
    total: float
    n: float

    @property
    def mean(self) -> float | None:
        """Exact: the sum is kept beside the buckets."""
        return self.total / self.n if self.n > 0 else None


class Quantile(NamedTuple):
    """``value`` assumes events spread evenly inside their bucket (None in the +Inf bucket); the sample quantile is
    certain to lie in (``low``, ``high``]. The sampling error of ``n`` events is not in it."""

    value: float | None
    low: float
    high: float
    n: float


def series(
    readings: Table, name: str, source: str | None = None, where: Mapping[str, str] | None = None
) -> list[Series]:
    """Every series of ``name``. ``source`` is one source (``metrics/0``) or a family of them (``metrics``); ``where``
    keeps the series that have these labels."""
    found = readings.memo(("series", name), lambda: _series(readings, name))
    return [s for s in found if (source is None or s.source == source or s.source.startswith(source + "/"))
            and all(s.labels.get(k) == v for k, v in (where or {}).items())]  # fmt: skip


def _series(readings: Table, name: str) -> list[Series]:
    groups: dict[tuple[str, str | None], list[int]] = {}
    mine = readings.rows_with("name", name)
    for i, src, raw in zip(mine.tolist(), readings["source"][mine], readings["labels"][mine], strict=True):
        groups.setdefault((src, raw), []).append(i)
    out = []
    for (src, raw), rows in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        values = readings["value"][rows].astype(np.float64)
        index = np.array(rows)[~np.isnan(values) & ~no_share(name, values)]
        index = index[np.argsort(readings["asked_ns"][index], kind="stable")]
        if len(index):
            columns = [readings[c][index].astype(np.float64) for c in ("asked_ns", "answered_ns", "value")]
            for column in columns:
                column.flags.writeable = False
            out.append(Series(src, json.loads(raw) if raw else {}, *columns))
    return out


def no_share(name: str, values: Floats) -> NDArray[np.bool_]:
    """Which readings of a share cannot be one."""
    if name not in SHARES:
        return np.zeros(len(values), dtype=bool)
    return (values < 0) | (values > MOST_SHARE)


def delta(
    readings: Table, name: str, window: Window, source: str | None = None, where: Mapping[str, str] | None = None
) -> Delta | None:
    """Growth of a counter over the window, summed over its series. Resets are bridged: after one, the counter has grown
    by at least what it shows."""
    found = _from_nothing(series(readings, name, source, where))
    parts = [d for s in found if (d := delta_of(s, window)) is not None]
    if not parts:
        return None
    start, end = max(p.start_ns for p in parts), min(p.end_ns for p in parts)
    first, last = min(p.start_ns for p in parts), max(p.end_ns for p in parts)
    if end - start >= TOGETHER * (last - first):
        if (start, end) != (first, last):  # so that amount and time are of the same stretch
            parts = [d for s in found if (d := delta_of(s, (math.floor(start), math.ceil(end)))) is not None]
    else:  # replicas that came and went: each counts for as long as it was read
        start, end = first, last
    return Delta(
        sum(p.value for p in parts),
        sum(p.low for p in parts),
        sum(p.high for p in parts),
        start,
        end,
        sum(p.resets for p in parts),
    )


def _from_nothing(found: list[Series]) -> list[Series]:
    """On an engine's page a label set that appears later than others was 0 before: a counter with labels is made when
    it is first counted up. (Of a thread that appears late in a list of processes nothing of the kind is known.)"""
    first: dict[str, Series] = {}
    for s in found:
        if s.source not in first or s.asked_ns[0] < first[s.source].asked_ns[0]:
            first[s.source] = s
    return [_padded(s, first[s.source]) if s.source.startswith(PAGES) else s for s in found]


def _padded(s: Series, other: Series) -> Series:
    before = np.flatnonzero(other.asked_ns < s.asked_ns[0])
    if not len(before):
        return s
    at = before[[0, -1]] if len(before) > 1 else before
    pad = (other.asked_ns[at], other.answered_ns[at], np.zeros(len(at)))
    columns = zip(pad, (s.asked_ns, s.answered_ns, s.values), strict=True)
    return Series(s.source, s.labels, *(np.concatenate(pair) for pair in columns))


def delta_of(s: Series, window: Window) -> Delta | None:
    """As :func:`delta`, of one series; None where it has no two readings that reach into the window."""
    t = s.t_ns
    if len(t) < 2:
        return None
    start, end = max(window[0], t[0]), min(window[1], t[-1])
    if end <= start:
        return None
    grown, resets = _unwrap(s.values)
    at_start, at_end = np.interp([start, end], t, grown)
    before_start = max(0, int(np.searchsorted(s.answered_ns, start, "right")) - 1)
    after_start = min(len(t) - 1, int(np.searchsorted(s.asked_ns, start, "left")))
    before_end = max(0, int(np.searchsorted(s.answered_ns, end, "right")) - 1)
    after_end = min(len(t) - 1, int(np.searchsorted(s.asked_ns, end, "left")))
    inside = (t >= start) & (t <= end)
    return Delta(
        float(at_end - at_start),
        max(0.0, float(grown[before_end] - grown[after_start])),
        float(grown[after_end] - grown[before_start]),
        float(start),
        float(end),
        int(resets[inside].sum()),
    )


def _unwrap(values: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Growth since the first sample, and where the counter had started anew."""
    steps = np.diff(values)
    fell = steps < 0
    grown = np.concatenate([[0.0], np.cumsum(np.where(fell, values[1:], steps))])
    return grown, np.concatenate([[False], fell])


def gauge(readings: Table, name: str, window: Window, source: str | None = None, combine: str = "sum") -> Gauge | None:
    """A gauge over the window. Several series (replicas, engines) are combined at every instant: ``sum`` for amounts,
    ``mean`` or ``max`` for shares."""
    found = joined(series(readings, name, source), window, combine)
    if found is None:
        return None
    grid, y = found
    wide = np.diff(grid)
    mean = (wide * (y[1:] + y[:-1]) / 2).sum() / wide.sum() if len(wide) else y[0]
    return Gauge(float(mean), float(y.min()), float(y.max()), float(y[-1]), _slope_per_s(grid, y), len(grid))


def joined(parts: Sequence[Series], window: Window, combine: str) -> tuple[Floats, Floats] | None:
    """Times (ns) and values of several series as one, at every reading of any of them inside the window; the others
    lie on lines between their own readings. None without such a reading."""
    inside = [s for s in parts if ((s.t_ns >= window[0]) & (s.t_ns <= window[1])).any()]
    if not inside:
        return None
    # Only where every series was read: outside, a sum would leave one out.
    start = max(window[0], *(s.t_ns[0] for s in inside))
    end = min(window[1], *(s.t_ns[-1] for s in inside))
    grid = np.unique(np.concatenate([s.t_ns for s in inside]))
    grid = grid[(grid >= start) & (grid <= end)]
    if not len(grid):
        return None
    stack = np.array([np.interp(grid, s.t_ns, s.values) for s in inside])
    return grid, _COMBINE[combine](stack, axis=0)


def _slope_per_s(t_ns: Floats, y: Floats) -> float | None:
    if len(t_ns) < 3:
        return None
    x = (t_ns - t_ns.mean()) / 1e9
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def histogram(readings: Table, base: str, window: Window, source: str | None = None) -> Histogram | None:
    """Growth of histogram ``base`` over the window, all series added; at the edges the last sample before counts.

    Series whose buckets differ are added over the bounds they share (cumulative counts stay exact there).
    """
    by_series: dict[tuple[str, str], dict[float, float]] = {}
    for s in _from_nothing(series(readings, base + "_bucket", source)):
        rest = json.dumps({k: v for k, v in s.labels.items() if k != "le"}, sort_keys=True)
        by_series.setdefault((s.source, rest), {})[float(s.labels.get("le", "nan"))] = _step_delta(s, window)
    sets = [set(d) for d in by_series.values()]
    bounds = sorted(b for b in set.intersection(*sets) if not math.isnan(b)) if sets else []
    if not bounds or bounds[-1] != math.inf:
        return None
    cumulative = np.array([sum(d[b] for d in by_series.values()) for b in bounds])
    cumulative = np.maximum.accumulate(cumulative)  # a reset seen in some buckets only could break the order
    total = sum(_step_delta(s, window) for s in _from_nothing(series(readings, base + "_sum", source)))
    return Histogram(np.array(bounds), np.diff(cumulative, prepend=0.0), total, float(cumulative[-1]))


def _step_delta(s: Series, window: Window) -> float:
    grown, _ = _unwrap(s.values)
    at = [max(0, int(np.searchsorted(s.answered_ns, edge, "right")) - 1) for edge in window]
    return float(grown[at[1]] - grown[at[0]])


def quantile(h: Histogram | None, q: float) -> Quantile | None:
    """Quantile ``q`` (0..1) of a histogram, with its bucket as the interval; None without events."""
    if h is None or h.n <= 0:
        return None
    cumulative = np.cumsum(h.counts)
    i = int(np.searchsorted(cumulative, q * h.n, "left"))
    i = min(max(i, int(np.flatnonzero(h.counts > 0)[0])), len(h.bounds) - 1)
    low = float(h.bounds[i - 1]) if i else min(0.0, float(h.bounds[0]))
    high = float(h.bounds[i])
    if math.isinf(high):
        return Quantile(None, low, high, h.n)
    before = float(cumulative[i - 1]) if i else 0.0
    inside = (q * h.n - before) / float(h.counts[i])
    return Quantile(low + (high - low) * min(1.0, max(0.0, inside)), low, high, h.n)


def answered_share(readings: Table, source: str, window: Window) -> float | None:
    """Share of looks at ``source`` in the window that were answered; None when nobody looked. Below 1 is a doubt."""
    looks = list(_inside(readings, source, window))
    return sum(looks) / len(looks) if looks else None


def _inside(readings: Table, source: str, window: Window) -> Iterator[Any]:
    for s in series(readings, "answered", source):
        yield from s.values[(s.asked_ns >= window[0]) & (s.asked_ns <= window[1])].tolist()
