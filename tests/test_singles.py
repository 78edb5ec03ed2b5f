"""What single streams tell, against services of numbers whose costs are known."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.probe_runs import Probed, Truth
from whywait.analyze.fits import Curve, curve, lengths_of, ratio
from whywait.analyze.singles import figures
from whywait.analyze.stats import Estimate

SEEDS = 30


def holds(e: dict[str, Any], truth: float) -> bool:
    return e["lo"] is not None and bool(e["lo"] <= truth <= e["hi"])


@pytest.mark.parametrize("truth", [Truth(), Truth(per_token2=5e-5), Truth(noise=0.1, outliers=0.08)])
def test_intervals_hold_the_true_costs(truth: Truth) -> None:
    """In at least 90 % of seeded probes each, for every cost that a service of numbers has; and they are narrow."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        f = figures(Probed(truth, seed).run(5))
        p, d = f["prefill"], f["decode"]
        true = {"fixed_ms": truth.fixed, "per_token_us": truth.per_token * 1e3}
        seen.update(k for k, v in true.items() if holds(p[k], v))
        square = p.get("per_token2_ns", {"lo": None})
        seen["square"] += holds(square, truth.per_token2 * 1e6) if truth.per_token2 else square["lo"] is None
        seen["step"] += holds(d["fixed_ms"], truth.step)
        seen["context"] += holds(d["per_context_token_us"], truth.per_context * 1e3)
        width = (p["per_token_us"]["hi"] - p["per_token_us"]["lo"]) / p["per_token_us"]["value"]
        seen["narrow"] += width < 0.5
    assert {k: n for k, n in seen.items() if n < 0.9 * SEEDS} == {}


@pytest.mark.parametrize(
    ("truth", "cache", "second", "neighbour"),
    [
        (Truth(), "fails", "batched", "whole"),
        (Truth(cache=0.95, second=0, stalls=False), "holds", "serialised", "none"),
        (Truth(cache=0.95, second=2.0, chunk=256), "holds", "in turn", "chunked"),
    ],
)
def test_what_repeats_and_pairs_show(truth: Truth, cache: str, second: str, neighbour: str) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for seed in range(12):
        f = figures(Probed(truth, seed).run(5))
        found[f["cache"]["state"], "cache"] += 1
        found[f["second_stream"]["kind"], "second"] += 1
        found[f["long_neighbour"]["kind"], "neighbour"] += 1
    for kind in ((cache, "cache"), (second, "second"), (neighbour, "neighbour")):
        assert found[kind] >= 11, found
    wrong = {
        (k, what): n
        for (k, what), n in found.items()
        if (k, what) not in {(cache, "cache"), (second, "second"), (neighbour, "neighbour")}
        and k not in ("undecided", "shared")
    }
    assert sum(wrong.values()) <= 1, wrong


def test_a_free_second_stream_is_not_called_dear() -> None:
    kinds = Counter(figures(Probed(Truth(second=1.0), seed).run(6))["second_stream"]["kind"] for seed in range(12))
    assert kinds["free"] >= 8
    assert not kinds["in turn"]
    assert not kinds["serialised"]


def test_cost_of_context_that_is_not_there_is_undecided() -> None:
    states = [figures(Probed(Truth(per_context=0.0), s).run(4))["decode"]["per_context_token_us"] for s in range(12)]
    assert sum(e["state"] == "undecided" for e in states) >= 11
    assert all("at most" in e["why"] for e in states if e["state"] == "undecided")


def test_blocks_and_drift_are_seen() -> None:
    f = figures(Probed(Truth(cache=0.9, reports=True), 3).run(6))
    assert f["cache"]["block_tokens"] == 16
    assert f["cache"]["saved_later"]["lo"] > 0.5
    drifted = figures(Probed(Truth(drift=0.5), 3).run(8))
    assert any("drifted" in d["what"] for d in drifted["doubts"])
    assert not any("drifted" in d["what"] for d in f["doubts"])


def test_too_little_is_undecided_and_never_a_number() -> None:
    f = figures(Probed(Truth(), 1).run(1))
    assert f["prefill"]["state"] == f["decode"]["state"] == f["second_stream"]["kind"] == "undecided"
    assert f["cache"]["state"] == "undecided"
    assert f["prefill"]["why"]
    assert "per_token_us" not in f["prefill"]


def test_a_step_in_the_lengths_is_not_sold_as_a_line() -> None:
    """Prefill in whole pieces of 1,000 tokens: far from a line, and seen to be so."""
    service = Probed(Truth(noise=0.01, outliers=0.0), 1)
    service.prefill = lambda n: 400.0 * math.ceil(n / 1000)  # type: ignore[method-assign]
    f = figures(service.run(6))
    assert f["prefill"]["state"] == "undecided"
    assert "does not follow" in f["prefill"]["why"]


def test_a_cache_cannot_be_denied_where_prefill_is_not_seen() -> None:
    f = figures(Probed(Truth(fixed=500, per_token=0.01), 2).run(5))
    assert f["cache"]["state"] == "undecided"
    assert "could not be seen" in f["cache"]["why"]


def test_unknown_prompt_counts_are_said() -> None:
    run = Probed(Truth(), 1).run(4)
    blind = run.requests.replace(prompt_tokens=np.full(len(run.requests), np.nan))
    f = figures(type(run)(run.manifest, run.points, blind, run.chunks, run.steps, run.readings))
    assert f["prefill"]["counted_by"] == "whywait"
    assert any("guessed" in d["what"] for d in f["doubts"])


