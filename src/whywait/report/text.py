"""A result as text for a terminal: verdicts first, then one table with a column per load point, then the doubts."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from whywait.analyze.summary import GAIN
from whywait.judge.vocabulary import page
from whywait.report.model_rows import model_rows
from whywait.report.text_parts import print_bands
from whywait.units import load_name, ms, number, percent, plain, size

PER_TABLE = 6
INVALID = "INVALID: the client was late, so the figures are not the service's alone:"
MARK = {"holds": ("●", "bold red"), "undecided": ("?", "yellow"), "fails": ("○", "dim")}
#: The word for a state. The claim of what was ruled out is its contrary ("no queue for a place"), so "fails" beside it
#: would be read as the opposite.
STATES = {"holds": "holds", "undecided": "undecided", "fails": "not the cause"}
PHASE_NAMES = {"queue": "queue", "prefill": "prefill", "decode": "decode", "stall": "stalled decode",
               "network": "network", "client": "client", "frontend": "frontend", "tail": "tail",
               "unknown": "not explained"}  # fmt: skip
#: What the knee is, by the definition of ``analyze.summary.knee``.
KNEE = f"past it a doubling of the load brings less than {GAIN:.0%} more throughput".replace("%", " %")
DEVICE_NAMES = {"prefill_busy": "prefill", "decode_busy": "decode", "idle_no_work": "idle, no request",
                "idle_host": "idle, work queued", "idle_kv_blocked": "idle, no KV space", "throttled": "throttled",
                "communication": "communication", "unknown": "not explained"}  # fmt: skip


class Plain(Console):
    """A console on which nothing that it is given moves the cursor.

    Never a notebook's: rich would show there, too, what a console with a file of its own is given, as a second output.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"force_jupyter": False, **options})

    def on_broken_pipe(self) -> None:
        """Whoever read has seen enough; rich would end the program as a failure, ``main`` does not."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Names that a service or a file gives itself are only text: the one place that all text comes by."""
        for s in super().render(renderable, options):
            yield s if s.control else Segment(plain(s.text), s.style)


def console(stream: TextIO | None = None) -> Console:
    """A console that stays plain and wide enough in a pipe."""
    stream = stream or sys.stdout
    return Plain(file=stream, highlight=False, width=None if stream.isatty() else 100, soft_wrap=not stream.isatty())


def print_result(summary: dict[str, Any], verdicts: Sequence[Any], directory: str, out: Console | None = None) -> None:
    """Verdict, table and doubts of a summary; ``directory`` is '' of a run that is not kept."""
    out = out or console()
    out.print()
    if summary.get("made_by") == "simulated":
        out.print(Text("SIMULATED: made by a model; nothing here was measured, all of it is modelled", style="bold"))
    if summary.get("made_by") == "imported":
        out.print(Text("IMPORTED: measured by another tool; what it did not record is unknown here", style="bold"))
    if summary.get("described"):
        out.print(Text(f"simulated: {summary['described']}"))
    if summary["partial"]:
        out.print(Text("PARTIAL: this run was cut short; what was measured is kept", style="bold yellow"))
    out.print(Text(summary.get("headline", ""), style="bold"))
    print_invalid(out, summary["invalid"])
    for v in verdicts:
        _verdict(out, v)
    _tables(out, summary)
    _classes(out, summary["points"])
    print_bands(out, summary, PHASE_NAMES)
    _errors(out, points=summary["points"])
    print_doubts(out, summary["doubts"])
    if directory:
        out.print(f"run kept in {escape(directory)}")


def print_invalid(out: Console, invalid: Sequence[str]) -> None:
    """Before any figure: that they are not the service's."""
    for line in invalid:
        out.print(Text(f"{INVALID} {line}", style="bold red"))


def _verdict(out: Console, v: Any) -> None:
    mark, style = MARK[v.state]
    share = f"  {percent(v.share)} of {v.of}" if v.share is not None and v.state != "fails" else ""
    out.print(Text.assemble((f"\n{mark} ", style), (v.claim, "bold" if v.state == "holds" else ""), (share, "cyan"),
                            (f"  [{STATES[v.state]}, {v.how}]", "dim")))  # fmt: skip
    for label, lines in (("evidence", v.evidence), ("against", v.against)):
        for line in lines:
            _hanging(out, f"{label}: {line}", "dim" if label == "against" else "")
    if v.lever and v.state == "holds":
        _hanging(out, f"what would change it: {v.lever}")
    if v.next_step and v.state != "fails":
        _hanging(out, f"to settle it: {v.next_step}", "dim")
    if v.state == "holds":
        out.print(Text(f"    more: {page(v.cause)}", style="dim"))


