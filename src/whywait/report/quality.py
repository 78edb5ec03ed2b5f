"""A comparison of answers as text for a terminal: claims, distributions, accuracy, degeneration, doubts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.analyze.degeneration import FIGURES
from whywait.report.text import console
from whywait.units import percent

MARK = {"holds": ("●", "bold green"), "undecided": ("?", "yellow"), "fails": ("○", "bold red")}
AGREEMENT_HEAD = ("figure", "value", "95 % over texts", "")
KIND_HEAD = ("kind of text", "texts", "positions", "top-1", "KL mean", "ppl A", "ppl B", "B / A", "95 %")
TASK_HEAD = ("category", "cases", "A", "B", "change", "95 %", "B lost / won", "not worse", "p (adjusted)")
SIGN_HEAD = ("sign", "cases", "A", "B", "change", "95 %", "p (adjusted)")


def points(share: float | None) -> str:
    """A difference of shares in points."""
    return "–" if share is None else f"{100 * share:+.1f}".replace("-", "−")


def nats(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if abs(value) < 1e-12 else f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.4f}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"×{value:.4f}" if value < 10 else f"×{value:,.0f}"


#: How the figure of a claim is written.
ANYHOW: dict[str, Callable[[float | None], str]] = {"perplexity_ratio": ratio, "top1": percent, "accuracy": points}


def plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def between(low: float | None, high: float | None, show: Callable[[float | None], str]) -> str:
    if low is None and high is None:
        return "–"
    return " … ".join("?" if v is None else show(v) for v in (low, high))


def agreement_rows(f: Mapping[str, Any]) -> list[list[str]]:
    """A row of AGREEMENT_HEAD per figure of ``analyze.agreement.figures``."""
    lumped = percent(f["outside"])
    told: list[tuple[str, str, Callable[[float | None], str], str]] = [
        ("same most probable token", "top1", percent, ""),
        ("KL(A‖B), mean", "kl_mean", nats, f"nats, at least; {lumped} of A's probability lumped"),
        ("KL(A‖B), p99 of positions", "kl_p99", nats, "nats, at least"),
        ("perplexity, B / A", "perplexity_ratio", ratio, ""),
    ]
    out = []
    for title, name, show, note in told:
        if name == "perplexity_ratio":
            note = f"{plain(f['perplexity_a'])} → {plain(f['perplexity_b'])}"
            note += f"; {percent(f['untold'])} of positions untold" if f["untold"] else ""
        out.append([title, show(f[name]), between(f[f"{name}_low"], f[f"{name}_high"], show), note])
    return out


def kind_rows(kinds: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    return [
        [kind, str(f["texts"]), str(f["positions"]), percent(f["top1"]), nats(f["kl_mean"]), plain(f["perplexity_a"]),
         plain(f["perplexity_b"]), ratio(f["perplexity_ratio"]),
         between(f["perplexity_ratio_low"], f["perplexity_ratio_high"], lambda v: "–" if v is None else f"×{v:.3g}")]
        for kind, f in kinds.items()
    ]  # fmt: skip


def task_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of TASK_HEAD per category of ``analyze.quality``, all cases first."""
    out = []
    for r in rows:
        name = r["name"].partition(": ")[2] or "all"
        out.append([name, str(r["n"]), percent(r["a"]), percent(r["b"]), points(r["drop"]),
                    between(r["low"], r["high"], points), f"{r['worse']} / {r['better']}", r["state"],
                    _p(r)])  # fmt: skip
    return out


def sign_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of SIGN_HEAD per sign; the length of answers as a geometric mean and a ratio."""
    out = []
    show: Callable[[float | None], str]
    moved: Callable[[float | None], str]
    for r in rows:
        name, show, moved = str(r["name"]), percent, points
        if name == FIGURES["length"]:
            name, show, moved = "length of the answers, tokens", _tokens, _times
        out.append([name, str(r["n"]), show(r["a"]), show(r["b"]), moved(r["drop"]),
                    between(r["low"], r["high"], moved), _p(r)])  # fmt: skip
    return out


def ways(result: Mapping[str, Any]) -> list[str]:
    """How each arm's distributions were had, or why there are none."""
    found = result["agreement"]
    if found["why"]:
        return [f"no agreement of distributions: {found['why']}"]
    told = found["ways"]
    if len(told) > 1 and len(set(told.values())) == 1:
        return [f"distributions of both by {next(iter(told.values()))}"]
    return [f"distributions of {arm} by {says}" for arm, says in told.items()]


def print_quality(result: Mapping[str, Any], directory: str, out: Console | None = None) -> None:
    out = out or console()
    out.print(Text(f"\n{result['headline']}", style="bold"))
    out.print(Text(f"  A: {result['plan']['a']}\n  B: {result['plan']['b']}", style="dim"))
    for c in result["claims"]:
        mark, style = MARK[c["state"]]
        show = ANYHOW[c["figure"]]
        told = "–" if c["value"] is None else show(c["value"])
        span = f"  ({between(c['low'], c['high'], show)})"
        out.print(Text.assemble((f"{mark} ", style), (c["claim"], ""), (f"  {told}", "cyan"), (span, "dim"),
                                (f"  [{c['state']}]", "dim")))  # fmt: skip
        if c["next_step"]:
            out.print(Text(f"    to settle it: {c['next_step']}", style="dim"))
    found, tasks = result["agreement"], result["tasks"]
    if found["figures"]:
        f = found["figures"]
        title = f"distributions: {f['positions']:,} positions of {f['texts']} texts, lists of {found['k']}"
        _table(out, AGREEMENT_HEAD, agreement_rows(f), title)
        if len(found["kinds"]) > 1:
            _table(out, KIND_HEAD, kind_rows(found["kinds"]), "by kind of text")
    if tasks:
        _table(out, TASK_HEAD, task_rows(tasks["accuracy"]), f"accuracy: {tasks['cases']} tasks")
        _table(out, SIGN_HEAD, sign_rows(tasks["degeneration"]), "signs of degeneration")
    out.print()
    for line in ways(result):
        out.print(Text(line, style="dim"))
    for d in result["doubts"]:
        out.print(Text(f"doubt: {d['what']}: {d['why']}" + (f"  → {d['next']}" if d["next"] else ""), style="dim"))
    if result["partial"]:
        why = result["partial_reason"].splitlines()[0]
        out.print(Text(f"PARTIAL: {why}; what both arms were asked is compared.", style="bold yellow"))
    out.print(f"kept in {escape(directory)}: whywait show {escape(directory)}")


def _table(out: Console, head: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", title=title, title_justify="left",
                  title_style="bold")  # fmt: skip
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 or not name else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    out.print()
    out.print(table)


def _tokens(value: float | None) -> str:
    return "–" if value is None else f"{math.exp(value):.0f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"×{math.exp(value):.3g}"


def _p(r: Mapping[str, Any]) -> str:
    value = r["adjusted"]
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"
