"""Several processes, one Run: what is dealt out is the whole, all begin together, a dead one is named and counted."""

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

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whywait.app import Load
from whywait.core.check import violations
from whywait.core.recorder import spools_of
from whywait.core.run import Run, concat
from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.core.spool import assemble
from whywait.load.driver import Point, Progress
from whywait.load.recipe import closed_schedule, open_schedule
from whywait.load.shards import split
from whywait.load.stub import StubProcess
from whywait.session import Options, Session

SESSIONS = Workload((RequestClass(turns=Lengths("fixed", 3)),))


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--tokens", "8") as s:
        yield s


def _options(stub: StubProcess, out: Path, processes: int, tokens: int = 8) -> Options:
    lengths = RequestClass(prompt_tokens=Lengths("fixed", 16), output_tokens=Lengths("fixed", tokens))
    return Options(stub.url, workload=Workload((lengths,)), out=str(out), floor=False, processes=processes)


# Dealing out


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_places_and_requests_add_up_in_a_closed_loop(places, n, requests, sessions):
    schedule = closed_schedule(SESSIONS if sessions else Workload(), requests)
    parts = split(Point(0, "concurrency", places, schedule), n)
    assert len(parts) == n
    some = [p for p in parts if p is not None]
    assert sum(p.target for p in some) == places
    assert max(p.target for p in some) - min(p.target for p in some) <= 1
    assert sorted(i for p in some for i in p.schedule.id.tolist()) == schedule.id.tolist()
    for p in some:  # nobody waits for the end of a request that another shard sends
        assert set(p.schedule.after_id[p.schedule.after_id >= 0].tolist()) <= set(p.schedule.id.tolist())


@given(st.integers(1, 5), st.integers(1, 60), st.none() | st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_rate_requests_and_due_times_add_up_in_an_open_loop(n, requests, most):
    schedule = open_schedule(Workload(), 7.0, requests)
    some = [p for p in split(Point(0, "rate", 7.0, schedule, max_in_flight=most), n) if p is not None]
    assert sum(p.target for p in some) == pytest.approx(7.0)
    due = {i: d for p in some for i, d in zip(p.schedule.id.tolist(), p.schedule.due_ns.tolist(), strict=True)}
    assert due == dict(zip(schedule.id.tolist(), schedule.due_ns.tolist(), strict=True))
    if most is not None and requests >= n * most:
        assert sum(p.max_in_flight for p in some) == most


def test_a_shard_with_more_places_gets_more_of_the_requests():
    """Else it would be done long before the others, and the rest would run below the target."""
    two, one = split(Point(0, "concurrency", 3, closed_schedule(Workload(), 300)), 2)
    assert (two.target, one.target) == (2, 1)
    assert (len(two.schedule), len(one.schedule)) == (200, 100)


def test_fewer_places_than_shards_leave_some_without_work():
    parts = split(Point(0, "concurrency", 2, closed_schedule(Workload(), 10)), 3)
    assert [p and p.target for p in parts] == [1, 1, None]


# Driving


@pytest.mark.parametrize("load", [Load("concurrency", 6, 40), Load("rate", 60.0, 40)])
def test_shards_together_are_the_whole(stub, tmp_path, load):
    """Invariant 7 on a measured Run: what is kept is the union of what each process recorded, and all was sent."""
    with Session(_options(stub, tmp_path / "r", 2), lambda _line: None) as s:
        assert s.point(load)
        assert s.point(load)
        run = s.finish()
        alone = [assemble([spool], None) for spool in spools_of(tmp_path / "r")]
    assert [len(a.requests) for a in alone] == [0, 40, 40]
    zero = alone[0].manifest.zero_unix_ns
    joined = concat([_with_zero(a, zero) for a in alone])
    for table in ("points", "requests", "chunks"):
        assert joined.table(table) == run.table(table), table
    assert run.requests.text("outcome") == ["ok"] * 80
    assert run.points["planned"].tolist() == [40, 40]
    assert run.points["target"].tolist() == [load.target] * 2
    assert len(run.chunks) == int(run.requests["content_chunks"].sum()) + 80  # a role chunk each
    assert violations(run) == []


def _with_zero(run: Run, zero: int) -> Run:
    import dataclasses

    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, zero_unix_ns=zero))


def test_all_shards_begin_together_on_one_time_line(stub, tmp_path):
    with Session(_options(stub, tmp_path / "r", 3), lambda _line: None) as s:
        s.point(Load("concurrency", 3, 9))
        run = s.finish()
        alone = [assemble([spool], None) for spool in spools_of(tmp_path / "r")][1:]
    assert len({int(a.points["start_ns"][0]) for a in alone}) == 1
    assert all((a.requests["sent_ns"] >= a.points["start_ns"][0]).all() for a in alone)
    clock = {c["shard"]: c for c in run.manifest.clock}
    assert sorted(clock) == [0, 1, 2]
    assert all(abs(c["offset_ns"]) < 1_000_000 and c["offset_error_ns"] > 0 for c in clock.values())
    client = run.manifest.client
    assert client["processes"] == 3
    assert client["chunks"] == sum(c["chunks"] for c in client["shards"]) == int(run.requests["content_chunks"].sum())


