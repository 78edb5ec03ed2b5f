"""Which tasks a comparison asks: built-in sets by name, or a user's own as JSONL.

One case a line: ``prompt`` or ``messages``; ``grader`` exact | numeric | choice | regex | json | json_schema;
``answer`` (a list: any of them); ``category``, and optionally ``id, group, level, max_tokens, system, tolerance,
relative, options, pattern, schema, language``. What a line lacks or has wrong is said with its number and field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whywait.core import bounded
from whywait.core.tasks import GRADERS, Case, Grader
from whywait.errors import UsageError
from whywait.load.case_rules import check_checks, check_schema
from whywait.load.case_sets import MADE, SETS, book, made

EACH = 40  # cases per category
CONTEXT = 2048  # tokens, where the service does not say how many it takes
MOST_LINE = 4 << 20
MOST = 100_000  # cases of a file
ROLES: Final = ("system", "user", "assistant", "developer")
FIELDS: Final = (
    "prompt", "messages", "answer", "grader", "category", "id", "group", "level", "max_tokens", "system", "tolerance",
    "relative", "options", "pattern", "schema", "language", "checks", "right", "wrong",
)  # fmt: skip
NEEDS: Final[Mapping[str, str]] = {"regex": "pattern", "json_schema": "schema", "checks": "checks"}


def cases_of(
    spec: str,
    seed: int = 1,
    n: int | None = None,
    context: int | None = None,
    *,
    usual: int = EACH,
    say: Callable[[str], None] = lambda _: None,
) -> list[Case]:
    """The cases of ``spec``: ``all``, names of built-in sets (``counting:1-3``: these levels only) and paths of JSONL
    files, with commas between.

    Args:
        seed: of what is generated. Same seed, same cases.
        n: at most so many of each category; 0: all that are written. None: ``usual`` of the built-in sets, and a
            user's own file as a whole.
        context: tokens a request may have, where the service says; longer needles are left out.
        say: told of what is left out of what is written.

    Raises:
        UsageError: no such set or file, or a line of it is wrong.
        MissingExtra: a case is graded by a JSON schema and ``jsonschema`` is not installed.
    """
    out: list[Case] = []
    each = usual if n is None else n
    for word in (w.strip() for w in spec.split(",")):
        name, _, span = word.partition(":")
        if word == "all":
            names: Sequence[str] = SETS
        elif word in SETS:
            names = (word,)
        elif name in MADE and (levels := _span(span)):
            out += made(name, (seed, each or EACH), context or CONTEXT, levels)
            continue
        elif Path(word).is_file():
            out += _first(read(Path(word)), n or 0, word, say)
            continue
        else:
            known = f"sets: {', '.join(SETS)} and all; a file of your own is a JSONL (docs/quality-tasks.md)"
            raise UsageError(f"there is no set of tasks or file {word!r}", known)
        for name in names:
            if name in MADE:
                out += made(name, (seed, each or EACH), context or CONTEXT)
            else:
                out += _first(_written(name), each, name, say)
    return _unique(out)


def read(path: Path) -> list[Case]:
    """
    Raises:
        UsageError: it cannot be read, or a line is wrong; the message names line and field.
        MissingExtra: see :func:`cases_of`.
    """
    try:
        text = bounded.read_text(path, hint="split it")
    except (OSError, UnicodeDecodeError) as exc:
        why = (exc.strerror or str(exc)) if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the cases {path}: {why}", "a JSONL file, one case a line") from None
    out = [case_of(line, number, path.name) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not out:
        raise UsageError(f"there is no case in {path}", 'one case a line: {"prompt": …, "answer": …, "grader": …}')
    if len(out) > MOST:
        raise UsageError(f"{path} has {len(out)} cases, more than {MOST}", "split it")
    return out


def case_of(line: str, number: int, file: str) -> Case:
    """One line of a file as a case.

    Raises:
        UsageError, MissingExtra: as :func:`read`.
    """
    wrong = _Wrong(file, number)
    if len(line) > MOST_LINE:
        raise wrong("", f"it is longer than {MOST_LINE} characters", "no prompt is")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise wrong("", f"it is not JSON: {exc}", "one JSON object a line") from None
    if not isinstance(row, dict):
        raise wrong("", "it is not a JSON object", 'such as {"prompt": …, "answer": …, "grader": "exact"}')
    if strange := sorted(set(row) - set(FIELDS)):
        raise wrong(strange[0], "there is no such field", f"known are {', '.join(FIELDS[:-3])}")
    messages = _messages(row, wrong)
    grader = _grader(row, wrong)
    category = _text(row, "category", wrong) or Path(file).stem
    most = _whole(row, "max_tokens", 256, wrong)
    if most < 1:
        raise wrong("max_tokens", "it is not above 0", "such as 256")
    return Case(
        _text(row, "id", wrong) or f"{Path(file).stem}-{number}", category, messages, grader, most,
        _text(row, "group", wrong), _whole(row, "level", 0, wrong),
    )  # fmt: skip


class _Wrong:
    """Makes the error of one line."""

    def __init__(self, file: str, line: int) -> None:
        self.where = f"{file}, line {line}"

    def __call__(self, name: str, what: str, hint: str) -> UsageError:
        return UsageError(f"{self.where}{f', field {name!r}' if name else ''}: {what}", hint)


def _messages(row: Mapping[str, Any], wrong: _Wrong) -> tuple[tuple[str, str], ...]:
    if ("prompt" in row) == ("messages" in row):
        raise wrong("prompt", "give either prompt or messages", "a text, or a list of {role, content}")
    system = _text(row, "system", wrong)
    before = (("system", system),) if system else ()
    if "prompt" in row:
        prompt = _text(row, "prompt", wrong)
        if not prompt.strip():
            raise wrong("prompt", "it is empty", "what is asked, as a text")
        return (*before, ("user", prompt))
    found = row["messages"]
    if not isinstance(found, list) or not found:
        raise wrong("messages", "it is not a list of messages", '[{"role": "user", "content": "…"}]')
    out = []
    for m in found:
        role, content = (m.get("role"), m.get("content")) if isinstance(m, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise wrong("messages", "a message is not {role, content} of texts", f"roles: {', '.join(ROLES)}")
        out.append((str(role), content))
    return (*before, *out)


def _grader(row: Mapping[str, Any], wrong: _Wrong) -> Grader:
    kind = row.get("grader")
    if kind not in GRADERS:
        what = "it is missing" if kind is None else f"there is no grader {kind!r}"
        raise wrong("grader", what, f"one of {', '.join(GRADERS[:-1])}")
    answers = _answers(row, str(kind), wrong)
    need = NEEDS.get(str(kind))
    if need and need not in row:
        raise wrong(need, f"the grader {kind} needs it", "see docs/quality-tasks.md")
    pattern = _text(row, "pattern", wrong)
    try:
        re.compile(pattern)
    except re.error as exc:
        raise wrong(
            "pattern", f"it is no regular expression: {exc}", "Python's re, searched for in the answer"
        ) from None
    checks, schema = row.get("checks", {}), row.get("schema")
    check_checks(checks, wrong)
    if "schema" in row:
        check_schema(schema, wrong)
    options = row.get("options", [])
    if not isinstance(options, list) or not all(isinstance(o, str) and o for o in options):
        raise wrong("options", "it is not a list of texts", 'such as ["yes", "no"]; default: the letters A to Z')
    if options and not all(str(a) in options for a in answers):
        raise wrong("answer", "it is none of the options", f"one of {', '.join(options)}")
    return Grader(
        str(kind), answers, _number(row, "tolerance", wrong), _number(row, "relative", wrong), pattern, schema,
        {**checks, **({"options": options} if options else {})}, _text(row, "language", wrong),
    )  # fmt: skip


def _answers(row: Mapping[str, Any], kind: str, wrong: _Wrong) -> tuple[Any, ...]:
    found = row.get("answer")
    if found is None:
        if kind in ("exact", "numeric", "choice", "json"):
            raise wrong("answer", f"the grader {kind} needs it", "what is right; a list means any of them")
        return ()
    answers = tuple(found) if isinstance(found, list) and kind != "json" else (found,)
    if not answers:
        raise wrong("answer", "the list is empty", "what is right; a list means any of them")
    if kind == "numeric":
        try:
            values = tuple(float(str(a).replace(",", "")) for a in answers)
            if all(map(math.isfinite, values)):
                return values
            raise ValueError
        except ValueError:
            raise wrong("answer", f"{found!r} is not a number", "such as 42 or 3.5") from None
    if kind in ("exact", "choice"):
        if any(isinstance(a, (dict, list, bool)) or not str(a).strip() for a in answers):
            raise wrong("answer", "it is not a text", 'such as "Paris"')
        return tuple(str(a) for a in answers)
    return answers


def _text(row: Mapping[str, Any], name: str, wrong: _Wrong) -> str:
    found = row.get(name, "")
    if name == "id" and isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if not isinstance(found, str):
        raise wrong(name, "it is not a text", "a JSON string")
    return found


def _whole(row: Mapping[str, Any], name: str, default: int, wrong: _Wrong) -> int:
    found = row.get(name, default)
    if type(found) is not int or abs(found) > 1 << 30:
        raise wrong(name, f"{found!r} is not a whole number", f"such as {default or 1}")
    return found


def _number(row: Mapping[str, Any], name: str, wrong: _Wrong) -> float:
    found = row.get(name, 0)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1e300:
        raise wrong(name, f"{found!r} is not a number from 0 up", "such as 0.01")
    return float(found)


def _span(text: str) -> tuple[int, int] | None:
    """``2-4`` or ``3``: levels from … to."""
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    return (int(found[1]), int(found[2] or found[1])) if found else None


def _written(name: str) -> list[Case]:
    return [case_of(json.dumps({"category": name, **row}), i, f"{name}.jsonl") for i, row in enumerate(book(name), 1)]


def _first(cases: Sequence[Case], n: int, name: str, say: Callable[[str], None]) -> list[Case]:
    """The first ``n`` of each category, all when 0."""
    seen: dict[str, int] = {}
    out = []
    for case in cases:
        seen[case.category] = seen.get(case.category, 0) + 1
        if not n or seen[case.category] <= n:
            out.append(case)
    if len(out) < len(cases):
        say(f"{name}: {len(out)} of its {len(cases)} cases are asked, {n} of each category (--cases 0: all)")
    return out


def _unique(cases: Sequence[Case]) -> list[Case]:
    """
    Raises:
        UsageError: two cases have one id: their answers could not be told apart.
    """
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise UsageError(f"two cases have the id {case.id!r}", "give each its own, or leave id out")
        seen.add(case.id)
    return list(cases)
