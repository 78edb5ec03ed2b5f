"""Goodput: who meets the SLO, and what it is a share of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis_runs import MS, S, Service, make_run, messy_runs, stream
from whywait.analyze.goodput import answer_tokens, bounds, goodput, meets
from whywait.analyze.window import Window
from whywait.errors import UsageError


def _row(first=100, last=140, tokens=3, **columns):
    return {"sent_ns": S, "first_ns": S + first * MS, "first_answer_ns": S + first * MS, "last_ns": S + last * MS,
            "end_ns": S + last * MS, "output_tokens": tokens, "content_chunks": tokens, **columns}  # fmt: skip


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({}, True),
        ({"ttft_ms": 100}, True),
        ({"ttft_ms": 99}, False),
        ({"tpot_ms": 20, "e2e_ms": 140}, True),
        ({"tpot_ms": 19}, False),
        ({"e2e_ms": 139}, False),
        ({"ttfa_ms": 100}, True),
    ],
)
def test_bounds(slo, good):
    assert meets(make_run([_row()]), slo).tolist() == [good]


def test_itl_is_the_worst_gap_per_token():
    run = make_run([_row(100, 160)], stream(0, [S + v * MS for v in (100, 110, 160)]))
    assert meets(run, {"itl_ms": 50}).tolist() == [True]
    assert meets(run, {"itl_ms": 49}).tolist() == [False]


def test_a_metric_that_does_not_apply_does_not_fail_but_a_missing_one_does():
    one_token = _row(100, 100, 1)
    no_usage = _row(tokens=None, content_chunks=3)
    thinking_only = _row(first_answer_ns=None)
    run = make_run([one_token, no_usage, thinking_only])
    assert meets(run, {"tpot_ms": 1e9}).tolist() == [True, False, True]
    assert meets(run, {"itl_ms": 1e9}).tolist() == [True, False, False]  # the last two have no chunks: not known
    assert meets(run, {"ttfa_ms": 1e9}).tolist() == [True, True, False]


def test_a_withheld_tpot_is_decided_by_its_certain_bound():
    run = make_run([_row(500, 500, 4)], stream(0, [S + 500 * MS] * 4, [S, S, S, None]))
    assert meets(run, {"tpot_ms": 167}).tolist() == [True]  # 500 ms over three tokens at most
    assert meets(run, {"tpot_ms": 166}).tolist() == [False]


@pytest.mark.parametrize("slo", [{"ttft": 5}, {"ttft_ms": 0}, {"ttft_ms": float("nan")}])
def test_what_is_no_bound_is_refused(slo):
    with pytest.raises(UsageError):
        meets(make_run([_row()]), slo)


def _classes(run, **slos):
    classes = [{"name": name, "slo": slo} for name, slo in slos.items()]
    manifest = dataclasses.replace(run.manifest, workload={"classes": classes})
    return dataclasses.replace(run, manifest=manifest)


def test_each_class_is_held_to_its_own_slo():
    rows = [_row(**{"class": name}) for name in ("quick", "slow", "free", "unknown")]
    run = _classes(make_run(rows), quick={"ttft_ms": 99}, slow={"ttft_ms": 100, "tpot_ms": 20}, free={})
    assert meets(run, {}).tolist() == [False, True, True, True]
    # What is asked of all is asked of those classes that ask nothing themselves.
    assert meets(run, {"e2e_ms": 139}).tolist() == [False, True, False, False]
    assert goodput(run, {"e2e_ms": 139}, Window(S, 2 * S, True, 4, 0)).share == 0.25
    assert bounds(run, {"e2e_ms": 139})["ttft_ms"].tolist() == [99, 100, float("inf"), float("inf")]


def test_a_bound_of_another_class_does_not_fail_what_is_not_known():
    run = _classes(make_run([_row(tokens=None, content_chunks=3, **{"class": "a"})]), b={"tpot_ms": 9, "itl_ms": 9})
    assert meets(run, {}).tolist() == [True]
    assert meets(run, {"tpot_ms": 9}).tolist() == [False]


def test_uncertainty_is_about_the_own_bound():
    rows = [_row(100, 300, 9, content_chunks=3, **{"class": name}) for name in "ab"]
    assert goodput(_classes(make_run(rows), a={"tpot_ms": 50}, b={"tpot_ms": 200}), {}).uncertain == 1


@pytest.mark.parametrize("slo", [{"ttft": 5}, {"ttft_ms": 0}])
def test_a_class_with_what_is_no_bound_is_refused(slo):
    with pytest.raises(UsageError):
        meets(_classes(make_run([_row()]), a=slo), {})


def test_share_is_of_all_that_were_due():
    rows = [_row(), _row(900, 940), _row(outcome="truncated"), {"due_ns": S, "outcome": "never_sent"}]
    g = goodput(make_run(rows), {"ttft_ms": 500}, Window(S, 3 * S, True, 4, 0))
    assert (g.due, g.share) == (4, 0.25)
    assert g.requests_per_s == 0.5
    assert g.effective_tokens_per_s == 1.5
    assert g.meets.tolist() == [True, False, False, False]


def test_of_none_due_there_is_no_share():
    assert goodput(make_run([]), {"ttft_ms": 1}, Window(0, S, True, 0, 0)).share is None


def test_answer_tokens_leave_reasoning_out():
    rows = [
        _row(tokens=10, reasoning_tokens=6, first_answer_ns=S + 120 * MS),
        _row(tokens=10),  # its first token is an answer, so it did not reason
        _row(tokens=10, first_answer_ns=S + 120 * MS),  # it did, and nobody says how much
    ]
    assert answer_tokens(make_run(rows)).tolist()[:2] == [4, 10]
    assert np.isnan(answer_tokens(make_run(rows))[2])
    g = goodput(make_run(rows[:2]), {}, Window(S, 2 * S, True, 2, 0))
    assert (g.effective_tokens_per_s, g.answer_tokens_per_s) == (20, 14)
    assert goodput(make_run(rows), {}, Window(S, 2 * S, True, 3, 0)).answer_tokens_per_s is None


def test_answer_chunks_carry_the_answer_tokens():
    t = [S + v * MS for v in (100, 120, 140)]
    chunks = stream(0, t)
    chunks[0]["kind"] = "reasoning"
    row = _row(tokens=9, content_chunks=3, reasoning_tokens=5, first_answer_ns=t[1])
    g = goodput(make_run([row], chunks), {}, Window(S, 2 * S, True, 1, 0))
    assert (g.effective_tokens_per_s, g.answer_tokens_per_s) == (9, 4)


def test_uncertain_requests_are_counted():
    run = make_run([_row(100, 300, 9, content_chunks=3)])
    assert goodput(run, {"tpot_ms": 50}).uncertain == 1
    assert goodput(run, {"tpot_ms": 200}).uncertain == 0


def test_goodput_of_a_service_within_its_slo_is_all_of_it():
    run = Service().closed(4, 40)
    g = goodput(run, {"ttft_ms": 51, "tpot_ms": 20.1, "itl_ms": 20.1, "e2e_ms": 351})
    assert g.share == 1
    assert g.effective_tokens_per_s == g.answer_tokens_per_s


@given(
    messy_runs(orderly=False),
    st.dictionaries(st.sampled_from(("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms")), st.just(99.0)),
)
def test_only_ok_requests_are_good(run, slo):
    one = run.point(0)
    g = goodput(one, slo)
    assert not g.meets[one.requests["outcome"] != 0].any()
    assert g.share is None or 0 <= g.share <= 1
