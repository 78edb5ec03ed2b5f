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
    linear_in: int = 0  # columns of a linear layer's input projections together
    linear_out: int = 0  # rows of its output projection
    linear_state: int = 0  # values of its state, per sequence
    query_gate: bool = False  # the query projection also makes a gate of the attention's output
    index_top: int = 0  # tokens that sparse attention picks (DeepSeek-V3.2); 0: attention is dense
    index_size: int = 0  # key values that its indexer keeps per token
    max_context: int = 0  # tokens; 0: not known
    native: str = "bf16"  # what the published weights are stored in
    native_experts: str = ""  # of the experts, where it differs

    @property
    def attention_layers(self) -> int:
        """Layers that keep KV of every token, or of a window."""
        return self.layers - self.linear_layers

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def kv_values(self) -> int:
        """KV values that one layer with attention keeps per token."""
        if self.latent:
            return self.latent + self.rope + self.index_size
        return 2 * self.kv_heads * self.head_size


def arch_of(name: str) -> Arch:
    """The architecture of a model by its name in the catalogue, a folder with ``config.json``, a ``.gguf`` file or a
    ``.toml`` file with an entry like those of the catalogue.

    Raises:
        UsageError: none of these; names the nearest that are known.
    """
    from whywait.physics.catalog import find_arch

    return find_arch(name)
