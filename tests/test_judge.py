"""Verdicts on Runs whose cause is known: named where the evidence is there, undecided where it is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, stream
from whywait.analyze.summary import summarize
from whywait.analyze.window import with_windows
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.engines import by_name
from whywait.judge.diagnose import failures, headline, judge
from whywait.judge.evidence import MIXED
from whywait.judge.verdict import WORK, Verdict, rank


def flags(name: str = "llama.cpp") -> dict[str, str]:
    table = by_name(name)
    assert table is not None
    return dict(table.flags)


def sweep(concurrency: list[int], gap_of: Any, slots: int = 4, **more: Any) -> Run:
    parts = [Service(slots=slots, gap_ms=gap_of(min(c, slots)), **more).closed(c, 12 * c) for c in concurrency]
    return with_windows(join(parts))


def verdicts(run: Run, engine: str = "llama.cpp") -> dict[str, Verdict]:
    """The first of each cause."""
    return {v.cause: v for v in reversed(judge(run, summarize(run), flags(engine)))}


def test_queue_behind_the_slots_holds_above_them_and_only_there() -> None:
    run = sweep([1, 4, 16], lambda c: 20.0)
    found = verdicts(run)
    v = found["slot limit"]
    assert (v.state, v.where) == ("holds", "concurrency 16")
    assert v.share == pytest.approx(0.75, abs=0.05)  # 4 served of 16 in flight: three quarters of the time is queue
    assert "--parallel" in v.lever


def test_the_share_of_the_queue_is_the_true_one() -> None:
    service = Service(slots=2)
    run = with_windows(join([service.closed(1, 12), service.closed(8, 64)]))
    # Of the steady part: the first eight, sent at once, are warm-up.
    took = (run.requests["end_ns"] - run.requests["sent_ns"])[20:]
    truth = np.sum(service.truth_queue_ns[8:]) / float(took.sum())
    assert verdicts(run)["slot limit"].share == pytest.approx(truth, abs=0.01)


def test_batching_for_free_means_weight_reads_and_none_means_compute() -> None:
    reads = verdicts(sweep([1, 4], lambda c: 20.0))
    assert reads["weight-read-bound decode"].state == "holds"
    compute = verdicts(sweep([1, 4], lambda c: 20.0 * c))
    assert compute["compute-bound decode"].state == "holds"
    between = verdicts(sweep([1, 4], lambda c: 20.0 * (1 + 0.5 * (c - 1))))
    assert between["weight-read-bound decode"].state == "undecided"
    for found in (reads, compute):
        assert all(v.how == "modelled" for c, v in found.items() if c.endswith("bound decode"))


def test_what_two_widths_do_not_tell_is_for_the_engines_own_profiler() -> None:
    run = sweep([1, 4], lambda c: 20.0 * (1 + 0.5 * (c - 1)))
    for engine, how in (("llama.cpp", "perf record"), ("vllm", "/start_profile"), ("sglang", "/start_profile"),
                        ("tensorrt-llm", "nsys profile")):  # fmt: skip
        v = verdicts(run, engine)["weight-read-bound decode"]
        assert (v.state, how in v.next_step) == ("undecided", True), v.next_step
    unknown = {v.cause: v for v in judge(run, summarize(run), {})}["weight-read-bound decode"]
    assert "profile the engine; look for" in unknown.next_step  # nobody told how: no command is made up


def test_where_the_engine_says_all_it_can_the_rest_is_for_its_profiler() -> None:
    run = sweep([4], lambda c: 20.0)
    late = run.requests.replace(sent_ns=run.requests["sent_ns"] - 1.5 * S, due_ns=run.requests["due_ns"] * np.nan)
    slots = gauge_rows("waiting", [(t, 0.0) for t in range(0, int(run.points["end_ns"][0]), S // 4)])
    readings = Table.from_rows("readings", [{"answered_ns": r["asked_ns"], **r} for r in slots])
    v = verdicts(dataclasses.replace(run, requests=late, readings=readings), "vllm")["unexplained"]
    assert v.state == "undecided"
    assert "/start_profile" in v.next_step


def test_one_point_alone_leaves_decode_undecided_and_says_what_would_settle_it() -> None:
    v = verdicts(sweep([1], lambda c: 20.0))["weight-read-bound decode"]
    assert v.state == "undecided"
    assert "concurrency" in v.next_step


def test_want_of_load() -> None:
    found = verdicts(sweep([1, 2], lambda c: 20.0, slots=8))["want of load"]
    assert found.state == "holds"
    assert found.share == pytest.approx(0.75, abs=0.05)  # eight at once would make four times as much
    filled = verdicts(sweep([1, 4], lambda c: 20.0 * c, slots=8, prefill_ms=0.001))["want of load"]
    assert filled.state == "fails"
    full = verdicts(sweep([1, 8], lambda c: 20.0, slots=8))["want of load"]
    assert full.state == "fails"  # the batch cannot grow
    alone = verdicts(sweep([1], lambda c: 20.0, slots=8))["want of load"]
    assert (alone.state, bool(alone.next_step)) == ("undecided", True)


def test_more_slots_are_not_promised_where_batching_gains_nothing() -> None:
    slow = verdicts(sweep([1, 4, 16], lambda c: 20.0 * c, prefill_ms=1.0))["slot limit"]
    assert any("slower decode" in a for a in slow.against)
    free = verdicts(sweep([1, 4, 16], lambda c: 20.0, prefill_ms=1.0))["slot limit"]
    assert not free.against


def without(run: Run, **nulls: Any) -> Run:
    requests = run.requests.replace(**{k: np.full(len(run.requests), np.nan) for k in nulls})
    return dataclasses.replace(run, requests=requests)


def test_without_engine_figures_and_gauges_nothing_is_claimed_about_the_queue() -> None:
    run = without(sweep([1, 4, 16], lambda c: 20.0), engine_prefill_ms=1)
    run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, engine={}))
    found = verdicts(run)
    assert "slot limit" not in found or found["slot limit"].state != "holds"
    assert found["unexplained"].state == "undecided"
    assert found["unexplained"].next_step


def test_a_limit_is_inferred_from_the_gauges_of_an_engine_that_does_not_tell() -> None:
    parts = []
    for c in (1, 8, 16):
        run = Service(slots=4).closed(c, 12 * c)
        times = range(int(run.points["start_ns"][0]), int(run.points["end_ns"][0]), S // 4)
        rows = gauge_rows("running", [(t, min(c, 4)) for t in times])
        rows += gauge_rows("waiting", [(t, max(0, c - 4)) for t in times])
        rows += gauge_rows("kv_use", [(t, 0.2) for t in times])
        rows = [{"answered_ns": r["asked_ns"], **r} for r in rows]
        engine = dataclasses.replace(run.manifest, engine={})
        parts.append(dataclasses.replace(run, manifest=engine, readings=Table.from_rows("readings", rows)))
    v = verdicts(with_windows(join(parts)), "vllm")["slot limit"]
    assert v.state == "holds"
    assert v.how == "inferred"
    assert "4 at a time" in v.claim
    assert "--max-num-seqs" in v.lever


def test_a_neighbours_prefill_is_named_with_it_and_not_without() -> None:
    plain = sweep([4], lambda c: 20.0)
    assert "neighbour's prefill" not in verdicts(plain)
    rows, chunks = [], []
    for i in range(12):
        begin = S + i * 2 * S
        # A stream of 40 tokens at 20 ms that stands still for 600 ms after its 20th, while the next long prompt is
        # computed; that request answers with two tokens.
        times = [begin + 100 * MS + k * 20 * MS + (600 * MS if k >= 20 else 0) for k in range(40)]
        rows.append({"id": 2 * i, "sent_ns": begin, "accepted_ns": times[0], "first_ns": times[0], "last_ns": times[-1],
                     "end_ns": times[-1], "engine_prefill_ms": 90.0, "output_tokens": 40,
                     "content_chunks": 40})  # fmt: skip
        chunks += stream(2 * i, times)
        first = times[20] - 5 * MS
        rows.append({"id": 2 * i + 1, "sent_ns": first - 601 * MS, "accepted_ns": first, "first_ns": first,
                     "last_ns": first + 40 * MS, "end_ns": first + 40 * MS, "engine_prefill_ms": 600.0,
                     "output_tokens": 3, "content_chunks": 3})  # fmt: skip
        chunks += stream(2 * i + 1, [first, first + 20 * MS, first + 40 * MS])
    points = [{"target": 2, "label": MIXED}]
    run = make_run(rows, chunks, points=points, engine={"slots": 4})
    v = verdicts(with_windows(run))["neighbour's prefill"]
    assert v.state == "holds"
    assert v.share == pytest.approx(0.595 / 2.13, abs=0.05)


def test_nothing_succeeded() -> None:
    run = sweep([1], lambda c: 20.0)
    failed = run.requests.replace(outcome=np.full(len(run.requests), 3, dtype=np.int8))
    found = judge(dataclasses.replace(run, requests=failed), summarize(dataclasses.replace(run, requests=failed)))
    assert [v.state for v in found] == ["undecided"]
    assert "No request succeeded" in found[0].claim


def test_no_evidence_cannot_hold() -> None:
    with pytest.raises(ValueError, match="evidence"):
        Verdict("x", "y", "holds")
    with pytest.raises(ValueError, match="state"):
        Verdict("x", "y", "perhaps")


def test_rank_and_headline() -> None:
    a = Verdict("a", "A", "holds", 0.2, evidence=("e",), point=1)
    b = Verdict("b", "B", "holds", 0.5, evidence=("e",), point=1)
    c = Verdict("c", "C", "undecided", 0.9)
    d = Verdict("d", "D", "fails", 0.0, evidence=("e",))
    assert [v.cause for v in rank([d, c, a, b])] == ["b", "a", "c", "d"]
    assert headline(rank([d, c, a, b])) == "B. A"  # two causes at once are both named
    work = Verdict("w", "W", "holds", 0.9, evidence=("e",), kind=WORK)
    assert headline(rank([work, a, b])) == "B. A"  # a wait that matters goes before work
    minor = Verdict("m", "M", "holds", 0.05, evidence=("e",))
    assert headline(rank([minor, work])) == "W"
    above = dataclasses.replace(b, beyond=True)
    assert headline(rank([above, a])) == "A. At other loads: b"
    assert headline([c, d]).startswith("Undecided")
    assert "Nothing" in headline([d])


def test_failures_lead_where_they_are_many() -> None:
    points = [{"counts": {"ok": 20, "http_error": 15, "reset": 5, "never_sent": 60}}]
    assert failures(points) == "20 of 40 requests failed (15 http error, 5 reset)"
    assert failures([{"counts": {"ok": 100, "timeout": 5}}]) == ""
    assert failures([{"counts": {"ok": 0, "censored": 4}}]) == ""


def test_what_bounds_a_step_of_one_need_not_bound_a_step_of_many() -> None:
    v = verdicts(sweep([1, 4], lambda c: 14.0 + 6.0 * c))["weight-read-bound decode"]  # 70 % of one, 37 % of four
    assert v.state == "undecided"
    assert "70 % of a step of one, 37 % of one of 4" in v.claim
    wide = verdicts(sweep([1, 4], lambda c: 19.0 + 1.0 * c))["weight-read-bound decode"]
    assert (wide.state, "83 % of a step" in wide.claim) == ("holds", True), wide.claim
