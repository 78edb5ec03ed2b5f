"""The OTLP receiver and the join of spans with requests, against a second encoder and over real sockets."""

import gzip
import http.client
import re
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from whywait import app
from whywait.core.run import Manifest, Run
from whywait.core.table import Table
from whywait.errors import UsageError
from whywait.net.reach import address
from whywait.net.wire import traceparent
from whywait.probe.options import Probes
from whywait.probe.otlp import MAX_BODY, MOST_SPANS, OtlpError, Receiver, spans_of_json, spans_of_protobuf, unpacked
from whywait.probe.spans import Span, figures, joined, new_prefix, rows_of
from whywait.probe.spool import Spool, read_spool
from whywait.probe.web import MOST_CONNECTIONS

PREFIX = "00000000000000aa"
QUEUE, PREFILL, E2E = "gen_ai.latency.time_in_queue", "gen_ai.latency.time_in_model_prefill", "gen_ai.latency.e2e"


# --- a small encoder, the other way round from the decoder


def varint(n: int) -> bytes:
    out = b""
    while n > 0x7F:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def field(number: int, value: int | float | bytes | str) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    return varint(number << 3) + varint(value & (1 << 64) - 1)


def attribute(key: str, value: Any) -> bytes:
    number = {str: 1, int: 3, float: 4, bytes: 7}[type(value)]
    return field(9, field(1, key) + field(2, field(number, value)))


def span(trace: str, name: str = "llm_request", took_ns: int = 5_000_000, **attributes: Any) -> bytes:
    start = 1_790_000_000_000_000_000
    head = field(1, bytes.fromhex(trace)) + field(2, b"12345678") + field(5, name)
    times = (
        varint(7 << 3 | 1) + start.to_bytes(8, "little") + varint(8 << 3 | 1) + (start + took_ns).to_bytes(8, "little")
    )
    return head + times + b"".join(attribute(k.replace("__", "."), v) for k, v in attributes.items())


def export(*spans: bytes) -> bytes:
    return field(
        1, field(1, field(1, attribute("service.name", "vllm"))) + field(2, b"".join(field(2, s) for s in spans))
    )


def trace(request: int, prefix: str = PREFIX) -> str:
    return traceparent(prefix, request, 1).split("-")[1]


VLLM = {QUEUE: 0.25, PREFILL: 0.1, E2E: 1.5, "gen_ai.usage.prompt_tokens": 64, "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.prompt": "a secret text", "gen_ai.latency.time_to_first_token": 0.36}  # fmt: skip


KEPT = {k: v for k, v in VLLM.items() if k != "gen_ai.prompt"}  # texts are not even looked at


def test_protobuf_by_our_decoder() -> None:
    got = spans_of_protobuf(export(span(trace(7), **VLLM), span(trace(8), "tokenize", **{QUEUE: -3, "bad": -3})))
    assert [s.trace_id for s in got] == [trace(7), trace(8)]
    assert got[0].length_ns == 5_000_000
    assert got[0].attributes == KEPT
    assert got[1].attributes == {QUEUE: -3}
    assert spans_of_protobuf(b"") == []


def test_protobuf_by_the_official_encoder() -> None:
    pb = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    request = pb.ExportTraceServiceRequest()
    one = request.resource_spans.add().scope_spans.add().spans.add()
    one.trace_id, one.name = bytes.fromhex(trace(9)), "llm_request"
    one.start_time_unix_nano, one.end_time_unix_nano = 10**18, 10**18 + 77
    one.events.add().name = "something we skip"
    one.status.code, one.flags = 1, 257
    for key, value in VLLM.items():
        kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(one.attributes.add(key=key).value, kind, value)
    one.attributes.add(key="list").value.array_value.values.add().string_value = "x"
    got = spans_of_protobuf(request.SerializeToString())
    assert got == [Span(trace(9), "llm_request", 77, KEPT)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_body_cut_short_is_refused(cut: int) -> None:
    body = export(span(trace(7), **VLLM))
    with pytest.raises(OtlpError):
        spans_of_protobuf(body[:-cut])


@pytest.mark.parametrize("body", [b"\x0b", b"\xff" * 12, field(1, 5), b"{}", field(1, field(2, field(2, field(9, 1))))])
def test_what_is_no_export_is_refused(body: bytes) -> None:
    with pytest.raises(OtlpError):
        spans_of_protobuf(body)
    with pytest.raises(OtlpError):
        spans_of_json(body)


def json_export(*spans: dict[str, Any]) -> bytes:
    return orjson.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]})


