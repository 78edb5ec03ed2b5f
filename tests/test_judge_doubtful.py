"""Work is named only where no wait could hide; what looks like a cause, and is something else, is not called that."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import MS, S, Service, join
from tests.test_judge_causes import TIMELY, at, coalesced, delayed, holds, pair, read, the, threads, waiting_run
from whywait.analyze.summary import summarize
from whywait.core.run import Run
from whywait.judge.diagnose import judge
from whywait.judge.doubtful import LARGER, lesser, withheld
from whywait.judge.facts_cpu import client_lost, engine_cpu, neighbours
from whywait.judge.facts_requests import _pending, work
from whywait.judge.gather import gather
from whywait.judge.verdict import WORK, Verdict

LOCAL = {"engine_is_local": True}


def told(run: Run, **machine: Any) -> Run:
    """``run`` as measured: the machine is described."""
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, machine={**LOCAL, **machine}))


def fed(run: Run, ran: float = 0.95, waited: float = 0.02) -> Run:
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    return read(told(run), threads(run, "process/engine", python=(ran, waited)), busy)


def span(run: Run) -> tuple[int, int]:
    return int(run.points["start_ns"].min()), int(run.points["end_ns"].max())


def test_work_is_withheld_where_the_engines_cores_were_not_seen() -> None:
    assert holds(fed(pair()))[0] == "weight-read-bound decode"
    blind = told(pair())
    assert holds(blind) == []
    v = the(blind, "weight-read-bound decode", "undecided")
    assert "cores" in v.claim
    assert "agent" in v.next_step
    assert holds(told(pair(), gpus=["a GPU"]))[0] == "weight-read-bound decode"  # its account is its own


def test_a_proxy_in_the_engines_place_is_not_the_engine() -> None:
    assert "weight-read-bound decode" not in holds(fed(pair(), 0.004, 0.01))


def test_an_engine_that_neither_runs_nor_waits_is_held_by_something_else() -> None:
    stopped = fed(pair(), 0.4, 0.0)  # stopped and let go in turns: no wait for a core, no throttling
    assert "weight-read-bound decode" not in holds(stopped)
    assert "ran or wanted to run" in the(stopped, "weight-read-bound decode", "undecided").claim


def test_work_is_withheld_where_much_of_the_time_is_not_explained() -> None:
    run = pair(high=8, slots=1)
    dark = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, engine={}))
    assert "slot limit" in holds(run)
    assert holds(fed(dark)) == []
    assert "not explained" in the(fed(dark), "weight-read-bound decode", "undecided").claim


def test_drafts_in_vain_are_not_called_compute() -> None:
    one, four = Service(slots=4, gap_ms=20.0).closed(1, 16), Service(slots=4, gap_ms=76.0).closed(4, 64)
    run = fed(join([one, four]))
    assert "compute-bound decode" not in holds(run)
    assert "draft" in the(run, "compute-bound decode", "undecided").claim
    paged = at(run, {"output_tokens_total": ("rate", 50.0)})
    whole = dataclasses.replace(run, readings=type(run.readings).concat([run.readings, read(run, paged).readings]))
    assert holds(whole)[0] == "compute-bound decode"


def test_accepted_drafts_come_together_and_are_no_proxy() -> None:
    run = coalesced(pair(), 5)
    alone = run.requests["first_ns"][:, None] - np.zeros(1)
    t = run.chunks["t_ns"].copy()
    low = run.chunks["t_low_ns"].copy()
    for i, first in zip(run.requests["id"], alone[:, 0], strict=True):  # the prefill's token comes by itself
        row = np.flatnonzero(run.chunks["id"] == i)[0]
        t[row], low[row] = first - 5 * MS, np.nan
    chunks = run.chunks.replace(t_ns=t, t_low_ns=low)
    run = dataclasses.replace(run, chunks=chunks, requests=run.requests.replace(
        engine_decode_ms=np.full(len(run.requests), np.nan)))  # fmt: skip
    plain = read(run, client=TIMELY)
    assert "buffering proxy" not in holds(plain)
    assert the(plain, "buffering proxy", "undecided").next_step
    drafts = {"draft_tokens_total": ("rate", 90.0), "accepted_tokens_total": ("rate", 80.0),
              "draft_rounds_total": ("rate", 20.0)}  # fmt: skip
    found = read(run, at(run, drafts), client=TIMELY)
    assert "buffering proxy" not in holds(found)
    assert holds(read(coalesced(pair()), client=TIMELY))[0] == "buffering proxy"


def test_a_constant_cost_of_long_prompts_may_be_their_reading() -> None:
    slow = delayed(pair(), 300)
    long = dataclasses.replace(slow, requests=slow.requests.replace(prompt_tokens=np.full(len(slow.requests), 8000.0)))
    assert "network latency" in holds(told(slow), "llama.cpp")
    assert "network latency" not in holds(told(long), "llama.cpp")
    assert "short prompts" in the(told(long), "network latency", "undecided", "llama.cpp").next_step


def test_waiting_under_a_cap_that_was_asked_for_is_not_the_client() -> None:
    run = Service(slots=2, prefill_ms=20.0, gap_ms=10.0).open([40 * MS] * 120, rate=25)
    due = run.requests["sent_ns"] - np.linspace(0, 5 * S, len(run.requests))
    late = dataclasses.replace(run, requests=run.requests.replace(due_ns=due))
    capped = dataclasses.replace(late, manifest=dataclasses.replace(
        late.manifest, workload={"max_in_flight": 1}))  # fmt: skip
    assert "the client itself" in holds(late)
    assert "the client itself" not in holds(capped)


def test_a_cold_cache_does_not_make_prompts_of_another_kind() -> None:
    run = pair()
    n = len(run.requests)
    cached = np.where(np.arange(n) % 8 == 0, 0.0, 95.0)
    one = dataclasses.replace(run, requests=run.requests.replace(
        prompt_tokens=np.full(n, 100.0), cached_tokens=cached))  # fmt: skip
    assert work(one, span(one)).big_prompts == 0.0
    long = np.where(np.arange(n) % 8 == 0, 900.0, 100.0)
    two = dataclasses.replace(one, requests=one.requests.replace(prompt_tokens=long, cached_tokens=np.zeros(n)))
    assert work(two, span(two)).big_prompts > 0.5


def test_a_ramp_is_not_a_growing_queue() -> None:
    """Long answers at a steady rate: the number in flight grows until the first ones end."""
    sent = np.arange(0, 20 * S, S, dtype=float)
    steady = _pending(sent, sent + 9 * S, (0, 30 * S))
    assert steady is not None
    assert steady[1] < 1.5 * steady[0]
    outrun = _pending(sent, sent + np.linspace(1, 18, len(sent)) * S, (0, 40 * S))
    assert outrun is not None
    assert outrun[1] > 1.5 * outrun[0]


def test_a_number_in_work_that_never_varies_is_a_limit_though_space_is_full() -> None:
    assert "kv space" not in holds(waiting_run(0.95, 2.0))


def hogged(run: Run, child: bool) -> Run:
    """The client's loop lacks a core, by a busy loop that is, or is not, a child of this client."""
    loop = {"main": (0.03, 0.27)}
    mine = threads(run, "process/client", **loop, **({"hog": (0.9, 0.1)} if child else {}))
    busy = at(
        run, {"cpu_busy_seconds_total": ("rate", 1.93), "engine_cores_busy_seconds_total": ("rate", 0.95)}, "host"
    )
    seconds = (span(run)[1] - span(run)[0]) / 1e9
    client = {"read_lag_ms": {"p50": 1.4, "p99": 15.0}, "cpu_ns_by_point": {"0": 0.03 * seconds * 1e9}}
    return read(told(run), threads(run, "process/engine", python=(0.95, 0.02)), mine, busy, client=client)


