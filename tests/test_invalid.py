"""A load that was not offered as asked is no measurement: said aloud before any figure, and exit code 6."""

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

from tests.analysis_runs import MS, Service, make_run
from tests.test_nothing_lost import _cut_sweep
from whywait.analyze import offered
from whywait.analyze.summary import summarize
from whywait.analyze.trust import doubts
from whywait.cli import main
from whywait.core.run import Run
from whywait.load.stub import StubProcess
from whywait.report.html import render

FAST = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "4"]


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "5", "--gap-ms", "2") as s:
        yield s


@pytest.fixture(autouse=True)
def busy_box_is_no_failure() -> None:
    """Instead of that in conftest.py: here the bounds are as users meet them."""


def _open(late_ms: list[float], **more: Any) -> dict[str, Any]:
    """Summary of an open loop, a request each 10 ms, each sent so late and answered in 50 ms."""
    rows = [{"due_ns": i * 10 * MS, "sent_ns": (t := i * 10 * MS + round(late * MS)), "first_ns": t + 20 * MS,
             "last_ns": t + 50 * MS, "end_ns": t + 50 * MS} for i, late in enumerate(late_ms)]  # fmt: skip
    point = {"mode": "rate", "target": 100.0, "start_ns": 0, **more.pop("point", {})}
    return summarize(make_run(rows, points=[point], **more))


def test_the_bound_is_named_with_what_passed_it() -> None:
    assert _open([0.5] * 100)["invalid"] == []
    s = _open([0.5] * 90 + [30.0] * 10)
    why = "sends were 30.0 ms late (p99; at most 5.00 ms), 97.1 of 100 requests/s were sent"
    assert s["invalid"] == [f"at 100 requests/s {why}"]
    assert s["points"][0]["offered"]["lag_limit_ms"] == 5.0


def test_one_late_send_is_no_p99() -> None:
    assert _open([0.5] * 29 + [30.0] + [0.5] * 30)["points"][0]["offered"]["valid"] is True
    assert _open([0.5] * 29 + [30.0, 20.0] + [0.5] * 30)["points"][0]["offered"]["valid"] is False


def test_a_short_span_is_off_by_no_more_than_a_lag() -> None:
    """Four requests in 30 ms, the last 2 ms late: 6 % off the rate, and every send on time."""
    assert _open([0.0, 0.0, 0.0, 2.0])["points"][0]["offered"]["valid"] is True


def _cut(after: int, behind_ms: float = 0.5, **manifest: Any) -> tuple[dict[str, Any], list[str]]:
    """Summary and doubts of an open loop of 400 requests, one each 10 ms and later one each 20 ms, that was cut
    when request ``after`` was due; the client sent each of those before ``behind_ms`` late."""
    due = [(10 * i + 10 * max(i - 100, 0)) * MS for i in range(400)]
    due[after] = due[after - 1] + 2 * MS
    end, rows = due[after] + MS, []
    for t in due:
        sent = t + round(behind_ms * MS)
        row = {"due_ns": t, "sent_ns": sent, "first_ns": sent + MS, "last_ns": sent + 50 * MS, "end_ns": sent + 50 * MS}
        if sent >= end or t == due[after]:
            row = {"due_ns": t, "outcome": "never_sent", "detail": "interrupted"}
        elif row["end_ns"] > end:
            row = {"due_ns": t, "sent_ns": sent, "end_ns": end, "outcome": "censored", "detail": "interrupted"}
        rows.append(row)
    point = {"mode": "rate", "target": 100.0, "start_ns": 0, "end_ns": end}
    run = make_run(rows, points=[point], **{"partial": True, **manifest})
    return summarize(run), [d["what"] for d in doubts(run)]


@pytest.mark.parametrize("after", [8, 30, 150])
def test_what_was_cut_is_held_to_the_rate_of_the_time_it_was_offered(after: int) -> None:
    """The rest of the timetable was never due; nor is the one that was due as it was cut a send that is missing."""
    s, said = _cut(after)
    assert (s["invalid"], s["points"][0]["offered"]["valid"]) == ([], True)
    assert "the load was not offered as planned" not in said
    late, _ = _cut(after, behind_ms=60.0)
    assert "sends were 60.0 ms late" in late["invalid"][0]  # a client that was late is late, cut or not
    whole, said = _cut(150, partial=False)
    assert "were sent" in whole["invalid"][0]  # what a run that was not cut left out is missing
    assert "the load was not offered as planned" in said


def _closed(late_ms: float, after: int) -> dict[str, Any]:
    """Summary of a closed loop of one place, 40 requests of 100 ms each, the client late from ``after`` on."""
    rows, free = [], 0
    for i in range(40):
        sent = free + (round(late_ms * MS) if i >= after else 0)
        rows.append({"due_ns": free, "sent_ns": sent, "first_ns": sent + MS, "last_ns": sent + 100 * MS,
                     "end_ns": sent + 100 * MS})  # fmt: skip
        free = sent + 100 * MS
    return summarize(make_run(rows, points=[{"start_ns": 0, "end_ns": free}]))


def test_a_closed_loop_is_invalid_by_the_load_that_was_missing() -> None:
    """Latencies count from the send there: a few late ones change nothing, many take the load away."""
    few, many = _closed(20.0, after=38), _closed(20.0, after=20)
    assert few["points"][0]["offered"]["client_lag_ms"] == 20.0
    assert few["points"][0]["offered"]["idle_share"] == pytest.approx(40 / 4040)
    assert few["invalid"] == []
    (said,) = many["invalid"]
    late = "sends were 20.0 ms late (p99; at most 5.00 ms)"
    assert said == f"at concurrency 1 {late}, so that 9.1 % of the load asked for was missing"
    assert _closed(4.0, after=0)["invalid"] == []


