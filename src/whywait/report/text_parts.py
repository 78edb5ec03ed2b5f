"""Parts of what the terminal is told: a plain table, what requests wait for by quantile of latency, doubts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.units import load_name, ms, percent

MOST_POINTS = 3
LEFT = ("", "run", "disturbed")  # columns of words


def print_table(out: Console, head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Nothing where there are no rows. The first column, those without a name and those of words stand to the left."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", title=title or None,
                  title_justify="left", title_style="bold")  # fmt: skip
    for i, name in enumerate(head):
        table.add_column(escape(name), justify="left" if i == 0 or name in LEFT else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    out.print()
    out.print(table)


def print_doubt_lines(out: Console, doubts: Sequence[Mapping[str, str]]) -> None:
    for d in doubts:
        out.print(Text(f"doubt: {d['what']}: {d['why']}" + (f"  → {d['next']}" if d["next"] else ""), style="dim"))


def print_bands(out: Console, summary: dict[str, Any], names: Mapping[str, str]) -> None:
    """Four rows (p0-50 … p99+) for the knee or the point of most load, and for those for another purpose."""
    points = _chosen(summary)
    if not points:
        return
    bands = [(p, b) for p in points for b in p["by_latency"]["e2e_ms"]]
    shown = [k for k in names if any(b["phases"][k] >= 0.005 * b["mean_ms"] > 0 for _, b in bands)]
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    table.add_column("by end-to-end time")
    for head in ("requests", "mean", *(names[k] for k in shown)):
        table.add_column(head, justify="right", overflow="fold")
    for p in points:
        table.add_row(Text(load_name(p["mode"], p["target"], p["label"]), style="bold"))
        for b in p["by_latency"]["e2e_ms"]:
            cells = (_share(b["phases"][k], b["mean_ms"]) for k in shown)
            table.add_row(f"  {b['band']}", str(b["requests"]), ms(b["mean_ms"]), *cells)
    out.print(Text("\nwhat the slowest wait for, beside the others", style="bold"))
    out.print(table)


def _chosen(summary: dict[str, Any]) -> list[dict[str, Any]]:
    points = [p for p in summary["points"] if len((p.get("by_latency") or {}).get("e2e_ms") or ()) > 1]
    plain = [p for p in points if not p["label"]] or points
    knee = None if summary.get("knee") is None else summary["points"][summary["knee"]]
    top = knee if any(p is knee for p in plain) else max(plain, key=lambda p: p["target"] or 0, default=None)
    found = [] if top is None else [top]
    found += [p for p in plain if p is not top and (p["target"] or 0) > ((top or p)["target"] or 0)][-1:]
    return (found + [p for p in points if p["label"] and p is not top])[:MOST_POINTS]


def _share(took: float, whole: float) -> str:
    share = took / whole if whole else 0.0
    return percent(share)
