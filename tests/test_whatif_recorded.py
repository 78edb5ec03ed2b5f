"""What-ifs against engines that really were changed: the runs kept in ``data/whatif``, recorded by
``tools/record_here.py``. ``tools/validate_here.py`` makes the whole table (docs/simulator.md); here is a part of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import validate_here as v
from whywait.core.run import Run
from whywait.sim import kernel
from whywait.sim.state import Load, Pool, Result

#: Of the errors of goodput that the table holds, rounded up: a simulator that does worse has lost something.
MOST = 0.15
DRAWS = 4  # of what is not known: medians are asked here, not intervals


def chosen(engine: str) -> list[v.Case]:
    """Each kind of change once: the heaviest load from the lightest, more places, a prefix cache."""
    return [c for c in v.cases([engine]) if c.load != "concurrency=16" and "2 places" not in c.what]


@pytest.fixture(scope="module", params=["llama", "vllm"])
def found(request: pytest.FixtureRequest) -> list[v.Row]:
    return [row for case in chosen(request.param) for row in v.rows(case, repeats=["b"], seeds=DRAWS)]


def test_every_change_goes_the_way_it_went(found: list[v.Row]) -> None:
    told = [r for r in found if r.direction is not None]
    assert {r.case.what for r in told} == {r.case.what for r in found}
    assert [(r.case.what, r.load, r.metric) for r in told if not r.direction] == []


def test_goodput_is_within_its_bound(found: list[v.Row]) -> None:
    good = [r for r in found if r.metric == v.GOODPUT]
    assert len(good) >= 7
    assert [(r.case.what, r.load, f"{r.error:+.1%}") for r in good if not r.inside] == []
    assert sorted(abs(r.error) for r in good)[len(good) // 2] < MOST


def test_a_simulator_without_its_prefix_cache_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = kernel.run

    def forgetful(load: Load, pools: Sequence[Pool], *more: Any) -> Result:
        return run(load, [pool._replace(prefix_cache=False) for pool in pools], *more)

    monkeypatch.setattr(kernel, "run", forgetful)
    (case,) = [c for c in v.cases(["llama"]) if c.change == "prefix-cache=on"]
    good = [r for r in v.rows(case, repeats=["b"], seeds=DRAWS) if r.metric == v.GOODPUT]
    assert good
    assert not any(r.inside or r.direction for r in good)


def test_the_kept_runs_say_how_they_were_made() -> None:
    for case in v.cases():
        for repeat in v.REPEATS:
            run = Run.load(v.KEPT / f"{case.before}-{repeat}")
            assert run.manifest.made_by == "measured"
            assert (run.requests["outcome"] == 0).all()
            assert len(run.points) >= 3


def row(**changed: float) -> v.Row:
    case = v.Case("llama", "places", "x", "y")
    plain = v.Row(case, "a", "concurrency 4", v.GOODPUT, 10.0, 20.0, 0.05, 19.0, 15.0, 24.0, 1.9, "better")
    return dataclasses.replace(plain, **changed)


def test_a_row_is_held_to_the_larger_of_bound_and_noise() -> None:
    assert row().inside
    assert row().direction
    assert not row(predicted=16.9).inside
    assert row(predicted=16.9, noise=0.1).bound == pytest.approx(2 * math.expm1(0.1))
    assert row(predicted=16.9, noise=0.1).inside
    assert row(predicted=9.9, change=0.99).direction is False
    assert row(change=1.005).direction is False, "hardly any change is none"
    assert row(measured=10.9).direction is None, "no further than twice the noise"


def test_the_table_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{v.BEGIN}\nstale figures\n{v.END}\nafter\n")
    v.write(v.table([row(), row(metric=v.TTFT, predicted=21.0)]), page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{v.END}\nafter\n")
    assert "stale figures" not in text
    assert "| llama | places (a) | concurrency 4 | 10.0 → 20.0 |" in text
    assert "-5.0%" in text
