"""How often the ranking of machines that ``whywait plan`` rests on is right, on services that others measured:
``python tools/validate_plan.py [--table e2e …] [--most N] [--data ../shared/measured] [--json FILE]``.

Two machines are a pair where the record has both under the same load, model, engine, type of numbers and number of
devices (of offline peaks: the same model and lengths, each machine as its maker ran it). The pair counts when their
measured throughput per device differs by more than 15 %; it is right when the simulator puts the same one ahead.

Nothing of the rows was seen by the prediction: within ``operations_only`` the simulator knows data sheets and measured
kernels, and of whole services only what was assumed before any was looked at (what ships was fitted on closed loops of
this record). One share of AMD's data sheets was set by MLPerf's MI300X rows: those rows are left out. ``--folds`` fits
what services do beyond their kernels on four fifths of the closed loops and predicts the last, as ``validate_sim.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from validate_sim_fit import Population, askers_of, first_guess, folds, names_of, operations_only, population
from validate_sim_mlperf import TOKENS
from validate_sim_recipes import deployment_of
from validate_sim_record import Row, groups, read, usable
from validate_sim_replay import TPOT, TTFT, measured, moved, predict
from whywait.core.schedule import Schedule
from whywait.errors import WhywaitError
from whywait.physics.arch import arch_of
from whywait.physics.dtypes import rate_name
from whywait.physics.fitted import prior_of
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import Accelerator, machine
from whywait.sim import service
from whywait.sim.capacity import capacity
from whywait.sim.deployment import Deployment
from whywait.sim.engines import engine_of
from whywait.sim.loads import Options

ROOT = Path(__file__).resolve().parents[1]
DECIDED = 1.28  # standard deviations: 90 % to be right
APART, ASKED = 0.15, 0.9  # pairs count beyond this difference; the share of them that must be right
AT_ONCE = 1536  # requests in work at most where an offline peak is asked for
ARGONNE = {"Nvidia A100 GPU": "a100-sxm", "Nvidia H100 GPU": "h100", "Nvidia GH200 GPU": "gh200",
           "AMD MI250 GPU": "mi250", "AMD MI300X GPU": "mi300x"}  # fmt: skip
ENGINE = {"vLLM": "vllm", "TensorRT-LLM": "trtllm"}
OVERVIEW = {"Llama 3.3 70B": "llama-3.1-70b", "GPT-OSS 120B": "gpt-oss-120b", "GPT-OSS 20B": "gpt-oss-20b",
            "Qwen3 235B A22B": "qwen3-235b-a22b", "Qwen3 30B A3B": "qwen3-30b-a3b",
            "DeepSeek R1 0528": "deepseek-v3"}  # fmt: skip
MLPERF = {"H100-SXM-80GB": "h100", "H200-SXM": "h200", "L40S": "l40s", "H100-PCIe": "h100-pcie",
          "GH200 Grace Hopper Superchip 96GB": "gh200"}  # fmt: skip
OFFLINE = {"llama2-70b-99": ("llama-2-70b", "fp8"), "mixtral-8x7b": ("mixtral-8x7b", "fp8"),
           "gptj-99": ("gpt-j-6b", "fp8")}  # fmt: skip


class Case(NamedTuple):
    """A measured throughput per device on a machine; cases of one ``key`` are compared. ``ask`` predicts the same;
    ``sd`` is of its logarithm, by the machine's prior."""

    key: tuple[object, ...]
    machine: str
    measured: float
    ask: Callable[[], float]
    sd: float


class Pair(NamedTuple):
    """Ratios of the first machine to the second; ``sd`` of the predicted one's logarithm. What lies inside it is a tie
    to ``whywait plan``: it ranks neither first."""

    table: str
    machines: tuple[str, str]
    measured: float
    predicted: float
    sd: float

    @property
    def decided(self) -> bool:
        return abs(math.log(self.predicted)) > DECIDED * self.sd if self.predicted > 0 else False

    @property
    def right(self) -> bool:
        return (self.measured > 1) == (self.predicted > 1)


