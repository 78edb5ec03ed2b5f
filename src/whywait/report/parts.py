"""What parts of the requests wait for: bars by quantile of latency and by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from whywait.report.svg import Html, Plot, cat, clip, details, figure, legend, table, tag
from whywait.report.text import PHASE_NAMES
from whywait.report.view import BEHIND, VISIBLE, View, load_name
from whywait.units import ms, percent

MOST_POINTS = 4  # load points drawn; the tables have all
METRIC_NAMES = {"e2e_ms": "end-to-end time", "ttft_ms": "TTFT"}
_ROW, _BAR = 25, 17
_Point = dict[str, Any]


class _Bar(NamedTuple):
    """A row: its label and, before the first row of a load point, the point's name; mean ms by phase, with causes."""

    head: str
    label: str
    phases: dict[str, float]
    causes: dict[str, dict[str, float]]
    requests: int


def chosen(view: View) -> list[_Point]:
    """The points that are shown part by part: the least load, the knee, the most load, and those for other
    purposes."""
    plain = [p for p in view.plain if p["by_latency"]["e2e_ms"]]
    found = plain[:1] + [p for p in plain if p is view.knee] + plain[-1:]
    found += [p for p in view.points if view.marked(p) and p["by_latency"]["e2e_ms"]]
    return [p for i, p in enumerate(found) if not any(p is q for q in found[:i])][:MOST_POINTS]


def bands(view: View) -> Html:
    """Bars by quantile of end-to-end time and of TTFT: what the slowest wait for, beside what the median does."""
    return cat(_bands(view, metric, name) for metric, name in METRIC_NAMES.items())


def bands_reading(view: View, metric: str) -> str:
    """The bars in a sentence: what the slowest band has more of than the fastest half, at the load where it matters
    most."""
    best: tuple[float, str] = (0.0, "")
    for p in chosen(view):
        found = p["by_latency"][metric]
        if len(found) < 2 or not found[-1]["mean_ms"]:
            continue
        slow, usual = found[-1], found[0]
        added = {k: slow["phases"][k] - usual["phases"][k] for k in slow["phases"]}
        grown, top = slow["mean_ms"] - usual["mean_ms"], max(added, key=lambda k: added[k])
        if grown > max(best[0], 0.05 * usual["mean_ms"]):
            why = _main(slow["causes"].get(top, {}), slow["phases"][top])
            part = added[top] / grown
            much = "all of the difference" if part >= 0.95 else f"{percent(part)} of the difference"
            text = (f"At {load_name(p)} the slowest ({slow['band']}) take {ms(slow['mean_ms'])}, the faster half "
                    f"{ms(usual['mean_ms'])}: {much} is {PHASE_NAMES[top]}{why}.")  # fmt: skip
            best = (grown, text)
    if all(p[metric]["n"] < 2 for p in chosen(view)):
        return "Of a single request there are no slowest and no others."
    return best[1] or "The slowest requests wait for the same as the others."


def classes(view: View) -> Html:
    """Bars by class of request; nothing where all are of one class."""
    rows = [_Bar(load_name(p) if i == 0 else "", name, b["phases"], b["causes"], b["requests"])
            for p in chosen(view) for i, (name, b) in enumerate(p["by_class"].items())]  # fmt: skip
    if not rows:
        return Html()
    slow = max(rows, key=lambda r: sum(r.phases.values()))
    top = max(slow.phases, key=lambda k: slow.phases[k])
    whole = max(sum(slow.phases.values()), 1e-9)
    reading = (f"The longest mean time, {ms(whole)}, is of class “{slow.label}”; "
               f"{percent(slow.phases[top] / whole)} of it is {PHASE_NAMES[top]}.")  # fmt: skip
    return _figure("What each class waits for", reading, rows, "by-class")


def _bands(view: View, metric: str, name: str) -> Html:
    rows = [_Bar(load_name(p) if i == 0 else "", b["band"], b["phases"], b["causes"], b["requests"])
            for p in chosen(view) for i, b in enumerate(p["by_latency"][metric])]  # fmt: skip
    key, title = f"bands-{metric.removesuffix('_ms')}", f"What requests wait for, by quantile of {name}"
    if not rows:
        return figure(title, f"No request ended well with what {name} takes.", [], key)
    return _figure(title, bands_reading(view, metric), rows, key)


def _figure(title: str, reading: str, rows: Sequence[_Bar], key: str) -> Html:
    names = [k for k in PHASE_NAMES if any(r.phases.get(k, 0) > VISIBLE * sum(r.phases.values()) for r in rows)]
    longest = max(sum(r.phases.values()) for r in rows) or 1.0
    heads = sum(1 for r in rows if r.head)
    plot = Plot(len(rows) * _ROW + heads * 20, left=78, right=64, top=6, bottom=4)
    y = 0.0
    for r in rows:
        if r.head:
            plot.text((0, y + 13), r.head, "tick", "start", -78)
            y += 20
        total = sum(r.phases.values())
        plot.text((0, y + 12), clip(r.label, 10), "label", "end", -8)
        x = 0.0
        for k in names:
            width = r.phases.get(k, 0.0) / longest
            if width >= VISIBLE / 2:
                why = _main(r.causes.get(k, {}), r.phases[k])
                tip = f"{r.label}, {r.requests} requests: {PHASE_NAMES[k]} {ms(r.phases[k])}{why}"
                plot.rect((x, y), (width, _BAR), f"seg f-{k}", tip)
                if width >= 0.14:
                    plot.text((x + width / 2, y + 12.5), percent(r.phases[k] / total), f"ink i-{k}", "middle")
            x += width
        plot.text((total / longest, y + 13), ms(total), "value", dx=5)
        y += _ROW
    said = "Mean time of the requests of each row."
    if rows[0].label == "p0-50":
        said += " Of fewer than 100 requests p99+ is the slowest one."
    note = tag("p", said, class_="note")
    body = [legend((f"f-{k}", PHASE_NAMES[k]) for k in names), plot.svg(title, reading, key), note, _table(rows, title)]
    return figure(title, reading, body, key)


def _table(rows: Sequence[_Bar], title: str) -> Html:
    names = [k for k in PHASE_NAMES if any(r.phases.get(k) for r in rows)]
    head = ["load", "part", "requests", "mean", *(PHASE_NAMES[k] for k in names), "causes"]
    body, load = [], ""
    for r in rows:
        load = r.head or load
        causes = [f"{PHASE_NAMES[p]}: {c} {ms(v)}" for p, found in r.causes.items() for c, v in found.items()
                  if c != "unknown" and v >= 0.01 * sum(r.phases.values())]  # fmt: skip
        body.append([load, r.label, r.requests, ms(sum(r.phases.values())),
                     *(ms(r.phases.get(k, 0.0)) for k in names), "; ".join(causes) or "–"])  # fmt: skip
    return details(BEHIND, table(head, body, title))


def _main(causes: dict[str, float], total: float) -> str:
    known = {k: v for k, v in causes.items() if k != "unknown" and v >= 0.5 * total}
    return f" ({max(known, key=lambda k: known[k])})" if known else ""
