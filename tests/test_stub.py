"""The stub service, by plain sockets. Stamps are compared with each other, never with a clock."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait.errors import InternalError
from whywait.load.stub import Options, StubProcess, StubThread, main
from whywait.load.stub_plan import Plan

QUICK = Plan(ttft_ms=4, gap_ms=2, tokens=6)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def stub() -> Iterator[StubThread]:
    with StubThread(Options(plan=QUICK)) as s:
        yield s


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.rsplit("/", 1)[1].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        yield sock


def request(path: str = CHAT, body: dict[str, Any] | None = None, head: str = "") -> bytes:
    data = json.dumps({"messages": [{"role": "user", "content": "two words"}], **(body or {})}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_all(sock: socket.socket) -> bytes:
    out = b""
    while data := sock.recv(1 << 16):
        out += data
    return out


def unframed(body: bytes) -> list[bytes]:
    """The chunks of a chunked body, strictly; the body must end with it."""
    out = []
    while True:
        size, _, body = body.partition(b"\r\n")
        n = int(size, 16)
        assert size == b"%x" % n
        assert body[n : n + 2] == b"\r\n"
        if n == 0:
            assert body == b"\r\n"
            return out
        out.append(body[:n])
        body = body[n + 2 :]


def stream(url: str, path: str = CHAT, **body: Any) -> tuple[list[Any], list[bytes]]:
    """Events ([DONE] as a string) and HTTP chunks of a streaming answer."""
    with connected(url) as sock:
        sock.sendall(request(path, {"stream": True, **body}, "Connection: close\r\n"))
        head, _, rest = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream")
    chunks = unframed(rest)
    return events(b"".join(chunks)), chunks


def events(body: bytes) -> list[Any]:
    pieces = body.split(b"\n\n")
    assert pieces.pop() == b""
    assert all(piece.startswith(b"data: ") for piece in pieces)
    return ["[DONE]" if piece == b"data: [DONE]" else json.loads(piece[6:]) for piece in pieces]


def post(url: str, path: str = CHAT, **body: Any) -> tuple[http.client.HTTPResponse, Any]:
    conn = http.client.HTTPConnection(url.rsplit("/", 1)[1], timeout=20)
    conn.request("POST", path, json.dumps({"messages": [], "prompt": "a b c", **body}))
    response = conn.getresponse()
    data = response.read()
    conn.close()
    return response, json.loads(data) if data.startswith(b"{") else data


def get(url: str, path: str) -> bytes:
    conn = http.client.HTTPConnection(url.rsplit("/", 1)[1], timeout=20)
    conn.request("GET", path)
    data = conn.getresponse().read()
    conn.close()
    return data


def truth(url: str) -> dict[str, float]:
    return dict(json.loads(get(url, "/stub")))


def until(url: str, **wanted: float) -> dict[str, float]:
    """Wait, within reason, until the stub's own account says so."""
    for _ in range(1000):
        now = truth(url)
        if all(now[name] == value for name, value in wanted.items()):
            return now
        time.sleep(0.01)
    raise AssertionError(f"{wanted} not reached: {now}")


def content(evs: list[Any]) -> list[Any]:
    return [e for e in evs if isinstance(e, dict) and "stub_ns" in e]


# --- the timetable


def test_stream_is_framed_and_on_its_timetable(stub: StubThread) -> None:
    evs, chunks = stream(stub.url, stream_options={"include_usage": True})
    role, toks, (finish, usage, done) = evs[0], evs[1:-3], evs[-3:]
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["delta"]["content"] for e in toks] == [" tok"] * 6
    assert [e["stub_n"] for e in toks] == [1, 2, 3, 4, 5, 6]
    assert [e["due_ns"] for e in toks] == [role["accepted_ns"] + (4 + 2 * i) * 1_000_000 for i in range(6)]
    assert all(e["stub_ns"] >= e["due_ns"] - 1000 for e in toks)  # two clocks: a microsecond for reading their offset
    assert all(a["stub_ns"] < b["stub_ns"] for a, b in pairwise(toks))
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (3, 6)
    assert done == "[DONE]"
    assert len(chunks) == 8  # role, six tokens, and the rest in one
    assert len({e["id"] for e in evs[:-1]}) == 1


