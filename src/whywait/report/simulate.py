"""A simulated deployment as text: what it is, a table with an interval under each figure, what it waits on, what it
rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.report.text import console, print_doubts
from whywait.units import ms, number, percent

PER_TABLE = 3
Show = Callable[[float | None], str]


def _dollars(value: float | None) -> str:
    return number(value, "$")


def _watts(value: float | None) -> str:
    return "–" if value is None else number(value, "W") if value < 10_000 else number(value / 1000, "kW")


ROWS: tuple[tuple[str, str, Show], ...] = (
    ("TTFT p50", "ttft_ms_p50", ms),
    ("TTFT p99", "ttft_ms_p99", ms),
    ("TPOT p50", "tpot_ms_p50", ms),
    ("TPOT p99", "tpot_ms_p99", ms),
    ("end to end p50", "e2e_ms_p50", ms),
    ("queue, mean", "queue_ms_mean", ms),
    ("output tokens/s", "output_tokens_per_s", number),
    ("requests/s", "requests_per_s", number),
    ("goodput, requests/s", "goodput_requests_per_s", number),
    ("goodput, share", "goodput_share", percent),
    ("in work, mean", "running", number),
    ("KV space in use", "kv_use", percent),
    ("prompt tokens cached", "cached_share", percent),
    ("drafts accepted", "acceptance", percent),
    ("preemptions", "preemptions", number),
    ("power", "power_w", _watts),
    ("J per output token", "joules_per_token", number),
    ("$ per million out", "usd_per_million_tokens", _dollars),
)
QUIET = ("queue_ms_mean", "cached_share", "preemptions")  # left out where all their values are 0


def print_simulated(head: str, found: dict[str, Any], headline: str, out: Console | None = None) -> None:
    """``found`` is ``Simulated.as_dict()``; ``headline`` what the verdict of the simulated run says."""
    out = out or console()
    out.print(Text(head, style="bold"))
    points = found["points"]
    for start in range(0, len(points), PER_TABLE):
        out.print()
        out.print(_table(points[start : start + PER_TABLE]))
    if headline:
        out.print(Text(f"\nwhat it waits on: {headline}", style="bold"))
    print_doubts(out, [d for d in found["summary"]["doubts"] if not d["what"].startswith("every figure")])
    out.print()
    for line in found["notes"]:
        out.print(Text(line, style="dim"))
    out.print(f"run kept in {escape(found['run'])}")


def _table(points: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    modes = {p["mode"] for p in points}
    table.add_column(
        no_wrap=True, header="concurrency" if modes == {"concurrency"} else "rate" if modes == {"rate"} else "load"
    )
    for p in points:
        table.add_column(f"{p['target']:g}{'' if p['mode'] == 'concurrency' else '/s'}", justify="right")
        table.add_column("80 %", style="dim", no_wrap=True)
    for name, key, show in ROWS:
        figures = [p["figures"].get(key) or {"value": None} for p in points]
        values = [f["value"] for f in figures]
        if all(v is None for v in values) or (key in QUIET and not any(values)):
            continue
        cells: list[str] = []
        for f in figures:
            cells += [show(f["value"]), _band(f, show)]
        table.add_row(name, *cells)
    return table


def _band(f: dict[str, Any], show: Show) -> str:
    if f["value"] is None or f.get("low") is None or f.get("high") is None:
        return ""
    low, high = show(f["low"]), show(f["high"])
    if low == high:
        return ""
    plain, _, unit = low.rpartition(" ")
    if unit and show(f["value"]).endswith(f" {unit}") and high.endswith(f" {unit}"):
        low, high = plain, high.removesuffix(f" {unit}")
    return f"{low}–{high}"
