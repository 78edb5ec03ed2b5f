"""Which request is due now. Pure: told the time and the completions, it reads no clock and sends nothing."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Pacer(Protocol):
    """``take`` until it gives None, then sleep until ``wake_ns`` or the next completion."""

    def take(self, now_ns: int) -> tuple[int, int] | None:
        """(row, due_ns) of the next request to send at ``now_ns``, or None when nothing is due."""
        ...

    def wake_ns(self) -> int | None:
        """When something will next be due without any completion; None when only a completion can change that."""
        ...

    def done(self, row: int, now_ns: int) -> None:
        """Request ``row`` ended."""
        ...


class ClosedLoop:
    """Keep ``concurrency`` requests in flight until ``n`` were sent or ``stop_ns`` has passed.

    A request is due at the moment its place became free, so the client's own lateness stays visible.
    """

    def __init__(self, n: int, concurrency: int, start_ns: int, stop_ns: int | None = None) -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self._n, self._stop = n, stop_ns
        self._free = [start_ns] * concurrency
        self._next = 0

    def take(self, now_ns: int) -> tuple[int, int] | None:
        if self._next >= self._n or not self._free or (self._stop is not None and now_ns >= self._stop):
            return None
        row = self._next
        self._next += 1
        return row, self._free.pop()

    def wake_ns(self) -> int | None:
        return None

    def done(self, row: int, now_ns: int) -> None:  # noqa: ARG002 - any completion frees one place
        self._free.append(now_ns)


class OpenLoop:
    """Send each row at its own ``due_ns``, whatever came of the others: an absolute timetable that never slips."""

    def __init__(self, due_ns: NDArray[np.int64], start_ns: int) -> None:
        if len(due_ns) and (np.diff(due_ns) < 0).any():
            raise ValueError("due times must not decrease")
        self._due = [start_ns + d for d in due_ns.tolist()]
        self._next = 0

    def take(self, now_ns: int) -> tuple[int, int] | None:
        if self._next >= len(self._due) or self._due[self._next] > now_ns:
            return None
        row = self._next
        self._next += 1
        return row, self._due[row]

    def wake_ns(self) -> int | None:
        return self._due[self._next] if self._next < len(self._due) else None

    def done(self, row: int, now_ns: int) -> None:
        pass
