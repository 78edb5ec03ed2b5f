"""What is taken of a run for a calibration: the figures of the summary, with an error that has the right size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from whywait.analyze.observed import observed, statistics
from whywait.analyze.summary import summarize_point
from whywait.core.run import Run

EXAM = Path(__file__).resolve().parents[1] / "exam"


@pytest.fixture(scope="module")
def vllm():
    return Run.load(EXAM / "vllm-base")


def test_the_figures_are_those_of_the_summary(vllm):
    for o in observed(vllm):
        point, _ = summarize_point(vllm, o.point)
        for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
            for stat in ("mean", "p50"):
                assert o.figures[f"{metric}.{stat}"].value == pytest.approx(point[metric][stat], rel=1e-9)
        assert o.figures["output_tokens_per_s"].value == pytest.approx(point["output_tokens_per_s"], rel=1e-9)
        assert o.in_flight == pytest.approx(point["in_flight"]["mean"])
        assert o.name == f"concurrency {o.target:g}"
        assert len(o.rows) == point["ttft_ms"]["n"]
        assert o.at == pytest.approx(np.log([o.in_flight, o.prompt_tokens, o.output_tokens]))


def test_errors_shrink_with_requests_and_are_those_of_repetition(vllm):
    few, many = observed(vllm)
    assert len(few.rows) < len(many.rows)
    assert few.figures["ttft_ms.mean"].log_se > many.figures["ttft_ms.mean"].log_se
    assert all(0 < f.log_se < 0.3 for o in (few, many) for f in o.figures.values())
    assert "ttft_ms.p90" in many.figures
    assert "ttft_ms.p90" not in few.figures  # fifteen requests say nothing of the slowest tenth


def test_engine_stages_and_a_queue_that_matters():
    run = Run.load(EXAM / "vllm-rate-40")
    light, heavy = observed(run)
    assert "queue_ms.mean" in heavy.figures
    assert heavy.figures["queue_ms.mean"].value > 0.5 * heavy.figures["ttft_ms.mean"].value
    assert "queue_ms.mean" not in light.figures
    assert light.figures["prefill_ms.mean"].value < light.figures["ttft_ms.mean"].value
    assert heavy.mode == "rate"


def test_a_point_where_nothing_ended_well_is_left_out():
    run = Run.load(EXAM / "llama-kv-896")
    assert len(run.points) == 2
    assert [o.point for o in observed(run)] == [0]


def test_nothing_is_looked_at_but_its_own_point(vllm):
    for o in observed(vllm):
        assert (vllm.requests["point"][o.rows] == o.point).all()
        assert (vllm.requests["outcome"][o.rows] == 0).all()
        assert set(o.rows) <= set(o.all_rows)


def test_statistics_leave_out_what_is_not_known():
    assert statistics("x", np.array([np.nan])) == {}
    assert statistics("x", np.array([1.0, np.nan, 3.0])) == {"x.mean": 2.0, "x.p50": 2.0}
    assert statistics("x", np.arange(21.0))["x.p90"] == pytest.approx(18.0)
