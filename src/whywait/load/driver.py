"""Drives one load point: pacer → client → recorder, in one loop, until every planned request has an outcome."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whywait.core.events import Failed
from whywait.core.pacer import ClosedLoop, OpenLoop, Pacer
from whywait.core.recorder import Recorder
from whywait.core.schedule import Schedule
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.units import NS_PER_MS, NS_PER_S

FLUSH_NS = 500 * NS_PER_MS
MAX_WAIT_NS = 100 * NS_PER_MS


@dataclass
class Point:
    """One load point to drive. ``target`` is requests in flight or requests per second, by ``mode``."""

    number: int
    mode: str
    target: float
    schedule: Schedule
    duration_s: float | None = None
    label: str | None = None


@dataclass
class Progress:
    """What a live view may show while a point runs; the driver updates it in place."""

    point: Point
    sent: int = 0
    ended: int = 0
    in_flight: int = 0
    chunks: int = 0
    elapsed_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)


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

    def run(self, point: Point) -> str:
        """Drive the point; returns '' or the reason it was cut short. The recorder holds the result either way."""
        schedule = point.schedule
        closed = point.mode == "concurrency"
        if closed:
            self.client.warm(min(int(point.target), len(schedule), 512))
        gc.collect()
        # Far enough ahead that writing the plan does not make the first requests late.
        start = self.begin(self.clock.now() + 20 * NS_PER_MS + 8_000 * len(schedule))
        stop_ns = None if point.duration_s is None else start + round(point.duration_s * NS_PER_S)
        pacer: Pacer
        if closed:
            pacer = ClosedLoop(len(schedule), int(point.target), start, stop_ns)
        else:
            pacer = OpenLoop(schedule.due_ns, start)
        row = {"point": point.number, "mode": point.mode, "target": point.target, "start_ns": start,
               "label": point.label}  # fmt: skip
        self.recorder.begin_point(row, _planned(point, start))
        progress = Progress(point)
        bodies = _Bodies(self.body, schedule, int(point.target) if closed else 8)
        while (left := start - self.clock.now()) > 0:
            self.client.poll(left)
        gc.freeze()
        gc.disable()  # a collection over a long run's objects stops the loop for tens of ms
        cpu = time.process_time_ns()
        try:
            reason = self._loop(pacer, point, progress, bodies)
        finally:
            gc.enable()
            gc.unfreeze()
        self._close(point, progress, reason, closed and point.duration_s is not None)
        self.cpu_ns[point.number] = time.process_time_ns() - cpu
        return reason

    def _loop(self, pacer: Pacer, point: Point, progress: Progress, bodies: _Bodies) -> str:
        client, clock, schedule = self.client, self.clock, point.schedule
        began = clock.now()
        next_flush = began + FLUSH_NS
        timeout = round(self.timeout_s * NS_PER_S)
        ids = schedule.id.tolist()
        while True:
            now = clock.now()
            while (due := pacer.take(now)) is not None:
                row, due_ns = due
                client.send(Call(row, ids[row], due_ns, bodies.take(row), self.stream, timeout))
                progress.sent += 1
                now = clock.now()
            wake = pacer.wake_ns()
            if client.in_flight == 0 and wake is None:
                return ""
            until = min(MAX_WAIT_NS if wake is None else wake - now, MAX_WAIT_NS)
            ended = client.poll(max(0, until))
            for row, end_ns in ended:
                pacer.done(row, end_ns)
                progress.ended += 1
            if not ended:
                bodies.prepare(1)
            if now >= next_flush:
                next_flush = now + FLUSH_NS
                self.recorder.flush()
                progress.in_flight, progress.chunks = client.in_flight, client.chunks
                progress.elapsed_s = (now - began) / NS_PER_S
                self.watch(progress)
            reason = self.stop(progress)
            if reason:
                client.cancel_all("censored", reason)
                return reason

    def _close(self, point: Point, progress: Progress, reason: str, elastic: bool) -> None:
        """Give every planned request that was never sent its outcome; of a closed loop by time they were no plan."""
        now = self.clock.now()
        unsent = point.schedule.id[progress.sent :].tolist()
        if not elastic or reason:
            for i in unsent:
                facts = {"outcome": "never_sent", "fault": "none", "detail": reason or "not reached"}
                self.recorder.event(Failed(i, now, facts))
            unsent = []
        self.recorder.end_point(point.number, now, unsent)


class _Bodies:
    """Request bodies made ahead of need, so that writing a prompt never makes a request late."""

    def __init__(self, make: Callable[[int, Schedule], bytes], schedule: Schedule, ahead: int) -> None:
        self._make, self._schedule = make, schedule
        self._ahead = max(4, min(ahead, 256))
        self._ready: dict[int, bytes] = {}
        self._next = 0
        self.prepare(self._ahead)

    def prepare(self, n: int) -> None:
        while n > 0 and len(self._ready) < self._ahead and self._next < len(self._schedule):
            self._ready[self._next] = self._make(self._next, self._schedule)
            self._next += 1
            n -= 1

    def take(self, row: int) -> bytes:
        self._next = max(self._next, row + 1)
        ready = self._ready.pop(row, None)
        return self._make(row, self._schedule) if ready is None else ready


def _planned(point: Point, start_ns: int) -> list[dict[str, Any]]:
    s = point.schedule
    rows = []
    for i, k, p, o, due in zip(
        s.id.tolist(), s.klass.tolist(), s.prompt_tokens.tolist(), s.output_tokens.tolist(), s.due_ns.tolist(),
        strict=True,
    ):  # fmt: skip
        row = {"id": i, "class": s.class_names[k], "asked_prompt_tokens": p, "asked_output_tokens": o}
        if due >= 0:
            row["due_ns"] = start_ns + due
        rows.append(row)
    return rows
