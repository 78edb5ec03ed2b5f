"""Runs in a plan: called what they are, with what is wrong with them, and what they changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from whywait import planning, planning_facts, planning_trial, simulating
from whywait.cli import parser
from whywait.core.run import SIMULATED_SERVICE, Run
from whywait.core.schedule import Workload
from whywait.judge import plan_answers, plan_told
from whywait.load.recipe import Load
from whywait.physics.prices import shipped
from whywait.planning_loads import Want
from whywait.planning_space import Space, shapes_of
from whywait.planning_told import calibrated
from whywait.twin.baseline import baseline_of

LOAD = {"prompt_tokens": "uniform(50,150)", "output_tokens": "uniform(20,60)"}
LLAMA = "meta-llama/Llama-3.1-8B"
SLO = {"ttft_ms": 500.0, "tpot_ms": 20.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    d = simulating.deployment_of("h100", "llama-3.1-8b")
    w = Workload.from_dict(dict(LOAD))
    simulating.simulate(simulating.Plan(d, w, (Load("rate", 10, 400),), SLO, draws=1, jobs=1, out=str(out)))
    return Run.load(out)


def of_a_run(directory: Path, run: Run) -> tuple[planning_facts.Measured, dict[str, Any]]:
    """``run`` as a candidate of a plan of its very load."""
    run.save(directory)
    want = Want(Workload.from_dict(dict(LOAD)), 10.0, SLO, jobs=1)
    the_offer = next(o for o in shipped() if "H100 SXM" in o.machines)
    (m,), story = planning_facts.measured(str(directory), want, lambda _: the_offer, (100.0, 40.0, LLAMA))
    return m, story


def as_measured(run: Run, **more: Any) -> Run:
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, made_by="measured", **more))


def test_a_measurement_of_a_simulated_service_is_not_called_measured(saved: Run, tmp_path: Path) -> None:
    real = as_measured(saved, doubts=[])
    m, story = of_a_run(tmp_path / "real", real)
    assert (m.entry["kind"], m.entry["basis"], story["made_by"]) == ("measured", "measured", "measured")
    m, story = of_a_run(
        tmp_path / "sim", as_measured(real, doubts=[{"what": SIMULATED_SERVICE, "why": "", "next": ""}])
    )
    assert (m.entry["kind"], m.entry["basis"], story["made_by"]) == ("simulated", "simulated", "simulated")
    assert m.row.name == "simulated: sim"
    shapes, _ = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",)))
    (told,) = calibrated([str(tmp_path / "sim")], shapes)[1]
    assert (told["made_by"], told["circular"]) == ("simulated", True)


def test_a_run_that_was_cut_short_says_so_and_shows_nothing_for_sure(saved: Run, tmp_path: Path) -> None:
    m, story = of_a_run(tmp_path / "whole", as_measured(saved))
    assert m.row.meets == "holds"
    assert not any("PARTIAL" in d for d in (*m.entry["doubts"], *story["doubts"]))
    m, story = of_a_run(tmp_path / "cut", as_measured(saved, partial=True, partial_reason="interrupted"))
    assert any(d == "PARTIAL: the run was cut short (interrupted)" for d in m.entry["doubts"])
    assert not m.row.eligible
    (line, *_) = second([story])["evidence"]
    assert "PARTIAL" in line


def test_a_run_whose_client_was_late_says_so(saved: Run, tmp_path: Path) -> None:
    late = saved.requests.replace(due_ns=saved.requests["due_ns"] - 3e9 * (saved.requests["id"] % 2))
    m, _ = of_a_run(tmp_path / "late", dataclasses.replace(as_measured(saved), requests=late))
    assert any(d.startswith("INVALID: the client was late") for d in m.entry["doubts"])
    assert not m.row.eligible


def second(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The second of the five questions."""
    return plan_answers._where({"runs": runs})


def story(**more: Any) -> dict[str, Any]:
    held = {"state": "holds", "claim": "decode is bound by weight reads", "evidence": ["a step"], "next_step": ""}
    return {"run": "R", "made_by": "measured", "headline": "decode", "other": "", "doubts": [], "points": [],
            "verdicts": [held], **more}  # fmt: skip


