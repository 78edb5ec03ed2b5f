"""What a case's checks and JSON schema must be, so that every answer can be graded by them. Nothing is ever fetched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from whywait.core.tasks import CHECK_VALUES
from whywait.errors import MissingExtra, UsageError

#: Makes the error of one line: field, what is wrong, what to try.
Wrong = Callable[[str, str, str], UsageError]

_PROBES: Final[tuple[Any, ...]] = ({}, [], "", 0, True, None, [{}], {"a": {}})
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_KINDS: Final[Mapping[str, str]] = {
    "texts": "a text or a list of texts", "text": "a text", "pattern": "a regular expression (Python's re)",
    "flag": "true or false", "counts": "an object of texts and how often each stands", "number": "a whole number",
}  # fmt: skip


def check_checks(checks: Any, wrong: Wrong) -> None:
    """
    Raises:
        UsageError: no object of names that there are, each with a value of its kind.
    """
    if not isinstance(checks, dict):
        raise wrong("checks", "it is not an object", "name: value, see docs/quality-tasks.md")
    for name, value in checks.items():
        kind = CHECK_VALUES.get(name)
        if kind is None:
            raise wrong("checks", f"there is no check {name!r}", f"known are {', '.join(CHECK_VALUES)}")
        if not _fits(kind, value):
            raise wrong("checks", f"the value of {name!r} does not fit", f"it is {_KINDS[kind]}")


def _fits(kind: str, value: Any) -> bool:
    if kind == "texts":
        return isinstance(value, str) or (
            isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
        )
    if kind == "counts":
        return isinstance(value, dict) and all(_fits("number", v) for v in value.values())
    if kind == "number":
        return type(value) is int and 0 <= value <= 1_000_000
    if kind == "flag":
        return isinstance(value, bool)
    return isinstance(value, str) and (kind != "pattern" or not _no_pattern(value))


def _no_pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as exc:
        return str(exc) or "too deep"
    return ""


def check_schema(schema: Any, wrong: Wrong) -> None:
    """
    Raises:
        UsageError: it is no JSON schema, refers to something outside itself or that is not there, or to itself
            without end.
        MissingExtra: ``jsonschema`` is not installed.
    """
    hint = "see json-schema.org"
    if not isinstance(schema, dict):
        raise wrong("schema", "it is no JSON schema: it is not an object", hint)
    try:
        import jsonschema
        import referencing
    except ImportError:
        raise MissingExtra("a case that is graded by a JSON schema", "quality") from None
    for name, value in _keys(schema):
        if name in _REFERENCES and isinstance(value, str) and not value.startswith("#"):
            raise wrong(
                "schema", f"it refers to {value!r}, and nothing is fetched", "put it into $defs: '#/$defs/NAME'"
            )
        for pattern in [value] if name == "pattern" and isinstance(value, str) else _patterns(name, value):
            if why := _no_pattern(pattern):
                raise wrong("schema", f"{pattern!r} is no regular expression: {why}", "Python's re")
    try:
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        _resolve(schema)
        validator = kind(schema, registry=referencing.Registry())
        for probe in _PROBES:
            next(iter(validator.iter_errors(probe)), None)
    except RecursionError:
        raise wrong("schema", "it refers to itself without end", "a reference must lead on") from None
    except referencing.exceptions.Unresolvable as exc:
        raise wrong("schema", f"it refers to {exc.ref!r}, which it does not have", "'#/$defs/NAME'") from None
    except Exception as exc:  # of whatever kind: no answer could be graded by it
        raise wrong("schema", f"it is no JSON schema: {getattr(exc, 'message', exc)}", hint) from None


def _resolve(schema: dict[str, Any]) -> None:
    """Look every reference up; where parts have names of their own (``$id``) only those that an answer meets are."""
    import referencing.jsonschema

    found = list(_keys(schema))
    if any(name == "$id" for name, _ in _keys(list(schema.values()))):
        return
    resource = referencing.Resource(contents=schema, specification=referencing.jsonschema.DRAFT202012)
    resolver = referencing.Registry().with_resource("", resource).resolver("")
    for name, value in found:
        if name == "$ref" and isinstance(value, str):
            resolver.lookup(value)


def _patterns(name: str, value: Any) -> list[str]:
    return list(value) if name == "patternProperties" and isinstance(value, dict) else []


def _keys(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, however deep, without recursion."""
    todo = [value]
    while todo:
        v = todo.pop()
        if isinstance(v, dict):
            yield from v.items()
            todo += v.values()
        elif isinstance(v, list):
            todo += v
