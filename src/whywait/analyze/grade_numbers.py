"""Numbers in a text, as they are written, and whether an answer gives the right one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from whywait.analyze.grade_final import final_answer, plain, taken_back
from whywait.core.tasks import Grade, Grader

#: Languages that write 1.234,5 for one thousand two hundred and thirty-four and a half.
COMMA: Final = frozenset(
    ("de", "es", "fr", "it", "pt", "nl", "pl", "ru", "uk", "tr", "sv", "da", "nb", "fi", "cs", "id", "vi")
)
#: Words behind a number. What a billion is depends on the language: elsewhere than in English none is read.
SCALES: Final[Mapping[str, float]] = {
    "thousand": 1e3, "million": 1e6, "millions": 1e6, "millionen": 1e6, "millones": 1e6, "milliard": 1e9,
    "milliards": 1e9, "milliarde": 1e9, "milliarden": 1e9, "billion": 1e9, "trillion": 1e12,
}  # fmt: skip
_ENGLISH_ONLY: Final = ("billion", "trillion")

_NUMBER = re.compile(
    r"(?<![\w.,^])(?<!\^\{)(?P<sign>[-+]\s?)?(?:[$€£¥₹]\s?)?(?P<sign2>-)?"
    r"(?:(?P<whole>\d{1,9})\s{1,3}(?=\d{1,9}\s?/\s?\d))?"
    r"(?P<digits>\d{1,3}(?: \d{3})+(?![\d.,]*\d)|\d[\d.,]*\d|\d|\.\d+)"
    r"(?:(?:\^|\*\*(?=[-\d{]))\s?\{?(?P<power>[-+]?\d{1,3})\}?)?"
    r"(?:(?:e|\s?[x×*·]\s?10\s?(?:\^|\*\*)\s?\{?)(?P<exp>[-+]?\d{1,3})\}?)?(?:\s?/\s?(?P<under>\d[\d,]*))?"
    rf"(?:\s(?P<scale>{'|'.join(sorted(SCALES, key=len, reverse=True))})\b)?",
    re.I,
)
_MINUS = re.compile(r"(?<![\d)])(?<![\d)] )\b(?:minus|negative|moins|menos|meno)\s{1,3}(?=[$€£]?\d)", re.I)
_BETWEEN = re.compile(r"\W{0,3}\s(?:or|and|to|oder|und|bis|ou|et|o|u|y)\s\W{0,3}", re.I)


def numbers(text: str, commas: bool = False) -> list[tuple[float, ...]]:
    """The numbers of a text (see :func:`plain`), in order, each as its possible readings: 1.234 is also a thousand and
    more where a language writes it so (``commas``)."""
    return [r for _, _, r in _spans(text, commas)]


def _spans(text: str, commas: bool) -> list[tuple[int, int, tuple[float, ...]]]:
    return [(m.start(), m.end(), r) for m in _NUMBER.finditer(text) if (r := _readings(m, commas))]


def _readings(m: re.Match[str], commas: bool) -> tuple[float, ...]:
    digits = m["digits"].rstrip(".,").replace(" ", "")
    texts = [_english(digits)]
    if commas:
        swapped = digits.translate(str.maketrans(".,", ",."))
        texts.append(_english(swapped))
    elif re.fullmatch(r"\d+(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}", digits):
        texts = [_english(digits.translate(str.maketrans(".,", ",.")))]  # can only be meant so
    sign = -1.0 if "-" in (m["sign"] or "") or m["sign2"] else 1.0
    scale = (m["scale"] or "").lower()
    if commas and scale in _ENGLISH_ONLY:
        return ()
    out = []
    for t in texts:
        try:
            value = float(t) ** int(m["power"] or 1) * 10.0 ** int(m["exp"] or 0) * SCALES.get(scale, 1.0)
            under = float(m["under"].replace(",", "")) if m["under"] else 1.0
            value = sign * (float(m["whole"] or 0) + value / under)
        except (ValueError, OverflowError, ZeroDivisionError):
            continue
        if value not in out:
            out.append(value)
    return tuple(out)


def _english(digits: str) -> str:
    """Commas between groups of three are left out; a single other one is a decimal point."""
    if re.fullmatch(r"\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?", digits):
        return digits.replace(",", "")
    if digits.count(",") == 1 and "." not in digits:
        return digits.replace(",", ".")
    return digits.replace(",", "") if re.fullmatch(r"[\d,]+\.\d+", digits) else digits


def numeric(grader: Grader, text: str, cut: bool) -> Grade:
    """Graded by the one number that is the answer."""
    text = _MINUS.sub("-", plain(text))
    if cut:
        text = re.sub(r"[\d.,]+$", "", text)  # the number it was in the middle of
    marked, commas = final_answer(text), grader.language in COMMA
    found = _marked(marked.text, commas) if marked is not None else None
    if marked is not None and found is not None:
        chosen, other = found
        if other:
            return Grade(False, f"{chosen[0]:.12g}", "several numbers")
        if any(n != chosen for n in numbers(taken_back(marked.after), commas)):
            return Grade(False, f"{chosen[0]:.12g}", "taken back")
    else:
        spans = _spans(text, commas)
        if not spans:
            return Grade(False, "", "no number")
        if cut and len({r[0] for _, _, r in spans}) > 1:
            return Grade(False, "", "cut off before an answer")
        chosen = spans[-1][2]
        if len(spans) > 1 and _alternatives(text, spans[-2], spans[-1]):
            return Grade(False, f"{chosen[0]:.12g}", "several numbers")
    right = any(_close(v, float(a), grader) for v in chosen for a in grader.answers)
    return Grade(right, f"{chosen[0]:.12g}", "" if right else "another number")


def _marked(text: str, commas: bool) -> tuple[tuple[float, ...], bool] | None:
    """The number of a final answer, and whether another stands beside it ("5 or 6"): of an equation the last side that
    is one number. What is in brackets with an equation of its own explains."""
    text = re.sub(r"\([^()]*=[^()]*\)", "", text)
    sides = [s for part in text.split("=") if (s := [(part, x) for x in _spans(part, commas)])]
    if not sides:
        return None
    side = next((s for s in reversed(sides) if len(s) == 1), sides[-1])
    part, first = side[0]
    return first[2], len(side) > 1 and _alternatives(part, first, side[1][1])


def _alternatives(text: str, a: tuple[int, int, tuple[float, ...]], b: tuple[int, int, tuple[float, ...]]) -> bool:
    return a[2] != b[2] and _BETWEEN.fullmatch(text[a[1] : b[0]]) is not None


def _close(value: float, answer: float, grader: Grader) -> bool:
    return abs(value - answer) <= max(grader.tolerance, grader.relative * abs(answer), 1e-9 * max(1.0, abs(answer)))
