"""One time line: nanoseconds after the run's zero, on the monotonic clock, with kernel stamps brought onto it."""

from __future__ import annotations

import time
from typing import Any

from whywait.units import NS_PER_MS

STEP_LIMIT_NS = NS_PER_MS
RESYNC_NS = 100 * NS_PER_MS


def bracket() -> tuple[int, int]:
    """(CLOCK_REALTIME − CLOCK_MONOTONIC, uncertainty) in ns: the tightest of a few brackets."""
    best = (0, 1 << 62)
    for _ in range(5):
        a = time.monotonic_ns()
        r = time.time_ns()
        b = time.monotonic_ns()
        if b - a < best[1]:
            best = (r - (a + b) // 2, b - a)
    return best


class Clock:
    """``now()`` is ns after zero. Kernel receive stamps are CLOCK_REALTIME: ``from_kernel`` converts them.

    The offset between the clocks is bracketed again every 100 ms; a jump of more than 1 ms is a clock step: stamps
    taken across it are refused (None) and the step is counted.
    """

    def __init__(self, zero_unix_ns: int | None = None) -> None:
        self.offset, self.error_ns = bracket()
        if zero_unix_ns is None:
            zero_unix_ns = time.monotonic_ns() + self.offset
        self.zero_unix_ns = zero_unix_ns
        self._zero_mono = zero_unix_ns - self.offset
        self._next_sync = 0
        self._distrust_until = 0
        self.steps = 0

    def zero_at(self, mono_ns: int) -> None:
        """From now on zero is here on CLOCK_MONOTONIC: where the line is another machine's, and ours went astray."""
        self._zero_mono = mono_ns

    def now(self) -> int:
        return time.monotonic_ns() - self._zero_mono

    def resync(self, now_ns: int) -> None:
        """Bracket again when it is time to, or when the clocks disagree; cheap to call on every loop."""
        if now_ns < self._next_sync and abs(time.time_ns() - time.monotonic_ns() - self.offset) < STEP_LIMIT_NS:
            return
        self._next_sync = now_ns + RESYNC_NS
        offset, error = bracket()
        if abs(offset - self.offset) > STEP_LIMIT_NS:
            self.steps += 1
            self._distrust_until = now_ns + RESYNC_NS
        self.offset, self.error_ns = offset, max(self.error_ns, error)

    def from_kernel(self, unix_ns: int, now_ns: int) -> int | None:
        """A kernel stamp on this time line, or None when the clock stepped or the stamp is not in the past."""
        t = unix_ns - self.offset - self._zero_mono
        if now_ns < self._distrust_until or t > now_ns + NS_PER_MS or t < now_ns - 60_000 * NS_PER_MS:
            return None
        return min(t, now_ns)

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {"offset_error_ns": self.error_ns, "steps": self.steps}
