"""The stacked bars with a row per load point: what requests wait for, and what the device does. Each has its table and
its reading in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from whywait.report.svg import Html, Plot, cat, clip, details, figure, legend, table, tag
from whywait.report.text import DEVICE_NAMES, PHASE_NAMES
from whywait.report.view import BEHIND, VISIBLE, Point, View, from_to, load_name, signs
from whywait.units import ms, percent

_ROW, _BAR = 27, 18


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
    ("share of device time", 1, "busy, bounds"), 0.7)  # fmt: skip


def phases(view: View) -> Html:
    """Mean request time by phase, as shares and in milliseconds, a row per load point."""
    longest = max((_total(p) for p in view.points), default=0.0)

    def times(plot: Plot, y: float, p: Point, parts: list[tuple[str, float, str]]) -> None:
        width = 0.19 * _total(p) / longest if longest else 0.0
        _bar(plot, (0.61, y), width, parts, False)
        plot.text((0.61 + width, y + 13), ms(_total(p)), "value", dx=5)

    note = "Mean over the requests that began in the window; small: how each is known, and its causes."
    return _stack(view, _PHASES, phases_reading(view), times, note)


def phases_reading(view: View) -> str:
    """The chart of phases in a sentence or two."""
    seen = [p for p in view.plain if p["phases"] and _total(p)]
    if not seen:
        return "No request left the stamps that it takes to account for its time."
    a, b = seen[0], seen[-1]
    if len(seen) == 1:
        text = f"At {load_name(a)} a request takes {ms(_total(a))} on average: {_largest(a, _PHASES)}."
    elif _total(b) < 1.1 * _total(a):
        text = f"From {from_to(a, b)} a request's mean time stays near {ms(_total(b))}: {_largest(b, _PHASES)}."
    else:
        added = {k: (b["phases"][k]["ms"] or 0) - (a["phases"].get(k, {}).get("ms") or 0) for k in b["phases"]}
        top = max(added, key=lambda k: added[k])
        part = added[top] / (_total(b) - _total(a))
        much = "the added time is" if part >= 0.95 else f"{percent(part)} of the added time is"
        text = (f"From {from_to(a, b)} a request's mean time grows from {ms(_total(a))} to {ms(_total(b))}; "
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

    def bounds(plot: Plot, y: float, p: Point, _parts: list[tuple[str, float, str]]) -> None:
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


# parts shared by the charts


def _stack(view: View, kind: _Stack, reading: str, right: Callable[..., None], note: str) -> Html:
    """Bars of shares, a row per point; ``right`` draws what stands beside each."""
    rows = [p for p in view.drawn if any(share for share, _ in _cells(p, kind.group).values())]
    shares = [{k: share or 0.0 for k, (share, _) in _cells(p, kind.group).items()} for p in rows]
    names = [k for k in kind.fill if any(s.get(k, 0.0) >= VISIBLE for s in shares)]
    behind = _points_table(view, kind)
    if not names:
        return figure(kind.title, reading, [details(BEHIND, behind)], kind.group)
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
            signs(view), _unseen(rows, kind), details(BEHIND, tag("p", note, class_="note") + behind)]  # fmt: skip
    return figure(kind.title, reading, body, kind.group)


def _bar(
    plot: Plot, at: tuple[float, float], width: float, parts: Iterable[tuple[str, float, str]], words: bool
) -> None:
    x, y = at
    for fill, share, tip in parts:
        if share >= VISIBLE:
            plot.rect((x, y), (share * width, _BAR), f"seg f-{fill}", tip)
            if words and share * width >= 0.1:
                plot.text((x + share * width / 2, y + 13), percent(share), f"ink i-{fill}", "middle")
            x += share * width


def _total(p: Point) -> float:
    return float(sum(v["ms"] or 0.0 for v in p["phases"].values()))


def _cells(p: Point, group: str) -> dict[str, tuple[float | None, str]]:
    """Share and how it is known of each phase or category of a point."""
    if group == "phases":
        return {k: (v["share"], v["how"]) for k, v in p["phases"].items()}
    return {k: (v, p["occupancy"]["how"][k]) for k, v in p["occupancy"]["shares"].items()}


def _cell(p: Point, kind: _Stack, k: str) -> list[str]:
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
    head = ["load", *kind.names.values(), "sum" if times else "busy, bounds"]
    return table(head, rows, f"{kind.title}, by load point: {what}")


def _unseen(points: list[Point], kind: _Stack) -> Html:
    """Names what nothing here could have shown: its time, if any, is in 'not explained'."""
    cells = [_cells(p, kind.group) for p in points]
    blind = [v for k, v in kind.names.items() if k != "unknown" and all(c.get(k, (None,))[0] is None for c in cells)]
    said = f"Not visible with what was told: {' · '.join(blind)}. Such time is in “not explained”."
    return tag("p", said, class_="note") if blind else Html()


def _largest(p: Point, kind: _Stack) -> str:
    shares = sorted(((s, k) for k, (s, _) in _cells(p, kind.group).items() if s), reverse=True)
    return ", ".join(f"{kind.names[k]} {percent(s)}" for s, k in shares[:2] if s >= 0.05) or "–"


def _cause(p: Point, phase: str) -> str:
    causes = {k: v for k, v in p["phases"][phase]["causes"].items() if k != "unknown" and v >= 0.5}
    return f" ({max(causes, key=lambda k: causes[k])})" if causes else ""


def _span(low: float | None, high: float | None) -> str:
    a, b = percent(low), percent(high)
    return a if a == b else f"{a.removesuffix(' %')}–{b}"
