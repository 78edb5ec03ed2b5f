"""Two arms, the same cases → what B does to a share or a figure, paired: test, interval, what would decide.

A case gives one pair (a, b), usually 0 or 1 each. What is common to both arms (the difficulty of a case) falls out.

*Test* of no difference. Of 0/1 pairs of single cases: McNemar's, exact, with the mid-p value (Fagerland, Lydersen &
Laake, *BMC Med. Res. Methodol.* 13 (2013): it keeps the level where the plain exact test gives power away). Of other
figures, or of cases in groups: the paired permutation test that swaps the arms of whole groups (4,000 draws, mid-p),
of which McNemar's is the special case.

*Interval* at 95 %: the wider of two. (1) Wald's with one further pair put on either side: Bonett & Price, *Br. J. Math.
Stat. Psychol.* 65 (2012), recommended by Fagerland, Lydersen & Laake, *Stat. Med.* 33 (2014); for groups the same with
a group of the mean size put on either side, and Student's t. Without it, arms that answer alike in all cases would have
an interval of no width. (2) The bootstrap over cases or groups (expanded percentiles, Hesterberg 2015). Categories have
intervals that hold *together* (Bonferroni).

*Many questions.* One is named beforehand: the accuracy over all cases. It has half of the error of 5 %, all the other
questions (categories, degeneration) share the other half: Holm's method with weights (*Scand. J. Stat.* 6 (1979)).
So that anything at all is found between two arms that do not differ has a chance of 5 %, categories or not.

*Not inferior within m points*: holds where the interval lies above −m, fails where it lies below, else undecided. The
cases that would decide: Lu & Bean, *Stat. Med.* 14 (1995), Nam, *Biometrics* 53 (1997), for a power of 80 %.
The least drop that so many cases would find in 80 % of trials: Connor, *Biometrics* 43 (1987).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np

from whywait.analyze.stats import cluster_bootstrap, t975
from whywait.core.table import Array

ALPHA: Final = 0.05  # that anything is found where nothing is
POWER: Final = 0.8
MARGIN: Final = 0.02  # a loss of two points is worth knowing of
DRAWS: Final = 2000
FAR: Final = 1_000_000  # cases: what would take more is not promised
TESTS: Final = ("permutation of groups, mid-p", "McNemar, mid-p")
_Z: Final = NormalDist().inv_cdf


@dataclass(frozen=True)
class Paired:
    """What B does to one share or figure over ``n`` cases in ``groups`` (as many as cases, where each stands alone).

    ``a``, ``b``: means of the arms; ``drop`` = b − a with its interval ``low … high`` (``level`` of its own); ``worse``
    and ``better`` count the cases that B lost and won. ``p``: of no difference, alone; ``adjusted``: among all
    questions of the comparison. ``state``: not inferior within ``margin``: holds, fails or undecided; '' where it was
    not asked. ``needed``: cases that would decide, None where none would; ``least``: the drop that so many would find.
    """

    name: str
    n: int
    groups: int
    a: float | None
    b: float | None
    drop: float | None
    low: float | None
    high: float | None
    worse: int
    better: int
    p: float | None
    adjusted: float | None
    margin: float
    state: str
    needed: int | None
    least: float | None
    level: float
    test: str

    @property
    def found(self) -> bool:
        """That the arms differ here, all questions of the comparison considered."""
        return self.adjusted is not None and self.adjusted <= ALPHA

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "found": self.found}


class Rule(NamedTuple):
    """How a question is asked. ``margin`` of "not inferior", on the scale of the figure (NaN: not asked); ``level`` of
    the interval; ``share``: the figure is 0 … 1 in each case."""

    margin: float = MARGIN
    level: float = 0.95
    share: bool = True


RULE: Final = Rule()


def paired(name: str, a: Array, b: Array, groups: Sequence[str] = (), *, rule: Rule = RULE, seed: int = 1) -> Paired:
    """One question.

    Args:
        a, b: a figure per case of either arm, (n,), NaN where there is none: such a pair is left out.
        groups: of each case; '' stands alone.
        rule: how it is asked.
        seed: of what is drawn. Same seed, same figures.
    """
    margin, level, share = rule
    keep = np.isfinite(a) & np.isfinite(b)
    a, b = np.asarray(a, dtype=np.float64)[keep], np.asarray(b, dtype=np.float64)[keep]
    sums, sizes = _clusters(b - a, [g for g, k in zip(groups, keep, strict=True) if k] if len(groups) else ())
    n, g = len(a), len(sums)
    empty = Paired(name, n, g, None, None, None, None, None, 0, 0, None, None, margin, "", None, None, level, "none")
    if not n:
        return replace(empty, state="" if math.isnan(margin) else "undecided")
    d = b - a
    binary = bool(np.isin(d, (-1.0, 0.0, 1.0)).all()) and g == n
    worse, better = int((d < 0).sum()), int((d > 0).sum())
    if binary and share:
        p, (low, high) = mcnemar_mid_p(worse, better), _of_counts(worse, better, n, level, seed)
    else:
        rng = np.random.default_rng(seed)
        p, (low, high) = swap_p(sums, rng), interval(sums, sizes, (level, share), rng)
    drop = float(d.mean())
    bounds = [v if math.isfinite(v) else None for v in (low, high)]
    state = "" if math.isnan(margin) else "holds" if low > -margin else "fails" if high < -margin else "undecided"
    size = n / g
    # With one pair more that differs (Laplace): few cases that agree do not mean that none ever differs.
    variance = (float(((sums - drop * sizes) ** 2).sum()) + size**2) / (n + size)
    needed = cases_needed(drop, variance, margin, level) if state == "undecided" else None
    needed = needed and max(needed, n + 1)
    discordant = (float((sums**2).sum()) + size**2) / (n + size)
    return replace(
        empty, a=float(a.mean()), b=float(b.mean()), drop=drop, low=bounds[0], high=bounds[1], worse=worse,
        better=better, p=p, state=state, needed=needed,
        least=least_drop(n, discordant) if share else None, test=TESTS[binary and share],
    )  # fmt: skip


def _clusters(d: Array, groups: Sequence[str]) -> tuple[Array, Array]:
    """Sums and sizes of the groups' differences; who has no group is one."""
    if not any(groups):
        return d, np.ones(len(d))
    names = [g or f"\0{i}" for i, g in enumerate(groups)]
    _, at = np.unique(names, return_inverse=True)
    return np.bincount(at, d), np.bincount(at).astype(np.float64)


