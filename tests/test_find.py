"""``whywait find``: what is asked, how requests are judged while they run, and the whole journey on the stub."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.analysis_runs import messy_runs
from whywait import finding
from whywait.analyze.goodput import meets
from whywait.cli import main
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge import search
from whywait.judge.search import Rule
from whywait.judge.slo import parse_rules, scores
from whywait.load.stub import StubProcess
from whywait.report.knee import headline

MS = 1_000_000


def test_limits_with_and_without_their_own_share() -> None:
    rules = parse_rules("ttft=500ms@p95, tpot=50@99, e2e=10s, ttfa=1s", 0.9)
    assert rules == (
        Rule("ttft", {"ttft_ms": 500.0}, 0.95),
        Rule("tpot", {"tpot_ms": 50.0}, 0.99),
        Rule("e2e and ttfa", {"e2e_ms": 10_000.0, "ttfa_ms": 1000.0}, 0.9),
    )


@pytest.mark.parametrize("text", ["", "ttft", "speed=1s", "ttft=soon", "ttft=1s@p0", "ttft=1s@px", "itl=5ms", "ttft=0"])
def test_slo_mistakes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rules(text, 0.95)


def test_share_must_be_a_share() -> None:
    with pytest.raises(UsageError):
        parse_rules("ttft=1s", 95)


@pytest.mark.parametrize("limits", [{"ttft_ms": 200.0}, {"tpot_ms": 20.0}, {"e2e_ms": 900.0, "ttft_ms": 300.0}])
@given(run=messy_runs())
def test_scores_call_good_what_goodput_calls_good(limits: dict[str, float], run: Run) -> None:
    none = run.chunks.where(np.zeros(0, dtype=np.int64))
    bare = Run(run.manifest, run.points, run.requests, none, run.steps, run.readings)
    (score,) = scores(bare, [Rule("r", limits, 0.95)])
    assert ((score <= 1) == meets(bare, limits)).all()


def open_score(row: dict[str, Any], now_ms: float, **limits: float) -> float:
    base = {"due_ns": 0, "asked_output_tokens": 11}
    (score,) = finding._open({**base, **row}, (Rule("r", limits, 0.95),), round(now_ms * MS))
    return score


def test_open_requests_are_bad_once_they_surely_are() -> None:
    assert math.isnan(open_score({}, 400, ttft_ms=500.0))
    assert open_score({}, 600, ttft_ms=500.0) == pytest.approx(1.2)
    assert math.isnan(open_score({"first_ns": 450 * MS}, 5000, ttft_ms=500.0))  # its first token came in time
    assert open_score({}, 2000, e2e_ms=1000.0) == pytest.approx(2.0)
    assert math.isnan(open_score({"first_ns": 100 * MS}, 500, tpot_ms=50.0))
    assert open_score({"first_ns": 100 * MS}, 1100, tpot_ms=50.0) == pytest.approx(2.0)


def test_nothing_is_due_after_it_is_over() -> None:
    pacer = finding._Until(np.array([0, 10, 20], dtype=np.int64), 100)
    assert pacer.take(100) == (0, 100)
    pacer.over = lambda now: now >= 110
    assert pacer.take(110) is None
    assert pacer.wake_ns() is None


def test_headlines_are_intervals_or_say_what_is_not_known() -> None:
    base = {"low": 4.0, "high": 5.0, "decided": True, "why": "", "cut_short": ""}
    assert "between" in headline(base)
    assert "highest rate that was allowed" in headline({**base, "high": None})
    for low, high in ((4.0, None), (None, 5.0), (None, None)):
        said = headline({**base, "low": low, "high": high, "decided": False, "why": "the time budget ran out"})
        assert said.startswith("not decided in the budget")
        assert "the time budget ran out" in said


@pytest.fixture(scope="module")
def stub() -> Any:
    with StubProcess("--ttft-ms", "20", "--gap-ms", "5") as s:
        yield s


def journey(url: str, out: Path, *flags: str) -> int:
    short = ["--no-floor", "--json", "--strict", "--prompt-tokens", "8", "--output-tokens", "4", "--out", str(out)]
    return main(["find", url, *short, *flags])


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (search, finding):
        monkeypatch.setattr(module, "BLOCK_S", 1.0)


@pytest.mark.usefixtures("short_blocks")
def test_a_rate_that_is_kept(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that no busy box can miss, up to the highest rate allowed: one Run, a point per probe, and a yes."""
    code = journey(stub.url, tmp_path / "run", "--slo", "ttft=60s@p95,e2e=90s", "--max-rate", "40", "--budget", "60s")
    said = json.loads(capsys.readouterr().out)
    found = said["find"]
    assert found["low"] is not None
    assert found["high"] is None
    assert (found["decided"], code) == ((True, 0) if found["low"] == 40.0 else (False, 3))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["find"] == found
    run = Run.load(tmp_path / "run")
    assert violations(run) == []
    assert not run.manifest.partial
    targets = dict(zip(run.points["point"].tolist(), run.points["target"].tolist(), strict=True))
    assert all(targets[p["point"]] == p["rate"] for p in found["probes"])
    assert {p["answer"] for p in found["probes"]} <= {"yes", "undecided"}
    assert all(r["share"] == 1.0 for p in found["probes"] for r in p["rules"])
    # What was not sent when a probe ended was no plan; each probe began with nobody in flight.
    assert all(p["counts"]["never_sent"] == p["counts"]["censored"] == 0 for p in said["points"])
    assert (run.points["start_ns"][1:] >= run.points["end_ns"][:-1]).all()


@pytest.mark.usefixtures("short_blocks")
def test_a_limit_that_nothing_keeps(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stub's first token takes 20 ms: no rate keeps 5 ms, and that is said, not a rate of 0."""
    code = journey(stub.url, tmp_path / "run", "--slo", "ttft=5ms", "--budget", "16s")
    found = json.loads(capsys.readouterr().out)["find"]
    assert found["low"] is None
    assert found["high"] is not None
    assert (found["decided"], code) == (False, 3)
    assert found["probes"][0]["answer"] == "no"


def test_a_service_elsewhere_needs_a_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "http://192.0.2.1:9", "--slo", "ttft=1s"]) == 2
    assert "--max-rate" in capsys.readouterr().err


def test_find_needs_an_slo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "http://127.0.0.1:9"]) == 2
    assert "--slo" in capsys.readouterr().err
