"""The pacers decide purely, so every order of sends and completions can be played through without a clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from whywait.core.pacer import Chains, ClosedLoop, OpenLoop

STEP = st.integers(0, 50)
#: Each row comes after an earlier one, or stands for itself (−1); with the pause before it.
LINKS = st.lists(st.tuples(st.integers(-6, 11), STEP), max_size=12)


def _chains(links: list[tuple[int, int]], due: list[int] | None = None) -> Chains:
    """``links`` made legal: no row comes after itself, a later one, or one that already has a follower."""
    after: list[int] = []
    for row, (before, _) in enumerate(links):
        after.append(before if 0 <= before < row and before not in after else -1)
    pauses = [pause for _, pause in links]
    return Chains(*(np.array(x, np.int64) for x in (after, pauses, due or [-1] * len(links))))


class _Play(RuleBasedStateMachine):
    """What both loops share: a clock, completions that may fail, and the plainest model of turns after turns."""

    def setup(self, chains: Chains, start: int, stop: int | None) -> None:
        self.n, self.start, self.stop, self.now = len(chains.after), start, stop, start
        self.after, self.think, self.due = (x.tolist() for x in (chains.after, chains.think_ns, chains.due_ns))
        self.ready: dict[int, int] = {}
        self.lost: set[int] = set()
        self.flying: list[int] = []
        self.sent: list[int] = []

    @rule()
    def take(self):
        self.takes()

    @rule(step=STEP)
    def time_passes(self, step):
        self.now += step

    @precondition(lambda self: self.flying)
    @rule(which=st.randoms(use_true_random=False), ago=STEP, ok=st.booleans())
    def complete(self, which, ago, ok):
        """A completion is seen a little after it happened, as a kernel stamp tells."""
        row = self.flying.pop(which.randrange(len(self.flying)))
        self.ends(row, max(self.now - ago, self.start), ok)

    def ends(self, row, at, ok):
        self.pacer.done(row, at, ok)
        for follower in [i for i, a in enumerate(self.after) if a == row]:
            if not ok:
                self.lose(follower)
            else:
                due = max(at + self.think[follower], self.start + self.due[follower] if self.due[follower] >= 0 else 0)
                if self.stop is None or due < self.stop:
                    self.ready[follower] = due

    def lose(self, row):
        self.lost.add(row)
        for follower in [i for i, a in enumerate(self.after) if a == row]:
            self.lose(follower)

    def goes(self, row):
        assert row not in self.sent
        before = self.after[row]
        if before >= 0:
            assert self.ready.pop(row) <= self.now  # its predecessor ended well, and the pause is over
        self.sent.append(row)
        self.flying.append(row)

    @invariant()
    def turns_of_a_failed_session_are_lost_and_only_those(self):
        if hasattr(self, "pacer"):
            assert set(self.pacer.lost) == self.lost
            assert not self.lost & {*self.sent, *self.ready}

    def all_comes_out(self):
        """Waiting for what it says and completing what flies brings out every row once, but for those lost."""
        for _ in range(4 * self.n + 4):
            while self.takes():
                pass
            if self.flying:
                self.ends(self.flying.pop(), self.now, True)
            elif (wake := self.pacer.wake_ns()) is not None:
                assert wake > self.now
                self.now = wake
        assert self.pacer.wake_ns() is None
        if self.stop is None:
            assert sorted([*self.sent, *self.lost]) == list(range(self.n))


class _Closed(_Play):
    """A closed loop beside the plainest model of one: places, each with the moment it became free."""

    @initialize(
        links=LINKS, concurrency=st.integers(1, 5), start=st.integers(0, 100), span=st.none() | st.integers(0, 200),
        ramp=st.sampled_from([0, 0, 60]),
    )  # fmt: skip
    def begin(self, links, concurrency, start, span, ramp):
        chains = _chains(links)
        self.setup(chains, start, None if span is None else start + span)
        self.concurrency = concurrency
        self.pacer = ClosedLoop(self.n, concurrency, start, self.stop, ramp_ns=ramp, chains=chains)
        self.free = [start + ramp * i // concurrency for i in range(concurrency)]

    def takes(self):
        got = self.pacer.take(self.now)
        free = [t for t in self.free if t <= self.now]
        ready = {row: t for row, t in self.ready.items() if t <= self.now}
        roots = [i for i in range(self.n) if self.after[i] < 0 and i not in self.sent]
        if (self.stop is not None and self.now >= self.stop) or not free or not (ready or roots):
            assert got is None
            return False
        assert got is not None
        row, due = got
        if ready:
            assert row in ready  # a turn that is ready goes before a session that has not begun
            assert ready[row] == min(ready.values())
        else:
            assert row == roots[0]  # in the schedule's order
        place = min(free)
        assert due == max(place, ready.get(row, 0))  # what the client is late by stays visible
        self.free.remove(place)
        self.goes(row)
        return True

    def ends(self, row, at, ok):
        super().ends(row, at, ok)
        self.free.append(at)

    @invariant()
    def never_more_in_flight_than_asked(self):
        if hasattr(self, "pacer"):
            assert len(self.flying) <= self.concurrency

    def teardown(self):
        if hasattr(self, "pacer"):
            self.all_comes_out()


TestClosedLoop = _Closed.TestCase
TestClosedLoop.settings = settings(max_examples=100, stateful_step_count=30)


class _Open(_Play):
    """An open loop beside its timetable: nothing but a predecessor or the cap delays a row."""

    @initialize(
        links=LINKS, gaps=st.lists(STEP, min_size=12, max_size=12), span=st.none() | st.integers(0, 200),
        most=st.none() | st.integers(1, 3), timed=st.booleans(),
    )  # fmt: skip
    def begin(self, links, gaps, span, most, timed):
        start = gaps[0]
        due = np.cumsum(np.array(gaps, dtype=np.int64))[: len(links)]
        chains = _chains(links)
        # A replayed trace has times for later turns too: not before them.
        chains = Chains(chains.after, chains.think_ns, np.where((chains.after < 0) | timed, due, -1))
        self.setup(chains, start, None if span is None else start + span)
        self.most = most
        self.pacer = OpenLoop(due, start, self.stop, most=most, chains=chains)

    def candidates(self):
        roots = {i: self.start + self.due[i] for i in range(self.n) if self.after[i] < 0 and i not in self.sent}
        return {**roots, **self.ready}

    def takes(self):
        got = self.pacer.take(self.now)
        due = {row: t for row, t in self.candidates().items() if t <= self.now}
        if not due or len(self.flying) == self.most:
            assert got is None
            return False
        assert got is not None
        assert got[1] == due[got[0]] == min(due.values())  # however long it waited, it is due when it was
        self.goes(got[0])
        return True

    @invariant()
    def never_more_in_flight_than_the_cap(self):
        if hasattr(self, "pacer"):
            assert self.most is None or len(self.flying) <= self.most

    @invariant()
    def sleep_ends_when_the_next_is_due(self):
        if hasattr(self, "pacer"):
            times = self.candidates().values()
            full = len(self.flying) == self.most
            assert self.pacer.wake_ns() == (None if full else min(times, default=None))

    def teardown(self):
        if hasattr(self, "pacer"):
            self.all_comes_out()


TestOpenLoop = _Open.TestCase
TestOpenLoop.settings = settings(max_examples=100, stateful_step_count=30)


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


def test_a_closed_loop_by_time_sends_nothing_after_its_end_and_lets_the_driver_end():
    pacer = ClosedLoop(100, 2, start_ns=10, stop_ns=20)
    assert pacer.take(19) == (0, 10)
    assert pacer.take(20) is None
    pacer.done(0, 19)
    assert pacer.take(21) is None
    assert pacer.wake_ns() is None


def test_a_ramp_opens_the_places_evenly():
    pacer = ClosedLoop(9, 4, start_ns=100, ramp_ns=80)
    sent = []
    for now in range(100, 200):
        while got := pacer.take(now):
            sent.append((now, got[1]))
    assert sent == [(100, 100), (120, 120), (140, 140), (160, 160)]


def test_under_a_cap_what_waits_is_due_when_it_was():
    pacer = OpenLoop(np.array([0, 10, 20]), 0, most=1)
    assert pacer.take(0) == (0, 0)
    assert pacer.take(15) is None
    assert pacer.wake_ns() is None  # only a completion helps
    pacer.done(0, 18)
    assert pacer.take(19) == (1, 10)
    pacer.done(1, 19)
    assert pacer.take(20) == (2, 20)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ClosedLoop(5, 0, 0)
    with pytest.raises(ValueError, match="at least 1"):
        OpenLoop(np.array([5]), 0, most=0)
    with pytest.raises(ValueError, match="must not decrease"):
        OpenLoop(np.array([5, 4]), 0)
    assert OpenLoop(np.array([], dtype=np.int64), 0).take(1 << 60) is None
