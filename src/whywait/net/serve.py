"""A small streaming HTTP/1.1 server: one thread, non-blocking sockets; it holds no load policy.

``handler(request, reply)`` is called once per complete request, on the loop's thread, and answers through the ``Reply``
at once or later from timers (``server.call_at``). A timer firing and one send of pre-framed bytes (``Reply.push``) is
the hot path: 50,000 chunks a second must leave most of a core free.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import traceback
from collections import deque
from collections.abc import Callable
from time import monotonic_ns

import httptools

from whywait.net.loop import IN, OUT, Loop
from whywait.net.reply import Early, Handler, Reply, Request, framed

__all__ = ["Conn", "Early", "Handler", "Reply", "Request", "Server", "TlsConn", "framed"]

READ_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 26
MAX_PIPELINED = 64
LINGER_NS = 1_000_000_000
PAUSE_NS = 50_000_000


class Conn:
    """One connection: the parser's callbacks, the requests not yet answered, and the bytes not yet sent."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server, self._sock = server, sock
        self.fd = sock.fileno()
        self._send: Callable[[bytes | bytearray], int] = sock.send
        self._recv = sock.recv
        self._out = bytearray()
        self._inbox: deque[Request] = deque()
        self._reply: Reply | None = None
        self.open, self._pumping, self._closing = True, False, False
        self._read_ns = 0
        self._parser = httptools.HttpRequestParser(self)
        self._early: Early | None = None
        self.on_message_begin()
        server.loop.watch(self.fd, self._ready)

    # --- the parser's callbacks; nothing here may raise, httptools would hide where from

    def on_message_begin(self) -> None:
        self._url, self._body = b"", [b""]
        self._headers: dict[str, str] = {}
        self._head_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and self._reply is None:
            self.push(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = self._headers.get("content-length", "")
        if self.server.early and length.isdigit() and 0 < int(length) <= MAX_BODY_BYTES and self._free:
            request = self._request(b"")
            reply = self._reply = Reply(self, request)
            try:
                self._early = self.server.early(request, reply)
            except Exception:
                traceback.print_exc()
            if self._early is None:
                self._reply = None

    @property
    def _free(self) -> bool:
        """No answer is owed to an earlier request."""
        return self._reply is None and not self._inbox and not self._closing

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._body.append(body)
        if self._early:
            self._early.piece(body)

    def on_message_complete(self) -> None:
        request = self._request(b"".join(self._body))
        early, self._early = self._early, None
        if early:
            early.whole(request)
        else:
            self._inbox.append(request)

    def _request(self, body: bytes) -> Request:
        path, _, query = self._url.decode("latin-1").partition("?")
        method, version = self._parser.get_method().decode(), self._parser.get_http_version()
        keep = bool(self._parser.should_keep_alive())
        return Request(method, path, query, self._headers, body, self, self._read_ns, version, keep)

    def _ready(self, mask: int) -> None:
        if mask & OUT:
            self._flush()
        if mask & ~OUT and self.open:  # also HUP and ERR: the read says what it is
            try:
                data = self._recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            self._read_ns = monotonic_ns()
            if not data:
                self.close()
            elif not self._closing:
                self._feed(data)

    def _feed(self, data: bytes) -> None:
        status = 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # an upgrade is not on offer
            status = 400
        if self._body_bytes > MAX_BODY_BYTES:
            status = 413
        elif self._head_bytes + len(self._url) > MAX_HEAD_BYTES:
            status = 431
        if (status and self._reply) or len(self._inbox) > MAX_PIPELINED:
            self.reset()  # no way to say it in the middle of another answer
        elif status:
            self._inbox.clear()
            self._reply = Reply(self, Request("GET", "", "", {}, b"", self, self._read_ns, keep_alive=False))
            self._reply.send(status, b"", "text/plain")
        else:
            self._pump()

    def _pump(self) -> None:
        """Hand over requests one at a time: pipelined answers must come in order."""
        if self._pumping:
            return
        self._pumping = True
        while self._inbox and self._reply is None and not self._closing:
            request = self._inbox.popleft()
            reply = self._reply = Reply(self, request)
            try:
                self.server.handler(request, reply)
            except Exception:  # one bad request must not end the other streams
                traceback.print_exc()
                if reply.started:
                    self.reset()
                else:
                    reply.send(500, b"", "text/plain")
        self._pumping = False

    def push(self, data: bytes) -> None:
        """Send what the socket takes now, keep the rest until it is writable."""
        if self._out:
            self._out += data
            return
        try:
            taken = self._send(data)
        except BlockingIOError:
            taken = 0
        except OSError:
            self.close()
            return
        if taken < len(data):
            self._out += data[taken:]
            self.server.loop.rewatch(self.fd, IN | OUT)

    def limit_send(self, size: int) -> None:
        """From now on give the socket at most ``size`` bytes per turn of the loop, to show a client a fine split."""
        send = self._sock.send
        self._send = lambda data: send(data[:size])

    @property
    def pending(self) -> int:
        """Bytes that the socket has not yet taken."""
        return len(self._out)

    def _flush(self) -> None:
        try:
            if self._out:
                del self._out[: self._send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not self._out:
            self.server.loop.rewatch(self.fd, IN)
            if self._closing:
                self._half_close()

    def replied(self, reply: Reply) -> None:
        if not self.open or reply is not self._reply:
            return
        self._reply = None
        if reply.keep_alive:
            self._pump()
        else:
            self._closing = True
            if not self._out:
                self._half_close()

    def _half_close(self) -> None:
        # Closing with unread bytes in the buffer sends RST, which can destroy the answer on its way: say FIN and wait.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self.server.call_at(monotonic_ns() + LINGER_NS, self.close)

    def reset(self) -> None:
        if self.open:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close()

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self.server.loop.unwatch(self.fd)
        self.server.conns.discard(self)
        self._sock.close()
        self._out.clear()
        self._inbox.clear()
        self._send = len  # what is still pushed counts as taken, so that the hot path need not ask whether we are open
        del self._parser  # it holds this object in a cycle
        reply, self._reply = self._reply, None
        if reply and not reply.done:
            reply.done = True
            if reply.on_gone:
                reply.on_gone()


class TlsConn(Conn):
    """The same over TLS, through memory buffers so that the loop alone touches the socket."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        super().__init__(server, sock)
        self._inward, self._outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        assert server.tls is not None
        self._tls = server.tls.wrap_bio(self._inward, self._outward, server_side=True)

    def push(self, data: bytes) -> None:
        with contextlib.suppress(ssl.SSLError):  # the peer has said goodbye already: the read will close
            self._tls.write(data)
        super().push(self._outward.read())

    def _feed(self, data: bytes) -> None:
        self._inward.write(data)
        plain = []
        try:
            self._tls.do_handshake()  # does nothing once it is done
            while more := self._tls.read(READ_BYTES):
                plain.append(more)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self.close()
            return
        super().push(self._outward.read())  # the handshake's own
        if plain and self.open:
            super()._feed(b"".join(plain))

    def _half_close(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # it wants the peer's goodbye too, which need not come
            self._tls.unwrap()
        super().push(self._outward.read())
        super()._half_close()


class Server:
    """A listener and its connections. Several may share one ``loop``; without one, the server has its own."""

    def __init__(
        self,
        handler: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        loop: Loop | None = None,
    ) -> None:
        self.handler, self.tls, self.host = handler, tls, host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=4096)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._own_loop = loop is None
        self.loop = loop or Loop()
        #: Asked when a request's head is there: who takes its body as it comes, or None for the handler as usual.
        self.early: Callable[[Request, Reply], Early | None] | None = None
        self.accepted: Callable[[Conn], None] = lambda _: None  # told of every new connection
        self.call_at, self.step, self.stop = self.loop.call_at, self.loop.step, self.loop.stop
        self.conns: set[Conn] = set()
        self.loop.watch(self._listener.fileno(), self._accept)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def _accept(self, _: int) -> None:
        make = TlsConn if self.tls else Conn
        try:
            while True:
                sock, _address = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                conn = make(self, sock)
                self.conns.add(conn)
                self.accepted(conn)
        except (BlockingIOError, ConnectionError):
            pass
        except OSError:  # out of descriptors: the listener stays readable, so look away for a while instead of spinning
            self.loop.unwatch(self._listener.fileno())
            self.call_at(monotonic_ns() + PAUSE_NS, self._listen_again)

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.watch(self._listener.fileno(), self._accept)

    def run(self, stop: Callable[[], bool] | None = None) -> None:
        """Serve until ``stop()`` is true (asked once a turn) or ``self.stop`` was called; then close."""
        try:
            self.loop.run(stop)
        finally:
            self.close()

    def close(self) -> None:
        for conn in list(self.conns):
            conn.close()
        if self._listener.fileno() >= 0:
            self.loop.unwatch(self._listener.fileno())
            self._listener.close()
        if self._own_loop:
            self.loop.close()
