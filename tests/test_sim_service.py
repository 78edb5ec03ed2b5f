"""A simulated service writes the same Run as a measured one: invariants, the analysis, what the numbers must obey."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from whywait import app, simulating
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.core.schedule import Schedule, Workload
from whywait.errors import UsageError
from whywait.load.recipe import Load, schedule_of
from whywait.sim import techniques
from whywait.sim.deployment import Deployment
from whywait.sim.grid import Cell, grid, numbers
from whywait.sim.loads import Options
from whywait.sim.result import Point, run_of
from whywait.sim.service import figures, run_point, simulate

ALL = Options(keep="chunks")


@pytest.fixture(scope="module")
def small() -> Deployment:
    return simulating.deployment_of("h100", "llama-3.1-8b")


def plan(load: Load, **fields: object) -> Schedule:
    return schedule_of(load, Workload.from_dict(dict(fields)), 0, 0)[0]


def run(d: Deployment, load: Load, options: Options = ALL, **fields: object) -> Run:
    return simulate(d, plan(load, **fields), load.mode, load.target, options=options)


SHARED = {"prompt_tokens": "512", "shared": 0.5, "groups": 3}
TURNS = {"prompt_tokens": "256", "turns": "3", "turn_tokens": "64", "think_ms": "200"}
LONG = {"prompt_tokens": "300", "output_tokens": "200"}
CASES = {
    "closed": ("", Load("concurrency", 8, 40), {}),
    "open": ("", Load("rate", 20, 60), {}),
    "more than it can": ("max-seqs=4", Load("rate", 60, 80), {}),
    "shared beginnings": ("", Load("concurrency", 4, 24), SHARED),
    "sessions": ("", Load("concurrency", 4, 24), TURNS),
    "sessions at a rate": ("", Load("rate", 10, 24), TURNS),
    "thinking": ("", Load("concurrency", 4, 16), {"thinking_tokens": "30"}),
    "replicas": ("replicas=2,routing=least-load", Load("concurrency", 8, 40), {}),
    "prefill apart": ("pd=1:2", Load("concurrency", 8, 40), {}),
    "drafts": ("spec-draft", Load("concurrency", 8, 40), {}),
    "short of KV": ("memory-share=0.22", Load("concurrency", 48, 96), {"prompt_tokens": "600", "output_tokens": "200"}),
    "static": ("engine=static", Load("concurrency", 8, 24), {"output_tokens": "uniform(8,64)"}),
    "llama.cpp": ("engine=llama.cpp", Load("concurrency", 8, 24), {}),
    "sglang": ("engine=sglang", Load("concurrency", 8, 24), {}),
    "trtllm": ("engine=trtllm", Load("concurrency", 8, 24), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_simulated_run_keeps_the_invariants_and_is_analysed(case, small, tmp_path):
    how, load, fields = CASES[case]
    found = run(techniques.apply(how, small), load, **fields)
    assert violations(found) == []
    assert found.manifest.made_by == "simulated"
    assert Run.load(found.save(tmp_path / "run")) == found
    result = app.analysed(found, tmp_path)
    point = result.summary["points"][0]
    assert point["counts"]["ok"] == len(found.requests)
    assert point["ttft_ms"]["p50"] > 0
    assert point["output_tokens_per_s"] > 0
    account = point["phases"]
    assert account["prefill"]["how"] == "measured"
    assert account["queue"]["how"] == "measured"
    assert all(v["how"] != "unknown" or not v["ms"] for k, v in account.items() if k in ("queue", "prefill", "decode"))


def test_figures_are_those_of_the_run(small):
    """The fast path and the analysis of the Run give the same numbers by two pieces of code."""
    load = Load("concurrency", 8, 120)
    s = plan(load, prompt_tokens="uniform(64,512)", output_tokens="uniform(20,100)")
    o = Options(keep="chunks", slo={"ttft_ms": 60.0, "tpot_ms": 9.0})
    told = numbers(figures(small, s, "concurrency", 8, options=o), s, o)
    point = app.analysed(simulate(small, s, "concurrency", 8, options=o), app.Path("x")).summary["points"][0]
    for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for q in ("p50", "p95", "mean"):
            assert told[f"{key}_{q}"] == pytest.approx(point[key][q], rel=1e-5), (key, q)
    assert told["output_tokens_per_s"] == pytest.approx(point["output_tokens_per_s"], rel=0.01)
    assert told["requests_per_s"] == pytest.approx(point["requests_per_s"], rel=1e-4)
    assert told["goodput_share"] == pytest.approx(point["goodput_share"])
    assert told["goodput_requests_per_s"] == pytest.approx(point["goodput_requests_per_s"], rel=1e-4)
    assert told["kv_use"] == pytest.approx(point["kv_use"], rel=0.15)


def test_same_seed_same_run_and_another_load_is_another(small):
    load = Load("rate", 20, 40)
    assert run(small, load) == run(small, load)
    assert run(small, load) != run(small, load, seed=2)


def test_tokens_of_the_chunks_are_those_of_the_requests(small):
    for how in ("", "spec-draft", "max-seqs=3"):
        found = run(techniques.apply(how, small), Load("concurrency", 6, 24), output_tokens="uniform(1,60)")
        made = np.bincount(found.chunks["id"], weights=found.chunks["tokens"], minlength=len(found.requests))
        assert made.tolist() == found.requests["output_tokens"].tolist()


def test_chunks_of_requests_that_decode_together_come_together(small):
    """A step gives all its sequences their tokens at once: no request has a clock of its own."""
    found = run(small, Load("concurrency", 6, 24), output_tokens="uniform(10,60)")
    times = np.unique(found.chunks["t_ns"])
    assert len(times) < 0.4 * len(found.chunks)


def test_readings_are_what_the_requests_did(small):
    found = run(small, Load("rate", 30, 90))
    rd = found.readings
    last = {
        n: rd["value"][rd["name"] == n][-1] for n in ("requests_total", "output_tokens_total", "prompt_tokens_total")
    }
    assert last["requests_total"] == 90
    assert last["output_tokens_total"] == pytest.approx(found.requests["output_tokens"].sum())
    assert last["prompt_tokens_total"] == found.requests["prompt_tokens"].sum()
    use = rd["value"][rd["name"] == "kv_use"]
    assert 0 < use.max() <= 1
    assert use[0] == 0


def test_a_request_past_its_timeout_is_given_up(small):
    found = run(small, Load("rate", 300, 600), Options("chunks", timeout_s=1.0), output_tokens="200")
    late = np.array(found.requests.text("outcome")) == "timeout"
    assert late.any()
    took = (found.requests["end_ns"] - found.requests["due_ns"])[late]
    assert np.allclose(took, 1e9, atol=2)
    assert (found.requests["output_tokens"][late] < 200).all()
    assert violations(found) == []


def test_a_closed_loop_bounded_by_time_sends_no_more_after_it(small):
    load = Load("concurrency", 4, None, 2.0)
    schedule, seconds = schedule_of(load, Workload(), 0, 0)
    found = simulate(small, schedule, "concurrency", 4, options=Options(send_s=seconds))
    sent = (found.requests["sent_ns"] - found.points["start_ns"][0]) / 1e9
    assert 8 < len(found.requests) < len(schedule)
    assert sent.max() < 2.0
    assert sent.max() > 1.0


def test_more_load_waits_longer_and_faster_memory_less(small):
    def tpot(d, c):
        return numbers(
            figures(d, plan(Load("concurrency", c, 64)), "concurrency", c), plan(Load("concurrency", c, 64)), ALL
        )

    one, many = tpot(small, 1), tpot(small, 32)
    assert many["tpot_ms_p50"] > one["tpot_ms_p50"]
    assert many["output_tokens_per_s"] > 8 * one["output_tokens_per_s"]
    assert tpot(techniques.apply("faster-memory=2", small), 1)["tpot_ms_p50"] < 0.75 * one["tpot_ms_p50"]
    assert tpot(techniques.apply("fp8-weights", small), 1)["tpot_ms_p50"] < 0.8 * one["tpot_ms_p50"]


def test_the_grid_is_the_same_with_any_number_of_processes(small, monkeypatch):
    from whywait.sim import grid as module

    schedules = [plan(Load("concurrency", 4, 12), seed=k) for k in (1, 2)]
    cells = [Cell(small, k % 2, "concurrency", 4.0, k) for k in range(6)]
    alone = grid(cells, schedules, jobs=1)
    monkeypatch.setattr(module, "ALONE", 0)
    told: list[tuple[int, int]] = []
    assert grid(cells, schedules, jobs=2, progress=lambda a, b: told.append((a, b))) == alone
    assert told[-1] == (6, 6)


def test_a_point_of_a_sweep_begins_after_the_one_before(small, tmp_path):
    p = simulating.Plan(small, Workload(), (Load("concurrency", 1, 8), Load("concurrency", 4, 16)), draws=4, jobs=1,
                        out=str(tmp_path / "run"))  # fmt: skip
    found = simulating.simulate(p)
    run_ = found.result.run
    assert violations(run_) == []
    assert run_.points["start_ns"][1] > run_.points["end_ns"][0]
    assert len(found.points) == 2
    for point in found.points:
        for name, f in point["figures"].items():
            if f["value"] is not None and f["low"] is not None:
                assert f["low"] <= f["value"] <= f["high"], name
        assert point["figures"]["tpot_ms_p50"]["low"] < point["figures"]["tpot_ms_p50"]["high"]
    again = simulating.simulate(dataclasses.replace(p, out=str(tmp_path / "again")))
    assert again.points == found.points
    assert again.result.run == run_
    assert math.isfinite(found.points[0]["figures"]["usd_per_million_tokens"]["value"])


def test_power_lies_between_idle_and_rated_and_the_counter_agrees_with_it(small):
    found = run(techniques.apply("replicas=2", small), Load("rate", 5, 40))
    rd = found.readings
    assert set(rd["source"][rd["name"] == "power_watts"]) == {"gpu/0"}
    watts = rd["value"][rd["name"] == "power_watts"]
    joules = rd["value"][rd["name"] == "energy_joules_total"]
    t = rd["asked_ns"][rd["name"] == "power_watts"] / 1e9
    rated = 2 * (small.machine.tdp_w or 0)
    assert 0.05 * rated < watts.min() < watts.max() <= rated
    assert joules[-1] - joules[0] == pytest.approx((watts[1:] * np.diff(t)).sum(), rel=1e-6)
    point = app.analysed(found, app.Path("x")).summary["points"][0]
    assert point["energy_j_per_good_request"] == pytest.approx(joules[-1] / 40, rel=0.05)
    assert point["memory_bytes"] < 2 * small.machine.memory_bytes


def test_power_of_the_figures_is_that_of_the_run(small):
    s = plan(Load("concurrency", 8, 120), prompt_tokens="512")
    o = Options("chunks")
    told = figures(small, s, "concurrency", 8, options=o)
    point = app.analysed(simulate(small, s, "concurrency", 8, options=o), app.Path("x")).summary["points"][0]
    assert told["power_w"] == pytest.approx(point["power_w"], rel=0.03)
    sampled = figures(small, s, "concurrency", 8, options=Options("sample"))
    assert sampled["power_w"] == pytest.approx(told["power_w"], rel=0.05)
    capped = figures(techniques.apply("power-cap=300", small), s, "concurrency", 8, options=o)
    assert capped["power_w"] <= 300
    assert np.nanmean(capped["ttft_s"]) > np.nanmean(told["ttft_s"])


def test_devices_of_one_replica_talk_and_single_ones_do_not(small):
    shares = {}
    for how in ("", "tp=4"):
        found = run(techniques.apply(how, small), Load("concurrency", 8, 40), prompt_tokens="512")
        shares[how] = app.analysed(found, app.Path("x")).summary["points"][0]["occupancy"]["shares"]["communication"]
    assert not shares[""]
    assert 0.01 < shares["tp=4"] < 0.9


def test_equal_beginnings_are_read_from_the_cache_unless_it_is_off(small):
    load = Load("concurrency", 4, 24)
    on, off = run(small, load, **SHARED), run(techniques.apply("prefix-cache=off", small), load, **SHARED)
    assert on.requests["cached_tokens"].sum() > 0.3 * on.requests["prompt_tokens"].sum()
    assert off.requests["cached_tokens"].sum() == 0
    assert on.requests["first_ns"].max() < off.requests["first_ns"].max()
    warm = run(small, load, Options("chunks", warm=True), cache="warm", **SHARED)
    assert (warm.requests["cached_tokens"] >= 256 - 16).all()
    assert violations(warm) == []


def test_what_the_device_has_no_room_for_comes_back_from_the_host(small):
    """Sixteen beginnings in turn, of which the device holds a few: without a tier they thrash."""
    tight = dataclasses.replace(small, engine=dataclasses.replace(small.engine, kv_blocks=600))
    load, fields = (
        Load("concurrency", 2, 96),
        {"prompt_tokens": "1024", "shared": 0.9, "groups": 16, "output_tokens": "16"},
    )
    bare, tiered = (run(techniques.apply(how, tight), load, **fields) for how in ("", "kv-offload=host"))
    assert bare.requests["cached_tokens"].sum() < 0.75 * tiered.requests["cached_tokens"].sum()
    assert violations(tiered) == []


def test_requests_longer_than_the_engine_takes_are_refused_and_counted(small):
    d = dataclasses.replace(small, engine=dataclasses.replace(small.engine, max_context=4096, kv_blocks=100))
    with pytest.raises(UsageError, match="KV space"):
        run(d, Load("concurrency", 2, 8), prompt_tokens="2000")
    d = techniques.apply("chunked-prefill=off,token-budget=512", small)
    found = run(d, Load("concurrency", 2, 24), prompt_tokens="uniform(64,1024)")
    outcome = np.array(found.requests.text("outcome"))
    assert set(outcome) == {"ok", "http_error"}
    whole = found.requests["prompt_tokens"] + found.requests["asked_output_tokens"]
    assert ((whole > 512) == (outcome == "http_error")).all()
    assert violations(found) == []


def test_drafts_show_in_the_counters(small):
    found = run(techniques.apply("spec-draft:drafts=3", small), Load("concurrency", 4, 40), output_tokens="100")
    point = app.analysed(found, app.Path("x")).summary["points"][0]
    d = techniques.apply("spec-draft:drafts=3", small)
    assert d.speculation is not None
    a = d.speculation.acceptance
    assert point["acceptance"] == pytest.approx((a[0] + a[0] * a[1] + a[0] * a[1] * a[2]) / 3, rel=0.1)


def test_the_judge_finds_what_was_put_in(small):
    """A limit of places, want of KV and a slow host, each by its name and first."""
    slow = dataclasses.replace(small, efficiency=dataclasses.replace(small.efficiency, step=20.0))
    for d, cause in (
        (techniques.apply("max-seqs=4", small), "slot limit"),
        (dataclasses.replace(small, engine=dataclasses.replace(small.engine, kv_blocks=150)), "kv space"),
        (slow, "host CPU"),
    ):
        loads = (Load("concurrency", 1, 40), Load("concurrency", 4, 60), Load("concurrency", 24, 120))
        points = [Point(x.mode, x.target, *run_point(d, plan(x, **LONG), x.mode, x.target, options=ALL)) for x in loads]
        verdicts = app.analysed(run_of(d, points, ALL), app.Path("x")).verdicts
        assert (verdicts[0].cause, verdicts[0].state) == (cause, "holds"), cause
