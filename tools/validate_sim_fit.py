"""Calibrates the simulator on the record: one configuration on a few of its loads, and the spread over configurations.

The population: multipliers of a configuration are drawn around the mean of its engine, ``theta_g ~ N(mu_engine, D)``
with ``D`` diagonal and common to all engines; ``mu`` and ``D`` by expectation and maximisation over the linear models
of the configurations (Dempster, Laird & Rubin 1977), each around the present means, which are then moved and looked at
anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import whywait.physics.fitted as shipped
from validate_sim_recipes import deployment_of
from validate_sim_record import Row, anchors
from validate_sim_replay import TPOT, TTFT, measured, moved, predict
from whywait.errors import WhywaitError
from whywait.judge.calibrate import Calibration, Knobs, Point, Prior, Seen, correlation, family, prior_only
from whywait.judge.calibrate_check import Interval, predictions
from whywait.judge.calibrate_fit import Linear, calibrate
from whywait.sim.capacity import capacity
from whywait.twin.model import REPLY

DRAWS = 8
#: Log-sd of a configuration's multipliers before the record was looked at.
FIRST_SD = {"weights": 0.12, "compute": 0.15, "experts": 0.25, "kv": 0.2, "pairs": 0.25, "link": 0.3, "step": 0.4,
            "sequence": 0.5, "token": 0.5, "prefill_step": 1.0, "frontend": 0.7, REPLY: 0.7,
            "kv_space": 0.08}  # fmt: skip
ENGINES = ("vllm", "sglang", "trtllm")
NAMES = tuple(FIRST_SD)
_LEAST_SD, _MOST_SD = 0.03, 1.0


@contextmanager
def operations_only() -> Iterator[None]:
    """Within it the simulator knows the measured operations, and of services only what was assumed before any was seen:
    what ships was fitted on all services of the record, and would have seen those it is tried on."""
    original = shipped.fitted
    bare = {**original(), "service": {}, "host": {"default": original()["host"]["default"]}}
    shipped.fitted = lambda: bare  # type: ignore[assignment]
    shipped.fit_of.cache_clear()
    try:
        yield
    finally:
        shipped.fitted = original
        shipped.fit_of.cache_clear()


class Asker:
    """Answers for the rows of one configuration: metrics for multipliers, each asked once."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._known: dict[tuple[object, ...], dict[str, float]] = {}
        self.points = [
            Point(r.id, r.at, {m: Seen(v) for m, v in measured(r).items() if v > 0 and math.isfinite(v)})
            for r in self.rows
        ]  # fmt: skip

    def __call__(self, multipliers: Mapping[str, float], index: int) -> Mapping[str, float]:
        row = self.rows[index]
        key = (row.load, row.ratio, *(round(v, 9) for v in multipliers.values()))
        if key not in self._known:
            try:
                self._known[key] = predict(moved(deployment_of(row), multipliers), row)
            except WhywaitError:  # with these it does not fit
                self._known[key] = {}
        return self._known[key]


@dataclass
class Population:
    """Means of the logarithms by engine, their spread, and the size of what the simulator has wrong by family."""

    mean: dict[str, dict[str, float]]
    sd: dict[str, float]
    wrong: dict[str, float] = field(default_factory=dict)

    def prior(self, rows: Sequence[Row]) -> Prior:
        """Of a configuration that was never seen."""
        names = names_of(rows[0])
        mean = self.mean[rows[0].backend]
        sd = {k: self.sd[k] for k in names}
        sd["kv_space"] = math.hypot(sd["kv_space"], space_sd(rows[0]))
        return Prior(sd, {k: mean[k] for k in names})

    def knobs(self) -> Knobs:
        base = Knobs()
        return Knobs(guess={**base.guess, **self.wrong}, doubt=0.4)


def first_guess() -> Population:
    """Before the record was looked at: the spread that calibration starts from, no shift."""
    return Population({e: dict.fromkeys(NAMES, 0.0) for e in ENGINES}, dict(FIRST_SD))


def space_sd(row: Row) -> float:
    """Log-sd of the KV space: a gigabyte more or less of working space is much where the weights leave little."""
    try:
        return 1.5e9 / max(capacity(deployment_of(row)).kv_bytes, 1e9)
    except WhywaitError:
        return 1.0


def names_of(row: Row) -> list[str]:
    """The multipliers that can matter to a configuration."""
    absent = set() if row.arch.experts else {"experts"}
    if row.part.tp * row.part.dp * row.part.pp == 1 and row.prefill is None:
        absent.add("link")
    return [k for k in NAMES if k not in absent]


def spread_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """At most ``most`` rows, evenly over the loads in their order."""
    unique = list({r.load: r for r in rows}.values())
    if len(unique) <= most:
        return unique
    return [unique[int(i)] for i in np.linspace(0, len(unique) - 1, most).round()]


