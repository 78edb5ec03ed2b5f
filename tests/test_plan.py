"""``whywait plan`` from the command line: it finds the size, keeps to its rules, and says what it does not know."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from whywait import deciding, planning, planning_facts, planning_quality, planning_search, simulating
from whywait.cli import main
from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.load.recipe import Load, schedule_of
from whywait.physics.prices import shipped
from whywait.planning_loads import Want, scaled_output, scaled_reuse
from whywait.planning_search import Search, Sized, finalists, needed
from whywait.planning_space import Shape, Space, low_precision, shapes_of, space_of
from whywait.report import plan_html
from whywait.report.plan import shown
from whywait.sim.bound import Bound, bound
from whywait.sim.service import figures

LOAD = {"prompt_tokens": "uniform(50,150)", "output_tokens": "uniform(20,60)"}
LLAMA = "meta-llama/Llama-3.1-8B"
SLO = {"ttft_ms": 500.0, "tpot_ms": 20.0}


def ask(space: Space, rate: float = 20.0, **more: object) -> planning.Ask:
    base = planning.Ask(space, Workload.from_dict(dict(LOAD)), rate, SLO, offers=shipped(), draws=4, jobs=1)
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> dict:
    space = Space("llama-3.1-8b", ("h100", "h200"), layouts=("tp=1", "tp=2"), apply=("", "fp8-weights"))
    return planning.plan(ask(space, 60.0, growth=0.5))


def test_five_questions_each_with_a_state_and_what_is_open_with_a_command(found):
    assert len(found["questions"]) == 5
    for q in found["questions"]:
        assert q["state"] in ("answered", "in part", "open")
        assert q["evidence"] or q["command"]
        if q["state"] == "open":
            assert "whywait" in q["command"]
    assert found["questions"][0]["state"] == "open", "lengths that were written down are a guess"
    assert found["questions"][1]["state"] == "open", "no run was given"


def test_narrow_numbers_without_a_test_are_marked_and_never_first(found):
    by = {r["name"]: r for r in found["rows"]}
    assert by[found["first"]]["quality"] == "as published"
    narrow = [r for r in found["rows"] if "fp8-weights" in r["apply"]]
    assert narrow
    assert all(r["quality"] == "untested" and not r["eligible"] for r in narrow)
    assert "--quality fp8-weights=DIR" in found["questions"][3]["command"]


def test_figures_agree_with_each_other(found):
    for r in found["rows"]:
        f = {k: v["value"] for k, v in r["figures"].items()}
        assert f["goodput"] == pytest.approx(f["share"] * 60.0)
        assert f["cost"] == pytest.approx(r["hourly"] / (f["goodput"] * 3600) * 1000)
        assert f["energy"] == pytest.approx(f["power_w"] / f["goodput"])
    first = found["rows"][0]
    assert first["name"] == found["first"]
    assert first["headroom"] >= 0
    assert 0 <= first["growth"] <= 1
    assert first["loss"]["replicas"] >= 1


def test_same_inputs_same_plan_and_it_can_be_made_again(found):
    again = planning.plan(planning.Ask.from_dict(json.loads(json.dumps(found["inputs"]))))
    assert again == found


def test_catalogue_figures_have_sources_and_offers_dates(found):
    assert all(m["source"] and m["read_in"] for m in found["catalogue"])
    assert all(o["source"] and o["date"] and o["currency"] for o in found["basis"]["offers"].values())


def test_what_cannot_hold_the_model_is_named_with_the_reason():
    space = Space("llama-3.1-70b", ("l4", "h100"), layouts=("tp=1", "tp=4"), apply=("",))
    shapes, refused = shapes_of(space)
    assert [s.name for s in shapes] == ["H100 SXM tp=4"]
    assert {r["name"] for r in refused} == {"L4 tp=1", "L4 tp=4", "H100 SXM tp=1"}
    assert all("fit" in r["why"] for r in refused)


def test_an_engine_of_one_maker_is_not_planned_on_anothers_devices():
    space = Space("llama-3.1-8b", ("mi300x", "h100"), ("trtllm", "vllm"), layouts=("tp=1",), apply=("",))
    shapes, refused = shapes_of(space)
    assert {s.group for s in shapes} == {"H100 SXM, trtllm", "H100 SXM, vllm", "MI300X, vllm"}
    assert "NVIDIA" in refused[0]["why"]
    with pytest.raises(UsageError, match="no engine 'vlm'"):
        shapes_of(Space("llama-3.1-8b", ("h100",), ("vllm", "vlm"), layouts=("tp=1",), apply=("",)))


def test_cheap_untested_numbers_leave_the_tested_ones_in_the_comparison(monkeypatch):
    """A machine at three times the untested one's cost may still be the best of those that may be first."""
    want = Want(Workload.from_dict(dict(LOAD)), 20.0, SLO, jobs=1)
    shapes, _ = shapes_of(Space("llama-3.1-8b", ("h100", "h200"), layouts=("tp=1",), apply=("", "fp8-weights")))
    offers = {o.machines[0]: o for o in shipped() if o.machines and o.machines[0] in ("H100 SXM", "H200 SXM")}
    dear = {"H100 SXM": dataclasses.replace(offers["H100 SXM"], per_device_hour=1.0, terms="on demand"),
            "H200 SXM": dataclasses.replace(offers["H200 SXM"], per_device_hour=3.0, terms="on demand")}  # fmt: skip
    narrow = {s.name for s in shapes if low_precision(s.deployment)}

    def dropped(tested: Callable[[Shape], bool]) -> set[str]:
        search = Search(want, dear)
        return {d["name"] for d in search.least(search.screen(some)[0], tested)}

    some = [s for s in shapes if s.name in ("H100 SXM tp=1 fp8-weights", "H200 SXM tp=1", "H200 SXM tp=1 fp8-weights")]
    monkeypatch.setattr(planning_search, "BATCH", 1)
    assert dropped(lambda s: s.name not in narrow) == {"H200 SXM tp=1 fp8-weights"}
    assert dropped(lambda _: True) == {"H200 SXM tp=1 fp8-weights", "H200 SXM tp=1"}


