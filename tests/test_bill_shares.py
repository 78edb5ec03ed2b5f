"""Shares of a batch's joules: exact, by a named rule, and what is in a window agrees with the rates of it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis_runs import MS, S, Service, make_run, messy_runs, stream
from whywait.analyze.bill_work import ANSWER, EFFECTIVE, GOOD, RAW, work_of
from whywait.analyze.goodput import goodput
from whywait.analyze.latency import CLOSED, OK
from whywait.analyze.phases import account
from whywait.analyze.sharing import (
    ALL_TOKENS,
    DEVICE_TIME,
    OUTPUT_TOKENS,
    RULES,
    apportion,
    presence,
    tokens_inside,
    weights,
)
from whywait.analyze.streams import content
from whywait.analyze.window import Window, request_rate, token_rate, window_of

WEIGHTS = st.lists(st.floats(0, 1e12, allow_nan=False, allow_subnormal=False), min_size=1, max_size=40)


@given(total=st.integers(0, 10**21), w=WEIGHTS)
def test_shares_sum_exactly_and_are_within_one(total: int, w: list[float]) -> None:
    parts = apportion(total, np.array(w))
    if not any(w):
        assert parts is None
        return
    assert parts is not None
    assert sum(parts) == total
    whole = sum(Fraction(x) for x in w)
    for part, x in zip(parts, w, strict=True):
        assert part >= 0
        exact = Fraction(x) / whole * total
        assert abs(part - exact) <= 1 + len(w) * total / 2**51  # weights count to 53 bits of the largest
        assert x > 0 or part == 0


@given(w=WEIGHTS, k=st.sampled_from([0.125, 2.0, 1024.0]))
def test_only_the_proportions_count(w: list[float], k: float) -> None:
    assert apportion(10**12, np.array(w)) == apportion(10**12, np.array(w) * k)


def test_what_is_left_goes_to_the_largest_remainders() -> None:
    assert apportion(7, np.array([5.0, 3.0, 2.0])) == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert apportion(7, np.array([2.0, 3.0, 5.0])) == [1, 2, 4]


@given(total=st.integers(0, 1000), n=st.integers(1, 30))
def test_equal_weights_differ_by_one_at_most(total: int, n: int) -> None:
    parts = apportion(total, np.ones(n))
    assert parts is not None
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize(("total", "w"), [(-1, [1.0]), (1, [-1.0]), (1, [np.nan]), (1, [np.inf])])
def test_what_cannot_be_shared(total: int, w: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        apportion(total, np.array(w))


@settings(max_examples=40)
@given(run=messy_runs())
def test_what_is_in_the_window_agrees_with_the_rates_of_it(run: object) -> None:
    one = run.point(0)  # type: ignore[attr-defined]
    w, c = Window(4 * S, 15 * S, False, 0, 0), content(one)
    every = np.ones(len(one.requests), dtype=bool)
    closed = one.points["mode"][0] == CLOSED
    there = presence(one, w, closed)
    rate = request_rate(one, w, every)
    assert np.nansum(there) == pytest.approx((rate or 0.0) * w.seconds)
    made = tokens_inside(one, c, w)
    assert not np.isinf(made).any()
    tokens, _, missing = token_rate(one, c, w, every)
    if tokens is not None and not missing:
        assert np.nansum(made) == pytest.approx(tokens * w.seconds, abs=1e-6)


@settings(max_examples=40)
@given(run=messy_runs())
def test_every_rule_gives_finite_weights_or_a_reason(run: object) -> None:
    one = run.point(0)  # type: ignore[attr-defined]
    acc = account(one)
    for rule in RULES:
        found = weights(one, Window(4 * S, 15 * S, False, 0, 0), content(one), acc, rule)
        if found.values is None:
            assert found.why
        else:
            assert len(found.values) == len(one.requests)
            assert np.isfinite(found.values).all()
            assert (found.values >= 0).all()
            assert found.prefill is None or -1e-9 <= found.prefill <= 1 + 1e-9


def test_device_time_is_split_by_who_is_in_work() -> None:
    """One alone for 1 s, two together for 2 s, the other alone for 1 s: 2 s each."""
    rows = [
        {"sent_ns": 0, "first_ns": S // 2, "last_ns": 3 * S, "end_ns": 3 * S, "output_tokens": 10, "prompt_tokens": 10,
         "engine_prefill_ms": 500.0},
        {"sent_ns": S, "first_ns": 2 * S, "last_ns": 4 * S, "end_ns": 4 * S, "output_tokens": 30, "prompt_tokens": 90,
         "engine_prefill_ms": 1000.0},
        {"sent_ns": S, "end_ns": S + 1, "outcome": "shed", "fault": "service"},
    ]  # fmt: skip
    run = make_run(rows)
    w, c, acc = Window(0, 5 * S, False, 0, 0), content(run), account(run)
    found = weights(run, w, c, acc, DEVICE_TIME)
    assert found.values.tolist() == pytest.approx([2e9, 2e9, 0])
    assert found.prefill == pytest.approx((0.5e9 + 0.5e9) / 4e9)
    assert weights(run, w, c, acc, OUTPUT_TOKENS).values.tolist() == [10, 30, 0]
    assert weights(run, w, c, acc, ALL_TOKENS).values.tolist() == [20, 120, 0]


def test_prompt_tokens_from_the_cache_were_not_computed() -> None:
    row = {"sent_ns": 0, "first_ns": S, "last_ns": 2 * S, "end_ns": 2 * S, "output_tokens": 5, "prompt_tokens": 100}
    run = make_run([{**row, "cached_tokens": 80}, row])
    found = weights(run, Window(0, 3 * S, False, 0, 0), content(run), account(run), ALL_TOKENS)
    assert found.values.tolist() == [25, 105]


def test_a_queue_is_not_work() -> None:
    service = Service(slots=1, tokens=11, prefill_ms=100, gap_ms=10)
    run = service.closed(4, 12)
    found = weights(run, window_of(run), content(run), account(run), DEVICE_TIME)
    inside = found.values[4:-4]
    assert inside.max() <= 200 * MS * 1.02  # each alone: its own 200 ms, not the 600 it waited for its turn


def test_tokens_of_failed_streams_are_counted_by_their_chunks_where_usage_is_missing() -> None:
    good = [{"sent_ns": 0, "first_ns": S, "last_ns": 2 * S, "end_ns": 2 * S, "output_tokens": 8, "content_chunks": 4}]
    cut = [{"sent_ns": 0, "first_ns": S, "last_ns": 2 * S, "end_ns": 2 * S, "outcome": "truncated", "fault": "service",
            "content_chunks": 3}]  # fmt: skip
    t = [S + i * 100 * MS for i in range(4)]
    run = make_run(good + cut, stream(0, t) + stream(1, t[:3]))
    w = Window(0, 3 * S, False, 0, 0)
    found = weights(run, w, content(run), account(run), OUTPUT_TOKENS)
    assert found.values.tolist() == pytest.approx([8, 6])  # two tokens a chunk, as in the good one


@settings(max_examples=40)
@given(run=messy_runs())
def test_the_work_of_pieces_adds_up_to_that_of_the_window(run: object) -> None:
    one = run.point(0)  # type: ignore[attr-defined]
    w = Window(4 * S, 14 * S, False, 0, 0)
    work = work_of(one, content(one), w, {})
    edges = np.linspace(w.start_ns, w.end_ns, 11)
    for what, parts in work.in_pieces(edges).items():
        whole = work.count(what)[0]
        if parts is not None and whole is not None:
            assert parts.sum() == pytest.approx(whole, abs=1e-6), what
    assert set(work.in_pieces(edges)) == {GOOD, EFFECTIVE, ANSWER, RAW}


def test_the_work_is_that_of_goodput() -> None:
    run = Service(slots=4, noise=0.2).closed(4, 60)
    w, c, slo = window_of(run), content(run), {"ttft_ms": 60.0}
    good, work = goodput(run, slo, w, c), work_of(run, c, w, slo)
    assert work.count(GOOD)[0] == pytest.approx(good.requests_per_s * w.seconds)
    assert work.count(EFFECTIVE)[0] == pytest.approx(good.effective_tokens_per_s * w.seconds)
    assert work.count(ANSWER)[0] == pytest.approx(good.answer_tokens_per_s * w.seconds)
    assert int(work.ok.sum()) == int((run.requests["outcome"] == OK).sum())
