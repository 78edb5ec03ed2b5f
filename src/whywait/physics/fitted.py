"""The fitted coefficients that ship with the package (``fitted.json``, made by ``tools/fit_ops.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whywait.physics.machines import Accelerator

_HOST: Mapping[str, float] = {
    "step_s": 1.5e-3, "seq_s": 8e-6, "token_s": 0.0, "prefill_step_s": 1e-3, "floor_s": 0.0, "floor_seq_s": 0.0,
}  # fmt: skip


def fit_of(machine: Accelerator, family: str) -> Mapping[str, Any]:
    from whywait.physics.kernels import PLAIN

    return PLAIN


def host_of(family: str) -> Mapping[str, float]:
    return _HOST
