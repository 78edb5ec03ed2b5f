"""The text of a few answers, counted anew: a check of ``usage``, never its replacement.

The text lives in memory until the point has ended and is then forgotten. Only the requests that are sampled have a tap;
all others cost nothing.

A count made from text need not equal usage: a stop token has no text, reasoning is set off by tokens that a service may
leave out, and a model may spell a text with other tokens than its tokenizer would. The first two are allowed for by
name, the last by the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

MOST, MOST_CHARS = 8, 1 << 16
TOLERANCE, TOLERANCE_TOKENS = 0.02, 2  # beyond both it is a disagreement
MARKS = 4  # tokens around reasoning, at most: begin, end and the line breaks between
_THINKING = ("reasoning_content", "reasoning")


class TextCounter(Protocol):
    def text(self, text: str) -> int | None:
        """Tokens of a piece of an answer, nothing added; None when it cannot be told."""
        ...


class Text:
    """One answer: its text by choice and kind. ``usable`` ends with what has no text of its own (tool calls)."""

    __slots__ = ("_sample", "id", "parts", "usable")

    def __init__(self, sample: Sample, id_: int) -> None:
        self._sample, self.id = sample, id_
        self.parts: dict[tuple[int, str], list[str]] = {}
        self.usable = True

    def tap(self, obj: dict[str, Any]) -> None:
        """One object of the answer with output in it, as :class:`whywait.net.dialect.Answer` hands it over."""
        if not self.usable:
            return
        choices = obj.get("choices")
        if not isinstance(choices, list):
            self._responses(obj)
            return
        for choice in choices:
            index = choice.get("index") if isinstance(choice, dict) else None
            if not isinstance(choice, dict) or not isinstance(index, (int, type(None))):
                self._drop()
                return
            delta = choice.get("delta")
            delta = delta if isinstance(delta, dict) else {"content": choice.get("text")}
            self._delta(index or 0, delta)

    def _delta(self, index: int, delta: dict[str, Any]) -> None:
        if delta.get("tool_calls") or delta.get("function_call"):
            self._drop()
            return
        thought = next((delta[k] for k in _THINKING if delta.get(k)), None)
        for kind, value in (("thinking", thought), ("answer", delta.get("content") or delta.get("refusal"))):
            if isinstance(value, str):
                self._add(index, kind, value)
            elif value:
                self._drop()

    def _responses(self, obj: dict[str, Any]) -> None:
        what, value, at = str(obj.get("type")), obj.get("delta"), obj.get("output_index")
        if not isinstance(value, str) or not ("text" in what or "refusal" in what) or "summary" in what:
            self._drop()
            return
        self._add(at if isinstance(at, int) else 0, "thinking" if "reasoning" in what else "answer", value)

    def _add(self, index: int, kind: str, value: str) -> None:
        if "\ufffd" in value:  # bytes that are no character were lost: what they were cannot be counted
            self._drop()
        if self.usable:
            self.parts.setdefault((index, kind), []).append(value)
            self._sample.chars += len(value)
            if self._sample.chars > MOST_CHARS:
                self._drop()

    def _drop(self) -> None:
        """Of no use: a part of a text cannot be compared."""
        self.usable = False
        self._sample.chars -= sum(len(s) for part in self.parts.values() for s in part)
        self.parts.clear()


class Sample:
    """Which requests of a point keep their text: the first, second, third, fifth, ninth … that is sent, eight at most,
    so that a long point is not judged by its start alone."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self.chars = 0
        self._sent, self._next = 0, 0

    def tap(self, id_: int) -> Callable[[dict[str, Any]], None] | None:
        """The tap of the request about to be sent, None for nearly all of them."""
        at, self._sent = self._sent, self._sent + 1
        if at != self._next or len(self.texts) >= MOST:
            return None
        self._next = max(1, 2 * at)
        self.texts.append(Text(self, id_))
        return self.texts[-1].tap

    def counts(self, counter: TextCounter) -> list[dict[str, int]]:
        """Tokens of each text by ``counter``, as numbers only; the texts are forgotten."""
        out: list[dict[str, int]] = []
        for text in self.texts:
            total = 0
            for part in text.parts.values():
                counted = counter.text("".join(part))
                if counted is None:  # it has stopped telling: no use to wait for it again and again
                    self.texts.clear()
                    return out
                total += counted
            if text.parts:
                out.append({"id": text.id, "counted": total, "choices": len({i for i, _ in text.parts}),
                            "thinking": sum(kind == "thinking" for _, kind in text.parts)})  # fmt: skip
        self.texts.clear()
        return out


def compared(counts: Iterable[Mapping[str, int]], usage_of: Mapping[int, float]) -> dict[str, Any] | None:
    """Recounted against usage (output tokens of ok requests by id). None where no answer can be compared.

    ``off`` is of each the tokens between usage and what the text can account for, 0 inside of that.
    """
    told = []
    for c in counts:
        usage = usage_of.get(c["id"])
        if usage is None or math.isnan(usage):
            continue
        least, most = c["counted"], c["counted"] + c["choices"] + MARKS * c["thinking"]
        told.append((int(usage), least, int(usage) - min(max(int(usage), least), most)))
    if not told:
        return None
    bad = [off for usage, counted, off in told if abs(off) > max(TOLERANCE_TOKENS, TOLERANCE * usage)]
    usage, counted = (sum(t[i] for t in told) for i in (0, 1))
    return {"answers": len(told), "usage_tokens": usage, "recounted_tokens": counted, "disagree": len(bad),
            "worst_off": max((o for _, _, o in told), key=abs)}  # fmt: skip


def doubt_of(point: int, found: Mapping[str, Any] | None) -> dict[str, str] | None:
    """The doubt that a disagreement leaves, with both numbers."""
    if not found or not found["disagree"]:
        return None
    return {
        "what": "usage and the text of the answers disagree on tokens",
        "why": f"point {point}: usage says {found['usage_tokens']} tokens, the tokenizer counts "
        f"{found['recounted_tokens']} in the text of the same {found['answers']} answers; {found['disagree']} of them "
        f"are off by more than 2 % and 2 tokens (worst: {found['worst_off']:+d})",
        "next": "figures use usage as it is; does the service count other tokens than it sends, or send text in part?",
    }
