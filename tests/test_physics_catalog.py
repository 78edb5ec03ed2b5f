"""Models and machines by name: published totals, aliases, refusals that name the nearest, and what a user adds."""

import itertools
import json

import numpy as np
import pytest

from whywait.errors import UsageError
from whywait.physics.arch import Arch, arch_of
from whywait.physics.catalog import models
from whywait.physics.efficiency import Efficiency
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import MACHINES, SOURCES, machine
from whywait.physics.memory import kv_bytes_per_token, state_bytes, weights_bytes, window_kv_bytes
from whywait.physics.prices import shipped
from whywait.physics.step import StepWork, step_parts, work

#: Parameters as the makers state them (billions), without a vision part or drafting layers.
PUBLISHED = {
    "Llama-2-7b": 6.74, "Llama-2-13b": 13.0, "Llama-2-70b": 69.0, "Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.6,
    "Llama-3.1-405B": 405.9, "Mistral-7B-v0.1": 7.24, "Mixtral-8x7B-v0.1": 46.7, "Qwen2.5-7B": 7.62,
    "Qwen2.5-72B": 72.7, "Qwen3-8B": 8.2, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.0,
    "Qwen3.5-397B-A17B": 397.0, "DeepSeek-V3": 671.0, "Kimi-K2": 1026.0, "GLM-4.5": 353.0, "GLM-4.5-Air": 107.0,
    "GLM-5": 744.0, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "MiniMax-M2.5": 229.0, "gpt-j-6b": 6.05,
    "gemma-3-27b": 27.0,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_weights_of_a_catalogued_model_add_up_to_what_its_maker_states(name, billions):
    assert weights_bytes(arch_of(name), Precision(), Layout()) / 2e9 == pytest.approx(billions, rel=0.012)


def test_every_model_is_checked_and_says_where_it_is_from():
    assert {a.name.rsplit("/", 1)[-1] for a in models().values()} == set(PUBLISHED)
    assert all("http" in a.source and "read 20" in a.source for a in models().values())


@pytest.mark.parametrize(
    ("said", "name"),
    [("nvidia/Llama-3.1-8B-Instruct-FP8", "meta-llama/Llama-3.1-8B"), ("deepseek-r1-0528", "deepseek-ai/DeepSeek-V3"),
     ("QWEN/QWEN3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B"), ("zhipuai/GLM-5", "zai-org/GLM-5"),
     ("Meta-Llama-3-70B-Instruct", "meta-llama/Llama-3.1-70B"), ("Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
     ("gpt-oss-120b", "openai/gpt-oss-120b"), ("nvidia/Kimi-K2.5-NVFP4", "moonshotai/Kimi-K2")],
)  # fmt: skip
def test_a_model_answers_to_its_other_names(said, name):
    assert arch_of(said).name == name


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(UsageError) as refused:
        arch_of("meta-llama/Llama-3.1-80B")
    assert "Llama-3.1-8" in refused.value.hint or "Llama-3.1-70B" in refused.value.hint
    with pytest.raises(UsageError):
        arch_of("")


@pytest.mark.parametrize(
    ("name", "kib"),
    [("Llama-3.1-70B", 320.0), ("Llama-3.1-8B", 128.0), ("Llama-2-7b", 512.0), ("DeepSeek-V3", 68.625),
     ("Qwen3-32B", 256.0), ("gpt-oss-120b", 72.0)],
)  # fmt: skip
def test_kv_per_token_by_hand(name, kib):
    assert kv_bytes_per_token(arch_of(name))[1] == kib * 1024


def test_kv_is_split_repeated_or_kept_whole():
    llama, deepseek = arch_of("Llama-3.1-70B"), arch_of("DeepSeek-V3")
    whole = kv_bytes_per_token(llama)[1]
    assert kv_bytes_per_token(llama, "bf16", Layout(4)) == (whole / 4, whole)
    assert kv_bytes_per_token(llama, "fp8", Layout(4))[0] == whole / 8
    assert kv_bytes_per_token(llama, "bf16", Layout(16)) == (whole / 8, whole * 2)  # 8 heads on 16 devices: each twice
    assert kv_bytes_per_token(llama, "bf16", Layout(1, 2))[0] == whole / 2
    assert (
        kv_bytes_per_token(deepseek, "bf16", Layout(8))[0] == kv_bytes_per_token(deepseek)[0]
    )  # latents are not split
    gemma = arch_of("gemma-3-27b")
    assert window_kv_bytes(gemma) == kv_bytes_per_token(gemma)[0] * 52 / 62
    assert window_kv_bytes(llama) == 0 == state_bytes(llama)
    hybrid = arch_of("Qwen3.5-397B-A17B")
    assert kv_bytes_per_token(hybrid)[1] == 2 * 2 * 256 * 2 * 15  # KV in one layer of four
    assert state_bytes(hybrid) == 4 * 64 * 128 * 128 * 45


def test_weights_by_precision_and_layout():
    llama = arch_of("Llama-3.1-70B")
    table = 2 * 128256 * 8192
    bf16 = weights_bytes(llama, Precision(), Layout())
    assert weights_bytes(llama, Precision("fp8", "fp8", "fp8"), Layout()) == (bf16 - 2 * table) / 2 + 2 * table
    assert weights_bytes(llama, Precision(), Layout(8)) == pytest.approx(bf16 / 8, rel=1e-6)
    assert weights_bytes(llama, Precision("q4_0"), Layout()) == pytest.approx(bf16 * 18 / 64, rel=1e-9)
    oss = weights_bytes(arch_of("gpt-oss-120b"), Precision(experts="mxfp4"), Layout())
    assert oss == pytest.approx(65e9, rel=0.03)  # the published files: 65 GB
    mixtral = arch_of("Mixtral-8x7B")
    assert weights_bytes(mixtral, Precision(), Layout(8, 1, 1, 8)) == pytest.approx(
        weights_bytes(mixtral, Precision(), Layout(8)), rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [("Llama-3.1-70B", Layout(3), "tp=2"), ("Llama-3.1-8B", Layout(ep=2), "ep"),
     ("Mixtral-8x7B", Layout(4, 1, 1, 3), "ep=2"),
     ("Llama-3.1-8B", Layout(pp=40), "pp=32"), ("Llama-3.1-8B", Layout(0), "tp=8")],
)  # fmt: skip
def test_an_impossible_layout_is_refused_with_the_nearest(name, layout, says):
    with pytest.raises(UsageError) as refused:
        weights_bytes(arch_of(name), Precision(), layout)
    assert says in refused.value.hint


def test_a_folder_with_a_configuration_is_the_catalogued_model(tmp_path):
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "intermediate_size": 18432, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, known = arch_of(str(tmp_path)), arch_of("DeepSeek-V3")
    assert {k: v for k, v in vars(found).items() if k not in ("name", "source")} == {
        k: v for k, v in vars(known).items() if k not in ("name", "source")
    }


def test_hybrid_and_windowed_configurations(tmp_path):
    hybrid = {"text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "attn_output_gate": True,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_num_value_heads": 64, "linear_value_head_dim": 128,
        "mtp_num_hidden_layers": 1}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    found, known = arch_of(str(tmp_path)), arch_of("Qwen3.5-397B-A17B")
    for field in ("linear_layers", "linear_in", "linear_out", "linear_state", "query_gate", "experts", "mtp_layers"):
        assert getattr(found, field) == getattr(known, field)
    gemma = {"text_config": {"hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "head_dim": 128,
                             "num_key_value_heads": 16, "vocab_size": 262208, "intermediate_size": 21504,
                             "sliding_window": 1024, "sliding_window_pattern": 6}, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    found = arch_of(str(tmp_path))
    assert (found.window, found.window_layers, found.tied) == (1024, 52, True)


def test_a_configuration_without_its_essentials_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 12}')
    with pytest.raises(UsageError):
        arch_of(str(tmp_path))
    (tmp_path / "bad.gguf").write_bytes(b"GGUFxxxx")
    with pytest.raises(UsageError):
        arch_of(str(tmp_path / "bad.gguf"))


def test_a_users_own_model_and_machine(tmp_path):
    model, gpu = tmp_path / "model.toml", tmp_path / "gpu.toml"
    model.write_text(
        '["mine"]\nhidden = 64\nlayers = 2\nheads = 4\nkv_heads = 2\nhead_size = 16\nvocab = 100\ninter = 128\n'
    )
    assert arch_of(str(model)) == Arch("mine", 64, 2, 4, 2, 16, 100, 128, source="given by the user")
    model.write_text('["mine"]\nhidden = 64\nspeed = 2\n')
    with pytest.raises(UsageError, match="speed"):
        arch_of(str(model))
    gpu.write_text('["Card 9"]\nmemory_gb = 10\nread_tbs = 2.0\nflops_tf = { bf16 = 100 }\n')
    found = machine(str(gpu))
    assert (found.name, found.read_bytes_per_s, found.flops["bf16"], found.price_usd_h) == ("Card 9", 2e12, 1e14, None)
    gpu.write_text('["Card 9"]\nread_tbs = 2.0\n')
    with pytest.raises(UsageError, match="Card 9"):
        machine(str(gpu))
    gpu.write_text("= no toml")
    with pytest.raises(UsageError):
        machine(str(gpu))


def test_machines_by_the_names_that_users_type():
    said = ("h100", "H200", "mi300x", "b200_sxm", "rtx 4090", "NVIDIA H100 80GB HBM3", "cpu")
    assert [machine(n).name for n in said] == [
        "H100 SXM", "H200 SXM", "MI300X", "B200", "RTX 4090", "H100 SXM", "CPU (Core i9-13900K, DDR5)",
    ]  # fmt: skip
    with pytest.raises(UsageError) as refused:
        machine("h300")
    assert "h200" in refused.value.hint


def test_every_machine_is_whole():
    for m in MACHINES:
        assert m.source
        assert m.memory_bytes > 8e9
        assert m.also
        assert m.fit
        assert m.price_usd_h is None or 0 < m.price_usd_h[0] <= m.price_usd_h[1]
        assert machine(m.also[0]) is m


def test_a_device_is_what_an_engine_sees_as_one():
    """Two dies that ROCm shows as two are two; two that CUDA shows as one are one."""
    die, whole = machine("mi250"), {"tf": 362.0, "tbs": 3.277, "gb": 128, "w": 560}
    assert die.flops["bf16"] == pytest.approx(whole["tf"] * 1e12 / 2)
    assert die.read_bytes_per_s == pytest.approx(whole["tbs"] * 1e12 / 2, rel=0.01)
    assert die.tdp_w == whole["w"] / 2
    assert machine("a100").memory_bytes / die.memory_bytes == pytest.approx(80 / 64)
    assert die.node == 8
    assert machine("mi250x").flops["bf16"] > die.flops["bf16"]
    assert machine("b200").memory_bytes / die.memory_bytes == pytest.approx(180 / 64)


def test_every_figure_of_a_machine_has_a_source_and_a_date():
    book = shipped()
    for m in MACHINES:
        assert all(s.strip() in SOURCES for s in m.source.split(","))
        offers = [o for o in book if m.name in o.machines]
        assert all(o.date.startswith("20") and o.source for o in offers)
        asked = [o.per_device_hour for o in offers]
        assert m.price_usd_h == ((min(asked), max(asked)) if asked else None)


def test_faster_data_sheets_rank_ahead_within_a_family():
    """One stream (bandwidth) and a long prompt (flops), 8 billion parameters in 16 bits."""
    families = [("a100-40gb", "a100", "h100", "h200", "b200"), ("l4", "l40s", "h100-pcie"),
                ("mi250", "mi300x", "mi325x", "mi355x")]  # fmt: skip
    for family in families:
        for seqs, prompt in ((1, 0), (0, 4096)):
            took = [step_s(machine(m), seqs, prompt) for m in family]
            assert all(later < before * 1.02 for before, later in itertools.pairwise(took)), (family, prompt, took)


def step_s(gpu, seqs, prompt):
    parts = step_parts(arch_of("llama-3.1-8b"), gpu, Precision(), Layout(), Efficiency())
    row = (seqs + prompt, seqs, 1000.0 * seqs, 0, float(prompt > 0), prompt**2 / 2, 0)
    return float(work(parts, StepWork(*(np.array([float(v)]) for v in row))).sum())