def e2e(data: Path, pop: Population | None = None, among: Sequence[str] | None = None) -> list[Case]:
    rows = [r for r in usable(read(data)) if among is None or r.group in among]
    return [
        Case((r.arch.name, r.backend, r.gemm, r.part, *r.load, r.ratio), r.system, _per_device(r, measured(r)),
             functools.partial(_asked, r, pop), _sd(deployment_of(r)))
        for r in rows
    ]  # fmt: skip


def _asked(r: Row, pop: Population | None) -> float:
    return _per_device(r, predict(_moved(r, pop), r))


def _moved(r: Row, pop: Population | None) -> Deployment:
    if pop is None:
        return deployment_of(r)
    return moved(deployment_of(r), {k: math.exp(pop.mean[r.backend][k]) for k in names_of(r)})


def _per_device(r: Row, found: Mapping[str, float]) -> float:
    p = r.part
    whole_s = (found[TTFT] + found[TPOT] * (r.osl - 1)) / 1e3
    return r.concurrency * r.osl / whole_s / (p.tp * p.pp * p.dp)


def argonne(data: Path) -> list[Case]:
    out = []
    for r in _csv(data / "argonne.csv"):
        name, engine, devices = ARGONNE.get(r["Hardware"]), ENGINE.get(r["Framework"]), int(r["Num of Hardware"])
        if name is None or engine is None or float(r["Throughput"] or 0) <= 0:
            continue
        try:
            model = arch_of(r["Model"])
        except WhywaitError:  # not in the catalogue
            continue
        tokens, batch = int(r["Input Output Length"]), int(r["Batch Size"])
        d = _deployment(name, model.name, engine, "bf16", Layout(tp=devices))
        out.append(Case(("argonne", engine, model.name, devices, tokens, batch), name, float(r["Throughput"]) / devices,
                        functools.partial(_batch, d, tokens, tokens, batch), _sd(d)))  # fmt: skip
    return _first_of_each(out)


def overview(data: Path) -> list[Case]:
    out = []
    for r in _csv(data / "trtllm_perf_overview" / "trtllm_offline_tput_per_gpu.csv"):
        name, way, dtype = r["config"].split()
        base = r["model"].partition(" (")[0]
        if base not in OVERVIEW:
            continue
        kind, n = way.rstrip("0123456789"), int("".join(c for c in way.partition("PP")[0] if c.isdigit()))
        pp = int(way.partition("PP")[2] or 1)
        layout = Layout(tp=1, dp=n, ep=n) if kind == "DEP" else Layout(tp=n, pp=pp)
        device = {"RTXPRO6000": "rtx-pro-6000"}.get(name, name.lower())
        d = _deployment(device, OVERVIEW[base], "trtllm", {"FP4": "nvfp4", "FP8": "fp8"}[dtype], layout)
        shape = int(r["isl"]), int(r["osl"])
        out.append(Case(("overview", base, *shape), name, float(r["output_tok_s_per_gpu"]),
                        functools.partial(_peak, d, *shape), _sd(d)))  # fmt: skip
    return out


def mlperf(data: Path) -> list[Case]:
    best: dict[tuple[str, str], float] = {}
    for r in _csv(data / "mlperf_llm_loadgen.csv"):
        name = next((v for k, v in MLPERF.items() if k in r["accelerator"]), None)
        if r["scenario"] != "Offline" or r["benchmark"] not in OFFLINE or name is None or not r["accel_per_node"]:
            continue
        devices = int(r["accel_per_node"]) * int(r["nodes"] or 1)
        got = float(r["tokens_per_s"] or 0) / devices or float(r["samples_per_s"] or 0) / devices
        best[r["benchmark"], name] = max(got, best.get((r["benchmark"], name), 0.0))
    out = []
    for (benchmark, name), got in best.items():
        model, dtype = OFFLINE[benchmark]
        d = _fitting(name, model, "trtllm", dtype)
        if d is not None and got > 0:
            out.append(Case((benchmark,), name, got, functools.partial(_peak, d, 256, round(TOKENS)), _sd(d)))
    return out