def test_duration_bounds_every_shard(stub, tmp_path):
    with Session(_options(stub, tmp_path / "r", 2), lambda _line: None) as s:
        assert s.point(Load("concurrency", 4, duration_s=0.5))
        run = s.finish()
    assert set(run.requests.text("outcome")) == {"ok"}  # what time left unsent was no plan
    assert int(run.points["planned"][0]) == len(run.requests)
    assert not run.manifest.partial


def test_progress_is_that_of_all(stub, tmp_path):
    seen: list[tuple[int, int]] = []
    options = _options(stub, tmp_path / "r", 2, tokens=200)
    with Session(options, lambda _line: None, lambda p: seen.append((p.sent, p.in_flight))) as s:
        s.point(Load("concurrency", 4, 8))
        s.finish()
    assert max(sent for sent, _ in seen) > 4  # no shard alone sends so many
    assert max(n for _, n in seen) == 4


# Dying


def _long(stub: StubProcess, out: Path, watch: Any) -> Session:
    return Session(_options(stub, out, 2, tokens=2000), lambda _line: None, watch)


def test_a_killed_shard_is_named_and_its_requests_are_counted(stub, tmp_path):
    killed: list[int] = []

    def kill(p: Progress) -> None:
        if p.in_flight == 4 and not killed:
            killed.append(s.crew.pids[1])
            os.kill(killed[0], signal.SIGKILL)

    with _long(stub, tmp_path / "r", kill) as s:
        assert not s.point(Load("concurrency", 4, 20))
        run = s.finish()
    assert run.manifest.partial
    assert run.manifest.partial_reason == f"shard 1 (process {killed[0]}) was killed by SIGKILL"
    outcomes = run.requests.text("outcome")
    assert outcomes.count("censored") == 4  # of the dead shard too
    assert outcomes.count("never_sent") == 16
    assert run.points["planned"].tolist() == [20]
    assert violations(run) == []


def test_a_shard_that_died_before_it_wrote_its_plan_is_counted_all_the_same(stub, tmp_path):
    with Session(_options(stub, tmp_path / "r", 2), lambda _line: None) as s:
        assert s.point(Load("concurrency", 4, 8))
        os.kill(s.crew.pids[0], signal.SIGKILL)
        assert not s.point(Load("concurrency", 4, 20))
        run = s.finish()
    assert run.manifest.partial
    assert "shard 0" in run.manifest.partial_reason
    assert run.points["planned"].tolist() == [8, 20]
    assert run.points["target"].tolist() == [4, 4]
    of_second = [o for o, p in zip(run.requests.text("outcome"), run.requests["point"], strict=True) if p == 1]
    assert len(of_second) == 20
    assert of_second.count("never_sent") >= 10
    assert violations(run) == []


def test_shards_die_with_their_parent_and_leave_what_they_had(stub, tmp_path):
    out = tmp_path / "r"
    argv = [sys.executable, "-m", "whywait", "run", stub.url, "--no-floor", "--output-tokens", "2000", "--processes",
            "2", "--concurrency", "4", "--requests", "20", "--out", str(out)]  # fmt: skip
    parent = subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while parent.poll() is None and sum(_sent(spool) for spool in spools_of(out)) < 4:
        time.sleep(0.05)
    shards = _children(parent.pid, "whywait.load.shards")
    assert len(shards) == 2
    parent.kill()
    parent.wait()
    _gone(shards)
    run = Run.load(out)
    assert run.manifest.partial
    assert run.requests.text("outcome").count("censored") == 4
    assert run.points["planned"].tolist() == [20]
    assert "the process that led the run ended" in run.requests["detail"].tolist()
    assert violations(run) == []


def _sent(spool: Path) -> int:
    log = spool / "log.jsonl"
    return log.read_bytes().count(b'["sent"') if log.exists() else 0


def _children(pid: int, what: str) -> list[int]:
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (proc / "status").read_text(), (proc / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{pid}\n" in status and what.encode() in command:
            found.append(int(proc.name))
    return found


def _gone(pids: list[int]) -> None:
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.05)


def test_ctrl_c_reaches_the_group_and_the_parent_decides(stub, tmp_path):
    out = tmp_path / "r"
    argv = [sys.executable, "-m", "whywait", "run", stub.url, "--no-floor", "--output-tokens", "2000", "--processes",
            "2", "--concurrency", "4", "--requests", "20", "--out", str(out), "--json"]  # fmt: skip
    parent = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while parent.poll() is None and sum(_sent(spool) for spool in spools_of(out)) < 4:
        time.sleep(0.05)
    os.killpg(parent.pid, signal.SIGINT)
    stdout, err = parent.communicate(timeout=60)
    assert parent.returncode == 130, err
    assert "Traceback" not in err
    counts = json.loads(stdout)["points"][0]["counts"]
    assert {k: v for k, v in counts.items() if v} == {"censored": 4, "never_sent": 16}
    run = Run.load(out)
    assert run.manifest.partial_reason == "interrupted"
    assert np.isnan(run.requests["end_ns"]).sum() == 16
    assert violations(run) == []
