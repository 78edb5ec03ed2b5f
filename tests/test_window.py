"""Windows, sweep lines and rates on services whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis_runs import MS, S, Service, join, make_run, messy_runs, stream
from whywait.analyze.streams import content
from whywait.analyze.window import (
    Spans,
    Window,
    in_flight,
    request_rate,
    starts_inside,
    sweep,
    token_bins,
    token_rate,
    window_of,
    with_windows,
)
from whywait.core.run import Run
from whywait.core.table import Table


def _all(run):
    return np.ones(len(run.requests), dtype=bool)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=12))
def test_sweep_counts_open_intervals(pairs):
    starts, ends = (np.array([p[i] for p in pairs], dtype=float) for i in (0, 1))
    times, counts = sweep(starts, ends)
    for t, n in zip(times, counts, strict=True):
        assert n == sum(a <= t < b for a, b in pairs)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=8), st.integers(-2, 33))
def test_spans_are_covered_once(pairs, t):
    spans = Spans.of(*(np.array([p[i] for p in pairs], dtype=np.int64) for i in (0, 1)))
    assert (spans.starts[1:] > spans.stops[:-1]).all()
    assert spans.covered(np.array([t])) == sum(any(a <= x < b for a, b in pairs) for x in range(-2, t))
    assert spans.ends_near(np.array([t]), np.array([2])) == any(abs(b - t) <= 2 for _, b in pairs)


def test_back_to_back_requests_are_never_two_at_once():
    run = make_run([{"sent_ns": 0, "end_ns": 10}, {"sent_ns": 10, "end_ns": 20}])
    assert in_flight(run, 0, 20) == (1, 1.0)
    assert in_flight(run, -20, 20) == (1, 0.5)
    assert in_flight(run, 5, 5) == (0, 0.0)


def test_closed_loop_window_starts_after_the_burst_and_ends_before_the_drain():
    run = Service(slots=4).closed(4, 40)
    w = window_of(run)
    burst = run.requests["first_ns"][:4].max()
    assert not w.whole
    assert w.start_ns == burst
    # The last request sent took the place of the one that ended then; after the next end nobody follows.
    last_sent = run.requests["sent_ns"].max()
    ends = np.sort(run.requests["end_ns"])
    assert w.end_ns == ends[ends > last_sent][0]
    assert (w.requests, w.dropped) == (36, 4)


def test_the_burst_is_over_when_the_last_of_it_has_a_token():
    run = Service(slots=4).closed(8, 80)
    assert window_of(run).start_ns == run.requests["first_ns"][7]


@pytest.mark.parametrize(
    ("concurrency", "requests", "why"),
    [(4, 4, "only 0 requests began"), (16, 20, "requests began in the steady part, 16 are needed"), (8, 4, "never")],
)
def test_too_little_is_measured_whole_and_said(concurrency, requests, why):
    run = Service(slots=64).closed(concurrency, requests)
    w = window_of(run)
    assert w.whole
    assert (w.start_ns, w.end_ns) == (run.points["start_ns"][0], run.points["end_ns"][0])
    assert why in w.why


def test_open_loop_window():
    run = Service(slots=8, tokens=16).open([100 * MS] * 100)  # end-to-end 350 ms, so 1 s is dropped
    w = window_of(run)
    assert w.start_ns == run.points["start_ns"][0] + S
    assert w.end_ns == run.requests["due_ns"].max()
    slow = Service(slots=64, tokens=101).open([100 * MS] * 100)  # 2.05 s
    assert window_of(slow).start_ns - slow.points["start_ns"][0] == pytest.approx(2.05 * S, rel=0.01)
    short = Service(slots=64, tokens=401).open([100 * MS] * 100)  # 8.05 s of the 10 in which requests are due
    assert "the steady part is only 9%" in window_of(short).why


def test_windows_are_filled_per_point_and_kept():
    run = join([Service().closed(4, 40), Service().closed(8, 8)])
    filled = with_windows(run)
    assert filled.points["steady_start_ns"][0] == window_of(run.point(0)).start_ns
    assert filled.points["steady_start_ns"][1] == run.points["start_ns"][1]
    assert with_windows(filled).points == filled.points
    assert window_of(filled.point(0)) == window_of(run.point(0))
    assert window_of(filled.point(1)) == window_of(run.point(1))
    stated = run.points.replace(steady_start_ns=run.points["start_ns"] + 5.0, steady_end_ns=run.points["end_ns"] - 5.0)
    w = window_of(Run(run.manifest, stated, run.requests, run.chunks, run.steps, run.readings).point(1))
    assert (w.start_ns, w.whole) == (run.points["start_ns"][1] + 5, False)


def test_rates_of_synchronous_waves_are_the_services():
    # Four places, 350 ms each: 4 / 0.35 s, though all end at once and the window is no whole number of waves.
    run = Service(slots=4, rtt_ns=0).closed(4, 40)
    w = window_of(run)
    assert request_rate(run, w, _all(run)) == pytest.approx(4 / 0.35, rel=0.001)
    tokens, peak, missing = token_rate(run, content(run), w, _all(run))
    assert tokens == pytest.approx(64 / 0.35, rel=0.05)
    assert peak >= tokens
    assert missing == 0


def test_under_overload_only_completions_count():
    run = Service(slots=1, tokens=11, prefill_ms=50, gap_ms=20).open([50 * MS] * 400)  # 4 /s served, 20 /s offered
    w = window_of(run)
    assert request_rate(run, w, _all(run)) == pytest.approx(4, rel=0.03)


def test_tokens_of_the_whole_point_are_all_tokens():
    run = Service(noise=0.2).closed(4, 20)
    w = Window(int(run.points["start_ns"][0]), int(run.points["end_ns"][0]), True, 20, 0)
    bins, _ = token_bins(run, content(run), w, _all(run), 7)
    assert bins.sum() == pytest.approx(20 * 16)
    bare = Run(run.manifest, run.points, run.requests, Table.empty("chunks"), run.steps, run.readings)
    bins, _ = token_bins(bare, content(bare), w, _all(run), 7)
    assert bins.sum() == pytest.approx(20 * 16)


def test_usage_is_spread_over_chunks_of_unknown_tokens():
    row = {"sent_ns": 0, "first_ns": 1 * S, "last_ns": 3 * S, "end_ns": 3 * S, "output_tokens": 12}
    run = make_run([row], stream(0, [S, 2 * S, 3 * S]))
    bins, missing = token_bins(run, content(run), Window(0, 3 * S, True, 1, 0), _all(run), 3)
    assert bins.tolist() == [4, 4, 4]
    assert missing == 0


@pytest.mark.parametrize("chunks", [stream(0, [S, 2 * S]), []])
def test_without_usage_the_rate_is_unknown(chunks):
    row = {"sent_ns": 0, "first_ns": S, "last_ns": 2 * S, "end_ns": 2 * S}
    run = make_run([row], chunks)
    assert token_rate(run, content(run), Window(0, 3 * S, True, 1, 0), _all(run)) == (None, None, 1)


def test_not_streamed_tokens_come_at_the_end():
    run = make_run([{"sent_ns": 0, "end_ns": 2 * S, "output_tokens": 10}])
    bins, _ = token_bins(run, content(run), Window(0, 2 * S, True, 1, 0), _all(run), 2)
    assert bins.tolist() == [0, 10]


def test_peak_weighs_chunks_by_tokens():
    times = [S // 2 + i * S for i in range(4)]
    row = {"sent_ns": 0, "first_ns": times[0], "last_ns": times[-1], "end_ns": 4 * S, "output_tokens": 13}
    run = make_run([row], stream(0, times, tokens=[1, 10, 1, 1]))
    assert token_rate(run, content(run), Window(0, 4 * S, True, 1, 0), _all(run)) == (13 / 4, 10, 0)


def test_choosing_by_origin():
    run = Service().closed(1, 4)
    sent = run.requests["sent_ns"]
    assert starts_inside(run, int(sent[1]), int(sent[2])).tolist() == [False, True, True, False]


@given(messy_runs(), st.integers(0, 10 * S), st.integers(1, 10 * S))
def test_peak_is_never_below_the_mean(run, start, length):
    peak, mean = in_flight(run, start, start + length)
    assert peak >= mean >= 0
    w = Window(start, start + length, False, 0, 0)
    one = run.point(0)
    rate, top, _ = token_rate(one, content(one), w, _all(one))
    assert (rate is None) == (top is None)
    assert rate is None or top >= rate >= 0


@given(messy_runs(orderly=False))
def test_windows_lie_in_their_points(run):
    filled = with_windows(run)
    assert not (filled.points["steady_start_ns"] < run.points["start_ns"]).any()
    for number in (0, 1):
        window_of(filled.point(number))
