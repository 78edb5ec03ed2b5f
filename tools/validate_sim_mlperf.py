"""Case 4: MLPerf v4.1 Server (Poisson arrivals), Llama-2-70B by TensorRT-LLM; calibrated on the Offline run of the same
system, which says one thing: tokens per second with all samples there at once.

Near the limit the time per token is the fixed part of a step over what is left of the capacity, so that some percent of
a step's length make half of the time per token. Server streams its tokens and Offline does not: what that costs per
sequence and step is one figure for all systems, fitted on those of one half and used for all.

Layouts and batch limits as NVIDIA published them (github.com/mlcommons/inference_results_v4.1, ``closed/NVIDIA/configs/
llama2-70b``); other submitters of the same devices are taken to use them too. Systems whose layout is not published
there are left out.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from validate_sim_fit import FIRST_SD
from validate_sim_replay import moved
from validate_sim_tables import table
from whywait.core.schedule import Schedule
from whywait.judge.calibrate import Calibration, Knobs, Point, Prior, Seen
from whywait.judge.calibrate_check import spread
from whywait.judge.calibrate_fit import calibrate
from whywait.physics.arch import arch_of
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import machine
from whywait.sim import service
from whywait.sim.deployment import Deployment
from whywait.sim.engines import engine_of
from whywait.sim.loads import Options

Floats = NDArray[np.float64]
TOKENS = 294.45  # mean answer of the benchmark's samples; the published lengths are of another tokeniser and shorter
TTFT_S, TPOT_S = 2.0, 0.2  # the benchmark's limits, of the 99th percentile
SAMPLES = 24576
#: Requests simulated under Poisson arrivals, and those at the beginning that are not counted: near its limit a service
#: takes minutes to fill, which runs of 40 minutes hardly show.
SERVED, FILLING = 73728, 24576
#: By a part of the accelerator's name: machine, devices of an engine, batch limit Offline and Server.
LAYOUTS: Mapping[str, tuple[str, int, int, int]] = {
    "H100-SXM": ("h100", 2, 896, 1024), "H200-SXM": ("h200", 1, 806, 896),
    "GH200 Grace Hopper Superchip 144GB": ("h200", 1, 806, 806),  # the same memory: HBM3e
}  # fmt: skip
STREAMING = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)  # times the host's cost per sequence and step that are tried
SHOWN = ("p99 TTFT", "p99 TPOT", "mean TPOT", "limit")
EXPECTED = {"p99 TTFT": "≤ 25 %", "p99 TPOT": "≤ 25 %", "mean TPOT": "", "limit": "≤ 10 %"}


@dataclass(frozen=True)
class System:
    """One submission: what it ran Offline and under Poisson arrivals."""

    name: str
    deployment: Deployment
    offline_batch: int
    offline: float  # tokens/s
    qps: float
    served: float  # tokens/s
    seen: dict[str, float]  # s


def read(folder: Path) -> list[System]:
    with (folder / "mlperf_llm_loadgen.csv").open(newline="", encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if r["benchmark"].startswith("llama2-70b") and r["valid"] == "VALID"]
    found: dict[str, System] = {}
    for r in rows:
        layout = next((v for k, v in LAYOUTS.items() if k in r["accelerator"]), None)
        if r["scenario"] != "Server" or layout is None or r["system"] in found or "TensorRT" not in r["framework"]:
            continue
        offline = [o for o in rows if o["system"] == r["system"] and o["scenario"] == "Offline"]
        if offline and int(float(r["accel_per_node"])) % layout[1] == 0:
            found[r["system"]] = _system(r, offline[0], layout)
    return list(found.values())


def _system(server: Mapping[str, str], offline: Mapping[str, str], layout: tuple[str, int, int, int]) -> System:
    name, tp, batch, server_batch = layout
    device = machine(name)
    engine = dataclasses.replace(
        engine_of("trtllm", device), max_seqs=server_batch, token_budget=16384, ahead=False, reserve="none",
        prefix_cache=False, memory_share=0.9,
    )  # fmt: skip
    replicas = int(float(server["accel_per_node"])) // tp
    d = Deployment(device, arch_of("meta-llama/Llama-2-70b"), Precision("fp8", "fp8", "fp8"), Layout(tp=tp), replicas,
                   engine, routing="least load")  # fmt: skip
    seen = {"p99 TTFT": float(server["ttft_p99_ms"]) / 1e3, "p99 TPOT": float(server["tpot_p99_ms"]) / 1e3,
            "mean TPOT": float(server["tpot_mean_ms"]) / 1e3, "limit": float(server["tokens_per_s"])}  # fmt: skip
    return System(server["system"], d, batch, float(offline["tokens_per_s"]), float(server["completed_samples_per_s"]),
                  float(server["tokens_per_s"]), seen)  # fmt: skip


@functools.cache
def lengths(folder: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    with (folder / "mlperf_lengths" / "llama2-70b-99.csv").open(newline="", encoding="utf-8") as f:
        rows = [(int(r["input_length"]), int(r["output_length"])) for r in csv.DictReader(f)]
    prompts, answers = (np.array(c, np.int64) for c in zip(*rows, strict=True))
    scale = TOKENS / answers.mean()
    for _ in range(20):  # answers end at 1,024
        scaled = np.clip(np.round(answers * scale), 1, 1024)
        scale *= TOKENS / scaled.mean()
    return prompts, scaled.astype(np.int64)


def load(folder: Path, n: int, qps: float, seed: int = 0) -> Schedule:
    """``n`` samples drawn as LoadGen does; Poisson at ``qps``, or all at once."""
    prompts, answers = lengths(folder)
    rng = np.random.default_rng([seed, n])
    pick = rng.permutation(len(prompts))[:n] if n <= len(prompts) else rng.integers(0, len(prompts), n)
    due = np.zeros(n) if math.isinf(qps) else np.cumsum(rng.exponential(1 / qps, n))
    return Schedule(np.arange(n), np.zeros(n, np.int64), prompts[pick], answers[pick], (due * 1e9).astype(np.int64))


def offline(system: System, folder: Path, multipliers: Mapping[str, float]) -> float:
    """Tokens/s. One engine with its share of the samples stands for all."""
    d = moved(system.deployment, multipliers)
    engine = dataclasses.replace(d.engine, max_seqs=system.offline_batch)
    one = dataclasses.replace(d, replicas=1, engine=engine)
    s = load(folder, SAMPLES // d.replicas, math.inf)
    _, _, t = service.run_point(one, s, "trace", math.nan, options=Options(keep="none"))
    return float(s.output_tokens.sum() / np.nanmax(t.last)) * d.replicas


def served(system: System, folder: Path, multipliers: Mapping[str, float], qps: float) -> dict[str, float]:
    """Percentiles and means (s) under Poisson arrivals, and tokens/s."""
    d = moved(system.deployment, multipliers)
    s = load(folder, SERVED, qps)
    _, _, t = service.run_point(d, s, "rate", qps, options=Options(keep="none"))
    ttft = (t.first - t.due)[FILLING:]
    tpot = ((t.last - t.first) / np.maximum(s.output_tokens - 1, 1))[FILLING:][s.output_tokens[FILLING:] > 1]
    return {"p99 TTFT": float(np.quantile(ttft, 0.99)), "p99 TPOT": float(np.quantile(tpot, 0.99)),
            "mean TPOT": float(tpot.mean()), "mean TTFT": float(ttft.mean())}  # fmt: skip


def limit(system: System, folder: Path, multipliers: Mapping[str, float]) -> float:
    """Most tokens/s at which both percentiles keep to their limits."""
    low, high = 0.5 * system.qps, 1.5 * system.qps
    for _ in range(6):
        middle = (low + high) / 2
        found = served(system, folder, multipliers, middle)
        good = found["p99 TTFT"] <= TTFT_S and found["p99 TPOT"] <= TPOT_S
        low, high = (middle, high) if good else (low, middle)
    return low * TOKENS


def calibrated(system: System, folder: Path, prior: Prior) -> Calibration:
    point = Point(system.name, (0.0, 0.0, 0.0), {"output_tokens_per_s": Seen(system.offline)})
    knobs = Knobs(guess={"output_tokens_per_s": 0.02}, floor={"output_tokens_per_s": 0.01})
    return calibrate([point], lambda m, _: {"output_tokens_per_s": offline(system, folder, m)}, prior, knobs)


def trained(name: str) -> bool:
    """Whether a system is one of those that the cost of streaming is fitted on: by its name's hash."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def streaming(found: Mapping[str, tuple[System, Calibration]], folder: Path) -> float:
    """The multiplier of the host's cost per sequence that explains mean TPOT and p99 TTFT of the training systems."""
    worth = []
    for times in STREAMING:
        off = []
        for system, one in found.values():
            if trained(system.name):
                said = served(system, folder, streamed(one.multipliers(), times), system.qps)
                off.append(sum(abs(math.log(said[k] / system.seen[k])) for k in ("mean TPOT", "p99 TTFT")))
        worth.append(float(np.median(off)))
    return STREAMING[int(np.argmin(worth))]


