"""The sampler process, its sources and its spool, against a small server that can misbehave."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from whywait.analyze.counters import answered_share, delta
from whywait.core.spool import readings_table
from whywait.core.table import Table
from whywait.errors import InternalError, UsageError
from whywait.probe.pages import Fetcher, MetricsPage, SlotsPage
from whywait.probe.sampler import READY, Config, SamplerProcess, read_spool
from whywait.probe.spool import COLUMNS, KEEP_EVERY_NS, Spool, Thinner

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
PAGE = 'llamacpp:requests_processing 2\nllamacpp:tokens_predicted_total {n}\npython_info{{a="b"}} 1\n'
SLOTS = [{"id": 0, "n_ctx": 512, "is_processing": True, "n_prompt_tokens": 128, "next_token": [{"n_decoded": 3}]}]


class Engine(ThreadingHTTPServer):
    """Serves /metrics and /slots; ``mood`` says how."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mood = "well"
        self.asked = 0
        self.seen: list[dict[str, str]] = []
        self.go_on = threading.Event()
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def get_request(self) -> Any:
        self.connections += 1
        return super().get_request()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        engine = self.server
        engine.asked += 1
        engine.seen.append(dict(self.headers))
        if engine.mood == "hangs":
            engine.go_on.wait(30)
        if engine.mood == "hangs up":
            self.close_connection = True
            return
        # Before the answer goes out: afterwards the test may already have changed it.
        self.close_connection = engine.mood in ("closes after", "cuts")
        text = json.dumps(SLOTS) if self.path == "/slots" else PAGE.format(n=engine.asked)
        body = text.encode()
        self.send_response(501 if engine.mood == "refuses" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:5] if engine.mood == "cuts" else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


def config(tmp_path: Path, **kw: Any) -> Config:
    return Config(
        zero_unix_ns=time.time_ns(), spool=str(tmp_path / "spool"), **{"hz": 50.0, "gpu": False, "host": False, **kw}
    )


