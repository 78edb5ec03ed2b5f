"""Clocks that step, processes that are suspended: the run survives, all requests are counted, and a doubt says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from whywait.analyze.trust import doubts
from whywait.cli import main
from whywait.core.check import violations
from whywait.core.recorder import spools_of
from whywait.core.run import Run
from whywait.load.stub import StubProcess
from whywait.net import clock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc, and kernel receive stamps")
STILL_S = 1.2


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--timings") as s:
        yield s


def _flags(stub: StubProcess, out: Path, *more: str) -> list[str]:
    return ["run", stub.url, "--no-floor", "--prompt-tokens", "16", "--out", str(out), *more]


def _children(pid: int, word: bytes) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in found if word in Path(f"/proc/{p}/cmdline").read_bytes()]


def _suspended(stub: StubProcess, out: Path, word: bytes, *flags: str) -> tuple[Run, str]:
    """A run of which the first child with ``word`` in its command line is stopped for a while; what it said."""
    argv = [sys.executable, "-m", "whywait", *_flags(stub, out, *flags)]
    p = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stopped: list[int] = []
    try:
        while p.poll() is None and not stopped:
            time.sleep(0.02)
            logs = [s / "log.jsonl" for s in spools_of(out)]
            if sum(log.read_bytes().count(b'["accepted"') for log in logs if log.exists()) >= 4:
                stopped = _children(p.pid, word)[:1]
        assert stopped, p.communicate()
        os.kill(stopped[0], signal.SIGSTOP)
        time.sleep(STILL_S)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    said, err = p.communicate(timeout=60)
    assert p.returncode in (0, 6), said + err  # 6: sends were late by it
    assert "Traceback" not in err
    run = Run.load(out)
    assert violations(run) == []
    return run, said + err


def _still(run: Run, what: str) -> float:
    """For how long, by the doubt ``what``."""
    (doubt,) = [d for d in doubts(run) if d["what"] == what]
    return float(doubt["why"].split("for ")[1].split(" s")[0])


def test_one_of_several_processes_is_suspended(stub: StubProcess, tmp_path: Path) -> None:
    flags = ("--concurrency", "4", "--requests", "8", "--output-tokens", "300", "--processes", "2")
    run, said = _suspended(stub, tmp_path / "r", b"shards", *flags)
    assert _still(run, "the client stood still") >= STILL_S - 0.2
    assert "the client stood still" in said
    assert not run.manifest.partial
    assert run.requests.text("outcome") == ["ok"] * 8


def test_the_sampler_is_suspended(stub: StubProcess, tmp_path: Path) -> None:
    flags = ("--concurrency", "2", "--requests", "8", "--output-tokens", "300")
    run, said = _suspended(stub, tmp_path / "r", b"probe.sampler", *flags)
    assert _still(run, "the sampler stood still") >= STILL_S - 0.3
    assert "the sampler stood still" in said
    assert run.requests.text("outcome") == ["ok"] * 8
    assert not [d for d in doubts(run) if d["what"] == "the client stood still"]


@pytest.mark.parametrize("step_s", [-5.0, -0.002])
def test_the_wall_clock_steps_in_the_middle_of_a_run(
    stub: StubProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step_s: float,
) -> None:
    """As the client sees it: its wall clock is moved against the kernel's stamps and the monotonic clock."""
    out = tmp_path / "r"
    stepped: list[bool] = []

    def time_ns() -> int:
        chunks = out / "spool" / "chunks.bin"
        if not stepped and chunks.exists() and chunks.stat().st_size:
            stepped.append(True)
        return time.time_ns() + (round(step_s * 1e9) if stepped else 0)

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic_ns=time.monotonic_ns, time_ns=time_ns))
    assert main(_flags(stub, out, "--concurrency", "2", "--requests", "8", "--output-tokens", "120")) in (0, 6)
    run = Run.load(out)
    assert violations(run) == []  # no time ran backwards
    assert run.requests.text("outcome") == ["ok"] * 8
    (doubt,) = [d for d in doubts(run) if "clock stepped" in d["what"]]
    assert "stepped 1 times" in doubt["what"]
    assert "clock stepped 1 times" in capsys.readouterr().out
    longest = max(float(b - a) for i in range(8) for a, b in [_first_and_last(run, i)])
    assert longest < 30e9  # the step is in no request's time
    assert "user" in run.chunks.text("clock")
    assert "kernel" in run.chunks.text("clock")


def _first_and_last(run: Run, row: int) -> tuple[float, float]:
    return float(run.requests["first_ns"][row]), float(run.requests["last_ns"][row])
