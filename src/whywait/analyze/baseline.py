"""A digest as the small JSON that people keep beside their code, and back: what a later run is compared with.

Four significant figures, at most ``KEPT_ROWS`` requests of a load point. The format has a version of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from whywait.analyze.digest import Digest, Point, as_read, thinned
from whywait.core.table import Array
from whywait.errors import UsageError

KIND, VERSION = "whywait baseline", 1
KEPT_ROWS = 1000
_WHOLE = ("rank", "klass")
_BOOLS = ("ok", "good", "due", "tried", "inside")
_NEEDED = (*_WHOLE, "ok", "good", "due", "inside", "asked_in", "asked_out", "begin_s", "ttft_ms", "tpot_ms", "e2e_ms")
_DROPPED = ("engine", "machine")  # of facts: kept, but without what is different in every process
_LISTS = ("invalid", "disturbed", "command")
_KINDS: dict[str, type] = {
    **dict.fromkeys(("made_by", "date", "model", "whywait_version", "partial", "definitions"), str),
    **dict.fromkeys(("engine", "machine", "asked", "workload", "slo_of_classes"), dict), **dict.fromkeys(_LISTS, list),
}  # fmt: skip
_PASSING = ("pid", "port", "url", "host", "hostname", "log")


def as_json(d: Digest) -> dict[str, Any]:
    """Plain values; null is unknown."""
    facts = {k: _lasting(v) if k in _DROPPED else v for k, v in d.facts.items() if k != "doubts"}
    return {"kind": KIND, "version": VERSION, "name": d.name, "runs": d.runs, "facts": facts,
            "points": [_point_json(p) for p in d.points]}  # fmt: skip


def from_json(raw: Mapping[str, Any], where: str) -> Digest:
    """
    Raises:
        UsageError: it is no baseline, of a newer whywait, or damaged; the message says where.
    """
    if raw.get("kind") != KIND:
        raise UsageError(f"{where} is no baseline", "one is made by: whywait compare --save-baseline FILE RUN")
    version = raw.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise UsageError(
            f"{where} is a baseline of version {version!r}, this whywait reads {VERSION}", "upgrade whywait"
        )
    try:
        facts = _facts(raw["facts"])
        return Digest(str(raw["name"]), "baseline", facts, tuple(map(_point, raw["points"])), int(raw["runs"]))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as exc:
        what = f"{type(exc).__name__}: {exc}"
        raise UsageError(f"{where} is damaged ({what[:200]})", "restore it, or make it anew from a run") from None


def _facts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a comparison reads are what it takes them for; the others are only shown.

    Raises:
        TypeError, ValueError: one is something else.
    """
    facts: dict[str, Any] = as_read(dict(raw))
    facts["slo"] = {str(k): _number(v) for k, v in dict(facts["slo"]).items()}
    for key, kind in _KINDS.items():
        if not isinstance(facts.get(key), (kind, type(None))):
            raise TypeError(f"facts: {key} is no {kind.__name__}")
    for key in _LISTS:
        if not all(isinstance(v, str) for v in facts.get(key) or ()):
            raise TypeError(f"facts: {key} is not a list of texts")
    return facts


def _point_json(p: Point) -> dict[str, Any]:
    rows = None if p.rows is None else {k: _plain(k, v) for k, v in thinned(p.rows, KEPT_ROWS).items()}
    return {
        "mode": p.mode, "target": p.target, "label": p.label, "seconds": _short(p.seconds), "busy": _short(p.busy),
        "counts": {k: v for k, v in p.counts.items() if v}, "derived": list(p.derived), "notes": p.notes,
        "figures": {k: _short(v) for k, v in p.figures.items() if v is not None},
        "bounds": {k: [_short(x) for x in v] for k, v in p.bounds.items() if v != (None, None)},
        "repeats": {k: [_short(x) for x in v] for k, v in p.repeats.items()}, "classes": list(p.classes), "rows": rows,
        "pieces": None if p.pieces is None else {k: _plain(k, v) for k, v in p.pieces.items()},
    }  # fmt: skip


def _point(raw: Mapping[str, Any]) -> Point:
    rows = None if raw["rows"] is None else {str(k): _column(k, v) for k, v in raw["rows"].items()}
    classes = tuple(map(str, raw["classes"]))
    if rows is not None:
        missing = [k for k in _NEEDED if k not in rows]
        if missing or len({len(v) for v in rows.values()}) != 1:
            raise ValueError(f"rows: {', '.join(missing) or 'columns of different lengths'}")
        if len(rows["rank"]) and not 0 <= rows["klass"].min() <= rows["klass"].max() < len(classes):
            raise ValueError("rows: a class that is not there")
    pieces = None if raw["pieces"] is None else {str(k): _column("", v) for k, v in raw["pieces"].items()}
    target, label = raw["target"], raw["label"]
    return Point(
        str(raw["mode"]), None if target is None else float(target), None if label is None else str(label),
        _number(raw["seconds"]), _number(raw["busy"]), {str(k): _number(v) for k, v in raw["figures"].items()},
        {str(k): (_maybe(v[0]), _maybe(v[1])) for k, v in raw["bounds"].items()},
        {str(k): int(v) for k, v in raw["counts"].items()}, classes, rows, pieces,
        tuple(map(str, raw["derived"])), {str(k): str(v) for k, v in raw["notes"].items()},
        {str(k): tuple(_number(x) for x in v) for k, v in raw["repeats"].items()},
    )  # fmt: skip


def _number(x: Any) -> float:
    value = float(x)
    if isinstance(x, (str, bool)) or not math.isfinite(value):
        raise ValueError(f"{x!r} is not a number")
    return value


def _maybe(x: Any) -> float | None:
    return None if x is None else _number(x)


def _column(name: str, values: Any) -> Array:
    if name in _BOOLS:
        return np.array([bool(int(v)) for v in values], dtype=bool)
    if name in _WHOLE:
        return np.array([int(v) for v in values], dtype=np.int64)
    return np.array([math.nan if v is None else _number(v) for v in values], dtype=np.float64)


def _plain(name: str, v: Array) -> list[Any]:
    if name in _WHOLE or name in _BOOLS:
        return [int(x) for x in v]
    return [_short(float(x)) for x in v]


def _short(x: float | None) -> float | int | None:
    """Four significant figures, whole numbers without a point; None for what is not known."""
    if x is None or not math.isfinite(x):
        return None
    value = float(f"{x:.4g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _lasting(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {k: _lasting(v) for k, v in facts.items() if k not in _PASSING}
    return facts