def test_completions_have_text_and_no_role(stub: StubThread) -> None:
    evs, _ = stream(stub.url, "/v1/completions", prompt="a b")
    assert [e["choices"][0]["text"] for e in evs[:-1]] == [" tok"] * 6 + [""]
    assert evs[0]["object"] == "text_completion"


def test_tokens_per_chunk_reasoning_and_asked_counts(stub: StubThread) -> None:
    own = {
        "tokens": 11,
        "tokens_per_chunk": 3,
        "first_chunk_tokens": 2,
        "reasoning_tokens": 4,
        "reasoning_key": "reasoning",
    }
    evs, _ = stream(stub.url, stub=own, return_token_ids=True, stream_options={"continuous_usage_stats": True})
    toks = content(evs)
    kinds = [next(iter(e["choices"][0]["delta"])) for e in toks]
    assert kinds == ["reasoning", "reasoning", "content", "content", "content"]
    assert [len(e["choices"][0]["token_ids"]) for e in toks] == [2, 2, 3, 3, 1]
    assert [e["usage"]["completion_tokens"] for e in toks] == [2, 4, 7, 10, 11]


@given(st.integers(0, 60), st.integers(0, 9), st.integers(0, 9), st.integers(0, 70))
def test_layout_holds_every_token_once(tokens: int, step: int, first: int, thinking: int) -> None:
    runs = list(Plan(tokens_per_chunk=step, first_chunk_tokens=first, reasoning_tokens=thinking).layout(tokens))
    assert all(count > 0 and size > 0 for count, size, _ in runs)
    assert sum(count * size for count, size, _ in runs) == tokens
    assert sum(count * size for count, size, reasoning in runs if reasoning) == min(thinking, tokens)
    assert [reasoning for *_, reasoning in runs] == sorted((reasoning for *_, reasoning in runs), reverse=True)


def test_lengths_and_whole_answers(stub: StubThread) -> None:
    for body, tokens, finish in (
        ({"max_tokens": 4}, 4, "length"),
        ({"max_tokens": 40}, 6, "stop"),
        ({"max_tokens": 9, "ignore_eos": True}, 9, "length"),
        ({"max_completion_tokens": 3}, 3, "length"),
    ):
        response, out = post(stub.url, **body)
        assert response.status == 200
        assert out["usage"]["completion_tokens"] == tokens == len(out["choices"][0]["message"]["content"].split())
        assert out["choices"][0]["finish_reason"] == finish
        assert out["stub_ns"] >= out["due_ns"] - 1000
    _, out = post(stub.url, "/v1/completions", stub={"timings": True, "cached_tokens": 2, "prefill_ms_per_token": 0.5})
    assert out["choices"][0]["text"] == " tok" * 6
    assert out["timings"] == {"cache_n": 2, "prompt_n": 1, "prompt_ms": 4.5, "predicted_n": 6, "predicted_ms": 10.0}


def test_jitter_keeps_order_and_never_drifts() -> None:
    dues = []
    for _ in range(2):
        with StubThread(Options(plan=Plan(ttft_ms=1, gap_ms=1, tokens=20, jitter_ms=3), seed=5)) as s:
            evs, _ = stream(s.url)
        late = [e["due_ns"] - evs[0]["accepted_ns"] - (1 + i) * 1_000_000 for i, e in enumerate(content(evs))]
        assert all(0 <= x <= 3_000_000 for x in late)
        assert all(a["due_ns"] <= b["due_ns"] for a, b in pairwise(content(evs)))
        dues.append(late)
    assert dues[0] == dues[1]


