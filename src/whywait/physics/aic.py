"""Kernel times out of the operation database of ``aiconfigurator-core`` (the extra ``aic``) in place of our fits.

Imported only where ``Efficiency.kernels`` is ``aic``. What the package has measured is taken from its own look-ups:
matrix products, experts, attention over keys and values, all-reduce. The rest stays as fitted: the host, small kernels,
all-to-all, sends of a pipeline, linear layers, and what whole services do beyond the sum of their operations.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np

from whywait.errors import MissingExtra, UsageError
from whywait.physics.arch import Arch
from whywait.physics.dtypes import bytes_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import fit_of, served
from whywait.physics.kernels import COMPUTE, HOST, KV, RESOURCES, Floats, Kernels, expert_kind, product_kind
from whywait.physics.layout import Layout
from whywait.physics.machines import Accelerator
from whywait.physics.ops import Attention, Collective, Experts, Product

#: Machines of our catalogue by the package's names; others have no database of whole engines in it.
SYSTEMS = {
    "A100 80GB SXM": "a100_sxm", "H100 SXM": "h100_sxm", "H200 SXM": "h200_sxm", "B200": "b200_sxm",
    "B300": "b300_sxm", "GB200": "gb200", "GB300": "gb300", "L40S": "l40s",
    "RTX PRO 6000 Blackwell Server": "rtx_pro_6000_server",
}  # fmt: skip
_BACKENDS = ("vllm", "sglang", "trtllm")
_PRODUCTS = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4_wo"}
_EXPERTS = {**_PRODUCTS, "mxfp4": "w4a16_mxfp4"}
_ROUTING = "power_law_1.2"  # experts asked unevenly: the package's own default
_DECODES = tuple(itertools.product((1, 8, 32, 128), (512, 2048, 8192)))  # sequences × context of each
_PREFILLS = tuple(itertools.product((128, 512, 2048, 8192), (0, 2048, 8192)))  # tokens × context before them
_OTHERWISE = "--kernels fitted"


class AicKernels(Kernels):
    """``Kernels`` whose operations last as long as the package says. Resources share a time as in the fits, and
    multipliers of ``Efficiency`` work as on them.

    Raises:
        MissingExtra: the package is not installed.
        UsageError: it does not know the machine, the engine, or an operation of the model.
    """

    def __init__(self, arch: Arch, machine: Accelerator, layout: Layout, efficiency: Efficiency) -> None:
        fit = fit_of(machine, efficiency.family)
        super().__init__(machine, served(efficiency), fit, efficiency)
        self._fits = Kernels(machine, Efficiency(family=efficiency.family), fit)
        self._arch, self._within = arch, max(1, layout.tp * layout.dp // layout.ep)
        self._at = _place(machine, efficiency.family)

    def product(self, op: Product, m: Floats) -> Floats:
        kind = self._held(product_kind(op.weights, op.compute))
        shape = (op.n, op.k, _named(_PRODUCTS, kind, op.weights))
        return self._as_long_as(super().product(op, m), self._fits.product(op, m), self._times("GEMM", shape, m))

    def experts(self, op: Experts, tokens: Floats) -> Floats:
        kind = self._held(expert_kind(op.weights, op.compute))
        shape = (op.hidden, self._arch.expert_inter, op.chosen, op.total, self._within, op.total // op.local,
                 _named(_EXPERTS, kind, op.weights), _ROUTING, 1)  # fmt: skip
        found = self._times("MoE", shape, tokens)
        return self._as_long_as(super().experts(op, tokens), self._fits.experts(op, tokens), found)

    def collective(self, op: Collective, tokens: Floats) -> Floats:
        found = super().collective(op, tokens)
        if op.kind != "all-reduce":
            return found
        times = self._times("CustomAllReduce", (round(op.bytes / 2), op.devices), tokens)
        return self._as_long_as(found, self._fits.collective(op, tokens), times)

    def decode(self, op: Attention, tokens_per_seq: int) -> tuple[Floats, Floats, Floats]:
        """Drafts to verify, which the database does not hold, take as much longer as in the fits."""
        times = [self._attention_s("GenerationAttention", op, b, s, 0) for b, s in _DECODES]
        step, seq, token = planes([(1.0, b, b * s) for b, s in _DECODES], times)
        if tokens_per_seq > 1:
            one, many = (self._fits.decode(op, n) for n in (1, tokens_per_seq))
            seq, token = (x * max(1.0, float(many[i].sum() / one[i].sum())) if one[i].sum() else x
                          for i, x in ((1, seq), (2, token)))  # fmt: skip
        least = op.kv_bytes / self.machine.read_bytes_per_s * self.sheet.kv
        unit, e = np.eye(len(RESOURCES)), self.factor
        return step * e.step * unit[HOST], seq * e.kv * unit[KV], max(token * e.kv, least) * unit[KV]

    def prefill(self, op: Attention) -> tuple[Floats, Floats, Floats]:
        times = [self._attention_s("ContextAttention", op, 1, s, before) for s, before in _PREFILLS]
        rows = [(1.0, s, s * before + s * (s + 1) / 2) for s, before in _PREFILLS]
        unit = np.eye(len(RESOURCES))[COMPUTE]
        seq, token, pair = (x * self.factor.pairs * unit for x in planes(rows, times))
        return seq, token, pair

    @staticmethod
    def _as_long_as(found: Floats, plain: Floats, times: Floats) -> Floats:
        """``found`` (5, …) times what ``times`` is of ``plain``'s totals."""
        return np.asarray(found * (times / plain.sum(axis=0)), dtype=float)

    def _times(self, name: str, shape: tuple[Any, ...], rows: Floats) -> Floats:
        each = [_lookup(self._at, name, shape, (("x", int(np.ceil(x))),)) for x in np.ravel(rows)]
        return np.reshape(np.array(each), np.shape(rows))

    def _attention_s(self, name: str, op: Attention, batch: int, s: int, before: int) -> float:
        if op.kind not in ("full", "window"):
            raise UsageError(f"--kernels aic is not wired for {op.kind} attention ({self._arch.name})", _OTHERWISE)
        kv = "fp8" if bytes_of(op.kv_type) <= 1.1 else "bfloat16"
        types = (kv, "bfloat16") if name == "ContextAttention" else (kv,)
        # Without a window: what a token that is looked at costs is the same, and the step counts only those.
        shape = (op.heads, op.kv_heads, *types, 0, op.head_size)
        return _lookup(self._at, name, shape, (("batch_size", batch), ("s", s), ("prefix", before)))


