"""A timeline of one request, the p99 one, with those in flight beside it: whose prefill its tokens waited for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whywait.analyze.latency import OK, WITHHOLD, origin_ns, per_request
from whywait.analyze.phases import PHASES
from whywait.analyze.stalls import STALL_FACTOR
from whywait.analyze.streams import Gaps, gaps
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.report.lanes import chunk_times, draw, spans, stalls_of, told
from whywait.report.parts import chosen
from whywait.report.svg import Html, Plot, Scale, cat, details, legend, table, tag
from whywait.report.text import PHASE_NAMES
from whywait.report.view import Point, View, load_name
from whywait.units import NS_PER_MS, NS_PER_S, ms

MOST_NEIGHBOURS, MOST_TICKS = 16, 400
_OWN, _LANE = 26, 15


def neighbours(view: View) -> Html:
    """A timeline for each load point that is shown part by part; the one of most load stands open."""
    points = chosen(view)
    plain = [p for p in points if not view.marked(p)]
    return cat(_timeline(view, p, p is (plain or points)[-1]) for p in points)


def focus(one: Run, keep: Array) -> int | None:
    """Row of the request at p99 of end-to-end time among the ``ok`` ones of ``keep`` (of few: the slowest)."""
    e2e = per_request(one).e2e_ms
    mine = np.flatnonzero(keep & (one.requests["outcome"] == OK) & np.isfinite(e2e))
    if not len(mine):
        return None
    ranked = mine[np.argsort(e2e[mine], kind="stable")]
    return int(ranked[min(int(np.ceil(0.99 * len(ranked))), len(ranked) - 1)])


def beside(one: Run, row: int) -> list[int]:
    """Rows of the requests to the same replica that were in flight with ``row``, those longest beside it, by time."""
    req = one.requests
    begin, end = req["sent_ns"], np.where(np.isnan(req["end_ns"]), np.inf, req["end_ns"])
    overlap = np.minimum(end, end[row]) - np.maximum(begin, begin[row])
    there = (req["replica"] == req["replica"][row]) & (overlap > 0)
    there[row] = False
    rows = np.flatnonzero(there)
    kept = rows[np.argsort(-overlap[rows], kind="stable")][:MOST_NEIGHBOURS]
    return [int(j) for j in kept[np.argsort(begin[kept], kind="stable")]]


def _timeline(view: View, p: Point, open_: bool) -> Html:
    (one, c), spent = view.one(p), view.acc.phases[view.acc.point == p["point"]]
    origin, w = origin_ns(one), p["window"]
    row = focus(one, w["whole_point"] | ((origin >= w["start_ns"]) & (origin <= w["end_ns"])))
    if row is None or not spent[row].sum():
        return Html()
    rows, gap = [row, *beside(one, row)], longest_gap(one, gaps(c), row, spent)
    if gap is not None and gap.whose is not None and gap.whose not in rows:  # the one that it waited for is shown
        rows = [row, *sorted([*rows[1:MOST_NEIGHBOURS], gap.whose], key=lambda j: float(origin[j]))]
    begin = float(origin[row])
    end = begin + float(spent[row].sum())
    room = 0.03 * (end - begin)
    across = (begin - room, end - begin + 2 * room)
    plot = Plot(_OWN + 10 + (len(rows) - 1) * _LANE + 6, left=74, top=8)
    plot.x_axis(Scale(-room / NS_PER_MS, (end - begin + room) / NS_PER_MS), "ms since the request was due or sent", 8)
    g, stall = gaps(c), PHASES.index("stall")
    y = 0.0
    for j in rows:
        thick = _OWN if j == row else _LANE - 3
        label = f"#{one.requests['id'][j]}"
        plot.text((0, y + thick / 2 + 4), label, "label" if j == row else "tick", "end", -6)
        line = spent[j].tolist()
        plot.group(f"request {one.requests['id'][j]}, {ms(sum(line) / NS_PER_MS)}: {told(line)}")
        found = spans(line, float(origin[j]), float(one.requests["first_ns"][j]), stalls_of(g, j, line[stall]))
        draw(plot, found, across, (y, thick))
        plot.end_group()
        if j == row:
            for t in chunk_times(c, row, MOST_TICKS).tolist():
                x = (t - across[0]) / across[1]
                plot.line((x, y + thick), (x, y + thick + 5), "bound")
        y += _OWN + 10 if j == row else _LANE
    strokes = " Strokes are its chunks." if (c.row == row).any() else ""
    reading = _reading(one, row, spent[row], len(rows) - 1) + strokes + _gap_reading(one, gap, float(origin[row]))
    title = f"The p99 request and those beside it, at {load_name(p)}"
    seen = [k for k in PHASE_NAMES if spent[rows, PHASES.index(k)].any()]
    body = [tag("p", reading, class_="reading"), legend((f"f-{k}", PHASE_NAMES[k]) for k in seen),
            plot.svg(title, reading, f"beside-{p['point']}"), _table(one, rows, spent, load_name(p))]  # fmt: skip
    return details(title, cat(body), open_, "card lanes")


def _reading(one: Run, row: int, line: Array, others: int) -> str:
    total = float(line.sum()) / NS_PER_MS
    ranked = sorted(zip(line.tolist(), PHASES, strict=True), reverse=True)
    most = ", ".join(f"{PHASE_NAMES[k]} {ms(v / NS_PER_MS)}" for v, k in ranked[:3] if v)
    sent, end = one.requests["sent_ns"][row], one.requests["end_ns"][row]
    firsts = one.requests["first_ns"]
    began = int(((firsts > sent) & (firsts < end)).sum()) - int(np.isfinite(firsts[row]))
    more = f"{max(began, 0)} other{'' if began == 1 else 's'} got a first token meanwhile"
    drawn = (f"{others} of those beside it are drawn; {more}."
             if others else "No other was in flight beside it.")  # fmt: skip
    return f"Request {one.requests['id'][row]} took {ms(total)}: {most}. {drawn}"


class Gap(NamedTuple):
    """A long gap between chunks: from when (ns), how long, the usual length; whose prefill (row) lies in it for how
    long."""

    begin: float
    length: float
    usual: float
    whose: int | None
    shared: float

    @property
    def long(self) -> bool:
        return self.length >= STALL_FACTOR * self.usual


def longest_gap(one: Run, g: Gaps, row: int, spent: Array) -> Gap | None:
    """The longest gap between the chunks of ``row``, if it is a long one (:func:`gap_of`)."""
    found = gap_of(one, g, row, spent)
    return found if found is not None and found.long else None


def gap_of(one: Run, g: Gaps, row: int, spent: Array) -> Gap | None:
    """The longest gap between the chunks of ``row``, and if it is a long one whose prefill lies in it; prefills are
    taken to end at first tokens. None where most chunks came several in one read: only bounds of gaps are known."""
    a, b = np.searchsorted(g.row, [row, row + 1])
    if b - a < 2 or g.coalesced[a:b].mean() > WITHHOLD:
        return None
    at = a + int(np.argmax(g.value[a:b]))
    begin, length, usual = float(g.begin_ns[at]), float(g.value[at]), float(np.median(g.value[a:b]))
    if length < STALL_FACTOR * usual:
        return Gap(begin, length, usual, None, 0.0)
    first, req = one.requests["first_ns"], one.requests
    shared = np.minimum(first, begin + length) - np.maximum(first - spent[:, PHASES.index("prefill")], begin)
    shared = np.where((req["replica"] == req["replica"][row]) & np.isfinite(shared), shared, 0.0)
    shared[row] = 0.0
    most = int(np.argmax(shared))
    found = float(shared[most])
    return Gap(begin, length, usual, most if found > 0 else None, max(found, 0.0))


def _gap_reading(one: Run, gap: Gap | None, origin: float) -> str:
    if gap is None:
        return ""
    whose = ""
    if gap.whose is not None:
        tokens = one.requests["prompt_tokens"][gap.whose]
        of = "" if np.isnan(tokens) else f" ({int(tokens):,} prompt tokens)"
        whose = f", {ms(gap.shared / NS_PER_MS)} of it in the prefill of #{one.requests['id'][gap.whose]}{of}"
    after, length, usual = (ms(v / NS_PER_MS) for v in (gap.begin - origin, gap.length, gap.usual))
    return f" Its longest gap is {length}, {after} after its beginning, against {usual} usually{whose}."


def _table(one: Run, rows: list[int], spent: Array, where: str) -> Html:
    known = [k for k in PHASE_NAMES if spent[rows, PHASES.index(k)].any()]
    zero = float(origin_ns(one)[rows[0]])
    req = one.requests
    body = [[req["id"][j], f"{(req['sent_ns'][j] - zero) / NS_PER_S:+.3f} s",
             *(ms(float(spent[j, PHASES.index(k)]) / NS_PER_MS) for k in known),
             "–" if np.isnan(req["prompt_tokens"][j]) else int(req["prompt_tokens"][j])] for j in rows]  # fmt: skip
    head = ["request", "sent", *(PHASE_NAMES[k] for k in known), "prompt tokens"]
    return details(
        "Figures behind this timeline", table(head, body, f"The request at p99, then those beside it, at {where}")
    )
