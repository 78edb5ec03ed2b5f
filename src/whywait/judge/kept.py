"""The shape of a ``trial.json`` that can be judged and shown: what a damaged file lacks is said by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NUMBER = (int, float)
_TRIAL: Final[Mapping[str, Any]] = {
    "plan": dict, "rounds": list, "order": list, "partial_reason": str, "aa": str, "salt": str,
}  # fmt: skip
_PLAN: Final[Mapping[str, Any]] = {
    "a": str, "b": str, "same": bool, "loads": list, "asked": list, "promise": str, "margin": _NUMBER, "low": int,
    "high": int, "exclude": list, "seed": int, "technique": str, "workload": dict, "slo": dict,
}  # fmt: skip
_ROUND: Final[Mapping[str, Any]] = {
    "number": int, "arm": str, "pair": int, "run": str, "whole": bool, "seconds": _NUMBER, "calibration_ms": list,
    "partial": str, "disturbed": dict, "doubts": list, "invalid": list, "engine": dict, "figures": dict,
}  # fmt: skip
_TEXTS: Final = ("doubts", "invalid")


def check_trial(kept: Any) -> None:
    """
    Raises:
        ValueError: something is not there, or of another kind; the message names it.
    """
    _shape(kept, _TRIAL, "the file")
    _shape(kept["plan"], _PLAN, "plan")
    if not kept["plan"]["loads"]:
        raise ValueError("plan.loads is empty")
    for i, load in enumerate(kept["plan"]["loads"]):
        _shape(load, {"mode": str, "target": _NUMBER}, f"plan.loads.{i}")
    for i, r in enumerate(kept["rounds"]):
        at = f"rounds.{i}"
        _shape(r, _ROUND, at)
        if r["arm"] not in ("A", "B"):
            raise ValueError(f"{at}.arm is neither A nor B")
        for label, found in r["figures"].items():
            _each(found, dict, f"{at}.figures.{label or '(main)'}")
            for name, value in found.items():
                if value is not None:
                    _each(value, _NUMBER, f"{at}.figures.{label or '(main)'}.{name}")
        for value in r["calibration_ms"]:
            if value is not None:
                _each(value, _NUMBER, f"{at}.calibration_ms")
        for name in _TEXTS:
            for text in r[name]:
                _each(text, str, f"{at}.{name}")
        for rule, text in r["disturbed"].items():
            _each(text, str, f"{at}.disturbed.{rule}")
    if (quality := kept.get("quality")) is not None:
        _shape(quality, {"headline": str, "claims": list, "partial": bool, "directory": str}, "quality")
    if not all(x in ("A", "B") for x in kept["order"]):
        raise ValueError("order is not of A and B")


def _shape(value: Any, shape: Mapping[str, Any], at: str) -> None:
    _each(value, dict, at)
    for name, kind in shape.items():
        if name not in value:
            raise ValueError(f"{at} has no {name}")
        _each(value[name], kind, f"{at}.{name}")


def _each(value: Any, kind: Any, at: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{at} is not what a trial keeps there")
