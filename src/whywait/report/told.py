"""What the terminal and a notebook say of a result: the answer of a search or of a probe, or verdicts and table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from whywait.report import knee, probe, text


def print_told(summary: dict[str, Any], verdicts: Sequence[Any], directory: str, out: Console | None = None) -> None:
    """By what the summary holds; ``directory`` is where the run is kept."""
    if "find" in summary:
        knee.print_find(summary, directory, out)
    elif "probe" in summary:
        probe.print_probe(summary, directory, out)
    else:
        text.print_result(summary, verdicts, directory, out)
