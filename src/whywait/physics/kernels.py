"""How long an operation takes on a machine: rooflines (``rooflines``) with the efficiencies of ``fitted.json``. Pure.

A time comes as five numbers that add up to it, one per resource (``RESOURCES``): what is above the launch of a product
is shared between reading and computing as r^p : c^p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whywait.physics import machines, rooflines
from whywait.physics.dtypes import bytes_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import Fit
from whywait.physics.hats import evaluate
from whywait.physics.machines import Accelerator
from whywait.physics.ops import Attention, Collective, Experts, Product

RESOURCES = ("weights", "kv", "compute", "link", "host")
WEIGHTS, KV, COMPUTE, LINK, HOST = range(5)
Floats = NDArray[np.float64]
_WEIGHT_ONLY = ("int4_wo", "mxfp4")  # multiplied in 16 bits


class Kernels:
    """Times of operations on ``machine``, each a (5, …) array of seconds by resource.

    A fit that stands for another machine, or shapes beside its knots, may beat the machine's data sheet; ``least`` and
    the attention's rates do not. ``sheet``: by how much the sheet itself is moved (faster-memory, a calibration)."""

    def __init__(self, machine: Accelerator, efficiency: Efficiency, fit: Fit, sheet: Efficiency | None = None) -> None:
        self.machine = machine
        self.factor = efficiency
        self.fit = fit
        self.sheet = sheet or Efficiency()

    def product(self, op: Product, m: Floats) -> Floats:
        """One matrix product of ``m`` rows."""
        kind = self._held(product_kind(op.weights, op.compute))
        flops = self.machine.flops if kind not in ("bf16", "int4_wo") else {"bf16": self.machine.flops["bf16"]}
        parts = rooflines.product((m, float(op.n), float(op.k)), op.weights, self.machine.read_bytes_per_s, flops)
        if op.weights.startswith(("q", "iq")):
            parts = parts._replace(compute=parts.compute * self._by_fours(m))
        found = self.fit.typed("product", kind)
        correction = self.fit.plain["product"] * np.ones(np.shape(m))
        if found is not None:
            features = (m, np.array(float(op.n)), np.array(float(op.k)))
            correction = np.exp(evaluate(np.asarray(found[1]) / 100, features, rooflines.PRODUCT_KNOTS))
        return self._split(parts, correction, (self.factor.weights, self.factor.compute))

    def _by_fours(self, m: Floats) -> Floats:
        """A core multiplies packed weights with ``packed_rows`` rows at once, and what is left over row by row, each
        ``rest_row`` times as long (llama.cpp, ggml-cpu/repack.cpp)."""
        rows = self.fit.plain.get("packed_rows", 1)
        rest = np.asarray(m, dtype=float) % rows if rows > 1 else np.zeros(np.shape(m))
        return np.asarray(1 + rest / np.maximum(m, 1.0) * (self.fit.plain.get("rest_row", 1.0) - 1), dtype=float)

    def experts(self, op: Experts, tokens: Floats) -> Floats:
        """The experts of one layer for ``tokens`` of the whole replica."""
        shape = rooflines.ExpertShape(
            tokens, *(np.array(float(v)) for v in (op.hidden, op.inter, op.chosen, op.total, op.local))
        )
        kind = self._held(expert_kind(op.weights, op.compute))
        found = self.fit.typed("experts", kind)
        flops = self.machine.flops
        if kind == "bf16" or (kind if found is None else found[0]) in _WEIGHT_ONLY:
            flops = {"bf16": flops["bf16"]}
        parts = rooflines.experts(shape, op.weights, self.machine.read_bytes_per_s, flops)
        correction = self.fit.plain["experts"] * np.ones(np.shape(tokens))
        if found is not None:
            spread = np.array(float(op.total / op.local))
            features = rooflines.expert_features(shape, spread)
            correction = np.exp(evaluate(np.asarray(found[1]) / 100, features, rooflines.EXPERT_KNOTS))
        factor = self.factor.experts
        return self._split(parts, correction, (factor * self.factor.weights, factor * self.factor.compute))

    def least(self, op: Product | Experts, m: Floats) -> Floats:
        """Seconds of ``op`` at the data sheet's rates: its weights read once, its products multiplied. Which experts a
        batch reads is a matter of its routing: those of one token bound it."""
        if isinstance(op, Product):
            products, kind, times = float(op.n) * op.k, product_kind(op.weights, op.compute), 1.0
        else:
            products = 3.0 * op.hidden * op.inter * op.chosen * op.local / op.total
            kind, times = expert_kind(op.weights, op.compute), self.sheet.experts
        rate = self.machine.flops["bf16"] if kind in ("bf16", "int4_wo") else self._fastest()
        read = products * bytes_of(op.weights) / self.machine.read_bytes_per_s * self.sheet.weights
        return np.asarray(times * np.maximum(read, 2.0 * m * products / rate * self.sheet.compute), dtype=float)

    def _held(self, kind: str) -> str:
        """``kind`` as this machine runs it: it reads 4-bit numbers that it cannot multiply and widens them to 16."""
        return "int4_wo" if kind == "nvfp4" and "fp4" not in self.machine.flops else kind

    def _split(self, parts: rooflines.Parts, correction: Floats, factors: tuple[float, float]) -> Floats:
        """(5, …); ``factors`` multiply reading and computing."""
        p = self.fit.plain["power"]
        r, c = parts.read * factors[0], parts.compute * factors[1]
        powers = np.maximum(r**p + c**p, 1e-300)
        total = powers ** (1 / p) * correction
        share = r**p / powers
        found = np.zeros((5, *np.shape(total)))
        found[WEIGHTS], found[COMPUTE] = total * share, total * (1 - share)
        found[HOST] = parts.launch * self.fit.plain["launch"] * correction * self.factor.step
        return found

    def decode(self, op: Attention, tokens_per_seq: int) -> tuple[Floats, Floats, Floats]:
        """Seconds of one layer's attention over decoding sequences: (5,) each per step, per sequence, per token of
        context. Several tokens of a sequence (drafts to verify) read its KV once and multiply each."""
        many = float(tokens_per_seq)
        shape = (op.heads * float(op.head_size) * many, op.kv_bytes, op.flops * many)
        rates = (self.machine.read_bytes_per_s, self.machine.flops["bf16"])
        zero, one = np.zeros(1), np.ones(1)
        values = np.asarray(self._attention("decode", op))
        base = rooflines.decode_terms(zero, zero, shape, rates)[0] * values
        seq = rooflines.decode_terms(one, zero, shape, rates)[0] * values - base
        token = rooflines.decode_terms(zero, one, shape, rates)[0] * values - base
        e = self.factor
        least = max(op.kv_bytes / rates[0], op.flops * many / self._multiplies(op)) * self.sheet.kv
        of_token = float(token.sum()) * e.kv
        if bytes_of(op.kv_type) <= 1.1 and not self.fit.own("decode", _sizes(op)[0]):
            # Another family's slow kernel for 8 bits (SGLang's for latents on Hopper) is no reason to read them slower
            # than 16 bits; a family's own measurement is left alone.
            wide = self.decode(
                op._replace(kv_type="bf16", kv_bytes=2 / bytes_of(op.kv_type) * op.kv_bytes), tokens_per_seq
            )
            of_token = min(of_token, float(wide[2].sum()))
        of_token = max(of_token, least)
        return base.sum() * e.step * _unit(HOST), seq.sum() * e.kv * _unit(KV), of_token * _unit(KV)

    def _multiplies(self, op: Attention) -> float:
        """Flops per second of attention at most: KV in 8 bits may be multiplied in 8."""
        return self.machine.flops["bf16"] if bytes_of(op.kv_type) > 1.1 else self._fastest()

    def _fastest(self) -> float:
        return max(self.machine.flops.values())

    def prefill(self, op: Attention) -> tuple[Floats, Floats, Floats]:
        """Seconds of one layer's attention in prefill: (5,) each per sequence, per token, per pair of tokens. What a
        step pays once is counted per sequence."""
        width = op.heads * float(op.head_size)
        shape = (width, op.kv_bytes / bytes_of(op.kv_type), op.prefill_flops)
        zero, one = np.zeros(1), np.ones(1)
        values = np.asarray(self._attention("prefill", op))
        rate, factor = self.machine.flops["bf16"], self.factor.pairs * _unit(COMPUTE)
        base = rooflines.prefill_terms((zero, zero, zero), shape, rate)[0] * values
        each = [rooflines.prefill_terms(w, shape, rate)[0] * values - base
                for w in ((one, zero, zero), (zero, one, zero), (zero, zero, one))]  # fmt: skip
        of_pair = max(each[2].sum() * self.factor.pairs, op.prefill_flops / self._multiplies(op) * self.sheet.pairs)
        return (base + each[0]).sum() * factor, each[1].sum() * factor, of_pair * _unit(COMPUTE)

    def _attention(self, op: str, a: Attention) -> list[float]:
        found = self.fit.values(op, _sizes(a))
        return list(found[1]) if found is not None else list(self.fit.plain[op])

    def collective(self, op: Collective, tokens: Floats) -> Floats:
        """One collective of ``tokens`` per device; past a node the slowest link counts."""
        size, n, node = op.bytes * tokens, op.devices, self.machine.node
        inside = min(n, node)
        if op.kind == "all-reduce":
            seconds = self._reduce(size, inside)
            if n > node:  # reduced inside each node, then between them, each device its share
                nodes = n / node
                seconds = seconds + 25e-6 + 2 * (nodes - 1) / nodes * size / inside / self._nic()
        elif op.kind == "all-to-all":
            seconds = self._exchange(size, n)
        else:
            link = self.machine.link_bytes_per_s if n <= node else self._nic()
            seconds = 10e-6 + size / (0.7 * link)
        found = np.zeros((5, *np.shape(tokens)))
        found[LINK] = seconds * self.factor.link
        return found

    def _nic(self) -> float:
        return 0.8 * (self.machine.nic_bytes_per_s or 12.5e9)

    def _reduce(self, size: Floats, n: int) -> Floats:
        measured = self.fit.values("all-reduce", [str(next((d for d in (2, 4, 8) if d >= n), 8))])
        plain = self.fit.plain
        if measured is None:  # ring: each device sends and receives 2 (n − 1)/n of it
            return np.asarray(
                plain["reduce_s"] + 2 * (n - 1) / n * size / (plain["link"] * self.machine.link_bytes_per_s)
            )
        found = _tabled(measured[1], size) * (1 + 0.05 * max(0.0, np.log2(n / 8)))
        return found if self.machine.link != "PCIe" else self._over_pcie(size, n, found, measured[1][0] * 1e-6)

    def _over_pcie(self, size: Floats, n: int, found: Floats, least: float) -> Floats:
        """The table's time ``found`` as a machine whose devices share PCIe takes it; ``least``: the table's time of the
        smallest message.

        A table of a machine with another link is that link's: what is beyond the smallest message goes by the ratio of
        the data sheets' rates. And a table of PCIe cards is of one host: four and eight L40S were measured at 2 GB/s,
        across its sockets, a fifteenth of the wire, where two reach a third. A host is not known here, so many cards
        are taken to reach what two do. Never less than the wire's own time.
        """
        own = machines.measured_on(self.machine.fit)
        same = own is None or own.link == "PCIe"
        ratio = 1.0 if own is None else own.link_bytes_per_s / self.machine.link_bytes_per_s
        floor = 2 * (n - 1) / n * size / self.machine.link_bytes_per_s
        found = least + np.maximum(found - least, 0.0) * ratio
        pair = self.fit.values("all-reduce", ["2"])
        if same and pair is not None:
            # At the largest message of two devices, which moves their size once each way.
            largest = rooflines.REDUCE_KNOTS[-1]
            times = pair[1][-1] * 1e-6 * ratio * self.machine.link_bytes_per_s / largest
            found = np.minimum(found, least + times * floor)
        return np.asarray(np.maximum(found, floor))

    def _exchange(self, size: Floats, n: int) -> Floats:
        """Dispatch and combine; ``size`` counts a byte out and two back for each token, choice and value."""
        moved = size / 3.0
        ways = []
        for kind in ("few", "many"):
            found = self.fit.values("all-to-all", [kind])
            if found is not None:
                ways.append(found[1][0] + found[1][1] * 1e-12 * moved)
        link = self.machine.link_bytes_per_s
        tabled = len(ways) == 2 and self.machine.link != "PCIe"  # the tables are of NVLink
        seconds = np.minimum(*ways) if tabled else 60e-6 + size / (0.6 * link)
        if n > self.machine.node:
            seconds = seconds + 30e-6 + size * (1 - self.machine.node / n) / self._nic()
        return np.asarray(seconds, dtype=float)


