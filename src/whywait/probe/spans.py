"""Spans of an engine: what is kept of them, and how they are joined to our requests.

Only lengths of time are used: what the engine itself subtracted (attributes), or end minus start of one span, which one
clock gave. No time of day of the engine's machine is ever compared with ours. Of a span's attributes only the figures
named here and the request's id are kept; texts, such as prompts, never.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from whywait.core.columns import OUTCOMES, TABLES
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.probe import Row
from whywait.probe.prometheus import label_json

SOURCE = "trace"

#: Attribute → (our name, factor). vLLM (``llm_request`` span) and SGLang (root span) use the same names, in seconds.
ATTRIBUTES: Mapping[str, tuple[str, float]] = {
    "gen_ai.latency.time_in_queue": ("queue_ms", 1e3),
    "gen_ai.latency.time_in_model_prefill": ("prefill_ms", 1e3),
    "gen_ai.latency.time_in_model_decode": ("decode_ms", 1e3),
    "gen_ai.latency.time_in_model_inference": ("inference_ms", 1e3),
    "gen_ai.latency.time_to_first_token": ("ttft_ms", 1e3),
    "gen_ai.latency.e2e": ("e2e_ms", 1e3),
    "gen_ai.usage.prompt_tokens": ("prompt_tokens", 1),
    "gen_ai.usage.completion_tokens": ("output_tokens", 1),
    "gen_ai.usage.input_tokens": ("prompt_tokens", 1),
    "gen_ai.usage.output_tokens": ("output_tokens", 1),
}
REQUEST_ID = ("gen_ai.request.id", "request.id", "rid")

#: Spans whose own length is a figure: SGLang gives a span to each stage (``--enable-trace``).
STAGES: Mapping[str, str] = {
    "tokenize": "tokenize_ms",
    "prefill_waiting": "queue_ms",
    "prefill_forward": "prefill_forward_ms",
    "prefill_transfer_kv_cache": "kv_transfer_ms",
}

#: Column of the requests table ← figure of its spans.
COLUMNS: Mapping[str, str] = {
    "engine_queue_ms": "queue_ms",
    "engine_prefill_ms": "prefill_ms",
    "engine_decode_ms": "decode_ms",
    "engine_ttft_ms": "ttft_ms",
    "engine_e2e_ms": "e2e_ms",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
}
KEPT = frozenset({*ATTRIBUTES, *REQUEST_ID})  # attributes that are looked at
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_MOST_MS = 1e9  # eleven days: more is a clock that was never set


class Span(NamedTuple):
    """A span as received: ids in hexadecimal, length in ns (None when it has not both ends), attributes as sent."""

    trace_id: str
    name: str
    length_ns: int | None
    attributes: Mapping[str, Any]


def new_prefix() -> str:
    """First half of the trace ids of a run, 16 hexadecimal digits; the second half is the request's number."""
    return f"{secrets.randbits(60):015x}1"


def unmeasured(prefix: str) -> str:
    """The same for requests of ours that are in no table, such as those that warm a cache; '' for ''."""
    return prefix[:-1] + "0" if prefix else ""


def trace_id_of(text: str) -> str:
    """``text`` where it is a trace id, 32 hexadecimal digits; else ''."""
    return text if _TRACE_ID.fullmatch(text) else ""


def figures(span: Span) -> tuple[dict[str, float], str | None]:
    """The figures of a span under our names, and the id of its request. Negative and absurd ones are left out."""
    out: dict[str, float] = {}
    for name, value in span.attributes.items():
        ours = ATTRIBUTES.get(name)
        if (
            ours is not None
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
            and 0 <= value * ours[1] < _MOST_MS
        ):
            out[ours[0]] = float(value) * ours[1]
    stage = STAGES.get(span.name)
    if stage is not None and span.length_ns is not None and 0 <= span.length_ns / 1e6 < _MOST_MS:
        out[stage] = span.length_ns / 1e6
    said = (span.attributes.get(name) for name in REQUEST_ID)
    return out, next((text[:200] for text in said if isinstance(text, str) and text), None)


