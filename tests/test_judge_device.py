"""What the device, and the threads that feed it, are held up by: said with the figure it rests on, or not at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.test_judge_causes import at, holds, of, pair, read, shared, the, threads
from whywait.core.run import Run


def gpu(run: Run, **levels: Any) -> Run:
    """Busy all the time, as one GPU says."""
    return read(run, at(run, {"busy_share": 1.0, **levels}, "gpu", gpu="0"))


def test_lowered_clocks_are_throttling_by_as_much_as_they_are_lower() -> None:
    run = pair()
    for clock, share in ((1.0e9, 0.5), (1.6e9, 0.2)):
        v = the(gpu(run, throttle_power=1.0, sm_clock_hz=clock, sm_clock_max_hz=2e9), "throttling")
        assert (v.of, v.share) == ("device time", pytest.approx(share, abs=0.02))
        assert "below their highest" in v.evidence[0]
    assert "throttling" not in holds(gpu(run, throttle_power=1.0, sm_clock_hz=1.98e9, sm_clock_max_hz=2e9))
    assert "throttling" not in holds(gpu(run, sm_clock_hz=1.0e9, sm_clock_max_hz=2e9))  # no reason was set


def linked(devices: int, bytes_per_s: float) -> Run:
    run = pair()
    m = dataclasses.replace(run.manifest, engine={**run.manifest.engine, "devices": devices},
                            machine={"gpus": ["NVIDIA H100 80GB HBM3"] * devices})  # fmt: skip
    return read(dataclasses.replace(run, manifest=m), at(run, {"nvlink_tx_bytes_total": ("rate", bytes_per_s)}, "gpu"))


def test_data_of_the_neighbours_by_the_bytes_that_the_links_carried() -> None:
    for rate, share in ((90e9, 0.2), (180e9, 0.4)):  # of 450 GB/s
        v = the(linked(2, rate), "interconnect")
        # Of the time with work, by all of the device's time: two devices share the bytes.
        assert v.share == pytest.approx(share / 2, rel=0.1)
        assert "450 GB/s" in v.evidence[0]
        assert "--tensor-parallel-size" in v.lever
    assert "interconnect" not in holds(linked(2, 9e9))
    assert "interconnect" not in holds(linked(1, 180e9))


def test_a_serving_process_that_wants_a_core_all_the_time() -> None:
    run = pair()
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    for ran, wanted in ((0.8, "wanted a core 9"), (0.4, "wanted a core 6")):
        own = threads(run, "process/engine", VLLM_Worker=(0.3, 0.0), python=(ran, 0.25 - 0.1 * (ran > 0.5)))
        v = the(read(run, own, busy), "host CPU")
        assert f"(python) {wanted}" in v.evidence[0]  # in per cent; at its ends the point was not read
        assert v.share == pytest.approx(ran / (ran + 0.3), abs=0.06)  # of the time in which the engine works
    calm = threads(run, "process/engine", VLLM_Worker=(0.3, 0.0), python=(0.3, 0.1))
    assert "host CPU" not in holds(read(run, calm, busy))


def test_who_has_the_cores_is_said_or_said_to_be_unknown() -> None:
    run = pair()
    spent = threads(run, "process/engine", a=(0.5, 0.5), b=(0.5, 0.5))
    alone = read(run, spent, at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host"))
    assert "mostly for each other or this client" in the(alone, "noisy neighbour", "undecided").claim
    unseen = the(read(run, spent), "noisy neighbour", "undecided")
    assert "was not read" in unseen.claim
    assert (unseen.share, unseen.gain) == (pytest.approx(0.5, abs=0.1), "")


def test_what_keeps_more_of_a_prefix_is_named_by_the_engines_own_flags() -> None:
    run = shared(0.03, groups=6)
    ways = [v.lever for v in of(run, "vllm") if v.cause == "prefix-cache thrash"]
    others = [v.lever for v in of(run, "llama.cpp") if v.cause == "prefix-cache thrash"]
    assert "--gpu-memory-utilization" in ways[0]
    assert "--gpu-memory-utilization" not in others[0]
    assert "--parallel" in others[0]
