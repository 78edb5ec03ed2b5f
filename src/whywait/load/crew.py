"""What drives the points of a run in one process: a client, its driver and whoever watches that they do not fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from whywait.core.recorder import Recorder
from whywait.core.schedule import Schedule, Workload
from whywait.load.calibrate import body_of
from whywait.load.driver import Driver, Point, Progress
from whywait.load.preflight import Target, ask_once
from whywait.load.prompts import Prompter
from whywait.load.recount import Sample, TextCounter
from whywait.load.tokens import text_counter
from whywait.load.turns import Message, Turns, languages_of, shares
from whywait.load.warming import Warmed, warm
from whywait.net.client import Client
from whywait.net.clock import Clock
from whywait.units import NS_PER_MS, NS_PER_S

MAX_FAILED_IN_A_ROW = 50
MAX_TIMEOUTS = 3  # with no success yet: a service that never answers would hold us for hours
STILL_NS = 500 * NS_PER_MS  # a turn of the loop takes a few ms, at most the 100 ms it sleeps

Stop = Callable[[Progress], str]


@dataclass(frozen=True)
class Writer:
    """Makes the bodies of requests; plain data, so that a shard can be sent it."""

    target: Target
    prompter: Prompter
    workload: Workload
    stream: bool = True

    def body(self, row: int, schedule: Schedule, max_tokens: int | None = None) -> bytes:
        """The request's JSON; ``max_tokens`` is for another answer than the schedule asks for."""
        shared = shares(schedule, row)
        # Whatever shares is told apart from other runs only, everything else from everything.
        unique = self.prompter.salt if shared else f"{self.prompter.salt}-{schedule.id[row]}"
        options = self.target.options(self.workload, self.stream if max_tokens is None else False, unique, shared)
        messages = Turns(self.prompter, schedule, languages_of(self.workload)).messages(row)
        return body_of(self.target, messages, max_tokens or int(schedule.output_tokens[row]), options)

    def warm(self, schedule: Schedule) -> Warmed:
        """Send once each beginning that will come again, for one token. In no table of the run."""
        options = self.target.options(self.workload, False, self.prompter.salt, True)

        def ask(messages: list[Message], _row: int) -> bool:
            body = body_of(self.target, messages, 1, options)
            return ask_once(self.target, body, False, self.workload.timeout_s).get("outcome") == "ok"

        return warm(Turns(self.prompter, schedule, languages_of(self.workload)), ask)


class Crew(Protocol):
    """What a session drives points with: this process alone (:class:`Solo`), or several (``load/shards.py``)."""

    def run(self, point: Point, writer: Writer) -> str:
        """Drive a point; '' or the reason it was cut short."""
        ...

    def report(self) -> Report:
        """What is known of the crew's own error so far."""
        ...

    def close(self) -> None:
        """End whatever is still in flight, and write it down."""
        ...


@dataclass
class Report:
    """A crew of itself. ``client`` and ``clock`` are for the manifest (one clock per shard); ``failed`` and
    ``succeeded`` are requests; ``still`` holds (when, how long) its loop stood still, ns; ``disk`` is what the disk
    said when it did not take something; ``lost`` names shards that died."""

    client: dict[str, Any]
    clock: list[dict[str, Any]]
    failed: int = 0
    succeeded: int = 0
    still: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    disk: str = ""
    lost: list[str] = dataclasses.field(default_factory=list)
    recounts: dict[str, list[dict[str, int]]] = dataclasses.field(default_factory=dict)  # by point: load/recount.py


class Guard:
    """Asked on every turn of the loop for a reason to end; sees when the loop itself was stopped meanwhile."""

    def __init__(self, client: Client, recorder: Recorder, clock: Clock, stop: Stop) -> None:
        self._client, self._recorder, self._clock, self._stop = client, recorder, clock, stop
        self.still: list[tuple[int, int]] = []
        self._turn = 0

    def begin(self) -> None:
        """A point begins: the time until its first turn is no standstill."""
        self._turn = 0

    def __call__(self, progress: Progress) -> str:
        now = self._clock.now()
        if self._turn and now - self._turn > STILL_NS:
            self.still.append((self._turn, now - self._turn))
        self._turn = now
        client = self._client
        if self._recorder.complaint:
            return f"the disk takes no more ({self._recorder.complaint})"
        if not client.succeeded and client.timeouts >= MAX_TIMEOUTS:
            return f"{client.timeouts} requests timed out and none succeeded"
        if client.failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            return f"{client.failed_in_a_row} requests failed in a row ({client.last_failure})"
        return self._stop(progress)


class Solo:
    """One process. ``begin`` is asked for the start of each point, and given the earliest that suits us."""

    def __init__(
        self,
        target: Target,
        recorder: Recorder,
        clock: Clock,
        watch: Callable[[Progress], None],
        stop: Stop,
    ) -> None:
        self.clock, self.recorder = clock, recorder
        self.client = Client(target.endpoint, recorder, clock)
        self.guard = Guard(self.client, recorder, clock, stop)
        self._watch = watch
        self.begin: Callable[[int], int] = lambda start_ns: start_ns
        self.cpu_ns: dict[int, int] = {}
        self.recounts: dict[str, list[dict[str, int]]] = {}
        self._counter: tuple[TextCounter | None] | None = None  # found out once, when the first answers are there

    def run(self, point: Point, writer: Writer) -> str:
        timeout_s = writer.workload.timeout_s
        driver = Driver(self.client, self.recorder, self.clock, writer.body, writer.stream, timeout_s)
        driver.watch, driver.stop, driver.begin, driver.cpu_ns = self._watch, self.guard, self.begin, self.cpu_ns
        self.guard.begin()
        sample = Sample()
        driver.tap = sample.tap
        reason = driver.run(point)
        if not reason and any(text.parts for text in sample.texts):
            self._counter = self._counter or (text_counter(writer.target),)
            if self._counter[0] is not None:
                self.recounts[str(point.number)] = sample.counts(self._counter[0])
        return reason

    def report(self) -> Report:
        client = {**self.client.facts(), "cpu_ns_by_point": {str(k): v for k, v in self.cpu_ns.items()}}
        c, disk = self.client, self.recorder.complaint
        return Report(
            client, [self.clock.facts()], c.failed, c.succeeded, self.guard.still, disk, recounts=self.recounts
        )

    def close(self) -> None:
        self.client.close()
        self.recorder.flush()


def still_doubt(still: list[tuple[int, int]]) -> dict[str, str] | None:
    """The doubt that a loop which stood still leaves."""
    if not still:
        return None
    at, long = max(still, key=lambda s: s[1])
    times = f"{len(still)} times, longest " if len(still) > 1 else ""
    return {
        "what": "the client stood still",
        "why": f"{times}for {long / NS_PER_S:.1f} s at {at / NS_PER_S:.1f} s: it was suspended, or got no CPU; "
        "requests due then were sent late, and what came in meanwhile was read together",
        "next": "measure again with nothing else on the client's cores",
    }