def test_counts_that_cannot_be_dealt_out_are_refused():
    shapes, refused = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=("tp=2",), apply=("",), counts=(3,)))
    assert not shapes
    assert "dealt out" in refused[0]["why"]


def test_a_file_of_candidates(tmp_path: Path):
    space = space_of({"model": "llama-3.1-8b", "machines": ["h100"], "layouts": ["tp=1"], "apply": ["", "fp8-kv"],
                      "candidate": [{"machine": "h200", "layout": "tp=2", "count": 4}]})  # fmt: skip
    shapes, refused = shapes_of(space)
    assert not refused
    assert {s.name: s.counts for s in shapes} == {
        "H200 SXM tp=2": (2,),
        "H100 SXM tp=1": (),
        "H100 SXM tp=1 fp8-kv": (),
    }
    with pytest.raises(UsageError, match="unknown key 'machine'"):
        space_of({"machine": "h100"})
    with pytest.raises(UsageError, match="machine is missing"):
        space_of({"candidate": [{"layout": "tp=1"}]})


@pytest.mark.parametrize(
    ("tech", "need"), [("", ()), ("fp8-kv", ("fp8-kv",)), ("fp8-weights,fp8-kv", ("fp8-weights", "fp8-kv"))]
)
def test_narrower_than_published(tech, need):
    (shape,), _ = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=(tech,)))
    assert low_precision(shape.deployment) == need


def test_published_in_fp8_is_not_narrower():
    d = simulating.deployment_of("h200", "deepseek-v3", layout="tp=8")
    assert low_precision(d) == ()


