"""Reads the record of real services (``../shared/measured``) and splits it by configuration.

The files are read where they lie; nothing of them is copied into the repository.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from whywait.physics.arch import Arch, arch_of

#: Configurations whose rows were all looked at while mechanisms were sought (who the client was, what the engine's
#: limits were). They count as training, whatever their hash.
LOOKED_AT = (
    "Qwen/Qwen3-32B|h100_sxm|vllm|nan|agg|4.0|1.0",
    "Qwen/Qwen3-32B|h100_sxm|sglang|nan|agg|8.0|1.0",
    "Qwen/Qwen3-32B|h100_sxm|trtllm|fp8|agg|4.0|1.0",
    "Qwen/Qwen3-32B|h100_sxm|trtllm|fp8|agg|1.0|1.0",
    "meta-llama/Llama-3.1-8B-Instruct|h100_sxm|trtllm|nan|agg|1.0|1.0",
    "meta-llama/Llama-3.1-8B-Instruct|h100_sxm|trtllm|nan|agg|8.0|1.0",
    "meta-llama/Llama-3.1-70B|h200_sxm|trtllm|fp8|agg|2.0|1.0",
    "meta-llama/Llama-3.1-70B|b200_sxm|vllm|fp8|agg|1.0|1.0",
    "meta-llama/Llama-3.1-70B|h100_sxm|vllm|fp8|agg|2.0|1.0",
)


@dataclass(frozen=True)
class Part:
    """Engines of one kind: how many, and how each is laid out."""

    workers: int
    tp: int
    pp: int
    dp: int
    ep: int


@dataclass(frozen=True)
class Row:
    """One measured load point: means of TTFT and TPOT over its requests. ``ratio``: lengths are uniform between that
    share of ``isl`` and ``osl`` and the whole; None: all the same. ``prefill`` only where the service was split."""

    id: str
    group: str
    model: str
    system: str
    backend: str
    version: str
    precision: str
    gemm: str
    experts: str
    inferencex: bool
    date: str
    isl: int
    osl: int
    ratio: float | None
    concurrency: int
    part: Part
    prefill: Part | None
    ttft_ms: float
    tpot_ms: float
    flag: str

    @cached_property
    def arch(self) -> Arch:
        return arch_of(self.model)

    @property
    def dense(self) -> bool:
        """No experts, no latent attention, no linear layers."""
        a = self.arch
        return not (a.experts or a.latent or a.linear_layers)

    @property
    def load(self) -> tuple[int, int, int]:
        return self.isl, self.osl, self.concurrency

    @property
    def at(self) -> tuple[float, ...]:
        """Where the load lies among loads, in logarithms."""
        return math.log(self.concurrency), math.log(self.isl), math.log(self.osl)


def read(folder: Path) -> list[Row]:
    """All rows of ``e2e_silicon.csv``."""
    with (folder / "e2e_silicon.csv").open(newline="", encoding="utf-8") as f:
        return [_row(r) for r in csv.DictReader(f)]


def usable(rows: Iterable[Row], split: bool = False) -> list[Row]:
    """Those without a flag of doubt; of aggregated services, or of split ones."""
    return [r for r in rows if not r.flag and r.concurrency and (r.prefill is not None) == split]


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By configuration, each in order of load."""
    found: dict[str, list[Row]] = defaultdict(list)
    for r in rows:
        found[r.group].append(r)
    return {g: sorted(rs, key=lambda r: (r.isl, r.osl, r.concurrency, r.id)) for g, rs in sorted(found.items())}


def half(group: str) -> str:
    """``train`` or ``test``: by the name's hash, so that nobody chooses; what was looked at is training."""
    if group in LOOKED_AT:
        return "train"
    return "train" if hashlib.sha256(group.encode()).digest()[0] % 2 == 0 else "test"


def anchors(rows: Sequence[Row], most: int = 4) -> list[Row]:
    """The loads a configuration is calibrated on: the lightest and the heaviest of the shape with the longest prompts
    and of the one with the shortest; of one shape, its lightest, middle and heaviest. One row each, the first by id."""
    shapes = sorted({(r.isl, r.osl) for r in rows})
    ends = [shapes[0], shapes[-1]] if len(shapes) > 1 else [shapes[0]]
    chosen: list[Row] = []
    for shape in ends:
        mine = [r for r in rows if (r.isl, r.osl) == shape]
        levels = sorted({r.concurrency for r in mine})
        wanted = [levels[0], levels[-1]] if len(ends) > 1 else [levels[0], levels[len(levels) // 2], levels[-1]]
        for level in dict.fromkeys(wanted):
            chosen.append(min((r for r in mine if r.concurrency == level), key=lambda r: r.id))
    return chosen[:most]


def _row(r: Mapping[str, str]) -> Row:
    split = r["mode"] == "disagg"
    return Row(
        r["id"], r["group"], r["model_path"], r["system"], r["backend"], r["backend_version"] or r["image"],
        r["precision"], r["gemm_quant_mode"], r["moe_quant_mode"], r["inferencex"] == "True", r["measured_date"],
        int(float(r["isl"])), int(float(r["osl"])), float(r["length_ratio_min"]) if r["length_ratio_min"] else None,
        int(float(r["concurrency"] or 0)), _part(r, "decode_" if split else ""),
        _part(r, "prefill_") if split else None,
        float(r["silicon_ttft_ms"] or "nan"), float(r["silicon_tpot_ms"] or "nan"), r["flag"],
    )  # fmt: skip


def _part(r: Mapping[str, str], prefix: str) -> Part:
    def number(name: str) -> int:
        text = r.get(prefix + name) or ""
        return int(float(text)) if text else 1

    tp, dp, ep = number("tp_size"), number("attention_dp_size"), max(1, number("moe_ep_size"))
    if not prefix and dp > 1:
        # Columns of these rows multiply up to more devices than there were: launched as tp=1, dp = all, experts over
        # all.
        label = r.get("tp_label") or ""
        devices = int(float(label)) if label else tp if tp > 1 else min(dp, number("moe_tp_size") * ep)
        devices = min(devices, 8)
        tp, dp, ep = 1, devices, devices if ep > 1 else 1
    return Part(number("num_workers") if prefix else 1, tp, number("pp_size"), dp, ep)