def _hanging(out: Console, line: str, style: str = "") -> None:
    """A line under a verdict; where it must be wrapped, what follows stands a little further in."""
    if not out.soft_wrap:
        line = textwrap.fill(line, max(out.width - 4, 20), subsequent_indent="  ", break_on_hyphens=False)
    out.print(Text(textwrap.indent(line, "    "), style=style))


def _tables(out: Console, summary: dict[str, Any]) -> None:
    points = summary["points"]
    footnote = False
    for start in range(0, len(points), PER_TABLE):
        table, unknown = _table(points[start : start + PER_TABLE], start, summary)
        out.print()
        out.print(table)
        footnote = footnote or unknown
    if footnote:
        out.print(Text("? upper 95 % bound unknown: too few requests for this percentile", style="dim"))
    if summary.get("knee") is not None:
        out.print(Text(f"◂ {KNEE}, and waiting grows instead", style="dim"))


def _table(points: list[dict[str, Any]], start: int, summary: dict[str, Any]) -> tuple[Table, bool]:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    table.add_column("")
    for i, p in enumerate(points, start):
        unit = "" if p["mode"] == "concurrency" else "/s"
        knee = " ◂" if summary.get("knee") == i else ""
        mixed = " mix" if p.get("label") else ""
        table.add_column(f"{p['target']:g}{unit}{mixed}{knee}", justify="right")
    unknown = False
    modes = {p["mode"] for p in points}
    head = "concurrency" if modes == {"concurrency"} else "rate" if modes == {"rate"} else "load"
    table.columns[0].header = head
    for name, cell in _rows(summary):
        cells = [cell(p) for p in points]
        nothing = ("–", "0 %") if name.startswith("  ") else ("–",)  # of an account: a part that nobody had
        if any(c not in nothing for c in cells):
            unknown = unknown or any(c.endswith(" ?") for c in cells)
            table.add_row(name, *cells)
    return table, unknown


def _rows(summary: dict[str, Any]) -> list[tuple[str, Callable[[dict[str, Any]], str]]]:
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("requests ok / planned", lambda p: f"{p['counts'].get('ok', 0)} / {sum(p['counts'].values())}"),
        *((f"  {o.replace('_', ' ')}", _count(o)) for o in dict.fromkeys(_failures(summary))),
        ("output tokens/s", lambda p: number(p["output_tokens_per_s"])),
        ("requests/s", lambda p: number(p["requests_per_s"])),
    ]
    if summary["slo"] or summary["slo_of_classes"]:
        rows += [
            ("goodput, requests/s", lambda p: number(p["goodput_requests_per_s"])),
            ("good, of all that were due", lambda p: percent(p["goodput_share"])),
            ("effective tokens/s", lambda p: number(p["effective_tokens_per_s"])),
        ]
    for key, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "end to end")):
        for q in ("p50", "p95"):
            rows.append((f"{name} {q}", _quantile(key, q)))
        if key == "ttft_ms" and any(
            (p.get("engine_ttft_ms") or {}).get("n") for p in summary["points"] if "passive" not in p
        ):
            rows += [(f"  {q} by the engine itself", _quantile("engine_ttft_ms", q)) for q in ("p50", "p95")]
    rows += [
        ("sent late, p99", lambda p: ms(p["offered"]["lag_ms"]["p99"])),
        ("requests sent/s", lambda p: number(p["offered"]["sent_per_s"]) if p["mode"] != "concurrency" else "–"),
        ("speculation accepted", lambda p: percent(p["acceptance"])),
        ("tokens per decode step", lambda p: number(p.get("tokens_per_step"))),
        ("in flight, mean", lambda p: number(p["in_flight"]["mean"])),
        ("engine queue, mean", lambda p: number(p["queue"])),
        ("KV space in use", lambda p: percent(p["kv_use"])),
        ("prompt tokens cached", lambda p: percent(p["cached_share"])),
        ("engine memory", lambda p: size(p["memory_bytes"])),
        ("power", lambda p: number(p["power_w"], "W")),
        ("energy per good request", lambda p: number(p["energy_j_per_good_request"], "J")),
        ("energy per M effective tokens", lambda p: number(p["energy_j_per_million_effective_tokens"], "J")),
    ]
    rows.append(("requests wait for", lambda _p: ""))
    for key, name in PHASE_NAMES.items():
        rows.append((f"  {name}", _share("phases", key)))
        if key == "queue":
            rows.append(("    of it, a neighbour's step", _turn))
    rows.append(("the device is in", lambda _p: ""))
    rows += [(f"  {name}", _device(key)) for key, name in DEVICE_NAMES.items()]
    return [*rows, *model_rows()]


