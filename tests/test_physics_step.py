"""The step by its operations: exact small cases by hand, what must grow, parts that add up, priors."""

from dataclasses import fields, replace

import numpy as np
import pytest

from whywait.physics.arch import arch_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import fit_of, prior_of
from whywait.physics.hats import evaluate
from whywait.physics.kernels import COMPUTE, HOST, KV, LINK, RESOURCES, WEIGHTS, Kernels
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import MACHINES, machine
from whywait.physics.ops import Product, operations
from whywait.physics.step import StepWork, bound_by, seconds, step_cost, step_parts, total, work

FP8 = Precision("fp8", "fp8", "fp8")
LLAMA, H100 = arch_of("Llama-3.1-70B"), machine("h100")


def steps(*rows):
    """Rows of (tokens, decode seqs, context, window context, prefill seqs, pairs, window pairs)."""
    return StepWork(*(np.array(c, dtype=float) for c in zip(*rows, strict=True)))


def decode(seqs, context, window=0):
    return (seqs, seqs, seqs * context, seqs * min(context, window), 0, 0, 0)


def test_products_of_a_dense_model_by_hand():
    ops = operations(LLAMA, FP8, Layout(4))
    shapes = {p.name: (p.n, p.k, p.times) for p in ops.products}
    assert shapes == {"qkv": ((64 + 16) * 128 // 4, 8192, 80), "attention out": (8192, 64 * 128 // 4, 80),
                      "gate up": (2 * 28672 // 4, 8192, 80), "down": (8192, 28672 // 4, 80),
                      "output": (128256 // 4, 8192, 1)}  # fmt: skip
    assert [(c.kind, c.devices, c.bytes, c.times) for c in ops.collectives] == [("all-reduce", 4, 2 * 8192, 161)]
    (a,) = ops.attention
    assert (a.heads, a.kv_heads, a.kv_bytes, a.flops) == (16, 2, 2 * 2 * 128, 4 * 16 * 128)


def test_flops_of_a_step_are_two_per_active_weight_and_token():
    for name, active in (
        ("Llama-3.1-70B", 69.5e9),
        ("DeepSeek-V3", 36.6e9),
        ("gpt-oss-120b", 5.13e9),
        ("Qwen3-30B-A3B", 3.0e9),
    ):
        ops = operations(arch_of(name), Precision(), Layout())
        flops = sum(2 * p.n * p.k * p.times for p in ops.products)
        flops += sum(2 * 3 * e.hidden * e.inter * e.chosen * e.times for e in ops.experts)
        assert flops / 2 == pytest.approx(active, rel=0.03)


def test_experts_latents_windows_and_hybrids_are_their_own_operations():
    deepseek = operations(arch_of("DeepSeek-V3"), FP8, Layout(8, 1, 1, 8))
    (x,) = deepseek.experts
    assert (x.local, x.inter, x.times) == (32, 2048, 58)
    (x,) = operations(arch_of("DeepSeek-V3"), FP8, Layout(8)).experts
    assert (x.local, x.inter) == (256, 256)
    assert [(a.kind, a.kv_bytes, a.heads) for a in deepseek.attention] == [("latent", 576.0, 16)]
    assert [a.kind for a in operations(arch_of("GLM-5"), FP8, Layout(8)).attention] == ["sparse", "index"]
    assert [(a.kind, a.times) for a in operations(arch_of("gpt-oss-120b"), FP8, Layout()).attention] == [
        ("full", 18), ("window", 18)]  # fmt: skip
    hybrid = operations(arch_of("Qwen3.5-397B-A17B"), Precision(), Layout())
    assert hybrid.state_bytes == 2 * 4 * 64 * 128 * 128 * 45
    assert {p.name: p.times for p in hybrid.products}["linear in"] == 45
    wide = operations(arch_of("DeepSeek-V3"), FP8, Layout(1, 1, 8, 8))
    assert {c.kind for c in wide.collectives} == {"all-to-all"}
    assert [c.kind for c in operations(LLAMA, FP8, Layout(1, 4)).collectives] == ["send"]


def test_a_step_is_above_the_data_sheet_and_not_far():
    cost = step_cost(LLAMA, H100, FP8, Layout(2), Efficiency())
    one = seconds(cost, steps(decode(1, 1000)))[0]
    least = (69.5e9 / 2 + 128256 * 8192) / 3.35e12  # its weights once from memory, the output table in 16 bits
    assert least < one < 2 * least
    prompt = seconds(cost, steps((8192, 0, 0, 0, 1, 8192 * 8193 / 2, 0)))[0]
    least = 2 * 69.5e9 * 8192 / 2 / 1979e12
    assert least < prompt < 4 * least


@pytest.mark.parametrize("family", ["vllm", "sglang", "trtllm", "llama.cpp"])
def test_more_work_takes_longer(family):
    cost = step_cost(LLAMA, H100, FP8, Layout(4), Efficiency(family=family))
    grown = seconds(cost, steps(*(decode(b, 2000) for b in (1, 2, 8, 32, 128, 512))))
    assert np.all(np.diff(grown) > 0)
    assert np.all(np.diff(seconds(cost, steps(*(decode(32, c) for c in (1, 100, 5000, 100000))))) > 0)
    rising = [(t + 16, 16, 16000, 0, 1, t * t / 2, 0) for t in (16, 256, 1024, 4096, 16384, 200000)]
    assert np.all(np.diff(seconds(cost, steps(*rising))) > 0)


def test_smaller_numbers_and_more_devices_are_faster_where_it_counts():
    def one(precision, layout, gpu="h100"):
        return seconds(step_cost(LLAMA, machine(gpu), precision, layout, Efficiency()), steps(decode(16, 2000)))[0]

    assert one(FP8, Layout(4)) < one(Precision(), Layout(4))
    assert one(FP8, Layout(8)) < one(FP8, Layout(4)) < one(FP8, Layout(2))
    assert one(FP8, Layout(4), "h200") < one(FP8, Layout(4))
    assert one(Precision("nvfp4", "fp8", "nvfp4"), Layout(1), "b200") < one(FP8, Layout(1), "b200")


def test_a_window_bounds_attention():
    arch = arch_of("gemma-3-27b")
    cost = step_cost(arch, H100, Precision(), Layout(2), Efficiency())
    assert cost.window == 1024
    assert cost.window_s == pytest.approx(cost.kv_s * 52 / 10)
    full = step_cost(replace(arch, window=0, window_layers=0), H100, Precision(), Layout(2), Efficiency())
    assert full.window_s == 0 == full.window
    assert full.kv_s == pytest.approx(cost.kv_s * 62 / 10)


CASES = [("Llama-3.1-70B", "h100", FP8, Layout(4)),
         ("DeepSeek-V3", "b200", Precision("nvfp4", "fp8", "nvfp4"), Layout(8)),
         ("gpt-oss-120b", "mi300x", Precision(experts="mxfp4"), Layout(2)),
         ("Qwen3.5-397B-A17B", "gb200", FP8, Layout(4, 2)),
         ("DeepSeek-V3", "h200", Precision("fp8_block", "fp8", "fp8_block"), Layout(1, 1, 16, 16)),
         ("GLM-5", "h200", FP8, Layout(8, 1, 1, 8)), ("Mistral-7B", "cpu", Precision("q4_0"), Layout())]  # fmt: skip


@pytest.mark.parametrize(("name", "gpu", "precision", "layout"), CASES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_parts_add_up_to_the_step(name, gpu, precision, layout, tokens):
    arch, device = arch_of(name), machine(gpu)
    parts = step_parts(arch, device, precision, layout, Efficiency(step=1.3, link=0.7), tokens)
    cost = total(parts)
    rows = steps(
        decode(1, 10), decode(64, 3000, 1000), (4128, 32, 64000, 9000, 2, 8e6, 3e6), (300000, 0, 0, 0, 4, 9e9, 9e8)
    )
    found = work(parts, rows)
    assert np.all(found >= 0)
    assert np.allclose(found.sum(axis=0), seconds(cost, rows), rtol=1e-12)
    assert step_cost(arch, device, precision, layout, Efficiency(step=1.3, link=0.7), tokens).step_s == cost.step_s
    assert np.all(np.diff(cost.linear_s) > -1e-4 * cost.linear_s[1:])
    assert set(bound_by(found)) <= set(RESOURCES)
    assert found[LINK].any() == (layout.devices > 1)


def test_the_host_fills_up_to_its_floor():
    parts = step_parts(LLAMA, H100, FP8, Layout(8), Efficiency())._replace(floor_s=0.05, floor_seq_s=0.001)
    found = work(parts, steps(decode(8, 100)))
    assert found.sum() == pytest.approx(0.058) == seconds(total(parts), steps(decode(8, 100)))[0]
    assert bound_by(found) == ["host"]


def test_each_efficiency_moves_its_own_part():
    rows = steps((4160, 64, 128000, 0, 1, 8e6, 0))
    base = work(step_parts(LLAMA, H100, FP8, Layout(4), Efficiency()), rows)
    of = {
        "kv": KV,
        "link": LINK,
        "step": HOST,
        "prefill_step": HOST,
        "sequence": HOST,
        "pairs": COMPUTE,
        "compute": COMPUTE,
    }
    for name, resource in of.items():
        moved = work(step_parts(LLAMA, H100, FP8, Layout(4), replace(Efficiency(), **{name: 2.0})), rows)
        assert moved[resource, 0] > base[resource, 0]
    kv = work(step_parts(LLAMA, H100, FP8, Layout(4), Efficiency(kv=2.0)), rows)
    assert kv[KV] == pytest.approx(2 * base[KV])
    assert kv[WEIGHTS] == pytest.approx(base[WEIGHTS])


def test_tokens_of_one_sequence_read_its_kv_once():
    plain, drafted = (step_cost(LLAMA, H100, FP8, Layout(4), Efficiency(), n) for n in (1, 4))
    assert plain.kv_s <= drafted.kv_s < 2 * plain.kv_s


def test_a_pipeline_works_on_its_parts_at_once():
    one, two = (step_cost(LLAMA, H100, FP8, Layout(1, pp), Efficiency()) for pp in (1, 2))
    assert two.kv_s == one.kv_s / 2
    big = steps(decode(512, 1000))
    assert seconds(two, big)[0] < seconds(one, big)[0]
    assert seconds(two, steps(decode(1, 10)))[0] >= seconds(one, steps(decode(1, 10)))[0] * 0.99


def test_a_machine_that_cannot_multiply_a_type_widens_it():
    product = Product("x", 8192, 8192, 1, "nvfp4", "nvfp4")
    m = np.array([8192.0])
    hopper = Kernels(H100, Efficiency(), fit_of(H100, "vllm")).product(product, m)
    wide = Kernels(H100, Efficiency(), fit_of(H100, "vllm")).product(
        product._replace(weights="bf16", compute="bf16"), m
    )
    assert hopper.sum() == pytest.approx(wide.sum(), rel=0.25)


def test_hats_are_exact_at_knots_and_flat_outside():
    knots = ((1.0, 10.0, 100.0), (1.0, 4.0))
    values = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    at = evaluate(values, (np.array([1.0, 10.0, 100.0, 1e6, 10**0.5]), np.array([1.0, 4.0, 1.0, 1.0, 2.0])), knots)
    assert at == pytest.approx([0.0, 3.0, 4.0, 4.0, 1.5])


def test_every_machine_and_family_has_a_cost_and_a_spread():
    known = {f.name for f in fields(Efficiency)}
    for m in MACHINES:
        cost = step_cost(arch_of("Llama-3.1-8B"), m, Precision(), Layout(), Efficiency())
        assert np.isfinite(cost.linear_s).all()
        assert cost.linear_s[0] > 2 * 7e9 / m.read_bytes_per_s * 0.6
        prior = prior_of(m)
        assert set(prior.sd) < known
        assert all(0 < v < 1.5 for v in prior.sd.values())
    measured, standing, sheet = (prior_of(machine(n)) for n in ("h100", "b300", "mi300x"))
    assert measured.sd["weights"] < standing.sd["weights"] < sheet.sd["weights"]
    assert "measured" in measured.basis
    assert "standing" in standing.basis
    assert "data sheet" in sheet.basis


def test_a_cpu_does_what_was_measured_on_it():
    """Llama-2 7B Q4_0 by llama.cpp on a Core i9-13900K: 54.7 ms a token, 18.1 ms a token of a prompt of 512
    (https://github.com/ggml-org/llama.cpp/issues/34)."""
    cost = step_cost(arch_of("Llama-2-7b"), machine("cpu"), Precision("q4_0"), Layout(), Efficiency(family="llama.cpp"))
    assert seconds(cost, steps(decode(1, 64)))[0] == pytest.approx(0.0547, rel=0.1)
    assert seconds(cost, steps((512, 0, 0, 0, 1, 512 * 256, 0)))[0] / 512 == pytest.approx(0.0181, rel=0.15)
