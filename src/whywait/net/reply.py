"""A request as a server sees it, and the reply it writes: what handlers work with. No sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import orjson

#: Headers of a streamed answer.
SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
DONE = b"data: [DONE]\n\n"  # the last event of chat completions and completions


class Line(Protocol):
    """The connection below, as far as replies and handlers know it."""

    @property
    def open(self) -> bool: ...

    @property
    def pending(self) -> int: ...

    def push(self, data: bytes) -> None: ...

    def limit_send(self, size: int) -> None: ...

    def replied(self, reply: Reply) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class Early(Protocol):
    """Takes the body of a request as it comes. Neither call may raise."""

    def piece(self, data: bytes) -> None: ...

    def whole(self, request: Request) -> None:
        """All of it was there; ``request`` has the body."""
        ...


@dataclass(frozen=True)
class Request:
    """One complete request; header names in lower case, ``accepted_ns`` (monotonic) from the read that completed it."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    conn: Line = field(repr=False)
    accepted_ns: int
    version: str = "1.1"
    keep_alive: bool = True


def framed(data: bytes) -> bytes:
    """``data`` as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def sse(event: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: %b\n\n" % orjson.dumps(event)


def envelope(ident: str, chat: bool, stream: bool, created: int, model: str) -> dict[str, Any]:
    """What every event of a chat completion or of a completion, or the whole answer, begins with."""
    kind = "chat.completion" if chat else "text_completion"
    return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{ident}", "object": f"{kind}.chunk" if chat and stream else kind,
            "created": created, "model": model}  # fmt: skip


def error(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """The body of a refusal as OpenAI-compatible services write it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Reply:
    """The answer to one request. Calls after its end, or after the peer has gone, do nothing.

    ``push`` sends bytes as they are (the caller frames them); ``on_gone`` is called if the connection is lost before
    the end.
    """

    __slots__ = ("_conn", "chunked", "done", "keep_alive", "on_gone", "push", "request", "started")

    def __init__(self, conn: Line, request: Request) -> None:
        self._conn, self.request = conn, request
        self.push: Callable[[bytes], object] = conn.push
        self.on_gone: Callable[[], None] | None = None
        self.started = self.done = self.chunked = False
        self.keep_alive = request.keep_alive

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        self.started = True
        reason = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        if self.chunked:
            lines.append("Transfer-Encoding: chunked")
        if not self.keep_alive:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def start(self, status: int, headers: Mapping[str, str], chunked: bool = True, first: bytes = b"") -> None:
        """Send status and headers, with ``first`` as the first piece of the body in the same segment.

        Without ``chunked`` (and always to HTTP/1.0) the body ends with the connection.
        """
        self.chunked = chunked and self.request.version != "1.0"
        self.keep_alive = self.keep_alive and self.chunked
        head = self._head(status, headers)
        if self.request.method == "HEAD":
            self._conn.push(head)
            self.push = len  # takes everything, says nothing
        else:
            self.push(head + (framed(first) if first and self.chunked else first))

    def send(
        self, status: int, body: bytes, kind: str = "application/json", headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer at once, with a Content-Length."""
        if self.done:
            return
        head = self._head(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})})
        self.push(head if self.request.method == "HEAD" else head + body)
        self.end()

    def write(self, data: bytes) -> None:
        if data:  # an empty chunk would end the body
            self.push(framed(data) if self.chunked else data)

    def end(self, last: bytes = b"") -> None:
        """End the body, with ``last`` and the closing chunk in one segment."""
        if self.done:
            return
        self.done = True
        tail = (framed(last) if last else b"") + b"0\r\n\r\n" if self.chunked else last
        if tail:
            self.push(tail)
        self._conn.replied(self)

    def abort(self) -> None:
        """Reset the connection (RST), whatever was said before."""
        self._conn.reset()


Handler = Callable[[Request, Reply], None]
