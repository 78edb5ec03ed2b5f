"""A run as a candidate of a plan: its numbers, its classes' SLO, its devices and its idle power are its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait import deciding, planning, planning_facts, planning_quality, simulating
from whywait.analyze.bill import Ask as BillAsk
from whywait.analyze.bill import bill
from whywait.core.run import Run
from whywait.core.schedule import Workload
from whywait.judge import plan_answers
from whywait.load.recipe import Load
from whywait.physics.prices import Offer
from whywait.planning_facts import Told, numbers_of
from whywait.planning_loads import Want
from whywait.planning_space import Space
from whywait.sim import techniques

LOAD = {"prompt_tokens": "uniform(50,150)", "output_tokens": "uniform(20,60)"}
LLAMA = "meta-llama/Llama-3.1-8B"
SLO = {"ttft_ms": 500.0, "tpot_ms": 20.0}
LIKE = (100.0, 40.0, LLAMA)
RENT = Offer("rent", "on demand", "EUR", "2026", "t", ("H100 SXM",), per_device_hour=2.0)


def make(out: Path, apply: str = "", layout: str = "tp=1", load: Any = None, slo: Any = None) -> str:
    d = simulating.deployment_of("h100", "llama-3.1-8b", layout=layout)
    d, w = techniques.apply(apply, d), Workload.from_dict(dict(load or LOAD))
    bounds = SLO if slo is None else slo
    simulating.simulate(simulating.Plan(d, w, (Load("rate", 10, 120),), bounds, draws=1, jobs=1, out=str(out)))
    return str(out)


@pytest.fixture(scope="module")
def narrow_run(tmp_path_factory) -> str:
    return make(tmp_path_factory.mktemp("narrow") / "run", "fp8-weights,fp8-kv")


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory) -> str:
    """Of two devices."""
    return make(tmp_path_factory.mktemp("pair") / "run", layout="tp=2")


def as_measured(run_dir: str, out: Path, engine: dict[str, Any] | None = None, **more: Any) -> str:
    """The same run as a measured one, which holds no deployment; ``engine``: what its manifest says else, None: not."""
    run = Run.load(run_dir)
    said = {k: v for k, v in run.manifest.engine.items() if k != "deployment"} | (engine or {})
    said = {k: v for k, v in said.items() if v is not None}
    manifest = dataclasses.replace(run.manifest, made_by="measured", engine=said, **more)
    dataclasses.replace(run, manifest=manifest).save(out)
    return str(out)


def candidate(run_dir: str, told: Told | None = None, offer: Offer | None = RENT, **want: Any):
    asked = dataclasses.replace(Want(Workload.from_dict(dict(LOAD)), 10.0, SLO, jobs=1, draws=400), **want)
    (m,), _ = planning_facts.measured(run_dir, asked, lambda _: offer, LIKE, told)
    return m


def test_a_run_of_narrower_numbers_is_untested_and_never_first(narrow_run: str):
    m = candidate(narrow_run)
    assert m.entry["narrow"] == ["fp8-weights", "fp8-kv"]
    assert m.row.quality == "untested"
    assert not m.row.eligible
    tested = planning_quality.Tested(("fp8-kv", "fp8-weights"), "DIR", "holds", "", "alike")
    assert candidate(narrow_run, Told((tested,))).row.eligible, "tested together it may be first"


def test_a_plan_does_not_rank_it_first(narrow_run: str):
    space = Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",))
    dear = dataclasses.replace(RENT, machines=("H100 SXM",))
    ask = planning.Ask(space, Workload.from_dict(dict(LOAD)), 10.0, SLO, offers=(dear,), draws=2, jobs=1,
                       runs=(narrow_run,), calibrate=False)  # fmt: skip
    found = planning.plan(ask)
    (mine,) = [r for r in found["rows"] if r.get("run")]
    assert found["first"] != mine["name"]
    assert "--quality fp8-weights+fp8-kv=DIR" in found["questions"][3]["command"]


def test_a_measured_run_tells_its_numbers_by_its_files_and_its_engine(narrow_run: str, tmp_path: Path):
    def said(at: str, engine: dict[str, Any], baseline: str = "", **more: Any) -> tuple[tuple[str, ...], str]:
        return numbers_of(Run.load(as_measured(narrow_run, tmp_path / at, engine, **more)), LLAMA, baseline)

    assert said("a", {}) == (("8-bit-weights", "fp8-kv"), "")
    wide = {**Run.load(narrow_run).manifest.engine["model_shape"], "weight_bytes": 16.06e9}
    assert said("b", {"model_shape": wide, "kv_dtype": "auto"}) == ((), "")
    assert said("c", {"model_shape": wide, "kv_dtype": "fp8_e4m3"}) == (("fp8-kv",), "")
    assert "weights and KV are" in said("d", {"model_shape": None, "kv_dtype": None})[1]
    started = ["whywait", "run", "--launch", "vllm serve model --quantization fp8"]
    assert "weights are" in said("e", {"model_shape": wide, "kv_dtype": "auto"}, command=started)[1]
    nothing: dict[str, Any] = {"model_shape": None, "kv_dtype": None}
    assert said("f", nothing, "machine=h100,bf16-weights,fp8-kv") == (("fp8-kv",), "")
    assert said("g", nothing, "int8-weights,bf16-kv") == (("int8-weights",), "")


def test_numbers_that_are_not_known_are_a_doubt(narrow_run: str, tmp_path: Path):
    m = candidate(as_measured(narrow_run, tmp_path / "run", {"model_shape": None, "kv_dtype": None}))
    assert any("--baseline bf16-weights,bf16-kv" in d for d in m.entry["doubts"])
    assert not m.row.eligible
    assert m.row.quality == "undecided", "it is not said to be as published"


def test_the_fourth_question_names_what_tells_the_numbers():
    row = {"quality": "undecided", "name": "measured: run", "narrow": [], "shape": "run", "quality_note": "not told"}
    q = plan_answers._quality({"rows": [row], "untested": []})
    assert q["state"] == "open"
    assert "measured: run: not told" in q["evidence"]
    assert "--baseline bf16-weights,bf16-kv" in q["command"]


@pytest.fixture(scope="module")
def run_of_classes(tmp_path_factory) -> str:
    """Of two classes, without any SLO of its own."""
    two = [{"name": n, "prompt_tokens": 100, "output_tokens": 40} for n in ("chat", "doc")]
    return make(tmp_path_factory.mktemp("classes") / "run", load={"classes": two}, slo={})


def of_classes(**slo: dict[str, float]) -> Workload:
    return Workload.from_dict(
        {"classes": [{"name": n, "prompt_tokens": 100, "output_tokens": 40, "slo": s} for n, s in slo.items()]}
    )


def test_a_run_is_held_to_the_slo_of_the_plans_classes(run_of_classes: str):
    def share(workload: Workload, slo: dict[str, float]) -> float:
        return candidate(run_of_classes, workload=workload, slo=slo).row.figures["share"]

    easy, hard = {"ttft_ms": 500.0}, {"ttft_ms": 0.001}
    assert share(of_classes(chat=easy, doc=easy), {}) == 1.0
    assert share(of_classes(chat=hard, doc=hard), {}) == 0.0
    assert 0.2 < share(of_classes(chat=hard, doc=easy), {}) < 0.8
    assert 0.2 < share(of_classes(chat=hard, doc={}), easy) < 0.8, "the others are held to --slo"
    m = candidate(run_of_classes, workload=of_classes(chat=hard, doc=hard), slo={})
    assert m.row.meets == "fails"
    assert m.row.figures["latency"] > 100, "the worst of the limits counts, the classes' too"


def test_a_run_of_classes_that_the_plan_has_no_slo_for_is_no_candidate(run_of_classes: str):
    want = Want(of_classes(chat={"ttft_ms": 500.0}), 10.0, {}, jobs=1)
    none, story = planning_facts.measured(run_of_classes, want, lambda _: RENT, LIKE)
    assert not none
    assert "doc" in story["unused"][0]
    assert "--slo" in story["unused"][0]


def test_the_runs_own_slo_says_nothing(narrow_run: str, tmp_path: Path):
    """Neither its manifest's bounds nor its classes' replace those of the plan."""
    own = {"classes": [{"name": c, "slo": {"ttft_ms": 0.001}} for c in ("default", "chat")]}
    run = as_measured(narrow_run, tmp_path / "run", slo={"ttft_ms": 0.001}, workload=own)
    assert candidate(run).row.figures["share"] == 1.0


def test_a_run_that_does_not_tell_its_devices_has_no_cost(pair_run: str, tmp_path: Path):
    """Two GPUs of which nobody says how many serve: neither one nor two may be taken for sure."""
    untold = as_measured(pair_run, tmp_path / "run", {"devices": None})
    m = candidate(untold, offer=RENT)
    assert m.entry["devices"] is None
    assert m.row.figures["cost"] is None
    assert m.row.figures["hourly"] is None
    assert any("--baseline tp=N" in d for d in m.entry["doubts"])
    assert not m.row.eligible
    given = candidate(untold, Told(baseline="engine=vllm,machine=h100,tp=2"))
    assert given.row.figures["hourly"] == 4.0
    assert not given.entry["doubts"]
    assert given.row.eligible
    assert candidate(as_measured(pair_run, tmp_path / "told")).row.figures["hourly"] == 4.0


def test_devices_that_were_counted_by_their_load_are_a_doubt(pair_run: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("whywait.analyze.energy._busy_devices", lambda *_: 2)
    m = candidate(as_measured(pair_run, tmp_path / "run", {"devices": None}))
    assert m.row.figures["hourly"] == 4.0
    assert m.row.meets == "undecided"
    assert not m.row.eligible


def test_power_of_a_run_is_paid_once_for_each_device(pair_run: str):
    """Of two devices owned at half use: their power while in use, and as long their idle power."""
    owned = Offer("o", "owned", "EUR", "2026", "t", ("H100 SXM",), capex=8766.0, years=1.0, power_price=0.2, pue=1.5,
                  utilisation=0.5)  # fmt: skip
    one, two = (candidate(pair_run, offer=owned, rate=r).row.figures for r in (10.0, 20.0))
    (p,) = bill(Run.load(pair_run), BillAsk((owned,)))["points"]
    idle = p["energy"]["idle"]["watts"]
    assert idle > 0
    assert one["hourly"] == pytest.approx(2 * 2.0 + (one["power_w"] + idle) / 1000 * 0.2 * 1.5)
    assert two["hourly"] == pytest.approx(2 * one["hourly"]), "two copies of it cost twice as much"
    assert two["power_w"] == pytest.approx(2 * one["power_w"])


def test_draws_of_a_run_scatter_as_two_measurements_of_one_service_do(narrow_run: str):
    m = candidate(narrow_run)
    for key in ("tpot_ms_p95", "latency"):
        assert np.log(m.row.draws[key] / m.row.figures[key]).std() == pytest.approx(0.03, rel=0.2)


def test_a_plan_shows_a_run_without_a_count_of_devices(pair_run: str, tmp_path: Path, capsys):
    untold = as_measured(pair_run, tmp_path / "run", {"devices": None})
    made = planning.plan(planning.Ask(Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",)),
                                      Workload.from_dict(dict(LOAD)), 10.0, SLO, offers=(RENT,), draws=2, jobs=1,
                                      runs=(untold,), calibrate=False))  # fmt: skip
    kept = deciding.Planned(made)
    kept.keep(tmp_path / "plan")
    kept.print(str(tmp_path / "plan"))
    assert "it does not tell how many devices serve" in capsys.readouterr().out
    assert "measured: run" in (tmp_path / "plan" / "plan.csv").read_text()


@pytest.mark.parametrize(("rate", "copies"), [(10.5, 1), (9.2, 1), (19.0, 2), (11.5, 0), (15.0, 0), (4.0, 0)])
def test_a_rate_is_a_whole_part_within_a_tenth(narrow_run: str, rate: float, copies: int):
    want = Want(Workload.from_dict(dict(LOAD)), rate, SLO, jobs=1)
    found, story = planning_facts.measured(narrow_run, want, lambda _: RENT, LIKE)
    assert [m.entry["replicas"] for m in found] == ([copies] if copies else [])
    assert bool(story["unused"]) is not bool(copies)


@pytest.mark.parametrize(("lengths", "doubted"), [((115.0, 40.0), 0), ((100.0, 48.0), 0), ((130.0, 40.0), 1),
                                                  ((100.0, 30.0), 1), ((60.0, 80.0), 2)])  # fmt: skip
def test_lengths_off_by_a_quarter_are_another_load(narrow_run: str, lengths: tuple[float, float], doubted: int):
    want = Want(Workload.from_dict(dict(LOAD)), 10.0, SLO, jobs=1)
    (m,), _ = planning_facts.measured(narrow_run, want, lambda _: RENT, (*lengths, LLAMA))
    assert sum("another load" in d for d in m.entry["doubts"]) == doubted
    assert m.row.meets == ("undecided" if doubted else "holds")


def test_the_share_of_a_run_scatters_as_its_requests_do(run_of_classes: str):
    m = candidate(run_of_classes, workload=of_classes(chat={"ttft_ms": 0.001}, doc={"ttft_ms": 500.0}), slo={})
    share = m.row.figures["share"]
    assert m.row.draws["share"].std() == pytest.approx((share * (1 - share) / 120) ** 0.5, rel=0.2)
    assert m.row.draws["share"].mean() == pytest.approx(share, abs=0.02)
    assert m.row.draws["goodput"] == pytest.approx(m.row.draws["share"] * 10.0)
    assert m.row.draws["cost"] * m.row.draws["goodput"] == pytest.approx(2.0 / 3600 * 1000)
