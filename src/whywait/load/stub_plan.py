"""What one request to the stub asks for: its timetable, its fault, and the bytes of every event, prepared ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import orjson

from whywait.net.reply import DONE, envelope, sse
from whywait.units import NS_PER_MS

STAMP = 10**18  # any number of as many digits as a nanosecond of CLOCK_REALTIME has until the year 2286
CUTS = ("error_event", "error_hold", "truncate", "reset")  # happen after k tokens, by default half of them
FAULTS = (*CUTS, "no_done", "no_usage", "usage_null_choices", "empty", "hang", "html", "wrong_model", "coalesce",
          "split", "close_delimited", "hold", "miscount")  # fmt: skip

PROMPTS = {"chat": "messages", "completions": "prompt", "responses": "input"}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Plan:
    """The timetable. Every field is a flag of the server, and a request may override it in its ``"stub"`` object."""

    ttft_ms: float = 50.0  # accepted (or given a slot) to the first content chunk
    gap_ms: float = 20.0  # between content chunks
    tokens: int = 64
    tokens_per_chunk: int = 1
    first_chunk_tokens: int = 0  # 0: as tokens_per_chunk
    reasoning_tokens: int = 0  # the first so many of the tokens
    reasoning_key: str = "reasoning_content"  # llama.cpp's; vLLM says "reasoning"
    prompt_tokens: int = 0  # 0: count the words
    cached_tokens: int = 0
    prefill_ms_per_token: float = 0.0  # added to ttft_ms for each prompt token not cached
    gap_ms_per_token: float = 0.0  # added to gap_ms for each prompt token: reads of the KV cache
    jitter_ms: float = 0.0  # each chunk late by up to this, around a grid that stays put
    tail_ms: float = 0.0  # from the finish chunk to usage and [DONE]
    spread: bool = False  # put each stream on its own phase of the gap, evenly, so that no two are due together
    shared_step: bool = False  # put all streams on one phase, as an engine's common step does
    timings: bool = False  # llama.cpp's object in the last chunk
    fault: str = ""  # name or name:number

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if kind is not str and not 0 <= value <= 1e9:  # also refuses not-a-number
                raise ValueError(f"stub: {name} must be between 0 and 1e9, not {value}")

    def overridden(self, asked: Mapping[str, Any]) -> Plan:
        if unknown := set(asked) - set(KINDS):
            raise ValueError(f"stub: unknown field {sorted(unknown)[0]!r}")
        return replace(self, **{name: KINDS[name](value) for name, value in asked.items()}) if asked else self

    def layout(self, tokens: int) -> Iterator[tuple[int, int, bool]]:
        """Runs of like chunks: how many, tokens in each, whether they are reasoning."""
        step = max(1, self.tokens_per_chunk)
        lead = self.first_chunk_tokens or step
        thinking = min(self.reasoning_tokens, tokens)
        for left, reasoning in ((thinking, True), (tokens - thinking, False)):
            head = min(lead, left)
            if head:
                yield 1, head, reasoning
                lead = step  # only the stream's first chunk is special
            whole, rest = divmod(left - head, step)
            if whole:
                yield whole, step, reasoning
            if rest:
                yield 1, rest, reasoning


KINDS: dict[str, type] = {f.name: type(f.default) for f in fields(Plan)}


@dataclass(frozen=True)
class Options:
    """The service as a whole; ``plan`` is what a request gets unless it asks otherwise."""

    plan: Plan = field(default_factory=Plan)
    host: str = "127.0.0.1"
    port: int = 0
    slots: int = 0  # requests answered at once, the others wait in order; 0: no limit
    model: str = "stub"
    strict_model: bool = False  # refuse other model names, as vLLM does; llama.cpp does not
    seed: int = 0
    prefix_cache: int = 0  # words in a block of its prefix cache; 0: it has none
    fault_every: int = 1  # the plan's fault befalls each n-th request
    api_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""


@dataclass(frozen=True)
class Ask:
    """One generation request, understood."""

    plan: Plan
    dialect: str
    model: str
    stream: bool
    usage: bool
    usage_each: bool
    token_ids: bool
    prompt_tokens: int
    tokens: int
    finish: str
    fault: str
    number: int | None  # the fault's own number
    text: str = ""  # the prompt, where it is one text

    @property
    def chat(self) -> bool:
        return self.dialect == "chat"

    @property
    def ttft_ns(self) -> int:
        fresh = max(0, self.prompt_tokens - self.plan.cached_tokens)
        return int((self.plan.ttft_ms + self.plan.prefill_ms_per_token * fresh) * NS_PER_MS)

    @property
    def gap_ns(self) -> int:
        return int((self.plan.gap_ms + self.plan.gap_ms_per_token * self.prompt_tokens) * NS_PER_MS)


def words(prompt: Any) -> int:
    """Tokens of a prompt, or of a chat's messages: ours count words, and one for the role of each message."""
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, Mapping):
        return words(prompt.get("text") or prompt.get("content") or "") + ("role" in prompt)
    if isinstance(prompt, list):
        return sum(1 if isinstance(item, int) else words(item) for item in prompt)
    return 0


