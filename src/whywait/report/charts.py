"""The charts with a row or a mark per load point: phases, occupancy, throughput and latency. Each has its table and its
reading in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from whywait.analyze.counters import series
from whywait.analyze.latency import Latency, origin_ns, per_request
from whywait.analyze.phases import RequestAccount
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.report.svg import Html, Labels, Plot, cat, clip, details, figure, legend, ms_scale, scale_for, table, tag
from whywait.report.text import DEVICE_NAMES, PHASE_NAMES
from whywait.units import ms, number, percent

MOST_ROWS = 24  # points drawn in a chart; the tables have all
VISIBLE = 0.002  # a smaller share of a bar is not drawn
BEHIND = "Figures behind this chart"
_ROW, _BAR = 27, 18
_Point = dict[str, Any]


class _Stack(NamedTuple):
    """A kind of stacked bars: what of a point it shows, its names and fills in the order drawn, width of the bars."""

    group: str
    title: str
    names: Mapping[str, str]
    fill: Mapping[str, str]
    heads: tuple[str, float, str]
    width: float


_PHASES = _Stack("phases", "What requests wait for", PHASE_NAMES, {k: k for k in PHASE_NAMES},
                 ("share of request time", 0.61, "mean time"), 0.56)  # fmt: skip
_DEVICE = _Stack(
    "occupancy", "What the device does", DEVICE_NAMES,
    {"prefill_busy": "prefill", "decode_busy": "decode", "communication": "network", "idle_host": "queue",
     "idle_kv_blocked": "kv", "throttled": "throttled", "unknown": "unknown", "idle_no_work": "idle"},
    ("share of device time", 1, "busy, bounds"), 0.78)  # fmt: skip


@dataclass(frozen=True)
class View:
    """A Run with its account and summary. ``points`` in the order drawn: plain ones by load, then the marked ones."""

    run: Run
    summary: dict[str, Any]
    acc: RequestAccount
    points: list[_Point] = field(init=False)

    def __post_init__(self) -> None:
        given = self.summary["points"]
        order = sorted(range(len(given)), key=lambda i: (self.marked(given[i]), given[i]["target"] or 0.0, i))
        object.__setattr__(self, "points", [given[i] for i in order])

    def marked(self, p: _Point) -> bool:
        """Whether a point is shown apart: it has a label, and not all have one."""
        return bool(p["label"]) and not all(q["label"] for q in self.summary["points"])

    @property
    def drawn(self) -> list[_Point]:
        """The points that charts show: all, or some evenly over the load, and the knee."""
        at = set(np.linspace(0, len(self.points) - 1, min(len(self.points), MOST_ROWS)).round().astype(int).tolist())
        return [p for i, p in enumerate(self.points) if i in at or p is self.knee]

    @property
    def plain(self) -> list[_Point]:
        return [p for p in self.points if not self.marked(p)]

    @property
    def knee(self) -> _Point | None:
        at = self.summary.get("knee")
        found: _Point | None = None if at is None else self.summary["points"][at]
        return found

    @property
    def axis(self) -> str:
        """What the load is counted in."""
        modes = {p["mode"] for p in self.points}
        return {"concurrency": "in flight", "rate": "requests/s"}.get("".join(modes), "load")

    def short(self, p: _Point) -> str:
        """``8``, ``2/s``, ``trace``; ◆ marks a point shown apart, ◂ the knee."""
        target = "–" if p["target"] is None else f"{p['target']:g}"
        text = {"concurrency": target, "rate": f"{target}/s"}.get(p["mode"], "trace")
        return text + (" ◆" if self.marked(p) else "") + (" ◂" if p is self.knee else "")


def load_name(p: _Point, label: bool = True) -> str:
    """A load point in words: ``8 in flight``, ``2 requests/s``, with its label."""
    target = "–" if p["target"] is None else f"{p['target']:g}"
    text = {"concurrency": f"{target} in flight", "rate": f"{target} requests/s"}.get(p["mode"], "the trace")
    return f"{text} ({clip(p['label'])})" if label and p["label"] else text


def phases(view: View) -> Html:
    """Mean request time by phase, as shares and in milliseconds, a row per load point."""
    longest = max((_total(p) for p in view.points), default=0.0)

    def times(plot: Plot, y: float, p: _Point, parts: list[tuple[str, float, str]]) -> None:
        width = 0.19 * _total(p) / longest if longest else 0.0
        _bar(plot, (0.61, y), width, parts, False)
        plot.text((0.61 + width, y + 13), ms(_total(p)), "value", dx=5)

    return _stack(view, _PHASES, phases_reading(view), times)


def phases_reading(view: View) -> str:
    """The chart of phases in a sentence or two."""
    seen = [p for p in view.plain if p["phases"] and _total(p)]
    if not seen:
        return "No request left the stamps that it takes to account for its time."
    a, b = seen[0], seen[-1]
    if len(seen) == 1:
        text = f"At {load_name(a)} a request takes {ms(_total(a))} on average: {_largest(a, _PHASES)}."
    elif _total(b) < 1.1 * _total(a):
        text = f"From {_from_to(a, b)} a request's mean time stays near {ms(_total(b))}: {_largest(b, _PHASES)}."
    else:
        added = {k: (b["phases"][k]["ms"] or 0) - (a["phases"].get(k, {}).get("ms") or 0) for k in b["phases"]}
        top = max(added, key=lambda k: added[k])
        part = added[top] / (_total(b) - _total(a))
        much = "the added time is" if part >= 0.95 else f"{percent(part)} of the added time is"
        text = (f"From {_from_to(a, b)} a request's mean time grows from {ms(_total(a))} to {ms(_total(b))}; "
                f"{much} {PHASE_NAMES[top]}{_cause(b, top)}.")  # fmt: skip
    for p in (p for p in view.points if view.marked(p) and p["phases"]):
        alike = next((q for q in seen if q["target"] == p["target"] and q["mode"] == p["mode"]), None)
        if alike is not None:
            here, there = ({k: s or 0.0 for k, (s, _) in _cells(q, "phases").items()} for q in (p, alike))
            top = max(here, key=lambda k: here[k] - there.get(k, 0.0))
            return (f"{text} With “{clip(p['label'])}” {PHASE_NAMES[top]} takes {percent(here[top])} of it, "
                    f"against {percent(there.get(top, 0.0))}.")  # fmt: skip
    return text


def occupancy(view: View) -> Html:
    """What the device does, as shares of wall time × devices, a row per load point, with the bounds of busy."""

    def bounds(plot: Plot, y: float, p: _Point, _parts: list[tuple[str, float, str]]) -> None:
        low, high = p["occupancy"]["busy"]
        if low is not None:
            a, b = (_DEVICE.width * v for v in (low, high))
            for x in (a, b):
                plot.line((x, y + _BAR - 4), (x, y + _BAR + 4), "bound")
            plot.line((a, y + _BAR + 3), (b, y + _BAR + 3), "bound")
        plot.text((1, y + 13), _span(low, high), "value", "end")

    note = ("Strokes: between them lies the true busy time, which the engine’s CPU time bounds where it was read. "
            "A bar that is busy beyond them held work that was not being computed.")  # fmt: skip
    told = view.plain[-1]["occupancy"].get("notes") or {} if view.plain else {}
    note += "".join(f" {DEVICE_NAMES[k].capitalize()} at {load_name(view.plain[-1])}: {v}." for k, v in told.items())
    return _stack(view, _DEVICE, occupancy_reading(view), bounds, note)


def occupancy_reading(view: View) -> str:
    seen = [p for p in view.plain if p["occupancy"]["wall_ns"]]
    if not seen:
        return "No time was measured in which the device could be watched."
    said = "; ".join(f"at {load_name(p)} it is {_largest(p, _DEVICE)}" for p in seen[:1] + seen[1:][-1:])
    return f"Of the device's time: {said}."


def curve(view: View, metric: str, name: str) -> Html:
    """Latency (p50 with its interval, p95) against throughput, a mark per load point."""
    rate = ("output_tokens_per_s", "output tokens/s")
    if all(p[rate[0]] is None for p in view.points):
        rate = ("requests_per_s", "requests/s")
    key, ident, title = rate[0], f"curve-{metric.removesuffix('_ms')}", f"Throughput and {name}"
    drawn = [p for p in view.drawn if p[key] is not None and p[metric]["p50"] is not None]
    reading, behind = curve_reading(view, metric, name, rate), _curve_table(view, metric, name, rate)
    if not drawn:
        return figure(title, reading, [behind], ident)
    slo = view.summary["slo"].get(metric)
    bounds = [v for p in drawn for v in (*_ci(p[metric], "p50"), p[metric]["p50"], p[metric]["p95"])]
    near = slo is not None and slo <= 4 * max(v for v in bounds if v is not None)
    y, per, unit = ms_scale([*bounds, *([slo] if near else [])])
    x = scale_for([v for p in drawn for v in (p[key], *(p.get(f"{key}_ci") or []))], log=False)
    plot = Plot(232, top=24)
    plot.x_axis(x, rate[1])
    plot.y_axis(y, f"{name}, {unit}" + (" (log)" if y.log else ""))

    def place(rate_: float, latency_ms: float) -> tuple[float, float]:
        return x(rate_), plot.height * (1 - y(latency_ms / per))

    open_ = " (? upper bound unknown)" if any(_ci(p[metric], "p95")[1] is None for p in drawn) else ""
    notes = [f"● p50, bars: 95 % intervals where known · ○ p95{open_}"]
    if near:
        level = place(0, slo)[1]
        plot.line((0, level), (1, level), "slo")
        plot.text((0, level - 4), f"SLO {ms(slo)}", "slo-label halo", dx=4)
    elif slo is not None:
        notes.append(f"the SLO of {ms(slo)} is far above what is drawn")
    _curve_marks(view, plot, drawn, (metric, key), place)
    body = [plot.svg(title, reading, ident), tag("p", " · ".join(notes), class_="note"), _signs(view), behind]
    return figure(title, reading, body, ident)


def _curve_marks(
    view: View, plot: Plot, drawn: list[_Point], keys: tuple[str, str], place: Callable[[float, float], Any]
) -> None:
    metric, key = keys
    line = [p for p in drawn if not view.marked(p)]
    for q in ("p95", "p50") if len(line) > 1 else ():
        plot.path([place(p[key], p[metric][q]) for p in line], f"line-{q}")
    labels = Labels(plot)
    for p in drawn:
        rate, found = p[key], p[metric]
        at, high = place(rate, found["p50"]), place(rate, found["p95"])
        (low, up), (left, right) = _ci(found, "p50"), p.get(f"{key}_ci") or (None, None)
        if low is not None and up is not None:
            plot.line(place(rate, low), place(rate, up), "whisker")
        if left is not None and right is not None:
            plot.line(place(left, found["p50"]), place(right, found["p50"]), "whisker thin")
        tip = f"{load_name(p)}: {number(rate)} per second, p50 {_with_ci(found, 'p50')}, p95 {_with_ci(found, 'p95')}"
        if p is view.knee:
            plot.mark(at, "ring", "knee", tip)
        plot.mark(high, "dot", "p95", tip)
        if _ci(found, "p95")[1] is None:
            plot.text((high[0], high[1] - 7), "?", "tick", "middle")
        plot.mark(at, "diamond" if view.marked(p) else "dot", "p50", tip)
        labels.keep_clear(at, 9 if p is view.knee else 6)
        labels.keep_clear(high, 6)
    for p in sorted(drawn, key=lambda p: p is not view.knee):
        labels.put(place(p[key], p[metric]["p50"]), view.short(p), wide=p is view.knee)


def curve_reading(view: View, metric: str, name: str, rate: tuple[str, str]) -> str:
    key, unit = rate
    seen = [p for p in view.plain if p[key] and p[metric]["p50"] is not None]
    if not seen:
        return f"Nothing to draw: no load point has both {unit} and {name}."
    a, b, knee = seen[0], seen[-1], view.knee
    if a is b:
        return f"At {load_name(a)}: {number(a[key])} {unit}, {name} {ms(a[metric]['p50'])} (p50)."
    if knee is not None and knee is not b and any(p is knee for p in seen):
        gain = b[key] / knee[key] - 1
        to = f"go from {number(knee[key])} to {number(b[key])} ({gain * 100:+.0f} %)"
        to = f"stay at {number(b[key])}" if abs(gain) < 0.03 else to
        return (f"From {_from_to(knee, b)} {unit} {to} while {name} goes from {ms(knee[metric]['p50'])} to "
                f"{ms(b[metric]['p50'])} (p50): more load only adds waiting.")  # fmt: skip
    return (f"From {_from_to(a, b)} {unit} go from {number(a[key])} to {number(b[key])} ({b[key] / a[key]:.2f}×) and "
            f"{name} from {ms(a[metric]['p50'])} to {ms(b[metric]['p50'])} (p50); "
            "no point was found at which throughput stops growing.")  # fmt: skip


def samples(view: View) -> list[tuple[dict[str, Any], Latency, Array]]:
    """Each drawn point with the latencies of its requests and which of them count: ``ok``, begun in the window."""
    out = []
    for p in view.drawn:
        one, w = view.run.point(p["point"]), p["window"]
        lat, origin = per_request(one), origin_ns(one)
        inside = (origin >= w["start_ns"]) & (origin <= w["end_ns"])
        out.append((p, lat, lat.ok & (inside | w["whole_point"])))
    return out


def gauge_line(run: Run, name: str, span: tuple[float, float], join: Callable[..., Any]) -> list[tuple[float, float]]:
    """(ns, value) of a gauge inside ``span``, its series joined; of many readings the highest of each stretch."""
    found = series(run.readings, name)
    inside = [s.t_ns[(s.t_ns >= span[0]) & (s.t_ns <= span[1])] for s in found]
    times = np.unique(np.concatenate(inside)) if inside else np.zeros(0)
    if not len(times):
        return []
    values = join([np.interp(times, s.t_ns, s.values) for s in found], axis=0)
    parts = np.array_split(np.arange(len(times)), min(len(times), 240))
    return [(float(times[i]), float(values[i])) for i in (part[np.argmax(values[part])] for part in parts)]


# parts shared by the charts


def _stack(view: View, kind: _Stack, reading: str, right: Callable[..., None], note: str = "") -> Html:
    """Bars of shares, a row per point; ``right`` draws what stands beside each."""
    rows = [p for p in view.drawn if any(share for share, _ in _cells(p, kind.group).values())]
    shares = [{k: share or 0.0 for k, (share, _) in _cells(p, kind.group).items()} for p in rows]
    names = [k for k in kind.fill if any(s.get(k, 0.0) >= VISIBLE for s in shares)]
    behind = _points_table(view, kind)
    if not names:
        return figure(kind.title, reading, [behind], kind.group)
    plot = Plot(len(rows) * _ROW + (12 if view.marked(rows[-1]) else 0), left=62, top=26, bottom=4)
    plot.text((0, -10), view.axis, "tick", "end", -8)
    plot.text((0, -10), kind.heads[0], "tick")
    plot.text((kind.heads[1], -10), kind.heads[2], "tick", "end" if kind.heads[1] == 1 else "start")
    apart = False
    for i, (p, share) in enumerate(zip(rows, shares, strict=True)):
        apart = apart or (view.marked(p) and i > 0)
        y = 2.0 + i * _ROW + (10 if apart else 0)
        plot.text((0, y + 13), view.short(p), "label", "end", -8)
        parts = [(kind.fill[k], share.get(k, 0.0), f"{load_name(p)}: {kind.names[k]} {', '.join(_cell(p, kind, k))}")
                 for k in names]  # fmt: skip
        _bar(plot, (0, y), kind.width, parts, True)
        right(plot, y, p, parts)
    body = [legend((f"f-{kind.fill[k]}", kind.names[k]) for k in names), plot.svg(kind.title, reading, kind.group),
            _signs(view), *([tag("p", note, class_="note")] if note else []), _unseen(rows, kind), behind]  # fmt: skip
    return figure(kind.title, reading, body, kind.group)


def _bar(
    plot: Plot, at: tuple[float, float], width: float, parts: Iterable[tuple[str, float, str]], words: bool
) -> None:
    x, y = at
    for fill, share, tip in parts:
        if share >= VISIBLE:
            plot.rect((x, y), (share * width, _BAR), f"seg f-{fill}", tip)
            if words and share >= 0.16:
                plot.text((x + share * width / 2, y + 13), percent(share), f"ink i-{fill}", "middle")
            x += share * width


def _signs(view: View) -> Html:
    """What the signs of the point names mean, and how many points are not drawn."""
    notes = ["◂ knee: throughput stops growing here"] if view.knee is not None else []
    labels = dict.fromkeys(clip(p["label"]) for p in view.points if view.marked(p))
    notes += ["◆ " + ", ".join(list(labels)[:4])] if labels else []
    few, all_ = len(view.drawn), len(view.points)
    notes += [f"{few} of {all_} points are drawn; the table has all"] if few < all_ else []
    return tag("p", " · ".join(notes), class_="note") if notes else Html()


def _total(p: _Point) -> float:
    return float(sum(v["ms"] or 0.0 for v in p["phases"].values()))


def _cells(p: _Point, group: str) -> dict[str, tuple[float | None, str]]:
    """Share and how it is known of each phase or category of a point."""
    if group == "phases":
        return {k: (v["share"], v["how"]) for k, v in p["phases"].items()}
    return {k: (v, p["occupancy"]["how"][k]) for k, v in p["occupancy"]["shares"].items()}


def _cell(p: _Point, kind: _Stack, k: str) -> list[str]:
    """``62 % · 1,200 ms``, ``inferred``, ``slot limit 100 %``."""
    share, how = _cells(p, kind.group).get(k, (None, ""))
    if share is None:
        return ["–"]
    found = p["phases"][k] if kind.group == "phases" else {"causes": {}}
    time = f" · {ms(found['ms'])}" if "ms" in found else ""
    return [percent(share) + time, how, *(f"{c} {percent(v)}" for c, v in found["causes"].items() if c != "unknown")]


def _points_table(view: View, kind: _Stack) -> Html:
    times = kind.group == "phases"
    rows = [[load_name(p), *(cat([c[0], *(tag("small", s) for s in c[1:])]) for k in kind.names
                             for c in [_cell(p, kind, k)]),
             ms(_total(p)) if times else _span(*p["occupancy"]["busy"])] for p in view.points]  # fmt: skip
    what = "share, mean time, how it is known, causes" if times else "share, how it is known"
    return details(BEHIND, table(["load", *kind.names.values(), "sum" if times else "busy, bounds"], rows,
                                 f"{kind.title}, by load point: {what}"))  # fmt: skip


def _curve_table(view: View, metric: str, name: str, rate: tuple[str, str]) -> Html:
    key, unit = rate
    rows = [[load_name(p), number(p[key]), *(_with_ci(p[metric], q) for q in ("p50", "p95")), p[metric]["n"],
             "knee" if p is view.knee else ""] for p in view.points]  # fmt: skip
    head = ["load", unit, f"{name} p50 [95 % interval]", f"{name} p95 [95 % interval]", "requests", "knee"]
    return details(BEHIND, table(head, rows, f"{unit} and {name} by load point; ? is unknown"))


def _unseen(points: list[_Point], kind: _Stack) -> Html:
    """Names what nothing here could have shown: its time, if any, is in 'not explained'."""
    cells = [_cells(p, kind.group) for p in points]
    blind = [v for k, v in kind.names.items() if k != "unknown" and all(c.get(k, (None,))[0] is None for c in cells)]
    said = f"Not visible with what was told: {' · '.join(blind)}. Such time, if any, is in “not explained”."
    return tag("p", said, class_="note") if blind else Html()


def _largest(p: _Point, kind: _Stack) -> str:
    shares = sorted(((s, k) for k, (s, _) in _cells(p, kind.group).items() if s), reverse=True)
    return ", ".join(f"{kind.names[k]} {percent(s)}" for s, k in shares[:2] if s >= 0.05) or "–"


def _cause(p: _Point, phase: str) -> str:
    causes = {k: v for k, v in p["phases"][phase]["causes"].items() if k != "unknown" and v >= 0.5}
    return f" ({max(causes, key=lambda k: causes[k])})" if causes else ""


def _from_to(a: _Point, b: _Point) -> str:
    first = load_name(a, False)
    return f"{first.split()[0] if a['mode'] == b['mode'] != 'trace' else first} to {load_name(b, False)}"


def _span(low: float | None, high: float | None) -> str:
    a, b = percent(low), percent(high)
    return a if a == b else f"{a.removesuffix(' %')}–{b}"


def _ci(found: dict[str, Any], q: str) -> tuple[float | None, float | None]:
    low, high = (found.get("ci") or {}).get(q) or (None, None)
    return low, high


def _with_ci(found: dict[str, Any], q: str) -> str:
    low, high = _ci(found, q)
    bounds = f" [{'?' if low is None else ms(low)} – {'?' if high is None else ms(high)}]"
    return "–" if found[q] is None else ms(found[q]) + bounds
