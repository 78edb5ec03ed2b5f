"""The command line as a user meets it: exit codes, one clear line per mistake, nothing lost. On the stub service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from whywait.cli import VERBS, main, parser
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.load.stub import StubProcess

FAST = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "4"]


@pytest.fixture(scope="module")
def stub() -> Any:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "3", "--slots", "2", "--timings") as s:
        yield s


def call(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as exc:
        return int(exc.code or 0)


def one_clear_line(err: str) -> str:
    """The complaint: one line and a hint, no traceback."""
    assert "Traceback" not in err
    lines = [x for x in err.splitlines() if x.startswith("whywait")]
    assert len(lines) == 1, err
    return err


def test_help_of_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert call(verb, "--help") == 0
    assert call("--help") == 0
    assert "exit codes" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    heavy = "('numpy', 'rich', 'arro3', 'asyncio')"
    code = f"import sys; from whywait.cli import parser; parser(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (["run", "ftp://x"], 2, "not an http"),
        (["run", "http://127.0.0.1:9"], 4, "refuses connections"),
        (["run", "http://no-such-host.invalid"], 4, "does not resolve"),
        (["run", "http://user:pw@127.0.0.1:9"], 2, "must not carry a password"),
        (["run"], 2, "which service"),
        (["run", "http://127.0.0.1:9", "--timeout", "soon"], 2, "--timeout"),
        (["run", "http://127.0.0.1:9", "--slo", "speed=1"], 2, "--slo"),
        (["run", "http://127.0.0.1:9", "--prompt-tokens", "many"], 2, "not a length"),
        (["run", "http://127.0.0.1:9", "--workload", "missing.toml"], 2, "missing.toml"),
        (["run", "http://127.0.0.1:9", "--api-key-file", "missing.key"], 2, "missing.key"),
        (["run", "http://127.0.0.1:9", "--fail-if", "nonsense"], 2, "nonsense"),
        (["show", "no-such-run"], 2, "holds no whywait run"),
        (["engine", "stop", "nobody-there"], 2, "nobody-there"),
    ],
)
def test_mistakes(argv: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*argv) == code
    assert word in one_clear_line(capsys.readouterr().err)


@pytest.mark.parametrize("argv", [["run", "--concurrency", "0"], ["sweep", "--rate", "1,x"], ["fly"], []])
def test_usage_is_exit_2(argv: list[str]) -> None:
    assert call(*argv) == 2


@pytest.mark.parametrize(
    ("flags", "argv", "code", "word"),
    [
        (["--api-key", "k"], [], 4, "401"),
        (["--fault", "html"], [], 4, "instead of an event stream"),
        (["--fault", "empty"], [], 4, "no tokens come"),
        (["--fault", "truncate"], [], 4, "without finish_reason"),
        (["--fault", "http_500"], [], 4, "500"),
        ([], ["--model", "gpt-9"], 4, "gpt-9"),
    ],
)
def test_whose_fault_and_what_to_try(  # noqa: PLR0917
    flags: list[str], argv: list[str], code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubProcess(*flags) as s:
        assert call("run", s.url, *argv, *FAST, "--out", str(tmp_path / "r")) == code
    err = one_clear_line(capsys.readouterr().err)
    assert word in err
    assert "→" in err


def test_a_web_page_is_not_an_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<html><body>hello</body></html>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert call("run", f"http://127.0.0.1:{server.server_port}", *FAST) == 4
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "web page" in one_clear_line(capsys.readouterr().err)


def test_not_this_machine_needs_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from whywait import session

    sent: list[str] = []
    monkeypatch.setattr(session.preflight, "find", lambda *a: sent.append("found") or 1 / 0)
    # 192.0.2.0/24 is set aside for documentation (RFC 5737); nothing is sent there.
    assert call("run", "http://192.0.2.1:8000", "--concurrency", "8", *FAST) == 2
    assert not sent
    err = one_clear_line(capsys.readouterr().err)
    assert "--load" in err
    assert "80 requests" in err


def test_run_writes_a_whole_run(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    argv = ["run", stub.url, *FAST, "--concurrency", "4", "--requests", "12", "--slo", "ttft=5s,tpot=1s", "--json"]
    assert call(*argv, "--out", str(out)) == 0
    summary = json.loads(capsys.readouterr().out)
    point = summary["points"][0]
    keys = {
        "mode", "target", "ttft_ms", "ttfa_ms", "chunk_gap_ms", "itl_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s",
        "effective_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "goodput_share", "counts", "kv_use",
        "queue", "memory_bytes", "power_w", "energy_j_per_good_request", "phases", "occupancy",
    }  # fmt: skip
    assert keys <= set(point)
    assert {"p50", "p90", "p95", "p99", "mean", "n", "ci"} <= set(point["ttft_ms"])
    assert point["counts"]["ok"] == 12 == sum(point["counts"].values())
    assert point["goodput_share"] == 1.0
    assert {"verdicts", "doubts", "points"} <= set(summary)
    run = Run.load(out)
    assert violations(run) == []
    assert json.loads((out / "summary.json").read_text())["points"] == summary["points"]
    assert not (out / "spool").exists()
    assert run.requests["output_tokens"].tolist() == [4] * 12
    assert abs(run.requests["prompt_tokens"] - 16).max() <= 2


def test_queue_behind_the_slots_is_named(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r")
    argv = ["sweep", stub.url, "--no-floor", "--prompt-tokens", "16", "--output-tokens", "40", "--concurrency", "1,8"]
    assert call(*argv, "--requests", "24", "--out", out) == 0
    text = capsys.readouterr().out
    assert "queue behind the engine's limit of 2" in text
    assert "--parallel" in text
    assert "No queue for a place at concurrency 1" in text
    assert call("show", out, "--json") == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    top = next(v for v in verdicts if v["cause"] == "slot limit")
    assert top["state"] == "holds"
    assert top["share"] > 0.5


def test_gates(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["run", stub.url, *FAST, "--requests", "4"]
    assert call(*base, "--out", str(tmp_path / "a"), "--fail-if", "e2e_ms.p50>100000") == 0
    assert call(*base, "--out", str(tmp_path / "b"), "--fail-if", "e2e_ms.p50>0.001") == 1
    assert call("show", str(tmp_path / "a"), "--fail-if", "power_w>1") == 1  # unknown does not pass
    assert "unknown" in capsys.readouterr().err
    assert call("show", str(tmp_path / "a"), "--fail-if", "no_such_key>1") == 2


def test_a_dead_service_is_exit_4_and_keeps_what_there_was(stub: Any, tmp_path: Path) -> None:
    out = tmp_path / "r"
    with StubProcess("--ttft-ms", "5", "--gap-ms", "5") as s:
        killer = threading.Timer(1.5, lambda: os.kill(s.pid, signal.SIGKILL))
        killer.start()
        code = call("run", s.url, *FAST, "--concurrency", "2", "--duration", "20s", "--out", str(out))
        killer.join()
    assert code == 4
    run = Run.load(out)
    assert run.manifest.partial
    assert "in a row" in run.manifest.partial_reason
    assert "ok" in run.requests.text("outcome")
    assert violations(run) == []


def test_failing_half_the_time_is_a_result_and_leads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StubProcess("--fault-every", "2", "--fault", "http_500") as s:
        # The first, checking request succeeds; then every second one fails.
        code = call("run", s.url, *FAST, "--requests", "10", "--out", str(tmp_path / "r"))
    assert code == 0
    assert "5 of 10 requests failed (5 http error)" in capsys.readouterr().out
    outcomes = Run.load(tmp_path / "r").requests.text("outcome")
    assert (outcomes.count("http_error"), outcomes.count("ok")) == (5, 5)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"ok": 5, "reset": 6}, "6 of 11 requests failed (6 reset)"),
        ({"ok": 5, "reset": 5, "censored": 9, "never_sent": 90}, ""),
        ({"ok": 0, "censored": 3}, "no request succeeded"),
    ],
)
def test_exit_4_is_for_more_failures_than_successes(counts: dict[str, int], said: str) -> None:
    from whywait.verbs.measure import _mostly_failed

    assert _mostly_failed({"points": [{"counts": counts}]}) == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_a_partial_run(stub: Any, tmp_path: Path, number: int) -> None:
    out = tmp_path / "r"
    argv = [sys.executable, "-m", "whywait", "run", stub.url, *FAST, "--concurrency", "2", "--duration", "60s"]
    process = subprocess.Popen([*argv, "--out", str(out)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    log = out / "spool" / "log.jsonl"
    while process.poll() is None and not (log.exists() and b'"ended"' in log.read_bytes()):
        time.sleep(0.05)
    process.send_signal(number)
    stdout, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "PARTIAL" in stdout
    run = Run.load(out)
    assert run.manifest.partial
    assert violations(run) == []


def test_kill_9_leaves_a_loadable_run(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    argv = [sys.executable, "-m", "whywait", "run", stub.url, *FAST, "--concurrency", "2", "--duration", "60s"]
    process = subprocess.Popen([*argv, "--out", str(out)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = out / "spool" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b'"ended"') > 3):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert call("show", str(out)) == 0
    assert "PARTIAL" in capsys.readouterr().out
    assert violations(Run.load(out)) == []


def test_launch_starts_and_stops_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    command = f"{sys.executable} -m whywait.load.stub --port {port} --ttft-ms 5 --gap-ms 2"
    assert call("run", "--launch", command, *FAST, "--requests", "3", "--out", str(tmp_path / "r")) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # it was stopped
    capsys.readouterr()
    bad = f"{sys.executable} -c 'import sys; print(\"no such weights\"); sys.exit(3)' --port {port}"
    assert call("run", "--launch", bad, *FAST) == 4
    assert "no such weights" in capsys.readouterr().err


def test_no_stream(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", stub.url, *FAST, "--no-stream", "--requests", "3", "--json", "--out", str(tmp_path / "r")]
    assert call(*argv) == 0
    point = json.loads(capsys.readouterr().out)["points"][0]
    assert point["counts"]["ok"] == 3
    assert point["ttft_ms"]["p50"] is None


def test_out_that_exists_is_refused(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", stub.url, *FAST, "--requests", "2", "--out", str(tmp_path / "r")]
    assert call(*argv) == 0
    before = (tmp_path / "r" / "manifest.json").read_bytes()
    capsys.readouterr()
    assert call(*argv) == 2
    assert "already holds a run" in one_clear_line(capsys.readouterr().err)
    assert (tmp_path / "r" / "manifest.json").read_bytes() == before


def test_a_fault_of_our_own_is_exit_5_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from whywait import app

    monkeypatch.delenv("WHYWAIT_DEBUG", raising=False)
    monkeypatch.setattr(app, "show", lambda _d: {}["oops"])
    assert call("show", "x") == 5
    assert "KeyError" in one_clear_line(capsys.readouterr().err)


def test_every_verb_has_flags_and_a_function() -> None:
    import importlib

    for verb, (where, text) in VERBS.items():
        module, function = where.split(":")
        assert callable(getattr(importlib.import_module(module), function)), verb
        assert text
    parser()


def test_a_reader_that_has_seen_enough_is_no_failed_gate(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with StubProcess("--ttft-ms", "1", "--gap-ms", "1") as s:
        assert main(["run", s.url, "--requests", "4", "--no-floor", "--out", str(run)]) == 0
    shell = f"{sys.executable} -m whywait show {run} | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", shell], env={**os.environ, "PYTHONPATH": "src"}, check=False).returncode == 0


def test_a_folder_with_anything_in_it_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["run", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "is not empty\n  → " in capsys.readouterr().err
