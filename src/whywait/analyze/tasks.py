"""What the rows of a comparison of tasks say besides its figures: by difficulty, which cases changed sides, how much
it can show. A row is a case: ``id, category, group, level`` and ``a``, ``b`` with ``right, why, outcome``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ALWAYS, NEVER = 0.95, 0.05  # of both arms: such tasks are too easy or too hard to show a loss
FEW = 100

Row = Mapping[str, Any]


def levels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Shares of right answers of A and B by category and level of difficulty, and of which level a loss would be seen:
    a description, without a test."""
    out = []
    for category, level in sorted({(str(r["category"]), int(r["level"])) for r in rows if r["level"]}):
        mine = [r for r in rows if r["category"] == category and r["level"] == level]
        a, b = (sum(float(r[k]["right"]) for r in mine) / len(mine) for k in ("a", "b"))
        out.append({"category": category, "level": level, "n": len(mine), "a": a, "b": b,
                    "tells": max(a, b) > NEVER and min(a, b) < ALWAYS})  # fmt: skip
    return out


def changed(rows: Sequence[Row], most: int = 5) -> dict[str, list[dict[str, Any]]]:
    """The first cases that B lost and won, with what was wrong with the answers; no text of them."""
    out: dict[str, list[dict[str, Any]]] = {"lost": [], "won": []}
    for r in rows:
        d = float(r["b"]["right"]) - float(r["a"]["right"])
        kind = out["lost" if d < 0 else "won"]
        if d and len(kind) < most:
            kind.append({"id": r["id"], "category": r["category"], "why_a": r["a"]["why"], "why_b": r["b"]["why"]})
    return out


def doubts(rows: Sequence[Row]) -> list[dict[str, str]]:
    """What makes the comparison say less than it seems to: failed requests, tasks that tell nothing, too few."""
    out = []
    for name in ("a", "b"):
        kinds = [str(r[name]["outcome"]) for r in rows if r[name]["outcome"] != "ok"]
        if kinds:
            out.append({"what": f"{len(kinds)} of {len(rows)} tasks of arm {name.upper()} were not answered",
                        "why": f"{', '.join(sorted(set(kinds)))}; they count as wrong",
                        "next": "see the service's log, then ask again"})  # fmt: skip
    dull = []
    for category in dict.fromkeys(str(r["category"]) for r in rows):
        mine = [r for r in rows if r["category"] == category]
        a, b = (sum(float(r[k]["right"]) for r in mine) / len(mine) for k in ("a", "b"))
        if min(a, b) >= ALWAYS or max(a, b) <= NEVER:
            dull.append(f"{category} ({a:.0%} and {b:.0%} right)")
    if dull:
        out.append({"what": f"hardly a loss could show in {', '.join(dull)}",
                    "why": "a task that both arms always solve, or never, tells nothing",
                    "next": "other levels (--tasks NAME:LOW-HIGH), or tasks of your own"})  # fmt: skip
    if 0 < len(rows) < FEW:
        out.append({"what": f"{len(rows)} tasks are few", "why": "a drop of a few points cannot be told from chance",
                    "next": "more of them: --cases N"})  # fmt: skip
    return out
