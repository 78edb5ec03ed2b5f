"""``whywait doctor``: what it finds, that it sends no more than it says, and what it says of what is missing."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.metrics_pages import FakePrometheus, serving, vllm_page
from whywait.cli import main
from whywait.core.ability import Ability, counted
from whywait.engines import ENGINES
from whywait.load import abilities as of_load
from whywait.load.stub import StubProcess
from whywait.net.endpoint import parse_url
from whywait.probe import abilities, abilities_engine

ROOT = Path(__file__).resolve().parents[1]


class Service(BaseHTTPRequestHandler):
    """A gateway in front of something: 8 chunks of two tokens, no metrics. What it was asked is kept."""

    protocol_version = "HTTP/1.1"
    counts_on_request = True
    together = False
    asked: list[tuple[str, str, dict[str, Any]]] = []  # noqa: RUF012 - emptied by the fixture
    more: dict[str, str] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(("GET", self.path, {}))
        found = self.path == "/v1/models"
        body = json.dumps({"data": [{"id": "m"}]} if found else {}).encode()
        self.send_response(200 if found else 404)
        for name, value in self.more.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(("POST", self.path, body))
        usage = body.get("stream_options", {}).get("continuous_usage_stats") and self.counts_on_request
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        events = []
        for i in range(8):
            event: dict[str, Any] = {"id": "x", "choices": [{"index": 0, "delta": {"content": "a b"}}]}
            if usage:
                event["usage"] = {"prompt_tokens": 9, "completion_tokens": 2 * i + 2, "total_tokens": 11 + 2 * i}
            events.append(event)
        events.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        last = {"prompt_tokens": 9, "completion_tokens": 16, "total_tokens": 25}
        events.append({"id": "x", "choices": [], "usage": last})
        texts = [f"data: {json.dumps(e)}\n\n".encode() for e in events] + [b"data: [DONE]\n\n"]
        if self.together:
            self.wfile.write(b"".join(texts))
            return
        for text in texts:
            self.wfile.write(text)
            self.wfile.flush()
            threading.Event().wait(0.005)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def service(**more: Any) -> Iterator[tuple[str, type[Service]]]:
    kind = type("It", (Service,), {"asked": [], "more": {}, **more})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def found(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[dict[str, dict[str, str]], Any]:
    """The lines by name, and the whole document."""
    capsys.readouterr()
    assert main(["doctor", *argv, "--no-floor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    return {a["name"]: a for s in document["sections"] for a in s["abilities"]}, document


def test_it_sends_two_single_streams_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    with service() as (url, it):
        lines, _ = found(capsys, url)
    posts = [(path, body) for method, path, body in it.asked if method == "POST"]
    assert [path for path, _ in posts] == ["/v1/chat/completions"] * 2
    assert all(body["stream"] and body["max_tokens"] == of_load.TOKENS for _, body in posts)
    assert "continuous_usage_stats" not in posts[0][1]["stream_options"]
    assert "continuous_usage_stats" in posts[1][1]["stream_options"]
    assert {path for method, path, _ in it.asked if method == "GET"} <= {
        "/v1/models", "/metrics", "/prometheus/metrics", "/version", "/props", "/slots"}  # fmt: skip
    assert lines["stream"]["state"] == lines["usage"]["state"] == "can"


def test_tokens_of_a_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    with service() as (url, _):
        lines, _ = found(capsys, url)
    said = lines["tokens-per-chunk"]
    assert said["state"] == "partly"
    assert "16 tokens came in 8 chunks" in said["seen"]
    flag = re.fullmatch(r"--body '(.*)' \(.*\)", said["enable"])
    assert flag is not None
    assert json.loads(flag[1])["stream_options"]["continuous_usage_stats"] is True
    with service(counts_on_request=False) as (url, _):
        lines, _ = found(capsys, url)
    assert lines["tokens-per-chunk"]["state"] == "cannot"
    assert lines["tokens-per-chunk"]["enable"] == ""


def test_the_flag_it_gives_is_a_flag_that_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What it says to add, added: the tokens of each chunk are known."""
    with service() as (url, _):
        lines, _ = found(capsys, url)
        body = lines["tokens-per-chunk"]["enable"].partition("'")[2].rpartition("'")[0]
        more, _ = found(capsys, url, "--body", body)
    assert more["tokens-per-chunk"]["state"] == "can"
    assert "unasked" in more["tokens-per-chunk"]["seen"]


