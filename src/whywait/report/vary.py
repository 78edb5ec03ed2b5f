"""A trial per value of a setting, as one table: for a terminal, and as a page that stands alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.analyze.compare import metric_of
from whywait.judge.paired import said
from whywait.report import svg
from whywait.report.html import HEAD
from whywait.report.svg import Html, cat, clip, table, tag
from whywait.report.text import console
from whywait.report.trial import amount
from whywait.units import percent

MARK = {"gain": "●", "loss": "○", "no change": "=", "undecided": "?"}
LEGEND = "● sure gain   ○ sure loss   = no change that counts   ? undecided; in brackets the always-valid interval"


def rows_of(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head, and a row per value: the pairs, and of each claim the mark, the effect of B and its interval."""
    rows = result["turns"]
    head = [result["name"], "pairs", *(title(r) for r in rows)]
    out = []
    for t in result["trials"]:
        cells = []
        for r in rows:
            at = next((x for x in r["at"] if x["value"] == t["value"]), None)
            cells.append("–" if at is None else cell(at))
        out.append([t["value"], str(t["pairs"]), *cells])
    return head, out


def title(row: Mapping[str, Any]) -> str:
    kind = {"price": " (price)", "promise": " (promise)"}.get(row["kind"], "")
    return metric_of(row["metric"]).title + (f" at {row['load']}" if row["load"] else "") + kind


def cell(at: Mapping[str, Any]) -> str:
    effect = said(at["effect"], at["scale"], at["unit"])
    if at["low"] is None or at["high"] is None:
        return f"{MARK[at['outcome']]} {effect} (?)"
    low, high = (said(at[k], at["scale"], at["unit"]) for k in ("low", "high"))
    return f"{MARK[at['outcome']]} {effect} ({low} … {high})"


def handover_rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Of a split: what the hand-overs took at each value."""
    trials = result["trials"]
    names = list(dict.fromkeys(n for t in trials for n in t["handover"]))
    head = [f"by {result['name']}", *(t["value"] for t in trials)]
    return head, [
        [metric_of(n).title, *(amount(t["handover"].get(n), metric_of(n).unit) for t in trials)] for n in names
    ]


def notes(result: Mapping[str, Any]) -> list[str]:
    out = [LEGEND]
    n = len(result["trials"])
    out.append(f"Each value is a trial of its own, right with 95 %; all {n} together with "
               f"{percent(1 - result['error_probability'])} at least.")  # fmt: skip
    out += [f"{result['name']}={t['value']} is PARTIAL: {t['partial_reason'].splitlines()[0]}"
            for t in result["trials"] if t["partial"]]  # fmt: skip
    if result["missing"]:
        out.append(f"not measured: {', '.join(result['missing'])}; the same command goes on")
    seen: dict[str, list[str]] = {}
    for t in result["trials"]:
        for d in t["doubts"]:
            seen.setdefault(d["what"].partition(": ")[2] or d["what"], []).append(t["value"])
    out += [f"doubt: {what} (at {', '.join(values)})" for what, values in seen.items()]
    return out


def print_vary(result: Mapping[str, Any], directory: str, out: Console | None = None) -> None:
    out = out or console()
    out.print(Text(f"\n{result['headline']}", style="bold"))
    out.print(Text(f"  A: {result['a']}\n  B: {result['trials'][0]['b'] if result['trials'] else ''}, …", style="dim"))
    for head, rows in (rows_of(result), handover_rows(result)):
        if not rows:
            continue
        shown = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
        for i, name in enumerate(head):
            shown.add_column(escape(name), justify="left" if not i else "right")
        for row in rows:
            shown.add_row(*map(escape, row))
        out.print()
        out.print(shown)
    out.print()
    for r in result["turns"]:
        out.print(Text.assemble((f"{title(r)}: ", "bold"), r["said"]))
    out.print()
    for line in notes(result):
        out.print(Text(line, style="dim"))
    out.print(f"kept in {escape(directory)}, a trial per value: whywait show {escape(directory)}/{result['name']}=…")


def render(result: Mapping[str, Any]) -> str:
    """The page of ``varying.Varied.result()``."""
    head, rows = rows_of(result)
    more, parts = handover_rows(result)
    body = [tag("section", tag("h2", "Effect of B by value") + table(head, rows, "Effects", "text"))]
    said_ = cat(tag("li", tag("b", title(r)) + f": {r['said']}") for r in result["turns"])
    body.append(tag("section", tag("h2", "Where it turns") + tag("ul", said_)))
    if parts:
        body.append(tag("section", tag("h2", "Hand-overs of B") + table(more, parts, "Hand-overs")))
    links = cat(tag("li", tag("a", f"{result['name']}={t['value']}", href=f"{t['directory']}/report.html")
                    + f": {t['headline']}") for t in result["trials"])  # fmt: skip
    body.append(tag("section", tag("h2", "The trials") + tag("ul", links)))
    body.append(tag("section", tag("h2", "Notes") + cat(tag("p", x, class_="note") for x in notes(result))))
    top = tag("p", "whywait paired trials by value", class_="brand") + tag("h1", result["headline"], class_="long")
    meta = tag("p", f"A: {clip(result['a'], 160)}", class_="meta")
    foot = tag("footer", f"whywait {result['whywait_version']}", class_="note")
    page = HEAD + tag("title", f"whywait: {clip(result['headline'], 120)}") + Html(f"<style>{svg.STYLE}</style>")
    return (f'<!doctype html>\n<html lang="en"><head>{page}</head>\n'
            f"<body>{cat([tag('header', top + meta), tag('main', cat(body)), foot])}</body></html>\n")  # fmt: skip
