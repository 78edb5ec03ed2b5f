"""Which figures of a what-if the check contradicts: those that a calibration without their load had wrong.

A claim rests on the interval of its figure. Where a left-out load lay outside that interval, or beyond the bound, the
interval is known to be too narrow on this very service, and what it says of a change is not to be claimed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from whywait.judge.calibrate import family
from whywait.judge.calibrate_check import Check, Miss

#: What follows from tokens per second, or is made of other figures: the families whose misses are its own.
MADE_OF = {
    "usd_per_million_tokens": ("output_tokens_per_s",), "energy_j_per_token": ("output_tokens_per_s",),
    "requests_per_s": ("output_tokens_per_s",), "e2e_ms": ("ttft_ms", "tpot_ms"),
    "goodput_requests_per_s": ("output_tokens_per_s",),
}  # fmt: skip
#: Parts of a figure that add up to it (in the same unit): a miss counts where it is a share of the whole.
PARTS = {"ttft_ms": ("prefill_ms", "queue_ms"), "e2e_ms": ("prefill_ms", "queue_ms")}
#: Figures that a bound of an SLO is held against.
HELD = {"ttft_ms": ("ttft_ms",), "ttfa_ms": ("ttft_ms",), "tpot_ms": ("tpot_ms",), "itl_ms": ("tpot_ms",),
        "e2e_ms": ("ttft_ms", "tpot_ms")}  # fmt: skip
MATERIAL = 0.05  # of the figure, before or after the change: a part that is missed by less does not spoil it


def wrong(m: Miss, bound: dict[str, float] | None = None) -> bool:
    """Whether a left-out figure is outside its interval or beyond its bound."""
    limit = (bound or {}).get(family(m.metric), math.inf)
    return not m.seen and (not m.predicted.holds(m.measured) or abs(m.error) > limit)


def doubt(checked: Check, load: str, metric: str, sizes: Sequence[float | None], slo: Collection[str] = ()) -> str:
    """Why a figure at a load may not be claimed; empty where it may.

    The load itself, left out, says so; a load that never was left out (not measured, or the lighter of two) is held
    to all that were. ``sizes`` are the figure before and after, in its unit: a part's miss is held against them.
    ``slo`` are the keys that goodput is made by.
    """
    own = [m for m in checked.held_out if m.point == load] or list(checked.held_out)
    head, _, stat = metric.partition(".")
    stats = {"mean", "p90" if stat in ("p95", "p99") else stat} if stat else set()
    bound = dict(checked.bound)
    kin = MADE_OF.get(head, (head,))
    if head == "goodput_requests_per_s":
        kin += tuple(f for key in slo for f in HELD.get(key, ()))
    for m in own:
        name, _, of = m.metric.partition(".")
        made = name in kin and (not of or not stats or of in stats)
        if wrong(m, bound) and (made or (name in PARTS.get(head, ()) and _material(m, sizes))):
            how = "outside its interval" if not m.predicted.holds(m.measured) else "beyond its bound"
            return f"{m.metric} of {m.point} is missed by {100 * m.error:+.0f} % when left out, {how}"
    return ""


def _material(m: Miss, sizes: Sequence[float | None]) -> bool:
    known = [x for x in sizes if x is not None and math.isfinite(x) and x > 0]
    return not known or abs(m.predicted.median - m.measured) > MATERIAL * min(known)
