"""Whether processes have ended."""

from __future__ import annotations

import time

from whywait.lab import state


def gone(pid: int, within_s: float = 8.0) -> bool:
    """Whether it ends within that time."""
    until = time.monotonic() + within_s
    while state.start_mark(pid) != "":
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
