"""Faults do what they say while they last, and leave nothing behind however they end."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.processes import gone
from whywait.lab import faults
from whywait.lab.cpus import allowed_cpus
from whywait.lab.faults import FAULTS, GROUP, NotPossible, Site
from whywait.lab.faults_line import Shape, line
from whywait.net.serve import Reply, Request, Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
SRC = Path(__file__).resolve().parents[1] / "src"


class Boom(Exception):
    pass


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process with a child of its own, as an engine has."""
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        assert p.stdout is not None
        p.stdout.readline()
        try:
            yield p.pid
        finally:
            for pid in reversed(faults.family(p.pid)):
                os.kill(pid, signal.SIGKILL)


class Service:
    """Answers GET with its path; a POST gets a first piece at once and the rest when it is let go."""

    def __init__(self) -> None:
        self._server = Server(self._handle)
        self._held: list[Reply] = []
        self.posts = threading.Semaphore(0)
        self.url = self._server.url
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._server.run, args=(self._turn,))

    def __enter__(self) -> Service:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._thread.join()

    def let_go(self) -> None:
        self._go.set()

    def _turn(self) -> bool:
        while self._go.is_set() and self._held:
            self._held.pop().end(b"last")
        self._server.call_at(time.monotonic_ns() + 20_000_000, lambda: None)
        return False

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.method == "GET":
            reply.send(200, request.path.encode(), "text/plain")
            return
        reply.start(200, {"Content-Type": "text/plain"}, first=b"first")
        self._held.append(reply)
        self.posts.release()


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as s:
        yield s


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)


def _get(url: str, path: str) -> bytes:
    c = _connect(url)
    c.request("GET", path)
    body = c.getresponse().read()
    c.close()
    return body


def _children() -> set[int]:
    return set(faults.family(os.getpid()))


def test_hogs_run_on_the_cpus_they_were_given_and_go() -> None:
    cpu, before = allowed_cpus()[0], _children()
    with pytest.raises(Boom), FAULTS["hog"](Site("u", 1, engine_cpus=(cpu,)), count=2) as put:  # noqa: PT012
        hogs = _children() - before
        assert len(hogs) == 2
        assert all(os.sched_getaffinity(pid) == {cpu} for pid in hogs)
        assert "2 busy loops" in put.label
        raise Boom
    assert _children() == before


def test_a_starved_client_needs_cpus_of_its_own() -> None:
    cpu = allowed_cpus()[0]
    with pytest.raises(NotPossible, match="share"), FAULTS["starved client"](Site("u", 1, (cpu,), (cpu,))):
        pass
    with pytest.raises(NotPossible, match="not pinned"), FAULTS["hog"](Site("u", 1)):
        pass


def test_hogs_end_when_their_maker_is_killed() -> None:
    code = f"""
import os, sys, time
from whywait.lab import faults
with faults.hog(faults.Site("u", 1, ({allowed_cpus()[0]},)), 1):
    print(*(set(faults.family(os.getpid())) - {{os.getpid()}}), flush=True)
    time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        hog = int(maker.stdout.readline())
        maker.kill()
        assert gone(hog)


def test_a_quota_holds_the_whole_family_and_is_undone(sleeper: int) -> None:
    before = Path(f"/proc/{sleeper}/cgroup").read_text()
    try:
        with pytest.raises(Boom), FAULTS["quota"](Site("u", sleeper), cpus=0.25) as put:  # noqa: PT012
            group, v2 = faults._cpu_group(sleeper)
            assert GROUP in group.name
            pids = {int(p) for p in (group / "cgroup.procs").read_text().split()}
            assert pids == set(faults.family(sleeper))
            assert len(pids) == 2
            if v2:
                assert (group / "cpu.max").read_text().split() == ["25000", "100000"]
            else:
                assert (group / "cpu.cfs_quota_us").read_text().strip() == "25000"
            assert "0.25 CPUs" in put.label
            raise Boom
    except NotPossible as exc:
        pytest.skip(exc.message)
    assert not group.exists()
    assert Path(f"/proc/{sleeper}/cgroup").read_text() == before


def test_a_quota_outlives_no_engine(sleeper: int) -> None:
    """The engine dies inside: the group goes all the same."""
    try:
        with FAULTS["quota"](Site("u", sleeper), cpus=0.25):
            group, _ = faults._cpu_group(sleeper)
            for pid in reversed(faults.family(sleeper)):
                os.kill(pid, signal.SIGKILL)
    except NotPossible as exc:
        pytest.skip(exc.message)
    assert not group.exists()


def test_a_delay_is_there_each_way(service: Service) -> None:
    with FAULTS["delay"](Site(service.url, 1), ms=60.0, jitter_ms=5.0) as put:
        began = time.monotonic()
        assert _get(put.url, "/late") == b"/late"
        assert time.monotonic() - began >= 0.12  # a bound that holds on any machine
    with pytest.raises(OSError, match="refused"):
        _get(put.url, "/gone")


def _first_piece(url: str, wait_s: float) -> bytes:
    """What of a POST's answer has come after ``wait_s``, or as soon as its first piece is there."""
    c = _connect(url)
    c.request("POST", "/", b"{}")
    assert c.sock is not None
    c.sock.settimeout(wait_s)
    try:
        return c.sock.recv(65536)
    except TimeoutError:
        return b""
    finally:
        c.close()


def test_a_buffering_proxy_hands_on_nothing_before_the_end(service: Service) -> None:
    assert b"first" in _first_piece(service.url, 10)
    with FAULTS["buffering"](Site(service.url, 1), size=16384) as put:
        assert _first_piece(put.url, 0.5) == b""
        c = _connect(put.url)
        c.request("POST", "/", b"{}")
        for _ in range(3):
            assert service.posts.acquire(timeout=10)
        service.let_go()
        assert c.getresponse().read() == b"firstlast"
        c.request("GET", "/again")  # on the same connection
        assert c.getresponse().read() == b"/again"
        c.close()


def test_a_small_buffer_hands_on_what_fills_it(service: Service) -> None:
    with line(Shape(service.url, hold_bytes=64)) as url:
        assert len(_first_piece(url, 10)) == 64


def test_a_gateway_sheds_what_is_too_many_and_only_posts(service: Service) -> None:
    with FAULTS["shedding"](Site(service.url, 1), most=1) as put:
        held = _connect(put.url)
        held.request("POST", "/", b"{}")
        assert service.posts.acquire(timeout=10)
        more = _connect(put.url)
        more.request("POST", "/", b"{}")
        answer = more.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (429, "1")
        assert _get(put.url, "/metrics") == b"/metrics"
        service.let_go()
        assert held.getresponse().read() == b"firstlast"
        held.close()
        more.close()


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_says_what_it_did_or_why_it_cannot(name: str, service: Service, sleeper: int) -> None:
    """And a proxy gives another address, all else the service's own."""
    cpus = allowed_cpus()
    site = Site(service.url, sleeper, cpus[:1], cpus[1:2])
    try:
        with FAULTS[name](site) as put:
            assert put.label
            assert (put.url != service.url) == (name in ("delay", "buffering", "shedding"))
    except NotPossible as exc:
        pytest.skip(exc.message)


def test_the_fixed_work_takes_time() -> None:
    took = faults.calibration_ms(allowed_cpus()[:1], rounds=1)
    assert took is not None
    assert took > 0.1


def test_a_busy_cpu_is_seen() -> None:
    cpu = allowed_cpus()[:1]
    with FAULTS["hog"](Site("u", 1, engine_cpus=cpu), count=1):
        busy = faults.busy_share(cpu, 0.3)
    assert busy is not None
    assert 0.5 < busy <= 1
