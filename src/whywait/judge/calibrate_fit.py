"""The search for the posterior: damped Gauss–Newton on log multipliers, Laplace's covariance, discrepancy by evidence.

Slopes are finite differences with steps wide enough to see past the jumps of a scheduler; between steps they are
carried on by Broyden's rank-one update (*A class of methods for solving nonlinear simultaneous equations*, Math. Comp.
19 (1965)), since a simulation costs more than algebra. The size of the discrepancy maximises the marginal likelihood of
the linear model around the current point times its prior.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whywait.judge.calibrate import (
    ONE_POINT,
    POSTERIOR,
    Calibration,
    Knobs,
    Point,
    Predict,
    Prior,
    Vector,
    correlation,
    covariance,
    family,
    prior_only,
)

_FAR = 4.0  # logarithm beyond which a prediction is only "far off": nothing pulls harder than that
_STEP = 1.0  # of a multiplier's logarithm, at most, in one step of the search
_GRID = np.exp(np.linspace(-2.0, 2.0, 13))  # sizes of a discrepancy that are tried, of its guess


def calibrate(points: Sequence[Point], predict: Predict, prior: Prior, knobs: Knobs | None = None) -> Calibration:
    """The posterior of the multipliers given what was seen at ``points``.

    Of one point the result is labelled ``one point``: it may be used to predict, but efficiency and overhead cannot be
    told apart by it; of none it is the prior.
    """
    knobs = knobs or Knobs()
    fit = _Fit(tuple(points), predict, prior, knobs)
    if not fit.rows:
        return prior_only(prior, knobs)
    fit.search()
    return fit.result()


def without(found: Calibration, point: int, predict: Predict) -> Calibration | None:
    """The calibration that the other points give, the size of the discrepancy too; None where none is left.

    The search begins at ``found`` with its slopes, so that few simulations are needed.
    """
    if all(p == point for p, _ in found.rows):
        return None
    fit = _Fit(found.points, predict, prior_of(found), found.knobs, (point, found))
    fit.search(True)
    return fit.result()


def prior_of(found: Calibration) -> Prior:
    return Prior(
        dict(zip(found.names, found.prior_sd.tolist(), strict=True)),
        dict(zip(found.names, found.prior_mean.tolist(), strict=True)),
    )


@dataclass(frozen=True)
class Linear:
    """The model around a point: ``residual(theta) = at_zero − slopes theta`` (rows,), and what its error is made of."""

    points: tuple[Point, ...]
    rows: tuple[tuple[int, str], ...]
    at_zero: Vector
    slopes: Vector
    noise: Vector  # variances of sampling, before outliers add to them
    prior: Prior
    knobs: Knobs
    alike: Vector  # correlation of the rows' discrepancies

    def posterior(self, scale: Mapping[str, float], noise: Vector) -> tuple[Vector, Vector]:
        """Mean and covariance of theta."""
        whole = covariance(self.rows, self.alike, scale, noise)
        sd, mu = self.prior.sd(), self.prior.mean()
        pull = np.linalg.solve(whole, self.slopes).T
        cov = np.linalg.inv(pull @ self.slopes + np.diag(sd**-2.0))
        cov = (cov + cov.T) / 2
        return cov @ (pull @ self.at_zero + mu / sd**2), cov

    def learn(self, scale: dict[str, float], noise: Vector) -> dict[str, float]:
        """``scale`` by family, one family after another, to the greatest evidence times prior."""
        scale = dict(scale)
        for f in dict.fromkeys(family(m) for _, m in self.rows):
            guess, least = self.knobs.guessed(f), self.knobs.least(f)
            sizes = np.unique(np.maximum(guess * _GRID, least))
            worth = [self._evidence({**scale, f: s}, noise) - _log_doubt(s, guess, self.knobs) for s in sizes]
            scale[f] = float(sizes[int(np.argmax(worth))])
        return scale

    def outliers(self, scale: Mapping[str, float], noise: Vector) -> Vector:
        """``noise`` grown where a residual is far out by Student's t: (tail + e²) / (tail + 1) of its variance."""
        mean, _ = self.posterior(scale, noise)
        own = np.diag(covariance(self.rows, self.alike, scale, self.noise))
        far = (self.at_zero - self.slopes @ mean) ** 2 / own
        grown: Vector = self.noise + own * np.maximum((far - 1) / (self.knobs.outlier + 1), 0.0)
        return grown

    def solved(self, kind: str, rounds: int = 3) -> Calibration:
        """The whole inference on the linear model; size of the discrepancy and outliers in turn, ``rounds`` times."""
        scale = {f: self.knobs.guessed(f) for f in dict.fromkeys(family(m) for _, m in self.rows)}
        noise = self.noise
        for _ in range(rounds):
            scale = self.learn(scale, noise)
            noise = self.outliers(scale, noise)
        mean, cov = self.posterior(scale, noise)
        return Calibration(
            kind, self.prior.names, mean, cov, self.prior.sd(), self.prior.mean(), self.knobs, self.points, self.rows,
            self.at_zero, self.slopes, noise, scale,
        )  # fmt: skip

    def _evidence(self, scale: Mapping[str, float], noise: Vector) -> float:
        """Log density of the residuals with theta integrated out, up to a constant."""
        whole = covariance(self.rows, self.alike, scale, noise)
        whole = whole + (self.slopes * self.prior.sd() ** 2) @ self.slopes.T
        left = self.at_zero - self.slopes @ self.prior.mean()
        root = np.linalg.cholesky(whole)
        white = np.linalg.solve(root, left)
        return float(-0.5 * white @ white - np.log(np.diag(root)).sum())