def parse_fault(text: str) -> tuple[str, int | None]:
    name, _, number = text.partition(":")
    if name and name not in FAULTS and not (name.startswith("http_") and name[5:].isdigit() and len(name) == 8):
        raise ValueError(f"stub: unknown fault {name!r}; known: {', '.join(FAULTS)}, http_NNN")
    return name, int(number) if number else None


def read_ask(raw: bytes, dialect: str, base: Plan, model: str) -> Ask:
    """The request body, or ValueError with what is wrong with it."""
    body = orjson.loads(raw)
    prompt = PROMPTS[dialect]
    if not isinstance(body, dict) or prompt not in body:
        raise ValueError(f"body.{prompt}: field required")
    own = body.get("stub") or {}
    options = body.get("stream_options") or {}
    try:
        plan = base.overridden(own)
        limit = next((body[k] for k in LIMITS if body.get(k)), None)
        limit = None if limit is None else int(limit)
        usage, usage_each = (bool(options.get(key)) for key in ("include_usage", "continuous_usage_stats"))
    except (TypeError, AttributeError) as exc:
        raise ValueError(f"body: {exc}") from None
    # An engine that ignores end-of-sequence has no length of its own; a length asked of the stub by name stays.
    tokens = limit if limit and body.get("ignore_eos") and "tokens" not in own else plan.tokens
    fault, number = parse_fault(plan.fault)
    finish = "stop"
    if limit is not None and tokens >= limit:
        tokens, finish = limit, "length"
    if fault == "empty":
        tokens = 0
    elif fault in CUTS or (fault == "hang" and number is not None):
        tokens = min(tokens, tokens // 2 if number is None else number)
    return Ask(
        plan=plan,
        dialect=dialect,
        model=str(body.get("model") or model),
        stream=bool(body.get("stream")),
        usage=usage and fault != "no_usage",
        usage_each=usage_each,
        token_ids=bool(body.get("return_token_ids")),
        prompt_tokens=plan.prompt_tokens or words(body[prompt]),
        tokens=tokens,
        finish=finish,
        fault=fault,
        number=number,
        text=_text(body[prompt]),
    )


def _text(prompt: Any) -> str:
    if isinstance(prompt, list):
        return " ".join(str(m.get("content", "")) for m in prompt if isinstance(m, Mapping))
    return str(prompt)


class Writer:
    """The events of one answer, as bytes. Content events are templates with three numbers left open: send stamp, due
    time, tokens so far. All have a fixed width, so the length of the HTTP chunk around them is known beforehand."""

    def __init__(self, ask: Ask, serial: int, created: int) -> None:
        self.ask, self.serial = ask, serial
        self._base = envelope(str(serial), ask.chat, ask.stream, created, ask.model)

    def _choice(self, content: Mapping[str, Any] | str, finish: str | None = None) -> dict[str, Any]:
        inner: dict[str, Any] = {"delta": content} if self.ask.chat else {"text": content, "logprobs": None}
        return {"index": 0, **inner, "finish_reason": finish}

    def content(self, tokens: int, reasoning: bool, chunked: bool) -> bytes:
        """The template of a content event carrying so many tokens."""
        ask, text = self.ask, " tok" * tokens
        choice = self._choice({ask.plan.reasoning_key if reasoning else "content": text} if ask.chat else text)
        if ask.token_ids:
            choice["token_ids"] = [7] * tokens
        event = orjson.dumps({**self._base, "choices": [choice]})[:-1].replace(b"%", b"%%")
        count = b'"usage":{"prompt_tokens":%d,"completion_tokens":%%9d}' % ask.prompt_tokens
        event = b'data: %b,"stub_ns":%%d,"due_ns":%%d,%b}\n\n' % (event, count if ask.usage_each else b'"stub_n":%9d')
        return b"%x\r\n%b\r\n" % (len(event % (STAMP, STAMP, 0)), event) if chunked else event

    def role(self, accepted_ns: int) -> bytes:
        """The opening event; completions have none."""
        if not self.ask.chat:
            return b""
        choice = self._choice({"role": "assistant", "content": ""})
        return sse({**self._base, "choices": [choice], "accepted_ns": accepted_ns})

    def finish(self) -> bytes:
        last = {**self._base, "choices": [self._choice({} if self.ask.chat else "", self.ask.finish)]}
        if self.ask.plan.timings and not self.ask.usage:
            last["timings"] = self.timings()
        return sse(last)

    def trailer(self) -> bytes:
        """What follows the finish event: usage and [DONE], as far as they were asked and no fault takes them."""
        out = b""
        if self.ask.usage:
            null = self.ask.fault == "usage_null_choices"
            last = {**self._base, "choices": None if null else [], "usage": self.usage()}
            out = sse({**last, "timings": self.timings()} if self.ask.plan.timings else last)
        return out if self.ask.fault == "no_done" else out + DONE

    def usage(self) -> dict[str, Any]:
        ask, plan = self.ask, self.ask.plan
        tokens = ask.tokens + ((ask.number or 1) if ask.fault == "miscount" else 0)
        return {
            "prompt_tokens": ask.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": ask.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": min(plan.cached_tokens, ask.prompt_tokens)},
            "completion_tokens_details": {"reasoning_tokens": min(plan.reasoning_tokens, ask.tokens)},
        }

    def timings(self) -> dict[str, Any]:
        """By the timetable, not by the clock: the stub's own lateness is in the stamps."""
        ask, cached = self.ask, min(self.ask.plan.cached_tokens, self.ask.prompt_tokens)
        chunks = sum(count for count, _, _ in ask.plan.layout(ask.tokens))
        return {
            "cache_n": cached,
            "prompt_n": ask.prompt_tokens - cached,
            "prompt_ms": ask.ttft_ns / NS_PER_MS,
            "predicted_n": ask.tokens,
            "predicted_ms": max(0, chunks - 1) * ask.gap_ns / NS_PER_MS,
        }

    def whole(self, stub_ns: int, due_ns: int) -> bytes:
        """The answer to a request that did not ask for a stream."""
        ask = self.ask
        thinking = min(ask.plan.reasoning_tokens, ask.tokens)
        text = " tok" * (ask.tokens - thinking if ask.chat else ask.tokens)
        message = {"role": "assistant", "content": text}
        if thinking:
            message[ask.plan.reasoning_key] = " tok" * thinking
        choice = self._choice("" if ask.chat else text, ask.finish)
        if ask.chat:
            del choice["delta"]
            choice["message"] = message
        out = {**self._base, "choices": [choice], "stub_ns": stub_ns, "due_ns": due_ns}
        if ask.fault != "no_usage":
            out["usage"] = self.usage()
        if ask.plan.timings:
            out["timings"] = self.timings()
        return orjson.dumps(out)
