"""A service that means harm, on loopback: pages and answers that never end, unfold without measure, trickle, or lead
elsewhere. Each is a function of the connection it is sent over; it writes until it is done, or the peer hangs up."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import orjson

Answer = Callable[["Peer"], None]

OK = b"HTTP/1.1 200 OK\r\n"
SSE = OK + b"Content-Type: text/event-stream\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
DONE = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
TRICKLE_S = 0.2
MB = 1 << 20


class Peer:
    """Who asked, and what."""

    def __init__(self, sock: socket.socket, head: bytes, stop: threading.Event) -> None:
        self._sock, self.head, self.stop = sock, head, stop
        self.sent = 0

    def say(self, data: bytes) -> None:
        self._sock.sendall(data)
        self.sent += len(data)

    def forever(self, data: bytes) -> None:
        while not self.stop.is_set():
            self.say(data)

    def drip(self, data: bytes) -> None:
        """A byte now and then, for ever."""
        while not self.stop.is_set():
            for i in range(len(data)):
                self.say(data[i : i + 1])
                if self.stop.wait(TRICKLE_S):
                    return

    def hold(self) -> None:
        self.stop.wait()


def body(data: bytes, kind: str = "application/json", status: str = "200 OK", more: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + more + b"\r\n" + data


def whole(data: bytes, **more: str) -> Answer:
    return lambda peer: peer.say(body(data, **more))


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streamed(peer: Peer) -> None:
    """An answer as it should be."""
    peer.say(SSE + CHUNKED + framed(EVENT * 8) + framed(DONE) + b"0\r\n\r\n")


def endless_headers(peer: Peer) -> None:
    peer.say(OK)
    n = 0
    while not peer.stop.is_set():
        peer.say(b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(n, n + 1000)))
        n += 1000


def endless_header_line(peer: Peer) -> None:
    peer.say(OK + b"X-Long: ")
    peer.forever(b"y" * 65536)


def endless_status_line(peer: Peer) -> None:
    peer.say(b"HTTP/1.1 200 ")
    peer.forever(b"O" * 65536)


def endless_continues(peer: Peer) -> None:
    peer.forever(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def dripping_headers(peer: Peer) -> None:
    peer.say(OK)
    peer.drip(b"X-A: b\r\n")


def endless_line(peer: Peer) -> None:
    """One event of a stream that never ends, in a body that ends with the connection."""
    peer.say(SSE + b"\r\ndata: ")
    peer.forever(b"z" * 65536)


def endless_data_lines(peer: Peer) -> None:
    peer.say(SSE + b"\r\n")
    peer.forever(b"data:\n" * 8192)


def endless_comments(peer: Peer) -> None:
    peer.say(SSE + b"\r\n")
    peer.forever(b": still here\n\n" * 4096)


def endless_events(peer: Peer) -> None:
    """A billion chunks, as fast as they go."""
    peer.say(SSE + b"\r\n")
    peer.forever(EVENT * 1024)


def endless_usage(peer: Peer) -> None:
    """Events without output, which no recorder counts."""
    peer.say(SSE + b"\r\n")
    peer.forever(b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n' * 1024)


def endless_choices(peer: Peer) -> None:
    """Each event another choice: what is remembered of them must not grow."""
    peer.say(SSE + b"\r\n")
    n = 0
    while not peer.stop.is_set():
        events = (b'data: {"choices":[{"index":%d,"delta":{}}]}\n\n' % i for i in range(n, n + 1000))
        peer.say(b"".join(events))
        n += 1000


def endless_trailer(peer: Peer) -> None:
    peer.say(SSE + CHUNKED + framed(EVENT) + b"0\r\nX-Trailer: ")
    peer.forever(b"t" * 65536)


def endless_chunk_extension(peer: Peer) -> None:
    peer.say(SSE + CHUNKED + b"5;x=")
    peer.forever(b"e" * 65536)


def dripping_events(peer: Peer) -> None:
    peer.say(SSE + b"\r\n")
    peer.drip(EVENT)


def big_event(peer: Peer) -> None:
    """Small on the wire, large once parsed: an event of millions of empty lists, again and again."""
    data = b'data: {"choices":[],"x":[' + b"[]," * (5 * MB) + b"0]}\n\n"
    peer.say(SSE + b"\r\n")
    peer.forever(data)


def deep_event(peer: Peer) -> None:
    peer.say(SSE + b"\r\n")
    peer.forever(b"data: " + b'{"choices":' * MB + b"\n\n")


@functools.cache
def _bomb(unit: bytes, times: int) -> bytes:
    z = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(z.compress(unit) for _ in range(times)), z.flush()])


def gzip_bomb(peer: Peer) -> None:
    """A stream that unfolds a thousandfold into one line."""
    data = _bomb(b"\0" * MB, 64)
    peer.say(SSE + b"Content-Encoding: gzip\r\n\r\n" + data)
    peer.forever(data)


def gzip_events(peer: Peer) -> None:
    """... and into well-formed events, in small pieces."""
    data = _bomb(EVENT * 16384, 16)
    peer.say(SSE + b"Content-Encoding: gzip\r\n" + CHUNKED)
    pieces = b"".join(framed(data[i : i + 512]) for i in range(0, len(data), 512))
    peer.forever(pieces)


def gzip_bomb_body(peer: Peer) -> None:
    data = _bomb(b" " * MB, 128)
    peer.say(body(data, more=b"Content-Encoding: gzip\r\n"))


def endless_body(peer: Peer) -> None:
    peer.say(OK + b"Content-Type: application/json\r\n\r\n")
    peer.forever(b" " * 65536)


def endless_error_body(peer: Peer) -> None:
    peer.say(b"HTTP/1.1 500 Oh\r\nContent-Type: application/json\r\n\r\n")
    peer.forever(b"[]," * 21845)


def big_error_body(peer: Peer) -> None:
    data = b'{"error":[' + b"[]," * (20 * MB) + b"0]}"
    peer.say(body(data, status="500 Oh"))


def dripping_body(peer: Peer) -> None:
    """Without a length, and with a goodbye in its head: the connection object lets go of the socket early."""
    peer.say(OK + b"Content-Type: application/json\r\nConnection: close\r\n\r\n")
    peer.drip(b" ")


def huge_length(peer: Peer) -> None:
    peer.say(OK + b"Content-Type: application/json\r\nContent-Length: 9999999999999999\r\n\r\n")
    peer.forever(b" " * 65536)


def huge_chunk(peer: Peer) -> None:
    peer.say(OK + b"Content-Type: application/json\r\n" + CHUNKED + b"ffffffffffffff\r\n")
    peer.forever(b" " * 65536)


def silent(peer: Peer) -> None:
    peer.hold()


def garbage(peer: Peer) -> None:
    peer.say(bytes(range(256)) * 64)


def redirect(to: str, status: str = "307 Temporary Redirect") -> Answer:
    return lambda peer: peer.say(body(b"{}", status=status, more=b"Location: " + to.encode() + b"\r\n"))


def redirect_loop(peer: Peer) -> None:
    path = peer.head.split(b" ", 2)[1]
    peer.say(body(b"{}", status="308 Permanent Redirect", more=b"Location: " + path + b"\r\n"))


#: Of a streamed answer, or of any page.
ANSWERS: dict[str, Answer] = {
    f.__name__.replace("_", " "): f
    for f in (
        endless_headers, endless_header_line, endless_status_line, endless_continues, dripping_headers, endless_line,
        endless_data_lines, endless_comments, endless_events, endless_usage, endless_choices, endless_trailer,
        endless_chunk_extension, dripping_events, big_event, deep_event, gzip_bomb, gzip_events, gzip_bomb_body,
        endless_body, endless_error_body, big_error_body, dripping_body, huge_length, huge_chunk, silent, garbage,
        redirect_loop,
    )
}  # fmt: skip
MODELS = whole(orjson.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))
PAGE = whole(
    b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n",
    kind="text/plain",
)


class Service:
    """``answers`` by path; the rest is as it should be. ``asked`` holds the head of every request that came."""

    def __init__(self, answers: Mapping[str, Answer], good: int = 0) -> None:
        self._answers = {"/v1/models": MODELS, "/v1/chat/completions": streamed, "/metrics": PAGE, **answers}
        self._good = dict.fromkeys(answers, good)  # so many are answered as they should be, first
        self.asked: list[bytes] = []
        self._stop = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._peers: list[socket.socket] = []

    def __enter__(self) -> Service:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._listening.close()
        for s in self._peers:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        for t in self._threads:
            t.join(10)

    def _accept(self) -> None:
        self._listening.settimeout(0.1)
        while not self._stop.is_set():
            try:
                sock, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            sock.settimeout(None)
            self._peers.append(sock)
            t = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(t)
            t.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            held = b""
            while not self._stop.is_set():
                while b"\r\n\r\n" not in held:
                    got = sock.recv(65536)
                    if not got:
                        return
                    held += got
                head, _, held = held.partition(b"\r\n\r\n")
                length = next(_lengths(head), 0)
                while len(held) < length:
                    got = sock.recv(65536)
                    if not got:
                        return
                    held += got
                held = held[length:]
                self.asked.append(head)
                self._answer(head)(Peer(sock, head, self._stop))
                if b"Connection: close" in head:
                    return

    def _answer(self, head: bytes) -> Answer:
        path = head.split(b" ", 2)[1].decode().partition("?")[0]
        left = self._good.get(path, 0)
        if left:
            self._good[path] = left - 1
            return {"/v1/models": MODELS, "/v1/chat/completions": streamed}.get(path, PAGE)
        return self._answers.get(path, whole(b"{}", status="404 Not Found"))


def _lengths(head: bytes) -> Iterator[int]:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            yield int(value)
