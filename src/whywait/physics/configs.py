"""An architecture from a model's own files: ``config.json`` of Hugging Face, or a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whywait.core import bounded
from whywait.errors import UsageError
from whywait.physics.arch import Arch
from whywait.physics.models import PLAIN_MLP, read_gguf


def arch_of_file(path: Path) -> Arch:
    """Of a ``.gguf`` file or a folder with ``config.json``.

    Raises:
        UsageError: it cannot be read or lacks its essentials.
    """
    try:
        if path.suffix == ".gguf":
            return arch_of_gguf(path)
        return arch_of_config(bounded.read_json(path / "config.json"), path.resolve().name)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, struct.error) as exc:
        raise UsageError(
            f"{path} is not understood as a model: {exc}", "a folder with config.json, or a GGUF file"
        ) from exc


def arch_of_config(config: Mapping[str, Any], name: str) -> Arch:
    """Of a parsed ``config.json``.

    Raises:
        ValueError, TypeError: an essential figure is missing or no number.
    """
    c = config.get("text_config")
    c = c if isinstance(c, Mapping) else config

    def get(*keys: str) -> int:
        for key in keys:
            value = c.get(key)
            if value is not None and not isinstance(value, (list, dict, str, bool)):
                return int(value)
        return 0

    hidden, layers = get("hidden_size", "n_embd", "d_model"), get("num_hidden_layers", "n_layer", "num_layers")
    heads, vocab = get("num_attention_heads", "n_head"), get("vocab_size")
    if not (hidden and layers and heads and vocab):
        raise ValueError("hidden size, layers, heads or vocabulary missing")
    latent = get("kv_lora_rank")
    nope, rope = get("qk_nope_head_dim"), get("qk_rope_head_dim")
    inter = get("intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
    experts = get("num_local_experts", "n_routed_experts", "num_experts")
    narrow = get("moe_intermediate_size") or inter
    quant = _quant(config)
    return Arch(
        name, hidden, layers, heads,
        get("num_key_value_heads", "num_kv_heads") or (1 if c.get("multi_query") else heads),
        nope + rope if latent else get("head_dim") or hidden // heads, vocab, inter,
        gated=c.get("model_type") not in PLAIN_MLP,
        tied=bool(c.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        experts=experts,
        chosen=get("num_experts_per_tok", "num_experts_per_token", "experts_per_token") if experts else 0,
        expert_inter=narrow if experts else 0,
        shared_inter=(get("shared_expert_intermediate_size") or get("n_shared_experts") * narrow) if experts else 0,
        dense_layers=get("first_k_dense_replace") if experts else 0,
        latent=latent, rope=rope if latent else 0, query_latent=get("q_lora_rank"), nope=nope if latent else 0,
        value_size=get("v_head_dim") if latent else 0, query_gate=bool(c.get("attn_output_gate")),
        index_top=get("index_topk"), index_size=get("index_head_dim"),
        mtp_layers=get("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        max_context=get("max_position_embeddings", "n_positions"), native=quant, source="config.json",
        **_windows(c, layers), **_linear(c, layers, get),
    )  # fmt: skip


def _windows(c: Mapping[str, Any], layers: int) -> dict[str, Any]:
    window = c.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or not c.get("use_sliding_window", True):
        return {}
    kinds = c.get("layer_types")
    if isinstance(kinds, list):
        count = sum(k == "sliding_attention" for k in kinds)
    else:  # Gemma's pattern: one layer of so many sees everything
        every = c.get("sliding_window_pattern")
        count = layers - layers // every if isinstance(every, int) and every > 1 else layers
    return {"window": window, "window_layers": count} if count else {}


def _linear(c: Mapping[str, Any], layers: int, get: Any) -> dict[str, Any]:
    kinds = c.get("layer_types")
    every = get("full_attention_interval")
    if isinstance(kinds, list):
        count = sum(k == "linear_attention" for k in kinds)
    else:
        count = layers - layers // every if every > 1 else 0
    if not count:
        return {}
    keys, values = get("linear_num_key_heads"), get("linear_num_value_heads")
    key, value = get("linear_key_head_dim"), get("linear_value_head_dim")
    # Gated delta net: q, k, v and the output gate z, and two scalars per value head (Yang et al. 2024, arXiv
    # 2412.06464).
    return {"linear_layers": count, "linear_in": 2 * keys * key + 2 * values * value + 2 * values,
            "linear_out": values * value, "linear_state": values * key * value}  # fmt: skip


def _quant(config: Mapping[str, Any]) -> str:
    quant = config.get("quantization_config")
    if not isinstance(quant, Mapping):
        return "bf16"
    method = str(quant.get("quant_method", "")).lower()
    if method == "fp8":
        return "fp8_block" if quant.get("weight_block_size") else "fp8"
    if method in ("mxfp4", "awq", "gptq"):
        return method
    if method == "modelopt":
        return "nvfp4" if "4" in str(quant.get("quant_algo", "")) else "fp8"
    bits = quant.get("bits") or quant.get("w_bit")
    return {4: "int4", 8: "int8"}.get(bits, "bf16") if isinstance(bits, int) else "bf16"


def arch_of_gguf(path: Path) -> Arch:
    """Of a GGUF file (specification: ggml, docs/gguf.md).

    Raises:
        OSError, ValueError, struct.error: it cannot be read, or lacks its essentials.
    """
    meta, sizes, weight_bytes = read_gguf(path)
    kind = str(meta.get("general.architecture", ""))

    def get(key: str) -> int:
        value = meta.get(f"{kind}.{key}")
        if isinstance(value, list):
            value = max(value, default=0)
        return int(value or 0)

    layers, heads, hidden = get("block_count"), get("attention.head_count"), get("embedding_length")
    if not (layers and heads and hidden):
        raise ValueError("layers, heads or width missing")
    key = get("attention.key_length") or hidden // heads
    inter = get("feed_forward_length")
    experts = get("expert_count")
    narrow = get("expert_feed_forward_length") or inter
    vocab = get("vocab_size") or sizes.get("token_embd.weight", 0) // hidden
    each = weight_bytes / max(sum(sizes.values()), 1)
    return Arch(
        str(meta.get("general.name") or path.stem), hidden, layers, heads, get("attention.head_count_kv") or heads, key,
        vocab, inter, gated=any("ffn_gate" in n for n in sizes) or not any("ffn_up" in n for n in sizes),
        tied="output.weight" not in sizes, experts=experts, chosen=get("expert_used_count"),
        expert_inter=narrow if experts else 0, shared_inter=get("expert_shared_count") * narrow,
        dense_layers=get("leading_dense_block_count") if experts else 0, latent=get("attention.kv_lora_rank"),
        rope=get("rope.dimension_count") if get("attention.kv_lora_rank") else 0,
        query_latent=get("attention.q_lora_rank"),
        nope=max(key - get("rope.dimension_count"), 0) if get("attention.kv_lora_rank") else 0,
        value_size=get("attention.value_length") if get("attention.kv_lora_rank") else 0,
        window=get("attention.sliding_window"), window_layers=layers if get("attention.sliding_window") else 0,
        max_context=get("context_length"), native=f"{each:.4f} bytes", source="the GGUF file",
    )  # fmt: skip
