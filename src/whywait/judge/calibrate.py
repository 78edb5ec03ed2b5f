"""Efficiencies of a service from what it was measured to do, and what of them remains unknown.

The model of Kennedy & O'Hagan (*Bayesian calibration of computer models*, JRSS B 63 (2001), section 4.2), on
logarithms:

    log measured(metric, load) = log simulated(theta, metric, load) + discrepancy(metric, load) + sampling error

``theta`` are logarithms of multipliers, 0 before anything was seen, with the spread that the fits of operations leave.
The discrepancy, what the simulator has wrong whatever its parameters, is a Gaussian process over the load (and over
metrics of one family), so that it is known near loads that were measured and unknown far from them. Its size per family
is learnt from the residuals, within a prior; single residuals far out count less (Student's t).

``predict`` comes from the application: this module knows no simulator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.core import bounded
from whywait.core.run import write_json
from whywait.errors import UsageError

Vector = NDArray[np.float64]

#: Metrics at a point for given multipliers by name: the point by its place in the list that is calibrated on.
Predict = Callable[[Mapping[str, float], int], Mapping[str, float]]

POSTERIOR, ONE_POINT, PRIOR = "posterior", "one point", "prior"
MOVED = 0.7  # a parameter whose sd shrank below this share of its prior was told by the data
_VERSION = 1


@dataclass(frozen=True)
class Seen:
    """A positive figure and the sampling error of its logarithm (0: none)."""

    value: float
    log_se: float = 0.0


@dataclass(frozen=True)
class Point:
    """A load point as measured. ``at`` are logarithms that say where it lies among loads (requests in flight, tokens of
    prompt and answer); the discrepancy is like that of points nearby."""

    name: str
    at: tuple[float, ...]
    seen: Mapping[str, Seen]


@dataclass(frozen=True)
class Prior:
    """Standard deviations of the logarithms of the multipliers, whose medians are 1 unless ``log_median`` says else."""

    log_sd: Mapping[str, float]
    log_median: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.log_sd)

    def sd(self) -> Vector:
        return np.array([max(float(v), 1e-6) for v in self.log_sd.values()])

    def mean(self) -> Vector:
        return np.array([float(self.log_median.get(k, 0.0)) for k in self.log_sd])


@dataclass(frozen=True)
class Knobs:
    """How far the simulator is trusted. Figures per family of metrics (the name before the dot) are logarithms.

    ``guess`` is the discrepancy before any residual was seen, ``floor`` the least that is believed afterwards;
    ``doubt`` the log-sd of that guess. ``length`` is the distance in log load over which the discrepancy forgets
    1 − 1/e of itself, ``alike`` its correlation between two metrics of a family. ``tail`` are the degrees of freedom of
    the predictions, ``outlier`` those of single residuals. ``changed`` is what a changed deployment adds to a ratio,
    ``again`` what two measurements of the same service differ by beyond their sampling.
    """

    guess: Mapping[str, float] = field(default_factory=lambda: {"tpot_ms": 0.06, "ttft_ms": 0.15, "prefill_ms": 0.25})
    floor: Mapping[str, float] = field(default_factory=lambda: {"tpot_ms": 0.02, "ttft_ms": 0.05})
    changed: Mapping[str, float] = field(default_factory=lambda: {"tpot_ms": 0.03, "ttft_ms": 0.07})
    other: tuple[float, float, float] = (0.10, 0.03, 0.05)  # guess, floor and changed of families not named
    doubt: float = 0.6
    length: float = 2.0
    alike: float = 0.7
    tail: float = 6.0
    outlier: float = 4.0
    again: float = 0.03
    rounds: int = 8  # steps of the search at most

    def guessed(self, metric: str) -> float:
        return float(self.guess.get(family(metric), self.other[0]))

    def least(self, metric: str) -> float:
        return float(self.floor.get(family(metric), self.other[1]))

    def change(self, metric: str) -> float:
        return float(self.changed.get(family(metric), self.other[2]))


@dataclass(frozen=True)
class Parameter:
    """One multiplier: its median and 80 % interval, and how much of the prior's spread the data left (0..1)."""

    name: str
    median: float
    low: float
    high: float
    left: float

    @property
    def moved(self) -> bool:
        return self.left < MOVED


