"""An OTLP receiver for traces: HTTP with protobuf or JSON bodies, gzip or not; gRPC where ``grpcio`` is installed.

The part of protobuf that a trace export uses is four wire types, so it is decoded here and the base install needs no
protobuf library. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.
"""

from __future__ import annotations

import gzip
import io
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from whywait.probe import Row
from whywait.probe.prometheus import label_json
from whywait.probe.spans import KEPT, SOURCE, Span, figures, rows_of, trace_id_of, unmeasured
from whywait.probe.spool import Spool
from whywait.probe.web import Handler, Server, allowed, whole_number

PATH = "/v1/traces"
MAX_BODY = 16 << 20  # as sent, and once unpacked
MOST_SPANS = 50_000  # of one export; an empty one takes two bytes to send, and far more to hold
DRAINED = 1 << 16  # bytes read of a body that is not taken, so that the answer gets through
MOST_STRANGERS = 20_000  # request ids of others that are remembered, for their count
JSON, PROTOBUF = "application/json", "application/x-protobuf"


class OtlpError(ValueError):
    """The body is no trace export."""


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) of one protobuf message: int for varint and fixed types, bytes for what has a length.

    Raises:
        OtlpError: it is cut short, or no protobuf.
    """
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        value: int | memoryview
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            if at + size > end:
                raise OtlpError("cut short")
            value, at = data[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            if at + size > end:
                raise OtlpError("cut short")
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        else:
            raise OtlpError(f"wire type {kind}")
        yield key >> 3, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    out = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        out |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return out & (1 << 64) - 1, at
    raise OtlpError("cut short")


def spans_of_protobuf(body: bytes) -> list[Span]:
    """The spans of an ExportTraceServiceRequest.

    Raises:
        OtlpError: it is none.
    """
    out: list[Span] = []
    for n1, resource_spans in fields(memoryview(body)):
        for n2, scope_spans in fields(_message(resource_spans)) if n1 == 1 else ():
            for n3, span in fields(_message(scope_spans)) if n2 == 2 else ():
                if n3 == 2:
                    out.append(_span(_message(span)))
                    if len(out) > MOST_SPANS:
                        raise OtlpError("too many spans")
    return out


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise OtlpError("a number where a message belongs")
    return value


def _span(data: memoryview) -> Span:
    trace_id, name, start, end = "", "", 0, 0
    attributes: dict[str, Any] = {}
    for number, value in fields(data):
        if number == 1:
            trace_id = trace_id_of(bytes(_message(value)).hex())
        elif number == 5:
            name = _text(value)
        elif number in (7, 8) and isinstance(value, int):
            start, end = (value, end) if number == 7 else (start, value)
        elif number == 9:
            key, found = "", None
            for n, v in fields(_message(value)):
                if n == 1:
                    key = _text(v)
                elif n == 2:
                    found = _any_value(_message(v))
            if key in KEPT:
                attributes[key] = found
    return Span(trace_id, name, end - start if start and end else None, attributes)


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode("utf-8", "replace")


def _any_value(data: memoryview) -> Any:
    """Text, whole or real number; anything else (lists, maps) is None: none of our figures is one."""
    for number, value in fields(data):
        if number == 1:
            return _text(value)
        if number == 3 and isinstance(value, int):
            return value - (1 << 64) if value >> 63 else value
        if number == 4 and isinstance(value, int):
            return struct.unpack("<d", value.to_bytes(8, "little"))[0]
    return None


def spans_of_json(body: bytes) -> list[Span]:
    """The same from OTLP's JSON: ids in hexadecimal, 64-bit numbers as text.

    Raises:
        OtlpError: it is no trace export.
    """
    try:
        export = orjson.loads(body)
        spans = [s for r in export["resourceSpans"] for g in r["scopeSpans"] for s in g["spans"]]
        if len(spans) > MOST_SPANS:
            raise OtlpError("too many spans")
        return [_json_span(s) for s in spans]
    except OtlpError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise OtlpError(f"not a trace export ({type(exc).__name__})") from None


def _json_span(span: dict[str, Any]) -> Span:
    start, end = _int64(span.get("startTimeUnixNano") or 0), _int64(span.get("endTimeUnixNano") or 0)
    attributes: dict[str, Any] = {}
    for pair in span.get("attributes") or ():
        value = pair["value"]
        if pair["key"] not in KEPT:
            continue
        if "intValue" in value:
            attributes[pair["key"]] = _int64(value["intValue"])
        else:
            attributes[pair["key"]] = value.get("doubleValue", value.get("stringValue"))
    trace_id = trace_id_of(str(span.get("traceId") or "").lower())
    return Span(trace_id, str(span.get("name") or ""), end - start if start and end else None, attributes)


def _int64(value: str | int) -> int:
    number = int(value)
    if not -(1 << 63) <= number < 1 << 64:
        raise OtlpError("a number of more than 64 bits")
    return number


def unpacked(body: bytes, encoding: str) -> bytes:
    """A body without its content coding.

    Raises:
        OtlpError: not gzip, or larger than ``MAX_BODY`` once unpacked.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise OtlpError(f"content coding {encoding[:20]!r}")
    try:
        out = gzip.GzipFile(fileobj=io.BytesIO(body)).read(MAX_BODY + 1)
    except (OSError, EOFError, zlib.error):
        raise OtlpError("not gzip") from None
    if len(out) > MAX_BODY:
        raise OtlpError("too large")
    return out


