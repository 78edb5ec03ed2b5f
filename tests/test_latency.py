"""Latency definitions on streams whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.analysis_runs import MS, S, Service, make_run, messy_runs, stream
from whywait.analyze.latency import latency_summary, origin_ns, per_request, worst_itl_ms
from whywait.analyze.streams import content, gaps


def _one(times_ms, tokens=None, lows=None, counts=None, **columns):
    """One request sent at 1000 ms with content chunks at these times (ms)."""
    t = [round(v * MS) for v in times_ms]
    row = {
        "due_ns": 900 * MS, "sent_ns": 1000 * MS, "accepted_ns": 1000 * MS, "first_ns": t[0], "first_answer_ns": t[0],
        "last_ns": t[-1], "end_ns": t[-1] + 5 * MS, "output_tokens": tokens, "content_chunks": len(t), **columns,
    }  # fmt: skip
    low = [None if v is None else round(v * MS) for v in lows] if lows else None
    return row, stream(0, t, low, counts)


def _run(*args, mode="concurrency", **kwargs):
    row, chunks = _one(*args, **kwargs)
    return make_run([row], chunks, points=[{"mode": mode, "target": 1, "start_ns": 0, "end_ns": 9 * S}])


def test_the_truth_of_a_simple_service():
    lat = per_request(Service(prefill_ms=50, gap_ms=20, tokens=16, rtt_ns=200_000).closed(1, 5))
    assert lat.ttft_ms == pytest.approx(np.full(5, 50.2))
    assert lat.e2e_ms == pytest.approx(np.full(5, 350.2))
    assert lat.tail_ms == pytest.approx(np.full(5, 0.01))
    assert lat.tpot_ms == pytest.approx(np.full(5, 20.0))


@pytest.mark.parametrize(("mode", "ttft"), [("concurrency", 100), ("rate", 200), ("trace", 200)])
def test_open_loop_counts_from_due(mode, ttft):
    run = _run([1100, 1120], 2, mode=mode)
    assert per_request(run).ttft_ms[0] == ttft


def test_without_a_due_time_open_loop_counts_from_sent():
    assert origin_ns(_run([1100, 1120], 2, mode="rate", due_ns=None))[0] == 1000 * MS


def test_tpot_with_known_first_chunk():
    lat = per_request(_run([1100, 1200, 1300], 9, counts=[3, 3, 3], first_chunk_tokens=3))
    assert lat.tpot_ms[0] == lat.tpot_low_ms[0] == lat.tpot_high_ms[0] == pytest.approx(200 / 6)


def test_tpot_is_an_interval_when_the_first_chunk_is_unknown():
    lat = per_request(_run([1100, 1200, 1300], 9))
    assert lat.tpot_low_ms[0] == pytest.approx(200 / 8)  # one token in the first chunk
    assert lat.tpot_high_ms[0] == pytest.approx(200 / 2)  # all but the last two in it
    assert lat.tpot_ms[0] == pytest.approx(200 / 6)  # three in each
    found, _ = latency_summary(_run([1100, 1200, 1300], 9))
    assert found["tpot_ms"]["bounds"]["p50"] == pytest.approx([25, 100])


def test_as_many_chunks_as_tokens_means_one_each():
    lat = per_request(_run([1100, 1110, 1120], 3))
    assert lat.tpot_low_ms[0] == lat.tpot_ms[0] == lat.tpot_high_ms[0] == 10


@pytest.mark.parametrize("tokens", [1, 40])
def test_tpot_does_not_apply_when_all_came_at_once(tokens):
    lat = per_request(_run([1100], tokens))
    assert np.isnan(lat.tpot_ms[0])
    assert not lat.tpot_applies[0]


def test_tpot_applies_but_is_unknown_without_usage():
    lat = per_request(_run([1100, 1120], None))
    assert np.isnan(lat.tpot_ms[0])
    assert lat.tpot_applies[0]


def test_chunks_of_one_read_have_intervals_and_no_zero_gaps():
    # Three events in the read stamped 1140, after one at 1100: the last event is exact, the others are not.
    run = _run([1100, 1140, 1140, 1140, 1160], 5, lows=[None, 1100, 1100, None, None])
    g = gaps(content(run))
    assert (g.value / MS).tolist() == pytest.approx([40 / 3, 40 / 3, 40 / 3, 20])
    assert (g.low / MS).tolist() == [0, 0, 0, 20]
    assert (g.high / MS).tolist() == [40, 40, 40, 20]
    assert g.coalesced.tolist() == [True, True, True, False]


def test_mostly_coalesced_gaps_are_withheld_but_bounded():
    found, doubts = latency_summary(_run([1100, 1140, 1140, 1140, 1160], 5, lows=[None, 1100, 1100, None, None]))
    gap = found["chunk_gap_ms"]
    assert gap["p50"] is gap["mean"] is found["itl_ms"]["p50"] is None
    assert gap["n"] == 4
    assert gap["bounds"]["p50"] == [0, 40]
    assert "withheld" in doubts[0]["what"]


def test_a_few_coalesced_gaps_give_bounds_beside_the_value():
    times = [1100 + 20 * i for i in range(10)]
    found, doubts = latency_summary(_run([*times, 1300, 1300], 12, lows=[None] * 10 + [1280, None]))
    gap = found["chunk_gap_ms"]
    assert gap["bounds"]["p50"][0] <= gap["p50"] <= gap["bounds"]["p50"][1]
    assert gap["bounds"]["mean"][0] < gap["mean"] < gap["bounds"]["mean"][1]
    assert doubts == []


def test_a_stream_in_one_read_has_no_tpot_value():
    lat = per_request(_run([1500] * 4, 4, lows=[1000, 1000, 1000, None]))
    assert np.isnan(lat.tpot_ms[0])
    assert lat.tpot_low_ms[0] == 0
    assert lat.tpot_high_ms[0] == pytest.approx(500 / 3)
    assert lat.ttft_low_ms[0] == 0
    assert lat.ttft_ms[0] == 500


def test_itl_divides_by_tokens_and_weighs_by_them():
    # Gaps of 30 ms with 3 tokens and of 40 ms with 1: itl 10 (three times) and 40 (once).
    found, _ = latency_summary(_run([1100, 1130, 1170], 5, counts=[1, 3, 1]))
    assert found["itl_ms"]["p50"] == 10
    assert found["itl_ms"]["mean"] == pytest.approx(17.5)
    assert found["chunk_gap_ms"]["mean"] == 35


@pytest.mark.parametrize(
    ("tokens", "counts", "reason", "known"),
    [
        (3, None, "length", True),
        (4, None, "stop", True),  # the stop token is counted but has no chunk
        (4, None, "length", False),
        (None, None, "stop", False),
        (5, [2, None, 2], "length", True),
        (9, [2, None, 2], "length", False),
    ],
)
def test_tokens_per_chunk_are_inferred_only_when_they_must_be_one(tokens, counts, reason, known):
    run = _run([1100, 1120, 1140], tokens, counts=counts, finish_reason=reason)
    c = content(run)
    assert bool(np.isnan(c.tokens[1])) is not known
    assert tokens is None or c.tokens_spread.sum() == pytest.approx(tokens)
    _, doubts = latency_summary(run)
    assert any("ITL leaves out" in d["what"] for d in doubts) is not known


def test_time_to_first_answer_is_apart_and_absent_for_thinking_only():
    assert per_request(_run([1100, 1120], 2, first_answer_ns=1120 * MS)).ttfa_ms[0] == 120
    assert np.isnan(per_request(_run([1100, 1120], 2, first_answer_ns=None)).ttfa_ms[0])


def test_role_chunks_are_no_tokens():
    row, chunks = _one([1100, 1120], 2)
    run = make_run([row], [{**stream(0, [1050 * MS])[0], "kind": "role"}, *chunks])
    assert len(content(run).t) == 2


def test_not_streamed_has_end_to_end_and_no_first_token():
    row = {"sent_ns": 1000 * MS, "end_ns": 1500 * MS, "output_tokens": 9}
    lat = per_request(make_run([row]))
    assert lat.e2e_ms[0] == 500
    assert np.isnan(lat.ttft_ms[0])


def test_only_good_requests_enter_the_percentiles():
    good, chunks = _one([1100, 1120], 2)
    bad, more = _one([1900, 1990], 2, outcome="truncated")
    found, _ = latency_summary(make_run([good, bad], chunks + [{**c, "id": 1} for c in more]))
    assert found["ttft_ms"]["n"] == found["chunk_gap_ms"]["n"] == 1
    assert found["ttft_ms"]["p50"] == 100
    found, _ = latency_summary(make_run([good], chunks), np.array([False]))
    assert found["ttft_ms"]["n"] == 0


def test_worst_gap_per_token_is_an_upper_bound_when_tokens_are_unknown():
    assert worst_itl_ms(r := _run([1100, 1130, 1190], 7), content(r))[0] == 60
    assert worst_itl_ms(r := _run([1100, 1130, 1190], 5, counts=[1, 1, 3]), content(r))[0] == 30
    assert np.isnan(worst_itl_ms(r := _run([1100], 1), content(r))[0])


@given(messy_runs())
def test_values_lie_within_their_certain_bounds(run):
    g = gaps(content(run))
    assert (g.low >= 0).all()
    assert (g.low <= g.value).all()
    assert (g.value <= g.high).all()
    lat = per_request(run)
    with np.errstate(invalid="ignore"):
        assert not (lat.tpot_ms <= 0).any()
        assert not (lat.tpot_ms < lat.tpot_low_ms * (1 - 1e-9)).any()
        assert not (lat.tpot_ms > lat.tpot_high_ms * (1 + 1e-9)).any()
        assert not (lat.ttft_low_ms > lat.ttft_ms).any()
    latency_summary(run)


@given(messy_runs(orderly=False))
def test_no_run_is_too_broken_to_look_at(run):
    latency_summary(run)