def test_why_the_second_question_is_answered_in_part_only_is_said() -> None:
    assert (second([story()])["state"], second([story()])["command"]) == ("answered", "")
    other = second([story(other="it is of Qwen3-8B, not of Llama")])
    assert (other["state"], "it is of Qwen3-8B, not of Llama" in other["answer"]) == ("in part", True)
    assert "R is simulated" in second([story(made_by="simulated")])["answer"]
    open_ = {
        "state": "undecided",
        "claim": "x",
        "evidence": [],
        "next_step": "a second one: whywait sweep URL --rate 2",
    }
    undecided = second([story(verdicts=[open_])])
    assert "no verdict on R holds" in undecided["answer"]
    assert undecided["command"].startswith("whywait sweep URL --rate 2"), "the step of the verdict, not a new diagnosis"
    assert second([story(verdicts=[open_]), story()])["state"] == "answered", "one that tells is enough"


def row(name: str, kind: str = "simulated", by: str | None = None) -> dict[str, Any]:
    return {"name": name, "kind": kind, "calibrated_by": by}


def test_modelled_is_said_while_any_that_decides_is_modelled() -> None:
    used = [{"run": "R", "state": "used", "made_by": "measured"}]
    rows = [row("A", by="R"), row("B"), row("C", "measured")]
    plain: dict[str, Any] = {"rows": rows, "first": "A", "ties": ["B"], "calibrations": []}
    said = plan_told.made(plain)
    assert said.startswith("MODELLED")
    assert "neither the first nor a tie" in said
    assert "calibrated on R" in plan_told.made({**plain, "calibrations": used})
    assert "calibrated" not in plan_told.made({**plain, "first": "B", "ties": [], "calibrations": used})
    assert "measured: C" in plan_told.made({**plain, "ties": ["C"]})
    assert plan_told.made({**plain, "first": "C", "ties": []}) == ""
    assert plan_told.made({**plain, "first": None, "ties": []}).startswith("MODELLED")
    assert plan_told.made({**plain, "rows": [row("A")], "ties": []}).endswith("nothing was measured for it")


@pytest.mark.parametrize(("machine", "engine", "layout", "techniques", "words"), [
    ("h100", "vllm", "tp=2", "fp8-kv", ("vllm", "2 devices of H100 SXM (--tensor-parallel-size 2), fp8-kv")),
    ("h200", "sglang", "tp=1", "", ("sglang", "1 device of H200 SXM")),
    ("h100", "vllm", "tp=1,pd=1:1", "", ("vllm", "2 devices of H100 SXM, tp=1,pd=1:1")),
])  # fmt: skip
def test_what_to_serve_and_what_the_plan_wants_afterwards(
    machine: str, engine: str, layout: str, techniques: str, words: tuple[str, str]
) -> None:
    space = Space("llama-3.1-8b", (machine,), (engine,), layouts=(layout,), apply=(techniques,))
    (shape,), _ = shapes_of(space)
    ask = planning.Ask(space, Workload.from_dict(dict(LOAD)), 10.0, SLO)
    assert planning_trial.serving(shape) == f"serve {LLAMA} by {words[0]} on {words[1]}"
    told = ",".join(filter(None, (f"machine={machine},engine={engine}", layout, techniques)))
    assert planning_trial.afterwards(shape, ask) == f"whywait plan … --run RUN --baseline '{told}'"
    assert planning_trial.sweep(2.0, ask).endswith("--slo ttft=500ms,tpot=20ms --out RUN")
    args = parser().parse_args(planning_trial.sweep(2.0, ask).replace("'", "").split()[1:])
    assert (args.rate, args.duration) == ([1.4, 2.0, 2.6], "5m")


def test_the_baseline_that_is_printed_can_be_given(saved: Run) -> None:
    space = Space("llama-3.1-8b", ("h200",), layouts=("tp=2",), apply=("fp8-weights,fp8-kv",))
    (shape,), _ = shapes_of(space)
    ask = planning.Ask(space, Workload.from_dict(dict(LOAD)), 10.0, SLO)
    text = planning_trial.afterwards(shape, ask).split("'")[1]
    d = baseline_of(saved, text).deployment
    assert (d.machine.name, d.layout.tp, d.precision.weights, d.precision.kv) == ("H200 SXM", 2, "fp8", "fp8")
