"""Paired rounds: effects and their intervals, claims that hold their error under optional stopping, waits, drift."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import S, Service, gauge_rows
from tests.paired_rounds import HIGH, KINDS, LOW, differences, rounds, stopped
from whywait.analyze import compare
from whywait.analyze.compare import METRICS, effect, effects, figures, metric_of
from whywait.analyze.phases import PHASES
from whywait.analyze.stats import t975
from whywait.analyze.summary import summarize
from whywait.errors import UsageError
from whywait.judge import paired
from whywait.judge.paired import ABOVE, ALPHA, BELOW, MARGIN, SAME, Asked, asked_of, promise_of, waits, ways
from whywait.judge.sequential import mean_evidence, mean_half_width
from whywait.judge.trial import _of_runs, gate, judged, surely_worse
from whywait.judge.vocabulary import CAUSES
from whywait.trying import order

FALSE_FINDINGS = 0.08  # of A/A trials, at most

# --- trials of simulated rounds


@pytest.mark.parametrize("kind", KINDS)
def test_an_aa_trial_finds_nothing(kind: str) -> None:
    said, _ = stopped(differences(rounds(kind, np.random.default_rng(1))))
    assert ((said == ABOVE) | (said == BELOW)).any(axis=1).mean() <= FALSE_FINDINGS


def test_the_rounds_are_noisy_enough_to_fool_a_plain_test() -> None:
    """Student's t at each look, for each figure: what a trial must not do. Else the test above could not fail."""
    d = differences(rounds("normal", np.random.default_rng(1)))
    fooled = np.zeros(len(d), dtype=bool)
    for n in range(LOW, HIGH + 1, 2):
        t = np.abs(d[..., :n].mean(-1)) / d[..., :n].std(-1, ddof=1) * math.sqrt(n)
        fooled |= (t > t975(n - 1)).any(axis=1)
    assert fooled.mean() > 2 * FALSE_FINDINGS


def test_a_fixed_order_would_be_fooled_by_drift() -> None:
    """A first in every pair: a steady drift is then taken for an effect. The order of the trial is what prevents it."""
    x = rounds("normal", np.random.default_rng(1)) / 8 + np.linspace(0, 0.4, 2 * HIGH)
    said, _ = stopped(x[..., 1::2] - x[..., 0::2])
    assert (said == ABOVE).any(axis=1).mean() > 0.5
    said, _ = stopped(differences(x))
    assert ((said == ABOVE) | (said == BELOW)).any(axis=1).mean() <= FALSE_FINDINGS


@pytest.mark.parametrize(("size", "most_pairs"), [(0.15, 8), (0.3, 6)])
def test_what_is_there_is_found_and_held_by_its_interval(size: float, most_pairs: int) -> None:
    d = differences(rounds("normal", np.random.default_rng(2)), size)
    said, pairs = stopped(d)
    assert (said == ABOVE).all(axis=1).mean() > 0.9
    assert np.median(pairs) <= most_pairs
    held = [
        np.abs(x[..., :n].mean(-1) - size) <= mean_half_width(x[..., :n], ALPHA / 3)
        for x, n in zip(d, pairs, strict=True)
    ]
    assert np.all(held, axis=1).mean() >= 1 - ALPHA


def test_equal_and_quiet_arms_are_found_to_be_equal() -> None:
    said, pairs = stopped(differences(rounds("normal", np.random.default_rng(3)) / 4))
    assert (said == SAME).all(axis=1).mean() > 0.95
    assert np.median(pairs) < HIGH


# --- the evidence


def test_the_interval_is_what_the_evidence_leaves() -> None:
    rng = np.random.default_rng(4)
    for n in (3, 4, 7, 20):
        d = rng.standard_normal((5, n))
        half = mean_half_width(d, 0.05)
        edge = mean_evidence(d, d.mean(-1) + half)
        assert edge == pytest.approx(np.full(5, -math.log(0.05)))
    assert np.isinf(mean_half_width(rng.standard_normal((2, 2)), 0.05)).all()
    assert mean_evidence(np.array([[3.0]])) == 0


