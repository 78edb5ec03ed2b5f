"""The SSE grammar and the response reader, split at any byte."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whywait.net.dialect import ANSWER, REASONING, ROLE, TOOL, request_body
from whywait.net.outcome import facts_of
from whywait.net.wire import Response, SseParser, WireError

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
    assert r.answer.saw_done


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


# one answer, said in three dialects


def responses(what: str, **more: object) -> bytes:
    return b"event: %s\ndata: " % what.encode() + orjson.dumps({"type": what, **more}) + b"\n\n"


USAGE = {"input_tokens": 7, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 2},
         "output_tokens_details": {"reasoning_tokens": 3}}  # fmt: skip
OPENED = (
    responses("response.created", response={"id": "resp_1", "status": "in_progress"}),
    responses("response.in_progress", response={"id": "resp_1"}),
    responses("response.output_item.added", item={"type": "reasoning"}),
)
COMPLETED = responses("response.completed", response={"id": "resp_1", "status": "completed", "usage": USAGE})


def answered(*events: bytes, dialect: str = "responses") -> Response:
    r = Response(True, dialect=dialect)
    r.feed(HEAD + chunked(*events))
    return r


def test_responses_stream() -> None:
    deltas = (
        responses("response.reasoning_text.delta", delta="hm"),
        responses("response.reasoning_summary_text.delta", delta="so"),
        responses("response.output_text.delta", delta="a"),
        responses("response.output_text.done", text="a"),
        responses("response.function_call_arguments.delta", delta='{"x"'),
        responses("response.output_text.delta", delta=""),
    )
    r = answered(*OPENED, *deltas, COMPLETED)
    assert [k for k, _ in r.events] == [ROLE, ROLE, REASONING, REASONING, ANSWER, TOOL, ROLE]
    facts = facts_of(r, 4)
    assert (facts["outcome"], facts["finish_reason"], facts["trace_id"]) == ("ok", "completed", "resp_1")
    assert [facts[k] for k in ("prompt_tokens", "output_tokens", "reasoning_tokens", "cached_tokens")] == [7, 5, 3, 2]


@pytest.mark.parametrize(
    ("last", "outcome", "detail"),
    [
        (
            responses("response.incomplete", response={"incomplete_details": {"reason": "max_output_tokens"}}),
            "ok",
            None,
        ),
        (
            responses("response.failed", response={"status": "failed", "error": {"code": "bad", "message": "secret"}}),
            "inband_error",
            "bad",
        ),
        (responses("error", code="rate_limit_exceeded", message="secret"), "inband_error", "error rate_limit_exceeded"),
        (responses("response.output_text.delta", delta="b"), "truncated", None),
    ],
)
def test_responses_endings(last: bytes, outcome: str, detail: str | None) -> None:
    facts = facts_of(answered(*OPENED, responses("response.output_text.delta", delta="a"), last), 1)
    assert facts["outcome"] == outcome
    assert detail is None or facts["detail"] == detail
    assert "secret" not in str(facts)


def whole(body: object, dialect: str = "chat", **headers: str) -> Response:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    r = Response(False, dialect=dialect)
    lines = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **headers}
    r.feed(b"HTTP/1.1 200 OK\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode() + b"\r\n" + raw)
    return r


def test_responses_whole() -> None:
    facts = facts_of(whole({"id": "r", "status": "completed", "output": [], "usage": USAGE}, "responses"), 0)
    assert (facts["outcome"], facts["output_tokens"], facts["reasoning_tokens"]) == ("ok", 5, 3)
    facts = facts_of(whole({"status": "failed", "error": {"code": "x"}, "output": []}, "responses"), 0)
    assert (facts["outcome"], facts["detail"]) == ("inband_error", "x")


def test_a_whole_answer_needs_no_finish_reason_but_must_be_one() -> None:
    assert facts_of(whole({"choices": [{"message": {"content": "x"}}]}), 0)["outcome"] == "ok"
    for body in (b"hello", b"[]", {"choices": None}, {"choices": [1]}, {"choices": "x"}, {}):
        assert facts_of(whole(body), 0)["outcome"] == "protocol"
    short = whole({"choices": []}, **{"Content-Length": "99"})
    assert not short.eof()
    assert facts_of(short, 0)["outcome"] == "truncated"


def test_responses_body_asks_for_nothing_a_service_may_refuse() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    body = orjson.loads(request_body("responses", "m", "hi", 9, options))
    assert body == {"model": "m", "input": "hi", "max_output_tokens": 9, "store": False, "stream": True,
                    "temperature": 0}  # fmt: skip


def choice(index: int, finish: str | None = None, **delta: object) -> dict[str, object]:
    return {"index": index, "delta": delta, "finish_reason": finish}


def chunk(*choices: object, **more: object) -> bytes:
    return b"data: " + orjson.dumps({"choices": list(choices), **more}) + b"\n\n"


def test_n_choices_end_when_all_have_ended() -> None:
    some = [chunk(choice(0, content="a")), chunk(choice(1, content="b")), chunk(choice(1, "stop"))]
    assert facts_of(answered(*some, dialect="chat"), 2)["outcome"] == "truncated"
    r = answered(*some, chunk(choice(0, content="c")), chunk(choice(0, "length")), dialect="chat")
    assert [k for k, _ in r.events] == [ANSWER, ANSWER, ROLE, ANSWER, ROLE]
    assert facts_of(r, 3)["outcome"] == "ok"


def test_choices_of_one_event_are_one_event() -> None:
    both = chunk({**choice(0, content="a"), "token_ids": [1]}, {**choice(1, reasoning="b"), "token_ids": [1, 2]})
    assert answered(both, dialect="chat").events == [(ANSWER, 3)]


@pytest.mark.parametrize(
    ("delta", "kind"),
    [
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, TOOL),
        ({"function_call": {"arguments": "{"}}, TOOL),
        ({"tool_calls": []}, ROLE),
        ({"refusal": "no"}, ANSWER),
        ({"reasoning": "hm"}, REASONING),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, REASONING),
        ({"content": [{"type": "text", "text": "a"}]}, ANSWER),
        ({"content": None}, ROLE),
    ],
)
def test_what_an_event_carries(delta: dict[str, object], kind: int) -> None:
    assert answered(chunk(choice(0, **delta)), dialect="chat").events == [(kind, None)]


def test_a_count_that_was_silent_does_not_say_how_many_tokens_are_this_events() -> None:
    plain = chunk(choice(0, content="a"))
    last = chunk(choice(0, content="b"), usage={"completion_tokens": 6})
    more = chunk(choice(0, content="c"), usage={"completion_tokens": 8})
    assert [t for _, t in answered(plain, plain, last, more, dialect="chat").events] == [None, None, None, 2]


def test_a_token_without_text_counts_with_the_next_that_has_some() -> None:
    half = {**choice(0, content=""), "token_ids": [1]}
    full = {**choice(0, content="é"), "token_ids": [2]}
    assert answered(chunk(half), chunk(full), dialect="chat").events == [(ROLE, None), (ANSWER, 2)]
    said = (("", 0), ("a", 1), ("", 2), ("b", 3))
    counted = [chunk(choice(0, content=c), usage={"completion_tokens": n}) for c, n in said]
    assert [t for _, t in answered(*counted, dialect="chat").events] == [None, 1, None, 2]


@pytest.mark.parametrize("nonsense", [-1, 1 << 60, True, "3", 2.5, None, [], {}])
def test_a_count_that_is_none_is_unknown(nonsense: object) -> None:
    r = answered(chunk(choice(0, content="a"), usage={"completion_tokens": nonsense}, timings=3), dialect="chat")
    assert r.events == [(ANSWER, None)]
    assert facts_of(r, 1)["output_tokens"] is None


def test_thoughts_are_part_of_the_output_however_they_are_counted() -> None:
    def usage(**u: object) -> dict[str, object]:
        said = {**u, "completion_tokens_details": {"reasoning_tokens": 30}}
        return facts_of(answered(chunk(choice(0, "stop")), chunk(usage=said), dialect="chat"), 0)

    inside = usage(prompt_tokens=5, completion_tokens=40, total_tokens=45)
    beside = usage(prompt_tokens=5, completion_tokens=10, total_tokens=45)
    neither = usage(prompt_tokens=5, completion_tokens=10, total_tokens=15)
    assert [(f["output_tokens"], f["reasoning_tokens"]) for f in (inside, beside, neither)] == [
        (40, 30), (40, 30), (10, None),
    ]  # fmt: skip


# the body on its way


def zipped(data: bytes, wbits: int) -> bytes:
    z = zlib.compressobj(9, zlib.DEFLATED, wbits)
    return z.compress(data) + z.flush()


@pytest.mark.parametrize(("coding", "wbits"), [("gzip", 31), ("X-GZIP", 31), ("deflate", 15), ("deflate", -15)])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_codings(coding: str, wbits: int, step: int) -> None:
    body = zipped(b"".join(STREAM[:3]), wbits) + (zipped(b"".join(STREAM[3:]), wbits) if wbits == 31 else b"")
    if wbits != 31:
        body = zipped(b"".join(STREAM), wbits)
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: %s\r\n\r\n" % coding.encode())
    raw = head + chunked(body)
    r = read(raw, list(range(0, len(raw), step)))
    assert [k for k, _ in r.events] == [ROLE, REASONING, ANSWER, ANSWER, ROLE]
    assert facts_of(r, 3)["output_tokens"] == 3


def test_a_bomb_is_refused_before_it_unfolds() -> None:
    bomb = zipped(bytes(64 << 20), 31)
    assert len(bomb) < 1 << 17
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    with pytest.raises(WireError, match="unfolds"):
        read(head + chunked(bomb))
    with pytest.raises(WireError, match="members"):
        read(head + chunked(zipped(b"", 31) * 100))
    with pytest.raises(WireError, match="br"):
        read(HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: br\r\n\r\n"))


def test_no_event_grows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.net.wire.MAX_EVENT", 1000)
    for endless in (b"data: " + b"x" * 400, b"data: x\n", b"data:\n"):
        parser = SseParser()
        with pytest.raises(WireError, match="longer"):
            all(parser.feed(endless) == [] for _ in range(500))
    parser = SseParser()
    for _ in range(500):
        assert parser.feed(b": nothing\ndata: x\n\n") == [(b"", b"x")]


def test_headers_do_not_grow_without_end() -> None:
    r = Response(True)
    r.feed(b"HTTP/1.1 200 OK\r\n")
    lines = (b"X-%d: %s\r\n" % (i, b"x" * 1000) for i in range(1 << 16))
    with pytest.raises(WireError, match="headers"):
        all(r.feed(line) is None for line in lines)


def test_trailers_extensions_and_early_hints() -> None:
    pieces = b"".join(b'%x;name="v"\r\n%s\r\n' % (len(p), p) for p in STREAM) + b"0\r\nContent-Type: x\r\n\r\n"
    early = b"HTTP/1.1 103 Early Hints\r\nContent-Encoding: br\r\nLink: </x>\r\n\r\n"
    r = read(early + HEAD + pieces)
    assert facts_of(r, 3)["outcome"] == "ok"
    assert r.headers == {"content-type": "text/event-stream", "transfer-encoding": "chunked"}


def test_bytes_after_the_answer_are_not_the_answer() -> None:
    for more in (HEAD + chunked(event({"content": "z"})), b"garbage\r\n\r\n"):
        for cut in ([], [len(HEAD + chunked(*STREAM))]):
            r = read(HEAD + chunked(*STREAM) + more, cut)
            assert len(r.events) == 5
            assert facts_of(r, 3)["outcome"] == "ok"
            assert not r.keep_alive


def test_close_delimited_body_ends_with_the_connection() -> None:
    head = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    r = read(head + b"".join(STREAM)[:-1])
    assert not r.complete
    assert r.eof()
    assert r.answer.saw_done
    assert not r.keep_alive
    cut = read(HEAD + chunked(STREAM[2])[:-5])
    assert not cut.eof()


def test_lenient_takes_a_clean_end_for_an_end_and_no_other() -> None:
    def outcome(data: bytes, chunks: int = 1) -> str:
        r = Response(True, lenient=True)
        r.feed(data)
        return str(facts_of(r, chunks)["outcome"])

    assert outcome(HEAD + chunked(STREAM[2])) == "ok"
    assert outcome(HEAD + chunked(STREAM[2])[:-5]) == "truncated"
    assert outcome(HEAD + chunked(b": nothing\n\n"), 0) == "truncated"


@pytest.mark.parametrize(
    ("status", "kind", "body", "detail"),
    [
        ("502 Bad Gateway", "text/html", "<p>secret", "502 text/html"),
        ("500 Oops", "text/plain; charset=utf-8", "secret", "500 text/plain"),
        ("422 No", "application/json", '{"error":"secret words","error_type":"validation"}', "422 validation"),
        ("400 Bad", "application/json", '{"message":"secret","type":"BadRequest","code":400}', "400 BadRequest 400"),
        ("400 Bad", "application/json", '{"error":{"type":"the prompt was: secret","code":null}}', "400"),
        ("400 Bad", "secret kind", "x", "400"),
        ("307 Moved", "text/plain", "", "307 redirects to /x"),
    ],
)  # fmt: skip
def test_error_bodies_are_named_not_quoted(status: str, kind: str, body: str, detail: str) -> None:
    raw = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nLocation: /x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    facts = facts_of(read(raw.encode()), 0)
    assert (facts["outcome"], facts["detail"]) == ("http_error", detail)
    assert facts["fault"] == ("service" if status[0] == "5" else "user")


def test_retry_after_is_recorded_where_it_is_one() -> None:
    for value, detail in (("7", "429, Retry-After 7"), ("<script>", "429")):
        raw = f"HTTP/1.1 429 No\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n"
        assert facts_of(read(raw.encode()), 0)["detail"] == detail


def test_deep_and_lone_surrogate_json() -> None:
    deep = b"data: " + b"[" * 100_000 + b"\n\n"
    lone = b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n'
    r = read(HEAD + chunked(deep, lone, b"event: error\ndata: 7\n\n"))
    assert r.answer.bad_events == 1
    assert [k for k, _ in r.events] == [ANSWER]
    assert facts_of(r, 1)["outcome"] == "inband_error"
