"""Each doubt is raised when there is reason, and not on a sound Run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, messy_runs, stream
from whywait.analyze.trust import doubts, foreign
from whywait.core.run import Manifest, Run
from whywait.core.table import Table


def _with(run: Run, manifest=None, readings=None, **requests) -> Run:
    req = run.requests.replace(**requests)
    m = dataclasses.replace(run.manifest, **(manifest or {}))
    read = run.readings if readings is None else make_run([], readings=readings).readings
    return Run(m, run.points, req, run.chunks, run.steps, read)


def _sound(requests=400, **service) -> Run:
    return Service(slots=4, **service).closed(4, requests)


def _said(run: Run, words: str) -> str | None:
    found = [d for d in doubts(run) if words in d["what"]]
    assert all(set(d) == {"what", "why", "next"} and all(d.values()) for d in doubts(run))
    return found[0]["why"] if found else None


def test_a_sound_run_has_no_doubts():
    assert doubts(_sound()) == []


def test_those_of_the_manifest_come_first():
    mine = {"what": "a", "why": "b", "next": "c"}
    run = _with(_sound(), {"doubts": [mine], "partial": True, "partial_reason": "Ctrl-C"})
    assert doubts(run)[0] == mine
    assert _said(run, "PARTIAL") == "Ctrl-C"


def test_late_sends_and_reads():
    run = _sound()
    assert "sends were 8.00 ms late" in _said(_with(run, due_ns=run.requests["sent_ns"] - 8 * MS), "did not keep up")
    assert _said(_with(run, due_ns=run.requests["sent_ns"] - 2 * MS), "did not keep up") is None
    slow = Service(gap_ms=100).closed(4, 400)  # 8 ms of 1,550 are nothing
    assert _said(_with(slow, due_ns=slow.requests["sent_ns"] - 8 * MS), "did not keep up") is None
    wall = int(run.points["end_ns"][0] - run.points["start_ns"][0])
    client = {"read_lag_ms": {"p50": 0.1, "p99": 20}, "cpu_ns_by_point": {"0": 0.97 * wall}}
    why = _said(_with(run, {"client": client}), "did not keep up")
    assert "reads were 20.0 ms late" in why
    assert "97 % of a core" in why


@pytest.mark.parametrize(
    ("client", "whose"),
    [
        ({}, "not known"),
        ({"coalesced_reads": 10, "coalesced_reads_while_late": 9}, "our own loop was late"),
        ({"coalesced_reads": 10, "coalesced_reads_while_late": 1}, "a proxy or the server buffers"),
    ],
)
def test_whose_fault_coalescing_is(client, whose):
    times = [S + i * 20 * MS for i in range(10)]
    row = {"sent_ns": 0, "first_ns": S, "last_ns": times[-1], "end_ns": times[-1]}
    chunks = stream(0, times, [None] * 8 + [times[7], None])
    assert whose in _said(make_run([row], chunks, client=client), "came with others in one read")
    assert _said(make_run([row], stream(0, times), client=client), "in one read") is None


def test_user_clock_and_clock_steps_and_lost_probes():
    row = {"sent_ns": 0, "first_ns": S, "last_ns": S, "end_ns": S}
    run = make_run([row], [{**stream(0, [S])[0], "clock": "user"}], clock=[{"steps": 2}, {"offset_error_ns": 5}])
    assert _said(run, "own clock")
    assert _said(run, "stepped 2 times")
    lost = [*gauge_rows("answered", [(1, 1.0), (2, 0.0)]), {"asked_ns": 3, "name": "running", "value": None}]
    assert _said(_with(run, readings=lost), "2 readings were not answered") == "source: metrics/0"


def test_realised_lengths():
    run = _sound()
    longer = run.requests["asked_output_tokens"] * 1.1
    assert "output -9% of 17.6 tokens" in _said(_with(run, asked_output_tokens=longer), "lengths are not")
    within = run.requests["asked_prompt_tokens"] * 1.01
    assert _said(_with(run, asked_prompt_tokens=within), "lengths are not") is None


def test_realised_rate_and_load():
    run = Service(slots=64).open([20 * MS] * 200, rate=50)
    assert _said(run, "not offered as planned") is None
    slipped = run.requests["sent_ns"] + (run.requests["sent_ns"] - run.requests["sent_ns"][0]) * 0.05
    assert "47.6 of 50.0 requests/s" in _said(_with(run, sent_ns=slipped), "not offered as planned")
    short = make_run([{"sent_ns": 0, "end_ns": S}, {"sent_ns": S, "end_ns": 2 * S}], points=[{"target": 4}])
    assert "1.00 of 4" in _said(short, "not the target")


@pytest.mark.parametrize(("cache", "doubted"), [("cold", True), ("natural", True), ("warm", False)])
def test_a_warm_cache(cache, doubted):
    run = _sound()
    warm = _with(run, {"workload": {"cache": cache}}, cached_tokens=run.requests["prompt_tokens"] * 0.5)
    assert (_said(warm, "warm cache") is not None) is doubted


def _counters(run: Run, factor=1.0, prompt="prompt_tokens_total", extra=0.0):
    """Counters that grow when a request ends, read four times a second and once after the end."""
    end = int(run.points["end_ns"].max())
    ends = run.requests["end_ns"]
    times = [*range(S // 2, end, S // 4), end + MS]
    rows = []
    for name, column in (("output_tokens_total", "output_tokens"), (prompt, "prompt_tokens"), ("requests_total", None)):
        amount = run.requests[column] if column else ends * 0 + 1
        values = [(t, 7.0 + factor * float(amount[ends <= t].sum()) + extra * t / S) for t in times]
        rows += gauge_rows(name, values)
    return rows


def test_counters_that_grow_by_what_we_sent_are_no_doubt():
    run = join([_sound(200), _sound(200)])
    run = _with(run, readings=_counters(run))
    assert _said(run, "others use") is None
    assert _said(run, "saw less") is None
    whole = foreign(run)
    assert {f.name for f in whole} == {"output_tokens_total", "prompt_tokens_total", "requests_total"}
    assert all(f.excess == 0 for f in whole)
    assert foreign(run, 0)[0].sent_low <= 200 <= foreign(run, 0)[0].sent_high


def test_foreign_traffic():
    run = _sound()
    assert "output_tokens_total grew by" in _said(_with(run, readings=_counters(run, extra=100)), "others use")
    assert "the metrics do not cover" in _said(_with(run, readings=_counters(run, factor=0.5)), "saw less")


def test_computed_prompt_tokens_leave_cached_ones_out():
    run = _sound()
    half = run.requests["prompt_tokens"] / 2
    rows = _counters(_with(run, prompt_tokens=half), prompt="prompt_tokens_computed_total")
    assert _said(_with(run, {"workload": {"cache": "warm"}}, rows, cached_tokens=half), "saw less") is None
    assert _said(_with(run, readings=rows), "saw less")


def test_no_counters_no_opinion():
    assert foreign(_sound()) == []
    assert foreign(make_run([], points=[])) == []


def test_client_ttft_against_the_engines():
    run = _sound()
    end = int(run.points["end_ns"].max())

    def histogram(ms):
        return [*gauge_rows("ttft_seconds_sum", [(0, 0.0), (end, 400 * ms / 1e3)]),
                *gauge_rows("ttft_seconds_count", [(0, 0.0), (end, 400.0)])]  # fmt: skip

    assert "50.2 ms at the client, 10.0 ms in the engine" in _said(_with(run, readings=histogram(10)), "engine's time")
    assert _said(_with(run, readings=histogram(49)), "engine's time") is None


def test_no_window_and_too_few_samples():
    run = join([Service(slots=8).closed(8, 8), _sound(100)])
    assert _said(run, "whole points").startswith("point 0: ")
    why = _said(run, "not bounded")
    assert "point 0: 8 requests, no upper bound for p90, p95, p99" in why
    assert "point 1: 96 requests, no upper bound for p99" in why


def test_the_clients_floor():
    floor = {"stamp_error_ms": {"p50": 0.1, "p99": 3.0}}
    why = _said(_with(_sound(), {"client": {"floor": floor}}), "tenth of what it measures")
    assert "TPOT 20.0 ms" in why
    assert "TTFT" not in why
    for harmless in ({"stamp_error_ms": {"p99": 0.05}}, {"stamp_error_ms": {"p99": None}}, None):
        assert _said(_with(_sound(), {"client": {"floor": harmless}}), "tenth of") is None


@given(messy_runs(orderly=False))
def test_no_run_is_too_broken_to_doubt(run):
    doubts(run)


def test_an_empty_run():
    names = ("points", "requests", "chunks", "steps", "readings")
    assert doubts(Run(Manifest(), *(Table.empty(n) for n in names))) == []


def test_a_partial_sweep_names_what_it_never_began():
    run = _sound()
    loads = [{"mode": "concurrency", "target": n} for n in (4.0, 8.0, 16.0)]
    run = _with(run, {"partial": True, "partial_reason": "Ctrl-C", "journey": {"loads": loads}})
    (found,) = [d for d in doubts(run) if "PARTIAL" in d["what"]]
    assert found["why"] == "Ctrl-C; not measured: concurrency 8, concurrency 16"
    assert "whywait resume" in found["next"]
