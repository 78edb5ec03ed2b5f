"""What hand-overs took, as a Prometheus page: the figures of the split itself, and those of its engines added up.

Seconds are the front's own clock, so that each part is what a request lived through; ``blocked`` is what the engines
say they did nothing else for. The stall that a restore causes is seen in the streams beside it: gaps between their
tokens in which one fell, against all their other gaps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from whywait.lab.disagg_call import Backend

P: Final = "whywait_split:"
BOUNDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: Counter → what it is. The engine table has them by the same names.
COUNTERS: Final[Mapping[str, str]] = {
    "handover_bytes_total": "Bytes of KV handed over.",
    "handover_save_seconds_total": "Seconds hand-overs took to be written out.",
    "handover_link_seconds_total": "Seconds hand-overs spent on the link (made slow on purpose).",
    "handover_wait_seconds_total": "Seconds hand-overs waited for a place at a decode engine.",
    "handover_restore_seconds_total": "Seconds hand-overs took to be read in.",
    "handover_blocked_seconds_total": "Seconds decode engines did nothing else because they read KV in.",
    "handover_failures_total": "Hand-overs that failed.",
    "restore_gaps_total": "Gaps of streams in which another's KV was read in.",
    "restore_gap_seconds_total": "Seconds of those.",
    "other_gaps_total": "All other gaps of streams.",
    "other_gap_seconds_total": "Seconds of those.",
    "cancelled_total": "Requests whose client left.",
}
#: Of the engines' own counters, and at which of a split they count: prompts where they are computed, output where it is
#: decoded (each prefill makes one token that nobody sees, each decode computes one token of the prompt again).
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
ENGINE: Final[Mapping[str, str]] = {
    "llamacpp:prompt_tokens_total": PREFILL,
    "llamacpp:prompt_tokens_cached_total": PREFILL,
    "llamacpp:prompt_seconds_total": PREFILL,
    "llamacpp:tokens_predicted_total": DECODE,
    "llamacpp:tokens_predicted_seconds_total": DECODE,
    "llamacpp:n_decode_total": BOTH,
}
GAUGES: Final = ("llamacpp:requests_processing", "llamacpp:requests_deferred")


class Counts:
    """Of one front, since it began."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(COUNTERS, 0.0)
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.handovers, self.seconds = 0, 0.0

    def add(self, name: str, value: float = 1.0) -> None:
        """NaN is what was not told: the sum is not known from then on, and no longer on the page."""
        self.sums[name] += value

    def handed(self, seconds: float, size: int, parts: Mapping[str, float]) -> None:
        """One hand-over is done; ``parts`` (seconds) are save, link, wait and restore."""
        self.handovers += 1
        self.seconds += seconds
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.add("handover_bytes_total", size)
        for part, took in parts.items():
            self.add(f"handover_{part}_seconds_total", took)

    def gap(self, seconds: float, touched: bool) -> None:
        kind = "restore" if touched else "other"
        self.add(f"{kind}_gaps_total")
        self.add(f"{kind}_gap_seconds_total", seconds)

    def lines(self) -> list[str]:
        out = []
        for name, what in COUNTERS.items():
            if math.isnan(self.sums[name]):
                continue
            out += [f"# HELP {P}{name} {what}", f"# TYPE {P}{name} counter", f"{P}{name} {self.sums[name]:.9g}"]
        name, seen = f"{P}handover_seconds", 0
        out += [f"# HELP {name} End of prefill to the decode engine's having its KV.", f"# TYPE {name} histogram"]
        for bound, n in zip((*BOUNDS, None), self.buckets, strict=True):
            seen += n
            out.append(f'{name}_bucket{{le="{"+Inf" if bound is None else bound}"}} {seen}')
        return [*out, f"{name}_sum {self.seconds:.9g}", f"{name}_count {self.handovers}"]


def engine_lines(prefill: Sequence[Backend], decode: Sequence[Backend]) -> list[str]:
    """The engines' counters added up, from the pages they gave last."""
    pages = {id(e): _values(e.page) for e in (*prefill, *decode)}
    where = {PREFILL: prefill or decode, DECODE: decode, BOTH: (*prefill, *decode)}
    out = []
    for name, at in ENGINE.items():
        found = [v for e in where[at] if (v := pages[id(e)].get(name)) is not None]
        if len(found) == len(where[at]):  # a sum without one of them would seem to go back
            out += [f"# TYPE {name} counter", f"{name} {sum(found):.9g}"]
    return out


def gauge_lines(processing: int, deferred: int) -> list[str]:
    both = zip(GAUGES, (processing, deferred), strict=True)
    return [line for name, value in both for line in (f"# TYPE {name} gauge", f"{name} {value}")]


def deferred_of(engines: Sequence[Backend]) -> int:
    """Requests that wait inside the engines."""
    return round(sum(_values(e.page).get(GAUGES[1], 0.0) for e in engines))


def _values(page: bytes) -> dict[str, float]:
    out = {}
    for line in page.decode("utf-8", "replace").splitlines():
        name, _, value = line.partition(" ")
        if name in ENGINE or name in GAUGES:
            try:
                out[name] = float(value)
            except ValueError:
                continue
    return out