@pytest.mark.parametrize("child", [True, False])
def test_a_loop_that_hardly_ever_has_a_core_while_others_compute(child: bool) -> None:
    run = hogged(pair(gap_ms=20.0, prefill_ms=20.0), child)
    assert client_lost(run, span(run)) == pytest.approx(0.9, abs=0.02)
    assert neighbours(run, span(run), 0.95) == pytest.approx(0.95, abs=0.03)
    assert holds(run)[0] == "the client itself"
    engine = threads(run, "process/engine", python=(0.95, 0.02))
    calm = read(run, engine, threads(run, "process/client", main=(0.03, 0.27)),
                at(run, {"cpu_busy_seconds_total": ("rate", 0.98)}, "host"))  # fmt: skip
    assert "the client itself" not in holds(calm)  # nobody else: it merely shares the engine's cores


def test_tokens_that_come_slower_than_they_are_made_are_not_the_engines_work() -> None:
    run = pair()
    n = run.requests["output_tokens"]
    slow = dataclasses.replace(run, requests=run.requests.replace(engine_decode_ms=(n - 1) * 4.0))
    assert "arrive every" in the(fed(slow), "weight-read-bound decode", "undecided").claim


def test_a_climb_speaks_of_so_few_places_that_it_ran_into_them() -> None:
    def climb(slots: int) -> Run:
        made = Service(slots=slots)
        run = join([made.closed(c, 16 * c) for c in (1, 2, 4)])
        return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, command=["diagnose", "URL"]))

    for slots, target in ((1, 2), (2, 4), (4, 4)):
        run = climb(slots)
        focus = gather(run, summarize(run)).focus
        assert focus is not None
        assert (slots, focus.target) == (slots, target)
    assert holds(climb(1))[0] == "slot limit"


