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
from whywait.sim.deployment import Deployment
from whywait.twin.model import FIELDS, REPLY, Twin, prior_of, unsure

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
    ``plain`` is the deployment with the multipliers of the fits; ``replicas`` those that the run measured together."""

    run: str
    own: bool
    found: Calibration
    carried: Carried
    plain: Deployment
    replicas: int = 1

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

    def factors(self, at: tuple[float, ...], n: int, seed: int) -> tuple[dict[str, float], list[dict[str, float]]]:
        """What measured latencies are over simulated ones at a load, by bound: in the median, and in each draw (of the
        same theta as :meth:`draws`); the discrepancy that the run left, and what a changed deployment and another
        measurement add to it."""
        theta, rng, k = self._theta(n, seed), np.random.default_rng([seed, 17]), self.found.knobs
        middle, each = dict[str, float](), [dict[str, float]() for _ in range(n)]
        for metric in dict.fromkeys(LIKE.values()):
            off, sd = self.found.offset(metric, at, theta)
            here = self.found.offset(metric, at, self.found.mean[None, :])[0]
            wrong = np.exp(off + rng.standard_normal(n) * math.hypot(sd, math.hypot(k.change(metric), k.again)))
            for bound in (b for b, like in LIKE.items() if like == metric):
                middle[bound] = float(np.exp(here[0]))
                for i in range(n):
                    each[i][bound] = float(wrong[i])
        return middle, each

    def _theta(self, n: int, seed: int) -> Floats:
        return self.found.draws(n, np.random.default_rng([seed, 12]))