def test_evidence_is_a_fair_bet() -> None:
    """Its mean is at most 1 under the null, whatever the spread: that is what lets one look at any time."""
    d = np.random.default_rng(5).standard_normal((200_000, 4)) * 17
    e = np.exp(mean_evidence(d))
    assert e.mean() == pytest.approx(1.0, abs=0.15)
    assert (e >= 20).mean() <= 0.05


def test_equal_values_are_not_known_better_than_they_can_be_measured() -> None:
    d = np.full((1, 4), 2e-4)
    assert ways(d, 0.05, 0.01)[0] == ABOVE
    assert ways(d, 0.05, 0.01, compare.RESOLUTION)[0] == SAME


# --- effects


def pairs_of(values: list[tuple[float | None, float | None]], name: str = "ttft_ms.p50") -> list[Any]:
    return [({name: a}, {name: b}) for a, b in values]


def test_an_effect_is_the_mean_over_pairs() -> None:
    e = effect("ttft_ms.p50", pairs_of([(100.0, 50.0), (200.0, 100.0), (50.0, 25.0), (80.0, 40.0)]))
    assert e.ratio.value == pytest.approx(0.5)
    assert e.ratio.lo is not None
    assert e.ratio.lo < 0.5 < (e.ratio.hi or 0)
    assert e.difference.value == pytest.approx(-53.75)
    assert (e.n, e.higher, e.scale, e.moved) == (4, 0, "ratio", -1)
    assert e.a is not None
    assert e.b == pytest.approx(e.a / 2)
    assert "Student" in e.note


def test_what_is_unknown_in_a_round_leaves_its_pair_out() -> None:
    e = effect("ttft_ms.p50", pairs_of([(100.0, None), (None, 1.0), (100.0, 90.0)]))
    assert (e.n, e.ratio.value, e.ratio.lo) == (1, pytest.approx(0.9), None)
    none = effect("ttft_ms.p50", pairs_of([(None, None)]))
    assert (none.n, none.a, none.ratio.value, none.note) == (0, None, None, "not known")


def test_what_may_be_nothing_is_compared_by_its_difference() -> None:
    e = effect("output_tokens_per_s", pairs_of([(0.0, 5.0), (10.0, 12.0)], "output_tokens_per_s"))
    assert (e.scale, e.ratio.value, e.difference.value) == ("difference", None, 3.5)
    assert effect("goodput_share", pairs_of([(0.5, 1.0)] * 3, "goodput_share")).scale == "difference"


@pytest.mark.parametrize("n", [4, 8])
def test_intervals_of_effects_hold_their_error(n: int) -> None:
    rng = np.random.default_rng(6)
    held = 0
    for _ in range(200):
        d = 0.2 + 0.05 * rng.standard_normal(n)
        e = effect("ttft_ms.p50", pairs_of([(100.0, 100.0 * math.exp(x)) for x in d]))
        assert e.ratio.lo is not None
        assert e.ratio.hi is not None
        held += e.ratio.lo <= math.exp(0.2) <= e.ratio.hi
    assert held >= 0.92 * 200


def test_a_cause_that_no_round_of_an_arm_named_took_no_time_there() -> None:
    cause = "causes.queue.slot limit"
    a, b = {"phases.queue": 40.0, cause: 30.0}, {"phases.queue": 0.0}
    assert effects([(a, b)] * 3)[cause].difference.value == -30
    assert effects([(a, {"phases.queue": None})] * 3)[cause].n == 0
    assert effects([(a, {"phases.queue": 20.0, "untold.queue": 5.0})] * 3)[cause].difference.value == -30
    assert effects([(a, {"phases.queue": 20.0, "untold.queue": 20.0})] * 3)[cause].n == 0  # it may be all of it
    mostly = {"phases.queue": 20.0, cause: 4.0, "untold.queue": 16.0}
    assert effects([(a, mostly)] * 3)[cause].n == 0


def test_waits_of_both_arms_differ_by_what_moved() -> None:
    pairs = [({"phases.decode": a, "e2e_ms.mean": 200.0}, {"phases.decode": a * 4, "e2e_ms.mean": 200.0})
             for a in (10.0, 40.0, 90.0)]  # fmt: skip
    (w,) = [w for w in waits(effects(pairs), "decode") if w["name"] == "phases.decode"]
    assert w["b"] - w["a"] == pytest.approx(w["difference"])
    assert w["value"] == pytest.approx(4)


