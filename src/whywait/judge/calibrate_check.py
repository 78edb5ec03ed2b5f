"""How wrong a calibrated simulator is on this service: at the points it was made from, and at each of them left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from whywait.judge.calibrate import Calibration, Point, Predict, Vector, family
from whywait.judge.calibrate_fit import without

LEVEL = 0.8  # of the intervals that are printed
#: Largest error of a held-out point, as a share, up to which a what-if is claimed.
BOUND: Mapping[str, float] = {"tpot_ms": 0.20, "ttft_ms": 0.30, "output_tokens_per_s": 0.20, "e2e_ms": 0.20}
JUDGED = ("ttft_ms.mean", "ttft_ms.p50", "tpot_ms.mean", "tpot_ms.p50", "output_tokens_per_s")


@dataclass(frozen=True)
class Interval:
    """A prediction with its interval at ``LEVEL``."""

    median: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Miss:
    """One metric at one point: measured, and predicted by a calibration that saw the point (``seen``) or did not."""

    point: str
    metric: str
    measured: float
    predicted: Interval
    seen: bool
    from_points: int  # how many points that calibration was made from

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted.median / self.measured - 1


@dataclass(frozen=True)
class Check:
    """All misses. ``beyond`` are those of held-out points past the bound: with any of them a what-if is undecided."""

    misses: tuple[Miss, ...]
    bound: Mapping[str, float] = field(default_factory=lambda: dict(BOUND))

    @property
    def held_out(self) -> tuple[Miss, ...]:
        return tuple(m for m in self.misses if not m.seen)

    @property
    def beyond(self) -> tuple[Miss, ...]:
        return tuple(
            m for m in self.held_out if m.metric in JUDGED and abs(m.error) > self.bound.get(family(m.metric), math.inf)
        )

    @property
    def outside(self) -> tuple[Miss, ...]:
        """Left-out figures outside their interval."""
        return tuple(m for m in self.held_out if not m.predicted.holds(m.measured))

    @property
    def passes(self) -> bool:
        """Some point was held out, and none was missed by more than the bound."""
        return bool(self.held_out) and not self.beyond

    @property
    def covered(self) -> float | None:
        """Share of the held-out figures inside their interval."""
        out = self.held_out
        return sum(m.predicted.holds(m.measured) for m in out) / len(out) if out else None


def check(found: Calibration, predict: Predict, bound: Mapping[str, float] | None = None) -> Check:
    """Simulate every point of a calibration with it, and with one that was made without that point.

    Of two points only the heavier load is left out: from one load alone nobody can tell what a lighter one would be
    spared.
    """
    misses: list[Miss] = []
    used = sorted({p for p, _ in found.rows}, key=lambda i: found.points[i].at)
    spared = used[:1] if len(used) == 2 else []
    for i in used:
        for calibration in (found, None if i in spared else without(found, i, predict)):
            if calibration is not None:
                seen = calibration is found
                count = len({p for p, _ in calibration.rows})
                misses += [
                    Miss(found.points[i].name, m, found.points[i].seen[m].value, interval, seen, count)
                    for m, interval in at_point(found, calibration, predict, i).items()
                ]
    return Check(tuple(misses), {**BOUND, **(bound or {})})


def at_point(whole: Calibration, found: Calibration, predict: Predict, point: int) -> dict[str, Interval]:
    """What ``found`` says of a point of ``whole``, by metric: one simulation at its median, its spread by the slopes of
    ``whole`` there (the delta method), discrepancy and the point's own sampling error on top."""
    said = predict(found.multipliers(), point)
    here, out = whole.points[point], dict[str, Interval]()
    for row, (p, m) in enumerate(whole.rows):
        value = said.get(m, math.nan)
        if p != point or not value > 0 or not math.isfinite(value):
            continue
        off, slope, sd = found.offset_slope(m, here.at)
        whole_slope = whole.slopes[row] + slope
        spread_sd = math.sqrt(max(float(whole_slope @ found.cov @ whole_slope), 0.0))
        reach = quantile(0.5 + LEVEL / 2, found.knobs.tail) * math.hypot(spread_sd, math.hypot(sd, here.seen[m].log_se))
        middle = math.log(value) + off
        out[m] = Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))
    return out


def predictions(
    found: Calibration,
    predict: Predict,
    where: tuple[int, Point],
    metrics: Sequence[str],
    sampled: tuple[int, np.random.Generator],
) -> dict[str, Interval]:
    """What a measurement at any point would show, by metric: parameters, discrepancy, the point's own sampling error.

    ``where`` is the point's place for ``predict`` and the point; ``sampled`` the number of draws and their generator.
    Metrics that the simulator leaves out are left out.
    """
    (index, point), (n, rng) = where, sampled
    theta = found.draws(n, rng)
    said = [predict(found.multipliers(t), index) for t in theta]
    out: dict[str, Interval] = {}
    for m in metrics:
        values = np.array([s.get(m, math.nan) for s in said])
        if not (values > 0).all() or not np.isfinite(values).all():
            continue
        off, sd = found.offset(m, point.at, theta)
        noise = point.seen[m].log_se if m in point.seen else 0.0
        out[m] = spread(np.log(values) + off, math.hypot(sd, noise), found.knobs.tail)
    return out


def spread(logs: Vector, sd: float, tail: float) -> Interval:
    """The interval of draws of a logarithm and an error of ``sd`` on top, by Student's t with ``tail`` degrees."""
    middle = float(np.mean(logs))
    whole = math.hypot(float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0, sd)
    reach = quantile(0.5 + LEVEL / 2, tail) * whole
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


@functools.cache
def quantile(p: float, dof: float) -> float:
    """Student's t: by bisection on its distribution function, which is a sum for the incomplete beta function."""
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if _below(middle, dof) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _below(t: float, dof: float) -> float:
    """P(T ≤ t), t ≥ 0, by Simpson's rule over the density."""
    x = np.linspace(0.0, t, 401)
    log_norm = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    y = np.exp(log_norm - (dof + 1) / 2 * np.log1p(x**2 / dof))
    return 0.5 + float((y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum()) * t / 1200)


def helps(found: Calibration, checked: Check) -> str:
    """The measurement that would help most, where a what-if stays undecided."""
    loads = sorted({round(math.exp(p.at[0])) for p in found.points if p.at}) or [1]
    if not found.calibrated:
        return f"sweep at two loads or more: whywait sweep URL --concurrency {_around(loads)}"
    kinds = {family(m.metric) for m in checked.beyond or checked.outside}
    if kinds and kinds <= {"ttft_ms"} and not any(family(m) in ("queue_ms", "prefill_ms") for _, m in found.rows):
        return "run with the engine's metrics (and per-request stages), so that queue and prefill are told apart"
    if len(found.points) < 4:
        return f"measure more loads, so that one left out is not far from the rest: --concurrency {_around(loads)}"
    if checked.held_out and not checked.beyond:
        return (
            "measure the undecided loads for longer, and loads next to them: left out, they are outside their intervals"
        )
    return "measure the load that is asked about itself, for longer: the simulator does not describe this service"


def _around(loads: Sequence[int]) -> str:
    low, high = max(min(loads), 1), max(*loads, 8)
    if len(set(loads)) == 1:  # another load on either side of it
        low, high = max(low // 4, 1), max(high, 4 * low)
    steps = sorted({low, *loads, high, round(math.sqrt(low * high)), round((low * high**3) ** 0.25)})
    return ",".join(str(s) for s in steps)
