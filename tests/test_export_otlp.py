"""OTLP spans: by the official messages, by our own receiver over a socket, and by a collector that is short of time."""

from __future__ import annotations

import base64
import gzip
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
import pytest
from hypothesis import given

from tests.analysis_runs import S, Service, make_run, messy_runs
from whywait import cli
from whywait.analyze.phases import PHASES, account
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.net.wire import traceparent
from whywait.probe.otlp import Receiver, spans_of_json
from whywait.probe.spool import Spool, read_spool
from whywait.report.export import Chosen, choose
from whywait.report.export_spans import BATCH, batches

PREFIX = "00000000000000aa"
ZERO = 1_700_000_000_000_000_000


def spans_of(chosen: Chosen) -> list[dict[str, Any]]:
    return [s for b in batches(chosen) for r in b["resourceSpans"] for g in r["scopeSpans"] for s in g["spans"]]


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def service(**more: Any) -> Run:
    facts = {"zero_unix_ns": ZERO, "endpoint": {"url": "http://127.0.0.1:8000/v1", "dialect": "chat", "stream": True},
             "client": {"trace_prefix": PREFIX}, **more}  # fmt: skip
    run = Service(slots=2, engine={"name": "vllm", "model": "m"}).closed(4, 8, **facts)
    return Run(run.manifest, run.points, run.requests.replace(reasoning_tokens=np.full(8, 3.0)), run.chunks, run.steps,
               run.readings)  # fmt: skip


def official(batch: dict[str, Any]) -> Any:
    """Parsed by the official messages; their JSON has ids in base64 where OTLP has hexadecimal."""
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from google.protobuf import json_format

    copy = orjson.loads(orjson.dumps(batch))
    for r in copy["resourceSpans"]:
        for span in r["scopeSpans"][0]["spans"]:
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in span:
                    span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    return json_format.ParseDict(copy, trace_service.ExportTraceServiceRequest())


def lawful(spans: list[dict[str, Any]]) -> None:
    """Ids of the right length and unique, parents there and around their children."""
    by_id = {(s["traceId"], s["spanId"]): s for s in spans}
    assert len(by_id) == len(spans)
    for s in spans:
        assert len(s["traceId"]) == 32
        assert int(s["traceId"], 16)
        assert len(s["spanId"]) == 16
        assert int(s["spanId"], 16)
        assert int(s["startTimeUnixNano"]) <= int(s["endTimeUnixNano"])
        if "parentSpanId" in s:
            parent = by_id[s["traceId"], s["parentSpanId"]]
            assert int(parent["startTimeUnixNano"]) <= int(s["startTimeUnixNano"])
            assert int(s["endTimeUnixNano"]) <= int(parent["endTimeUnixNano"])


@given(messy_runs(orderly=False))
def test_any_run_gives_lawful_spans(run: Run) -> None:
    chosen = choose(run)
    spans = spans_of(chosen)
    assert sum("parentSpanId" not in s for s in spans) == len(run.requests)
    lawful(spans)
    for batch in batches(chosen):
        orjson.loads(orjson.dumps(batch))
        official(batch)


def test_spans_by_the_genai_conventions() -> None:
    run = service()
    spans = spans_of(choose(run))
    lawful(spans)
    tops = [s for s in spans if "parentSpanId" not in s]
    a = attributes(tops[5])
    assert tops[5]["name"] == "chat m"
    assert tops[5]["kind"] == 3
    assert a["gen_ai.operation.name"] == "chat"
    assert a["gen_ai.provider.name"] == "vllm"
    assert (a["gen_ai.usage.input_tokens"], a["gen_ai.usage.output_tokens"]) == ("100", "16")
    assert a["gen_ai.usage.reasoning.output_tokens"] == "3"
    assert (a["server.address"], a["server.port"]) == ("127.0.0.1", "8000")
    first = run.requests["first_ns"][5] - run.requests["sent_ns"][5]
    assert a["gen_ai.response.time_to_first_chunk"] == first / S
    assert int(tops[5]["startTimeUnixNano"]) == ZERO + run.requests["sent_ns"][5]
    events = {e["name"]: int(e["timeUnixNano"]) for e in tops[5]["events"]}
    assert events["first chunk"] == ZERO + run.requests["first_ns"][5]
    # The ids are those that went out with the request, so an engine's spans are its children.
    assert f"00-{tops[5]['traceId']}-{tops[5]['spanId']}-01" == traceparent(PREFIX, 5, 1)
    acc = account(run)
    spent = dict.fromkeys(PHASES, 0)
    for s in spans:
        if s.get("parentSpanId") == tops[5]["spanId"]:
            spent[s["name"]] += int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"])
    whole = dict(zip(PHASES, acc.phases[5].tolist(), strict=True))
    assert spent == {**whole, "decode": whole["decode"] + whole["stall"], "stall": 0}


