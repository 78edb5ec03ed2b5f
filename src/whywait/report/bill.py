"""The bill as text: energy and work, each offer, what it is shared among, and how far the energy may be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.analyze.bill import PER
from whywait.report.text import console
from whywait.units import load_name, number, percent

STYLE = {"holds": "green", "undecided": "yellow", "fails": "bold red"}
MILLION = ("per_million_effective_tokens", "per_million_answer_tokens", "per_million_output_tokens")
Figure = Mapping[str, Any]


def print_bill(found: Mapping[str, Any], out: Console | None = None) -> None:
    """``found`` is the dict of ``analyze.bill`` with ``run``, the folder."""
    out = out or console()
    if found["made_by"] == "simulated":
        out.print(Text("SIMULATED: energy and work are those of a model, no meter was read", style="bold"))
    slo = ", ".join(f"{k.removesuffix('_ms')} ≤ {v:g} ms" for k, v in found["slo"].items())
    out.print(Text(f"good: ended well{f' within {slo}' if slo else '; no SLO was given, so that every ok request is'}"))
    if found["partial"]:
        out.print(Text("PARTIAL: this run was cut short", style="bold yellow"))
    for p in found["points"]:
        _point(out, p)
    _sources(out, found)


def _point(out: Console, p: Mapping[str, Any]) -> None:
    w, e, work = p["window"], p["energy"], p["work"]
    head = load_name(p["mode"], p["target"], p["label"])
    whole = ", the whole point" if w["whole"] else ""
    out.print(Text(f"\n{head}: {number(w['seconds'])} s{whole}", style="bold"))
    late, failed = work["late_requests"], work["failed_requests"]
    out.print(Text(f"  {number(work['requests'])} requests: {number(work['good_requests'])} good, {number(late)} late, "
                   f"{number(failed)} failed; {number(work['effective_tokens'])} effective tokens"))  # fmt: skip
    out.print(Text(f"  energy {_energy(e)}"))
    share = p["shares"][0]
    lost = {k: v for k, v in (share["spent_on"] or {}).items() if k != "good" and v}
    if lost:
        said = " and ".join(f"{percent(v)} on {k} requests" for k, v in lost.items())
        charged = "charged to the good" if share["spent_on"]["good"] else "with nothing good to charge it to"
        out.print(Text(f"  of it {said} (by {share['rule']}), {charged}"))
    if e["joules"] is not None or p["money"]:
        out.print(_figures(p))
    for why in dict.fromkeys(_whys(p)):
        out.print(Text(f"  – {why}", style="dim"))
    _shares(out, p)
    _validity(out, e)


def _energy(e: Mapping[str, Any]) -> str:
    if e["joules"] is None:
        return "not known"
    label = {"counter": "by counter", "power": "by integrated power", "modelled": "MODELLED"}
    host = "host in it" if e["host_joules"] is not None else "without the host"
    idle = e["idle"]
    said = "" if idle["share"] is None else f"; {percent(idle['share'])} of the devices' is idle power ({idle['how']})"
    many = e["read"] or e["devices"]
    return (f"{number(e['joules'])} J {label[e['how']]}, {number(e['watts'])} W in the mean, {many} "
            f"device{'' if many == 1 else 's'}, {host}{said}")  # fmt: skip


def _figures(p: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    for name in ("per", "1,000 good", "95 %", "M effective", "95 %", "M answer", "M raw", "gap"):
        band = name == "95 %"
        table.add_column(name, justify="left" if band or name == "per" else "right", no_wrap=name != "per",
                         style="dim" if band else "")  # fmt: skip
    e = p["energy"]
    if e["joules"] is not None:
        table.add_row("energy, kJ", *_cells(e, 1e-3))
    for m in p["money"]:
        table.add_row(f"{m['currency']}, {m['name']}", *_cells(m, 1.0))
    return table


def _cells(f: Mapping[str, Figure], unit: float) -> list[str]:
    request, effective = f["per_good_request"], f["per_million_effective_tokens"]
    raw, value = f["per_million_output_tokens"]["value"], effective["value"]
    gap = f"{value / raw:.2f} ×" if raw and value else "–"
    return [
        _value(request, 1000 * unit), _band(request, 1000 * unit), _value(effective, unit), _band(effective, unit),
        *(_value(f[k], unit) for k in MILLION[1:]), gap,
    ]  # fmt: skip


def _value(f: Figure, by: float) -> str:
    return number(None if f["value"] is None else f["value"] * by)


def _band(f: Figure, by: float) -> str:
    if f["low"] is None:
        return ""
    low, high = number(f["low"] * by), number(None if f["high"] is None else f["high"] * by)
    return f"{low}–{high if f['high'] is not None else '?'}" if low != high else ""


def _whys(p: Mapping[str, Any]) -> list[str]:
    """Why figures are missing, once per reason; the totals are stated."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for entry in (p["energy"], *p["money"]):
        total, unit = entry.get("total", entry.get("joules")), entry.get("currency", "J")
        for k in PER:
            if entry[k]["why"]:
                names, totals = found.setdefault(entry[k]["why"], ({}, {}))
                names[k.replace("_", " ")] = None
                if total is not None:
                    totals[f"{number(total)} {unit}"] = None
    return [f"no figure {', '.join(names)}: {why}{'; in all ' if totals else ''}{', '.join(totals)}"
            for why, (names, totals) in found.items()]  # fmt: skip


