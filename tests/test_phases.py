"""The request account: exact on every Run, right where the truth is known, unknown where there is no evidence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, messy_runs, stream
from whywait.analyze.first_token import others_in_flight, prefill_windows
from whywait.analyze.latency import origin_ns
from whywait.analyze.phases import PHASES, account, point_account
from whywait.core.run import Run


def _phase(run, name):
    return account(run).phases[:, PHASES.index(name)]


def _one(*, first=100, last=300, end=310, **columns):
    return {"due_ns": S, "sent_ns": S, "first_ns": S + first * MS, "last_ns": S + last * MS, "end_ns": S + end * MS,
            "connect_ns": 0, "rtt_ns": 0, **columns}  # fmt: skip


def _ms(run):
    acc = account(run)
    return {p: acc.phases[0, i] / MS for i, p in enumerate(PHASES) if acc.phases[0, i]}


@settings(max_examples=300)
@given(messy_runs(orderly=False))
def test_phases_add_up_exactly_on_any_run(run):
    acc = account(run)
    assert acc.phases.dtype == np.int64
    assert (acc.phases >= 0).all()
    assert (acc.phases.sum(axis=1) == acc.total_ns).all()
    for (phase, _), ns in acc.cause_ns.items():
        assert (ns >= 0).all()
        assert (ns <= acc.phases[:, PHASES.index(phase)]).all()


@settings(max_examples=200)
@given(messy_runs())
def test_the_total_is_end_minus_origin(run):
    acc = account(run)
    want = run.requests["end_ns"] - origin_ns(run)
    known = ~np.isnan(want)
    assert (acc.total_ns[known] == want[known]).all()
    e2e = run.requests["last_ns"] - origin_ns(run)
    ok = (run.requests["outcome"] == 0) & ~np.isnan(e2e) & known
    assert (acc.total_ns - acc.phases[:, PHASES.index("tail")])[ok] == pytest.approx(e2e[ok])


@settings(max_examples=200)
@given(messy_runs())
def test_without_evidence_it_is_unknown(run):
    req = run.requests.replace(
        engine_prefill_ms=np.full(len(run.requests), np.nan), engine_queue_ms=np.full(len(run.requests), np.nan)
    )
    # Neighbours' first tokens beside the gaps of a stream are evidence of their own: without chunks there are no gaps.
    none = run.chunks.where(np.zeros(0, dtype=np.int64))
    acc = account(Run(run.manifest, run.points, req, none, run.steps, run.readings))
    for name in ("frontend", "queue", "prefill", "stall"):
        assert not acc.phases[:, PHASES.index(name)].any()
        assert all(h[name] == "unknown" for h in acc.how.values())


def test_queue_behind_the_slots_is_found_and_has_its_cause():
    service = Service(slots=4)
    run = service.closed(8, 64)
    queued = _phase(run, "queue")
    assert queued.tolist() == service.truth_queue_ns
    acc = account(run)
    assert acc.how[0]["queue"] == "inferred"
    assert acc.causes[0]["queue"] == {"slot limit": 1.0}
    assert acc.phases[:, PHASES.index("prefill")].tolist() == [50 * MS] * 64
    assert acc.phases[:, PHASES.index("network")].tolist() == [200_000] * 64
    assert not acc.phases[:, PHASES.index("unknown")].any()


def test_within_the_slots_nothing_queues():
    acc = account(Service(slots=4).closed(4, 40))
    assert not acc.phases[:, PHASES.index("queue")].any()
    assert acc.how[0]["queue"] == "inferred"  # there is evidence: of no queue


def test_a_delay_without_evidence_of_a_queue_is_unknown():
    run = make_run([_one(first=500, last=700, end=700, engine_prefill_ms=60)])
    assert _ms(run) == {"prefill": 60, "unknown": 440, "decode": 200}


@pytest.mark.parametrize(
    ("readings", "queue"),
    [([(S + 50 * MS, 2)], 240), ([(S + 50 * MS, 0)], None), ([(S - 5 * MS, 2)], None), ([(S + 280 * MS, 2)], None)],
)
def test_waiting_readings_are_evidence_while_it_waits(readings, queue):
    run = make_run([_one(first=300, last=400, end=400, engine_prefill_ms=60)], readings=gauge_rows("waiting", readings))
    assert _ms(run).get("queue") == queue
    assert _ms(run).get("unknown") == (None if queue else 240)
    if queue:
        assert account(run).causes[0]["queue"] == {"unknown": 1.0}


def test_of_a_burst_any_may_be_the_one_that_waits():
    # Both were sent at once on one slot; the engine took the second first.
    rows = [
        _one(first=300, last=400, end=400, engine_prefill_ms=60),
        _one(first=60, last=200, end=200, engine_prefill_ms=60),
    ]
    run = make_run(rows, readings=gauge_rows("waiting", [(S + 50 * MS, 1), (S + 190 * MS, 1)]), engine={"slots": 1})
    assert _phase(run, "queue").tolist() == [240 * MS, 0]
    assert account(run).causes[0]["queue"] == {"slot limit": 1.0}


def test_an_empty_queue_read_meanwhile_outranks_the_count_of_requests():
    # Five in flight on four slots, but most of their time is on the wire: the engine never queued anything.
    rows = [_one(first=300, last=400, end=400, engine_prefill_ms=60) for _ in range(5)]
    run = make_run(rows, engine={"slots": 4})
    assert _phase(run, "queue")[-1] == 240 * MS
    run = make_run(rows, readings=gauge_rows("waiting", [(S + 100 * MS, 0)]), engine={"slots": 4})
    assert not _phase(run, "queue").any()
    assert _phase(run, "unknown")[-1] == 240 * MS


@pytest.mark.parametrize(
    ("neighbour", "queue"),
    [
        ((100, 400, 300, 0), 300),  # it ended its prefill just when the other began its own
        ((100, 400, 300, 1), None),  # on another replica
        ((100, 370, 300, 0), None),  # 30 ms before: no reason to have waited the whole time
        ((100, 405, 305, 0), 300),
    ],
)
def test_a_wait_behind_a_neighbours_prefill(neighbour, queue):
    sent, first, prefill, replica = neighbour
    steady = [S + (450 + 20 * i) * MS for i in range(10)]
    one = _one(first=450, last=630, end=630, engine_prefill_ms=50)
    two = {
        **_one(first=first, last=1500, end=1500, engine_prefill_ms=prefill, replica=replica),
        "sent_ns": S + sent * MS,
    }
    run = make_run([one, two], stream(0, steady), engine={"slots": 4})
    acc = account(run)
    assert _ms(run).get("queue") == queue
    assert _ms(run)["unknown"] == (100 if queue else 400)
    assert acc.causes[0].get("queue") == ({"neighbour's prefill": 1.0} if queue else None)


def test_the_engines_own_queue_figure_is_measured():
    run = make_run([_one(first=300, last=400, end=400, engine_prefill_ms=60, engine_queue_ms=200)])
    assert _ms(run) == {"queue": 200, "prefill": 60, "frontend": 40, "decode": 100}
    assert account(run).how[0]["queue"] == "measured"


def test_network_is_connecting_and_a_round_trip():
    run = make_run([_one(connect_ns=7 * MS, rtt_ns=3 * MS, engine_prefill_ms=90)])
    assert _ms(run) == {"network": 10, "prefill": 90, "decode": 200, "tail": 10}
    assert _ms(make_run([_one(rtt_ns=900 * MS)])) == {"network": 100, "decode": 200, "tail": 10}


def test_lateness_of_an_open_loop_is_the_clients():
    row = _one(engine_prefill_ms=100, due_ns=S - 30 * MS)
    run = make_run([row], points=[{"mode": "rate", "target": 1}])
    assert _ms(run) == {"client": 30, "prefill": 100, "decode": 200, "tail": 10}
    assert _ms(make_run([row])) == {"prefill": 100, "decode": 200, "tail": 10}


def test_prefill_longer_than_the_wait_is_cut_and_doubted():
    acc = account(make_run([_one(engine_prefill_ms=150)]))
    assert acc.phases[0, PHASES.index("prefill")] == 100 * MS
    assert "cut to fit" in acc.doubts[0]["what"]
    assert account(make_run([_one(engine_prefill_ms=104)])).doubts == []


@pytest.mark.parametrize("outcome", ["truncated", "timeout", "inband_error", "censored"])
def test_after_the_last_token_of_a_failure_nobody_knows(outcome):
    run = make_run([_one(engine_prefill_ms=100, outcome=outcome, end=900)])
    assert _ms(run) == {"prefill": 100, "decode": 200, "unknown": 600}


def test_refused_and_never_sent():
    refused = {"sent_ns": S, "end_ns": S + 5 * MS, "connect_ns": 2 * MS, "outcome": "refused"}
    assert _ms(make_run([refused])) == {"network": 2, "unknown": 3}
    never = {"due_ns": S, "end_ns": S + 5 * MS, "outcome": "never_sent"}
    assert _ms(make_run([never], points=[{"mode": "rate"}])) == {"client": 5}
    assert _ms(make_run([{"due_ns": S, "outcome": "never_sent"}], points=[{"mode": "rate"}])) == {}


def test_not_streamed_takes_the_engines_figures():
    row = {"sent_ns": S, "end_ns": S + 500 * MS, "engine_prefill_ms": 100, "engine_decode_ms": 300, "rtt_ns": 0}
    assert _ms(make_run([row])) == {"prefill": 100, "decode": 300, "unknown": 100}


def _stalled(neighbour: bool, replica: int = 0):
    """A steady stream with one gap of 120 ms; meanwhile, or not, another request is in prefill for 80 ms."""
    gaps = [20] * 10 + [120] + [20] * 10
    times = [S + 100 * MS + int(v) * MS for v in np.cumsum([0, *gaps])]
    one = _one(last=(times[-1] - S) // MS, end=(times[-1] - S) // MS, engine_prefill_ms=100)
    first = 400 if neighbour else 1200
    two = _one(first=first, last=first + 100, end=first + 100, engine_prefill_ms=80, replica=replica)
    return make_run([one, {**two, "sent_ns": S + (first - 80) * MS}], stream(0, times))


def test_a_neighbours_prefill_stalls_decode():
    run = _stalled(True)
    acc = account(run)
    assert _phase(run, "stall").tolist() == [80 * MS, 0]  # of the 100 ms beyond the usual gap 80 are explained
    assert acc.cause_ns["decode", "unknown"].tolist() == [20 * MS, 0]
    assert acc.causes[0]["stall"] == {"neighbour's prefill": 1.0}
    assert acc.how[0]["stall"] == "inferred"


def test_a_long_gap_without_a_neighbour_stays_in_decode():
    for run in (_stalled(False), _stalled(True, replica=1)):
        assert not _phase(run, "stall").any()
        assert account(run).cause_ns["decode", "unknown"][0] == 100 * MS


def test_coalesced_chunks_are_no_stall():
    times = [S + v * MS for v in (100, 120, 140, 160, 400, 400, 400)]
    lows = [None] * 4 + [S + 160 * MS] * 2 + [None]
    one = _one(last=400, end=400, engine_prefill_ms=100)
    two = {**_one(first=300, last=400, end=400, engine_prefill_ms=100), "sent_ns": S + 200 * MS}
    assert not _phase(make_run([one, two], stream(0, times, lows)), "stall").any()


def test_how_each_phase_is_known():
    bare = [_one(connect_ns=None, rtt_ns=None)]
    assert set(account(make_run(bare)).how[0].items()) >= {
        ("client", "measured"), ("network", "unknown"), ("frontend", "unknown"), ("queue", "unknown"),
        ("prefill", "unknown"), ("decode", "measured"), ("stall", "unknown"), ("tail", "measured"),
    }  # fmt: skip
    imported = make_run([_one(due_ns=None)], points=[{"mode": "trace"}])
    assert account(imported).how[0]["client"] == "unknown"


def test_others_in_flight_by_replica():
    rows = [{"sent_ns": a, "end_ns": b, "replica": r} for a, b, r in
            ((0, 10, 0), (0, 20, 0), (5, None, 1), (10, 30, 0), (15, 16, 0), (50, 60, 1), (None, 9, 0))]  # fmt: skip
    assert others_in_flight(make_run(rows)).tolist() == [0, 1, 0, 1, 2, 1, -1]


def test_prefill_windows_end_with_the_first_token():
    start, end = prefill_windows(make_run([_one(engine_prefill_ms=30), _one(engine_prefill_ms=999), _one()]))
    assert start[:2].tolist() == [S + 70 * MS, S]
    assert end[:2].tolist() == [S + 100 * MS] * 2
    assert np.isnan(end[2])


def _histograms(queue_s, prefill_s, decode_s, requests=10):
    rows = []
    for name, seconds in (("queue", queue_s), ("prefill", prefill_s), ("decode", decode_s)):
        if seconds is not None:
            rows += gauge_rows(f"{name}_seconds_sum", [(S // 2, 5.0), (9 * S, 5.0 + seconds * requests)])
            rows += gauge_rows(f"{name}_seconds_count", [(S // 2, 3), (9 * S, 3.0 + requests)])
    return rows


def test_histograms_give_the_mean_phases_of_a_point():
    rows = [_one(first=500, last=700, end=700, rtt_ns=MS) for _ in range(10)]
    run = make_run(rows, readings=_histograms(0.3, 0.1, 0.2))
    assert not account(run).phases[:, PHASES.index("queue")].any()
    found = point_account(run, 0)
    ms = {k: v["ms"] for k, v in found["phases"].items()}
    assert ms == pytest.approx({"client": 0, "network": 1, "frontend": 99, "queue": 300, "prefill": 100, "decode": 200,
                                "stall": 0, "tail": 0, "unknown": 0})  # fmt: skip
    assert found["phases"]["queue"]["how"] == "derived"
    assert found["requests"] == 10
    assert found["doubts"] == []


def test_without_a_decode_histogram_the_clients_decode_stays():
    run = make_run([_one(first=500, last=700, end=700)] * 10, readings=_histograms(0.3, 0.1, None))
    found = point_account(run, 0)["phases"]
    assert found["decode"] == {"ms": 200, "how": "measured"}
    assert found["frontend"] == {"ms": pytest.approx(100), "how": "derived"}


def test_littles_law_and_totals_stand_in_for_histograms():
    # Ten requests over the point's 4 s; on average 0.75 waited, so each waited 300 ms.
    rows = [_one(first=500, last=700, end=700) for _ in range(10)]
    readings = [*gauge_rows("waiting", [(t, 0.75) for t in range(0, 5 * S, S // 4)]),
                *gauge_rows("prefill_seconds_total", [(0, 2.0), (4 * S, 3.0)])]  # fmt: skip
    run = make_run(rows, readings=readings, points=[{"target": 10, "start_ns": 0, "end_ns": 4 * S}])
    found = point_account(run, 0)["phases"]
    assert found["queue"] == {"ms": pytest.approx(300), "how": "derived"}
    assert found["prefill"] == {"ms": pytest.approx(100), "how": "derived"}
    assert found["decode"] == {"ms": 200, "how": "measured"}
    assert found["unknown"]["ms"] == pytest.approx(100)


def test_what_requests_know_themselves_is_not_derived():
    rows = [_one(first=500, last=700, end=700, engine_prefill_ms=60, engine_queue_ms=300)] * 10
    assert point_account(make_run(rows, readings=_histograms(0.2, 0.1, 0.2)), 0) is None
    rows = [_one(first=500, last=700, end=700, engine_prefill_ms=60)] * 10  # no slots, no readings: no queue known
    found = point_account(make_run(rows, readings=_histograms(0.2, 0.1, None)), 0)["phases"]
    assert found["prefill"] == {"ms": 60, "how": "measured"}
    assert found["queue"] == {"ms": pytest.approx(200), "how": "derived"}


def test_histograms_that_hold_too_much_are_cut_and_doubted():
    run = make_run([_one(first=500, last=700, end=700)] * 10, readings=_histograms(0.9, 0.1, 0.2))
    found = point_account(run, 0)
    assert sum(v["ms"] for v in found["phases"].values()) == pytest.approx(700)
    assert "hold more time" in found["doubts"][0]["what"]


def test_no_histograms_no_point_account():
    assert point_account(make_run([_one()]), 0) is None


def test_points_are_told_apart():
    acc = account(join([Service(slots=4).closed(4, 12), Service(slots=4).closed(8, 24)]))
    assert sorted(acc.how) == [0, 1]
    assert "queue" not in acc.causes[0]
    assert acc.causes[1]["queue"] == {"slot limit": 1.0}


def test_a_run_of_nothing():
    acc = account(make_run([]))
    assert acc.phases.shape == (0, len(PHASES))
    assert acc.how == {}
