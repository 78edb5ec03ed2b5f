"""What a good request costs at each load: energy, money by the offers that are given or shipped for its machine,
device time. The figures are those of ``analyze.bill``; here they are only drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from whywait.analyze.bill import Ask, bill, offered
from whywait.core.run import Run
from whywait.report.svg import Html, Plot, cat, clip, details, figure, scale_for, table, tag
from whywait.report.view import BEHIND, Point, View, load_name, signs
from whywait.units import number, percent

TITLE = "What a good request costs"
HOW = {"counter": "by energy counter", "power": "by integrated power", "modelled": "modelled, no meter was read"}
MOST_PANELS = 2  # side by side; the table has all
_ROW, _BAR = 27, 14


class Panel(NamedTuple):
    """A figure per good request: what it is called with its unit, its fill, and value, low, high and why by point."""

    name: str
    fill: str
    cells: dict[int, Mapping[str, Any]]

    def value(self, p: Point) -> float | None:
        found: float | None = self.cells.get(p["point"], {}).get("value")
        return found

    def per(self, watched: bool) -> str:
        """The name with what it is for; money is per 1,000 and its name says so."""
        one = "request" if watched else "good request"
        return self.name if self.fill == "f-frontend" else f"{self.name} per {one}"

    def apart(self, p: Point, q: Point) -> bool:
        """Whether the intervals at two points are known and leave no doubt that the first is less."""
        most, least = self.cells[p["point"]]["high"], self.cells[q["point"]]["low"]
        return most is not None and least is not None and bool(most < least)


def figures(run: Run, ask: Ask | None = None) -> dict[str, Any]:
    """The bill of ``run``, by the shipped offers for its machine where ``ask`` names none."""
    return bill(run, offered(run, ask))


def panels(found: Mapping[str, Any]) -> list[Panel]:
    """What the bill tells per good request (per request where only the engine's counters tell how many there were):
    energy, each offer's money (per 1,000), device time. Only what is known at some point."""
    points = {p["point"]: p for p in found["points"]}
    out = [Panel("energy, J", "f-decode", {n: _each(p["energy"]) for n, p in points.items()})]
    what = "1,000 requests" if _counted(found) else "1,000 good requests"
    for i, offer in enumerate(next(iter(points.values()))["money"] if points else ()):
        name = f"{offer['currency']} per {what} ({clip(offer['name'], 40)}, {offer['date']})"
        out.append(Panel(name, "f-frontend", {n: _thousand(p["money"][i]) for n, p in points.items()}))
    known = all(p["energy"]["devices"] for p in points.values())
    name = "device time, s" if known else "service time, s"
    out.append(Panel(name, "f-queue", {n: _taken(p, known) for n, p in points.items()}))
    return [p for p in out if any(c["value"] is not None for c in p.cells.values())]


def cost(view: View, found: Mapping[str, Any]) -> Html:
    """Bars of energy and the first offer's money per good request (else of time), a row per load point."""
    shown = panels(found)
    reading, behind = cost_reading(view, found, shown), _table(view, found)
    drawn = [p for p in view.drawn if any(x.value(p) is not None for x in shown)]
    if not drawn:
        return figure(TITLE, reading, [details(BEHIND, behind)], "cost")
    kinds = [x for i, x in enumerate(shown) if x.fill not in {y.fill for y in shown[:i]}][:MOST_PANELS]
    rows = [p for p in view.drawn if p["point"] in kinds[0].cells]
    plot = Plot(len(rows) * _ROW + (12 if view.marked(rows[-1]) else 0), left=62, right=8, top=26, bottom=4)
    plot.text((0, -10), view.axis, "tick", "end", -8)
    for k, kind in enumerate(kinds):
        _panel(view, plot, rows, (kind, k / len(kinds), 1 / len(kinds)), _counted(found))
    money = [x.name for x in shown if x.fill == "f-frontend"]
    more = f" {len(money) - 1} more offers, and the device time, are in the table." if len(money) > 1 else ""
    lines = "Lines: 95 % intervals, where the window is long enough to resample." + more
    body = [plot.svg(TITLE, reading, "cost"), signs(view), tag("p", _note(found, bool(money)), class_="note"),
            details(BEHIND, tag("p", lines, class_="note") + behind)]  # fmt: skip
    return figure(TITLE, reading, body, "cost")


def cost_reading(view: View, found: Mapping[str, Any], shown: list[Panel]) -> str:
    """The chart in a sentence: the first figure that is known, where it is least and where most."""
    first, watched = next(iter(shown), None), _counted(found)
    known = [p for p in view.plain if first and first.value(p) is not None]
    if view.passive and not known:
        return "No request was ours, so none can be charged; power stands in the timeline where it was read."
    if first is None or not known:
        why = next((w for p in found["points"] if (w := (p["work"]["why"] or {}).get("effective_tokens"))), None)
        return f"There is nothing good to charge: {why}." if why else "There is nothing good to charge."

    money = next((x for x in shown if x.fill == "f-frontend" and x is not first), None)
    cheap, dear = (f(known, key=lambda p: first.value(p) or 0.0) for f in (min, max))
    text = f"{_subject(first, watched)} {_amounts(first, money, cheap)} at {load_name(cheap)}"
    if dear is not cheap:
        times = (first.value(dear) or 0.0) / (first.value(cheap) or 1.0)
        if first.apart(cheap, dear):
            text += f", the least; {number(times)} times that at {load_name(dear)}"
        else:
            whose = [first.cells[p["point"]] for p in (cheap, dear)]
            open_ = any(c[k] is None for c in whose for k in ("low", "high"))
            why = "not both intervals are known" if open_ else "their intervals overlap"
            text += f" and {number(first.value(dear))} at {load_name(dear)}; {why}, so neither is called the cheaper"
    none = [load_name(p) for p in view.plain if first.value(p) is None and p["point"] in first.cells]
    text += "; by the engine's counters, how many were good is not known" if watched else ""
    text += f"; nothing{'' if watched else ' good'} to charge at {', '.join(none[:4])}." if none else "."
    lost = [(share, k, p) for p in found["points"] for k, share in (p["shares"][0]["spent_on"] or {}).items()
            if k != "good" and share and share >= 0.01]  # fmt: skip
    if lost:
        share, kind, p = max(lost, key=lambda x: x[0])
        where = next((load_name(q) for q in view.points if q["point"] == p["point"]), "one load")
        text += f" At {where} {percent(share)} went into {kind} requests."
    return text


def _subject(first: Panel, watched: bool) -> str:
    if first.fill == "f-frontend":
        return "Requests cost" if watched else "Good requests cost"
    return f"A {'' if watched else 'good '}request takes"


def _amounts(first: Panel, money: Panel | None, p: Point) -> str:
    """``43.8 J of energy and 0.0291 USD per 1,000 good requests``."""
    value, name = number(first.value(p)), first.name.split(" (")[0]
    text = f"{value} {name.split(', ')[1]} of {name.split(', ')[0]}" if ", " in name else f"{value} {name}"
    priced = None if money is None else money.value(p)
    return text if money is None or priced is None else f"{text} and {number(priced)} {money.name.split(' (')[0]}"


def _panel(view: View, plot: Plot, rows: list[Point], at: tuple[Panel, float, float], watched: bool) -> None:
    kind, left, width = at
    room, known = width * 0.62, [c for c in kind.cells.values() if c["value"] is not None]
    scale = scale_for([v for c in known for v in (c["value"], c["low"], c["high"])], zero=True)

    def x(value: float) -> float:
        return left + room * scale(value)

    plot.text(
        (left, -10), clip(kind.name.split(" (")[0].replace(" per ", "/"), 24) + (" (log)" if scale.log else ""), "tick"
    )
    apart = False
    for i, p in enumerate(rows):
        apart = apart or (view.marked(p) and i > 0)
        y = 2.0 + i * _ROW + (10 if apart else 0)
        if left == 0:
            plot.text((0, y + 13), view.short(p), "label", "end", -8)
        c = kind.cells[p["point"]]
        value, low, high = c["value"], c["low"], c["high"]
        if value is None:
            plot.text((left, y + 13), "–", "value")
            continue
        tip = f"{load_name(p)}: {_said(c)} {kind.per(watched)}"
        end = value if low is None else max(value, scale.high if high is None else high)
        if scale.log:  # a bar has no foot there: a mark on a line
            plot.line((left, y + 9), (left + room, y + 9), "rule")
            plot.mark((x(value), y + 9), "dot", kind.fill, tip)
        else:
            plot.rect((left, y + 2), (room * scale(value), _BAR), f"seg {kind.fill}", tip)
        if low is not None:
            plot.line((x(low), y + 9), (x(end), y + 9), "bound")
        text, at_ = number(value) + (" ?" if low is not None and high is None else ""), max(x(end), x(value))
        plot.text((left + room if scale.log else at_, y + 13), text, "value", dx=7)


def _counted(found: Mapping[str, Any]) -> bool:
    """Whether the service was only watched, and its own counters tell how many requests there were."""
    return any(p.get("counted") for p in found["points"])


def _each(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figure per good request, or per request of a service that was only watched."""
    told: Mapping[str, Any] | None = entry.get("by_counters")
    each: Mapping[str, Any] = entry["per_good_request"] if told is None else told["per_request"]
    return each


def _thousand(offer: Mapping[str, Any]) -> dict[str, Any]:
    each = _each(offer)
    return {**each, **{k: None if each[k] is None else 1000 * each[k] for k in ("value", "low", "high")}}


def _taken(p: Mapping[str, Any], known: bool) -> dict[str, Any]:
    """Devices × seconds of the window / good requests: what a price per device-hour is multiplied by. Of the whole
    service where it is not ``known`` how many serve."""
    told = p.get("counted")
    devices, good = p["energy"]["devices"] if known else 1, p["work"]["good_requests"]
    good = told["requests"]["value"] if told else good
    value = devices * p["window"]["seconds"] / good if good else None
    return {"value": value, "low": None, "high": None, "why": None if good else "there was none"}


def _said(c: Mapping[str, Any]) -> str:
    if c["value"] is None:
        return f"– ({c['why']})" if c.get("why") else "–"
    if c["low"] is None:
        return number(c["value"])
    return f"{number(c['value'])} [{number(c['low'])} – {'?' if c['high'] is None else number(c['high'])}]"


def _note(found: Mapping[str, Any], priced: bool) -> str:
    how = next((p["energy"]["how"] for p in found["points"] if p["energy"]["how"]), None)
    price = (
        "" if priced else " No price is known for this machine: whywait show RUN --html takes one (--price-per-hour)."
    )
    if how is None:
        return f"No energy meter of the devices was read.{price}"
    state = "fails" if any(p["energy"]["state"] == "fails" for p in found["points"]) else ""
    trust = " A check of it fails: see the table." if state else ""
    return f"Energy: {HOW[how]}. Failed and late requests are charged to the good.{trust}{price}"


def _table(view: View, found: Mapping[str, Any]) -> Html:
    shown, watched = panels(found), _counted(found)
    by, open_ = {p["point"]: p for p in found["points"]}, dict[str, list[str]]()
    rows = []
    for p in view.points:
        b = by.get(p["point"])
        if b is None:
            continue
        for c in b["energy"]["checks"]:
            if c["state"] != "holds":
                open_.setdefault(f"{c['what']}: {c['why']}", []).append(load_name(p))
        # Of a watched service nobody knows which requests were good: that none of ours was is no figure.
        work = [None if watched else b["work"][f"{k}_requests"] for k in ("good", "late", "failed")]
        rows.append([load_name(p), number(b["window"]["seconds"]), *map(number, work), number(b["energy"]["joules"]),
                     *(_said(x.cells[p["point"]]) for x in shown),
                     number(b["energy"]["per_million_effective_tokens"]["value"]),
                     b["energy"]["state"]])  # fmt: skip
    head = ["load", "window, s", "good", "late", "failed", "energy, J", *(x.per(watched) for x in shown),
            "J per million effective tokens", "energy to be believed?"]  # fmt: skip
    doubt = Html()
    if open_:  # below the table: a cell would cut it
        told = (f"{what} ({'every load' if len(at) == len(rows) else ', '.join(at)})" for what, at in open_.items())
        doubt = tag("p", f"Whether the energy is to be believed: {'; '.join(told)}.", class_="note")
    said = "no SLO was given: every ok request is good" if not found["slo"] else "good: ended well, within the SLO"
    said = "by the engine's counters, which do not tell good requests from others" if watched else said
    offers = [f"{o['name']}: {o['terms']}, {o['date']}, {o['source']}" for o in
              (found["points"][0]["money"] if found["points"] else ())]  # fmt: skip
    none = ("no offer is shipped for the machine of this run; whywait show RUN --html FILE --price-per-hour X "
            "--currency USD prices it")  # fmt: skip
    source = tag("p", "Prices: " + ("; ".join(offers) if offers else none) + ".", class_="note")
    figures_ = table(head, rows, f"{TITLE}, in the steady window; {said} [95 % interval]", "wide")
    return cat([figures_, doubt, source])