@lru_cache(maxsize=65536)
def mcnemar_mid_p(worse: int, better: int) -> float:
    """Two-sided mid-p value of McNemar's test: of the discordant pairs each side has half, by chance. 1 without any."""
    n, k = worse + better, min(worse, better)
    if worse == better:
        return 1.0
    log_half = n * math.log(2)
    first = math.lgamma(n + 1) - log_half
    terms = [math.exp(first - math.lgamma(i + 1) - math.lgamma(n - i + 1)) for i in range(k + 1)]
    return min(1.0, 2 * sum(terms) - terms[-1])


def swap_p(sums: Array, rng: np.random.Generator, draws: int = 4000) -> float:
    """Two-sided mid-p value of the permutation test that swaps the arms of whole groups. 1 where nothing differs."""
    moved = sums[sums != 0]
    if not len(moved):
        return 1.0
    seen = abs(float(moved.sum()))
    total = float(moved.sum())
    found = np.concatenate([np.abs(total - 2 * (rng.integers(0, 2, (1000, len(moved)), dtype=np.int8) @ moved))
                            for _ in range(draws // 1000)])  # fmt: skip
    slack = 1e-9 * float(np.abs(moved).sum())
    more, same = (found > seen + slack).sum(), (np.abs(found - seen) <= slack).sum()
    return min(1.0, float((more + same / 2 + 1) / (draws + 1)))


@lru_cache(maxsize=65536)
def _of_counts(worse: int, better: int, n: int, level: float, seed: int) -> tuple[float, float]:
    """The interval of 0/1 pairs of single cases: these counts are all there is to know of them."""
    d = np.repeat((-1.0, 0.0, 1.0), (worse, n - worse - better, better))
    return interval(d, np.ones(n), (level, True), np.random.default_rng(seed))


def interval(sums: Array, sizes: Array, how: tuple[float, bool], rng: np.random.Generator) -> tuple[float, float]:
    """Of the mean difference: see the module. ``sums`` and ``sizes`` are of the groups, (g,); ``how``: its level, and
    whether the figure is a share. Infinite where one group alone tells nothing."""
    g, n = len(sums), float(sizes.sum())
    level, share = how
    mean_size = n / g if share else 0.0
    if not share and g < 2:
        return -math.inf, math.inf
    total = n + 2 * mean_size
    centre = float(sums.sum()) / total
    spread = float(((sums - centre * sizes) ** 2).sum()) + ((1 - centre) ** 2 + (1 + centre) ** 2) * mean_size**2
    spread *= 1.0 if share else g / (g - 1)
    z = _Z(0.5 + level / 2)
    if g < n or not share:  # Student's t, scaled from 95 % to the level asked for
        z *= t975(g + 1 if share else g - 1) / _Z(0.975)
    half = z * math.sqrt(spread) / total
    low, high = centre - half, centre + half
    if g >= 2:
        lo, hi = _resampled(sums, sizes, level, rng)
        low, high = min(low, lo), max(high, hi)
    return (max(-1.0, low), min(1.0, high)) if share else (low, high)


def _resampled(sums: Array, sizes: Array, level: float, rng: np.random.Generator) -> tuple[float, float]:
    g = len(sums)
    kinds, counts = np.unique(np.stack([sums, sizes], 1), axis=0, return_counts=True)
    if len(kinds) == 1:
        return float(kinds[0, 0] / kinds[0, 1]), float(kinds[0, 0] / kinds[0, 1])
    if len(kinds) > 16 and level == 0.95:
        lo, hi = cluster_bootstrap(g, lambda m: (m @ sums) / (m @ sizes), rng)
        return float(lo), float(hi)
    drawn = rng.multinomial(g, counts / g, size=DRAWS)  # cases of one kind are drawn together: the same, and quick
    found = (drawn @ kinds[:, 0]) / (drawn @ kinds[:, 1])
    z = math.sqrt(g / (g - 1)) * _Z(0.5 + level / 2) * t975(g - 1) / _Z(0.975)
    tail = 0.5 * math.erfc(z / math.sqrt(2))
    return float(np.quantile(found, tail, method="lower")), float(np.quantile(found, 1 - tail, method="higher"))


def cases_needed(drop: float, variance: float, margin: float, level: float = 0.95) -> int | None:
    """Cases at which "not inferior within ``margin``" would be decided with the power of 80 %, were the truth what
    was seen: n = (z + z_power)² · variance / (drop + margin)². For 0/1 pairs the variance is the share of discordant
    pairs less drop² (Lu & Bean 1995; Nam 1997). None: more than ``FAR``, as where the drop is the margin itself."""
    off = abs(drop + margin)
    z = _Z(0.5 + level / 2) + _Z(POWER)
    if off * off * FAR <= z * z * variance:
        return None
    return max(2, math.ceil(z * z * variance / off**2))


def least_drop(n: int, discordant: float, level: float = 0.95) -> float | None:
    """The least difference that ``n`` pairs find with the power of 80 %, where a share ``discordant`` of them differs
    (Connor 1987): d such that d·√n = z·√ψ + z_power·√(ψ − d²). None where none would be found."""
    z, zp = _Z(0.5 + level / 2), _Z(POWER)
    low, high = 0.0, math.sqrt(discordant)
    if high * math.sqrt(n) < z * math.sqrt(discordant):
        return None
    for _ in range(60):
        d = (low + high) / 2
        if d * math.sqrt(n) < z * math.sqrt(discordant) + zp * math.sqrt(max(0.0, discordant - d * d)):
            low = d
        else:
            high = d
    return high if high < 1 else None


def adjusted(found: Sequence[Paired]) -> list[Paired]:
    """The first of them was named beforehand and has half of the error, the rest share the other half; Holm's method
    with these weights. Those without a p value ask nothing."""
    asked = [i for i, f in enumerate(found) if f.p is not None]
    if not asked:
        return list(found)
    rest = max(1, len([i for i in asked if i]))
    weights = {i: (0.5 if i == 0 else 0.5 / rest) if 0 in asked and len(asked) > 1 else 1.0 for i in asked}
    order = sorted(asked, key=lambda i: _p(found[i]) / weights[i])
    out, worst = list(found), 0.0
    for k, i in enumerate(order):
        left = sum(weights[j] for j in order[k:])
        worst = max(worst, min(1.0, _p(found[i]) * left / weights[i]))
        out[i] = replace(found[i], adjusted=worst)
    return out


def _p(f: Paired) -> float:
    return 1.0 if f.p is None else f.p


def by_category(
    right: tuple[Array, Array],
    categories: Sequence[str],
    groups: Sequence[str] = (),
    margin: float = MARGIN,
    seed: int = 1,
) -> list[Paired]:
    """Accuracy over all cases, then of each category in the order of first mention; not yet adjusted.

    Args:
        right: 0 … 1 per case of A and of B, (n,) each.
        categories, groups: of each case.
    """
    a, b = (np.asarray(x, dtype=np.float64) for x in right)
    names = list(dict.fromkeys(categories))
    out = [paired("accuracy", a, b, groups, rule=Rule(margin), seed=seed)]
    if len(names) < 2:
        return out
    level = 1 - 0.05 / len(names)
    labels = np.array(categories)
    for name in names:
        mine = labels == name
        theirs = [g for g, m in zip(groups, mine, strict=True) if m] if len(groups) else ()
        out.append(paired(f"accuracy: {name}", a[mine], b[mine], theirs, rule=Rule(margin, level), seed=seed))
    return out


def as_table(found: Sequence[Paired]) -> list[dict[str, Any]]:
    return [f.as_dict() for f in found]
