"""The server and its loop, by plain sockets, turned by hand on the test's own thread."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whywait.net import loop as loop_module
from whywait.net import serve as serve_module
from whywait.net.loop import Loop, Poll
from whywait.net.serve import MAX_HEAD_BYTES, Reply, Request, Server


@contextlib.contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=20) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    out = b""
    while data := sock.recv(1 << 16):
        out += data
    return out


def serving() -> tuple[Server, list[Request]]:
    """A server that echoes bodies: whole, or as a stream on /stream."""
    seen: list[Request] = []

    def handler(req: Request, reply: Reply) -> None:
        seen.append(req)
        if req.path == "/stream":
            reply.start(200, {})
            reply.write(req.body)
            reply.write(b"")
            reply.end(b"!")
            reply.end(b"nothing more comes")
        elif req.path == "/bug":
            raise RuntimeError("ours")
        else:
            reply.send(200, req.body, "text/plain")

    return Server(handler), seen


def turn(server: Server, done: Callable[[], object]) -> None:
    for _ in range(10_000):
        if done():
            return
        server.step(0.01)
    raise AssertionError("nothing happened")


def exchange(server: Server, data: bytes) -> bytes:
    """What comes back until the server closes."""
    with connected(server) as sock:
        turn(server, lambda: server.conns)
        sock.setblocking(False)
        out = b""
        while True:
            with contextlib.suppress(BlockingIOError):
                data = data[sock.send(data) :] if data else b""
            server.step(0.002)
            with contextlib.suppress(BlockingIOError):
                more = sock.recv(1 << 16)
                if not more:
                    return out
                out += more


WIRE = (
    b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nx-a: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
    b"GET /d HTTP/1.1\r\n\r\nPOST /e HTTP/1.1\r\nContent-Length: 4\r\nConnection: close\r\n\r\n\xc3\xa9\r\n"
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, len(WIRE) - 1), max_size=8))
def test_requests_split_anywhere_are_the_same(cuts: list[int]) -> None:
    server, seen = serving()
    edges = [0, *sorted(set(cuts)), len(WIRE)]
    with contextlib.closing(server), connected(server) as sock:
        for a, b in pairwise(edges):
            sock.sendall(WIRE[a:b])
            server.step(0)
        turn(server, lambda: len(seen) == 3)
        turn(server, lambda: not any(conn.pending for conn in server.conns))
        sock.shutdown(socket.SHUT_WR)
        turn(server, lambda: not server.conns)
        answers = read_all(sock)
    assert [(r.method, r.path, r.query, r.body, r.keep_alive) for r in seen] == [
        ("POST", "/a", "b=c", b"abcde", True),
        ("GET", "/d", "", b"", True),
        ("POST", "/e", "", b"\xc3\xa9\r\n", False),
    ]
    assert seen[0].headers["x-a"] == "1, 2"
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answers.endswith(b"Content-Length: 4\r\nConnection: close\r\n\r\n\xc3\xa9\r\n")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (
            b"POST /stream HTTP/1.1\r\nConnection: close\r\nContent-Length: 16\r\n\r\n0123456789abcdef",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"10\r\n0123456789abcdef\r\n1\r\n!\r\n0\r\n\r\n",
        ),
        (
            b"POST /stream HTTP/1.0\r\nContent-Length: 2\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nab!",
        ),
        (
            b"HEAD /stream HTTP/1.1\r\nConnection: close\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
        ),
        (
            b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        ),
        (
            b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1\r\n"
            b"Connection: close\r\n\r\nx",
        ),
    ],
)
def test_answers_byte_for_byte(sent: bytes, answer: bytes) -> None:
    server, _ = serving()
    with contextlib.closing(server):
        assert exchange(server, sent) == answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n", b"431"),
        (b"GET /" + b"x" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n" + b"x" * 300_000, b"413"),
    ],
)
def test_what_is_no_request_is_refused(sent: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "MAX_BODY_BYTES", 100_000)
    server, seen = serving()
    with contextlib.closing(server):
        assert exchange(server, sent).split()[1] == status
        assert not seen


def test_a_bug_in_the_handler_is_told_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    server, _ = serving()
    with contextlib.closing(server):
        assert (
            exchange(server, b"GET /bug HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nConnection: close\r\n\r\n").count(
                b"HTTP/1.1 "
            )
            == 2
        )
    assert "RuntimeError: ours" in capsys.readouterr().err


def test_slow_reader_gets_everything_and_fine_splits_too() -> None:
    server, _ = serving()
    big = bytes(range(256)) * 40_000
    head = b"POST /stream HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with contextlib.closing(server):
        assert exchange(server, head % len(big) + big).endswith(big + b"\r\n1\r\n!\r\n0\r\n\r\n")

    def drip(req: Request, reply: Reply) -> None:
        req.conn.limit_send(1)
        reply.send(200, b"hello", "text/plain", {"Connection": "close"})

    server = Server(drip)
    with contextlib.closing(server), connected(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        sizes = []
        sock.setblocking(False)
        while sum(sizes) < 80:
            server.step(0.01)
            with contextlib.suppress(BlockingIOError):
                sizes.append(len(sock.recv(100)))
        assert set(sizes) == {1}


def test_lost_and_aborted_connections_tell_once() -> None:
    replies: list[Reply] = []
    gone: list[str] = []

    def handler(req: Request, reply: Reply) -> None:
        reply.on_gone = lambda: gone.append(req.path)
        reply.start(200, {})
        replies.append(reply)

    server = Server(handler)
    with contextlib.closing(server):
        with connected(server) as sock:
            sock.sendall(b"GET /left HTTP/1.1\r\n\r\n")
            turn(server, lambda: replies)
        turn(server, lambda: not server.conns)
        replies[0].push(b"x")
        replies[0].end()
        replies[0].abort()
        with connected(server) as sock:
            sock.sendall(b"GET /aborted HTTP/1.1\r\n\r\n")
            turn(server, lambda: len(replies) == 2)
            replies[1].abort()
            with pytest.raises(ConnectionResetError):
                read_all(sock)
    assert gone == ["/left", "/aborted"]


def test_tls(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if not openssl:
        pytest.skip("no openssl command to make a certificate with")
    key, cert = str(tmp_path / "k"), str(tmp_path / "c")
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    subprocess.run(
        [*make, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def handler(req: Request, reply: Reply) -> None:
        if req.path == "/close":
            reply.start(200, {}, chunked=False, first=req.body)
            reply.end()
        else:
            reply.send(200, req.body)

    server = Server(handler, tls=context)
    assert server.url.startswith("https://127.0.0.1:")
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        client = ssl.create_default_context(cafile=cert)
        body = b"z" * 3_000_000
        with connected(server) as raw, client.wrap_socket(raw, server_hostname="localhost") as sock:
            sock.sendall(b"POST /keep HTTP/1.1\r\nContent-Length: 2\r\n\r\nok")
            sock.sendall(b"POST /close HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            answers = read_all(sock)  # an end without TLS's goodbye would raise
            assert answers.count(b"HTTP/1.1 200 OK") == 2
            assert answers.endswith(b"\r\n\r\n" + body)
        with connected(server) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not read_all(raw).startswith(b"HTTP")
    finally:
        server.stop()
        thread.join()


# --- the loop


@pytest.mark.parametrize("poller", [loop_module.best_poller, Poll])
def test_timers_run_in_order_again_and_from_each_other(poller: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "best_poller", poller)
    loop, ran = Loop(), []
    with contextlib.closing(loop):
        start = time.monotonic_ns()
        times = iter([start + 2_000_000, start + 4_000_000])

        def repeating() -> int | None:
            ran.append("repeating")
            loop.call_at(0, lambda: ran.append("long due"))
            return next(times, None)

        loop.call_at(start + 1_000_000, repeating)
        loop.call_at(start + 1_000_000, lambda: ran.append("same time, set later"))
        loop.call_at(start + 3_000_000, lambda: ran.append("last but one"))
        loop.run(lambda: len(ran) == 8)
        assert time.monotonic_ns() >= start + 4_000_000
        assert ran[:2] == ["repeating", "same time, set later"]
        assert (ran.count("repeating"), ran.count("long due")) == (3, 3)
        loop.stop()
        loop.run()


def test_stop_wakes_from_another_thread() -> None:
    loop = Loop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.stop()
    thread.join(20)
    assert not thread.is_alive()
    loop.close()
    loop.close()
    loop.stop()


def test_several_servers_share_a_loop() -> None:
    loop = Loop()
    with contextlib.closing(loop):
        servers = [Server(lambda _, reply: reply.send(200, b"hi"), loop=loop) for _ in range(2)]
        for server in servers:
            assert exchange(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").endswith(b"hi")
            server.close()