def test_few_in_flight_leads_before_how_they_spend_their_time() -> None:
    made = Service(slots=16)
    run = fed(join([made.closed(1, 16), made.closed(2, 32)]))
    assert holds(run)[0] == "want of load"


def test_space_without_room_for_one_more_is_no_limit_of_places() -> None:
    assert holds(waiting_run(0.5, 3.0))[0] == "slot limit"
    tight = waiting_run(0.85, 3.0)  # three of 0.28 each
    assert "slot limit" not in holds(tight)
    assert the(tight, "slot limit", "undecided").next_step
    limited = dataclasses.replace(tight, manifest=dataclasses.replace(tight.manifest, engine={"slots": 32}))
    assert holds(limited)[0] == "kv space"


def test_few_drafts_cost_little_though_none_agrees() -> None:
    run = pair(prefill_ms=5.0)

    def drafting(rounds: float) -> list[str]:
        counters = {"draft_tokens_total": ("rate", 4 * rounds), "accepted_tokens_total": ("rate", 0.0),
                    "draft_rounds_total": ("rate", rounds), "output_tokens_total": ("rate", 100.0)}  # fmt: skip
        return holds(read(run, at(run, counters)))

    assert drafting(90.0)[0] == "poor speculation"
    assert "poor speculation" not in drafting(0.4)


def test_two_at_a_time_do_not_tell_what_eight_would_make() -> None:
    """Kernels change between one sequence and several: a step of two may take twice that of one, of eight no more."""
    one, two = Service(slots=8, gap_ms=18.0).closed(1, 16), Service(slots=8, gap_ms=33.0).closed(2, 32)
    run = fed(join([one, two]))
    paged = at(run, {"output_tokens_total": ("rate", 50.0)})
    run = dataclasses.replace(run, readings=type(run.readings).concat([run.readings, read(run, paged).readings]))
    assert holds(run) == []
    assert the(run, "want of load", "undecided").next_step
    full = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, engine={"slots": 2}))
    assert holds(full)[0] == "compute-bound decode"  # all there is room for


def test_this_client_on_the_engines_cores_is_no_neighbour() -> None:
    run = pair()
    engine = threads(run, "process/engine", python=(0.6, 0.4))
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    ours = threads(run, "process/client", main=(0.38, 0.02))
    assert "noisy neighbour" in holds(read(run, engine, busy))
    assert "noisy neighbour" not in holds(read(run, engine, busy, ours))
    assert the(read(run, engine, busy, ours), "noisy neighbour", "undecided").next_step


def test_a_path_that_varies_bunches_tokens_and_is_no_buffer() -> None:
    quick = pair(slots=64, gap_ms=1.0, prefill_ms=5.0)
    n = quick.requests["output_tokens"]
    made = dataclasses.replace(coalesced(quick, 4), requests=quick.requests.replace(engine_decode_ms=(n - 1) * 1.0))
    run = delayed(made, 250, 80)
    run = read(run, at(run, {"waiting": 0.0, "running": 1.0}), client=TIMELY)
    assert holds(run, "llama.cpp")[0] == "network latency"
    assert "buffering proxy" not in holds(run, "llama.cpp")


def test_weight_reads_are_withheld_where_the_batch_may_just_be_small() -> None:
    few = Verdict("want of load", "?", "undecided", 0.0, of="device time", point=1, kind=WORK)
    reads = Verdict("weight-read-bound decode", "!", "holds", 0.7, evidence=("a step",), point=1, kind=WORK)
    found = {v.cause: v.state for v in lesser([few, reads])}
    assert found["weight-read-bound decode"] == "undecided"
    fails = dataclasses.replace(few, state="fails")
    assert {v.cause: v.state for v in lesser([fails, reads])}["weight-read-bound decode"] == "holds"


