"""The trial of the ranking of machines counts as it says; a part of the record, where it lies beside the repository."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import validate_plan as tool
from validate_plan import Case, Pair, pairs_of, text
from whywait.errors import UsageError

RECORD = Path(__file__).resolve().parents[2] / "shared" / "measured"


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


def test_of_an_mi250_one_half_is_taken():
    whole, half = tool.machine("mi250"), tool._device("mi250")
    assert half.memory_bytes == whole.memory_bytes / 2
    assert half.read_bytes_per_s == whole.read_bytes_per_s / 2
    assert tool._device("h100") is tool.machine("h100")


@pytest.mark.skipif(not (RECORD / "e2e_silicon.csv").is_file(), reason="the record is not beside the repository")
@pytest.mark.parametrize("table", ["mlperf", "e2e"])
def test_a_part_of_the_record(table):
    with tool.operations_only():
        found = pairs_of(table, tool.TABLES[table](RECORD), 12, lambda _: None)
    assert len(found) >= 8
    assert sum(p.right for p in found) >= tool.ASKED * len(found)
