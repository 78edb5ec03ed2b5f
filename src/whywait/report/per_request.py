"""What the report draws request by request: distributions of latencies, and timelines of requests in lanes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from whywait.analyze.latency import Gaps, Latency, content, gaps, origin_ns
from whywait.analyze.phases import PHASES
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.report import svg
from whywait.report.charts import BEHIND, View, gauge_line, load_name
from whywait.report.svg import Html, Plot, Scale, cat, clip, details, table, tag
from whywait.report.text import PHASE_NAMES
from whywait.units import NS_PER_MS, NS_PER_S, ms, number, percent

MOST_REQUESTS, MOST_LANES, MOST_LISTED, MOST_STALLS = 240, 80, 60, 8
GAUGES: dict[str, Callable[..., Any]] = {"running": np.sum, "waiting": np.sum, "kv_use": np.mean}


def ecdf(view: View, found: list[tuple[dict[str, Any], Latency, Array]], metric: str, name: str) -> Html:
    """The share of requests at or below each latency, a line per load point."""
    lines = [(p, np.sort(v[keep & np.isfinite(v)])) for p, lat, keep in found for v in [getattr(lat, metric)]]
    lines = [(p, v) for p, v in lines if len(v)]
    key, title = f"ecdf-{metric.removesuffix('_ms')}", f"Distribution of {name}"
    if not lines:
        return svg.figure(title, f"No request ended well with what {name} takes.", [], key)
    x, per, unit = svg.ms_scale([float(v) for _, values in lines for v in (values[0], values[-1])], zero=False)
    plot, last = Plot(200, top=24), max(len(lines) - 1, 1)
    plot.x_axis(x, f"{name}, {unit}" + (" (log)" if x.log else ""), 5)
    plot.y_axis(Scale(0, 100), "% of requests", most=5)
    labels, levels = svg.Labels(plot), max(60, 4000 // len(lines))
    for i, (p, v) in enumerate(lines):
        at = np.unique(np.linspace(0, len(v) - 1, min(len(v), levels)).round().astype(int)).tolist()
        points = [(x(float(v[j]) / per), plot.height * (1 - (j + 1) / len(v))) for j in at]
        style = f"ecdf s{round(8 * i / last)}{' dashed' if view.marked(p) else ''}"
        tip = f"{load_name(p)}: {len(v)} requests"
        plot.path([(points[0][0], plot.height), *points, (1.0, 0.0)], style, tip, steps=True)
    for i, (p, v) in enumerate(lines):
        level = 0.8 - 0.6 * i / last
        middle = float(v[int(level * (len(v) - 1))])
        labels.put((x(middle / per), plot.height * (1 - level)), view.short(p))
    reading = _ecdf_reading(view, lines, name)
    return svg.figure(title, reading, [plot.svg(title, reading, key), _ecdf_table(lines, name)], key)


def _ecdf_reading(view: View, lines: list[tuple[dict[str, Any], Array]], name: str) -> str:
    spread = [float(np.quantile(v, 0.9) / max(np.quantile(v, 0.1), 1e-9)) for _, v in lines]
    at = int(np.argmax(spread))
    wide = f"widest at {load_name(lines[at][0])}, p90 is {number(spread[at])}× p10" if spread[at] > 1.2 else "narrow"
    plain = [line for line in lines if not view.marked(line[0])] or lines
    said = ", ".join(f"{ms(float(np.median(v)))} at {load_name(p)}" for p, v in (plain[:1] + plain[1:][-1:]))
    return f"Median {name}: {said}; {wide}."


def _ecdf_table(lines: list[tuple[dict[str, Any], Array]], name: str) -> Html:
    levels = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
    # Dvoretzky, Kiefer, Wolfowitz with Massart's constant: holds the whole curve, at 95 %.
    band = [percent(min(1.0, math.sqrt(math.log(40) / (2 * len(v))))) for _, v in lines]
    rows = [[load_name(p), len(v), f"± {b}", *(ms(float(q)) for q in np.quantile(v, levels))]
            for (p, v), b in zip(lines, band, strict=True)]  # fmt: skip
    head = ["load", "requests", "band of the curve, 95 %", *(f"p{q * 100:g}" for q in levels)]
    return details(BEHIND, table(head, rows, f"{name}: sample quantiles"))


def timelines(view: View) -> Html:
    shown = view.drawn
    first = next((p for p in reversed(shown) if not view.marked(p)), None)  # the one of most load stands open
    text = ("A lane per request in flight. How long each phase took is known; their order before the first token is "
            f"assumed, and stalls lie at the longest gaps. Drawn are at most {MOST_REQUESTS} requests of a point in "
            f"{MOST_LANES} lanes, at {len(shown)} of {len(view.points)} points.")  # fmt: skip
    return tag("p", text, class_="note") + cat(_timeline(view, p, p is first) for p in shown)


def _timeline(view: View, p: dict[str, Any], open_: bool) -> Html:
    one, spent = view.run.point(p["point"]), view.acc.phases[view.acc.point == p["point"]]
    begin = origin_ns(one)
    begin = np.where(np.isnan(begin), one.requests["sent_ns"], begin)
    end = begin + spent.sum(axis=1)
    rows = [int(j) for j in np.argsort(begin, kind="stable") if end[j] > begin[j]]
    if len(rows) > MOST_REQUESTS:  # from the steady window on, as far as there are enough
        at = min(int(np.searchsorted(begin[rows], p["window"]["start_ns"])), len(rows) - MOST_REQUESTS)
        rows = rows[at : at + MOST_REQUESTS]
    place = {rows[i]: lane for i, lane in svg.lanes([(begin[j], end[j]) for j in rows], MOST_LANES).items()}
    if not place:
        said = "No request of this point has the stamps that it takes to draw it."
        return details(load_name(p), tag("p", said), open_, "card")
    rows, zero = list(place), int(one.points["start_ns"][0])
    span = (float(begin[rows].min()), float(end[rows].max()))
    scale, count = Scale((span[0] - zero) / NS_PER_S, (span[1] - zero) / NS_PER_S), max(place.values()) + 1

    def x(t_ns: float) -> float:
        return scale((t_ns - zero) / NS_PER_S)

    lines = {n: [(x(t), v) for t, v in gauge_line(view.run, n, span, join)] for n, join in GAUGES.items()}
    thick, busy = min(max(round(400 / count), 4), 16), lines["running"] + lines["waiting"]
    strips = [count * thick + 34, count * thick + 34 + (84 if busy else 0)]
    plot = Plot(strips[1] + (50 if lines["kv_use"] else -30), top=8)
    plot.x_axis(scale, "seconds since the point began", 8)
    gap = gaps(content(one)) if spent[rows, PHASES.index("stall")].any() else None
    for j, lane in place.items():
        _draw_request(plot, one.requests.where(np.array([j])).rows()[0], (spent[j].tolist(), float(begin[j])),
                      (x, lane * thick, thick), _stalls(gap, j, int(spent[j, PHASES.index("stall")])))  # fmt: skip
    if busy:
        top = Scale(0, max(1.0, *(v for _, v in busy)) * 1.05)
        title = "requests in the engine: running (thin line), waiting (amber)"
        plot.strip(strips[0], title, top, [(f"g-{n}", lines[n]) for n in ("waiting", "running")])
    if lines["kv_use"]:
        held = [(t, v * 100) for t, v in lines["kv_use"]]
        plot.strip(strips[1], "KV space in use, %", Scale(0, 100), [("g-kv_use", held)])
    shares = sorted(zip((spent[rows].sum(axis=0) / spent[rows].sum()).tolist(), PHASES, strict=True), reverse=True)
    largest = ", ".join(f"{PHASE_NAMES[k]} {percent(v)}" for v, k in shares[:3] if v)
    reading = (f"{len(rows)} of {len(spent)} requests drawn, from {scale.low:.1f} to {scale.high:.1f} s, "
               f"in {count} lanes; of their time {largest}.")  # fmt: skip
    if lines["waiting"]:
        most = max(v for _, v in lines["waiting"])
        reading += f" The engine's own queue {f'held up to {most:.0f}' if most else 'stayed empty'}."
    words = svg.legend((f"f-{k}", PHASE_NAMES[k]) for v, k in shares if v >= 0.001)
    drawn = plot.svg(f"Timeline at {load_name(p)}", reading, f"time-{p['point']}")
    how = view.acc.how[p["point"]]
    known = [k for k in PHASE_NAMES if how[k] != "unknown" or spent[:, PHASES.index(k)].any()]
    listed = _listed(one, {k: spent[:, PHASES.index(k)] for k in known}, rows[:MOST_LISTED], (begin - zero) / NS_PER_S)
    return details(load_name(p), tag("p", reading, class_="reading") + words + drawn + listed, open_, "card")


def _listed(one: Run, spent: dict[str, Array], rows: list[int], start_s: Array) -> Html:
    head = ["request", "class", "at", "outcome", *(PHASE_NAMES[k] for k in spent), "tokens"]
    body = [[r["id"], clip(r["class"] or "–"), f"{start_s[j]:.2f} s", r["outcome"],
             *(ms(float(v[j]) / NS_PER_MS) for v in spent.values()), str(r["output_tokens"] or "–")]
            for j, r in zip(rows, one.requests.where(np.array(rows)).rows(), strict=True)]  # fmt: skip
    title = f"The first {len(rows)} of the requests drawn"
    return details(title, table(head, body, title, "tall"), class_="data noprint")


def _draw_request(
    plot: Plot, row: dict[str, Any], spent: tuple[list[int], float], at: tuple[Any, int, int], stalls: list[svg.At]
) -> None:
    """A request in its lane; ``spent`` is its account and beginning (ns), ``at`` the scale, the lane's y and height."""
    (line, begin), (x, y, thick) = spent, at
    parts = dict(zip(PHASES, line, strict=True))
    total, first = sum(line), row["first_ns"]
    decoding = parts["decode"] + parts["stall"]
    known = sum(parts[k] for k in ("client", "network", "frontend", "queue", "prefill"))
    wait = total - decoding - parts["tail"] if first is None else int(first - begin)
    before = min(max(wait - known, 0), parts["unknown"])
    order = [(k, parts[k]) for k in ("client", "network", "frontend")]
    order += [("unknown", before), ("queue", parts["queue"]), ("prefill", parts["prefill"]), ("decode", decoding),
              ("tail", parts["tail"]), ("unknown", parts["unknown"] - before)]  # fmt: skip
    took = ", ".join(f"{PHASE_NAMES[k]} {ms(v / NS_PER_MS)}" for k, v in parts.items() if v)
    plot.group(f"request {row['id']} ({row['outcome']}), {ms(total / NS_PER_MS)}: {took}")
    t, spans = begin, []
    for name, length in order:
        spans += [(name, t, t + length)] if length > 0.0005 * total else []
        t += length
    for name, a, b in [*spans, *(("stall", a, b) for a, b in stalls)]:
        plot.rect((x(a), y + 0.5), (x(b) - x(a), thick - 1), f"f-{name}")
    if row["outcome"] != "ok":
        plot.mark((x(begin + total), y + thick / 2), "cross", "cross", row["outcome"])
    plot.end_group()


def _stalls(gap: Gaps | None, row: int, left: int) -> list[svg.At]:
    """Where the stalled time of a request is drawn: at the ends of its longest gaps, until it is used up."""
    out: list[svg.At] = []
    if gap is None or left <= 0:
        return out
    a, b = np.searchsorted(gap.row, [row, row + 1])
    for i in a + np.argsort(-gap.value[a:b], kind="stable")[:MOST_STALLS]:
        took = min(float(gap.value[i] - np.median(gap.value[a:b])), float(left))
        if took > 0:
            until = float(gap.begin_ns[i] + gap.value[i])
            out, left = [*out, (until - took, until)], left - round(took)
    return out
