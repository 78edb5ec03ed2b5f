"""The bill as text: energy and work, each offer, what it is shared among, and how far the energy may be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.analyze.bill import PER
from whywait.analyze.bill_counted import PER as PER_COUNTED
from whywait.analyze.bill_counted import WORDS
from whywait.report.text import console
from whywait.units import load_name, number, percent

STYLE = {"holds": "green", "undecided": "yellow", "fails": "bold red"}
MILLION = ("per_million_effective_tokens", "per_million_answer_tokens", "per_million_output_tokens")
HEAD = ("what it costs per", "1,000 good\nrequests", "95 %", "M effective\ntokens", "95 %", "M answer\ntokens",
        "M tokens,\nraw", "effective\n/ raw")  # fmt: skip
COUNTED_HEAD = ("what it costs per", "1,000 requests", "bounds", "M output tokens", "bounds")
BELIEVED = {"holds": "the energy may be believed", "undecided": "the energy is not sure",
            "fails": "the energy must not be believed"}  # fmt: skip
#: What the sentence is about, in words, and how many of that.
SAID = {"per_good_request": ("1,000 good requests", 1000.0), "per_request": ("1,000 requests", 1000.0),
        "per_million_output_tokens": ("1,000,000 output tokens", 1.0)}  # fmt: skip
#: Requests by what became of them (``analyze.bill_work.Work.kinds``).
ON = {"good": "good requests", "late": "late requests", "failed": "failed requests",
      "censored": "requests cut off by the end of the run",
      "cancelled": "requests that their client cancelled"}  # fmt: skip
CUT = {"censored": "cut off by the end of the run", "cancelled": "cancelled by their client"}
Figure = Mapping[str, Any]


def print_bill(found: Mapping[str, Any], out: Console | None = None) -> None:
    """``found`` is the dict of ``analyze.bill`` with ``run``, the folder."""
    out = out or console()
    if found["made_by"] == "simulated":
        out.print(Text("SIMULATED: energy and work are those of a model, no meter was read", style="bold"))
    out.print(Text(headline(found), style="bold"))
    if any(not p["counted"] for p in found["points"]):
        out.print(Text(good_is(found)))
    if found["partial"]:
        out.print(Text("PARTIAL: this run was cut short", style="bold yellow"))
    for p in found["points"]:
        _point(out, p)
    _sources(out, found)


def good_is(found: Mapping[str, Any]) -> str:
    """What a good request is here."""
    slo = ", ".join(f"{k.removesuffix('_ms')} ≤ {v:g} ms" for k, v in found["slo"].items())
    return f"good: ended well{f' within {slo}' if slo else '; no SLO was given, so that every ok request is'}"


def headline(found: Mapping[str, Any]) -> str:
    """The bill in one sentence: of several load points the one at which a good request costs least."""
    points = found["points"]
    if not points:
        return "There is no load point in this run to make a bill of"
    best = min(points, key=_price)
    where = f" at {_name(best)}{', where it is least' if len(points) > 1 else ''}"
    key, by = _key(best), _figures_of(best)
    what, many = SAID[key]
    costs = [f"{number(f[key]['value'] * many * unit)} {name}" for f, unit, name in by if f[key]["value"] is not None]
    if not costs:
        why = next((f[key]["why"] for f, _, _ in by if f[key]["why"]), "nothing is known")
        of = f" (at {_name(best)}, the first of {len(points)} loads)" if len(points) > 1 else ""
        return f"What {what} cost is not known: {why}{of}"
    work = best["work"]
    share, n = "", work["requests"]
    if n:
        said = [f"{percent(work['good_requests'] / n)} were good"]
        said += [f"{percent(many / n)} {words}" for k, words in CUT.items() if (many := work[f"{k}_requests"])]
        share = f"; {', '.join(said)}"
    told = f"; {best['counted']['how']}" if best["counted"] else share
    sure = f"; {BELIEVED[best['energy']['state']]}" if best["energy"]["joules"] is not None else ""
    return f"{what} cost {' and '.join(costs)}{where}{told}{sure}"


def _figures_of(p: Mapping[str, Any]) -> list[tuple[Mapping[str, Figure], float, str]]:
    """Energy and the first offer with a total: figures, factor to the unit, unit in words."""
    e = p["energy"]
    label = " (modelled)" if e["how"] == "modelled" else ""
    out: list[tuple[Mapping[str, Figure], float, str]] = [(_of(p, e), 1e-3, f"kJ{label}")]
    paid = next((m for m in p["money"] if m["total"] is not None), None)
    if paid:
        out.append((_of(p, paid), 1.0, f"{paid['currency']} ({paid['name']}, {paid['terms']})"))
    return out


def _of(p: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Figure]:
    found: Mapping[str, Figure] = entry["by_counters"] if p["counted"] else entry
    return found


def _key(p: Mapping[str, Any]) -> str:
    """What the sentence is about: of a service that was only watched tokens where requests are not counted."""
    if not p["counted"]:
        return "per_good_request"
    return "per_request" if p["counted"]["requests"]["value"] else "per_million_output_tokens"


def _price(p: Mapping[str, Any]) -> tuple[bool, list[float]]:
    """For finding the least: money before energy, what is not known last."""
    key = _key(p)
    values = [f[key]["value"] for f, _, _ in reversed(_figures_of(p)) if f[key]["value"] is not None]
    return (not values, values)


def _name(p: Mapping[str, Any]) -> str:
    return load_name(p["mode"], p["target"], p["label"])


def _point(out: Console, p: Mapping[str, Any]) -> None:
    w, e = p["window"], p["energy"]
    whole = ", the whole point" if w["whole"] and not p["counted"] else ""
    out.print(Text(f"\n{_name(p)}: {number(w['seconds'])} s{whole}", style="bold"))
    for line in (*work_lines(p), f"energy {energy_line(e)}", *lost_lines(p)):
        out.print(Text(f"  {line}"))
    if e["joules"] is not None or p["money"]:
        out.print(_table(COUNTED_HEAD if p["counted"] else HEAD, cost_rows(p)))
    for why in why_lines(p):
        out.print(Text(f"  – {why}", style="dim"))
    if not p["counted"]:
        _shares(out, p)
    _validity(out, e)


def work_lines(p: Mapping[str, Any]) -> list[str]:
    """What was done in the window, in words."""
    work, done = p["work"], p["counted"]
    if done:
        known = [f"{number(done[k]['value'])} {w}" for k, w in WORDS.items() if done[k]["value"] is not None]
        return [f"nothing was sent; {done['how']}: {', '.join(known) or 'nothing is counted'}"]
    n, parts = work["requests"], ""
    if n != round(n):
        parts = " (one that lies partly in the window counts as that part)"
    kinds = {"good": "good", "late": "late", "failed": "failed", **CUT}
    counts = {k: work[f"{k}_requests"] for k in kinds}
    said = ", ".join(f"{_count(v)} {kinds[k]}" for k, v in counts.items() if v or k not in CUT)
    return [f"{_count(n)} requests{parts}: {said}; "
            f"{number(work['effective_tokens'])} effective tokens"]  # fmt: skip


def _count(n: float) -> str:
    """Requests: whole where they are, for people."""
    return f"{n:,.0f}" if abs(n - round(n)) < 1e-6 else number(n)


def energy_line(e: Mapping[str, Any]) -> str:
    """The energy in words: how much, how known, of what."""
    if e["joules"] is None:
        return "not known"
    label = {"counter": "by counter", "power": "by integrated power", "modelled": "MODELLED"}
    idle = e["idle"]
    said = "" if idle["share"] is None else f"; {percent(idle['share'])} of the devices' is idle power ({idle['how']})"
    if e["device_joules"] is None:
        of = "the host, whose processors are the engine's device"
    else:
        many = e["read"] or e["devices"]
        of = f"{many} device{'' if many == 1 else 's'} {'and' if e['host_joules'] is not None else 'without'} the host"
    return f"{number(e['joules'])} J {label[e['how']]}, {number(e['watts'])} W in the mean, of {of}{said}"


def lost_lines(p: Mapping[str, Any]) -> list[str]:
    """What of it went on requests that were not good."""
    share = p["shares"][0]
    lost = {k: v for k, v in (share["spent_on"] or {}).items() if k != "good" and v}
    if not lost:
        return []
    said = " and ".join(f"{percent(v)} on {ON[k]}" for k, v in lost.items())
    charged = "charged to the good" if share["spent_on"]["good"] else "with nothing good to charge it to"
    if p["energy"]["joules"] is None and all(m["total"] is None for m in p["money"]):
        return [f"by {share['rule']} {said}"]
    return [f"of it {said} (by {share['rule']}), {charged}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    for i, name in enumerate(head):
        band = name in ("95 %", "bounds")
        table.add_column(name, justify="left" if band or not i else "right", no_wrap=bool(i),
                         style="dim" if band else "")  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def cost_rows(p: Mapping[str, Any]) -> list[list[str]]:
    """A row per kind of cost under ``HEAD``, or ``COUNTED_HEAD`` of a service that was only watched."""
    e, cells = p["energy"], _counted_cells if p["counted"] else _cells
    rows = [["energy, kJ", *cells(_of(p, e), 1e-3)]] if e["joules"] is not None else []
    return rows + [[f"{m['currency']}, {m['name']}", *cells(_of(p, m), 1.0)] for m in p["money"]]


def _cells(f: Mapping[str, Figure], unit: float) -> list[str]:
    request, effective = f["per_good_request"], f["per_million_effective_tokens"]
    raw, value = f["per_million_output_tokens"]["value"], effective["value"]
    gap = f"{value / raw:.2f} ×" if raw and value else "–"
    return [
        _value(request, 1000 * unit), _band(request, 1000 * unit), _value(effective, unit), _band(effective, unit),
        *(_value(f[k], unit) for k in MILLION[1:]), gap,
    ]  # fmt: skip


def _counted_cells(f: Mapping[str, Figure], unit: float) -> list[str]:
    out = []
    for key, by in (("per_request", 1000 * unit), ("per_million_output_tokens", unit)):
        out += [_value(f[key], by), _band(f[key], by)]
    return out


def _value(f: Figure, by: float) -> str:
    return number(None if f["value"] is None else f["value"] * by)


def _band(f: Figure, by: float) -> str:
    if f["low"] is None:
        return ""
    low, high = number(f["low"] * by), number(None if f["high"] is None else f["high"] * by)
    return f"{low}–{high if f['high'] is not None else '?'}" if low != high else ""


def why_lines(p: Mapping[str, Any]) -> list[str]:
    """Why figures are missing, once per reason; the totals are stated."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for entry in (p["energy"], *p["money"]):
        total, unit = entry.get("total", entry.get("joules")), entry.get("currency", "J")
        of = _of(p, entry)
        for k in PER_COUNTED if p["counted"] else PER:
            if of[k]["why"]:
                names, totals = found.setdefault(of[k]["why"], ({}, {}))
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
    for _, rows in share_tables(p):
        out.print(_table(rows[0], rows[1:]))