def test_points_of_our_own_do_not_make_a_run_invalid() -> None:
    late = [0.5] * 90 + [30.0] * 10
    s = _open(late, point={"label": "long prompts mixed in"})
    assert s["points"][0]["offered"]["valid"] is False
    assert s["invalid"] == []


def _one_place(idle_ms: int, **manifest: Any) -> dict[str, Any]:
    """An open loop whose requests take 50 ms and wait for one place; from the 20th on the client leaves it idle."""
    rows, free = [], 0
    for i in range(40):
        sent = max(i * 10 * MS, free) + (idle_ms * MS if i >= 20 else 0)
        free = sent + 50 * MS
        rows.append({"due_ns": i * 10 * MS, "sent_ns": sent, "first_ns": sent + MS, "last_ns": free, "end_ns": free})
    run = make_run(rows, points=[{"mode": "rate", "target": 100.0, "start_ns": 0}], **manifest)
    found: dict[str, Any] = summarize(run)["points"][0]["offered"]
    return found


def test_waiting_for_a_place_under_a_cap_was_asked_for() -> None:
    capped = {"max_in_flight": 1}
    waits = _one_place(0, workload=capped)
    assert (waits["valid"], waits["client_lag_ms"]) == (True, 0.0)
    assert waits["lag_ms"]["max"] > 1000
    assert _one_place(0)["valid"] is False
    late = _one_place(30, workload=capped)
    assert (late["valid"], late["client_lag_ms"]) == (False, 30.0)
    # Of several processes it is not known which waited for the end of which request.
    assert _one_place(30, workload=capped, client={"shards": [{}, {}]})["valid"] is None


def test_the_report_says_it_above_everything() -> None:
    run = Service().closed(4, 40)
    summary = {**summarize(run), "verdicts": [], "headline": "x", "invalid": ["at <b> sends were late"]}
    page = render(run, summary)
    assert page.index("INVALID") < page.index("<h1")
    assert "at &lt;b&gt; sends were late" in page


def test_a_client_that_was_stopped(stub: StubProcess, tmp_path: Path) -> None:
    """End to end: the process sleeps for a second in the middle of an open loop."""
    out = tmp_path / "r"
    argv = [sys.executable, "-m", "whywait", "run", stub.url, *FAST, "--rate", "40", "--duration", "3s"]
    p = subprocess.Popen([*argv, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        log = out / "spool" / "log.jsonl"
        while p.poll() is None and not (log.exists() and log.read_bytes().count(b'["sent"') >= 4):
            time.sleep(0.02)
        os.kill(p.pid, signal.SIGSTOP)
        time.sleep(1.0)
    finally:
        os.kill(p.pid, signal.SIGCONT)
    text, err = p.communicate(timeout=60)
    assert p.returncode == 6, err
    assert "INVALID: the client was late" in text
    assert text.index("INVALID") < text.index("TTFT p50")
    assert "the measurement is invalid: at 40 requests/s sends were" in err
    assert "Traceback" not in err
    assert len(Run.load(out).requests) > 50
    assert json.loads((out / "summary.json").read_text())["points"][0]["offered"]["valid"] is False


@pytest.fixture
def always_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that no send keeps."""
    monkeypatch.setattr(offered, "RATE", -1.0)
    monkeypatch.setattr(offered, "LAG_MS", -1.0)
    monkeypatch.setattr(offered, "LAG_SHARE", -1.0)


@pytest.mark.usefixtures("always_late")
def test_which_code_wins(stub: StubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["sweep", stub.url, *FAST, "--concurrency", "1,2", "--requests", "6"]
    assert main([*base, "--out", str(tmp_path / "a")]) == 6
    text, err = capsys.readouterr()
    assert text.count("INVALID") == 2
    assert "at concurrency 1 sends" in err
    assert "at concurrency 2 sends" in err
    assert main([*base, "--out", str(tmp_path / "b"), "--fail-if", "e2e_ms.p50>0.001"]) == 1
    assert main([*base, "--out", str(tmp_path / "c"), "--strict"]) == 6
    assert main(["show", str(tmp_path / "a")]) == 0  # reading it again is no new failure, and it is said again
    assert "INVALID" in capsys.readouterr().out
    _cut_sweep(stub, cut := tmp_path / "cut")
    assert main(["resume", str(cut), "--no-floor", "--out", str(tmp_path / "whole")]) == 6
    with StubProcess("--fault-every", "2", "--fault", "http_500", "--ttft-ms", "2") as s:
        failing = main(["run", s.url, *FAST, "--requests", "9", "--out", str(tmp_path / "d")])
    assert failing == 4  # five of nine failed: the service's fault comes first


@pytest.mark.usefixtures("always_late")
def test_diagnose_says_it_and_keeps_its_report(stub: StubProcess, tmp_path: Path) -> None:
    argv = ["diagnose", stub.url, "--no-floor", "--budget", "4s", "--out", str(tmp_path / "r")]
    assert main(argv) == 6
    assert "INVALID" in (tmp_path / "r" / "report.html").read_text()


def test_a_closed_loop_cut_before_anything_ended_is_not_held_to_be_late() -> None:
    """How much of the places' time the client let pass is not known before an answer has ended."""
    rows = [{"due_ns": 0, "sent_ns": 27 * MS, "end_ns": 53 * MS, "outcome": "censored"} for _ in range(2)]
    point = {"mode": "concurrency", "target": 2.0, "start_ns": 0, "end_ns": 53 * MS}
    cut = summarize(make_run(rows, points=[point], partial=True))
    assert (cut["invalid"], cut["points"][0]["offered"]["valid"]) == ([], None)
