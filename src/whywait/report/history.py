"""The runs of a folder as text for a terminal (a table, a figure over time in one line) and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from whywait.analyze.against import figure_of
from whywait.report.text import console
from whywait.report.text_parts import print_table
from whywait.report.trial import amount
from whywait.units import plain

BARS = "▁▂▃▄▅▆▇█"
GAP = "·"
HEADLINE = ("output_tokens_per_s", "ttft_ms.p50", "ttft_ms.p95", "tpot_ms.p50", "goodput_share", "failed_share")
MOST_CELLS = 60
CSV_HEAD = ("name", "date", "state", "made_by", "engine", "model", "machine", "verdict", "load", *HEADLINE)
_SHOWN = ("ttft_ms.p95", "tpot_ms.p50")


def print_history(result: Mapping[str, Any], out: Console | None = None) -> None:
    out = out or console()
    runs = result["runs"]
    out.print()
    if not runs:
        out.print(Text(f"no run in {result['directory']}", style="bold"))
    beside = [n for n in _SHOWN if n != result["figure"]]
    head = ["", "date", "state", "engine", "model", "load", result["title"], *(figure_of(n).title for n in beside)]
    rows = []
    for r in runs:
        point = next((p for p in r["points"] if p["load"] == r["at"]), None)
        figures = point["figures"] if point else {}
        rows.append([r["name"], (r["date"] or "–")[5:16].replace("T", " "), state(r), r["engine"] or "–",
                     _short(r["model"] or "–", 20), _load(r["at"]), amount(r["value"], result["unit"]),
                     *(amount(figures.get(n), "ms") for n in beside)])  # fmt: skip
    print_table(out, head, rows)
    if line := trend(result):
        out.print()
        out.print(Text(line))
    for r in runs:
        if r["why"]:
            out.print(Text(f"{r['name']}: {r['state']}: {r['why']}", style="dim"))
    told = [r for r in runs if r["verdict"]]
    if told:
        out.print(Text(f"last verdict ({told[-1]['name']}): {told[-1]['verdict']}", style="dim"))
    for b in result["broken"]:
        out.print(Text(f"not read: {b['name']}: {b['why']}", style="yellow"))


def trend(result: Mapping[str, Any]) -> str:
    """The figure over the runs in a line; '' where fewer than two know it."""
    values = [r["value"] for r in result["runs"]]
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return ""
    low, high = (amount(v, result["unit"]) for v in (min(known), max(known)))
    many = len(kinds(result))
    more = f"; of {many} loads or kinds of run, see the table" if many > 1 else ""
    return f"{result['title']}  {spark(values)}  {low} … {high}, oldest first{more}"


def spark(values: Sequence[float | None]) -> str:
    """One sign per value from the lowest to the highest, unknown ones a dot; of very many the last."""
    values = values[-MOST_CELLS:]
    known = [v for v in values if v is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if high == low:
        return "".join(GAP if v is None else BARS[3] for v in values)
    top = len(BARS) - 1
    return "".join(GAP if v is None else BARS[round((v - low) / (high - low) * top)] for v in values)


def csv_rows(result: Mapping[str, Any]) -> Iterator[list[Any]]:
    """A row of CSV_HEAD (and the plotted figure, where that is another) per run and load point."""
    more = [] if result["figure"] in HEADLINE else [result["figure"]]
    yield [*CSV_HEAD, *more]
    for r in result["runs"]:
        facts = [cell(r[k]) for k in CSV_HEAD[: CSV_HEAD.index("load")]]
        for p in r["points"] or [{"load": None, "figures": {}}]:
            yield [*facts, cell(p["load"]), *(p["figures"].get(n) for n in (*HEADLINE, *more))]
    for b in result["broken"]:
        yield [cell(b["name"]), None, cell(f"not read: {b['why']}"), *[None] * (len(CSV_HEAD) - 3 + len(more))]


def cell(value: Any) -> Any:
    """Text for a table program: what begins as a formula is only text."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def _load(name: str | None) -> str:
    return (name or "–").replace("concurrency ", "").replace(" requests/s", "/s")


def state(r: Mapping[str, Any]) -> str:
    """What a reader must know before its figures: that it is not whole, or that nothing of ours measured it."""
    kind = r["made_by"] if r["made_by"] in ("simulated", "imported") else ""
    return ", ".join(filter(None, (kind, "" if r["state"] == "whole" else str(r["state"]))))


def kinds(result: Mapping[str, Any]) -> dict[tuple[Any, Any], list[int]]:
    """The runs that know the figure (their numbers), by load and by what made them: only within one of these does a
    change over time mean something."""
    found: dict[tuple[Any, Any], list[int]] = {}
    for i, r in enumerate(result["runs"]):
        if r["value"] is not None:
            found.setdefault((r["at"], r["made_by"]), []).append(i)
    return found


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[-most + 1 :]
