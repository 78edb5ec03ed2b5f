"""What a calibration on one deployment says of another one: the same multipliers, less surely where the two differ.
Part of the application layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.judge.calibrate import Calibration
from whywait.judge.calibrate_claims import OF_EFFECT, OF_EFFECT_TWO, error_of_change
from whywait.physics.step import StepWork, seconds
from whywait.sim.deployment import Deployment
from whywait.sim.loads import cost_of
from whywait.twin.model import FIELDS, REPLY, Twin, prior_of, unsure

At = tuple[float, ...]
Floats = NDArray[np.float64]
NAMES = (*FIELDS, REPLY)
#: Whose discrepancy a bound of an SLO has: tails of what was calibrated.
LIKE = {"ttft_ms": "ttft_ms.p90", "tpot_ms": "tpot_ms.p90", "itl_ms": "tpot_ms.p90", "e2e_ms": "tpot_ms.p90"}


class Carried(NamedTuple):
    """``wider``: log-sd by name that multipliers get there on top; ``fresh``: log-sd of those that the calibration did
    not have, drawn from the prior there."""

    wider: Mapping[str, float]
    fresh: Mapping[str, float]

    def there(self, here: Mapping[str, float], z: Mapping[str, float]) -> dict[str, float]:
        """The multipliers of the other deployment, given those ``here`` and standard normals by name."""
        out = {k: v * math.exp(self.wider[k] * z[k]) if k in self.wider else v for k, v in here.items()}
        return out | {k: math.exp(sd * z[k]) for k, sd in self.fresh.items()}


def carried(before: Deployment, after: Deployment, cpu: bool) -> Carried:
    """How what was learnt of ``before`` holds of ``after``; ``cpu``: ``before`` computes on this machine's
    processor."""
    prior = prior_of(before, cpu)
    there = prior_of(after, cpu and after.machine.name == before.machine.name)
    fresh = {k: v for k, v in there.log_sd.items() if k not in prior.log_sd}
    return Carried(unsure(before, after, prior), fresh)


@dataclass(frozen=True)
class Told:
    """A deployment as a calibrated run speaks of it. ``own``: the run is of its very machine, else of another one.
    ``plain`` is the deployment with the multipliers of the fits, ``before`` the one that was measured, likewise."""

    run: str
    own: bool
    found: Calibration
    carried: Carried
    plain: Deployment
    before: Deployment

    @property
    def median(self) -> Deployment:
        return Twin(self.plain, ()).at(self.found.multipliers())

    @property
    def sd(self) -> dict[str, float]:
        """Log-sd of every multiplier there."""
        post = np.sqrt(np.diag(self.found.cov))
        out = {k: math.hypot(float(s), self.carried.wider.get(k, 0.0))
               for k, s in zip(self.found.names, post, strict=True)}  # fmt: skip
        return out | dict(self.carried.fresh)

    def draws(self, n: int, seed: int) -> list[Deployment]:
        """``n`` draws of the deployment. The same seed gives the same normals whatever the deployment is, so that those
        of one machine under one engine are paired."""
        theta, z = self._theta(n, seed), np.random.default_rng([seed, 13]).standard_normal((n, len(NAMES)))
        twin = Twin(self.plain, ())
        return [twin.at(self.carried.there(self.found.multipliers(theta[i]), dict(zip(NAMES, z[i], strict=True))))
                for i in range(n)]  # fmt: skip

    def factor(self, at: At) -> dict[str, float]:
        """What measured latencies are over simulated ones at a load, by bound, in the median: the discrepancy that the
        run left. ``at`` are logarithms of requests in flight, and of tokens of a prompt and of an answer."""
        off = {m: self.found.offset(m, at, self.found.mean[None, :])[0][0] for m in LIKE.values()}
        return {bound: float(np.exp(off[like])) for bound, like in LIKE.items()}

    def factors(self, at: At, n: int, seed: int) -> list[dict[str, float]]:
        """The same in each draw (of the theta of :meth:`draws`): with what is not known of the discrepancy, the error
        of the effect that the change of deployment has, and that of another measurement."""
        theta, rng, k = self._theta(n, seed), np.random.default_rng([seed, 17]), self.found.knobs
        wrong = {}
        for metric, effect in self._effects(at).items():
            off, sd = self.found.offset(metric, at, theta)
            share = OF_EFFECT if len(self.found.points) > 2 else OF_EFFECT_TWO
            changed = error_of_change(np.array([effect]), k.change(metric), share)
            wrong[metric] = np.exp(off + rng.standard_normal(n) * math.hypot(sd, math.hypot(changed, k.again)))
        return [{bound: float(wrong[like][i]) for bound, like in LIKE.items()} for i in range(n)]

    def _effects(self, at: At) -> dict[str, float]:
        """Log of how a step of decoding, and one with a prompt, change from the deployment that was measured."""
        many, prompt, answer = (math.exp(x) for x in at)
        n = max(many / max(self.before.replicas, 1), 1.0)
        decode = (n, n, n * (prompt + answer / 2), 0.0, 0.0, 0.0, 0.0)
        first = (n + prompt, n, n * (prompt + answer / 2), 0.0, 1.0, prompt * prompt / 2, 0.0)
        here, there = Twin(self.before, ()).at(self.found.multipliers()), self.median
        return {metric: math.log(_step_s(there, row) / _step_s(here, row))
                for metric, row in (("ttft_ms.p90", first), ("tpot_ms.p90", decode))}  # fmt: skip

    def _theta(self, n: int, seed: int) -> Floats:
        return self.found.draws(n, np.random.default_rng([seed, 12]))


def _step_s(d: Deployment, row: tuple[float, ...]) -> float:
    return float(seconds(cost_of(d), StepWork(*(np.array([x]) for x in row)))[0])
