"""How numbers are stored and how a model is spread over devices: what a step's cost depends on beside model and machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Types of numbers by what they are for; names as in ``physics.models.BYTES``."""

    weights: str = "bf16"
    kv: str = "bf16"
    compute: str = "bf16"  # of the matrix products (activations)
    experts: str | None = None  # of the experts' weights where they differ


@dataclass(frozen=True)
class Layout:
    """Devices of one replica: tensor × pipeline × data parallel; experts spread over ``ep`` of them."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp
