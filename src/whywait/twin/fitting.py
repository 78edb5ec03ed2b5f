"""A measured Run's twin, fitted to it and checked: what a what-if and a plan begin with. Part of the application
layer."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whywait.analyze.observed import Observed, observed
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge.calibrate import Calibration, Knobs
from whywait.judge.calibrate_check import BOUND, Check, check
from whywait.judge.calibrate_fit import calibrate
from whywait.twin.asked import asked
from whywait.twin.baseline import Baseline, baseline_of
from whywait.twin.budget import fitted_budget
from whywait.twin.model import Twin, points_of, prior_of
from whywait.twin.spread import Fact


@dataclass(frozen=True)
class Begun:
    """What is known before anything is fitted."""

    run: Run
    seen: Sequence[Observed]
    base: Baseline
    twin: Twin


@dataclass(frozen=True)
class Fitted:
    """``twin`` with the limit that the run fits best, ``facts`` of its baseline, and the posterior with its errors.
    ``compiling`` s of the time it took went into compiling the simulator, perhaps."""

    twin: Twin
    facts: tuple[Fact, ...]
    calibration: Calibration
    check: Check
    compiling: float

    @property
    def refused(self) -> str:
        """Why nothing may be claimed by it; empty where it may."""
        return refusal(self.calibration, self.check)


def begin(run: Run, name: str, baseline: str = "", slo: Mapping[str, float] | None = None) -> Begun:
    """The twin of ``run``, its multipliers all 1.

    Raises:
        UsageError: the run holds nothing that ended well, or does not say which deployment it measured.
    """
    seen = observed(run)
    if not seen:
        raise UsageError(f"{name} holds no load point at which a request ended well", "whywait show says what happened")
    base = baseline_of(run, baseline)
    limits = dict(run.manifest.slo) if slo is None else dict(slo)
    return Begun(run, seen, base, Twin(base.deployment, tuple(asked(run, o) for o in seen), limits))


def fit(begun: Begun, knobs: Knobs | None = None, bound: Mapping[str, float] | None = None) -> Fitted:
    """The calibration on the run and its error on loads left out. Where the engine's default limit of tokens per step
    fits badly and the run does not tell it, another one may be taken."""
    twin, facts = begun.twin, begun.base.facts
    began = time.monotonic()
    twin.predict({}, 0)
    compiling = time.monotonic() - began  # the first one compiles, where the extra is there
    found = calibrate(points_of(begun.seen), twin.predict, prior_of(begun.base.deployment, begun.base.cpu), knobs)
    checked = check(found, twin.predict, bound=bound)
    # Whatever error is allowed: a poor fit may have settled on multipliers that make up for a wrong limit.
    if found.calibrated and not dataclasses.replace(checked, bound=BOUND).passes:
        other = fitted_budget(twin, found, facts)
        if other is not None:
            twin, found, fact = other
            checked = check(found, twin.predict, bound=bound)
            facts = (*(f for f in facts if f.what != fact.what), fact)
    return Fitted(twin, facts, found, checked, compiling)


def refusal(found: Calibration, checked: Check) -> str:
    """Why nothing may be claimed; empty where it may."""
    if not found.calibrated:
        return "one load point is no calibration: what a step costs and what is spent around it cannot be told apart"
    if checked.passes:
        return ""
    if not checked.held_out:
        return "no load point could be left out"
    worst = max(checked.beyond, key=lambda m: abs(math.log(max(1 + m.error, 1e-9))))
    bound = checked.bound[worst.metric.partition(".")[0]]
    miss = f"{worst.metric} at {worst.point} by {100 * worst.error:+.1f} %"
    return f"the simulator misses {miss} when that load is left out (bound {100 * bound:.0f} %)"
