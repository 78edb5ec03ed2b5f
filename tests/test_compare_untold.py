"""What one side does not tell, tells twice or tells wrongly: never taken for nothing, never paired, never a crash."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import Service, join
from tests.comparable_runs import noisy
from whywait import app
from whywait.analyze import baseline
from whywait.analyze.against import Change, Comparison
from whywait.analyze.compare import DIFFERENCE, HIGHER, Metric
from whywait.analyze.digest import Digest, told
from whywait.analyze.pairing import pairing
from whywait.cli import main
from whywait.comparing import Options, compare, read, save_baseline
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge import alike
from whywait.judge.change_gates import FAILS, PASSES, UNDECIDED, parse
from whywait.report.compared import how

EXAM = Path(__file__).parents[1] / "exam"
STEADY = "8 in flight, steady"


def call(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as exc:
        return int(exc.code or 0)


def gates(a: Any, b: Any, *texts: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = compare(a, [b], Options(gates=tuple(parse(texts))))["gates"]
    return found


def parts(result: dict[str, Any], kind: str = "figures", load: int = 0) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in result["comparisons"][0]["points"][load][kind]}


def without(run: Run, *columns: str) -> Run:
    nan = np.full(len(run.requests), np.nan)
    return dataclasses.replace(run, requests=run.requests.replace(**dict.fromkeys(columns, nan)))


def with_manifest(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, **changes))


def imported(run: Run) -> Run:
    """As ``whywait import`` gives it: no workload, no seed, nothing of the engine, the lengths that were served."""
    run = without(run, "asked_prompt_tokens", "asked_output_tokens", "engine_prefill_ms", "engine_queue_ms")
    return with_manifest(run, made_by="imported", workload={}, engine={}, seed=0)


def test_a_phase_that_one_side_does_not_know_is_unknown_and_no_gate_passes_on_it():
    """B's rows hold 0 where its account knows no prefill: that is not 50 ms less."""
    a, b = noisy(STEADY, 1), without(noisy(STEADY, 2), "engine_prefill_ms", "engine_queue_ms")
    one, other = (read(x, Options()).points[0] for x in (a, b))
    assert one.figures["phases.prefill"] > 40
    assert other.figures["phases.prefill"] is None
    assert not other.rows["phases.prefill"].any()
    for x, y in ((a, b), (b, a)):
        assert {"phases.prefill", "phases.queue", "phases.unknown"}.isdisjoint(parts(compare(x, [y]), "waits"))
    texts = ("phases.prefill>+20%", "phases.prefill>+5ms", "phases.prefill<-5ms", "causes.queue.slot limit>+5ms",
             "causes.prefill.compute>+5ms", "phases.unknown>+5ms", "phases.prefill>9000",
             "causes.queue.slot limit>9000")  # fmt: skip
    for g in gates(a, b, *texts):
        assert g["state"] == FAILS, g
        assert "does not pass" in g["why"]
    assert [g["state"] for g in gates(a, a, "phases.prefill>+20%", "causes.queue.slot limit>+5ms")] == [PASSES] * 2


def test_what_nobody_tells_is_unknown_on_a_baseline_too(tmp_path, capsys):
    a, b = noisy(STEADY, 1), without(noisy(STEADY, 1), "engine_prefill_ms", "engine_queue_ms")
    b.save(tmp_path / "b")
    save_baseline(tmp_path / "a.json", [a])
    argv = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b")]
    assert call(*argv, "--fail-if", "phases.prefill>+20%") == 1
    assert "phases.prefill is unknown (known of one side only): does not pass" in capsys.readouterr().err
    assert call(*argv, "--fail-if", "phases.decode>+20%") == 0


def known(run: Run, **figures: float | None) -> Digest:
    d = read(run, Options())
    more = {k.replace("__", "."): v for k, v in figures.items()}
    return dataclasses.replace(d, points=(dataclasses.replace(d.points[0], figures={**d.points[0].figures, **more}),))


