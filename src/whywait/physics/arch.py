"""A model by its operations: the matrices of a layer, the form of its attention, its experts. What a step's time is made of;
``models.Shape`` is the same model in totals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """Decoder-only transformer. ``latent`` > 0: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    inter: int  # width of the dense feed-forward part (of the dense layers where the others have experts)
    gated: bool = True  # three matrices (gate, up, down), else two
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    expert_inter: int = 0
    shared_inter: int = 0  # width of the experts that see every token, together
    dense_layers: int = 0  # first layers without experts, where there are experts
    latent: int = 0
    rope: int = 0  # size of the rotary key that latent attention keeps beside its latent
    query_latent: int = 0
    nope: int = 0  # latent attention: size of a head's part without position
    value_size: int = 0  # latent attention: size of a head's value
    window: int = 0  # tokens that windowed layers look back; 0: none
    window_layers: int = 0  # how many layers have the window
    linear_layers: int = 0  # layers whose state does not grow with context (linear attention, SSM): no KV
    mtp_layers: int = 0  # layers that predict further tokens
    source: str = ""
