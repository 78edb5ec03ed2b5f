"""Distributions of latencies as curves: the share of requests (or tokens) at or below each value, with bands."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whywait.analyze.counters import histogram, quantile
from whywait.analyze.latency import WITHHOLD
from whywait.analyze.passive import LATENCIES
from whywait.analyze.pooled import sort
from whywait.analyze.stats import ranked, weighted_percentile
from whywait.analyze.streams import chosen, gaps, is_alike
from whywait.core.table import Array
from whywait.report import svg
from whywait.report.svg import Html, Plot, Scale, cat, details, table, tag
from whywait.report.view import BEHIND, Point, View, load_name
from whywait.units import NS_PER_MS, ms, number, percent

NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end-to-end time", "itl_ms": "ITL"}
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
GRID = 80  # values at which the band of pooled gaps is computed
DRAWS, MOST_GROUPS = 400, 1500  # resamples of requests; more requests than this are bundled at random


class Line(NamedTuple):
    """A curve: ``values`` ascending (ms), ``share`` at or below each, ``low`` and ``high`` of its band there; ``n``
    requests (of an engine's histogram of ITL: tokens), and its quantiles at :data:`LEVELS` by the definition that the
    other figures have. Where only bounds are known ``share`` is the lower one, and ``least`` holds the lower bounds of
    the quantiles, whose upper ones ``levels`` are."""

    point: Point
    values: Array
    share: Array
    low: Array
    high: Array
    n: int
    levels: tuple[float, ...]
    least: tuple[float, ...] = ()


def distributions(view: View) -> Html:
    """The curves of TTFT, TPOT, end-to-end time (one value per request) and ITL (pooled over requests). Of a service
    that was only watched those that its histograms tell; empty where it has none."""
    if view.passive:
        return cat(_of_buckets(view, metric, name) for metric, name in NAMES.items())
    return cat([*(ecdf(view, metric, name) for metric, name in list(NAMES.items())[:3]), itl(view)])


def ecdf(view: View, metric: str, name: str) -> Html:
    """The share of requests at or below each latency, a line per load point."""
    lines = []
    for p, lat, keep in view.samples:
        found = line(p, getattr(lat, metric)[keep])
        if not found.n and metric == "tpot_ms":  # all came at once: how many in what time has bounds only
            found = between(p, (lat.tpot_low_ms[keep], lat.tpot_high_ms[keep]))
        lines += [found] if found.n else []
    said = "band that holds the whole curve with 95 % (Dvoretzky, Kiefer, Wolfowitz; Massart)"
    return _figure(view, lines, (metric, name, "% of requests"), said)


def line(p: Point, values: Array) -> Line:
    """The curve of one value per request (NaN: unknown, left out) with the band of Dvoretzky, Kiefer, Wolfowitz."""
    v = np.sort(values[np.isfinite(values)])
    share, half = np.arange(1, len(v) + 1) / max(len(v), 1), _dkw(len(v))
    levels = tuple(np.quantile(v, LEVELS).tolist()) if len(v) else ()
    return Line(p, v, share, np.maximum(share - half, 0), np.minimum(share + half, 1), len(v), levels)


def between(p: Point, bounds: tuple[Array, Array], weights: Array | None = None, n: int | None = None) -> Line:
    """Between the curves of the lower and of the upper bounds (ms) of values that are known no better; ``n`` requests
    (default: the values). NaN in either: left out."""
    low, high = bounds
    known = np.isfinite(low) & np.isfinite(high)
    low, high, w = low[known], high[known], (np.ones(len(low)) if weights is None else weights)[known]
    if not len(low):
        return Line(p, low, low, low, low, 0, ())
    grid = np.unique(np.quantile(np.concatenate([low, high]), np.linspace(0, 1, GRID + 1)))

    def share(v: Array) -> Array:
        order = np.argsort(v, kind="stable")
        done = np.append(0.0, np.cumsum(w[order])) / w.sum()
        found: Array = done[np.searchsorted(v[order], grid, "right")]
        return found

    ends = [tuple(weighted_percentile(v, q, w) or 0.0 for q in LEVELS) for v in (low, high)]
    surely = share(high)
    return Line(p, grid, surely, surely, share(low), len(low) if n is None else n, ends[1], ends[0])


def itl(view: View) -> Html:
    """The share of tokens at or below each gap per token; gaps of a request are alike, so requests are resampled. Where
    most gaps touch chunks that came several in one read, their bounds only (as in the figures)."""
    lines = []
    for p, lat, keep in view.samples:
        one, c = view.one(p)
        g = gaps(c)
        with np.errstate(invalid="ignore", divide="ignore"):
            each = g.value / NS_PER_MS / g.tokens
        mine = keep[g.row] & np.isfinite(each) & (g.tokens > 0)
        if not mine.any() or len(lat.ids) != len(one.requests):
            continue
        if g.coalesced[keep[g.row]].mean() > WITHHOLD:
            ends = (g.low[mine] / NS_PER_MS / g.tokens[mine], g.high[mine] / NS_PER_MS / g.tokens[mine])
            lines.append(between(p, ends, g.tokens[mine], len(np.unique(g.row[mine]))))
        else:
            lines.append(_pooled(p, g.row[mine], each[mine], chosen(g.tokens, mine)))
    return _figure(view, lines, ("itl_ms", "ITL", "% of tokens"), "95 % at each value, requests resampled")


def _of_buckets(view: View, metric: str, name: str) -> Html:
    """By the growth of the engine's histogram: exact at the bounds of its buckets, anywhere between them inside."""
    lines = []
    for p in view.drawn:
        w = p["window"]
        found = histogram(view.run.readings, LATENCIES[metric], (w["start_ns"], w["end_ns"]))
        if found is None or found.n <= 0:
            continue
        # From 0 on, where the first bucket begins; of it too nothing is known but that it holds so many.
        bounds, share = np.append(0.0, found.bounds), np.append(0.0, np.cumsum(found.counts) / found.n)
        fine = np.isfinite(bounds) & (np.append(share[1:], 1.0) > 0)
        high = np.append(share[1:], 1.0)[fine]
        ends = [q for level in LEVELS if (q := quantile(found, level)) is not None]
        if fine.any():
            lines.append(Line(p, bounds[fine] * 1000, share[fine], share[fine], high, round(found.n),
                              tuple(q.high * 1000 for q in ends), tuple(q.low * 1000 for q in ends)))  # fmt: skip
    if not lines:
        return Html()
    what = (metric, name, "% of tokens" if metric == "itl_ms" else "% of requests")
    return _figure(view, lines, what, "where the curve may lie, between the bounds of the engine's buckets")


def _pooled(p: Point, row: Array, value: Array, weight: Array) -> Line:
    """A weighted curve on a grid of its own quantiles, its band from resampled requests (or bundles of them)."""
    n, steps = len(value), np.linspace(0, 1, GRID + 1)
    if singly := is_alike(weight) and weight[0] == 1:  # nothing to carry along: what is done by rank i is i
        ascending = sort(value)
        at = np.unique((np.ceil(steps * float(n)).astype(np.int64) - 1).clip(0, n - 1))
    else:
        order = np.argsort(value, kind="stable")
        ascending, done = value[order], np.cumsum(weight[order])
        at = np.unique(np.searchsorted(done, steps * done[-1]).clip(0, n - 1))
    grid = np.unique(ascending[at])
    ids, group = np.unique(row, return_inverse=True)
    rng = np.random.default_rng(1)
    many = min(len(ids), MOST_GROUPS)
    bundle = rng.permutation(len(ids)) % many
    mine = bundle[group.ravel()]
    held = np.bincount(mine * (len(grid) + 1) + np.searchsorted(grid, value), weight, many * (len(grid) + 1))
    counts = np.cumsum(held.reshape(many, -1), axis=1)
    whole = counts.sum(axis=0)
    share = whole[:-1] / whole[-1]
    found = ranked(value, LEVELS) if singly else [weighted_percentile(value, q, weight) for q in LEVELS]
    levels = tuple(x or 0.0 for x in found)
    if many < 4:  # so few say nothing of how requests differ
        return Line(p, grid, share, np.zeros_like(share), np.ones_like(share), len(ids), levels)
    drawn = rng.multinomial(many, np.full(many, 1 / many), DRAWS) @ counts
    low, high = np.quantile(drawn[:, :-1] / drawn[:, -1:], (0.025, 0.975), axis=0)
    return Line(p, grid, share, np.minimum(low, share), np.maximum(high, share), len(ids), levels)


def _figure(view: View, lines: list[Line], what: tuple[str, str, str], band: str) -> Html:
    metric, name, unit_y = what
    key, title = f"ecdf-{metric.removesuffix('_ms')}", f"Distribution of {name}"
    if not lines:
        return svg.figure(title, f"No request ended well with what {name} takes.", [], key)
    counted = unit_y.removeprefix("% of ") if view.passive else "requests"
    if any(x.least for x in lines) and not view.passive:
        where = ", ".join(load_name(x.point) for x in lines if x.least)
        sure = f"where the curve may lie at {where}, whose chunks came several in one read"
        band = sure if all(x.least for x in lines) else f"{sure}; elsewhere {band}"
    slo = view.summary["slo"].get(metric)
    ends = [float(v) for x in lines for v in (*x.values[x.values > 0][:1], x.values[-1])]
    near = slo is not None and min(ends) / 3 <= slo <= 3 * max(ends)
    x, per, unit = svg.ms_scale([*ends, *([slo] if near else [])], zero=False)
    plot, last = Plot(200, top=24), max(len(lines) - 1, 1)
    plot.x_axis(x, f"{name}, {unit}" + (" (log)" if x.log else ""), 5)
    plot.y_axis(Scale(0, 100), unit_y, most=5)
    shaded = _shaded(view, lines)
    for i, line in enumerate(lines):
        if any(line is s for s in shaded):
            _band(plot, line, (x, per), f"band b{round(8 * i / last)}")
    paths: list[list[svg.At]] = []
    levels = max(60, 4000 // len(lines))
    for i, line in enumerate(lines):
        at = np.unique(np.linspace(0, len(line.values) - 1, min(len(line.values), levels)).round().astype(int)).tolist()
        points = [(x(float(line.values[j]) / per), plot.height * (1 - float(line.share[j]))) for j in at]
        paths.append([(points[0][0], float(plot.height)), *points, (1.0, 0.0)])
        style = f"ecdf s{round(8 * i / last)}{' dashed' if view.marked(line.point) else ''}"
        tip = f"{load_name(line.point)}: {line.n} {counted}"
        plot.path(paths[-1], style, tip, steps=True)
    if near and slo is not None:
        plot.line((x(slo / per), 0), (x(slo / per), plot.height), "slo")
    _labels(view, plot, lines, paths, (x(slo / per), f"SLO {ms(slo)}") if near and slo is not None else None)
    reading = _reading(view, lines, name)
    names = ", ".join(load_name(s.point) for s in shaded)
    note = tag("p", f"Shaded: {band}; at {names}." if shaded else "", class_="note")
    return svg.figure(title, reading, [plot.svg(title, reading, key), note, _table(lines, (name, counted), band)], key)


def _labels(
    view: View, plot: Plot, lines: list[Line], paths: list[list[svg.At]], slo: tuple[float, str] | None
) -> None:
    """Names the curves, and the SLO (where, text), where no curve is in the way if there is such a place."""
    labels = svg.Labels(plot)
    for path in paths:
        labels.keep_line(path[:: max(1, len(path) // 60)] + path[-1:])
    if slo is not None:
        labels.keep_line([(slo[0], 0.0), (slo[0], float(plot.height))])
        tries = [(slo[0], plot.height * level) for level in (0.97, 0.04, 0.8, 0.2, 0.65, 0.35, 0.5)]
        if not any(labels.put(at, slo[1], "slo-label halo") for at in tries):
            plot.text((slo[0], 10), slo[1], "slo-label halo", "end" if slo[0] > 0.6 else "start", 4)
    for i, (line, path) in enumerate(zip(lines, paths, strict=True)):
        level = 0.8 - 0.6 * i / max(len(lines) - 1, 1)
        heights = [plot.height * (1 - level - d) for d in (0.0, 0.1, -0.1, 0.15, -0.15)]
        places = [(next(px for px, py in path if py <= y), y) for y in heights]
        name = view.short(line.point)
        if not any(labels.put(at, name) for at in places):
            plot.text(places[0], name, "label halo", "start", 9)


def _shaded(view: View, lines: list[Line]) -> list[Line]:
    """Those whose band is drawn: the least load, the knee and the most, so that bands do not cover each other; and all
    of which there are bounds only."""
    plain = [x for x in lines if not view.marked(x.point)] or lines
    found = [plain[0], *(x for x in plain if x.point is view.knee), *(x for x in lines if x.least), plain[-1]]
    return [x for i, x in enumerate(found) if not any(x is y for y in found[:i])]


def _band(plot: Plot, line: Line, at: tuple[Scale, float], style: str) -> None:
    """The area between the bounds: along the upper one, back along the lower, both as steps."""
    scale, per = at
    pick = np.unique(np.linspace(0, len(line.values) - 1, min(len(line.values), 120)).round().astype(int)).tolist()
    xs = [scale(float(line.values[j]) / per) for j in pick]
    high = [plot.height * (1 - float(line.high[j])) for j in pick]
    low = [plot.height * (1 - float(line.low[j])) for j in pick]
    # Before the first value the lower bound is 0; past the last the upper one is 1.
    up = [(xs[0], float(plot.height))]
    for a, y in zip(xs, high, strict=True):
        up += [(a, up[-1][1]), (a, y)]
    down = []
    for i in range(len(xs) - 1, -1, -1):
        right = xs[i + 1] if i + 1 < len(xs) else 1.0
        down += [(right, low[i]), (xs[i], low[i])]
    plot.path([*up, (1.0, 0.0), *down, (xs[0], float(plot.height))], style)


def _dkw(n: int) -> float:
    """Half of the width of the band around the curve of ``n`` values: sqrt(ln(2/0.05) / 2n), at most 1."""
    return min(1.0, math.sqrt(math.log(40) / (2 * max(n, 1))))


def _level(line: Line, q: float) -> float:
    return line.levels[LEVELS.index(q)]


def _reading(view: View, lines: list[Line], name: str) -> str:
    exact = [x for x in lines if not x.least]  # of bounds nobody can say how far apart the values are
    spread = [_level(x, 0.9) / max(_level(x, 0.1), 1e-9) for x in exact]
    wide = ""
    if spread:
        at = int(np.argmax(np.nan_to_num(spread)))
        where = f"widest at {load_name(exact[at].point)}, p90 is {number(spread[at])}× p10"
        wide = f"; {where}" if spread[at] > 1.2 else "; narrow"
    plain = [x for x in lines if not view.marked(x.point)] or lines
    said = ", ".join(f"{_told(x, 0.5)} at {load_name(x.point)}" for x in (plain[:1] + plain[1:][-1:]))
    return f"Median {name}: {said}{wide}."


def _told(line: Line, q: float) -> str:
    """A quantile, or the bounds that it lies between."""
    high = _level(line, q)
    if not line.least:
        return ms(high)
    low = line.least[LEVELS.index(q)]
    if math.isinf(high):
        return f"more than {ms(low)}"
    return f"at most {ms(high)}" if low <= 0 else f"{ms(low)} – {ms(high)}"


def _table(lines: list[Line], what: tuple[str, str], band: str) -> Html:
    name, counted = what
    rows = [[load_name(x.point), x.n, f"± {percent(float((x.high - x.low).max()) / 2)}",
             *(_told(x, q) for q in LEVELS)] for x in lines]  # fmt: skip
    head = ["load", counted, "band, at its widest", *(f"p{q * 100:g}" for q in LEVELS)]
    return details(BEHIND, table(head, rows, f"{name}: quantiles; band: {band}"))
