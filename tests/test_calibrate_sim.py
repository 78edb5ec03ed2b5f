"""The posterior of efficiencies against services whose truth is known: a closed form stands in for the simulator."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from whywait.errors import UsageError
from whywait.judge.calibrate import (
    ONE_POINT,
    POSTERIOR,
    PRIOR,
    Calibration,
    Knobs,
    Point,
    Prior,
    Seen,
    correlation,
    family,
    prior_only,
)
from whywait.judge.calibrate_check import check, helps, predictions, quantile, spread
from whywait.judge.calibrate_fit import calibrate, without

PRIOR_SD = {"weights": 0.15, "compute": 0.2, "kv": 0.2, "step": 0.5, "sequence": 0.5, "frontend": 0.7, "link": 0.2}
LOADS = (1, 4, 16, 32)
METRICS = ("ttft_ms.mean", "ttft_ms.p50", "tpot_ms.mean", "output_tokens_per_s")
TRUE_SD = {"ttft_ms": 0.12, "tpot_ms": 0.05, "output_tokens_per_s": 0.05}


def service(t, c, prompt=512, out=256):
    """TTFT and TPOT of ``c`` streams in closed loop, in closed form; ``link`` plays no part."""
    step = 0.004 * t["step"] + 0.006 * t["weights"] + c * (2e-4 * t["sequence"] + (prompt + out / 2) * 1e-7 * t["kv"])
    prefill = prompt * 4e-5 * t["compute"]
    tpot = step + prefill / out * (c - 1) * 0.8
    ttft = 0.003 * t["frontend"] + prefill * (1 + 0.02 * c) + 0.5 * tpot
    return {"ttft_ms.mean": ttft * 1e3, "ttft_ms.p50": ttft * 950, "tpot_ms.mean": tpot * 1e3,
            "output_tokens_per_s": c * out / (ttft + tpot * out)}  # fmt: skip


def predict(t, i):
    return service(t, LOADS[i])


def truth(seed, scale=1.0, noise=0.01):
    """A service drawn from the prior and what is measured of it: the closed form, wrong by a smooth discrepancy."""
    rng, knobs = np.random.default_rng(seed), Knobs()
    theta = {k: math.exp(sd * rng.standard_normal()) for k, sd in PRIOR_SD.items()}
    bare = [Point(f"concurrency {c}", (math.log(c),), {}) for c in LOADS]
    rows = [(i, m) for i in range(len(LOADS)) for m in METRICS]
    alike = correlation(bare, rows, [(bare[i].at, m) for i, m in rows], knobs)
    sd = scale * np.array([TRUE_SD[family(m)] for _, m in rows])
    wrong = np.linalg.cholesky(alike * np.outer(sd, sd) + 1e-12 * np.eye(len(rows))) @ rng.standard_normal(len(rows))
    seen: list[dict[str, Seen]] = [{} for _ in LOADS]
    for (i, m), off in zip(rows, wrong, strict=True):
        value = service(theta, LOADS[i])[m] * math.exp(off + noise * rng.standard_normal())
        seen[i][m] = Seen(value, noise)
    return theta, [dataclasses.replace(p, seen=s) for p, s in zip(bare, seen, strict=True)]


def fitted(points, knobs=None, simulator=predict):
    return calibrate(points, simulator, Prior(PRIOR_SD), knobs)


def test_intervals_hold_as_often_as_they_say():
    """Calibrated on loads 1, 4, 16 and predicted at 32: 80 % intervals hold of 80 %, near enough for 40 services."""
    inside = []
    for seed in range(40):
        _, points = truth(seed)
        found = fitted(points[:3])
        at = predictions(found, predict, (3, points[3]), METRICS, (16, np.random.default_rng(seed)))
        inside.append([at[m].holds(points[3].seen[m].value) for m in METRICS])
    assert 0.70 <= np.mean(inside) <= 0.92
    assert np.mean(inside, axis=0).min() >= 0.6  # of each metric too


def test_intervals_are_narrower_than_those_of_the_prior():
    _, points = truth(3)
    rng = np.random.default_rng(1)
    told = predictions(fitted(points[:3]), predict, (3, points[3]), METRICS, (64, rng))
    guessed = predictions(prior_only(Prior(PRIOR_SD)), predict, (3, points[3]), METRICS, (64, rng))
    for m in ("tpot_ms.mean", "ttft_ms.mean"):
        assert told[m].high / told[m].low < guessed[m].high / guessed[m].low


def test_what_the_data_tell_is_moved_and_the_rest_stays_prior():
    hits = []
    for seed in range(12):
        theta, points = truth(seed, scale=0.05, noise=0.002)
        found = fitted(points, Knobs(guess={"tpot_ms": 0.01, "ttft_ms": 0.01}, other=(0.01, 0.005, 0.05)))
        by_name = {p.name: p for p in found.parameters()}
        assert by_name["compute"].moved
        assert by_name["sequence"].moved
        assert not by_name["link"].moved  # nothing depends on it
        assert by_name["link"].left == pytest.approx(1.0, abs=1e-3)
        assert by_name["link"].median == pytest.approx(1.0, abs=1e-3)
        hits += [p.low <= theta[p.name] <= p.high for p in found.parameters() if p.moved]
    assert 0.6 <= np.mean(hits) <= 0.98


def test_what_only_shows_in_a_sum_stays_unknown_apart():
    """Host time and weight reads are both once per step: their sum is known, neither of them is."""
    theta, points = truth(5, scale=0.01, noise=0.001)
    found = fitted(points, Knobs(guess={"tpot_ms": 0.01, "ttft_ms": 0.01}, floor={}, other=(0.01, 0.002, 0.05)))
    draws = np.exp(found.draws(400, np.random.default_rng(0)))
    weights, step = (draws[:, found.names.index(k)] for k in ("weights", "step"))
    whole = 0.004 * step + 0.006 * weights
    assert np.std(np.log(whole)) < 0.3 * np.std(np.log(step))
    assert np.median(whole) == pytest.approx(0.004 * theta["step"] + 0.006 * theta["weights"], rel=0.05)


def test_one_point_is_no_calibration():
    _, points = truth(1)
    found = fitted(points[:1])
    assert found.kind == ONE_POINT
    assert not found.calibrated
    assert "two loads" in helps(found, check(found, predict))
    assert check(found, predict).held_out == ()
    assert not check(found, predict).passes  # nothing could be held out
    assert fitted(points[:2]).kind == POSTERIOR
    assert fitted([]).kind == PRIOR


def test_a_point_left_out_is_predicted_without_it():
    _, points = truth(2)
    found = fitted(points)
    left = without(found, 3, predict)
    assert left is not None
    assert {p for p, _ in left.rows} == {0, 1, 2}
    again = fitted(points[:3])
    assert np.allclose(left.mean, again.mean, atol=0.35 * again.prior_sd.max())
    wrong = dataclasses.replace(points[3], seen={m: Seen(s.value * 5, 0.01) for m, s in points[3].seen.items()})
    assert np.allclose(without(fitted([*points[:3], wrong]), 3, predict).mean, left.mean, atol=0.5)


def test_a_service_the_simulator_does_not_describe_is_undecided():
    """From 16 streams on something unmodelled triples the time to the first token."""
    _, points = truth(4, scale=0.2)
    points = [
        dataclasses.replace(p, seen={m: Seen(s.value * (3.0 if m.startswith("ttft") and i >= 2 else 1), 0.01)
                                     for m, s in p.seen.items()})
        for i, p in enumerate(points)
    ]  # fmt: skip
    found = fitted(points)
    checked = check(found, predict)
    assert not checked.passes
    assert {family(m.metric) for m in checked.beyond} == {"ttft_ms"}
    assert "metrics" in helps(found, checked)
    assert check(found, predict, bound={"ttft_ms": 9.0}).passes


def test_a_service_that_is_described_passes():
    _, points = truth(6, scale=0.3)
    checked = check(fitted(points), predict)
    assert checked.passes
    assert {m.point for m in checked.held_out} == {p.name for p in points}
    assert all(abs(m.error) < 0.15 for m in checked.misses if m.seen)
    assert checked.covered is not None


def test_a_single_wild_figure_pulls_little():
    _, points = truth(7, scale=0.1)
    plain = fitted(points)
    seen = {**points[1].seen, "tpot_ms.mean": Seen(points[1].seen["tpot_ms.mean"].value * 4, 0.01)}
    wild = fitted([points[0], dataclasses.replace(points[1], seen=seen), *points[2:]])
    off = (wild.mean - plain.mean) / plain.prior_sd
    assert np.abs(off).max() < 1.0
    assert wild.noise.max() > 100 * plain.noise.min()


def test_the_discrepancy_is_known_near_what_was_measured_and_not_far_away():
    _, points = truth(8)
    found = fitted(points)
    theta = found.draws(8, np.random.default_rng(0))
    sd = [found.offset("tpot_ms.mean", (math.log(c),), theta)[1] for c in (16, 64, 4096)]
    assert sd[0] < 0.7 * sd[1] < sd[2]
    assert sd[2] == pytest.approx(found.scale("tpot_ms.mean"), rel=0.05)
    mean, alone = prior_only(Prior(PRIOR_SD)).offset("tpot_ms.mean", (0.0,), theta)
    assert not mean.any()
    assert alone == Knobs().guessed("tpot_ms")


def test_the_size_of_the_discrepancy_is_learnt():
    small = np.median([fitted(truth(s, 0.05)[1]).scale("ttft_ms") for s in range(6)])
    large = np.median([fitted(truth(s, 3.0)[1]).scale("ttft_ms") for s in range(6)])
    assert small < 0.1
    assert large > 0.2
    floor = fitted(truth(0, 0.0, 0.0005)[1], Knobs(floor={"ttft_ms": 0.09})).scale("ttft_ms")
    assert floor >= 0.09


def test_metrics_that_the_simulator_leaves_out_are_named():
    _, points = truth(9)

    def deaf(t, i):
        return {m: v for m, v in predict(t, i).items() if m != "output_tokens_per_s"}

    found = fitted(points, simulator=deaf)
    assert "concurrency 1: output_tokens_per_s" in found.silent
    assert not any(m == "output_tokens_per_s" for _, m in found.rows)


def test_a_simulator_that_fails_somewhere_does_not_stop_the_search():
    _, points = truth(10)

    def fragile(t, i):
        return predict(t, i) if t["step"] < 1.3 else dict.fromkeys(METRICS, math.nan)

    found = fitted(points, simulator=fragile)
    assert np.isfinite(found.mean).all()
    assert found.runs < 400


def test_draws_mirror_and_widen():
    _, points = truth(11)
    found = fitted(points)
    draws = found.draws(2000, np.random.default_rng(0))
    assert np.allclose(draws.mean(axis=0), found.mean, atol=1e-9)
    assert np.allclose(draws.std(axis=0), np.sqrt(np.diag(found.cov)), rtol=0.1)
    wide = found.draws(2000, np.random.default_rng(0), {"link": 1.0})
    assert wide[:, found.names.index("link")].std() > 0.9
    assert np.array_equal(found.draws(3, np.random.default_rng(5)), found.draws(3, np.random.default_rng(5)))


def test_saved_and_loaded_it_is_the_same(tmp_path):
    _, points = truth(12)
    found = fitted(points)
    back = Calibration.load(found.save(tmp_path / "calibration.json"))
    assert back.as_dict() == found.as_dict()
    assert back.points == found.points
    assert back.knobs == found.knobs
    theta = found.draws(4, np.random.default_rng(0))
    assert np.array_equal(back.offset("ttft_ms.p50", (2.0,), theta)[0], found.offset("ttft_ms.p50", (2.0,), theta)[0])
    empty = prior_only(Prior(PRIOR_SD))
    assert Calibration.load(empty.save(tmp_path / "none.json")).as_dict() == empty.as_dict()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 99}', '{"version": 1, "names": 3}'])
def test_a_file_that_is_no_calibration_is_said_so(tmp_path, text):
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"c\.json"):
        Calibration.load(file)
    with pytest.raises(UsageError, match="cannot read"):
        Calibration.load(tmp_path / "gone.json")
    with pytest.raises(UsageError, match="cannot write"):
        prior_only(Prior(PRIOR_SD)).save(tmp_path / "no" / "where.json")


def test_json_holds_no_nan():
    json.dumps(fitted(truth(13)[1]).as_dict(), allow_nan=False)


def test_student_t():
    for p, dof, value in ((0.9, 6, 1.4398), (0.975, 10, 2.2281), (0.9, 1e6, 1.28155), (0.95, 2, 2.9200)):
        assert quantile(p, dof) == pytest.approx(value, abs=2e-3)
    got = spread(np.zeros(5), 0.1, 6.0)
    assert (got.median, got.high) == (1.0, pytest.approx(math.exp(0.14398), rel=1e-3))
