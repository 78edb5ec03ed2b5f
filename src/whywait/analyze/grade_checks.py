"""Constraints on the form of an answer that a program can check: what instruction-following cases are graded by."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

_EDGES = " \t\r\n\"'`*_.,;:!?()[]“”„«»。，！？"


def words(text: str) -> list[str]:
    """Words, without punctuation; a number is one, so is "don't"."""
    return re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text)


def script_shares(text: str) -> dict[str, float]:
    """The share of each script among the letters of a text, by the first word of the letters' names in Unicode (kana
    and Han count as one where both stand: Japanese). Empty without letters."""
    found = Counter(_script(c) for c in text if c.isalpha())
    if found["kana"]:
        found["kana"] += found.pop("han", 0)
    total = sum(found.values())
    return {k: v / total for k, v in found.items() if v}


def _script(c: str) -> str:
    if c.isascii():
        return "latin"
    first = unicodedata.name(c, "?").split()[0].lower()
    return {"cjk": "han", "hiragana": "kana", "katakana": "kana", "katakana-hiragana": "kana"}.get(first, first)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _sentences(text: str) -> int:
    return len([s for s in re.split(r"(?<=[.!?。！？])(?:\s+|(?=[^\s.!?。！？]))", text.strip()) if words(s)])


def _items(text: str) -> list[str]:
    return [i.strip(_EDGES) for i in re.split(r"[,\n;、，،]", text.strip().rstrip(".")) if i.strip(_EDGES)]


def _low(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _all(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def _in_order(text: str, pieces: list[str]) -> bool:
    at = 0
    for piece in pieces:
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


CHECKS: Final[Mapping[str, Callable[[str, Any], bool]]] = {
    "contains": lambda t, v: all(_low(x) in _low(t) for x in _all(v)),
    "contains_any": lambda t, v: any(_low(x) in _low(t) for x in _all(v)),
    "absent": lambda t, v: not any(_low(x) in _low(t) for x in _all(v)),
    "in_order": lambda t, v: _in_order(_low(t), [_low(x) for x in _all(v)]),
    "starts": lambda t, v: _low(t.strip().strip(_EDGES)).startswith(_low(str(v))),
    "ends": lambda t, v: _low(t.strip()).endswith(_low(str(v))),
    "is": lambda t, v: _low(t.strip(_EDGES)) in [_low(x).strip(_EDGES) for x in _all(v)],
    "words": lambda t, v: len(words(t)) == v,
    "words_min": lambda t, v: len(words(t)) >= v,
    "words_max": lambda t, v: len(words(t)) <= v,
    "sentences": lambda t, v: _sentences(t) == v,
    "lines": lambda t, v: len(_lines(t)) == v,
    "items": lambda t, v: len(_items(t)) == v,
    "bullets": lambda t, v: sum(re.match(r"[-*•]\s+\S", line) is not None for line in _lines(t)) == v,
    "numbered": lambda t, v: (
        [m[1] for line in _lines(t) if (m := re.match(r"(\d+)[.)]\s+\S", line))] == [str(i) for i in range(1, v + 1)]
    ),
    "upper": lambda t, v: any(c.isalpha() for c in t) and (t.upper() == t) is bool(v),
    "lower": lambda t, v: any(c.isalpha() for c in t) and (t.lower() == t) is bool(v),
    "times": lambda t, v: all(_low(t).count(_low(k)) == n for k, n in v.items()),
    "full": lambda t, v: re.fullmatch(str(v), t.strip(), re.S) is not None,
    "script": lambda t, v: script_shares(t).get(str(v), 0.0) > 0.5,
}


def failed_check(checks: Mapping[str, Any], text: str) -> str:
    """The name of the first check that does not hold; '' when all do.

    Raises:
        KeyError: there is no such check.
    """
    return next((name for name, value in checks.items() if not CHECKS[name](text, value)), "")