def wait_for(path: str, enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Readings so far, once they are enough. No bound on how fast: only on how long we are patient."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        rows = read_spool(path)
        if enough(rows):
            return rows
        time.sleep(0.02)
    raise AssertionError(f"not in a minute: {read_spool(path)[-5:]}")


def values(rows: list[dict[str, Any]], source: str, name: str) -> list[float]:
    return [r["value"] for r in rows if r["source"] == source and r["name"] == name]


# --- pages


def test_metrics_page_keeps_its_connection(engine: Engine) -> None:
    page = MetricsPage("m", Fetcher(engine.url + "/metrics", {"X-Key": "k"}, 30.0))
    for _ in range(3):
        assert page.sample() is not None
    page.close()
    assert engine.connections == 1
    assert engine.seen[0]["X-Key"] == "k"
    assert engine.seen[0]["User-Agent"].startswith("whywait/")


def test_a_kept_connection_that_was_closed_is_no_failure(engine: Engine) -> None:
    page = MetricsPage("m", Fetcher(engine.url + "/metrics", {}, 30.0))
    engine.mood = "closes after"  # without saying so in a header, as servers do after their keep-alive limit
    assert page.sample() is not None
    engine.mood = "well"
    assert page.sample() is not None
    page.close()
    assert engine.connections == 2


@pytest.mark.parametrize(
    ("mood", "why"),
    [
        ("refuses", "HTTP 501"),
        ("hangs up", "RemoteDisconnected"),
        ("cuts", "IncompleteRead"),
        ("hangs", "TimeoutError"),
    ],
)
def test_a_page_that_fails_says_why_and_recovers(engine: Engine, mood: str, why: str) -> None:
    page = MetricsPage("m", Fetcher(engine.url + "/metrics", {}, 0.2 if mood == "hangs" else 30.0))
    engine.mood = mood
    assert page.sample() is None
    assert page.why == why
    engine.mood = "well"
    engine.go_on.set()
    assert page.sample() is not None
    page.close()


def test_engine_is_found_from_the_page_or_told(engine: Engine) -> None:
    for told in (None, "llama.cpp"):
        page = MetricsPage("m", Fetcher(engine.url + "/metrics", {}, 30.0), told)
        rows = page.sample()
        page.close()
        assert rows is not None
        assert [r[:2] for r in rows] == [("running", None), ("output_tokens_total", None)]
    other = MetricsPage("m", Fetcher(engine.url + "/slots", {}, 30.0))
    assert other.sample() == []  # it answered; nothing in it that we know
    other.close()


@pytest.mark.parametrize(
    "body", [b"[]", b"[1]", b"[null]", b'[{"is_processing":1,"next_token":[5]}]', b"{}", b"[", b"5"]
)
def test_slots_of_no_sense_are_no_answer_and_not_zero_slots(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SlotsPage("s", Fetcher("http://127.0.0.1:1/slots", {}, 0.2))
    monkeypatch.setattr(page._fetcher, "get", lambda: body)
    assert page.sample() is None
    assert page.why == "not what was expected"


def test_slots_page(engine: Engine) -> None:
    page = SlotsPage("s", Fetcher(engine.url + "/slots", {}, 30.0))
    got = {name: value for name, _, value in page.sample() or []}
    page.close()
    assert got["kv_use"] == 0.25
    wrong = SlotsPage("s", Fetcher(engine.url + "/metrics", {}, 30.0))
    assert wrong.sample() is None
    assert wrong.why == "not what was expected"
    wrong.close()


# --- spool


def test_spool_survives_a_torn_and_a_garbled_line(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    spool = Spool(path)
    spool.write(1, 2, "metrics/0", [("running", None, 1.0), ("kv_use", '{"e":"0"}', 0.5), ("odd", None, float("nan"))])
    spool.close()
    spool.write(1, 2, "late", [("x", None, 1.0)])  # a thread that was still busy at the end
    with open(path, "ab") as f:
        f.write(b'garbage\n[1,2]\n{"a":1}\n[3,4,"metrics/0","runn')
    rows = read_spool(path)
    assert rows == [
        dict(zip(COLUMNS, v, strict=True))
        for v in ((1, 2, "metrics/0", "running", None, 1.0), (1, 2, "metrics/0", "kv_use", '{"e":"0"}', 0.5),
                  (1, 2, "metrics/0", "odd", None, None))
    ]  # fmt: skip
    assert len(Table.from_rows("readings", rows)) == 3
    whole = b'[5,6,"metrics/0","running",null,2]\n'
    Path(path + "2").write_bytes(b'[1,2,["s"],"n",null,1]\n[1,2,"s",null,null,1]\n[1,2,"s","n",{},1]\n' + whole)
    table = readings_table([Path(path + "2")])  # lines that are JSON and no readings
    assert (table["asked_ns"].tolist(), table["source"].tolist()) == ([5], ["metrics/0"])
    assert read_spool(tmp_path / "nothing") == []


def test_thinner_writes_before_it_grows_and_now_and_then() -> None:
    thinner = Thinner()
    rows = [("h_bucket", '{"le":"1"}', 1.0), ("h_count", None, 1.0)]
    more = [("h_bucket", '{"le":"1"}', 2.0), ("h_count", None, 2.0)]
    gauge = ("running", None, 1.0)

    def at(t: int, what: list[Any]) -> list[tuple[int, int]]:
        return [(a, len(part)) for a, _, part in thinner.split(t, t, what)]

    assert at(0, [gauge, *rows]) == [(0, 3)]
    assert at(1, [gauge, *rows]) == [(1, 1)]
    assert at(2, [gauge, *rows]) == [(2, 1)]
    assert at(3, [gauge, *more]) == [(2, 2), (3, 3)]
    assert at(4, [gauge, *more]) == [(4, 1)]
    assert at(4 + KEEP_EVERY_NS, [gauge, *more]) == [(4, 2), (4 + KEEP_EVERY_NS, 3)]
    assert at(5 + KEEP_EVERY_NS, [gauge, *more]) == [(5 + KEEP_EVERY_NS, 1)]
    assert [(a, len(part)) for a, _, part in thinner.rest()] == [(5 + KEEP_EVERY_NS, 2)]


# --- configuration


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"zero_unix_ns":1,"spool":"x","hertz":4}', b'{"zero_unix_ns":1,"spool":"x","hz":0}']
)
def test_a_bad_configuration_is_refused(raw: bytes) -> None:
    with pytest.raises(UsageError):
        Config.from_json(raw)


def test_configuration_travels_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    c = config(tmp_path, metrics_urls=("http://x",), pids={"engine": (1, 2)}, api_key_env="MY_KEY",
               headers_env={"X-Other": "MY_KEY", "X-Absent": "NOT_SET"})  # fmt: skip
    raw = orjson.dumps(c)
    assert b"s3cret" not in raw
    again = Config.from_json(raw)
    assert again.metrics_urls == c.metrics_urls
    assert list(again.pids["engine"]) == [1, 2]
    assert again.headers() == {"Authorization": "Bearer s3cret", "X-Other": "s3cret"}


# --- the process


def test_samples_until_it_is_told_to_stop(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    c = config(
        tmp_path,
        metrics_urls=(engine.url + "/metrics", "http://127.0.0.1:9/metrics"),
        slots_url=engine.url + "/slots",
        api_key_env="MY_KEY",
        pids={"client": (os.getpid(),)},
    )
    with SamplerProcess(c) as sampler:
        assert sampler.pid is not None
        if sys.platform.startswith("linux"):
            assert b"s3cret" not in Path(f"/proc/{sampler.pid}/cmdline").read_bytes()
        wait_for(
            c.spool,
            lambda rows: min(len(values(rows, s, "answered")) for s in ("metrics/0", "metrics/1", "slots/0")) > 3,
        )
    rows = sampler.rows
    assert sampler.complaint == ""
    sampler.stop()  # again: nothing more happens
    assert sampler.rows == rows
    assert set(values(rows, "metrics/0", "answered")) == {1}
    assert set(values(rows, "metrics/0", "running")) == {2}
    assert set(values(rows, "slots/0", "kv_use")) == {0.25}
    lost = [r for r in rows if r["source"] == "metrics/1"]
    assert {r["name"] for r in lost} == {"answered"}  # never zeros for its metrics
    assert {(r["value"], r["labels"]) for r in lost} == {(0, '{"why":"ConnectionRefusedError"}')}
    assert engine.seen[0]["Authorization"] == "Bearer s3cret"

    table = Table.from_rows("readings", rows)
    asked, answered = table["asked_ns"], table["answered_ns"]
    assert (asked >= 0).all()
    assert (answered >= asked).all()
    assert answered.max() < time.time_ns() - c.zero_unix_ns
    lateness = [r for r in rows if r["source"] == "sampler" and r["name"] == "lateness_ms"]
    assert {json.loads(r["labels"])["source"] for r in lateness} >= {"metrics/0", "metrics/1", "slots/0"}
    window = (0, int(answered.max()))
    assert answered_share(table, "metrics/0", window) == 1
    assert answered_share(table, "metrics/1", window) == 0
    d = delta(table, "output_tokens_total", window)
    assert d is not None
    assert d.low > 0
    assert delta(table, "output_tokens_total", window, source="metrics/1") is None
    # One more look is taken after the end is asked for: nothing the last look saw is missing in the spool.
    assert max(values(rows, "metrics/0", "output_tokens_total")) >= engine.asked - 2


@linux
def test_processes_may_come_later_and_the_machine_is_read(tmp_path: Path) -> None:
    c = config(tmp_path, host=True)
    with (
        SamplerProcess(c) as sampler,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
    ):
        sampler.add_pids("engine", [child.pid])
        sampler.add_pids("client", [os.getpid()])
        wait_for(
            c.spool,
            lambda rows: all(values(rows, s, "cpu_seconds_total") for s in ("process/engine", "process/client")),
        )
        child.communicate(b"\n")
        wait_for(c.spool, lambda rows: 0 in values(rows, "process/engine", "answered"))
    rows = sampler.rows
    assert values(rows, "host", "cpu_busy_seconds_total")
    ours = {
        json.loads(r["labels"])["pid"]
        for r in rows
        if r["source"] == "process/client" and r["name"] == "process_cpu_seconds_total"
    }
    assert str(os.getpid()) in ours
    assert str(child.pid) not in ours  # the engine is not charged to the client that started it, nor is the sampler
    assert str(sampler.pid) not in ours
    assert sampler.complaint == ""


def test_a_slow_source_holds_up_no_other(engine: Engine, tmp_path: Path) -> None:
    engine.mood = "hangs"
    with Engine() as second:
        thread = threading.Thread(target=second.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        c = config(tmp_path, metrics_urls=(engine.url + "/metrics", second.url + "/metrics"), timeout_s=0.3)
        with SamplerProcess(c) as sampler:
            wait_for(
                c.spool,
                lambda rows: (
                    len(values(rows, "metrics/1", "answered")) > 10 and values(rows, "metrics/0", "answered") != []
                ),
            )
            engine.mood = "well"
            engine.go_on.set()
            wait_for(c.spool, lambda rows: 1 in values(rows, "metrics/0", "answered"))
        second.shutdown()
        thread.join()
    hung = [r for r in sampler.rows if r["source"] == "metrics/0" and r["value"] == 0]
    assert {r["labels"] for r in hung} == {'{"why":"TimeoutError"}'}
    skipped = [r for r in sampler.rows if r["name"] == "skipped_ticks_total" and "metrics/0" in r["labels"]]
    assert skipped  # the looks it could not take are said


def test_killed_sampler_leaves_what_it_had(engine: Engine, tmp_path: Path) -> None:
    c = config(tmp_path, metrics_urls=(engine.url + "/metrics",))
    with SamplerProcess(c) as sampler:
        wait_for(c.spool, lambda rows: len(values(rows, "metrics/0", "running")) > 2)
        assert sampler.pid is not None
        os.kill(sampler.pid, signal.SIGKILL)
        sampler.add_pids("client", [1])  # nobody there any more: no error
    assert len(values(sampler.rows, "metrics/0", "running")) > 2


@pytest.mark.parametrize("how", ["SIGTERM", "parent killed"])
def test_ends_with_its_parent_or_on_sigterm(engine: Engine, tmp_path: Path, how: str) -> None:
    """A parent that is killed closes the pipe, and that is enough."""
    c = config(tmp_path, metrics_urls=(engine.url + "/metrics",))
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'whywait.probe.sampler'], stdin=subprocess.PIPE)\n"
        "p.stdin.write(sys.argv[1].encode() + b'\\n'); p.stdin.flush(); print(p.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, orjson.dumps(c).decode()], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == READY
        wait_for(c.spool, lambda rows: values(rows, "metrics/0", "running") != [])
        if how == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        else:
            parent.kill()
        parent.stdout.read() if how == "parent killed" else wait_gone(c.spool)
        parent.kill()
    assert values(read_spool(c.spool), "metrics/0", "running")


def wait_gone(spool: str) -> None:
    """Until the spool has not grown for a while: whoever wrote it has ended."""
    size = -1
    while size != (size := os.path.getsize(spool)):
        time.sleep(0.5)


def test_a_sampler_that_cannot_start_says_so(tmp_path: Path) -> None:
    c = config(tmp_path / "no such folder")
    with pytest.raises(InternalError, match="did not start: FileNotFoundError"):
        SamplerProcess(c).start()


def test_ctrl_c_is_left_to_the_parent(engine: Engine, tmp_path: Path) -> None:
    c = config(tmp_path, metrics_urls=(engine.url + "/metrics",))
    with SamplerProcess(c) as sampler:
        assert sampler.pid is not None
        os.kill(sampler.pid, signal.SIGINT)
        before = len(read_spool(c.spool))
        wait_for(c.spool, lambda rows: len(rows) > before + 10)
    assert sampler.complaint == ""


def test_runs_pinned(engine: Engine, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        if not hasattr(os, "sched_getaffinity"):
            pytest.skip("no affinity here")
        core = min(os.sched_getaffinity(0))
        c = config(tmp_path, metrics_urls=(engine.url + "/metrics",), cpus=(core,))
        sampler = stack.enter_context(SamplerProcess(c))
        assert sampler.pid is not None
        assert os.sched_getaffinity(sampler.pid) == {core}
