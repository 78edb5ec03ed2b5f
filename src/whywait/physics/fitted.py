"""The fitted coefficients that ship with the package (``fitted.json``, made by ``tools/fit_ops.py``) and how sure they
are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from whywait.physics.efficiency import Efficiency
from whywait.physics.machines import Accelerator

FAMILIES = ("vllm", "sglang", "trtllm", "llama.cpp")
#: Whose kernels stand in where a family has none of a kind: they share most libraries.
_INSTEAD = {"vllm": ("vllm", "sglang", "trtllm"), "sglang": ("sglang", "vllm", "trtllm"),
            "trtllm": ("trtllm", "sglang", "vllm")}  # fmt: skip
_TYPES = {"nvfp4": ("nvfp4", "fp8", "bf16"), "fp4": ("nvfp4", "fp8", "bf16"), "fp8": ("fp8", "fp8_block", "bf16"),
          "fp8_block": ("fp8_block", "fp8", "bf16"), "mxfp4": ("mxfp4_a8", "mxfp4", "int4_wo", "bf16"),
          "int4_wo": ("int4_wo", "mxfp4", "bf16")}  # fmt: skip


@cache
def fitted() -> Mapping[str, Any]:
    """``fitted.json``."""
    found: Mapping[str, Any] = json.loads(files("whywait.physics").joinpath("fitted.json").read_text("utf-8"))
    return found


@dataclass(frozen=True)
class Fit:
    """The coefficients that hold for one machine and engine family. ``plain``: shares of the data sheet for what has no
    table (see ``fitted.json``, ``plain``)."""

    tables: Mapping[str, Any]
    plain: Mapping[str, Any]
    family: str

    def values(self, op: str, kinds: Sequence[str]) -> tuple[str, Sequence[float]] | None:
        """Coefficients of ``op`` for the first of ``kinds`` that was measured, of the family or of one that stands in;
        with the kind found."""
        for kind in kinds:
            families = self.tables.get(op, {}).get(kind, {})
            for family in _INSTEAD.get(self.family, _INSTEAD["vllm"]):
                if family in families:
                    return kind, families[family]
        return None

    def own(self, op: str, kind: str) -> bool:
        """``op`` of ``kind`` was measured with this family's own kernels."""
        return self.family in self.tables.get(op, {}).get(kind, {})

    def typed(self, op: str, dtype: str) -> tuple[str, Sequence[float]] | None:
        """The same by number type, with the types that stand in for it."""
        return self.values(op, _TYPES.get(dtype, ("bf16",)))


@cache
def fit_of(machine: Accelerator, family: str) -> Fit:
    """The coefficients for ``machine``; those of the one that stands for it (``Accelerator.fit``)."""
    found = fitted()
    plain = {**found["plain"]["default"], **found["plain"].get(machine.fit, {})}
    service = found.get("service", {}).get(family, {})  # launches that graphs hide, small kernels that are fused
    plain["launch"] *= service.get("launch", 1.0)
    plain["small_s"] *= service.get("small", 1.0)
    return Fit(found["machines"].get(machine.fit, {}), plain, family)


def served(efficiency: Efficiency) -> Efficiency:
    """``efficiency`` with what whole services do beyond the sum of their operations (``fitted.json``, ``service``)."""
    found = fitted().get("service", {}).get(efficiency.family, {})
    names = ("weights", "compute", "experts", "kv", "pairs", "link")
    return replace(efficiency, **{n: getattr(efficiency, n) * found.get(n, 1.0) for n in names})


def host_of(family: str) -> Mapping[str, float]:
    """What an engine's host takes, in s (``fitted.json``, ``host``): per step, per sequence and step, per token, per
    step with prefill (``skew_s`` more per collective in it); and, of an engine that schedules ahead, the least time of
    a step and of a sequence in it. ``frontend_s`` and ``frontend_token_s``: before the queue, per request and prompt
    token; ``reply_s``: from a step's end to the client."""
    host = fitted()["host"]
    return {**host["default"], **host.get(family, {})}


@dataclass(frozen=True)
class Prior:
    """How sure a machine's fit is: the sd of the log of each ``Efficiency`` field, and of what the figures are."""

    sd: Mapping[str, float]
    basis: str


def prior_of(machine: Accelerator, family: str = "vllm") -> Prior:
    """Before any measurement of the service itself. The sd of a kind of operation is the median error of its fit on
    shapes held out, taken as normal, and what whole services deviate beyond their operations (``fitted.json``,
    ``service_sd``: overlap, clocks, other versions), and what standing in for another machine adds."""
    found = fitted()
    ops = {"weights": "product", "compute": "product", "experts": "experts", "kv": "decode", "pairs": "prefill",
           "link": "all-reduce"}  # fmt: skip
    measured = machine.fit in found["machines"]
    sd = {}
    for name, base in found["service_sd"].items():
        errors = [e[6] for e in found["errors"] if e[0] == machine.fit and e[1] == ops.get(name)]
        own = 1.48 * sorted(errors)[len(errors) // 2] if errors else (0.25 if name in ops and not measured else 0.0)
        sd[name] = math.hypot(base, own, machine.scatter if name in ops else 0.0)
    known = {f.name for f in fields(Efficiency)}
    what = f"operations measured on {machine.fit}" if measured else "data sheet × achieved shares"
    stands = "" if not machine.scatter or not measured else f", standing for {machine.name}"
    return Prior({k: round(v, 4) for k, v in sd.items() if k in known}, f"{what}{stands} ({family})")
