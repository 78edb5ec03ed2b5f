"""Roofline terms of one engine step: time by resource, from a model's bytes and flops and a machine's rates. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Achievable rates of what runs the model. ``source`` says where the figures come from (measured, datasheet)."""

    read_bytes_per_s: float
    flops_per_s: float
    source: str


@dataclass(frozen=True)
class Model:
    """Per decoded token of one sequence: weight bytes read once per step, flops per token."""

    weight_bytes: float
    params: float

    @property
    def flops_per_token(self) -> float:
        """2 per parameter: one multiply and one add (Kaplan et al. 2020, appendix B; attention left out)."""
        return 2.0 * self.params


def decode_step_s(model: Model, machine: Machine, batch: int) -> dict[str, float]:
    """Least time (s) of one decode step of ``batch`` sequences by resource: ``weight reads`` and ``compute``.

    Weights are read once per step whatever the batch; compute grows with it (roofline: Williams et al. 2009). KV
    reads, attention and host overhead are left out, so the truth lies above the larger of the two.
    """
    return {
        "weight reads": model.weight_bytes / machine.read_bytes_per_s,
        "compute": batch * model.flops_per_token / machine.flops_per_s,
    }
