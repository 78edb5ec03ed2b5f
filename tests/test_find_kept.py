"""What ``find`` found is in the Run: shown again as it was said, gated, and kept however the search ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whywait import finding
from whywait.cli import main
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge import search
from whywait.judge.gates import failed_gates, parse_gates
from whywait.load.stub import StubProcess
from whywait.report.knee import headline

SHORT = ["--no-floor", "--prompt-tokens", "8", "--output-tokens", "4"]


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "20", "--gap-ms", "5") as s:
        yield s


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (search, finding):
        monkeypatch.setattr(module, "BLOCK_S", 1.0)


def _answer(text: str) -> str:
    """From the headline to the table, and whether it was cut short; without where it is kept."""
    return text[: text.index("run kept in")].strip()


@pytest.mark.usefixtures("short_blocks")
def test_show_says_what_find_said_and_gates_hold(
    stub: StubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "r")
    flags = ["--slo", "ttft=5ms", "--budget", "8s", "--out", out]
    assert main(["find", stub.url, *SHORT, *flags, "--fail-if", "find.high<100"]) == 1
    said = capsys.readouterr()
    assert "find.high is" in said.err
    kept = json.loads((Path(out) / "summary.json").read_text())["find"]
    assert headline(kept) in said.out  # a busy box may leave even this undecided, and then that is what is shown again
    assert main(["show", out]) == 0
    assert _answer(capsys.readouterr().out) == _answer(said.out)
    # No rate is known to keep it, so no figure of such a point passes.
    assert main(["show", out, "--fail-if", "ttft_ms.p95>500"]) == 1
    assert "no rate is known to keep the SLO" in capsys.readouterr().err
    assert main(["show", out, "--fail-if", "find.low<1"]) == 1
    assert main(["show", out, "--fail-if", "find.nothing<1"]) == 2
    assert kept == Run.load(out).manifest.journey["find"]
    assert kept["cut_short"] == ""


def _summary(**find: Any) -> dict[str, Any]:
    points = [{"point": i, "mode": "rate", "target": float(r), "e2e_ms": {"p50": 100.0 * r}}
              for i, r in ((1, 2), (2, 4), (3, 8))]  # fmt: skip
    probes = [{"point": 1, "rate": 2.0, "answer": "yes"}, {"point": 2, "rate": 4.0, "answer": "yes"},
              {"point": 3, "rate": 8.0, "answer": "no"}]  # fmt: skip
    return {"points": points, "find": {"low": 4.0, "high": 8.0, "decided": True, "probes": probes, **find}}


@pytest.mark.parametrize(
    ("gate", "failed"),
    [
        ("e2e_ms.p50>500", 0),  # 800 ms at the rate that was meant to miss
        ("e2e_ms.p50>300", 1),  # 400 ms at the highest rate that keeps the SLO
        ("find.low<4", 0),
        ("find.low<5", 1),
        ("find.decided<1", 0),
    ],
)
def test_gates_are_asked_of_the_answer(gate: str, failed: int) -> None:
    assert len(failed_gates(parse_gates([gate]), _summary())) == failed


def test_a_gate_on_the_search_of_a_run_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"a summary has no 'find\.low'"):
        failed_gates(parse_gates(["find.low<4"]), {"points": []})


def test_a_headline_of_a_search_that_was_cut_short() -> None:
    base = {"low": 4.0, "high": None, "decided": False, "why": "", "cut_short": "interrupted"}
    assert headline(base).startswith("cut short before it was decided (interrupted): the SLO is kept at 4")


def _begun(stub: StubProcess, out: Path) -> subprocess.Popen[str]:
    """A search in the middle of its first probe, with requests of it under way."""
    argv = [sys.executable, "-m", "whywait", "find", stub.url, *SHORT, "--slo", "ttft=60s", "--out", str(out)]
    p = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = out / "spool" / "log.jsonl"
    while p.poll() is None and not (log.exists() and log.read_bytes().count(b'["ended"') > 3 + 20):
        time.sleep(0.02)
    return p


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_cut_off_in_the_middle(
    stub: StubProcess, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    p = _begun(stub, out)
    os.kill(p.pid, number)
    text, err = p.communicate(timeout=60)
    assert "Traceback" not in err
    assert p.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), err
    run = Run.load(out)
    assert run.manifest.partial
    assert violations(run) == []
    assert run.points.text("mode") == ["concurrency", "rate"]
    assert main(["show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "cut short before it was decided" in shown
    assert "nothing is known of any rate" in shown
    assert "PARTIAL" in shown
    assert "asked: 95 % of requests with ttft ≤ 60.0 s" in shown
    if number == signal.SIGINT:
        assert _answer(shown) == _answer(text)
        assert "(interrupted)" in shown
