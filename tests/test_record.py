"""The recording proxy: what passes is untouched, what is kept holds no text, and the client cannot tell it is there."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import whywait
from tests.test_client import closed, drive
from whywait.cli import main
from whywait.convert.fit import hit_rate
from whywait.convert.read import read
from whywait.core.prefix import chain, new_secret
from whywait.load.stub import StubProcess
from whywait.net import proxy as proxy_module
from whywait.net.endpoint import parse_url
from whywait.net.proxy import Proxy
from whywait.net.reach import Reach
from whywait.net.record import FILE, Book, Recorder
from whywait.net.serve import Reply, Request, Server

KEY = "sk-test-SECRETKEY-0123456789"
SECRET_TEXT = "the quick purple walrus of Aldebaran"


class Recording:
    """A proxy in a thread of its own, and its file."""

    def __init__(self, upstream: str, folder: Path, token: str | None = None, reach: Reach | None = None) -> None:
        self.proxy = Proxy(parse_url(upstream, reach=reach), ("127.0.0.1", 0), token)
        self.book = Book(folder, upstream)
        self.recorder = Recorder(self.book, self.proxy.loop)
        self.proxy.watch = self.recorder.watch
        self.url, self.path = self.proxy.server.url, self.book.path
        self.port = self.proxy.server.port
        self._thread = threading.Thread(target=self.proxy.run)

    def __enter__(self) -> Recording:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.loop.stop()
        self._thread.join()
        self.proxy.close()
        self.recorder.finish()
        self.book.close()

    def rows(self, event: str = "ended") -> list[dict[str, Any]]:
        return [r for r in map(orjson.loads, self.path.read_bytes().splitlines()) if r.get("event") == event]


@contextlib.contextmanager
def scripted(*answers: list[bytes], end: str = "keep") -> Iterator[tuple[str, list[bytes]]]:
    """A service that says exactly these bytes, in these pieces, one answer per request; then stays, closes or resets.

    What it was sent is given back, a request an entry; b'' is the end of a connection.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    got: list[bytes] = []
    stop = threading.Event()

    def serve() -> None:
        left = list(answers)
        while not stop.is_set():
            try:
                conn, _ = listener.accept()
            except OSError:
                return
            with conn:
                while request := _request(conn):
                    got.append(request)
                    for piece in left.pop(0) if left else []:
                        conn.sendall(piece)
                        time.sleep(0.002)  # so that pieces are read one by one
                    if end != "keep" and not left:
                        if end == "reset":
                            conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        break
                else:
                    got.append(b"")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", got
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def _request(conn: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            more = conn.recv(1 << 16)
        except OSError:
            return b""
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    size = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0)
    while len(body) < size:
        body += conn.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def ask(body: dict[str, Any] | None = None, path: str = "/v1/chat/completions", extra: str = "") -> bytes:
    data = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], **(body or {})})
    return f"POST {path} HTTP/1.1\r\nHost: me\r\n{extra}Content-Length: {len(data)}\r\n\r\n".encode() + data


