"""How a run's service was spread over devices: as the run says, and never as its memory cannot hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait import simulating
from whywait.core.run import Run
from whywait.core.schedule import Workload
from whywait.core.table import Table
from whywait.errors import UsageError
from whywait.judge import plan_told
from whywait.load.recipe import Load
from whywait.planning_space import Space, shapes_of
from whywait.planning_told import calibrated
from whywait.sim.loads import capacities_of
from whywait.twin.baseline import Baseline, baseline_of
from whywait.whatif import what_if

LOAD = {"prompt_tokens": "lognormal(800,0.6)", "output_tokens": "lognormal(150,0.5)"}


def make(out: Path, layout: str, model: str = "llama-3.1-8b", rates: tuple[float, ...] = (2.0, 5.0)) -> Run:
    d = simulating.deployment_of("h100", model, layout=layout)
    loads = tuple(Load("rate", r, 80) for r in rates)
    simulating.simulate(simulating.Plan(d, Workload.from_dict(dict(LOAD)), loads, draws=1, jobs=1, out=str(out)))
    return Run.load(out)


def told(run: Run, gpus: int, replicas: int = 1, readings: Table | None = None, **engine: Any) -> Run:
    """``run`` as a measurement of a service that somebody else started would tell it."""
    m = run.manifest
    kept = {k: v for k, v in m.engine.items() if k in ("name", "model", "model_shape", "kv_tokens")}
    machine = {"gpus": [{"name": "NVIDIA H100 80GB HBM3"}] * gpus, "engine_is_local": True}
    manifest = dataclasses.replace(m, made_by="measured", engine={**kept, **engine}, machine=machine)
    requests = run.requests.replace(replica=np.arange(len(run.requests)) % replicas)
    nothing = run.readings.where(np.zeros(len(run.readings), dtype=bool))
    return dataclasses.replace(run, manifest=manifest, requests=requests, readings=readings or nothing)


def busy(shares: list[float]) -> Table:
    rows = [{"asked_ns": t, "answered_ns": t, "source": "gpu/0", "name": "busy_share", "value": share,
             "labels": json.dumps({"gpu": str(i)})} for i, share in enumerate(shares) for t in (0, 10**9)]  # fmt: skip
    return Table.from_rows("readings", rows)


def devices(base: Baseline) -> list[tuple[str, str]]:
    return [(f.value, f.how) for f in base.facts if f.what == "devices"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make(tmp_path_factory.mktemp("spread") / "tp=2", "tp=2")


@pytest.mark.parametrize(
    "layout", ["tp=2", "pp=2", "dp=2", "tp=2,replicas=2", "tp=1,replicas=3", "pd=1:2", "tp=2,pd=1:1"]
)
def test_a_simulated_run_is_of_the_layout_that_was_simulated(tmp_path: Path, layout: str) -> None:
    d = simulating.deployment_of("h100", "llama-3.1-8b", layout=layout)
    base = baseline_of(make(tmp_path / "run", layout, rates=(3.0,)))
    got = base.deployment
    assert (got.layout, got.replicas, got.split, got.devices) == (d.layout, d.replicas, d.split, d.devices)
    assert devices(base)[0][1] == "run"
    # Places and KV space are of one engine, not of all of them together.
    assert got.engine.max_seqs == d.engine.max_seqs
    assert got.engine.kv_blocks == capacities_of(d)[-1].blocks


def test_the_users_word_goes_before_the_runs(two: Run) -> None:
    base = baseline_of(two, "pp=2")
    assert (base.deployment.layout.tp, base.deployment.layout.pp) == (1, 2)
    assert devices(base) == []


@pytest.mark.parametrize(
    ("engine", "replicas", "want", "how"),
    [
        ({"devices": 2, "devices_how": "the driver"}, 1, (2, 1, 1), "assumed"),
        ({"devices": 2, "devices_how": "its command", "layout": {"pp": 2}}, 1, (1, 2, 1), "run"),
        ({"devices": 4, "layout": {"tp": 2, "dp": 2}}, 1, (2, 1, 2), "run"),
        ({"devices": 4, "layout": {"tp": 2}}, 2, (2, 1, 1), "run"),
        ({"devices": 4, "layout": {"tp": 8}}, 2, (2, 1, 1), "assumed"),
    ],
)
def test_a_measured_run_is_of_the_devices_that_were_counted(
    two: Run, engine: dict[str, Any], replicas: int, want: tuple[int, int, int], how: str
) -> None:
    base = baseline_of(told(two, 8, replicas, **engine))
    at = base.deployment.layout
    assert (at.tp, at.pp, at.dp) == want
    assert base.deployment.replicas == replicas
    assert [h for _, h in devices(base)] == [how]


def test_one_gpu_that_is_read_among_several_does_not_say_how_many_served(two: Run) -> None:
    with pytest.raises(UsageError, match="names 4 devices") as caught:
        baseline_of(told(two, 4, readings=busy([0.9])))
    assert "--baseline tp=N" in (caught.value.hint or "")
    base = baseline_of(told(two, 4, readings=busy([0.9, 0.8, 0.0, 0.01])))
    assert base.deployment.layout.tp == 2
    assert devices(base) == [("tp=2", "assumed")]


def test_replicas_that_do_not_share_the_devices_alike_are_asked_for(two: Run) -> None:
    with pytest.raises(UsageError, match="3 devices and 2 replicas"):
        baseline_of(told(two, 4, 2, devices=3))


def test_what_the_memory_cannot_hold_is_never_taken(two: Run) -> None:
    """The KV space that this run tells is that of two devices."""
    with pytest.raises(UsageError, match=r"GB of KV .* are more than a device's 85 GB") as caught:
        baseline_of(told(two, 1))
    assert "--baseline tp=N" in (caught.value.hint or "")
    assert baseline_of(told(two, 1), "tp=2").deployment.devices == 2
    large = told(two, 1, model="llama-3.1-70b", model_shape=None, kv_tokens=None)
    with pytest.raises(UsageError, match="141 GB of weights"):
        baseline_of(large)
    assert baseline_of(large, "fp8-weights").deployment.devices == 1


def test_of_a_machine_with_several_kinds_the_engines_own_devices_count(two: Run) -> None:
    run = told(two, 0, devices=2, device_ids=[1, 2])
    run.manifest.machine["gpus"] = [{"name": "NVIDIA L4"}, *[{"name": "NVIDIA H100 80GB HBM3"}] * 2]
    assert baseline_of(run).deployment.machine.name == "H100 SXM"
    run.manifest.engine["device_ids"] = []
    with pytest.raises(UsageError, match="several kinds"):
        baseline_of(run)


def test_an_engine_on_the_processors_of_a_machine_with_gpus_is_not_on_them(two: Run) -> None:
    base = baseline_of(told(two, 2, devices=1, device_kind="cpu", kv_tokens=20_000))
    assert base.cpu
    assert base.deployment.devices == 1


def test_a_plan_says_which_service_it_took_a_run_for(two: Run, tmp_path: Path) -> None:
    """As two devices: the same run told to be of one calibrates nothing."""
    two.save(tmp_path / "own")
    space = Space("llama-3.1-8b", ("h100",), layouts=("tp=2",), apply=("",))
    (shape,), (story,) = calibrated([str(tmp_path / "own")], shapes_of(space)[0])
    assert shape.told is not None
    assert shape.told.before.layout.tp == 2
    assert "taken to be of meta-llama/Llama-3.1-8B (bf16, KV f16) on 2 × H100 SXM (tp=2)" in plan_told.said(story)
    counted = told(two, 8, devices=2, devices_how="the driver")
    counted.save(tmp_path / "counted")
    _, (story,) = calibrated([str(tmp_path / "counted")], shapes_of(space)[0])
    assert "(devices assumed: the driver; --baseline tp=N,pp=N to say else)" in plan_told.said(story)
    (shape,), (story,) = calibrated([str(tmp_path / "own")], shapes_of(space)[0], "tp=1")
    assert shape.told is None
    assert story["state"] == "not possible"


def test_a_what_if_of_a_service_on_several_devices_keeps_them(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "tp=2,replicas=2", rates=(3.0,))
    found = what_if(tmp_path / "run", apply="max-seqs=64", seeds=8)
    assert "4 × H100 SXM (tp=2, replicas=2)" in found.before
    assert run.manifest.engine["devices"] == 4