def _tabled(values: Sequence[float], size: Floats) -> Floats:
    """Seconds of an all-reduce by a table (µs) over ``REDUCE_KNOTS``; past the last in proportion."""
    found = np.exp(evaluate(np.log(np.asarray(values) * 1e-6), (np.maximum(size, 1.0),), (rooflines.REDUCE_KNOTS,)))
    return np.asarray(found * np.maximum(1.0, size / rooflines.REDUCE_KNOTS[-1]))


def _unit(resource: int) -> Floats:
    found = np.zeros(5)
    found[resource] = 1.0
    return found


def _sizes(a: Attention) -> list[str]:
    """Whose measurement holds for ``a``, the nearest first."""
    kv = "fp8" if bytes_of(a.kv_type) <= 1.1 else "bf16"
    if a.kind in ("latent", "sparse"):
        return [f"{kv} latent", "bf16 latent"]
    near = sorted((64, 128, 256), key=lambda s: abs(np.log(s / a.head_size)))
    return [f"{t} {s}" for t in (kv, "bf16") for s in near]


def product_kind(weights: str, compute: str) -> str:
    """Whose measured efficiency holds: of products in few bits by their weights, of 16-bit ones whatever they read."""
    if compute in ("bf16", "bfloat16", "fp16", "f16", "fp32", "float32", "f32"):
        return "int4_wo" if weights in ("int4", "int4_wo", "awq", "gptq", "w4a16") else "bf16"
    if weights in ("fp4", "nvfp4", "mxfp4"):
        return "nvfp4"
    return weights if weights in ("fp8", "fp8_block") else "fp8"


def expert_kind(weights: str, compute: str) -> str:
    if weights == "mxfp4":
        return "mxfp4"
    if weights in ("int4", "int4_wo", "awq", "gptq", "w4a16"):
        return "int4_wo"
    return product_kind(weights, compute if weights not in ("fp4", "nvfp4") else "fp4")
