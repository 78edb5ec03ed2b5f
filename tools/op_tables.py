"""Reads the measured tables of operations that the priors are fitted on (not part of the repository; see docs/physics.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from arro3.io import read_parquet
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MACHINES = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s")
FAMILIES = ("vllm", "sglang", "trtllm")
#: Names of number types in the tables, as ours.
TYPES = {"bfloat16": "bf16", "float16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4",
         "int4_wo": "int4_wo", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4_a8"}  # fmt: skip


class Table(NamedTuple):
    """Rows of one measured table, by column; latency in seconds. ``version`` is the engine's (or library's)."""

    family: str
    version: str
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, keep: NDArray[np.bool_]) -> Table:
        return Table(self.family, self.version, {k: v[keep] for k, v in self.columns.items()})

    def number(self, name: str) -> Floats:
        return np.asarray(self.columns[name], dtype=float)

    def text(self, name: str) -> NDArray[Any]:
        return np.asarray(self.columns[name], dtype=str)


def newest(root: Path, machine: str, kind: str, name: str) -> Iterator[Table]:
    """The newest table of each engine with rows of gated experts, where experts they are."""
    for family in FAMILIES:
        folder = root / machine / kind / family
        versions = sorted(
            (p for p in folder.glob(f"*/{name}.parquet")), key=lambda p: _order(p.parent.name), reverse=True
        )
        for path in versions:
            table = read(path, family)
            if name == "moe_perf":
                table = table.where(_gated(table))
            if len(table):
                yield table
                break


def read(path: Path, family: str) -> Table:
    whole = read_parquet(str(path)).read_all()
    columns = {n: np.asarray(whole.column(n).to_numpy()) for n in whole.schema.names}
    columns = {n: v.astype(str) if v.dtype == object else v for n, v in columns.items()}
    if "latency" in columns:
        columns["latency"] = np.asarray(columns["latency"], dtype=float) * 1e-3
    if "window_size" not in columns:
        columns["window_size"] = np.zeros(whole.num_rows)
    return Table(family, path.parent.name, columns)


def _gated(table: Table) -> NDArray[np.bool_]:
    """Experts of three matrices: those of the Nemotron family have two."""
    inter, chosen = table.number("inter_size"), table.number("topk")
    plain = np.char.find(table.text("kernel_source"), "nongated") >= 0
    return ~(plain | (inter == 1856) | (inter == 2688) | (chosen == 22))


def _order(version: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """1.3.0rc20 after 1.3.0rc5, and 1.3.0 after both."""
    main, _, rest = version.partition("rc")
    return tuple(int(n) for n in re.findall(r"\d+", main)), (int(rest) if rest.isdigit() else 1 << 30,)
