"""One exchange with an engine, on the front's loop: request out, answer in, cancelled by closing. A connection each.

``Told`` hears of it: ``head`` once, ``data`` as the body comes, ``end`` once: '' when the answer was whole, else why
not (``refused``, ``reset``, ``ended``, ``protocol``). Nothing is heard after ``cancel``.
"""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
import orjson

from whywait.net.loop import Loop
from whywait.net.upstream import Upstream


class Told(Protocol):
    def head(self, status: int, headers: Mapping[str, str], /) -> None: ...

    def data(self, data: bytes) -> None: ...

    def end(self, reason: str) -> None: ...


@dataclass
class Backend:
    """An engine behind the front. ``free`` are its slots in no use of ours, the longest free first; ``load`` counts
    what was sent there and has not ended; ``page`` is its metrics page as last read; ``gone``: it refused the last
    connection."""

    url: str
    slots: int
    free: list[int] = field(default_factory=list)
    load: int = 0
    page: bytes = b""
    gone: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self.host = parts.hostname or ""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self.address = (family, (self.host, parts.port or 80))
        self.free = list(range(self.slots))


class Call:
    """See the module. ``body`` is JSON; None sends a GET."""

    def __init__(self, loop: Loop, to: Backend, path: str, body: bytes | None, told: Told) -> None:
        self._told, self._over, self._status = told, False, 0
        self._headers: dict[str, str] = {}
        self._sized = self._complete = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._up = Upstream(loop, to.address, None, to.host)
        self._up.on_data, self._up.on_closed = self._data, self._closed
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {to.host}\r\nConnection: close\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._up.send(head.encode("latin-1") + b"\r\n" + (body or b""))
        self.pause, self.resume = self._up.pause, self._up.resume

    def cancel(self) -> None:
        self._over = True
        self._up.close()

    # --- the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = int(self._parser.get_status_code())
        coding = self._headers.get("transfer-encoding", "").lower()
        self._sized = "content-length" in self._headers or "chunked" in coding
        if self._status >= 200 and not self._over:
            self._told.head(self._status, self._headers)

    def on_body(self, data: bytes) -> None:
        if not self._over:
            self._told.data(data)

    def on_message_complete(self) -> None:
        self._complete = self._status >= 200

    # --- the connection

    def _data(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if isinstance(exc, httptools.HttpParserCallbackError):  # a defect of ours, not the engine's
                traceback.print_exc()
            self._end("protocol")
            return
        if self._complete:
            self._end("")

    def _closed(self, reason: str) -> None:
        whole = self._complete or (not reason and self._status >= 200 and not self._sized)
        self._end("" if whole else reason or "ended")

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._up.close()
            self._told.end(reason)


class _Whole:
    """Collects an answer and hands it over at its end."""

    def __init__(self, then: Callable[[int, bytes, str], None]) -> None:
        self._then, self._status, self._parts = then, 0, [b""]

    def head(self, status: int, _headers: Mapping[str, str]) -> None:
        self._status = status

    def data(self, data: bytes) -> None:
        self._parts.append(data)

    def end(self, reason: str) -> None:
        self._then(self._status, b"".join(self._parts), reason)


def ask(loop: Loop, to: Backend, path: str, body: bytes | None, then: Callable[[int, bytes, str], None]) -> Call:
    """A whole answer: ``then(status, body, reason)`` once."""
    return Call(loop, to, path, body, _Whole(then))


def as_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``; empty where there is none."""
    with contextlib.suppress(orjson.JSONDecodeError):
        found = orjson.loads(data)
        if isinstance(found, dict):
            return found
    return {}
