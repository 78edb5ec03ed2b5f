"""A timeline of one request, the p99 one, with those in flight beside it: whose prefill its tokens waited for."""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.latency import OK, content, gaps, origin_ns, per_request
from whywait.analyze.phases import PHASES
from whywait.analyze.stalls import STALL_FACTOR, typical_gaps
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.report.charts import View, load_name
from whywait.report.parts import chosen
from whywait.report.svg import Html, Plot, Scale, cat, details, legend, table, tag
from whywait.report.text import PHASE_NAMES
from whywait.units import NS_PER_MS, NS_PER_S, ms

MOST_NEIGHBOURS, MOST_TICKS = 16, 400
_OWN, _LANE = 26, 15
_BEFORE = ("client", "network", "frontend", "unknown", "queue", "prefill")


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


def _timeline(view: View, p: dict[str, Any], open_: bool) -> Html:
    one, spent = view.run.point(p["point"]), view.acc.phases[view.acc.point == p["point"]]
    origin, w = origin_ns(one), p["window"]
    row = focus(one, w["whole_point"] | ((origin >= w["start_ns"]) & (origin <= w["end_ns"])))
    if row is None or not spent[row].sum():
        return Html()
    rows = [row, *beside(one, row)]
    begin = float(origin[row])
    end = begin + float(spent[row].sum())
    room = 0.03 * (end - begin)
    scale = Scale((begin - room) / NS_PER_MS, (end + room) / NS_PER_MS)
    plot = Plot(_OWN + 10 + (len(rows) - 1) * _LANE + 6, left=74, top=8)
    plot.x_axis(Scale(-room / NS_PER_MS, (end - begin + room) / NS_PER_MS), "ms since the request was due or sent", 8)
    long, ticks = _gaps(one, rows)
    y = 0.0
    for j in rows:
        thick = _OWN if j == row else _LANE - 3
        label = f"#{one.requests['id'][j]}"
        plot.text((0, y + thick / 2 + 4), label, "label" if j == row else "tick", "end", -6)
        _lane(plot, one, j, (spent[j], float(origin[j])), (scale, y, thick, long[j]))
        if j == row:
            for t in ticks:
                x = scale(t / NS_PER_MS)
                plot.line((x, y + thick), (x, y + thick + 5), "bound")
        y += _OWN + 10 if j == row else _LANE
    reading = _reading(one, row, spent[row], len(rows) - 1)
    title = f"The p99 request and those beside it, at {load_name(p)}"
    seen = [k for k in PHASE_NAMES if spent[rows, PHASES.index(k)].any()]
    body = [tag("p", reading, class_="reading"), legend((f"f-{k}", PHASE_NAMES[k]) for k in seen),
            plot.svg(title, reading, f"beside-{p['point']}"), _table(one, rows, spent)]  # fmt: skip
    return details(title, cat(body), open_, "card")


def _lane(
    plot: Plot,
    one: Run,
    j: int,
    account: tuple[Array, float],
    at: tuple[Scale, float, float, list[tuple[float, float]]],
) -> None:
    (line, begin), (scale, y, thick, long) = account, at
    parts = dict(zip(PHASES, (int(v) for v in line), strict=True))
    first = one.requests["first_ns"][j]
    total, decoding = sum(parts.values()), parts["decode"] + parts["stall"]
    wait = int(first - begin) if np.isfinite(first) else total - decoding - parts["tail"]
    known = sum(parts[k] for k in _BEFORE if k != "unknown")
    unknown = min(max(wait - known, 0), parts["unknown"])
    order = [(k, unknown if k == "unknown" else parts[k]) for k in _BEFORE]
    order += [("decode", decoding), ("tail", parts["tail"]), ("unknown", parts["unknown"] - unknown)]
    took = ", ".join(f"{PHASE_NAMES[k]} {ms(v / NS_PER_MS)}" for k, v in parts.items() if v)
    plot.group(f"request {one.requests['id'][j]}, {ms(total / NS_PER_MS)}: {took}")
    t, spans = begin, []
    for name, length in order:
        spans.append((name, t, t + length))
        t += length
    left = float(parts["stall"])
    for a, b in sorted(long, key=lambda s: s[0] - s[1]):  # the longest first, until the stalled time is used up
        if left <= 0:
            break
        spans.append(("stall", max(a, b - left), b))
        left -= b - a
    for name, a, b in spans:
        x0, x1 = scale(a / NS_PER_MS), scale(b / NS_PER_MS)
        if x1 - x0 > 0.0005:
            plot.rect((x0, y), (x1 - x0, thick), f"f-{name}")
    plot.end_group()


def _gaps(one: Run, rows: list[int]) -> tuple[dict[int, list[tuple[float, float]]], list[float]]:
    """Where each row's long gaps exceed its usual one (ns), and when the chunks of the first row came."""
    c = content(one)
    g = gaps(c)
    typical = typical_gaps(g, len(one.requests), one.requests["point"])
    long: dict[int, list[tuple[float, float]]] = {j: [] for j in rows}
    at = np.flatnonzero((g.low > STALL_FACTOR * typical[g.row]) & np.isin(g.row, rows))
    for i in at:
        end = float(g.begin_ns[i] + g.low[i])
        long[int(g.row[i])].append((end - float(g.low[i] - typical[g.row[i]]), end))
    times = c.t[c.row == rows[0]]
    return long, times[:: max(1, -(-len(times) // MOST_TICKS))].tolist()


def _reading(one: Run, row: int, line: Array, others: int) -> str:
    total = float(line.sum()) / NS_PER_MS
    ranked = sorted(zip(line.tolist(), PHASES, strict=True), reverse=True)
    most = ", ".join(f"{PHASE_NAMES[k]} {ms(v / NS_PER_MS)}" for v, k in ranked[:3] if v)
    sent, end = one.requests["sent_ns"][row], one.requests["end_ns"][row]
    firsts = one.requests["first_ns"]
    began = int(((firsts > sent) & (firsts < end)).sum()) - int(np.isfinite(firsts[row]))
    drawn = (f"{others} of those beside it are drawn; {max(began, 0)} others got their first token meanwhile."
             if others else "No other was in flight beside it.")  # fmt: skip
    return f"Request {one.requests['id'][row]} took {ms(total)}: {most}. {drawn} Strokes are its chunks."


def _table(one: Run, rows: list[int], spent: Array) -> Html:
    known = [k for k in PHASE_NAMES if spent[rows, PHASES.index(k)].any()]
    zero = float(origin_ns(one)[rows[0]])
    req = one.requests
    body = [[req["id"][j], f"{(req['sent_ns'][j] - zero) / NS_PER_S:+.3f} s",
             *(ms(float(spent[j, PHASES.index(k)]) / NS_PER_MS) for k in known),
             "–" if np.isnan(req["prompt_tokens"][j]) else int(req["prompt_tokens"][j])] for j in rows]  # fmt: skip
    head = ["request", "sent", *(PHASE_NAMES[k] for k in known), "prompt tokens"]
    return details("Figures behind this timeline", table(head, body, "The request, then those beside it"))
