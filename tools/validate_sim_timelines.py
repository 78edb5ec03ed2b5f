"""Case 3: two recorded vLLM runs of 300 requests, replayed with the arrivals, the prompts and the limits they had.

Calibrated on how the first ``CALIBRATED_ON`` requests (in order of arrival) fared; all that came later is predicted.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from validate_sim_fit import FIRST_SD
from validate_sim_replay import moved
from validate_sim_tables import table
from whywait.core.schedule import Schedule
from whywait.judge.calibrate import Knobs, Point, Prior, Seen
from whywait.judge.calibrate_fit import calibrate
from whywait.physics.arch import arch_of
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import machine
from whywait.sim import service
from whywait.sim.deployment import Deployment
from whywait.sim.engines import engine_of
from whywait.sim.loads import Options

Floats = NDArray[np.float64]
CALIBRATED_ON, PARTS = 100, 4
RUNS = {"RTX4090/Llama-3.1-8B": ("rtx-4090", "sharegpt-llama-3.1-8b-300-sps10.jsonl"),
        "RTXPRO6000/Qwen3-32B": ("rtx-pro-6000", "sharegpt-qwen3-32b-300-sps10.jsonl")}  # fmt: skip
#: Kernels of these machines were never measured: as wide as what the data sheet leaves open.
SD = {k: max(v, 0.3) if k in ("weights", "compute", "kv", "pairs", "link") else v for k, v in FIRST_SD.items()}
METRICS = ("TTFT", "TPOT", "queue")


@dataclass(frozen=True)
class Timeline:
    """Stamps (s) per request from the first arrival; ``series``: per second, as the engine logged it."""

    name: str
    schedule: Schedule
    deployment: Deployment
    arrived: Floats
    scheduled: Floats
    first: Floats
    last: Floats
    series: Mapping[str, Floats]

    def values(self) -> dict[str, Floats]:
        n = np.maximum(self.schedule.output_tokens - 1, 1)
        return {
            "TTFT": self.first - self.arrived,
            "TPOT": (self.last - self.first) / n,
            "queue": self.scheduled - self.arrived,
        }


def read(folder: Path, name: str) -> Timeline:
    device, trace = RUNS[name]
    run = folder / "request_timelines" / name
    with (run / "requests.jsonl").open(encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    meta = json.loads((run / "meta.json").read_text("utf-8"))

    def column(key: str) -> Floats:
        return np.array([r[key] for r in rows], dtype=np.float64)

    # Stamps of the engine are on another clock; no request can have been queued before it arrived.
    shift = float((column("queued_ts") - column("arrival_time")).min()) + float(column("arrival_time").min())
    stamps = {k: column(k) - shift for k in ("scheduled_ts", "first_token_ts", "last_token_ts")}
    arrived = column("arrival_time") - column("arrival_time").min()
    with (folder.parent / "traces" / "llmservingsim" / trace).open(encoding="utf-8") as f:
        prompts = [json.loads(line)["input_tok_ids"] for line in f]
    with (run / "timeseries.csv").open(newline="", encoding="utf-8") as f:
        logged = list(csv.DictReader(f))
    series = {k: np.array([float(r[k]) for r in logged]) for k in ("t", "running", "waiting", "kv_cache_pct")}
    return Timeline(name, _schedule(rows, prompts, arrived), _deployment(device, meta), arrived, stamps["scheduled_ts"],
                    stamps["first_token_ts"], stamps["last_token_ts"], series)  # fmt: skip


def _schedule(rows: list[dict[str, Any]], prompts: list[list[int]], arrived: Floats) -> Schedule:
    n, size = len(rows), 16
    blocks = []
    for ids in prompts:
        digest, chain = hashlib.sha256(), []
        for k in range(len(ids) // size):
            digest.update(np.array(ids[k * size : (k + 1) * size], np.int64).tobytes())
            chain.append(int.from_bytes(digest.digest()[:7], "big"))
        blocks.append(tuple(chain))
    prompt, answer = (np.array([r[k] for r in rows], np.int64) for k in ("input_toks", "output_toks"))
    due = (arrived * 1e9).round().astype(np.int64)
    return Schedule(np.arange(n), np.zeros(n, np.int64), prompt, answer, due, blocks=tuple(blocks), block_tokens=size)


def _deployment(device: str, meta: Mapping[str, Any]) -> Deployment:
    told, accelerator = meta["engine_kwargs"], machine(device)
    engine = dataclasses.replace(
        engine_of("vllm", accelerator), max_seqs=told["max_num_seqs"], token_budget=told["max_num_batched_tokens"],
        kv_blocks=meta.get("kv_cache", {}).get("num_gpu_blocks"), ahead=True, frontend_s=0.0, reply_s=0.0,
    )  # fmt: skip
    layout = Layout(tp=told["tensor_parallel_size"])
    return Deployment(accelerator, arch_of(meta["model"]), Precision(), layout, 1, engine)


@dataclass(frozen=True)
class Replay:
    """The same of the simulated run."""

    values: dict[str, Floats]
    series: dict[str, Floats]


def replay(run: Timeline, multipliers: Mapping[str, float]) -> Replay:
    d = moved(run.deployment, multipliers)
    p, r, t = service.run_point(d, run.schedule, "trace", math.nan, options=Options(keep="steps"))
    n = np.maximum(run.schedule.output_tokens - 1, 1)
    at = run.series["t"]
    k = np.clip(np.searchsorted(r.steps.t_s, at, side="right") - 1, 0, len(r.steps.t_s) - 1)
    busy = at < r.end_s
    # A row of steps is of its first: what came since then waits too, as long as it goes on.
    since = np.searchsorted(run.arrived, at, side="right") - np.searchsorted(run.arrived, r.steps.t_s[k], side="right")
    series = {
        "running": np.where(busy, (r.steps.decode_seqs + r.steps.prefill_seqs)[k], 0.0),
        "waiting": np.where(busy, r.steps.waiting[k] + since, 0.0),
        "kv_cache_pct": np.where(busy, 100.0 * r.steps.kv_used[k] / p.pools[0].blocks, 0.0),
    }
    return Replay({"TTFT": t.first - t.due, "TPOT": (t.last - t.first) / n, "queue": t.scheduled - t.due}, series)


def calibrate_on_first(run: Timeline) -> dict[str, float]:
    """Multipliers by the mean TTFT and TPOT of ``PARTS`` groups of the first requests."""
    groups = np.array_split(np.arange(CALIBRATED_ON), PARTS)
    seen = run.values()
    points = [
        Point(str(i), (math.log(i + 1.0), 0.0, 0.0),
              {m: Seen(float(seen[k][g].mean())) for m, k in (("ttft_ms.mean", "TTFT"), ("tpot_ms.mean", "TPOT"))})
        for i, g in enumerate(groups)
    ]  # fmt: skip
    known: dict[tuple[float, ...], Replay] = {}

    def predict(multipliers: Mapping[str, float], index: int) -> Mapping[str, float]:
        key = tuple(multipliers.values())
        if key not in known:
            known[key] = replay(run, multipliers)
        v, g = known[key].values, groups[index]
        return {"ttft_ms.mean": float(v["TTFT"][g].mean()), "tpot_ms.mean": float(v["TPOT"][g].mean())}

    free = {"weights", "compute", "kv", "pairs", "step", "sequence", "prefill_step"}
    if run.deployment.layout.devices > 1:
        free.add("link")
    if run.deployment.engine.kv_blocks is None:
        free.add("kv_space")
    found = calibrate(points, predict, Prior({k: v for k, v in SD.items() if k in free}), Knobs(floor={}, doubt=0.5))
    return found.multipliers()


def errors(run: Timeline, sim: Replay) -> tuple[list[list[str]], list[float], list[float]]:
    """Lines of the table: of the requests that came after those calibrated on, then of all; means and p99 of each."""
    lines, means, tails = [], [], []
    seen = run.values()
    for of, part in (("later", slice(CALIBRATED_ON, None)), ("all", slice(None))):
        for m in METRICS:
            a, b = seen[m][part], sim.values[m][part]
            pairs = [(float(f(a)), float(f(b))) for f in (np.mean, np.median, lambda x: np.quantile(x, 0.99))]
            off = [y / x - 1 for x, y in pairs]
            lines.append([of, m, *(f"{x:.3g} / {y:.3g} ({e:+.1%})" for (x, y), e in zip(pairs, off, strict=True))])
            means.append(abs(off[0]))
            tails.append(abs(off[2]))
    for key, name in (("running", "running"), ("waiting", "waiting"), ("kv_cache_pct", "KV %")):
        a, b = run.series[key], sim.series[key]
        if a.mean() > 0:
            bias = float(b.mean() / a.mean() - 1)
            away = f"off by {float(np.abs(b - a).mean() / a.mean()):.1%} on average"
            lines.append(["over time", name, f"{a.mean():.3g} / {b.mean():.3g} ({bias:+.1%})", away, ""])
            means.append(abs(bias))
    return lines, means, tails


def texts(folder: Path) -> dict[str, str]:
    out = []
    for name in RUNS:
        run = read(folder, name)
        found = calibrate_on_first(run)
        lines, _, _ = errors(run, replay(run, found))
        moved_text = ", ".join(f"{k} × {v:.2f}" for k, v in found.items())
        head = ["requests", "metric", "mean: measured / simulated", "median", "p99"]
        out.append(
            f"{name.replace('/', ', ')}, calibrated on its first {CALIBRATED_ON} requests ({moved_text}):\n\n"
            f"{table(head, lines)}"
        )
    return {"case 3": "\n\n".join(out)}
