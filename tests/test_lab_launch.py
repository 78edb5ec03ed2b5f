"""Launching a command, with a small HTTP server in the engine's place: nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import gone
from whywait.errors import EngineDied, UsageError
from whywait.lab import ask, launch, places, state

SRC = Path(__file__).resolve().parents[1] / "src"

FAKE = """
import http.server, json, subprocess, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for n in range(20):
    print("loading shard", n, flush=True)
print("INFO kv_cache_utils.py:2327] CPU KV cache size: 12,288 tokens, "
      "Maximum concurrency for 2,048 tokens per request: 6.00x", flush=True)
if "--stray" in options:  # a helper that leaves the group and ignores SIGTERM
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"
    stray = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    open(options["--stray"], "w").write(str(stray.pid))
if "--die" in options:
    print("ValueError: no such model", file=sys.stderr, flush=True)
    sys.exit(int(options["--die"]))
began = time.time()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        late = time.time() - began < float(options.get("--load-s", 0))
        status = 503 if late else 200 if self.path in ("/health", "/v1/models") else 404
        body = json.dumps({"data": [{"id": "tiny", "max_model_len": 2048}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WHYWAIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def fake(tmp_path, port):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return f"{sys.executable} -S -E {script} --port {port}"


def test_a_command_is_started_described_and_stopped(fake, port):
    with launch.launched(lambda: launch.start_command(fake + " --load-s 0.5")) as engine:
        assert engine.url == f"http://127.0.0.1:{port}"
        assert (engine.model, engine.kind) == ("tiny", "command")
        assert (engine.kv_tokens, engine.ctx_per_slot, engine.max_num_seqs) == (12288, 2048, None)
        assert engine.pid != os.getpid()
        assert os.getpgid(engine.pid) == engine.pid
        assert state.running() == [engine]
        assert ask.ready(engine.url)
        guard = engine.guard_pid
    assert gone(engine.pid, 0)
    assert gone(guard, 0)
    assert state.running() == []


def test_a_command_that_dies_shows_its_last_lines(fake):
    with pytest.raises(EngineDied) as err:
        launch.start_command(fake + " --die 3")
    message = err.value.message
    assert "code 3" in message
    assert "ValueError: no such model" in message
    assert "loading shard 19" in message
    assert "loading shard 3\n" not in message
    assert len(message.splitlines()) == 13
    assert str(places.engines_dir()) in err.value.hint
    assert state.running() == []


def test_a_command_that_is_never_ready_is_ended(fake):
    with pytest.raises(EngineDied, match="within 1 s"):
        launch.start_command(fake + " --load-s 100", ready_timeout_s=1, name="slow")
    assert state.running() == []


def test_a_port_in_use_is_said_before_starting(fake, port):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match="already listens"):
        launch.start_command(fake)


def test_helpers_that_left_the_group_end_too(fake, tmp_path):
    engine = launch.start_command(f"{fake} --stray {tmp_path / 'stray'}")
    stray = int((tmp_path / "stray").read_text())
    assert os.getpgid(stray) != engine.pid
    launch.stop(engine)
    assert gone(stray, 0)
    assert gone(engine.pid, 0)
    launch.stop(engine)  # a second time does nothing


def test_an_engine_killed_behind_our_back_leaves_nothing(fake, tmp_path):
    engine = launch.start_command(f"{fake} --stray {tmp_path / 'stray'}")
    os.kill(engine.pid, signal.SIGKILL)
    assert gone(int((tmp_path / "stray").read_text()))
    assert gone(engine.guard_pid)
    assert state.running() == []
    launch.stop(engine)


def test_an_error_inside_the_block_stops_the_engine(fake):
    with pytest.raises(ZeroDivisionError), launch.launched(lambda: launch.start_command(fake)) as engine:
        _ = 1 / 0
    assert gone(engine.pid, 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PARENT = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, or in a background job, we were born deaf to these
signal.signal(signal.SIGINT, signal.default_int_handler)
from whywait.lab import launch
with launch.launched(lambda: launch.start_command(sys.argv[1])) as engine:
    print(engine.pid, engine.guard_pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9), (signal.SIGINT, None)]
)
def test_the_engine_ends_whatever_ends_us(fake, signum, code):
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), fake],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signum)
    assert parent.wait(15) == code or code is None
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)
    assert state.running() == []


def test_a_killed_guard_takes_the_command_with_it(fake):
    if sys.platform != "linux":
        pytest.skip("needs PR_SET_PDEATHSIG")
    engine = launch.start_command(fake)
    os.kill(engine.guard_pid, signal.SIGKILL)
    assert gone(engine.pid)
    launch.stop(engine)