def _shares(out: Console, p: Mapping[str, Any]) -> None:
    share = p["shares"][0]
    if share["why"]:
        out.print(Text(f"  not shared by {share['rule']}: {share['why']}", style="dim"))
        return
    for title, rows in (("class", share["by_class"]), ("prompt tokens", share["by_prompt"])):
        if len(rows) > 1:
            out.print(_rows(f"{title}, by {share['rule']}", rows, p["money"]))


def _rows(title: str, rows: Sequence[Mapping[str, Any]], money: Sequence[Mapping[str, Any]]) -> Table:
    priced = next((m for m in money if m["total"] is not None), None)
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    table.add_column(title)
    names = ["requests", "good", "kJ", "kJ/1,000 good", "kJ/M effective"]
    if priced:
        names += [f"{priced['currency']}/1,000 good", f"{priced['currency']}/M effective"]
    for name in names:
        table.add_column(name, justify="right")
    for r in rows:
        paid = r["money"].get(priced["name"]) if priced else None
        cells = [
            number(r["requests"]), number(r["good_requests"]), _kilo(r["nanojoules"], 1e-12),
            _kilo(r["j_per_good_request"], 1.0), _kilo(r["j_per_million_effective_tokens"], 1e-3),
        ]  # fmt: skip
        if priced:
            each, million = "per_good_request", "per_million_effective_tokens"
            cells += [_kilo(paid and paid[each], 1e3), _kilo(paid and paid[million], 1.0)]
        table.add_row(r["name"], *cells)
    return table


def _kilo(value: float | None, by: float) -> str:
    return number(None if value is None else value * by)


def _validity(out: Console, e: Mapping[str, Any]) -> None:
    out.print(Text.assemble("  is the energy to be believed? ", (e["state"], STYLE[e["state"]])))
    for c in e["checks"]:
        if c["state"] != "holds":
            out.print(Text(f"    {c['state']}: {c['what']}: {c['why']}", style="dim"))
    held = [c["what"] for c in e["checks"] if c["state"] == "holds"]
    if held:
        out.print(Text(f"    holds: {', '.join(held)}", style="dim"))


def _sources(out: Console, found: Mapping[str, Any]) -> None:
    offers = found["points"][0]["money"] if found["points"] else []
    out.print()
    if not offers:
        known = f"no offer for {found['machine']} is shipped" if found["machine"] else "the run names no known machine"
        out.print(Text(f"no price: {known} (--price-per-hour … --currency …, --owned …, --price FILE)", style="dim"))
    for m in offers:
        note = f"; {m['note']}" if m["note"] else ""
        price = f"{number(m['per_device_hour'])} {m['currency']} per device-hour of use"
        if m["per_kwh"] is not None:
            price += f", and {number(m['per_kwh'])} {m['currency']} per kWh drawn (PUE in it)"
        out.print(Text(f"{m['name']} ({m['terms']}, {m['date']}): {price}; {m['source']}{note}", style="dim"))
    out.print(f"run: {escape(str(found['run']))}")