def streamed(multipliers: Mapping[str, float], times: float) -> dict[str, float]:
    return {**multipliers, "sequence": multipliers["sequence"] * times}


def pinned(system: System, folder: Path, multipliers: Mapping[str, float]) -> dict[str, float]:
    """With the cost of streaming that gives the mean TPOT of the system's own Server run."""
    low, high = math.log(0.2), math.log(12.0)
    for _ in range(6):
        middle = (low + high) / 2
        said = served(system, folder, streamed(multipliers, math.exp(middle)), system.qps)["mean TPOT"]
        low, high = (middle, high) if said < system.seen["mean TPOT"] else (low, middle)
    return streamed(multipliers, math.exp((low + high) / 2))


@dataclass
class Table:
    """Errors by metric, and a line per system."""

    errors: dict[str, list[float]]
    inside: dict[str, list[bool]]
    lines: list[list[str]]

    def add(self, system: System, folder: Path, best: Mapping[str, float], draws: list[dict[str, float]]) -> None:
        """One system predicted with ``best``; ``draws`` of the multipliers for the interval, or none."""
        mine = served(system, folder, best, system.qps)
        mine["limit"] = limit(system, folder, best)
        drawn = [served(system, folder, m, system.qps) for m in draws]
        line = [system.name, f"{system.offline:,.0f}"]
        for k, values in self.errors.items():
            off = mine[k] / system.seen[k] - 1
            binding = k != "limit" or system.seen["p99 TPOT"] > 0.85 * TPOT_S
            if binding:
                values.append(off)
            if drawn and k != "limit":
                logs = np.log([d[k] for d in drawn])
                self.inside[k].append(spread(logs, 0.1, 6.0).holds(system.seen[k]))
            form = ",.0f" if k == "limit" else ".3f"
            line.append(f"{system.seen[k]:{form}} / {mine[k]:{form}} ({off:+.0%}){'' if binding else ' below it'}")
        self.lines.append(line)

    def text(self) -> str:
        rows = []
        for k, v in self.errors.items():
            covers = f"{np.mean(self.inside[k]):.0%}" if self.inside[k] else "–"
            rows.append([k, EXPECTED[k], f"{np.median(np.abs(v)):.1%}", f"{np.abs(v).mean():.1%}", covers, str(len(v))])
        head = ["metric", "expected", "median abs. error", "mean", "80 % interval covers", "systems"]
        columns = ["system", "Offline tokens/s", *(f"{k}: measured / predicted" for k in self.errors)]
        return f"{table(head, rows)}\n\n{table(columns, self.lines)}"


