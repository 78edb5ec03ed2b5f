"""HTTP and SSE bytes in, request bytes out. No I/O and no clock: bytes are fed, facts come out."""

from __future__ import annotations

from typing import Any

import httptools

from whywait.net.coding import MAX_PIECE, CodingError, inflater
from whywait.net.dialect import ANSWERS, Answer, Tap

MAX_HEAD = 1 << 20
MAX_EVENT = 16 << 20
MAX_BODY = 64 << 20
MAX_SAID = 1 << 20  # kept of a body that is no answer: the type of an error is in it, or is not worth more
MAX_ANSWER = 1 << 30  # bytes of one answer on the wire, however it is made up
MAX_EVENTS = 1 << 20  # with output in one answer: no model writes a million tokens, a service that means harm does
MAX_HELD = 256 << 20  # of all unfinished bodies and events of a client together
LARGE = 1 << 20
OURS = "a fault of whywait's own"


class WireError(Exception):
    """The bytes are not HTTP, or not a stream this client can read."""


class SseParser:
    """Server-sent events by the WHATWG grammar: LF, CRLF or CR lines, comments, multi-line data, BOM, any split."""

    __slots__ = ("_data", "_event", "_first", "_parts", "_size", "_skip_lf")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line whose end has not come; joined once, so that long lines stay linear
        self._size = 0  # bytes held: those parts and the data of the event so far
        self._data: list[bytes] = []
        self._event = b""
        self._first = True
        self._skip_lf = False

    @property
    def held(self) -> int:
        return self._size

    def feed(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """Complete events in ``piece`` and what was pending, as (event type, data); the type is b'' when not named."""
        pending = self._parts or self._data or self._first or self._skip_lf or self._event
        if not pending and piece.startswith(b"data: ") and piece.endswith(b"\n\n") and b"\r" not in piece:
            body = piece[6:-2]
            if b"\n" not in body:  # the usual case by far: one whole event of one data line
                return [(b"", body)]
        return self._slow(piece)

    def _slow(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        if not piece:
            return []
        if not (self._first or self._skip_lf) and b"\n" not in piece and b"\r" not in piece:
            self._hold(piece)
            return []
        buf = b"".join((*self._parts, piece))
        self._size -= len(buf) - len(piece)
        self._parts.clear()
        if self._first:
            if len(buf) < 3 and b"\xef\xbb\xbf".startswith(buf):
                self._hold(buf)
                return []
            self._first = False
            buf = buf.removeprefix(b"\xef\xbb\xbf")
        if self._skip_lf and buf:
            buf = buf.removeprefix(b"\n")
            self._skip_lf = False
        if b"\r" in buf:
            self._skip_lf = buf.endswith(b"\r")
            buf = buf.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = buf.split(b"\n")
        rest = lines.pop()
        out = self._lines(lines)
        if rest:
            self._hold(rest)
        return out

    def _lines(self, lines: list[bytes]) -> list[tuple[bytes, bytes]]:
        out: list[tuple[bytes, bytes]] = []
        for line in lines:
            if not line:
                if self._data:
                    out.append((self._event, b"\n".join(self._data)))
                self._data, self._event, self._size = [], b"", 0
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
                self._grow(len(value) + 64)  # the list costs too, where the lines are empty
            elif name == b"event":
                self._event = value
        return out

    def _hold(self, part: bytes) -> None:
        self._parts.append(part)
        self._grow(len(part))

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_EVENT:
            raise WireError(f"an event of the stream is longer than {MAX_EVENT} bytes")

    def flush(self) -> list[tuple[bytes, bytes]]:
        """The stream ended: an event whose closing blank line never came counts (some servers leave it out)."""
        if not (self._parts or self._data):
            return []
        self._skip_lf = False
        return self._slow(b"\n\n")


class Response:
    """One HTTP response as it arrives: status, headers, the stream's events, and how it ended.

    ``answer`` is what the service says in it (see ``net.dialect``), ``events`` its list of events.
    """

    __slots__ = (
        "_bare", "_body", "_count", "_inflate", "_parser", "_size", "_sse", "answer", "body", "complete", "events",
        "headers", "headers_done", "keep_alive", "lenient", "not_sse", "started", "status", "stream", "unasked",
    )  # fmt: skip

    def __init__(self, stream: bool, tap: Tap | None = None, dialect: str = "chat", lenient: bool = False) -> None:
        self.stream = stream
        self.lenient = lenient  # a stream that just ends, ends well
        self.status = 0
        self.headers: dict[str, str] = {}
        self.headers_done = False
        self.complete = False
        self.keep_alive = False
        self.started = False  # any byte came
        self.not_sse = False
        self.unasked = False  # bytes of another answer came behind it
        self.body = bytearray()
        self.answer: Answer = ANSWERS[dialect](tap)
        self.events = self.answer.events
        self._parser: Any = httptools.HttpResponseParser(self)
        self._sse = SseParser()
        self._inflate: Any = None
        self._bare = 0  # bytes since there was any of the body: a head, a trailer, framing
        self._size = self._body = self._count = 0  # bytes; of the body; events

    @property
    def held(self) -> int:
        """Bytes kept of what is not yet whole."""
        return len(self.body) + self._sse.held

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.headers_done:  # else it is a trailer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.complete:
            self.keep_alive, self.unasked = False, True
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers.clear()
            return
        self.status = status
        self.headers_done = True
        kind = self.headers.get("content-type", "").lower()
        self.not_sse = self.stream and "text/event-stream" not in kind
        self._inflate = inflater(self.headers.get("content-encoding", ""))

    def on_body(self, data: bytes) -> None:
        self._bare = 0
        if self.complete:
            return
        if self._inflate is not None:
            data = self._inflate.feed(data)
        if self.status != 200 or not self.stream or self.not_sse:
            self._body += len(data)
            if self._body > MAX_BODY:
                raise WireError(f"the body is longer than {MAX_BODY} bytes")
            whole = self.status == 200 and not self.stream
            self.body += data if whole else data[: MAX_SAID - len(self.body)]
            return
        for name, event in self._sse.feed(data):
            self.answer.event(name, event)

    def on_message_complete(self) -> None:
        if self.headers_done and not self.complete:
            self.keep_alive = bool(self._parser.should_keep_alive())  # the parser forgets it with the message
            self._end()

    def _end(self) -> None:
        for name, event in self._sse.flush():
            self.answer.event(name, event)
        self.complete = True

    def feed(self, data: memoryview | bytes) -> None:
        """Take received bytes.

        Raises:
            WireError: not HTTP, or past a size limit.
        """
        self.started = True
        if self._bare > MAX_HEAD:
            raise WireError(f"the {'framing is' if self.headers_done else 'headers are'} longer than {MAX_HEAD} bytes")
        self._bare += len(data)
        self._size += len(data)
        if self._inflate is not None:
            self._inflate.room = MAX_PIECE
        was_complete = self.complete
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise WireError("the service wants another protocol (Upgrade)") from None
        except httptools.HttpParserCallbackError as exc:
            cause = exc.__context__
            if isinstance(cause, (WireError, CodingError)):
                raise WireError(str(cause)) from None
            if cause is not None and not isinstance(cause, Exception):
                raise cause from None  # Ctrl-C
            raise WireError(f"{OURS}: {cause or exc!r}") from cause
        except httptools.HttpParserError as exc:
            if not self.complete:
                raise WireError(f"not HTTP: {exc}") from None
            self.unasked, self.keep_alive = self.keep_alive, False  # the answer is whole; what follows it is none
        if was_complete:
            self.keep_alive = False
        self._count += len(self.events)
        if self._count > MAX_EVENTS or self._size > MAX_ANSWER:
            raise WireError(f"an answer of more than {MAX_EVENTS} events or {MAX_ANSWER} bytes")

    def eof(self) -> bool:
        """The peer closed. True when that is a legal end of this response (a close-delimited body)."""
        if not self.complete and self.headers_done:
            coding = self.headers.get("transfer-encoding", "").lower()
            if "content-length" not in self.headers and "chunked" not in coding:
                self._end()
        return self.complete

    def close(self) -> None:
        """No more bytes will be fed. What was said stays; the parser, which holds this object in a cycle, goes: a
        client that runs for hours does not wait for the garbage collector."""
        self._parser = self._inflate = None


def request_bytes(path: str, host: str, body: bytes, headers: dict[str, str]) -> bytes:
    """One POST with a JSON body, ready to send."""
    extra = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Accept-Encoding: identity\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    )
    return head.encode("latin-1") + body


def traceparent(prefix: str, request: int, attempt: int) -> str:
    """The W3C trace context of a request (version 00, sampled): its trace id is ``prefix`` (16 hexadecimal digits) and
    the request's number; the span id tells the attempts apart."""
    return f"00-{prefix}{request:016x}-{attempt:04x}{request & 0xFFFFFFFFFFFF:012x}-01"
