"""The price of a shared KV pool, on the real engine: it runs full, and every stream ends with an error inside it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="needs the 'engine' extra: pip install 'whywait[engine]'")

from whywait import app
from whywait.analyze.compare import figures
from whywait.core.workload import Workload
from whywait.lab.settings import Settings
from whywait.lab.technique import one_class

pytestmark = pytest.mark.engine


def test_a_pool_that_runs_full_is_counted_as_failures(tmp_path: Path) -> None:
    """Two requests of 340 tokens do not fit into 512; one of them after the other does."""
    with app.embedded(Settings(slots=2, ctx_per_slot=256, kv_unified=True)) as engine:
        o = app.Options(
            url=engine.url, workload=Workload(classes=one_class(300, 40)), floor=False, out=str(tmp_path / "run")
        )
        loads = [app.Load("concurrency", 1, requests=1), app.Load("concurrency", 2, requests=2)]
        result = app.measure(o, loads, engine=engine)
    alone, both = (figures(result.run, p) for p in result.summary["points"])
    assert alone["failed_share"] == 0
    assert both["failed_share"] is not None
    assert both["failed_share"] >= 0.5
    assert set(result.summary["points"][1]["counts"]) >= {"inband_error"}
    assert result.summary["points"][1]["counts"]["inband_error"] >= 1
    space = result.run.readings
    totals = set(space["value"][space.rows_with("name", "kv_tokens_total")].tolist())
    assert totals == {512.0}  # what they share, not that for each of them
