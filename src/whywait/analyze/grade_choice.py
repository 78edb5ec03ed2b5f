"""Which of some options a text chooses. Pure. What its form does not decide is no choice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from whywait.analyze.grade_final import EDGES, bare, final_answer, plain, taken_back
from whywait.core.tasks import Grade, Grader

LETTERS: Final = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_OR = r"(?:\s*(?:,|/|;|\bor\b|\band\b|\boder\b|\bund\b|\bou\b|\bet\b|\bo\b|\by\b|&)\s*)"
#: "not B", "rule out option B": what stands before an option that is not chosen.
_NOT_BEFORE = re.compile(
    r"(?:\b(?:not|nor|neither|never|unlike|except|without|than|instead of|rul(?:e|es|ed|ing) out|"
    r"exclud(?:e|es|ed|ing)|eliminat(?:e|es|ed|ing)|reject(?:s|ed|ing)?|discard(?:s|ed|ing)?|nicht|kein|no es|no|pas)"
    r"|n['’]t)[\s,:]+(?:be\s+)?(?:the\s+)?(?:answer\s+|option\s+|choice\s+)?[(*\"']{0,3}$",
    re.I,
)
#: "B is wrong", "C. is out": what stands behind one.
_NOT_AFTER = re.compile(
    r"[.):*\"']{0,4}\s{0,3}(?:(?:is|are|was|can|could|would|must|does|do)\s{0,3}(?:not\b|n['’]t)|(?:is|was|seems|looks)\s"
    r"+(?:the\s+|a\s+|clearly\s+|also\s+)*(?:wrong|incorrect|false|out|ruled out|excluded|eliminated|no)\b"
    r"|(?:isn|aren|can|doesn|wasn)['’]?t\b|ist\s+(?:falsch|nicht))",
    re.I,
)


class Found(NamedTuple):
    """An option in a text, and where it is."""

    option: str
    start: int
    end: int


def choice(grader: Grader, text: str) -> Grade:
    """Graded by the one option that is chosen."""
    own = tuple(str(o) for o in grader.checks.get("options", ()))
    right = {str(a).casefold() if own else bare(str(a)) for a in grader.answers}
    got = chosen(plain(text), own or LETTERS)
    if got is None:
        return Grade(False, "", "no clear choice")
    ok = got.casefold() in right
    return Grade(ok, got, "" if ok else "another choice")


def chosen(text: str, options: Sequence[str]) -> str | None:
    """The option that a text chooses; None where it chooses none, or several: what follows the marker, else what the
    text begins with, else the only one that it names and does not reject."""
    letters = all(len(o) == 1 and o.isascii() and o.isalpha() for o in options)
    marked = final_answer(text)
    if marked is not None and (found := _named(marked.text, options, letters)):
        later = _named(taken_back(marked.after), options, letters)
        if _several(marked.text, found) or any(f.option != found[0].option for f in later):
            return None
        return found[0].option
    if (first := _leading(text, options, letters)) is not None:
        return first or None
    named = {f.option for f in _named(text, options, letters)}
    return named.pop() if len(named) == 1 else None


def _named(text: str, options: Sequence[str], letters: bool) -> list[Found]:
    """Options that are named and not rejected, in order."""
    finds = (_sure, _lone) if letters else (_words,)
    return next((kept for find in finds if (kept := [f for f in find(text, options) if not _rejected(text, f)])), [])


def _rejected(text: str, f: Found) -> bool:
    before, after = text[max(0, f.start - 60) : f.start], text[f.end : f.end + 60]
    return _NOT_BEFORE.search(before) is not None or _NOT_AFTER.match(after) is not None


def _leading(text: str, options: Sequence[str], letters: bool) -> str | None:
    """The option that the first line begins with, or is; '' where other lines begin with others; None without one."""
    known = "|".join(re.escape(o) for o in sorted(options, key=len, reverse=True))
    close = r"[)*\"']{0,3}[.):][)*\"']{0,3}(?=\s|$)" if letters else r"[)*\"']{0,3}\s?[,.:;!–—]"
    begins = re.compile(rf"[(*\"'\s]{{0,4}}({known})(?:{close}|\s?[)]\s)", 0 if letters else re.I)
    by = {o.casefold(): o for o in options}
    lead: list[str] = []
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        alone = by.get(line.strip().casefold()) or by.get(line.strip(EDGES).casefold())
        m = begins.match(line)
        if m and not alone and _rejected(line, Found(m[1], m.start(1), m.end(1))):
            m = None
        option = alone or (by[m[1].casefold()] if m else None)
        if option is None and not lead:
            return None
        if option is not None:
            lead.append(option)
    if not lead:
        return None
    found = [Found(lead[0], 0, lines[0].casefold().find(lead[0].casefold()) + len(lead[0]))]
    rest = _named(lines[0][found[0].end :], options, letters)
    others = [Found(f.option, f.start + found[0].end, f.end + found[0].end) for f in rest]
    later = _named(taken_back(text), options, letters)
    clear = len(set(lead)) == 1 and not _several(lines[0], found + others)
    return lead[0] if clear and not any(f.option != lead[0] for f in later) else ""


def _sure(text: str, options: Sequence[str]) -> Iterator[Found]:
    """Letters that stand for options by their form: "(B)", "B.", "**B**", "option B", a text that is one letter."""
    upper, known = _alphabet(options)
    whole = text.strip(EDGES)
    if len(whole) == 1 and whole in known:
        yield Found(whole.upper(), text.find(whole), text.find(whole) + 1)
        return
    form = re.compile(
        rf"(?:\(([{known}])\)|\*\*\(?([{upper}])\)?[.:)]?\*\*|(?<![\w'])([{upper}])[.):](?=\s|$|\*)"
        rf"|\b(?:option|choice|opción|opção)\s+\(?([{known}])\b)"
    )
    for m in form.finditer(text):
        yield Found(next(g for g in m.groups() if g).upper(), m.start(), m.end())


def _lone(text: str, options: Sequence[str]) -> Iterator[Found]:
    """Letters that stand alone. The words "A" and "I" are none, and neither is the letter of a name or a formula."""
    upper, _ = _alphabet(options)
    lone = re.compile(
        rf"(?<![\w'’.-])([{upper}])(?![\w'’-]|\.\w|\s+[a-z])|(?<![\w'’.-])([{upper}])(?=\s+(?:is|or|and|because|since)\b)"
    )
    for m in lone.finditer(text):
        yield Found(m[1] or m[2], m.start(), m.end())


def _alphabet(options: Sequence[str]) -> tuple[str, str]:
    """The letters of the options in capitals, and in both cases."""
    upper = "".join(sorted({o.upper() for o in options}))
    return upper, upper + upper.lower()


def _words(text: str, options: Sequence[str]) -> Iterator[Found]:
    """Options that are named as whole words. Of two that overlap the longer one counts."""
    words = "|".join(re.escape(o) for o in sorted(options, key=len, reverse=True))
    by = {o.casefold(): o for o in options}
    for m in re.finditer(rf"(?<!\w)(?:{words})(?!\w)", text, re.I):
        yield Found(by.get(m[0].casefold(), m[0]), m.start(), m.end())


def _several(scope: str, found: Sequence[Found]) -> bool:
    """Two options in one breath, "A or B"."""
    if len({f.option for f in found}) < 2:
        return False
    other = re.escape(next(f.option for f in found if f.option != found[0].option))
    after = scope[found[0].end :]
    return re.match(rf"[.)*]{{0,3}}{_OR}[(*]*(?:option\s+)?{other}(?!\w)", after, re.I) is not None
