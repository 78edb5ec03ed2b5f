"""Draws of what is not known of a deployment before anything of it was measured."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np

from whywait.physics.efficiency import Efficiency
from whywait.sim.deployment import Deployment

#: Standard deviation of the logarithm of each multiplier where the fits do not say it.
SPREAD = {"weights": 0.12, "compute": 0.2, "experts": 0.2, "kv": 0.2, "pairs": 0.2, "link": 0.3, "step": 0.35,
          "sequence": 0.5, "token": 0.5, "prefill_step": 0.5, "frontend": 0.5, "kv_space": 0.05}  # fmt: skip


def prior_draws(d: Deployment, n: int, seed: int) -> list[Efficiency]:
    """``n`` efficiencies from the prior of the fits, around the deployment's own. The same seed gives the same draws,
    and they are spread evenly over each multiplier (Latin hypercube; McKay et al., Technometrics 21 (1979) 239)."""
    rng = np.random.default_rng([seed, 11])
    names = [f.name for f in fields(Efficiency) if isinstance(f.default, float)]
    out = [d.efficiency] * n
    for name in names:
        ranks = (rng.permutation(n) + rng.random(n)) / n
        spread = SPREAD.get(name, 0.2)
        for i, u in enumerate(ranks.tolist()):
            out[i] = replace(out[i], **{name: getattr(out[i], name) * math.exp(spread * _normal(u))})
    return out


def _normal(u: float) -> float:
    """The standard normal quantile."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(min(max(u, 1e-9), 1 - 1e-9))
