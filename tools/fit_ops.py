"""Fits how well kernels do against their machine's data sheet, on measured tables of operations, and writes the
coefficients that ship with the package. ``python tools/fit_ops.py TABLES [--out src/whywait/physics/fitted.json]``.

Products and experts: the plain roofline of ``physics.rooflines`` times a factor per shape, given at knots and linear in
the logarithms between (least absolute deviations of log time by reweighting, a slight pull to zero where no row is).
Attention: linear in sequences, bytes and pairs, non-negative, least relative deviations. A quarter of the shapes (of (n, k),
of models' experts, of heads) is held out; the error written is that of the held-out shapes, then all are fitted.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fit_attention import attention
from fit_links import links
from numpy.typing import NDArray
from op_tables import MACHINES, TYPES, Floats, Table, newest
from whywait.physics import rooflines as r
from whywait.physics.hats import weights
from whywait.physics.machines import Accelerator, machine

Knots = Sequence[Sequence[float]]
_OUT = Path(__file__).resolve().parents[1] / "src" / "whywait" / "physics" / "fitted.json"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--only", nargs="*", default=list(MACHINES))
    args = parser.parse_args(argv)
    kept = json.loads(args.out.read_text("utf-8")) if args.out.is_file() else {}
    errors = [e for e in kept.get("errors", []) if e["machine"] not in args.only]
    machines = dict(kept.get("machines", {}))
    for name in args.only:
        machines[name], found = fit_machine(args.tables, name)
        errors += found
        for e in found:
            print(f"{name:9} {e['op']:14} {e['type']:10} {e['family']:7} {e['version']:10} rows {e['rows']:6} "
                  f"held out: median {e['median']:6.1%} p90 {e['p90']:6.1%}", flush=True)  # fmt: skip
        kept.update(machines=machines, errors=errors)
        args.out.write_text(dumps(kept), "utf-8")  # as each is done
    kept.update(source="ai-dynamo/aiconfigurator-core 0.12.0 measured tables (Apache-2.0)", fitted="2026-11-30",
                machines=machines, errors=errors)  # fmt: skip
    args.out.write_text(dumps(kept), "utf-8")
    print(f"{args.out}: {args.out.stat().st_size / 1024:.0f} KiB")
    return 0


def dumps(found: dict[str, Any]) -> str:
    """A line per list of numbers, so that a change shows as one."""
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False)
    out, inside = [], 0
    for line in text.split("\n"):
        opens = line.rstrip().endswith("[")
        if inside and not opens:
            out[-1] += line.strip()
        else:
            out.append(line)
        closes = line.strip().rstrip(",") == "]"
        inside = inside + opens - closes if (opens or closes) else inside
    return "\n".join(out) + "\n"


def fit_machine(root: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Coefficients of one machine and their errors."""
    spec = machine(name)
    coefficients: dict[str, Any] = {}
    errors: list[dict[str, Any]] = []
    for op, kind, table, value, error in (*products(root, name, spec), *experts(root, name, spec),
                                          *attention(root, name, spec), *links(root, name)):  # fmt: skip
        coefficients.setdefault(op, {}).setdefault(kind, {})[table.family] = value
        errors.append({"machine": name, "op": op, "type": kind, "family": table.family, "version": table.version,
                       "rows": error[0], "median": round(error[1], 4), "p90": round(error[2], 4)})  # fmt: skip
    return coefficients, errors


def products(
    root: Path, name: str, spec: Accelerator
) -> Iterator[tuple[str, str, Table, Any, tuple[int, float, float]]]:
    """Matrix products. 16-bit ones run the same library in every engine: one fit, of the first that has them. Tables of
    8-bit blocks that a launch by the host dominates (small products as slow as large ones) are left out."""
    done = set()
    for table in newest(root, name, "gemm", "gemm_perf"):
        for raw in np.unique(table.text("gemm_dtype")):
            kind = TYPES.get(str(raw))
            if kind is None or (kind == "bf16" and kind in done):
                continue
            m, n, k = table.number("m"), table.number("n"), table.number("k")
            t = table.where((table.text("gemm_dtype") == raw) & (m <= 16384) & (n >= 128) & (k >= 128) & (n * k < 8e8))
            m, n, k = t.number("m"), t.number("n"), t.number("k")
            if np.median(t.columns["latency"][(n * k < 3e6) & (m <= 64)]) > 40e-6:
                continue
            done.add(kind)
            plain = r.product((m, n, k), kind, spec.read_bytes_per_s, spec.flops).total()  # type: ignore[arg-type]
            target = np.log(t.columns["latency"] / plain)
            value, error = fit_factor((m, n, k), r.PRODUCT_KNOTS, target, held(n * 1e6 + k))
            yield "product", kind, t, value, error


