"""What disturbed a round of a paired trial, seen by the machine's own readings and the client's, never by the result.

So a rule that leaves disturbed rounds out, named before the first of them, cannot favour either arm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from whywait.analyze.counters import delta
from whywait.analyze.trust import foreign
from whywait.core.run import Run
from whywait.units import NS_PER_S, percent

NEIGHBOURS: Final = 0.1  # of the engine's cores (or of one core, where those are not known) used by others
FOREIGN: Final = 0.05  # of what we sent
RULES: Final[Mapping[str, str]] = {
    "client": "the client was late, or did not keep the rate",
    "neighbours": f"others used {NEIGHBOURS:.0%} or more of the engine's cores (not pinned: of one core)",
    "foreign": "the service also answered somebody else",
}


def disturbances(run: Run, summary: Mapping[str, Any]) -> dict[str, str]:
    """Which of ``RULES`` the round breaks, each with what was seen; ``summary`` is that of ``run``."""
    out = {}
    if summary["invalid"]:
        out["client"] = "; ".join(summary["invalid"])
    others = neighbours(run)
    if others is not None and others >= NEIGHBOURS:
        where = "the engine's cores" if run.manifest.engine.get("cpus") else "a core"
        out["neighbours"] = f"others used {percent(others)} of {where}"
    beyond = [f for f in foreign(run) if abs(f.excess) > FOREIGN * max(f.sent_high, 1.0) and np.isfinite(f.sent_high)]
    if beyond:
        out["foreign"] = f"{beyond[0].name} moved by {beyond[0].excess:+.0f} beyond what was sent"
    return out


def neighbours(run: Run) -> float | None:
    """The part of the engine's cores that others used during the points of ``run``, 0 …; of one core where the engine
    is not tied to any. None where the host was not read."""
    if not len(run.points):
        return None
    span = (int(run.points["start_ns"].min()), int(run.points["end_ns"].max()))
    cores = len(run.manifest.engine.get("cpus") or ())
    own = delta(run.readings, "engine_cores_other_seconds_total", span, "host") if cores else None
    found = own or delta(run.readings, "other_cpu_seconds_total", span, "host")
    if found is None or found.end_ns <= found.start_ns:
        return None
    return found.value * NS_PER_S / (found.end_ns - found.start_ns) / (cores if own else 1)
