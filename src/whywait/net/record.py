"""What a recording keeps of the requests that pass the proxy: lengths, times and keyed hashes; never text or keys.

A line is written when a request arrives and another when it ended, each by one ``write`` to a file opened for
appending: ``kill -9`` loses nothing that was written. The secret of the hashes lives in memory only.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any

import orjson

from whywait import __version__
from whywait.core.prefix import BLOCK_WORDS, Chain, keyed, new_secret, prompt_texts
from whywait.errors import UsageError
from whywait.net.dialect import ANSWER, ROLE
from whywait.net.loop import Loop
from whywait.net.outcome import facts_of
from whywait.net.reply import Request
from whywait.net.wire import Response, WireError

VERSION = 1
FILE = "recording.jsonl"
DIALECTS = {"/chat/completions": "chat", "/completions": "completions", "/responses": "responses"}
CLASS_HEADER, SESSION_HEADERS = "x-whywait-class", ("x-whywait-session", "x-session-id", "x-conversation-id")
# Names are kept as they are only if they look like names: a prompt in their place would be text.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,99}", re.ASCII)
# Of what facts_of gives.
KEPT = ("status", "finish_reason", "prompt_tokens", "output_tokens", "reasoning_tokens", "cached_tokens")
OUTCOMES = {"refused": "refused", "tls": "refused", "reset": "reset", "cancelled": "cancelled", "protocol": "protocol",
            "ended": "truncated"}  # fmt: skip


class Book:
    """The file. A disk that is full costs lines, which are counted, never a request."""

    def __init__(self, folder: Path, upstream: str) -> None:
        self.path = folder / FILE
        self.lost = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            self._fd = os.open(self.path, flags, 0o600)
        except FileExistsError:
            hint = "a recording is never mixed with another: give another --out"
            raise UsageError(f"{self.path} is there already", hint) from None
        except OSError as exc:
            raise UsageError(f"cannot record into {folder}: {exc.strerror}") from exc
        self.write({"whywait_recording": VERSION, "id": secrets.token_hex(8), "whywait": __version__,
                    "started_unix_ns": time_ns(), "upstream": upstream, "block_words": BLOCK_WORDS})  # fmt: skip

    def write(self, row: dict[str, Any]) -> None:
        line = orjson.dumps(row) + b"\n"
        try:
            if os.write(self._fd, line) != len(line):
                # Half a line: end it, so that the next is whole.
                self.lost += 1
                os.write(self._fd, b"\n")
        except OSError:
            self.lost += 1

    def close(self) -> None:
        os.close(self._fd)


class Recorder:
    """Makes a watcher per request (:class:`Watched`) and hashes prompts piece by piece when the loop has time."""

    def __init__(self, book: Book, loop: Loop) -> None:
        self.book, self.outcomes, self.others = book, Counter[str](), 0
        self.without_usage = 0
        self.secret = new_secret()
        self._loop, self._serial = loop, 0
        self._work: deque[tuple[Iterator[None], Callable[[bool], None]]] = deque()

    def watch(self, request: Request) -> Watched | None:
        """None for what asks for no tokens: model lists, health, metrics."""
        dialect = next((d for tail, d in DIALECTS.items() if request.path.endswith(tail)), None)
        if dialect is None or request.method != "POST":
            self.others += 1
            return None
        self._serial += 1
        return Watched(self, self._serial, request, dialect)

    def later(self, work: Iterator[None], done: Callable[[bool], None]) -> None:
        """``done`` is told whether all went well."""
        if not self._work:
            self._loop.when_idle(self._hash_some)
        self._work.append((work, done))

    def _hash_some(self) -> int | None:
        """One bounded piece when the loop has nothing else to do, so that no byte waits for a prompt to be read."""
        work, done = self._work[0]
        try:
            next(work)
        except StopIteration:
            self._work.popleft()
            done(True)
        except Exception:  # a prompt so odd that it cannot be read, such as one nested a thousand deep
            self._work.popleft()
            done(False)
        return 0 if self._work else None

    def finish(self) -> None:
        """Hash what is left, for the end of a recording."""
        while self._work:
            self._hash_some()

    def facts(self) -> dict[str, Any]:
        return {"requests": self._serial, "outcomes": dict(self.outcomes), "other_requests": self.others,
                "without_usage": self.without_usage, "lines_lost": self.book.lost}  # fmt: skip


class Watched:
    """One request and what is learnt of it. Times are ns after its arrival; null is not known."""

    def __init__(self, recorder: Recorder, number: int, request: Request, dialect: str) -> None:
        self._recorder, self._t0 = recorder, request.accepted_ns
        self.chain = Chain(recorder.secret)
        self._row: dict[str, Any] = {"event": "ended", "n": number,
                                     "at_unix_ns": time_ns() - (monotonic_ns() - request.accepted_ns)}  # fmt: skip
        self._first: int | None = None
        self._answer: int | None = None
        self._last: int | None = None
        self._head_ns: int | None = None
        self._chunks = 0
        self._waiting = 2  # for the answer's end and for the hashes
        self._request: Request | None = request
        self._dialect, self._hashing = dialect, False
        self._body: dict[str, Any] = {}
        self._response: Response | None = None
        recorder.later(self._noted(), lambda _: None)

    def _noted(self) -> Iterator[None]:
        self._begin()
        yield

    def _hash(self) -> None:
        """Not before an answer comes: until then the service may want the CPU, and the client waits for it."""
        if not self._hashing:
            self._hashing = True
            self._recorder.later(self.chain.feed(prompt_texts(self._body)), self.hashed)

    def _begin(self) -> None:
        """Read what was asked: when the loop has time, or when the answer comes and that cannot wait."""
        request, self._request = self._request, None
        if request is None:
            return
        body = self._body = _body(request.body)
        self._row.update(_asked(body, self._dialect), **self._who(request, body))
        self._response = Response(bool(body.get("stream")), dialect=self._dialect)
        self._recorder.book.write({**self._row, "event": "arrived"})

    def _who(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        headers, secret = request.headers, self._recorder.secret
        user = body.get("user") or body.get("safety_identifier") or headers.get("authorization")
        session = next((headers[h] for h in SESSION_HEADERS if headers.get(h)), None)
        for key in ("session_id", "conversation_id", "conversation"):
            session = session or (body[key] if isinstance(body.get(key), str) else None)
        return {
            "class": _name(headers.get(CLASS_HEADER)),
            # The kinds are kept apart, so that equal hashes mean equal things.
            "user": keyed(secret, f"user\0{user}") if user else None,
            "session": keyed(secret, f"session\0{session}") if session else None,
        }

    def read(self, data: bytes) -> None:
        """Bytes of the answer, after they went on to the client."""
        now = monotonic_ns() - self._t0
        self._begin()
        self._hash()
        response = self._response
        if response is None:
            return
        try:
            response.feed(data)
        except WireError:
            self._response = None  # the client may well read it; what it was is not known to us
            return
        if self._head_ns is None and response.headers_done:
            self._head_ns = now
        if response.events:
            kinds = [kind for kind, _ in response.events if kind != ROLE]
            response.events.clear()
            if kinds:
                self._first = now if self._first is None else self._first
                if self._answer is None and any(kind >= ANSWER for kind in kinds):
                    self._answer = now
                self._last = now
                self._chunks += len(kinds)

    def end(self, reason: str) -> None:
        self._begin()
        self._hash()
        row, response = self._row, self._response
        row["end_ns"] = monotonic_ns() - self._t0
        if response is not None:
            if not response.complete and reason == "":
                response.eof()
            facts = facts_of(response, self._chunks)
            row.update({k: facts.get(k) for k in KEPT}, outcome=facts["outcome"])
            row["finish_reason"] = _name(row["finish_reason"])
        else:
            row["outcome"] = "protocol"
        if reason:
            # A whole stream whose client hung up right after the last event is whole.
            done = row["outcome"] == "ok" and reason in ("cancelled", "ended")
            row["outcome"] = "ok" if done else OUTCOMES[reason]
        row.update(head_ns=self._head_ns, first_ns=self._first, first_answer_ns=self._answer, last_ns=self._last,
                   content_chunks=self._chunks)  # fmt: skip
        self._recorder.outcomes[row["outcome"]] += 1
        if row["outcome"] == "ok" and row.get("output_tokens") is None:
            self._recorder.without_usage += 1
        self._done()

    def hashed(self, known: bool) -> None:
        self._body = {}
        self._row.update(blocks=self.chain.hashes if known else [], prompt_words=self.chain.words if known else None)
        self._done()

    def _done(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._recorder.book.write(self._row)
            self._response = None


def _body(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _asked(body: dict[str, Any], dialect: str) -> dict[str, Any]:
    most = next((body[k] for k in ("max_completion_tokens", "max_output_tokens", "max_tokens") if k in body), None)
    return {"dialect": dialect, "model": _name(body.get("model")), "stream": bool(body.get("stream")),
            "max_tokens": most if type(most) is int else None}  # fmt: skip


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and _NAME.fullmatch(value) else None