def test_figures_of_a_run() -> None:
    run = Service(slots=2, tokens=8).closed(2, 12)
    found = figures(run, summarize(run)["points"][0])
    assert set(METRICS) <= set(found)
    assert {f"phases.{p}" for p in PHASES} <= set(found)
    ok = run.requests["outcome"] == 0
    assert found["mean_output_tokens"] == pytest.approx(float(run.requests["output_tokens"][ok].mean()))
    assert found["energy_j_per_good_request"] is None
    assert all(v is None or math.isfinite(v) for v in found.values())
    for name in found:
        if not name.startswith(("mean_", "untold.")):
            metric_of(name)


def test_energy_is_charged_to_the_tokens_of_what_ended_well() -> None:
    power = [{**r, "source": "gpu"} for r in gauge_rows("energy_joules_total", [(0, 0.0), (60 * S, 6000.0)])]
    run = Service(slots=2, tokens=8).closed(2, 12, readings=power)
    point = summarize(run)["points"][0]
    found = figures(run, point)
    assert found["energy_j_per_good_request"] == pytest.approx(100 / point["goodput_requests_per_s"], rel=1e-3)
    million = 100 / point["effective_tokens_per_s"] * 1e6
    assert found["energy_j_per_million_effective_tokens"] == pytest.approx(million, rel=1e-3)


# --- claims


def trial(d: dict[str, list[float]], base: dict[str, float], **plan: Any) -> dict[str, Any]:
    """The judgement of a trial whose pairs differ by these ln(B / A)."""
    asked = [vars(asked_of(n)) for n in plan.pop("metrics", d)]
    whole = {"a": "x", "b": "y", "same": False, "loads": [{"label": None}], "asked": asked, "promise": "",
             "margin": MARGIN, "exclude": [], **plan}  # fmt: skip
    out = []
    for i in range(len(next(iter(d.values())))):
        for arm in "AB":
            found = {k: v * math.exp(d[k][i] if arm == "B" and k in d else 0.0) for k, v in base.items()}
            out.append({"number": len(out), "arm": arm, "pair": i, "whole": True, "disturbed": {}, **NO_WORD,
                        "calibration_ms": [10.0, 10.0], "figures": {"": found}})  # fmt: skip
    return judged(whole, out)


NO_WORD: dict[str, Any] = {"engine": {}, "doubts": [], "run": "r"}
FASTER = [0.30, 0.28, 0.33, 0.31]
FLAT = [0.002, -0.003, 0.001, -0.001]
BASE = {"output_tokens_per_s": 100.0, "ttft_ms.p50": 50.0, "tpot_ms.p50": 10.0}


def test_claims_hold_fail_or_stay_open() -> None:
    found = trial({"output_tokens_per_s": FASTER, "ttft_ms.p50": FASTER, "tpot_ms.p50": FLAT}, BASE)
    states = {c["metric"]: (c["state"], c["way"]) for c in found["claims"]}
    assert states == {
        "output_tokens_per_s": ("holds", "above"),
        "ttft_ms.p50": ("fails", "above"),
        "tpot_ms.p50": ("fails", "same"),
    }
    assert found["decided"]
    assert surely_worse(found) == ["ttft_ms.p50 +35.7 %"]
    wild = trial({"output_tokens_per_s": [0.3, -0.2, 0.4, 0.0]}, BASE)
    assert wild["claims"][0]["state"] == "undecided"
    assert "pairs would decide" in wild["claims"][0]["next_step"]
    assert not wild["decided"]


def test_a_trial_is_judged_by_the_rule_that_was_simulated() -> None:
    d = differences(rounds("two modes", np.random.default_rng(7), 40), 0.2)[..., :6]
    said = ways(d, ALPHA / 3, math.log1p(MARGIN), compare.RESOLUTION)
    for i, one in enumerate(d):
        found = trial({k: v.tolist() for k, v in zip(BASE, one, strict=True)}, BASE)
        assert [c["way"] for c in found["claims"]] == [paired.WAYS[int(w)] for w in said[i]]
    assert len(set(said.ravel().tolist())) > 1


