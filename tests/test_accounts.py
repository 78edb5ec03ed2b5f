"""The parts of both accounts: by latency and class, by roofline, by the device's readings, by thinking."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, messy_runs, stream
from whywait.analyze.occupancy import device_account
from whywait.analyze.parts import by_class, by_latency
from whywait.analyze.phases import account
from whywait.analyze.roofline import apportion, roofline
from whywait.analyze.summary import summarize
from whywait.analyze.thinking import thinking
from whywait.core.run import Run

SHAPE = {"params": 1e8, "weight_bytes": 1e8, "kv_values": 1e4, "attention": 1e4, "layers": 10}
RATES = {"read_bytes_per_s": 1e10, "f32_flops_per_s": 1e11, "how": "by decree"}


def _parts(run, keep=None):
    one = run.point(0)
    keep = np.ones(len(one.requests), dtype=bool) if keep is None else keep
    return by_latency(one, account(run), keep)


def test_what_the_slowest_wait_for_is_not_what_the_median_does():
    # Nine find the place free; the tenth waits behind all of them.
    service = Service(slots=1, prefill_ms=10, gap_ms=1, tokens=8)
    run = service.open([1000 * MS] * 98 + [0, 0])
    bands = {b["band"]: b for b in _parts(run)["e2e_ms"]}
    assert [b["requests"] for b in bands.values()] == [50, 40, 9, 1]
    assert bands["p0-50"]["phases"]["queue"] == 0
    assert bands["p99+"]["phases"]["queue"] == pytest.approx(34, abs=1)
    assert bands["p99+"]["causes"]["queue"] == {"slot limit": bands["p99+"]["phases"]["queue"]}
    ttft = {b["band"]: b for b in _parts(run)["ttft_ms"]}
    assert ttft["p99+"]["phases"]["decode"] == 0
    assert ttft["p99+"]["mean_ms"] == pytest.approx(ttft["p99+"]["to_ms"])


@settings(max_examples=150)
@given(messy_runs(orderly=False))
def test_bands_hold_each_request_once_and_add_up(run):
    acc = account(run)
    for number in run.points["point"].tolist():
        one = run.point(number)
        found = by_latency(one, acc, np.ones(len(one.requests), dtype=bool))
        for bands in found.values():
            assert sum(b["requests"] for b in bands) <= len(one.requests)
            edges = [e for b in bands for e in (b["from_ms"], b["to_ms"])]
            assert edges == sorted(edges)
            for b in bands:
                assert sum(b["phases"].values()) == pytest.approx(b["mean_ms"], abs=1e-6)
                assert all(sum(c.values()) <= b["phases"][p] + 1e-6 for p, c in b["causes"].items())


def test_classes_have_accounts_of_their_own():
    run = Service(slots=2).closed(4, 40)
    names = np.array(["long" if i % 4 == 0 else "short" for i in range(40)], dtype=object)
    mixed = Run(run.manifest, run.points, run.requests.replace(**{"class": names}), run.chunks, run.steps, run.readings)
    found = by_class(mixed.point(0), account(mixed), np.ones(40, dtype=bool))
    assert {k: v["requests"] for k, v in found.items()} == {"long": 10, "short": 30}
    assert by_class(run.point(0), account(run), np.ones(40, dtype=bool)) == {}
    whole = summarize(mixed)["points"][0]
    assert set(whole["by_class"]) == {"long", "short"}


def _known(run, **engine):
    m = run.manifest
    own = dataclasses.replace(m, engine={**m.engine, "model_shape": SHAPE, **engine}, machine={"engine_rates": RATES})
    return Run(own, run.points, run.requests, run.chunks, run.steps, run.readings)


def test_mbu_and_mfu_by_hand():
    run = _known(Service(slots=1, prefill_ms=50, gap_ms=20).closed(1, 30))
    found = roofline(run, 0)
    held = 100 + 16 / 2
    reads = 1e8 + held * 1e4 * 2
    assert found["mbu"]["decode"] == pytest.approx(reads / 0.020 / 1e10, rel=1e-3)
    assert found["mfu"]["decode"] == pytest.approx((2e8 + 4e4 * held) / 0.020 / 1e11, rel=1e-3)
    assert found["mfu"]["prefill"] == pytest.approx(100 * (2e8 + 4e4 * 50) / 0.050 / 1e11, rel=1e-3)
    assert found["mbu"]["how"] == "modelled"
    assert "by decree" in found["mbu"]["of"]


def test_a_step_is_calibrated_on_one_sequence_and_missed_by_what_it_says():
    single = Service(slots=1, prefill_ms=50, gap_ms=20).closed(1, 30)
    four = Service(slots=4, prefill_ms=50, gap_ms=40).closed(4, 60)
    run = _known(join([single, four]))
    one, wide = (roofline(run, n)["decode_step"] for n in (0, 1))
    assert one["error"] is None
    assert one["modelled_ms"] == pytest.approx(20, rel=1e-6)
    assert one["shares"]["other"] == pytest.approx(0, abs=1e-9)
    assert wide["error"] == pytest.approx(wide["modelled_ms"] / 40 - 1)
    assert wide["shares"]["compute"] > one["shares"]["compute"]
    assert sum(wide["shares"].values()) == pytest.approx(1)
    assert wide["calibrated"]


def test_without_a_single_sequence_a_step_is_not_calibrated():
    step = roofline(_known(Service(slots=4, prefill_ms=50, gap_ms=40).closed(4, 60)), 0)["decode_step"]
    assert step["calibrated"] is False
    assert step["error"] == pytest.approx(step["modelled_ms"] / 40 - 1)
    assert step["modelled_ms"] > 1e8 / 1e10 * 1e3  # the weights alone


def test_prefill_is_of_the_prompts_of_its_own_point():
    slow, fast = Service(slots=1, prefill_ms=50).closed(1, 30), Service(slots=1, prefill_ms=25).closed(2, 30)
    run = _known(join([slow, fast]))
    each = 100 * (2e8 + 4e4 * 50) / 1e11
    assert [roofline(run, n)["mfu"]["prefill"] for n in (0, 1)] == pytest.approx([each / 0.050, each / 0.025], rel=1e-3)


def test_prompts_whose_windows_overlap_are_read_weights_for_once():
    alone, together = (Service(slots=n, prefill_ms=50).closed(n, 40) for n in (1, 4))
    run = _known(join([alone, together]))
    one, four = (roofline(run, n)["mbu"]["prefill"] for n in (0, 1))
    assert one == pytest.approx(1e8 / 0.050 / 1e10, rel=1e-3)
    assert four <= one * (1 + 1e-9)  # counted for each prompt it would be four times that


def test_engines_that_share_the_load_have_each_their_part_of_the_machine():
    run = _known(Service(slots=4, gap_ms=20).closed(4, 80))
    spread = run.requests.replace(replica=np.arange(80, dtype=run.requests["replica"].dtype) % 2)
    two = roofline(Run(run.manifest, run.points, spread, run.chunks, run.steps, run.readings), 0)
    one = roofline(run, 0)
    assert two["decode_step"]["batch"] == pytest.approx(one["decode_step"]["batch"] / 2, rel=0.05)
    step = two["decode_step"]["step_ms"] / 1e3
    context = 100 + 16 / 2
    reads = 1e8 + two["decode_step"]["batch"] * context * 1e4 * 2
    assert two["mbu"]["decode"] == pytest.approx(reads / step / (1e10 / 2), rel=1e-2)


def _counted(concurrency, seconds):
    """Stages are not told; a counter of prefill seconds is, which grew by so many."""
    run = _known(Service(slots=1, prefill_ms=50).closed(concurrency, 30))
    end = int(run.points["end_ns"][0])
    rows = [] if seconds is None else gauge_rows("prefill_seconds_total", [(0, 7.0), (end + S, 7.0 + seconds)])
    told = run.requests.replace(engine_prefill_ms=np.full(30, np.nan))
    return Run(run.manifest, run.points, told, run.chunks, run.steps, make_run([], readings=rows).readings)


def test_prefill_of_one_at_a_time_is_also_known_by_a_counter():
    each = 100 * (2e8 + 4e4 * 50) / 1e11
    for seconds in (1.5, 3.0):
        found = roofline(_counted(1, seconds), 0)
        assert found["mfu"]["prefill"] == pytest.approx(30 * each / seconds, rel=1e-3)
        assert found["mbu"]["prefill"] == pytest.approx(30 * 1e8 / seconds / 1e10, rel=1e-3)
    for run in (_counted(2, 1.5), _counted(1, None)):  # the counter holds others' decode; there is none
        assert roofline(run, 0)["mfu"]["prefill"] is roofline(run, 0)["mbu"]["prefill"] is None


@pytest.mark.parametrize(
    ("told", "weights", "each"),
    [({}, 1e8, 2), ({"kv_dtype": "fp8"}, 1e8, 1), ({"cache_dtype": "f32"}, 1e8, 4), ({"cache_dtype": "auto"}, 1e8, 2),
     ({}, 4e8, 4)],
)  # fmt: skip
def test_kv_is_read_in_the_type_that_the_engine_holds_it_in(told, weights, each):
    shape = {**SHAPE, "weight_bytes": weights}
    run = _known(Service(slots=1, gap_ms=20).closed(1, 30), model_shape=shape, **told)
    reads = weights + (100 + 16 / 2) * 1e4 * each
    assert roofline(run, 0)["mbu"]["decode"] == pytest.approx(reads / 0.020 / 1e10, rel=1e-4)


def test_without_model_or_machine_nothing_is_modelled():
    run = Service(slots=1).closed(1, 20)
    found = roofline(run, 0)
    assert found["decode_step"] is None
    assert found["mbu"] == {"prefill": None, "decode": None, "device": None, "how": "unknown",
                            "of": "the model's shape and the machine's rates not known"}  # fmt: skip


def test_a_gpu_is_taken_at_its_data_sheet():
    run = Service(slots=1, gap_ms=5).closed(1, 30)
    own = dataclasses.replace(run.manifest, engine={"model_shape": SHAPE}, machine={"gpus": ["NVIDIA H100 80GB HBM3"]})
    found = roofline(Run(own, run.points, run.requests, run.chunks, run.steps, run.readings), 0)
    assert "H100 SXM" in found["mbu"]["of"]
    assert found["mbu"]["decode"] == pytest.approx(1e8 / 0.005 / 3.35e12, rel=0.05)


def test_what_the_devices_counters_say_stands_beside_the_model():
    run = Service(slots=1).closed(1, 20)
    assert roofline(run, 0)["mbu"]["device"] is None
    end = int(run.points["end_ns"][0])
    rows = [r for name, v in (("dram_active_share", 0.6), ("tensor_active_share", 0.1))
            for r in gauge_rows(name, [(t, v) for t in range(S, end, 100 * MS)], "gpu/0")]  # fmt: skip
    read = make_run([], readings=rows).readings
    found = roofline(Run(run.manifest, run.points, run.requests, run.chunks, run.steps, read), 0)
    assert (found["mbu"]["device"], found["mfu"]["device"]) == (pytest.approx(0.6), pytest.approx(0.1))


@given(st.integers(0, 10**15), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_apportioning_is_exact(total, shares):
    found = apportion(total, {str(i): v for i, v in enumerate(shares)})
    assert sum(found.values()) == total
    assert all(v >= 0 for v in found.values())


def test_the_summary_splits_decode_exactly():
    p = summarize(_known(Service(slots=1).closed(1, 30)))["points"][0]
    assert sum(p["occupancy"]["decode"].values()) == pytest.approx(p["occupancy"]["shares"]["decode_busy"])
    assert {"weight reads", "KV reads", "compute"} <= set(p["phases"]["decode"]["causes"])
    assert sum(p["phases"]["decode"]["causes"].values()) <= 1 + 1e-9


def _busy(readings, **more):
    """One request: prefill for 100 ms, decode for 900."""
    row = {"sent_ns": 0, "first_ns": 100 * MS, "last_ns": 1000 * MS, "end_ns": 1000 * MS, "engine_prefill_ms": 100}
    run = make_run([row], readings=readings, **more)
    a = device_account(run, 0, 1000 * MS)
    assert sum(a.ns.values()) == a.total_ns
    return a, {k: v / MS for k, v in a.ns.items() if v}


def _grown(name, by, source="process/engine"):
    return gauge_rows(name, [(0, 1.0), (1000 * MS, 1.0 + by)], source)


def test_a_quota_takes_its_time_out_of_busy():
    a, ms = _busy(_grown("cgroup_throttled_seconds_total", 0.4), engine={"threads": 2})
    assert ms == {"prefill_busy": 80, "decode_busy": 720, "throttled": 200}
    assert a.how["throttled"] == "derived"
    assert "quota" in a.notes["throttled"]


def test_threads_without_a_core_leave_the_device_idle():
    wait = _grown("run_queue_wait_seconds_total", 0.3)
    a, ms = _busy([*wait, *_grown("cpu_seconds_total", 0.6)], engine={"threads": 1})
    assert ms == {"prefill_busy": 70, "decode_busy": 630, "idle_host": 300}
    # Threads that do not compute wait too: what the engine had of CPU time was busy.
    long = _grown("run_queue_wait_seconds_total", 9.0)
    assert _busy([*long, *_grown("cpu_seconds_total", 0.6)], engine={"threads": 1})[1]["idle_host"] == 400
    assert "idle_host" not in _busy(wait, engine={"threads": 1})[1]
    assert a.how["idle_host"] == "derived"
    assert _busy(_grown("run_queue_wait_seconds_total", 0.3))[1] == {"prefill_busy": 100, "decode_busy": 900}


def test_a_gpu_that_runs_no_kernel_is_idle_with_work_in_flight():
    readings = gauge_rows("busy_share", [(t * MS, 0.6) for t in range(0, 1001, 100)], "gpu")
    a, ms = _busy(readings)
    assert ms == {"prefill_busy": 60, "decode_busy": 540, "idle_host": 400}
    assert (a.busy_low_ns, a.busy_high_ns) == (600 * MS, 600 * MS)


def test_a_gpu_that_hardly_runs_while_work_goes_on_says_nothing_of_it():
    readings = gauge_rows("busy_share", [(t * MS, 0.005) for t in range(0, 1001, 100)], "gpu")
    assert "idle_host" not in _busy(readings)[1]


def test_a_gpu_that_the_engine_does_not_use_is_not_its_device():
    times = range(0, 1001, 100)
    both = [*gauge_rows("busy_share", [(t * MS, 0.9) for t in times], "gpu", gpu="0"),
            *gauge_rows("busy_share", [(t * MS, 0.0) for t in times], "gpu", gpu="1")]  # fmt: skip
    assert _busy(both)[1]["idle_host"] == 100
    assert _busy(both, engine={"devices": 2})[1]["idle_host"] > 1000  # of two devices' time
    flag = gauge_rows("throttle_power", [(t * MS, 1.0) for t in times], "gpu", gpu="0")
    clocks = [r for gpu, hz in (("0", 2e9), ("1", 3e8))
              for name, value in (("sm_clock_hz", hz), ("sm_clock_max_hz", 2e9))
              for r in gauge_rows(name, [(t * MS, value) for t in times], "gpu", gpu=gpu)]  # fmt: skip
    assert not _busy([*both, *flag, *clocks])[1].get("throttled")  # the clock of the idle one is not its loss


def test_lowered_clocks_are_throttling_only_where_they_were_read():
    times = range(0, 1001, 100)
    flag = gauge_rows("throttle_power", [(t * MS, 1.0) for t in times], "gpu")
    busy = gauge_rows("busy_share", [(t * MS, 1.0) for t in times], "gpu")
    a, ms = _busy([*flag, *busy])
    assert "throttled" not in ms
    assert "at most 100%" in a.notes["throttled"]
    clocks = [*gauge_rows("sm_clock_hz", [(t * MS, 1.5e9) for t in times], "gpu"),
              *gauge_rows("sm_clock_max_hz", [(t * MS, 2e9) for t in times], "gpu")]  # fmt: skip
    assert _busy([*flag, *busy, *clocks])[1]["throttled"] == 250
    idle = gauge_rows("throttle_gpu_idle", [(t * MS, 1.0) for t in times], "gpu")
    assert "throttled" not in _busy([*idle, *busy, *clocks])[1]


def test_bytes_on_the_links_are_communication_at_least():
    readings = _grown("nvlink_tx_bytes_total", 45e9, "gpu")
    a, ms = _busy(readings, engine={"devices": 2}, machine={"gpus": ["NVIDIA H100 80GB HBM3"] * 2})
    assert ms["communication"] == pytest.approx(100)
    assert a.how["communication"] == "modelled"
    assert "communication" not in _busy(readings, engine={"devices": 2})[1]
    rate = gauge_rows("pcie_rx_bytes_per_s", [(t * MS, 6.4e9) for t in range(0, 1001, 100)], "gpu")
    _, ms = _busy(rate, engine={"devices": 2}, machine={"gpus": ["NVIDIA H100 PCIe"] * 2})
    assert ms["communication"] == pytest.approx(100)


def test_kv_space_blocks_what_waits_below_the_limit():
    times = [t * MS for t in range(0, 1001, 100)]
    full = gauge_rows("kv_use", [(t, 0.99) for t in times])
    waiting, running = (gauge_rows(n, [(t, v) for t in times]) for n, v in (("waiting", 2.0), ("running", 3.0)))
    a, _ = _busy([*full, *waiting, *running], engine={"slots": 8})
    assert a.kv_blocked_ns == pytest.approx(1000 * MS)
    assert _busy([*full, *waiting, *running], engine={"slots": 3})[0].kv_blocked_ns == 0
    assert _busy(waiting)[0].kv_blocked_ns is None
    late = {"sent_ns": 0, "first_ns": 900 * MS, "last_ns": 1000 * MS, "end_ns": 1000 * MS, "engine_prefill_ms": 100}
    a = device_account(make_run([late], readings=[*full, *waiting]), 0, 1000 * MS)
    assert a.ns["idle_kv_blocked"] == 800 * MS
    assert a.how["idle_kv_blocked"] == "inferred"


def test_the_share_that_thinking_takes():
    row = {"sent_ns": S, "due_ns": S, "first_ns": S + 100 * MS, "first_answer_ns": S + 700 * MS,
           "last_ns": S + 1100 * MS, "end_ns": S + 1100 * MS, "prompt_tokens": 100, "output_tokens": 100,
           "reasoning_tokens": 60}  # fmt: skip
    run = make_run([row], stream(0, [S + 100 * MS, S + 1100 * MS]))
    found = thinking(run, np.ones(1, dtype=bool), np.array([[100 * MS, 1000 * MS]]))
    assert found["time_share"] == pytest.approx(600 / 1100)
    spent = 100 * 600 + 60 * (300 + 400)
    assert found["kv_share"] == pytest.approx(spent / (100 * 1000 + 60 * 700 + 40 * 200))
    assert found["cost_share"] == pytest.approx(600 / 1100)
    plain = make_run([{**row, "reasoning_tokens": None, "first_answer_ns": row["first_ns"]}])
    assert thinking(plain, np.ones(1, dtype=bool))["kv_share"] is None
