"""Roofline terms of one engine step: time by resource, from a model's bytes and flops and a machine's rates. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from whywait.physics.models import Shape

WEIGHTS, KV, COMPUTE = "weight reads", "KV reads", "compute"


@dataclass(frozen=True)
class Machine:
    """Achievable rates of what runs the model. ``source`` says where the figures come from (measured, datasheet);
    ``overlaps`` that it reads and computes at the same time (accelerators), so that the longer of the two counts."""

    read_bytes_per_s: float
    flops_per_s: float
    source: str
    overlaps: bool = False


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


def step_terms_s(
    shape: Shape, machine: Machine, batch: float, context: float, kv_dtype: str = "f16"
) -> dict[str, float]:
    """Time (s) that each resource needs in one decode step of ``batch`` sequences at mean ``context`` tokens.

    Reads of weights and of each sequence's KV, and compute with attention (roofline: Williams et al. 2009). On a
    machine that overlaps, compute is what goes beyond the reads, so that the terms always add up to the step.
    """
    weights = shape.read_bytes(batch) / machine.read_bytes_per_s
    kv = batch * _seen(shape, context) * shape.kv_bytes_per_token(kv_dtype) / machine.read_bytes_per_s
    compute = batch * shape.flops_per_token(context) / machine.flops_per_s
    if machine.overlaps:
        compute = max(0.0, compute - weights - kv)
    return {WEIGHTS: weights, KV: kv, COMPUTE: compute}


def step_bytes(shape: Shape, batch: float, context: float, kv_dtype: str = "f16") -> float:
    """Bytes that one such step must read: weights once, the KV of every sequence."""
    return shape.read_bytes(batch) + batch * _seen(shape, context) * shape.kv_bytes_per_token(kv_dtype)


def calibrated(
    shape: Shape,
    machine: Machine,
    single: tuple[float, float],
    prefill_flops_per_s: float | None,
    kv_dtype: str = "f16",
) -> Machine:
    """``machine`` at the rates it was seen to reach: compute from prefill (where it was seen), reads from what the step
    of one sequence (``single``: its s and its context) leaves beside it; at least a tenth, so that a wrong prefill
    figure cannot make reads free."""
    (step_s, context), flops = single, prefill_flops_per_s or machine.flops_per_s
    compute = shape.flops_per_token(context) / flops
    left = step_s if machine.overlaps else max(step_s - compute, step_s / 10)
    reads = step_bytes(shape, 1, context, kv_dtype) / left
    return Machine(reads, flops, f"{machine.source}; calibrated on one sequence at a time", machine.overlaps)


def _seen(shape: Shape, context: float) -> float:
    return context if shape.window is None else min(context, float(shape.window))