def test_phases_are_spread_or_shared(stub: StubThread) -> None:
    spread = [content(stream(stub.url, stub={"spread": True, "gap_ms": 8, "tokens": 1})[0])[0] for _ in range(5)]
    assert len({round(e["due_ns"] / 1e5) % 80 for e in spread}) == 5
    shared = [content(stream(stub.url, stub={"shared_step": True, "gap_ms": 8, "tokens": 1})[0])[0] for _ in range(3)]
    phases = [e["due_ns"] % 8_000_000 for e in shared]
    assert max(phases) - min(phases) < 1_000_000  # as exact as the offset between the two clocks, read for each stream


# --- faults


@pytest.mark.parametrize(
    ("fault", "seen", "tokens"),
    [
        ("error_event:2", {"error"}, 2),
        ("error_event", {"error"}, 3),
        ("truncate:4", set(), 4),
        ("truncate:0", set(), 0),
        ("no_done", {"finish", "usage"}, 6),
        ("no_usage", {"finish", "done"}, 6),
        ("usage_null_choices", {"finish", "usage", "done"}, 6),
        ("empty", {"finish", "usage", "done"}, 0),
        ("coalesce:3", {"finish", "usage", "done"}, 6),
        ("split", {"finish", "usage", "done"}, 6),
        ("", {"finish", "usage", "done"}, 6),
    ],
)
def test_stream_faults(stub: StubThread, fault: str, seen: set[str], tokens: int) -> None:
    evs, _ = stream(stub.url, stub={"fault": fault}, stream_options={"include_usage": True})
    said = set()
    for e in evs[1 + tokens :]:
        said.add("done" if e == "[DONE]" else "error" if "error" in e else "usage" if "usage" in e else "finish")
    assert said == seen
    assert len(content(evs)) == tokens
    if "usage" in seen:
        usage = next(e for e in evs[:] if isinstance(e, dict) and "usage" in e)
        assert usage["usage"]["completion_tokens"] == tokens
        assert usage["choices"] == (None if fault == "usage_null_choices" else [])
    if fault == "coalesce:3":
        assert len({e["stub_ns"] for e in content(evs)}) == 2
        assert len({e["due_ns"] for e in content(evs)}) == 6


def test_connection_faults(stub: StubThread) -> None:
    with connected(stub.url) as sock:
        sock.sendall(request(body={"stream": True, "stub": {"fault": "reset:2"}}))
        with pytest.raises(ConnectionResetError):
            read_all(sock)
    with connected(stub.url) as sock:
        sock.sendall(request(body={"stream": True, "stub": {"fault": "close_delimited"}}))
        head, _, rest = read_all(sock).partition(b"\r\n\r\n")
        assert b"\r\nConnection: close" in head
        assert b"Transfer-Encoding" not in head
        assert events(rest)[-1] == "[DONE]"
    for own in ({"fault": "hang"}, {"fault": "hang:2"}):
        with connected(stub.url) as sock:
            sock.sendall(request(body={"stream": True, "stub": own}))
            got = b""
            while got.count(b"stub_ns") < 2 and own["fault"] == "hang:2":
                got += sock.recv(4096)
            sock.settimeout(0.05)
            with pytest.raises(TimeoutError):
                sock.recv(1)


def test_whole_answer_faults(stub: StubThread) -> None:
    for fault, status, header in (
        ("http_500", 500, None),
        ("http_429:7", 429, ("Retry-After", "7")),
        ("http_401", 401, ("WWW-Authenticate", "Bearer")),
        ("html", 200, ("Content-Type", "text/html")),
        ("wrong_model", 404, None),
        ("error_event", 500, None),
        ("close_delimited", 200, ("Connection", "close")),
        ("split", 200, None),
    ):
        response, _ = post(stub.url, stub={"fault": fault})
        assert response.status == status, fault
        assert header is None or response.getheader(header[0]) == header[1]
    with pytest.raises(http.client.IncompleteRead):
        post(stub.url, stub={"fault": "truncate"})
    with pytest.raises(ConnectionResetError):
        post(stub.url, stub={"fault": "reset"})