def experts(
    root: Path, name: str, spec: Accelerator
) -> Iterator[tuple[str, str, Table, Any, tuple[int, float, float]]]:
    """Experts, drawn with a mild power law as routers do."""
    for table in newest(root, name, "moe", "moe_perf"):
        kinds = {str(raw) for raw in np.unique(table.text("moe_dtype"))} & set(TYPES)
        for raw in sorted(kinds):
            inter, ways = table.number("inter_size"), table.number("moe_tp_size")
            keep = (table.text("moe_dtype") == raw) & (table.text("distribution") == "power_law_1.01")
            t = table.where(keep & (table.number("moe_ep_size") <= 32) & (inter / ways >= 64))
            if len(t) < 500:
                continue
            total, spread = t.number("num_experts"), t.number("moe_ep_size")
            shape = r.ExpertShape(t.number("num_tokens"), t.number("hidden_size"), t.number("inter_size") / t.number("moe_tp_size"),
                                  t.number("topk"), total, np.maximum(total / spread, 1))  # fmt: skip
            kind = TYPES[raw]
            rate = {"mxfp4": {"bf16": spec.flops["bf16"]}, "int4_wo": {"bf16": spec.flops["bf16"]}}.get(
                kind, spec.flops
            )
            plain = r.experts(shape, kind.removesuffix("_a8"), spec.read_bytes_per_s, rate).total()
            target = np.log(t.columns["latency"] / plain)
            apart = held(shape.hidden * 1e9 + shape.inter * 1e3 + total + spread * 7)
            value, error = fit_factor(r.expert_features(shape, spread), r.EXPERT_KNOTS, target, apart)
            yield "experts", kind, t, value, error


def held(key: Floats) -> NDArray[np.bool_]:
    """A quarter of the distinct values of ``key``, by their digest."""
    values, index = np.unique(key, return_inverse=True)
    chosen = np.array([zlib.crc32(repr(float(v)).encode()) % 4 == 0 for v in values])
    return np.asarray(chosen[index], dtype=bool)


def fit_factor(
    features: Sequence[Floats], knots: Knots, target: Floats, apart: NDArray[np.bool_]
) -> tuple[list[int], tuple[int, float, float]]:
    """Values at the knots (hundredths of log) of all rows, and rows, median and 90th percentile of the relative error of
    the rows ``apart`` when the others are fitted."""
    cells, share = weights(features, knots)
    size = int(np.prod([len(k) for k in knots]))
    off = np.abs(np.expm1((_solve(cells[~apart], share[~apart], size, target[~apart])[cells] * share).sum(-1) - target))
    value = _solve(cells, share, size, target)
    error = (len(target), float(np.median(off[apart])), float(np.quantile(off[apart], 0.9)))
    return [round(100 * float(v)) for v in value], error


def _solve(cells: NDArray[np.int64], share: Floats, size: int, target: Floats) -> Floats:
    """Least absolute deviations: weighted least squares, four rounds. Knots without rows take their neighbours' mean
    value through a slight pull of all towards the median."""
    middle = float(np.median(target))
    design = np.zeros((len(target), size), dtype=np.float32)
    np.put_along_axis(design, cells, share.astype(np.float32), axis=1)
    weight = np.ones(len(target), dtype=np.float32)
    value = np.zeros(size)
    for _ in range(4):
        left = design * weight[:, None]
        normal = (left.T @ design).astype(float) + (2e-4 * len(target) / size + 1e-6) * np.eye(size)
        value = np.linalg.solve(normal, (left.T @ (target - middle).astype(np.float32)).astype(float))
        off = np.abs((value[cells] * share).sum(-1) + middle - target)
        weight = (1 / np.maximum(off, 0.02)).astype(np.float32)
        weight /= weight.mean()
    return value + middle


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
