"""Timelines of a load point: a lane per request in flight, and below, over the same time, what was read beside them.

Drawn without any script; ``zoom.js`` makes of them what one can zoom, by the data that :func:`data` leaves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from whywait.analyze.latency import origin_ns
from whywait.analyze.phases import PHASES
from whywait.analyze.streams import gaps
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.report import lanes, strips, svg
from whywait.report.neighbours import gap_of
from whywait.report.svg import Html, Plot, Scale, cat, clip, details, table, tag
from whywait.report.text import PHASE_NAMES
from whywait.report.view import Point, View, load_name
from whywait.units import NS_PER_MS, NS_PER_S, NS_PER_US, ms, percent

MOST_REQUESTS, MOST_LANES = 240, 80
MOST_IN_ALL, LEAST_REQUESTS = 2_400, 60  # of all points together; and of each, however many there are
LEAST_SHARE = 0.001  # a smaller share of the time is not named
MOST_CHUNKS, MOST_STAMPS = 400, 150_000  # stamps kept for zooming, of one request and of the whole page


class Drawn(NamedTuple):
    """The requests of a point that are drawn: their rows and lanes, when each began, its spans; the time that all
    take (ns), the zero of the axis, and the panels below."""

    point: Point
    one: Run
    rows: list[int]
    lane: dict[int, int]
    begin: Array
    spans: dict[int, lanes.Spans]
    span: tuple[float, float]
    zero: float
    strips: list[strips.Strip]

    @property
    def thick(self) -> int:
        """Height of a lane, px."""
        return min(max(round(300 / max(len(set(self.lane.values())), 1)), 4), 16)

    def share(self, t_ns: float) -> float:
        return min(max((t_ns - self.span[0]) / max(self.span[1] - self.span[0], 1.0), 0.0), 1.0)


def timelines(view: View) -> tuple[Html, list[Drawn]]:
    """A timeline per point that is drawn; the one of most load stands open."""
    shown = view.drawn
    first = next((p for p in reversed(shown) if not view.marked(p)), None)
    most = min(MOST_REQUESTS, max(MOST_IN_ALL // max(len(shown), 1), LEAST_REQUESTS))
    found = [_drawn(view, p, most) for p in shown]
    text = (f"A lane per request in flight, at most {most} requests of a point in {MOST_LANES} lanes (a "
            f"stretch of the steady window, not a choice), at {len(shown)} of {len(view.points)} points. How long each "
            "phase took is known; their order before the first token is assumed, and stalls lie at the "
            f"longest gaps, {lanes.MOST_STALLS} of a request at most.")  # fmt: skip
    if view.passive:
        text = "No request was ours: what was read of the service, over the time that was watched."
    body = cat(_timeline(view, d, d.point is first) for d in found)
    return tag("p", text, class_="note") + body, [d for d in found if d.rows]


def _drawn(view: View, p: Point, most: int) -> Drawn:
    (one, c), spent = view.one(p), view.acc.phases[view.acc.point == p["point"]]
    begin = origin_ns(one)
    begin = np.where(np.isnan(begin), one.requests["sent_ns"], begin)
    end = begin + spent.sum(axis=1)
    rows = [int(j) for j in np.argsort(begin, kind="stable") if end[j] > begin[j]]
    if len(rows) > most:  # from the steady window on, as far as there are enough
        at = min(int(np.searchsorted(begin[rows], p["window"]["start_ns"])), len(rows) - most)
        rows = rows[at : at + most]
    place = {rows[i]: k for i, k in svg.lanes([(begin[j], end[j]) for j in rows], MOST_LANES).items()}
    rows = list(place)
    zero = float(one.points["start_ns"][0])
    span = (float(begin[rows].min()), float(end[rows].max())) if rows else (zero, float(one.points["end_ns"][0]))
    stall, first = PHASES.index("stall"), one.requests["first_ns"]
    g = gaps(c) if rows and spent[rows, stall].any() else None
    found = {j: lanes.spans(spent[j].tolist(), float(begin[j]), float(first[j]),
                            lanes.stalls_of(g, j, int(spent[j, stall]))) for j in rows}  # fmt: skip
    one = dataclasses.replace(one)  # without all that was made of it, which would stay in memory with it
    return Drawn(p, one, rows, place, begin, found, span, zero, strips.strips(view.run, one, span))


def _timeline(view: View, d: Drawn, open_: bool) -> Html:
    p = d.point
    if not d.rows and not d.strips:
        said = "No request of this point has the stamps that it takes to draw it."
        return details(load_name(p), tag("p", said), open_, "card")
    spent = view.acc.phases[view.acc.point == p["point"]]
    count = len(set(d.lane.values()))
    top = count * d.thick
    plot = Plot(top + strips.heights(d.strips) + 4, top=8)
    plot.group(class_="x-axis")
    low, high = ((t - d.zero) / NS_PER_S for t in d.span)
    plot.x_axis(Scale(low, high), "seconds since the point began", 8)
    plot.end_group()
    ids, outcomes = d.one.requests["id"], d.one.requests.text("outcome")
    for j in d.rows:
        total = float(spent[j].sum())
        tip = f"request {ids[j]} ({outcomes[j]}), {ms(total / NS_PER_MS)}: {lanes.told(spent[j].tolist())}"
        plot.group(tip, data_r=ids[j])
        y = d.lane[j] * d.thick
        lanes.draw(plot, d.spans[j], (d.span[0], d.span[1] - d.span[0]), (y + 0.5, d.thick - 1))
        if outcomes[j] != "ok":
            plot.mark((d.share(d.begin[j] + total), y + d.thick / 2), "cross", "cross", outcomes[j])
        plot.end_group()
    strips.draw(plot, d.strips, top, d.share)
    shares = _shares(spent, d.rows)
    reading = _reading(d, len(spent), shares)
    drawn = plot.svg(f"Timeline at {load_name(p)}", reading, f"time-{p['point']}")
    words = svg.legend((f"f-{k}", PHASE_NAMES[k]) for v, k in shares if v >= LEAST_SHARE)
    body = [tag("p", reading, class_="reading"), words,
            tag("div", drawn, class_="timeline", id=f"timeline-{p['point']}", data_point=p["point"]),
            _derived(p, shares), *_tables(view, d, spent)]  # fmt: skip
    return details(load_name(p), cat(body), open_, "card lanes")


def _shares(spent: Array, rows: list[int]) -> list[tuple[float, str]]:
    whole = float(spent[rows].sum()) if rows else 0.0
    if not whole:
        return []
    return sorted(zip((spent[rows].sum(axis=0) / whole).tolist(), PHASES, strict=True), reverse=True)


def _reading(d: Drawn, all_: int, shares: list[tuple[float, str]]) -> str:
    low, high = ((t - d.zero) / NS_PER_S for t in d.span)
    text = f"From {low:.1f} to {high:.1f} s."
    if d.rows:
        largest = ", ".join(f"{PHASE_NAMES[k]} {percent(v)}" for v, k in shares[:3] if v >= LEAST_SHARE)
        count = len(set(d.lane.values()))
        in_lanes = f"in {count} lane{'' if count == 1 else 's'}"
        text = (f"{len(d.rows)} of {all_} requests drawn, from {low:.1f} to {high:.1f} s, {in_lanes}; of their time "
                f"{largest}.")  # fmt: skip
    return f"{text} {strips.strips_reading(d.strips)}".rstrip()


def _derived(p: Point, shares: list[tuple[float, str]]) -> Html:
    """Of a point more may be known (by histograms) than of each of its requests."""
    unknown = next((v for v, k in shares if k == "unknown"), 0.0)
    told = [f"{PHASE_NAMES[k]} {percent(v['share'])}" for k, v in p["phases"].items()
            if v["how"] == "derived" and (v["share"] or 0) >= 0.01]  # fmt: skip
    if unknown < 0.05 or not told:
        return Html()
    said = "What is not explained of single requests is known of all together, by the engine's histograms"
    return tag("p", f"{said}: {', '.join(told)}.", class_="note")


def _tables(view: View, d: Drawn, spent: Array) -> list[Html]:
    out = []
    if d.strips:
        out.append(details("Figures behind the panels", strips.strips_table(d.strips, d.zero, load_name(d.point))))
    if d.rows:
        how = view.acc.how[d.point["point"]]
        known = {k: PHASES.index(k) for k in PHASE_NAMES if how[k] != "unknown" or spent[:, PHASES.index(k)].any()}
        rows = d.rows
        body = [[r["id"], clip(r["class"] or "–"), f"{(d.begin[j] - d.zero) / NS_PER_S:.2f} s", r["outcome"],
                 *(ms(float(spent[j, k]) / NS_PER_MS) for k in known.values()), str(r["output_tokens"] or "–")]
                for j, r in zip(rows, d.one.requests.where(np.array(rows)).rows(), strict=True)]  # fmt: skip
        title = f"The requests drawn at {load_name(d.point)}"
        head = ["request", "class", "at", "outcome", *(PHASE_NAMES[k] for k in known), "tokens"]
        out.append(details(title, table(head, body, title, "tall"), class_="data noprint"))
    return out


def data(view: View, found: list[Drawn]) -> dict[str, Any]:
    """What zooming needs: per point its name, time (s) and lanes; per request its facts, spans (phase, from, length),
    when its chunks came, its account (by phase), and its longest gap (from, length, the usual, whose prefill lies in
    it and for how long); times in whole µs after the first instant that is drawn."""
    each = min(MOST_CHUNKS, max(MOST_STAMPS // max(sum(len(d.rows) for d in found), 1), 16))
    return {"phases": [[k, PHASE_NAMES[k]] for k in PHASES], "points": [_point(view, d, each) for d in found]}


def _point(view: View, d: Drawn, most: int) -> dict[str, Any]:
    c, zero, spent = view.one(d.point)[1], d.span[0], view.acc.phases[view.acc.point == d.point["point"]]
    g = gaps(c)
    req, outcomes = d.one.requests, d.one.requests.text("outcome")

    def us(t_ns: float) -> int:
        return round((t_ns - zero) / NS_PER_US)

    def gap(j: int) -> list[int | None] | None:
        found = gap_of(d.one, g, j, spent)
        if found is None:
            return None
        whose = None if found.whose is None else int(req["id"][found.whose])
        took = (round(v / NS_PER_US) for v in (found.length, found.usual, found.shared))
        return [us(found.begin), *took, whose]

    rows = []
    for j in d.rows:
        spans = [v for k, a, b in d.spans[j] for v in (PHASES.index(k), us(a), us(b) - us(a))]
        stamps = [us(t) for t in lanes.chunk_times(c, j, most).tolist()]
        chunks = np.diff(np.array([0, *stamps])).tolist()  # each after the one before
        tokens = [None if np.isnan(req[k][j]) else int(req[k][j]) for k in ("prompt_tokens", "output_tokens")]
        count = int(np.searchsorted(c.row, j + 1) - np.searchsorted(c.row, j))
        rows.append([int(req["id"][j]), d.lane[j], us(d.begin[j]), outcomes[j], clip(req["class"][j] or "", 40),
                     int(req["replica"][j]), *tokens, count, spans, chunks,
                     [round(v / NS_PER_US) for v in spent[j].tolist()], gap(j)])  # fmt: skip
    return {"point": d.point["point"], "name": load_name(d.point), "from_s": (zero - d.zero) / NS_PER_S,
            "us": us(d.span[1]), "thick": d.thick, "requests": rows}  # fmt: skip