def test_json() -> None:
    attributes = [{"key": QUEUE, "value": {"doubleValue": 0.5}},
                  {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "12"}},
                  {"key": "gen_ai.request.id", "value": {"stringValue": "x"}}]  # fmt: skip
    one = {
        "traceId": trace(3).upper(),
        "name": "s",
        "startTimeUnixNano": "100",
        "endTimeUnixNano": "250",
        "attributes": attributes,
    }
    got = spans_of_json(json_export(one, {"traceId": trace(4), "name": "open"}))
    assert got[0] == Span(trace(3), "s", 150, {QUEUE: 0.5, "gen_ai.usage.prompt_tokens": 12, "gen_ai.request.id": "x"})
    assert got[1].length_ns is None


def test_numbers_and_ids_that_cannot_be_are_refused_or_left_out() -> None:
    long_varint = b"\xff" * 9 + b"\x7f"  # 70 bits
    value = field(9, field(1, QUEUE) + field(2, varint(4 << 3) + long_varint))
    assert figures(spans_of_protobuf(export(value))[0]) == ({}, None)  # not a number, and no fault of ours
    for wrong in ({"startTimeUnixNano": "9" * 400, "endTimeUnixNano": "1"},
                  {"attributes": [{"key": QUEUE, "value": {"intValue": "1" + "0" * 400}}]}):  # fmt: skip
        with pytest.raises(OtlpError):
            spans_of_json(json_export({"traceId": trace(3), "name": "prefill_waiting", **wrong}))
    for odd in ("z" * 32, "é" * 32, PREFIX, "a" * 10_000):
        assert spans_of_json(json_export({"traceId": odd}))[0].trace_id == ""
    assert spans_of_protobuf(export(field(1, bytes(9_000))))[0].trace_id == ""


def test_an_export_of_nothing_but_spans_is_refused() -> None:
    """Two bytes each on the way, a hundred times that in memory."""
    many = MOST_SPANS + 1
    with pytest.raises(OtlpError, match="too many"):
        spans_of_protobuf(export(*[b""] * many))
    with pytest.raises(OtlpError, match="too many"):
        spans_of_json(json_export(*[{}] * many))


def test_bodies_are_unpacked_within_a_bound() -> None:
    assert unpacked(gzip.compress(b"abc"), "gzip") == b"abc"
    assert unpacked(b"abc", "") == b"abc"
    for body, coding in ((b"abc", "gzip"), (gzip.compress(b"abc")[:-3], "gzip"), (b"abc", "br")):
        with pytest.raises(OtlpError):
            unpacked(body, coding)
    with pytest.raises(OtlpError):
        unpacked(gzip.compress(bytes(MAX_BODY + 1)), "gzip")


def test_rows_hold_figures_and_ids_and_no_text() -> None:
    rows = rows_of(Span(trace(7), "llm_request", 5, VLLM))
    assert {name: value for name, _, value in rows} == {"queue_ms": 250, "prefill_ms": 100, "e2e_ms": 1500,
                                                        "prompt_tokens": 64, "ttft_ms": 360}  # fmt: skip
    labels = {text for _, text, _ in rows}
    assert labels == {f'{{"request":"chatcmpl-1","span":"llm_request","trace":"{trace(7)}"}}'}
    assert rows_of(Span(trace(7), "http get", 5, {"http.status": 200})) == []
    assert rows_of(Span(trace(7), "x", 5, {QUEUE: -1.0, E2E: 1e12, PREFILL: float("nan")})) == []
    assert rows_of(Span(trace(7), "prefill_waiting", 2_000_000, {}))[0][::2] == ("queue_ms", 2.0)


# --- the receiver


def test_totals_never_fall_however_exports_interleave(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "spool"))
    made, write = Receiver(spool, lambda: 5, PREFIX), spool.write
    other: list[threading.Thread] = []

    def slow(asked: int, answered: int, source: str, rows: list[Any]) -> None:
        if not other:  # a second export comes in just as the first is about to be written
            other.append(threading.Thread(target=made.take, args=([Span(trace(2), "s", 5, {E2E: 1.0})],)))
            other[0].start()
            other[0].join(0.3)
        write(asked, answered, source, rows)

    spool.write = slow  # type: ignore[method-assign]
    made.take([Span(trace(1), "s", 5, {E2E: 1.0})])
    other[0].join()
    assert [r["value"] for r in read_spool(tmp_path / "spool") if r["name"] == "spans_total"] == [1, 2]


