"""A Run as OpenTelemetry spans: OTLP in JSON, a line per export, as the collector's file exporter and receiver have it.

A request is a client span by the GenAI conventions (semantic conventions 1.41; attributes of our own begin with
``whywait.``), with a child per phase and events for its headers and its first tokens. No text of a prompt or an answer
is in a Run, so none is here. Where the run sent W3C trace contexts the ids are those it sent: an engine's own spans of
the same requests then hang below ours in any viewer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from whywait import __version__
from whywait.analyze.phases import PHASES, STALL
from whywait.report.export import Chosen
from whywait.units import NS_PER_MS, NS_PER_S

BATCH = 256  # requests of one export
MOST_STALLS = 16  # spans of stalls of a request, the longest of them; how long all took is an attribute of decode
CLIENT, INTERNAL = 3, 1  # Span.SpanKind
ERROR = 2  # Status.StatusCode
OPERATIONS = {"chat": "chat", "responses": "chat", "completions": "text_completion"}
_TRACE = re.compile(r"[0-9a-f]{32}")
_DECODE = PHASES.index("decode")

#: Column of a request → attribute of its span.
ATTRIBUTES = {
    "asked_output_tokens": "gen_ai.request.max_tokens",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "status": "http.response.status_code",
    "point": "whywait.point",
    "id": "whywait.request.id",
    "class": "whywait.class",
    "turn": "whywait.turn",
    "replica": "whywait.replica",
    "attempt": "whywait.attempt",
    "outcome": "whywait.outcome",
    "fault": "whywait.fault",
    "content_chunks": "whywait.content_chunks",
}


def batches(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """ExportTraceServiceRequests of ``chosen`` in OTLP's JSON, each of at most ``BATCH`` requests."""
    resource = {"attributes": _attributes({"service.name": "whywait", "service.version": __version__,
                                           "service.instance.id": chosen.uid,
                                           **{f"whywait.run.{k}": v for k, v in chosen.labels.items()}})}  # fmt: skip
    ids = _Ids(chosen)
    for lo in range(0, len(chosen.due), BATCH):
        part = chosen.due[lo : lo + BATCH]
        rows = chosen.run.requests.where(part).rows()
        spans = [s for row, one in zip(part.tolist(), rows, strict=True) for s in _spans(chosen, row, one, ids)]
        scope = {"scope": {"name": "whywait.export", "version": __version__}, "spans": spans}
        yield {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


class _Ids:
    """Trace and span ids: what the run sent, else what follows from the run and the request's number."""

    def __init__(self, chosen: Chosen) -> None:
        prefix = str(chosen.run.manifest.client.get("trace_prefix") or "")
        self._prefix = prefix if re.fullmatch(r"[0-9a-f]{16}", prefix) else ""
        self._seed = chosen.uid

    def of(self, one: dict[str, Any]) -> tuple[str, str]:
        said = str(one["trace_id"] or "").lower()
        if self._prefix:
            return f"{self._prefix}{one['id']:016x}", f"{one['attempt']:04x}{one['id'] & 0xFFFFFFFFFFFF:012x}"
        trace = said if _TRACE.fullmatch(said) else self._made(f"trace {one['id']}")[:32]
        return trace, self._made(f"span {one['id']}")[:16]

    def child(self, one: dict[str, Any], number: int) -> str:
        return self._made(f"part {one['id']} {number}")[:16]

    def _made(self, what: str) -> str:
        return hashlib.sha256(f"{self._seed} {what}".encode()).hexdigest()


def _spans(chosen: Chosen, row: int, one: dict[str, Any], ids: _Ids) -> Iterator[dict[str, Any]]:
    trace, own = ids.of(one)
    edges, m = chosen.placed.edges, chosen.run.manifest
    operation = OPERATIONS.get(str(m.endpoint.get("dialect") or "chat"), "chat")
    model = m.engine.get("model")
    told = {"gen_ai.operation.name": operation, "gen_ai.provider.name": m.engine.get("name") or "unknown",
            "gen_ai.request.model": model, "gen_ai.request.stream": m.endpoint.get("stream"), **_server(m.endpoint),
            **{name: one[column] for column, name in ATTRIBUTES.items()}}  # fmt: skip
    told |= {"gen_ai.conversation.id": _text(one["session_id"]), "whywait.detail": one["detail"]}
    if one["trace_id"] and not _TRACE.fullmatch(one["trace_id"].lower()):
        told["gen_ai.response.id"] = one["trace_id"]
    if one["finish_reason"]:
        told["gen_ai.response.finish_reasons"] = [one["finish_reason"]]
    if one["first_ns"] is not None and one["sent_ns"] is not None:
        told["gen_ai.response.time_to_first_chunk"] = (one["first_ns"] - one["sent_ns"]) / NS_PER_S
    lat = chosen.latency
    times = {f"whywait.{k}": float(getattr(lat, k)[row]) for k in ("ttft_ms", "tpot_ms", "e2e_ms")}
    told |= {k: v for k, v in times.items() if np.isfinite(v)}
    told["whywait.starts"] = chosen.starts(one["point"])
    if one["outcome"] != "ok":
        told["error.type"] = one["outcome"]
    span = {"traceId": trace, "spanId": own, "name": f"{operation} {model}" if model else operation, "kind": CLIENT,
            "startTimeUnixNano": str(chosen.unix(edges[row, 0])), "endTimeUnixNano": str(chosen.unix(edges[row, -1])),
            "attributes": _attributes(told), "events": _events(chosen, one)}  # fmt: skip
    if one["outcome"] != "ok":
        span["status"] = {"code": ERROR, "message": " ".join(str(w) for w in (one["outcome"], one["detail"]) if w)}
    yield span
    yield from _phases(chosen, row, one, (trace, own, ids))


def _phases(chosen: Chosen, row: int, one: dict[str, Any], at: tuple[str, str, _Ids]) -> Iterator[dict[str, Any]]:
    """A span per phase below the request's; stalls below decode."""
    (trace, own, ids), acc = at, chosen.account
    how, first = acc.how[int(acc.point[row])], int(chosen.placed.edges[row, 8])
    causes = [(p, c, float(ns[row]) / NS_PER_MS) for (p, c), ns in acc.cause_ns.items() if ns[row] and c != "unknown"]
    number = 0

    def span(phase: int, start: int, end: int, parent: str) -> dict[str, Any]:
        nonlocal number
        number += 1
        name = PHASES[phase]
        told = {"whywait.phase": name, "whywait.how": how[name],
                **{f"whywait.cause.{c}.ms": v for p, c, v in causes if p == name}}  # fmt: skip
        return {"traceId": trace, "spanId": ids.child(one, number), "parentSpanId": parent, "name": name,
                "kind": INTERNAL, "startTimeUnixNano": str(chosen.unix(start)),
                "endTimeUnixNano": str(chosen.unix(end)), "attributes": _attributes(told)}  # fmt: skip

    for phase, start, end in chosen.placed.parts(row):
        part = span(phase, start, end, own)
        yield part  # what is added below is in it when the batch is written
        if phase == _DECODE and start == first:
            stalls = chosen.placed.stalls(row)
            if stalls:
                told = {"whywait.stalls": len(stalls), "whywait.stalled_ms": sum(z - a for a, z in stalls) / NS_PER_MS}
                part["attributes"] += _attributes(told)
            longest = sorted(stalls, key=lambda s: s[0] - s[1])[:MOST_STALLS]
            yield from (span(STALL, a, z, part["spanId"]) for a, z in sorted(longest))


def _events(chosen: Chosen, one: dict[str, Any]) -> list[dict[str, Any]]:
    found = {"sent": one["sent_ns"], "response headers": one["accepted_ns"], "first chunk": one["first_ns"],
             "first answer chunk": one["first_answer_ns"] if one["first_answer_ns"] != one["first_ns"] else None,
             "last chunk": one["last_ns"]}  # fmt: skip
    return [{"timeUnixNano": str(chosen.unix(t)), "name": name} for name, t in found.items() if t is not None]


def _server(endpoint: dict[str, Any]) -> dict[str, Any]:
    """Host and port of the service; nothing else of its URL."""
    try:
        parts = urlsplit(str(endpoint.get("url") or ""))
        return {"server.address": parts.hostname, "server.port": parts.port}
    except ValueError:
        return {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _attributes(told: dict[str, Any]) -> list[dict[str, Any]]:
    """OTLP's key-value pairs; what is not known is left out. 64-bit numbers are text, as its JSON wants them."""
    return [{"key": k, "value": _value(v)} for k, v in told.items() if v is not None]


def _value(v: Any) -> dict[str, Any]:
    if isinstance(v, bool):
        return {"boolValue": v}
    if isinstance(v, int):
        return {"intValue": str(v)}
    if isinstance(v, float):
        return {"doubleValue": v}
    if isinstance(v, list):
        return {"arrayValue": {"values": [_value(x) for x in v]}}
    return {"stringValue": str(v)}
