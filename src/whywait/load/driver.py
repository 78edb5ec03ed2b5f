"""Drives one load point: pacer → client → recorder, in one loop, until every planned request has an outcome."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from whywait.core.events import Failed
from whywait.core.pacer import Chains, ClosedLoop, OpenLoop
from whywait.core.recorder import Recorder
from whywait.core.schedule import Schedule
from whywait.load.progress import Progress, Watched
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.dialect import Tap
from whywait.units import NS_PER_MS, NS_PER_S

__all__ = ["Driver", "Point", "Progress", "planned"]

FLUSH_NS = 500 * NS_PER_MS
MAX_WAIT_NS = 100 * NS_PER_MS


@dataclass
class Point:
    """One load point to drive. ``target`` is requests in flight or requests per second, by ``mode``.

    Closed loop: the first requests are spread over ``ramp_s``. Open loop: no more than ``max_in_flight`` at once; what
    is due beyond waits, due as it was.
    """

    number: int
    mode: str
    target: float
    schedule: Schedule
    duration_s: float | None = None
    label: str | None = None
    ramp_s: float = 0.0
    max_in_flight: int | None = None

    @property
    def closed(self) -> bool:
        return self.mode == "concurrency"

    @property
    def elastic(self) -> bool:
        """Whether the schedule is an upper bound: what time left unsent was then no plan."""
        return self.duration_s is not None and (self.closed or self.schedule.has_sessions)

    def pacer(self, start_ns: int) -> ClosedLoop | OpenLoop:
        """The pacer of this point, with ``start_ns`` as its zero."""
        s = self.schedule
        stop = None if self.duration_s is None else start_ns + round(self.duration_s * NS_PER_S)
        chains = Chains.of(s)
        if self.closed:
            ramp = round(self.ramp_s * NS_PER_S)
            return ClosedLoop(len(s), int(self.target), start_ns, stop, ramp_ns=ramp, chains=chains)
        return OpenLoop(s.due_ns, start_ns, stop, most=self.max_in_flight, chains=chains)


@dataclass
class Driver:
    """``body(row, schedule)`` gives a request's JSON; ``watch(progress)`` is called about twice a second.

    ``stop`` is asked on every turn and returns a reason to end early (Ctrl-C, error budget, foreign traffic) or ''.
    """

    client: Client
    recorder: Recorder
    clock: Clock
    body: Callable[[int, Schedule], bytes]
    stream: bool = True
    timeout_s: float = 300.0
    watch: Callable[[Progress], None] = lambda _p: None  # may write a line; it runs between two turns of the loop
    stop: Callable[[Progress], str] = lambda _p: ""
    begin: Callable[[int], int] = lambda start_ns: start_ns  # the start that the shards of a run agree on
    cpu_ns: dict[int, int] = field(default_factory=dict)
    tap: Callable[[int], Tap | None] = lambda _id: None  # of a request about to be sent: who reads its answer along

    def run(self, point: Point) -> str:
        """Drive the point; returns '' or the reason it was cut short. The recorder holds the result either way."""
        schedule = point.schedule
        if point.closed:
            self.client.warm(min(int(point.target), len(schedule), 512))
        gc.collect()
        # Far enough ahead that writing the plan does not make the first requests late.
        start = self.begin(self.clock.now() + 20 * NS_PER_MS + 8_000 * len(schedule))
        turn = _Turn(point.pacer(start), Progress(point), self._bodies(point), Watched(self.recorder, point.closed))
        row = {"point": point.number, "mode": point.mode, "target": point.target, "start_ns": start,
               "label": point.label, "elastic": point.elastic}  # fmt: skip
        self.recorder.begin_point(row, planned(point, start))
        while (left := start - self.clock.now()) > 0:
            self.client.poll(left)
        gc.freeze()
        gc.disable()  # a collection over a long run's objects stops the loop for tens of ms
        cpu = time.process_time_ns()
        self.client.recorder = turn.outcomes
        try:
            reason = self._loop(turn)
        finally:
            self.client.recorder = self.recorder
            gc.enable()
            gc.unfreeze()
        self._close(turn, reason)
        self.cpu_ns[point.number] = time.process_time_ns() - cpu
        return reason

    def _bodies(self, point: Point) -> _Bodies:
        return _Bodies(self.body, point.schedule, int(point.target) if point.closed else 8)

    def _loop(self, turn: _Turn) -> str:
        client, clock, pacer, progress, bodies = self.client, self.clock, turn.pacer, turn.progress, turn.bodies
        began = clock.now()
        next_flush = began + FLUSH_NS
        timeout = round(self.timeout_s * NS_PER_S)
        ids = progress.point.schedule.id.tolist()
        failed = turn.outcomes.failed
        while True:
            now = clock.now()
            while (due := pacer.take(now)) is not None:
                row, due_ns = due
                client.send(Call(row, ids[row], due_ns, bodies.take(row), self.stream, timeout, self.tap(ids[row])))
                turn.sent[row] = 1
                progress.sent += 1
                now = clock.now()
            wake = pacer.wake_ns()
            if client.in_flight == 0 and wake is None:
                return ""
            until = min(MAX_WAIT_NS if wake is None else wake - now, MAX_WAIT_NS)
            ended = client.poll(max(0, until))
            for row, end_ns in ended:
                pacer.done(row, end_ns, ids[row] not in failed)
                progress.ended += 1
            if not ended:
                bodies.prepare(1)
            if now >= next_flush:
                next_flush = now + FLUSH_NS
                self.recorder.flush()
                progress.in_flight, progress.chunks = client.in_flight, client.chunks
                progress.elapsed_s, progress.so_far = (now - began) / NS_PER_S, turn.outcomes.so_far(client)
                self.watch(progress)
            reason = self.stop(progress)
            if reason:
                client.cancel_all("censored", reason)
                return reason

    def _close(self, turn: _Turn, reason: str) -> None:
        """Give every planned request that was never sent its outcome; where the plan was an upper bound, those that
        only time kept from being sent were no plan."""
        now, point = self.clock.now(), turn.progress.point
        ids, lost = point.schedule.id.tolist(), set(turn.pacer.lost)
        unplanned = []
        for row in range(len(ids)):
            if turn.sent[row]:
                continue
            if row not in lost and point.elastic:
                unplanned.append(ids[row])
                continue
            why = "an earlier turn of its session failed" if row in lost else reason or "not reached"
            self.recorder.event(Failed(ids[row], now, {"outcome": "never_sent", "fault": "none", "detail": why}))
        self.recorder.end_point(point.number, now, unplanned)


class _Turn:
    """What one point's loop works with. ``sent`` holds a byte per row."""

    def __init__(self, pacer: ClosedLoop | OpenLoop, progress: Progress, bodies: _Bodies, outcomes: Watched) -> None:
        self.pacer, self.progress, self.bodies, self.outcomes = pacer, progress, bodies, outcomes
        self.sent = bytearray(len(progress.point.schedule))


