"""A transparent reverse proxy: answers go through byte for byte, and a watcher sees what passes. No policy.

Every connection of a client has one of its own to the service, so whoever looks from either side sees what it would
see without us: what the service sends, in its chunks, and closed connections where the service closes them. Bytes are
passed on first and watched after.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, Protocol

import httptools
import orjson

from whywait.net.endpoint import Endpoint
from whywait.net.loop import Loop
from whywait.net.reply import Line, Reply, Request
from whywait.net.serve import Server
from whywait.net.upstream import Upstream

MAX_HEAD = 1 << 16
HIGH, LOW = 1 << 20, 1 << 18  # bytes a slow client may be behind before we stop reading for it
LOOK_NS, SWEEP_NS = 5_000_000, 500_000_000
TOKEN_HEADER = "x-whywait-token"  # noqa: S105 - the header's name
# Of one connection only (RFC 9110, 7.6.1), or said anew by us.
OURS = {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te", "trailer",
        "transfer-encoding", "upgrade", "expect", "host", "content-length", TOKEN_HEADER}  # fmt: skip


class Watcher(Protocol):
    """Sees one exchange. ``end`` comes once: '' when the answer was whole, else ``refused``, ``reset``, ``tls``,
    ``ended`` (the service closed too early) or ``cancelled`` (the client left)."""

    def read(self, data: bytes) -> None: ...

    def end(self, reason: str) -> None: ...


Watch = Callable[[Request], "Watcher | None"]


@dataclass
class Counts:
    requests: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    unwatched: int = 0


class Framing:
    """Where the answer ends. Fed the final head and all that follows."""

    def __init__(self) -> None:
        self.complete = self.keep_alive = self.broken = False
        self.sized = False  # the length is said, so an early close is an error
        self._parser: Any = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        low = name.lower()
        if low == b"content-length" or (low == b"transfer-encoding" and b"chunked" in value.lower()):
            self.sized = True

    def on_message_complete(self) -> None:
        if self.complete:
            self.broken = True
        else:
            self.complete, self.keep_alive = True, bool(self._parser.should_keep_alive())

    def feed(self, data: bytes) -> None:
        if self.complete or self.broken:
            self.broken = True  # more than was asked for
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.broken = True


class Exchange:
    """One request and its answer on their way through."""

    def __init__(self, proxy: Proxy, request: Request, reply: Reply, upstream: Upstream) -> None:
        self._proxy, self._request, self._reply, self._upstream = proxy, request, reply, upstream
        self._watcher: Watcher | None = None
        self._head = b""
        self._whole = self._seen = False  # all of the request has come; a watcher was asked for
        self._framing: Framing | None = None
        self._over = False
        reply.on_gone = self._gone
        upstream.on_data, upstream.on_closed = self._data, self._closed

    def start(self, length: int) -> None:
        """Send the head, and of the body what there is; ``length`` is that of all of it."""
        counts = self._proxy.counts
        counts.requests += 1
        counts.in_flight += 1
        counts.most_in_flight = max(counts.most_in_flight, counts.in_flight)
        self._upstream.send(self._proxy.head(self._request, length) + self._request.body)

    def piece(self, data: bytes) -> None:
        """More of the body, as it came."""
        if not self._over:
            self._upstream.send(data)

    def whole(self, request: Request) -> None:
        """The request is on its way; now there is time to look at it."""
        self._request, self._whole = request, True
        self._look_at(request)

    def _look_at(self, request: Request) -> None:
        if not self._seen:
            self._seen = True
            self._watcher = self._safely(self._proxy.watch, request)

    def _data(self, data: bytes) -> None:
        if not self._whole:  # it answers before it has read all: what there is of the request is all we shall see
            self._look_at(self._request)
        if self._framing is None:
            data = self._heads(data)
            if not data:
                return
        framing = self._framing
        assert framing is not None
        framing.feed(data)
        self._reply.push(data)
        if self._watcher:
            self._safely(self._watcher.read, data)
        if framing.broken or framing.complete or (self._request.method == "HEAD" and not self._over):
            keep = self._request.method == "HEAD" or (framing.keep_alive and not framing.broken)
            self._finish("", keep)
        elif self._request.conn.pending > HIGH:
            self._upstream.pause()
            self._proxy.loop.call_at(monotonic_ns() + LOOK_NS, self._look)

    def _heads(self, data: bytes) -> bytes:
        """Pass interim answers on; of the final one give head and what follows, or b'' as long as it is not whole."""
        self._head += data
        while (at := self._head.find(b"\r\n\r\n")) >= 0:
            head, rest = self._head[: at + 4], self._head[at + 4 :]
            self._reply.started = True
            if head[9:10] == b"1" and head.startswith(b"HTTP/1.") and head[9:12] != b"101":
                self._reply.push(head)
                self._head = rest
                continue
            self._framing = Framing()
            whole, self._head = _end_to_end(head) + rest, b""
            return whole
        if len(self._head) > MAX_HEAD or not b"HTTP/1.".startswith(self._head[:7]):
            self._refuse("the upstream does not speak HTTP/1", "protocol")
        return b""

    def _look(self) -> int | None:
        """A timer while the client is behind."""
        if self._request.conn.pending > LOW and self._upstream.open:
            return monotonic_ns() + LOOK_NS
        self._upstream.resume()
        return None

    def _closed(self, reason: str) -> None:
        if reason in ("refused", "tls") and not self._reply.started:
            said = {"refused": "refuses the connection", "tls": "does not agree on TLS"}[reason]
            self._refuse(f"the upstream {said}", reason)
        elif reason:
            self._end(reason)
            self._reply.abort()
        else:
            # Close-delimited bodies end like this; anything else the client sees cut short, as it would without us.
            whole = self._framing is not None and not self._framing.sized
            self._finish("" if whole else "ended", False)

    def _refuse(self, message: str, reason: str) -> None:
        self._end(reason)
        self._upstream.close()
        body = {"error": {"message": f"whywait record: {message}", "type": f"upstream_{reason}", "code": 502}}
        self._reply.keep_alive = False
        self._reply.send(502, orjson.dumps(body))

    def _finish(self, reason: str, keep: bool) -> None:
        if self._over:
            return
        self._end(reason)
        reply = self._reply
        reply.chunked = False  # the bytes came framed
        reply.keep_alive = reply.keep_alive and keep and self._whole
        if not reply.keep_alive:
            self._upstream.close()
        else:
            self._proxy.rest(self._request.conn, self._upstream)
        reply.end()

    def _gone(self) -> None:
        """The client left: the service must not go on working for nobody."""
        self._upstream.close()
        self._end("cancelled")

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._proxy.counts.in_flight -= 1
            if self._watcher:
                self._safely(self._watcher.end, reason)

    def _safely(self, call: Callable[[Any], Any], what: Any) -> Any:
        """Whatever is wrong with our looking, the client must not feel it."""
        try:
            return call(what)
        except Exception:
            self._watcher = None
            self._proxy.counts.unwatched += 1
            return None


class Proxy:
    """``watch(request)`` gives the watcher of a request, after it was sent. With a ``token``, clients must bring it."""

    def __init__(self, endpoint: Endpoint, listen: tuple[str, int], token: str | None = None) -> None:
        self.endpoint, self.counts = endpoint, Counts()
        self.watch: Watch = lambda _: None
        self._token = token
        self._tls = endpoint.tls()
        self._pairs: dict[Line, Upstream] = {}
        self.loop = Loop()
        self.server = Server(self._handle, *listen, loop=self.loop)
        self.server.early = self._early
        if token is None:
            self.server.accepted = self._connect
        self.loop.call_at(monotonic_ns() + SWEEP_NS, self._sweep)

    def _early(self, request: Request, reply: Reply) -> Exchange | None:
        """Pass on a request from its head on, so that no long prompt waits here; None: it is not for the upstream."""
        if not request.path.startswith("/"):
            return None
        if self._token is not None and not _same(_token_of(request), self._token):
            return None
        exchange = self._exchange(request, reply)
        exchange.start(int(request.headers["content-length"]))
        return exchange

    def _connect(self, conn: Line) -> None:
        """A client that connects would connect to the service: so its first request need not wait for that."""
        upstream = self._pairs[conn] = Upstream(self.loop, self.endpoint.address, self._tls, self.endpoint.host)

        def closed(reason: str) -> None:
            self._pairs.pop(conn, None)
            if not reason:  # the service hung up; what it refuses is tried again, and told, with the first request
                conn.close()

        upstream.on_closed = closed

    def _exchange(self, request: Request, reply: Reply) -> Exchange:
        upstream = self._pairs.pop(request.conn, None)
        if upstream is None or not upstream.open:
            upstream = Upstream(self.loop, self.endpoint.address, self._tls, self.endpoint.host)
        self._pairs[request.conn] = upstream
        return Exchange(self, request, reply, upstream)

    def _handle(self, request: Request, reply: Reply) -> None:
        if self._token is not None and not _same(_token_of(request), self._token):
            body = {"error": {"message": f"whywait record: send the token as {TOKEN_HEADER}", "type": "no_token"}}
            reply.send(401, orjson.dumps(body))
            return
        if not request.path.startswith("/"):
            reply.send(400, b'{"error":{"message":"whywait record: one upstream only","type":"not_a_path"}}')
            return
        exchange = self._exchange(request, reply)
        exchange.start(len(request.body))
        exchange.whole(request)

    def head(self, request: Request, length: int) -> bytes:
        """The request's head as the service gets it: the client's own headers, but for those of one connection."""
        dropped = OURS | {x.strip().lower() for x in request.headers.get("connection", "").split(",")}
        lines = [f"{request.method} {self.endpoint.root}{request.path}{'?' if request.query else ''}{request.query}"
                 f" HTTP/{request.version}", f"host: {self.endpoint.netloc}"]  # fmt: skip
        lines += [f"{k}: {v}" for k, v in request.headers.items() if k not in dropped]
        if length or request.method in ("POST", "PUT", "PATCH"):
            lines.append(f"content-length: {length}")
        if not request.keep_alive:
            lines.append("connection: close")
        elif request.version == "1.0":
            lines.append("connection: keep-alive")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def rest(self, conn: Line, upstream: Upstream) -> None:
        """Between two requests: if the service closes, so do we; if it speaks unasked, something is wrong."""

        def over(_: object) -> None:
            upstream.close()
            self._pairs.pop(conn, None)
            conn.close()

        upstream.on_data, upstream.on_closed = over, over

    def _sweep(self) -> int:
        """Close what belongs to clients that have gone between two requests."""
        for conn in [c for c in self._pairs if not c.open]:
            self._pairs.pop(conn).close()
        return monotonic_ns() + SWEEP_NS

    def run(self, stop: Callable[[], bool] | None = None) -> None:
        self.loop.run(stop)

    def close(self) -> None:
        for conn in list(self.server.conns):
            conn.close()
        for upstream in self._pairs.values():
            upstream.close()
        self._pairs.clear()
        self.server.close()
        self.loop.close()


def _end_to_end(head: bytes) -> bytes:
    """The head without what is meant for one connection only. ``Connection: close`` and ``keep-alive`` stay: they are
    as true on our side, since connections go in pairs; and so does the framing, which is passed on as it is."""
    lines = head[:-4].split(b"\r\n")
    fields = [(line.partition(b":")[0].strip().lower(), line) for line in lines[1:]]
    named = {x.strip().lower() for name, line in fields if name == b"connection"
             for x in line.partition(b":")[2].split(b",")} - {b"close", b"keep-alive", b""}  # fmt: skip
    if not named and not any(name == b"upgrade" for name, _ in fields):
        return head
    kept = [lines[0]]
    for name, line in fields:
        if name == b"connection":
            stay = [x.strip() for x in line.partition(b":")[2].split(b",")]
            stay = [x for x in stay if x.lower() in (b"close", b"keep-alive")]
            if stay:
                kept.append(b"Connection: " + b", ".join(stay))
        elif name not in named and name != b"upgrade":
            kept.append(line)
    return b"\r\n".join(kept) + b"\r\n\r\n"


def _token_of(request: Request) -> str:
    return request.headers.get(TOKEN_HEADER) or request.headers.get("proxy-authorization", "").removeprefix("Bearer ")


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode("latin-1", "replace"), b.encode("latin-1", "replace"))
