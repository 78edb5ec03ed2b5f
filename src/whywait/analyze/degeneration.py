"""What goes wrong with answers besides being wrong: they loop, never end their thoughts, stop being JSON, change their
language, come out empty, or grow. Per answer, pure.

Low precision often shows here before it shows in an accuracy, and in long answers before short ones.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from whywait.analyze.grade import json_in
from whywait.analyze.grade_checks import script_shares
from whywait.analyze.quality import Paired, Rule, paired
from whywait.core.table import Array
from whywait.core.tasks import Answered, Case

PERIODS = 64  # words: longer repeats are not looked for
MOST_WORDS = 20_000  # of one answer, from its end: it is there that one degenerates
LEAST_WORDS, LEAST_TIMES, LEAST_SHARE = 12, 3, 0.3  # of a loop: so many words, said so often, of so much of the answer
LEAST_PAIRS = 6  # below, no test of pairs reaches 5 %
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


def switched(case: Case, answered: Answered) -> float | None:
    """1 where most letters of the answer are of another script than was asked for (the grader's ``language``, else
    that of the last message), 0 where not, None where there are too few letters. A change between languages of one
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
        return None
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


def signs(case: Case, answered: Answered) -> dict[str, float | None]:
    """Every sign and figure of an answer; None where the request failed or the sign cannot be told."""
    out: dict[str, float | None] = dict.fromkeys((*SIGNS, *FIGURES))
    if not answered.ok or not answered.generated:
        return out
    text, thinking = answered.text, answered.thinking
    whole = f"{thinking}\n{text}" if thinking else text
    out.update(
        loops=float(loops(whole)),
        unfinished=float(unfinished(answered)),
        cut=float(answered.cut),
        empty=float(not text.strip() and not answered.unclosed),
        switched=switched(case, answered),
        broken=float("\ufffd" in whole),
        length=math.log(answered.output_tokens) if answered.output_tokens else None,
        repeated=repeated_share(whole),
        compression=compression(whole),
    )
    if case.grader.kind in ("json", "json_schema"):
        out["invalid_json"] = float(not json_in(text)[1])
    return out


def compared(rows: Sequence[Mapping[str, Any]], seed: int = 1) -> list[Paired]:
    """Every sign and figure that both arms tell, paired over cases; not yet adjusted.

    A sign in which the arms never differ, or that too few answers tell to find anything, asks nothing: it takes no
    share of the error.

    Args:
        rows: a case each: ``group``, and ``a`` and ``b`` with the ``signs`` of their answers.
    """
    groups = [str(r["group"]) for r in rows]
    out = []
    for name, title in {**SIGNS, **FIGURES}.items():
        a, b = (np.array([_number(r[k]["signs"].get(name)) for r in rows], dtype=np.float64) for k in ("a", "b"))
        found = paired(title, a, b, groups, rule=Rule(math.nan, 0.95, name in SIGNS), seed=seed)
        if found.n:
            silent = found.n < LEAST_PAIRS or not (found.worse or found.better)
            out.append(replace(found, p=None) if silent else found)
    return out


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