class Receiver:
    """Writes the spans that come in to the spool; counts the requests they tell of. Threads of its own."""

    def __init__(self, spool: Spool, now: Callable[[], int], prefix: str = "", token: str | None = None) -> None:
        self._spool, self._now, self._prefix = spool, now, prefix
        self.token = token
        self._lock = threading.Lock()
        self.ours: set[str] = set()  # traces with our prefix
        self._named: dict[str, None] = {}  # request ids of others, oldest first
        self.spans = self.dropped = self.refused = 0
        self._cpu_s = 0.0
        self._server: Server | None = None
        self._grpc: Any = None

    @property
    def requests(self) -> int:
        """How many requests spans have come of."""
        return len(self.ours) or len(self._named)

    def allowed(self, said: str | None) -> bool:
        return allowed(self.token, said)

    def take(self, spans: list[Span]) -> None:
        rows: list[Row] = []
        warm = unmeasured(self._prefix)
        with self._lock:
            for span in spans:
                if warm and span.trace_id.startswith(warm):
                    continue
                found, request = figures(span)
                ours = bool(self._prefix) and span.trace_id.startswith(self._prefix)
                if not found or not (ours or request):
                    self.dropped += 1
                    continue
                if "e2e_ms" in found or "queue_ms" in found:
                    self._count(span.trace_id if ours else None, str(request))
                rows += rows_of(span)
            self.spans += len(spans)
            rows.append(("spans_total", None, float(self.spans)))
            if self.dropped:
                rows.append(("spans_dropped_total", None, float(self.dropped)))
            now = self._now()
            self._spool.write(now, now, SOURCE, rows)  # under the lock: a total written late would look like a reset

    def _count(self, ours: str | None, request: str) -> None:
        if ours is not None:
            self.ours.add(ours)
        else:
            self._named[request] = None
            if len(self._named) > MOST_STRANGERS:
                del self._named[next(iter(self._named))]

    def cost(self, cpu_s: float) -> None:
        """Note the CPU time an export took us."""
        with self._lock:
            self._cpu_s += cpu_s
            now = self._now()
            labels = label_json({"source": SOURCE})
            self._spool.write(now, now, "sampler", [("cpu_seconds_total", labels, round(self._cpu_s, 6))])

    def refuse(self) -> None:
        """Note an export that could not be read: what was in it is lost, and that is a reading."""
        with self._lock:
            self.refused += 1
            now = self._now()
            self._spool.write(now, now, SOURCE, [("exports_refused_total", None, float(self.refused))])

    def serve(self, listening: socket.socket) -> None:
        """Answer on a socket that already listens."""
        server = Server(listening, _handler(self))
        self._server = server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True, name="otlp").start()

    def serve_grpc(self, address: str) -> None:
        """The same over gRPC; needs ``grpcio``.

        Raises:
            ImportError: it is not installed. RuntimeError: the address cannot be used.
        """
        from whywait.probe.otlp_grpc import start

        self._grpc = start(self, address)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._grpc is not None:
            self._grpc.stop(0.5)
            self._grpc = None


def _handler(receiver: Receiver) -> type[Handler]:
    class Exports(Handler):
        def do_POST(self) -> None:
            began = time.thread_time()
            try:
                self._take()
            except Exception:  # it hung up in the middle, or a fault of ours: lost either way, and that is counted
                receiver.refuse()
                raise
            receiver.cost(time.thread_time() - began)

        def _take(self) -> None:
            size = whole_number(self.headers.get("Content-Length"))
            if self.path.partition("?")[0] != PATH:
                return self._unread(404, size)
            if not receiver.allowed(self.headers.get("Authorization")):
                return self._unread(401, size)
            if size is None or size > MAX_BODY:
                receiver.refuse()
                return self._unread(413 if size else 411, None)
            body = self.rfile.read(size)
            kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
            if kind not in (JSON, PROTOBUF):
                receiver.refuse()
                return self.answer(415)
            try:
                plain = unpacked(body, (self.headers.get("Content-Encoding") or "").strip().lower())
                spans = spans_of_json(plain) if kind == JSON else spans_of_protobuf(plain)
            except OtlpError:
                receiver.refuse()
                return self.answer(400)
            receiver.take(spans)
            return self.answer(200, b"{}" if kind == JSON else b"", kind)  # an empty message means: all taken

        def _unread(self, status: int, size: int | None) -> None:
            """Answer whoever may not send, or sends too much, without holding what it sends."""
            if size is not None and size <= DRAINED:
                self.rfile.read(size)
            else:
                self.close_connection = True
            self.answer(status)

    return Exports
