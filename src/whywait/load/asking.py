"""Cases asked of a service, their answers whole: the measuring client, a bounded number at once, temperature 0.

Both arms of a comparison get the same bytes, so nothing is salted; an answer from a prefix cache is as good as any.
Whatever goes wrong with a request is its outcome, not an error: it stays in every denominator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.core.tasks import Answered, Case
from whywait.load.calibrate import body_of
from whywait.load.preflight import Target
from whywait.load.turns import Message
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.units import NS_PER_S

AT_ONCE = 4
GIVE_UP = 20  # failures in a row after which nothing more is sent: the service is gone, and it is not to be hammered
MOST_CHARS = 1 << 20  # of one answer; what is longer is cut, and has long degenerated
_OPEN, _CLOSE = (re.compile(rf"<{end}(?:think|thinking|thought|reasoning)>", re.I) for end in ("", "/"))
_THINKING = ("reasoning_content", "reasoning")


def ask_all(
    target: Target,
    cases: Sequence[Case],
    at_once: int = AT_ONCE,
    timeout_s: float = 300.0,
    say: Callable[[int, int], None] | None = None,
) -> list[Answered]:
    """An answer for each case, in the order of ``cases``. ``say`` is told how many of how many are done.

    After ``GIVE_UP`` failures in a row the rest is ``never_sent``.
    """
    sink = _Sink()
    clock = Clock()
    client = Client(target.endpoint, sink, clock)
    waiting, texts = list(range(len(cases)))[::-1], [_Text() for _ in cases]
    done = 0
    try:
        while waiting or client.in_flight:
            if client.failed_in_a_row >= GIVE_UP:
                waiting.clear()
            while waiting and client.in_flight < max(1, at_once):
                i = waiting.pop()
                body = _body(target, cases[i])
                client.send(Call(i, i, clock.now(), body, True, round(timeout_s * NS_PER_S), texts[i].tap))
            ended = len(client.poll(100_000_000))
            done += ended
            if ended and say is not None:
                say(done, len(cases))
    finally:
        client.close()
    return [_answer(case, texts[i], sink.facts.get(i)) for i, case in enumerate(cases)]


def split_thinking(text: str) -> tuple[str, str, bool]:
    """(thinking, answer, unclosed) of a text that carries its thoughts in tags. A closing tag without an opening one
    ends a thought that the chat template had opened."""
    thoughts, answer, at = [], [], 0
    first_close, first_open = _CLOSE.search(text), _OPEN.search(text)
    if first_close and (first_open is None or first_close.start() < first_open.start()):
        thoughts.append(text[: first_close.start()])
        at = first_close.end()
    while (opened := _OPEN.search(text, at)) is not None:
        answer.append(text[at : opened.start()])
        closed = _CLOSE.search(text, opened.end())
        thoughts.append(text[opened.end() : closed.start() if closed else len(text)])
        if closed is None:
            return "\n".join(thoughts).strip(), "".join(answer).strip(), True
        at = closed.end()
    answer.append(text[at:])
    return "\n".join(thoughts).strip(), "".join(answer).strip(), False


def _body(target: Target, case: Case) -> bytes:
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    messages = [Message(role, content) for role, content in case.messages]
    return body_of(target, messages, case.max_tokens, {**options, **target.extra})


class _Text:
    """The text of one answer as it comes: of its first choice, thoughts apart where the service sets them apart."""

    def __init__(self) -> None:
        self.answer: list[str] = []
        self.thinking: list[str] = []
        self._chars = 0

    def tap(self, obj: dict[str, Any]) -> None:
        for kind, piece in _pieces(obj):
            if self._chars < MOST_CHARS:
                (self.thinking if kind == "thinking" else self.answer).append(piece)
                self._chars += len(piece)


def _pieces(obj: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, text) of an object of any dialect; what is no text is left out."""
    choices = obj.get("choices")
    if not isinstance(choices, list):  # the Responses API
        what, delta = str(obj.get("type")), obj.get("delta")
        if isinstance(delta, str) and ("text" in what or "refusal" in what):
            yield ("thinking" if "reasoning" in what else "answer"), delta
        return
    first = next((c for c in choices if isinstance(c, dict) and c.get("index") in (0, None)), {})
    delta = first.get("delta")
    delta = delta if isinstance(delta, dict) else {"content": first.get("text")}
    thought = next((delta[k] for k in _THINKING if delta.get(k)), None)
    for kind, value in (("thinking", thought), ("answer", delta.get("content") or delta.get("refusal"))):
        if isinstance(value, str) and value:
            yield kind, value
        elif isinstance(value, list):  # content in parts (Mistral's)
            yield from _parts(value, kind)


def _parts(parts: Sequence[Any], kind: str) -> Iterator[tuple[str, str]]:
    for part in parts:
        if not isinstance(part, dict):
            continue
        inner = part.get("thinking")
        if isinstance(inner, list):
            yield from _parts(inner, "thinking")
        elif isinstance(inner, str):
            yield "thinking", inner
        elif isinstance(part.get("text"), str):
            yield kind, part["text"]


def _answer(case: Case, text: _Text, facts: Mapping[str, Any] | None) -> Answered:
    if facts is None or "outcome" not in facts:
        return Answered(case.id, detail="nothing more was sent after too many failures")
    thought, said, unclosed = split_thinking("".join(text.answer))
    apart = "".join(text.thinking).strip()
    # Thoughts set apart by the service, cut off before a word of the answer: it never came out of them.
    unclosed = unclosed or bool(apart and not said and facts.get("finish_reason") == "length")
    return Answered(
        case.id,
        said,
        "\n".join(t for t in (apart, thought) if t),
        str(facts["outcome"]),
        str(facts.get("detail") or ""),
        facts.get("finish_reason"),
        facts.get("output_tokens"),
        facts.get("reasoning_tokens"),
        facts["end_ns"] - facts["sent_ns"],
        unclosed,
    )


class _Sink:
    """What the client tells of each request, by its number."""

    def __init__(self) -> None:
        self.facts: dict[int, dict[str, Any]] = {}

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        facts = self.facts.setdefault(e.id, {})
        if isinstance(e, Sent):
            facts["sent_ns"] = e.t_ns
        elif not isinstance(e, Accepted):
            facts.update(e.facts, end_ns=e.t_ns)

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:
        pass