def linear_at(asker: Asker, prior: Prior, at: Mapping[str, float], knobs: Knobs) -> Linear | None:
    """The configuration's linear model around ``at`` (logarithms); None where the simulator had no answer."""
    names, sd = prior.names, prior.sd()
    theta = np.array([at[k] for k in names])

    def logs(t: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[dict[str, float]]:
        by_name = dict(zip(names, np.exp(t).tolist(), strict=True))
        return [{m: math.log(v) for m, v in asker(by_name, i).items() if v > 0} for i in range(len(asker.rows))]

    here = logs(theta)
    rows = tuple((i, m) for i, p in enumerate(asker.points) for m in p.seen if m in here[i])
    if not rows:
        return None
    slopes = np.zeros((len(rows), len(names)))
    for j in range(len(names)):
        step = theta.copy()
        step[j] += min(max(0.3 * float(sd[j]), 0.03), 0.2)
        there = logs(step)
        slopes[:, j] = [(there[i].get(m, here[i][m]) - here[i][m]) / (step[j] - theta[j]) for i, m in rows]
    seen = np.array([math.log(asker.points[i].seen[m].value) for i, m in rows])
    at_zero = seen - np.array([here[i][m] for i, m in rows]) + slopes @ theta
    alike = correlation(asker.points, rows, [(asker.points[i].at, m) for i, m in rows], knobs)
    return Linear(tuple(asker.points), rows, at_zero, slopes, np.zeros(len(rows)), prior, knobs, alike)


def askers_of(configs: Mapping[str, Sequence[Row]], most: int = 6) -> dict[str, Asker]:
    """One per configuration, of at most ``most`` of its rows: what a population is fitted on."""
    return {g: Asker(spread_rows(rows, most)) for g, rows in configs.items()}


def population(askers: Mapping[str, Asker], start: Population, rounds: int = 2) -> Population:
    """See the module; ``rounds`` times around the means found before."""
    found = start
    for _ in range(rounds):
        models: dict[str, tuple[str, Linear]] = {}
        for g, asker in askers.items():
            prior, engine = found.prior(asker.rows), asker.rows[0].backend
            one = linear_at(asker, prior, found.mean[engine], found.knobs())
            if one is not None:
                models[g] = engine, one
        found = _maximised(models, found)
    return found


def _maximised(models: Mapping[str, tuple[str, Linear]], start: Population, rounds: int = 12) -> Population:
    found = start
    for _ in range(rounds):
        solved: dict[str, tuple[str, Calibration]] = {}
        for g, (engine, one) in models.items():
            prior = Prior(
                {k: found.sd[k] for k in one.prior.names}, {k: found.mean[engine][k] for k in one.prior.names}
            )
            model = Linear(one.points, one.rows, one.at_zero, one.slopes, one.noise, prior, found.knobs(), one.alike)
            solved[g] = engine, model.solved("posterior", 2)
        found = _moments(list(solved.values()), found)
    return found


def _moments(solved: Sequence[tuple[str, Calibration]], start: Population) -> Population:
    """Means by engine, drawn to the mean over engines as far as there is little to go by, and the common spread."""
    mean = {e: dict(m) for e, m in start.mean.items()}
    sd = dict(start.sd)
    for name in NAMES:
        got = [
            (e, float(c.mean[j]), float(c.cov[j, j]))
            for e, c in solved
            if name in c.names
            for j in [c.names.index(name)]
        ]
        if not got:
            continue
        between = 0.5 * FIRST_SD[name]  # of engines among themselves
        for e in {e for e, _, _ in got}:
            mine = [m for x, m, _ in got if x == e]
            weight = len(mine) / sd[name] ** 2
            mean[e][name] = weight * float(np.mean(mine)) / (weight + between**-2)
        variance = float(np.mean([(m - mean[e][name]) ** 2 + v for e, m, v in got]))
        prior_weight = 5.0  # configurations' worth of the guess before: a few are far out
        pooled = (len(got) * variance + prior_weight * FIRST_SD[name] ** 2) / (len(got) + prior_weight)
        sd[name] = min(max(math.sqrt(pooled), _LEAST_SD), _MOST_SD)
    wrong: dict[str, float] = {}
    for f in {family(m) for _, c in solved for _, m in c.rows}:
        wrong[f] = float(np.exp(np.mean([math.log(c.discrepancy[f]) for _, c in solved if f in c.discrepancy])))
    return Population(mean, sd, wrong)


@dataclass(frozen=True)
class Guess:
    """A prediction of one metric of a row, with its 80 % interval. ``seen``: the row was calibrated on."""

    row: Row
    metric: str
    measured: float
    predicted: Interval
    seen: bool

    @property
    def error(self) -> float:
        return self.predicted.median / self.measured - 1


def calibrated(
    rows: Sequence[Row], pop: Population, choose: Callable[[Sequence[Row]], list[Row]] = anchors
) -> list[Guess]:
    """Case 1: calibrated on a few loads, every other one predicted."""
    use = choose(rows)
    asker = Asker([*use, *(r for r in rows if r not in use)])
    prior, knobs = pop.prior(rows), pop.knobs()
    found = calibrate(asker.points[: len(use)], asker, prior, knobs)
    return _guesses(asker, found, len(use))


def unseen(rows: Sequence[Row], pop: Population) -> list[Guess]:
    """Case 2: nothing of the configuration was seen."""
    asker = Asker(rows)
    return _guesses(asker, prior_only(pop.prior(rows), pop.knobs()), 0)


def _guesses(asker: Asker, found: Calibration, used: int) -> list[Guess]:
    loads = {r.load for r in asker.rows[:used]}
    out: list[Guess] = []
    for i, row in enumerate(asker.rows):
        said = predictions(found, asker, (i, asker.points[i]), [TTFT, TPOT], (DRAWS, np.random.default_rng([7, DRAWS])))
        truth = measured(row)
        out += [Guess(row, m, truth[m], interval, row.load in loads) for m, interval in said.items()]
    return out


def folds(configs: Mapping[str, Sequence[Row]], n: int) -> list[tuple[list[str], list[str]]]:
    """(fit, predict) by names of configurations: by the hash of the name, so that nobody chooses."""
    import hashlib

    where = {g: int.from_bytes(hashlib.sha256(g.encode()).digest()[1:5], "big") % n for g in configs}
    return [([g for g in configs if where[g] != k], [g for g in configs if where[g] == k]) for k in range(n)]


def shared(argument: str | None) -> Path:
    """The folder of the record: as given, or beside the repository."""
    return Path(argument) if argument else Path(__file__).resolve().parents[2] / "shared" / "measured"
