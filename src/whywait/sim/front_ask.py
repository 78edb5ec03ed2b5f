"""What a request to the simulated service asks for, or why it is refused; prompts counted and cut into blocks. Pure.

There is no tokenizer: four bytes of UTF-8 are a token. A chat is laid out as text first (``layout``): a head of four
tokens for each message, its content filled up to a whole token, and a head that opens the answer. So a turn of a
conversation begins with the whole of the turn before it, and a prefix cache finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from whywait.net.dialect import MOST

BYTES_PER_TOKEN = 4
WORD = " tok"  # what answers are made of; one token by the same rule
WORD_ID = int.from_bytes(WORD.encode(), "big")
HEAD_TOKENS = 4  # of each message, and of the answer
COMPLETION_TOKENS = 16  # of a completion that does not say max_tokens; OpenAI's default, and vLLM's
PATHS = {"/v1/chat/completions": True, "/v1/completions": False}  # whether it is a chat
BAD = "BadRequestError"


class Refused(Exception):
    """The service says no, as vLLM would. ``param`` names the field at fault."""

    def __init__(self, status: int, message: str, kind: str = BAD, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param


@dataclass(frozen=True)
class Ask:
    """One generation request, understood. ``text`` holds four bytes per prompt token."""

    chat: bool
    model: str
    stream: bool
    usage: bool
    usage_each: bool
    token_ids: bool
    text: bytes = field(repr=False)
    limit: int | None  # max_tokens, where it was given
    least: int
    priority: int
    salt: str

    @property
    def prompt_tokens(self) -> int:
        return len(self.text) // BYTES_PER_TOKEN


def read(raw: bytes, chat: bool) -> Ask:
    """The body of a request.

    Raises:
        Refused: it is not JSON, or a field is not what it should be.
    """
    body = parsed(raw)
    options = body.get("stream_options") or {}
    if type(options) is not dict:
        raise _bad("stream_options", "should be an object")
    if body.get("n") not in (None, 1):
        raise Refused(400, "n must be 1: the simulated service gives one answer per request", param="n")
    temperature = body.get("temperature")
    if isinstance(temperature, (int, float)) and temperature < 0:
        raise Refused(400, f"temperature must be non-negative, got {temperature}", param="temperature")
    name = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    limit = _whole(body, name, 1)
    least = _whole(body, "min_tokens", 0) or 0
    if limit is not None and least > limit:
        raise Refused(400, f"min_tokens must be at most {name} ({limit}), got {least}", param="min_tokens")
    return Ask(
        chat=chat,
        model=_text(body, "model"),
        stream=_flag(body, "stream"),
        usage=_flag(options, "include_usage"),
        usage_each=_flag(options, "continuous_usage_stats"),
        token_ids=_flag(body, "return_token_ids"),
        text=prompt_of(body, chat),
        limit=limit if limit is not None or chat else COMPLETION_TOKENS,
        least=least,
        priority=_whole(body, "priority", -MOST) or 0,
        salt=_text(body, "cache_salt"),
    )


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Refused: it is none.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise Refused(400, f"body: JSON decode error: {exc}", "Bad Request", "body") from None
    if type(body) is not dict:
        raise _bad("body", "should be an object")
    return body


def prompt_of(body: Mapping[str, Any], chat: bool) -> bytes:
    """The prompt as four bytes per token: a chat's messages, a text, or a list of token ids.

    Raises:
        Refused: there is none, or it is of another kind.
    """
    if chat:
        return layout(body.get("messages"))
    prompt = body.get("prompt")
    if type(prompt) is str and prompt:
        return _filled(_bytes(prompt))
    if type(prompt) is list and prompt and all(type(t) is int and 0 <= t < 1 << 32 for t in prompt):
        return b"".join([t.to_bytes(BYTES_PER_TOKEN, "big") for t in prompt])
    if type(prompt) is list and len(prompt) == 1:
        return prompt_of({"prompt": prompt[0]}, False)
    if type(prompt) is list and len(prompt) > 1:
        raise Refused(400, "prompt: one prompt per request, a text or a list of token ids", param="prompt")
    raise _bad("prompt", "field required: a text or a list of token ids")


def layout(messages: Any) -> bytes:
    """A chat as one text, the head of the answer included.

    Raises:
        Refused: not a list of messages, or something other than text is in them.
    """
    if type(messages) is not list or not messages:
        raise _bad("messages", "field required: a list of messages")
    out = []
    for at, message in enumerate(messages):
        role = message.get("role") if type(message) is dict else None
        if type(role) is not str:
            raise _bad(f"messages.{at}.role", "field required")
        out += [_head(role), _filled(_bytes(_content(message.get("content"), at)))]
    return b"".join([*out, _head("assistant")])


def _content(content: Any, at: int) -> str:
    if content is None:  # of an assistant that called a tool
        return ""
    if type(content) is str:
        return content
    if type(content) is list and all(type(p) is dict and type(p.get("text")) is str for p in content):
        return "\n".join(p["text"] for p in content)
    raise Refused(400, "messages: only text is understood here", param=f"messages.{at}.content")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _head(role: str) -> bytes:
    return b"\x01" + _bytes(role)[:14].ljust(14) + b"\n"


def _filled(data: bytes) -> bytes:
    return data + b" " * (-len(data) % BYTES_PER_TOKEN)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or type(value) is bool:
        return bool(value)
    raise _bad(name, "should be true or false")


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None or type(value) is str:
        return value or ""
    raise _bad(name, "should be a text")


def _whole(body: Mapping[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value >= MOST:
        raise _bad(name, "should be a whole number")
    if value < least:
        raise Refused(400, f"{name} must be at least {least}, got {value}", param=name)
    return value


def _bad(name: str, what: str) -> Refused:
    return Refused(400, f"{name}: {what}", "Bad Request", f"body.{name}")


class Room:
    """What a request may be: the longest context, in tokens, and who asks for how much."""

    def __init__(self, context: int) -> None:
        self.context = context

    def output(self, ask: Ask, drawn: int) -> tuple[int, str]:
        """Tokens of the answer and its finish reason: as many as were asked for, else ``drawn``.

        Raises:
            Refused: prompt and answer together are longer than the context.
        """
        prompt, limit, most = ask.prompt_tokens, ask.limit, self.context
        if limit is not None and limit > most:
            raise Refused(
                400, f"max_tokens={limit} is more than max_model_len={most}: ask for less", param="max_tokens"
            )
        if prompt + (limit or ask.least or 1) > most:
            raise Refused(
                400,
                f"This model's maximum context length is {most} tokens; the prompt has {prompt} input tokens"
                f" and {limit or ask.least or 1} output tokens were requested. Shorten one of them.",
                param="input_tokens",
            )
        if limit is not None:
            return limit, "length"
        tokens = max(1, ask.least, drawn)
        return (tokens, "stop") if prompt + tokens <= most else (most - prompt, "length")


class Blocks:
    """Whole blocks of prompts by content: equal beginnings, equal numbers.

    A number stands for a block *and all before it*. Numbers grow and are not used again. At most ``most`` are kept,
    those seen last: no more can be in a cache of so many blocks that forgets by the same rule.
    """

    def __init__(self, block: int, most: int) -> None:
        self.size, self.most = block * BYTES_PER_TOKEN, max(1, most)
        self._known: dict[tuple[int, int], int] = {}
        self._next = 0

    def chain(self, text: bytes, salt: str = "") -> list[int]:
        """Numbers of the whole blocks of a prompt, from its beginning. Prompts of another ``salt`` share nothing."""
        known, size = self._known, self.size
        before = -1 if not salt else -2 - abs(hash(salt))
        out = []
        for at in range(0, len(text) - size + 1, size):
            key = (before, hash(text[at : at + size]))
            number = known.pop(key, None)  # put back at the end: the order is that of use
            if number is None:
                number, self._next = self._next, self._next + 1
            known[key] = before = number
            out.append(number)
        while len(known) > self.most:
            del known[next(iter(known))]
        return out


def token_ids(text: bytes) -> Sequence[int]:
    """The tokens of a prompt as numbers, for ``/tokenize``."""
    step = BYTES_PER_TOKEN
    return [int.from_bytes(text[at : at + step], "big") for at in range(0, len(text), step)]