def test_claims_are_of_what_was_named_and_share_one_error() -> None:
    alone = trial({"output_tokens_per_s": FASTER}, BASE)["claims"][0]
    among = trial({"output_tokens_per_s": FASTER, "ttft_ms.p50": FLAT, "tpot_ms.p50": FLAT}, BASE)["claims"][0]
    assert among["low"] < alone["low"] < alone["value"] < alone["high"] < among["high"]


def test_an_aa_trial_calls_a_finding_false() -> None:
    assert "no false finding" in trial({"ttft_ms.p50": FLAT}, BASE, same=True)["headline"]
    assert "FALSE" in trial({"ttft_ms.p50": FASTER}, BASE, same=True)["headline"]
    noise = trial({"ttft_ms.p50": FLAT}, BASE, same=True)["noise"]
    assert 0 < noise["ttft_ms.p50"] < MARGIN


def test_a_promise_is_of_a_known_wait() -> None:
    for name, where in paired.SEEN_IN.items():
        assert name in CAUSES
        metric_of(where)
        assert promise_of(name).metric == where
    assert promise_of("queue").metric == "phases.queue"
    for bad in ("speed", "no success", ""):
        with pytest.raises(UsageError):
            promise_of(bad)
    with pytest.raises(UsageError):
        asked_of("speed")


WAITS = {"ttft_ms.p50": 50.0, "phases.queue": 40.0, "phases.prefill": 20.0, "phases.decode": 40.0}


def test_the_waits_that_moved_are_set_against_the_promise() -> None:
    moves = {"phases.queue": [-2.0, -2.1, -1.9, -2.0], "phases.decode": FASTER}
    found = trial(moves, WAITS, metrics=["ttft_ms.p50"], promise="queue")
    (promise,) = [c for c in found["claims"] if c["kind"] == "promise"]
    assert promise["state"] == "holds"
    rows = {w["name"]: (w["way"], w["promised"]) for w in found["waits"][""]}
    assert rows == {"phases.queue": ("below", True), "phases.decode": ("above", False)}
    broken = trial({"phases.queue": FASTER}, WAITS, metrics=["ttft_ms.p50"], promise="queue")
    assert [c["state"] for c in broken["claims"] if c["kind"] == "promise"] == ["fails"]


def test_a_wait_that_is_not_there_is_no_promise_broken() -> None:
    found = trial({"ttft_ms.p50": FLAT}, {**WAITS, "phases.queue": 0.1}, promise="queue")
    (promise,) = [c for c in found["claims"] if c["kind"] == "promise"]
    assert promise["state"] == "undecided"
    assert "hardly waits" in promise["evidence"][0]


def test_a_price_that_is_paid_holds_and_is_no_failure() -> None:
    asked = [vars(Asked("ttft_ms.p50", True, "", price=True))]
    found = trial({"ttft_ms.p50": FASTER}, BASE, asked=asked)
    assert [(c["kind"], c["state"]) for c in found["claims"]] == [("price", "holds")]
    assert surely_worse(found) == []


def test_only_a_rule_said_before_leaves_rounds_out() -> None:
    plan = {"same": False, "loads": [{"label": None}], "asked": [vars(asked_of("ttft_ms.p50"))], "promise": "",
            "margin": MARGIN}  # fmt: skip
    made = [
        {"number": i, "arm": "AB"[i % 2], "pair": i // 2, "whole": i != 7, **NO_WORD, "calibration_ms": [None, None],
         "disturbed": {"neighbours": "others used 50 %"} if i == 2 else {}, "figures": {"": {"ttft_ms.p50": 50.0}}}
        for i in range(8)
    ]  # fmt: skip
    assert judged({**plan, "exclude": []}, made)["pairs"] == 3
    left = judged({**plan, "exclude": ["neighbours"]}, made)
    assert (left["pairs"], [x["pair"] for x in left["excluded"]]) == (2, [1])
    assert any("rounds 3 (A)" in d["what"] for d in left["doubts"])


