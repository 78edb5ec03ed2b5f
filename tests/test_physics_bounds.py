"""No step beats the data sheet, none gets shorter when tokens are added, and what was measured is left as it is."""

import numpy as np
import pytest

from whywait import simulating
from whywait.errors import UsageError
from whywait.physics import machines, step
from whywait.physics.arch import arch_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.layout import Layout, Precision
from whywait.physics.memory import kv_bytes_per_token, weights_bytes
from whywait.physics.step import StepWork, seconds, step_cost
from whywait.sim import techniques

CPU = "CPU (Core i9-13900K, DDR5)"


def cost(machine, model, precision=None, layout=Layout(), efficiency=Efficiency()):  # noqa: B008
    device, arch = machines.machine(machine), arch_of(model)
    return step_cost(arch, device, simulating.precision_of(arch, device, precision), layout, efficiency)


def one_sequence(of):
    return float(seconds(of, StepWork(*(np.array([x]) for x in (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0))))[0])


@pytest.mark.parametrize(
    ("machine", "model", "precision", "layout"),
    [(CPU, "llama-2-7b", None, Layout()), (CPU, "qwen2.5-72b", "int4", Layout(tp=2)),
     ("l4", "gpt-j-6b", "fp8", Layout(tp=4)), ("l4", "llama-3.1-8b", "fp8", Layout(tp=2)),
     ("l40s", "gpt-j-6b", "fp8", Layout(tp=4)), ("h200", "llama-3.1-70b", "fp8", Layout(tp=2))],
)  # fmt: skip
@pytest.mark.parametrize("family", ["vllm", "trtllm"])
def test_a_step_reads_its_weights_no_faster_than_the_data_sheet(machine, model, precision, layout, family):
    device, arch = machines.machine(machine), arch_of(model)
    found = cost(machine, model, precision, layout, Efficiency(family=family))
    table = 0.0 if arch.tied else arch.vocab * arch.hidden * 2 / layout.tp  # embeddings: one row is read
    read = weights_bytes(arch, simulating.precision_of(arch, device, precision), layout) - table
    assert one_sequence(found) >= read / device.read_bytes_per_s


@pytest.mark.parametrize("machine", ["a100", "a100-pcie", "h100", "l4"])
@pytest.mark.parametrize("family", ["vllm", "trtllm"])
def test_kv_is_read_no_faster_than_the_data_sheet(machine, family):
    found, arch = cost(machine, "qwen3-8b", efficiency=Efficiency(family=family)), arch_of("qwen3-8b")
    assert found.kv_s >= kv_bytes_per_token(arch)[0] / machines.machine(machine).read_bytes_per_s * (1 - 1e-12)


@pytest.mark.parametrize("machine", ["l4", "a100", "h100", CPU])
def test_products_are_multiplied_no_faster_than_the_data_sheet(machine):
    arch, found = arch_of("llama-3.1-8b"), cost(machine, "llama-3.1-8b", "bf16")
    table = 2 * arch.vocab * arch.hidden
    flops = 2.0 * (weights_bytes(arch, Precision(), Layout()) / 2 - table)
    assert np.all(found.linear_s >= flops * found.grid / machines.machine(machine).flops["bf16"])


def test_pairs_of_tokens_are_multiplied_no_faster_than_the_data_sheet():
    arch = arch_of("llama-3.1-8b")
    flops = 4.0 * arch.heads * arch.head_size * arch.layers
    assert cost(CPU, "llama-3.1-8b").pair_s >= flops / machines.machine(CPU).flops["bf16"] * (1 - 1e-9)


def test_a_faster_memory_moves_the_bound_with_it():
    slow, fast = cost(CPU, "llama-2-7b"), cost(CPU, "llama-2-7b", efficiency=Efficiency(weights=0.5, kv=0.5))
    assert one_sequence(fast) < 0.6 * one_sequence(slow)


