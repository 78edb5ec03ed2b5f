"""The trial of the ranking of machines counts as it says; a part of the record, where it lies beside the repository."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import fit_stacks as stacks
import validate_plan as tool
import validate_plan_tables as tables
from validate_plan import Pair, pairs_of, text
from validate_plan_tables import Case
from validate_sim_fit import operations_only
from whywait.errors import UsageError
from whywait.physics.machines import machine

RECORD = Path(__file__).resolve().parents[2] / "shared" / "measured"

record = pytest.mark.skipif(
    not (RECORD / "e2e_silicon.csv").is_file(), reason="the record is not beside the repository"
)


def case(key: str, machine: str, measured: float, predicted: float, sd: float = 0.1) -> Case:
    return Case((key,), machine, measured, lambda: predicted, sd)


def test_only_machines_that_differ_enough_under_one_load_are_compared():
    cases = [case("a", "x", 100, 1.0), case("a", "y", 114, 2.0), case("a", "z", 200, 4.0), case("b", "x", 500, 1.0)]
    found = pairs_of("t", cases, None, lambda _: None)
    assert {p.machines for p in found} == {("x", "z"), ("y", "z")}
    assert all(p.right for p in found)


def test_a_row_measured_again_counts_once_by_its_median():
    cases = [case("a", "x", v, 1.0) for v in (90, 100, 400)] + [case("a", "y", 200, 0.5)]
    (p,) = pairs_of("t", cases, None, lambda _: None)
    assert p.measured == 0.5
    assert not p.right


def test_what_cannot_be_predicted_is_not_right():
    def never() -> float:
        raise UsageError("it does not fit")

    (p,) = pairs_of("t", [Case(("a",), "x", 1.0, never, 0.1), case("a", "y", 2.0, 1.0)], None, lambda _: None)
    assert math.isnan(p.predicted)
    assert not p.decided
    assert "| all | 1 | 0 | 0% |" in text([p])


@pytest.mark.parametrize(("predicted", "decided"), [(1.05, False), (1.5, True), (0.9, False), (0.6, True)])
def test_inside_the_error_nothing_is_decided(predicted, decided):
    assert Pair("t", ("x", "y"), 2.0, predicted, 0.2).decided is decided


def test_rows_that_set_a_figure_are_counted_apart():
    pairs = [Pair("t", ("x", "y"), 2.0, 3.0, 0.1, seen=True), Pair("t", ("x", "z"), 2.0, 0.5, 0.1)]
    said = text(pairs)
    assert "| all | 2 | 1 | 50% |" in said
    assert "| all, without rows that a figure of a machine was fitted on | 1 | 0 | 0% |" in said
    assert "| t: fitted on | 1 | 1 | 100% |" in said


def test_every_second_model_of_the_machine_is_fitted_on_and_no_other():
    def of(machine: str, model: str) -> Case:
        return Case(("argonne", "vllm", model), machine, 1.0, lambda: 1.0, 0.1)

    cases = [of(tables.STACKED, m) for m in "dacbb"] + [of("h100", "a0")]
    assert tables.fitted_half(cases) == {"a", "c"}


def test_the_stacks_count_once_each(monkeypatch):
    monkeypatch.setattr(stacks, "pairs", lambda _: {
        "one": [(0.5, lambda: 1.0, lambda: 1.0)], "many": [(1.0, lambda: 1.0, lambda: 1.0)] * 99})  # fmt: skip
    found = stacks.off(stacks.pairs(RECORD))
    assert [round(float(sum(v) / len(v)), 3) for v in found.values()] == [-0.693, 0.0]


def test_all_that_a_kernel_takes_is_scaled_and_no_launch():
    plain = stacks.shipped.fitted()["plain"]
    found = stacks.scaled(2.0)
    assert found["product"] == 2 * plain["mi"]["product"]
    assert found["decode"] == pytest.approx([2 * v for v in plain["default"]["decode"]], rel=0.01)
    assert found["launch"] == plain["mi"]["launch"]


@record
def test_what_ships_of_the_stacks_is_what_the_record_says():
    """The share that ships is where the mean of the stacks is level; neither is off by more than its scatter."""
    with operations_only():
        found = {k: float(np.median(v)) for k, v in stacks.off(stacks.pairs(RECORD)).items()}
    assert len(found) == 2
    assert abs(sum(found.values())) / 2 < 0.05
    assert all(abs(v) < machine("mi300x").scatter for v in found.values())


@record
@pytest.mark.parametrize(("table", "least"), [("mlperf", 16), ("e2e", 8), ("splitwise", 8), ("mlenergy", 8)])
def test_a_part_of_the_record(table, least):
    with operations_only():
        found = pairs_of(table, tables.TABLES[table](RECORD), 12, lambda _: None)
    assert len(found) >= least
    assert sum(p.right for p in found) >= tool.ASKED * len(found)


@record
def test_models_that_set_no_share_are_ranked_as_well():
    """MI300X against H100 on the models that its share was not fitted on."""
    cases = [c for c in tables.argonne(RECORD) if c.machine in ("mi300x", "h100") and c.key[4] in (128, 1024)]
    with operations_only():
        found = [p for p in pairs_of("argonne", cases, None, lambda _: None) if not p.seen]
    found = [p for p in found if "mi300x" in p.machines]
    assert len(found) > 10
    assert sum(p.right for p in found) >= tool.ASKED * len(found)
