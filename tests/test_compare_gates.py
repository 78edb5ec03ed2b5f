"""``--fail-if`` on a comparison: fails, passes or undecided, by the interval of the change and never by luck."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis_runs import Service
from tests.comparable_runs import noisy
from whywait.analyze.against import Change
from whywait.analyze.compare import DIFFERENCE, LOWER, RATIO, Metric
from whywait.analyze.student import quantile
from whywait.cli import main
from whywait.comparing import Options, compare
from whywait.errors import UsageError
from whywait.judge import change_gates
from whywait.judge.change_gates import FAILS, PASSES, UNDECIDED, parse

STEADY = "8 in flight, steady"


def call(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as exc:
        return int(exc.code or 0)


def states(a: Any, b: Any, *texts: str, **more: Any) -> list[str]:
    return [g["state"] for g in compare(a, [b], Options(gates=tuple(parse(texts)), **more))["gates"]]


@pytest.mark.parametrize(
    ("text", "figure", "kind", "op", "limit"),
    [
        ("goodput<-5%", "goodput_requests_per_s", "ratio", "<", -0.05),
        ("throughput < -5 %", "output_tokens_per_s", "ratio", "<", -0.05),
        ("ttft_ms.p95>+20ms", "ttft_ms.p95", "difference", ">", 20),
        ("e2e_ms.mean>=+1.5s", "e2e_ms.mean", "difference", ">=", 1500),
        ("ttft_ms.p95>+20", "ttft_ms.p95", "difference", ">", 20),
        ("ttft_ms.p95>+20us", "ttft_ms.p95", "difference", ">", 0.02),
        ("ttft_ms.p95>500us", "ttft_ms.p95", "level", ">", 0.5),
        ("ttft_ms.p95>10%", "ttft_ms.p95", "ratio", ">", 0.1),
        ("goodput_share<-2pp", "goodput_share", "difference", "<", -0.02),
        ("goodput_share<-0.02", "goodput_share", "difference", "<", -0.02),
        ("goodput_share<0.95", "goodput_share", "level", "<", 0.95),
        ("ttft_ms.p95>500", "ttft_ms.p95", "level", ">", 500),
        ("cost>+1e-3", "cost_per_good_request", "difference", ">", 0.001),
        ("causes.stall.neighbour's prefill>+10ms", "causes.stall.neighbour's prefill", "difference", ">", 10),
        ("occupancy.idle_host>+5pp", "occupancy.idle_host", "difference", ">", 0.05),
        (" worse ", "worse", "worse", "", 0),
    ],
)
def test_conditions_are_read(text, figure, kind, op, limit):
    (g,) = parse([text])
    assert (g.figure, g.kind, g.op) == (figure, kind, op)
    assert g.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    "text",
    ["", "goodput", "goodput<", "<-5%", "goodput<-5%%", "goodput=-5%", "goodput<--5%", "goodput<nan", "goodput<inf%",
     "goodput_share<-5%", "goodput<-5kg", "goodput<-20ms", "ttft_ms.p95>+2pp", "ttft_ms.p42>5", "speed<5%",
     "ttft_ms>5", "better", "goodput<-5% or worse", "goodput<1e999%", "goodput<-.%"],
)  # fmt: skip
def test_what_is_no_condition_is_named(text):
    with pytest.raises(UsageError) as caught:
        parse(["worse", text])
    assert "--fail-if" in caught.value.message


class Known:
    """A comparison of which one change is known."""

    def __init__(self, change: Change) -> None:
        self.found = change
        self.b = dataclasses.make_dataclass("P", ["load", "figures"])("concurrency 1", {change.name: change.b})

    def change(self, name: str) -> Change:
        assert name == self.found.name
        return self.found


OPS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


@given(st.sampled_from(list(OPS)), st.floats(-0.5, 0.5), st.floats(1e-3, 0.3), st.integers(-40, 40), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_a_gate_is_decided_where_its_whole_interval_lies_on_a_side(op, value, se, limit, share):
    """Told by the definition itself: what holds of every change inside the interval."""
    c = Change("ttft_ms.p50", Metric("TTFT", "ms", LOWER), 100.0, 100 * math.exp(value), RATIO, value, se, 11, "x", 9)
    (g,) = change_gates.judge(parse([f"ttft_ms.p50{op}{limit}%"]), [(Known(c), [])], share)
    half = quantile(1 - 0.05 / share, 11) * se
    inside = [math.exp(value + k * half / 50) - 1 for k in range(-50, 51)]
    true = [OPS[op](x, limit / 100) for x in inside]
    assert g["state"] == (FAILS if all(true) else PASSES if not any(true) else UNDECIDED)
    assert g["low"] == pytest.approx(inside[0])
    assert g["high"] == pytest.approx(inside[-1])


def test_a_ratio_as_a_difference_is_of_what_a_has():
    c = Change("ttft_ms.p50", Metric("TTFT", "ms", LOWER), 200.0, 260.0, RATIO, math.log(1.3), 0.01, 50, "x", 9)
    for text, state in (("ttft_ms.p50>+40ms", FAILS), ("ttft_ms.p50>+80ms", PASSES), ("ttft_ms.p50>+60ms", UNDECIDED)):
        (g,) = change_gates.judge(parse([text]), [(Known(c), [])], 1)
        assert g["state"] == state, text
        assert g["value"] == pytest.approx(60)
    c = dataclasses.replace(c, name="phases.queue", scale=DIFFERENCE, a=0.0, b=0.2, value=0.2, se=0.1)
    (g,) = change_gates.judge(parse(["phases.queue>10%"]), [(Known(c), [])], 1)
    assert (g["state"], g["why"].split(":")[0]) == (UNDECIDED, "phases.queue")  # of nothing there is no share


def test_all_three_states_on_runs_whose_truth_is_known():
    a, b = noisy(STEADY, 1), noisy(STEADY, 2, 0.2)
    found = states(a, b, "tpot_ms.p50>+10%", "tpot_ms.p50>+40%", "tpot_ms.p50>+20%", "worse", "tpot_ms.p50>1")
    assert found == [FAILS, PASSES, UNDECIDED, FAILS, FAILS]
    c = noisy(STEADY, 3)
    assert states(a, c, "worse", "tpot_ms.p50>+10%") == [UNDECIDED, PASSES]  # ten pieces bound requests/s by 12 %
    assert states(a, c, "worse", metrics=("tpot_ms.p50", "ttft_ms.p95", "output_tokens_per_s")) == [PASSES]


def test_more_gates_share_the_error():
    a, b = noisy("2 in flight, speed wanders 10 %", 1), noisy("2 in flight, speed wanders 10 %", 2)
    one = compare(a, [b], Options(gates=tuple(parse(["tpot_ms.p50>5%"]))))["gates"][0]
    many = compare(a, [b], Options(gates=tuple(parse(["tpot_ms.p50>5%", *["ttft_ms.p50>5%"] * 9]))))["gates"][0]
    assert many["high"] > one["high"]
    assert many["low"] < one["low"]
    assert many["value"] == one["value"]


def test_unknown_never_passes():
    a = Service().closed(4, 40)
    lost = dataclasses.replace(a, requests=a.requests.replace(outcome=np.full(40, 3, dtype=np.int8)))
    for text in ("ttft_ms.p50>+1000%", "ttft_ms.p50>1e9", "energy>+10%", "itl_ms.p99<-1e6"):
        assert states(a, lost, text) == [FAILS], text
        (g,) = compare(a, [lost], Options(gates=tuple(parse([text]))))["gates"]
        assert "does not pass" in g["why"]


def test_few_requests_are_undecided_and_one_reading_is_judged_by_its_value():
    a, b = Service().closed(4, 40), Service(prefill_ms=80).closed(4, 40)
    (g,) = compare(a, [b], Options(gates=tuple(parse(["ttft_ms.p99>+10%"]))))["gates"]
    assert g["state"] == UNDECIDED
    assert "too few" in g["why"]
    c = Change("memory_bytes", Metric("memory", "bytes", LOWER), 100.0, 120.0, RATIO, math.log(1.2), None, 1, "", 0)
    (g,) = change_gates.judge(parse(["memory_bytes>+10%"]), [(Known(c), [])], 1)
    assert (g["state"], g["low"]) == (FAILS, None)
    assert "by its value" in g["why"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    top = tmp_path_factory.mktemp("runs")
    noisy(STEADY, 1).save(top / "a")
    noisy(STEADY, 2, 0.2).save(top / "b")
    return str(top / "a"), str(top / "b")


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--fail-if", "tpot_ms.p50>+10%"], 1),
        (["--fail-if", "tpot_ms.p50>+10%", "--fail-if", "tpot_ms.p50>+20%", "--strict"], 1),
        (["--fail-if", "tpot_ms.p50>+40%"], 0),
        (["--fail-if", "tpot_ms.p50>+40%", "--strict"], 0),
        (["--fail-if", "tpot_ms.p50>+20%"], 0),
        (["--fail-if", "tpot_ms.p50>+20%", "--strict"], 3),
        ([], 0),
        (["--metric", "tpot_ms.p50", "--strict"], 0),
        (["--metric", "ttft_ms.p99", "--strict"], 3),
        (["--fail-if", "worse"], 1),
    ],
)
def test_exit_codes(argv, code, folders, capsys):
    assert call("compare", *folders, *argv) == code
    out = capsys.readouterr()
    assert "figure" in out.out  # the comparison is told whatever the gates say
    assert ("undecided: b" in out.err) == ("tpot_ms.p50>+20%" in argv)
    if code == 1:
        assert "fails at concurrency 8" in out.err


def test_the_example_and_the_page_use_conditions_that_exist():
    """What people copy must parse."""
    root = Path(__file__).parents[1]
    pages = [root / "docs" / "compare.md", *(root / "examples" / "03_performance_gate").iterdir()]
    texts = [t for p in pages for t in re.findall(r"--fail-if '([^']+)'", p.read_text())]
    assert len(texts) >= 5
    rows = re.findall(
        r"^\| `([^`]+)` \|", (root / "docs" / "compare.md").read_text().split("## Gates")[1], re.MULTILINE
    )
    assert len(parse([*texts, *rows[:5]])) == len(texts) + 5


@pytest.mark.parametrize(
    ("text", "times", "state"),
    [("ttft_ms.p50>+5ms", 4, UNDECIDED), ("ttft_ms.p50>+7.5ms", 2, UNDECIDED), ("ttft_ms.p50<-5ms", 4, UNDECIDED),
     ("ttft_ms.p50<-0.1ms", 0, UNDECIDED), ("ttft_ms.p50>+11ms", 0, PASSES)],
)  # fmt: skip
def test_what_is_undecided_says_how_much_more_would_decide(text, times, state):
    """Half the interval is 10 ms, the value 0: a limit 5 ms off needs a fourth of its variance."""
    se = 10 / quantile(0.95, 11)
    c = Change("ttft_ms.p50", Metric("TTFT", "ms", LOWER), 100.0, 100.0, DIFFERENCE, 0.0, se, 11, "x", 9)
    (g,) = change_gates.judge(parse([text]), [(Known(c), [])], 1)
    assert g["state"] == state
    assert (f"about {times} times the requests" in g["why"]) == bool(times)
    assert ("times the requests" in g["why"]) == bool(times)
