"""Evidence that may be looked at as often as one likes: is the share of good requests above or below the asked one?

Two wealth processes bet against ``share <= asked`` and ``share >= asked``: likelihood ratios of Bernoulli trials, mixed
over a fixed grid of alternatives (the method of mixtures: Robbins, *Ann. Math. Stat.* 41 (1970) 1397; as betting:
Waudby-Smith & Ramdas, *JRSS B* 86 (2024) 1). Under its null each is a non-negative supermartingale that starts at 1, so
by Ville's inequality it ever reaches 1/alpha with probability alpha at most, whenever one looks and stops.

That holds for independent requests, and requests that queue behind each other are not. So ``n`` requests count as
``n / tau`` independent ones, where ``tau`` is the integrated autocorrelation time (Geyer, *Stat. Sci.* 7 (1992) 473)
of being bad, or of being among the worst (the larger), widened by its own standard error (Sokal, *Monte Carlo Methods
in Statistical Mechanics* (1996), 3.19).
With an estimated ``tau`` the guarantee is no theorem any more; ``benchmarks/find_coverage.py`` measures what is left.

The mean of few paired differences of unknown spread has evidence of the same kind, :func:`mean_evidence`: the Bayes
factor of Student's t (Gönen et al., *Am. Stat.* 59 (2005) 252), which for normal differences is a test martingale
whatever their spread (Lai, *Ann. Stat.* 4 (1976) 265; Wang & Ramdas, *Sequential Analysis* 43 (2025) 56).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whywait.analyze.stats import Estimate
from whywait.core.table import Array

CLIP = 2.0  # scores (measured / limit) count up to this: a failed request is inf
CLEAR_FROM, CLEAR_Z = 50.0, 4.0  # effective requests, and standard errors, for ``clearing``
TOP = 2.0  # the worst requests, this many times the share that may fail, show how bad ones would clump
EFFECTS = 8.0  # variance of the effects expected, in that of one paired difference: rounds are made long enough
PIECES = 8  # of a probe, from which the interval of its slope is made
# Alternatives, as a part of the way from the asked share to 1 (to say yes) and to 0 (to say no).
_UP = np.array([0.3, 0.5, 0.7, 0.85, 0.95, 1.0])
_DOWN = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95])


class Evidence(NamedTuple):
    """Of one rule at one probe: requests counted, what they are worth, their share, log wealth for yes and for no.

    ``clear`` says that mean and spread of the scores alone leave no room for a smaller share than asked; ``clearing``
    is how much of the requests that this takes are there, 1 and more where it is so, 0 where they do leave room.
    """

    n: int
    n_eff: float
    share: float
    log_yes: float
    log_no: float
    clearing: float = 0.0

    @property
    def clear(self) -> bool:
        return self.clearing >= 1


def autocorrelation_time(x: Array) -> float:
    """Integrated autocorrelation time of a series, in samples: 1 for independent values, n for a single step.

    Geyer's initial monotone positive sequence: it needs no window to be chosen.
    """
    n = len(x)
    centred = x - x.mean() if n else x
    if n < 4 or not (centred != 0).any():
        return 1.0
    size = 1 << (2 * n - 1).bit_length()
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    rho = np.fft.irfft(power, size)[: n - n % 2]
    pairs = (rho[0::2] + rho[1::2]) / rho[0]
    below = np.flatnonzero(pairs <= 0)
    pairs = np.minimum.accumulate(pairs[: below[0]] if len(below) else pairs)
    return float(max(1.0, 2 * pairs.sum() - 1))


def evidence(scores: Array, busy: Array, asked: float) -> Evidence:
    """Weigh requests in the order they were due. ``scores`` are measured / limit; more than 1 is not good.

    ``busy`` is how many requests were in flight when each was due.
    """
    n = len(scores)
    if not n:
        return Evidence(0, 0.0, math.nan, 0.0, 0.0)
    bad = scores > 1
    worst = scores > np.quantile(np.minimum(scores, 1e9), 1 - min(0.5, TOP * (1 - asked)))
    tau = max(autocorrelation_time(bad.astype(np.float64)), autocorrelation_time(worst.astype(np.float64)))
    n_eff = n / _widened(tau, n)
    share = 1 - float(bad.mean())
    return Evidence(n, n_eff, share, *wealth(n_eff * share, n_eff * (1 - share), asked), clearing(scores, busy, asked))


def clearing(scores: Array, busy: Array, asked: float) -> float:
    """Whether scores stay so far below 1 that, by Cantelli's inequality, the asked share must keep the limit.

    The answer is 0 where they do not, else the effective requests there are, as a part of those it takes to say so.

    P(x >= mean + k sd) <= 1 / (1 + k^2) for any distribution; mean and variance are taken at their upper bounds. A
    service whose times hardly vary is cleared so by a tenth of the requests that counting good and bad ones takes.
    """
    x = np.minimum(scores, CLIP)
    # Waits may be zero for long and only the requests in flight show how slowly the queue forgets.
    tau = max(autocorrelation_time(x), autocorrelation_time(busy.astype(np.float64)))
    n_eff = len(x) / _widened(tau, len(x))
    mean, variance = float(x.mean()), float(x.var())
    kurtosis = float(((x - mean) ** 4).mean()) / variance**2 if variance > 0 else 1.0
    variance *= 1 + CLEAR_Z * math.sqrt(max(kurtosis - 1, 0.0) / n_eff)
    mean += CLEAR_Z * math.sqrt(variance / n_eff)
    return n_eff / CLEAR_FROM if mean + math.sqrt(asked / (1 - asked) * variance) <= 1 else 0.0


def _widened(tau: float, n: int) -> float:
    """By its standard error: the window is about 5 tau wide, the relative variance then 2 (2 * 5 * tau/2 + 1) / n."""
    return tau * (1 + math.sqrt(min(1.0, (10 * tau + 2) / n))) if tau > 1 else 1.0


def wealth(good: float, bad: float, asked: float) -> tuple[float, float]:
    """Log wealth against ``share <= asked`` and against ``share >= asked`` after so many (effective) requests."""
    return _mixed(good, bad, asked, asked + _UP * (1 - asked)), _mixed(good, bad, asked, asked * (1 - _DOWN))


def share_interval(e: Evidence, alpha: float) -> tuple[float, float]:
    """The shares that neither wealth has reached 1/alpha against: an always-valid interval of the true share."""
    if not e.n:
        return 0.0, 1.0
    good, bad, need = e.n_eff * e.share, e.n_eff * (1 - e.share), -math.log(alpha)
    edge = 1e-6

    def search(side: int, inside: float, outside: float) -> float:
        if wealth(good, bad, outside)[side] < need:
            return outside
        for _ in range(30):
            mid = (inside + outside) / 2
            inside, outside = (inside, mid) if wealth(good, bad, mid)[side] >= need else (mid, outside)
        return inside

    centre = min(max(e.share, edge), 1 - edge)
    return search(0, centre, edge), search(1, centre, 1 - edge)


def mean_evidence(d: Array, at: Array | float = 0.0, floor: Array | float = 0.0) -> Array:
    """Log evidence against "the mean is ``at``", from differences along the last axis of ``d`` (..., n), n >= 1.

    It may be looked at after every further difference: under its null it ever reaches log(1/alpha) with probability
    alpha at most. ``floor`` is the least standard deviation taken: equal values are not known better than they can be
    measured. One difference is no evidence (0).
    """
    n = d.shape[-1]
    if n < 2:
        return np.zeros(d.shape[:-1])
    off = np.square(d.mean(axis=-1) - at)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(off > 0, off * n / (_spread(d, floor) ** 2 * (n - 1)), 0.0)  # t squared over its degrees
        ratio = np.where(np.isinf(x), 1 + n * EFFECTS, (1 + x) / (1 + x / (1 + n * EFFECTS)))
    out: Array = n / 2 * np.log(ratio) - 0.5 * math.log(1 + n * EFFECTS)
    return out


def mean_half_width(d: Array, alpha: float, floor: Array | float = 0.0) -> Array:
    """Half the width of the always-valid interval of the mean: of what :func:`mean_evidence` has not reached 1/alpha
    against. Infinite while there are too few differences for any interval (fewer than 3 at 5 %)."""
    n = d.shape[-1]
    most = 1 + n * EFFECTS
    r = (math.sqrt(most) / alpha) ** (2 / n)
    if n < 2 or r >= most:
        return np.full(d.shape[:-1], np.inf)
    t = math.sqrt((n - 1) * (r - 1) / (1 - r / most))
    out: Array = t / math.sqrt(n) * _spread(d, floor)
    return out


def _spread(d: Array, floor: Array | float) -> Array:
    out: Array = np.maximum(d.std(axis=-1, ddof=1), floor)
    return out


def slope(t: Array, in_flight: Array, quantile: float) -> Estimate:
    """Growth of the requests in flight, per second, from its mean over equal pieces of a probe (Student's t).

    ``t`` and ``in_flight`` are the count after each change, ascending; ``quantile`` is Student's t at the wanted level.
    In a stable queue the pieces' increments pull back against each other, so that this interval is then too wide.
    """
    if len(t) < 2 * PIECES or not t[-1] > t[0]:
        return Estimate(None, None, None, 0)
    edges = np.linspace(t[0], t[-1], PIECES + 1)
    level = in_flight[np.searchsorted(t, edges, side="right") - 1].astype(np.float64)
    steps = np.diff(level) / (edges[1] - edges[0])
    mean = float(steps.mean())
    half = quantile * float(steps.std(ddof=1)) / math.sqrt(PIECES)
    return Estimate(mean, mean - half, mean + half, PIECES)


def _mixed(good: float, bad: float, asked: float, others: Array) -> float:
    with np.errstate(divide="ignore"):
        logs = good * np.log(others / asked)
        if bad:
            logs = logs + bad * np.log((1 - others) / (1 - asked))
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))
