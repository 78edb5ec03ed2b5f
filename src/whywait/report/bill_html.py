"""The page of a bill: its sentence, a table per load point, whether the energy may be believed, who it was spent on,
and every offer with currency, date and source. Stands alone, no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whywait.report import bill as text
from whywait.report.page import Top, frame
from whywait.report.svg import Html, cat, clip, details, tag
from whywait.report.svg import table as svg_table
from whywait.units import number, percent

#: Of a check: words and the colour of a state; on the pages of verdicts it is a bottleneck that holds, here a figure.
STATES = {"holds": ("● Holds", "fails"), "undecided": ("◐ Undecided", "undecided"), "fails": ("○ Fails", "holds")}


def render(found: Mapping[str, Any]) -> str:
    """The page of ``deciding.bill``."""
    points = found["points"]
    parts = [
        ("costs", "What it costs", _all(points) + _each(points, _costs)),
        ("energy", "May the energy be believed?", _each(points, _believed)),
        ("shares", "Who it was spent on", _each(points, _shares)),
        ("offers", "Prices", _offers(found)),
        ("meters", "What was read", _each(points, _meters)),
        ("repeat", "To make it again", _again(found)),
    ]
    watched = bool(points) and all(p["counted"] for p in points)
    banners = []
    if found["made_by"] == "simulated":
        banners.append(tag("strong", "SIMULATED") + ": energy and work are those of a model, no meter was read.")
    if found["partial"]:
        banners.append(tag("strong", "PARTIAL") + ": this run was cut short.")
    about = [] if watched else [text.good_is(found)]
    about.append(f"run: {clip(found['run'], 160)}" if found["run"] else "")
    top = Top("whywait bill", found["headline"], " · ".join(filter(None, about)), tuple(banners))
    return frame(top, parts, f"whywait {found['whywait_version']}, definitions {found['definitions']}")


def _each(points: Sequence[Mapping[str, Any]], body: Any) -> Html:
    """A body per load point, under its name; what has none is left out."""
    found = [(p, made) for p in points if (made := body(p))]
    if not found:
        return tag("p", "Nothing of this is known.")
    return cat(tag("article", tag("h3", _head(p)) + made, class_="card") for p, made in found)


def _head(p: Mapping[str, Any]) -> str:
    whole = ", the whole point" if p["window"]["whole"] and not p["counted"] else ""
    return f"{text._name(p)}: {number(p['window']['seconds'])} s{whole}"


def _list(lines: Iterable[str]) -> Html:
    items = [tag("li", line) for line in lines]
    return tag("ul", cat(items)) if items else Html()


def _all(points: Sequence[Mapping[str, Any]]) -> Html:
    """Of several load points one table, to see which is the cheapest."""
    if len(points) < 2 or any(p["counted"] for p in points):
        return Html()
    offers = [m["name"] for m in points[0]["money"]]
    head = ["load", "good", "kJ per 1,000 good", *(f"{m['currency']} per 1,000 good, {m['name']}" for m in
                                                   points[0]["money"]), "the energy"]  # fmt: skip
    rows = []
    for p in points:
        entries = [(p["energy"], 1.0), *((m, 1000.0) for m in p["money"])]
        cells = [text._value(entry["per_good_request"], by) for entry, by in entries]
        w, whole = p["work"], p["work"]["requests"]
        good = percent(w["good_requests"] / whole) if whole else "–"
        rows.append([text._name(p), good, *cells[: len(offers) + 1], STATES[p["energy"]["state"]][0]])
    return svg_table(head, rows, "All load points")


def _costs(p: Mapping[str, Any]) -> Html:
    said = [*text.work_lines(p), f"energy {text.energy_line(p['energy'])}", *text.lost_lines(p)]
    rows = text.cost_rows(p)
    head = text.COUNTED_HEAD if p["counted"] else text.HEAD
    told = svg_table(head, rows, f"Costs at {text._name(p)}") if rows else Html()
    note = Html() if p["counted"] else tag("p", text.LEGEND, class_="note")
    return _list(said) + told + _list(text.why_lines(p)) + (note if rows else Html())


def _believed(p: Mapping[str, Any]) -> Html:
    e = p["energy"]
    said, look = STATES[e["state"]]
    rows = [[c["what"], tag("span", STATES[c["state"]][0], class_=f"state {STATES[c['state']][1]}"), c["why"]]
            for c in e["checks"]]  # fmt: skip
    lead = tag("p", f"{said}: {text.BELIEVED[e['state']]}", class_=f"state {look}")
    return lead + svg_table(["is it so?", "state", "why"], rows, f"Checks at {text._name(p)}", "text")


def _shares(p: Mapping[str, Any]) -> Html:
    if p["counted"]:
        return Html()
    share = p["shares"][0]
    if share["why"]:
        return tag("p", f"Not shared by {share['rule']}: {share['why']}.")
    out = []
    spent = share["spent_on"] or {}
    if spent:
        parts = [f"{percent(v)} on {text.ON[k]}" for k, v in spent.items() if v or k not in text.CUT]
        out.append(tag("p", "Of the energy: " + ", ".join(parts)))
    for title, rows in text.share_tables(p):
        out.append(svg_table(rows[0], rows[1:], f"By {title}, shared by {share['rule']}"))
    if len(out) < 2:
        out.append(tag("p", "All requests are of one class and one length of prompt."))
    return cat(out)


def _offers(found: Mapping[str, Any]) -> Html:
    offers = found["points"][0]["money"] if found["points"] else []
    if not offers:
        return tag("p", text.no_offer(found))
    head = ["offer", "terms", "a device-hour of use", "a kWh drawn, with PUE", "currency", "date", "source", "note"]
    rows = [[m["name"], m["terms"], number(m["per_device_hour"]),
             "in the hour's price" if m["per_kwh"] is None else number(m["per_kwh"]), m["currency"], m["date"],
             m["source"], m["note"] or "–"] for m in offers]  # fmt: skip
    lines = []
    for p in found["points"]:
        for m in p["money"]:
            items = ", ".join(f"{k} {number(v)}" for k, v in m["items"].items())
            total = number(m["total"]) if m["why"] is None else f"not known ({m['why']})"
            hours = f"{number(m['device_hours'])} device-hours" if m["device_hours"] is not None else "–"
            lines.append([f"{m['name']}, {text._name(p)}", hours, items or "–", total, m["currency"]])
    sums = svg_table(["offer and load", "used", "items", "total of the window", "currency"], lines, "What was paid")
    return svg_table(head, rows, "Offers: none is converted or averaged", "text") + details("What was paid", sums)


def _meters(p: Mapping[str, Any]) -> Html:
    e = p["energy"]
    if not e["parts"]:
        return Html()
    rows = [[m["name"], m["scope"], m["how"] or "–", number(m["joules"]), f"{number(m['low'])} – {number(m['high'])}",
             percent(m["covered"]), m["samples"], m["why"] or "–"] for m in e["parts"]]  # fmt: skip
    head = ["meter", "of", "how", "J", "bounds, J", "of the window", "samples", "note"]
    by = e["devices_by"] or "as many as were busy"
    many = "not known" if e["devices"] is None else f"{e['devices']} ({by})"
    return tag("p", f"Devices that serve: {many}.") + svg_table(head, rows, f"Meters at {text._name(p)}")


def _again(found: Mapping[str, Any]) -> Html:
    command = f"whywait bill {found['run'] or 'RUN'} --html bill.html"
    said = "with the same flags gives the same figures; --json has all of them, and the shares by every rule."
    return tag("p", tag("code", command) + f" {said}")