def test_of_two_works_the_smaller_waits_for_the_larger_each_in_its_own_words() -> None:
    larger = Verdict("compute-bound prefill", "p", "undecided", 0.6, point=1, kind=WORK)
    smaller = Verdict("compute-bound decode", "d", "holds", 0.3, evidence=("a step",), point=1, kind=WORK)
    fewer = dataclasses.replace(smaller, cause="poor speculation", claim="s", share=0.1, against=("so",))
    elsewhere = dataclasses.replace(smaller, point=2)
    assert [(v.cause, v.state, v.claim, v.against) for v in lesser([larger, smaller, fewer, elsewhere])] == [
        ("compute-bound prefill", "undecided", "p", ()),
        ("compute-bound decode", "undecided", f"d; {LARGER}", (LARGER,)),
        ("poor speculation", "undecided", f"s; {LARGER}", ("so", LARGER)),
        ("compute-bound decode", "holds", "d", ()),
    ]


@pytest.mark.parametrize(
    ("cause", "error", "state"),
    [("weight-read-bound decode", 0.1, "holds"), ("weight-read-bound decode", -0.3, "holds"),
     ("weight-read-bound decode", 0.5, "undecided"), ("weight-read-bound decode", None, "undecided"),
     ("compute-bound prefill", 0.1, "undecided")],
)  # fmt: skip
def test_a_step_that_meets_the_roofline_is_not_stretched_by_slow_cores(cause: str, error: Any, state: str) -> None:
    blind = told(pair())
    e = gather(blind, summarize(blind))
    p = dataclasses.replace(e.points[-1], summary={**e.points[-1].summary, "decode_step": {"error": error}})
    v = Verdict(cause, "!", "holds", 0.7, evidence=("a step",), point=p.number, kind=WORK)
    assert withheld(v, dataclasses.replace(e, points=[p])).state == state


def test_the_neighbour_that_used_most_is_named() -> None:
    run = pair()
    for used, name in (((0.2, 0.7), "cc1plus"), ((0.9, 0.7), "backup")):
        rows = [at(run, {"neighbour_cpu_seconds_total": ("rate", rate)}, "host", process=who, pid=str(i))
                for i, (who, rate) in enumerate(zip(("backup", "cc1plus"), used, strict=True))]  # fmt: skip
        cpu = engine_cpu(read(fed(run), threads(run, "process/engine", python=(0.9, 0.0)), *rows), span(run))
        assert cpu.neighbour == name
    assert engine_cpu(fed(run), span(run)).neighbour == ""


def test_a_step_by_few_of_the_gaps_is_no_step_where_the_tokens_come_slower() -> None:
    run = fed(pair())
    e = gather(run, summarize(run))
    p = e.focus
    assert p is not None
    v = Verdict("weight-read-bound decode", "reads", "holds", 0.8, evidence=("x",), point=p.number, kind=WORK)
    quiet = dataclasses.replace(p.streams, engine_gap_ms=None)

    def judged(itl_n: int, tpot: float, **more: Any) -> Verdict:
        figures = {
            **p.summary,
            "itl_ms": {"p50": 13.4, "n": itl_n},
            "chunk_gap_ms": {"n": 100},
            "tpot_ms": {"p50": tpot},
        }
        q = dataclasses.replace(p, **{"streams": quiet, "summary": figures, **more})
        return withheld(v, dataclasses.replace(e, points=[q]))

    doubted = judged(52, 28.9)
    assert doubted.state == "undecided"
    assert "leave out 48 % of them" in doubted.claim
    assert "28.9 ms apart (TPOT)" in doubted.claim
    assert judged(100, 28.9).state == "holds"  # all gaps are known: their median is a step
    assert judged(52, 18.0).state == "holds"
    assert judged(52, 28.9, share={**p.share, "decode": 0.4, "stall": 0.4}).state == "holds"  # it is the stalls
    assert judged(52, 28.9, streams=dataclasses.replace(quiet, engine_gap_ms=13.4)).state == "holds"  # the engine's own


def test_of_a_simulated_service_nothing_was_measured() -> None:
    run = fed(pair(high=8, slots=1))
    assert {v.how for v in judge(run, summarize(run))} - {"modelled", "unknown"}
    made = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, made_by="simulated"))
    found = judge(made, summarize(made))
    assert {v.how for v in found} <= {"modelled", "unknown"}
    assert [(v.cause, v.state) for v in found] == [(v.cause, v.state) for v in judge(run, summarize(run))]
    assert not any("measured)" in line for v in found for line in v.evidence)


def test_a_pool_without_a_request_is_no_idle_service() -> None:
    run = pair()
    s = summarize(run)
    p = s["points"][-1]
    p["occupancy"]["shares"]["idle_no_work"], p["occupancy"]["pool_idle"] = 0.5, 0.45
    assert gather(run, s).points[-1].device["idle_no_work"] == pytest.approx(0.05)
    p["occupancy"]["pool_idle"] = None
    assert gather(run, s).points[-1].device["idle_no_work"] == 0.5