@pytest.mark.parametrize(
    ("machine", "model", "precision", "layout", "family"),
    [("h100", "gpt-oss-20b", "int4", Layout(), "trtllm"), ("h100", "gpt-oss-20b", "fp4", Layout(), "vllm"),
     ("l4", "mixtral-8x7b", "int4", Layout(dp=8), "trtllm"), ("b200", "gpt-oss-20b", None, Layout(dp=8, ep=8), "vllm"),
     ("a100", "qwen3.5-397b-a17b", None, Layout(tp=8, ep=8), "trtllm"),
     ("h200", "llama-3.1-70b", None, Layout(), "vllm")],
)  # fmt: skip
def test_tokens_added_to_a_step_never_shorten_it(machine, model, precision, layout, family):
    found = cost(machine, model, precision, layout, Efficiency(family=family))
    assert np.all(np.diff(found.linear_s) >= -1e-15)


def test_a_table_that_does_not_fall_is_left_as_it_is_and_one_that_does_is_moved_least():
    rises = np.vstack([np.arange(1.0, 6.0)] * 5)
    assert step._rising(rises) is rises
    falls = np.vstack([np.array([1.0, 4.0, 1.0, 8.0])] * 5)  # 5, 20, 5, 40: the two in the middle meet at 10
    found = step._rising(falls)
    assert found.sum(axis=0) == pytest.approx([5, 10, 10, 40])
    assert found[0] == pytest.approx(found.sum(axis=0) / 5)  # resources keep their shares


@pytest.mark.parametrize("machine", ["h100", "h200", "b200"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "deepseek-v3", "qwen3-235b-a22b"])
def test_measured_accelerators_do_not_feel_the_data_sheet(machine, model, monkeypatch):
    found = cost(machine, model, "fp8", Layout(tp=8))
    monkeypatch.setattr(step, "_least", lambda *_: np.zeros(len(step._GRID)))
    assert found.linear_s == pytest.approx(cost(machine, model, "fp8", Layout(tp=8)).linear_s, rel=1e-3)


@pytest.mark.parametrize("choice", ["fp8-weights", "int8-weights"])
def test_a_technique_does_not_widen_weights_that_are_narrower_yet(choice):
    plain = simulating.deployment_of("h100", "gpt-oss-20b")
    with pytest.raises(UsageError) as refused:
        techniques.apply(choice, plain)
    assert "mxfp4" in refused.value.message
    assert refused.value.exit_code == 2
    assert techniques.apply("int4-weights", plain).precision.weights == "int4"
    assert techniques.apply("bf16-weights", plain).precision.weights == "bf16"  # to be wide is what it is for
    assert techniques.apply(choice, simulating.deployment_of("h100", "gpt-oss-20b", precision="bf16"))


@pytest.mark.parametrize("machine", ["h100", "h200", "b200", "l40s", "a100"])
@pytest.mark.parametrize("family", ["vllm", "sglang", "trtllm"])
def test_kv_in_8_bits_is_read_no_slower_than_in_16(machine, family):
    e = Efficiency(family=family)
    narrow = cost(machine, "llama-3.1-8b", "weights=bf16,kv=fp8", efficiency=e)
    assert narrow.kv_s <= cost(machine, "llama-3.1-8b", "bf16", efficiency=e).kv_s


def test_another_familys_slow_kernel_for_8_bits_is_not_taken_over_but_its_own_is_kept():
    def ratio(family):
        e = Efficiency(family=family)
        narrow, wide = (
            cost("h100", "deepseek-v3", f"weights=fp8,kv={t}", Layout(tp=8), e).kv_s for t in ("fp8", "bf16")
        )
        return narrow / wide

    assert ratio("vllm") <= 1.0 + 1e-9
    assert ratio("trtllm") < 0.8
    assert ratio("sglang") > 2  # measured: SGLang 0.5.14 on Hopper


def test_devices_without_a_known_link_work_alone():
    alone = machines.accelerator_of("mine", {"read_tbs": 3, "memory_gb": 80, "flops_tf": {"bf16": 900}})
    arch = arch_of("llama-3.1-8b")
    assert np.isfinite(step_cost(arch, alone, Precision(), Layout(), Efficiency()).linear_s).all()
    with pytest.raises(UsageError) as refused:
        step_cost(arch, alone, Precision(), Layout(tp=2), Efficiency())
    assert "link_gbs" in refused.value.hint