def rows_of(span: Span) -> list[Row]:
    """Readings of a span: one per figure, labelled with its trace and its request; [] when it tells nothing."""
    found, request = figures(span)
    if not found:
        return []
    labels = {"trace": span.trace_id, "span": span.name[:60], **({"request": request} if request else {})}
    text = label_json(labels)
    return [(name, text, round(value, 6)) for name, value in found.items()]


class Joined(NamedTuple):
    """A Run with its requests filled in from spans; of ``due`` requests that ended well ``found`` had any."""

    run: Run
    due: int
    found: int
    strangers: int

    def doubts(self, listening: str) -> list[dict[str, str]]:
        out = []
        if missing := self.due - self.found:
            none = f"the engine exports none to {listening}"
            why = "they were not exported before the wait for them ended" if self.found else none
            next_ = "vllm: --otlp-traces-endpoint, with OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
            out.append({"what": f"{missing} of {self.due} requests have no span", "why": why, "next": next_})
        if self.strangers:
            why = "they belong to none of our requests: somebody else uses the service, or it was warmed up"
            out.append({"what": f"{self.strangers} spans of others", "why": why, "next": ""})
        return out


def joined(run: Run) -> Joined:
    """Fill what the response did not say from the spans among the readings; what it did say stays.

    A span belongs to a request by its trace id (``client.trace_prefix`` of the manifest and the request's number), else
    by the request id that the response carried.
    """
    requests = run.requests
    ok = requests["outcome"] == OUTCOMES.index("ok")
    by_row: dict[int, dict[str, float]] = {}
    strangers: set[str] = set()
    ids = {int(i): row for row, i in enumerate(requests["id"].tolist())}
    said = {text: row for row, text in enumerate(requests["trace_id"].tolist()) if text}
    prefix = str(run.manifest.client.get("trace_prefix") or "")
    for labels, name, value in _span_rows(run.readings):
        row = _row_of(labels, prefix, ids, said)
        if row is None and not (prefix and str(labels["trace"]).startswith(unmeasured(prefix))):
            strangers.add(str(labels.get("trace")))
        elif row is not None:
            by_row.setdefault(row, {})[name] = value
    for got in by_row.values():
        _stages_of_sglang(got)
    changes = {}
    known = {c.name for c in TABLES["requests"]}
    for column, figure in COLUMNS.items():
        if column in known and any(figure in got for got in by_row.values()):
            values = requests[column].astype(np.float64)  # a copy
            for row, got in by_row.items():
                if figure in got and np.isnan(values[row]):
                    values[row] = got[figure]
            changes[column] = values
    if changes:
        tables = {name: run.table(name) for name in TABLES} | {"requests": requests.replace(**changes)}
        run = Run(run.manifest, **tables)
    found = sum(bool(ok[row]) for row in by_row)
    return Joined(run, int(ok.sum()), found, len(strangers))


def _span_rows(readings: Table) -> Iterator[tuple[dict[str, Any], str, float]]:
    parsed: dict[str, dict[str, Any]] = {}
    for i in np.flatnonzero(readings["source"] == SOURCE).tolist():
        raw = readings["labels"][i]
        if not raw:
            continue
        if raw not in parsed:
            parsed[raw] = json.loads(raw)
        if "trace" in parsed[raw]:
            yield parsed[raw], readings["name"][i], float(readings["value"][i])


def _row_of(labels: dict[str, Any], prefix: str, ids: dict[int, int], said: dict[str, int]) -> int | None:
    trace, request = str(labels["trace"]), str(labels.get("request") or "")
    if prefix and trace.startswith(prefix) and len(trace) == 32:
        return ids.get(int(trace[16:], 16))
    # vLLM numbers the prompts of a completion request: cmpl-… becomes cmpl-…-0.
    return said.get(request, said.get(request.rpartition("-")[0])) if request else None


def _stages_of_sglang(got: dict[str, float]) -> None:
    """SGLang's prefill attribute runs from dispatch to the first token: its queue, a span of its own, is in it."""
    if "prefill_forward_ms" in got:
        if "prefill_ms" in got and "queue_ms" in got:
            got["prefill_ms"] = max(got["prefill_ms"] - got["queue_ms"], got["prefill_forward_ms"])
        else:
            got.setdefault("prefill_ms", got["prefill_forward_ms"])
