"""A workload in the terminal: lengths, rate over time, shared prefixes, sessions."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from whywait.report.text import console

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 40
LENGTHS = (("prompt_tokens", "prompt tokens"), ("output_tokens", "output tokens"))


def print_workload(facts: dict[str, Any], out: Console | None = None) -> None:
    """``facts`` as :func:`whywait.convert.fit.describe` gives them."""
    out = out or console()
    rate, cv = facts["rate_per_s"], facts["gap_cv"]
    head = f"{facts['requests']:,} requests ({facts['format']}) in {_time(facts['span_s'])}"
    out.print(
        head + ("" if rate is None else f", {rate:.3g} per second") + ("" if cv is None else f", gap CV {cv:.2f}")
    )
    over = facts["rate_over_time"]
    peak = max(over["requests"], default=0)
    out.print(f"\n[bold]rate over time[/]  one bar is {_time(over['bin_s'])}; the highest {peak / over['bin_s']:.3g}/s")
    out.print(f"  {sparkline(over['requests'])}", soft_wrap=True)
    windows = [w["cv"] for w in facts["cv_per_window"]]
    if len(windows) > 1:
        each = round(facts["requests"] / len(windows))
        out.print(f"  gap CV per stretch of {each:,} requests: {min(windows):.2f} to {max(windows):.2f}")
    out.print()
    out.print(_quantiles(facts))
    for key, name in LENGTHS:
        _histogram(out, name, facts[key.replace("tokens", "histogram")])
    if facts["length_correlation"] is not None:
        out.print(
            f"\nlong prompts and long outputs go together by {facts['length_correlation']:+.2f} (rank correlation)"
        )
    _prefix(out, facts["prefix"])
    _sessions(out, facts["sessions"])
    if len(facts["classes"]) > 1:
        out.print("\nclasses: " + ", ".join(f"{k} {v:,}" for k, v in facts["classes"].items()))
    for note in facts["notes"]:
        out.print(f"note: {note}", markup=False)


def sparkline(counts: list[int]) -> str:
    """One character per count; only what is zero looks empty."""
    top = max(counts, default=0) or 1
    return "".join(BARS[0 if not c else max(1, round(c / top * (len(BARS) - 1)))] for c in counts)


def _quantiles(facts: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("mean", "min", "p10", "p50", "p90", "p99", "max")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for key, label in LENGTHS:
        table.add_row(label, *(f"{facts[key][n]:,.0f}" for n in names))
    if facts["gap_s"] is not None:
        table.add_row("gap, ms", *(f"{facts['gap_s'][n] * 1e3:,.4g}" for n in names))
    return table


def _histogram(out: Console, name: str, h: dict[str, list[float]]) -> None:
    top = max(h["requests"], default=0) or 1
    out.print(f"\n[bold]{name}[/]")
    for low, high, n in zip(h["edges"], h["edges"][1:], h["requests"], strict=False):
        bar = "█" * round(n / top * WIDTH) or ("▏" if n else "")
        out.print(f"  {low:>9,.0f} – {high - 1:>9,.0f}  {bar} {n:,.0f}")


def _prefix(out: Console, p: dict[str, Any] | None) -> None:
    if p is None:
        out.print("\nshared prefixes: the log tells nothing of them")
        return
    rate = "unknown" if p["hit_rate"] is None else f"{p['hit_rate']:.1%}"
    out.print(
        f"\n[bold]shared prefixes[/]  an unlimited cache would hold {rate} of the prompts' blocks "
        f"({p['block_tokens']} tokens each); {p['requests_with_a_hit']:.0%} of the requests would hit"
    )
    out.print(f"  {p['groups']:,} first blocks, {p['shared_groups']:,} of them in several requests; "
              f"the largest: {', '.join(f'{n:,}' for n in p['largest_groups'][:5])}")  # fmt: skip
    if p["requests_ago"]:
        ago = p["requests_ago"]
        out.print(f"  a reused prefix was last used {ago['p50']:,.0f} requests ago (p50), {ago['p90']:,.0f} (p90)")


def _sessions(out: Console, s: dict[str, Any] | None) -> None:
    if s is None:
        out.print("sessions: the log tells nothing of them")
        return
    turns, between = s["turns"], s["between_turns_s"]
    wait = "" if between is None else f"; {_time(between['p50'])} between turns (p50)"
    out.print(f"sessions: {s['sessions']:,} of {turns['mean']:.2g} turns on average, at most {turns['max']:,.0f}{wait}")


def _time(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
