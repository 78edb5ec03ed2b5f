"""An answer and what is right → right or wrong. Pure, and the same for both arms.

What is graded is the answer after the thinking. In it the *final answer* is what follows the last of ``\\boxed{…}``,
``#### …`` and a marker ("Answer:", "the answer is", "Antwort:" …); where there is none, the whole of it. A number is
then the first after the marker (after its last "="), else the last of the text. An answer that was cut off before a
marker counts only when nothing else could be meant: a half-way number is not a result.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from whywait.analyze.grade_checks import failed_check
from whywait.core.tasks import Answered, Case, Grader
from whywait.errors import MissingExtra

LINE: Final = 2000  # characters of a final answer, at most
MARKERS: Final = 50  # of a final answer that are tried, from the last
LETTERS: Final = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
#: Languages that write 1.234,5 for one thousand two hundred and thirty-four and a half.
COMMA: Final = frozenset(
    ("de", "es", "fr", "it", "pt", "nl", "pl", "ru", "uk", "tr", "sv", "da", "nb", "fi", "cs", "id", "vi")
)

_MARK = re.compile(
    r"(?:final\s+answer|correct\s+(?:answer|option|choice)|answer|solution|result|antwort|lösung|ergebnis|respuesta|"
    r"resultado|réponse|résultat|risposta|risultato|resposta|antwoord|odpowiedź|ответ|результат|الجواب|الإجابة|उत्तर|"
    r"답|정답)\s{0,9}(?:\**\s{0,9}(?:is|ist|es|est|è|é|:|：|=|—)\s{0,9})+\**\s{0,9}[:：]?"
    r"|(?:答案|答え|答|最终答案)\s{0,9}(?:是|は)?\s{0,9}[:：是は]?",
    re.I,
)
_HASHES = re.compile(r"####\s*")
_BOXED = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(
    r"(?<![\w.,])(?P<sign>[-+]\s?)?(?:[$€£¥₹]\s?)?(?P<sign2>-)?(?P<digits>\d[\d.,]*\d|\d|\.\d+)"
    r"(?:(?:e|\s?[x×*]\s?10\s?\^\s?\{?)(?P<exp>[-+]?\d{1,3})\}?)?(?:\s?/\s?(?P<under>\d[\d,]*))?",
    re.I,
)
_FENCE = re.compile(r"```[a-zA-Z]*\s*\n?(.*?)```", re.S)
_EDGES = " \t\r\n\"'`*_.,;:!?()[]{}“”„‘’«»「」『』。，、！？：；<>$#|"
_OR = r"(?:\s*(?:,|/|;|\bor\b|\band\b|\boder\b|\bou\b|\bo\b|\by\b|&)\s*)"


class Grade(NamedTuple):
    """``got`` is what was taken for the final answer, ``why`` says in a word or two what was wrong with it."""

    right: bool
    got: str = ""
    why: str = ""


def grade(case: Case, answered: Answered) -> Grade:
    """Whether the answer is right. A request that failed, an empty answer and an unfinished thought are wrong."""
    if not answered.ok:
        return Grade(False, "", answered.outcome)
    if answered.unclosed:
        return Grade(False, "", "the thinking never ended")
    if not answered.text.strip():
        return Grade(False, "", "empty")
    return grade_text(case.grader, answered.text, answered.cut)


def grade_text(grader: Grader, text: str, cut: bool = False) -> Grade:
    """A text graded; ``cut``: it was stopped by the limit on its length.

    Raises:
        MissingExtra: graded by a JSON schema, and ``jsonschema`` is not installed.
    """
    kind = grader.kind
    if kind == "numeric":
        return _numeric(grader, text, cut)
    if kind == "choice":
        return _choice(grader, text, cut)
    if kind == "exact":
        return _exact(grader, text)
    if kind == "regex":
        found = re.search(grader.pattern, text)
        return Grade(found is not None, found[0] if found else "", "" if found else "no match")
    if kind == "checks":
        failed = failed_check(grader.checks, text)
        return Grade(not failed, "", failed)
    value, there = json_in(text)
    if not there:
        return Grade(False, "", "no valid JSON")
    if kind == "json_schema" and (why := _against_schema(grader.schema, value)):
        return Grade(False, json.dumps(value)[:200], why)
    right = not grader.answers or any(same_json(value, a) for a in grader.answers)
    return Grade(right, json.dumps(value, ensure_ascii=False)[:200], "" if right else "another value")


# the final answer


def plain(text: str) -> str:
    """One form of what is written in several: compatible characters, digits of all scripts, minus signs, thousands set
    apart by thin spaces or apostrophes, LaTeX spacing."""
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f'’_](?=\d{3}(?!\d))", "", text)
    text = text.replace("\\,", "").replace("\\!", "").replace("\\$", "$").replace("\\ ", " ").replace("{,}", ",")
    text = re.sub(r"\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}", r"\1/\2", text)
    text = unicodedata.normalize("NFKC", text)
    out = []
    for c in text:
        d = unicodedata.decimal(c, None)
        out.append(c if d is None else str(d))
    return "".join(out).translate({0x2212: "-", 0x2010: "-", 0x2011: "-", 0x2013: "-", 0x066B: ".", 0x066C: ","})


def final_answer(text: str) -> str | None:
    """What follows the last marker of a final answer, up to the end of its line; None where there is no marker."""
    found = [(m.start(), m.end()) for m in _MARK.finditer(text)]
    found += [(m.start(), m.end()) for m in _HASHES.finditer(text)]
    boxes = list(_BOXED.finditer(text))
    last_box = boxes[-1].start() if boxes else -1
    for _, end in sorted(found, reverse=True)[:MARKERS]:
        if end > last_box or (found and "\\boxed" in text[end : end + 60].partition("\n")[0]):
            rest = text[end : end + LINE].lstrip(" \t*")
            line = rest.lstrip("\n").partition("\n")[0].strip()
            if line.strip(_EDGES):
                return _unboxed(line)
    if boxes:
        return _braced(text, boxes[-1].end())
    return None


def _unboxed(line: str) -> str:
    found = _BOXED.search(line)
    return _braced(line, found.end()) if found else line


def _braced(text: str, start: int) -> str:
    depth, at = 1, start
    while at < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1 if depth == 0 else at].strip()


# numbers


def numbers(text: str, commas: bool = False) -> list[tuple[float, ...]]:
    """The numbers of a text (see :func:`plain`), in order, each as its possible readings: 1.234 is also a thousand and
    more where a language writes it so (``commas``)."""
    return [r for m in _NUMBER.finditer(text) if (r := _readings(m, commas))]


def _readings(m: re.Match[str], commas: bool) -> tuple[float, ...]:
    digits = m["digits"].rstrip(".,")
    texts = [_english(digits)]
    if commas:
        swapped = digits.translate(str.maketrans(".,", ",."))
        texts.append(_english(swapped))
    elif re.fullmatch(r"\d+(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}", digits):
        texts = [_english(digits.translate(str.maketrans(".,", ",.")))]  # can only be meant so
    sign = -1.0 if "-" in (m["sign"] or "") or m["sign2"] else 1.0
    out = []
    for t in texts:
        try:
            value = sign * float(t) * 10.0 ** int(m["exp"] or 0)
        except (ValueError, OverflowError):
            continue
        under = float(m["under"].replace(",", "")) if m["under"] else 1.0
        if under and value / under not in out:
            out.append(value / under)
    return tuple(out)


def _english(digits: str) -> str:
    """Commas between groups of three are left out; a single other one is a decimal point."""
    if re.fullmatch(r"\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?", digits):
        return digits.replace(",", "")
    if digits.count(",") == 1 and "." not in digits:
        return digits.replace(",", ".")
    return digits.replace(",", "") if re.fullmatch(r"[\d,]+\.\d+", digits) else digits


def _numeric(grader: Grader, text: str, cut: bool) -> Grade:
    text = plain(text)
    if cut:
        text = re.sub(r"[\d.,]+$", "", text)  # the number it was in the middle of
    marked = final_answer(text)
    commas = grader.language in COMMA
    found = numbers((marked or "").rpartition("=")[2], commas) if marked is not None else []
    if not found and marked is not None:
        found = numbers(marked, commas)
    if found:
        chosen = found[0]
    else:
        found = numbers(text, commas)
        if not found:
            return Grade(False, "", "no number")
        if cut and len({f[0] for f in found}) > 1:
            return Grade(False, "", "cut off before an answer")
        chosen = found[-1]
    right = any(_close(v, float(a), grader) for v in chosen for a in grader.answers)
    return Grade(right, f"{chosen[0]:.12g}", "" if right else "another number")


def _close(value: float, answer: float, grader: Grader) -> bool:
    return abs(value - answer) <= max(grader.tolerance, grader.relative * abs(answer), 1e-9 * max(1.0, abs(answer)))


# choices and texts


def _choice(grader: Grader, text: str, cut: bool) -> Grade:
    options = tuple(str(o) for o in grader.checks.get("options", ())) or LETTERS
    right = {bare(str(a)) for a in grader.answers}
    got = chosen(plain(text), options, cut)
    if got is None:
        return Grade(False, "", "no clear choice")
    ok = bare(got) in right
    return Grade(ok, got, "" if ok else "another choice")


def chosen(text: str, options: Sequence[str], cut: bool = False) -> str | None:
    """The option that a text chooses; None where it chooses none, or several."""
    marked = final_answer(text)
    letters = all(len(o) == 1 and o.isascii() and o.isalpha() for o in options)
    find = _letters if letters else _words
    for scope in (marked, None if marked is None else text.strip(), text.strip()):
        if scope is None:
            continue
        found = list(find(scope, options))
        if scope is marked and found:
            return found[0][0] if not _several(scope, found) else None
        if found and scope is not marked:
            return found[-1][0] if not cut or len({o for o, _ in found}) == 1 else None
    return None


def _letters(text: str, options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Letters that stand for options, with where they end: "(B)", "B.", "**B**", "option B", a lone B. The words "A"
    and "I" are none, and neither is the letter of a name or a formula."""
    known = "".join(re.escape(o) for o in options)
    known = "".join(sorted({*known.upper(), *known.lower()}))
    whole = text.strip(_EDGES)
    if len(whole) == 1 and whole in known:
        yield whole.upper(), len(text)
        return
    upper = "".join(c for c in known if c.isupper())
    sure = re.compile(
        rf"(?:\(([{known}])\)|\*\*\(?([{upper}])\)?[.:)]?\*\*|(?<![\w'])([{upper}])[.):](?=\s|$|\*)"
        rf"|\b(?:option|choice|opción|opção)\s+\(?([{known}])\b)"
    )
    found = [(next(g for g in m.groups() if g).upper(), m.end()) for m in sure.finditer(text)]
    if not found:
        lone = re.compile(
            rf"(?<![\w'’.-])([{upper}])(?![\w'’.-]|\s+[a-z])|(?<![\w'’.-])([{upper}])(?=\s+(?:is|or|and|because|since)\b)"
        )
        found = [((m[1] or m[2]), m.end()) for m in lone.finditer(text)]
    yield from found


