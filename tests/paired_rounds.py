"""Simulated paired trials: rounds that drift, remember and stray, and what the rule of ``whywait ab`` says of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from whywait.analyze import compare
from whywait.judge.paired import ALPHA, MARGIN, OPEN, ways
from whywait.trying import order

PRIMARY = ("output_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50")  # the usual claims of a trial
REPEATS, LOW, HIGH = 1000, 4, 12
NOISE = 0.04  # of a figure between rounds of the same


def rounds(kind: str, rng: np.random.Generator, repeats: int = REPEATS) -> Any:
    """ln of the three figures of every round of A/A trials (repeats, 3, 2 * HIGH): alike in part, as real ones are."""
    n = 2 * HIGH
    one, common = rng.standard_normal((repeats, 3, n)), rng.standard_normal((repeats, 1, n))
    e = 0.6 * one + 0.8 * common
    if kind == "autocorrelated":
        for i in range(1, n):
            e[..., i] = 0.7 * e[..., i - 1] + math.sqrt(1 - 0.49) * e[..., i]
    elif kind == "drift":
        e += np.linspace(0, 8, n)
    elif kind == "warms up":
        e += 6 * np.exp(-np.arange(n) / 1.5)
    elif kind == "step":
        e += 4 * (np.arange(n) >= rng.integers(1, n, (repeats, 1, 1)))
    elif kind == "walk":
        e = e + np.cumsum(rng.standard_normal((repeats, 3, n)), axis=-1)
    elif kind == "heavy tails":
        e /= np.sqrt(rng.chisquare(2, (repeats, 1, n)) / 2)
    elif kind == "skewed":
        e = np.exp(1.5 * e)
    elif kind == "two modes":
        e = 0.15 * e + 3 * rng.integers(0, 2, (repeats, 1, n))
    return NOISE * e


KINDS = ("normal", "autocorrelated", "drift", "warms up", "step", "walk", "heavy tails", "skewed", "two modes")


def differences(x: Any, effect_of_b: float = 0.0) -> Any:
    """ln(B / A) of each pair (repeats, 3, HIGH), in the order that a trial of that seed would take."""
    arms = np.array([[a == "B" for a in order(seed, x.shape[-1])] for seed in range(len(x))])
    x = x + effect_of_b * arms[:, None, :]
    sign = np.where(arms[:, 1::2], 1.0, -1.0)[:, None, :]
    return sign * (x[..., 1::2] - x[..., 0::2])


def stopped(d: Any, margin: float = math.log1p(MARGIN)) -> tuple[Any, Any]:
    """What each trial says when it stops, by the rule of the verb, and after how many pairs."""
    said = np.full(d.shape[:2], OPEN)
    pairs = np.zeros(len(d), dtype=int)
    for n in range(LOW, HIGH + 1, 2):
        now = ways(d[..., :n], ALPHA / len(PRIMARY), margin, compare.RESOLUTION)
        going = pairs == 0
        said[going] = now[going]
        pairs[going & ((now != OPEN).all(axis=1) | (n == HIGH))] = n
    return said, pairs
