"""What a user of ``simulate`` says and is told: names, layouts, loads, links, and one figure in both places."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from whywait import cli, simulating
from whywait.core.lengths import Lengths
from whywait.core.schedule import RequestClass, Workload
from whywait.errors import UsageError
from whywait.load.recipe import Load
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import fit_of
from whywait.physics.kernels import LINK, Kernels
from whywait.physics.machines import find, machine
from whywait.physics.ops import Collective
from whywait.sim.service import window


@pytest.mark.parametrize("name", ["h1000", "h2000", "b2000", "mi3000x", "NVIDIA H1000", "l40s,h100"])
def test_another_number_is_another_machine(name):
    assert find(name) is None or "," in name
    with pytest.raises(UsageError) as refused:
        machine(name)
    assert "," in name or refused.value.hint


def test_the_nearest_name_is_told_and_forms_of_a_device_are_known():
    with pytest.raises(UsageError) as refused:
        machine("h1000")
    assert "nearest: h100" in str(refused.value.hint)
    for name, meant in (("NVIDIA H100 80GB HBM3", "H100 SXM"), ("mi300xhf", "MI300X"),
                        ("AMD Instinct MI300X", "MI300X"),
                        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM")):  # fmt: skip
        assert machine(name).name == meant


@pytest.mark.parametrize(("name", "weights"), [
    ("qwen3-32b", "bf16"), ("qwen3-32b-fp8", "fp8"), ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "fp8"),
    ("Qwen/Qwen3-32B-AWQ", "int4"), ("deepseek-v3", "fp8_block"),
])  # fmt: skip
def test_the_end_of_a_models_name_tells_its_weights(name, weights):
    d = simulating.deployment_of("h200", name, layout="tp=8" if "deepseek" in name else "")
    assert d.precision.weights == weights
    assert ("as the name" in d.model.source) == ("-fp8" in name.lower() or "awq" in name.lower())
    assert simulating.deployment_of("h200", "qwen3-32b-fp8", precision="bf16").precision.weights == "bf16"


def _reduce(name: str, n: int, size: np.ndarray, family: str = "vllm") -> np.ndarray:
    m = machine(name)
    kernels = Kernels(m, Efficiency(family=family), fit_of(m, family))
    return kernels.collective(Collective("all-reduce", 1.0, n, 1), size)[LINK]


@pytest.mark.parametrize("family", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", ["l40s", "l4", "rtx-pro-6000", "rtx4090", "a100-pcie", "h100-pcie"])
def test_over_pcie_a_reduction_takes_the_wires_time_and_no_order_more(name, family):
    size = np.array([8e6, 3.3e7, 1.3e8, 1e9, 4e9])
    for n in (2, 4, 8):
        floor = 2 * (n - 1) / n * size / machine(name).link_bytes_per_s
        found = _reduce(name, n, size, family)
        assert (found >= floor).all()
        assert (found < 8 * floor).all()
        assert np.all(np.diff(found) > 0)


def test_twice_the_wire_is_half_the_time_and_nvlink_stays_as_it_was_measured():
    big = np.array([3e8])
    assert _reduce("rtx-pro-6000", 4, big) == pytest.approx(_reduce("l40s", 4, big) / 2, rel=0.01)
    assert _reduce("a100-pcie", 4, big) > 5 * _reduce("a100", 4, big)
    # Points of the tables themselves: 3e7 bytes over four devices (µs).
    for name, told in (("h100", 304.9), ("h200", 292.5), ("b200", 173.5), ("gb300", 173.5)):
        assert _reduce(name, 4, np.array([3e7])) == pytest.approx(told * 1e-6)


def test_readings_are_named_by_the_link():
    for name, meter in (("h100", "nvlink_tx_bytes_per_s"), ("l40s", "pcie_tx_bytes_per_s")):
        d = simulating.deployment_of(name, "llama-3.1-8b", layout="tp=2")
        found = simulating.run_point(d, *_plan(Load("concurrency", 2, 8)))
        from whywait.sim.loads import Options
        from whywait.sim.result import Point, run_of

        run = run_of(d, [Point("concurrency", 2, *found)], Options())
        assert {n for n in set(run.readings["name"]) if n.endswith("tx_bytes_per_s")} == {meter}


def _plan(load: Load):
    from whywait.load.recipe import schedule_of

    return schedule_of(load, Workload(), 0, 0)[0], load.mode, load.target


def _workload(prompt: str, answer: str) -> Workload:
    return Workload((RequestClass(prompt_tokens=Lengths.parse(prompt), output_tokens=Lengths.parse(answer)),))


def _plan_of(load: Load, prompt: str = "lognormal(200,0.5)", answer: str = "8") -> simulating.Plan:
    d = simulating.deployment_of("h100", "llama-3.1-8b")
    return simulating.Plan(d, _workload(prompt, answer), (load,), draws=2, jobs=1)


def test_a_rate_is_simulated_for_a_minute_unless_somebody_says_otherwise():
    for rate in (2.0, 30.0):
        bounded, point, _ = simulating._central(_plan_of(Load("rate", rate)), Load("rate", rate), 0)
        assert bounded.requests == max(simulating.ENOUGH, 60 * rate)
        assert window(point.times)[2]
        assert point.prepared.schedule.due_ns.max() / 1e9 > 50
    said = Load("rate", 30.0, 90)
    assert simulating._central(_plan_of(said), said, 0)[0].requests == 90


def test_a_rate_without_a_steady_window_is_simulated_for_longer(monkeypatch):
    asked: list[int] = []
    real = simulating.run_point

    def counted(d, schedule, *rest, **options):
        asked.append(len(schedule))
        return real(d, schedule, *rest, **options)

    monkeypatch.setattr(simulating, "run_point", counted)
    monkeypatch.setattr(simulating, "ENOUGH", 20)
    monkeypatch.setattr(simulating, "RATE_S", 1.0)
    load = Load("rate", 5.0)
    simulating._central(_plan_of(load, answer="400"), load, 0)
    assert asked == [20, 40, 80][: len(asked)]
    assert len(asked) > 1


def test_the_layout_has_room_for_the_load():
    d = simulating.deployment_of("h100", "llama-3.1-70b", count=4)
    assert (d.layout.tp, d.replicas) == (2, 2)
    w = _workload("1000", "200")
    few, why = simulating.laid_out(d, w, [Load("concurrency", 8)])
    assert few.layout.tp == 2
    assert "tp=2, replicas=2" in why
    many, why = simulating.laid_out(d, w, [Load("concurrency", 8), Load("concurrency", 128)])
    assert (many.layout.tp, many.replicas) == (4, 1)
    assert "tokens of KV" in why
    assert simulating.laid_out(d, w, [Load("rate", 1.0)])[0].layout.tp == 2
    assert simulating.laid_out(d, w, [Load("rate", 12.0)])[0].layout.tp == 4
    none, why = simulating.laid_out(d, w, [Load("concurrency", 1000)])
    assert none.layout.tp == 4
    assert "no tp has room" in why


def test_simulate_says_load_space_doubts_and_the_figures_of_show(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["simulate", "--machine", "l40s", "--model", "llama-3.1-8b", "--precision", "fp8", "--count", "2",
            "--concurrency", "8", "--requests", "60", "--draws", "2", "--jobs", "1", "--out", "run"]  # fmt: skip
    assert cli.main(argv) == 0
    told = " ".join(capsys.readouterr().out.split())
    for words in ("load: closed loop, prompts of 128 tokens, answers of 64; 60 requests a point", "KV space:",
                  "layout tp=1, replicas=2", "all requests are of the same length",
                  "no measured service was compared on this machine"):  # fmt: skip
        assert words in told
    assert cli.main(["show", "run", "--html", "r.html"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    service = "meta-llama/Llama-3.1-8B (fp8) on 2 × L40S (replicas=2), vllm"
    assert f"simulated: {service}" in shown
    page = (tmp_path / "r.html").read_text("utf-8")
    assert page.index("SIMULATED: made by a model") < page.index(service) < page.index("<h1")


def test_a_point_has_one_figure_inside_its_interval(tmp_path):
    plan = dataclasses.replace(_plan_of(Load("concurrency", 8, 60), "128", "64"), out=str(tmp_path / "run"))
    found = simulating.simulate(plan)
    figures, shown = found.points[0]["figures"], found.result.summary["points"][0]
    for name in ("output_tokens_per_s", "requests_per_s"):
        assert figures[name]["value"] == shown[name]
        assert figures[name]["low"] <= shown[name] <= figures[name]["high"]
    assert figures["ttft_ms_p50"]["value"] == shown["ttft_ms"]["p50"]
