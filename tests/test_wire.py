"""The SSE grammar and the response reader, split at any byte."""

from __future__ import annotations

import contextlib
import gzip
import itertools

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whywait.net.outcome import facts_of
from whywait.net.wire import ANSWER, REASONING, ROLE, Response, SseParser, WireError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(delta: dict, **more: object) -> bytes:
    finish = more.pop("finish", None)
    return b"data: " + orjson.dumps({"choices": [{"delta": delta, "finish_reason": finish}], **more}) + b"\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


STREAM = (
    event({"role": "assistant", "content": ""}),
    event({"reasoning_content": "hm"}),
    event({"content": "naïve 雨"}),
    event({"content": "b"}),
    event({}, finish="stop"),
    b'data: {"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":7,'
    b'"completion_tokens_details":{"reasoning_tokens":1},"prompt_tokens_details":{"cached_tokens":2}}}\n\n',
    b"data: [DONE]\n\n",
)


def read(data: bytes, cuts: list[int] | None = None, stream: bool = True) -> Response:
    r = Response(stream)
    edges = [0, *sorted(cuts or []), len(data)]
    for a, b in itertools.pairwise(edges):
        if a != b:
            r.feed(data[a:b])
    return r


@given(st.lists(st.integers(0, len(HEAD + chunked(*STREAM))), max_size=30))
def test_any_split_gives_the_same_events_and_facts(cuts: list[int]) -> None:
    r = read(HEAD + chunked(*STREAM), cuts)
    assert [k for k, _ in r.events] == [ROLE, REASONING, ANSWER, ANSWER, ROLE]
    facts = facts_of(r, 3)
    assert facts["outcome"] == "ok"
    assert (facts["prompt_tokens"], facts["output_tokens"]) == (7, 3)
    assert (facts["reasoning_tokens"], facts["cached_tokens"]) == (1, 2)
    assert r.complete
    assert r.keep_alive


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["\n", "\r\n", "\r"]), st.text(max_size=8).filter(lambda s: not set(s) & set("\r\n"))
        ),
        max_size=6,
    ),
    st.lists(st.integers(0, 200), max_size=12),
    st.booleans(),
)
def test_sse_line_ends_comments_and_bom(lines: list[tuple[str, str]], cuts: list[int], bom: bool) -> None:
    raw = b"\xef\xbb\xbf" if bom else b""
    want = []
    for end, text in lines:
        e = end.encode()
        raw += b": a comment" + e + b"data:" + b" " + text.encode() + e + b"id: 1" + e + b"data: x" + e + e
        want.append((b"", text.encode() + b"\nx"))
    parser = SseParser()
    got = []
    edges = [0, *sorted(c for c in cuts if c < len(raw)), len(raw)]
    for a, b in itertools.pairwise(edges):
        got += parser.feed(raw[a:b])
    assert got == want


@settings(max_examples=300)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_garbage_never_raises_anything_but_wire_error(junk: bytes, cuts: list[int]) -> None:
    for data in (junk, HEAD + junk, HEAD + chunked(junk) if junk else HEAD):
        with contextlib.suppress(WireError):
            facts_of(read(data, [c for c in cuts if c < len(data)]), 0)


def test_last_event_without_a_blank_line_counts() -> None:
    r = read(HEAD + chunked(event({"content": "a"}), b"data: [DONE]"))
    assert r.saw_done


def test_gzip_body() -> None:
    body = gzip.compress(b"".join(STREAM))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    r = read(head % len(body) + body, [200, 201, 222])
    assert facts_of(r, 3)["output_tokens"] == 3


def test_100_continue_is_not_the_answer() -> None:
    r = read(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunked(*STREAM))
    assert r.status == 200
    assert facts_of(r, 3)["outcome"] == "ok"


@pytest.mark.parametrize(
    ("raw", "outcome", "fault"),
    [
        (
            HEAD + chunked(STREAM[2], b'data: {"error":{"message":"secret","code":500,"type":"server_error"}}\n\n'),
            "inband_error",
            "service",
        ),
        (HEAD + chunked(STREAM[2]), "truncated", "service"),
        (HEAD + chunked(STREAM[2], STREAM[4]), "ok", "none"),
        (HEAD + chunked(STREAM[2], STREAM[6]), "ok", "none"),
        (b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n", "shed", "service"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "shed", "service"),
        (
            b'HTTP/1.1 400 Bad\r\nContent-Length: 41\r\n\r\n{"error":{"message":"secret","code":400}}\n',
            "http_error",
            "user",
        ),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 6\r\n\r\nsecret", "http_error", "service"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\nsecret", "protocol", "service"),
    ],
)
def test_outcomes_and_no_message_leaks(raw: bytes, outcome: str, fault: str) -> None:
    facts = facts_of(read(raw), 1)
    assert (facts["outcome"], facts["fault"]) == (outcome, fault)
    assert "secret" not in str(facts)


def test_non_streaming_body() -> None:
    body = orjson.dumps(
        {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}], "usage": {"completion_tokens": 9}}
    )
    r = read(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        stream=False,
    )
    facts = facts_of(r, 0)
    assert (facts["outcome"], facts["output_tokens"], facts["finish_reason"]) == ("ok", 9, "length")


def test_missing_usage_is_unknown_not_zero() -> None:
    facts = facts_of(read(HEAD + chunked(STREAM[2], STREAM[4])), 1)
    assert facts["output_tokens"] is None
    assert facts["prompt_tokens"] is None


def test_tokens_per_chunk_from_running_counts() -> None:
    a = event({"content": "ab"}, timings={"predicted_n": 2})
    b = event({"content": "cde"}, timings={"predicted_n": 5})
    assert [t for _, t in read(HEAD + chunked(a, b)).events] == [2, 3]
    c = event({"content": "ab"}, usage={"completion_tokens": 4})
    assert [t for _, t in read(HEAD + chunked(c)).events] == [4]
