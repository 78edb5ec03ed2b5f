"""Recording on the real embedded engine: what was put in shows in the Run, and the engine is gone afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="needs the 'engine' extra: pip install 'whywait[engine]'")

from whywait import exam
from whywait.analyze.counters import delta, gauge
from whywait.core.run import Run
from whywait.lab import state
from whywait.lab.cpus import cpu_split
from whywait.lab.exam import Case, Point, chat

pytestmark = pytest.mark.engine
POINTS = (Point("concurrency", 1, 1.5), Point("concurrency", 4, 3.0))
TINY = {"slots": 1, "ctx_per_slot": 2048, "synthetic": "tiny"}


def _run(case: Case, folder: Path) -> tuple[Run, tuple[int, int]]:
    run = Run.load(folder / case.name)
    return run, (int(run.points["start_ns"][1]), int(run.points["end_ns"][1]))


def test_one_slot_and_a_quota_show_in_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "QUIET_WAIT_S", 0.0)
    if not all(cpu_split()):
        pytest.skip("processes are not pinned here")
    work = chat(24, 200)
    slots = Case("slots", "embedded", "slot limit", ("slot limit",), work, POINTS, TINY)
    quota = Case("quota", "embedded", "cpu quota", ("cpu quota",), work, POINTS, TINY, "quota", {"cpus": 0.2})
    said: list[str] = []
    failed = exam.record([slots, quota], tmp_path, say=said.append)
    assert [e.name for e in state.running() if str(os.getpid()) in e.name] == []
    run, span = _run(slots, tmp_path)
    waiting = gauge(run.readings, "waiting", span)
    assert waiting is not None
    assert waiting.high >= 2
    if failed == ["quota"]:
        pytest.skip(said[-1])  # no control group may be made here
    assert failed == []
    run, span = _run(quota, tmp_path)
    throttled = delta(run.readings, "cgroup_throttled_periods_total", span)
    assert throttled is not None
    assert throttled.value > 5
