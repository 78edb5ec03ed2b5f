"""Fits collectives: all-reduce by size and devices, all-to-all of experts: see ``fit_ops``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from op_tables import Floats, Table, newest, read
from scipy.optimize import nnls
from whywait.physics import rooflines as r
from whywait.physics.hats import evaluate, weights

Found = tuple[str, str, Table, Any, tuple[int, float, float]]


def links(root: Path, name: str) -> Iterator[Found]:
    for table in newest(root, name, "comm", "custom_allreduce_perf"):
        backend = table.text("backend") if "backend" in table.columns else np.full(len(table), "graph")
        graph = np.char.endswith(backend, "graph")
        t = table.where(graph) if graph.any() else table
        for devices in (2, 4, 8):
            rows = t.where(t.number("num_gpus") == devices)
            if len(rows) < 10:
                continue
            size, log = rows.number("message_size"), np.log(rows.columns["latency"])
            apart = np.arange(len(size)) % 4 == 2
            off = np.abs(np.expm1(evaluate(_at_knots(size[~apart], log[~apart]), (size,), (r.REDUCE_KNOTS,)) - log))[
                apart
            ]
            value = [float(f"{v:.4g}") for v in 1e6 * np.exp(_at_knots(size, log))]
            yield (
                "all-reduce",
                str(devices),
                rows,
                value,
                (len(rows), float(np.median(off)), float(np.quantile(off, 0.9))),
            )
    yield from _all_to_all(root, name)


def _at_knots(size: Floats, log: Floats) -> Floats:
    cells, share = weights((size,), (r.REDUCE_KNOTS,))
    design = np.zeros((len(size), len(r.REDUCE_KNOTS)))
    np.put_along_axis(design, cells, share, axis=1)
    return np.asarray(np.linalg.solve(design.T @ design + 1e-6 * np.eye(design.shape[1]), design.T @ log), dtype=float)


def _all_to_all(root: Path, name: str) -> Iterator[Found]:
    """DeepEP within a node: low-latency kernels and those for throughput, dispatch and combine together; each a constant
    and a rate over tokens × choices × width."""
    folder = root / name / "comm" / "sglang"
    for kind, stem, columns in (("few", "wideep_deepep_ll_perf", ("dispatch_avg_t_us", "combine_avg_t_us")),
                                ("many", "wideep_deepep_normal_perf", ("dispatch_transmit_us", "combine_transmit_us"))):  # fmt: skip
        for path in sorted(folder.glob(f"*/{stem}.parquet"))[:1]:
            t = read(path, "sglang")
            keep = t.number("node_num") == 1
            if "dispatch_sms" in t.columns:
                keep &= t.number("dispatch_sms") == 24
            t = t.where(keep)
            seconds = 1e-6 * (t.number(columns[0]) + t.number(columns[1]))
            moved = t.number("num_token") * t.number("num_topk") * t.number("hidden_size")
            terms = np.column_stack([np.ones(len(moved)), moved * 1e-12])
            apart = np.arange(len(moved)) % 4 == 2
            off = np.abs(terms @ _rate(terms[~apart], seconds[~apart]) / seconds - 1)[apart]
            value = [float(f"{v:.4g}") for v in _rate(terms, seconds)]
            yield "all-to-all", kind, t, value, (len(moved), float(np.median(off)), float(np.quantile(off, 0.9)))


def _rate(terms: Floats, seconds: Floats) -> Floats:
    weight = 1 / seconds
    value = np.zeros(2)
    for _ in range(8):
        value, _ = nnls(terms * weight[:, None], seconds * weight)
        weight = 1 / seconds / np.sqrt(np.maximum(np.abs(terms @ value / seconds - 1), 0.03))
    return np.asarray(value, dtype=float)
