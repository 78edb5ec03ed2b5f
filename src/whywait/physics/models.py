"""A model as a cost: weights, KV bytes per token and flops per token, from its ``config.json`` or its GGUF file. Pure
but for reading those two.

Sources: flops 2 per parameter and token (Kaplan et al. 2020, arXiv 2001.08361, table 1), attention 4 × layers × heads ×
head size × context on top (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, forward part); KV of grouped heads
(Ainslie et al. 2023, arXiv 2305.13245); multi-head latent attention keeps one latent and one rotary key per token
(DeepSeek-V2, arXiv 2405.04434, section 2.1). Norms and biases are left out: below 0.1 % of the weights.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from whywait.core import bounded
from whywait.errors import UsageError

#: Bytes of a weight or a KV value by the names that configurations use.
BYTES: Mapping[str, float] = {
    "float32": 4, "fp32": 4, "f32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "f16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32, "int4": 0.5, "fp4": 0.5,
}  # fmt: skip
#: Families whose feed-forward part is two matrices (up, down) and not three (gate, up, down).
PLAIN_MLP = frozenset({"gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "mpt", "starcoder2", "gpt_bigcode"})
_MOST_META = 64 << 20  # bytes of GGUF metadata read at most; vocabularies take a few megabytes


@dataclass(frozen=True)
class Shape:
    """What a model costs. ``params`` counts all weights, ``embedding`` those of the input table where it is a table of
    its own (only looked up, never multiplied), ``expert`` those of all experts of which ``expert_share`` works on a
    token. ``kv_values`` are KV numbers kept per token, ``attention`` is layers × heads × head size (both parts of a
    score: 4 × that × context flops). ``how`` says where it is from."""

    params: float
    weight_bytes: float
    kv_values: float
    attention: float
    layers: int
    embedding: float = 0.0
    expert: float = 0.0
    expert_share: float = 1.0
    window: int | None = None
    how: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any] | None) -> Shape | None:
        """From a manifest; None where it holds no shape."""
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{k: v for k, v in (found or {}).items() if k in known}) if found else None
        except TypeError:
            return None

    @property
    def bytes_per_param(self) -> float:
        return self.weight_bytes / self.params

    def kv_bytes_per_token(self, kv_dtype: str = "f16") -> float:
        each = float(BYTES.get(kv_dtype.lower(), 2))
        return self.kv_values * each

    def read_bytes(self, batch: float) -> float:
        """Weights read in one step of ``batch`` tokens: all that are multiplied; of the experts those that any token
        chose, if each chooses alike and independently."""
        used = 1 - float((1 - self.expert_share) ** max(batch, 1.0))
        return (self.params - self.embedding - self.expert * (1 - used)) * self.bytes_per_param

    def flops_per_token(self, context: float) -> float:
        """Of one token at ``context`` tokens before it."""
        active = self.params - self.embedding - self.expert * (1 - self.expert_share)
        seen = context if self.window is None else min(context, self.window)
        return 2 * active + 4 * self.attention * seen

    def prompt_flops(self, tokens: float, cached: float = 0.0) -> float:
        """Of computing ``tokens`` of a prompt after ``cached`` ones: each sees those before it."""
        return tokens * self.flops_per_token(cached + tokens / 2)


def describe(model: str | os.PathLike[str]) -> Shape | None:
    """The shape of a model on this machine: a ``.gguf`` file, a folder with ``config.json``, or a name in the local
    Hugging Face cache. None where it is not here or not understood; nothing is fetched."""
    path = Path(model)
    try:
        if path.suffix == ".gguf" and path.is_file():
            return from_gguf(path)
        folder = path if (path / "config.json").is_file() else _cached(str(model))
        if folder is None:
            return None
        found = from_config(bounded.read_json(folder / "config.json"))
        return None if found is None else _weighed(found, folder)
    except (OSError, UsageError, ValueError, TypeError, AttributeError, ArithmeticError, struct.error):
        return None


def from_config(config: Mapping[str, Any]) -> Shape | None:
    """The shape that a Hugging Face ``config.json`` describes; None without its essentials.

    Raises:
        TypeError, ValueError: a figure in it is no number.
    """
    c = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(c, Mapping)
    hidden = _int(c, "hidden_size", "n_embd", "d_model")
    layers = _int(c, "num_hidden_layers", "n_layer", "num_layers")
    heads = _int(c, "num_attention_heads", "n_head")
    vocab = _int(c, "vocab_size")
    if not hidden or not layers or not heads or not vocab:
        return None
    size = _int(c, "head_dim") or hidden // heads
    kv_heads = _int(c, "num_key_value_heads", "num_kv_heads") or (1 if c.get("multi_query") else heads)
    attention, kv, width = _attention(c, (hidden, heads, kv_heads, size))
    dense, expert, share = _mlp(c, hidden, layers)
    tied = bool(c.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    table = float(vocab * hidden)
    params = layers * attention + dense + expert + table * (1 if tied else 2)
    each = _weight_bytes(config, c)
    window = _int(c, "sliding_window") if c.get("use_sliding_window", True) else None
    return Shape(params, params * each, layers * kv, layers * width, layers, 0.0 if tied else table, expert, share,
                 window or None, "config.json")  # fmt: skip


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, int], int]:
    """Of a GGUF file: its metadata, the number of values of each tensor, and the bytes of all (specification: ggml,
    docs/gguf.md).

    Raises:
        OSError, ValueError, struct.error: it cannot be read, or is not GGUF of version 2 or 3.
    """
    with path.open("rb") as file:
        magic, version, tensors, entries = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version not in (2, 3) or tensors > 1 << 20 or entries > 1 << 20:
            raise ValueError("not a GGUF file of version 2 or 3")
        meta = dict(_entry(file) for _ in range(entries))
        sizes = dict(_tensor(file) for _ in range(tensors))
        step = int(meta.get("general.alignment") or 32)
        return meta, sizes, path.stat().st_size - -(-file.tell() // step) * step


def from_gguf(path: Path) -> Shape | None:
    """The shape of a GGUF file by its metadata and its list of tensors.

    Raises:
        OSError, ValueError, struct.error: as of ``read_gguf``.
    """
    meta, sizes, weight_bytes = read_gguf(path)
    arch = str(meta.get("general.architecture", ""))

    def get(key: str) -> Any:
        value = meta.get(f"{arch}.{key}")
        return max(value) if isinstance(value, list) and value else value

    layers, heads, hidden = (int(get(k) or 0) for k in ("block_count", "attention.head_count", "embedding_length"))
    params = float(sum(sizes.values()))
    if not layers or not heads or not params:
        return None
    kv_heads = int(get("attention.head_count_kv") or heads)
    key = int(get("attention.key_length") or hidden // heads)
    value = int(get("attention.value_length") or key)
    used, experts = float(get("expert_used_count") or 0), float(get("expert_count") or 0)
    expert = float(sum(n for name, n in sizes.items() if "_exps." in name))
    table = float(sizes.get("token_embd.weight", 0)) if "output.weight" in sizes else 0.0
    return Shape(params, float(weight_bytes), float(layers * kv_heads * (key + value)),
                 layers * heads * (key + value) / 2, layers, table, expert, used / experts if experts else 1.0,
                 int(get("attention.sliding_window") or 0) or None, "the GGUF file")  # fmt: skip


def _attention(c: Mapping[str, Any], sizes: tuple[int, int, int, int]) -> tuple[float, float, float]:
    """Of one layer: weights of attention, KV values per token, heads × head size (mean of the two parts of a score)."""
    hidden, heads, kv_heads, size = sizes
    latent = _int(c, "kv_lora_rank")
    if not latent:
        return 2.0 * hidden * size * (heads + kv_heads), 2.0 * kv_heads * size, float(heads * size)
    plain, rotary, value = (_int(c, k) or 0 for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    low, query = _int(c, "q_lora_rank"), heads * (plain + rotary)
    weights = low * (hidden + query) if low else hidden * query
    weights += hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
    # What is kept is one latent and one rotary key; scores are made over the latent in decode.
    return float(weights), float(latent + rotary), heads * (2 * latent + rotary) / 2


def _mlp(c: Mapping[str, Any], hidden: int, layers: int) -> tuple[float, float, float]:
    """Of all layers: weights of the dense feed-forward parts, of the experts, and the share of these on a token."""
    width = _int(c, "intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
    each = hidden * (2 if c.get("model_type") in PLAIN_MLP else 3)
    experts = _int(c, "num_local_experts", "n_routed_experts", "num_experts")
    if not experts:
        return float(layers * each * width), 0.0, 1.0
    chosen = _int(c, "num_experts_per_tok", "num_experts_per_token", "experts_per_token") or 1
    first = _int(c, "first_k_dense_replace") or 0
    narrow = _int(c, "moe_intermediate_size") or width
    shared = _int(c, "shared_expert_intermediate_size") or (_int(c, "n_shared_experts") or 0) * narrow
    sparse = layers - first
    dense = first * each * width + sparse * (each * shared + hidden * experts)
    return float(dense), float(sparse * experts * each * narrow), chosen / experts


def _weight_bytes(config: Mapping[str, Any], c: Mapping[str, Any]) -> float:
    quant = config.get("quantization_config")
    if isinstance(quant, Mapping):
        bits = quant.get("bits") or quant.get("w_bit")
        if bits:
            return float(bits) / 8
        method = str(quant.get("quant_method", "")).lower()
        if method in ("fp8", "modelopt", "fbgemm_fp8"):
            return 1.0
    name = c.get("dtype") or c.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"
    return float(BYTES.get(str(name).removeprefix("torch."), 2))


def _weighed(shape: Shape, folder: Path) -> Shape:
    """With the bytes of the weight files where they are beside the configuration: they know of mixed formats."""
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    if not 0.3 * shape.weight_bytes < size < 3 * shape.weight_bytes:
        return shape
    return Shape(**{**shape.as_dict(), "weight_bytes": float(size), "how": "config.json and the weight files"})


def _cached(name: str) -> Path | None:
    if name.count("/") != 1 or name.startswith((".", "/")):
        return None
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    found = sorted(Path(home, f"models--{name.replace('/', '--')}", "snapshots").glob("*/config.json"))
    return found[-1].parent if found else None


def _int(c: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = c.get(key)
        if value is not None and not isinstance(value, (list, dict, str, bool)):
            return int(value)
    return 0


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9


def _entry(file: BinaryIO) -> tuple[str, Any]:
    name = _text(file)
    (kind,) = struct.unpack("<I", file.read(4))
    return name, _value(file, kind)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind != _LIST:
        if kind not in _SCALARS:
            raise ValueError("metadata of a kind not understood")
        code = f"<{_SCALARS[kind]}"
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]
    inner, count = struct.unpack("<IQ", file.read(12))
    if inner in _SCALARS and count <= 4096:
        return [_value(file, inner) for _ in range(count)]
    if inner in _SCALARS:
        file.seek(min(count, _MOST_META) * struct.calcsize(f"<{_SCALARS[inner]}"), os.SEEK_CUR)
        return None
    if inner != _STRING:
        raise ValueError("metadata of a kind not understood")
    for _ in range(count):
        (size,) = struct.unpack("<Q", file.read(8))
        file.seek(size, os.SEEK_CUR)
        _within(file)
    return None


def _within(file: BinaryIO) -> None:
    if file.tell() > _MOST_META:
        raise ValueError("more metadata than any model has")


def _tensor(file: BinaryIO) -> tuple[str, int]:
    name = _text(file)
    (dims,) = struct.unpack("<I", file.read(4))
    if dims > 8:
        raise ValueError("a tensor of more dimensions than any")
    shape = struct.unpack(f"<{dims}Q", file.read(8 * dims))
    file.seek(12, os.SEEK_CUR)  # type and offset
    count = 1
    for n in shape:
        count *= n
    return name, count


def _text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", file.read(8))
    if size > _MOST_META:
        raise ValueError("a text longer than any metadata")
    _within(file)
    return file.read(size).decode("utf-8", "replace")