def test_connections_are_bounded(receiver: Receiver) -> None:
    port = receiver.port  # type: ignore[attr-defined]
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_CONNECTIONS)]
    try:
        for sock in held:
            sock.sendall(b"POST")
        with socket.create_connection(("127.0.0.1", port), timeout=30) as one_more:
            assert one_more.recv(1) == b""
    finally:
        for sock in held:
            sock.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    sock = socket.create_server(("127.0.0.1", 0))
    made = Receiver(Spool(str(tmp_path / "spool")), lambda: 5, PREFIX)
    made.port = sock.getsockname()[1]  # type: ignore[attr-defined]
    made.serve(sock)
    yield made
    made.close()


def post(
    receiver: Receiver, body: bytes, kind: str = "application/x-protobuf", path: str = "/v1/traces", **headers: str
) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=30)  # type: ignore[attr-defined]
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request("POST", path, body, {"Content-Type": kind, **named})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_receiver_takes_all_forms(receiver: Receiver, tmp_path: Path) -> None:
    body = export(span(trace(1), **VLLM))
    assert post(receiver, body) == 200
    assert post(receiver, gzip.compress(export(span(trace(2), **VLLM))), Content_Encoding="gzip") == 200
    one = {"traceId": trace(3), "name": "s", "attributes": [{"key": E2E, "value": {"doubleValue": 0.5}}]}
    assert post(receiver, json_export(one), "application/json; charset=utf-8") == 200
    assert receiver.requests == 3
    assert post(receiver, body) == 200  # exporters send again what they are not sure of
    assert receiver.requests == 3
    rows = read_spool(tmp_path / "spool")
    assert [r["value"] for r in rows if r["name"] == "e2e_ms"] == [1500, 1500, 500, 1500]
    assert {r["source"] for r in rows if not r["name"].startswith("cpu")} == {"trace"}
    assert next(r for r in rows if r["name"] == "cpu_seconds_total")["labels"] == '{"source":"trace"}'
    assert "secret" not in (tmp_path / "spool").read_text()


def test_receiver_refuses_and_counts_what_it_refused(receiver: Receiver, tmp_path: Path) -> None:
    assert post(receiver, b"\x0b") == 400
    assert post(receiver, b"\x00" * 9, Content_Encoding="gzip") == 400
    assert post(receiver, b"", "text/plain") == 415
    assert post(receiver, b"", path="/v1/metrics") == 404
    assert post(receiver, b"", Content_Length=str(MAX_BODY + 1)) == 413
    refused = [r["value"] for r in read_spool(tmp_path / "spool") if r["name"] == "exports_refused_total"]
    assert refused == [1, 2, 3, 4]


def test_an_export_that_breaks_off_is_counted_as_lost(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_spans: list[Span]) -> None:
        raise RuntimeError

    monkeypatch.setattr(receiver, "take", fails)
    with pytest.raises(http.client.RemoteDisconnected):
        post(receiver, export(span(trace(1), **VLLM)))
    assert receiver.refused == 1


def test_spans_of_others_are_counted_and_only_kept_where_they_name_a_request(
    receiver: Receiver, tmp_path: Path
) -> None:
    nameless = {k: v for k, v in VLLM.items() if k != "gen_ai.request.id"}
    assert post(receiver, export(span("ff" * 16, **nameless), span("ee" * 16, **VLLM), span(trace(1), "http"))) == 200
    rows = {r["name"]: r["value"] for r in read_spool(tmp_path / "spool")}
    assert (rows["spans_total"], rows["spans_dropped_total"]) == (3, 2)
    assert receiver.requests == 1


