"""When to look at a request again: its deadline, or the end of a grace. Of those that have ended little is kept."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whywait.net.client import Flight
    from whywait.net.conn import Conn

MOST_STALE = 4096  # timers kept of requests that have ended


class Timers:
    """A heap of times. A request that ends leaves its timer in it, which is passed over when it comes; but a timeout of
    minutes would keep every request of those minutes alive, so now and then all such timers are let go of."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Conn, Flight]] = []
        self._serial = itertools.count()
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, t_ns: int, conn: Conn, flight: Flight) -> None:
        heapq.heappush(self._heap, (t_ns, next(self._serial), conn, flight))

    def next_ns(self) -> int | None:
        """The earliest time; None where there is none."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ns: int) -> Iterator[tuple[Conn, Flight]]:
        """Those whose time has come and that are still in flight on their connection."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, conn, flight = heapq.heappop(self._heap)
            if conn.flight is flight:
                yield conn, flight

    def ended(self, flight: Flight) -> None:
        """``flight`` has ended, or is about to; its connection may still name it."""
        self._stale += 1
        if self._stale > MOST_STALE and self._stale > len(self._heap) // 2:
            self._heap = [x for x in self._heap if x[2].flight is x[3] and x[3] is not flight]
            heapq.heapify(self._heap)
            self._stale = 0