def share_tables(p: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """By class and by length of prompt, where there is more than one: what it is by, the head and the rows."""
    share = p["shares"][0]
    groups = (("class", share["by_class"]), ("prompt tokens", share["by_prompt"]))
    return [(title, _rows(f"by {title}\n(shared by {share['rule']})", rows, p["money"]))
            for title, rows in groups if len(rows) > 1]  # fmt: skip


def _rows(title: str, rows: Sequence[Mapping[str, Any]], money: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    priced = next((m for m in money if m["total"] is not None), None)
    names = ["requests", "good", "kJ", "kJ / 1,000\ngood", "kJ / M\neffective"]
    if priced:
        names += [f"{priced['currency']} / 1,000\ngood", f"{priced['currency']} / M\neffective"]
    out = [[title, *names]]
    for r in rows:
        paid = r["money"].get(priced["name"]) if priced else None
        cells = [
            _count(r["requests"]), _count(r["good_requests"]), _kilo(r["nanojoules"], 1e-12),
            _kilo(r["j_per_good_request"], 1.0), _kilo(r["j_per_million_effective_tokens"], 1e-3),
        ]  # fmt: skip
        if priced:
            each, million = "per_good_request", "per_million_effective_tokens"
            cells += [_kilo(paid and paid[each], 1e3), _kilo(paid and paid[million], 1.0)]
        out.append([str(r["name"]), *cells])
    return out


def _kilo(value: float | None, by: float) -> str:
    return number(None if value is None else value * by)


def _validity(out: Console, e: Mapping[str, Any]) -> None:
    out.print(Text.assemble("  is the energy to be believed? ", (e["state"], STYLE[e["state"]])))
    for c in e["checks"]:
        if c["state"] != "holds":
            out.print(Text(f"    {c['state']}: {c['what']}? {c['why']}", style="dim"))
    held = [c["what"] for c in e["checks"] if c["state"] == "holds"]
    if held:
        out.print(Text(f"    holds: {'; '.join(held)}", style="dim"))


def offer_line(m: Mapping[str, Any]) -> str:
    """An offer in words: price, terms, date, source."""
    note = f"; {m['note']}" if m["note"] else ""
    price = f"{number(m['per_device_hour'])} {m['currency']} per device-hour of use"
    if m["per_kwh"] is not None:
        price += f", and {number(m['per_kwh'])} {m['currency']} per kWh drawn (PUE in it)"
    return f"{m['name']} ({m['terms']}, {m['date']}): {price}; source: {m['source']}{note}"


def no_offer(found: Mapping[str, Any]) -> str:
    """Why nothing is priced."""
    known = f"no offer for {found['machine']} is shipped" if found["machine"] else "the run names no known machine"
    return f"no price: {known} (--price-per-hour … --currency …, --owned …, --price FILE)"


def _sources(out: Console, found: Mapping[str, Any]) -> None:
    offers = found["points"][0]["money"] if found["points"] else []
    out.print()
    for line in [offer_line(m) for m in offers] or [no_offer(found)]:
        out.print(Text(line, style="dim"))
    if any(not p["counted"] for p in found["points"]):
        out.print(Text(LEGEND, style="dim"))
    out.print(f"run: {escape(str(found['run']))}")


LEGEND = (
    "effective tokens: output tokens of the good requests, reasoning included; answer tokens: without it; raw: over "
    "all tokens made, whoever they were for. 95 %: how much this window alone leaves open (docs/bill.md)"
)