def test_receiver_with_a_token(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        made = Receiver(Spool(str(tmp_path / "spool")), lambda: 5, PREFIX, "s3cret-word")
        made.port = sock.getsockname()[1]  # type: ignore[attr-defined]
        made.serve(sock)
        try:
            body = export(span(trace(1), **VLLM))
            assert post(made, body) == 401
            assert post(made, body, Authorization="Bearer other") == 401
            # Nor is a large body read of somebody who has not said the token: the answer comes without it.
            assert post(made, b"", Content_Length=str(MAX_BODY)) == 401
            assert post(made, body, Authorization="Bearer s3cret-word") == 200
        finally:
            made.close()


def test_grpc(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    made = Receiver(Spool(str(tmp_path / "spool")), lambda: 5, PREFIX, "s3cret-word")
    made.serve_grpc(f"127.0.0.1:{port}")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
            body, token = export(span(trace(1), **VLLM)), [("authorization", "Bearer s3cret-word")]
            assert call(body, metadata=token, timeout=30) == b""
            with pytest.raises(grpc.RpcError) as no_token:
                call(body, timeout=30)
            with pytest.raises(grpc.RpcError) as bad:
                call(b"\x0b", metadata=token, timeout=30)
        assert no_token.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert bad.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert made.requests == 1
    finally:
        made.close()


# --- the flags


def test_listening_beyond_this_machine_needs_a_token() -> None:
    assert address("4318", "--x", False) == ("127.0.0.1", 4318)
    assert address("[::1]:4318", "--x", False) == ("::1", 4318)
    assert address("0.0.0.0:4318", "--x", True) == ("0.0.0.0", 4318)
    for bad in (
        "127.0.0.1:²",
        "127.0.0.1:" + "9" * 5000,
        "0.0.0.0:4318",
        "10.0.0.1:4318",
        "host",
        "127.0.0.1:99999",
        "",
    ):
        with pytest.raises(UsageError):
            address(bad, "--x", False)


def test_one_that_listens_everywhere_does_not_say_an_address_nobody_can_use(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-word")
    ready = Probes(otlp_listen="0.0.0.0:0", otlp_token_file=str(tmp_path / "token")).prepare()
    assert re.fullmatch(r"http://HOST:\d+/v1/traces", ready.where)
    ready.close()


def test_a_port_in_use_is_said_before_anything_is_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock, pytest.raises(UsageError, match="cannot listen"):
        Probes(otlp_listen=str(sock.getsockname()[1])).prepare()
    ready = Probes(otlp_listen="127.0.0.1:0").prepare()
    assert ready.where.startswith("http://127.0.0.1:")
    assert len(ready.prefix) == 16
    ready.close()
    with pytest.raises(UsageError, match="is not a URL"):
        Probes(gpu_urls=("host:9400",)).prepare()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    for wrong in (Probes(gpu_urls=(f"http://127.0.0.1:{port}/m",)), Probes(agents=(f"http://127.0.0.1:{port}",))):
        with pytest.raises(UsageError, match="does not answer"):
            wrong.prepare()
    for url in (
        "http://[::1",
        "http://h:port",
        "http://h:99999",
        "http://h/ü",
        "ftp://h",
        "http://",
        "http://u:geheim@h",
    ):
        for wrong in (Probes(gpu_urls=(url,)), Probes(agents=(url,))):
            with pytest.raises(UsageError) as said:
                wrong.prepare()
            assert "geheim" not in said.value.message
    for alone in (Probes(otlp_token_file="x"), Probes(agent_token_file="x")):  # a flag without effect
        with pytest.raises(UsageError, match="needs"):
            alone.prepare()
    assert not Probes().prepare().prefix


# --- the join


def run_of(rows: list[dict[str, Any]], readings: list[tuple[str, dict[str, str], float]], prefix: str = PREFIX) -> Run:
    base = {"point": 0, "replica": 0, "attempt": 1, "outcome": "ok", "fault": "none"}
    table = Table.from_rows("requests", [{**base, **row} for row in rows])
    at = {"asked_ns": 1, "answered_ns": 1, "source": "trace"}
    said = [{**at, "name": n, "labels": orjson.dumps(w).decode(), "value": v} for n, w, v in readings]
    empty = {name: Table.empty(name) for name in ("points", "chunks", "steps")}
    return Run(
        Manifest(client={"trace_prefix": prefix}), requests=table, readings=Table.from_rows("readings", said), **empty
    )


def test_spans_fill_what_the_response_did_not_say() -> None:
    rows = [
        {"id": 5},
        {"id": 6, "engine_queue_ms": 3.0},
        {"id": 7},
        {"id": 8, "outcome": "timeout", "fault": "service"},
    ]
    ours = [("queue_ms", {"trace": trace(5)}, 11.0), ("queue_ms", {"trace": trace(6)}, 22.0),
            ("prefill_ms", {"trace": trace(6)}, 4.0), ("output_tokens", {"trace": trace(5)}, 9.0),
            ("queue_ms", {"trace": "ff" * 16}, 99.0), ("e2e_ms", {"trace": "ff" * 16}, 99.0)]  # fmt: skip
    got = joined(run_of(rows, ours))
    assert np.array_equal(got.run.requests["engine_queue_ms"], [11, 3, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(got.run.requests["engine_prefill_ms"], [np.nan, 4, np.nan, np.nan], equal_nan=True)
    assert got.run.requests["output_tokens"][0] == 9
    assert (got.due, got.found, got.strangers) == (3, 2, 1)
    what = [d["what"] for d in got.doubts("http://x")]
    assert what == ["1 of 3 requests have no span", "1 spans of others"]
    again = joined(got.run)
    assert again.run.requests == got.run.requests


def test_request_ids_join_where_the_trace_did_not_get_through() -> None:
    rows = [{"id": 5, "trace_id": "chatcmpl-a"}, {"id": 6, "trace_id": "cmpl-b"}]
    ours = [("queue_ms", {"trace": "ff" * 16, "request": "chatcmpl-a"}, 11.0),
            ("queue_ms", {"trace": "ee" * 16, "request": "cmpl-b-0"}, 12.0)]  # fmt: skip
    assert joined(run_of(rows, ours)).run.requests["engine_queue_ms"].tolist() == [11, 12]
    assert joined(run_of(rows, ours, prefix="")).found == 2


def test_sglang_has_its_queue_inside_its_prefill() -> None:
    ours = [("queue_ms", {"trace": trace(5), "span": "prefill_waiting"}, 30.0),
            ("prefill_ms", {"trace": trace(5)}, 50.0),
            ("prefill_forward_ms", {"trace": trace(5), "span": "prefill_forward"}, 15.0)]  # fmt: skip
    requests = joined(run_of([{"id": 5}], ours)).run.requests
    assert (requests["engine_queue_ms"][0], requests["engine_prefill_ms"][0]) == (30, 20)


def test_no_spans_at_all_is_a_doubt() -> None:
    got = joined(run_of([{"id": 5}], []))
    assert "exports none to http://x" in got.doubts("http://x")[0]["why"]


def test_traceparent_is_w3c() -> None:
    prefix = new_prefix()
    version, trace_id, parent, flags = traceparent(prefix, 2**40 + 3, 2).split("-")
    assert (version, flags) == ("00", "01")
    assert len(trace_id) == 32
    assert trace_id[:16] == prefix
    assert int(trace_id[16:], 16) == 2**40 + 3
    assert len(parent) == 16
    assert int(parent, 16)
    assert prefix != new_prefix()


# --- a whole run, against an engine that exports


class Engine(ThreadingHTTPServer):
    """Answers a chat request and then exports a span of it to ``spans_to``, as an exporter does: from a thread."""

    daemon_threads = True
    spans_to = 0
    seen: list[str]


class Chat(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self._send(
            200 if known else 404, "application/json", b'{"object":"list","data":[{"id":"m"}]}' if known else b"{}"
        )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.endswith("/chat/completions"):
            self._send(404, "application/json", b"{}")
            return
        events = [
            {"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}}]},
            {"id": "x", "choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "length"}]},
            {"id": "x", "choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 2}},
        ]
        body = b"".join(b"data: " + orjson.dumps(e) + b"\n\n" for e in events) + b"data: [DONE]\n\n"
        self._send(200, "text/event-stream", body)
        self.server.seen.append(self.headers["traceparent"])
        trace_id = self.headers["traceparent"].split("-")[1]
        body = export(span(trace_id, **{QUEUE: 0.5, PREFILL: int(trace_id[16:], 16) / 1e3, E2E: 0.75}))
        connection = http.client.HTTPConnection("127.0.0.1", self.server.spans_to, timeout=30)
        connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
        connection.getresponse().read()
        connection.close()

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_joins_the_spans_of_its_engine(tmp_path: Path, processes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with Engine(("127.0.0.1", 0), Chat) as engine:
        engine.spans_to, engine.seen = port, []
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            url = f"http://127.0.0.1:{engine.server_address[1]}"
            probes = Probes(otlp_listen=str(port))
            out = str(tmp_path / "r")
            options = app.Options(url=url, out=out, floor=False, probes=probes, processes=processes)
            result = app.measure(options, [app.Load("concurrency", 2, requests=6)], say=lambda _line: None)
        finally:
            engine.shutdown()
            thread.join()
    requests = result.run.requests
    assert requests["engine_queue_ms"].tolist() == [500.0] * 6
    assert requests["engine_prefill_ms"].tolist() == [float(i) for i in requests["id"].tolist()]  # each has its own
    said = [d["what"] for d in result.run.manifest.doubts]
    assert not [w for w in said if "span" in w]  # nor were those of the first requests taken for others'
    assert len({t.split("-")[1][:15] for t in engine.seen}) == 1
    assert app.show(tmp_path / "r").run.requests == requests


def test_each_request_of_sglang_has_its_own_queue_taken_out() -> None:
    ours = [(name, {"trace": trace(k)}, value) for k, told in enumerate([(30.0, 50.0, 15.0), (30.0, 40.0, 25.0)])
            for name, value in zip(("queue_ms", "prefill_ms", "prefill_forward_ms"), told, strict=True)]  # fmt: skip
    ours.append(("prefill_forward_ms", {"trace": trace(2)}, 12.0))
    requests = joined(run_of([{"id": k} for k in range(3)], ours)).run.requests
    # The second one's forward pass alone took longer than what the queue leaves.
    assert requests["engine_prefill_ms"].tolist() == [20, 25, 12]
