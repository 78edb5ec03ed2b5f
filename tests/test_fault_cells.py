"""Cells of the matrix of faults (docs/faults.md) that have no test elsewhere: what stands still, is slow, or talks
nonsense, and what the user is told of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whywait.app import Load
from whywait.core import recorder
from whywait.core.check import violations
from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.load import shards
from whywait.load.driver import Progress
from whywait.load.stub import StubProcess
from whywait.session import Options, Session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--tokens", "8") as s:
        yield s


def _options(stub: StubProcess, out: Path, processes: int = 1, tokens: int = 8) -> Options:
    lengths = RequestClass(prompt_tokens=Lengths("fixed", 16), output_tokens=Lengths("fixed", tokens))
    return Options(stub.url, workload=Workload((lengths,)), out=str(out), floor=False, processes=processes)


def _all_counted(run: Any, planned: int) -> None:
    assert violations(run) == []
    assert len(run.requests) == planned == int(run.points["planned"].sum())


def test_a_worker_that_stands_still_is_given_up_and_named(
    stub: StubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SILENT_S", 2.0)
    stopped: list[int] = []

    def stop(p: Progress) -> None:
        if p.in_flight == 4 and not stopped:
            stopped.append(s.crew.pids[1])
            os.kill(stopped[0], signal.SIGSTOP)

    with Session(_options(stub, tmp_path / "r", 2, tokens=2000), lambda _line: None, stop) as s:
        assert not s.point(Load("concurrency", 4, 20))
        run = s.finish()
    assert run.manifest.partial
    assert run.manifest.partial_reason == f"shard 1 (process {stopped[0]}) said nothing for 2 s"
    _all_counted(run, 20)
    assert not Path(f"/proc/{stopped[0]}").exists()


def test_a_worker_that_stands_still_for_a_while_is_late_and_says_so(stub: StubProcess, tmp_path: Path) -> None:
    timers: list[threading.Timer] = []

    def stop(p: Progress) -> None:
        if p.in_flight == 4 and not timers:
            os.kill(s.crew.pids[1], signal.SIGSTOP)
            timers.append(threading.Timer(1.5, os.kill, (s.crew.pids[1], signal.SIGCONT)))
            timers[0].start()

    with Session(_options(stub, tmp_path / "r", 2, tokens=400), lambda _line: None, stop) as s:
        assert s.point(Load("concurrency", 4, 4))
        run = s.finish()
    timers[0].join()
    assert "the client stood still" in [d["what"] for d in run.manifest.doubts]
    _all_counted(run, 4)
    assert set(run.requests.text("outcome")) == {"ok"}


def test_a_worker_that_talks_nonsense_is_given_up_and_named(
    stub: StubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, garbled = os.read, []

    def read(fd: int, n: int) -> bytes:
        data = real(fd, n)
        if fd in ours and data and not garbled:
            garbled.append(fd)
            return b"\x00\xffnonsense\n"
        return data

    ours: list[int] = []

    def watch(p: Progress) -> None:
        if p.in_flight == 4 and not ours:
            ours.append(s.crew._shards[1].link.out)  # type: ignore[union-attr]
            monkeypatch.setattr(shards.os, "read", read)

    with Session(_options(stub, tmp_path / "r", 2, tokens=2000), lambda _line: None, watch) as s:
        assert not s.point(Load("concurrency", 4, 20))
        run = s.finish()
    assert garbled
    assert run.manifest.partial_reason.startswith("shard 1 (process ")
    assert run.manifest.partial_reason.endswith("said what makes no sense")
    _all_counted(run, 20)


def test_a_sampler_that_stands_still_costs_its_readings_and_nothing_else(stub: StubProcess, tmp_path: Path) -> None:
    stopped: list[int] = []

    def stop(_p: Progress) -> None:
        if s._watching.pid and not stopped:
            stopped.append(s._watching.pid)
            os.kill(stopped[0], signal.SIGSTOP)

    with Session(_options(stub, tmp_path / "r"), lambda _line: None, stop) as s:
        assert s.point(Load("concurrency", 2, duration_s=1.2))
        run = s.finish()
    (doubt,) = [d for d in run.manifest.doubts if "sampler" in d["what"]]
    assert "before its time" in doubt["why"]
    assert set(run.requests.text("outcome")) == {"ok"}
    assert len(run.readings) > 0
    assert violations(run) == []
    assert not Path(f"/proc/{stopped[0]}").exists()


@pytest.mark.parametrize(("pause_s", "said"), [(0.01, False), (1.0, True)])
def test_a_disk_that_is_slow_or_stands_still_is_told_where_it_held_us_up(
    stub: StubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float, said: bool
) -> None:
    """Every write of the log takes that long; nothing of the run is lost by it."""
    real = recorder._Appender.write

    def write(self: Any, data: bytes) -> Any:
        time.sleep(pause_s)
        return real(self, data)

    with Session(_options(stub, tmp_path / "r", tokens=200), lambda _line: None) as s:
        monkeypatch.setattr(recorder._Appender, "write", write)
        s.point(Load("concurrency", 2, 4))
        monkeypatch.setattr(recorder._Appender, "write", real)
        run = s.finish()
    assert ("the client stood still" in [d["what"] for d in run.manifest.doubts]) is said
    _all_counted(run, 4)
