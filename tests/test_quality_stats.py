"""Paired statistics of tasks: known values, the error between arms that do not differ, and the power to see a loss."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.paired_answers import World, draw, finding, judged
from whywait.analyze.quality import (
    ALPHA,
    Paired,
    Rule,
    adjusted,
    by_category,
    cases_needed,
    least_drop,
    mcnemar_mid_p,
    paired,
    swap_p,
)

REPEATS = 1000
LIMIT = 0.08


def pair(worse: int, better: int, same: int, margin: float = 0.02) -> Paired:
    a = np.array([1.0] * worse + [0.0] * better + [1.0] * same)
    b = np.array([0.0] * worse + [1.0] * better + [1.0] * same)
    return paired("x", a, b, rule=Rule(margin))


@pytest.mark.parametrize(("worse", "better"), [(0, 5), (1, 7), (3, 9), (10, 10), (6, 16), (0, 0), (40, 70)])
def test_mcnemar_is_the_binomial_sum(worse: int, better: int) -> None:
    n, k = worse + better, min(worse, better)
    exact = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    mid = 2 * exact - math.comb(n, k) / 2**n
    assert mcnemar_mid_p(worse, better) == pytest.approx(1.0 if worse == better else min(1.0, mid))
    assert mcnemar_mid_p(better, worse) == mcnemar_mid_p(worse, better)


def test_the_permutation_test_is_mcnemars_for_single_cases() -> None:
    d = np.array([1.0] * 7 + [-1.0] * 1)
    every = [abs(sum(s)) for s in itertools.product((-1, 1), repeat=8)]
    mid = (sum(v > 6 for v in every) + sum(v == 6 for v in every) / 2) / 256
    assert mcnemar_mid_p(1, 7) == pytest.approx(mid)
    assert swap_p(d, np.random.default_rng(1)) == pytest.approx(mid, abs=0.012)


def test_the_interval_is_bonett_and_prices_where_that_is_wider() -> None:
    found = pair(12, 3, 85)
    p12, p21 = 4 / 102, 13 / 102  # their Laplace estimates
    half = 1.959964 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / 102)
    assert found.low <= p12 - p21 - half + 1e-6
    assert found.high >= p12 - p21 + half - 1e-6
    assert found.drop == pytest.approx(-0.09)
    assert (found.worse, found.better, found.n) == (12, 3, 100)


def test_arms_that_answer_alike_have_an_interval_all_the_same() -> None:
    found = pair(0, 0, 50)
    assert found.low < -0.03 < 0.03 < found.high
    assert found.state == "undecided"
    assert found.p == 1.0
    assert pair(0, 0, 500).state == "holds"
    assert pair(0, 0, 500).low > pair(0, 0, 50).low


def test_states_by_the_interval() -> None:
    assert pair(40, 5, 155, 0.02).state == "fails"
    assert pair(5, 40, 155, 0.02).state == "holds"
    assert pair(12, 8, 180, 0.02).state == "undecided"
    assert paired("x", np.zeros(0), np.zeros(0)).state == "undecided"
    assert paired("x", np.zeros(3), np.zeros(3), rule=Rule(math.nan)).state == ""


def test_nan_pairs_are_left_out_and_clusters_widen() -> None:
    a, b = np.array([1.0, np.nan, 1.0, 0.0]), np.array([0.0, 1.0, np.nan, 0.0])
    assert paired("x", a, b).n == 2
    rng = np.random.default_rng(3)
    a = np.repeat(rng.random(20) < 0.6, 10).astype(float)
    b = np.repeat(rng.random(20) < 0.5, 10).astype(float)
    alone = paired("x", a, b)
    grouped = paired("x", a, b, [str(i // 10) for i in range(200)])
    assert (grouped.groups, alone.groups) == (20, 200)
    assert grouped.high - grouped.low > 2 * (alone.high - alone.low)
    assert grouped.p > alone.p


def test_holm_with_half_of_the_error_for_the_first() -> None:
    base = pair(0, 0, 10)
    named = [Paired(**{**base.__dict__, "p": p}) for p in (0.02, 0.001, 0.04, None)]
    out = adjusted(named)
    # weights 1/2, 1/4, 1/4: 0.001 · 1/0.25, then 0.02 · 0.75/0.5, then 0.04 · 0.25/0.25
    assert [f.adjusted for f in out] == [pytest.approx(0.03), pytest.approx(0.004), pytest.approx(0.04), None]
    assert [f.found for f in out] == [True, True, True, False]
    assert adjusted([named[0]])[0].adjusted == pytest.approx(0.02)


@pytest.mark.parametrize("categories", [1, 4, 9])
def test_arms_that_do_not_differ_give_hardly_a_finding(categories: int) -> None:
    world = World(60, 0.6, categories=categories, steady=0.3)
    assert sum(finding(judged(world, seed)) for seed in range(REPEATS)) / REPEATS <= LIMIT


def test_nor_do_they_with_signs_of_degeneration() -> None:
    world = World(30, 0.5, categories=3, steady=0.3, loops=0.1)
    assert sum(finding(judged(world, seed, True)) for seed in range(100)) / 100 <= LIMIT


def test_a_loss_is_seen_and_its_interval_holds_it() -> None:
    world = World(300, 0.6, drop=0.12, steady=0.8)
    found = [judged(world, seed) for seed in range(60)]
    assert sum(f[0].found for f in found) > 50
    assert sum(f[0].low <= -0.12 <= f[0].high for f in found) >= 54
    one = [judged(World(400, 0.6, drop=0.25, where=1, steady=0.8), seed) for seed in range(30)]
    assert sum(f[2].found for f in one) > 25
    assert sum(f[k].found for f in one for k in (1, 3, 4)) <= 5


def test_not_inferior_is_hardly_ever_said_of_what_is() -> None:
    world = World(300, 0.6, categories=1, drop=0.1, steady=0.8)
    held = 0
    for seed in range(200):
        a, b, categories, _ = draw(world, np.random.default_rng(seed))
        held += by_category((a, b), categories, margin=0.1)[0].state == "holds"
    assert held / 200 <= ALPHA


@pytest.mark.parametrize(("drop", "discordant"), [(0.0, 0.1), (-0.06, 0.15), (0.03, 0.2)])
def test_so_many_cases_do_decide_in_four_of_five_trials(drop: float, discordant: float) -> None:
    n = cases_needed(drop, discordant - drop**2, 0.03)
    assert n is not None
    rng = np.random.default_rng(2)
    lost, won = (discordant - drop) / 2, (discordant + drop) / 2
    counts = rng.multinomial(n, [lost, won, 1 - lost - won], size=120)
    states = [pair(int(w), int(b), int(s), 0.03).state for w, b, s in counts]
    decided = sum(s == ("fails" if drop < -0.03 else "holds") for s in states) / len(states)
    assert 0.68 < decided < 0.92


def test_few_cases_that_agree_promise_no_quick_end() -> None:
    assert pair(0, 0, 4).needed > 2000
    assert 137 < pair(0, 0, 100).needed < 400  # from 137 on the interval itself is narrow enough
    assert pair(0, 0, 135).state == "undecided"
    assert pair(0, 0, 139).state == "holds"


def test_what_can_not_be_decided_is_promised_no_number() -> None:
    assert cases_needed(-0.02, 0.1, 0.02) is None
    assert cases_needed(0.0, 0.1, 0.02) < cases_needed(-0.01, 0.1, 0.02)


def test_the_least_drop_is_found_in_four_of_five_trials() -> None:
    d = least_drop(400, 0.15)
    assert d is not None
    rng = np.random.default_rng(4)
    counts = rng.multinomial(400, [(0.15 + d) / 2, (0.15 - d) / 2, 0.85], size=400)
    seen = np.mean([mcnemar_mid_p(int(w), int(b)) <= 0.05 for w, b, _ in counts])
    assert 0.74 < seen < 0.88
    assert least_drop(3, 0.01) is None


def test_same_seed_same_figures() -> None:
    assert judged(World(80), 7) == judged(World(80), 7)