def test_failures_are_errors_and_partial_runs_say_so() -> None:
    run = make_run([{"sent_ns": 0, "end_ns": S, "outcome": "http_error", "detail": "overloaded", "status": 500}],
                   partial=True, partial_reason="killed", made_by="imported")  # fmt: skip
    (batch,) = batches(choose(run))
    told = attributes(batch["resourceSpans"][0]["resource"])
    assert (told["whywait.run.partial"], told["whywait.run.partial_reason"]) == (True, "killed")
    assert told["whywait.run.made_by"] == "imported"
    assert "made up" in told["whywait.run.clock"]
    span = batch["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert span["status"] == {"code": 2, "message": "http_error overloaded"}
    assert attributes(span)["error.type"] == "http_error"
    assert int(span["startTimeUnixNano"]) == 946_684_800 * S


def test_exports_are_of_bounded_size() -> None:
    run = make_run([{"sent_ns": i, "end_ns": i + S} for i in range(BATCH + 1)])
    assert [len(b["resourceSpans"][0]["scopeSpans"][0]["spans"]) for b in batches(choose(run))] == [2 * BATCH, 2]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    sock = socket.create_server(("127.0.0.1", 0))
    spool = Spool(tmp_path / "readings.jsonl")
    got = Receiver(spool, lambda: 1, PREFIX)
    got.serve(sock)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}", tmp_path / "readings.jsonl"
    got.close()
    spool.close()


def test_our_own_receiver_takes_them(receiver: tuple[str, Path], tmp_path: Path) -> None:
    url, spool = receiver
    run = service()
    run.save(tmp_path / "run")
    assert cli.main(["export", str(tmp_path / "run"), "--to", "otlp", "--endpoint", url]) == 0
    rows = Table.from_rows("readings", read_spool(spool))
    output = rows.where(rows["name"] == "output_tokens")
    assert sorted(output["value"].tolist()) == [16.0] * 8
    assert {json.loads(x)["trace"] for x in output["labels"]} == {f"{PREFIX}{i:016x}" for i in range(8)}


def test_the_file_is_what_the_receiver_reads(tmp_path: Path) -> None:
    service().save(tmp_path / "run")
    out = tmp_path / "spans.jsonl"
    assert cli.main(["export", str(tmp_path / "run"), "--to", "otlp", "--out", str(out), "--requests", "2,4-5"]) == 0
    spans = [s for line in out.read_bytes().splitlines() for s in spans_of_json(line)]
    assert {s.trace_id for s in spans} == {f"{PREFIX}{i:016x}" for i in (2, 4, 5)}


class Collector(http.server.BaseHTTPRequestHandler):
    answers: ClassVar[list[tuple[int, bytes]]] = []
    got: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, dict(self.headers), gzip.decompress(body)))
        status, answer = self.answers.pop(0) if self.answers else (200, b"{}")
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.answers, Collector.got = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_busy_collector_is_asked_again_and_rejections_are_told(
    collector: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service().save(tmp_path / "run")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=perf%20lab")
    Collector.answers = [(503, b""), (200, b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"no"}}')]
    argv = ["export", str(tmp_path / "run"), "--to", "otlp", "--endpoint", collector, "--json", "--header", "x-a: b"]
    assert cli.main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rejected_spans"] == 3
    assert [path for path, _, _ in Collector.got] == ["/v1/traces"] * 2
    _, headers, body = Collector.got[1]
    assert headers["x-team"] == "perf lab"
    assert headers["x-a"] == "b"
    assert headers["Content-Type"] == "application/json"
    spans = orjson.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert told["spans"] == len(spans) - 3
    assert Collector.got[0][2] == body


def test_a_collector_that_refuses_or_is_not_there(
    collector: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service().save(tmp_path / "run")
    Collector.answers = [(401, b"")]
    argv = ["export", str(tmp_path / "run"), "--to", "otlp", "--endpoint"]
    assert cli.main([*argv, collector]) == 4
    assert "answers 401; 0 spans had been taken" in capsys.readouterr().err
    assert len(Collector.got) == 1
    for url, code, said in (("http://127.0.0.1:1", 4, "no collector"), ("http://192.0.2.1:4318", 2, "--remote"),
                            ("ftp://127.0.0.1", 2, "not a URL"), ("http://[::1", 2, "not a URL")):  # fmt: skip
        assert cli.main([*argv, url]) == code
        assert said in capsys.readouterr().err
