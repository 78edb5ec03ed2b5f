"""The text block of serving benchmarks: its figures by hand, its form line by line, and the command line."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.analysis_runs import Service
from whywait import app
from whywait.analyze.summary import summarize
from whywait.analyze.whole_point import whole_point
from whywait.cli import main
from whywait.core.recorder import discard_spool
from whywait.core.run import Run
from whywait.report.bench import block, notes, print_bench
from whywait.report.text import console

ROOT = Path(__file__).resolve().parents[1]
#: Labels of `vllm bench serve` (0.32), in its order, for a run with an SLO at a fixed concurrency.
LABELS = [
    "Successful requests:", "Failed requests:", "Maximum request concurrency:", "Benchmark duration (s):",
    "Total input tokens:", "Total generated tokens:", "Request throughput (req/s):", "Request goodput (req/s):",
    "Output token throughput (tok/s):", "Peak output token throughput (tok/s):", "Peak concurrent requests:",
    "Total token throughput (tok/s):", "Mean TTFT (ms):", "Median TTFT (ms):", "P99 TTFT (ms):", "Mean TPOT (ms):",
    "Median TPOT (ms):", "P99 TPOT (ms):", "Mean ITL (ms):", "Median ITL (ms):", "P99 ITL (ms):", "Mean E2EL (ms):",
    "Median E2EL (ms):", "P99 E2EL (ms):",
]  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Run:
    made: Run = Service(slots=4).closed(4, 24)
    return made


def test_whole_point_counts_every_request(run: Run) -> None:
    found = whole_point(run, 0)
    req = run.requests
    seconds = (float(req["end_ns"].max()) - int(run.points["start_ns"][0])) / 1e9
    assert found["completed"] == len(req)
    assert found["failed"] == found["censored"] == 0
    assert found["seconds"] == pytest.approx(seconds)
    assert found["output_tokens"] == int(req["output_tokens"].sum())
    assert found["requests_per_s"] == pytest.approx(len(req) / seconds)
    assert found["output_tokens_per_s"] == pytest.approx(req["output_tokens"].sum() / seconds)
    assert found["total_tokens_per_s"] == pytest.approx((req["output_tokens"] + req["prompt_tokens"]).sum() / seconds)
    assert found["peak_tokens_per_s"] >= found["output_tokens_per_s"]
    assert found["peak_in_flight"] == 4
    ttft = (req["first_ns"] - req["sent_ns"]) / 1e6
    assert found["ttft_ms"]["mean"] == pytest.approx(float(ttft.mean()))
    assert found["ttft_ms"]["n"] == len(req)  # warm-up and drain too
    assert found["good_per_s"] is None  # nobody asked for an SLO


def test_what_is_not_known_is_not_filled_in(run: Run) -> None:
    untold = run.requests.replace(output_tokens=run.requests["output_tokens"] * float("nan"))
    blind = Run(run.manifest, run.points, untold, run.chunks, run.steps, run.readings)
    found = whole_point(blind, 0)
    assert found["output_tokens"] is found["output_tokens_per_s"] is found["total_tokens_per_s"] is None
    lines = block(found)
    assert next(x for x in lines if x.startswith("Total generated tokens:")).split()[-1] == "n/a"


def test_a_failed_request_is_no_success(run: Run) -> None:
    outcome = run.requests["outcome"].copy()
    outcome[0] = 3
    broken = Run(run.manifest, run.points, run.requests.replace(outcome=outcome), run.chunks, run.steps, run.readings)
    found = whole_point(broken, 0)
    assert (found["completed"], found["failed"]) == (len(outcome) - 1, 1)
    assert found["output_tokens"] == int(run.requests["output_tokens"][1:].sum())


def test_form(run: Run) -> None:
    """What scripts that read such blocks rely on: 40 columns of name, a blank, the value; 50 columns of rule."""
    found = {**whole_point(run, 0), "good_per_s": 1.5}
    lines = block(found)
    assert lines[0] == " Serving Benchmark Result ".center(50, "=")
    assert lines[-1] == "=" * 50
    rows = [x for x in lines if not x.startswith(("-", "="))]
    assert [x[:40].rstrip() for x in rows] == LABELS
    assert all(x[40] == " " and re.fullmatch(r"[\d.]+ *", x[41:]) for x in rows)
    assert [x.strip("-") for x in lines if x.startswith("-")] == [
        "Time to First Token", "Time per Output Token (excl. 1st token)", "Inter-token Latency", "End-to-end Latency",
    ]  # fmt: skip
    rate = block({**found, "mode": "rate", "target": 4.0})
    assert f"{'Request rate configured (RPS):':<40} {'4.00':<10}" in rate


def test_notes_say_what_differs_and_what_to_doubt(run: Run) -> None:
    found, summary = whole_point(run, 0), summarize(run)
    said = " ".join(notes([found], summary))
    assert "steady window" in said
    assert "P99 of" in said  # few requests
    assert "PARTIAL" in " ".join(notes([found], {**summary, "partial": True}))
    assert "cut off" in " ".join(notes([{**found, "censored": 2}], summary))
    assert "imported" in notes([found], {**summary, "made_by": "imported"})[0]


def test_blocks_of_a_sweep_are_named(run: Run) -> None:
    out = io.StringIO()
    point = whole_point(run, 0)
    print_bench([point, {**point, "target": 8.0}], summarize(run), "somewhere", console(out))
    said = out.getvalue()
    assert said.count("Serving Benchmark Result") == 2
    assert said.index("concurrency 4:") < said.index("concurrency 8:")
    assert "run kept in somewhere" in said


def test_command_line(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept: Any = app.keep(run, tmp_path / "run")
    discard_spool(kept.directory)
    assert main(["show", str(kept.directory), "--format", "bench"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("=" * 12 + " Serving Benchmark Result")
    assert f"Successful requests:{'':<20} {len(run.requests)}" in said
    assert main(["show", str(kept.directory), "--format", "bench", "--json"]) == 2
    assert "choose one" in capsys.readouterr().err


def test_the_page_names_every_line() -> None:
    page = (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8")
    for label in LABELS:
        name = re.sub(r"^(Mean|Median|P99) ", "", label).rstrip(":")
        assert name.partition(" (")[0] in page, label