def texts(folder: Path, say: Callable[[str], None]) -> dict[str, str]:
    prior = Prior({k: v for k, v in FIRST_SD.items() if k not in ("experts", "kv_space")})
    systems = {s.name: (s, calibrated(s, folder, prior)) for s in read(folder)}
    times = streaming(systems, folder)
    say(f"streaming: {times} times the host's cost per sequence and step")
    tails = [k for k in SHOWN if k != "mean TPOT"]
    common, own = (Table({k: [] for k in keys}, {k: [] for k in keys}, []) for keys in (SHOWN, tails))
    for system, found in systems.values():
        if not trained(system.name):
            draws = [streamed(found.multipliers(t), times) for t in found.draws(3, np.random.default_rng(3))]
            common.add(system, folder, streamed(found.multipliers(), times), draws)
        own.add(system, folder, pinned(system, folder, found.multipliers()), [])
        say(" | ".join(own.lines[-1]))
    by_offline = f"""On Offline alone, the cost of streaming ({times:g} times what the host takes per sequence
and step) by the systems of the other half:

{common.text()}"""
    by_both = f"""Calibrated on Offline and on the mean TPOT of the Server run, whose tails and limit are predicted:

{own.text()}"""
    return {"case 4": f"{by_offline}\n\n{by_both}"}