CLASS_HEAD = ("load", "class", "ok / planned", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "good", "its own SLO")


def class_rows(points: list[dict[str, Any]]) -> list[list[str]]:
    """A row (of CLASS_HEAD) per point and class, of the points that mix classes; none where no point does."""
    return [
        [load_name(p["mode"], p["target"], p["label"]), name, f"{c['ok']} / {c['requests']}",
         *(_quantile(key, q)(c) for key in ("ttft_ms", "tpot_ms") for q in ("p50", "p95")),
         percent(c["goodput_share"]) if c["slo"] else "–",
         ", ".join(f"{k.removesuffix('_ms')} ≤ {ms(v)}" for k, v in c["slo"].items()) or "none"]
        for p in points if len(p["classes"]) > 1 for name, c in p["classes"].items()
    ]  # fmt: skip


def _classes(out: Console, points: list[dict[str, Any]]) -> None:
    rows = class_rows(points)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in CLASS_HEAD:
        table.add_column(name, justify="left" if name in ("load", "class", "its own SLO") else "right")
    last = ""
    for load, name, *cells in rows:
        table.add_row("" if load == last else escape(load), escape(name), *cells)
        last = load
    out.print()
    out.print(table)


def _failures(summary: dict[str, Any]) -> list[str]:
    return [o for p in summary["points"] for o, n in p["counts"].items() if n and o != "ok"]


def _count(outcome: str) -> Callable[[dict[str, Any]], str]:
    return lambda p: str(p["counts"].get(outcome) or "–")


def _quantile(key: str, q: str) -> Callable[[dict[str, Any]], str]:
    def cell(p: dict[str, Any]) -> str:
        found = p[key]
        value = found.get(q)
        if value is None:
            return "–"
        ci = (found.get("ci") or {}).get(q)
        return ms(value) + (" ?" if ci is not None and ci[1] is None else "")

    return cell


def _share(group: str, key: str) -> Callable[[dict[str, Any]], str]:
    def cell(p: dict[str, Any]) -> str:
        share = p[group].get(key, {}).get("share") if p[group] else None
        return percent(share)

    return cell


def _turn(p: dict[str, Any]) -> str:
    """Waiting with a place already free: for the end of a neighbour's prefill step."""
    found = p["phases"].get("queue", {}) if p["phases"] else {}
    share = (found.get("share") or 0.0) * found.get("causes", {}).get("neighbour's prefill", 0.0)
    return percent(share)


def _device(key: str) -> Callable[[dict[str, Any]], str]:
    def cell(p: dict[str, Any]) -> str:
        share = p["occupancy"]["shares"].get(key)
        return percent(share)

    return cell


def _errors(out: Console, points: list[dict[str, Any]]) -> None:
    """What went wrong, of all points together."""
    found: dict[tuple[str, ...], int] = {}
    for e in (e for p in points for e in p["errors"]):
        key = (e["outcome"], str(e["status"] or ""), e["detail"], e["fault"])
        found[key] = found.get(key, 0) + e["n"]
    if found:
        out.print(Text("\nerrors", style="bold"))
    for (outcome, status, detail, fault), n in sorted(found.items(), key=lambda x: -x[1])[:12]:
        what = detail if detail.startswith(status) else f"{status} {detail}"
        out.print(Text(f"  {n} × {outcome}: {what.strip() or 'no word'}  ({fault})"))


def print_doubts(out: Console, doubts: list[dict[str, str]]) -> None:
    if not doubts:
        return
    out.print(Text("\ndoubts", style="bold"))
    for d in doubts:
        tail = f"  → {d['next']}" if d.get("next") else ""
        out.print(Text(f"  {d['what']}: {d['why']}{tail}", style="dim"))
