"""A technique for real, on the embedded engine: fresh processes, both accounts, a verdict. About a minute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="needs the 'engine' extra: pip install 'whywait[engine]'")

from whywait.cli import main
from whywait.core.run import Run
from whywait.lab import state

pytestmark = pytest.mark.engine


def test_slots_let_more_be_worked_on_at_once(tmp_path: Path) -> None:
    """One slot or four at four in flight: requests wait for a place or they do not, whatever the machine is like."""
    out = tmp_path / "trial"
    before = {e.pid for e in state.running()}
    argv = ["ab", "--a", "embedded:slots=1,ctx_per_slot=256", "--b", "embedded:slots=4,ctx_per_slot=256"]
    argv += ["--concurrency", "4", "--requests", "8", "--prompt-tokens", "32", "--output-tokens", "8", "--no-floor"]
    assert main([*argv, "--metric", "ttft_ms.p50", "--promise", "queue", "--rounds", "2", "--out", str(out)]) == 0
    found = json.loads((out / "trial.json").read_text())
    assert (found["pairs"], found["partial"]) == (2, False)
    queue = found["effects"][""]["phases.queue"]
    assert queue["n"] == 2
    assert queue["b"] < 0.5 * queue["a"]
    assert found["claims"][0]["state"] == "undecided"  # two pairs decide nothing, however large the effect
    engines = {json.dumps(r["engine"]) for r in found["rounds"]}
    assert len(engines) == 2
    for r in found["rounds"]:
        run = Run.load(out / r["run"])
        assert run.manifest.engine["slots"] == (1 if r["arm"] == "A" else 4)
        assert run.manifest.engine["kind"] == "embedded"
    assert {e.pid for e in state.running()} <= before  # every process is gone