def _log_doubt(size: float, guess: float, knobs: Knobs) -> float:
    return 0.5 * (math.log(size / guess) / knobs.doubt) ** 2


class _Fit:
    """One search. ``theta`` are log multipliers; ``f`` (rows,) the logarithms predicted there."""

    def __init__(
        self,
        points: tuple[Point, ...],
        predict: Predict,
        prior: Prior,
        knobs: Knobs,
        left_out: tuple[int, Calibration] | None = None,
    ) -> None:
        """``left_out``: a point that is not looked at, and a calibration of all points to begin from."""
        self.points, self.prior, self.knobs = points, prior, knobs
        self._predict = predict
        self.runs = 0
        self._out = left_out[0] if left_out else -1
        self.theta = left_out[1].mean if left_out else prior.mean()
        self._ask()
        if left_out:
            at = {r: i for i, r in enumerate(left_out[1].rows)}
            self.rows_of(tuple(r for r in self.rows if r in at))
            self.slopes = left_out[1].slopes[[at[r] for r in self.rows]]

    def _ask(self) -> None:
        """What the simulator says where the search begins; metrics it leaves out are left out."""
        self._said = [self._at(self.theta, i) if i != self._out else {} for i in range(len(self.points))]
        every = [(i, m) for i, p in enumerate(self.points) for m, s in p.seen.items() if s.value > 0 and i != self._out]
        rows = tuple(r for r in every if self._said[r[0]].get(r[1], math.nan) > 0)
        self.silent = tuple(f"{self.points[i].name}: {m}" for i, m in every if (i, m) not in set(rows))
        self.rows_of(rows)

    def rows_of(self, rows: tuple[tuple[int, str], ...]) -> None:
        self.rows = rows
        self.seen = np.array([math.log(self.points[i].seen[m].value) for i, m in rows])
        self.noise = np.array([self.points[i].seen[m].log_se ** 2 for i, m in rows])
        self.f = self._logs(self._said)
        places = [(self.points[i].at, m) for i, m in rows]
        self._alike = correlation(self.points, rows, places, self.knobs) if places else np.zeros((0, 0))

    def _at(self, theta: Vector, point: int) -> Mapping[str, float]:
        self.runs += 1
        by_name = {k: float(v) for k, v in zip(self.prior.names, np.exp(theta), strict=True)}
        return self._predict(by_name, point)

    def _logs(self, said: Sequence[Mapping[str, float]]) -> Vector:
        out = np.zeros(len(self.rows))
        for k, (i, m) in enumerate(self.rows):
            value = said[i].get(m, math.nan)
            far = math.log(value) - self.seen[k] if value > 0 and math.isfinite(value) else _FAR
            out[k] = self.seen[k] + min(max(far, -_FAR), _FAR)
        return out

    def _model(self, theta: Vector) -> Vector:
        used = {i for i, _ in self.rows}
        return self._logs([self._at(theta, i) if i in used else {} for i in range(len(self.points))])

    def _slopes(self) -> Vector:
        out = np.zeros((len(self.rows), len(self.theta)))
        for j, sd in enumerate(self.prior.sd()):
            h = min(max(0.3 * sd, 0.03), 0.2)
            moved = self.theta.copy()
            moved[j] += h
            out[:, j] = (self._model(moved) - self.f) / h
        return out

    def linear(self) -> Linear:
        at_zero = self.seen - self.f + self.slopes @ self.theta
        return Linear(
            self.points, self.rows, at_zero, self.slopes, self.noise, self.prior, self.knobs, self._alike
        )  # fmt: skip

    def search(self, carried: bool = False) -> None:
        """Steps toward the posterior's mode until they are small beside its spread; see the module. ``carried``: there
        are slopes to begin with, and at the end they are good enough."""
        if not carried:
            self.slopes = self._slopes()
        fresh, damp = not carried, 1.0
        for _ in range(self.knobs.rounds if not carried else self.knobs.rounds // 2):
            here = self.linear().solved(POSTERIOR, 1)
            step = damp * (here.mean - self.theta)
            step *= min(1.0, _STEP / max(float(np.abs(step).max()), 1e-12))
            if float(np.abs(step / np.sqrt(np.diag(here.cov))).max()) < 0.1:
                break
            f = self._model(self.theta + step)
            if self._cost(here, self.theta + step, f) < self._cost(here, self.theta, self.f):
                self.slopes += np.outer(f - self.f - self.slopes @ step, step) / float(step @ step)
                self.theta, self.f, fresh, damp = self.theta + step, f, False, min(1.0, 2 * damp)
            elif not fresh:  # the carried slopes mislead: look again
                self.slopes, fresh = self._slopes(), True
            else:
                damp /= 3
        if not fresh and not carried:
            self.slopes = self._slopes()

    def _cost(self, here: Calibration, theta: Vector, f: Vector) -> float:
        left, off = self.seen - f, (theta - self.prior.mean()) / self.prior.sd()
        return float(left @ np.linalg.solve(here.covariance(), left) + off @ off)

    def result(self) -> Calibration:
        kind = POSTERIOR if len({p for p, _ in self.rows}) > 1 else ONE_POINT
        found = self.linear().solved(kind)
        return dataclasses.replace(found, runs=self.runs, silent=self.silent)
