"""Conditions on a summary for ``--fail-if``. A figure that is unknown, or has no samples, does not pass."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whywait.errors import UsageError

OPS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
EXAMPLE = "such as 'goodput_share<0.95' or 'ttft_ms.p95>500'; keys are those of a point in summary.json"


@dataclass(frozen=True)
class Gate:
    text: str
    path: tuple[str, ...]
    op: str
    limit: float


def parse_gates(texts: list[str]) -> list[Gate]:
    """``'ttft_ms.p95>500'`` → Gate: the run fails when the condition is true of any point.

    Raises:
        UsageError: not KEY OP NUMBER, or a key that no summary has.
    """
    gates = []
    for text in texts:
        form = re.fullmatch(r"\s*([a-z_][a-z0-9_.]*)\s*(<=|>=|<|>)\s*([\d.eE+-]+)\s*", text)
        try:
            limit = float(form[3]) if form else 0.0
        except ValueError:
            form = None
        if form is None:
            raise UsageError(f"--fail-if {text!r} is not KEY<NUMBER", EXAMPLE)
        gates.append(Gate(text.strip(), tuple(form[1].split(".")), form[2], limit))
    return gates


def failed_gates(gates: list[Gate], summary: dict[str, Any]) -> list[str]:
    """What failed, in words, one per gate and point.

    Raises:
        UsageError: a key that the summary does not have.
    """
    out = []
    for gate in gates:
        if not summary["points"]:
            out.append(f"nothing was measured, so {gate.text!r} does not pass")
        for p in summary["points"]:
            value = _value(p, gate)
            at = p["mode"] if p["target"] is None else f"{p['mode']} {p['target']:g}"
            if value is None:
                out.append(f"{'.'.join(gate.path)} is unknown at {at}, so {gate.text!r} does not pass")
            elif OPS[gate.op](value, gate.limit):
                out.append(f"{'.'.join(gate.path)} is {value:.6g} at {at} ({gate.text})")
    return out


def _value(point: dict[str, Any], gate: Gate) -> float | None:
    found: Any = point
    for key in gate.path:
        if found == {}:  # a part of the summary for which there was no request: unknown, not a wrong key
            return None
        if not isinstance(found, dict) or key not in found:
            raise UsageError(f"--fail-if: a summary has no {'.'.join(gate.path)!r}", EXAMPLE)
        found = found[key]
    if found is not None and not isinstance(found, (int, float)):
        raise UsageError(f"--fail-if: {'.'.join(gate.path)!r} is not a number", EXAMPLE)
    return found
