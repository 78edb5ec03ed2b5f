"""A load point as the text block that serving benchmarks print: names, units and columns as in `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from whywait.report.text import print_invalid
from whywait.units import load_name

WIDTH, NAME = 50, 40
LEAST_P99 = 368  # requests without which a p99 has no upper bound (docs/metrics.md)
SECTIONS = (("ttft_ms", "TTFT", "Time to First Token"), ("tpot_ms", "TPOT", "Time per Output Token (excl. 1st token)"),
            ("itl_ms", "ITL", "Inter-token Latency"), ("e2e_ms", "E2EL", "End-to-end Latency"))  # fmt: skip
NOTES = (
    "whole point, warm-up and drain included, as serving benchmarks count; whywait's own figures (--format text) are "
    "those of the steady window",
    "TTFT and E2EL count from when a request was due (--rate) or sent (--concurrency), to the kernel's receive stamps "
    "where there are any",
    "ITL is per token (the gap divided by its chunk's tokens), not per chunk; TPOT leaves out the first chunk's tokens",
    "E2EL ends with the last token; token counts are the service's own",
    "more: docs/terminal.md, docs/metrics.md",
)


def print_bench(
    points: Sequence[dict[str, Any]], summary: dict[str, Any], directory: str, out: Console | None = None
) -> None:
    """A block per load point (``analyze.whole_point``), then what its words mean here."""
    from whywait.report.text import console

    out = out or console()
    print_invalid(out, summary["invalid"])
    for p in points:
        if len(points) > 1:
            out.print(f"{load_name(p['mode'], p['target'], p['label'])}:", markup=False)
        for line in block(p):
            out.print(line, markup=False, overflow="ignore", no_wrap=True)
    for note in notes(points, summary):
        out.print(f"note: {note}", markup=False)
    out.print(f"run kept in {directory}", markup=False)


def block(p: dict[str, Any]) -> list[str]:
    """The lines of one load point. What is not known is ``n/a``; no figure is filled in."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", _row("Successful requests:", p["completed"]),
             _row("Failed requests:", p["failed"])]  # fmt: skip
    if p["mode"] == "concurrency":
        lines.append(_row("Maximum request concurrency:", None if p["target"] is None else int(p["target"])))
    else:
        lines.append(_row("Request rate configured (RPS):", p["target"]))
    lines += [
        _row("Benchmark duration (s):", float(p["seconds"])),
        _row("Total input tokens:", p["prompt_tokens"]),
        _row("Total generated tokens:", p["output_tokens"]),
        _row("Request throughput (req/s):", p["requests_per_s"]),
    ]
    if p["good_per_s"] is not None:
        lines.append(_row("Request goodput (req/s):", p["good_per_s"]))
    lines += [
        _row("Output token throughput (tok/s):", p["output_tokens_per_s"]),
        _row("Peak output token throughput (tok/s):", p["peak_tokens_per_s"]),
        _row("Peak concurrent requests:", float(p["peak_in_flight"])),
        _row("Total token throughput (tok/s):", p["total_tokens_per_s"]),
    ]
    for key, short, title in SECTIONS:
        lines.append(f"{title:-^{WIDTH}}")
        lines += [_row(f"{name} {short} (ms):", p[key][q]) for name, q in _QUANTILES]
    return [*lines, "=" * WIDTH]


_QUANTILES = (("Mean", "mean"), ("Median", "p50"), ("P99", "p99"))


def _row(name: str, value: float | int | None) -> str:
    text = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<{NAME}} {text:<10}"


def notes(points: Sequence[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    """What the words of the block mean here, and what to doubt in these figures."""
    out = list(NOTES)
    if (made := summary.get("made_by")) not in (None, "measured"):
        out.insert(0, f"these figures are {made}, not measured by whywait")
    few = [str(p["ttft_ms"]["n"]) for p in points if p["ttft_ms"]["n"] < LEAST_P99]
    if few:
        out.append(f"P99 of {', '.join(few)} requests has no upper bound: {LEAST_P99} are needed")
    if cut := sum(p["censored"] for p in points):
        out.append(f"{cut} of the failed requests were cut off by the end of the run")
    if summary["partial"]:
        out.append("PARTIAL: this run was cut short; what was measured is kept")
    if n := len(summary["doubts"]):
        out.append(f"{n} doubts: whywait show, without --format, tells them")
    return out
