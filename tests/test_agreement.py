"""Agreement of distributions against known ones: the bound against the whole sum, intervals against simulated truth."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whywait.analyze import agreement as ag
from whywait.core.scored import Scored, scored
from whywait.judge import agreed

ln = math.log


def listed(p: dict[int, float], k: int) -> tuple[np.ndarray, np.ndarray]:
    top = sorted(p.items(), key=lambda t: -t[1])[:k]
    return np.array([t for t, _ in top]), np.array([v for _, v in top])


def whole(p: dict[int, float], q: dict[int, float]) -> float:
    return sum(v * ln(v / q[t]) for t, v in p.items() if v > 0)


def test_whole_lists_give_the_divergence_itself() -> None:
    p, q = {1: 0.5, 2: 0.25, 3: 0.25}, {1: 0.25, 2: 0.5, 3: 0.25}
    kl, outside = ag.divergence(listed(p, 3), listed(q, 3))
    assert kl == pytest.approx(0.5 * ln(2) - 0.25 * ln(2), abs=1e-5)
    assert outside == pytest.approx(0, abs=1e-12)
    assert ag.divergence(listed(p, 3), listed(p, 3))[0] == pytest.approx(0, abs=1e-12)


def test_the_rest_is_one_lump() -> None:
    """By hand: lists of one token, 0.6 against 0.3; the rest is 0.4 against 0.7."""
    kl, outside = ag.divergence(listed({1: 0.6, 2: 0.4}, 1), listed({1: 0.3, 2: 0.7 / 2, 3: 0.7 / 2}, 3))
    assert outside == pytest.approx(0.4)
    one = ag.divergence((np.array([1]), np.array([0.6])), (np.array([1]), np.array([0.3])))[0]
    assert one == pytest.approx(0.6 * ln(2) + 0.4 * ln(0.4 / 0.7), abs=1e-4)
    assert kl == pytest.approx(one, abs=1e-4)


def test_a_token_that_b_does_not_list_has_at_most_what_its_last_has() -> None:
    """A is sure of 9, which B's list of two does not hold: B gives it at most 0.1 or what its list leaves."""
    kl, _ = ag.divergence((np.array([9]), np.array([0.9])), (np.array([1, 2]), np.array([0.5, 0.1])))
    assert kl == pytest.approx(0.9 * ln(0.9 / 0.1) + 0.1 * ln(0.1 / 0.9), rel=1e-3)
    lumped = 0.9 * ln(0.9 / 1.0)  # all of it in one lump says nothing
    assert kl > 1.5 > lumped


masses = st.lists(st.floats(0.001, 1), min_size=6, max_size=6)


