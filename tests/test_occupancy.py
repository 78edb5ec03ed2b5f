"""The device account: exact on every Run, and right on a service whose truth is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis_runs import MS, S, Service, gauge_rows, make_run, messy_runs
from whywait.analyze.occupancy import CATEGORIES, device_account
from whywait.analyze.pools import unbalanced


def _row(sent, first, last, end, **columns):
    times = {"sent_ns": sent, "first_ns": first, "last_ns": last, "end_ns": end}
    return {**{k: None if v is None else v * MS for k, v in times.items()}, **columns}


def _ms(account):
    return {k: v / MS for k, v in account.ns.items() if v}


@settings(max_examples=300)
@given(messy_runs(orderly=False), st.integers(0, 15 * S), st.integers(0, 10 * S))
def test_it_is_wall_times_devices_on_any_run(run, start, length):
    a = device_account(run, start, start + length)
    assert tuple(a.ns) == CATEGORIES
    assert sum(a.ns.values()) == a.total_ns == length * run.manifest.engine.get("devices", 1)
    assert all(isinstance(v, int) and v >= 0 for v in a.ns.values())
    assert 0 <= a.busy_low_ns <= a.busy_high_ns <= a.total_ns


@settings(max_examples=100)
@given(messy_runs())
def test_without_evidence_it_is_unknown(run):
    a = device_account(run)
    for name in ("communication", "idle_kv_blocked", "throttled"):
        assert a.ns[name] == 0
        assert a.how[name] == "unknown"


def test_one_request():
    run = make_run([_row(10, 70, 170, 175, engine_prefill_ms=50)])
    a = device_account(run, 0, 200 * MS)
    assert _ms(a) == {"idle_no_work": 35, "unknown": 15, "prefill_busy": 50, "decode_busy": 100}
    assert a.how["prefill_busy"] == "measured"
    assert (a.busy_low_ns, a.busy_high_ns) == (150 * MS, 165 * MS)


def test_prefill_of_one_outranks_decode_of_another():
    run = make_run([_row(0, 10, 100, 100, engine_prefill_ms=10), _row(40, 60, 120, 120, engine_prefill_ms=20)])
    assert _ms(device_account(run)) == {"prefill_busy": 30, "decode_busy": 90}


def test_prefill_that_is_not_seen_is_unknown_unless_others_decode():
    run = make_run([_row(0, 50, 100, 100), _row(60, 90, 150, 150)])
    a = device_account(run)
    assert _ms(a) == {"unknown": 50, "decode_busy": 100}
    assert a.how["prefill_busy"] == "unknown"
    assert a.busy_high_ns == 150 * MS


def test_failed_requests_keep_the_device_in_doubt():
    run = make_run([_row(0, None, None, 80, outcome="timeout"), _row(90, None, None, None, outcome="censored")])
    assert _ms(device_account(run, 0, 100 * MS)) == {"unknown": 90, "idle_no_work": 10}


@pytest.mark.parametrize(("waiting", "category"), [(3, "idle_host"), (0, "unknown")])
def test_work_that_waits_while_nothing_runs_is_the_hosts(waiting, category):
    # In flight for 400 ms before its prefill of 50 ms begins.
    readings = gauge_rows("waiting", [(t * MS, waiting) for t in range(0, 600, 100)])
    run = make_run([_row(0, 450, 500, 500, engine_prefill_ms=50)], readings=readings)
    a = device_account(run)
    assert _ms(a) == {category: 400, "prefill_busy": 50, "decode_busy": 50}
    assert a.how["idle_host"] == "inferred"


def test_a_waiting_reading_is_no_evidence_while_a_prefill_may_be_running():
    readings = gauge_rows("waiting", [(t * MS, 3) for t in range(0, 600, 100)])
    run = make_run([_row(0, 450, 500, 500), _row(0, 450, 500, 500, engine_prefill_ms=50)], readings=readings)
    assert device_account(run).ns["idle_host"] == 0


def test_a_stale_reading_says_nothing_of_later():
    readings = gauge_rows("waiting", [(0, 3), (10 * MS, 3), (20 * MS, 3), (900 * MS, 0)])
    run = make_run([_row(0, 950, 1000, 1000, engine_prefill_ms=50)], readings=readings)
    assert device_account(run).ns["idle_host"] == 50 * MS


def test_replicas_share_the_devices():
    run = make_run(
        [_row(0, 10, 100, 100, engine_prefill_ms=10), _row(0, 10, 50, 50, engine_prefill_ms=10, replica=1)],
        engine={"devices": 4},
    )
    assert _ms(device_account(run)) == {"prefill_busy": 40, "decode_busy": 2 * 90 + 2 * 40, "idle_no_work": 2 * 50}


def _cpu(source, labels, seconds):
    return gauge_rows("cpu_seconds_total", [(0, 5.0), (1000 * MS, 5.0 + seconds)], source, **labels)


@pytest.mark.parametrize(("source", "labels"), [("process/engine", {}), ("host", {"role": "engine"})])
def test_cpu_time_bounds_busy_time(source, labels):
    row = _row(0, 100, 1000, 1000, engine_prefill_ms=100)
    run = make_run([row], readings=_cpu(source, labels, 1.2), engine={"threads": 2})
    a = device_account(run, 0, 1000 * MS)
    assert a.busy_high_ns == a.busy_low_ns == 600 * MS
    assert "more time busy than the engine had CPU" in a.doubts[0]["what"]
    run = make_run([row], readings=_cpu(source, labels, 2.0), engine={"threads": 2})
    assert device_account(run, 0, 1000 * MS).doubts == []


def test_cpu_time_of_others_or_of_a_part_of_the_window_bounds_nothing():
    row = _row(0, 100, 1000, 1000, engine_prefill_ms=100)
    for readings in (
        _cpu("process/client", {}, 0.1),
        gauge_rows("cpu_seconds_total", [(0, 1.0), (500 * MS, 1.1)], "process/engine"),
    ):
        a = device_account(make_run([row], readings=readings, engine={"threads": 1}), 0, 1000 * MS)
        assert a.busy_high_ns == 1000 * MS


def test_a_service_short_of_load_idles_without_work():
    service = Service(slots=1, rtt_ns=0)
    run = service.open([500 * MS] * 20)  # each takes 350 ms
    a = device_account(run)
    shares = {k: v / a.total_ns for k, v in a.ns.items()}
    assert shares["idle_no_work"] == pytest.approx(0.3, abs=0.02)
    assert shares["prefill_busy"] == pytest.approx(0.1, abs=0.01)
    assert shares["decode_busy"] == pytest.approx(0.6, abs=0.02)


def test_what_is_no_window_is_refused():
    with pytest.raises(ValueError, match="ends at"):
        device_account(make_run([]), 10, 5)
    with pytest.raises(ValueError, match="needs a window"):
        device_account(make_run([], points=[]))


def test_what_others_are_in_work_with_is_no_idle_device():
    """None of ours in flight, while the engine says twice in a row that it has requests: unknown. Once is the end of
    ours, or a look too late."""
    queue = gauge_rows("waiting", [(t * MS, 34.0 if 200 <= t <= 600 else 0.0) for t in range(0, 1001, 100)])
    a = device_account(make_run([_row(0, 10, 100, 100, engine_prefill_ms=10)], readings=queue), 0, 1000 * MS)
    assert _ms(a) == {"prefill_busy": 10, "decode_busy": 90, "idle_no_work": 500, "unknown": 400}
    late = gauge_rows("running", [(t * MS, float(t in (100, 300))) for t in range(0, 1001, 100)])
    a = device_account(make_run([_row(0, 10, 100, 100, engine_prefill_ms=10)], readings=late), 0, 1000 * MS)
    assert a.ns["idle_no_work"] == 900 * MS
    ours = gauge_rows("running", [(t * MS, float(t <= 600)) for t in range(0, 1001, 100)])
    a = device_account(make_run([_row(0, 10, 550, 550, engine_prefill_ms=10)], readings=ours), 0, 1000 * MS)
    assert a.ns["idle_no_work"] == 450 * MS  # the last reading with work is of a stretch in which ours ended


def test_each_pool_of_a_split_service_has_its_own_requests():
    """One prefill engine of two devices, two decode engines of one. 100 ms without a request, two prefills of 50 ms one
    after the other, then both decode to 500 ms, the second with a hand-over of 20 ms."""
    rows = [_row(100, 150, 500, 500, engine_prefill_ms=50), _row(150, 220, 500, 500, engine_prefill_ms=50)]
    engine = {"devices": 4, "pools": {"prefill": [1, 2], "decode": [2, 1]}}
    a = device_account(make_run(rows, engine=engine), 0, 500 * MS)
    assert sum(a.ns.values()) == a.total_ns
    seen = _ms(a)
    assert seen["prefill_busy"] == 2 * 100
    assert seen["decode_busy"] == 350 + 280
    assert a.pool_idle_ns <= a.ns["idle_no_work"] - 4 * 100 * MS
    assert "the prefill pool 56 % of its time" in a.notes["idle_no_work"]
    assert unbalanced({"pool_idle": a.pool_idle_ns / a.total_ns, "notes": a.notes})
    assert not unbalanced({"pool_idle": 0.1, "notes": a.notes})
    other = device_account(make_run(rows, engine={**engine, "devices": 3}), 0, 500 * MS)  # not what it was told
    assert other.pool_idle_ns == 0
    assert "idle_no_work" not in other.notes


def test_an_engine_to_spare_in_a_pool_that_works_is_want_of_load_not_a_pool_without_requests():
    rows = [_row(0, 50, 500, 500, engine_prefill_ms=50)]
    engine = {"devices": 5, "pools": {"prefill": [1, 1], "decode": [4, 1]}}
    a = device_account(make_run(rows, engine=engine), 0, 500 * MS)
    seen = _ms(a)
    assert seen["decode_busy"] == 450
    assert a.pool_idle_ns == (450 + 4 * 50) * MS  # prefill while decode works, all of decode while prefill works
    assert a.ns["idle_no_work"] == a.pool_idle_ns + 3 * 450 * MS