def talk(url: str, request: bytes, size: int | None = None) -> bytes:
    """Everything that comes back for ``request``: ``size`` bytes, or all until the end of the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(request)
        out = b""
        while size is None or len(out) < size:
            try:
                data = sock.recv(1 << 16)
            except ConnectionResetError:
                return out + b"<reset>"
            if not data:
                break
            out += data
        return out


def until(done: Callable[[], Any]) -> Any:
    for _ in range(4000):
        if found := done():
            return found
        time.sleep(0.005)
    raise AssertionError("it did not come")


def sse(*objects: Any) -> list[bytes]:
    data = [b"data: " + (o if isinstance(o, bytes) else orjson.dumps(o)) + b"\n\n" for o in objects]
    return [b"%x\r\n%b\r\n" % (len(d), d) for d in data]


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "c-1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


USAGE = {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13,
         "prompt_tokens_details": {"cached_tokens": 8}}  # fmt: skip
HEAD = b"HTTP/1.1 200 Fine\r\nX-Odd-CASE:  two  spaces\r\nContent-Type: text/event-stream\r\n"
STREAM = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *sse(delta("a"), delta("b")),
          *sse({"choices": [], "usage": USAGE}, b"[DONE]"), b"0\r\n\r\n"]  # fmt: skip
WHOLE = b"".join(STREAM)
PACKED = gzip.compress(orjson.dumps({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
                                     "usage": USAGE}))  # fmt: skip
ANSWERS: dict[str, tuple[list[bytes], str]] = {
    "a stream in chunks": (STREAM, "keep"),
    "chunks in chunks of their own": (
        [b"".join(STREAM)[i : i + 7] for i in range(0, len(b"".join(STREAM)), 7)],
        "keep",
    ),
    "extensions and trailers": (
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n", b"0\r\nX-Trailer: t\r\n\r\n"],
        "keep",
    ),
    "a length": ([HEAD + b"Content-Length: 5\r\n\r\nhe", b"llo"], "keep"),
    "until it closes": ([HEAD + b"\r\n", b"data: x\n\n", b"data: y\n\n"], "close"),
    "the service wants to close": ([HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi"], "close"),
    "cut short": ([HEAD + b"Content-Length: 50\r\n\r\nhello"], "close"),
    "reset": ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"], "reset"),
    "no answer at all": ([], "close"),
    "an error of the service": ([b"HTTP/1.1 500 Oh no\r\nContent-Length: 4\r\n\r\nOops"], "keep"),
    "early hints": ([b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + HEAD, b"Content-Length: 1\r\n\r\nx"], "keep"),
    "no content": ([b"HTTP/1.1 204 No Content\r\nX-A: 1\r\nX-A: 2\r\n\r\n"], "keep"),
    "compressed": (
        [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED), PACKED],
        "keep",
    ),
    "broken compression": (
        [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!"],
        "keep",
    ),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_bytes_are_the_same_with_and_without_the_proxy(what: str, tmp_path: Path) -> None:
    pieces, end = ANSWERS[what]
    size = len(b"".join(pieces)) if end == "keep" else None
    with scripted(pieces, end=end) as (url, got):
        direct = talk(url, ask(extra="Connection: close\r\n" if end != "keep" else ""), size)
    with scripted(pieces, end=end) as (url, got), Recording(url, tmp_path) as recording:
        through = talk(recording.url, ask(extra="Connection: close\r\n" if end != "keep" else ""), size)
        until(recording.rows)
    assert through == direct
    assert through.removesuffix(b"<reset>") == b"".join(pieces)
    assert got[0].partition(b"\r\n\r\n")[2] == ask().partition(b"\r\n\r\n")[2]


def test_what_is_for_one_connection_only_is_not_passed_on(tmp_path: Path) -> None:
    answer = [b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nUpgrade: h2c\r\nX-End: 2\r\n"
              b"Content-Length: 0\r\n\r\n"]  # fmt: skip
    sent = ("Authorization: Bearer key\r\nX-Keep: yes\r\nConnection: X-Drop\r\nX-Drop: no\r\nTE: trailers\r\n"
            "Proxy-Authorization: Basic abc\r\nAccept-Encoding: gzip\r\nExpect: 100-continue\r\n")  # fmt: skip
    with scripted(answer) as (url, got), Recording(f"{url}/api/v1", tmp_path) as recording:
        back = talk(recording.url, ask(extra=sent, path="/v1/chat/completions?x=1"), 60)
        until(lambda: got)
    head = got[0].partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert head[0] == "POST /api/v1/chat/completions?x=1 HTTP/1.1"
    assert f"host: {url.removeprefix('http://')}" in head
    names = [line.partition(":")[0] for line in head[1:]]
    assert {"authorization", "x-keep", "accept-encoding", "content-length"} <= set(names)
    assert not {"x-drop", "te", "proxy-authorization", "connection", "expect"} & set(names)
    assert back.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: keep-alive\r\nX-End: 2\r\n")


def test_connections_go_in_pairs(tmp_path: Path) -> None:
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]
    with scripted(answer, answer, answer) as (url, got), Recording(url, tmp_path) as recording:
        with socket.create_connection(("127.0.0.1", recording.port), timeout=20) as sock:
            for n in (1, 2):
                sock.sendall(ask())
                assert len(sock.recv(1 << 16)) == len(answer[0])
                assert until(lambda n=n: len(got) == n)
            assert b"" not in got  # both came over one connection
        until(lambda: got[-1] == b"")  # which ends with the client's
        assert len(recording.rows()) == 2
    # And the other way: the service ends an idle connection, and so do we.
    with scripted(answer, end="close") as (url, got), Recording(url, tmp_path / "b") as recording:
        assert talk(recording.url, ask()) == answer[0]


def test_a_client_that_leaves_ends_the_work_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "SWEEP_NS", 10**15)  # at once, not when somebody sweeps
    with scripted(STREAM[:2]) as (url, got), Recording(url, tmp_path) as recording:
        with socket.create_connection(("127.0.0.1", recording.port), timeout=20) as sock:
            sock.sendall(ask())
            assert sock.recv(1 << 16)
        until(lambda: got[-1:] == [b""])  # the service sees the end
        row = until(recording.rows)[0]
    assert row["outcome"] == "cancelled"
    assert row["output_tokens"] is None


def test_a_service_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with Recording(f"http://127.0.0.1:{port}", tmp_path) as recording:
        answer = talk(recording.url, ask())
        row = until(recording.rows)[0]
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"upstream_refused" in answer
    assert row["outcome"] == "refused"


def test_a_service_that_speaks_something_else(tmp_path: Path) -> None:
    for said in (b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * (proxy_module.MAX_HEAD + 1)):
        with scripted([said]) as (url, _), Recording(url, tmp_path / str(len(said))) as recording:
            answer = talk(recording.url, ask())
            assert b"upstream_protocol" in answer
            assert until(recording.rows)[0]["outcome"] == "protocol"


@pytest.mark.parametrize("where", ["watch", "read", "end"])
def test_a_fault_of_ours_in_looking_is_not_felt_by_the_client(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("ours")

    target = "whywait.net.record.Recorder.watch" if where == "watch" else f"whywait.net.record.Watched.{where}"
    monkeypatch.setattr(target, broken)
    with scripted(STREAM, STREAM) as (url, _), Recording(url, tmp_path) as recording:
        recording.proxy.watch = recording.recorder.watch
        for _ in range(2):
            assert talk(recording.url, ask(), len(WHOLE)) == WHOLE
        until(lambda: recording.proxy.counts.unwatched == 2)
        until(lambda: recording.proxy.counts.in_flight == 0)


def test_a_prompt_nested_beyond_reason_passes(tmp_path: Path) -> None:
    data = b'{"model":"m","stream":true,"tools":' + b"[" * 1000 + b"]" * 1000 + b',"messages":7}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    with scripted(STREAM) as (url, _), Recording(url, tmp_path) as recording:
        assert talk(recording.url, request, len(WHOLE)) == WHOLE
        row = until(recording.rows)[0]
    assert (row["outcome"], row["blocks"], row["output_tokens"]) == ("ok", [], 2)


def test_what_is_learnt_of_a_request(tmp_path: Path) -> None:
    body = {"max_completion_tokens": 9, "user": "ada", "metadata": {}, "model": "org/model-1:2"}
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    pieces = [STREAM[0], *sse(thought), *STREAM[1:]]
    extra = "X-Whywait-Class: chat\r\nX-Session-Id: s1\r\n"
    with scripted(pieces, pieces) as (url, _), Recording(url, tmp_path) as recording:
        for _ in range(2):
            talk(recording.url, ask(body, extra=extra), len(b"".join(pieces)))
        a, b = until(lambda: len(recording.rows()) == 2 and recording.rows())
        head, *arrived = map(orjson.loads, recording.path.read_bytes().splitlines()[:2])
    assert (a["prompt_tokens"], a["output_tokens"], a["cached_tokens"], a["reasoning_tokens"]) == (11, 2, 8, None)
    assert (a["model"], a["max_tokens"], a["class"], a["stream"]) == ("org/model-1:2", 9, "chat", True)
    assert (a["outcome"], a["status"], a["content_chunks"]) == ("ok", 200, 3)
    assert 0 <= a["head_ns"] <= a["first_ns"] < a["first_answer_ns"] <= a["last_ns"] <= a["end_ns"]
    assert a["user"] == b["user"] != a["session"] == b["session"]
    assert head["whywait_recording"] == 1
    assert arrived[0]["event"] == "arrived"
    assert b["at_unix_ns"] > a["at_unix_ns"]
    assert abs(a["at_unix_ns"] - time.time_ns()) < 60e9


@pytest.fixture(scope="module")
def stub() -> Any:
    with StubProcess() as s:
        yield s


def test_the_real_client_with_64_streams(stub: Any, tmp_path: Path) -> None:
    with Recording(stub.url, tmp_path / "rec") as recording:
        run = drive(recording.url, tmp_path / "run", [closed(192, 64)], {"ttft_ms": 100})
        assert recording.proxy.counts.most_in_flight == 64
        rows = until(lambda: len(recording.rows()) == 192 and recording.rows())
    assert Counter(run.requests.text("outcome")) == {"ok": 192}
    assert run.requests["content_chunks"].tolist() == [6] * 192
    assert Counter(r["outcome"] for r in rows) == {"ok": 192}
    assert {r["output_tokens"] for r in rows} == {6}
    assert sorted(r["prompt_tokens"] for r in rows) == sorted(run.requests["prompt_tokens"].astype(int).tolist())
    assert len(read([recording.path])) == len(read([tmp_path / "rec"])) == 192


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("error_event", "inband_error"), ("truncate", "truncated"), ("no_done", "ok"), ("reset", "reset"),
     ("http_500", "http_error"), ("http_429", "shed"), ("html", "protocol"), ("close_delimited", "ok")],
)  # fmt: skip
def test_errors_reach_client_and_recording_as_they_are(stub: Any, tmp_path: Path, fault: str, outcome: str) -> None:
    with Recording(stub.url, tmp_path / "rec") as recording:
        run = drive(recording.url, tmp_path / "run", [closed(3, 3)], {"fault": fault})
        rows = until(lambda: len(recording.rows()) == 3 and recording.rows())
    assert set(run.requests.text("outcome")) == {outcome}
    assert {r["outcome"] for r in rows} == {outcome}


def test_nothing_secret_is_written(tmp_path: Path) -> None:
    """Prompts, answers, keys, names: not in the file, whole, in part or in a hash that could be made again."""
    said = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *sse(delta("ANSWERTEXT"), {"choices": [], "usage": USAGE}),
            *sse({"error": {"message": f"no: {SECRET_TEXT}", "type": "bad thing said"}}), b"0\r\n\r\n"]  # fmt: skip
    body = {
        "messages": [{"role": "system", "content": f"{SECRET_TEXT} " * 40}],
        "user": "ada.lovelace", "model": f"model {SECRET_TEXT}", "session_id": "session-number-one",
    }  # fmt: skip
    extra = f"Authorization: Bearer {KEY}\r\nX-Whywait-Class: {SECRET_TEXT}\r\n"
    with scripted(said, said) as (url, _), Recording(url, tmp_path) as recording:
        for path in ("/v1/chat/completions?k=QUERYSECRET", "/v1/chat/completions"):
            talk(recording.url, ask(body, path, extra), len(b"".join(said)))
        until(lambda: len(recording.rows()) == 2)
        secret = recording.recorder.secret
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    words = [
        *SECRET_TEXT.split(),
        KEY,
        "SECRETKEY",
        "ANSWERTEXT",
        "lovelace",
        "session-number",
        "QUERYSECRET",
        "bad thing",
    ]
    assert [w for w in words if len(w) > 3 and w.encode() in written] == []
    assert secret.hex().encode() not in written
    assert recording.path.stat().st_mode & 0o077 == 0  # and the file is the owner's only
    a, b = recording.rows()
    assert len(a["blocks"]) > 2
    assert a["blocks"] == b["blocks"]
    assert a["blocks"] != chain(new_secret(), [f"{SECRET_TEXT} " * 40]).hashes


def test_shared_prefixes_are_seen_through_the_proxy(stub: Any, tmp_path: Path) -> None:
    system = " ".join(f"word{i}" for i in range(640))
    with Recording(stub.url, tmp_path) as recording:
        for n in range(4):
            own = " ".join(f"own{n}-{i}" for i in range(640))
            messages = [{"role": "system", "content": system}, {"role": "user", "content": own}]
            body = {"messages": messages, "stream_options": {"include_usage": True}, "stub": {"tokens": 3}}
            talk(recording.url, ask(body, extra="Connection: close\r\n"))
        until(lambda: len(recording.rows()) == 4)
    trace = read([recording.path])
    assert trace.chains is not None
    # "system", 640 words, "user", 640 words: 20 blocks, of which 10 are the same in all; the first request finds none.
    assert [len(c) for c in trace.chains] == [20] * 4
    assert hit_rate(trace.chains) == pytest.approx(3 * 10 / 80)


def test_a_slow_client_is_not_buffered_without_bound(tmp_path: Path) -> None:
    size = 32 << 20
    whole = [HEAD + b"Content-Length: %d\r\n\r\n" % size, bytes(size)]
    with scripted(whole) as (url, _), Recording(url, tmp_path) as recording:
        sock = socket.create_connection(("127.0.0.1", recording.port), timeout=20)
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sock.sendall(ask())
            most, taken = 0, 0
            wanted = len(whole[0]) + size
            while taken < wanted:
                most = max([most, *(c.pending for c in list(recording.proxy.server.conns))])
                taken += len(sock.recv(1 << 18))
                time.sleep(0.0005)
    assert taken == wanted
    assert 0 < most <= proxy_module.HIGH + (1 << 17)


def test_a_token_is_asked_for_and_not_passed_on(tmp_path: Path) -> None:
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]
    with scripted(answer, answer) as (url, got), Recording(url, tmp_path, token="tok-12345") as recording:
        for wrong in ("", "X-Whywait-Token: tok-1234\r\n", "Authorization: Bearer tok-12345\r\n"):
            assert talk(recording.url, ask(extra=wrong + "Connection: close\r\n")).startswith(b"HTTP/1.1 401 ")
        assert got == []
        for right in ("X-Whywait-Token: tok-12345\r\n", "Proxy-Authorization: Bearer tok-12345\r\n"):
            assert talk(recording.url, ask(extra=right), len(answer[0])) == answer[0]
        assert not any(b"tok-12345" in request for request in got)
        assert len(until(lambda: len(recording.rows()) == 2 and recording.rows())) == 2


def test_other_pages_pass_and_are_not_recorded(stub: Any, tmp_path: Path) -> None:
    with Recording(stub.url, tmp_path) as recording:
        models = talk(recording.url, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = talk(recording.url, b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert talk(recording.url, b"GET http://elsewhere/ HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 400 "
        )
    assert b'"data"' in models
    assert head.partition(b"\r\n\r\n")[2] == b""
    assert recording.recorder.facts()["other_requests"] == 2
    assert recording.rows() == []


def test_tls_to_the_service(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if not openssl:
        pytest.skip("no openssl command to make a certificate with")
    key, cert = str(tmp_path / "k"), str(tmp_path / "c")
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    subprocess.run([*make, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    big = b"x" * 300_000

    def handler(_: Request, reply: Reply) -> None:
        reply.send(200, big)

    server = Server(handler, tls=context)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with Recording(server.url, tmp_path / "a", reach=Reach(ca=cert)) as recording:
            assert talk(recording.url, ask(extra="Connection: close\r\n")).endswith(big)
        with Recording(server.url, tmp_path / "b") as recording:  # its certificate is nobody's
            assert b"upstream_tls" in talk(recording.url, ask(extra="Connection: close\r\n"))
            assert until(recording.rows)[0]["outcome"] == "refused"
    finally:
        server.stop()
        thread.join()


def test_kill_9_leaves_a_readable_recording(stub: Any, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(whywait.__file__).parents[1])}
    flags = ["record", "--upstream", stub.url, "--out", str(tmp_path / "rec")]
    process = subprocess.Popen([sys.executable, "-m", "whywait", *flags], stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr
        url = process.stderr.readline().split()[1]
        body = {"stream_options": {"include_usage": True}, "stub": {"tokens": 3, "ttft_ms": 1}}
        for _ in range(3):
            talk(url, ask(body, extra="Connection: close\r\n"))
        host, port = url.removeprefix("http://").split(":")
        file = tmp_path / "rec" / FILE
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(ask({"stub": {"ttft_ms": 60_000}}))
            until(lambda: file.read_bytes().count(b'"arrived"') == 4)
            process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
    trace = read([file])
    assert len(trace) == 3
    assert any("1 left out: requests that had not ended" in note for note in trace.notes)
    with file.open("ab") as f:  # the last line is torn
        f.write(b'{"event":"ended","n":4,"at_un')
    assert len(read([file])) == 3


def test_the_verb_says_what_it_did_and_ends_on_a_signal(stub: Any, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(whywait.__file__).parents[1])}
    flags = ["record", "--upstream", stub.url, "--out", str(tmp_path / "rec"), "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "whywait", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stderr
        url = process.stderr.readline().split()[1]
        talk(url, ask({"stub": {"tokens": 3, "ttft_ms": 1}}, extra="Connection: close\r\n"))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    facts = json.loads(out)
    assert process.returncode == 0
    assert err == ""
    assert (facts["requests"], facts["outcomes"], facts["without_usage"]) == (1, {"ok": 1}, 1)
    assert Path(facts["recording"]).is_file()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--listen", "0.0.0.0:0"], "needs a token"),
        (["--listen", "nonsense"], "HOST:]PORT"),
        (["--listen", "example:1"], "needs a token"),
        (["--listen", "127.0.0.1:0", "--token-env", "WHYWAIT_TEST_NO_SUCH"], "holds no token"),
        (["--listen", "a..b:0", "--token-env", "PATH"], "cannot listen on a..b:0"),
    ],
)
def test_what_the_verb_refuses(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "r"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_the_proxy_is_not_its_own_upstream_and_a_recording_is_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    at = f"127.0.0.1:{port}"
    assert main(["record", "--upstream", f"http://{at}", "--listen", at, "--out", str(tmp_path)]) == 2
    assert "itself" in capsys.readouterr().err
    (tmp_path / FILE).write_text("")
    assert main(["record", "--upstream", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "there already" in capsys.readouterr().err


def test_a_full_disk_costs_lines_and_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]
    with scripted(answer) as (url, _), Recording(url, tmp_path) as recording:
        monkeypatch.setattr("whywait.net.record.os.write", full)
        assert talk(recording.url, ask(), len(answer[0])) == answer[0]
        until(lambda: recording.book.lost == 2)
        monkeypatch.undo()
    assert recording.rows() == []
