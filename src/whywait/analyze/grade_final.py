"""Where in a text the final answer stands, and one form of what is written in several. Pure."""

from __future__ import annotations

import re
import unicodedata
from typing import Final, NamedTuple

LINE: Final = 2000  # characters of a final answer, at most
MARKERS: Final = 50  # of a final answer that are tried, from the last
EDGES: Final = " \t\r\n\"'`*_.,;:!?()[]{}“”„‘’«»「」『』。，、！？：；<>$#|"
#: Of those, what can be all the difference between two texts: C and C#.
TELLING: Final = "#!?$<>|"

_MARK = re.compile(
    r"(?:final\s+answer|correct\s+(?:answer|option|choice)|answer|solution|result|antwort|lösung|ergebnis|respuesta|"
    r"resultado|réponse|résultat|risposta|risultato|resposta|antwoord|odpowiedź|ответ|результат|الجواب|الإجابة|उत्तर|"
    r"답|정답)\s{0,9}(?:\**\s{0,9}(?:(?:is|ist|es|est|è|é)(?![\w'’])|:|：|=|—)\s{0,9})+\**\s{0,9}[:：]?"
    r"|(?:答案|答え|答|最终答案)\s{0,9}(?:是|は)?\s{0,9}[:：是は]?",
    re.I,
)
_HASHES = re.compile(r"####\s*")
_BOXED = re.compile(r"\\boxed\s*\{")
_BACK = re.compile(
    r"\b(?:wait|actually|correction|sorry|oops|scratch that|on second thou?ghts?|my mistake|i was wrong|moment mal|"
    r"tatsächlich|en realidad|perdón|en fait|attendez)\b",
    re.I,
)
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = str.maketrans({"−": "-", "‐": "-", "‑": "-", "–": "-", "⁄": "/", "\u066b": ".", "\u066c": ","})


class Answer(NamedTuple):
    """``text``: the final answer; ``after``: all that comes behind its marker, itself included."""

    text: str
    after: str


def plain(text: str) -> str:
    """One form of what is written in several: compatible characters, digits of all scripts, minus signs, thousands set
    apart by thin spaces or apostrophes, powers and fractions, LaTeX spacing."""
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f'’_](?=\d{3}(?!\d))", "", text)
    text = text.replace("\\,", "").replace("\\!", "").replace("\\$", "$").replace("\\ ", " ").replace("{,}", ",")
    text = re.sub(r"\\(?:times|cdot)(?![a-zA-Z])", "×", text)
    text = re.sub(r"((?:\d\s{0,3})?)\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}", _fraction, text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = re.sub(r"(?<=\d)[⁰¹²³⁴-⁹⁻]+", lambda m: "^" + m[0].translate(_POWERS), text)
    text = unicodedata.normalize("NFKC", text)
    out = []
    for c in text:
        d = unicodedata.decimal(c, None)
        out.append(c if d is None else str(d))
    return "".join(out).translate(_SIGNS)


def _fraction(m: re.Match[str]) -> str:
    return f"{m[1].strip()}{' ' if m[1] else ''}{m[2]}/{m[3]}"


def final_answer(text: str) -> Answer | None:
    """What follows the last marker of a final answer, up to the end of its line; None where there is no marker."""
    found = [(m.start(), m.end()) for m in _MARK.finditer(text)]
    found += [(m.start(), m.end()) for m in _HASHES.finditer(text)]
    boxes = list(_BOXED.finditer(text))
    last_box = boxes[-1].start() if boxes else -1
    for _, end in sorted(found, reverse=True)[:MARKERS]:
        if end > last_box or (found and "\\boxed" in text[end : end + 60].partition("\n")[0]):
            rest = text[end : end + LINE].lstrip(" \t*")
            line = rest.lstrip("\n").partition("\n")[0].strip()
            if line.strip(EDGES):
                return Answer(_unboxed(line), text[end:])
    if boxes:
        return Answer(_braced(text, boxes[-1].end()), text[boxes[-1].end() :])
    return None


def taken_back(after: str) -> str:
    """What follows "wait", "actually" and the like in the text behind a marker; '' where nothing is taken back."""
    found = _BACK.search(after)
    return after[found.end() :] if found else ""


def _unboxed(line: str) -> str:
    found = _BOXED.search(line)
    return _braced(line, found.end()) if found else line


def _braced(text: str, start: int) -> str:
    depth, at = 1, start
    while at < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1 if depth == 0 else at].strip()


def bare(text: str, edges: str = EDGES) -> str:
    """A text without its case, spacing and outer punctuation."""
    return " ".join(plain(text).casefold().strip(edges).split())


_QUIET: Final = "".join(c for c in EDGES if c not in TELLING)


def same_text(got: str, right: str) -> bool:
    """Equal but for case, spacing and outer punctuation. Punctuation that the right text has itself must be there, and
    a last # is always told: "C" is not "C#", "?" is not "!"."""
    a, b = bare(got, _QUIET), bare(right, _QUIET)
    if not b:
        return got.strip() == right.strip()
    if b != bare(right) or a.endswith("#"):
        return a == b
    return bare(got) == b