TABLES: Mapping[str, Callable[[Path], list[Case]]] = {
    "e2e": e2e, "argonne": argonne, "overview": overview, "mlperf": mlperf,
}  # fmt: skip


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _device(name: str) -> Accelerator:
    """By name; of an MI250 one half. ROCm shows its two halves as a device each, and a process of one device uses no
    other: of the record's MI250 at tp=1 no row reads more than 1.0 TB/s, where a half has 1.6 and the whole 3.3."""
    found = machine(name)
    if name != "mi250":
        return found
    flops = {k: v / 2 for k, v in found.flops.items()}
    return dataclasses.replace(found, read_bytes_per_s=found.read_bytes_per_s / 2, memory_bytes=found.memory_bytes / 2,
                               flops=flops)  # fmt: skip


def _deployment(name: str, model: str, engine: str, dtype: str, layout: Layout) -> Deployment:
    device = _device(name)
    precision = Precision(dtype, "fp8" if dtype != "bf16" else "bf16", rate_name(dtype, device.flops))
    e = dataclasses.replace(engine_of(engine, device), prefix_cache=False, ahead=True)
    return Deployment(device, arch_of(model), precision, layout, 1, e)


def _fitting(name: str, model: str, engine: str, dtype: str) -> Deployment | None:
    """With the least tp that leaves room for a batch worth the name."""
    for tp in (1, 2, 4, 8):
        d = _deployment(name, model, engine, dtype, Layout(tp=tp))
        with contextlib.suppress(WhywaitError):
            if capacity(d, 1024.0).tokens > 32_768:
                return d
    return None


def _first_of_each(cases: Sequence[Case]) -> list[Case]:
    """The record repeats: of one key and machine the median."""
    found: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for c in cases:
        found[c.key, c.machine].append(c)
    return [cs[0]._replace(measured=float(np.median([c.measured for c in cs]))) for cs in found.values()]


def _sd(d: Deployment) -> float:
    """Of the logarithm of a machine's throughput before anything of it was measured: the widest of what it mostly
    waits for."""
    sd = prior_of(d.machine, d.engine.policy).sd
    return max(sd.get(k, 0.0) for k in ("weights", "compute", "kv"))


def _batch(d: Deployment, prompt: int, answer: int, batch: int) -> float:
    """Tokens in and out per second and device of one batch sent at once."""
    t = service.run_point(d, _same(batch, prompt, answer), "concurrency", batch, options=Options(keep="none"))[2]
    return batch * (prompt + answer) / float(np.nanmax(t.last) - np.nanmin(t.sent)) / d.devices


def _peak(d: Deployment, prompt: int, answer: int) -> float:
    """Output tokens per second and device with as many requests in work as fit, ``AT_ONCE`` at most."""
    fits = capacity(d, float(prompt + answer)).concurrency or 1.0
    n = max(1, min(AT_ONCE, int(fits)))
    budget = max(d.engine.token_budget, prompt * d.layout.dp + n)  # prompts are not cut in pieces
    d = dataclasses.replace(d, engine=dataclasses.replace(d.engine, token_budget=budget))
    t = service.run_point(d, _same(2 * n, prompt, answer), "concurrency", n, options=Options(keep="none"))[2]
    return 2 * n * answer / float(np.nanmax(t.last) - np.nanmin(t.sent)) / d.devices


def _same(n: int, prompt: int, answer: int) -> Schedule:
    each = np.ones(n, np.int64)
    return Schedule(np.arange(n), 0 * each, prompt * each, answer * each, -each)


