"""One simulated engine at true pace: a step takes as long as the simulation says, and its tokens leave at its end.

The timetable is absolute: a step begins when the one before it was *due* to end, however late this machine was, so
lateness does not add up. Only where it falls more than ``SLIP_NS`` behind is the timetable moved, and that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from time import monotonic_ns
from typing import NamedTuple, Protocol

from whywait.sim.front_metrics import Now, Told
from whywait.units import NS_PER_S

SLIP_NS = NS_PER_S
NEVER = 1 << 63
IDLE = Now(0, 0, 0.0)


class New(NamedTuple):
    """A request as the engine sees it. ``chain``: numbers of its whole KV blocks by content, on into the answer, whose
    blocks are there for others once they are filled."""

    id: int
    prompt: int
    output: int
    chain: Sequence[int] = ()
    priority: int = 0


class Step(NamedTuple):
    """What one engine step does. Each of ``ids`` gets so many ``tokens`` at its end, in this order. ``scheduled`` are
    those taken from the queue for the first time, and how many of their prompt tokens were found in the cache. One that
    computes nothing only waits (for KV that is on its way), and ends when a request comes."""

    took_s: float
    ids: Sequence[int]
    tokens: Sequence[int]
    prefill_tokens: int
    scheduled: Sequence[tuple[int, int]]
    now: Now
    preempted: int = 0
    drafts: int = 0  # rounds of verification, tokens proposed, and accepted
    drafted: int = 0
    accepted: int = 0


class Engine(Protocol):
    """One replica. Seconds are simulated ones and never go back."""

    def add(self, new: New, at_s: float) -> None:
        """It came to the queue at ``at_s``, not later than the next step begins. They come in order."""

    def drop(self, id: int) -> None:
        """Its client has gone: its place and its KV are free for the next step. Of an id that has ended: nothing."""

    def step(self, now_s: float) -> Step | None:
        """The step that begins now, or None when there is nothing to do. A request ends when its output is out."""


class Sink(Protocol):
    """Who asked."""

    def scheduled(self, at_ns: int, cached: int) -> None: ...

    def tokens(self, count: int, at_ns: int) -> None: ...


class Pace:
    """The steps of one engine on a loop. ``at``: ``Loop.call_at``."""

    def __init__(
        self, engine: Engine, told: Told, at: Callable[[int, Callable[[], int | None]], None], speed: float = 1.0,
        reply_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.engine, self.told, self.now = engine, told, IDLE
        self.sinks: dict[int, Sink] = {}
        self._at, self._speed = at, speed
        self._reply_ns = int(reply_s / speed * NS_PER_S)
        self._origin = monotonic_ns()
        self._coming: list[tuple[int, int, New]] = []  # by when they are through the frontend
        self._step: Step | None = None  # in progress, until _due
        self._due = self._resume = 0

    def add(self, new: New, ready_ns: int, sink: Sink) -> None:
        """It reaches the engine's queue at ``ready_ns``."""
        self.sinks[new.id] = sink
        heappush(self._coming, (ready_ns, new.id, new))
        if self._step is None:
            self._at(ready_ns, self._wake)

    def drop(self, id: int) -> None:
        if self.sinks.pop(id, None) is not None:
            self.engine.drop(id)

    def ended(self, id: int) -> None:
        """The sink has had its last token."""
        self.sinks.pop(id, None)

    # --- the timetable

    def _wake(self) -> None:
        """Work comes to an engine that is idle. One that was asked for twice, or too early by now, is not needed."""
        if self._step is not None:
            return
        first = min(self._coming[0][0] if self._coming else NEVER, self._resume or NEVER)
        if first <= monotonic_ns():
            due = self._begin(max(first, self._due))
            if due is not None:
                self._at(due, self._tick)

    def _begin(self, t_ns: int) -> int | None:
        """Plan the step that begins at ``t_ns`` with all that is there by then; returns when it ends."""
        coming = self._coming
        while coming and coming[0][0] <= t_ns:
            ready_ns, _, new = heappop(coming)
            if new.id in self.sinks:  # else its client has gone already
                self.engine.add(new, self._simulated_s(ready_ns))
        step = self.engine.step(self._simulated_s(t_ns))
        self.now = IDLE if step is None else step.now
        if step is None or not (step.ids or step.prefill_tokens):
            self._step, self._resume = None, 0 if step is None else t_ns + self._wall_ns(step.took_s)
            if self._resume:
                self._at(self._resume, self._wake)
            if coming:
                self._at(coming[0][0], self._wake)
            return None
        self._step, self._resume = step, 0
        for id, cached in step.scheduled:
            if sink := self.sinks.get(id):
                sink.scheduled(t_ns, cached)
        self._due = t_ns + self._wall_ns(step.took_s)
        return self._due

    def _simulated_s(self, t_ns: int) -> float:
        return (t_ns - self._origin) / NS_PER_S * self._speed

    def _wall_ns(self, simulated_s: float) -> int:
        return max(1, int(simulated_s / self._speed * NS_PER_S))

    def _tick(self) -> int | None:
        """The step is over: its tokens leave, after their way to the client, and the next begins."""
        step, due = self._step, self._due
        assert step is not None
        behind = monotonic_ns() - due
        if behind > SLIP_NS:
            self.told.slipped_s += behind / NS_PER_S
            due += behind
        leave = due + self._reply_ns
        if self._reply_ns:
            self._at(leave, lambda: self._send(step, leave))
        else:
            self._send(step, leave)
        return self._begin(due)

    def _send(self, step: Step, at_ns: int) -> None:
        told, sinks, out = self.told, self.sinks, 0
        for id, count in zip(step.ids, step.tokens, strict=True):
            if sink := sinks.get(id):
                sink.tokens(count, at_ns)
                out += count
        if out:
            told.late.observe((monotonic_ns() - at_ns) / NS_PER_S)
        told.add("vllm:generation_tokens_total", out)
        told.observe("vllm:iteration_tokens_total", step.prefill_tokens + out)
        told.add("vllm:num_preemptions_total", step.preempted)
        if step.drafts:
            told.add("vllm:spec_decode_num_drafts_total", step.drafts)
            told.add("vllm:spec_decode_num_draft_tokens_total", step.drafted)
            told.add("vllm:spec_decode_num_accepted_tokens_total", step.accepted)
