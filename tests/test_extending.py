"""The examples of docs/extending.md are run as they stand there."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from whywait import app, engines
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.engines import detect, use_file
from whywait.net.clock import Clock
from whywait.probe.config import Config
from whywait.probe.prometheus import canonical, parse
from whywait.probe.sampler import _Loop
from whywait.probe.spool import Spool, read_spool

ROOT = Path(__file__).parents[1]
EXAM = ROOT / "exam" / "llama-slots-1-of-4"


def example(name: str) -> str:
    page = (ROOT / "docs" / "extending.md").read_text()
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", page, re.DOTALL)
    assert found is not None, name
    return found[1]


def run_python(name: str) -> dict[str, object]:
    space: dict[str, object] = {"__name__": "__example__"}
    exec(compile(example(name), f"docs/extending.md: {name}", "exec"), space)
    return space


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(engines.FILE_ENV, "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(EXAM)
    yield
    engines._with.cache_clear()


def test_the_engine_is_found_by_its_page_and_speaks_our_names(tmp_path: Path) -> None:
    (tmp_path / "myengine.toml").write_text(example("engine"))
    text = "myengine_active_requests 3\nmyengine_queued_requests 2\nmyengine_kv_usage_percent 41\n"
    assert detect(metrics_text=text) is None
    table = use_file(str(tmp_path / "myengine.toml"))
    assert detect(metrics_text=text) is table
    found = {s.name: s.value for s in canonical(parse(text).samples, table)}
    assert found["running"] == 3
    assert found["waiting"] == 2
    assert found["kv_use"] == pytest.approx(0.41)
    assert table.flags == {"slots": "--max-active N"}


def test_readings_of_a_log_join_a_run(tmp_path: Path) -> None:
    run = Run.load(EXAM)
    begin = run.manifest.zero_unix_ns / 1e9
    (tmp_path / "inlet.csv").write_text(f"unix_s,celsius\n{begin + 1:.3f},24.5\n{begin + 2:.3f},25.0\n")
    run_python("readings")
    joined = Run.load("run-with-inlet")
    mine = joined.readings.where(joined.readings.rows_with("source", "inlet"))
    assert mine["value"].tolist() == [24.5, 25.0]
    assert mine["asked_ns"].tolist() == pytest.approx([1e9, 2e9], abs=2e6)
    assert len(joined.readings) == len(run.readings) + 2


def test_the_source_is_sampled_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = run_python("source")["LoadAverage"]()  # type: ignore[operator]
    spool, clock = Spool(str(tmp_path / "spool")), Clock(0)
    config = Config(zero_unix_ns=0, spool=str(tmp_path / "spool"), hz=50)
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(os, "getloadavg", lambda: (_ for _ in ()).throw(OSError))
        loop = _Loop(source, clock, spool, config)
        loop.stop.set()
        loop.run()
    spool.close()
    rows = [(r["name"], r["value"]) for r in read_spool(tmp_path / "spool") if r["source"] == "load"]
    assert [name for name, _ in rows] == ["answered", "load_1m", "load_5m", "answered"]
    assert [value for name, value in rows if name == "answered"] == [1.0, 0.0]


def test_the_report_has_a_row_per_load_point_and_every_verdict() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_python("report")
    result = app.show(EXAM)
    lines = said.getvalue().splitlines()
    assert lines[0] == result.headline
    assert sum(line.startswith("| concurrency ") for line in lines) == len(result.summary["points"])
    assert sum(line.startswith("- ") for line in lines) == len(result.verdicts)
    assert "- holds: At concurrency 4 requests queue behind the engine's limit" in said.getvalue()


def test_the_importer_makes_a_run_that_is_judged(tmp_path: Path) -> None:
    rows = "".join(f"{i * 0.5},{0.2 if i else ''},{1.0},{21 if i else ''},{'' if i else '503'}\n" for i in range(12))
    (tmp_path / "results.csv").write_text("start_s,ttft_s,latency_s,output_tokens,error\n" + rows)
    run_python("importer")
    result = app.show("imported")
    assert violations(result.run) == []
    point = result.summary["points"][0]
    assert result.summary["made_by"] == "imported"
    assert point["counts"]["ok"] == 11
    assert point["counts"]["http_error"] == 1
    assert point["ttft_ms"]["p50"] == pytest.approx(200)
    assert point["tpot_ms"]["p50"] is None or point["tpot_ms"]["p50"] == pytest.approx(40, rel=0.1)
    assert point["queue"] is None
    assert not any(v.state == "holds" for v in result.verdicts)
