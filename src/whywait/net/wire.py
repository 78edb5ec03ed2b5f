"""Request bodies out, HTTP and SSE bytes in. No I/O and no clock: bytes are fed, facts come out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import httptools
import orjson

from whywait.core.columns import KINDS

ROLE, REASONING, ANSWER, TOOL = (KINDS.index(k) for k in ("role", "reasoning", "answer", "tool"))
MAX_EVENT = 16 << 20
MAX_BODY = 64 << 20


class WireError(Exception):
    """The bytes are not HTTP, or not a stream this client can read."""


class SseParser:
    """Server-sent events by the WHATWG grammar: LF, CRLF or CR lines, comments, multi-line data, BOM, any split."""

    __slots__ = ("_buf", "_data", "_event", "_first", "_skip_lf")

    def __init__(self) -> None:
        self._buf = b""
        self._data: list[bytes] = []
        self._event = b""
        self._first = True
        self._skip_lf = False

    def feed(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """Complete events in ``piece`` and what was pending, as (event type, data); the type is b'' when not named."""
        pending = self._buf or self._data or self._first or self._skip_lf or self._event
        if not pending and piece.startswith(b"data: ") and piece.endswith(b"\n\n") and b"\r" not in piece:
            body = piece[6:-2]
            if b"\n" not in body:  # the usual case by far: one whole event of one data line
                return [(b"", body)]
        return self._slow(piece)

    def _slow(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        buf = self._buf + piece
        if self._first and buf:
            if len(buf) < 3 and b"\xef\xbb\xbf".startswith(buf):
                self._buf = buf
                return []
            self._first = False
            buf = buf.removeprefix(b"\xef\xbb\xbf")
        if self._skip_lf and buf:
            buf = buf.removeprefix(b"\n")
            self._skip_lf = False
        if b"\r" in buf:
            if buf.endswith(b"\r"):
                self._skip_lf = True
            buf = buf.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = buf.split(b"\n")
        self._buf = lines.pop()
        if len(self._buf) > MAX_EVENT:
            raise WireError(f"a stream line is longer than {MAX_EVENT} bytes")
        out: list[tuple[bytes, bytes]] = []
        for line in lines:
            if not line:
                if self._data:
                    out.append((self._event, b"\n".join(self._data)))
                self._data, self._event = [], b""
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"event":
                self._event = value
        return out

    def flush(self) -> list[tuple[bytes, bytes]]:
        """The stream ended: an event whose closing blank line never came counts (some servers leave it out)."""
        return self._slow(b"\n\n") if self._buf or self._data else []


class Response:
    """One HTTP response as it arrives: status, headers, the stream's events, and how it ended.

    ``events`` holds (kind, tokens) of each stream event since the caller last cleared it, where tokens is None when
    the service does not say. Everything else is a running summary. ``tap`` sees every object that has choices.
    """

    def __init__(self, stream: bool, tap: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.stream = stream
        self._tap = tap
        self.status = 0
        self.headers: dict[str, str] = {}
        self.headers_done = False
        self.complete = False
        self.keep_alive = False
        self.events: list[tuple[int, int | None]] = []
        self.started = False  # any byte came
        self.saw_done = False
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.request_id: str | None = None
        self.not_sse = False
        self.body = bytearray()
        self.bad_events = 0
        self._parser: Any = httptools.HttpResponseParser(self)
        self._sse = SseParser()
        self._gzip: Any = None
        self._predicted = 0
        self._usage_tokens = 0

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:
            return
        self.headers_done = True
        kind = self.headers.get("content-type", "")
        self.not_sse = self.stream and "text/event-stream" not in kind
        coding = self.headers.get("content-encoding", "")
        if coding in ("gzip", "deflate"):
            self._gzip = zlib.decompressobj(47 if coding == "gzip" else 15)

    def on_body(self, data: bytes) -> None:
        if self._gzip is not None:
            data = self._gzip.decompress(data, MAX_BODY)
        if self.status != 200 or not self.stream or self.not_sse:
            if len(self.body) + len(data) > MAX_BODY:
                raise WireError(f"the body is longer than {MAX_BODY} bytes")
            self.body += data
            return
        for name, event in self._sse.feed(data):
            self._read_event(name, event)

    def on_message_complete(self) -> None:
        if self.headers_done:
            self.keep_alive = bool(self._parser.should_keep_alive())  # the parser forgets it with the message
            self._end()

    def _end(self) -> None:
        for name, event in self._sse.flush():
            self._read_event(name, event)
        self.complete = True

    def feed(self, data: memoryview | bytes) -> None:
        """Take received bytes.

        Raises:
            WireError: not HTTP, or past a size limit.
        """
        self.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise WireError("the service wants another protocol (Upgrade)") from None
        except httptools.HttpParserCallbackError as exc:
            cause = exc.__context__
            raise WireError(str(cause or exc)) from None
        except httptools.HttpParserError as exc:
            raise WireError(f"not HTTP: {exc}") from None
        except zlib.error as exc:
            raise WireError(f"broken compression: {exc}") from None

    def eof(self) -> bool:
        """The peer closed. True when that is a legal end of this response (a close-delimited body)."""
        if self.complete:
            return True
        delimited = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        if self.headers_done and not delimited:
            self._end()
        return self.complete

    def _read_event(self, name: bytes, data: bytes) -> None:
        if data == b"[DONE]":
            self.saw_done = True
            return
        try:
            obj = orjson.loads(data)
        except orjson.JSONDecodeError:
            try:  # orjson is strict about lone surrogates; the standard library is not
                obj = json.loads(data.decode("utf-8", "replace"))
            except ValueError:
                self.bad_events += 1
                return
        if not isinstance(obj, dict):
            self.bad_events += 1
            return
        error = obj.get("error")
        if error or name == b"error":
            self.error = error if isinstance(error, dict) else {"message": str(error or obj)}
            return
        self._read_object(obj)

    def _read_object(self, obj: dict[str, Any]) -> None:
        choices = obj.get("choices")
        usage = obj.get("usage")
        timings = obj.get("timings")
        if usage:
            self.usage = usage
        if timings:
            self.timings = timings
        if "metrics" in obj and isinstance(obj["metrics"], dict):
            self.metrics = obj["metrics"]
        if self.request_id is None:
            self.request_id = obj.get("id")
        if not choices:
            return
        choice = choices[0]
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
        delta = choice.get("delta")
        if delta is None:
            delta = choice
            content = choice.get("text")
        else:
            content = delta.get("content")
        if content:
            kind = ANSWER
        elif delta.get("reasoning_content") or delta.get("reasoning"):
            kind = REASONING
        elif delta.get("tool_calls"):
            kind = TOOL
        else:
            kind = ROLE
        if self._tap is not None:
            self._tap(obj)
        self.events.append((kind, self._tokens(kind, choice, usage, timings)))

    def _tokens(self, kind: int, choice: dict[str, Any], usage: Any, timings: Any) -> int | None:
        """Tokens in this event, by whichever running count the service sends; None when it sends none."""
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            return len(ids)
        if usage and isinstance(usage.get("completion_tokens"), int):
            before, self._usage_tokens = self._usage_tokens, usage["completion_tokens"]
            return max(0, self._usage_tokens - before)
        if timings and isinstance(timings.get("predicted_n"), int) and kind != ROLE:
            before, self._predicted = self._predicted, timings["predicted_n"]
            return max(0, self._predicted - before)
        return None

    def read_whole(self) -> None:
        """Take the facts of a non-streaming body; anything that is not the expected JSON becomes ``error``."""
        try:
            obj = orjson.loads(bytes(self.body))
        except orjson.JSONDecodeError:
            return
        if isinstance(obj, dict):
            error = obj.get("error")
            if error:
                self.error = error if isinstance(error, dict) else {"message": str(error)}
            else:
                for choice in obj.get("choices") or []:
                    choice.setdefault("delta", choice.get("message"))
                self._read_object(obj)


def request_bytes(path: str, host: str, body: bytes, headers: dict[str, str]) -> bytes:
    """One POST with a JSON body, ready to send."""
    extra = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Accept-Encoding: identity\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    )
    return head.encode("latin-1") + body


def chat_body(model: str, prompt: str, max_tokens: int, options: dict[str, Any]) -> bytes:
    """Body for /v1/chat/completions; ``options`` are merged last (temperature, stream, ignore_eos …)."""
    return orjson.dumps(
        {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, **options}
    )


def completion_body(model: str, prompt: str, max_tokens: int, options: dict[str, Any]) -> bytes:
    """Body for /v1/completions."""
    return orjson.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens, **options})
