"""Stalls of decode are told apart by what else happened at that instant; where the truth is known they get it right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis_runs import MS, S, gauge_rows, make_run, stream
from whywait.analyze.phases import PHASES, account, point_account


def _times(first_ms, gaps_ms):
    return [S + int(first_ms * MS) + int(v * MS) for v in np.cumsum([0, *gaps_ms])]


def _row(times, sent_ms=0.0, **columns):
    return {"sent_ns": S + int(sent_ms * MS), "first_ns": times[0], "last_ns": times[-1], "end_ns": times[-1],
            "connect_ns": 0, "rtt_ns": 0, **columns}  # fmt: skip


def _run(streams, sent=None, readings=None, **columns):
    """Streams of chunk times as requests; ``sent`` ms of each."""
    rows = [_row(t, (sent or {}).get(i, 0), **columns) for i, t in enumerate(streams)]
    return make_run(rows, [c for i, t in enumerate(streams) for c in stream(i, t)], readings)


def _causes(run, row=0):
    acc = account(run)
    assert (acc.phases.sum(axis=1) == acc.total_ns).all()
    return {c: ns[row] / MS for (p, c), ns in acc.cause_ns.items() if p == "stall" and ns[row]}


STEADY = [20.0] * 10
HELD = [*STEADY, 120.0, *STEADY]  # one gap of 120 ms, from 300 to 420 ms after the first chunk at 100 ms


def test_a_neighbours_first_token_ends_the_gaps_of_all_streams():
    # The engine says nothing of prefill: the newcomer, sent in the gap, gets its first token as it ends.
    newcomer = _times(420, STEADY)
    run = _run([_times(100, HELD), _times(105, HELD), newcomer], {2: 310})
    assert _causes(run, 0) == {"neighbour's prefill": 100}
    acc = account(run)
    assert acc.how[0]["prefill"] == "unknown"
    assert acc.how[0]["stall"] == "inferred"
    assert "weaker" in acc.evidence[0]["stall"]


def test_chunks_of_a_long_prefill_are_one_run_of_gaps():
    gaps = [*STEADY, 60.0, 60.0, 60.0, *STEADY]  # three steps with a piece of the prompt in each
    newcomer = _times(480, STEADY)
    run = _run([_times(100, gaps), _times(101, gaps), newcomer], {2: 295})
    assert _causes(run)["neighbour's prefill"] == 120


def test_a_gap_that_no_first_token_ends_is_not_a_neighbours():
    newcomer = _times(500, STEADY)  # it came 80 ms after the gap
    run = _run([_times(100, HELD), _times(105, HELD), newcomer], {2: 310})
    assert _causes(run) == {}
    assert account(run).cause_ns["decode", "unknown"][0] == 100 * MS


def test_while_others_tokens_come_no_prefill_holds_this_stream():
    flowing = _times(100, [20.0] * 31)
    newcomer = _times(420, STEADY)
    run = _run([_times(100, HELD), flowing, newcomer], {2: 310})
    assert _causes(run) == {}


def _counter(name, at_ms, source="metrics/0", by=1.0):
    """A counter read every 100 ms that grows once, between ``at_ms`` and 100 ms later."""
    return gauge_rows(name, [(S + t * MS, 0.0 if t <= at_ms else by) for t in range(0, 1500, 100)], source)


def test_a_request_pushed_out_is_silent_alone_while_the_counter_grew():
    pushed = _times(100, [*STEADY, 400.0, *STEADY])  # silent from 300 to 700 ms; the others go on
    others = _times(100, [20.0] * 50)
    for prefills in ({}, {"engine_prefill_ms": 90.0}):
        run = _run([pushed, others], readings=_counter("preemptions_total", 200), **prefills)
        assert _causes(run) == {"preemption/recompute": 380}
        assert _causes(run, 1) == {}
    assert _causes(_run([pushed, others])) == {}
    assert _causes(_run([pushed, others], readings=_counter("preemptions_total", 1000))) == {}


def test_a_freeze_of_all_streams_with_no_prefill_of_others_is_the_kv_spaces():
    run = _run([_times(100, HELD), _times(105, HELD)], readings=_counter("preemptions_total", 200))
    assert _causes(run, 0) == _causes(run, 1) == {"preemption/recompute": 100}


def test_a_neighbours_prefill_outranks_the_counter_when_all_are_silent():
    newcomer = _times(420, STEADY)
    run = _run([_times(100, HELD), newcomer], {1: 310}, _counter("preemptions_total", 200), engine_prefill_ms=100.0)
    assert _causes(run) == {"neighbour's prefill": 100}


@pytest.mark.parametrize(
    ("name", "cause"),
    [("cgroup_throttled_seconds_total", "cpu quota"), ("run_queue_wait_seconds_total", "noisy neighbour")],
)
def test_silence_while_the_engine_had_no_cpu(name, cause):
    streams = [_times(100, HELD), _times(105, HELD)]
    run = _run(streams, readings=_counter(name, 300, "process/engine", 0.08))
    assert _causes(run) == {cause: pytest.approx(80)}
    assert _causes(_run(streams, readings=_counter(name, 300, "process/client", 0.08))) == {}


def test_a_little_waiting_for_a_core_is_normal():
    run = _run([_times(100, HELD)], readings=_counter("run_queue_wait_seconds_total", 300, "process/engine", 0.03))
    assert _causes(run) == {}


def test_rejected_speculation_is_the_share_of_positions_computed_for_nothing():
    counters = [*_counter("draft_tokens_total", 0, by=300.0), *_counter("accepted_tokens_total", 0, by=60.0),
                *_counter("draft_rounds_total", 0, by=100.0)]  # fmt: skip
    acc = account(_run([_times(100, STEADY * 5)], readings=counters))
    assert acc.causes[0]["decode"]["rejected speculation"] == pytest.approx(240 / 400, abs=1e-6)
    assert "rejected speculation" not in account(_run([_times(100, STEADY)])).causes[0].get("decode", {})


def test_a_held_back_stream_had_decode_behind_its_wait():
    # The engine prefilled for 60 ms and decoded for 400; all of it came in the last 10 ms.
    times = _times(460, [5.0, 5.0])
    acc = account(_run([times], engine_prefill_ms=60.0, engine_decode_ms=400.0))
    phases = dict(zip(PHASES, (acc.phases[0] / MS).tolist(), strict=True))
    assert phases["decode"] == 400
    assert phases["unknown"] == 10
    assert acc.cause_ns["decode", "buffering"].tolist() == [390 * MS]
    alike = account(_run([_times(60, STEADY)], engine_prefill_ms=60.0, engine_decode_ms=210.0))
    assert not alike.cause_ns["decode", "buffering"].any()


def test_the_frontend_is_what_the_engines_stages_and_the_path_leave():
    stages = {"engine_queue_ms": 30.0, "engine_prefill_ms": 60.0, "accepted_ns": S + 200 * MS}
    acc = account(_run([_times(300, STEADY)], **{**stages, "rtt_ns": 10 * MS}))
    phases = dict(zip(PHASES, (acc.phases[0] / MS).tolist(), strict=True))
    assert (phases["network"], phases["queue"], phases["prefill"], phases["frontend"]) == (10, 30, 60, 200)
    assert acc.how[0]["frontend"] == "inferred"
    assert "190.0 ms after sending" in acc.evidence[0]["frontend"]
    unseen = account(_run([_times(300, STEADY)], **{**stages, "rtt_ns": None}))
    assert unseen.how[0]["frontend"] == "unknown"
    assert unseen.phases[0, PHASES.index("unknown")] == 210 * MS


def test_the_engines_own_ttft_leaves_the_frontend_too():
    acc = account(_run([_times(300, STEADY)], engine_ttft_ms=250.0))
    assert acc.phases[0, PHASES.index("frontend")] == 50 * MS
    assert acc.phases[0, PHASES.index("unknown")] == 250 * MS


def test_a_busy_serving_process_makes_it_host_cpu():
    def cpu(process, per_s):
        labels = {"pid": process, "process": process}
        return gauge_rows("process_cpu_seconds_total", [(t * S // 4, t * per_s / 4) for t in range(12)],
                          "process/engine", **labels)  # fmt: skip

    stages = {"engine_queue_ms": 0.0, "engine_prefill_ms": 60.0}
    for serving, cause in ((0.95, "host CPU"), (0.2, "unknown")):
        readings = [*cpu("python", serving), *cpu("VLLM::EngineCore", 1.0)]
        acc = account(_run([_times(300, STEADY)], readings=readings, **stages))
        assert acc.causes[0]["frontend"] == {cause: 1.0}


def test_histograms_of_queue_and_prefill_leave_the_frontend_of_a_point():
    times = _times(500, STEADY)
    rows = [c for name, s in (("ttft", 0.45), ("queue", 0.3), ("prefill", 0.1)) for c in
            (*gauge_rows(f"{name}_seconds_sum", [(S // 2, 1.0), (9 * S, 1.0 + s)]),
             *gauge_rows(f"{name}_seconds_count", [(S // 2, 1.0), (9 * S, 2.0)]))]  # fmt: skip
    found = point_account(_run([times], readings=rows), 0)["phases"]
    assert found["frontend"] == {"ms": pytest.approx(100), "how": "derived"}
    only = [r for r in rows if r["name"].startswith("ttft")]
    found = point_account(_run([times], readings=only), 0)["phases"]
    assert found["frontend"] == {"ms": pytest.approx(50), "how": "derived"}
    assert found["queue"]["how"] == "unknown"


def test_a_queue_while_the_kv_space_was_full_is_the_kv_spaces():
    full, free = (gauge_rows("kv_use", [(S + t * MS, v) for t in range(0, 400, 100)]) for v in (0.97, 0.5))
    stages = {"engine_queue_ms": 200.0, "engine_prefill_ms": 60.0}
    for readings, cause in ((full, "kv space"), (free, "unknown"), (None, "unknown")):
        assert account(_run([_times(300, STEADY)], readings=readings, **stages)).causes[0]["queue"] == {cause: 1.0}
    # Over the engine's slots it is their limit, whatever the space.
    rows = [_row(_times(300, STEADY), i, **stages) for i in range(3)]
    assert account(make_run(rows, readings=full, engine={"slots": 1})).cause_ns["queue", "slot limit"][2] == 200 * MS
