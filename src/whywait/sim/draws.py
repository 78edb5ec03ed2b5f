"""Draws of what is not known of a deployment before anything of it was measured."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from statistics import NormalDist

import numpy as np

from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import prior_of
from whywait.sim.deployment import Deployment
from whywait.sim.loads import family_of


def prior_draws(d: Deployment, n: int, seed: int) -> list[Efficiency]:
    """``n`` efficiencies around the deployment's own, each multiplier lognormal with the sd that the fits have (see
    ``physics.fitted.prior_of``). The same seed gives the same draws, spread evenly over each multiplier (Latin
    hypercube: McKay et al., Technometrics 21 (1979) 239)."""
    rng, normal = np.random.default_rng([seed, 11]), NormalDist()
    sd = prior_of(d.machine, family_of(d)).sd
    out = [d.efficiency] * n
    for name in (f.name for f in fields(Efficiency) if isinstance(f.default, float)):
        ranks = (rng.permutation(n) + rng.random(n)) / n
        if sd.get(name):
            out = [replace(e, **{name: getattr(e, name) * math.exp(sd[name] * normal.inv_cdf(u))})
                   for e, u in zip(out, np.clip(ranks, 1e-9, 1 - 1e-9).tolist(), strict=True)]  # fmt: skip
    return out


def basis(d: Deployment) -> str:
    """What the prior of a deployment rests on, in words."""
    if d.efficiency.kernels == "aic":
        from whywait.physics import aic

        return aic.basis(d.machine, family_of(d))
    return prior_of(d.machine, family_of(d)).basis
