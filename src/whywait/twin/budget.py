"""The tokens that a step may compute, where the run does not tell them and the engine's default does not fit it."""

from __future__ import annotations

import dataclasses
import math

from whywait.judge.calibrate import Calibration
from whywait.judge.calibrate_fit import calibrate, prior_of
from whywait.twin.baseline import BUDGET
from whywait.twin.model import Twin
from whywait.twin.spread import Fact

CANDIDATES = (256, 512, 1024, 2048, 4096, 8192, 16384)
SURE = 6.0  # log evidence by which another limit must be better than the default
NEAR = 2  # of the candidates are fitted: those that miss least with the multipliers of the default


def fitted_budget(twin: Twin, found: Calibration, facts: tuple[Fact, ...]) -> tuple[Twin, Calibration, Fact] | None:
    """The twin with the limit that fits the run far better than the assumed one, its calibration, and the fact; None
    where the limit is known, or none fits far better."""
    assumed = any(f.what == BUDGET and f.how == "assumed" for f in facts)
    if not assumed or twin.deployment.engine.policy == "static":
        return None
    now = twin.deployment.engine.token_budget
    others = [_with(twin, n) for n in CANDIDATES if n != now]
    others = [t for t in others if t.deployment.engine.chunked or _fits(t)]
    best: tuple[Twin, Calibration] | None = None
    for other in sorted(others, key=lambda t: _missed(t, found))[:NEAR]:
        fit = calibrate(found.points, other.predict, prior_of(found), found.knobs)
        if fit.evidence > (best[1] if best else found).evidence + (0.0 if best else SURE):
            best = other, fit
    if best is None:
        return None
    n = best[0].deployment.engine.token_budget
    why = (
        f"not told; the run fits it far better than the engine's default of {now}; --baseline token-budget=N to say it"
    )
    return best[0], best[1], Fact(BUDGET, str(n), "assumed", why)


def _with(twin: Twin, tokens: int) -> Twin:
    engine = dataclasses.replace(twin.deployment.engine, token_budget=tokens)
    return dataclasses.replace(twin, deployment=dataclasses.replace(twin.deployment, engine=engine))


def _fits(twin: Twin) -> bool:
    """Without chunks a prompt must fit in a step."""
    longest = max(int(a.schedule.prompt_tokens.max()) for a in twin.loads)
    return twin.deployment.engine.token_budget >= longest


def _missed(twin: Twin, found: Calibration) -> float:
    """Squared log errors over all rows, at the multipliers found for another limit."""
    by_name = found.multipliers()
    total = 0.0
    for i, point in enumerate(found.points):
        said = twin.predict(by_name, i)
        for p, m in found.rows:
            if p == i:
                value = said.get(m, 0.0)
                total += min(math.log(value / point.seen[m].value) ** 2 if value > 0 else 9.0, 9.0)
    return total
