"""What a simulated service says of its KV space, of a split that is impossible, and of requests that never end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from whywait import simulating
from whywait.core.schedule import Schedule, Workload
from whywait.errors import UsageError
from whywait.load.recipe import Load, schedule_of
from whywait.sim import techniques
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Options
from whywait.sim.result import Point, run_of
from whywait.sim.service import figures, run_point, simulate


@pytest.fixture(scope="module")
def small() -> Deployment:
    return simulating.deployment_of("h100", "llama-3.1-8b")


def plan(load: Load, **fields: object) -> Schedule:
    return schedule_of(load, Workload.from_dict(dict(fields)), 0, 0)[0]


def test_a_static_batch_cannot_be_split(small):
    d = techniques.apply("pd=1:1", dataclasses.replace(small, engine=simulating.engine_of("static")))
    with pytest.raises(UsageError, match="static batching has no split"):
        simulate(d, plan(Load("concurrency", 2, 4)), "concurrency", 2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_of_a_split_the_kv_that_waits_for_a_place_is_not_the_decode_engines(small, engine):
    """24 blocks a decode engine, and many more requests than it takes: its space is in use about as much as its steps
    say, never more than all of it."""
    d = techniques.apply("pd=1:1", dataclasses.replace(small, engine=simulating.engine_of(engine)))
    d = dataclasses.replace(d, engine=dataclasses.replace(d.engine, block=16, kv_blocks=200, prefix_cache=False))
    schedule = plan(Load("concurrency", 64, 200), prompt_tokens="400", output_tokens="100")
    told = figures(d, schedule, "concurrency", 64)
    prepared, found, _ = run_point(d, schedule, "concurrency", 64, options=Options(keep="chunks"))
    s = found.steps
    mine = s.replica >= prepared.settings.engines[0]
    seen = float((s.kv_used * s.took_s)[mine].sum() / s.took_s[mine].sum()) / 200
    assert seen > 0.5
    assert told["kv_use"] == pytest.approx(seen, abs=0.25)
    assert told["kv_use"] <= 1.0


def test_requests_that_never_end_are_said(small, tmp_path):
    """What stood still is told from what a limit of time cut off."""
    schedule, limited = plan(Load("concurrency", 4, 20)), Options(limit_s=2.0)
    point = run_point(small, schedule, "concurrency", 4, options=limited)
    assert np.isnan(point[1].last_s).any()
    cut = run_of(small, [Point("concurrency", 4, *point)], limited)
    assert not any("never ended" in d["what"] for d in cut.manifest.doubts)
    free = dataclasses.replace(point[0], settings=point[0].settings._replace(limit_s=np.inf))
    still = run_of(small, [Point("concurrency", 4, free, *point[1:])], Options(), {"doubts": []})
    said = [d["what"] for d in still.manifest.doubts if "never ended" in d["what"]]
    stuck = int(np.isnan(point[1].last_s).sum())
    assert said == [f"{stuck} of 20 requests at concurrency 4 never ended"]


def test_the_verb_says_it_first(small, tmp_path, monkeypatch):
    """A kernel that stands still: a line on top of what the figures rest on, and a doubt of the kept run."""

    def broken(*given: object, **named: object) -> object:
        prepared, found, times = run_point(*given, **named)
        last = found.last_s.copy()
        last[-3:] = np.nan
        return prepared, found._replace(last_s=last), times

    monkeypatch.setattr(simulating, "run_point", broken)
    asked = simulating.Plan(
        small, Workload(), (Load("concurrency", 4, 20),), draws=1, jobs=1, out=str(tmp_path / "run")
    )
    told = simulating.simulate(asked).as_dict()
    assert told["notes"][0].startswith("3 of 20 requests at concurrency 4 never ended")
    assert any("never ended" in d["what"] for d in told["summary"]["doubts"])