@dataclass(frozen=True)
class Calibration:
    """A posterior, frozen. Everything is in logarithms; ``rows`` are the (point, metric) pairs it was made from.

    ``residual`` (rows,) is log measured − log simulated, linear in theta by ``slopes`` (rows × parameters):
    ``residual(theta) = at_zero − slopes theta``. ``noise`` (rows,) are variances of sampling, grown where a row was far
    out; ``discrepancy`` the learnt sd by family.
    """

    kind: str
    names: tuple[str, ...]
    mean: Vector
    cov: Vector  # parameters × parameters
    prior_sd: Vector
    prior_mean: Vector
    knobs: Knobs
    points: tuple[Point, ...] = ()
    rows: tuple[tuple[int, str], ...] = ()
    at_zero: Vector = field(default_factory=lambda: np.zeros(0))
    slopes: Vector = field(default_factory=lambda: np.zeros((0, 0)))
    noise: Vector = field(default_factory=lambda: np.zeros(0))
    discrepancy: Mapping[str, float] = field(default_factory=dict)
    evidence: float = (
        -math.inf
    )  # log density of what was seen with theta integrated out; of the same rows, more is better
    runs: int = 0  # how often the simulator was asked
    silent: tuple[str, ...] = ()  # "point: metric" that the simulator did not answer

    @property
    def calibrated(self) -> bool:
        """Whether efficiency and overhead could be told apart at all: not from one load."""
        return self.kind == POSTERIOR

    def multipliers(self, theta: Vector | None = None) -> dict[str, float]:
        """By name; of the posterior's median without ``theta``."""
        values = np.exp(self.mean if theta is None else theta)
        return {k: float(v) for k, v in zip(self.names, values, strict=True)}

    def draws(self, n: int, rng: np.random.Generator, extra_sd: Mapping[str, float] | None = None) -> Vector:
        """``n`` draws of theta (n × parameters), in pairs that mirror each other; ``extra_sd`` widens by name."""
        extra = np.array([(extra_sd or {}).get(k, 0.0) for k in self.names])
        cov = self.cov + np.diag(extra**2)
        root = np.linalg.cholesky(cov + 1e-14 * np.eye(len(cov)))
        z = rng.standard_normal(((n + 1) // 2, len(self.names)))
        out: Vector = self.mean + np.concatenate((z, -z))[:n] @ root.T
        return out

    def parameters(self) -> tuple[Parameter, ...]:
        sd = np.sqrt(np.diag(self.cov))
        z = 1.2815515655
        return tuple(
            Parameter(k, math.exp(m), math.exp(m - z * s), math.exp(m + z * s), float(s / p))
            for k, m, s, p in zip(self.names, self.mean, sd, self.prior_sd, strict=True)
        )

    def offset(self, metric: str, at: Sequence[float], theta: Vector) -> tuple[Vector, float]:
        """The discrepancy of a metric at a load: its mean for each row of ``theta`` (n × parameters), and its sd."""
        here, slope, sd = self.offset_slope(metric, at)
        return here + (theta - self.mean) @ slope, sd

    def offset_slope(self, metric: str, at: Sequence[float]) -> tuple[float, Vector, float]:
        """The same at the median of theta, its slope over theta, and its sd."""
        size = self.scale(metric)
        if not self.rows:
            return 0.0, np.zeros(len(self.names)), size
        near = size**2 * correlation(self.points, self.rows, [(at, metric)], self.knobs)[:, 0]
        solved = np.linalg.solve(self.covariance(), near)
        var = max(size**2 - float(near @ solved), 0.0)
        slope: Vector = -(solved @ self.slopes)
        return float(solved @ self.at_zero + slope @ self.mean), slope, math.sqrt(var)

    def scale(self, metric: str) -> float:
        """The sd of the discrepancy of a metric far from every load that was measured."""
        return float(self.discrepancy.get(family(metric), self.knobs.guessed(metric)))

    def covariance(self) -> Vector:
        """Of the residuals: discrepancy and sampling (rows × rows)."""
        places = [(self.points[i].at, m) for i, m in self.rows]
        alike = correlation(self.points, self.rows, places, self.knobs)
        return covariance(self.rows, alike, {family(m): self.scale(m) for _, m in self.rows}, self.noise)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = dataclasses.asdict(self)
        for key in ("mean", "cov", "prior_sd", "prior_mean", "at_zero", "slopes", "noise"):
            out[key] = np.asarray(getattr(self, key)).tolist()
        return {"version": _VERSION, **out, "evidence": self.evidence if math.isfinite(self.evidence) else None}

    def save(self, path: str | Path) -> Path:
        file = Path(path)
        try:
            write_json(file, self.as_dict())
        except OSError as exc:
            raise UsageError(
                f"cannot write the calibration to {file}: {exc.strerror}", "choose another place"
            ) from None
        return file

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read one back.

        Raises:
            UsageError: no such file, or it is no calibration of this version.
        """
        try:
            raw = bounded.read_json(Path(path))
            return _from_dict(raw)
        except OSError as exc:
            raise UsageError(f"cannot read the calibration {path}: {exc.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise UsageError(f"{path} is no calibration: {exc}", "make it again from the run") from exc


def prior_only(prior: Prior, knobs: Knobs | None = None) -> Calibration:
    """What is believed with nothing measured: wide."""
    sd = prior.sd()
    return Calibration(PRIOR, prior.names, prior.mean(), np.diag(sd**2), sd, prior.mean(), knobs or Knobs())


def family(metric: str) -> str:
    """``ttft_ms.p90`` → ``ttft_ms``: metrics that are wrong together."""
    return metric.partition(".")[0]


def correlation(
    points: Sequence[Point], rows: Sequence[tuple[int, str]], other: Sequence[tuple[Sequence[float], str]], knobs: Knobs
) -> Vector:
    """Of the discrepancies of ``rows`` (point, metric) with those at ``other`` (load, metric); (rows × other).

    Metrics of different families have none; else Matérn 1/2 in the distance of the loads, times ``alike`` between two
    metrics of one family.
    """
    here = np.array([points[i].at for i, _ in rows], dtype=np.float64).reshape(len(rows), -1)
    there = np.array([at for at, _ in other], dtype=np.float64).reshape(len(other), -1)
    far = np.sqrt(((here[:, None, :] - there[None, :, :]) ** 2).sum(axis=2))
    a, b = np.array([m for _, m in rows], dtype=object), np.array([m for _, m in other], dtype=object)
    kin_a = np.array([family(m) for m in a], dtype=object)
    kin_b = np.array([family(m) for m in b], dtype=object)
    kin = (kin_a[:, None] == kin_b[None, :]) * np.where(a[:, None] == b[None, :], 1.0, knobs.alike)
    out: Vector = kin * np.exp(-far / knobs.length)
    return out


def covariance(rows: Sequence[tuple[int, str]], alike: Vector, scale: Mapping[str, float], noise: Vector) -> Vector:
    """Of the rows: discrepancies of ``scale`` by family that are ``alike`` (rows × rows), and sampling variance."""
    sd = np.array([scale[family(m)] for _, m in rows])
    out: Vector = alike * np.outer(sd, sd) + np.diag(noise + 1e-10)
    return out


def _from_dict(raw: Mapping[str, Any]) -> Calibration:
    if raw["version"] != _VERSION:
        raise ValueError(f"version {raw['version']}")
    known = {f.name for f in dataclasses.fields(Calibration)}
    found = {k: v for k, v in raw.items() if k in known}
    for key in ("mean", "cov", "prior_sd", "prior_mean", "at_zero", "noise"):
        found[key] = np.array(found[key], dtype=np.float64)
    found["slopes"] = np.array(found["slopes"], dtype=np.float64).reshape(-1, len(found["names"]))
    found["names"] = tuple(found["names"])
    found["evidence"] = -math.inf if found.get("evidence") is None else float(found["evidence"])
    found["rows"] = tuple((int(i), str(m)) for i, m in found["rows"])
    found["silent"] = tuple(found["silent"])
    knobs = found["knobs"]
    found["knobs"] = Knobs(**{**knobs, "other": tuple(knobs["other"])})
    found["points"] = tuple(
        Point(p["name"], tuple(p["at"]), {m: Seen(**s) for m, s in p["seen"].items()}) for p in found["points"]
    )
    return Calibration(**found)
