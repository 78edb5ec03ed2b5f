"""What ``ab``, ``try`` and ``quality`` have in common: gates on one result, and its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def write_page(path: Path, text: Any, kept: str) -> None:
    """``kept`` says what is not lost if it cannot be written."""
    try:
        path.write_text(clean(text), encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write the report to {path}: {exc.strerror}", f"{kept} kept") from None
