"""Runs that calibrate a plan: a service with hidden multipliers is found out, and as much is bought as it needs."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from whywait import planning, simulating
from whywait.cli import main
from whywait.core.schedule import Workload
from whywait.judge import plan_told
from whywait.load.recipe import Load
from whywait.physics.efficiency import Efficiency
from whywait.physics.prices import shipped
from whywait.planning_loads import Want
from whywait.planning_search import Search
from whywait.planning_space import Space, shapes_of
from whywait.planning_told import calibrated
from whywait.report import plan_html

LOAD = {"prompt_tokens": "lognormal(800,0.6)", "output_tokens": "lognormal(150,0.5)"}
SLO = {"ttft_ms": 600.0, "tpot_ms": 15.0}
RATE = 60.0
#: Kernels half as slow again as the fits have them.
HIDDEN = Efficiency(weights=1.5, compute=1.5, kv=1.5, pairs=1.5)
SPACE = Space("llama-3.1-8b", ("h100", "h200"), layouts=("tp=1",), apply=("",))


def make(out: Path, machine: str = "h100", model: str = "llama-3.1-8b", rates: tuple[float, ...] = (3, 8, 13)) -> Path:
    """A run of the hidden service."""
    d = dataclasses.replace(simulating.deployment_of(machine, model), efficiency=HIDDEN)
    loads = tuple(Load("rate", r, 240) for r in rates)
    w = Workload.from_dict(dict(LOAD))
    simulating.simulate(simulating.Plan(d, w, loads, SLO, draws=1, jobs=1, out=str(out)))
    return out


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> str:
    return str(make(tmp_path_factory.mktemp("told") / "run"))


def ask(**more: object) -> planning.Ask:
    base = planning.Ask(SPACE, Workload.from_dict(dict(LOAD)), RATE, SLO, offers=shipped(), draws=6, jobs=1)
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def by_prior() -> dict:
    return planning.plan(ask())


@pytest.fixture(scope="module")
def by_run(run_dir: str) -> dict:
    return planning.plan(ask(runs=(run_dir,)))


def truth(shape: str, replicas: int) -> dict:
    """The hidden service on that shape, simulated as a plan simulates it."""
    search = Search(Want(Workload.from_dict(dict(LOAD)), RATE, SLO, jobs=1), {})
    (mine,) = [s for s in shapes_of(SPACE)[0] if s.name == shape]
    d = dataclasses.replace(mine.times(replicas), efficiency=HIDDEN)
    (found,) = search.run([search.whole(d, RATE, keep="sample")], "")
    return found


def errors(found: dict, key: str) -> list[float]:
    """Of every simulated candidate with a service that keeps up: predicted over true − 1."""
    rows = [
        (r, truth(r["shape"], r["replicas"])) for r in found["rows"] if r["kind"] == "simulated" and r.get("layout")
    ]
    return [abs(r["figures"][key]["value"] / t[key] - 1) for r, t in rows if t["goodput_share"] > 0.5]


def least(shape: str) -> int:
    return next(n for n in range(1, 20) if truth(shape, n)["goodput_share"] >= 0.95)


def test_figures_are_nearer_to_the_truth_than_the_priors(by_prior: dict, by_run: dict):
    (mine,) = {r["shape"] for r in by_run["rows"] if r["basis"] == plan_told.CALIBRATED}
    for key in ("tpot_ms_p95", "ttft_ms_p95"):
        worst = max(errors(by_run, key))
        known = {n: truth(mine, n)[key] for n in {r["replicas"] for r in by_prior["rows"] if r["shape"] == mine}}
        off = [abs(r["figures"][key]["value"] / known[r["replicas"]] - 1)
               for r in by_prior["rows"] if r["shape"] == mine]  # fmt: skip
        assert worst < 0.25
        assert min(off) > worst, "the prior is farther off at every size"


def test_the_size_bought_is_the_one_the_service_needs(by_prior: dict, by_run: dict):
    def bought(found: dict, shape: str) -> int:
        return min(r["replicas"] for r in found["rows"] if r["shape"] == shape and r["meets"] == "holds")

    need = least("H100 SXM tp=1")
    assert bought(by_prior, "H100 SXM tp=1") < need, "by the prior it would be too few"
    assert need <= bought(by_run, "H100 SXM tp=1") <= need + 1


def test_which_candidate_rests_on_what_is_said_everywhere(run_dir: str, by_prior: dict, by_run: dict):
    assert {r["basis"] for r in by_prior["rows"]} == {plan_told.PRIOR}
    of = {r["machine"]: r["basis"] for r in by_run["rows"] if r["kind"] == "simulated" and r.get("layout")}
    assert of == {"H100 SXM": plan_told.CALIBRATED, "H200 SXM": plan_told.OTHER}
    (c,) = by_run["calibrations"]
    assert (c["state"], c["circular"], c["own"]) == ("used", True, ["H100 SXM, vllm"])
    assert c["other_machine"] == ["H200 SXM, vllm"]
    assert c["figures"] > 0
    assert set(c["worst"]) == {"ttft_ms", "tpot_ms", "output_tokens_per_s"}
    third = by_run["questions"][2]
    assert "calibrated on your run" in third["answer"]
    assert any(f"calibrated on {run_dir}" in e and "left out" in e and "circular" in e for e in third["evidence"])
    page = plan_html.render(by_run)
    assert f"calibrated on {run_dir}" in page
    assert "calibrated elsewhere" in page


def test_what_the_run_changed_is_said(by_prior: dict, by_run: dict):
    assert by_prior["by_prior"] is None
    assert plan_told.changed(by_prior) == ""
    was = by_run["by_prior"]
    assert (was["first"], was["kinds"]) == (by_prior["first"], 2), "what the plan without the run has first"
    assert was["first"] != by_run["first"]
    said = plan_told.changed(by_run)
    now = next(r for r in by_run["rows"] if r["shape"] == was["shape"] and r["eligible"])
    assert f"{was['first']} (" in said
    assert f"by the run that kind is {now['name']} (" in said
    assert said in plan_html.render(by_run)


@pytest.mark.parametrize(("first", "rows", "words"), [
    ("2 × A", [], "the same would be first: 2 × A"),
    ("3 × B", [], "no size of that kind surely keeps the SLO"),
    ("3 × B", ["2 × A"], "by the run it costs 5.00 EUR"), ("3 × B", ["4 × A"], "by the run that kind is 4 × A (5.00"),
])  # fmt: skip
def test_each_way_a_run_may_change_a_plan(first: str, rows: list[str], words: str):
    made = [{"name": n, "shape": "A", "eligible": True, "figures": {"cost": {"value": 5.0}}} for n in rows]
    prior = {"first": "2 × A", "shape": "A", "cost": 4.0, "kinds": 3}
    plain = {"first": first, "rows": made, "basis": {"currency": "EUR"}, "by_prior": prior}
    assert words in plan_told.changed(plain)
    assert "none would surely keep" in plan_told.changed({**plain, "by_prior": {**prior, "first": None}})


def test_another_machine_is_known_less_surely(by_run: dict):
    def width(machine: str) -> float:
        f = next(r["figures"]["tpot_ms_p95"] for r in by_run["rows"] if r["machine"] == machine and r.get("layout"))
        return f["high"] / f["low"]

    assert width("H200 SXM") > width("H100 SXM")


def test_not_calibrating_keeps_the_prior_and_the_run_as_a_candidate(run_dir: str, by_prior: dict):
    found = planning.plan(ask(runs=(run_dir,), calibrate=False))
    assert found["calibrations"] == []
    mine = {r["name"]: r["figures"] for r in found["rows"] if r["basis"] == plan_told.PRIOR}
    assert mine == {r["name"]: r["figures"] for r in by_prior["rows"]}


def test_one_load_point_is_no_calibration_and_the_prior_is_kept(tmp_path: Path):
    one = str(make(tmp_path / "one", rates=(5.0,)))
    shapes, stories = calibrated([one], shapes_of(SPACE)[0])
    assert [s.told for s in shapes] == [None, None]
    assert stories[0]["state"] == "refused"
    assert "one load point" in stories[0]["why"]
    assert "the prior is kept" in plan_told.said(stories[0])


def test_a_calibration_that_fails_its_check_is_not_used(run_dir: str, monkeypatch):
    monkeypatch.setattr("whywait.judge.calibrate_check.BOUND", {"ttft_ms": 1e-6, "tpot_ms": 1e-6})
    monkeypatch.setattr("whywait.twin.fitting.BOUND", {"ttft_ms": 1e-6, "tpot_ms": 1e-6})
    monkeypatch.setattr("whywait.twin.fitting.fitted_budget", lambda *_: None)
    shapes, (story,) = calibrated([run_dir], shapes_of(SPACE)[0])
    assert all(s.told is None for s in shapes)
    assert story["state"] == "refused"
    assert "left out" in story["why"]
    assert story["worst"], "its error is told all the same"


def test_a_run_of_another_model_calibrates_nothing(tmp_path: Path):
    other = str(make(tmp_path / "other", model="qwen3-8b", rates=(2.0,)))
    shapes, (story,) = calibrated([other], shapes_of(SPACE)[0])
    assert all(s.told is None for s in shapes)
    assert story["state"] == "of nothing here"
    assert "Qwen3-8B" in story["why"]


def test_a_run_that_does_not_say_what_it_measured_is_told_by_baseline(run_dir: str, tmp_path: Path):
    dumb = tmp_path / "dumb"
    dumb.mkdir()
    for file in Path(run_dir).iterdir():
        (dumb / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((dumb / "manifest.json").read_text())
    manifest["engine"].pop("name")
    (dumb / "manifest.json").write_text(json.dumps(manifest))
    shapes, (story,) = calibrated([str(dumb)], shapes_of(SPACE)[0])
    assert story["state"] == "not possible"
    assert "--baseline engine=vllm" in story["why"]
    shapes, (story,) = calibrated([str(dumb)], shapes_of(SPACE)[0], "engine=vllm")
    assert story["state"] == "used"
    assert [s.told.own for s in shapes if s.told] == [True, False]


def test_draws_of_one_group_are_paired_and_the_same_again(run_dir: str):
    space = dataclasses.replace(SPACE, machines=("h100",), layouts=("tp=1", "tp=2"))
    (a, b), _ = calibrated([run_dir], shapes_of(space)[0])
    assert a.told is not None
    assert b.told is not None
    x, y = a.told.draws(6, 3), b.told.draws(6, 3)
    assert x == a.told.draws(6, 3)
    same = [(p.efficiency.compute, q.efficiency.compute) for p, q in zip(x, y, strict=True)]
    assert all(p == pytest.approx(q) for p, q in same), "what the run told is the same draw for both"
    assert len({q.efficiency.link for q in y}) > 1, "what it could not tell is drawn from the prior"
    assert "link" in b.told.sd


def test_from_the_command_line(run_dir: str, tmp_path: Path, capsys):
    args = ["plan", "--model", "llama-3.1-8b", "--machines", "h100", "--layouts", "tp=1", "--apply", "", "--rate", "60",
            "--draws", "3", "--jobs", "1", "--prompt-tokens", LOAD["prompt_tokens"], "--output-tokens",
            LOAD["output_tokens"], "--slo", "ttft=600ms,tpot=15ms", "--run", run_dir]  # fmt: skip
    assert main([*args, "--out", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert "cal." in text
    assert f"calibrated on {run_dir}" in text
    assert "by the prior alone, of the 1 kind" in " ".join(text.split())
    rows = list(csv.DictReader((tmp_path / "a" / "plan.csv").read_text(encoding="utf-8").splitlines()))
    assert {r["calibrated_by"] for r in rows if r["basis"] == "calibrated"} == {run_dir}
    assert all(r["prices_of"] and r["price_source"] for r in rows), "each amount has its date and source"
    assert {(r["engine"], r["layout"]) for r in rows if r["kind"] != "simulated" or r["basis"] == "simulated"} == {
        ("vllm", "tp=1")
    }, "of the run, too"
    assert main([*args, "--no-calibrate", "--out", str(tmp_path / "b")]) == 0
    assert "calibrated on" not in capsys.readouterr().out