def test_a_go_between_and_what_it_holds_back(capsys: pytest.CaptureFixture[str]) -> None:
    with service(more={"Via": "1.1 gate"}, together=True) as (url, _):
        lines, _ = found(capsys, url)
    assert lines["path"]["state"] == "partly"
    assert "via" in lines["path"]["seen"]
    assert lines["chunks-apart"]["state"] in ("cannot", "unknown")  # unknown: a busy machine made the client late
    with service() as (url, _):
        lines, _ = found(capsys, url)
    assert lines["path"]["state"] == "can"
    assert lines["chunks-apart"]["state"] in ("can", "unknown")


def test_no_metrics_is_said_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with service() as (url, _):
        lines, document = found(capsys, url)
    assert lines["engine"]["state"] == "unknown"
    assert lines["metrics"]["state"] == "cannot"
    assert "--metrics-url" in lines["metrics"]["enable"]
    assert lines["request-stages"]["state"] == "cannot"
    assert document["counts"] == counted(Ability(**a) for s in document["sections"] for a in s["abilities"])


def test_an_engine_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with StubProcess("--ttft-ms", "5", "--gap-ms", "2", "--slots", "2", "--timings") as stub:
        lines, document = found(capsys, stub.url)
        assert main(["doctor", stub.url, "--no-floor"]) == 0
    text = capsys.readouterr().out
    assert lines["engine"]["state"] == "can"
    assert lines["metrics-queue"]["seen"] == "running, waiting"
    assert lines["slots"]["state"] == "can"
    assert lines["engine-process"]["state"] == "can"
    assert str(stub.pid) in lines["engine-process"]["seen"]
    assert "prefill" in lines["request-stages"]["seen"]
    assert lines["traces"]["state"] == "cannot"
    assert {s["title"] for s in document["sections"]} == {"this machine", "the service", "its metrics", "its machine"}
    for name in lines:
        assert re.search(rf"^  (can|partly|cannot|unknown) +{re.escape(name)} ", text, re.MULTILINE), name