def test_bandwidth_is_modelled_from_the_step() -> None:
    f = figures(Probed(Truth(step=10.0), 1).run(5, engine={"model_bytes": 10**9}))
    assert f["bandwidth"]["value"] == pytest.approx(1e11, rel=0.2)
    assert f["bandwidth"]["how"].startswith("modelled")


def test_ratio_shrugs_off_one_bad_pair_and_wants_three() -> None:
    good = np.array([1.3, 1.31, 1.29, 1.3, 1.32, 1.28])
    assert ratio(np.append(good, 9.0)).hi == pytest.approx(1.33, abs=0.05)
    assert ratio(good[:2]).lo is None
    assert ratio(np.empty(0)).value is None


def test_lengths_group_what_came_out_alike() -> None:
    groups = lengths_of(np.array([100.0, 512, 103, 520, 30]))
    assert [sorted(np.flatnonzero(g).tolist()) for g in groups] == [[4], [0, 2], [1, 3]]
    assert lengths_of(np.empty(0)) == []


def test_a_curve_needs_lengths() -> None:
    x = np.repeat([100.0, 200.0], 20)
    assert curve(x, x, np.arange(40.0), np.random.default_rng(1)) is None


def test_an_answer_of_one_token_without_text_ends_with_its_token() -> None:
    run = Probed(Truth(), 1).run(4)
    bare = run.requests["output_tokens"] == 1
    blind = run.requests.replace(first_ns=np.where(bare, np.nan, run.requests["first_ns"]))
    mute = type(run)(run.manifest, run.points, blind, run.chunks, run.steps, run.readings)
    assert figures(mute)["prefill"] == figures(run)["prefill"]
    assert figures(mute)["long_neighbour"] == figures(run)["long_neighbour"]


def test_several_tokens_to_a_chunk_do_not_make_a_step_longer() -> None:
    run = Probed(Truth(outliers=0.0), 1).run(5)
    packed = run.requests.replace(content_chunks=np.maximum(1.0, run.requests["output_tokens"] // 2))
    f = figures(type(run)(run.manifest, run.points, packed, run.chunks, run.steps, run.readings))
    assert f["decode"]["fixed_ms"]["value"] == pytest.approx(8.0, rel=0.15)


def test_the_network_is_told_from_single_streams_alone() -> None:
    run = Probed(Truth(), 1).run(4)
    f = figures(run)["network"]
    assert (f["connect_ms"]["value"], f["headers_ms"]["value"], f["rtt_ms"]) == (0.2, 1.0, 0.2)
    assert f["tls_ms"]["value"] is None
    assert f["headers_come_with_the_first_token"] is False
    single = ~np.isin(run.requests["class"], ["pair", "neighbour", "long"])
    assert f["n"] == single.sum() < len(run.requests)
    waits = (run.requests["first_ns"] - run.requests["sent_ns"])[single]
    assert f["least_ttft_ms"] == pytest.approx(waits.min() / 1e6)
    late = run.requests.replace(accepted_ns=run.requests["first_ns"], rtt_ns=np.full(len(run.requests), np.nan))
    f = figures(type(run)(run.manifest, run.points, late, run.chunks, run.steps, run.readings))["network"]
    assert f["headers_come_with_the_first_token"] is True
    assert f["rtt_ms"] is None
    assert f["headers_ms"]["value"] == pytest.approx(np.median(waits) / 1e6)


@pytest.mark.parametrize(("prefill", "step"), [(0.1, 6.0), (0.3, 2.0)])
def test_what_the_engine_says_is_fitted_beside_ours(prefill: float, step: float) -> None:
    run = Probed(Truth(), 1).run(5)
    req = run.requests
    held = req["prompt_tokens"] + req["output_tokens"] / 2
    told = req.replace(engine_prefill_ms=5 + prefill * req["prompt_tokens"],
                       engine_decode_ms=(req["output_tokens"] - 1) * (step + 0.001 * held))  # fmt: skip
    f = figures(type(run)(run.manifest, run.points, told, run.chunks, run.steps, run.readings))["engine_says"]
    values = [f[k]["value"] for k in ("per_token_us", "fixed_ms", "step_fixed_ms", "per_context_token_us")]
    assert values == pytest.approx([prefill * 1e3, 5.0, step, 1.0], rel=0.02)
    assert figures(run)["engine_says"] is None


def test_a_second_stream_is_measured_by_one_of_the_same_service() -> None:
    for step in (8.0, 24.0):
        found = figures(Probed(Truth(step=step, outliers=0.0), 1).run(5))["second_stream"]
        assert found["step_ratio"]["value"] == pytest.approx(1.3, rel=0.05)
        assert found["ttft_ratio"]["value"] == pytest.approx(1.0, rel=0.05)


def test_a_curve_is_a_polynomial() -> None:
    coef = tuple(Estimate(c, None, None, 9) for c in (2.0, 3.0, 0.5))
    found = Curve(coef, 0.0, 0.0, False, Estimate(None, None, None, 0))
    assert [found.at(x) for x in (0.0, 2.0, 10.0)] == [2.0, 10.0, 82.0]
