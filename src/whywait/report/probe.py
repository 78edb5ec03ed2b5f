"""The answer of ``whywait probe`` as text: costs with their intervals, what the pairs showed, what is undecided."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.report.text import console
from whywait.units import ms, number, percent, size

MARK = {"holds": "●", "undecided": "?", "fails": "○"}


def print_probe(summary: dict[str, Any], directory: str, out: Console | None = None) -> None:
    """The figures, the findings and the doubts of a probe."""
    out = out or console()
    p = summary["probe"]
    out.print(Text(f"\n{headline(p)}", style="bold"))
    sent = f"{p['requests']} requests in {p['rounds']} rounds, {p['failed']} failed; {p['how']}, 95 % intervals"
    out.print(Text(f"  {sent}", style="dim"))
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name, side in (("", "left"), ("cost", "right"), ("between", "left"), ("n", "right"), ("engine says", "right"),
                       ("", "left")):  # fmt: skip
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for row in _costs(p):
        table.add_row(*row)
    out.print()
    out.print(table)
    out.print()
    for state, text in _findings(p):
        out.print(Text(f"{MARK[state]} {text}  [{state}]", style="" if state != "undecided" else "yellow"))
    for line in _network(p["network"]):
        out.print(Text(f"  {line}", style="dim"))
    for d in p["doubts"]:
        out.print(Text(f"  {d['what']}: {d['why']}", style="dim"))
    if summary["partial"]:
        out.print(Text("PARTIAL: this probe was cut short; what was measured is kept.", style="bold yellow"))
    out.print(f"run kept in {escape(directory)}")


def headline(p: dict[str, Any]) -> str:
    """One sentence: what a single stream costs, as far as it is known."""
    prefill, decode = p["prefill"], p["decode"]
    parts = []
    if prefill["state"] == "holds":
        fixed = f"{ms(prefill['fixed_ms']['value'])} and " if prefill["fixed_ms"]["state"] == "holds" else ""
        parts.append(f"the first token takes {fixed}{number(prefill['per_token_us']['value'])} µs per prompt token")
    if decode["state"] == "holds":
        parts.append(f"each further token {ms(decode['fixed_ms']['value'])}")
    return ", ".join(parts) or "undecided: the figures do not stand out of the noise"


def _costs(p: dict[str, Any]) -> list[tuple[str, str, str, str, str, str]]:
    said = p["engine_says"] or {}
    prefill, decode = p["prefill"], p["decode"]
    wanted = [
        ("prefill, fixed", prefill, "fixed_ms", "ms", "fixed_ms"),
        ("prefill, per token", prefill, "per_token_us", "µs", "per_token_us"),
        ("prefill, per token²", prefill, "per_token2_ns", "ns", ""),
        ("prefill rate", prefill, "tokens_per_s", "tokens/s", ""),
        ("decode step, fixed", decode, "fixed_ms", "ms", "step_fixed_ms"),
        ("decode step, per token of context", decode, "per_context_token_us", "µs", "per_context_token_us"),
    ]
    rows = []
    for name, part, key, unit, theirs in wanted:
        if key in part:
            rows.append(_row(name, part[key], unit, said.get(theirs)))
        elif key in ("fixed_ms", "per_token_us") and part["state"] == "undecided":
            rows.append((name, "–", "", str(part["n"]), "", f"undecided: {part['why']}"))
    if p["bandwidth"]:
        b = p["bandwidth"]
        between = "" if b["lo"] is None else f"{size(b['lo'])} … {size(b['hi'])}"
        rows.append((f"weights ({size(b['model_bytes'])}) read", f"{size(b['value'])}/s", between, str(b["n"]), "",
                     "modelled"))  # fmt: skip
    return rows


def _row(name: str, e: dict[str, Any], unit: str, said: dict[str, Any] | None) -> tuple[str, str, str, str, str, str]:
    between = "" if e["lo"] is None or e["hi"] is None else f"{number(e['lo'])} … {number(e['hi'])}"
    theirs = f"{number(said['value'])} {unit}" if said else ""
    state = "" if e["state"] == "holds" else f"undecided: {e['why']}"
    return name, number(e["value"], unit), between, str(e["n"]), theirs, state


def _findings(p: dict[str, Any]) -> list[tuple[str, str]]:
    cache, second, beside = p["cache"], p["second_stream"], p["long_neighbour"]
    block = f"; it keeps them in blocks of {cache['block_tokens']} token(s)" if cache["block_tokens"] else ""
    later = cache["saved_later"]
    kept = "" if cache["state"] != "holds" or later["value"] is None else \
        f"; at the end of a round {percent(max(later['value'], 0))} is saved"  # fmt: skip
    stall = ""
    if beside["stall_ms"]["value"] is not None and beside["kind"] in ("whole", "chunked"):
        stall = f"; the longest gap is {ms(beside['stall_ms']['value'])}"
        if beside["chunk_tokens"]:
            stall += f", pieces of about {number(beside['chunk_tokens'])} tokens"
    return [
        (cache["state"], f"a prefix cache is on: {cache['why']}{kept}{block}"),
        (second["state"], f"second stream, {second['kind']}: {second['why']} (n = {second['n']})"),
        (beside["state"], f"long neighbour, {beside['kind']}: {beside['why']}{stall} (n = {beside['n']})"),
    ]


def _network(n: dict[str, Any]) -> list[str]:
    parts = [f"connect {ms(n['connect_ms']['value'])}"]
    if n["tls_ms"]["value"] is not None:
        parts.append(f"TLS {ms(n['tls_ms']['value'])}")
    parts += [f"round trip {ms(n['rtt_ms'])}", f"headers after {ms(n['headers_ms']['value'])}",
              f"least TTFT seen {ms(n['least_ttft_ms'])}"]  # fmt: skip
    late = ["headers come with the first token: their time says nothing of the network"]
    return ["network: " + ", ".join(parts)] + (late if n["headers_come_with_the_first_token"] else [])