def test_a_cause_that_is_not_named_took_no_time_only_where_its_phase_is_told_apart():
    name = "causes.queue.kv space"
    run = noisy(STEADY, 1)
    assert told(known(run, phases__queue=100.0).points[0], name) == 0.0
    assert told(known(run, phases__queue=100.0, untold__queue=40.0).points[0], name) == 0.0
    assert told(known(run, phases__queue=100.0, untold__queue=60.0).points[0], name) is None
    assert told(known(run, phases__queue=None).points[0], name) is None
    point = known(run, phases__queue=100.0).points[0]
    assert told(dataclasses.replace(point, derived=("queue",)), name) is None  # only the engine's histograms know it
    assert told(dataclasses.replace(point, rows=None), name) is None


def test_a_cause_that_a_model_names_is_not_nothing_in_the_other():
    """Weight reads come from the model of a step, for the point as a whole; no request has them."""
    run = noisy(STEADY, 1)
    named = {"causes.decode.weight reads": 300.0}
    a = known(run, **named)
    for b, state in ((known(run), FAILS), (known(run, **{"causes.decode.weight reads": 400.0}), UNDECIDED)):
        (g,) = gates(a, b, "causes.decode.weight reads>+5ms")
        assert g["state"] == state, g
    c = Comparison(a.points[0], known(run, **{"causes.decode.weight reads": 400.0}).points[0])
    change = c.change("causes.decode.weight reads")
    assert (change.a, change.b, change.value, change.se) == (300.0, 400.0, 100.0, None)


def test_load_points_of_one_name_go_each_with_its_own():
    run = join([Service(gap_ms=10).closed(4, 60), Service(gap_ms=40).closed(4, 60)])
    r = compare(run, [run])
    (c,) = r["comparisons"]
    assert (c["only_a"], c["only_b"], len(c["points"])) == ([], [], 2)
    for load in (0, 1):
        assert all(f["value"] in (None, 0.0, 1.0) for f in parts(r, load=load).values())
    assert parts(r, load=0)["tpot_ms.p50"]["a"] == pytest.approx(10)
    assert parts(r, load=1)["tpot_ms.p50"]["a"] == pytest.approx(40)
    assert any("several load points of one name" in d["what"] for d in r["doubts"])
    (c,) = compare(run, [Service(gap_ms=10).closed(4, 60)])["comparisons"]
    assert (c["only_a"], len(c["points"])) == (["concurrency 4"], 1)
    one = compare(Service().closed(4, 60), [Service().closed(4, 60)])
    assert not any("one name" in d["what"] for d in one["doubts"])


def test_repeats_of_load_points_of_one_name_are_each_of_its_own():
    runs = [join([Service(gap_ms=g * x).closed(4, 60) for g in (10, 40)]) for x in (1, 1.1, 1.2)]
    r = compare(runs[0], [runs[0]], repeats=runs[1:])
    for load, gap in ((0, 10), (1, 40)):
        f = parts(r, load=load)["tpot_ms.p50"]
        assert "3 runs of A" in f["how"]
        assert f["a"] == pytest.approx(gap * (1 * 1.1 * 1.2) ** (1 / 3), rel=1e-3)


