"""Two load points, one of A and one of B → what changed, figure by figure, with a standard error.

*Paired* where both sent the same schedule: request k of A and request k of B are drawn together. Else each side is
drawn by itself. What is drawn are eight to twelve blocks of requests that follow each other in the schedule, since
requests that are served together share what befalls the service; never gaps within a request. Where neighbouring blocks
still resemble each other the error is widened as for a first-order autoregression (with Kendall's correction of its
small-sample bias, *Biometrika* 41 (1954) 403) and counts for fewer. Rates and shares of the device's time are over ten
pieces of each window (batch means). Where only a summary is left, its own intervals are joined (each side's half width
as a standard error). Repeats of A show what differs from run to run of the same, which no resampling of one run can:
where there are any they are part of the error.

An effect is ln(B / A) where both are positive quantities, B − A for shares, counts and parts of a request's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from whywait.analyze.compare import CAUSE, DEVICE, DIFFERENCE, HIGHER, LOWER, NEITHER, PHASE, RATIO, Metric, metric_of
from whywait.analyze.digest import AT, COST, ENERGY, PER_TIME, SPREAD, TIMED, Point, told
from whywait.analyze.pairing import pairing
from whywait.analyze.pieces import ended_of, joined
from whywait.analyze.stats import QUANTILES, order_ranks
from whywait.analyze.student import quantile, two_sided
from whywait.core.table import Array

DRAWS = 400
LEAST_BLOCKS, MOST_BLOCKS = 8, 12  # fewer say little of how they differ; more would not be long enough
MOST_ALIKE = 0.8  # correlation of neighbouring blocks that is reckoned with
LEAST_DF = 2.0
LEAST_PIECES = 4  # of a window
BY_RUNS = ", which differ more than its requests tell"  # ends ``Change.how`` where only more runs would narrow it
RESOLUTION = 1e-3  # of a figure: two runs are not told apart better than this
Z975 = 1.959963985
_TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end to end", "ttfa_ms": "TTFA",
           "first_byte_ms": "first byte", "itl_ms": "ITL", "chunk_gap_ms": "chunk gap"}  # fmt: skip
_SHARES = {"goodput_share": ("good", "due"), "failed_share": ("ok", "tried")}


@dataclass(frozen=True)
class Change:
    """What B does to one figure. ``value`` and ``se`` are on ``scale`` (ln of the ratio, or the difference); ``se`` is
    None where nothing is known of it, with ``why``; ``df`` its degrees of freedom. ``how`` names the method, ``n``
    counts the requests (pairs, or the lesser side) or pieces. Of what is paired ``a`` and ``b`` are those of the pairs,
    so that ``value`` is what lies between them."""

    name: str
    metric: Metric
    a: float | None
    b: float | None
    scale: str
    value: float | None
    se: float | None
    df: float
    how: str
    n: int
    why: str = ""

    @property
    def p(self) -> float | None:
        """Two-sided, of no change at all."""
        if self.value is None or self.se is None:
            return None
        return two_sided(self.value / self.se, self.df) if self.se > 0 else float(self.value == 0)

    def bounds(self, level: float = 0.95) -> tuple[float | None, float | None]:
        """On ``scale``; None where nothing is known of the error."""
        if self.value is None or self.se is None:
            return None, None
        half = quantile(level, self.df) * self.se
        low, high = self.value - half, self.value + half
        if self.metric.unit == "share" and self.scale == DIFFERENCE:  # no share grows or falls by more than the whole
            return max(low, -1.0), min(high, 1.0)
        return low, high


def figure_of(name: str) -> Metric:
    """Of any figure that two runs can be compared by.

    Raises:
        KeyError: there is no such figure.
    """
    if name in (ENERGY, COST):
        what, unit = ("energy", "J") if name == ENERGY else ("cost", "money")
        return Metric(f"{what} per good request", unit, LOWER)
    base, _, q = name.rpartition(".")
    if base in SPREAD and q in AT:
        return Metric(f"{_TITLES[base]} {q}", "ms", LOWER)
    m = metric_of(name)
    if name.startswith(DEVICE):
        return m._replace(better=NEITHER)
    return m._replace(scale=DIFFERENCE) if name.startswith((PHASE, CAUSE)) else m


class Comparison:
    """Both points, and which rows pair up: none where ``why`` says that they must not. ``run_noise`` is the standard
    deviation, as a share, that a figure is taken to have from run to run where no repeats tell it."""

    def __init__(self, a: Point, b: Point, why: str = "", run_noise: float = 0.0, seed: int = 1) -> None:
        self.a, self.b, self.seed, self.run_noise = a, b, seed, run_noise
        none: Array = np.zeros(0, dtype=np.int64)
        self.i: Array
        self.j: Array
        self.i, self.j, self.why_apart = (none, none, why) if why else pairing(a, b)

    @property
    def paired(self) -> bool:
        return not self.why_apart

    def change(self, name: str) -> Change:
        """
        Raises:
            KeyError: there is no such figure.
        """
        metric = figure_of(name)
        values = told(self.a, name), told(self.b, name)
        found = self._over_runs(self._change(name, metric, values))
        if not self.run_noise or found.se is None or self.a.repeats.get(name):
            return found
        size = 1.0 if found.scale == RATIO else (abs(found.a or 0.0) + abs(found.b or 0.0)) / 2
        return replace(found, se=math.hypot(found.se, self.run_noise * math.sqrt(2) * size))

    def names(self, start: str) -> list[str]:
        """Of the waits that either side knows of."""
        known = [*self.a.figures, *self.b.figures, *(self.a.rows or {}), *(self.b.rows or {})]
        return list(dict.fromkeys(n for n in known if n.startswith(start)))

    def _change(self, name: str, metric: Metric, values: tuple[float | None, float | None]) -> Change:
        if name == COST and len({p.notes.get(COST, "").partition(",")[0] for p in (self.a, self.b)}) > 1:
            return _unknown(name, metric, (None, None), "the prices are in different currencies")
        base, _, q = name.rpartition(".")
        rows = self.a.rows is not None and self.b.rows is not None
        if base in TIMED and rows:
            return self._of_requests(name, metric, base, q)
        if name in _SHARES and rows:
            return self._of_shares(name, metric, values)
        if name.startswith((PHASE, CAUSE)):
            if why := self._why_unknown(name, values):
                return _unknown(name, metric, values if None in values else (None, None), why)
            if rows and not self._derived(name) and not self._modelled(name):
                return self._of_requests(name, metric, name, "mean", everyone=True)
        x, y = ((p.pieces or {}).get(name) for p in (self.a, self.b))
        if x is not None and y is not None:
            return self._of_pieces(name, metric, (x, y), values)
        return self._of_bounds(name, metric, values)

    def _why_unknown(self, name: str, values: tuple[float | None, float | None]) -> str:
        """Why a wait cannot be compared, '' where it can: the rows hold 0 where a phase is not known at all."""
        if self._modelled(name):
            values = self.a.figures.get(name), self.b.figures.get(name)
        if None in values:
            return "not known" if values[0] is values[1] else "known of one side only"
        known = [{n for n, v in p.figures.items() if n.startswith(PHASE) and v is not None} for p in (self.a, self.b)]
        if name == PHASE + "unknown" and known[0] != known[1]:
            return "not the same phases are told apart"
        return ""

    def _modelled(self, name: str) -> bool:
        """That a cause is named by the model of a step, of the point as a whole, and in no request."""
        named = any(p.figures.get(name) is not None for p in (self.a, self.b))
        return name.startswith(CAUSE) and named and not any(name in (p.rows or {}) for p in (self.a, self.b))

    def _derived(self, name: str) -> bool:
        """That a phase is known of the point as a whole only: then so is what is left unexplained."""
        known = {p for side in (self.a, self.b) for p in side.derived}
        return name.startswith(PHASE) and bool(known) and name.removeprefix(PHASE) in {*known, "unknown"}

    def _of_requests(self, name: str, metric: Metric, column: str, q: str, everyone: bool = False) -> Change:
        """A quantile or the mean of what each request took, over those that began in the window (``ok`` ones, if not
        ``everyone``)."""
        x, y = ((p.rows or {}).get(column) for p in (self.a, self.b))
        zero = name.startswith(CAUSE)
        empty = [np.zeros(len((p.rows or {})["rank"])) if zero else None for p in (self.a, self.b)]
        x, y = (e if v is None else v for v, e in zip((x, y), empty, strict=True))
        if x is None or y is None:
            return _unknown(name, metric, (None, None), "not known")
        keep = [self._counted(p, v, everyone) for p, v in ((self.a, x), (self.b, y))]
        if self.paired:
            both = keep[0][self.i] & keep[1][self.j]
            sides = [x[self.i][both], y[self.j][both]]
        else:
            sides = [v[k] for v, k in zip((x, y), keep, strict=True)]
        usual = _quantile_of(q)
        n = min(map(len, sides))
        if not n:
            return _unknown(name, metric, (None, None), "no request ended well with what it takes")
        value_a, value_b = (float(usual(v, None)[0]) for v in sides)
        scale = _scale(metric, value_a, value_b)
        why = "" if q == "mean" else _too_few(n, QUANTILES[q])
        blocks = self._blocks(n)
        if not why and blocks < LEAST_BLOCKS:
            why = f"only {n} requests"
        mid = _effect(scale, value_a, value_b)
        if why or not math.isfinite(mid):
            return replace(_unknown(name, metric, (value_a, value_b), why or "one side is nothing"), n=n)
        more = self._alike(sides, q, blocks)
        se = max(self._drawn(sides, usual, scale, blocks) * math.sqrt(more), _floor(scale, value_a, value_b))
        df = max((blocks - 1) / more, LEAST_DF)
        return Change(name, metric, value_a, value_b, scale, mid, se, df, "requests", n)

    def _counted(self, p: Point, v: Array, everyone: bool) -> Array:
        rows = p.rows or {}
        found: Array = rows["inside"] & np.isfinite(v) & (rows["due"] if everyone else rows["ok"])
        return found

    def _blocks(self, n: int) -> int:
        """As many as let each hold the requests that are in flight together, but not fewer than ``LEAST_BLOCKS``."""
        busy = max(self.a.busy, self.b.busy, 1.0)
        return min(n, MOST_BLOCKS, max(LEAST_BLOCKS, int(n / busy)))

    def _alike(self, sides: list[Array], q: str, blocks: int) -> float:
        """By how much blocks that resemble their neighbours widen the variance (1: not at all)."""
        parts = []
        for v in sides:
            centre = v.mean() if q == "mean" else np.quantile(v, QUANTILES[q])
            s = (v - centre) / (abs(centre) or 1.0) if q == "mean" else (v > centre).astype(np.float64)
            parts.append(np.bincount(_block_of(len(v), blocks), s, blocks))
        return widened(parts[1] - parts[0]) if self.paired else max(map(widened, parts))

    def _drawn(self, sides: list[Array], usual: Callable[..., Array], scale: str, blocks: int) -> float:
        rng = np.random.default_rng(self.seed)
        even = np.full(blocks, 1 / blocks)
        drawn = rng.multinomial(blocks, even, size=DRAWS)
        other = drawn if self.paired else rng.multinomial(blocks, even, size=DRAWS)
        found = [usual(v, m[:, _block_of(len(v), blocks)]) for v, m in zip(sides, (drawn, other), strict=True)]
        with np.errstate(divide="ignore", invalid="ignore"):
            d = np.log(found[1] / found[0]) if scale == RATIO else found[1] - found[0]
        d = d[np.isfinite(d)]
        return float(d.std(ddof=1)) * math.sqrt(blocks / (blocks - 1)) if len(d) > DRAWS / 2 else math.inf

    def _of_shares(self, name: str, metric: Metric, values: tuple[float | None, float | None]) -> Change:
        """A share of the requests; where nobody (or everybody) was good the error is that of one more on each side."""
        yes, of = _SHARES[name]
        sides, error = [], 0.0
        for p in (self.a, self.b):
            rows = p.rows or {}
            counted = rows.get(of, rows["due"] & np.isfinite(rows["begin_s"]))  # a baseline of old has no "tried"
            x = rows[yes][counted].astype(np.float64)
            sides.append(1 - x if name == "failed_share" else x)
        n = min(map(len, sides))
        if not n or values[0] is None or values[1] is None:
            return _unknown(name, metric, values, "no request was due")
        blocks = self._blocks(n)
        if blocks < LEAST_BLOCKS:
            return replace(_unknown(name, metric, values, f"only {n} requests"), n=n)
        for x in sides:
            k = self._blocks(len(x))
            parts = np.bincount(_block_of(len(x), k), x - x.mean(), k)
            p1 = (x.sum() + 1) / (len(x) + 2)
            of_blocks = float((parts**2).sum()) / len(x) ** 2 * k / max(k - 1, 1) * widened(parts)
            error += max(of_blocks, p1 * (1 - p1) / (len(x) + 2))
        return Change(name, metric, *values, DIFFERENCE, values[1] - values[0], math.sqrt(error), blocks - 1,
                      "requests", n)  # fmt: skip

    def _of_pieces(
        self, name: str, metric: Metric, pieces: tuple[Array, Array], values: tuple[float | None, float | None]
    ) -> Change:
        a, b = values
        if a is None or b is None:
            return _unknown(name, metric, values, "not known of both")
        scale = _scale(metric, a, b)
        parts = []
        ended = [ended_of(p, name) for p in (self.a, self.b)]
        pieces = tuple(joined(x[np.isfinite(x)], n) for x, n in zip(pieces, ended, strict=True))  # type: ignore[assignment]
        if min(map(len, pieces)) < LEAST_PIECES:
            return self._of_bounds(name, metric, values)
        for x, usual, k in zip(pieces, values, ended, strict=True):
            # Requests are counted whole: where a window begins and ends between two of them is chance.
            v = _variance(x) / len(x) * widened(x) + ((usual or 0.0) ** 2 / (6 * k**2) if k else 0.0)
            parts.append(v / usual**2 if scale == RATIO and usual else v)
        total, n = sum(parts), [len(x) for x in pieces]
        if scale == RATIO and not (a > 0 and b > 0):
            return _unknown(name, metric, values, "one side is nothing")
        worth = sum(v**2 / (k - 1) for v, k in zip(parts, n, strict=True))
        df = total**2 / worth if worth else float(sum(n) - 2)
        se = max(math.sqrt(total), _floor(scale, a, b))
        return Change(name, metric, a, b, scale, _effect(scale, a, b), se, df, "pieces of the window", min(n))

    def _of_bounds(self, name: str, metric: Metric, values: tuple[float | None, float | None]) -> Change:
        a, b = values
        if a is None or b is None:
            return _unknown(name, metric, values, "not known" if a is b else "known of one side only")
        scale = _scale(metric, a, b)
        mid = _effect(scale, a, b)
        if not math.isfinite(mid):
            return _unknown(name, metric, values, "one side is nothing")
        total = 0.0
        for p in (self.a, self.b):
            low, high = p.bounds.get(name, (None, None))
            if low is None or high is None or (scale == RATIO and low <= 0):
                found = _unknown(name, metric, values, "one value per run, without an interval")
                return replace(found, value=mid, scale=scale)
            half = math.log(high / low) / 2 if scale == RATIO else (high - low) / 2
            total += (half / Z975) ** 2
        se = max(math.sqrt(total), _floor(scale, a, b))
        return Change(name, metric, a, b, scale, mid, se, math.inf, "the intervals of the summaries", 0)

    def _over_runs(self, c: Change) -> Change:
        """With what differs from run to run of A, where more than one was given: the value is against their mean. Where
        requests were paired A is moved by what its mean is off its first run, of which the pairs are."""
        runs = self.a.repeats.get(c.name, ())
        if len(runs) < 2 or c.b is None or c.a is None:
            return c
        if c.scale == RATIO and not (min(runs) > 0 and c.a > 0 and c.b > 0):
            return c  # of what was nothing in some run there is no ratio
        x = np.log(runs) if c.scale == RATIO else np.array(runs)
        k = len(runs)
        spread = math.sqrt(_variance(x) * (1 + 1 / k))
        off = float(x.mean() - x[0])
        usual = c.a * math.exp(off) if c.scale == RATIO else c.a + off
        value = _effect(c.scale, usual, c.b)
        # What differs from run to run holds what differs within one; by chance it may come out too small.
        own = c.se or 0.0
        se, df = (spread, float(k - 1)) if spread >= own else (own, c.df)
        if se == 0:
            return c
        how = f"{k} runs of A" if c.se is None else f"{c.how}, {k} runs of A"
        return replace(c, a=usual, value=value, se=max(se, _floor(c.scale, usual, c.b)), df=df, why="",
                       how=how + BY_RUNS * (spread > own))  # fmt: skip


def _quantile_of(q: str) -> Callable[..., Array]:
    """The mean or a quantile of values, for each row of weights (draws × values), or once without weights."""

    def mean(v: Array, weights: Array | None) -> Array:
        if weights is None:
            return np.array([v.mean()])
        out: Array = weights @ v / weights.sum(axis=1)
        return out

    def level(v: Array, weights: Array | None) -> Array:
        if weights is None:
            return np.array([np.quantile(v, QUANTILES[q])])
        order = np.argsort(v, kind="stable")
        cum = np.cumsum(weights[:, order], axis=1)
        at = (cum < QUANTILES[q] * cum[:, -1:] - 1e-9).sum(axis=1)
        out: Array = v[order][np.minimum(at, len(v) - 1)]
        return out

    return mean if q == "mean" else level


def widened(x: Array) -> float:
    """Variance of the mean of a series over that of independent values, from how alike neighbours are; 1 at least."""
    n, d = len(x), x - x.mean()
    if n < LEAST_PIECES or not (d != 0).any():
        return 1.0
    seen = float((d[1:] * d[:-1]).sum() / (d**2).sum())
    true = min((seen + 1 / n) / max(1 - 3 / n, 0.2), MOST_ALIKE)
    return (1 + true) / (1 - true) if true > 0 else 1.0


def _block_of(n: int, blocks: int) -> Array:
    """Which block each of ``n`` requests in a row belongs to."""
    found: Array = np.arange(n) * blocks // n
    return found


def _too_few(n: int, q: float) -> str:
    low, high = order_ranks(n, q)
    return "" if low and high else f"{n} requests are too few for an interval of p{q * 100:g}"


def _scale(metric: Metric, a: float, b: float) -> str:
    return RATIO if metric.scale == RATIO and a > 0 and b > 0 else DIFFERENCE


def _effect(scale: str, a: float, b: float) -> float:
    if scale == RATIO:
        return math.log(b / a) if a > 0 and b > 0 else math.nan
    return b - a


def _floor(scale: str, a: float, b: float) -> float:
    return RESOLUTION if scale == RATIO else RESOLUTION * (abs(a) + abs(b)) / 2


def _variance(x: Array) -> float:
    return float(x.var(ddof=1)) if len(x) > 1 else 0.0


def _unknown(name: str, metric: Metric, values: tuple[float | None, float | None], why: str) -> Change:
    return Change(name, metric, *values, metric.scale, None, None, 1.0, "", 0, why)


__all__ = ["HIGHER", "LOWER", "PER_TIME", "Change", "Comparison", "figure_of"]
