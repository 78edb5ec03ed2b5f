"""The plain form of each operation's time, before the fitted correction: what ``tools/fit_ops.py`` fits against and
``kernels`` evaluates. Pure.

Of an operation that reads for ``r`` s and computes for ``c`` s: ``launch + (r^3 + c^3)^(1/3)``, close to the longer of the
two and a little more where they are alike. The correction is a factor per shape, linear in the logarithms between knots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.physics.dtypes import bytes_of, rate_name

Floats = NDArray[np.float64]
POWER = 3.0
PRODUCT_KNOTS = ((1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384), (256, 1024, 4096, 8192, 16384, 65536),
                 (256, 1024, 2048, 4096, 8192, 16384))  # m, n, k  # fmt: skip
#: Tokens per local expert, width of an expert's share, local experts, devices that experts spread over.
EXPERT_KNOTS = ((0.01, 0.06, 0.25, 1, 4, 16, 64, 256, 1024, 4096), (192, 768, 3072), (4, 32, 256), (1, 8))
REDUCE_KNOTS = (1e3, 3e4, 1.3e5, 5e5, 2e6, 8e6, 3e7, 1.3e8, 5e8)  # bytes
READ, FLOPS, LAUNCH_S = 0.85, 0.75, 3e-6
EXPERT_READ, EXPERT_FLOPS, EXPERT_LAUNCH_S = 0.8, 0.6, 10e-6


class Parts(NamedTuple):
    """Seconds of reading and of computing, and of launching."""

    read: Floats
    compute: Floats
    launch: float

    def total(self) -> Floats:
        return np.asarray(self.launch + (self.read**POWER + self.compute**POWER) ** (1 / POWER), dtype=float)


def product(shape: tuple[Floats, float, float], kind: str, read_rate: float, flops: Mapping[str, float]) -> Parts:
    """A product of ``m`` × ``k`` with ``k`` × ``n`` weights of ``kind``; ``shape`` is (m, n, k)."""
    m, n, k = shape
    read = (n * k * bytes_of(kind) + 2.0 * m * (n + k)) / (read_rate * READ)
    return Parts(np.asarray(read, dtype=float), 2.0 * m * n * k / (flops[rate_name(kind, flops)] * FLOPS), LAUNCH_S)


class ExpertShape(NamedTuple):
    """Experts on one device. ``tokens`` of all devices; ``inter``: width of this device's share of an expert."""

    tokens: Floats
    hidden: Floats
    inter: Floats
    chosen: Floats
    total: Floats
    local: Floats

    def per_expert(self) -> Floats:
        return np.asarray(self.tokens * self.chosen / self.total, dtype=float)


def experts(x: ExpertShape, kind: str, read_rate: float, flops: Mapping[str, float]) -> Parts:
    """Experts drawn alike and independently: each local one is read with the chance that any token chose it."""
    each = 3.0 * x.hidden * x.inter
    touched = x.local * (1 - (1 - x.chosen / x.total) ** np.maximum(x.tokens, 1.0))
    mine = x.per_expert() * x.local
    read = (touched * each * bytes_of(kind) + 4.0 * mine * (x.hidden + x.inter)) / (read_rate * EXPERT_READ)
    return Parts(
        np.asarray(read, dtype=float),
        2.0 * mine * each / (flops[rate_name(kind, flops)] * EXPERT_FLOPS),
        EXPERT_LAUNCH_S,
    )


def expert_features(x: ExpertShape, spread: Floats) -> tuple[Floats, ...]:
    return x.per_expert(), np.asarray(x.inter), np.asarray(x.local), spread


def decode_terms(
    seqs: Floats, context: Floats, shape: tuple[float, float, float], rates: tuple[float, float]
) -> Floats:
    """(rows, 5): what one layer's attention over ``seqs`` sequences of ``context`` tokens in all is linear in: a constant,
    query values, KV values of a sequence, seconds of reading KV, seconds of multiplying. ``shape``: query values per
    sequence (heads × size), KV bytes per token, flops per token of context; ``rates``: bytes/s, flops/s."""
    width, kv_bytes, flops = shape
    one = np.ones(np.broadcast_shapes(np.shape(seqs), np.shape(context)))
    return np.stack([one, one * seqs * width * 1e-9, one * seqs * kv_bytes * 1e-9, one * context * kv_bytes / rates[0],
                     one * context * flops / rates[1]], axis=-1)  # fmt: skip


def prefill_terms(work: tuple[Floats, Floats, Floats], shape: tuple[float, float, float], rate: float) -> Floats:
    """(rows, 5): of prefill: a constant, query values of a sequence, of a token, KV bytes of a token, seconds of
    multiplying. ``work``: sequences, tokens, pairs of tokens; ``shape``: query values, KV bytes, flops per pair."""
    seqs, tokens, pairs = work
    width, kv_bytes, flops = shape
    one = np.ones(np.broadcast_shapes(np.shape(seqs), np.shape(tokens)))
    return np.stack([one, one * seqs * width * 1e-9, one * tokens * width * 1e-12, one * tokens * kv_bytes * 1e-12,
                     one * pairs * flops / rate], axis=-1)  # fmt: skip