def _words(text: str, options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Options that are named as whole words; "not Ann" names nobody. Of two that overlap the longer one counts."""
    words = "|".join(re.escape(o) for o in sorted(options, key=len, reverse=True))
    by = {o.casefold(): o for o in options}
    for m in re.finditer(rf"(?<!\w)(?:{words})(?!\w)", text, re.I):
        if not re.search(r"(?:\bnot|\bnor|n't|\bnicht|\bno es|\bpas)\s+(?:the\s+)?$", text[: m.start()], re.I):
            yield by[m[0].casefold()], m.end()


def _several(scope: str, found: Sequence[tuple[str, int]]) -> bool:
    """Two options in one breath, "A or B"."""
    if len({o for o, _ in found}) < 2:
        return False
    return re.match(rf"{_OR}[(*]*(?:option\s+)?{re.escape(found[1][0])}(?!\w)", scope[found[0][1] :], re.I) is not None


def bare(text: str) -> str:
    """A text without its case, spacing and outer punctuation."""
    return " ".join(plain(text).casefold().strip(_EDGES).split())


def _exact(grader: Grader, text: str) -> Grade:
    right = {bare(str(a)) for a in grader.answers}
    marked = final_answer(plain(text))
    lines = [line for line in text.splitlines() if line.strip()]
    tries = [marked] if marked is not None else []
    tries += [text, lines[-1]]
    got = next((t for t in tries if bare(t) in right), None)
    return Grade(got is not None, (tries[0] if got is None else got)[:200], "" if got is not None else "another text")


# JSON


def json_in(text: str) -> tuple[Any, bool]:
    """(value, whether there is one): the text as JSON, else its first fenced block, else the first object or list in
    it. A bare number or word is none unless it is the whole text."""
    for piece in (text, *_FENCE.findall(text)):
        try:
            return json.loads(piece, parse_constant=_no_constant), True
        except (ValueError, RecursionError):
            continue
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    for m in list(re.finditer(r"[{\[]", text))[:50]:
        try:
            return decoder.raw_decode(text, m.start())[0], True
        except (ValueError, RecursionError):
            continue
    return None, False


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def same_json(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0, true is not 1, texts without their outer spaces, objects in any order."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if isinstance(a, str) and isinstance(b, str):
        return unicodedata.normalize("NFC", a).strip() == unicodedata.normalize("NFC", b).strip()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same_json(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(v, b[k]) for k, v in a.items())
    return a is None and b is None


def _against_schema(schema: Any, value: Any) -> str:
    try:
        import jsonschema
    except ImportError:
        raise MissingExtra("a case that is graded by a JSON schema", "quality") from None
    validator = jsonschema.validators.validator_for(schema)(schema)
    error = next(iter(validator.iter_errors(value)), None)
    return "" if error is None else f"against the schema: {str(error.message)[:120]}"
