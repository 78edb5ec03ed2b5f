"""What a service that was only watched did in a window, by its own counters: no request of ours, so no goodput.

What it drew and cost is divided by the requests that ended and the output tokens that were made, good or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whywait.analyze.counters import delta
from whywait.analyze.energy import COVERED
from whywait.core.run import Run

HOW = "by the engine's counters, goodput unknown"
#: Name of a figure → (what it is divided by, how many of that it is for).
PER: Mapping[str, tuple[str, float]] = {
    "per_request": ("requests", 1.0),
    "per_million_output_tokens": ("output_tokens", 1e6),
}
COUNTERS = {"requests": ("requests_total", "e2e_seconds_count"), "output_tokens": ("output_tokens_total",)}
WORDS = {"requests": "requests that ended", "output_tokens": "output tokens"}


def counted(run: Run, window: tuple[int, int]) -> dict[str, Any]:
    """``how``, and for ``requests`` and ``output_tokens`` what the counters grew by: ``value`` with its bounds ``low,
    high`` by the readings around the window, and ``why`` where that is null."""
    return {"how": HOW, **{what: _grown(run, window, what) for what in COUNTERS}}


def _grown(run: Run, window: tuple[int, int], what: str) -> dict[str, Any]:
    none: dict[str, Any] = {"value": None, "low": None, "high": None}
    for name in COUNTERS[what]:
        d = delta(run.readings, name, window)
        if d is None:
            continue
        covered = (d.end_ns - d.start_ns) / max(window[1] - window[0], 1)
        if d.resets:
            return {**none, "why": f"the engine's counter of {WORDS[what]} started anew in the window"}
        if covered < COVERED:
            return {**none, "why": f"the engine's counter of {WORDS[what]} was read for {covered:.0%} of the window"}
        low, high = max(min(d.low, d.value), 0.0), max(d.high, d.value)
        return {"value": d.value / covered, "low": low / covered, "high": high / covered, "why": None}
    return {**none, "why": f"the engine publishes no counter of {WORDS[what]}"}


def per(total: tuple[float | None, float | None, float | None], done: Mapping[str, Any], why: str) -> dict[str, Any]:
    """``total`` (value and bounds) by each thing in :data:`PER`, as figures with bounds; ``why`` if it is unknown."""
    value, least, most = total
    out: dict[str, Any] = {}
    for name, (what, many) in PER.items():
        n = done[what]
        if value is None or not n["value"]:
            nothing = n["why"] or f"no {WORDS[what].rpartition(' that ')[0] or WORDS[what]} in the window"
            out[name] = {"value": None, "low": None, "high": None, "why": why if value is None else nothing}
            continue
        low = (value if least is None else least) / n["high"] * many
        high = (value if most is None else most) / n["low"] * many if n["low"] else None
        out[name] = {"value": value / n["value"] * many, "low": low, "high": high, "why": None}
    return out
