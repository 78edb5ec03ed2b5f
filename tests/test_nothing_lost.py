"""Whatever ends a run, there is a loadable Run with exact counts, labelled PARTIAL; and it can be finished."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait import app
from whywait.analyze.trust import doubts
from whywait.cli import main
from whywait.core.check import violations
from whywait.core.recorder import spools_of
from whywait.core.run import Run
from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.errors import UsageError
from whywait.load.stub import StubProcess
from whywait.session import Options, Session

FAST = ["--no-floor", "--prompt-tokens", "16"]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--tokens", "8", "--timings") as s:
        yield s


def _start(stub: StubProcess, out: Path, *flags: str, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "whywait", "run", stub.url, *FAST, "--out", str(out), *flags]
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=limit,  # noqa: PLW1509
    )


def _until(process: subprocess.Popen[str], out: Path, word: bytes, count: int) -> None:
    """Until the spools hold this many of that line."""
    while process.poll() is None:
        logs = [s / "log.jsonl" for s in spools_of(out)]
        if sum(log.read_bytes().count(word) for log in logs if log.exists()) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate())


def _exact(run: Run) -> dict[str, int]:
    """Counts by outcome; with them that planned = their sum, point by point."""
    assert violations(run) == []
    outcomes = run.requests.text("outcome")
    assert int(run.points["planned"].sum()) == len(outcomes)
    return {str(o): outcomes.count(o) for o in sorted(set(outcomes), key=str)}


def _end(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    assert "panicked" not in err
    return out + err


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("long", [False, True])
def test_kill_9(stub: StubProcess, tmp_path: Path, processes: str, long: bool) -> None:
    """In the middle of answers, and between short ones."""
    out = tmp_path / "r"
    tokens = "2000" if long else "2"
    p = _start(
        stub, out, "--concurrency", "4", "--requests", "3000", "--output-tokens", tokens, "--processes", processes
    )
    _until(p, out, b'["sent"' if long else b'["ended"', 4 if long else 40)
    os.killpg(p.pid, signal.SIGKILL)
    p.communicate()
    run = Run.load(out)
    assert run.manifest.partial
    counts = _exact(run)
    assert sum(counts.values()) == 3000
    assert counts.get("censored", 0) <= 4
    assert set(counts) <= {"ok", "censored", "never_sent"}
    assert counts.get("ok", 0) >= (0 if long else 40)
    assert main(["show", str(out)]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal(stub: StubProcess, tmp_path: Path, number: int) -> None:
    out = tmp_path / "r"
    p = _start(stub, out, "--concurrency", "4", "--requests", "50", "--output-tokens", "2000")
    _until(p, out, b'["sent"', 4)
    p.send_signal(number)
    assert "PARTIAL" in _end(p)
    assert p.returncode == 130
    run = Run.load(out)
    assert run.manifest.partial_reason == "interrupted"
    assert _exact(run) == {"censored": 4, "never_sent": 46}
    assert not spools_of(out)


@LINUX
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_full_disk_while_recording(stub: StubProcess, tmp_path: Path, processes: str) -> None:
    """No file may grow beyond 64 KB: the write fails as on a full disk; what is there is a Run."""
    out = tmp_path / "r"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    flags = ("--concurrency", "16", "--requests", "200", "--output-tokens", "400", "--processes", processes)
    p = _start(stub, out, *flags, limit=limit)
    said = _end(p)
    assert p.returncode == 2, said
    lines = [x for x in said.splitlines() if x.startswith("whywait:")]
    assert len(lines) == 1, said
    assert "the disk did not take the whole run (File too large)" in lines[0]
    run = Run.load(out)
    assert run.manifest.partial
    counts = _exact(run)
    assert sum(counts.values()) == 200
    assert max(f.stat().st_size for f in out.rglob("*") if f.is_file()) <= 1 << 16
    assert len(run.chunks) > 100  # what was there before is kept, and no row of it is torn
    assert main(["show", str(out)]) == 0


@LINUX
def test_a_disk_that_is_full_when_the_run_is_over(stub: StubProcess, tmp_path: Path) -> None:
    """A small file system of its own, if we may mount one: recording fits, finishing does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        out = disk / "r"
        p = _start(stub, out, "--concurrency", "4", "--requests", "40", "--output-tokens", "20")
        _until(p, out, b'["ended"', 20)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        try:  # all but what the rest of the recording needs
            (disk / "ballast").write_bytes(b"x" * max(0, free - 60_000))
        except OSError:
            pytest.skip("the disk filled up before it was to")
        said = _end(p)
        if p.returncode == 0:
            pytest.skip("everything found room")
        assert p.returncode == 2, said
        assert "No space left on device" in said
        run = Run.load(out)
        assert _exact(run)
        os.unlink(disk / "ballast")
        assert main(["show", str(out)]) == 0
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_the_service_dies(tmp_path: Path) -> None:
    out = tmp_path / "r"
    with StubProcess("--ttft-ms", "5", "--gap-ms", "5") as s:
        p = _start(s, out, "--concurrency", "4", "--requests", "2000", "--output-tokens", "20")
        _until(p, out, b'["ended"', 8)
        os.kill(s.pid, signal.SIGKILL)
        said = _end(p)
    assert p.returncode == 4, said
    run = Run.load(out)
    assert "failed in a row" in run.manifest.partial_reason
    counts = _exact(run)
    assert counts["ok"] >= 8
    assert counts["refused"] + counts.get("reset", 0) >= 40
    assert sum(counts.values()) == 2000