@pytest.mark.parametrize(
    ("layout", "apply"), [("tp=1", ""), ("tp=2", "fp8-kv"), ("tp=1", "spec-ngram"), ("tp=1,pd=1:1", "")]
)
def test_the_bound_is_not_below_what_is_simulated(layout, apply):
    """At more than it can take, the simulated service serves less than the bound says it could at most."""
    (shape,), _ = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=(layout,), apply=(apply,)))
    w = Workload.from_dict({"prompt_tokens": "uniform(200,800)", "output_tokens": "uniform(50,150)"})
    s, _ = schedule_of(Load("rate", 400, 1200), w, 0, 0)
    got = figures(shape.deployment, s, "rate", 400)
    assert bound(shape.deployment, s).requests_per_s >= 0.98 * float(got["requests_per_s"])


def test_a_stream_slower_than_its_limit_alone_is_screened_by_the_bound():
    (shape,), _ = shapes_of(Space("llama-3.1-70b", ("h100",), layouts=("tp=2",), apply=("",)))
    s, _ = schedule_of(Load("rate", 1, 50), Workload.from_dict(dict(LOAD)), 0, 0)
    b = bound(shape.deployment, s, 5.0)
    assert b.requests_per_s == 0
    assert "alone" in b.why


def test_the_size_found_keeps_the_slo_and_one_less_does_not():
    want = Want(Workload.from_dict(dict(LOAD)), 400.0, SLO, jobs=1)
    shapes, _ = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",)))
    search = Search(want, {})
    sized, dropped = search.screen(shapes)
    search.least(sized)
    (x,) = sized
    assert not dropped
    assert x.least is not None
    assert search.keeps(x.seen[x.least])
    before = x.ladder.index(x.least) - 1
    assert before < 0 or (x.ladder[before] in x.seen and not search.keeps(x.seen[x.ladder[before]]))


def test_the_budget_bounds_the_sizes():
    space = Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",))
    poor = planning.plan(ask(space, 2000.0, budget=2.0))
    assert poor["first"] is None
    assert not poor["rows"]
    assert any("budget" in d["why"] for d in poor["screened"])


def test_each_draw_needs_the_least_size_that_keeps_the_slo_in_it():
    sizes = [(1.0, [0.99, 0.5, 0.5]), (2.0, [1.0, 0.99, 0.9])]
    assert needed(sizes, 0.95).tolist() == [1.0, 2.0, 3.0]


def test_of_a_large_service_a_part_is_simulated_that_reaches_its_steady_state():
    want = Want(Workload.from_dict(dict(LOAD)), 4000.0, SLO, jobs=1)
    (shape,), _ = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",)))
    search = Search(want, {})
    c = search.whole(shape.times(80), want.rate).cell
    assert c.deployment.replicas < 80
    assert c.target / c.deployment.replicas == pytest.approx(4000 / 80)
    assert len(search.loads.list[c.schedule]) / c.target >= 0.9 * min(search.loads.span, 4000 / (4000 / 80))
    small = search.whole(shape.times(2), 10.0).cell
    assert small.deployment.replicas == 2
    assert small.target == 10.0


def test_finalists_have_every_machine():
    shapes, _ = shapes_of(Space("llama-3.1-8b", ("h100", "h200"), layouts=("tp=1", "tp=2"), apply=("", "fp8-kv")))
    price = {"H100 SXM": 1.0, "H200 SXM": 9.0}
    made = []
    for s in shapes:
        d = bound(s.deployment, schedule_of(Load("rate", 1, 20), Workload(), 0, 0)[0])
        made.append(Sized(s, d, (1, 2), price[s.machine], 1, {1: {"tpot_ms_p95": 1.0}}))
    chosen = finalists(made, lambda s: not s.apply, most=3)
    assert {x.shape.machine for x in chosen} == {"H100 SXM", "H200 SXM"}


