"""A paired trial as it is kept: the prompts it sends, Ctrl-C, and going on with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from whywait.cli import main
from whywait.load.stub import StubProcess, StubThread
from whywait.load.stub_plan import Options as StubOptions
from whywait.load.stub_plan import Plan as StubPlan

FLAGS = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "6", "--concurrency", "2", "--requests", "8"]


def kept(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "trial.json").read_text())
    return found


def test_prompts_of_a_pair_are_the_same_and_pairs_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both arms of a pair are sent the same; on one service that runs on, A/A rounds must not find each other's."""
    sent: dict[str, list[str]] = {}

    def stub(name: str) -> StubThread:
        thread = StubThread(StubOptions(plan=StubPlan(ttft_ms=2, gap_ms=1)))
        generate = thread.stub._generate
        seen = sent.setdefault(name, [])

        def listening(request: Any, reply: Any) -> None:
            seen.append(orjson.loads(request.body)["messages"][-1]["content"])
            generate(request, reply)

        thread.stub._generate = listening  # type: ignore[method-assign]
        return thread

    few = ["--no-floor", "--prompt-tokens", "24", "--output-tokens", "3", "--concurrency", "2", "--requests", "4",
           "--rounds", "2", "--metric", "e2e_ms.p50"]  # fmt: skip
    with stub("a") as a, stub("b") as b:
        assert main(["ab", "--a", a.url, "--b", b.url, *few, "--out", str(tmp_path / "ab")]) == 0
        assert len(sent["a"]) == len(sent["b"])
        assert set(sent["a"]) == set(sent["b"])
        salted = [t for t in sent["a"] if ": " in t[:12]]
        assert len(set(salted)) == len(salted) >= 2 * (4 + 2)  # of no two pairs alike
        sent["a"].clear()
        capsys.readouterr()
        assert main(["ab", "--a", a.url, "--aa", *few, "--out", str(tmp_path / "aa")]) == 0
        salted = [t for t in sent["a"] if ": " in t[:12]]
        assert len(set(salted)) == len(salted) >= 4 * (4 + 2)
    assert "no false finding" in capsys.readouterr().out
    found = kept(tmp_path / "aa")
    assert found["plan"]["same"]
    assert found["claims"][0]["way"] == "open"  # two pairs bound nothing


def test_ctrl_c_keeps_what_there_is_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """With the fixed loop and the client's floor, as a user has it; A/A on a service of its own."""
    with StubProcess("--ttft-ms", "40", "--gap-ms", "20", "--slots", "2") as s:
        _ctrl_c(s.url, tmp_path)


def _ctrl_c(url: str, tmp_path: Path) -> None:
    out = tmp_path / "t"
    argv = ["ab", "--a", url, "--aa", *FLAGS, "--metric", "tpot_ms.p50", "--rounds", "2", "--out", str(out)]
    child = subprocess.Popen([sys.executable, "-m", "whywait", *argv], env=os.environ | {"PYTHONPATH": "src"},
                             stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    until = time.monotonic() + 120
    while not (out / "trial.json").exists() or len(kept(out)["rounds"]) < 2:
        assert child.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    said, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert "PARTIAL" in said
    assert "Traceback" not in err
    found = kept(out)
    assert found["partial"]
    assert found["pairs"] >= 1
    before = [r["run"] for r in found["rounds"] if r["whole"]]
    assert main(argv) == 0
    found = kept(out)
    assert not found["partial"]
    assert found["pairs"] == 2
    assert [r["run"] for r in found["rounds"]][:2] == before[:2]
    assert main(argv) == 2  # it is whole
