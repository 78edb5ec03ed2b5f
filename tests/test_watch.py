"""``whywait watch`` against a service that only has a metrics page: nothing else is sent, the last window is judged."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from tests.metrics_pages import FakePrometheus, engine, serving, vllm_page
from whywait import engines
from whywait.analyze.summary import summarize
from whywait.cli import main
from whywait.core.run import Run
from whywait.judge.diagnose import judge
from whywait.probe.spool import Spool, Tail
from whywait.report.watch import view

FAST = ["--hz", "10"]


def queueing(t: float) -> str:
    """4 requests in work, 12 wait, 5 end per second."""
    return vllm_page(4, 12, int(5 * t))


def test_once_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Mapping[str, str]] = []
    out = tmp_path / "run"
    with engine(queueing, seen) as url:
        assert main(["watch", url, "--once", "--json", "--window", "2s", "--out", str(out), *FAST]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {s["path"] for s in seen} <= {"/v1/models", "/metrics", "/prometheus/metrics"}
    assert {s["user-agent"].partition("/")[0] for s in seen} == {"whywait"}
    [point] = told["points"]
    assert point["phases"]["queue"]["share"] == pytest.approx(0.75)
    assert point["passive"]["in_flight"] == 16
    assert point["occupancy"]["shares"]["idle_no_work"] == 0
    lead = told["verdicts"][0]
    assert lead["state"] in ("holds", "undecided")
    assert lead["share"] == pytest.approx(0.75)
    assert told["window"]["end_unix_s"] - told["window"]["start_unix_s"] == pytest.approx(2, abs=1)
    run = Run.load(out)
    assert run.manifest.journey["verb"] == "watch"
    assert len(run.points) == 1
    assert not (out / "spool").exists()
    assert main(["show", str(out)]) == 0


def test_ended_by_a_signal_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with engine(queueing) as url:
        command = [sys.executable, "-m", "whywait", "watch", url, "--json", "--window", "1s", "--out", str(out), *FAST]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert all(line["points"] for line in lines)
    assert len(Run.load(out).points) >= 2


def test_killed_it_is_still_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with engine(queueing) as url:
        command = [sys.executable, "-m", "whywait", "watch", url, "--json", "--window", "1s", "--out", str(out), *FAST]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.kill()
        process.communicate(timeout=60)
    run = Run.load(out)
    assert run.manifest.partial
    assert len(run.points) >= 2
    assert (run.readings["name"] == "running").any()


def test_several_replicas_and_the_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of another host is not sent the service's key, nor the user's own headers."""
    monkeypatch.setenv("WHYWAIT_API_KEY", "geheim-3")
    seen: list[Mapping[str, str]] = []
    with engine(queueing, seen) as a, engine(lambda t: vllm_page(1, 0, int(t), kv=0.25)) as b:
        other = a.replace("127.0.0.1", "localhost")
        pages = ["--metrics-url", f"{other}/metrics", "--metrics-url", f"{b}/metrics"]
        assert (
            main(["watch", b, *pages, "--header", "X-Own: geheim-4", "--once", "--json", "--window", "2s", *FAST]) == 0
        )
    rows = json.loads(capsys.readouterr().out)["points"][0]["passive"]["replicas"]
    assert [(r["source"], r["running"], r["waiting"], r["kv_use"]) for r in rows] == [
        ("metrics/0", 4, 12, 0.5), ("metrics/1", 1, 0, 0.25)]  # fmt: skip
    assert seen
    assert not [s for s in seen if "geheim" in str(s)]


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ([], 2, "give a URL, or --prometheus"),
        (["URL", "--hz", "50"], 2, "would cost the service"),
        (["URL", "--window", "1s"], 2, "at least 3 looks"),
        (["URL", "--metrics-url", "nothing"], 2, "is not a URL"),
        (["URL", "--metrics-url", "http://h:port/"], 2, "is not a URL"),
        (["URL", "--metrics-url", "URL/none"], 2, "does not answer (HTTP 404)"),
        (["URL", "--metrics-url", "URL/v1/models"], 2, "no engine whywait knows"),
        (["URL", "--metrics-url", "URL/metrics", "--prometheus", "http://127.0.0.1:9"], 2, "count everything twice"),
        (["URL", "--engine-file", "/nowhere.toml"], 2, "No such file"),
        (["URL", "--prometheus", "http://127.0.0.1:9"], 4, "is that the Prometheus's URL?"),
        (["http://127.0.0.1:9"], 4, "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_watched(flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(queueing) as url:
        assert main(["watch", "--once", *(f.replace("URL", url) for f in flags)]) == code
    assert said in capsys.readouterr().err


def test_a_service_without_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(path: str, *_: object) -> tuple[int, str, bytes]:
        return (200, "application/json", b'{"data":[{"id":"m"}]}') if path == "/v1/models" else (404, "text/plain", b"")

    with serving(ask) as url:
        assert main(["watch", url, "--once"]) == 2
    assert "publishes no metrics" in capsys.readouterr().err


def test_the_view_shows_both_accounts_and_every_replica() -> None:
    from tests.test_passive import counter, level, loaded, watched

    run = watched(*loaded(), level("running", 1, "metrics/1"), level("waiting", 0, "metrics/1"),
                  counter("output_tokens_total", 5, "metrics/1"))  # fmt: skip
    summary = summarize(run)
    told = _text(view(summary, judge(run, summary), "http://x", 30))
    for what in ("last 30 s", "requests wait for", "the device is in", "queue", "decode", "metrics/1", "arriving/s"):
        assert what in told
    # A name in brackets, such as an IPv6 address, is a name and no markup.
    summary["points"][0]["passive"]["replicas"][0]["instance"] = "[fd00::1]:8000 [/x]"
    assert "[fd00::1]:8000 [/x]" in _text(view(summary, judge(run, summary), "http://x", 30))
    assert "no reading yet" in _text(view({"points": []}, [], "http://x", 30))


def _text(part: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(part)
    return console.export_text()


def test_the_tail_of_a_growing_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.probe.spool.EMPTY_AT", 200)
    path = tmp_path / "readings.jsonl"
    tail = Tail(path, keep=False)
    assert tail.rows(0) == []
    spool = Spool(str(path))
    for k in range(10):
        spool.write(k, k, "metrics/0", [("running", None, float(k))])
        assert [row["value"] for row in tail.rows(k - 2)] == [float(j) for j in range(max(0, k - 2), k + 1)]
    assert path.stat().st_size < 200
    with open(path, "ab") as file:  # half a line is waited for
        file.write(b'[10,10,"metrics/0","runn')
    assert [row["asked_ns"] for row in tail.rows(9)] == [9]
    with open(path, "ab") as file:
        file.write(b'ing",null,10.0]\n')
    assert [row["asked_ns"] for row in tail.rows(9)] == [9, 10]
    spool.close()


def test_only_a_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    pages = {f"{name}:8000": [(now + k, vllm_page(2, 0, max(0, k + 60))) for k in range(-60, 60)] for name in "ab"}
    fake = FakePrometheus(pages)
    with serving(fake) as url:
        flags = ["--prometheus", url, "--prometheus-match", '{job="svc"}', "--once", "--json", "--window", "6s"]
        assert main(["watch", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    [point] = told["points"]
    assert point["requests_per_s"] == pytest.approx(2, rel=0.2)
    assert {r["instance"] for r in point["passive"]["replicas"]} == {"a:8000", "b:8000"}
    assert all('job="svc"' in form.get("query", form.get("match[]", "")) for _, form in fake.asked)


def test_a_prometheus_that_goes_away_is_a_doubt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    fake = FakePrometheus({"a:8000": [(now + k, vllm_page(2, 0, max(0, k + 60))) for k in range(-60, 60)]})
    left = iter(range(6))  # the name of the engine, then a look or two

    def fading(path: str, form: dict[str, str], headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        return fake(path, form, headers) if next(left, None) is not None else (503, "text/plain", b"gone")

    out = tmp_path / "run"
    with serving(fading) as url:
        flags = ["--prometheus", url, "--json", "--window", "1s", "--for", "5s", "--out", str(out)]
        assert main(["watch", *flags]) == 0
    windows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(windows) == 5  # it went on
    assert windows[0]["points"][0]["passive"]["in_flight"] == 2
    lost = "the Prometheus did not answer all the time"
    assert [sum(d["what"] == lost for d in w["doubts"]) for w in (windows[0], windows[-1])] == [0, 1]
    assert lost in {d["what"] for d in Run.load(out).manifest.doubts}


def test_ended_before_the_first_window_is_no_success(tmp_path: Path) -> None:
    with engine(queueing) as url:
        command = [sys.executable, "-m", "whywait", "watch", url, "--once", "--json", "--window", "60s", *FAST]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert b"watching" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"before a window was whole" in err


def test_an_engine_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(engines.FILE_ENV, "")  # so that what the flag sets is taken back
    table = tmp_path / "own.toml"
    table.write_text('name = "own"\nmetric_prefixes = ["own_"]\n[metrics]\nown_busy = "running"\nown_line = "waiting"\n'
                     '[flags]\nslots = "--seats N"\n')  # fmt: skip
    with engine(lambda t: "own_busy 2\nown_line 6\n") as url:
        assert main(["watch", url, "--once", "--json", "--window", "1s", *FAST]) == 2
        assert "publishes no metrics" in capsys.readouterr().err
        flags = ["--engine-file", str(table), "--once", "--json", "--window", "1s", *FAST]
        assert main(["watch", url, *flags]) == 0
    [point] = json.loads(capsys.readouterr().out)["points"]
    assert point["phases"]["queue"]["share"] == pytest.approx(0.75)
