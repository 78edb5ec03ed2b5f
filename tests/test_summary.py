"""The summary: its stable keys, plain JSON, nulls with a reason, and the knee."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, messy_runs
from whywait.analyze.phases import PHASES
from whywait.analyze.summary import knee, summarize
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.report.text import _rows as text_rows

STABLE = {
    "mode", "target", "ttft_ms", "ttfa_ms", "chunk_gap_ms", "itl_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s",
    "effective_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "goodput_share", "counts", "kv_use", "queue",
    "memory_bytes", "power_w", "energy_j_per_good_request", "phases", "occupancy",
}  # fmt: skip


def _sweep(**manifest) -> Run:
    return join([Service(slots=4, noise=0.1).closed(c, 64, **manifest) for c in (1, 2, 4, 8, 16)])


def test_stable_keys():
    s = summarize(_sweep())
    assert {"points", "verdicts", "doubts", "definitions"} <= set(s)
    for point in s["points"]:
        assert set(point) >= STABLE
        for name in ("ttft_ms", "ttfa_ms", "chunk_gap_ms", "itl_ms", "tpot_ms", "e2e_ms"):
            assert set(point[name]) >= {"p50", "p90", "p95", "p99", "mean", "n", "ci"}
        assert set(point["counts"]) == set(OUTCOMES)
    assert s["verdicts"] == []


def test_figures_of_a_known_service():
    s = summarize(_sweep(slo={"ttft_ms": 100, "tpot_ms": 50}))
    one, four, sixteen = (s["points"][i] for i in (0, 2, 4))
    assert (one["mode"], one["target"]) == ("concurrency", 1)
    assert one["ttft_ms"]["p50"] == pytest.approx(50.2)
    assert four["tpot_ms"]["mean"] == pytest.approx(20, rel=0.02)
    assert four["output_tokens_per_s"] == pytest.approx(4 * 16 / 0.35, rel=0.02)
    assert four["output_tokens_per_s_ci"][0] < four["output_tokens_per_s"] < four["output_tokens_per_s_ci"][1]
    assert four["goodput_share"] == 1
    assert four["in_flight"]["peak"] == 4
    assert sixteen["goodput_share"] == pytest.approx(4 / 64)  # only the first four of the burst
    assert sixteen["phases"]["queue"]["share"] > 0.7
    assert sixteen["phases"]["queue"]["causes"] == {"slot limit": 1.0}
    assert sixteen["window"]["dropped"] == 28
    assert sixteen["peak_tokens_per_s"] >= sixteen["output_tokens_per_s"]
    assert s["knee"] == 2


def test_phases_and_occupancy_add_up_and_what_is_not_seen_is_null():
    for point in summarize(_sweep())["points"]:
        phases, shares = point["phases"], point["occupancy"]["shares"]
        assert set(phases) == set(PHASES)
        assert phases["frontend"]["ms"] is None
        assert sum(p["share"] or 0 for p in phases.values()) == pytest.approx(1)
        assert shares["communication"] is None
        assert sum(v or 0 for v in shares.values()) == pytest.approx(1)
        assert point["occupancy"]["busy"][0] <= point["occupancy"]["busy"][1]


def test_every_null_has_its_reason():
    s = summarize(_sweep())
    for key in ("kv_use", "queue", "memory_bytes", "power_w", "energy_j_per_good_request"):
        assert all(p[key] is None for p in s["points"])
        assert any(d["what"].startswith(f"{key} is unknown") for d in s["doubts"])


def test_readings_fill_them():
    run = Service(slots=4).closed(4, 40)
    end = int(run.points["end_ns"][0])
    times = range(S, end + S // 10, S // 10)
    readings = [
        *gauge_rows("kv_use", [(t, 0.5) for t in times]),
        *gauge_rows("waiting", [(t, 2) for t in times]),
        *gauge_rows("pss_bytes", [(t, 1e9) for t in times], "process/engine"),
        *gauge_rows("pss_bytes", [(t, 7e9) for t in times], "process/client"),
        *gauge_rows("running", [(t, 3) for t in times]),
        *gauge_rows("decode_steps_total", [(t, 20.0 * t / S) for t in times]),
        *gauge_rows("iteration_tokens_sum", [(t, 100.0 * t / S) for t in times]),
        *gauge_rows("power_watts", [(t, 100) for t in times], "gpu", gpu="0"),
        *gauge_rows("power_watts", [(t, 50) for t in times], "gpu", gpu="1"),
        *gauge_rows("energy_joules_total", [(t, 1000.0 + 100 * (t - S) / S) for t in times], "gpu", gpu="0"),
    ]
    point = summarize(Run(run.manifest, run.points, run.requests, run.chunks, run.steps,
                          make_run([], readings=readings).readings))["points"][0]  # fmt: skip
    assert point["kv_use"] == pytest.approx(0.5)
    assert point["queue"] == pytest.approx(2)
    assert point["memory_bytes"] == 1e9
    assert point["power_w"] == pytest.approx(150)
    assert point["energy_j_per_good_request"] == pytest.approx(150 / point["goodput_requests_per_s"])
    per_token = 150 / point["effective_tokens_per_s"]
    assert point["energy_j_per_million_effective_tokens"] == pytest.approx(per_token * 1e6)
    assert (point["energy_how"], point["energy_state"]) == ("power", "undecided")  # of device 1 only power was read
    steps = point["engine_steps"]
    assert (steps["steps_per_s"], steps["tokens_per_step"], steps["batch"]) == pytest.approx((20, 5, 3))


def test_histograms_stand_in_where_requests_say_nothing():
    rows = [{"sent_ns": S, "first_ns": S + 500 * MS, "last_ns": S + 700 * MS, "end_ns": S + 700 * MS}] * 10
    readings = [*gauge_rows("queue_seconds_sum", [(0, 0.0), (3 * S, 3.0)]),
                *gauge_rows("queue_seconds_count", [(0, 0.0), (3 * S, 10.0)])]  # fmt: skip
    phases = summarize(make_run(rows, readings=readings))["points"][0]["phases"]
    assert phases["queue"]["ms"] == pytest.approx(300)
    assert phases["queue"]["how"] == "derived"


def test_the_engines_own_ttft_stands_beside_ours():
    rows = [{"sent_ns": S, "first_ns": S + 500 * MS, "last_ns": S + 700 * MS, "end_ns": S + 700 * MS}] * 10
    grown = {"bucket": {"0.1": 0.0, "0.25": 6.0, "0.5": 10.0, "+Inf": 10.0}, "sum": {None: 2.4}, "count": {None: 10.0}}
    readings = [r for kind, ends in grown.items() for le, n in ends.items()
                for r in gauge_rows(f"ttft_seconds_{kind}", [(0, 0.0), (S, 0.0), (S + 600 * MS, n), (3 * S, n)],
                                    **({"le": le} if le else {}))]  # fmt: skip
    run = make_run(rows, readings=readings)
    found = summarize(run)["points"][0]["engine_ttft_ms"]
    assert found["mean"] == pytest.approx(240)
    assert found["ci"]["p50"] == pytest.approx([100, 250])  # a bucket is all that a histogram tells
    assert found["ci"]["p95"] == pytest.approx([250, 500])
    assert any(name == "  p50 by the engine itself" for name, _ in text_rows(summarize(run)))
    told = make_run([{**r, "engine_ttft_ms": 480.0} for r in rows], readings=readings)
    assert summarize(told)["points"][0]["engine_ttft_ms"]["p50"] == 480  # of these very requests: better than all alike
    unknown = summarize(make_run(rows))
    assert (unknown["points"][0]["engine_ttft_ms"]["p50"], unknown["points"][0]["engine_ttft_ms"]["n"]) == (None, 0)
    assert not any("engine itself" in name for name, _ in text_rows(unknown))


def test_thinking_and_answer_are_apart():
    row = {"sent_ns": S, "first_ns": S + 100 * MS, "first_answer_ns": S + 400 * MS, "last_ns": S + 500 * MS,
           "end_ns": S + 500 * MS, "output_tokens": 40, "reasoning_tokens": 30}  # fmt: skip
    thinking = summarize(make_run([row]))["points"][0]["thinking"]
    assert thinking["reasoning_tokens"]["p50"] == 30
    assert thinking["answer_tokens"]["p50"] == 10
    assert thinking["thinking_ms"]["p50"] == 300
    assert thinking["answering_ms"]["p50"] == 100


def test_failures_are_counted_and_their_tokens_kept_apart():
    good = {"sent_ns": S, "first_ns": 2 * S, "last_ns": 3 * S, "end_ns": 3 * S, "output_tokens": 20}
    bad = {**good, "outcome": "inband_error", "output_tokens": 6}
    point = summarize(make_run([good, bad, {"outcome": "never_sent"}]))["points"][0]
    assert (point["counts"]["ok"], point["counts"]["inband_error"], point["counts"]["never_sent"]) == (1, 1, 1)
    assert point["output_tokens_per_s"] == 10
    assert point["wasted_tokens_per_s"] == 3
    assert point["goodput_share"] == pytest.approx(1 / 3)
    assert point["ttft_ms"]["n"] == 1


@settings(max_examples=60, deadline=None)
@given(messy_runs(orderly=False))
def test_any_run_gives_plain_json(run):
    json.dumps(summarize(run), allow_nan=False)


def test_a_run_without_points():
    s = summarize(make_run([], points=[]))
    assert (s["points"], s["knee"]) == ([], None)


def _point(target, rate, ttft=50.0, *, ci=None, mode="concurrency", queue=None):
    return {"mode": mode, "target": target, "output_tokens_per_s": rate, "requests_per_s": rate, "queue": queue,
            "output_tokens_per_s_ci": ci, "ttft_ms": {"p50": ttft}, "e2e_ms": {"p50": 500.0}}  # fmt: skip


@pytest.mark.parametrize(
    ("points", "at"),
    [
        ([_point(1, 10), _point(2, 20), _point(4, 21, 100), _point(8, 21, 300)], 1),
        ([_point(8, 21, 300), _point(1, 10), _point(4, 21, 100), _point(2, 20)], 3),  # in any order
        ([_point(1, 10), _point(2, 20), _point(4, 40)], None),  # still grows
        ([_point(1, 10), _point(2, 10.5, 80), _point(4, 20, 90)], None),  # a dip, not a knee
        ([_point(1, 10), _point(2, 10)], None),  # nothing waits
        ([_point(1, 10, queue=0.0), _point(2, 10, queue=1.0)], 0),
        ([_point(1, 10, ci=[4, 16]), _point(2, 10, 90, ci=[4, 16])], None),  # the intervals leave room for a doubling
        ([_point(1, 10, ci=[9, 11]), _point(2, 10, 90, ci=[9, 11])], 0),
        ([_point(1, 10), _point(16, 14, 90)], 0),  # 9 % per doubling
        ([_point(1, 10), _point(2, 10, 90, mode="rate")], None),
        ([_point(1, None), _point(2, None)], None),
        ([_point(1, 10)], None),
        ([_point(1, 10), {**_point(2, 10, 90), "label": "long prompts mixed in"}, _point(4, 40)], None),
        ([], None),
    ],
)
def test_knee(points, at):
    assert knee(points) == at
