"""Hand-overs of a split in the request account and among the figures: measured, and simulated by the same names."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis_runs import MS, S, gauge_rows, make_run, stream
from whywait import simulating
from whywait.analyze.compare import METRICS, effects
from whywait.analyze.first_token import prefill_windows
from whywait.analyze.handover import handovers
from whywait.analyze.phases import PHASES, account
from whywait.core.run import Run
from whywait.core.schedule import Workload
from whywait.load.recipe import Load, schedule_of
from whywait.sim import techniques
from whywait.sim.loads import Options
from whywait.sim.service import simulate


def one(*, first: int = 500, last: int = 700, end: int = 700, **columns: object) -> dict[str, object]:
    return {"due_ns": S, "sent_ns": S, "first_ns": S + first * MS, "last_ns": S + last * MS, "end_ns": S + end * MS,
            "connect_ns": 0, "rtt_ns": 0, **columns}  # fmt: skip


def ms(run: Run) -> dict[str, float]:
    acc = account(run)
    return {p: acc.phases[0, i] / MS for i, p in enumerate(PHASES) if acc.phases[0, i]}


def test_before_the_first_token_where_the_decode_engine_makes_it() -> None:
    run = make_run([one(engine_queue_ms=100, engine_prefill_ms=200, engine_handover_ms=150)])
    assert ms(run) == {"queue": 100, "prefill": 200, "stall": 150, "frontend": 50, "decode": 200}
    acc = account(run)
    assert acc.causes[0]["stall"] == {"interconnect": 1.0}
    assert acc.causes[0]["queue"] == {"neighbour's prefill": 1.0}  # a prefill engine works on nothing else
    start, end = prefill_windows(run)
    assert ((start[0] - S) / MS, (end[0] - S) / MS) == (150, 350)  # the hand-over came after it


def test_after_the_first_token_where_the_prefill_engine_makes_it() -> None:
    """As the simulator has it: the wait for the first token has no room for the hand-over, so it lies behind it."""
    chunks = stream(0, [S + t * MS for t in (300, 500, *range(520, 701, 20))])
    run = make_run([one(first=300, engine_queue_ms=100, engine_prefill_ms=200, engine_handover_ms=150)], chunks)
    assert ms(run) == {"queue": 100, "prefill": 200, "stall": 150, "decode": 250}
    assert account(run).causes[0]["stall"] == {"interconnect": 1.0}


def test_a_prefill_elsewhere_holds_up_nobody() -> None:
    """A stream pauses just while another's prompt is computed: by the one engine, or by one of its own."""
    gaps = [S + t * MS for t in (*range(100, 301, 20), 600, *range(620, 801, 20))]
    beside = one(first=600, last=800, end=800, engine_prefill_ms=280, engine_queue_ms=0)
    for more, stalled in (({}, True), ({"engine_handover_ms": 20.0}, False)):
        run = make_run([one(first=100, last=800, end=800, engine_prefill_ms=100), {**beside, **more}], stream(0, gaps))
        acc = account(run)
        assert bool(acc.cause_ns.get(("stall", "neighbour's prefill"), np.zeros(2))[0]) is stalled


def test_the_services_own_time_to_first_token_decides() -> None:
    """A slow way to the client leaves room for a hand-over that came later."""
    for ttft, want in ((450, {"stall": 150, "frontend": 50}), (300, {"stall": 150, "frontend": 200})):
        run = make_run([one(engine_queue_ms=100, engine_prefill_ms=200, engine_handover_ms=150, engine_ttft_ms=ttft)])
        found = ms(run)
        assert {k: found[k] for k in want} == want
        assert found["decode"] == (200 if ttft == 450 else 50)


def grown(name: str, to: float) -> list[dict[str, object]]:
    return gauge_rows(name, [(S - 10 * MS, 0.0), (S + 350 * MS, to / 2), (S + 710 * MS, to)])


def test_figures() -> None:
    rows = [one(engine_prefill_ms=100, engine_handover_ms=h, handover_bytes=b) for h, b in ((100, 10e6), (300, 10e6))]
    said = {"handover_seconds_count": 2, "handover_save_seconds_total": 0.1, "handover_blocked_seconds_total": 0.02,
            "restore_gaps_total": 2, "restore_gap_seconds_total": 0.2, "other_gaps_total": 10,
            "other_gap_seconds_total": 0.5}  # fmt: skip
    readings = [r for name, to in said.items() for r in grown(name, to)]
    found = handovers(make_run(rows, readings=readings), 0)
    assert found["handover_ms.mean"] == 200
    assert found["handover_bytes"] == 10e6
    assert found["handover_mb_s"] == pytest.approx(50)
    assert found["handover_save_ms"] == pytest.approx(50)
    assert found["handover_blocked_ms"] == pytest.approx(10)
    assert found["handover_link_ms"] is None  # nobody said so
    assert found["restore_stall_ms"] == pytest.approx(50)  # 100 ms with another's KV being read in, else 50
    assert found.keys() <= METRICS.keys()


def test_of_a_service_that_hands_nothing_over_they_are_unknown() -> None:
    assert set(handovers(make_run([one(engine_prefill_ms=100)]), 0).values()) == {None}


def test_what_only_one_arm_has_is_shown_and_claims_nothing() -> None:
    pairs = [({"handover_bytes": None}, {"handover_bytes": 4e6}), ({"handover_bytes": None}, {"handover_bytes": 6e6})]
    e = effects(pairs)["handover_bytes"]
    assert (e.a, e.b, e.n, e.ratio.value) == (None, 5e6, 0, None)


def test_a_simulated_split_says_the_same() -> None:
    d = techniques.apply("pd=1:1", simulating.deployment_of("h100", "llama-3.1-8b"))
    load = Load("concurrency", 4, 12)
    schedule = schedule_of(load, Workload.from_dict({}), 0, 0)[0]
    run = simulate(d, schedule, load.mode, load.target, options=Options(keep="chunks"))
    took = run.requests["engine_handover_ms"]
    assert (took > 0).all()
    acc = account(run)
    moved = acc.cause_ns["stall", "interconnect"] / MS
    assert moved == pytest.approx(took, rel=1e-6)
    assert (acc.phases.sum(axis=1) == acc.total_ns).all()
    found = handovers(run, 0)
    assert found["handover_ms.mean"] == pytest.approx(took.mean())
    assert found["handover_bytes"] == pytest.approx((run.requests["prompt_tokens"] * 32 * 8 * 128 * 2 * 2).mean())