def test_the_worst_disturbed_round_is_quoted_and_only_whole_rounds_show_drift() -> None:
    plan = {"same": False, "loads": [{"label": None}], "asked": [vars(asked_of("ttft_ms.p50"))], "promise": "",
            "margin": MARGIN, "exclude": []}  # fmt: skip
    used = {0: "others used 18 % of a core", 3: "others used 40 % of a core", 5: "others used 9 % of a core"}
    made = [
        {"number": i, "arm": "AB"[i % 2], "pair": i // 2, "whole": i != 7, **NO_WORD,
         "calibration_ms": [90.0 if i == 7 else 10.0 + i / 10] * 2, "figures": {"": {"ttft_ms.p50": 50.0}},
         "disturbed": {"neighbours": used[i]} if i in used else {}}
        for i in range(8)
    ]  # fmt: skip
    found = judged(plan, made)
    (doubt,) = [d for d in found["doubts"] if d["what"].startswith("rounds 1 (A), 4 (B), 6 (B)")]
    assert doubt["why"].startswith("in round 4: others used 40 %")
    assert found["drift"]["loop"] == pytest.approx(0.06)


def test_drift_and_unlike_work_are_doubts() -> None:
    plan = {"same": False, "loads": [{"label": None}], "asked": [vars(asked_of("ttft_ms.p50"))], "promise": "",
            "margin": MARGIN, "exclude": []}  # fmt: skip
    made = [
        {"number": i, "arm": arm, "pair": i // 2, "whole": True, **NO_WORD, "disturbed": {},
         "calibration_ms": [10.0 + i, 10.0 + i],
         "figures": {"": {"ttft_ms.p50": 50.0 * 1.05**i, "mean_prompt_tokens": 100.0 if arm == "A" else 110.0}}}
        for i, arm in enumerate("ABBAABBA")
    ]  # fmt: skip
    found = judged(plan, made)
    said = " ".join(d["what"] for d in found["doubts"])
    assert "drift" in said
    assert "same work" in said
    assert "machine itself" in said
    assert found["drift"]["figure"] == pytest.approx(1.05**7 - 1, rel=0.05)
    assert found["claims"][0]["way"] not in ("above", "below")


def test_effects_for_people() -> None:
    ratios = [paired.said(v, "ratio", "ms") for v in (1.125, 0.5, 1.0, 12.5, 1e9, 1e-9, None)]
    assert ratios == ["+12.5 %", "−50.0 %", "±0 %", "×12.5", "over ×1000", "under ÷1000", "–"]
    units = (("ms", "−3.20 ms"), ("share", "−320 points"), ("J", "−3.20 J"))
    assert all(paired.said(-3.2, "difference", unit) == text for unit, text in units)


def test_what_the_runs_doubt_is_told_once() -> None:
    made = [{"arm": arm, "run": f"round-{i}", "doubts": [f"{i} reads were coalesced", "power_w is unknown"]}
            for i, arm in enumerate("ABB")]  # fmt: skip
    assert _of_runs(made) == [{"what": "… reads were coalesced", "why": "so say the runs of 1 rounds of A and 2 of B",
                               "next": "whywait show …/round-0"}]  # fmt: skip


def test_gates_read_effects_and_claims() -> None:
    found = trial({"ttft_ms.p50": FASTER}, BASE)
    assert gate(found, ("ttft_ms", "p50", "ratio")) == pytest.approx(1.357, abs=0.01)
    low, high = (gate(found, ("ttft_ms", "p50", f"ratio_{k}")) or 0 for k in ("low", "high"))
    assert (low, high) == (found["claims"][0]["low"], found["claims"][0]["high"])
    assert gate(found, ("ttft_ms", "p50", "a")) == pytest.approx(50.0)
    for bad in (("speed", "ratio"), ("ttft_ms", "p50", "size")):
        with pytest.raises(KeyError):
            gate(found, bad)


def test_the_order_is_of_blocks_that_cancel_drift() -> None:
    for seed in range(20):
        got = "".join(order(seed, 24))
        assert {got[i : i + 4] for i in range(0, 24, 4)} <= {"ABBA", "BAAB"}
    assert len({"".join(order(s, 24)) for s in range(20)}) > 10
    assert order(3, 8) == order(3, 8)
