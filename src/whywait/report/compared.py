"""A comparison of runs as text for a terminal: what changed in a sentence, figures, waits that moved, gates, doubts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from whywait.judge.paired import said
from whywait.report.text import console
from whywait.report.text_parts import print_doubt_lines, print_table
from whywait.report.trial import amount, wait_name

HEAD = ("figure", "A", "B", "B against A", "95 %", "by chance", "")
WAIT_HEAD = ("wait", "A", "B", "moved by", "95 %", "by chance", "")
STATES = {"better": "better", "worse": "worse", "moved": "moved", "small": "surely, but small",
          "same": "no change that counts", "open": "undecided"}  # fmt: skip
MARK = {"fails": ("✗", "bold red"), "passes": ("✓", "green"), "undecided": ("?", "yellow")}
MOST_CHANGED = 12
SURELY = 0.001


def figure_rows(point: Mapping[str, Any]) -> list[list[str]]:
    """A row of HEAD each; figures that are not claimed have their chance by themselves, in brackets."""
    out = []
    for f in point["figures"]:
        state = STATES[f["state"]] if f["claimed"] else ""
        out.append([f["title"], amount(f["a"], f["unit"]), amount(f["b"], f["unit"]),
                    said(f["value"], f["scale"], f["unit"]), between(f), _chance(f), state])  # fmt: skip
    return out


def why_open(point: Mapping[str, Any]) -> list[str]:
    """Why figures have no interval, each reason once."""
    told: dict[str, list[str]] = {}
    for f in point["figures"]:
        if f["claimed"] and f["why"] and f["low"] is None:
            told.setdefault(f["why"], []).append(f["title"])
    return [f"no interval: {why} ({', '.join(names)})" for why, names in told.items()]


def wait_rows(point: Mapping[str, Any]) -> list[list[str]]:
    """A row of WAIT_HEAD for each that surely moved, and each whose move would count if it were sure."""
    out = []
    for f in moved(point):
        way = "grew" if f["value"] > 0 else "fell"
        state = "undecided" if f["state"] == "open" else way if f["state"] != "small" else f"{way}, but little"
        out.append([wait_name(f), amount(f["a"], f["unit"]), amount(f["b"], f["unit"]),
                    said(f["value"], "difference", f["unit"]), between(f), _chance(f), state])  # fmt: skip
    return out


def moved(point: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of the waits, the request account first, those worth a line."""
    known = [f for f in point["waits"] if f["value"] is not None]
    large = {f["name"] for f in known if f["size"] and abs(f["value"]) >= f["size"]}
    shown = [f for f in known if f["state"] not in ("same", "open") or f["name"] in large]
    device = [f for f in shown if f["name"].startswith("occupancy.")]
    return [*sorted((f for f in shown if f not in device), key=lambda f: -abs(f["value"])),
            *sorted(device, key=lambda f: -abs(f["value"]))]  # fmt: skip


def how(point: Mapping[str, Any]) -> str:
    """How a load point was compared, in words."""
    n = point["requests"]
    if point["paired"]:
        pairs = f"paired, request by request: {point['pairs']} of the same schedule"
        rest = f", of {n['a']} of A and {n['b']} of B; times are those of the pairs"
        return pairs + (rest if max(n["a"], n["b"]) > point["pairs"] else "")
    return f"not paired ({point['why_apart']}): {n['a']} requests of A, {n['b']} of B"


def side(s: Mapping[str, Any]) -> str:
    """One side in a line."""
    runs = f", {s['runs']} runs" if s["runs"] > 1 else ""
    facts = [s["made_by"], s["date"], s["engine"], s["model"], s["source"] if s["source"] != "run" else None]
    return f"{s['name']} ({', '.join(str(f) for f in facts if f)}{runs})"


def print_compared(result: Mapping[str, Any], out: Console | None = None) -> None:
    out = out or console()
    out.print()
    out.print(Text(result["headline"], style="bold"))
    out.print(Text(f"A: {side(result['a'])}"))
    for c in result["comparisons"]:
        out.print(Text(f"B: {side(c['b'])}"))
        _changes(out, c["changed"])
        for name, left in (("A", c["only_a"]), ("B", c["only_b"])):
            if left:
                out.print(Text(f"only in {name}, not compared: {', '.join(left)}", style="dim"))
        for p in c["points"]:
            out.print(Text(f"\n{p['load']}: {how(p)}", style="bold"))
            print_table(out, HEAD, figure_rows(p))
            for line in why_open(p):
                out.print(Text(line, style="dim"))
            for figure, note in p["notes"].items():
                out.print(Text(f"{figure}: by {note}", style="dim"))
            if rows := wait_rows(p):
                print_table(out, WAIT_HEAD, rows, "waits that moved: mean per request, and share of the device's time")
        _gates(out, c["gates"])
        out.print()
    print_doubt_lines(out, result["doubts"])


def gate_line(g: Mapping[str, Any]) -> str:
    return f"{g['gate']} {g['state']} at {g['load']}: {g['why']}"


def _changes(out: Console, changed: Sequence[Mapping[str, str]]) -> None:
    for u in changed[:MOST_CHANGED]:
        out.print(Text(f"changed: {u['what']}: {u['a']} → {u['b']}"))
    if len(changed) > MOST_CHANGED:
        out.print(Text(f"… and {len(changed) - MOST_CHANGED} more (--json has all)", style="dim"))
    if not changed:
        out.print(Text("changed: nothing that the runs tell of", style="dim"))


def _gates(out: Console, gates: Sequence[Mapping[str, Any]]) -> None:
    if gates:
        out.print()
    for g in gates:
        mark, style = MARK[g["state"]]
        line = Text(f"{mark} ", style=style)
        line.append(gate_line(g), style="")
        out.print(line)


def between(f: Mapping[str, Any]) -> str:
    """The interval, its unit once."""
    if f["low"] is None or f["high"] is None:
        return "–"
    low, high = (said(x, f["scale"], f["unit"]) for x in (f["low"], f["high"]))
    amount_, _, unit = low.rpartition(" ")
    return f"{amount_ if amount_ and high.endswith(' ' + unit) else low} … {high}"


def _chance(f: Mapping[str, Any]) -> str:
    """The chance that a change as clear as this is found where there is none, of all that was looked at."""
    p = f["p_adjusted"] if f["claimed"] else f["p"]
    if p is None:
        return "–"
    text = f"under {SURELY:.1%}" if p < SURELY else f"{p:.1%}" if p < 0.1 else f"{p:.0%}"
    return text.replace("%", " %") if f["claimed"] else f"({text.replace('%', ' %')})"
