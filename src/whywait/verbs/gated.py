"""What ``ab``, ``try`` and ``quality`` have in common: gates on one result, and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whywait.core.secrets import clean
from whywait.errors import UsageError
from whywait.judge.gates import OPS, Gate, parse_gates

WORSE = "worse"


def gates_of(texts: Sequence[str]) -> list[Gate]:
    """``worse``, or a condition on a figure of the result."""
    plain = [t for t in texts if t.strip() != WORSE]
    found = parse_gates(plain)
    return [*found, *([Gate(WORSE, (WORSE,), "", 0.0)] if len(plain) < len(texts) else [])]


def check(gates: Sequence[Gate], known: Callable[[Sequence[str]], bool], hint: str) -> None:
    """Before anything is measured.

    Raises:
        UsageError: a condition on what no such result has.
    """
    for g in gates:
        if g.text != WORSE and not known(g.path):
            raise UsageError(f"--fail-if: this has no {'.'.join(g.path)!r}", hint)


def failed(
    gates: Sequence[Gate], worse: Sequence[str], value_of: Callable[[Sequence[str]], float | None], hint: str
) -> list[str]:
    """What failed, in words. ``worse``: what became so; ``value_of`` raises KeyError where there is no such figure."""
    out: list[str] = []
    for g in gates:
        if g.text == WORSE:
            out += worse
            continue
        name = ".".join(g.path)
        try:
            value = value_of(g.path)
        except KeyError:
            raise UsageError(f"--fail-if: this has no {name!r}", hint) from None
        if value is None:
            out.append(f"{name} is unknown, so {g.text!r} does not pass")
        elif OPS[g.op](value, g.limit):
            out.append(f"{name} is {value:.6g} ({g.text})")
    return out


def tell(as_json: bool, result: Mapping[str, Any], directory: Path, shown: Callable[[Any, str], None]) -> None:
    """The result on stdout: as JSON with its folder, or as ``shown`` prints it."""
    if as_json:
        json.dump({**result, "run": str(directory)}, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        shown(result, str(directory))


def write_page(path: Path, text: Any, kept: str) -> None:
    """``kept`` says what is not lost if it cannot be written."""
    try:
        path.write_text(clean(text), encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write the report to {path}: {exc.strerror}", f"{kept} kept") from None