@pytest.mark.parametrize(("require", "code", "word"), [
    ("usage,stream", 0, ""), ("metrics", 1, "metrics (cannot)"), ("nonsense", 2, "no line is called nonsense"),
])  # fmt: skip
def test_require(require: str, code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with service() as (url, _):
        assert main(["doctor", url, "--no-floor", "--require", require]) == code
    assert word in capsys.readouterr().err


def test_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 4, and what is known of the machine all the same."""
    lines, document = found(capsys, "http://127.0.0.1:9", code=4)
    assert lines["endpoint"]["state"] == "cannot"
    assert "kernel-stamps" in lines
    assert "refuses connections" in document["error"]["message"]
    lines, document = found(capsys, "http://no-such-host.invalid", code=4)
    assert "does not resolve" in document["error"]["message"]


def test_a_service_that_gives_no_stream(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(self: Service) -> None:
        self.send_error(500)

    with service(do_POST=refuse) as (url, _):
        lines, _ = found(capsys, url, code=4)
    assert lines["stream"]["state"] == "cannot"
    assert "500" in lines["stream"]["seen"]


@pytest.mark.parametrize("argv", [["--no-stream"], ["--agent", "http://127.0.0.1:9"]])
def test_flags_that_cannot_be(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9", *argv]) == 2
    assert capsys.readouterr().err


def test_another_machine() -> None:
    e = parse_url("http://192.0.2.1:8000")
    assert of_load._load_allowed(e).state == "cannot"
    assert "--load" in of_load._load_allowed(e).enable
    assert abilities_engine.elsewhere("192.0.2.1", []).state == "cannot"
    assert abilities_engine.elsewhere("192.0.2.1", [{}]).state == "can"


# this machine, at another root


def tree(root: Path, **files: str) -> str:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(root)


def test_energy_counters(tmp_path: Path) -> None:
    assert abilities.rapl(str(tmp_path / "none")).state == "cannot"
    zone = "sys/class/powercap/intel-rapl:0"
    shut = tree(tmp_path / "shut", **{f"{zone}/name": "package-0\n", f"{zone}/energy_uj": ""})
    said = abilities.rapl(shut)
    assert said.state == "cannot"
    assert "chmod a+r" in said.enable
    free = tree(tmp_path / "free", **{f"{zone}/name": "package-0\n", f"{zone}/energy_uj": "12345\n"})
    assert abilities.rapl(free).state == "can"


def test_pressure_and_waits_for_a_core(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    assert abilities.pressure(none).state == "cannot"
    assert "psi=1" in abilities.pressure(none).enable
    assert abilities.processes(none).state == "cannot"
    half = tree(tmp_path / "half", proc__self__stat="1 (x) S 1\n", proc__pressure__cpu="some avg10=0 total=1\n")
    assert abilities.processes(half).state == "partly"
    assert abilities.pressure(half).state == "can"


@pytest.mark.parametrize(
    ("quota", "state"), [("max 100000", "can"), ("400000 100000", "can"), ("50000 100000", "partly")]
)
def test_cpu_quota(tmp_path: Path, quota: str, state: str) -> None:
    mounts = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    tree(tmp_path, proc__self__mountinfo=mounts, proc__self__cgroup="0::/\n")
    tree(tmp_path, **{f"proc/{os.getpid()}/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"})
    _, said = abilities.cores(str(tmp_path))
    assert said.name == "cpu-quota"
    assert said.state == state, said.seen


def test_profilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for level, state in ((-1, "can"), (1, "can"), (2, "partly"), (4, "partly")):
        root = tree(tmp_path / str(level), proc__sys__kernel__perf_event_paranoid=f"{level}\n")
        assert abilities.profiler(root).state == state
    assert abilities.profiler(str(tmp_path / "none")).state == "unknown"


class Devices:
    """As Nvml and RocmSmi are used."""

    def __init__(self, *names: str) -> None:
        self._names, self.closed = names, False

    def sample(self, _now_s: float) -> list[tuple[str, None, float]]:
        return [(name, None, 1.0) for name in self._names]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("names", "state"), [
    (("power_watts", "busy_share", "energy_joules_total"), "can"), (("busy_share",), "partly"), ((), "cannot"),
])  # fmt: skip
def test_devices(names: tuple[str, ...], state: str) -> None:
    devices = Devices(*names)
    nvidia, amd = abilities.gpus(lambda: devices, lambda: None)  # type: ignore[arg-type,return-value]
    assert (nvidia.state, amd.state) == (state, "cannot")
    assert devices.closed
    assert "whywait agent" in amd.enable


def test_a_kernel_without_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abilities.stamps, "enable", lambda _sock: False)
    said = abilities.kernel_stamps()
    assert said.state == "cannot"
    assert "client's own clock" in said.seen


def test_the_floor() -> None:
    measured = {"streams": 16, "stamp_error_ms": {"p50": 0.01, "p99": 0.04}, "cpu_us_per_chunk": 12.0,
                "coalesced_share": 0.0}  # fmt: skip
    assert abilities.floor(measured).state == "can"
    assert "40 µs (p99)" in abilities.floor(measured).seen
    assert abilities.floor({**measured, "stamp_error_ms": {"p50": 1.0, "p99": 9.0}}).state == "partly"
    assert abilities.floor({}).state == "unknown"


# metrics


def test_metrics_of_each_engine_by_its_table() -> None:
    """A page with every name gives what the engine has; an empty one says what is missing, and whether it could be."""
    for table in ENGINES.values():
        known = {m.name for ms in table.metrics.values() for m in ms} | set(table.histograms.values()) | set(table.sums)
        whole = {a.name: a for a in abilities_engine.of_metrics(table, "http://x/metrics", known)}
        assert whole["metrics-queue"].state == "can", table.name
        empty = {a.name: a for a in abilities_engine.of_metrics(table, "http://x/metrics", ())}
        assert {empty[name].state for name in abilities_engine.GROUPS} == {"cannot"}
        assert "another version" in empty["metrics-queue"].enable
    llama = {a.name: a for a in abilities_engine.of_metrics(ENGINES["llama.cpp"], "http://x/metrics", ())}
    assert "has no such figure" in llama["metrics-ttft"].seen
    assert llama["metrics-ttft"].enable == ""
    assert "another version" not in llama["metrics-speculation"].enable
    assert "--spec-type" in llama["metrics-speculation"].enable


def test_a_service_that_says_the_key_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-doctor-0123456789abcdef"
    monkeypatch.setenv("WHYWAIT_API_KEY", key)

    def echo(self: Service) -> None:
        body = json.dumps({"data": [{"id": self.headers["Authorization"].split()[1]}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    with service(do_GET=echo) as (url, _):
        for more in ([], ["--json"]):
            assert main(["doctor", url, "--no-floor", *more]) == 0
    out = capsys.readouterr()
    assert "endpoint" in out.out
    assert key not in out.out + out.err


def test_metrics_of_a_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    pages = {"a:8000": [(now + 5 * k, vllm_page(2, 0, k + 200)) for k in range(-120, 12)]}
    with serving(FakePrometheus(pages)) as prometheus, service() as (url, _):
        lines, _ = found(capsys, url, "--prometheus", prometheus)
    assert lines["engine"]["state"] == "can"
    assert "Prometheus" in lines["metrics"]["seen"]
    assert lines["metrics-queue"]["state"] == "can"


def test_limits_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with service() as (url, _):
        lines, _ = found(capsys, url)
    assert lines["limits"]["state"] == "cannot"
    with StubProcess("--slots", "2") as stub:
        lines, _ = found(capsys, stub.url)
    assert lines["limits"]["state"] == "can"
    assert "2 requests at once" in lines["limits"]["seen"]


def test_traces_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abilities_engine, "listening_pids", lambda _port, _root: (7,))
    on = tree(tmp_path / "on", proc__7__cmdline="vllm\0serve\0m\0--otlp-traces-endpoint\0http://127.0.0.1:4318\0")
    off = tree(tmp_path / "off", proc__7__cmdline="vllm\0serve\0m\0")
    vllm = ENGINES["vllm"]
    assert abilities_engine.traces(vllm, 8000, "", on).state == "can"
    assert abilities_engine.traces(vllm, 8000, "", off).state == "cannot"
    assert "--otlp-traces-endpoint" in abilities_engine.traces(vllm, 8000, "", off).enable
    assert abilities_engine.traces(vllm, 0, "", off).state == "unknown"  # on another machine
    assert abilities_engine.traces(ENGINES["llama.cpp"], 8000, "", off).enable == ""


def test_the_page_names_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    with StubProcess("--ttft-ms", "5", "--gap-ms", "2") as stub:
        lines, _ = found(capsys, stub.url)
    for name in lines:
        head, _, tail = name.partition("-")
        told = f"`{name}`" in page or (head == "metrics" and f"`-{tail}`" in page) or head == "extra"
        assert told, name


def test_states_are_closed() -> None:
    with pytest.raises(ValueError, match="maybe"):
        Ability("x", "maybe", "y")
