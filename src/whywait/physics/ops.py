"""The operations of one engine step on one device: matrix products, experts, attention, collectives. Pure numbers of
shapes, no time: ``kernels`` knows how long each takes.

Sharding as vLLM, SGLang and TensorRT-LLM do it: columns of the query, key, value, gate and up projections and rows of
the output and down projections over ``tp`` (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053); KV heads repeated when
there are fewer than ``tp``; latents of latent attention on every device; experts over ``ep`` devices and each within
``tp × dp / ep``; with ``dp`` > 1 attention and dense parts see a share of the tokens and experts see all.
"""

from __future__ import annotations

from typing import NamedTuple

from whywait.errors import UsageError
from whywait.physics.arch import Arch
from whywait.physics.dtypes import bytes_of
from whywait.physics.layout import Layout, Precision


class Product(NamedTuple):
    """A matrix product of ``m`` tokens × ``k`` with weights ``k`` × ``n``, ``times`` a step. ``heads``: one row per
    sequence (the output table), not per token."""

    name: str
    n: int
    k: int
    times: int
    weights: str
    compute: str
    rows: str = "tokens"  # tokens, sequences


class Experts(NamedTuple):
    """Experts of one device: ``local`` of ``total``, each of width ``inter``; ``chosen`` of them per token."""

    hidden: int
    inter: int
    total: int
    local: int
    chosen: int
    times: int
    weights: str
    compute: str


class Attention(NamedTuple):
    """Attention of ``times`` layers on one device. ``kv_bytes`` per token and layer; ``flops`` per pair of tokens and
    layer in decode, ``prefill_flops`` in prefill (latent attention decodes over the latent). ``kind``: full, window,
    latent, sparse."""

    kind: str
    times: int
    heads: int
    head_size: int
    kv_heads: int
    kv_bytes: float
    flops: float
    prefill_flops: float
    kv_type: str


class Collective(NamedTuple):
    """``kind``: all-reduce, all-to-all, send. ``bytes`` per token of one device, over ``devices``, ``times`` a step."""

    kind: str
    bytes: float
    devices: int
    times: int


class Operations(NamedTuple):
    products: tuple[Product, ...]
    experts: tuple[Experts, ...]
    attention: tuple[Attention, ...]
    collectives: tuple[Collective, ...]
    kernels: int  # small kernels a step (norms, rotary, activations, quantising) beside these
    token_bytes: float  # what those read and write per token
    state_bytes: float  # state of linear layers read and written per sequence
    linear_flops: float  # of linear layers' recurrence per token


