"""What goes wrong with answers besides being wrong: they loop, never end their thoughts, stop being JSON, change their
language, come out empty, or grow. Per answer, pure.

Low precision often shows here before it shows in an accuracy, and in long answers before short ones.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from whywait.analyze.grade import json_in
from whywait.analyze.grade_checks import script_shares
from whywait.core.table import Array
from whywait.core.tasks import Answered, Case

PERIODS = 64  # words: longer repeats are not looked for
MOST_WORDS = 20_000  # of one answer, from its end: it is there that one degenerates
LEAST_WORDS, LEAST_TIMES, LEAST_SHARE = 12, 3, 0.3  # of a loop: so many words, said so often, of so much of the answer
COMPRESSED = 200  # characters from which compression says something
LETTERS = 8  # from which the script of an answer is told

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[^\w\s]")
#: Script of a language (ISO 639-1) that is not written in Latin letters, as ``script_shares`` names it.
SCRIPTS: Final = {
    "ar": "arabic", "fa": "arabic", "ur": "arabic", "ru": "cyrillic", "uk": "cyrillic", "bg": "cyrillic",
    "el": "greek", "he": "hebrew", "hi": "devanagari", "th": "thai", "ko": "hangul", "ja": "kana", "zh": "han",
}  # fmt: skip


def loop_share(text: str) -> float:
    """The share of an answer's words that lie in its longest run of one phrase said over and over (three times or
    more, up to ``PERIODS`` words long); 0 without one of ``LEAST_WORDS`` words."""
    words = _WORD.findall(text.casefold())[-MOST_WORDS:]
    n = len(words)
    if n < LEAST_WORDS:
        return 0.0
    _, ids = np.unique(np.array(words, dtype=object).astype(str), return_inverse=True)
    best = 0
    for period in range(1, min(PERIODS, n // LEAST_TIMES) + 1):
        run = _longest(ids[period:] == ids[:-period])
        if run >= (LEAST_TIMES - 1) * period and run + period >= LEAST_WORDS:
            best = max(best, run + period)
    return best / n


def _longest(same: Array) -> int:
    """The longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0


def loops(text: str) -> bool:
    return loop_share(text) >= LEAST_SHARE


def repeated_share(text: str, n: int = 4) -> float | None:
    """The share of a text's n-grams of words that were there before; None for a text of fewer than ``LEAST_WORDS``."""
    words = _WORD.findall(text.casefold())[-MOST_WORDS:]
    if len(words) < LEAST_WORDS:
        return None
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def compression(text: str) -> float | None:
    """Compressed size over size (zlib, UTF-8): a text in plain language is at about a half, a loop near zero. None for
    a short one, which says nothing."""
    raw = text.encode("utf-8", "replace")
    return len(zlib.compress(raw, 6)) / len(raw) if len(text) >= COMPRESSED else None


def unfinished(answered: Answered) -> bool:
    """It was still thinking when it ended: an open tag, or cut off with thoughts and not a word of an answer."""
    return answered.unclosed or bool(answered.cut and answered.thinking and not answered.text.strip())


def switched(case: Case, answered: Answered) -> float:
    """1 where most letters of the answer are of another script than was asked for (the grader's ``language``, else
    that of the last message), 0 where not, NaN where there are too few letters. A change between languages of one
    script is not seen."""
    found = script_shares(answered.text)
    letters = sum(c.isalpha() for c in answered.text)
    language = case.grader.language
    if language:
        wanted = SCRIPTS.get(language, "latin")
    else:
        shares = script_shares(case.messages[-1][1])
        wanted = max(shares, key=lambda k: shares[k], default="")
    if letters < LETTERS or not wanted:
        return float("nan")
    if wanted == "kana":
        return float(found.get("kana", 0.0) + found.get("han", 0.0) < 0.5)
    return float(found.get(wanted, 0.0) < 0.5)


#: What is told of each answer, with its title. All are shares (0 or 1 in each case), except where FIGURES says.
SIGNS: Final = {
    "loops": "answers that loop",
    "unfinished": "thoughts that never end",
    "cut": "answers cut off by the length limit",
    "empty": "empty answers",
    "invalid_json": "answers that should be JSON and are not",
    "switched": "answers in another script",
    "broken": "answers with broken characters",
}
FIGURES: Final = {
    "length": "length of the answers, ln of tokens",
    "repeated": "repeated 4-grams, share",
    "compression": "compressed size over size",
}


def signs(cases: Sequence[Case], answers: Sequence[Answered]) -> dict[str, Array]:
    """Every sign and figure of every answer, (n,) each; NaN where a request failed or the sign cannot be told."""
    out = {name: np.full(len(cases), np.nan) for name in (*SIGNS, *FIGURES)}
    for i, (case, got) in enumerate(zip(cases, answers, strict=True)):
        if not got.ok:
            continue
        whole = f"{got.thinking}\n{got.text}" if got.thinking else got.text
        row: dict[str, float | None] = {
            "loops": loops(whole),
            "unfinished": unfinished(got),
            "cut": got.cut,
            "empty": not got.text.strip() and not got.unclosed,
            "invalid_json": not json_in(got.text)[1] if case.grader.kind in ("json", "json_schema") else None,
            "switched": switched(case, got),
            "broken": "\ufffd" in whole,
            "length": float(np.log(got.output_tokens)) if got.output_tokens else None,
            "repeated": repeated_share(whole),
            "compression": compression(whole),
        }
        for name, value in row.items():
            if value is not None:
                out[name][i] = float(value)
    return out
