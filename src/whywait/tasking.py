"""The tasks of ``whywait quality``: asked of both arms, graded, compared. Part of the application layer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whywait.analyze import degeneration, quality, tasks
from whywait.analyze.grade import grade
from whywait.core import secrets
from whywait.core.tasks import Answered, Case, Grader
from whywait.load import lmeval
from whywait.load.asking import ask_all
from whywait.load.lmeval import Sample, Suites
from whywait.load.preflight import Target
from whywait.session import Say

BATCH = 10  # times as many cases as are asked at once: what was answered is kept when the rest is cut off
SIDE = ("outcome", "finish_reason", "output_tokens", "reasoning_tokens")


def asked(target: Target, cases: Sequence[Case], how: tuple[int, float], say: Say, out: list[Answered]) -> None:
    """Answers in the order of ``cases``, put into ``out`` as they come; ``how``: at once, seconds for each."""
    at_once, timeout_s = how
    size = BATCH * at_once
    for i in range(0, len(cases), size):
        gone = bool(out) and out[-1].outcome == "never_sent"
        batch = cases[i : i + size]
        out += [Answered(c.id) for c in batch] if gone else ask_all(target, batch, at_once, timeout_s)
        say(f"  {len(out)} of {len(cases)} tasks answered")


def graded(cases: Sequence[Case], a: Sequence[Answered], b: Sequence[Answered]) -> list[dict[str, Any]]:
    """A row per case that both were asked: figures and grades, no text."""
    return [
        {"id": c.id, "category": c.category, "group": c.group, "level": c.level, "a": _side(c, x), "b": _side(c, y)}
        for c, x, y in zip(cases, a, b, strict=False)
    ]


def suites_run(target: Target, suites: Suites, keep: Path | None, say: Say) -> list[Sample]:
    """lm-eval's samples of one arm; what it writes, texts among it, stays in ``keep`` where there is one."""
    say(f"  lm-eval: {', '.join(suites.names)}")
    with contextlib.ExitStack() as stack:
        return lmeval.run(target, suites, keep or Path(stack.enter_context(tempfile.TemporaryDirectory())))


def joined(a: Sequence[Sample], b: Sequence[Sample]) -> list[dict[str, Any]]:
    """Rows as those of :func:`graded`, of the documents that lm-eval scored on both arms; a category per task."""
    theirs = {(s.task, s.key): s for s in b if s.score is not None}
    out = []
    for x in a:
        y = theirs.get((x.task, x.key))
        if x.score is not None and y is not None:
            case = Case(f"{x.task}/{x.key}", x.task, (("user", ""),), Grader("exact"))
            sides = {k: _facts(case, s.answered) | {"right": s.score} for k, s in (("a", x), ("b", y))}
            out.append({"id": case.id, "category": x.task, "group": "", "level": 0, **sides})
    return out


def _side(case: Case, answered: Answered) -> dict[str, Any]:
    found = grade(case, answered)
    return _facts(case, answered) | {"right": found.right, "why": found.why}


def _facts(case: Case, answered: Answered) -> dict[str, Any]:
    facts = {k: getattr(answered, k) for k in SIDE}
    return {"right": None, "why": "", **facts, "signs": _told(degeneration.signs(case, answered))}


def judged(rows: Sequence[Mapping[str, Any]], margin: float, seed: int) -> dict[str, Any]:
    """Accuracy over all and per category, signs of degeneration, claims and doubts, from rows of :func:`graded`;
    ``margin``: points of accuracy."""
    right = (np.array([float(r["a"]["right"]) for r in rows]), np.array([float(r["b"]["right"]) for r in rows]))
    groups, categories = [r["group"] for r in rows], [r["category"] for r in rows]
    found = quality.by_category(right, categories, groups, margin / 100, seed)
    named = len(found)
    found = quality.adjusted([*found, *degeneration.compared(rows, seed)])
    out: dict[str, Any] = _told({
        "cases": len(rows), "accuracy": quality.as_table(found[:named]),
        "degeneration": quality.as_table(found[named:]), "levels": tasks.levels(rows), "changed": tasks.changed(rows),
        "doubts": tasks.doubts(rows),
    })  # fmt: skip
    return out | {"claims": [_claim(out["accuracy"][0])]}


def _told(value: Any) -> Any:
    """Absent is null, in figures too."""
    if isinstance(value, Mapping):
        return {k: _told(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _claim(p: Mapping[str, Any]) -> dict[str, Any]:
    more = ""
    if p["state"] == "undecided":
        more = "hardly any number of cases would decide"
        if p["needed"]:  # of what was seen by chance it may be fewer than there were
            more = f"about {max(p['needed'], 2 * p['n']):,} cases like these {p['n']} would decide"
    return {"claim": f"B's accuracy is at most {100 * p['margin']:.3g} points below A's", "figure": "accuracy",
            "margin": 100 * p["margin"], "limit": -p["margin"], "state": p["state"], "value": p["drop"],
            "low": p["low"], "high": p["high"], "cases": p["n"], "next_step": more}  # fmt: skip


def keep_texts(path: Path, cases: Sequence[Case], answers: Mapping[str, Sequence[Answered]]) -> None:
    """The answers themselves, a line each; only where that was asked for."""
    with path.open("w", encoding="utf-8") as out:
        for arm, told in answers.items():
            for case, a in zip(cases, told, strict=False):
                line = {"arm": arm, "category": case.category, "prompt": case.prompt, **dataclasses.asdict(a)}
                out.write(secrets.clean(json.dumps(line, ensure_ascii=False)) + "\n")