def test_a_and_b_of_what_is_paired_are_those_of_the_pairs():
    """B was cut short and A slows down: of all requests A is slower than of those that both got to."""
    a, b = noisy(STEADY, 1), noisy(STEADY, 1, 0.1)
    late = np.arange(240) >= 80
    first = a.requests["sent_ns"] + (a.requests["first_ns"] - a.requests["sent_ns"]) * np.where(late, 3, 1)
    a = dataclasses.replace(a, requests=a.requests.replace(first_ns=first))
    b = dataclasses.replace(b, requests=b.requests.where(~late))
    r = compare(a, [b])
    (point,) = r["comparisons"][0]["points"]
    assert (point["paired"], point["pairs"]) == (True, 80)
    assert how(point).endswith("80 of the same schedule, of 240 of A and 80 of B; times are those of the pairs")
    for kind in ("figures", "waits"):
        for f in parts(r, kind).values():
            if f["value"] is not None and f["how"] == "requests":
                apart = f["b"] / f["a"] if f["scale"] == "ratio" else f["b"] - f["a"]
                assert f["value"] == pytest.approx(apart), f["name"]
    ttft = parts(r)["ttft_ms.p50"]
    assert ttft["value"] == pytest.approx(1.1, abs=0.02)
    whole = read(a, Options()).points[0].figures["ttft_ms.p50"]
    assert whole > 2 * ttft["a"]
    (g,) = gates(a, b, "ttft_ms.p50>+1ms")
    assert g["value"] == pytest.approx(ttft["b"] - ttft["a"])
    again = parts(compare(a, [b], repeats=[a]))["ttft_ms.p50"]  # a second run of A that is the first moves nothing
    assert (again["a"], again["value"]) == (pytest.approx(ttft["a"]), pytest.approx(ttft["value"]))


def test_what_was_not_told_is_not_paired():
    """Same places and same lengths are no evidence of one schedule where nobody tells what was asked for."""
    runs = [imported(noisy(STEADY, s, slower)) for s, slower in ((1, 0.0), (2, 0.3))]
    r = compare(runs[0], [runs[1]])
    (point,) = r["comparisons"][0]["points"]
    assert not point["paired"]
    assert point["why_apart"] == "the workload is not told by both"
    assert parts(r)["tpot_ms.p50"]["state"] == "worse"


def test_a_schedule_of_which_half_is_another_does_not_pair():
    a = Service().closed(4, 40)
    for other, pairs in ((3, 37), (20, 0)):
        lengths = np.where(np.arange(40) < other, 99.0, a.requests["asked_output_tokens"])
        b = dataclasses.replace(a, requests=a.requests.replace(asked_output_tokens=lengths))
        i, j, _ = pairing(*(read(x, Options()).points[0] for x in (a, b)))
        assert len(i) == len(j) == pairs


def test_what_an_import_does_not_tell_is_not_changed():
    a = with_manifest(noisy(STEADY, 1), machine={"client": {"cpu": "x"}, "gpus": [1]})
    (c,) = compare(a, [imported(a)], Options(allow=alike.KINDS))["comparisons"]
    assert [u["what"] for u in c["changed"]] == ["made_by"]
    b = with_manifest(a, engine={**a.manifest.engine, "quantization": "fp8"})
    (c,) = compare(a, [b])["comparisons"]  # of one engine, told the same way, what is new was put there
    assert c["changed"] == [{"what": "engine.quantization", "a": "–", "b": "fp8"}]


@pytest.mark.parametrize("text", ["failed_share>5%", "failed_share>+5%", "goodput_share<-5%", "kv_use>10%"])
def test_a_share_in_per_cent_is_refused_with_what_is_meant(text):
    with pytest.raises(UsageError) as caught:
        parse([text])
    assert "is a share itself" in caught.value.message
    for meant in caught.value.hint.split("'")[1::2]:
        assert parse([meant])[0].kind in ("difference", "level")
        assert abs(parse([meant])[0].limit) == pytest.approx(0.1 if "10" in text else 0.05)


def failing(run: Run, every: int, outcome: str = "http_error") -> Run:
    found = run.requests["outcome"].copy()
    found[::every] = OUTCOMES.index(outcome)
    return dataclasses.replace(run, requests=run.requests.replace(outcome=found))


def test_failures_from_none_fail_in_points():
    a = Service().closed(4, 120)
    assert [g["state"] for g in gates(a, failing(a, 3), "failed_share>+5pp", "failed_share>0.05")] == [FAILS] * 2