def test_finalists_have_the_cheapest_tested_of_each_engine_near_the_best():
    """How sure a size is, is each engine's own: the cheapest by its median may need the most in the end."""
    shapes, _ = shapes_of(Space("llama-3.1-8b", ("h100",), ("vllm", "sglang", "trtllm"), ("tp=1",), ("", "fp8-kv")))
    price = {"vllm": 1.0, "sglang": 1.4, "trtllm": 1.6}
    made = [Sized(s, Bound(1.0), (1,), price[s.engine], 1, {1: {"tpot_ms_p95": price[s.engine]}}) for s in shapes]
    chosen = finalists(made, lambda s: not s.apply, most=2)
    assert [(x.shape.engine, x.shape.apply) for x in chosen] == [("vllm", ""), ("sglang", "")]


def test_assumptions_change_the_load_as_they_say():
    s, _ = schedule_of(Load("rate", 1, 200), Workload.from_dict({**LOAD, "shared": 0.5, "groups": 2}), 0, 0)
    longer = scaled_output(1.3)(s)
    assert longer.output_tokens.sum() == pytest.approx(1.3 * s.output_tokens.sum(), rel=0.02)
    less = scaled_reuse(0.7)(s)
    assert less.prefix_tokens.sum() == pytest.approx(0.7 * s.prefix_tokens.sum(), rel=0.02)
    assert (scaled_reuse(5.0)(s).prefix_tokens < s.prompt_tokens).all()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    d = simulating.deployment_of("h100", "llama-3.1-8b")
    w = Workload.from_dict(dict(LOAD))
    simulating.simulate(simulating.Plan(d, w, (Load("rate", 10, 400),), SLO, draws=2, jobs=1, out=str(out)))
    return out


def test_a_run_stands_beside_the_simulated_ones(run_dir: Path):
    want = Want(Workload.from_dict(dict(LOAD)), 20.0, SLO, jobs=1)
    the_offer = next(o for o in shipped() if "H100 SXM" in o.machines)

    def offers(machine: str | None):
        return the_offer if machine == "H100 SXM" else None

    (m,), story = planning_facts.measured(str(run_dir), want, offers, (100.0, 40.0, LLAMA))
    assert m.entry["kind"] == "simulated", "what was not measured is not called so"
    assert m.entry["replicas"] == 2
    assert m.entry["devices"] == 2
    assert m.row.figures["hourly"] == pytest.approx(2 * 1.3)
    assert any("not measured together" in d for d in m.entry["doubts"])
    assert story["points"][0]["phases"]["decode"]["ms"] > 0
    assert story["other"] == ""
    none, story = planning_facts.measured(str(run_dir), want, offers, (100.0, 40.0, "Qwen/Qwen3-8B"))
    assert not none, "a run of another model is no candidate"
    assert "not of Qwen/Qwen3-8B" in story["unused"][0]
    none, story = planning_facts.measured(
        str(run_dir), dataclasses.replace(want, rate=13.0), offers, (100.0, 40.0, LLAMA)
    )
    assert not none
    assert "no whole part" in story["unused"][0]
    (other,), _ = planning_facts.measured(str(run_dir), want, offers, (1000.0, 40.0, LLAMA))
    assert any("another load" in d for d in other.entry["doubts"])
    assert not other.row.eligible, "of another load it shows nothing for sure"


@pytest.mark.parametrize(("claims", "model", "same", "state"), [
    (["holds", "holds"], "llama-3.1-8b", False, "holds"), (["holds", "fails"], "llama-3.1-8b", False, "fails"),
    (["holds", "undecided"], "llama-3.1-8b", False, "undecided"), (["holds"], "llama-3.1-70b", False, "undecided"),
    (["holds"], "llama-3.1-8b", True, "undecided"), ([], "llama-3.1-8b", False, "undecided"),
    (["holds"], "my-own-name", False, "undecided"),
])  # fmt: skip
def test_a_comparison_of_answers_is_read(monkeypatch, claims, model, same, state):
    result = {"claims": [{"state": c} for c in claims], "arms": {"A": {"model": model}, "B": {"model": model}},
              "plan": {"same": same}, "partial": False, "headline": "said"}  # fmt: skip
    monkeypatch.setattr(planning_quality.qualifying, "load", lambda _: SimpleNamespace(result=lambda: result))
    arch = simulating.deployment_of("h100", "llama-3.1-8b").model
    (t,) = planning_quality.quality_of([("fp8-weights", "DIR")], arch, [("fp8-weights",)])
    assert t.state == state
    if model == "my-own-name":
        assert "serve it as Llama-3.1-8B" in t.note
    assert planning_quality.quality_state(("fp8-weights",), [t])[0] == state
    assert planning_quality.quality_state((), [t])[0] == "as published"
    both = planning_quality.quality_state(("fp8-weights", "fp8-kv"), [t])
    assert both[0] == ("fails" if state == "fails" else "untested")