class _Bodies:
    """Request bodies made ahead of need, so that writing a prompt never makes a request late.

    Those that stand for themselves come in order; one that follows another is made once that other was sent.
    """

    def __init__(self, make: Callable[[int, Schedule], bytes], schedule: Schedule, ahead: int) -> None:
        self._make, self._schedule = make, schedule
        self._ahead = max(4, min(ahead, 256))
        self._ready: dict[int, bytes] = {}
        self._taken: set[int] = set()
        after = schedule.after_rows().tolist() if schedule.has_sessions else []
        self._roots = deque(i for i, a in enumerate(after) if a < 0) if after else deque(range(len(schedule)))
        self._followers = {a: i for i, a in enumerate(after) if a >= 0}
        self._soon: deque[int] = deque()
        self.prepare(self._ahead)

    def prepare(self, n: int) -> None:
        while n > 0:
            queue = self._soon or (self._roots if len(self._ready) < self._ahead else None)
            if not queue:
                return
            row = queue.popleft()
            if row in self._taken:
                self._taken.discard(row)
                continue
            self._ready[row] = self._make(row, self._schedule)
            n -= 1

    def take(self, row: int) -> bytes:
        ready = self._ready.pop(row, None)
        if row in self._followers:
            self._soon.append(self._followers.pop(row))
        if ready is not None:
            return ready
        self._taken.add(row)  # sent before it was its turn: it is still in a queue
        return self._make(row, self._schedule)


def planned(point: Point, start_ns: int) -> Iterator[dict[str, Any]]:
    """What is known of each request before it is sent."""
    s = point.schedule
    names = ("id", "klass", "prompt_tokens", "output_tokens", "due_ns", "session_id", "turn", "after_id")
    for i, k, p, o, due, session, turn, after in zip(*(getattr(s, c).tolist() for c in names), strict=True):
        row = {"id": i, "class": s.class_names[k], "asked_prompt_tokens": p, "asked_output_tokens": o}
        if due >= 0 and after < 0:  # when a later turn is due only the run will tell
            row["due_ns"] = start_ns + due
        if session >= 0:
            row.update(session_id=session, turn=turn)
        yield row