def test_what_grew_from_nothing_grew_by_more_than_any_share():
    """A never queues, B does for most of its time."""
    a, b = Service(slots=8).closed(8, 120), Service(slots=2).closed(8, 120)
    a, b = (dataclasses.replace(r, requests=r.requests.replace(
        engine_queue_ms=np.full(120, q))) for r, q in ((a, 0.0), (b, 400.0)))  # fmt: skip
    up, down = gates(a, b, "phases.queue>+20%", "phases.queue<-20%")
    assert (up["state"], down["state"]) == (FAILS, PASSES)
    assert "from nothing" in up["why"]
    assert gates(a, a, "phases.queue>+20%")[0]["state"] == UNDECIDED


def test_worse_is_undecided_where_a_figure_may_be_worse(capsys, tmp_path):
    """Forty requests bound no p95: that it is not worse is not known."""
    a, b = (noisy(STEADY, s, requests=40) for s in (1, 2))
    (g,) = gates(a, b, "worse")
    assert g["state"] == UNDECIDED
    assert "TTFT p95" in g["why"]
    for name, run in (("a", a), ("b", b)):
        run.save(tmp_path / name)
    argv = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-if", "worse"]
    assert call(*argv) == 0
    assert "undecided: b: worse" in capsys.readouterr().err
    assert call(*argv, "--strict") == 3
    assert call(*argv, "--strict", "--metric", "tpot_ms.p50") == 0


def test_the_error_of_a_share_is_of_those_that_its_value_counts():
    """Two thirds were cancelled by the end of the run: they are no evidence that few fail."""
    a = Service().closed(4, 120)
    cut = failing(a, 2, "cancelled")
    d = read(cut, Options())
    assert d.points[0].figures["failed_share"] == 0.0
    assert d.points[0].rows["tried"].sum() == 60
    half, whole = (parts(compare(x, [x]))["failed_share"] for x in (cut, a))
    assert (half["n"], whole["n"]) == (60, 120)
    assert half["high"] > 1.5 * whole["high"]
    old = baseline.as_json(d)  # of before the column: it is still read
    del old["points"][0]["rows"]["tried"]
    assert baseline.from_json(old, "old").points[0].figures == pytest.approx(baseline.from_json(
        baseline.as_json(d), "new").points[0].figures)  # fmt: skip


@pytest.mark.parametrize("outcome", ["never_sent", "censored", "cancelled"])
def test_who_was_not_tried_did_not_fail(outcome):
    a = Service().closed(4, 40)
    kept = failing(a, 4, outcome)
    assert read(kept, Options()).points[0].figures["failed_share"] == 0.0
    assert read(failing(a, 4), Options()).points[0].figures["failed_share"] == 0.25
    assert read(kept, Options()).points[0].counts[outcome] == 10


def test_pairs_are_drawn_together():
    """What befalls both alike is no error of what lies between them: every request of B is A's and a tenth more."""
    a = Service(noise=0.3, seed=1).closed(4, 96)
    sent = a.requests["sent_ns"]
    took = np.random.default_rng(1).uniform(10, 500, 96) * 1e6
    runs = [dataclasses.replace(a, requests=a.requests.replace(
        first_ns=(sent + took * x).astype(np.int64))) for x in (1, 1.1)]  # fmt: skip
    points = [read(r, Options()).points[0] for r in runs]
    together, apart = (Comparison(*points, why).change("ttft_ms.mean") for why in ("", "apart"))
    assert together.value == pytest.approx(math.log(1.1), abs=1e-6)
    assert together.se == pytest.approx(1e-3)  # the least that is told apart
    assert apart.se > 0.03


SUMMARY_JUNK = ["x", math.nan, math.inf, True, 10**400, []]


@pytest.fixture(scope="module")
def summary() -> str:
    return json.dumps(app.show(EXAM / "llama-base").summary)


