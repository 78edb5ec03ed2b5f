"""How far a service stays below (or above) the fitted machine: multipliers that a calibration moves, 1.0 before it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Times are multiplied by these. ``1.0`` is the fit of the operation tables; what is seconds is said so."""

    weights: float = 1.0  # reading weights (matrix products of few tokens)
    compute: float = 1.0  # matrix products of many tokens
    experts: float = 1.0
    kv: float = 1.0  # attention of decoding sequences
    pairs: float = 1.0  # attention of prefill
    link: float = 1.0  # collectives
    step: float = 1.0  # host and launches per step
    sequence: float = 1.0  # host per sequence and step
    token: float = 1.0  # host per token
    prefill_step: float = 1.0  # what a step with prefill in it costs on top
    frontend: float = 1.0  # before the queue, per request
    kv_space: float = 1.0  # blocks, against those computed
    kernels: str = "fitted"  # whose times of operations: fitted, or aic (physics.aic, an optional extra)
    family: str = "vllm"  # whose kernels the fit is of: vllm, sglang, trtllm, llama.cpp
