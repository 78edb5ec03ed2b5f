"""A request as spans in a lane: its phases one after the other, its stalls where its gaps were long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from whywait.analyze.phases import PHASES
from whywait.analyze.streams import Content, Gaps
from whywait.core.table import Array
from whywait.report.svg import At, Plot
from whywait.report.text import PHASE_NAMES
from whywait.units import NS_PER_MS, ms

MOST_STALLS = 8  # drawn of a request, the longest
_BEFORE = ("client", "network", "frontend", "unknown", "queue", "prefill")
Spans = list[tuple[str, float, float]]


def spans(line: Sequence[int], begin: float, first: float, stalls: Iterable[At] = ()) -> Spans:
    """(phase, from, to) in ns of a request whose account is ``line`` and began at ``begin``; ``first`` is when its
    first token came (NaN: never). How long each phase took is known; their order before the first token is assumed.
    ``stalls`` come last: they lie over decode."""
    parts = dict(zip(PHASES, (int(v) for v in line), strict=True))
    total, decoding = sum(parts.values()), parts["decode"] + parts["stall"]
    wait = int(first - begin) if np.isfinite(first) else total - decoding - parts["tail"]
    unknown = min(max(wait - sum(parts[k] for k in _BEFORE if k != "unknown"), 0), parts["unknown"])
    order = [(k, unknown if k == "unknown" else parts[k]) for k in _BEFORE]
    order += [("decode", decoding), ("tail", parts["tail"]), ("unknown", parts["unknown"] - unknown)]
    out, t = [], begin
    for name, length in order:
        out += [(name, t, t + length)] if length > 0.0005 * total else []
        t += length
    return [*out, *(("stall", a, b) for a, b in stalls)]


def draw(plot: Plot, found: Spans, x: tuple[float, float], at: tuple[float, float]) -> None:
    """The spans as bars; ``x`` is (ns at the left edge, ns of the whole width), ``at`` (top, height) in pixels."""
    for name, a, b in found:
        left, right = (min(max((t - x[0]) / x[1], 0.0), 1.0) for t in (a, b))
        if right - left > 0.0001:
            plot.rect((left, at[0]), (right - left, at[1]), f"f-{name}")


def told(line: Sequence[int]) -> str:
    """``queue 1,200 ms, decode 341 ms``: the account of a request in words, in its order."""
    parts = dict(zip(PHASES, line, strict=True))
    return ", ".join(f"{PHASE_NAMES[k]} {ms(float(v) / NS_PER_MS)}" for k, v in parts.items() if v)


def stalls_of(g: Gaps | None, row: int, left: int) -> list[At]:
    """Where the stalled time of a request is drawn: at the ends of its longest gaps, until it is used up."""
    out: list[At] = []
    if g is None or left <= 0:
        return out
    a, b = np.searchsorted(g.row, [row, row + 1])
    usual = float(np.median(g.value[a:b])) if b > a else 0.0
    for i in a + np.argsort(-g.value[a:b], kind="stable")[:MOST_STALLS]:
        took = min(float(g.value[i]) - usual, float(left))
        if took > 0:
            until = float(g.begin_ns[i] + g.value[i])
            out, left = [*out, (until - took, until)], left - round(took)
    return out


def chunk_times(c: Content, row: int, most: int) -> Array:
    """When the chunks of a request came (ns), at most about ``most`` of them, evenly left out."""
    a, b = np.searchsorted(c.row, [row, row + 1])
    times: Array = c.t[a:b]
    return times[:: max(1, -(-len(times) // most))]
