"""The clock: kernel stamps come onto our own time line, and a step of the system's clock is never taken for a wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait.net import clock as module
from whywait.net.clock import RESYNC_NS, STEP_LIMIT_NS, Clock, bracket

MS = 1_000_000
S = 1_000_000_000
OFFSET = 1_700_000_000 * S


class Times:
    """The system's clocks in place of ``time``: ``mono`` runs as told, the wall clock stands ``offset`` off it."""

    def __init__(self, mono: int = 5 * S, offset: int = OFFSET) -> None:
        self.mono, self.offset = mono, offset
        self.pauses: list[int] = []

    def monotonic_ns(self) -> int:
        if self.pauses:
            self.mono += self.pauses.pop(0)
        return self.mono

    def time_ns(self) -> int:
        return self.mono + self.offset


@pytest.fixture
def times(monkeypatch):
    fake = Times()
    monkeypatch.setattr(module, "time", fake)
    return fake


def test_zero_is_now_unless_it_is_given(times):
    clock = Clock()
    assert clock.zero_unix_ns == times.time_ns()
    assert clock.now() == 0
    times.mono += 7
    assert clock.now() == 7
    shard = Clock(clock.zero_unix_ns)  # another process, later: the same time line
    assert shard.now() == 7


def test_a_kernel_stamp_and_our_own_clock_agree(times):
    clock = Clock()
    times.mono += 3 * S
    stamp = times.time_ns()
    times.mono += 40
    assert clock.from_kernel(stamp, clock.now()) == 3 * S


def test_our_time_line_does_not_follow_the_wall_clock(times):
    clock = Clock()
    times.mono += S
    times.offset += 10 * S
    clock.resync(clock.now())
    assert clock.now() == S


@pytest.mark.parametrize("step", [2 * MS, -2 * MS, 3600 * S, -3600 * S])
def test_a_step_is_counted_and_stamps_across_it_are_refused(times, step):
    clock = Clock()
    clock.resync(clock.now())
    times.mono += RESYNC_NS
    before = times.time_ns()
    times.offset += step
    clock.resync(clock.now())
    assert clock.steps == 1
    assert clock.facts()["steps"] == 1
    assert clock.from_kernel(before, clock.now()) is None
    assert clock.from_kernel(times.time_ns(), clock.now()) is None  # which side it is from nobody can tell yet
    times.mono += RESYNC_NS
    clock.resync(clock.now())
    assert clock.steps == 1
    stamp = times.time_ns()
    assert clock.from_kernel(stamp, clock.now()) == clock.now()


@pytest.mark.parametrize("drift", [STEP_LIMIT_NS, -STEP_LIMIT_NS, 1000])
def test_a_slow_drift_is_followed_and_no_step(times, drift):
    """As when NTP slews: up to the limit between two looks the offset is brought up to date and stamps stay good."""
    clock = Clock()
    for _ in range(5):
        times.mono += RESYNC_NS
        times.offset += drift
        clock.resync(clock.now())
        assert clock.from_kernel(times.time_ns(), clock.now()) == clock.now()
    assert clock.steps == 0


def test_a_step_is_seen_at_once_and_a_drift_when_it_is_time(times):
    """The two clocks are compared on every turn of the loop; the careful look is taken ten times a second."""
    clock = Clock()
    clock.resync(clock.now())
    times.offset += MS // 2  # a drift: not worth a look before its time
    times.mono += RESYNC_NS - 1
    clock.resync(clock.now())
    assert clock.offset == OFFSET
    times.mono += 1
    clock.resync(clock.now())
    assert clock.offset == OFFSET + MS // 2
    times.offset += 5 * MS
    times.mono += 1
    clock.resync(clock.now())
    assert clock.steps == 1


def test_a_stamp_that_cannot_be_is_refused(times):
    clock = Clock()
    times.mono += 100 * S
    now, wall = clock.now(), times.time_ns()
    assert clock.from_kernel(wall + MS, now) == now  # a little ahead is our own error: it arrived by now
    assert clock.from_kernel(wall + MS + 1, now) is None  # the clock went forward since we looked
    assert clock.from_kernel(wall - 60 * S, now) == now - 60 * S
    assert clock.from_kernel(wall - 60 * S - 1, now) is None
    assert clock.from_kernel(0, now) is None  # no stamp at all reads as 1970


@given(st.integers(-(10**6), 10**6), st.integers(0, 10**9))
def test_a_stamp_is_never_after_its_reading(ahead, passed):
    with pytest.MonkeyPatch.context() as patch:
        fake = Times()
        patch.setattr(module, "time", fake)
        clock = Clock()
        fake.mono += passed
        got = clock.from_kernel(fake.time_ns() + ahead, clock.now())
        assert got is None or got == min(passed, passed + ahead)


def test_the_tightest_bracket_counts_and_says_how_tight(times):
    """Five brackets; the scheduler takes the processor away within four of them."""
    times.pauses = [0, 900, 0, 700, 0, 30, 0, 800, 0, 600]
    offset, error = bracket()
    assert error == 30
    assert (
        offset == OFFSET - 15
    )  # the wall clock was read at the first of the two readings, half a bracket from its middle


def test_the_error_on_record_is_the_worst_there_was(times):
    times.pauses = [0, 50] * 5
    clock = Clock()
    assert clock.facts() == {"offset_error_ns": 50, "steps": 0}
    times.pauses = [0, 400] * 5
    clock.resync(0)
    clock.resync(clock.now() + RESYNC_NS)
    assert clock.facts()["offset_error_ns"] == 400


def test_the_real_clocks_are_bracketed():
    """Not how tight, which is the machine's affair: only that the offset is the one between the two clocks."""
    import time

    low = time.time_ns() - time.monotonic_ns()
    offset, error = bracket()
    assert error >= 0
    assert abs(offset - low) < S
