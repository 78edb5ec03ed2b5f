"""Simulated answers of two arms: difficulty by case, noise by answer, several categories. For test and benchmark.

Each case has a probability to be answered right; an arm draws anew from it, as a service does whose batches, kernels or
sampling differ from run to run. ``steady``: the share of cases that always come out alike (temperature 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.degeneration import FIGURES, SIGNS, compared
from whywait.analyze.quality import Paired, adjusted, by_category

Array = Any


@dataclass(frozen=True)
class World:
    """``n`` cases of ``categories`` kinds, right with probability ``accuracy`` on average; B loses ``drop`` of them
    (in one category only, where ``where`` is its number). ``groups``: cases per group, which share their difficulty."""

    n: int = 200
    accuracy: float = 0.6
    categories: int = 4
    steady: float = 0.5
    drop: float = 0.0
    where: int = -1
    groups: int = 1
    loops: float = 0.05


def draw(w: World, rng: np.random.Generator) -> tuple[Array, Array, list[str], list[str]]:
    """(right of A, right of B, categories, groups)."""
    made = -(-w.n // w.groups)
    p = np.repeat(rng.beta(2 * w.accuracy, 2 * (1 - w.accuracy), made), w.groups)[: w.n]
    category = np.arange(w.n) // w.groups % w.categories
    always = np.repeat(rng.random(made) < w.steady, w.groups)[: w.n]
    both = rng.random(w.n) < p
    a, b = (np.where(always, both, rng.random(w.n) < p) for _ in range(2))
    hit = np.ones(w.n, bool) if w.where < 0 else category == w.where
    lost = w.drop / max(1e-9, w.accuracy)
    b = b & ~(hit & (rng.random(w.n) < lost))
    groups = [str(i // w.groups) for i in range(w.n)] if w.groups > 1 else [""] * w.n
    return a.astype(float), b.astype(float), [f"c{k}" for k in category], groups


def signs_of(w: World, rng: np.random.Generator, groups: list[str]) -> list[dict[str, Any]]:
    """Rows with signs of degeneration that do not differ between the arms."""
    rows = []
    for g in groups:
        length = rng.normal(4, 0.8)
        sides = [{"signs": {**dict.fromkeys((*SIGNS, *FIGURES)), "loops": float(rng.random() < w.loops),
                            "cut": float(rng.random() < 2 * w.loops), "empty": 0.0,
                            "length": length + rng.normal(0, 0.3), "repeated": rng.beta(1, 8)}}
                 for _ in range(2)]  # fmt: skip
        rows.append({"group": g, "a": sides[0], "b": sides[1]})
    return rows


def judged(w: World, seed: int, signs: bool = False) -> list[Paired]:
    """One comparison, all its questions adjusted together, as ``whywait quality`` does it."""
    rng = np.random.default_rng(seed)
    a, b, categories, groups = draw(w, rng)
    found = by_category((a, b), categories, groups, 0.02)
    if signs:
        found += compared(signs_of(w, rng, groups))
    return adjusted(found)


def finding(found: list[Paired]) -> bool:
    """That it says anything of a difference: a question answered, or "not inferior" that fails."""
    return any(f.found or f.state == "fails" for f in found)
