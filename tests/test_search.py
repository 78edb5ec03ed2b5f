"""The search for the knee: evidence that may be looked at any time, probes that end, and searches on known queues."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tests.queue_models import MODELS, erlang_c, mmk_knee, run_searches, scores, true_knee
from whywait.judge.search import ALPHA, BLOCK_S, ENOUGH, PROBES, Ask, Look, Rule, Search, Seen, enough, look
from whywait.judge.sequential import (
    Evidence,
    autocorrelation_time,
    clearing,
    evidence,
    share_interval,
    slope,
    wealth,
)

RULES = (Rule("ttft", {"ttft_ms": 500.0}, 0.95),)


def ever_reached(p: float, side: int, alpha: float) -> float:
    """Share of seeded streams of independent requests whose wealth ever reaches 1/alpha within 600 of them."""
    rng = np.random.default_rng(7)
    reached = 0
    for good in rng.random((300, 600)) < p:
        so_far = np.cumsum(good)
        reached += any(wealth(float(so_far[n - 1]), float(n - so_far[n - 1]), 0.95)[side] >= -math.log(alpha)
                       for n in range(10, 601, 10))  # fmt: skip
    return reached / 300


def test_wealth_seldom_grows_where_the_null_is_true() -> None:
    assert ever_reached(0.95, 0, 0.05) <= 0.06
    assert ever_reached(0.95, 1, 0.05) <= 0.06


def test_wealth_grows_where_it_is_false() -> None:
    assert ever_reached(0.995, 0, 0.05) > 0.9
    assert ever_reached(0.88, 1, 0.05) > 0.9


def test_share_interval_holds_the_share_and_narrows() -> None:
    few, many = (share_interval(Evidence(n, n, 0.9, 0, 0), 0.01) for n in (30, 3000))
    assert 0 < few[0] < many[0] < 0.9 < many[1] < few[1] <= 1
    assert share_interval(Evidence(0, 0, math.nan, 0, 0), 0.01) == (0.0, 1.0)


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_autocorrelation_time_of_a_known_process(phi: float) -> None:
    x, noise = np.zeros(40_000), np.random.default_rng(1).standard_normal(40_000)
    for i in range(1, len(x)):
        x[i] = phi * x[i - 1] + noise[i]
    assert autocorrelation_time(x) == pytest.approx((1 + phi) / (1 - phi), rel=0.15)


def test_autocorrelation_time_of_what_never_changes_and_of_a_step() -> None:
    assert autocorrelation_time(np.ones(50)) == 1
    assert autocorrelation_time(np.repeat([0.0, 1.0], 100)) > 60


def test_clumped_failures_are_worth_less_than_scattered_ones() -> None:
    rng = np.random.default_rng(3)
    scattered = np.where(rng.random(2000) < 0.1, 2.0, 0.5)
    clumped = np.sort(scattered.reshape(10, 200), axis=1).ravel()
    busy = np.zeros(2000)
    few, many = evidence(clumped, busy, 0.95), evidence(scattered, busy, 0.95)
    assert few.share == many.share
    assert few.n_eff < many.n_eff / 20
    assert few.log_no < many.log_no


def test_clear_needs_distance_and_time() -> None:
    rng = np.random.default_rng(2)
    busy = rng.poisson(5, 400).astype(float)
    narrow = 0.5 + 0.03 * rng.standard_normal(400)
    assert clearing(narrow, busy, 0.95) >= 1
    assert clearing(narrow + 0.4, busy, 0.95) == 0  # five per cent of Cantelli's worst case would be above 1
    assert 0.2 < clearing(narrow[:30], busy[:30], 0.95) < 1  # narrow enough, and too few so far
    # No wait at all so far proves nothing while the queue has hardly had time to change.
    assert clearing(np.zeros(400), np.cumsum(rng.standard_normal(400)), 0.95) < 1


def test_slope_tells_growth_from_noise() -> None:
    t = np.linspace(0, 10, 200)
    rng = np.random.default_rng(4)
    grows = slope(t, 5 * t + rng.normal(0, 2, 200), 4.03)
    assert grows.lo is not None
    assert grows.lo > 0
    assert grows.value == pytest.approx(5, rel=0.2)
    still = slope(t, rng.normal(20, 2, 200), 4.03)
    assert still.lo is not None
    assert still.hi is not None
    assert still.lo < 0 < still.hi
    assert slope(t[:3], t[:3], 4.03).value is None


def seen(score: list[float] | np.ndarray, gap: float = 0.1, now: float | None = None) -> Seen:
    one = np.asarray(score, dtype=float)
    due = np.arange(len(one)) * gap
    end = np.where(np.isnan(one), np.nan, due + 0.05)
    return Seen(float(due[-1] + 1 if now is None else now), due, end, one[None, :])


def test_a_request_whose_fate_is_open_ends_the_count() -> None:
    score = np.full(300, 0.5)
    score[120] = math.nan
    assert look(seen(score), RULES, 2.0).n == 121 - 1 - 24  # a fifth of what is known is left out
    assert look(seen(np.full(300, 0.5)), RULES, 2.0).n == 240


def test_warm_up_and_the_start_are_left_out() -> None:
    score = np.full(400, 0.2)
    score[:60] = math.inf
    (e,) = look(seen(score), RULES, 2.0).evidence
    assert e.share == 1.0
    (e,) = look(seen(score), RULES, 2.0).evidence
    assert look(seen(score, now=11.0), RULES, 2.0).answer == ""  # no answer before a whole block


def test_yes_no_and_failures() -> None:
    assert look(seen(np.full(400, 0.5)), RULES, 2.0).answer == "yes"
    rng = np.random.default_rng(5)
    bad = np.where(rng.random(400) < 0.4, math.inf, 0.5)
    assert look(seen(bad), RULES, 2.0).answer == "no"
    near = np.where(rng.random(400) < 0.05, 1.2, 0.5)
    assert look(seen(near), RULES, 2.0).answer == ""


def test_every_rule_must_be_kept() -> None:
    both = (*RULES, Rule("tpot", {"tpot_ms": 50.0}, 0.95))
    s = seen(np.full(400, 0.5))
    bad = np.where(np.random.default_rng(6).random(400) < 0.4, 2.0, 0.5)
    two = Seen(s.now, s.due, s.end, np.stack((s.scores[0], bad)))
    found = look(two, both, 2.0)
    assert (found.answer, found.worst) == ("no", 1)


def test_a_growing_queue_is_an_early_no() -> None:
    due = np.arange(0, 13, 0.05)
    served = np.arange(len(due)) * 0.1 + 0.1  # half as fast as they come
    ttft = served - due
    score = np.where(served <= 13, ttft / 0.5, np.where(13 - due > 0.5, (13 - due) / 0.5, np.nan))
    found = look(Seen(13.0, due, np.where(served <= 13, served, np.nan), score[None, :]), RULES, 2.0)
    assert found.answer == "no"
    assert found.slope.lo is not None
    assert found.slope.lo > 0


def told(answer: str, share: float = 0.99, n: int = 200, now: float = 30.0) -> Look:
    e = Evidence(n, n, share, 1.0, -1.0)
    return Look(answer, "", now, (e,), ((0.0, 1.0),), slope(np.zeros(0), np.zeros(0), 1.0), n)


def search_with(knee: float, **more: float) -> Search:
    """A search whose every probe is answered, and rightly."""
    s = Search(1.0, **more)
    left = 10_000.0
    while (ask := s.next(left)) is not None:
        s.tell(ask, told("yes" if ask.rate <= knee else "no"), RULES)
        left -= 30
    return s


@pytest.mark.parametrize("knee", [0.07, 0.9, 3.3, 57.0])
def test_sure_answers_close_in_on_the_knee(knee: float) -> None:
    s = search_with(knee)
    assert s.decided
    assert s.low is not None
    assert s.high is not None
    assert s.low <= knee < s.high
    assert s.high / s.low <= ENOUGH
    assert s.asked <= PROBES


def test_the_highest_rate_allowed_is_never_passed() -> None:
    s = search_with(50.0, max_rate=6.0)
    assert (s.low, s.high, s.decided) == (6.0, None, True)
    s = Search(1.0, max_rate=6.0)
    rates = []
    while (ask := s.next(1000.0)) is not None and len(rates) < 30:
        rates.append(ask.rate)
        s.tell(ask, told("", 0.95) if ask.rate > 4 else told("yes"), RULES)
    assert max(rates) <= 6.0
    assert not s.decided


def test_no_rate_at_all_and_no_time() -> None:
    s = search_with(0.0)
    assert (s.low, s.decided) == (None, False)
    assert "not met" in s.why or "probes" in s.why
    s = Search(1.0)
    assert s.next(5.0) is None
    assert "budget" in s.why


def test_impressions_climb_but_claim_nothing() -> None:
    s = Search(1.0)
    first = s.next(600.0)
    assert first is not None
    assert enough(told("", 1.0), first, RULES)
    s.tell(first, told("", 1.0), RULES)
    second = s.next(500.0)
    assert second is not None
    assert second.rate == 2.0
    assert (s.low, s.high) == (None, None)


def test_a_probe_that_will_not_answer_in_its_time_ends_early() -> None:
    ask = Ask(5.0, 90.0, False)
    assert enough(told("", 0.95, now=40.0), ask, RULES)
    assert not enough(told("", 0.95, now=20.0), ask, RULES)
    assert not enough(told("", 0.99, now=40.0), ask, RULES)
    assert enough(told("", 0.99, now=90.0), ask, RULES)


def test_a_probe_goes_on_where_mean_and_spread_will_say_yes_in_its_time() -> None:
    """A steering rule only: what is said then rests on the same bounds."""
    ask, dull = Ask(5.0, 90.0, False), told("", 0.95, now=60.0)

    def look_with(*clearing: float) -> Look:
        return dataclasses.replace(dull, evidence=tuple(dull.evidence[0]._replace(clearing=c) for c in clearing))

    assert enough(look_with(0.0), ask, RULES)
    assert enough(look_with(0.5), ask, RULES)
    assert not enough(look_with(0.7), ask, RULES)
    assert enough(look_with(0.7, 0.0), ask, RULES)  # every rule must


def test_formula_and_simulation_agree_on_the_knee() -> None:
    """The truth that coverage is held against, from two sides."""
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    model = MODELS["M/M/1"]
    assert model.knee == pytest.approx(mmk_knee(1, 10.0, 0.5, 0.95))
    assert true_knee(model, 2.0, 9.0, requests=8000, copies=64, rounds=10) == pytest.approx(model.knee, rel=0.03)


@pytest.mark.parametrize("name", ["M/M/1", "M/M/16"])
def test_the_interval_holds_the_true_knee(name: str) -> None:
    """A few seeds here; ``benchmarks/find_coverage.py`` runs a thousand of each model."""
    model = MODELS[name]
    found = run_searches(model, 30, 600.0, seed=11)
    assert model.knee is not None
    assert sum(f.holds(model.knee) for f in found) >= 28  # 92 % of 30, rounded up
    assert sum(f.search.low is not None and f.search.high is not None for f in found) >= 24
    assert all(len(f.probes) <= PROBES and f.seconds < 700 for f in found)


def test_batching_slows_every_stream() -> None:
    """The model's own sanity: alone 40 tokens of 21 ms, and both rules scored by their limits."""
    model = MODELS["batching"]
    ttft, e2e = model.serve(np.array([[0.0, 10.0]]), np.random.default_rng(0))
    assert ttft == pytest.approx(0.031)
    assert e2e == pytest.approx(0.031 + 39 * 0.021)
    assert scores(model, ttft, e2e)[:, 0, 0] == pytest.approx([0.031 / 0.3, 0.021 / 0.05])


def test_the_error_is_shared_out() -> None:
    assert ALPHA / PROBES * PROBES <= 0.05
    assert BLOCK_S >= 10
