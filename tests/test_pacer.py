"""The pacers decide purely, so every order of sends and completions can be played through without a clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from whywait.core.pacer import ClosedLoop, OpenLoop

STEP = st.integers(0, 50)


class _Closed(RuleBasedStateMachine):
    """A closed loop beside the plainest model of one: places, each with the moment it became free."""

    @initialize(
        n=st.integers(0, 12),
        concurrency=st.integers(1, 5),
        start=st.integers(0, 100),
        span=st.none() | st.integers(0, 200),
    )
    def begin(self, n, concurrency, start, span):
        self.n, self.concurrency, self.now = n, concurrency, start  # nobody asks before the start
        self.stop = None if span is None else start + span
        self.pacer = ClosedLoop(n, concurrency, start, self.stop)
        self.free = [start] * concurrency
        self.flying: list[int] = []
        self.sent: list[int] = []

    @rule(step=STEP)
    def time_passes(self, step):
        self.now += step

    @rule()
    def take(self):
        got = self.pacer.take(self.now)
        stopped = self.stop is not None and self.now >= self.stop
        if stopped or len(self.sent) == self.n or not self.free:
            assert got is None
            return
        assert got is not None
        row, due = got
        assert due <= self.now
        assert due in self.free  # the moment some place became free: what the client was late by stays visible
        self.free.remove(due)
        assert row == len(self.sent)  # none lost, none twice, in the schedule's order
        self.sent.append(row)
        self.flying.append(row)

    @precondition(lambda self: self.flying)
    @rule(which=st.randoms(use_true_random=False), ago=STEP)
    def complete(self, which, ago):
        """A completion is seen a little after it happened, as a kernel stamp tells."""
        row = self.flying.pop(which.randrange(len(self.flying)))
        ended = max(self.now - ago, 0)
        self.pacer.done(row, ended)
        self.free.append(ended)

    @invariant()
    def never_more_in_flight_than_asked(self):
        if hasattr(self, "pacer"):
            assert len(self.flying) <= self.concurrency

    @invariant()
    def only_a_completion_makes_something_due(self):
        if hasattr(self, "pacer"):
            assert self.pacer.wake_ns() is None

    def teardown(self):
        """Whatever had happened: completions alone bring out every row, once, unless time ran out before."""
        if not hasattr(self, "pacer"):
            return
        for _ in range(self.n + self.concurrency):
            self.take()
            if self.flying:
                self.pacer.done(self.flying.pop(), self.now)
                self.free.append(self.now)
        if self.stop is None or self.now < self.stop:
            assert self.sent == list(range(self.n))


TestClosedLoop = _Closed.TestCase
TestClosedLoop.settings = settings(max_examples=80, stateful_step_count=30)


class _Open(RuleBasedStateMachine):
    """An open loop beside its timetable. Completions come in any number and order, and must change nothing."""

    @initialize(gaps=st.lists(STEP, max_size=12), start=st.integers(0, 100))
    def begin(self, gaps, start):
        self.now = 0
        self.timetable = [start + int(t) for t in np.cumsum(gaps)]
        self.pacer = OpenLoop(np.cumsum(np.array(gaps, dtype=np.int64)), start)
        self.sent = 0

    @rule(step=STEP)
    def time_passes(self, step):
        self.now += step

    @rule(row=st.integers(0, 20), ago=STEP)
    def complete(self, row, ago):
        self.pacer.done(row, self.now - ago)

    @rule()
    def take(self):
        got = self.pacer.take(self.now)
        if self.sent < len(self.timetable) and self.timetable[self.sent] <= self.now:
            assert got == (self.sent, self.timetable[self.sent])
            self.sent += 1
        else:
            assert got is None

    @invariant()
    def sleep_ends_when_the_next_is_due(self):
        if hasattr(self, "pacer"):
            left = self.timetable[self.sent :]
            assert self.pacer.wake_ns() == (left[0] if left else None)


TestOpenLoop = _Open.TestCase
TestOpenLoop.settings = settings(max_examples=80, stateful_step_count=30)


@given(st.lists(STEP, min_size=1, max_size=20), st.lists(STEP, max_size=20))
def test_an_open_loop_that_fell_behind_catches_up_with_the_times_it_missed(gaps, pauses):
    """The timetable is absolute: being late once makes no later request late, and every lateness is on record."""
    due = np.cumsum(np.array(gaps, dtype=np.int64))
    pacer = OpenLoop(due, 0)
    now, taken = 0, []
    for pause in [*pauses, int(due[-1])]:
        now += pause
        while (got := pacer.take(now)) is not None:
            taken.append(got)
    assert taken == list(enumerate(due.tolist()))


def test_a_closed_loop_by_time_sends_nothing_after_its_end():
    pacer = ClosedLoop(100, 2, start_ns=10, stop_ns=20)
    assert pacer.take(19) == (0, 10)
    assert pacer.take(20) is None
    pacer.done(0, 19)
    assert pacer.take(21) is None


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ClosedLoop(5, 0, 0)
    with pytest.raises(ValueError, match="must not decrease"):
        OpenLoop(np.array([5, 4]), 0)
    assert OpenLoop(np.array([], dtype=np.int64), 0).take(1 << 60) is None