def test_what_is_wrong_is_said(stub: StubThread) -> None:
    for body in (
        {"stub": {"nonsense": 1}},
        {"stub": {"fault": "nonsense"}},
        {"stub": {"gap_ms": -1}},
        {"max_tokens": "lots"},
    ):
        response, out = post(stub.url, **body)
        assert response.status == 400, body
        assert out["error"]["message"]
    assert json.loads(get(stub.url, "/nowhere"))["error"]["code"] == 404
    assert get(stub.url, "/health") == b'{"status":"ok"}'
    with StubThread(Options(plan=QUICK, api_key="k", model="m", strict_model=True, fault_every=2)) as s:
        assert b"Invalid API key" in get(s.url, "/v1/models")
        for model, status in (("other", b"404"), ("m", b"200")):
            with connected(s.url) as sock:
                sock.sendall(request(body={"model": model}, head="Connection: close\r\nAuthorization: Bearer k\r\n"))
                assert read_all(sock).split()[1] == status


# --- slots and counters


def test_slots_serve_in_order_and_counters_are_true() -> None:
    with StubThread(Options(plan=Plan(ttft_ms=20, gap_ms=5, tokens=4), slots=1)) as s, contextlib.ExitStack() as stack:
        socks = []
        for i in range(4):
            socks.append(stack.enter_context(connected(s.url)))
            socks[-1].sendall(request(body={"stream": True}, head="Connection: close\r\n"))
            until(s.url, requests=i + 1)
        assert b"llamacpp:requests_processing 1\n" in get(s.url, "/metrics")
        socks[1].close()  # one that waits gives up: the others move up
        until(s.url, gone=1)
        dues = []
        for sock in (socks[0], socks[2], socks[3]):
            body = read_all(sock).partition(b"\r\n\r\n")[2]
            dues.append([e["due_ns"] for e in content(events(b"".join(unframed(body))))])
        assert all(a[-1] <= b[0] - 20_000_000 + 100_000 for a, b in pairwise(dues))
        now = until(s.url, active=0)
        assert (now["finished"], now["gone"], now["queued"]) == (3, 1, 0)
        assert (now["tokens_predicted_total"], now["prompt_tokens_total"]) == (12, 9)
        page = get(s.url, "/metrics")
        assert b"llamacpp:tokens_predicted_total 12\n" in page
        assert b"llamacpp:requests_deferred 0\n" in page


def test_client_that_leaves_frees_its_slot() -> None:
    with StubThread(Options(plan=Plan(ttft_ms=1, gap_ms=1000, tokens=1000), slots=1)) as s:
        with connected(s.url) as sock:
            sock.sendall(request(body={"stream": True}))
            sock.recv(10)
            assert [x["is_processing"] for x in json.loads(get(s.url, "/slots"))] == [True]
        until(s.url, active=0, gone=1)


# --- as a process


def test_process_says_where_it_is_and_ends_with_us() -> None:
    with StubProcess("--tokens", "2", "--gap-ms", "1", "--ttft-ms", "1", cpus=None) as s:
        evs, _ = stream(s.url)
        assert len(content(evs)) == 2
        pid = s.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_process_ends_on_sigterm() -> None:
    with StubProcess() as s:
        os.kill(s.pid, signal.SIGTERM)
        assert s._process.wait(20) == 0


def test_only_loopback_without_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "0.0.0.0"]) == 2
    assert main(["--fault", "nonsense"]) == 2
    assert main(["--gap-ms", "-1"]) == 2
    assert "not a loopback address" in capsys.readouterr().err
    with pytest.raises(InternalError), StubProcess("--gap-ms", "-1"):
        pass
