"""The main job on the real embedded engine: verdicts, both accounts, every invariant. About two minutes."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="needs the 'engine' extra: pip install 'whywait[engine]'")

from whywait import app
from whywait.analyze.occupancy import device_account
from whywait.analyze.phases import account
from whywait.cli import main
from whywait.core.check import violations
from whywait.core.run import Run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diagnose") / "run"
    assert main(["diagnose", "--budget", "100s", "--out", str(out)]) == 0
    return out


def test_everything_a_stranger_needs_is_there(diagnosed: Path) -> None:
    names = {p.name for p in diagnosed.iterdir()}
    assert names >= {
        "manifest.json", "points.parquet", "requests.parquet", "chunks.parquet", "readings.parquet", "summary.json",
        "report.html",
    }  # fmt: skip
    assert "spool" not in names
    report = (diagnosed / "report.html").read_text(encoding="utf-8")
    assert escape(json.loads((diagnosed / "summary.json").read_text())["headline"].split(".")[0]) in report


def test_invariants(diagnosed: Path, tmp_path: Path) -> None:
    run = Run.load(diagnosed)
    assert violations(run) == []  # 1, 3, 8
    run.save(tmp_path / "again")
    assert Run.load(tmp_path / "again") == run  # 6
    acc = account(run)
    assert (acc.phases.sum(axis=1) == acc.total_ns).all()  # 4
    assert (acc.phases >= 0).all()
    for row in run.points.rows():
        a = device_account(run, row["start_ns"], row["end_ns"])
        assert sum(a.ns.values()) == a.total_ns == row["end_ns"] - row["start_ns"]  # 10
    counts = Counter(run.requests["point"].tolist())
    assert [counts[p] for p in run.points["point"].tolist()] == run.points["planned"].tolist()


def test_stamps_are_the_kernels_and_the_engine_agrees_with_them(diagnosed: Path) -> None:
    run = Run.load(diagnosed)
    assert set(run.chunks.text("clock")) == {"kernel"}
    r = run.requests.where(run.requests["outcome"] == 0)
    ours = (r["last_ns"] - r["first_ns"]) / 1e6
    # The engine counts from its first token to its last as well; we may differ by a step, not by more.
    assert np.median(np.abs(ours - r["engine_decode_ms"]) / ours) < 0.2


def test_verdicts_that_must_come_out(diagnosed: Path) -> None:
    verdicts = json.loads((diagnosed / "summary.json").read_text())["verdicts"]
    by_cause: dict[str, Any] = {f"{v['cause']} {v['state']}": v for v in verdicts}
    queue = by_cause["slot limit holds"]
    assert queue["beyond"]  # 4 in flight fill its places; only our own rungs above queue
    assert "--parallel" in queue["lever"]
    assert "limit of 4" in queue["claim"]
    neighbour = by_cause["neighbour's prefill holds"]
    assert "long prompts mixed in" in neighbour["where"]
    assert "concurrency 1" in by_cause["slot limit fails"]["claim"]
    decode = [v for v in verdicts if v["cause"].endswith("bound decode")]
    assert decode
    assert decode[0]["how"] == "modelled"
    assert by_cause["want of load fails"]["where"] == "concurrency 4"


def test_figures_are_there_or_null_with_a_reason(diagnosed: Path) -> None:
    summary = json.loads((diagnosed / "summary.json").read_text())
    reasons = " ".join(d["what"] for d in summary["doubts"])
    for p in summary["points"]:
        assert p["output_tokens_per_s"] > 0
        assert p["kv_use"] is not None
        assert p["queue"] is not None
        assert p["memory_bytes"] > 1e7
        for key in ("power_w", "energy_j_per_good_request"):
            assert p[key] is not None or key in reasons


def test_the_python_api(tmp_path: Path) -> None:
    with app.embedded() as engine:
        options = app.Options(url=engine.url, out=str(tmp_path / "r"), floor=False)
        result = app.measure(options, [app.Load("concurrency", 2, requests=4)], engine=engine)
    assert result.summary["points"][0]["counts"]["ok"] == 4
    assert app.show(result.directory).summary["points"] == result.summary["points"]
