"""The catalogue as text: a table per kind, or one entry in full."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whywait.report.text import console
from whywait.units import number


def print_lists(found: dict[str, list[dict[str, Any]]], out: Console | None = None) -> None:
    out = out or console()
    for i, (kind, rows) in enumerate(found.items()):
        if i:
            out.print()
        out.print(Text(kind, style="bold"))
        out.print(_LISTS[kind](rows))
    out.print(Text("\none in full, with its source: whywait catalog machines h200", style="dim"))


def print_entry(entry: dict[str, Any], out: Console | None = None) -> None:
    out = out or console()
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    for key, value in entry.items():
        if value in (None, "", (), {}, 0, False) and key != "name":
            continue
        table.add_row(key.replace("_", " "), _said(key, value))
    out.print(table)


def _said(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_said(key, v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return " – ".join(_said(key, v) for v in value) if key == "price_usd_h" else ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("bytes_per_s"):
        return f"{number(value / 1e9)} GB/s"
    if key == "flops":
        return f"{number(value / 1e12)} TFLOP/s"
    if key.endswith("bytes"):
        return f"{number(value / 1e9)} GB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _columns(heads: tuple[str, ...], left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < left or i == len(heads) - 1 else "right")
    return table


def _machines(rows: list[dict[str, Any]]) -> Table:
    table = _columns(("name", "typed", "memory GB", "TB/s", "TFLOP/s bf16", "fp8", "fp4", "link GB/s", "W", "$/h"), 2)
    for m in rows:
        flops, price = m["flops"], m["price_usd_h"]
        table.add_row(m["name"], (m["also"] or ("",))[0], number(m["memory_bytes"] / 1e9),
                      number(m["read_bytes_per_s"] / 1e12),
                      *(number(flops[k] / 1e12) if k in flops else "–" for k in ("bf16", "fp8", "fp4")),
                      number(m["link_bytes_per_s"] / 1e9), number(m["tdp_w"]),
                      "–".join(f"{x:g}" for x in dict.fromkeys(price)) if price else "–")  # fmt: skip
    return table


def _models(rows: list[dict[str, Any]]) -> Table:
    table = _columns(("name", "layers", "hidden", "heads", "KV heads", "experts", "context", "stored in"))
    for m in rows:
        experts = f"{m['chosen']} of {m['experts']}" if m["experts"] else "–"
        heads = "latent" if m["latent"] else str(m["kv_heads"])
        table.add_row(m["name"], str(m["layers"]), str(m["hidden"]), str(m["heads"]), heads, experts,
                      f"{m['max_context']:,}" if m["max_context"] else "–",
                      m["native_experts"] or m["native"])  # fmt: skip
    return table


def _techniques(rows: list[dict[str, Any]]) -> Table:
    table = _columns(("written", "cuts", "its price"), 3)
    for t in rows:
        table.add_row(t["syntax"].split("[:")[0], t["cuts"], t["price"])
    return table


def _engines(rows: list[dict[str, Any]]) -> Table:
    table = _columns(("name", "sequences", "token budget", "KV block", "memory share", "chunked prefill"))
    for e in rows:
        table.add_row(e["name"], str(e["max_seqs"]), f"{e['token_budget']:,}", str(e["block"]),
                      f"{e['memory_share']:g}", "yes" if e["chunked"] else "no")  # fmt: skip
    return table


def _waits(rows: list[dict[str, Any]]) -> Table:
    table = _columns(("name", "what it is"), 2)
    for w in rows:
        table.add_row(w["name"], w["meaning"])
    return table


_LISTS = {"machines": _machines, "models": _models, "techniques": _techniques, "engines": _engines, "waits": _waits}