@given(masses, masses, st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_it_is_never_more_than_the_true_divergence(a: list[float], b: list[float], k: int) -> None:
    p = {i: v / sum(a) for i, v in enumerate(a)}
    q = {i: v / sum(b) for i, v in enumerate(b)}
    kl, outside = ag.divergence(listed(p, k), listed(q, k))
    assert 0 <= kl <= whole(p, q) + 2e-5
    assert 0 <= outside <= 1 + 1e-9
    if k == 6:
        assert kl == pytest.approx(whole(p, q), abs=2e-5)


@given(masses, masses)
@settings(max_examples=40, deadline=None)
def test_what_both_lists_hold_only_sharpens_it(a: list[float], b: list[float]) -> None:
    p = {i: v / sum(a) for i, v in enumerate(a)}
    q = {i: v / sum(b) for i, v in enumerate(b)}
    order = sorted(p, key=lambda t: -p[t])  # the same tokens in both lists, so that the longer refines the shorter
    found = []
    for k in range(1, 7):
        ids = np.array(order[:k])
        lists = [(ids, np.array([d[t] for t in order[:k]])) for d in (p, q)]
        found.append(ag.divergence(lists[0], lists[1])[0])
    assert all(x <= y + 2e-5 for x, y in pairwise(found))


def text_of(rows: list[tuple[int, float | None, dict[int, float]]]) -> Scored:
    return scored(rows)


def test_positions_by_hand() -> None:
    a = text_of([(8, ln(0.5), {1: ln(0.5), 2: ln(0.3)}), (9, None, {4: ln(0.9)})])
    b = text_of([(8, ln(0.25), {2: ln(0.6), 1: ln(0.25)}), (9, ln(0.2), {4: ln(0.7), 5: ln(0.2)})])
    found = ag.positions(a, b)
    assert found["same"] == [0.0, 1.0]
    assert found["nll_a"] == [pytest.approx(ln(2)), None]
    assert found["nll_b"] == [pytest.approx(ln(4)), pytest.approx(ln(5))]
    assert found["at"] == [8, 9]
    figures = ag.figures([{"kind": "x", **found}])
    assert figures["positions"] == 2
    assert figures["top1"] == 0.5
    assert figures["untold"] == 0.5
    assert (figures["perplexity_a"], figures["perplexity_b"]) == (pytest.approx(2), pytest.approx(4))
    assert figures["perplexity_ratio"] == pytest.approx(2)
    assert figures["perplexity_ratio_low"] is None  # one text says nothing of others
    with pytest.raises(ValueError, match="same positions"):
        ag.positions(a, text_of([(8, ln(0.5), {1: 0.0})]))


def test_a_tie_is_no_disagreement() -> None:
    """In 16 bits two logits are often equal, and which comes first says nothing."""
    a = text_of([(8, None, {1: ln(0.4), 2: ln(0.4) - 1e-6}), (9, None, {1: ln(0.4), 2: ln(0.39)})])
    b = text_of([(8, None, {2: ln(0.4), 1: ln(0.4) - 1e-6}), (9, None, {2: ln(0.4), 1: ln(0.39)})])
    assert ag.positions(a, b)["same"] == [1.0, 0.0]


def test_nothing_gives_nothing() -> None:
    found = ag.figures([])
    assert found["positions"] == 0
    assert {k for k, v in found.items() if v is not None} == {"texts", "positions"}
    assert [c["state"] for c in ag.claims(found, {"perplexity": 2, "top1": 5})] == ["undecided", "undecided"]


def made(rng: np.random.Generator, texts: int, each: int, loss: float, agree: float) -> list[dict[str, object]]:
    """Texts that differ from one another: a loss of its own each, around ``loss`` nats."""
    out = []
    for i in range(texts):
        nll = rng.gamma(2, 1.5, each)
        own = loss + rng.normal(0, 0.02)
        kl = rng.gamma(0.5, 0.05, each) * np.exp(rng.normal(0, 0.3))
        out.append({"kind": f"k{i % 3}", "same": (rng.random(each) < agree).astype(float).tolist(), "kl": kl.tolist(),
                    "outside": [0.1] * each, "nll_a": nll.tolist(), "at": list(range(each)),
                    "nll_b": (nll + own + rng.normal(0, 0.2, each)).tolist()})  # fmt: skip
    return out


def test_identical_arms_with_noise_find_something_in_at_most_8_percent_of_1000(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither is perplexity found to have moved, nor does a claim fail: over texts, not positions."""
    monkeypatch.setattr(ag, "DRAWS", 200)
    rng = np.random.default_rng(3)
    moved = failed = 0
    for _ in range(1000):
        sums = []
        for _ in range(12):
            own = rng.normal(0, 0.02)
            sums.append((float((own + rng.normal(0, 0.2, 16)).sum()), 16))
        found = ag._ratio("x", sums)
        low, high = found["x_low"], found["x_high"]
        assert low is not None
        assert high is not None
        moved += low > 0 or high < 0
        failed += math.exp(low) > 1.02
    assert moved <= 80
    assert failed <= 10


def test_intervals_hold_the_truth_and_claims_follow_them() -> None:
    rng = np.random.default_rng(5)
    margins = {"perplexity": 2.0, "top1": 5.0}
    big = ag.figures(made(rng, 40, 40, ln(1.10), 0.80))
    assert big["perplexity_ratio_low"] < 1.10 < big["perplexity_ratio_high"]
    assert big["top1_low"] < 0.80 < big["top1_high"]
    assert [c["state"] for c in ag.claims(big, margins)] == ["fails", "fails"]
    none = ag.figures(made(rng, 200, 60, 0.0, 0.99))
    assert [c["state"] for c in ag.claims(none, margins)] == ["holds", "holds"]
    few = ag.claims(ag.figures(made(rng, 6, 10, ln(1.021), 0.96)), margins)
    assert [c["state"] for c in few] == ["undecided", "undecided"]
    assert all(c["next_step"] for c in few)


def test_agreement_in_all_positions_still_has_an_interval() -> None:
    rng = np.random.default_rng(7)
    found = ag.figures(made(rng, 10, 10, 0.0, 2.0))
    assert found["top1"] == 1.0
    assert 0.95 < found["top1_low"] < 1.0


def test_p99_has_no_upper_bound_from_few_positions() -> None:
    rng = np.random.default_rng(9)
    assert ag.figures(made(rng, 8, 10, 0, 0.9))["kl_p99_high"] is None
    found = ag.figures(made(rng, 20, 40, 0, 0.9))
    assert found["kl_p99_low"] <= found["kl_p99"] <= found["kl_p99_high"]


def test_kinds_are_apart() -> None:
    rng = np.random.default_rng(1)
    found = ag.by_kind(made(rng, 6, 5, 0, 0.9))
    assert list(found) == ["k0", "k1", "k2"]
    assert all(f["texts"] == 2 and f["positions"] == 10 for f in found.values())


def claim(figure: str, state: str, value: float | None) -> dict[str, object]:
    return {"figure": figure, "state": state, "value": value, "claim": "…"}


def test_the_headline_names_what_fails_first() -> None:
    worse, open_ = claim("perplexity_ratio", "fails", 2.245), claim("accuracy", "undecided", -0.031)
    good = claim("top1", "holds", 0.99)
    assert agreed.headline([good, worse, open_], False) == "B is worse than allowed: perplexity ×2.25"
    assert agreed.headline([good, open_], False) == (
        "Undecided: accuracy −3.1 points; within bounds: same first choice in 99%"
    )
    assert agreed.headline([good], False).startswith("B is not worse than allowed")
    assert "which is false" in agreed.headline([worse], True)
    assert agreed.headline([claim("top1", "undecided", None)], False) == "Undecided: first choice"
    assert agreed.headline([], False) == "Nothing could be compared"


def test_what_is_doubtful_is_said() -> None:
    rng = np.random.default_rng(2)
    texts = made(rng, 5, 10, 0, 0.9)
    for t in texts:
        t["outside"], t["nll_b"] = [0.3] * 10, [None] * 10
    kept = {"texts": texts, "why": "", "ways": {"A": "one", "B": "other"}, "k": 20}
    found = agreed.agreement_of(kept, {"perplexity": 2.0, "top1": 5.0})
    said = [d["what"] for d in agreed.doubts(found, {"A": {"model": "x"}, "B": {"model": "y"}}, False)]
    assert len(said) == 5
    assert found["claims"][0]["state"] == "undecided"
    assert agreed.gate({"agreement": found, "tasks": None}, ("agreement", "perplexity_ratio")) is None
    assert agreed.gate({"agreement": found, "tasks": None}, ("accuracy", "drop")) is None
    with pytest.raises(KeyError):
        agreed.gate({"agreement": found, "tasks": None}, ("accuracy", "kl"))


def test_a_gate_counts_losses_upwards() -> None:
    row = {"name": "accuracy", "a": 0.9, "b": 0.8, "drop": -0.1, "low": -0.15, "high": -0.05}
    mine = {**row, "name": "accuracy: long sums"}
    sign = {"name": "answers that loop", "a": 0.0, "b": 0.2, "drop": 0.2, "low": 0.1, "high": 0.3}
    result = {"agreement": {"figures": None}, "tasks": {"accuracy": [row, mine], "degeneration": [sign]}}
    names = [("accuracy", n) for n in ("drop", "drop_low", "drop_high", "a")]
    assert [agreed.gate(result, p) for p in names] == [pytest.approx(v) for v in (10, 5, 15, 90)]
    assert agreed.gate(result, ("accuracy", "long sums", "drop_high")) == pytest.approx(15)
    assert agreed.gate(result, ("degeneration", "answers that loop", "rise_low")) == pytest.approx(10)