@LINUX
def test_the_client_is_suspended(stub: StubProcess, tmp_path: Path) -> None:
    """Two seconds of SIGSTOP: the loop stood still, and the run says when and for how long."""
    out = tmp_path / "r"
    p = _start(stub, out, "--concurrency", "2", "--requests", "4", "--output-tokens", "600")
    _until(p, out, b'["accepted"', 2)
    os.kill(p.pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(p.pid, signal.SIGCONT)
    said = _end(p)
    assert p.returncode in (0, 6), said  # 6: sends were late by it
    run = Run.load(out)
    (doubt,) = [d for d in run.manifest.doubts if d["what"] == "the client stood still"]
    seconds = float(doubt["why"].split("for ")[1].split(" s")[0])
    assert seconds >= 1.9
    assert "the client stood still" in said
    assert _exact(run) == {"ok": 4}


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 1\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def _options(stub: StubProcess, out: Path, **more: Any) -> Options:
    lengths = RequestClass(prompt_tokens=Lengths("fixed", 16), output_tokens=Lengths("fixed", 40))
    return Options(stub.url, workload=Workload((lengths,)), out=str(out), floor=False, **more)


def test_a_source_of_metrics_goes_away(stub: StubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its readings end; they do not become zeros, and the run says so."""
    import dataclasses

    from whywait import session

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    find, url = session.preflight.find, f"http://127.0.0.1:{server.server_port}/metrics"
    monkeypatch.setattr(session.preflight, "find", lambda *a: dataclasses.replace(find(*a), metrics_urls=(url,)))
    gone: list[int] = []

    def watch(_p: object) -> None:
        if not gone:
            server.shutdown()
            server.server_close()
            gone.append(s.clock.now())

    try:
        with Session(_options(stub, tmp_path / "r", metrics_hz=20.0), lambda _line: None, watch) as s:
            assert s.point(app.Load("concurrency", 2, duration_s=2.0))
            run = s.finish()
    finally:
        if not gone:
            server.shutdown()
            server.server_close()
        thread.join()
    page = run.readings.where(run.readings["source"] == "metrics/0")
    answered = page.where(page["name"] == "answered")
    assert answered["value"][0] == 1
    assert answered["value"][-1] == 0
    assert len(answered.where(answered["value"] == 0)) > 3
    others = page.where((page["name"] != "answered") & (page["asked_ns"] > gone[0] + 100_000_000))
    assert len(others) == 0
    assert any("readings were not answered" in d["what"] for d in doubts(run))
    assert not run.manifest.partial


def test_the_sampler_dies(stub: StubProcess, tmp_path: Path) -> None:
    def watch(_p: object) -> None:
        if s._watching.pid:
            os.kill(s._watching.pid, signal.SIGKILL)

    with Session(_options(stub, tmp_path / "r"), lambda _line: None, watch) as s:
        assert s.point(app.Load("concurrency", 2, duration_s=1.2))
        run = s.finish()
    (doubt,) = [d for d in run.manifest.doubts if "sampler" in d["what"]]
    assert "before its time" in doubt["why"]
    assert len(run.readings) > 0
    assert set(_exact(run)) == {"ok"}


# Resuming


def _cut_sweep(stub: StubProcess, out: Path) -> None:
    argv = [sys.executable, "-m", "whywait", "sweep", stub.url, *FAST, "--output-tokens", "40", "--concurrency",
            "1,2,3", "--requests", "8", "--slo", "ttft=1s", "--out", str(out)]  # fmt: skip
    p = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _until(p, out, b'["ended"', 11)  # in the second point
    p.kill()
    p.communicate()


def _recorded(folder: Path) -> dict[Path, bytes]:
    """What lies there, but for readings: the sampler may outlive the killed process by one."""
    return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != "readings.jsonl"}


def test_resume_finishes_a_sweep(stub: StubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut, out = tmp_path / "cut", tmp_path / "whole"
    _cut_sweep(stub, cut)
    before = _recorded(cut)
    old = Run.load(cut)
    assert main(["resume", str(cut), "--no-floor", "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    assert "1 of 3 points are taken over" in said.err
    assert [p["target"] for p in json.loads(said.out)["points"]] == [1, 2, 3]
    run = Run.load(out)
    assert _exact(run) == {"ok": 24}
    assert run.points["planned"].tolist() == [8, 8, 8]
    assert not run.manifest.partial
    assert run.manifest.zero_unix_ns == old.manifest.zero_unix_ns
    first = old.requests.where(old.requests["point"] == 0)
    assert run.requests.where(run.requests["point"] == 0) == first
    assert (np.diff(run.points["start_ns"]) > 0).all()
    # The time between the halves is in the times.
    assert int(run.points["start_ns"][1]) > int(old.points["end_ns"].max())
    halves = run.manifest.halves
    assert [h["points"] for h in halves] == [[0], [1, 2]]
    assert halves[0]["run"] == str(cut)
    assert run.manifest.slo == {"ttft_ms": 1000.0}
    assert _recorded(cut) == before
    assert len(set(run.requests["id"].tolist())) == 24
    assert main(["resume", str(out), "--no-floor"]) == 2  # nothing is missing
    assert "nothing is missing" in capsys.readouterr().err


def test_resume_refuses_another_service(stub: StubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut, out = tmp_path / "cut", tmp_path / "whole"
    _cut_sweep(stub, cut)
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--model", "other") as other:
        manifest = app.options_of(cut)
        assert manifest.url.startswith("http://127.0.0.1")
        argv = ["resume", str(cut), "--no-floor", "--url", other.url, "--out", str(out)]
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "engine model was stub, is other" in said
        assert "--anyway" in said
        assert not out.exists()
        assert main([*argv, "--anyway"]) == 0
    run = Run.load(out)
    assert _exact(run) == {"ok": 24}
    assert any("different services" in d["what"] for d in run.manifest.doubts)


def test_what_says_nothing_of_its_loads_cannot_be_resumed(stub: StubProcess, tmp_path: Path) -> None:
    with Session(_options(stub, tmp_path / "r"), lambda _line: None) as s:
        s.point(app.Load("concurrency", 1, 2))
        s.finish().save(tmp_path / "r")
    with pytest.raises(UsageError, match="does not say what was to be measured"):
        app.options_of(tmp_path / "r")
