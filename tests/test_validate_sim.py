"""The tool that tries the simulator on measured services: splits, statistics, and (with the record) replay."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import validate_sim
import validate_sim_e2e as e2e
import validate_sim_mlperf as mlperf
import validate_sim_timelines as timelines
import whywait.physics.fitted as shipped
from validate_sim_fit import (
    FIRST_SD,
    NAMES,
    Guess,
    Population,
    _maximised,
    first_guess,
    folds,
    operations_only,
)
from validate_sim_recipes import deployment_of
from validate_sim_record import LOOKED_AT, Part, Row, anchors, groups, half, read, usable
from validate_sim_replay import PER_SLOT, TPOT, TTFT, moved, predict, schedule_of
from validate_sim_tables import by_cluster, cell, put, reason, summary, worst
from whywait.judge.calibrate import Knobs, Point, Prior, Seen, correlation
from whywait.judge.calibrate_check import LEVEL, Interval
from whywait.judge.calibrate_fit import Linear
from whywait.sim.capacity import capacity

SHARED = Path(__file__).resolve().parents[2] / "shared" / "measured"


def row(**changes: object) -> Row:
    plain = Row("id", "Llama|h100|vllm", "meta-llama/Llama-3.1-70B", "h100_sxm", "vllm", "", "fp8", "fp8", "fp8", True,
                "2025-10-29", 1024, 1024, 0.8, 8, Part(1, 4, 1, 1, 1), None, 100.0, 12.0, "")  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


class TestSplits:
    def test_configurations_are_never_cut(self) -> None:
        names = {f"group {i}": [row()] for i in range(200)}
        parts = folds(names, 5)
        assert sorted(g for _, p in parts for g in p) == sorted(names)
        for fit, apart in parts:
            assert not set(fit) & set(apart)
            assert len(fit) + len(apart) == len(names)
            assert 20 <= len(apart) <= 60

    def test_what_was_looked_at_is_training(self) -> None:
        assert all(half(g) == "train" for g in LOOKED_AT)
        share = np.mean([half(f"group {i}") == "train" for i in range(400)])
        assert 0.4 < share < 0.6

    def test_anchors_are_the_ends_of_the_ends(self) -> None:
        rows = [row(id=f"{i} {c}", isl=i, concurrency=c) for i in (1024, 4096, 8192) for c in (4, 16, 64)]
        assert {r.load for r in anchors(rows)} == {(i, 1024, c) for i in (1024, 8192) for c in (4, 64)}
        one = [r for r in rows if r.isl == 1024]
        assert [r.concurrency for r in anchors(one)] == [4, 16, 64]

    def test_repeats_do_not_count_twice(self) -> None:
        rows = [row(id=str(k), concurrency=c) for k in range(3) for c in (4, 16, 64)]
        assert len(anchors(rows)) == 3


class TestReplay:
    def test_lengths_are_the_clients(self) -> None:
        s = schedule_of(1000, 500, 0.8, 16, 0)
        assert len(s) == PER_SLOT * 16
        assert 800 <= s.prompt_tokens.min() < 830
        assert 970 < s.prompt_tokens.max() <= 1000
        assert 400 <= s.output_tokens.min() < 415
        assert (s.prompt_tokens == schedule_of(1000, 500, 0.8, 16, 0).prompt_tokens).all()
        fixed = schedule_of(1000, 500, None, 16, 0)
        assert set(fixed.prompt_tokens) == {1000}
        assert set(fixed.output_tokens) == {500}

    def test_limits_are_the_scripts(self) -> None:
        engine = deployment_of(row(concurrency=32)).engine
        assert (engine.max_seqs, engine.token_budget, engine.ahead) == (32, 8192, True)
        waits = deployment_of(row(backend="trtllm", system="h200_sxm", part=Part(1, 2, 1, 1, 1))).engine
        assert (waits.wait_steps, waits.token_budget) == (20, 16384)
        assert deployment_of(row(backend="trtllm", system="h200_sxm", isl=8192)).engine.wait_steps == 0
        assert not deployment_of(row()).engine.prefix_cache

    def test_multipliers_reach_the_simulator(self) -> None:
        d, small = deployment_of(row()), row(isl=64, osl=16, concurrency=2)
        plain = predict(d, small)
        slower = predict(moved(d, {"weights": 2.0}), small)
        assert slower[TPOT] > 1.4 * plain[TPOT]
        later = predict(moved(d, {"frontend": 10.0}), small)
        assert later[TTFT] > plain[TTFT] + 5
        assert later[TPOT] == pytest.approx(plain[TPOT], rel=0.15)

    def test_put_off_prompts_wait_for_the_steps(self) -> None:
        d = deployment_of(row(backend="trtllm", system="h200_sxm", part=Part(1, 2, 1, 1, 1)))
        loads = row(isl=128, osl=64, concurrency=4)
        with_wait = predict(replace(d, engine=replace(d.engine, wait_steps=20, wait_share=0.9)), loads)
        without = predict(replace(d, engine=replace(d.engine, wait_steps=0)), loads)
        assert with_wait[TTFT] - without[TTFT] > 8 * without[TPOT]

    def test_operations_only_forgets_the_services(self) -> None:
        d, small = deployment_of(row()), row(isl=64, osl=16, concurrency=2)
        whole = predict(d, small)[TPOT]
        with operations_only():
            assert shipped.fitted()["service"] == {}
            bare = predict(d, small)[TPOT]
        assert shipped.fitted()["service"]
        assert predict(d, small)[TPOT] == whole != bare


class TestPopulation:
    def test_means_and_spread_come_back(self) -> None:
        """Forty services whose multipliers are drawn around a mean that is not 1."""
        rng = np.random.default_rng(4)
        start = first_guess()
        names = [n for n in NAMES if n not in ("experts", "link")]
        shift = {"weights": 0.15, "sequence": -0.4}
        models: dict[str, tuple[str, Linear]] = {}
        for g in range(40):
            truth = np.array([rng.normal(shift.get(n, 0.0), 0.5 * FIRST_SD[n]) for n in names])
            points = tuple(Point(str(i), (float(i), 0.0, 0.0), {TPOT: Seen(1.0), TTFT: Seen(1.0)}) for i in range(12))
            rows = tuple((i, m) for i in range(12) for m in (TPOT, TTFT))
            slopes = rng.normal(size=(len(rows), len(names)))
            seen = slopes @ truth + rng.normal(0, 0.02, len(rows))
            alike = correlation(points, rows, [(points[i].at, m) for i, m in rows], Knobs())
            prior = Prior({n: start.sd[n] for n in names})
            models[str(g)] = "vllm", Linear(points, rows, seen, slopes, np.zeros(len(rows)), prior, Knobs(), alike)
        found = _maximised(models, start)
        assert found.mean["vllm"]["weights"] == pytest.approx(0.15, abs=0.05)
        assert found.mean["vllm"]["sequence"] == pytest.approx(-0.4, abs=0.12)
        assert found.mean["trtllm"]["weights"] == 0.0
        assert 0.4 * FIRST_SD["weights"] < found.sd["weights"] < 0.85 * FIRST_SD["weights"]
        assert 0.01 < found.wrong["tpot_ms"] < 0.06


def guesses(error: float, width: float, n: int, group: str, rng: np.random.Generator) -> list[Guess]:
    off = np.exp(rng.normal(0, error, n))
    wide = math.exp(width)
    return [
        Guess(row(group=group), m, float(x), Interval(1.0, 1 / wide, wide), False) for x in off for m in (TTFT, TPOT)
    ]


class TestTables:
    def test_widened_intervals_hold_as_often_as_they_say(self) -> None:
        rng = np.random.default_rng(0)
        learnt = guesses(0.3, 0.1, 400, "a", rng)
        fixed = e2e.widened(guesses(0.3, 0.1, 400, "b", rng), learnt)
        share = np.mean([g.predicted.holds(g.measured) for g in fixed])
        assert share == pytest.approx(LEVEL, abs=0.06)
        narrowed = e2e.widened(guesses(0.01, 0.5, 400, "b", rng), guesses(0.01, 0.5, 400, "a", rng))
        assert np.mean([g.predicted.holds(g.measured) for g in narrowed]) == pytest.approx(LEVEL, abs=0.06)

    def test_a_few_clusters_say_less_than_their_rows(self) -> None:
        inside = np.array(([True] * 40 + [False] * 10) * 2)
        few = by_cluster(inside, ["a"] * 50 + ["b"] * 50)
        assert few == (0.8, 0.8)  # both alike: nothing to draw from
        uneven = np.array([True] * 50 + [False] * 50)
        low, high = by_cluster(uneven, ["a"] * 50 + ["b"] * 50)
        assert (low, high) == (0.0, 1.0)

    def test_rows_that_were_seen_are_not_counted(self) -> None:
        rng = np.random.default_rng(1)
        far = [replace(g, seen=True, measured=100.0) for g in guesses(0.1, 0.1, 5, "a", rng)]
        near = [replace(g, measured=1.0) for g in guesses(0.1, 0.1, 5, "b", rng)]
        assert cell([*far, *near], TTFT)[0] == "0.0%"
        assert cell([*far, *near], TTFT)[4] == "1 / 5"
        assert "a" not in worst([*far, *near], {}).replace("| group | TPOT | TTFT | rows | why |", "").split("`")[1::2]
        assert "groups never looked at" not in summary(near, {"all": lambda _: True}, {})

    def test_reasons_are_found_by_part_of_the_name(self) -> None:
        assert reason("x|h100_sxm|vllm", {"h100": "because"}) == "because"
        assert reason("x", {"h100": "because"}) == "not found"

    def test_only_what_is_between_the_markers_changes(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n", "utf-8")
        put(page, "x", "new \\1")
        assert page.read_text("utf-8") == "a\n<!-- x -->\nnew \\1\n<!-- /x -->\nb\n"
        with pytest.raises(ValueError, match="no markers for y"):
            put(page, "y", "new")

    def test_the_page_has_a_place_for_every_table(self) -> None:
        text = validate_sim.PAGE.read_text("utf-8")
        names = [f"case {c} {k}{w}" for c in (1, 2) for k in ("dense", "experts") for w in ("", " worst")]
        for name in (*names, "case 3", "case 4"):
            assert f"<!-- {name} -->" in text
            assert f"<!-- /{name} -->" in text

    def test_no_record_is_said_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert validate_sim.main(["--data", str(tmp_path)]) == 2
        assert "give --data" in capsys.readouterr().err


def test_a_configuration_never_seen_is_as_wide_as_its_engine() -> None:
    wide = Population({"vllm": dict.fromkeys(NAMES, 0.1)}, dict(FIRST_SD))
    prior = wide.prior([row()])
    assert prior.log_median["weights"] == 0.1
    assert "experts" not in prior.names
    assert "link" in prior.names
    assert prior.log_sd["kv_space"] > FIRST_SD["kv_space"]
    alone = wide.prior([row(part=Part(1, 1, 1, 1, 1), system="b200_sxm")])
    assert "link" not in alone.names


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "e2e_silicon.csv").is_file(), reason="the record (../shared) is not here")
class TestRecord:
    def test_every_usable_row_is_a_deployment(self) -> None:
        rows = usable(read(SHARED))
        assert len(rows) > 1000
        assert sum(r.dense for r in rows) > 400
        for r in rows:
            d = deployment_of(r)
            assert d.engine.token_budget >= min(r.isl, 2048)
            if r.dense:
                assert capacity(d).tokens > r.isl + r.osl

    def test_a_dense_service_without_calibration(self) -> None:
        """One configuration by operations and rules alone; light, heavy, with a KV cache too small."""
        mine = groups(usable(read(SHARED)))["meta-llama/Llama-3.1-70B|h100_sxm|vllm|fp8|agg|2.0|1.0"]
        for load in ((1024, 1024, 4), (8192, 1024, 8), (1024, 8192, 64)):
            r = next(x for x in mine if x.load == load)
            said = predict(deployment_of(r), r)
            assert said[TPOT] == pytest.approx(r.tpot_ms, rel=0.2)
            assert said[TTFT] == pytest.approx(r.ttft_ms, rel=0.4)

    def test_a_timeline_is_replayed(self) -> None:
        run = timelines.read(SHARED, "RTX4090/Llama-3.1-8B")
        assert len(run.arrived) == 300
        assert (run.scheduled >= run.arrived - 1e-6).all()
        assert (run.first > run.scheduled).all()
        sim = timelines.replay(run, {"weights": 0.84, "compute": 0.84})
        lines, means, tails = timelines.errors(run, sim)
        assert len(lines) == 9
        assert max(means) < 0.15
        assert max(tails) < 0.15

    def test_lengths_of_the_benchmark_have_its_mean(self) -> None:
        prompts, answers = mlperf.lengths(SHARED)
        assert len(prompts) == mlperf.SAMPLES
        assert answers.mean() == pytest.approx(mlperf.TOKENS, rel=0.005)
        assert answers.max() <= 1024
        systems = mlperf.read(SHARED)
        assert len(systems) >= 10
        assert any(mlperf.trained(s.name) for s in systems)
        assert any(not mlperf.trained(s.name) for s in systems)
        s = mlperf.load(SHARED, 2000, 50.0)
        assert s.due_ns[-1] / 1e9 == pytest.approx(40.0, rel=0.1)
