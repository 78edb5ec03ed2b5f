"""``whywait agent`` and the source that reads it: over real sockets, with and without a token, alive and gone."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from whywait.cli import main
from whywait.core import secrets
from whywait.errors import UsageError
from whywait.net.reach import Reach
from whywait.probe import Row
from whywait.probe.agent import MOST_ROWS, READINGS, Agent, AgentPage, serve
from whywait.probe.options import Probes, _facts
from whywait.probe.pages import Fetcher
from whywait.probe.sampler import Config, SamplerProcess
from whywait.probe.sources import Timed
from whywait.probe.web import Server

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def child() -> Iterator[int]:
    code = (
        "import socket,time\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate("\n")


class Served:
    def __init__(self, agent: Agent, token: str | None = None) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.server: ThreadingHTTPServer = serve(agent, self.sock, token)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        self._agent = agent

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        self._agent.close()

    def page(self, token: str | None = None) -> AgentPage:
        own = {"Authorization": f"Bearer {token}"} if token else {}
        return AgentPage("agent/0", Fetcher(self.url + READINGS, own, 30.0, Reach()))


def test_it_says_what_is_on_its_machine(child: int) -> None:
    with Served(Agent(engine_port=child)) as served:
        page = served.page()
        before = time.time_ns()
        rows = page.sample()
        spent = time.time_ns() - before
        page.close()
    assert rows is not None
    got = {(json.loads(labels)["of"] if labels else None, name): value for name, labels, value in rows}
    assert got["host", "cpu_busy_seconds_total"] > 0
    assert got["process/engine", "processes"] == 1
    assert got["process/engine", "rss_bytes"] > 1e6
    assert got["agent", "cpu_seconds_total"] > 0
    # Both clocks are the same here, so the true offset is 0, and it lies within the stated error.
    assert abs(got[None, "clock_offset_ns"]) <= got[None, "clock_error_ns"] <= spent


def test_two_readers_at_once_get_one_look() -> None:
    agent = Agent()
    assert agent.look() is agent.look()
    agent.close()


def test_a_token_is_asked_for() -> None:
    with Served(Agent(), "s3cret-word") as served:
        wrong, right = served.page("other"), served.page("s3cret-word")
        assert wrong.sample() is None
        assert wrong.why == "HTTP 401"
        assert right.sample() is not None
        for page in (wrong, right):
            page.close()
        with pytest.raises(UsageError, match="401"):
            Probes(agents=(served.url,)).prepare()


def test_a_page_that_is_no_agent_is_a_lost_probe() -> None:
    with Served(Agent()) as served:
        facts = AgentPage("agent/0", Fetcher(served.url + "/v1/facts", {}, 30.0, Reach()))
        assert facts.sample() is None
        assert facts.why == "not an agent"
        facts.close()
        gone = served.page()
    assert gone.sample() is None
    assert gone.why


class Says:
    """A page that is what we want it to be."""

    why = ""

    def __init__(self, **body: object) -> None:
        self._body = json.dumps({"agent": "1", "unix_ns": 5, "rows": [], **body}).encode()

    def get(self) -> bytes:
        return self._body

    def close(self) -> None:
        pass


def test_what_is_not_known_there_is_not_known_here() -> None:
    rows = AgentPage("agent/0", Says(rows=[["host", "a", None, 1], ["host", "b", None, None]])).sample()  # type: ignore[arg-type]
    assert rows is not None
    assert rows[0] == ("a", '{"of":"host"}', 1.0)
    assert "b" not in {name for name, _, _ in rows}  # absent, and neither 0 nor the loss of all the others


@pytest.mark.parametrize(
    "body",
    [{"rows": [["host", "a", None, "inf"]]}, {"rows": [["host", "a", None, True]]}, {"rows": 5},
     {"rows": [[1]]}, {"rows": [[["x"], "a", None, 1]]}, {"rows": [["host", "a", "[1]", 1]]},
     {"rows": [["host", "a", "{", 1]]}, {"unix_ns": "x"}, {"unix_ns": None}, {"rows": [["host", "a", None, {}]]},
     {"rows": [["host", "a", None, 1]] * (MOST_ROWS + 1)}],
)  # fmt: skip
def test_an_agent_that_talks_nonsense_is_a_lost_probe(body: dict[str, object]) -> None:
    page = AgentPage("agent/0", Says(**body))  # type: ignore[arg-type]
    assert page.sample() is None
    assert page.why == "not an agent"


def test_labels_of_an_agent_are_texts() -> None:
    rows = AgentPage("agent/0", Says(rows=[["host", "a", '{"cpus":[1]}', 1]])).sample()  # type: ignore[arg-type]
    assert rows is not None
    assert rows[0][1] == '{"cpus":"[1]","of":"host"}'


@pytest.mark.parametrize("machine", [5, {"cpu": {"nested": 1}}, {"cpu": "x" * 500}, {"cores": [1]}, {"cpu": "\x1b[2J"}])
def test_facts_that_are_none_are_refused(machine: object) -> None:
    with pytest.raises(UsageError, match="no 'whywait agent'"):
        _facts("http://x", json.dumps({"machine": machine}))


def test_one_source_that_fails_does_not_silence_the_others() -> None:
    agent = Agent()

    def broken(_now_s: float) -> list[Row]:
        raise OSError

    agent._sources.insert(0, Timed("gpu", broken))
    rows = json.loads(agent.look())["rows"]
    agent.close()
    assert ["gpu", "answered", '{"why":"OSError"}', 0.0] in rows
    assert ["host", "answered", None, 1.0] in rows


def test_a_token_that_is_easily_guessed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("short\n")
    assert main(["agent", "--listen", "0.0.0.0:0", "--token-file", str(tmp_path / "token")]) == 2
    with pytest.raises(UsageError, match="fewer than 8"):
        Probes(otlp_listen="0", otlp_token_file=str(tmp_path / "token")).prepare()
    assert "fewer than 8" in capsys.readouterr().err


def test_the_token_is_hidden_here_too(tmp_path: Path) -> None:
    """Whatever answers may say it back to us: it must not come into a manifest by that way."""
    (tmp_path / "token").write_text("one-of-a-kind")
    with Served(Agent(), "one-of-a-kind") as served:
        Probes(agents=(served.url,), agent_token_file=str(tmp_path / "token")).prepare()
    assert secrets.clean("it said one-of-a-kind") == "it said [secret]"


def test_the_sampler_reads_it(tmp_path: Path) -> None:
    with Served(Agent(pids=(os.getpid(),)), "s3cret-word") as served:
        token = tmp_path / "token"
        token.write_text("s3cret-word\n")
        ready = Probes(agents=(served.url,), agent_token_file=str(token)).prepare()
        assert ready.agents[0]["cores"] == os.cpu_count()
        config = Config(time.time_ns(), str(tmp_path / "spool"), hz=50, host=False, gpu=False, **ready.settings)
        with SamplerProcess(config, ready.env) as sampler:
            end = time.monotonic() + 60
            while time.monotonic() < end and not any(
                r["name"] == "clock_error_ns" and r["source"] == "agent/0" for r in sampler.rows
            ):
                time.sleep(0.02)
    assert {r["value"] for r in sampler.rows if r["source"] == "agent/0" and r["name"] == "answered"} >= {1.0}
    assert "s3cret" not in (tmp_path / "spool").read_text()


def test_a_signal_that_comes_while_a_request_begins_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(self: Server, request: socket.socket, client_address: object) -> None:
        self.process_request_thread(request, client_address)  # it is over before the main thread goes on
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "process_request", begins)
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.closing(Agent()) as agent:
        server = serve(agent, listening, None)
        with socket.create_connection(listening.getsockname()) as asking:
            asking.sendall(f"GET {READINGS} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
            with pytest.raises(KeyboardInterrupt):
                server.handle_request()


def test_the_verb(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whywait", "agent", "--listen"]
    refused = subprocess.run([*command, "0.0.0.0:0"], capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2
    assert "token" in refused.stderr
    with subprocess.Popen([*command, "127.0.0.1:0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().partition("readings are at ")[2].partition(";")[0]
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.request("GET", READINGS)
        assert json.loads(connection.getresponse().read())["rows"]
        connection.close()
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()  # else a failure waits for it for ever
