"""What a split service's hand-overs took, from its requests and its front's counters; of others nothing."""

from __future__ import annotations

import numpy as np

from whywait.analyze.counters import delta
from whywait.core.run import Run

#: Figure → the counter of seconds that it is the mean of, per hand-over.
PARTS = {
    "handover_save_ms": "handover_save_seconds_total",
    "handover_link_ms": "handover_link_seconds_total",
    "handover_wait_ms": "handover_wait_seconds_total",
    "handover_restore_ms": "handover_restore_seconds_total",
    "handover_blocked_ms": "handover_blocked_seconds_total",
}


def handovers(run: Run, point: int) -> dict[str, float | None]:
    """Figures of one load point; None where it says nothing.

    ``handover_ms.mean`` and ``handover_bytes`` are means over the requests that say it, ``handover_mb_s`` their bytes
    by their time (10⁶ bytes/s); the parts are the growth of the front's counters by hand-over. ``restore_stall_ms`` is
    how much longer the gaps of streams were in which another's KV was read in than their other gaps (means).
    """
    req = run.point(point).requests
    ms, size = req["engine_handover_ms"], req["handover_bytes"]
    both = ~np.isnan(ms) & ~np.isnan(size) & (ms > 0)
    out: dict[str, float | None] = {
        "handover_ms.mean": float(np.nanmean(ms)) if (~np.isnan(ms)).any() else None,
        "handover_bytes": float(np.nanmean(size)) if (~np.isnan(size)).any() else None,
        "handover_mb_s": float(size[both].sum() / ms[both].sum() / 1e3) if both.any() else None,
    }
    row = run.points["point"] == point
    span = int(run.points["start_ns"][row][0]), int(run.points["end_ns"][row][0])

    done = delta(run.readings, "handover_seconds_count", span)

    def grew(name: str) -> float | None:
        found = delta(run.readings, name, span)
        if found is None or (done is not None and found.end_ns < done.end_ns):  # it fell silent: an engine did not tell
            return None
        return found.high  # from before the point to after it

    n = grew("handover_seconds_count")
    for figure, counter in PARTS.items():
        took = grew(counter)
        out[figure] = 1e3 * took / n if n and took is not None else None
    means = []
    for kind in ("restore", "other"):
        count, seconds = grew(f"{kind}_gaps_total"), grew(f"{kind}_gap_seconds_total")
        means.append(seconds / count if count and seconds is not None else None)
    touched, other = means
    out["restore_stall_ms"] = None if touched is None or other is None else 1e3 * (touched - other)
    return out