@pytest.mark.parametrize("junk", SUMMARY_JUNK, ids=lambda x: repr(x)[:8])
@pytest.mark.parametrize(
    "place", ["ttft_ms.p50", "ttft_ms.ci.p50.0", "output_tokens_per_s", "phases.decode.ms", "in_flight.mean",
              "occupancy.shares.unknown", "target", "window.end_ns", "counts.ok", "output_tokens_per_s_ci.1"],
)  # fmt: skip
def test_a_damaged_summary_is_named_before_anything_is_printed(place, junk, summary, tmp_path, capsys):
    raw = json.loads(summary)
    *way, last = [int(k) if k.isdigit() else k for k in place.split(".")]
    inner = raw["points"][0]
    for k in way:
        inner = inner[k]
    inner[last] = junk
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(raw))
    code = call("compare", str(path), str(path), "--json")
    out, err = capsys.readouterr()
    assert code == 2 or (junk is True and json.loads(out))  # true is 1 where nanoseconds are meant
    if code == 2:
        assert out == ""
        assert "neither a summary.json nor a baseline" in err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text((EXAM / "llama-base" / "manifest.json").read_text())
    path.rename(tmp_path / "run" / "summary.json")
    assert call("history", str(tmp_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) + len(found["broken"]) == 1
    assert bool(found["broken"]) == (code == 2)


@pytest.mark.parametrize(
    ("key", "junk"),
    [("invalid", 5), ("disturbed", 5), ("invalid", [5]), ("disturbed", "text"), ("engine", []), ("slo", None),
     ("slo", {"ttft_ms": math.nan}), ("slo_of_classes", 3), ("command", "x"), ("model", 7), ("partial", 3),
     ("made_by", []), ("workload", "x")],
)  # fmt: skip
def test_facts_of_a_baseline_that_are_something_else_are_named(key, junk):
    raw = baseline.as_json(read(noisy(STEADY, 1, requests=40), Options(), "kept"))
    raw["facts"][key] = junk
    with pytest.raises(UsageError, match=r"file\.json is damaged"):
        baseline.from_json(raw, "file.json")


def test_facts_that_are_no_number_are_null(capsys, tmp_path):
    a = with_manifest(noisy(STEADY, 1, requests=40), engine={"slots": 8, "kv_tokens": math.nan, "model": math.inf})
    assert read(a, Options()).facts["engine"] == {"slots": 8, "kv_tokens": None}
    json.dumps(compare(a, [a]), allow_nan=False)
    raw = baseline.as_json(read(noisy(STEADY, 1, requests=40), Options(), "kept"))
    raw["facts"]["date"] = math.nan
    (tmp_path / "b.json").write_text(json.dumps(raw))
    assert call("compare", str(tmp_path / "b.json"), str(tmp_path / "b.json"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["a"]["date"] is None


@pytest.mark.parametrize(("n", "known"), [(12, False), (200, True)])
def test_a_rate_of_few_whole_requests_is_not_known_to_a_hair(n: int, known: bool) -> None:
    """Each piece of the window holds the same one or two requests; that says nothing of how much the rate varies."""
    a, b = Service(gap_ms=50).closed(2, n), Service(gap_ms=45).closed(2, n)
    rate = parts(compare(a, [b]))["requests_per_s"]
    assert (rate["low"] is not None) == known
    if known:
        assert math.log(rate["high"] / rate["low"]) / 2 > 1.9 * math.sqrt(2 / 6) / n  # the two ends of two windows


def test_no_share_changes_by_more_than_the_whole() -> None:
    share, ms = (Metric("x", unit, HIGHER) for unit in ("share", "ms"))
    assert Change("x", share, 1.0, 0.25, DIFFERENCE, -0.75, 0.3, 11, "", 9).bounds()[0] == -1.0
    assert Change("x", ms, 1.0, 0.25, DIFFERENCE, -0.75, 0.3, 11, "", 9).bounds()[0] < -1.0
