"""The answer of ``whywait find`` as text: an interval, what it rests on, and the probes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.report.text import console, print_invalid
from whywait.units import ms, number, percent


def headline(find: dict[str, Any]) -> str:
    """One sentence; never a point."""
    low, high = find["low"], find["high"]
    if low is not None and high is not None:
        return f"the SLO is kept at {number(low)} requests/s and missed at {number(high)}: the knee is between"
    if find["decided"]:
        return f"the SLO is kept at {number(low)} requests/s, the highest rate that was allowed"
    why = f" ({find['why']})" if find["why"] else ""
    open_ = "not decided in the budget: "
    if cut := find["cut_short"]:
        open_ = f"cut short before it was decided ({cut}): "
    if low is not None:
        return f"{open_}the SLO is kept at {number(low)} requests/s, no rate is known to miss it{why}"
    if high is not None:
        return f"{open_}the SLO is missed at {number(high)} requests/s, no rate is known to keep it{why}"
    return f"{open_}nothing is known of any rate{why}"


def print_find(summary: dict[str, Any], directory: str, out: Console | None = None) -> None:
    """The headline, a row per probe, and the doubts of the measurement."""
    out = out or console()
    find = summary["find"]
    out.print(Text(f"\n{headline(find)}", style="bold"))
    print_invalid(out, summary["invalid"])
    asked = "; ".join(
        f"{percent(r['share'])} of requests with "
        + ", ".join(f"{k.removesuffix('_ms')} ≤ {ms(limit)}" for k, limit in r["limits"].items())
        for r in find["rules"]
    )
    out.print(Text(f"  asked: {asked}", style="dim"))
    odds = f"  all answers are meant to be right with {percent(1 - find['error_probability'])}; docs/find.md says how"
    out.print(Text(odds, style="dim"))
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("requests/s", "kept", "good", "surely between", "requests", "worth", "seconds", "in flight, per s"):
        table.add_column(name, justify="right")
    for p in sorted(find["probes"], key=lambda p: float(p["rate"])):
        worst = min(p["rules"], key=lambda r: 1.0 if r["share"] is None else r["share"])
        low, high = worst["share_interval"]
        table.add_row(number(p["rate"]), p["answer"], percent(worst["share"]), f"{low:.1%} … {high:.1%}",
                      str(worst["requests"]), number(worst["effective_requests"]), f"{p['seconds']:.0f}",
                      number(p["in_flight_slope_per_s"][0]))  # fmt: skip
    out.print()
    out.print(table)
    for d in summary["doubts"]:
        out.print(Text(f"  {d['what']}: {d['why']}", style="dim"))
    if summary["partial"]:
        out.print(Text("PARTIAL: this run was cut short; what was measured is kept.", style="bold yellow"))
    out.print(f"run kept in {escape(directory)}")
