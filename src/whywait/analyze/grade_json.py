"""JSON in a text, whether it is the right one, and whether it keeps to a schema. Pure; nothing is ever fetched."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final

from whywait.core.tasks import Grade, Grader
from whywait.errors import MissingExtra

MOST: Final = 50  # brackets that are tried
_FENCE = re.compile(r"```[a-zA-Z]*\s*\n?(.*?)```", re.S)
_TYPES: Final[Mapping[str, type]] = {"object": dict, "array": list}


def json_grade(grader: Grader, text: str) -> Grade:
    """Graded by the one JSON value of the text. Of several only those of the form that is asked for (object or list)
    count; where they differ, form does not decide.

    Raises:
        MissingExtra: graded by a JSON schema, and ``jsonschema`` is not installed.
    """
    values = json_values(text)
    if not values:
        return Grade(False, "", "no valid JSON")
    forms = {type(a) for a in grader.answers} or {_TYPES.get(str((grader.schema or {}).get("type")), object)}
    if len(values) > 1:
        values = [v for v in values if any(isinstance(v, f) for f in forms)] or values[:1]
    value = values[0]
    if not all(same_json(value, v) for v in values):
        return Grade(False, "", "several JSON values")
    got = json.dumps(value, ensure_ascii=False)[:200]
    if grader.kind == "json_schema" and (why := _against_schema(grader.schema, value)):
        return Grade(False, got, why)
    right = not grader.answers or any(same_json(value, a) for a in grader.answers)
    return Grade(right, got, "" if right else "another value")


def json_values(text: str) -> list[Any]:
    """The text as JSON, else its fenced blocks, else the objects and lists in it. A bare number or word is none unless
    it is the whole text."""
    whole = list(_parsed(text))
    if whole:
        return whole
    return [v for piece in _FENCE.findall(text) for v in _parsed(piece)] or list(_inside(text))


def _parsed(text: str) -> Iterator[Any]:
    try:
        yield json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return


def _inside(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    end = 0
    for m in list(re.finditer(r"[{\[]", text))[:MOST]:
        if m.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, m.start())
        except (ValueError, RecursionError):
            continue
        yield value


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
    """What is wrong with the value; '' when nothing is. A reference that leaves the schema is not followed: it raises
    whatever ``jsonschema`` raises for one that cannot be resolved."""
    try:
        import jsonschema
        import referencing
    except ImportError:
        raise MissingExtra("a case that is graded by a JSON schema", "quality") from None
    validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
    error = next(iter(validator.iter_errors(value)), None)
    return "" if error is None else f"against the schema: {str(error.message)[:120]}"
