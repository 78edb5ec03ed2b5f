"""Answers of two arms to the same cases → accuracy, what degenerated, and what B lost: one comparison, one error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.degeneration import FIGURES, SIGNS, signs
from whywait.analyze.grade import Grade, grade
from whywait.analyze.quality import MARGIN, Paired, Rule, adjusted, by_category, paired
from whywait.core.table import Array
from whywait.core.tasks import Answered, Case

SHOWN = 5  # lost and won cases that are named
ALWAYS, NEVER = 0.95, 0.05  # of both arms: such a category is too easy or too hard to show a loss


@dataclass(frozen=True)
class Comparison:
    """``accuracy``: over all cases, then by category; ``degeneration``: shares of answers and figures. Their
    ``adjusted`` p values are of one family. ``failed``: requests of A and of B by outcome, which count as wrong."""

    accuracy: tuple[Paired, ...]
    degeneration: tuple[Paired, ...]
    levels: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, int], dict[str, int]]
    lost: tuple[dict[str, Any], ...]
    won: tuple[dict[str, Any], ...]
    notes: tuple[dict[str, str], ...]

    @property
    def worse(self) -> bool:
        """That B is surely worse in accuracy, overall or in a category."""
        return any(f.found and (f.drop or 0.0) < 0 for f in self.accuracy)

    @property
    def state(self) -> str:
        """Not inferior within the margin over all cases: holds, fails or undecided."""
        return self.accuracy[0].state

    def as_dict(self) -> dict[str, Any]:
        return {
            "accuracy": [f.as_dict() for f in self.accuracy],
            "degeneration": [f.as_dict() for f in self.degeneration],
            "levels": list(self.levels), "failed": {"a": self.failed[0], "b": self.failed[1]},
            "lost": list(self.lost), "won": list(self.won), "notes": list(self.notes), "state": self.state,
        }  # fmt: skip


def compared(
    cases: Sequence[Case], a: Sequence[Answered], b: Sequence[Answered], margin: float = MARGIN, seed: int = 1
) -> Comparison:
    """Both arms' answers, in the order of ``cases``. ``margin``: of "not inferior", as a share (0.02: two points)."""
    grades = [[grade(c, x) for c, x in zip(cases, arm, strict=True)] for arm in (a, b)]
    right = np.array([[g.right for g in arm] for arm in grades], dtype=np.float64)
    groups, categories = [c.group for c in cases], [c.category for c in cases]
    accuracy = by_category((right[0], right[1]), categories, groups, margin=margin, seed=seed)
    worse = degenerated(cases, a, b, groups, seed)
    whole = adjusted([*accuracy, *worse])
    accuracy, worse = whole[: len(accuracy)], whole[len(accuracy) :]
    failed = tuple(dict(Counter(x.outcome for x in arm if not x.ok)) for arm in (a, b))
    moved = right[1] - right[0]
    return Comparison(
        tuple(accuracy), tuple(worse), tuple(_levels(cases, right)), (failed[0], failed[1]),
        tuple(_named(cases, grades, moved < 0)), tuple(_named(cases, grades, moved > 0)),
        tuple(_notes(cases, accuracy, failed)),
    )  # fmt: skip


def degenerated(
    cases: Sequence[Case], a: Sequence[Answered], b: Sequence[Answered], groups: Sequence[str], seed: int
) -> list[Paired]:
    """Every sign and figure that both arms tell, paired. A sign that neither arm ever showed is told, and asks nothing:
    it has no p value and takes no share of the error."""
    of_a, of_b = signs(cases, a), signs(cases, b)
    out = []
    for name, title in {**SIGNS, **FIGURES}.items():
        rule = Rule(math.nan, 0.95, name in SIGNS or name == "repeated")
        found = paired(title, of_a[name], of_b[name], groups, rule=rule, seed=seed)
        if found.n:
            out.append(found)
    return [_silent(f) for f in out]


def _silent(f: Paired) -> Paired:
    if f.worse or f.better:
        return f
    return Paired(**{**f.__dict__, "p": None})


def _levels(cases: Sequence[Case], right: Array) -> list[dict[str, Any]]:
    """Shares of right answers by category and level: a description."""
    keys = sorted({(c.category, c.level) for c in cases if c.level})
    out = []
    for category, level in keys:
        mine = np.array([c.category == category and c.level == level for c in cases])
        out.append({"category": category, "level": level, "n": int(mine.sum()),
                    "a": float(right[0][mine].mean()), "b": float(right[1][mine].mean())})  # fmt: skip
    return out


def _named(cases: Sequence[Case], grades: Sequence[Sequence[Grade]], which: Array) -> list[dict[str, Any]]:
    """Ids of the first cases that changed sides, and why; texts stay out of it, as they may be the user's own."""
    out = []
    for i in np.flatnonzero(which)[:SHOWN]:
        out.append({"id": cases[i].id, "category": cases[i].category, "why_a": grades[0][i].why,
                    "why_b": grades[1][i].why})  # fmt: skip
    return out


def _notes(cases: Sequence[Case], accuracy: Sequence[Paired], failed: Sequence[dict[str, int]]) -> list[dict[str, str]]:
    """What makes the comparison say less than it seems to."""
    out = []
    dull = [f.name for f in accuracy[1:] or accuracy if f.a is not None and f.b is not None
            and (min(f.a, f.b) >= ALWAYS or max(f.a, f.b) <= NEVER)]  # fmt: skip
    if dull:
        out.append({"what": f"hardly a loss could show in {', '.join(dull)}",
                    "why": "both arms answer (nearly) all or none of these right",
                    "next": "harder or easier cases: other sets, or your own"})  # fmt: skip
    counts = [sum(f.values()) for f in failed]
    if any(counts):
        out.append({"what": f"{counts[0]} requests of A and {counts[1]} of B failed",
                    "why": "they count as wrong: " + ", ".join(sorted({k for f in failed for k in f})),
                    "next": "see the services' logs, then ask again"})  # fmt: skip
    if len(cases) < 100:
        out.append({"what": f"{len(cases)} cases are few", "why": "a drop of a few points cannot be told from chance",
                    "next": "more: --cases N"})  # fmt: skip
    return out
