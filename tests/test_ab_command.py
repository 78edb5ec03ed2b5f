"""Arms that are command lines: a fresh process and a free port for each round, and nothing left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from whywait.cli import main
from whywait.lab import state

STUB = f"{sys.executable} -m whywait.load.stub --port {{port}} --gap-ms 2 --ttft-ms"
SRC = Path(__file__).resolve().parents[1] / "src"


def test_a_against_itself_first_and_then_against_b(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    out = tmp_path / "t"
    argv = ["ab", "--a", f"{STUB} 10", "--b", f"{STUB} 5", "--aa", "first", "--rounds", "2", "--out", str(out)]
    load = ["--concurrency", "2", "--requests", "4", "--prompt-tokens", "16", "--output-tokens", "3", "--warm-up", "0"]
    assert main([*argv, *load, "--no-floor", "--metric", "ttft_ms.p50"]) == 0
    found = {name: json.loads((tmp_path / name / "trial.json").read_text()) for name in ("t", "t-aa")}
    assert found["t"]["aa"] == str(tmp_path / "t-aa")
    assert [found[n]["plan"]["same"] for n in ("t", "t-aa")] == [False, True]
    assert found["t-aa"]["plan"]["b"] == found["t"]["plan"]["a"]
    ttft = found["t"]["effects"][""]["ttft_ms.p50"]
    assert ttft["b"] < ttft["a"]
    assert found["t"]["claims"][0]["state"] == "undecided"
    loops = [v for r in found["t"]["rounds"] for v in r["calibration_ms"]]
    assert all(v > 0 for v in loops)
    said = capsys.readouterr()
    assert "A/A: no false finding in 2 pairs" in said.err
    assert "pairs would decide" in said.out
    assert state.running() == []