def shards(whole: int, parts: int) -> int:
    """The larger part of ``whole`` over ``parts``."""
    return -(-whole // parts)


def check(arch: Arch, layout: Layout) -> None:
    """Refuse what no engine runs.

    Raises:
        UsageError: heads or experts do not divide; names the nearest that do.
    """
    if min(layout.tp, layout.pp, layout.dp, layout.ep) < 1:
        raise UsageError("each of tp, pp, dp and ep is at least 1", "--layout tp=8")
    if arch.heads % layout.tp:
        fits = [t for t in range(1, arch.heads + 1) if arch.heads % t == 0]
        near = min(fits, key=lambda t: (abs(t - layout.tp), t))
        raise UsageError(
            f"{arch.name} has {arch.heads} heads, which tp={layout.tp} does not divide", f"nearest: tp={near}"
        )
    if layout.pp > arch.layers:
        raise UsageError(
            f"{arch.name} has {arch.layers} layers, fewer than pp={layout.pp}", f"nearest: pp={arch.layers}"
        )
    wide = layout.tp * layout.dp
    if layout.ep > 1 and not arch.experts:
        raise UsageError(f"{arch.name} has no experts to spread over ep={layout.ep}", "leave ep at 1")
    if wide % layout.ep:
        near = max(e for e in range(1, layout.ep + 1) if wide % e == 0)
        raise UsageError(f"ep={layout.ep} does not divide tp × dp = {wide}", f"nearest: ep={near}")


def operations(arch: Arch, precision: Precision, layout: Layout) -> Operations:
    """One step's operations on one device of one pipeline's worth of layers (all of them: stages run one after another).

    Raises:
        UsageError: the layout cannot be.
    """
    check(arch, layout)
    tp = layout.tp
    products = [*_attention_products(arch, precision, tp), *_dense_products(arch, precision, tp)]
    products.append(Product("output", shards(arch.vocab, tp), arch.hidden, 1, *head_types(precision), "sequences"))
    width = layout.tp * layout.dp
    experts: tuple[Experts, ...] = ()
    if arch.experts:
        inside = width // layout.ep
        kind = expert_type(precision)
        experts = (Experts(arch.hidden, shards(arch.expert_inter, inside), arch.experts, shards(arch.experts, layout.ep),
                           arch.chosen, arch.expert_layers, kind, _expert_compute(precision, kind)),)  # fmt: skip
    return Operations(tuple(products), experts, _attention(arch, precision, tp), _collectives(arch, layout),
                      _small(arch, precision), _activations(arch, tp),
                      2.0 * 4 * shards(arch.linear_state, tp) * arch.linear_layers,
                      6.0 * shards(arch.linear_state, tp) * arch.linear_layers)  # fmt: skip


def head_types(precision: Precision) -> tuple[str, str]:
    """Types of the output table and of its product: recipes of 8 and 4 bits leave it in 16 (llm-compressor, ModelOpt);
    files of llama.cpp do not."""
    if precision.weights.startswith(("q", "iq")) or precision.weights in ("fp32", "float32", "f32"):
        return precision.weights, precision.compute
    return "bf16", "bf16"


def expert_type(precision: Precision) -> str:
    return precision.experts or precision.weights


def _expert_compute(precision: Precision, kind: str) -> str:
    return "fp4" if kind in ("fp4", "nvfp4", "mxfp4") else precision.compute


def _attention_products(arch: Arch, precision: Precision, tp: int) -> list[Product]:
    w, c, layers = precision.weights, precision.compute, arch.attention_layers
    heads, hidden = shards(arch.heads, tp), arch.hidden
    found = []
    if arch.linear_layers:
        found += [Product("linear in", shards(arch.linear_in, tp), hidden, arch.linear_layers, w, c),
                  Product("linear out", hidden, shards(arch.linear_out, tp), arch.linear_layers, w, c)]  # fmt: skip
    if not arch.latent:
        kv = max(1, shards(arch.kv_heads, tp))
        columns = (heads * (2 if arch.query_gate else 1) + 2 * kv) * arch.head_size
        return [*found, Product("qkv", columns, hidden, layers, w, c),
                Product("attention out", hidden, heads * arch.head_size, layers, w, c)]  # fmt: skip
    query = arch.nope + arch.rope
    down = (arch.query_latent or heads * query) + arch.latent + arch.rope
    found.append(Product("latent down", down, hidden, layers, w, c))
    if arch.query_latent:
        found.append(Product("query up", heads * query, arch.query_latent, layers, w, c))
    if arch.index_size:  # the indexer of sparse attention: 32 heads over the query's latent, one key
        found.append(Product("index", 32 * arch.index_size, arch.query_latent, layers, w, c))
    return [*found, Product("kv up", heads * (arch.nope + arch.value_size), arch.latent, layers, "bf16", "bf16"),
            Product("attention out", hidden, heads * arch.value_size, layers, w, c)]  # fmt: skip


def _dense_products(arch: Arch, precision: Precision, tp: int) -> list[Product]:
    w, c, hidden = precision.weights, precision.compute, arch.hidden
    found = []
    up = 2 if arch.gated else 1
    dense = arch.dense_layers if arch.experts else arch.layers
    if dense:
        inter = shards(arch.inter, tp)
        found += [Product("gate up", up * inter, hidden, dense, w, c), Product("down", hidden, inter, dense, w, c)]
    if arch.expert_layers:
        found.append(Product("router", arch.experts, hidden, arch.expert_layers, "bf16", "bf16"))
        if arch.shared_inter:
            inter = shards(arch.shared_inter, tp)
            found += [Product("shared gate up", up * inter, hidden, arch.expert_layers, w, c),
                      Product("shared down", hidden, inter, arch.expert_layers, w, c)]  # fmt: skip
    return found


def _attention(arch: Arch, precision: Precision, tp: int) -> tuple[Attention, ...]:
    heads, each, kind = shards(arch.heads, tp), bytes_of(precision.kv), precision.kv
    if arch.latent:
        decode = 2.0 * heads * (2 * arch.latent + arch.rope)
        prefill = 2.0 * heads * (arch.nope + arch.rope + arch.value_size)
        latent = Attention("sparse" if arch.index_top else "latent", arch.layers, heads, arch.latent + arch.rope, 1,
                           (arch.latent + arch.rope) * each, decode, prefill, kind)  # fmt: skip
        if not arch.index_top:
            return (latent,)
        # The indexer scores every token with 32 small heads in 8 bits (DeepSeek-V3.2, section 2.1).
        index = 2.0 * 32 * arch.index_size
        return latent, Attention(
            "index", arch.layers, 32, arch.index_size, 1, float(arch.index_size), index, index, "fp8"
        )
    kv = max(1, shards(arch.kv_heads, tp))
    flops = 4.0 * heads * arch.head_size
    shape = (heads, arch.head_size, kv, 2.0 * kv * arch.head_size * each, flops, flops, kind)
    windowed = arch.window_layers if arch.window else 0
    found = []
    if arch.attention_layers - windowed:
        found.append(Attention("full", arch.attention_layers - windowed, *shape))
    if windowed:
        found.append(Attention("window", windowed, *shape))
    return tuple(found)


def _collectives(arch: Arch, layout: Layout) -> tuple[Collective, ...]:
    wide, size = layout.tp * layout.dp, 2.0 * arch.hidden
    found = []
    if layout.tp > 1:  # after attention and after the dense or expert part
        after = arch.layers if layout.dp > 1 and arch.experts else 0
        found.append(Collective("all-reduce", size, layout.tp, 2 * arch.layers - after + 1))
    if arch.experts and layout.dp > 1:
        if layout.ep > 1:  # out to the chosen experts' devices in 8 bits, back in 16
            per = arch.hidden * 3.0 * min(arch.chosen, layout.ep) / layout.tp
            found.append(Collective("all-to-all", per, layout.ep, arch.expert_layers))
        else:
            found.append(Collective("all-reduce", size * layout.dp, wide, arch.expert_layers))
    if layout.pp > 1:
        found.append(Collective("send", size, 2, layout.pp - 1))
    return tuple(found)


def _small(arch: Arch, precision: Precision) -> int:
    """Small kernels a step: two norms, rotary and KV write, activation, and quantising before each product of 8 or 4
    bits; routing and permuting with experts."""
    each = 5 + (3 if precision.compute not in ("bf16", "f16", "fp16", "bfloat16") else 0) + (2 if arch.latent else 0)
    return arch.layers * each + arch.expert_layers * 3 + arch.linear_layers * 3 + 6


def _activations(arch: Arch, tp: int) -> float:
    """Bytes of activations that the small kernels move per token: norms with residual (4 × hidden), quantising, rotary,
    gate × up (3 × width), in 16 bits."""
    wide = arch.chosen * arch.expert_inter + arch.shared_inter if arch.experts else arch.inter
    layer = 2.0 * (6 * arch.hidden + (4 * arch.heads * arch.head_size + 3 * wide) / tp)
    return layer * arch.layers
