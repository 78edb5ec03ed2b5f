"""Conditions on a summary for ``--fail-if``. A figure that is unknown, or has no samples, does not pass."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whywait.analyze.against import figure_of
from whywait.errors import UsageError

OPS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
#: Titles and units of what no comparison has, as the tables call them.
GAUGES = {"queue": ("engine queue, mean", "requests"), "queue_max": ("engine queue, peak", "requests")}
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
        form = re.fullmatch(r"\s*([a-z_][a-z0-9_]*(?:\.[\w -]*\w)*)\s*(<=|>=|<|>)\s*([\d.eE+-]+)\s*", text)
        try:
            limit = float(form[3]) if form else 0.0
        except ValueError:
            form = None
        if form is None:
            raise UsageError(f"--fail-if {text!r} is not KEY<NUMBER", EXAMPLE)
        gates.append(Gate(text.strip(), tuple(form[1].split(".")), form[2], limit))
    return gates


def failed_gates(gates: list[Gate], summary: dict[str, Any]) -> list[str]:
    """What failed, in words, one per gate and point; of a search, at the highest rate known to keep the SLO.

    A key that begins with ``find.`` is one of the search's answer (``find.low<10``).

    Raises:
        UsageError: a key that the summary does not have.
    """
    out = []
    points = _kept(summary) if "find" in summary else summary["points"]
    for gate in gates:
        if gate.path[0] == "find":
            out += _failed(gate, {"find": summary.get("find")}, "")
            continue
        if not points:
            what = "no rate is known to keep the SLO" if "find" in summary else "nothing was measured"
            out.append(f"{what}, so {gate.text!r} does not pass")
        for p in points:
            out += _failed(gate, p, " at " + (p["mode"] if p["target"] is None else f"{p['mode']} {p['target']:g}"))
    return out


def _kept(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a search the point at the highest rate known to keep the SLO: its other points were meant to miss it."""
    find = summary["find"]
    at = {p["point"] for p in find["probes"] if p["answer"] == "yes" and p["rate"] == find["low"]}
    return [p for p in summary["points"] if p["point"] in at]


def _failed(gate: Gate, figures: dict[str, Any], at: str) -> list[str]:
    value, name = _value(figures, gate), ".".join(gate.path)
    if value is None:
        return [f"{name} is unknown{at}, so {gate.text!r} does not pass"]
    return [f"{_amount(name, value)}{at} ({gate.text})"] if OPS[gate.op](value, gate.limit) else []


def _amount(name: str, value: float) -> str:
    """The figure in words, by its title and unit: a bare number may be taken for a share."""
    try:
        title, unit = GAUGES.get(name) or figure_of(name)[:2]
    except KeyError:
        return f"{name} is {value:.6g}"
    if unit == "share":
        return f"{title}: {100 * value:.4g} %"
    return f"{title}: {value:.4g}{f' {unit}' if unit else ''}"


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
