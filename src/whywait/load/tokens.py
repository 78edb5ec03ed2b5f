"""How many tokens a text has: by the service's own ``/tokenize``, or by a tokenizer file the user names.

The file needs the optional ``tokenizers`` package. Neither replaces what ``usage`` says; they make prompts of an exact
length, and check the counts of answers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from whywait.errors import MissingExtra, UsageError, WhywaitError
from whywait.load.preflight import Target
from whywait.load.turns import Message
from whywait.net.endpoint import post

FILE = "tokenizer.json"
TOKENIZE = ("vllm", "llama.cpp")  # engines whose /tokenize is known


class Counter(Protocol):
    """Counts as usage does. ``calls`` are requests it sent to the service, which is ``far`` when on another machine."""

    calls: int

    @property
    def far(self) -> bool: ...

    def count(self, messages: Sequence[Message]) -> int | None:
        """Tokens of the prompt as usage will count them; None when that is not known."""
        ...


@dataclass
class ServiceCounter:
    """Asks the service itself: vLLM's and llama.cpp's ``/tokenize``.

    ``offset`` is what usage counts beyond it, found by one real request.
    """

    target: Target
    offset: int = 0
    calls: int = 0

    def count(self, messages: Sequence[Message]) -> int | None:
        chat = self.target.endpoint.dialect != "completions"
        plain = "\n\n".join(m.content for m in messages)
        if self._llama:
            if chat:
                answer = self._ask("/apply-template", {"messages": [m._asdict() for m in messages]})
                plain = str(answer.get("prompt", ""))
                if not plain:
                    return None
            return self._plus(self._llama_count(plain, True))
        asked: dict[str, Any] = {"messages": [m._asdict() for m in messages]} if chat else {"prompt": plain}
        return self._plus(self._vllm_count(asked))

    def text(self, text: str) -> int | None:
        """Tokens of a piece of an answer: nothing is put before or after it. None when the service does not say."""
        if self._llama:
            return self._llama_count(text, False)
        return self._vllm_count({"prompt": text, "add_special_tokens": False})

    @property
    def far(self) -> bool:
        return not self.target.endpoint.loopback

    @property
    def _llama(self) -> bool:
        return self.target.engine is not None and self.target.engine.name == "llama.cpp"

    def _plus(self, count: int | None) -> int | None:
        return None if count is None else count + self.offset

    def _llama_count(self, text: str, add_special: bool) -> int | None:
        asked = {"content": text, "add_special": add_special, "parse_special": True}
        tokens = self._ask("/tokenize", asked).get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    def _vllm_count(self, asked: dict[str, Any]) -> int | None:
        count = self._ask("/tokenize", {"model": self.target.model, **asked}).get("count")
        return count if isinstance(count, int) and not isinstance(count, bool) else None

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        try:
            status, _, answer = post(self.target.endpoint, self.target.endpoint.root + path, orjson.dumps(body), 10.0)
            found = orjson.loads(answer) if status == 200 else {}
        except (WhywaitError, orjson.JSONDecodeError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass
class FileCounter:
    """Counts with a tokenizer file. What the service's template adds is learnt from its usage (``load/calibrate.py``):
    ``offset`` to a single message, ``system`` for one before it, ``turn`` per earlier question and answer (None: not
    known, so histories are not counted)."""

    path: str
    plain: bool = False  # messages are sent as one text
    offset: int = 0
    system: int | None = None
    turn: int | None = None
    calls: int = 0
    far: bool = False

    def count(self, messages: Sequence[Message]) -> int | None:
        if self.plain:
            return self.text("\n\n".join(m.content for m in messages)) + self.offset
        total = sum(self.text(m.content) for m in messages) + self.offset
        before = messages[0].role == "system"
        turns = (len(messages) - before - 1) // 2
        if (before and self.system is None) or (turns and self.turn is None):
            return None
        return total + (self.system or 0) * before + (self.turn or 0) * turns

    def text(self, text: str) -> int:
        return len(load(self.path).encode(text, add_special_tokens=False).ids)


def text_counter(target: Target) -> ServiceCounter | FileCounter | None:
    """What counts the tokens of answers: the service where it does, else the file that was named."""
    if target.engine is not None and target.engine.name in TOKENIZE:
        found = ServiceCounter(target)
        if found.text("one two three") is not None:
            return found
    return FileCounter(target.tokenizer) if target.tokenizer else None


@functools.lru_cache(maxsize=2)
def load(path: str) -> Any:
    """The tokenizer of a ``tokenizer.json`` or of the folder that holds it.

    Raises:
        UsageError: the package is not installed, or there is no such file, or it is none.
    """
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("--tokenizer", "tokenizer") from None
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UsageError(f"--tokenizer: there is no file {file}", f"give a {FILE} or the folder that holds it")
    try:
        found = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the package raises bare Exceptions
        raise UsageError(f"--tokenizer: {file} is not a tokenizer: {exc}", f"give a {FILE}") from None
    found.no_truncation()
    found.no_padding()
    return found
