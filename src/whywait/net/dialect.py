"""What a service says in its answer: /v1/chat/completions, /v1/completions and /v1/responses, streamed or whole. Pure.

A dialect is a reader (objects in, facts out) and a writer of request bodies. All of it is what somebody else sent, so
every value is looked at before it is believed: a wrong type is as good as nothing said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson

from whywait.core import bounded
from whywait.core.columns import KINDS
from whywait.core.secrets import clean

ROLE, REASONING, ANSWER, TOOL = (KINDS.index(k) for k in ("role", "reasoning", "answer", "tool"))
PATHS = {"chat": "chat/completions", "completions": "completions", "responses": "responses"}
LIGHT, MOST_PARSED = 1 << 20, 256 << 20  # bytes of an event that are parsed unseen; that one may take once parsed
MOST_CHOICES = 1024
MOST = 1 << 40  # no token count is larger; what is, is nonsense and would not fit the tables

Tap = Callable[[dict[str, Any]], None]


def count(value: Any) -> int | None:
    """``value`` when it is a count of something, else None: not said."""
    return value if type(value) is int and 0 <= value < MOST else None


class Answer:
    """What was said so far. ``events`` holds (kind, tokens) of each stream event since the caller last cleared it,
    tokens None when the service does not say. ``tap`` sees every object that has output in it."""

    __slots__ = (
        "_tap", "bad_events", "error", "events", "finish_reason", "late", "metrics", "over", "parsed", "request_id",
        "saw_done", "timings", "usage",
    )  # fmt: skip

    def __init__(self, tap: Tap | None = None) -> None:
        self._tap = tap
        self.events: list[tuple[int, int | None]] = []
        self.saw_done = False
        self.over = False  # nothing more is to come, though the connection may stay open
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.request_id: str | None = None
        self.bad_events = 0
        self.late = False  # there was output after its end was said
        self.parsed = False  # a whole answer that was an answer

    @property
    def finished(self) -> bool:
        """The service said that it is done, in either of its ways."""
        return self.saw_done or self.finish_reason is not None

    def event(self, name: bytes, data: bytes) -> None:
        """One event of the stream: its type (b'' when not named) and its data."""
        if data == b"[DONE]":
            self.saw_done = self.over = True
            return
        obj = _parsed(data)
        if type(obj) is not dict:
            # An event named error is one, whatever its data; a keep-alive without data is nothing.
            if name == b"error":
                self.error, self.over = {}, True
            elif data.strip():
                self.bad_events += 1
            return
        error = obj.get("error")
        if error or name == b"error":
            self.error, self.over = _error(error or obj), True
            return
        self.read(obj)

    def read(self, obj: dict[str, Any]) -> None:
        """One object of the stream that is not an error."""
        raise NotImplementedError

    def whole(self, body: bytes) -> None:
        """The answer to a request that did not ask for a stream; ``parsed`` tells whether it was one."""
        obj = _parsed(body)
        if type(obj) is not dict:
            return
        if obj.get("error"):
            self.error = _error(obj["error"])
        else:
            self.parsed = self.read_whole(obj)

    def read_whole(self, obj: dict[str, Any]) -> bool:
        raise NotImplementedError

    def _facts(self, obj: dict[str, Any]) -> None:
        """What may stand beside the output of any event."""
        for name in ("usage", "timings", "metrics"):
            value = obj.get(name)
            if value and type(value) is dict:
                setattr(self, name, value)
        if self.request_id is None:
            found = obj.get("id")
            self.request_id = found if isinstance(found, str) and len(found) <= 200 else None


class ChatAnswer(Answer):
    """Chat completions and completions: they differ in where the text is."""

    __slots__ = ("_counted", "_missed", "_open", "_owed")

    def __init__(self, tap: Tap | None = None) -> None:
        super().__init__(tap)
        self._counted = 0  # the running count at the last content event that had one
        self._missed = False  # a content event had none since
        self._owed = 0  # tokens seen in events without text
        self._open: dict[int, bool] = {}  # choices seen, and whether they are still going on

    @property
    def finished(self) -> bool:
        return self.saw_done or (self.finish_reason is not None and not any(self._open.values()))

    def read(self, obj: dict[str, Any]) -> None:
        choices = obj.get("choices")
        usage = obj.get("usage")
        timings = obj.get("timings")
        if usage or timings or self.request_id is None or "metrics" in obj:
            self._facts(obj)
        if not choices:
            return
        if type(choices) is not list:
            self.bad_events += 1
            return
        if self._tap is not None:
            self._tap(obj)
        kind = ROLE
        ids: list[Any] | None = []
        for choice in choices:  # of all the choices of n > 1 in one event: one event
            if type(choice) is not dict:
                self.bad_events += 1
                return
            index = choice.get("index")
            if type(index) is not int:
                index = 0
            over = self.saw_done or self._open.get(index) is False
            this = self._kind(choice, index)
            self.late = self.late or (over and this != ROLE)
            kind = this if this > kind else kind
            if "token_ids" in choice:
                more = choice["token_ids"]
                if type(more) is list and ids is not None:
                    ids += more
                elif more is not None:
                    ids = None
        if ids or usage or timings:
            self.events.append((kind, self._tokens(kind, ids, usage, timings)))
        else:
            self._missed = self._missed or kind != ROLE
            self.events.append((kind, None))

    def _kind(self, choice: dict[str, Any], index: int) -> int:
        reason = choice.get("finish_reason")
        if reason or index not in self._open:
            self._going(index, reason)
        delta = choice.get("delta")
        if type(delta) is dict:
            content = delta.get("content")
        else:
            delta, content = choice, choice.get("text")
        if content:
            return ANSWER if type(content) is str or not _all_thinking(content) else REASONING
        if delta.get("reasoning_content") or delta.get("reasoning"):
            return REASONING
        if delta.get("tool_calls") or delta.get("function_call"):
            return TOOL
        return ANSWER if delta.get("refusal") else ROLE

    def _going(self, index: int, reason: Any) -> None:
        if reason:
            self.finish_reason = _short(reason)
        if index in self._open or len(self._open) < MOST_CHOICES:
            self._open[index] = not reason

    def _tokens(self, kind: int, ids: Any, usage: Any, timings: Any) -> int | None:
        """Tokens in this event, by whichever running count the service sends; None when it sends none.

        A token without text (half of a character, a stop token) counts with the next event that has some. A running
        count that was silent for a while does not say how many of its tokens are this event's.
        """
        if ids:
            self._owed += len(ids)
            if kind == ROLE:
                return None
            owed, self._owed = self._owed, 0
            return owed
        if kind == ROLE:
            return None
        now = count(usage.get("completion_tokens")) if type(usage) is dict else None
        if now is None and type(timings) is dict:
            now = count(timings.get("predicted_n"))
        if not now:  # no tokens so far, though there is text: not a running count (some gateways send zeros)
            self._missed = True
            return None
        before, self._counted = self._counted, now
        if self._missed or now < before:
            self._missed = False
            return None
        return now - before

    def read_whole(self, obj: dict[str, Any]) -> bool:
        choices = obj.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                choice.setdefault("delta", choice.get("message"))
        self.read(obj)
        return isinstance(choices, list) and bool(choices) and not self.bad_events


OUTPUT = {
    "response.output_text.delta": ANSWER, "response.refusal.delta": ANSWER,
    "response.reasoning_text.delta": REASONING, "response.reasoning_summary_text.delta": REASONING,
    "response.reasoning.delta": REASONING, "response.reasoning_summary.delta": REASONING,
    "response.function_call_arguments.delta": TOOL, "response.custom_tool_call_input.delta": TOOL,
    "response.mcp_call_arguments.delta": TOOL, "response.code_interpreter_call_code.delta": TOOL,
}  # fmt: skip
OPENING = ("response.created", "response.output_item.added", "response.content_part.added")
LAST = ("response.completed", "response.incomplete", "response.failed")


class ResponsesAnswer(Answer):
    """The Responses API: typed events; usage and status come in the last of them. No token counts per event."""

    __slots__ = ()

    def read(self, obj: dict[str, Any]) -> None:
        what = obj.get("type")
        kind = OUTPUT.get(what) if type(what) is str else None
        if kind is not None:
            if self._tap is not None:
                self._tap(obj)
            self.late = self.late or self.over
            self.events.append((kind if obj.get("delta") else ROLE, None))
            return
        if what == "error":
            self.error, self.over = obj, True
        elif what in LAST and isinstance(obj.get("response"), dict):
            self._status(obj["response"])
            self.over = True
        elif what in OPENING:
            self.events.append((ROLE, None))
        if isinstance(obj.get("response"), dict):
            self._facts(obj["response"])

    def read_whole(self, obj: dict[str, Any]) -> bool:
        self._facts(obj)
        self._status(obj)
        return isinstance(obj.get("output"), list)

    def _status(self, response: dict[str, Any]) -> None:
        """``completed``, ``incomplete`` (its reason is the finish reason) or ``failed``."""
        status, error = response.get("status"), response.get("error")
        why = response.get("incomplete_details")
        reason = why.get("reason") if isinstance(why, dict) else None
        if status == "failed" or error:
            self.error = _error(error or {})
        elif isinstance(reason, str) or isinstance(status, str):
            self.finish_reason = _short(reason or status)


ANSWERS: dict[str, type[Answer]] = {"chat": ChatAnswer, "completions": ChatAnswer, "responses": ResponsesAnswer}


def request_body(dialect: str, model: str, prompt: str, max_tokens: int, options: dict[str, Any]) -> bytes:
    """The JSON body of a request; ``options`` are merged last (temperature, stream, ignore_eos …)."""
    if dialect == "chat":
        return chat_body(model, prompt, max_tokens, options)
    if dialect == "completions":
        return orjson.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens, **options})
    # Usage comes unasked here, and a service may refuse the field; nothing of a measurement is to be kept there.
    rest = {k: v for k, v in options.items() if k != "stream_options"}
    return orjson.dumps({"model": model, "input": prompt, "max_output_tokens": max_tokens, "store": False, **rest})


def chat_body(model: str, prompt: str, max_tokens: int, options: dict[str, Any]) -> bytes:
    """Body for /v1/chat/completions."""
    messages = [{"role": "user", "content": prompt}]
    return orjson.dumps({"model": model, "messages": messages, "max_tokens": max_tokens, **options})


def _parsed(data: bytes) -> Any:
    """None: no JSON, or what would take all our memory once parsed."""
    if len(data) > LIGHT and bounded.weight(data) > MOST_PARSED:
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _leniently(data)


def _leniently(data: bytes) -> Any:
    """orjson is strict about lone surrogates and the like; the standard library is not. None: not JSON at all."""
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _error(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {"message": found if isinstance(found, str) else type(found).__name__}


def _short(word: Any) -> str:
    """A reason in few characters: what is no text has none (nested a thousand times it could not be written), and a
    secret that a service echoes is cut out before the end of it is cut off."""
    return clean(word)[:60] if isinstance(word, str) else type(word).__name__


def _all_thinking(content: Any) -> bool:
    """Content as a list of parts (Mistral's), all of them thoughts."""
    return isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "thinking" for p in content)
