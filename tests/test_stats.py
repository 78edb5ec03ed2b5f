"""Percentiles against exact binomial sums, known distributions and known correlation."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whywait.analyze.stats import (
    cluster_bootstrap,
    order_ranks,
    percentile,
    pooled_summary,
    summary,
    t975,
    weighted_percentile,
)


@pytest.mark.parametrize(("q", "n"), [(0.9, 36), (0.95, 72), (0.99, 368)])
def test_upper_bound_exists_from_the_stated_count_on(q, n):
    assert order_ranks(n - 1, q)[1] is None
    assert order_ranks(n, q)[1] == n
    assert order_ranks(n - 1, 1 - q)[0] is None
    assert order_ranks(n, 1 - q)[0] == 1


@settings(deadline=None)
@given(st.integers(1, 80), st.sampled_from((0.05, 0.5, 0.9, 0.95, 0.99)))
def test_ranks_are_those_of_the_exact_binomial(n, q):
    def below(k):  # P(B <= k)
        return sum(comb(n, i) * q**i * (1 - q) ** (n - i) for i in range(k + 1))

    lower = [rank for rank in range(1, n + 1) if below(rank - 1) <= 0.025]
    upper = [rank for rank in range(1, n + 1) if 1 - below(rank - 1) <= 0.025]
    assert order_ranks(n, q) == (max(lower, default=None), min(upper, default=None))


def test_ranks_of_a_million_values_are_the_normal_ones():
    low, high = order_ranks(1_000_000, 0.5)
    assert low == pytest.approx(500_000 - 980, abs=2)
    assert high == pytest.approx(500_001 + 980, abs=2)


@pytest.mark.parametrize("q", [0, 1, 1.5])
def test_a_quantile_outside_0_and_1_is_refused(q):
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile(np.ones(3), q)


@pytest.mark.parametrize(("q", "n"), [(0.5, 25), (0.9, 60), (0.95, 100), (0.99, 400)])
def test_order_statistic_intervals_hold_the_truth(q, n):
    rng = np.random.default_rng(11)
    truth = -np.log(1 - q)
    held = 0
    for _ in range(2000):
        e = percentile(rng.exponential(size=n), q)
        held += e.lo <= truth <= e.hi
    assert held >= 0.93 * 2000


def test_mean_intervals_hold_the_truth():
    rng = np.random.default_rng(12)
    held = 0
    for _ in range(2000):
        low, high = summary(rng.normal(3, 2, 12))["ci"]["mean"]
        held += low <= 3 <= high
    assert held >= 0.93 * 2000


def _clustered(rng, groups=40, each=25):
    level = rng.normal(0, 1, groups)
    return (level[:, None] + rng.normal(0, 0.5, (groups, each))).ravel(), np.repeat(np.arange(groups), each)


def test_intervals_of_correlated_gaps_hold_the_truth_and_naive_ones_do_not():
    rng = np.random.default_rng(13)
    held = naive = 0
    for _ in range(160):
        x, group = _clustered(rng)
        low, high = pooled_summary(x, group, rng)["ci"]["p50"]
        held += low <= 0 <= high
        e = percentile(x, 0.5)
        naive += e.lo <= 0 <= e.hi
    assert held >= 0.93 * 160
    assert naive <= 0.6 * 160


def test_summary_of_nothing_is_unknown():
    s = summary(np.array([np.nan]))
    assert s == {"p50": None, "p90": None, "p95": None, "p99": None, "mean": None, "n": 0,
                 "ci": {k: [None, None] for k in ("p50", "p90", "p95", "p99", "mean")}}  # fmt: skip
    assert pooled_summary(np.zeros(0), np.zeros(0, int), np.random.default_rng(1)) == {**s, "groups": 0}


def test_summary_of_one_value_has_no_interval():
    s = summary(np.array([5.0, np.nan]))
    assert (s["p50"], s["mean"], s["n"]) == (5.0, 5.0, 1)
    assert s["ci"]["p50"] == s["ci"]["mean"] == [None, None]


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=120), st.floats(0.02, 0.98))
def test_an_interval_holds_its_value(values, q):
    e = percentile(np.array(values), q)
    assert e.n == len(values)
    assert e.lo is None or e.lo <= e.value
    assert e.hi is None or e.hi >= e.value


def test_weighted_percentile_counts_tokens():
    values = np.array([10.0, 20.0, 30.0, np.nan])
    assert weighted_percentile(values, 0.5) == 20
    assert weighted_percentile(values, 0.5, np.array([8, 1, 1, 99])) == 10
    assert weighted_percentile(values, 0.95, np.array([1, 1, 0, 1])) == 20
    assert weighted_percentile(np.zeros(0), 0.5) is None


def test_pooled_percentiles_are_reproducible_and_weighted():
    x, group = _clustered(np.random.default_rng(3))
    weights = np.where(x > 0, 3.0, 1.0)
    a = pooled_summary(x, group, np.random.default_rng(7), weights)
    b = pooled_summary(x, group, np.random.default_rng(7), weights)
    assert a == b
    assert a["p50"] == weighted_percentile(x, 0.5, weights)
    assert a["mean"] == pytest.approx(np.average(x, weights=weights))
    assert (a["n"], a["groups"]) == (1000, 40)
    assert a["ci"]["p50"][0] < a["p50"] < a["ci"]["p50"][1]


def test_few_groups_or_few_independent_values_leave_bounds_unknown():
    rng = np.random.default_rng(5)
    x, group = _clustered(rng, groups=3)
    assert pooled_summary(x, group, rng)["ci"]["p50"] == [None, None]
    x, group = _clustered(rng, groups=30, each=100)  # 3,000 values, but hardly 30 that are independent
    assert pooled_summary(x, group, rng)["ci"]["p99"][1] is None


def test_many_values_and_many_groups_agree_with_the_plain_bootstrap():
    rng = np.random.default_rng(6)
    x, group = _clustered(rng, groups=3000, each=20)
    found = pooled_summary(x, group, rng)
    by_group = [x[i * 20 : i * 20 + 20] for i in range(3000)]
    plain = [np.quantile(np.concatenate([by_group[i] for i in rng.integers(0, 3000, 3000)]), 0.9) for _ in range(600)]
    assert found["ci"]["p90"] == pytest.approx(np.quantile(plain, [0.025, 0.975]), abs=0.01)


def test_cluster_bootstrap_takes_any_statistic_of_counts():
    sums, sizes = np.arange(20.0), np.full(20, 4.0)
    low, high = cluster_bootstrap(20, lambda m: (m @ sums) / (m @ sizes), np.random.default_rng(1))
    assert low < sums.sum() / sizes.sum() < high
    with pytest.raises(ValueError, match="at least 2"):
        cluster_bootstrap(1, lambda m: m, np.random.default_rng(1))


@pytest.mark.parametrize(("df", "t"), [(1, 12.706), (8, 2.306), (9, 2.262), (30, 2.042), (10**6, 1.96)])
def test_students_t(df, t):
    assert t975(df) == pytest.approx(t, abs=0.002)
