"""``--fail-if``: a condition that cannot be told to be false is not passed, and one that makes no sense is named."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis_runs import Service
from whywait.analyze.against import figure_of
from whywait.analyze.summary import summarize
from whywait.errors import UsageError
from whywait.judge.gates import Gate, failed_gates, parse_gates

OPS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


def _summary(*points: dict[str, object]) -> dict[str, object]:
    return {"points": [{"mode": "concurrency", "target": 4.0, **p} for p in points]}


def _failed(text: str, *points: dict[str, object]) -> list[str]:
    return failed_gates(parse_gates([text]), _summary(*points))


@pytest.mark.parametrize(
    ("text", "path", "op", "limit"),
    [
        ("ttft_ms.p95>500", ("ttft_ms", "p95"), ">", 500),
        (" goodput_share <  0.95 ", ("goodput_share",), "<", 0.95),
        ("counts.ok<=3", ("counts", "ok"), "<=", 3),
        ("power_w>=1e3", ("power_w",), ">=", 1000),
        ("kv_use>-1.5e-1", ("kv_use",), ">", -0.15),
    ],
)
def test_conditions_are_read(text, path, op, limit):
    assert parse_gates([text]) == [Gate(text.strip(), path, op, limit)]


@pytest.mark.parametrize(
    "text",
    ["", "ttft_ms.p95", "ttft_ms.p95>", ">500", "ttft_ms.p95=500", "ttft_ms.p95==500", "ttft_ms.p95>fast",
     "ttft_ms.p95>5ms", "ttft_ms.p95>nan", "a<1<2", "a>1 and b>2", "9a>1", "TTFT>1", "a><1", "a>1e", "a>-", "a>1.2.3"],
)  # fmt: skip
def test_what_is_no_condition_is_named_with_an_example(text):
    with pytest.raises(UsageError) as caught:
        parse_gates(["goodput_share<0.9", text])
    assert repr(text) in caught.value.message
    assert "ttft_ms.p95>500" in caught.value.hint


@given(st.sampled_from(list(OPS)), st.integers(-3, 3), st.integers(-3, 3))
def test_a_run_fails_exactly_when_the_condition_is_true(op, value, limit):
    failed = _failed(f"x{op}{limit}", {"x": value})
    assert len(failed) == OPS[op](value, limit)
    if failed:
        assert failed == [f"x is {value} at concurrency 4 (x{op}{limit})"]


@given(st.sampled_from(list(OPS)), st.floats(-1e6, 1e6).map(str))
def test_unknown_never_passes(op, limit):
    """Rule 2: no samples is no pass, whichever way the condition points."""
    for path, point in (("x", {"x": None}), ("x.p95", {"x": {"p95": None, "n": 0}})):
        (said,) = _failed(f"{path}{op}{limit}", point)
        assert said.startswith(f"{path} is unknown at concurrency 4")
        assert "does not pass" in said


def test_every_gate_is_asked_of_every_point():
    points = [
        {"x": 1, "y": 1, "target": 1.0},
        {"x": 9, "y": None, "target": 8.0},
        {"x": 9, "y": 0, "mode": "rate", "target": 0.5},
    ]
    said = failed_gates(parse_gates(["x>5", "y<1"]), _summary(*points))
    assert [line.split(" (")[0].split(",")[0] for line in said] == [
        "x is 9 at concurrency 8", "x is 9 at rate 0.5", "y is unknown at concurrency 8", "y is 0 at rate 0.5",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["z>1", "x.p95.deeper>1", "x.p66>1", "y.p95>1"])
def test_a_key_that_no_summary_has_is_named(text):
    with pytest.raises(UsageError, match="a summary has no") as caught:
        _failed(text, {"x": {"p95": 1.0}, "y": 2})
    assert repr(text.split(">")[0]) in caught.value.message


@pytest.mark.parametrize("text", ["x>1", "mode>1", "label<2"])
def test_a_key_that_is_no_number_is_named(text):
    with pytest.raises(UsageError, match="is not a number"):
        _failed(text, {"x": {"p95": 1.0}, "label": "mixed"})


def test_no_gates_no_failure():
    assert failed_gates([], _summary({"x": 1})) == []
    assert failed_gates([], _summary()) == []


def test_where_nothing_was_measured_no_gate_passes():
    """``whywait show --fail-if`` on a run that was cut off before its first point: rule 2 again."""
    (said,) = _failed("x>5")
    assert "does not pass" in said


def test_a_point_without_a_target_can_fail_too():
    """The target of a replayed trace is null."""
    assert len(_failed("x>5", {"x": 9, "mode": "trace", "target": None})) == 1


def test_the_documented_examples_work_on_a_real_summary():
    summary = summarize(Service(slots=2).closed(4, 40))
    assert failed_gates(parse_gates(["goodput_share<0.95", "ttft_ms.p95>500000"]), summary) == []
    assert len(failed_gates(parse_gates(["ttft_ms.p50>1", "counts.ok>=40", "power_w>1"]), summary)) == 3


def test_a_gate_names_its_figure_and_unit():
    said = [_failed(f"{name}>0.5", {name: 2.14091}) for name in ("queue", "goodput_share", "x")]
    assert [s.partition(" at concurrency 4")[0] for (s,) in said] == [
        "engine queue, mean: 2.141 requests", f"{figure_of('goodput_share').title}: 214.1 %", "x is 2.14091",
    ]  # fmt: skip
