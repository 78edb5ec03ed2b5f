"""What-if: on simulated services whose truth is known, on recorded runs, and at the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from whywait.analyze.observed import observed
from whywait.cli import main
from whywait.core.run import Run
from whywait.core.schedule import Schedule
from whywait.errors import EXIT_UNDECIDED, EXIT_USAGE, UsageError
from whywait.judge.calibrate import Calibration, Knobs
from whywait.judge.calibrate_check import BOUND
from whywait.physics.arch import arch_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.machines import machine
from whywait.sim import techniques
from whywait.sim.deployment import Deployment
from whywait.sim.engines import engine_of
from whywait.sim.loads import Options
from whywait.sim.result import Point, run_of
from whywait.sim.service import figures, run_point
from whywait.twin.asked import asked
from whywait.whatif import Ask, answer, what_if

EXAM = Path(__file__).resolve().parents[1] / "exam"
HIDDEN = Efficiency(weights=1.12, compute=0.9, kv=1.2, step=1.4, frontend=1.5)
LOADS = (1, 4, 8)
QUICK = Knobs(rounds=3)


def schedule(n, prompt=1024, output=32):
    rng = np.random.default_rng(3)
    lengths = rng.integers(int(0.8 * prompt), prompt + 1, n), rng.integers(int(0.8 * output), output + 1, n)
    none = np.full(n, -1, np.int64)
    return Schedule(np.arange(n, dtype=np.int64), 0 * none, *(x.astype(np.int64) for x in lengths), none)


def rows(c):
    return max(12, 5 * c)


def service(name="h100", **efficiency):
    d = Deployment(machine(name), arch_of("llama-3.1-8b"), engine=engine_of("vllm"))
    engine = dataclasses.replace(d.engine, max_seqs=4)
    return dataclasses.replace(d, engine=engine, efficiency=dataclasses.replace(HIDDEN, **efficiency))


@pytest.fixture(scope="module")
def truth():
    """A run of a service with hidden efficiencies: concurrency 1, 4 and 8, four sequences at once."""
    d, points = service(), []
    for c in LOADS:
        s = schedule(rows(c))
        points.append(Point("concurrency", float(c), *run_point(d, s, "concurrency", float(c), 0, options=Options())))
    return run_of(d, points, Options(keep="chunks"))


@pytest.fixture(scope="module")
def answered(truth):
    return answer(truth, "truth", Ask(apply="max-seqs=8", seeds=8, knobs=QUICK))


def at(d, c, n=None):
    f = figures(d, schedule(n or rows(c)), "concurrency", float(c), 0, options=Options(keep="none"))
    ok = f["ok"] & (np.arange(len(f["ok"])) >= (c if n else 0))
    ttft, tpot = (float(np.median(f[k][ok])) * 1e3 for k in ("ttft_s", "tpot_s"))
    return {"ttft_ms.p50": ttft, "tpot_ms.p50": tpot, "output_tokens_per_s": f["output_tokens_per_s"]}


def claim(found, load, metric):
    (c,) = [c for c in found.claims if (c.load, c.metric) == (load, metric)]
    return c


def test_a_technique_does_what_the_hidden_service_does(answered):
    """More sequences at once at concurrency 8: the truth, which the calibration never saw, is in the intervals."""
    assert not answered.refused
    after = dataclasses.replace(service(), engine=dataclasses.replace(service().engine, max_seqs=8))
    was, real = at(service(), 8), at(after, 8)
    for metric, state in (("ttft_ms.p50", "better"), ("tpot_ms.p50", "worse"), ("output_tokens_per_s", "better")):
        c = claim(answered, "concurrency 8", metric)
        assert c.state == state, metric
        assert c.change.low <= real[metric] / was[metric] <= c.change.high, metric
        assert c.after.low <= real[metric] * c.measured / was[metric] <= c.after.high, metric


def test_where_a_change_does_nothing_nothing_is_claimed(answered):
    """One stream never needs a second sequence."""
    states = {c.state for c in answered.claims if c.load == "concurrency 1"}
    assert states == {"same"}
    c = claim(answered, "concurrency 1", "tpot_ms.p50")
    assert (c.change.low, c.change.high) == (1.0, 1.0)


def test_the_account_shows_the_wait_that_was_promised(answered):
    (p,) = answered.promises
    assert (p.technique, p.cuts, p.shows, p.load) == ("max-seqs=8", "slot limit", "queue", "concurrency 8")
    assert p.state == "cut"
    assert p.before_ms > 100 > p.after_ms
    assert p.price


def test_the_hidden_efficiencies_are_found_where_they_show(answered):
    by_name = {p.name: p for p in answered.calibration.parameters()}
    assert by_name["compute"].moved
    assert by_name["compute"].low <= HIDDEN.compute <= by_name["compute"].high
    assert not by_name["pairs"].moved
    assert "link" not in by_name  # one device
    assert "experts" not in by_name  # no experts


def test_a_load_that_was_not_measured(truth):
    found = answer(truth, "truth", Ask(load="concurrency=6", seeds=8, knobs=QUICK))
    real = at(service(), 6, 200)
    for metric in ("ttft_ms.p50", "tpot_ms.p50", "output_tokens_per_s"):
        c = claim(found, "concurrency 6", metric)
        assert c.measured is None
        assert c.after.low <= real[metric] <= c.after.high, metric
        assert c.state == "same"  # nothing but the load was changed


def test_another_machine_is_less_sure_and_says_so(truth):
    there = answer(truth, "truth", Ask(machine="h200", load="concurrency=4", seeds=8, knobs=QUICK))
    c = claim(there, "concurrency 4", "tpot_ms.p50")
    was, real = at(service(), 4), at(service("h200"), 4)
    assert c.change.low <= real["tpot_ms.p50"] / was["tpot_ms.p50"] <= c.change.high
    assert c.change.median < 0.85
    faster = techniques.apply("faster-memory=1.4", service())
    here = answer(truth, "truth", Ask(apply="faster-memory=1.4", load="concurrency=4", seeds=8, knobs=QUICK))
    own = claim(here, "concurrency 4", "tpot_ms.p50")
    assert c.change.high / c.change.low > own.change.high / own.change.low
    assert at(faster, 4)["tpot_ms.p50"] < was["tpot_ms.p50"]
    assert any("H200" in n and "not measured" in n for n in there.notes)
    assert claim(there, "concurrency 4", "usd_per_million_tokens").measured > 0


def test_the_same_question_has_the_same_answer(truth, answered):
    again = answer(truth, "truth", Ask(apply="max-seqs=8", seeds=8, knobs=QUICK))
    assert [c.as_dict() for c in again.claims] == [c.as_dict() for c in answered.claims]


def test_past_the_bound_it_is_undecided_and_says_what_would_help(truth):
    found = answer(
        truth,
        "truth",
        Ask(
            apply="max-seqs=8",
            seeds=8,
            knobs=QUICK,
            bound={"tpot_ms": 1e-6},
            load="concurrency=1",
            baseline="token-budget=8192",
        ),
    )
    assert found.refused
    assert found.advice
    assert {c.state for c in found.claims} == {"undecided"}
    assert "undecided" in found.headline


def test_a_service_that_is_not_as_described_is_undecided(truth):
    """The run says four sequences at once; if it were told that they were 64, loads left out give that away."""
    found = answer(
        truth,
        "truth",
        Ask(apply="max-seqs=128", baseline="max-seqs=64,token-budget=8192", load="concurrency=1", seeds=8, knobs=QUICK),
    )
    assert found.refused
    assert {c.state for c in found.claims} == {"undecided"}


def test_goodput_by_an_slo(truth):
    loose = answer(
        truth, "truth", Ask(apply="max-seqs=8", load="concurrency=8", slo={"ttft_ms": 1e6}, seeds=8, knobs=QUICK)
    )
    c = claim(loose, "concurrency 8", "goodput_requests_per_s")
    assert c.measured == pytest.approx(claim(loose, "concurrency 8", "requests_per_s").measured, rel=0.1)
    none = answer(
        truth, "truth", Ask(apply="max-seqs=8", load="concurrency=8", slo={"ttft_ms": 1e-3}, seeds=8, knobs=QUICK)
    )
    assert claim(none, "concurrency 8", "goodput_requests_per_s").after.median == 0.0


def test_one_load_point_is_no_calibration(truth):
    alone = dataclasses.replace(truth, points=truth.points.where(truth.points["point"] == 1))
    found = answer(alone, "truth", Ask(apply="max-seqs=8", seeds=8, knobs=QUICK))
    assert found.calibration.kind == "one point"
    assert "no calibration" in found.refused
    assert "two loads" in found.advice
    assert {c.state for c in found.claims} == {"undecided"}
    assert any("no calibration" in n for n in found.notes)


def test_impossible_changes_are_refused_with_the_nearest(truth):
    for ask, word, hint in (
        (Ask(), "nothing is changed", "--apply"),
        (Ask(apply="fp9-kv"), "fp9-kv", "fp8-kv"),
        (Ask(machine="x9000"), "x9000", "nearest"),
        (Ask(layout="tp=3"), "tp=3", "nearest"),
        (Ask(layout="fp8-kv"), "no part of a layout", "--apply"),
        (Ask(load="lots"), "lots", "concurrency=64"),
        (Ask(apply="fp4-weights"), "FP4", "int4"),
        (Ask(model="llama-9"), "llama-9", "nearest"),
        (Ask(apply="max-seqs=4", baseline="engine=ollama"), "ollama", "nearest"),
        (Ask(apply="max-seqs=4", baseline="model="), "needs a value", "model="),
    ):
        with pytest.raises(UsageError) as caught:
            answer(truth, "truth", ask)
        assert word in caught.value.message, ask
        assert hint in f"{caught.value.message} {caught.value.hint}", ask


def test_what_a_run_does_not_tell_is_asked_for(truth):
    m = truth.manifest
    for engine, machines, flag in (
        ({**m.engine, "name": None}, m.machine, "engine="),
        ({**m.engine, "model": "secret-7b", "model_shape": None}, m.machine, "model="),
        (m.engine, {"client": {}}, "machine="),
    ):
        blind = dataclasses.replace(truth, manifest=dataclasses.replace(m, engine=engine, machine=machines),
                                    readings=truth.readings.where(np.zeros(len(truth.readings), bool)))  # fmt: skip
        with pytest.raises(UsageError) as caught:
            answer(blind, "truth", Ask(apply="max-seqs=8"))
        assert f"--baseline {flag}" in caught.value.hint
    given = answer(blind, "truth", Ask(apply="max-seqs=8", baseline="machine=h100", seeds=8, knobs=QUICK))
    assert any((f.what, f.value, f.how) == ("machine", "h100", "given") for f in given.facts)


# Recorded runs of real engines


def test_more_slots_on_a_real_llama_server():
    """Two slots asked with eight streams; exam/llama-base-wide is the same service with eight slots."""
    found = what_if(EXAM / "llama-slots-2-of-8", apply="max-seqs=8", bound=dict.fromkeys(BOUND, 0.5))
    real = {o.name: o.figures for o in observed(Run.load(EXAM / "llama-base-wide"))}["concurrency 8"]
    c = claim(found, "concurrency 8", "output_tokens_per_s")
    assert c.state == "better"
    assert 0.8 < c.after.median / real["output_tokens_per_s"].value < 1.25
    for metric, missed in (("ttft_ms.p50", "prefill_ms.mean"), ("tpot_ms.p50", "tpot_ms.mean")):  # both are wrong there
        c = claim(found, "concurrency 8", metric)
        assert c.state == "undecided"
        assert missed in c.why
        assert "left out" in c.why
    assert found.promises[0].state == "cut"
    assert any(f.what == "machine" and "this machine" in f.value for f in found.facts)


def test_the_prefix_cache_of_a_real_vllm():
    """It was off in exam/vllm-cache-off-8 and on in exam/vllm-base-shared, with the same workload. Neither run tells
    that the engine was started with 512 tokens a step; the load left out gives that away."""
    found = what_if(EXAM / "vllm-cache-off-8", apply="prefix-cache")
    assert not found.refused
    assert any(f.what == "tokens per step" and f.value == "512" and "fits" in f.why for f in found.facts)
    assert any((f.what, f.value) == ("prefix cache", "off") for f in found.facts)
    real = {o.name: o.figures for o in observed(Run.load(EXAM / "vllm-base-shared"))}
    for load in ("concurrency 1", "concurrency 8"):
        for metric, state in (("ttft_ms.p50", "better"), ("output_tokens_per_s", "better")):
            c = claim(found, load, metric)
            assert c.state == state
            assert 0.6 < c.after.median / real[load][metric].value < 1.6
    assert found.promises[0].state == "cut"


@pytest.mark.parametrize("name", ["vllm-base-shared", "llama-tokenise-3000", "llama-rate-4", "vllm-shed-own"])
def test_the_requests_of_a_run_are_played_again(name):
    run = Run.load(EXAM / name)
    for o in observed(run):
        a = asked(run, o)
        rows = {int(i): r for r, i in enumerate(run.requests["id"])}
        mine = [rows[int(i)] for i in a.schedule.id]
        assert np.array_equal(a.schedule.prompt_tokens, run.requests["prompt_tokens"][mine])
        assert (run.requests["outcome"][mine] == 0).all()
        assert a.counted.any()
        assert "could not be rebuilt" not in a.note
        if a.mode == "rate":
            assert (np.diff(a.schedule.due_ns) >= 0).all()
            assert a.schedule.due_ns[0] == 0
        assert bool((a.schedule.prefix_tokens > 0).any()) == (name == "vllm-base-shared")


# The command line


@pytest.fixture(scope="module")
def saved(truth, tmp_path_factory):
    return str(truth.save(tmp_path_factory.mktemp("run")))


def test_the_terminal(saved, capsys):
    assert main(["what-if", saved, "--apply", "max-seqs=8", "--seeds", "8", "--slo", "ttft=500ms"]) == 0
    out = capsys.readouterr().out
    words = ("calibrated on concurrency 1, concurrency 4, concurrency 8", "still prior", "left out", "how wrong it is",
             "better", "promises to cut: slot limit", "price:", "modelled", "nothing that matters changes",
             "goodput")  # fmt: skip
    for word in words:
        assert word in out, word
    assert out.index("how wrong it is") < out.index("what if (80 %)")  # the error comes first
    assert max(map(len, out.splitlines()[:20])) < 200


def test_json_and_html_and_the_calibration(saved, capsys, tmp_path):
    page, kept = tmp_path / "w.html", tmp_path / "c.json"
    argv = [
        "what-if",
        saved,
        "--apply",
        "max-seqs=8",
        "--seeds",
        "8",
        "--json",
        "--html",
        str(page),
        "--calibration",
        str(kept),
    ]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["passes"] is True
    assert {c["state"] for c in found["claims"]} >= {"better", "worse", "same"}
    assert found["calibration"]["kind"] == "posterior"
    text = page.read_text()
    assert "MODELLED" in text
    assert "<script" not in text
    assert "http-equiv" in text
    assert Calibration.load(kept).calibrated


def test_html_holds_no_markup_of_a_run(truth, tmp_path, capsys):
    m = dataclasses.replace(truth.manifest, engine={**truth.manifest.engine, "model": "<b onload=x>"})
    where = dataclasses.replace(truth, manifest=m).save(tmp_path / "run")
    assert (
        main(["what-if", str(where), "--apply", "max-seqs=8", "--seeds", "8", "--html", str(tmp_path / "p.html")]) == 0
    )
    capsys.readouterr()
    assert "<b onload" not in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "nothing is changed"),
        (["--apply", "turbo"], "there is no technique 'turbo'"),
        (["--machine", "x9000"], "nearest"),
        (["--apply", "max-seqs=8", "--bound", "quite"], "--bound"),
        (["--apply", "max-seqs=8", "--bound", "tpot=-3%"], "--bound"),
        (["--apply", "max-seqs=8", "--slo", "ttft"], "--slo"),
        (["--apply", "max-seqs=8", "--html", "/nowhere/at/all.html"], "cannot write a report"),
        (["--load", "rate=0"], "--load"),
    ],
)
def test_errors_are_said_without_a_traceback(saved, capsys, argv, word):
    assert main(["what-if", saved, *argv]) == EXIT_USAGE
    err = capsys.readouterr().err
    assert word in err
    assert "Traceback" not in err
    assert "fault of our own" not in err


def test_no_run_there(tmp_path, capsys):
    assert main(["what-if", str(tmp_path / "no"), "--apply", "fp8-kv"]) == EXIT_USAGE
    assert "fault of our own" not in capsys.readouterr().err


def test_strict(saved, capsys):
    argv = [
        "what-if",
        saved,
        "--apply",
        "max-seqs=8",
        "--seeds",
        "8",
        "--bound",
        "0.0001%",
        "--baseline",
        "token-budget=8192",
    ]
    assert main([*argv, "--strict"]) == EXIT_UNDECIDED
    assert "to settle it" in capsys.readouterr().out
