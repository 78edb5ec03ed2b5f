"""The driver with sessions, caps and ramps, on the stub service. Order and outcomes only; no timed assertions."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait.cli import main
from whywait.core.check import violations
from whywait.core.recorder import Recorder
from whywait.core.run import Manifest, Run
from whywait.core.schedule import Lengths, RequestClass, Schedule, Workload
from whywait.load.driver import Driver, Point, _Bodies
from whywait.load.recipe import closed_schedule, open_schedule
from whywait.load.stub import StubProcess
from whywait.net.client import Client
from whywait.net.clock import Clock
from whywait.net.dialect import chat_body
from whywait.net.endpoint import parse_url

MS = 1_000_000
TALK = Workload(
    (RequestClass(turns=Lengths.parse(4), think_ms=Lengths.parse(20), output_tokens=Lengths.parse(4)),),
    arrivals="constant",
)


@pytest.fixture(scope="module")
def stub() -> Any:
    with StubProcess() as s:
        yield s


def drive(url: str, out: Path, point: Point, fault: dict[int, str] | None = None) -> tuple[Run, Driver]:
    clock = Clock()
    manifest = Manifest(zero_unix_ns=clock.zero_unix_ns)
    recorder = Recorder(out, manifest)
    client = Client(parse_url(url), recorder, clock)

    def body(row: int, schedule: Schedule) -> bytes:
        plan = {"ttft_ms": 5, "gap_ms": 1, "tokens": 4, "fault": (fault or {}).get(row, "")}
        return chat_body("stub", f"hello {row}", 4, {"stream": True, "stub": plan})

    try:
        driver = Driver(client, recorder, clock, body)
        assert driver.run(point) == ""
        assert client.recorder is recorder
        run = recorder.finish(manifest)
    finally:
        client.close()
    assert violations(run) == []
    return run, driver


def _check_turns(run: Run, schedule: Schedule) -> None:
    """Every turn was sent after the one before had ended and its user had thought, and was due exactly then."""
    r = run.requests
    end = dict(zip(r["id"].tolist(), r["end_ns"].tolist(), strict=True))
    for i, sent, due, after, think in zip(
        r["id"].tolist(), r["sent_ns"].tolist(), r["due_ns"].tolist(), schedule.after_id.tolist(),
        schedule.think_ns.tolist(), strict=True,
    ):  # fmt: skip
        if after >= 0 and not np.isnan(sent):
            assert sent >= due >= end[after] + think, i


def _peak(run: Run) -> int:
    r = run.requests.where(~np.isnan(run.requests["sent_ns"]))
    edges = np.concatenate([r["sent_ns"], r["end_ns"]])
    step = np.concatenate([np.ones(len(r)), -np.ones(len(r))])
    return int(np.cumsum(step[np.lexsort((step, edges))]).max())


@pytest.mark.parametrize("mode", ["concurrency", "rate"])
def test_turns_follow_their_sessions(stub: Any, tmp_path: Path, mode: str) -> None:
    if mode == "concurrency":
        schedule, target = closed_schedule(TALK, 24, first_id=100), 3.0
    else:
        schedule, target = open_schedule(TALK, 200, 24, first_id=100), 200.0
    run, _ = drive(stub.url, tmp_path / "r", Point(0, mode, target, schedule))
    assert Counter(run.requests.text("outcome")) == {"ok": 24}
    assert run.requests["session_id"].tolist() == [100 + i // 4 * 4 for i in range(24)]
    assert run.requests["turn"].tolist() == [0, 1, 2, 3] * 6
    _check_turns(run, schedule)
    if mode == "concurrency":
        assert _peak(run) == 3
    else:
        first = run.requests.where(run.requests["turn"] == 0)
        assert np.diff(first["due_ns"]).tolist() == [4 / 200 * 1e9] * 5  # the timetable is of the sessions' starts
        following = run.requests.where(run.requests["turn"] > 0)
        assert (following["due_ns"] > first["due_ns"].min()).all()


@pytest.mark.parametrize("mode", ["concurrency", "rate"])
def test_what_comes_after_a_failed_turn_is_never_sent(stub: Any, tmp_path: Path, mode: str) -> None:
    """A user who got no answer does not go on: but the requests stay in the count."""
    schedule = closed_schedule(TALK, 16) if mode == "concurrency" else open_schedule(TALK, 200, 16)
    run, _ = drive(stub.url, tmp_path / "r", Point(0, mode, 2 if mode == "concurrency" else 200, schedule),
                   {0: "http_500", 6: "truncate"})  # fmt: skip
    outcome = run.requests.text("outcome")
    assert outcome[:4] == ["http_error", *["never_sent"] * 3]
    assert outcome[4:8] == ["ok", "ok", "truncated", "never_sent"]
    assert outcome[8:] == ["ok"] * 8
    assert {run.requests["detail"][i] for i in (1, 2, 3, 7)} == {"an earlier turn of its session failed"}
    assert run.points["planned"].tolist() == [16]
    assert np.isnan(run.requests["due_ns"][[1, 2, 3]]).all()


def test_turns_that_time_kept_from_being_sent_were_no_plan(stub: Any, tmp_path: Path) -> None:
    slow = dataclasses.replace(TALK.classes[0], think_ms=Lengths.parse(60_000))
    schedule = open_schedule(dataclasses.replace(TALK, classes=(slow,)), 100, 16)
    run, _ = drive(stub.url, tmp_path / "r", Point(0, "rate", 100, schedule, duration_s=0.3))
    assert Counter(run.requests.text("outcome")) == {"ok": 4}
    assert run.points["planned"].tolist() == [4]


def test_a_cap_holds_and_hides_nothing(stub: Any, tmp_path: Path) -> None:
    schedule = open_schedule(Workload(arrivals="constant"), 1000, 30)
    point = Point(0, "rate", 1000, schedule, max_in_flight=2)
    run, _ = drive(stub.url, tmp_path / "r", point)
    r = run.requests
    assert _peak(run) == 2
    assert Counter(r.text("outcome")) == {"ok": 30}
    assert np.diff(r["due_ns"]).tolist() == [1e6] * 29  # due as they were
    assert (r["sent_ns"] - r["due_ns"])[-1] > 20 * MS  # fifteen rounds of at least 8 ms, and only 29 ms of timetable


def test_a_ramp_spreads_the_first_requests(stub: Any, tmp_path: Path) -> None:
    point = Point(0, "concurrency", 4, closed_schedule(Workload(), 60), ramp_s=0.2)
    run, _ = drive(stub.url, tmp_path / "r", point)
    start = run.points["start_ns"][0]
    due = np.sort(run.requests["due_ns"]) - start
    assert due[0] == 0
    for wanted in (50 * MS, 100 * MS, 150 * MS):
        assert wanted in due.tolist()
    assert _peak(run) == 4


def test_bodies_of_turns_are_made_once_and_after_what_they_follow() -> None:
    schedule = closed_schedule(TALK, 16)
    made: list[int] = []

    def make(row: int, _s: Schedule) -> bytes:
        made.append(row)
        return str(row).encode()

    bodies = _Bodies(make, schedule, ahead=2)
    assert made == [0, 4, 8, 12]
    assert bodies.take(4) == b"4"
    bodies.prepare(3)
    assert made[4:] == [5]  # only what may come next
    assert [bodies.take(row) for row in (0, 1)] == [b"0", b"1"]  # the second before it was prepared
    bodies.prepare(9)
    assert sorted(made) == [0, 1, 2, 4, 5, 8, 12]
    assert [bodies.take(row) for row in (5, 6, 2)] == [b"5", b"6", b"2"]
    bodies.prepare(9)
    assert len(made) == len(set(made))


# By the command line


def _run(url: str, tmp_path: Path, *flags: str) -> Run:
    assert main(["run", url, "--no-floor", "--out", str(tmp_path / "run"), *flags]) == 0
    run = Run.load(tmp_path / "run")
    assert violations(run) == []
    return run


def test_a_trace_is_replayed_from_the_command_line(stub: Any, tmp_path: Path) -> None:
    rows = [{"at_s": i / 20, "prompt_tokens": 30 + i, "output_tokens": 3, "class": "log"} for i in range(12)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = _run(stub.url, tmp_path, "--trace", str(tmp_path / "t.jsonl"), "--speed", "2")
    assert run.points.text("mode") == ["trace"]
    assert run.points["target"].tolist() == [pytest.approx(40)]
    assert np.diff(run.requests["due_ns"]).tolist() == [25e6] * 11
    assert run.requests["asked_prompt_tokens"].tolist() == list(range(30, 42))
    assert run.requests["prompt_tokens"].tolist() == list(range(30, 42))
    assert set(run.requests["class"]) == {"log"}


def test_stages_and_a_cap_from_the_command_line(stub: Any, tmp_path: Path) -> None:
    run = _run(stub.url, tmp_path, "--stages", "20:200ms,20-100:300ms", "--arrivals", "constant",
               "--max-in-flight", "1", "--prompt-tokens", "30", "--output-tokens", "4")  # fmt: skip
    assert run.points.text("mode") == ["rate"]
    assert len(run.requests) == 22
    assert _peak(run) == 1
    (doubt,) = [d for d in run.manifest.doubts if "waited in the client" in d["what"]]
    assert "max_in_flight is 1" in doubt["why"]
    assert run.manifest.workload["max_in_flight"] == 1
    assert Workload.from_dict(run.manifest.workload).stages[1].to == 100


def test_a_warm_cache_is_warmed_before_and_said(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(stub.url, tmp_path, "--cache", "warm", "--concurrency", "2", "--requests", "20",
               "--prompt-tokens", "40", "--output-tokens", "2")  # fmt: skip
    assert len(run.requests) == 20
    assert run.manifest.client["warmed_by_point"] == {"0": 8}
    assert "8 prompts were sent once" in capsys.readouterr().err


def test_classes_are_judged_by_their_own_slo(stub: Any, tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(
        "output_tokens = 2\nprompt_tokens = 30\n[[class]]\nname = 'never'\nslo = {ttft_ms = 0.001}\n"
        "[[class]]\nname = 'always'\nslo = {ttft_ms = 100000}\n[[class]]\nname = 'whatever'\nlanguage = 'de, es'"
    )
    flags = ["--workload", str(tmp_path / "w.toml"), "--requests", "12"]
    run = _run(stub.url, tmp_path, *flags)
    assert run.manifest.slo == {}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["points"][0]["goodput_share"] == pytest.approx(8 / 12)
    # What is asked on the command line is asked of all.
    assert main(["run", stub.url, "--no-floor", "--out", str(tmp_path / "b"), "--slo", "ttft=100s", *flags]) == 0
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["points"][0]["goodput_share"] == 1
