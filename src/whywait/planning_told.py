"""What measured runs tell of the candidates of a plan: each is calibrated by a run of its machine, engine and model,
else by one of its engine and model on another machine. Part of the application layer; the calibration is that of
``whywait what-if``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge.calibrate import family
from whywait.judge.calibrate_check import JUDGED, helps
from whywait.judge.plan_told import CANNOT, ELSEWHERE, REFUSED, USED
from whywait.physics.fitted import FAMILIES
from whywait.planning_space import Shape
from whywait.sim.result import describe
from whywait.twin.baseline import Baseline, as_rows
from whywait.twin.fitting import Fitted, begin, fit
from whywait.twin.told import Told, carried

Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Calibrated:
    """A run that may speak: its fit, and what is said of it (plain JSON values, filled in as it is used)."""

    run: str
    base: Baseline
    fitted: Fitted
    story: dict[str, Any]


def calibrated(
    runs: Sequence[str], shapes: Sequence[Shape], baseline: str = "", say: Say | None = None
) -> tuple[list[Shape], list[dict[str, Any]]]:
    """``shapes``, those that a run speaks of with what it told of them, and a story per run: ``state`` is used, refused
    (its own check fails: the prior is kept), of nothing here, or not possible, with ``why``."""
    found, stories = [], []
    for i, name in enumerate(runs):
        if say is not None:
            say("calibrating on runs", i, len(runs))
        one = _one(name, shapes, baseline)
        stories.append(one if isinstance(one, dict) else one.story)
        if isinstance(one, Calibrated) and not one.fitted.refused:
            found.append(one)
    if say is not None and runs:
        say("calibrating on runs", len(runs), len(runs))
    out = [_told(s, found) for s in shapes]
    for c in found:
        for key, own in (("own", True), ("other_machine", False)):
            groups = dict.fromkeys(s.group for s in out if s.told and s.told.run == c.run and s.told.own is own)
            c.story[key] = list(groups)
        if not (c.story["own"] or c.story["other_machine"]):
            c.story.update(state=ELSEWHERE, why="another run that was given speaks of the same candidates")
    return out, stories


def _one(name: str, shapes: Sequence[Shape], baseline: str) -> Calibrated | dict[str, Any]:
    plain: dict[str, Any] = {"run": name, "state": CANNOT, "why": "", "made_by": None, "circular": False,
                             "own": [], "other_machine": []}  # fmt: skip
    run = Run.load(name)
    plain |= {"made_by": run.manifest.origin, "circular": run.manifest.origin == "simulated"}
    try:
        begun = begin(run, name, baseline)
    except UsageError as exc:
        return plain | {"why": exc.message + (f" ({exc.hint})" if exc.hint else "")}
    d = begun.base.deployment
    plain |= {"machine": d.machine.name, "engine": d.engine.policy, "model": d.model.name,
              "baseline": as_rows(begun.base.facts), "deployment": describe(d)}  # fmt: skip
    mine = [s for s in shapes if _speaks(begun.base, s)]
    if not mine:
        what = f"it measured {d.model.name} under {d.engine.policy} on {d.machine.name}"
        return plain | {"state": ELSEWHERE, "why": f"{what}: no candidate is of that model and engine"}
    try:
        fitted = fit(begun)
    except UsageError as exc:  # what it was asked does not go into the deployment that it says it was
        return plain | {"why": exc.message + (f" ({exc.hint})" if exc.hint else "")}
    return Calibrated(name, begun.base, fitted, plain | _story(fitted))


def _story(f: Fitted) -> dict[str, Any]:
    """The calibration and its own error in plain values."""
    c = f.check
    worst: dict[str, float] = {}
    for m in c.held_out:
        kind = family(m.metric)
        if m.metric in JUDGED and abs(m.error) >= abs(worst.get(kind, 0.0)):
            worst[kind] = m.error
    moved = [dataclasses.asdict(p) for p in f.calibration.parameters() if p.moved]
    return {
        "state": REFUSED if f.refused else USED, "why": f.refused, "facts": as_rows(f.facts),
        "points": [p.name for p in f.calibration.points], "moved": moved, "worst": worst,
        "left_out": len({m.point for m in c.held_out}), "figures": len(c.held_out), "outside": len(c.outside),
        "covered": c.covered, "bound": dict(c.bound), "discrepancy": dict(f.calibration.discrepancy),
        "helps": helps(f.calibration, c) if f.refused else None,
    }  # fmt: skip


def _speaks(base: Baseline, s: Shape) -> bool:
    """Whether a run says anything of a candidate: same model and engine. What a processor does says nothing of another
    machine, and an engine without fitted kernels none of its own."""
    mine, other = base.deployment, s.deployment
    same = mine.model.name == other.model.name and mine.engine.policy == other.engine.policy
    here = mine.machine.name == other.machine.name
    return same and mine.engine.policy in FAMILIES and (here or not base.cpu)


def _told(s: Shape, found: Sequence[Calibrated]) -> Shape:
    """By the run of its very machine, else of another; of several the one with most load points."""
    mine = [c for c in found if _speaks(c.base, s)]
    if not mine:
        return s

    def rank(c: Calibrated) -> tuple[bool, int]:
        return c.base.deployment.machine.name == s.deployment.machine.name, len(c.fitted.calibration.points)

    best = max(mine, key=rank)
    before = best.fitted.twin.deployment
    told = Told(best.run, rank(best)[0], best.fitted.calibration, carried(before, s.deployment, best.base.cpu),
                s.deployment, before)  # fmt: skip
    return dataclasses.replace(s, deployment=told.median, told=told)
