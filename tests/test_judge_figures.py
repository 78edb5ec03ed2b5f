"""The figures in what verdicts say are those of the point they speak of."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from tests.analysis_runs import MS, Service, join
from tests.test_judge_causes import TIMELY, at, coalesced, delayed, holds, pair, read, the, threads
from whywait.analyze.summary import summarize
from whywait.analyze.window import with_windows
from whywait.core.columns import FAULTS, OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.judge.evidence import MIXED
from whywait.judge.gather import gather
from whywait.judge.rules_work import decode
from whywait.physics.cost import Machine, step_terms_s
from whywait.physics.models import Shape
from whywait.units import ms, percent


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def test_a_wait_is_told_with_its_share_and_its_length() -> None:
    for high, slots in ((8, 2), (6, 3)):
        run = pair(high, slots)
        queue = summarize(with_windows(run))["points"][1]["phases"]["queue"]
        v = the(run, "slot limit")
        assert v.share == pytest.approx(queue["share"])
        assert v.evidence[0].startswith(f"at concurrency {high} {percent(queue['share'])} of the requests' time")
        assert f"({ms(queue['ms'])} of " in v.evidence[0]
        assert f"limit of {slots} at a time" in v.claim


def test_loads_without_a_queue_are_listed() -> None:
    for high in (2, 4):
        v = the(pair(high, 4), "slot limit", "fails")
        assert v.claim == f"No queue for a place at concurrency 1, {high}"
        for told, n in zip(v.evidence, (1, high), strict=True):
            assert told.startswith(f"at concurrency {n} {percent(0.0)} of the requests' time")
    open_loop = Service(slots=4, prefill_ms=20.0, gap_ms=10.0).open([500 * MS] * 40, rate=2)
    assert the(open_loop, "slot limit", "fails").claim == "No queue for a place at 2 requests/s"


def test_a_path_is_as_long_as_what_every_request_waits_for_it() -> None:
    for late in (150, 300):
        run = delayed(pair(), late)
        v = the(run, "network latency", engine="llama.cpp")
        whole = summarize(with_windows(run))["points"][1]["e2e_ms"]["mean"]
        assert v.share == pytest.approx(late / whole, rel=0.03)
        assert number(r"every request waits (\d+) ms", v.claim) == pytest.approx(late, rel=0.05)
        assert v.gain == f"up to {percent(v.share)} of the requests' time"


def serving(run: Run, cores: float) -> Run:
    spent = threads(run, "process/engine", VLLM_Worker=(0.9, 0.0), VLLM_EngineCor=(cores, 0.0))
    return read(run, spent, at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host"))


def test_time_outside_in_which_the_engine_served_is_not_the_path() -> None:
    run = delayed(pair(), 300)
    v = the(serving(run, 0.02), "network latency", engine="llama.cpp")
    assert "serving threads used CPU for" in v.evidence[-1]
    more = the(serving(run, 0.06), "network latency", engine="llama.cpp")
    assert more.evidence[-1] != v.evidence[-1]
    assert "network latency" not in holds(serving(run, 2.0), "llama.cpp")


def test_a_buffer_costs_no_more_than_the_time_in_which_the_engine_decoded() -> None:
    shares = []
    for prefill_ms in (50.0, 600.0):
        run = coalesced(pair(prefill_ms=prefill_ms))
        untold = run.requests.replace(engine_decode_ms=run.requests["engine_decode_ms"] + float("nan"))
        v = the(read(dataclasses.replace(run, requests=untold), client=TIMELY), "buffering proxy")
        decoding = 1 - summarize(with_windows(run))["points"][1]["phases"]["prefill"]["share"]
        assert v.share is not None
        assert v.share <= decoding + 0.02
        shares.append(v.share)
    assert shares[0] > shares[1] + 0.2


def test_a_frontend_is_named_by_the_cpu_that_its_threads_use() -> None:
    """Time in neither queue nor model, while threads that do not compute are at work, or are not."""
    run = delayed(pair(slots=16, prefill_ms=20.0, gap_ms=5.0), 100)
    for each in (0.2, 0.3):
        rows = threads(run, "process/engine", a_worker=(0.4, 0.0), VLLM_APIServer=(each, 0.0), b_EngineCor=(each, 0.0))
        found = read(run, rows)
        v = the(found, "host CPU")
        assert number(r"do not compute used ([\d.]+) of its", v.evidence[1]) == pytest.approx(2 * each, abs=0.05)
        outside = summarize(with_windows(found))["points"][1]["phases"]
        assert v.share == pytest.approx(sum(outside[k]["share"] or 0 for k in ("frontend", "unknown")), abs=0.02)
    calm = threads(run, "process/engine", a_worker=(0.6, 0.0), VLLM_APIServer=(0.02, 0.0))
    assert "host CPU" not in holds(read(run, calm))


def test_a_rate_beyond_capacity_is_told_with_what_comes_and_what_is_finished() -> None:
    made = Service(slots=2, prefill_ms=20.0, gap_ms=10.0)  # 170 ms each, 11.8 requests/s at most
    for rate in (20, 25):
        v = the(made.open([1000 // rate * MS] * 240, rate=rate), "rate beyond capacity")
        assert v.claim == f"{rate} requests/s outrun the service: its queue grows"
        told = " ".join(v.evidence)
        assert number(r"([\d.]+) requests/s are finished", told) == pytest.approx(2 / 0.170, rel=0.1)
        assert f"{rate} come" in told
        assert number(r"up to about ([\d.]+) requests/s", v.gain) == pytest.approx(2 / 0.170, rel=0.1)


def test_gauges_are_told_beside_a_wait() -> None:
    run = pair(8, 2)
    for waiting in (3.0, 5.0):
        v = the(read(run, at(run, {"waiting": waiting, "running": 2.0, "kv_use": waiting / 10})), "slot limit")
        assert v.evidence[1].startswith(f"the engine's own queue held {waiting:.1f} requests on average")
        assert v.evidence[2] == "2.0 requests were in work on average (max 2 of 2 places)"
        assert v.evidence[3].startswith(f"KV space was {percent(waiting / 10)} full on average")


def test_more_space_is_by_the_engines_own_flags() -> None:
    assert "--gpu-memory-utilization" in the(pushed_out(), "kv space").lever
    assert "--ctx-size" in the(pushed_out(), "kv space", engine="llama.cpp").lever


def pushed_out() -> Run:
    run = pair(8, 2)
    pushed = {"preemptions_total": ("rate", 3.0), "kv_use": 0.99, "waiting": 5.0, "running": 1.5}
    return read(run, at(run, pushed))


@pytest.mark.parametrize(("broken", "of"), [(32, 128), (64, 128)])
def test_errors_while_the_kv_space_is_full_are_counted(broken: int, of: int) -> None:
    run = pair(8, 8)
    rows = np.flatnonzero(run.requests["point"] == 1)[:broken]
    outcome, fault = run.requests["outcome"].copy(), run.requests["fault"].copy()
    outcome[rows], fault[rows] = OUTCOMES.index("inband_error"), FAULTS.index("service")
    failing = dataclasses.replace(run, requests=run.requests.replace(outcome=outcome, fault=fault))
    v = the(read(failing, at(run, {"kv_use": 0.98})), "kv space")
    assert v.evidence == (f"{broken} of {of} requests ended with an error of the service",
                          f"meanwhile KV space was up to {percent(0.98)} full")  # fmt: skip
    assert (v.share, v.of) == (broken / of, "requests")
    assert "kv space" not in holds(read(failing, at(run, {"kv_use": 0.5})))


def test_long_prompts_beside_short_ones_where_the_engine_does_not_say_when_it_prefills() -> None:
    run = join([Service(slots=4).closed(4, 64), Service(slots=4, gap_ms=40.0).closed(4, 64)])
    points = run.points.replace(label=np.array([None, MIXED], dtype=object))
    untold = run.requests.replace(engine_prefill_ms=np.full(len(run.requests), np.nan))
    blind = dataclasses.replace(run, points=points, requests=untold, chunks=Table.empty("chunks"))
    for engine, flag in (("vllm", "--max-num-batched-tokens"), ("llama.cpp", "--batch-size")):
        v = the(blind, "neighbour's prefill", "undecided", engine)
        assert (v.point, v.share, v.evidence) == (1, None, ())  # no chunks, no gaps
        assert flag in v.next_step


def test_prompts_are_named_by_the_time_that_they_take_to_compute() -> None:
    for prefill_ms in (200.0, 600.0):
        run = pair(prefill_ms=prefill_ms, gap_ms=10.0)
        phases = summarize(with_windows(run))["points"][1]["phases"]
        v = the(run, "compute-bound prefill")
        assert v.share == pytest.approx(phases["prefill"]["share"] + phases["stall"]["share"], abs=0.01)
        assert v.evidence[0] == (f"prefill is {percent(phases['prefill']['share'])} of the requests' time "
                                 f"({ms(phases['prefill']['ms'])} each, measured)")  # fmt: skip
        assert "--enable-prefix-caching" in v.lever
    assert "compute-bound prefill" not in holds(pair(prefill_ms=10.0, gap_ms=20.0))


RATES = {"read_bytes_per_s": 1e10, "f32_flops_per_s": 1e11, "how": "by decree", "threads": 4}


@pytest.mark.parametrize(("weights", "reads"), [(1.8e8, "18"), (3.6e8, "36")])
def test_the_roofline_of_a_step_is_told_beside_it(weights: float, reads: str) -> None:
    run = pair(gap_ms=60.0)
    told = {**run.manifest.engine, "model_bytes": weights, "model_params": 1e8}
    known = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, engine=told,
                                                                  machine={"engine_rates": RATES}))  # fmt: skip
    v = the(known, "weight-read-bound decode")
    assert any(e.startswith(f"roofline (modelled): for one sequence weight reads need at least {reads}")
               and e.endswith("(by decree, threads: 4)") for e in v.evidence)  # fmt: skip
    assert not any("roofline" in e for e in the(run, "weight-read-bound decode").evidence)


@pytest.mark.parametrize(
    ("shape", "cause"),
    [({"params": 1e7, "weight_bytes": 2e8, "kv_values": 1e3}, "weight-read-bound decode"),
     ({"params": 1e7, "weight_bytes": 2e7, "kv_values": 1e6}, "KV-read-bound decode"),
     ({"params": 1e9, "weight_bytes": 2e7, "kv_values": 1e2}, "compute-bound decode")],
)  # fmt: skip
def test_a_step_is_bound_by_what_takes_most_of_its_model(shape: dict[str, float], cause: str) -> None:
    """Where the model meets the step that was measured; calibrated on one sequence, then missed by little."""
    run = pair(gap_ms=20.0)
    e = gather(run, summarize(with_windows(run)))
    assert e.focus is not None
    machine = Machine(1e10, 1e11, "by decree")
    terms = step_terms_s(Shape(**shape, attention=1e3, layers=10), machine, 4, 100)  # type: ignore[arg-type]
    whole = sum(terms.values())
    found = {"shares": {k: t / whole for k, t in terms.items()}, "step_ms": whole * 1e3, "error": 0.1, "batch": 4.0,
             "context": 100.0, "how": "modelled", "of": "by decree"}  # fmt: skip
    for error, how in ((0.1, [cause]), (0.5, [])):
        summary = {**e.focus.summary, "decode_step": {**found, "error": error}}
        focus = dataclasses.replace(e.focus, summary=summary)
        said = decode(dataclasses.replace(e, focus=focus, points=[focus]))
        assert [v.cause for v in said if v.state == "holds"] == how
