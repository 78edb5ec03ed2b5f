"""How long an operation takes on a machine: a roofline with the efficiencies that ``fitted.json`` holds. Pure.

A time comes as five numbers that add up to it, one per resource (``RESOURCES``). Of an operation that reads weights for
``r`` s and computes for ``c`` s the time is ``launch + (r^p + c^p)^(1/p)`` (``p`` = 3: close to the longer of the two, a
little more where they are alike); what is above the launch is shared between reading and computing as r^p : c^p.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.physics.dtypes import bytes_of, rate_name
from whywait.physics.efficiency import Efficiency
from whywait.physics.machines import Accelerator
from whywait.physics.ops import Attention, Collective, Experts, Product

RESOURCES = ("weights", "kv", "compute", "link", "host")
WEIGHTS, KV, COMPUTE, LINK, HOST = range(5)
Floats = NDArray[np.float64]
_P = 3.0


class Kernels:
    """Times of operations on ``machine``, each a (5, …) array of seconds by resource; ``fit`` is the machine's part of
    the fitted coefficients."""

    def __init__(self, machine: Accelerator, efficiency: Efficiency, fit: Mapping[str, Any]) -> None:
        self.machine = machine
        self.factor = efficiency
        self.fit = fit

    def _roofline(self, read: Floats, compute: Floats, launch: float, factors: tuple[float, float]) -> Floats:
        """(5, …) of one operation; ``factors`` multiply reading and computing."""
        r, c = read * factors[0], compute * factors[1]
        total = (r**_P + c**_P) ** (1 / _P)
        share = r**_P / np.maximum(r**_P + c**_P, 1e-300)
        found = np.zeros((5, *np.shape(total)))
        found[WEIGHTS], found[COMPUTE] = total * share, total * (1 - share)
        found[HOST] = launch * self.factor.step
        return found

    def product(self, op: Product, m: Floats) -> Floats:
        """One matrix product of ``m`` rows."""
        read = (op.n * op.k * bytes_of(op.weights) + 2.0 * m * (op.n + op.k)) / (
            self.machine.read_bytes_per_s * self.fit["read"]
        )
        rate = self.machine.flops[rate_name(op.compute, self.machine.flops)]
        compute = 2.0 * m * op.n * op.k / (rate * self.fit["flops"])
        return self._roofline(read, compute, self.fit["launch_s"], (self.factor.weights, self.factor.compute))

    def experts(self, op: Experts, tokens: Floats) -> Floats:
        """The experts of one layer for ``tokens`` of the whole replica, drawn alike and independently."""
        touched = op.local * (1 - (1 - op.chosen / op.total) ** np.maximum(tokens, 1))
        mine = tokens * op.chosen * op.local / op.total
        each = 3.0 * op.hidden * op.inter
        read = touched * each * bytes_of(op.weights) / (self.machine.read_bytes_per_s * self.fit["read"])
        rate = self.machine.flops[rate_name(op.compute, self.machine.flops)]
        compute = 2.0 * mine * each / (rate * self.fit["flops"] * 0.7)
        factor = self.factor.experts
        return self._roofline(
            read, compute, 4 * self.fit["launch_s"], (factor * self.factor.weights, factor * self.factor.compute)
        )

    def decode(self, op: Attention, tokens_per_seq: int) -> tuple[float, float, float]:
        """Seconds of one layer's attention over decoding sequences: each step, each sequence, each token of context."""
        read = op.kv_bytes / (self.machine.read_bytes_per_s * self.fit["kv_read"])
        compute = op.flops * tokens_per_seq / (self.machine.flops["bf16"] * self.fit["attention_flops"])
        return self.fit["attention_s"], self.fit["attention_seq_s"], max(read, compute)

    def prefill(self, op: Attention) -> tuple[float, float]:
        """Seconds of one layer's attention in prefill: each sequence, each pair of tokens."""
        return self.fit["attention_seq_s"], op.prefill_flops / (self.machine.flops["bf16"] * self.fit["prefill_flops"])

    def collective(self, op: Collective, tokens: Floats) -> Floats:
        """One collective of ``tokens`` per device."""
        size = op.bytes * tokens
        link = self.machine.link_bytes_per_s
        n = op.devices
        if op.kind == "all-reduce":  # ring: each device sends and receives 2 (n − 1)/n of it
            seconds = 5e-6 + 2 * (n - 1) / n * size / (0.75 * link)
        elif op.kind == "all-to-all":
            seconds = 40e-6 + (n - 1) / n * size / (0.6 * link)
        else:
            seconds = 10e-6 + size / (0.7 * link)
        found = np.zeros((5, *np.shape(tokens)))
        found[LINK] = seconds * self.factor.link
        return found


#: Until a machine has a fit: shares of the data sheet that kernels commonly reach.
PLAIN: Mapping[str, Any] = {
    "read": 0.8, "flops": 0.65, "launch_s": 2.5e-6, "kv_read": 0.75, "attention_flops": 0.3, "attention_s": 6e-6,
    "attention_seq_s": 0.08e-6, "prefill_flops": 0.5, "small_s": 1.8e-6,
}  # fmt: skip