def planes(rows: Sequence[tuple[float, float, float]], times: Sequence[float]) -> tuple[float, float, float]:
    """Three coefficients, none below 0, whose sums over ``rows`` come nearest to ``times`` in relative least squares:
    the best of all subsets, which for three is what non-negative least squares finds."""
    a = np.asarray(rows, dtype=float) / np.asarray(times)[:, None]
    best, least = np.zeros(3), np.inf
    for n in (1, 2, 3):
        for chosen in itertools.combinations(range(3), n):
            x = np.zeros(3)
            x[list(chosen)] = np.linalg.lstsq(a[:, list(chosen)], np.ones(len(a)), rcond=None)[0]
            error = float(((a @ x - 1) ** 2).sum())
            if (x >= 0).all() and error < least:
                best, least = x, error
    return float(best[0]), float(best[1]), float(best[2])


def basis(machine: Accelerator, family: str) -> str:
    """What the times rest on, in words: the package, its database, and what is still ours."""
    system, backend, version = _place(machine, family)
    package = _package()["version"]
    return (f"operation times of aiconfigurator-core {package} ({system}, {backend} {version}); host, small kernels "
            "and how sure they are: our fits")  # fmt: skip


@cache
def _package() -> dict[str, Any]:
    try:
        from importlib.metadata import version

        from aiconfigurator_core.sdk import common, operations, perf_database
    except ImportError:
        raise MissingExtra("--kernels aic", "aic") from None
    # It tells of every older table that it falls back to; what the figures rest on is in the notes.
    logging.getLogger("aiconfigurator_core").setLevel(logging.CRITICAL)
    return {"common": common, "operations": operations, "data": perf_database,
            "version": version("aiconfigurator-core")}  # fmt: skip


def _place(machine: Accelerator, family: str) -> tuple[str, str, str]:
    """System, engine and version of the engine, as the package names them."""
    data, system = _package()["data"], SYSTEMS.get(machine.name)
    if system is None:
        raise UsageError(f"aiconfigurator-core has no operation times of {machine.name}",
                         f"{', '.join(SYSTEMS)}; or {_OTHERWISE}")  # fmt: skip
    if family not in _BACKENDS:
        raise UsageError(f"aiconfigurator-core has no operation times of {family}", f"--engine vllm; or {_OTHERWISE}")
    return system, family, _version(data, system, family)


@cache
def _version(data: Any, system: str, family: str) -> str:
    found = data.get_latest_database_version(system, family)
    if not found:
        raise UsageError(f"aiconfigurator-core has no operation times of {family} on {system}", _OTHERWISE)
    return str(found)


@cache
def _database(at: tuple[str, str, str]) -> Any:
    found = _package()["data"].get_database(*at)
    if found is None:
        raise UsageError(f"aiconfigurator-core cannot read its operation times of {' '.join(at)}", _OTHERWISE)
    return found


@cache
def _lookup(at: tuple[str, str, str], name: str, shape: tuple[Any, ...], asked: tuple[tuple[str, int], ...]) -> float:
    """Seconds of one operation. The package raises errors of several kinds where a table lacks it.

    Raises:
        UsageError: it has no time for this shape or type.
    """
    try:
        op = getattr(_package()["operations"], name)(name, 1.0, *_typed(name, shape))
        found = float(op._engine_query(_database(at), **dict(asked))) * 1e-3  # ms
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError) as e:
        _unknown(at, name, shape, e)
    if not found > 0 and name != "CustomAllReduce":
        _unknown(at, name, shape, None)
    return found


def _unknown(at: tuple[str, str, str], name: str, shape: tuple[Any, ...], cause: Exception | None) -> NoReturn:
    what = " × ".join(str(x) for x in shape)
    raise UsageError(f"aiconfigurator-core has no {name} of {what} on {at[0]}, {at[1]} {at[2]}",
                     f"another --precision or --layout; or {_OTHERWISE}") from cause  # fmt: skip


def _typed(name: str, shape: tuple[Any, ...]) -> list[Any]:
    """Names of number types as the package's enumerations."""
    common = _package()["common"]
    kinds = {"GEMM": (common.GEMMQuantMode,), "MoE": (common.MoEQuantMode,),
             "GenerationAttention": (common.KVCacheQuantMode,),
             "ContextAttention": (common.KVCacheQuantMode, common.FMHAQuantMode)}  # fmt: skip
    left = iter(kinds.get(name, ()))
    return [next(left)[x] if isinstance(x, str) and x != _ROUTING else x for x in shape]


def _named(names: dict[str, str], kind: str, weights: str) -> str:
    """The package's name of a type of weights. Those that it would read wider than they are (files of llama.cpp, 8 bits
    multiplied in 16) are not taken for others.

    Raises:
        UsageError: it has none.
    """
    if kind not in names or weights.startswith(("q", "iq")) or (kind == "bf16" and bytes_of(weights) != 2):
        raise UsageError(f"--kernels aic has no times of weights in {weights} here", f"--precision; or {_OTHERWISE}")
    return names[kind]
