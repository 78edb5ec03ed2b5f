"""What a model takes of a device's memory: weights and KV per token, by precision and layout. Pure."""

from __future__ import annotations

from whywait.physics.arch import Arch
from whywait.physics.dtypes import bytes_of as bytes_of
from whywait.physics.layout import Layout, Precision
from whywait.physics.ops import expert_type, head_types, operations, shards


def weights_bytes(arch: Arch, precision: Precision, layout: Layout) -> float:
    """Bytes of weights on the fullest device: its share of every layer of its stage, and the tables. Norms and biases
    are left out (below 0.1 %); drafting layers (MTP) too."""
    ops = operations(arch, precision, layout)
    share = shards(arch.layers, layout.pp) / arch.layers
    total = 0.0
    for p in ops.products:
        if p.rows == "tokens":
            total += share * p.times * p.n * p.k * bytes_of(p.weights)
    up = 3 if arch.gated else 2
    for e in ops.experts:
        total += share * e.times * e.local * up * e.hidden * e.inter * bytes_of(expert_type(precision))
    table = shards(arch.vocab, layout.tp) * arch.hidden * bytes_of(head_types(precision)[0])
    return total + table * (1 if arch.tied or layout.pp > 1 else 2)


def kv_bytes_per_token(arch: Arch, kv_dtype: str = "bf16", layout: Layout | None = None) -> tuple[float, float]:
    """KV bytes that one token of context takes: on one device, and on all devices of the replica together.

    Heads are split over ``tp`` (repeated when there are fewer), latents kept on every device of a ``tp`` group, layers
    split over ``pp``; a sequence lives in one of the ``dp`` parts. Layers with a window count as if they had none:
    see ``window_kv_bytes``.
    """
    at = layout or Layout()
    each = bytes_of(kv_dtype)
    kv = arch.kv_values * each
    if arch.latent:
        device, every = kv, kv * at.tp
    else:
        device = 2 * max(1, shards(arch.kv_heads, at.tp)) * arch.head_size * each
        every = device * at.tp
    layers = arch.attention_layers
    return device * shards(layers, at.pp), every * layers


def window_kv_bytes(arch: Arch, kv_dtype: str = "bf16", layout: Layout | None = None) -> float:
    """Of the bytes per token on one device, those of layers with a window: past the window they need no more."""
    if not arch.window_layers:
        return 0.0
    return kv_bytes_per_token(arch, kv_dtype, layout)[0] * arch.window_layers / arch.attention_layers


def state_bytes(arch: Arch, layout: Layout | None = None) -> float:
    """Bytes of linear layers' state per sequence on one device, in 32 bits as engines keep it."""
    at = layout or Layout()
    return 4.0 * shards(arch.linear_state, at.tp) * shards(arch.linear_layers, at.pp)
