"""Mixed workloads: figures per class, each held to its own SLO, wherever results are shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.analysis_runs import MS, S, Service, make_run, messy_runs
from whywait.analyze.summary import summarize
from whywait.cli import main
from whywait.core.run import Run
from whywait.judge.gates import failed_gates, parse_gates
from whywait.load.stub import StubProcess
from whywait.report.html import render

MIXED = """
[[classes]]
name = "chat"
share = 0.5
prompt_tokens = 8
output_tokens = 4
slo = {ttft_ms = 30000, tpot_ms = 10000}

[[classes]]
name = "batch"
share = 0.5
prompt_tokens = 8
output_tokens = 8
slo = {ttft_ms = 0.001}
"""


def _row(name: str | None, ttft_ms: int, **more: Any) -> dict[str, Any]:
    first = S + ttft_ms * MS
    return {"class": name, "due_ns": S, "sent_ns": S, "first_ns": first, "first_answer_ns": first, "output_tokens": 3,
            "last_ns": first + 40 * MS, "end_ns": first + 40 * MS, "content_chunks": 3, **more}  # fmt: skip


def _run(**slos: dict[str, float]) -> Run:
    rows = [*(_row("chat", 100 + i) for i in range(4)), _row("chat", 900), _row("chat", 9, outcome="truncated"),
            *(_row("batch", 500 + i) for i in range(3)), {"class": "batch", "outcome": "never_sent"}]  # fmt: skip
    classes = [{"name": n, "slo": slo} for n, slo in slos.items()]
    return make_run(rows, points=[{"mode": "rate", "target": 5.0, "start_ns": S}], workload={"classes": classes})


def test_each_class_has_its_figures_and_its_own_slo() -> None:
    s = summarize(_run(batch={"ttft_ms": 501.0}, chat={"ttft_ms": 200.0, "tpot_ms": 20.0}))
    classes = s["points"][0]["classes"]
    assert list(classes) == ["batch", "chat"]  # in the order of the workload
    chat, batch = classes["chat"], classes["batch"]
    assert (chat["requests"], chat["ok"], chat["goodput_share"]) == (6, 5, pytest.approx(4 / 6))
    assert chat["slo"] == {"ttft_ms": 200.0, "tpot_ms": 20.0}
    assert (batch["requests"], batch["ok"], batch["goodput_share"], batch["slo"]) == (4, 3, 0.5, {"ttft_ms": 501.0})
    assert (chat["ttft_ms"]["n"], chat["ttft_ms"]["p50"]) == (5, 102)
    assert (batch["ttft_ms"]["n"], batch["ttft_ms"]["p50"], batch["tpot_ms"]["p95"]) == (3, 501, 20)
    assert s["slo_of_classes"] == {"batch": {"ttft_ms": 501.0}, "chat": {"ttft_ms": 200.0, "tpot_ms": 20.0}}


def test_what_is_asked_of_all_is_asked_of_a_class_without_its_own() -> None:
    run = _run(chat={"ttft_ms": 200.0}, batch={})
    run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, slo={"e2e_ms": 541.0}))
    classes = summarize(run)["points"][0]["classes"]
    assert classes["batch"]["slo"] == {"e2e_ms": 541.0}
    assert classes["batch"]["goodput_share"] == 0.5


def test_requests_that_say_no_class() -> None:
    s = summarize(make_run([_row(None, 5), _row("b", 6), _row("a", 7)]))
    assert list(s["points"][0]["classes"]) == ["a", "b", "unnamed"]


@given(messy_runs(orderly=False))
def test_classes_add_up_to_their_point(run: Run) -> None:
    for p in summarize(run)["points"]:
        rows = p["classes"].values()
        assert sum(c["requests"] for c in rows) == sum(p["counts"].values())
        assert sum(c["ok"] for c in rows) == p["counts"]["ok"]
        assert sum(c["ttft_ms"]["n"] for c in rows) == p["ttft_ms"]["n"]


def test_a_gate_on_a_class() -> None:
    s = summarize(_run(**{"chat": {"ttft_ms": 200.0}, "Long prompt-2": {}}))
    assert len(failed_gates(parse_gates(["classes.chat.goodput_share<0.95"]), s)) == 1
    assert failed_gates(parse_gates(["classes.chat.ttft_ms.p50>200", "classes.batch.ok<3"]), s) == []
    (gate,) = parse_gates(["classes.Long prompt-2.ttft_ms.p95 > 5"])
    assert gate.path == ("classes", "Long prompt-2", "ttft_ms", "p95")


def test_the_report_has_a_table_only_where_classes_mix() -> None:
    page = render(run := _run(chat={"ttft_ms": 200.0}, batch={}), {**summarize(run), "headline": "x"})
    table = page[page.index("By class of request") :]
    assert table.index("chat") < table.index("67 %") < table.index("TTFT ≤ 200 ms".replace("TTFT", "ttft"))
    one = Service().closed(4, 40)
    assert "By class of request" not in render(one, {**summarize(one), "headline": "x"})


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.toml").write_text(MIXED)
    out = tmp_path / "r"
    with StubProcess("--ttft-ms", "5", "--gap-ms", "2") as s:
        argv = ["run", s.url, "--no-floor", "--workload", str(tmp_path / "w.toml"), "--concurrency", "4"]
        assert main([*argv, "--requests", "20", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if " chat " in line or " batch " in line]
    assert len(rows) == 2
    assert "100 %" in next(r for r in rows if " chat " in r)
    assert " 0 %" in next(r for r in rows if " batch " in r)
    assert "good, of all that were due" in text
    p = json.loads((out / "summary.json").read_text())["points"][0]
    assert p["classes"]["chat"]["goodput_share"] == 1.0
    assert p["classes"]["batch"]["goodput_share"] == 0.0
    assert p["goodput_share"] == pytest.approx(p["classes"]["chat"]["requests"] / 20)
    assert main(["show", str(out), "--fail-if", "classes.batch.goodput_share<0.95"]) == 1