def pairs_of(name: str, cases: Sequence[Case], most: int | None, say: Callable[[str], None]) -> list[Pair]:
    """All pairs of machines under one key that differ enough; with ``most``, of so many keys spread evenly."""
    by_key: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for c in _first_of_each(cases):
        by_key[c.key].append(c)
    keys = [k for k, cs in by_key.items() if any(_apart(a, b) for a, b in itertools.combinations(cs, 2))]
    if most is not None and len(keys) > most:
        keys = [keys[int(i)] for i in np.linspace(0, len(keys) - 1, most).round()]
    out = []
    for key in keys:
        said = {}
        for c in by_key[key]:
            with contextlib.suppress(WhywaitError):  # it does not fit as simulated: counted as wrong
                said[c.machine] = c.ask()
        for a, b in itertools.combinations(by_key[key], 2):
            if _apart(a, b):
                know = a.machine in said and b.machine in said
                ratio = said[a.machine] / said[b.machine] if know else math.nan
                out.append(Pair(name, (a.machine, b.machine), a.measured / b.measured, ratio, math.hypot(a.sd, b.sd)))
    say(f"{name}: {len(cases)} rows, {len(keys)} loads with machines that differ by more than {APART:.0%}")
    return out


def _apart(a: Case, b: Case) -> bool:
    return a.machine != b.machine and max(a.measured, b.measured) > (1 + APART) * min(a.measured, b.measured)


def by_folds(data: Path, most: int | None, say: Callable[[str], None]) -> Iterator[Pair]:
    """The closed loops, each machine's row predicted by what four fifths of the configurations taught that do not hold
    it."""
    configs = groups(usable(read(data)))
    askers = askers_of(configs)
    cases: list[Case] = []
    for fit, predicting in folds(configs, 5):
        pop = population({g: askers[g] for g in fit}, first_guess())
        cases += e2e(data, pop, predicting)
        say(f"fitted on {len(fit)} configurations")
    yield from pairs_of("e2e, folds", cases, most, say)


def text(pairs: Sequence[Pair]) -> str:
    """A table by source and by pair of machines."""
    rows = ["| of | pairs that differ by > 15 % | right | share | outside the error | right | share |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    groups_: dict[str, list[Pair]] = defaultdict(list)
    for p in pairs:
        groups_["all"].append(p)
        groups_[p.table].append(p)
        groups_[f"{p.table}: {' / '.join(sorted(p.machines))}"].append(p)
    for name, mine in groups_.items():
        right = sum(p.right for p in mine if not math.isnan(p.predicted))
        sure = [p for p in mine if p.decided]
        well = sum(p.right for p in sure)
        rows.append(f"| {name} | {len(mine)} | {right} | {right / len(mine):.0%} | {len(sure)} | {well} | "
                    f"{f'{well / len(sure):.0%}' if sure else '–'} |")  # fmt: skip
    return "\n".join(rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "measured", help="the record")
    parser.add_argument("--table", action="append", choices=tuple(TABLES), help="all when left out")
    parser.add_argument("--most", type=int, help="loads per table at most, spread evenly")
    parser.add_argument("--folds", action="store_true", help="closed loops with what services do fitted in five folds")
    parser.add_argument("--json", type=Path, help="keep the pairs there")
    args = parser.parse_args(argv)
    if not (args.data / "e2e_silicon.csv").is_file():
        print(f"no record in {args.data}: give --data", file=sys.stderr)
        return 2
    begun, found = time.monotonic(), list[Pair]()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)

    with operations_only():
        if args.folds:
            found += by_folds(args.data, args.most, say)
        for name in args.table or (() if args.folds else TABLES):
            found += pairs_of(name, TABLES[name](args.data), args.most, say)
    print(text(found))
    if args.json:
        args.json.write_text(json.dumps([p._asdict() for p in found], indent=1), encoding="utf-8")
    right = sum(p.right for p in found if not math.isnan(p.predicted))
    return 0 if found and right >= ASKED * len(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
