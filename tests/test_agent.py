"""``whywait agent`` and the source that reads it: over real sockets, with and without a token, alive and gone."""

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

from whywait.errors import UsageError
from whywait.net.reach import Reach
from whywait.probe.agent import READINGS, Agent, AgentPage, serve
from whywait.probe.options import Probes
from whywait.probe.pages import Fetcher
from whywait.probe.sampler import Config, SamplerProcess

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
        assert process.wait(30) == 0
