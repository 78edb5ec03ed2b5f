"""Which request is due now. Pure: told the time and the completions, it reads no clock and sends nothing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from whywait.core.schedule import Ints, Schedule


class Pacer(Protocol):
    """``take`` until it gives None, then sleep until ``wake_ns`` or the next completion."""

    def take(self, now_ns: int) -> tuple[int, int] | None:
        """(row, due_ns) of the next request to send at ``now_ns``, or None when nothing is due."""
        ...

    def wake_ns(self) -> int | None:
        """When something will next be due without any completion; None when only a completion can change that."""
        ...

    def done(self, row: int, now_ns: int, ok: bool = True) -> None:
        """Request ``row`` ended at ``now_ns``; what comes after it is sent only if it was ``ok``."""
        ...


def _nothing() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Chains:
    """Which row follows which: ``after`` (−1: none), the pause before it, and the earliest it may be due (−1: no such).

    Empty arrays mean that every row stands for itself.
    """

    after: Ints = field(default_factory=_nothing)
    think_ns: Ints = field(default_factory=_nothing)
    due_ns: Ints = field(default_factory=_nothing)

    @classmethod
    def of(cls, schedule: Schedule) -> Chains:
        if not schedule.has_sessions:
            return cls()
        return cls(schedule.after_rows(), schedule.think_ns, schedule.due_ns)


class _Followers:
    """Rows that wait for another: ready ones by the time they became so, and those that will never come."""

    def __init__(self, chains: Chains, start_ns: int) -> None:
        self._start = start_ns
        self._think, self._due = chains.think_ns.tolist(), chains.due_ns.tolist()
        self._next: dict[int, list[int]] = {}
        for row, before in enumerate(chains.after.tolist()):
            if before >= 0:
                self._next.setdefault(before, []).append(row)
        self.ready: list[tuple[int, int]] = []
        self.lost: list[int] = []

    def done(self, row: int, now_ns: int, ok: bool, stop_ns: int | None) -> None:
        for follower in self._next.pop(row, ()):
            if not ok:
                self._lose(follower)
                continue
            due = now_ns + self._think[follower]
            if self._due[follower] >= 0:
                due = max(due, self._start + self._due[follower])
            if stop_ns is None or due < stop_ns:
                heapq.heappush(self.ready, (due, follower))

    def _lose(self, row: int) -> None:
        left = [row]
        while left:
            self.lost.append(left.pop())
            left += self._next.pop(self.lost[-1], ())


class ClosedLoop:
    """Keep ``concurrency`` requests in flight until ``n`` were sent or ``stop_ns`` has passed.

    A request is due at the moment its place became free, or when it was ready if that is later, so the client's own
    lateness stays visible. A turn that is ready goes before a session that has not begun; while a user thinks, the
    place is another's. With ``ramp_ns`` the places open one after another, evenly over that time.
    """

    def __init__(
        self, n: int, concurrency: int, start_ns: int, stop_ns: int | None = None, *, ramp_ns: int = 0,
        chains: Chains | None = None,
    ) -> None:  # fmt: skip
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self._stop = stop_ns
        self._free = [start_ns + ramp_ns * i // concurrency for i in range(concurrency)]  # in order: a heap
        chains = chains or Chains()
        self._followers = _Followers(chains, start_ns)
        self._roots = np.flatnonzero(chains.after < 0).tolist() if len(chains.after) else range(n)
        self._next = 0
        self._over = False

    @property
    def lost(self) -> list[int]:
        """Rows that will not be sent, since one they come after failed."""
        return self._followers.lost

    def take(self, now_ns: int) -> tuple[int, int] | None:
        free, ready = self._free, self._followers.ready
        self._over = self._stop is not None and now_ns >= self._stop
        if self._over or not free or free[0] > now_ns:
            return None
        if ready and ready[0][0] <= now_ns:
            since, row = heapq.heappop(ready)
            return row, max(since, heapq.heappop(free))
        if self._next >= len(self._roots):
            return None
        row = self._roots[self._next]
        self._next += 1
        return row, heapq.heappop(free)

    def wake_ns(self) -> int | None:
        if self._over or not self._free:
            return None
        place, ready = self._free[0], self._followers.ready
        wake = max(place, ready[0][0]) if ready else None
        if self._next < len(self._roots):
            wake = place
        return None if wake is None or (self._stop is not None and wake >= self._stop) else wake

    def done(self, row: int, now_ns: int, ok: bool = True) -> None:
        heapq.heappush(self._free, now_ns)
        self._followers.done(row, now_ns, ok, self._stop)


class OpenLoop:
    """Send each row at its own ``due_ns``, whatever came of the others: an absolute timetable that never slips.

    Rows that follow another are due after it. ``most`` bounds the requests in flight: what is due then waits for a
    place, still due when it was due, so that its wait counts. After ``stop_ns`` no
    follower becomes due any more, while the timetable itself is kept to its end.
    """

    def __init__(
        self, due_ns: NDArray[np.int64], start_ns: int, stop_ns: int | None = None, *, most: int | None = None,
        chains: Chains | None = None,
    ) -> None:  # fmt: skip
        chains = chains or Chains()
        rows = np.flatnonzero(chains.after < 0) if len(chains.after) else np.arange(len(due_ns))
        if len(rows) and (np.diff(due_ns[rows]) < 0).any():
            raise ValueError("due times must not decrease")
        if most is not None and most < 1:
            raise ValueError("at least 1 request must be allowed in flight")
        self._roots = rows.tolist()
        self._due = [start_ns + d for d in due_ns[rows].tolist()]
        self._followers = _Followers(chains, start_ns)
        self._next = self._flying = 0
        self._most, self._stop = most, stop_ns

    @property
    def lost(self) -> list[int]:
        """Rows that will not be sent, since one they come after failed."""
        return self._followers.lost

    def take(self, now_ns: int) -> tuple[int, int] | None:
        due = self._earliest()
        if due is None or due > now_ns or self._flying == self._most:
            return None
        ready = self._followers.ready
        if ready and ready[0][0] == due:
            row = heapq.heappop(ready)[1]
        else:
            row = self._roots[self._next]
            self._next += 1
        self._flying += 1
        return row, due

    def wake_ns(self) -> int | None:
        return None if self._flying == self._most else self._earliest()

    def done(self, row: int, now_ns: int, ok: bool = True) -> None:
        self._flying -= 1
        self._followers.done(row, now_ns, ok, self._stop)

    def _earliest(self) -> int | None:
        ready = self._followers.ready
        root = self._due[self._next] if self._next < len(self._due) else None
        if not ready:
            return root
        return ready[0][0] if root is None else min(root, ready[0][0])