def test_a_comparison_that_could_be_of_several_must_be_named(monkeypatch):
    result = {"claims": [], "arms": {}, "plan": {"same": False}, "partial": False, "headline": ""}
    monkeypatch.setattr(planning_quality.qualifying, "load", lambda _: SimpleNamespace(result=lambda: result))
    arch = simulating.deployment_of("h100", "llama-3.1-8b").model
    with pytest.raises(UsageError, match="of which candidates"):
        planning_quality.quality_of([("", "DIR")], arch, [("fp8-kv",), ("fp8-weights",)])
    (t,) = planning_quality.quality_of([("", "DIR")], arch, [("fp8-kv",)])
    assert t.techniques == ("fp8-kv",)


ARGS = ["plan", "--model", "llama-3.1-8b", "--layouts", "tp=1", "--apply", "", "--rate", "20", "--draws", "3",
        "--jobs", "1",
        "--prompt-tokens", "100", "--output-tokens", "30", "--slo", "ttft=500ms,tpot=20ms"]  # fmt: skip


def test_from_the_command_line(tmp_path: Path, capsys):
    out = tmp_path / "plan"
    code = main(
        [*ARGS, "--machines", "h100,l40s", "--price-per-hour", "h100=3,l40s=1", "--currency", "EUR", "--out", str(out)]
    )
    text = capsys.readouterr().out
    assert code == 0
    for word in ("The five questions", "Is the load real?", "fixed lengths", "What would turn it over", "MODELLED"):
        assert word in text
    kept = json.loads((out / "plan.json").read_text())
    assert kept["basis"]["currency"] == "EUR"
    assert kept["inputs"]["own_prices"] is True
    rows = list(csv.DictReader((out / "plan.csv").read_text(encoding="utf-8").splitlines()))
    assert [r["candidate"] for r in rows] == [r["name"] for r in kept["rows"]]
    page = (out / "plan.html").read_text()
    assert "<script" not in page
    assert "Five questions" in page
    assert "MODELLED" in page
    assert main(["show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["headline"] == kept["headline"]


def test_from_python(tmp_path: Path):
    space = Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",))
    made = deciding.plan(dataclasses.replace(ask(space), offers=(), draws=2))
    assert made.headline == made.found["headline"]
    assert "USD" in made.headline, "without offers the shipped ones are taken"
    again = deciding.planned(made.keep(tmp_path / "kept"))
    assert again == deciding.Planned(json.loads(json.dumps(made.found)))
    assert again.html() == made.html()
    (tmp_path / "kept" / "plan.json").write_text('{"kind": "plan", "inputs": {')
    with pytest.raises(UsageError, match="it is damaged"):
        deciding.planned(tmp_path / "kept")
    (tmp_path / "kept" / "plan.json").write_text('{"kind": "trial"}')
    with pytest.raises(UsageError, match="something else"):
        deciding.planned(tmp_path / "kept")


@pytest.mark.parametrize(("args", "says"), [
    (["--slo", "tpot=0ms"], "kept by nothing"), (["--baseline", "tp=2"], "there is no --run"),
    (["--engines", "vllm,vlm"], "no engine 'vlm'"), (["--run", "nowhere"], "holds no whywait run"),
])  # fmt: skip
def test_odd_inputs_are_refused_in_a_line(tmp_path: Path, capsys, args, says):
    assert main([*ARGS, "--machines", "h100", *args, "--out", str(tmp_path / "p")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("args", "says"), [
    (["--budget", "0.5/h"], "within 0.500 USD an hour"), (["--slo", "tpot=0.01ms"], "a stream alone takes"),
])  # fmt: skip
def test_where_nothing_will_do_the_reason_is_in_the_headline(tmp_path: Path, capsys, args, says):
    assert main([*ARGS, "--machines", "h100", *args, "--strict", "--out", str(tmp_path / "p")]) == 3
    out = capsys.readouterr().out
    assert "No candidate keeps the SLO" in out
    assert says in out


def test_of_those_that_may_not_be_first_the_cheapest_are_shown():
    rows = [{"name": f"able {i}", "shape": f"a{i}", "eligible": True} for i in range(20)]
    rows += [{"name": f"never {i}", "shape": f"n{i}", "eligible": False} for i in range(5)]
    seen = [r["name"] for r in shown({"rows": rows}, 14)]
    assert seen == [*(f"able {i}" for i in range(11)), "never 0", "never 1", "never 2"]
    assert [r["name"] for r in shown({"rows": rows[18:]}, 6)] == [
        "able 18",
        "able 19",
        *(f"never {i}" for i in range(4)),
    ]


def test_a_damaged_plan_is_not_made_again(tmp_path: Path, capsys):
    (tmp_path / "plan.json").write_text('{"kind": "plan", "inputs": {"space": {}}}')
    assert main(["plan", "--again", str(tmp_path), "--out", str(tmp_path / "p")]) == 2
    assert "is missing" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2
    assert "not whole" in capsys.readouterr().err


def test_a_machine_without_a_price_is_not_ranked_and_that_is_said(tmp_path: Path, capsys):
    assert main([*ARGS, "--machines", "l40s", "--strict", "--json", "--out", str(tmp_path / "p")]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["first"] is None
    assert found["basis"]["unpriced"] == ["L40S"]
    assert found["questions"][4]["state"] == "open"
    assert "--price" in found["questions"][4]["command"]


@pytest.mark.parametrize(("args", "says"), [
    (["--machines", "h100", "--price-per-hour", "3"], "currency"), (["--machines", "h1000"], "h1000"), ([], "machines"),
    (["--machines", "h100", "--budget", "much"], "--budget"), (["--machines", "h100", "--terms", "free"], "--terms"),
    (["--machines", "h100", "--apply", "faster"], "no technique"), (["--again", "nowhere"], "no plan"),
])  # fmt: skip
def test_what_is_asked_wrongly_is_said(tmp_path: Path, capsys, args, says):
    assert main([*ARGS, *args, "--out", str(tmp_path / "p")]) == 2
    assert says in capsys.readouterr().err


def test_no_slo_no_plan(tmp_path: Path, capsys):
    assert main([*ARGS[:-2], "--machines", "h100", "--out", str(tmp_path / "p")]) == 2
    assert "SLO" in capsys.readouterr().err


def test_draws_are_spread_as_their_prior_is(found):
    rows = [r for r in found["rows"] if r["kind"] == "simulated"]
    assert any(r["figures"]["tpot_ms_p95"]["low"] < r["figures"]["tpot_ms_p95"]["high"] for r in rows)
    assert np.isfinite([r["figures"]["cost"]["value"] for r in rows]).all()


def test_the_page_says_ties_growth_and_what_is_open(found):
    other = next(r["name"] for r in found["rows"] if r["shape"] != found["rows"][0]["shape"])
    tied = {**found, "ties": [other], "rows": [{**r, "tie": r["name"] == other} for r in found["rows"]]}
    page = plan_html.render(tied)
    assert "It is not surely cheaper than" in page
    assert "With the growth of 50 %, " in page
    assert "Not, or not wholly, answered" in page
    nothing = {**found, "first": None, "rows": [], "ties": [], "headline": "No candidate keeps the SLO at this rate"}
    assert "No candidate keeps the SLO" in plan_html.render(nothing)
