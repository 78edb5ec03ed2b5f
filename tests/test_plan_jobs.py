"""A plan over several processes: the same bits as over one, and no process outlives it, however it ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from whywait import planning, planning_search
from whywait.core.schedule import Schedule, Workload
from whywait.physics.prices import shipped
from whywait.planning_space import Space
from whywait.sim import grid

LOAD = {"prompt_tokens": "uniform(50,150)", "output_tokens": "uniform(20,60)"}
SLO = {"ttft_ms": 500.0, "tpot_ms": 20.0}
#: The command line, its simulations spread over processes however small they are.
RUN = "import sys, whywait.sim.grid as g; g.ALONE = 0; from whywait.cli import main; sys.exit(main(sys.argv[1:]))"
ARGS = ["plan", "--model", "llama-3.1-8b", "--machines", "h100,h200", "--rate", "300", "--jobs", "2",
        "--prompt-tokens", "uniform(50,900)", "--output-tokens", "uniform(100,400)", "--slo",
        "ttft=1s,tpot=20ms"]  # fmt: skip


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A plan in a session of its own, as a terminal's foreground group is."""
    p = subprocess.Popen([sys.executable, "-c", RUN, *ARGS, "--out", str(tmp_path / "p")], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    yield p
    with p:  # closes its pipes
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)


def workers(of: int) -> list[int]:
    """The processes that simulate for ``of``."""
    out = []
    for at in Path("/proc").iterdir():
        try:
            if at.name.isdigit() and int((at / "stat").read_text().rpartition(")")[2].split()[1]) == of:
                out += [int(at.name)] if b"spawn_main" in (at / "cmdline").read_bytes() else []
        except OSError:
            continue
    return out


def seen(p: subprocess.Popen[str], seconds: float = 60.0) -> list[int]:
    until = time.monotonic() + seconds
    while time.monotonic() < until and p.poll() is None:
        if found := workers(p.pid):
            return found
        time.sleep(0.05)
    raise AssertionError("no process was started to simulate")


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False


def test_one_process_or_two_give_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    """One step of a plan over two processes, the rest alone: to start them takes seconds."""
    space = Space("llama-3.1-8b", ("h100",), layouts=("tp=1", "tp=2,pd=1:1"), apply=("",), counts=(1, 2))
    ask = planning.Ask(space, Workload.from_dict(dict(LOAD)), 60.0, SLO, offers=shipped(), draws=2, jobs=1)
    alone = planning.plan(ask)
    sizes: list[int] = []

    def over_two(cells: list[grid.Cell], schedules: list[Schedule], jobs: int, tell: grid.Progress | None) -> object:
        sizes.append(len(cells))
        monkeypatch.setattr(grid, "ALONE", 0 if len(sizes) == 3 else 1e12)
        return real(cells, schedules, jobs, tell)

    real = grid.grid
    monkeypatch.setattr(planning_search, "grid", over_two)
    both = planning.plan(dataclasses.replace(ask, jobs=2))
    assert sizes[2] > 2
    assert (alone["inputs"].pop("jobs"), both["inputs"].pop("jobs")) == (1, 2)
    assert both == alone


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_worker_that_is_killed_is_said_in_a_line(started: subprocess.Popen[str]):
    seen(started)
    time.sleep(1.0)
    until = time.monotonic() + 60.0
    while started.poll() is None and time.monotonic() < until:  # one that had nothing left to do is not missed
        for pid in workers(started.pid)[-1:]:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _, err = started.communicate(timeout=30)
    assert started.returncode == 2
    assert "was killed from outside" in err
    assert "--jobs 1" in err
    assert "Traceback" not in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(("number", "wait"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 1.0)])
def test_ctrl_c_ends_the_workers_and_says_so(started: subprocess.Popen[str], tmp_path: Path, number: int, wait: float):
    mine = seen(started)
    time.sleep(wait)  # at once: while they are still starting
    mine = workers(started.pid) or mine
    if number == signal.SIGINT:
        os.killpg(started.pid, number)  # as a terminal does: to all of the group
    else:
        os.kill(started.pid, number)
    out, err = started.communicate(timeout=30)
    assert started.returncode == 130
    assert "nothing of this plan is kept" in err
    assert "Traceback" not in out + err
    assert all(gone(pid) for pid in mine)
    assert not (tmp_path / "p").exists()
