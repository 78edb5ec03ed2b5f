"""Fits what whole services do beyond the sum of their operations (launches that graphs hide, overlap, the host), on
measured closed loops, and writes the ``service`` and ``host`` parts of ``fitted.json``.
``python tools/fit_service.py MEASURED [--out …] [--check]``.

Of a closed loop in steady state: every step decodes all C sequences (as long as their KV fits), each request prefills
once in O steps, so the mean time between tokens is t(C) + C/O × (t with a prompt of I tokens − t(C)). A few factors,
common to all models and machines, and the host's times per engine family are fitted to the measured means: least
absolute deviations of log time with a normal prior at the operations' own values, by Gauss–Newton. A fifth of the
configuration groups is held out in turn; the error printed and written is theirs.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import whywait.physics.fitted as shipped
from fit_ops import dumps
from whywait.errors import UsageError
from whywait.physics.arch import arch_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import machine
from whywait.physics.step import StepCost, StepWork, seconds, step_cost

Floats = NDArray[np.float64]
_OUT = Path(__file__).resolve().parents[1] / "src" / "whywait" / "physics" / "fitted.json"
_FAMILIES = ("vllm", "sglang", "trtllm")
_COMMON = ("weights", "compute", "experts", "kv", "pairs")
_OWN = ("link", "launch", "small")  # of a family: fused collectives, graphs, fused small kernels
_HOST = ("step_s", "seq_s", "prefill_step_s")
#: Prior: factors of 1, launches and hosts as they start; and the sd of their logarithms.
_START = {"launch": 0.3, "small": 1.0, "step_s": 8e-4, "seq_s": 6e-6, "prefill_step_s": 1e-3}
_SD = {"launch": 0.8, "small": 0.3, "step_s": 0.6, "seq_s": 0.6, "prefill_step_s": 0.6, "link": 0.4}
_SCALE = 1.5  # rows of one configuration err alike: each counts as little as so many groups would


class Row(NamedTuple):
    group: str
    model: str
    system: str
    family: str
    precision: Precision
    layout: Layout
    prompt: float
    answer: float
    seqs: float
    seconds: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--check", action="store_true", help="hold groups out too")
    args = parser.parse_args(argv)
    rows = read(args.measured / "e2e_silicon.csv")
    kept = json.loads(args.out.read_text("utf-8"))
    names = [*_COMMON, *(f"{f} {h}" for f in _FAMILIES for h in (*_OWN, *_HOST))]
    start = np.log([_START.get(n.split()[-1], 1.0) for n in names])
    spread = np.array([_SD.get(n.split()[-1], 0.12) for n in names])
    measured = np.log([r.seconds for r in rows])
    said, slopes = linearised(rows, kept, names, start)
    first = solve(slopes, measured - said, spread, np.zeros(len(names)))
    said, slopes = linearised(rows, kept, names, start + first)
    moved = first + solve(slopes, measured - said, spread, first)
    if args.check:
        off = _held_out(rows, (slopes, measured - said, spread, first))
        print(f"held out: {len(rows)} rows, median {np.median(off):.1%}, p90 {np.quantile(off, 0.9):.1%}")
        kept["service_error"] = [len(rows), round(float(np.median(off)), 4), round(float(np.quantile(off, 0.9)), 4)]
    apply(kept, names, start + moved)
    kept["service_source"] = (
        "ai-dynamo/aiconfigurator 095f58a, measured closed loops (Apache-2.0); tools/fit_service.py"
    )
    args.out.write_text(dumps(kept), "utf-8")
    for name, value in zip(names, np.exp(start + moved), strict=True):
        print(f"{name:24} {value:.4g}")
    return 0


def apply(kept: dict[str, Any], names: Sequence[str], theta: Floats) -> None:
    """The factors into the tables of coefficients."""
    value = dict(zip(names, (float(f"{v:.4g}") for v in np.exp(theta)), strict=True))
    common = {n: value[n] for n in _COMMON}
    kept["service"] = {f: {**common, **{n: value[f"{f} {n}"] for n in _OWN}} for f in _FAMILIES}
    for family in _FAMILIES:
        kept["host"].setdefault(family, {}).update({h: value[f"{family} {h}"] for h in _HOST})


def linearised(
    rows: Sequence[Row], kept: Mapping[str, Any], names: Sequence[str], theta: Floats
) -> tuple[Floats, Floats]:
    """Log of the time predicted for every row at ``theta``, and its slopes."""
    at = _predict(rows, kept, names, theta)
    step = 0.1
    slopes = [
        (_predict(rows, kept, names, theta + step * (np.arange(len(theta)) == i)) - at) / step
        for i in range(len(theta))
    ]
    return at, np.stack(slopes, axis=1)


def solve(slopes: Floats, target: Floats, spread: Floats, done: Floats) -> Floats:
    """The move: least absolute deviations (below 4 % all count alike) and the prior, of which ``done`` is spent."""
    move = np.zeros(slopes.shape[1])
    for _ in range(30):
        weight = 1 / np.maximum(np.abs(target - slopes @ move), 0.04)
        normal = slopes.T @ (slopes * weight[:, None]) / _SCALE + np.diag(1 / spread**2)
        right = slopes.T @ (target * weight) / _SCALE - done / spread**2
        move = np.linalg.solve(normal, right)
    return np.asarray(move, dtype=float)


def _held_out(rows: Sequence[Row], fit: tuple[Floats, Floats, Floats, Floats]) -> Floats:
    slopes, target, spread, done = fit
    groups = sorted({r.group for r in rows})
    off: list[float] = []
    for part in range(5):
        apart = np.isin([r.group for r in rows], groups[part::5])
        move = solve(slopes[~apart], target[~apart], spread, done)
        off += list(np.abs(np.expm1(slopes[apart] @ move - target[apart])))
    return np.array(off)


def _predict(rows: Sequence[Row], kept: Mapping[str, Any], names: Sequence[str], theta: Floats) -> Floats:
    table = json.loads(json.dumps({k: kept[k] for k in ("host", "plain")}))
    apply(table, names, theta)
    whole = {**kept, **table}
    original = shipped.fitted
    shipped.fit_of.cache_clear()
    try:
        shipped.fitted = lambda: whole  # type: ignore[assignment]
        costs = {key: step_cost(arch_of(key[0]), machine(key[1]), key[3], key[4], Efficiency(family=key[2]))
                 for key in {r[1:6] for r in rows}}  # fmt: skip
    finally:
        shipped.fitted = original
        shipped.fit_of.cache_clear()
    return np.log([between_tokens(costs[r[1:6]], r) for r in rows])


def between_tokens(cost: StepCost, row: Row) -> float:
    """Mean s between tokens of the closed loop."""
    context = row.prompt + row.answer / 2
    plain = _step(cost, row.seqs, row.seqs * context, 0.0)
    with_prompt = _step(cost, row.seqs, row.seqs * context, row.prompt)
    return plain + row.seqs / row.answer * (with_prompt - plain)


def _step(cost: StepCost, seqs: float, context: float, prompt: float) -> float:
    seen = min(context, seqs * cost.window)
    pairs = prompt * (prompt + 1) / 2
    seen_pairs = min(pairs, prompt * cost.window)
    row = (seqs + prompt, seqs, context, seen, float(prompt > 0), pairs, seen_pairs)
    return float(seconds(cost, StepWork(*(np.array([v]) for v in row)))[0])


def read(path: Path) -> list[Row]:
    """Aggregated closed loops, not flagged, whose requests do not wait for room (first tokens within 5 s), on one node,
    without attention in parallel over data."""
    out = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ways = int(float(row["tp_label"] or row["tp_size"] or 0))
            simple = row["mode"] == "agg" and not row["flag"] and float(row["attention_dp_size"] or 1) <= 1
            fits = (
                float(row["silicon_ttft_ms"] or 1e9) < 5000
                and 0 < float(row["concurrency"] or 0) <= 256
                and 0 < ways <= 8
            )
            drafts = (
                "DeepSeek-R1" in row["model_path"] and row["measured_date"] >= "2026" and row["backend"] == "trtllm"
            )
            if not (simple and fits) or drafts or row["system"].startswith("gb"):
                continue
            try:
                arch = arch_of(row["model_path"])
            except UsageError:
                continue
            wide = max(1, int(float(row["moe_ep_size"] or 1))) if arch.experts else 1
            share = (1 + float(row["length_ratio_min"] or 1)) / 2
            out.append(Row(row["group"], row["model_path"], row["system"], row["backend"], precision_of(row),
                           Layout(ways, 1, 1, wide if ways % wide == 0 else 1), float(row["isl"]) * share,
                           float(row["osl"]) * share, float(row["concurrency"]),
                           float(row["silicon_tpot_ms"]) / 1e3))  # fmt: skip
    return out


def precision_of(row: Mapping[str, str]) -> Precision:
    """What the record says, with the KV type that recipes of the family use (it does not say)."""
    model, kind = row["model_path"].lower(), row["precision"]
    if "gpt-oss" in model:
        return Precision("bf16", "bf16", "bf16", "mxfp4")
    if kind == "int4":
        return Precision("bf16", "bf16", "bf16", "int4_wo")
    if kind == "bf16" or (not kind and "fp8" not in model):  # not said: what the checkpoint of that name holds
        return Precision()
    kv = "fp8" if row["system"].startswith("b") or row["backend"] == "trtllm" else "bf16"
    if kind == "fp4":
        return Precision("nvfp4", kv, "nvfp4")
    blocks = any(k in model for k in ("deepseek", "qwen3-235b", "qwen3.5", "minimax", "glm"))
    name = "fp8_block" if blocks else "fp8"
    return Precision(name, kv, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
