"""What the techniques of batching, KV space and placement need beside their data: figures, points with a workload of
their own, CPUs as a setting, and whether an embedded engine's slots share one pool."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.analysis_runs import MS, S, Service, gauge_rows, make_run, stream
from whywait import trying
from whywait.analyze.compare import effects, figures, metric_of
from whywait.analyze.summary import summarize
from whywait.cli import main
from whywait.core.run import Run
from whywait.core.workload import Workload
from whywait.errors import UsageError
from whywait.judge.paired import asked_of, claims, waits
from whywait.lab import tech_batching, tech_memory, tech_placement
from whywait.lab.arms import embedded_text, settings_of
from whywait.lab.cpus import allowed_cpus
from whywait.lab.state import Engine
from whywait.lab.technique import Point, Show, Technique, one_class
from whywait.lab.techniques import TECHNIQUES
from whywait.load.stub import StubProcess
from whywait.report.trial import told as report
from whywait.watching import _unified

ROOT = Path(__file__).parents[1]


def run_of(outcomes: list[str], readings: list[dict[str, object]] | None = None) -> Run:
    """A request per outcome, each with three chunks: gaps of 10 ms and (10 · its number) ms."""
    rows, chunks = [], []
    for i, outcome in enumerate(outcomes):
        t = [S + 50 * MS, S + 60 * MS, S + 60 * MS + 10 * (i + 1) * MS]
        rows.append({"id": i, "class": "short" if i % 2 else "long", "outcome": outcome, "due_ns": S, "sent_ns": S,
                     "accepted_ns": t[0], "first_ns": t[0], "last_ns": t[-1], "end_ns": S + 500 * MS,
                     "output_tokens": 3, "prompt_tokens": 10})  # fmt: skip
        chunks += stream(i, t, tokens=[1, 1, 1])
    return make_run(rows, chunks, readings)  # type: ignore[arg-type]


def told(run: Run) -> dict[str, float | None]:
    return figures(run, summarize(run)["points"][0])


def test_failures_are_of_those_that_were_tried() -> None:
    assert told(run_of(["ok", "ok", "ok", "inband_error"]))["failed_share"] == pytest.approx(0.25)
    assert told(run_of(["ok", "censored", "cancelled", "timeout"]))["failed_share"] == pytest.approx(0.5)
    assert told(run_of(["ok", "ok"]))["failed_share"] == 0
    assert told(run_of(["censored"]))["failed_share"] is None


def test_the_longest_silence_is_of_streams_that_ended_well() -> None:
    found = told(run_of(["ok", "ok", "ok", "inband_error"]))
    assert found["chunk_gap_ms.max"] == pytest.approx(30)
    assert told(run_of(["inband_error"]))["chunk_gap_ms.max"] is None


def test_how_many_the_engine_worked_on_and_pushed_out() -> None:
    at = [(S + k * 100 * MS, k) for k in range(6)]
    readings = gauge_rows("running", [(t, 2.0 + 2 * (k > 2)) for t, k in at])
    readings += gauge_rows("preemptions_total", [(t, 10.0 + k) for t, k in at])
    found = told(run_of(["ok", "ok"], readings))
    assert found["running_max"] == 4
    assert 2 < (found["running"] or 0) < 4
    assert found["preemptions"] == pytest.approx(5)
    unread = told(run_of(["ok", "ok"]))
    assert [unread[k] for k in ("running", "running_max", "preemptions")] == [None] * 3


def test_figures_of_a_class() -> None:
    found = told(run_of(["ok"] * 4))
    assert found["classes.long.ttft_ms.mean"] == pytest.approx(50)
    assert metric_of("classes.long.ttft_ms.mean").title == "TTFT mean: long"
    assert asked_of("classes.a.b.tpot_ms.p50").up is False  # a class may have a point in its name
    assert asked_of("classes.x.goodput_share").up is True
    with pytest.raises(UsageError):
        asked_of("classes.long.speed")
    a, b = dict(found), {**found, "classes.long.ttft_ms.mean": 100.0}
    made = effects([(a, b), (a, b)])
    assert made["classes.long.ttft_ms.mean"].ratio.value == pytest.approx(2)
    names = list(made)
    assert names.index("classes.long.ttft_ms.mean") < names.index("phases.queue")
    assert not any(n.startswith("classes.") for n in told(Service().closed(2, 8)))  # of one class they are all of it


def test_goodput_of_a_class_has_a_row_only_where_an_slo_asks_for_it() -> None:
    name = "classes.long.goodput_share"
    effect = {name: {"n": 2, "a": 1.0, "b": 1.0}, "classes.long.ttft_ms.p50": {"n": 2, "a": 1.0, "b": 1.0}}
    plan = {"slo": {}, "workload": {"classes": [{"slo": {}}]}}
    assert name not in report({"plan": plan, "effects": {"": effect}}, "")
    assert name in report({"plan": {**plan, "slo": {"ttft_ms": 5}}, "effects": {"": effect}}, "")


def test_a_promise_whose_cause_is_not_told_apart_is_held_to_its_phase() -> None:
    whole = [({"phases.queue": 100.0 + k, "phases.decode": 50.0}, {"phases.queue": 10.0, "phases.decode": 50.0})
             for k in range(4)]  # fmt: skip
    (claim,) = claims({"": effects(whole)}, [], "slot limit")
    assert (claim.metric, claim.state) == ("phases.queue", "holds")
    assert "slot limit (queue)" in claim.claim
    assert [w["name"] for w in waits(effects(whole), "slot limit") if w["promised"]] == ["phases.queue"]
    other = [
        ({**a, "causes.queue.kv space": 20.0}, b) for a, b in whole
    ]  # causes are told here, and it is none of them
    (claim,) = claims({"": effects(other)}, [], "slot limit")
    assert claim.metric == "causes.queue.slot limit"
    assert claim.state == "undecided"


def test_cpus_are_a_setting() -> None:
    assert settings_of("cpus=0-2+5")["cpus"] == (0, 1, 2, 5)
    assert settings_of("cpus=all")["cpus"] == allowed_cpus()
    text = embedded_text({"threads": 2, "cpus": (0, 3)})
    assert text == "embedded:threads=2,cpus=0+3"
    assert settings_of(text.partition(":")[2]) == {"threads": 2, "cpus": (0, 3)}
    with pytest.raises(UsageError, match="cpus=fast"):
        settings_of("cpus=fast")


def test_parameters_of_llama_cpp_that_lie_at_the_top() -> None:
    got = settings_of("llama.numa=1,cpuparams.poll=0")
    assert got == {"extra": {"numa": 1, "cpuparams.poll": 0}}
    assert settings_of(embedded_text(got).partition(":")[2]) == got
    with pytest.raises(UsageError, match="numa=1"):
        settings_of("numa=1")


def test_both_arms_of_paged_kv_have_the_same_space() -> None:
    from whywait.lab.settings import Settings

    t = tech_memory.TECHNIQUES["paged-kv"]
    a, b = (Settings.from_dict(dict(x)) for x in (t.a, t.b) if not isinstance(x, str))
    assert a.total_ctx == b.total_ctx
    assert b.kv_unified
    longest = max(int(c.prompt_tokens.a + c.output_tokens.a) for c in t.workload.classes)
    assert longest < a.total_ctx // a.slots  # a fixed region has to hold the longest request
    full = t.points[1]
    assert full.target * longest > b.total_ctx  # and that many do not fit into the pool


def test_a_set_of_beginnings_outgrows_the_slots_of_the_small_cache() -> None:
    t = tech_memory.TECHNIQUES["prefix-thrash"]
    sets = [(p.workload or t.workload).classes[0].groups for p in t.points]
    assert not isinstance(t.a, str)
    assert min(sets) <= t.a["slots"] < max(sets)


def test_more_threads_than_the_default_on_every_machine() -> None:
    t = tech_placement.TECHNIQUES["threads"]
    assert not isinstance(t.a, str)
    assert not isinstance(t.b, str)
    assert t.b["threads"] > t.a["threads"] >= 1


@pytest.mark.parametrize("name", [*tech_batching.TECHNIQUES, *tech_memory.TECHNIQUES, *tech_placement.TECHNIQUES])
def test_the_recipes_are_those_of_the_pages(name: str) -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "techniques").glob("*.md"))
    words = [w for both in TECHNIQUES[name].flags.values() for w in " ".join(both).split() if w.startswith("--")]
    assert [w for w in words if w not in text] == []


def test_a_point_may_have_a_workload_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "calibration_ms", lambda _cpus, _rounds: 10.0)
    monkeypatch.setattr("whywait.verbs.measure.raise_invalid", lambda _invalid: None)
    out = tmp_path / "t"
    with StubProcess("--ttft-ms", "2", "--gap-ms", "1") as a, StubProcess("--ttft-ms", "2", "--gap-ms", "1") as b:
        own = Workload(classes=one_class(64, 3, shared=0.5, groups=2))
        technique = Technique("", a.url, b.url, Workload(classes=one_class(16, 6)),
                              (Point(2, 4), Point(1, 2, "other", workload=own)), "decode",
                              (Show("ttft_ms.p50", False),), "")  # fmt: skip
        monkeypatch.setitem(TECHNIQUES, "mine", technique)
        assert main(["try", "mine", "--rounds", "2", "--no-floor", "--cache", "natural", "--out", str(out)]) == 0
    plan = json.loads((out / "trial.json").read_text())["plan"]
    assert [x.get("workload", {}).get("cache") for x in plan["loads"]] == [None, "natural"]  # the flag holds there too
    run = Run.load(out / "round-01-a") if (out / "round-01-a").exists() else Run.load(out / "round-01-b")
    labels = dict(zip(run.points["label"].tolist(), run.points["point"].tolist(), strict=True))
    asked = {k: set(run.point(n).requests["asked_prompt_tokens"].tolist()) for k, n in labels.items()}
    assert asked["other"] == {64}
    assert asked[None] == {16}


def test_whether_slots_share_a_pool_is_what_the_engine_was_told() -> None:
    apart = Engine(name="e", kind="embedded", url="http://127.0.0.1:1", pid=1, model="m", log="", command=(),
                   slots=4, ctx_per_slot=256, kv_tokens=1024)  # fmt: skip
    assert _unified(apart) is False
    assert _unified(replace(apart, ctx_per_slot=1024)) is True
    assert _unified(replace(apart, kv_tokens=None)) is None
    assert _unified(replace(apart, kind="command")) is None
    assert _unified(None) is None
