"""The column registry: every table of a Run, with the type, unit and meaning of each column.

The run-format page in ``docs/run-format.md`` is generated from this file; a test keeps them in step.

In memory a nullable integer column is ``float64`` with NaN for null (run times are nanoseconds from the run's own
zero, so 53 bits hold 104 days exactly); a column that is never null is ``int64``. On disk both are INT64, with real
nulls. ``enum`` columns are ``int8`` codes in memory (−1 is null) and strings on disk.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEMA_VERSION = 1

OUTCOMES = (
    "ok", "truncated", "inband_error", "http_error", "shed", "timeout", "refused", "reset", "protocol", "cancelled",
    "censored", "never_sent",
)  # fmt: skip
FAULTS = ("none", "service", "network", "client", "user")
KINDS = ("role", "reasoning", "answer", "tool")
CLOCKS = ("kernel", "user")
MODES = ("concurrency", "rate", "trace")
#: What an answer that ended well may hold all the same (``detail``).
STRANGE = ("events that make no sense", "output after its end")
MADE_BY = ("measured", "simulated", "imported")


class Column(NamedTuple):
    """One column. ``type`` is i64, f64, str or enum; ``unit`` is ns, ms, tokens, … or '' for names and codes."""

    name: str
    type: str
    unit: str
    meaning: str
    nullable: bool = True
    values: tuple[str, ...] = ()


def _req(name: str, type_: str, unit: str, meaning: str, values: tuple[str, ...] = ()) -> Column:
    return Column(name, type_, unit, meaning, False, values)


POINTS = (
    _req("point", "i64", "", "number of the load point, from 0"),
    _req("mode", "enum", "", "how load was offered", MODES),
    Column("target", "f64", "", "requests in flight (concurrency) or requests per second (rate)"),
    _req("planned", "i64", "requests", "requests in the schedule of this point"),
    _req("start_ns", "i64", "ns", "load began"),
    _req("end_ns", "i64", "ns", "the last request ended, or was given up"),
    Column("steady_start_ns", "i64", "ns", "steady window begins (warm-up ends)"),
    Column("steady_end_ns", "i64", "ns", "steady window ends (drain begins)"),
    Column("label", "str", "", "free text: what this point was for"),
)

REQUESTS = (
    _req("point", "i64", "", "load point"),
    _req("id", "i64", "", "number of the request, unique in the run"),
    Column("class", "str", "", "workload class"),
    Column("session_id", "i64", "", "session of a multi-turn workload"),
    Column("turn", "i64", "", "turn within the session, from 0"),
    _req("replica", "i64", "", "which endpoint, from 0"),
    _req("attempt", "i64", "", "1; 2 when an idle connection had been closed and the request was sent again"),
    Column("trace_id", "str", "", "the service's request id or the W3C trace id"),
    Column("due_ns", "i64", "ns", "when the schedule wanted it sent"),
    Column("sent_ns", "i64", "ns", "when the client began to send it (connecting included)"),
    Column("accepted_ns", "i64", "ns", "response headers complete"),
    Column("first_ns", "i64", "ns", "first token (reasoning counts)"),
    Column("first_answer_ns", "i64", "ns", "first token that is not reasoning"),
    Column("last_ns", "i64", "ns", "last token"),
    Column("end_ns", "i64", "ns", "response complete, or given up"),
    Column("connect_ns", "i64", "ns", "time to open the connection (0 when it was kept alive)"),
    Column("tls_ns", "i64", "ns", "part of connect_ns: the TLS handshake; null when there was none in this request"),
    Column("rtt_ns", "i64", "ns", "smallest round trip the kernel has seen on the connection (TCP_INFO)"),
    Column("retransmits", "i64", "", "segments sent again on the connection during the request (TCP_INFO)"),
    Column("asked_prompt_tokens", "i64", "tokens", "prompt length the schedule asked for"),
    Column("asked_output_tokens", "i64", "tokens", "output length the schedule asked for (max_tokens)"),
    Column("prompt_tokens", "i64", "tokens", "prompt length by the service's count"),
    Column("output_tokens", "i64", "tokens", "output length by the service's count, reasoning included"),
    Column("reasoning_tokens", "i64", "tokens", "part of output_tokens that is reasoning"),
    Column("cached_tokens", "i64", "tokens", "part of prompt_tokens read from the prefix cache"),
    Column("content_chunks", "i64", "chunks", "stream events that carried tokens"),
    Column("first_chunk_tokens", "i64", "tokens", "tokens in the first content chunk, when known"),
    _req("outcome", "enum", "", "how it ended; the list is closed", OUTCOMES),
    _req("fault", "enum", "", "whose fault, when not ok", FAULTS),
    Column("detail", "str", "", "error type or code, or what is strange in an ok answer, in few words; never the body"),
    Column("status", "i64", "", "HTTP status"),
    Column("finish_reason", "str", "", "finish_reason as sent"),
    Column("engine_queue_ms", "f64", "ms", "queue time the engine reports for this request"),
    Column("engine_prefill_ms", "f64", "ms", "prefill time the engine reports for this request"),
    Column("engine_decode_ms", "f64", "ms", "decode time the engine reports for this request"),
    Column("engine_ttft_ms", "f64", "ms", "the engine's own time to first token: arrival there to first token made"),
    Column("engine_e2e_ms", "f64", "ms", "the engine's own end to end: arrival there to last token made"),
    Column("engine_handover_ms", "f64", "ms", "end of prefill to the decode engine's having its KV (a split service)"),
    Column("handover_bytes", "i64", "bytes", "KV handed over from the prefill to the decode engine"),
    Column("engine_prefill_tokens", "i64", "tokens", "prompt tokens the engine computed (not cached)"),
    Column("draft_tokens", "i64", "tokens", "tokens that speculation proposed (null: none were, or it does not say)"),
    Column("accepted_tokens", "i64", "tokens", "part of draft_tokens that was accepted"),
)

CHUNKS = (
    _req("id", "i64", "", "request"),
    _req("t_ns", "i64", "ns", "arrival; the latest possible when it is an interval"),
    Column("t_low_ns", "i64", "ns", "earliest possible arrival, when several events came in one read"),
    _req("kind", "enum", "", "what it carries", KINDS),
    Column("tokens", "i64", "tokens", "tokens in it, when the service says"),
    _req("clock", "enum", "", "kernel receive stamp, or the client's own clock", CLOCKS),
)

STEPS = (
    _req("t_ns", "i64", "ns", "the engine iteration began"),
    _req("took_ns", "i64", "ns", "its length"),
    Column("prefill_tokens", "i64", "tokens", "prompt tokens computed in it"),
    Column("decode_seqs", "i64", "", "sequences that decoded one step"),
    Column("kv_used", "f64", "blocks", "KV blocks in use"),
    Column("bound_by", "str", "", "resource that set its length"),
    Column("replica", "i64", "", "engine that ran it, from 0 (null: the only one)"),
    Column("count", "i64", "", "steps in a row that this row stands for: took_ns is of all, the rest of the first"),
)

READINGS = (
    _req("asked_ns", "i64", "ns", "the sampler asked"),
    _req("answered_ns", "i64", "ns", "the answer was complete"),
    _req("source", "str", "", "where it came from"),
    _req("name", "str", "", "canonical name, or the source's own"),
    Column("labels", "str", "", "JSON object of labels"),
    Column("value", "f64", "", "value; null when the source did not answer"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "points": POINTS,
    "requests": REQUESTS,
    "chunks": CHUNKS,
    "steps": STEPS,
    "readings": READINGS,
}
