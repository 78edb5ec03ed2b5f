"""The event loop under everything of ours that serves: readiness of descriptors, and timers on a heap; single thread.

A timer is a plain callable that *returns* when it wants to run again: a stream of chunks then costs one ``heapreplace``
per chunk instead of a pop, a push and a new closure.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from time import monotonic_ns

IDLE_NS = 2_000_000
IN, OUT = 1, 4  # EPOLLIN = POLLIN and EPOLLOUT = POLLOUT wherever either exists

Timer = Callable[[], "int | None"]
Ready = Callable[[int], None]


class Poll:
    """Readiness by poll(2): everywhere, with timeouts in whole milliseconds."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register, self.modify, self.unregister = self._poll.register, self._poll.modify, self._poll.unregister

    def wait(self, seconds: float | None) -> list[tuple[int, int]]:
        # Rounded up: waking before the timer is due would only spin.
        return self._poll.poll(None if seconds is None else -int(-seconds * 1e3 // 1))

    def close(self) -> None:
        pass


if sys.platform == "linux":

    class Epoll:
        """Readiness by epoll, with timeouts in microseconds.

        ``epoll.poll`` rounds its timeout up to whole milliseconds, which would make every chunk up to 1 ms late. An
        epoll descriptor is itself selectable, and ``select`` takes microseconds: so the waiting is done there.
        """

        def __init__(self) -> None:
            poll = self._epoll = select.epoll()
            self.register, self.modify, self.unregister = poll.register, poll.modify, poll.unregister
            # select() cannot take descriptors from 1024 up; made that late, we live with milliseconds.
            self._one = [poll.fileno()] if poll.fileno() < 1024 else []

        def wait(self, seconds: float | None) -> list[tuple[int, int]]:
            if self._one and seconds:
                select.select(self._one, (), (), seconds)
                seconds = 0.0
            return self._epoll.poll(seconds)

        def close(self) -> None:
            self._epoll.close()

    best_poller: type[Epoll] | type[Poll] = Epoll
else:
    best_poller = Poll


class Loop:
    """Everything runs on the thread that calls ``run`` or ``step``; only ``stop`` may be called from another thread or
    from a signal handler."""

    def __init__(self) -> None:
        self._poller = best_poller()
        self._watched: dict[int, Ready] = {}
        self._heap: list[tuple[int, int, Timer]] = []
        self._serial = self._earliest = 0
        self._stopped = self._closed = False
        self._idle: deque[Timer] = deque()
        self._idle_ns = 0  # when idle work was last done, or there was none
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self.watch(self._wake_read, lambda _: None)  # never drained: once stopped, no step may wait again

    # --- timers

    def call_at(self, t_ns: int, fn: Timer) -> None:
        """Call ``fn`` at ``t_ns`` (monotonic) or as soon after as may be, and again at the time it returns, if any.

        There is no cancelling: a timer that is no longer wanted finds that out and returns None.
        """
        self._serial += 1
        heappush(self._heap, (max(t_ns, self._earliest), self._serial, fn))

    def when_idle(self, fn: Timer) -> None:
        """Call ``fn`` in turns in which nothing is ready and nothing due, until it returns None. It should be quick.

        On a loop that is never idle it is called all the same, once in IDLE_NS.
        """
        if not self._idle:
            self._idle_ns = monotonic_ns()
        self._idle.append(fn)

    def _spare(self, busy: bool) -> None:
        now = monotonic_ns()
        if (busy or (self._heap and self._heap[0][0] <= now)) and now - self._idle_ns < IDLE_NS:
            return
        self._idle_ns = now
        fn = self._idle[0]
        if fn() is None:
            self._idle.popleft()

    def _fire(self) -> None:
        """Run all that is due by one reading of the clock; what falls due meanwhile waits for the next turn."""
        heap, now = self._heap, monotonic_ns()
        if not heap or heap[0][0] > now:
            return
        self._earliest = now + 1  # a timer set by a timer never goes above the one running, so heap[0] stays that one
        while heap and heap[0][0] <= now:
            _, serial, fn = heap[0]
            again = fn()
            if again is None:
                heappop(heap)
            else:
                heapreplace(heap, (again, serial, fn))
        self._earliest = 0

    # --- readiness

    def watch(self, fd: int, ready: Ready, mask: int = IN) -> None:
        """Call ``ready(mask)`` whenever ``fd`` is ready: listeners, connections, upstreams, pipes."""
        self._poller.register(fd, mask)
        self._watched[fd] = ready

    def rewatch(self, fd: int, mask: int) -> None:
        if fd in self._watched:
            self._poller.modify(fd, mask)

    def unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None):
            self._poller.unregister(fd)

    # --- turns

    def step(self, timeout: float | None = None) -> None:
        """One turn: wait for the first of bytes, a timer and ``timeout`` seconds, then do all that is due."""
        if self._heap:
            left = max(0.0, (self._heap[0][0] - monotonic_ns()) * 1e-9)
            timeout = left if timeout is None else min(left, timeout)
        if self._idle:
            timeout = 0.0
        watched = self._watched
        events = self._poller.wait(timeout)
        for fd, mask in events:
            if ready := watched.get(fd):  # an earlier event of this turn may have closed it
                ready(mask)
        self._fire()
        if self._idle:
            self._spare(bool(events))

    def run(self, stop: Callable[[], bool] | None = None) -> None:
        """Turn until ``stop()`` is true (asked once a turn) or ``self.stop`` was called."""
        while not self._stopped and not (stop and stop()):
            self.step()

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(OSError):  # full is as good as written; closed means there is nothing to wake
            os.write(self._wake_write, b".")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watched.clear()
            self._poller.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
