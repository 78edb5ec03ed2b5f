"""The bytes of a simulated answer, in the shape of vLLM's: one event per step that gave the request tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from whywait.net.reply import DONE, envelope, framed, sse
from whywait.sim.front_ask import WORD, WORD_ID, Ask

FINGERPRINT = "whywait-sim"


class Stages(NamedTuple):
    """Where a request's time went, milliseconds by the timetable of the simulation (at the pace it is served); the
    object that vLLM adds to answers with ``--enable-per-request-metrics``."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float


class Answer:
    """The events of one answer. A content event costs no JSON: its bytes are kept by how many tokens it carries."""

    def __init__(self, ask: Ask, serial: int, created: int, chunked: bool) -> None:
        self.ask, self._chunked = ask, chunked
        self._base = envelope(f"sim-{serial}", ask.chat, ask.stream, created, ask.model)
        self._frames: dict[int, bytes] = {}

    def opening(self) -> bytes:
        """The event with the role, which comes with the first token; completions have none."""
        ask = self.ask
        if not ask.chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        event = {**self._base, "choices": [choice]}
        if ask.usage_each:
            event["usage"] = self.usage(0, None)
        return framed(sse(event)) if self._chunked else sse(event)

    def content(self, tokens: int, so_far: int) -> bytes:
        """The event of ``tokens`` tokens (not the last one), ready to be sent."""
        frame = self._frames.get(tokens)
        if frame is None:
            frame = self._frames[tokens] = self._template(tokens)
        return frame % (self.ask.prompt_tokens + so_far, so_far) if self.ask.usage_each else frame

    def _template(self, tokens: int) -> bytes:
        event = orjson.dumps({**self._base, "choices": [self._choice(tokens, None)]})
        if self.ask.usage_each:
            # Fixed widths, so that the length of the HTTP chunk around it is known beforehand.
            usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%%9d,"completion_tokens":%%9d}}'
            event = event[:-1].replace(b"%", b"%%") + b"," + usage % self.ask.prompt_tokens
        out = b"data: %b\n\n" % event
        size = len(out % (0, 0)) if self.ask.usage_each else len(out)
        return b"%x\r\n%b\r\n" % (size, out) if self._chunked else out

    def _choice(self, tokens: int, finish: str | None) -> dict[str, Any]:
        text = WORD * tokens
        choice: dict[str, Any] = {"index": 0, **({"delta": {"content": text}} if self.ask.chat else {"text": text})}
        choice |= {"logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = None
        if self.ask.token_ids:
            choice["token_ids"] = [WORD_ID] * tokens
        return choice

    def closing(self, tokens: int, so_far: int, finish: str, cached: int, stages: Stages) -> bytes:
        """The last tokens with the finish reason, then usage where it was asked for, and the end; not framed."""
        last = {**self._base, "choices": [self._choice(tokens, finish)]}
        if self.ask.usage_each:
            last["usage"] = self.usage(so_far, None)
        out = sse(last)
        if self.ask.usage:
            out += sse({**self._base, "choices": [], "usage": self.usage(so_far, cached), "metrics": stages._asdict(),
                        "system_fingerprint": FINGERPRINT})  # fmt: skip
        return out + DONE

    def usage(self, tokens: int, cached: int | None) -> dict[str, Any]:
        prompt = self.ask.prompt_tokens
        said: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
        return said if cached is None else {**said, "prompt_tokens_details": {"cached_tokens": cached}}

    def whole(self, tokens: int, finish: str, cached: int, stages: Stages) -> bytes:
        """The answer to a request that did not ask for a stream."""
        choice = self._choice(tokens, finish)
        if self.ask.chat:
            choice["message"] = {"role": "assistant", **choice.pop("delta")}
        said: Mapping[str, Any] = {**self._base, "choices": [choice], "usage": self.usage(tokens, cached),
                                   "system_fingerprint": FINGERPRINT, "metrics": stages._asdict()}  # fmt: skip
        return orjson.dumps(said)
