"""Fits power by what a device is busy with, on services measured at many batch sizes, and writes the ``power`` part of
``fitted.json``. ``python tools/fit_power.py MEASURED [--out …]``.

H100 and B200: ``mlenergy.csv`` (mean power, batch and throughput of a service; ml.energy leaderboard; read here, not
kept).
A100: ``splitwise_perf_model.csv`` (power as a share of the rating in decode, and its peak in prefill). The step model
gives the seconds by resource of a step at that batch, the measurement its wall time; what the model does not account
for is time in which little is drawn. Shares are non-negative and bounded, least relative deviations; a fifth of the
groups (machine, model) is held out in turn, and the error written is that of the held-out rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fit_ops import dumps
from least import bounded
from whywait.errors import UsageError
from whywait.physics.arch import arch_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.kernels import RESOURCES
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import machine
from whywait.physics.step import StepParts, StepWork, step_parts, work

Floats = NDArray[np.float64]
_OUT = Path(__file__).resolve().parents[1] / "src" / "whywait" / "physics" / "fitted.json"
_PROMPT = 250.0  # tokens: the chat and question sets of the leaderboard do not give it
#: Not fitted. Idle: of H100 with a model loaded, 110–120 W of 700 (as nvidia-smi shows); slowdown: Splitwise's capped
#: H100 (half the power: prompts 1.3 times as long; Patel et al. 2024, arXiv 2311.18677).
_IDLE, _CAP, _SLOWER = 0.17, 0.5, 1.3
_MOST = 1.2  # a share is at most this: the rating is the most that is drawn, and busy time is a little overstated


class Row(NamedTuple):
    group: str
    share: float  # of the rated power
    parts: Floats  # (5,) seconds by resource
    wall_s: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--out", type=Path, default=_OUT)
    args = parser.parse_args(argv)
    rows = {"h100_sxm": _leaderboard(args.measured, "H100"), "b200_sxm": _leaderboard(args.measured, "B200"),
            "a100_sxm": _splitwise(args.measured)}  # fmt: skip
    exponent = math.log((1 - _IDLE) / (_CAP - _IDLE)) / math.log(_SLOWER)
    found: dict[str, Any] = {"default": {"idle": _IDLE, "exponent": round(exponent, 2)}}
    errors = []
    everything = [r for group in rows.values() for r in group]
    for name, group in (("default", everything), *rows.items()):
        shares = dict(zip(("active", *RESOURCES), (round(float(v), 3) for v in _solve(group)), strict=True))
        found.setdefault(name, {}).update(shares)
        off = held_out(group)
        errors.append({"machine": name, "rows": len(group), "median": round(float(np.median(off)), 4),
                       "p90": round(float(np.quantile(off, 0.9)), 4)})  # fmt: skip
        print(
            f"{name:9} rows {len(group):4} held out: "
            f"median {np.median(off):.1%} p90 {np.quantile(off, 0.9):.1%} {shares}"
        )
    kept = json.loads(args.out.read_text("utf-8"))
    source = "ml.energy leaderboard (0cd52da), Splitwise (8f99e7d); idle and cap: tools/fit_power.py"
    kept.update(power=found, power_errors=errors, power_source=source)
    args.out.write_text(dumps(kept), "utf-8")
    return 0


def terms(rows: Sequence[Row]) -> Floats:
    """(rows, 6): the part of the time that a device is on, then by resource; what wall time leaves is on and
    waiting."""
    parts = np.array([r.parts for r in rows])
    wall = np.maximum(parts.sum(axis=1), [r.wall_s for r in rows])
    return np.column_stack([np.ones(len(rows)), parts / wall[:, None]])


def _solve(rows: Sequence[Row]) -> Floats:
    share = np.array([r.share for r in rows])
    weight = 1 / share
    value = np.zeros(1 + len(RESOURCES))
    for _ in range(6):
        value = bounded(terms(rows) * weight[:, None], share * weight, _MOST)
        weight = 1 / share / np.sqrt(np.maximum(np.abs(terms(rows) @ value / share - 1), 0.02))
    return np.asarray(value, dtype=float)


def held_out(rows: Sequence[Row]) -> Floats:
    """Relative errors of rows of groups that the fit has not seen."""
    groups = sorted({r.group for r in rows})
    off: list[float] = []
    for part in range(5):
        apart = set(groups[part::5])
        value = _solve([r for r in rows if r.group not in apart])
        test = [r for r in rows if r.group in apart]
        if test:
            said = np.minimum(terms(test) @ value, 1.0)
            off += list(np.abs(said / np.array([r.share for r in test]) - 1))
    return np.array(off)


def _leaderboard(folder: Path, gpu: str) -> list[Row]:
    out = []
    with (folder / "mlenergy.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            devices = int(row["num_gpus"])
            if row["gpu_model"] != gpu:
                continue
            try:
                arch = arch_of(row["model_id"])
            except UsageError:
                continue
            kind = {"fp8": "fp8_block"}.get(row["weight_precision"], "bf16")
            experts = "mxfp4" if row["weight_precision"] == "mxfp4" else None
            wide = int(row["expert_parallel"]) if arch.experts else 1
            layout = Layout(devices, 1, 1, wide if wide > 1 else 1)
            parts = step_parts(arch, machine(gpu), Precision(kind, "bf16", kind, experts), layout, Efficiency())
            batch, answer = float(row["avg_batch_size"]), float(row["avg_output_len"])
            wall = batch / float(row["output_throughput_tokens_per_sec"])
            share = float(row["avg_power_watts"]) / devices / (machine(gpu).tdp_w or 1.0)
            out.append(Row(f"{gpu} {row['nickname']}", share, _mixed(parts, batch, answer), wall))
    return out


def _mixed(parts: StepParts, batch: float, answer: float) -> Floats:
    """Seconds by resource of a step of ``batch`` sequences with its share of prefill."""
    plain = _step(parts, batch, batch * (_PROMPT + answer / 2), 0.0)
    with_prompt = _step(parts, batch, batch * (_PROMPT + answer / 2), _PROMPT)
    return plain + batch / answer * (with_prompt - plain)


def _step(parts: StepParts, seqs: float, context: float, prompt: float) -> Floats:
    seen = min(context, seqs * parts.window) if parts.window else 0.0
    row = (seqs + prompt, seqs, context, seen, float(prompt > 0), prompt * prompt / 2, 0.0)
    return work(parts, StepWork(*(np.array([v]) for v in row)))[:, 0]


def _splitwise(folder: Path) -> list[Row]:
    out = []
    with (folder / "splitwise_perf_model.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["hardware"] != "a100-80gb" or row["model"] != "llama2-70b" or float(row["average_power"]) <= 0.2:
                continue
            ways, batch = int(row["tensor_parallel"]), float(row["batch_size"])
            prompt, answer = float(row["prompt_size"]), float(row["token_size"])
            parts = step_parts(arch_of("Llama-2-70b"), machine("a100"), Precision(), Layout(ways), Efficiency())
            decode = _step(parts, batch, batch * (prompt + answer / 2), 0.0)
            group = f"tp{ways} {row['prompt_size']}x{row['batch_size']}"
            out.append(Row(group, float(row["average_power"]), decode, float(row["token_time"]) / 1e3))
            filled = (prompt * batch, 0.0, 0.0, 0.0, batch, batch * prompt * prompt / 2, 0.0)
            prefill = work(parts, StepWork(*(np.array([v]) for v in filled)))[:, 0]
            out.append(Row(group, min(float(row["peak_power"]), 1.0), prefill, float(row["prompt_time"]) / 1e3))
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
