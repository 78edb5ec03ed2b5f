"""Models by their published sizes, machines by their names, a step by both."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait.physics.cost import COMPUTE, KV, WEIGHTS, Machine, calibrated, step_bytes, step_terms_s
from whywait.physics.machines import ACCELERATORS, SOURCES, find, machine_of
from whywait.physics.models import Shape, describe, from_config

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16"}  # fmt: skip
MIXTRAL = {**LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GPT2 = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "model_type": "gpt2",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(LLAMA_8B, 8.03, 8.03), (MIXTRAL, 46.7, 12.9), (DEEPSEEK_V3, 671.0, 37.5), (GPT2, 0.124, 0.124)],
)
def test_the_sizes_that_their_makers_publish(config, billions, active):
    shape = from_config(config)
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.01)
    working = shape.params - shape.expert * (1 - shape.expert_share)
    assert working / 1e9 == pytest.approx(active, rel=0.01)


def test_kv_bytes_of_a_token():
    assert from_config(LLAMA_8B).kv_bytes_per_token() == 128 * 1024  # the model's usual figure
    assert from_config(LLAMA_8B).kv_bytes_per_token("fp8") == 64 * 1024
    assert from_config(DEEPSEEK_V3).kv_bytes_per_token() == 61 * 576 * 2


def test_experts_are_read_as_the_batch_needs_them():
    shape = from_config(MIXTRAL)
    one, many = shape.read_bytes(1), shape.read_bytes(1000)
    assert one == pytest.approx(2 * (shape.params - shape.embedding - 0.75 * shape.expert))
    assert many == pytest.approx(2 * (shape.params - shape.embedding))
    assert from_config(LLAMA_8B).read_bytes(1) == from_config(LLAMA_8B).read_bytes(64)


def test_attention_counts_the_context_and_a_window_bounds_it():
    shape = from_config(LLAMA_8B)
    grown = shape.flops_per_token(1000) - shape.flops_per_token(0)
    assert grown == 4 * 32 * 4096 * 1000
    narrow = from_config({**LLAMA_8B, "sliding_window": 100})
    assert narrow.flops_per_token(1000) == narrow.flops_per_token(100)
    assert shape.prompt_flops(10, cached=1000) > shape.prompt_flops(10)


@pytest.mark.parametrize("config", [{}, {"hidden_size": 64}, {**LLAMA_8B, "vocab_size": None}])
def test_what_does_not_describe_a_model_is_none(config):
    assert from_config(config) is None


def _text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def _gguf(path, tied=True):
    meta = [("general.architecture", 8, _text("llama")), ("llama.block_count", 4, struct.pack("<I", 2)),
            ("llama.embedding_length", 4, struct.pack("<I", 64)),
            ("llama.attention.head_count", 4, struct.pack("<I", 4)),
            ("llama.attention.head_count_kv", 4, struct.pack("<I", 2)),
            ("tokenizer.tokens", 9, struct.pack("<IQ", 8, 3) + _text("a") + _text("bc") + _text("")),
            ("tokenizer.scores", 9, struct.pack("<IQ", 6, 5000) + bytes(20000))]  # fmt: skip
    tensors = [("token_embd.weight", (64, 100)), ("blk.0.attn_q.weight", (64, 64))]
    tensors += [] if tied else [("output.weight", (64, 100))]
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(meta))
    for name, kind, value in meta:
        out += _text(name) + struct.pack("<I", kind) + value
    for name, dims in tensors:
        out += (
            _text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 1, 0)
        )
    out += bytes(-len(out) % 32) + bytes(20992 if tied else 33792)
    path.write_bytes(out)


def test_a_gguf_file_tells_its_own_shape(tmp_path):
    _gguf(tmp_path / "m.gguf")
    shape = describe(tmp_path / "m.gguf")
    assert (shape.params, shape.weight_bytes, shape.embedding) == (64 * 100 + 64 * 64, 20992, 0)
    assert shape.kv_values == 2 * 2 * (16 + 16)
    assert shape.attention == 2 * 4 * 16
    _gguf(tmp_path / "u.gguf", tied=False)
    assert describe(tmp_path / "u.gguf").embedding == 6400


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + b"\xff" * 40, b"PK\x03\x04" + bytes(40)])
def test_what_is_no_model_is_none_and_no_error(tmp_path, data):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert describe(path) is None
    assert describe(tmp_path / "nothing") is None


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("g") / "x.gguf"
    for head in (b"", _text("k"), _text("k") + struct.pack("<I", 9), _text("k") + struct.pack("<I", 77)):
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 2, 2) + head + data)
        assert describe(path) is None


def test_a_folder_and_the_weight_files_beside_it(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    found = describe(tmp_path)
    assert found.how == "config.json"
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.truncate(200_000_000)
    assert describe(tmp_path).weight_bytes == 200_000_000
    cache = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    cache.mkdir(parents=True)
    (cache / "config.json").write_text(json.dumps(GPT2))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert describe("org/name").params == found.params
    assert describe("../name") is None


def test_a_shape_survives_the_manifest():
    shape = from_config(MIXTRAL)
    assert Shape.from_dict(json.loads(json.dumps(shape.as_dict()))) == shape
    assert Shape.from_dict(None) is None
    assert Shape.from_dict({"params": 1}) is None


@pytest.mark.parametrize(
    ("said", "name"),
    [("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H200", "H200 SXM"),
     ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"), ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"), ("NVIDIA L4", "L4"),
     ("NVIDIA L40S", "L40S"), ("NVIDIA L40", None), ("NVIDIA B200", "B200"), ("NVIDIA GB200", "GB200"),
     ("NVIDIA H100 NVL", "H100 NVL"), ("NVIDIA H200 NVL", None),
     ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM"), ("AMD Instinct MI300X", "MI300X"),
     ("NVIDIA A100-PCIE-40GB", None), ("AMD Instinct MI250", "MI250 GCD"), ("AMD Instinct MI250X", "MI250X GCD"),
     ("NVIDIA GH200 480GB", None), ("NVIDIA GeForce RTX 3060", None), ("", None)],
)  # fmt: skip
def test_a_device_is_known_by_its_own_name_or_not_at_all(said, name):
    found = find(said)
    assert (found.name if found else None) == name


def test_every_figure_has_its_source():
    for a in ACCELERATORS:
        assert {s.strip() for s in a.source.split(",")} <= set(SOURCES)
        assert a.flops["bf16"] > 1e13
        assert 1e11 < a.read_bytes_per_s < 1e13


def test_machines_add_up_only_if_alike():
    two = machine_of(["NVIDIA H100 80GB HBM3"] * 2)
    assert two.read_bytes_per_s == 6.7e12
    assert two.overlaps
    assert machine_of(["NVIDIA H100 80GB HBM3", "NVIDIA L4"]) is None
    assert machine_of([]) is None
    assert machine_of(["NVIDIA H100 80GB HBM3"], "fp8").flops_per_s == 1979e12


def test_the_terms_of_a_step_by_hand():
    shape, gpu = from_config(LLAMA_8B), machine_of(["NVIDIA H100 80GB HBM3"])
    terms = step_terms_s(shape, gpu, 32, 2000)
    assert terms[WEIGHTS] == pytest.approx(2 * (shape.params - shape.embedding) / 3.35e12)
    assert terms[KV] == pytest.approx(32 * 2000 * 131072 / 3.35e12)
    assert terms[COMPUTE] == 0  # hidden behind the reads
    assert step_terms_s(shape, gpu, 4096, 1)[COMPUTE] > 0
    assert step_bytes(shape, 32, 2000) == pytest.approx((terms[WEIGHTS] + terms[KV]) * 3.35e12)


@given(st.floats(1e-3, 1), st.floats(1, 4000), st.one_of(st.none(), st.floats(1e10, 1e15)), st.booleans())
def test_calibrated_terms_make_the_very_step(step, context, rate, overlaps):
    shape = from_config(LLAMA_8B)
    own = calibrated(shape, Machine(1e11, 1e12, "test", overlaps), (step, context), rate)
    total = sum(step_terms_s(shape, own, 1, context).values())
    slow = shape.flops_per_token(context) / (rate or 1e12)
    if slow < 0.9 * step:
        assert total == pytest.approx(step)
    else:
        assert total >= step * 0.999


@pytest.mark.parametrize(
    ("said", "each"),
    [({}, 2), ({"torch_dtype": "torch.float32"}, 4), ({"dtype": "float16"}, 2),
     ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 0.5), ({"quantization_config": {"w_bit": 8}}, 1),
     ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, 1)],
)  # fmt: skip
def test_weights_have_the_size_that_the_configuration_says(said, each):
    shape = from_config({**{k: v for k, v in LLAMA_8B.items() if k != "torch_dtype"}, **said})
    assert shape.weight_bytes == each * shape.params
