"""The throughput tables on which the ranking of machines is tried (``validate_plan.py``): what each measured, per
device, under which load, and how the simulator is asked the same.

The files are read where they lie; nothing of them is copied into the repository.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from validate_sim_fit import Population, names_of
from validate_sim_recipes import deployment_of
from validate_sim_record import Row, read, usable
from validate_sim_replay import TPOT, TTFT, measured, moved, predict
from whywait.core.schedule import Schedule
from whywait.errors import WhywaitError
from whywait.physics.arch import arch_of
from whywait.physics.dtypes import rate_name
from whywait.physics.fitted import prior_of
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import machine
from whywait.sim import service
from whywait.sim.capacity import capacity
from whywait.sim.deployment import Deployment
from whywait.sim.engines import engine_of
from whywait.sim.loads import Options

AT_ONCE = 1536  # requests in work at most where an offline peak is asked for
#: The A100 of that record has 40 GB: of Llama-2-70B on four of them the tables read no more than 3 GB of cache.
ARGONNE = {"Nvidia A100 GPU": "a100-40gb", "Nvidia H100 GPU": "h100", "Nvidia GH200 GPU": "gh200",
           "AMD MI250 GPU": "mi250", "AMD MI300X GPU": "mi300x", "Habana Gaudi2": "gaudi2"}  # fmt: skip
#: Devices in one piece of hardware of that record: it counts packages (Mixtral's 93 GB on one MI250, whose dies have 64
#: each; its script runs tp=4 and 8 on two and four).
DIES = {"mi250": 2}
STACKED = "mi300x"
#: DeepSpeed has no scheduler of its own here: vLLM's stands in, on both machines that ran it.
ENGINE = {"vLLM": "vllm", "TensorRT-LLM": "trtllm", "Deepspeed": "vllm", "Deepspeed-MII": "vllm"}
OVERVIEW = {"Llama 3.3 70B": "llama-3.1-70b", "GPT-OSS 120B": "gpt-oss-120b", "GPT-OSS 20B": "gpt-oss-20b",
            "Qwen3 235B A22B": "qwen3-235b-a22b", "Qwen3 30B A3B": "qwen3-30b-a3b",
            "DeepSeek R1 0528": "deepseek-v3"}  # fmt: skip
MLPERF = {"H100-SXM-80GB": "h100", "H200-SXM": "h200", "L40S": "l40s", "H100-PCIe": "h100-pcie", "H100-NVL": "h100-nvl",
          "GH200 Grace Hopper Superchip 96GB": "gh200"}  # fmt: skip
#: Model, numbers, and tokens of a prompt for each of an answer: by the published lengths (``mlperf_lengths``), of news
#: by the data set's card (CNN/DailyMail: 781 tokens an article; the answers of the record have 69).
OFFLINE = {"llama2-70b-99": ("llama-2-70b", "fp8", 1.016), "mixtral-8x7b": ("mixtral-8x7b", "fp8", 2.95),
           "gptj-99": ("gpt-j-6b", "fp8", 11.3)}  # fmt: skip
PROMPT = 250  # tokens: the chat and question sets of the ml.energy leaderboard do not give it


class Case(NamedTuple):
    """A measured throughput per device on a machine; cases of one ``key`` are compared. ``ask`` predicts the same;
    ``sd`` is of its logarithm, by the machine's prior. ``seen``: the row had a part in a figure of the machine."""

    key: tuple[object, ...]
    machine: str
    measured: float
    ask: Callable[[], float]
    sd: float
    seen: bool = False


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
        dies = DIES.get(name, 1)
        d = deployment(name, model.name, engine, "bf16", Layout(tp=devices * dies))
        by = r["Framework"].partition("-")[0]
        out.append(Case(("argonne", by, model.name, devices, tokens, batch), name, float(r["Throughput"]) / devices,
                        functools.partial(_batch, d, tokens, tokens, batch, dies), _sd(d)))  # fmt: skip
    half = fitted_half(out)
    return first_of_each([c._replace(seen=c.machine == STACKED and c.key[2] in half) for c in out])


def fitted_half(cases: Sequence[Case]) -> set[object]:
    """Every second model by name, of those that were run on ``STACKED``: what ``fit_stacks.py`` learns from."""
    return set(sorted({str(c.key[2]) for c in cases if c.machine == STACKED})[::2])


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
        d = deployment(device, OVERVIEW[base], "trtllm", {"FP4": "nvfp4", "FP8": "fp8"}[dtype], layout)
        if base.startswith("GPT-OSS"):  # published with experts of 4 bits, the rest of 16: no other was served
            d = dataclasses.replace(d, precision=Precision(kv="fp8", experts="mxfp4"))
        shape = int(r["isl"]), int(r["osl"])
        out.append(Case(("overview", base, *shape), name, float(r["output_tok_s_per_gpu"]),
                        functools.partial(peak, d, *shape), _sd(d)))  # fmt: skip
    return out


def mlperf(data: Path, everyone: bool = False) -> list[Case]:
    """The best of each machine; the stricter of the benchmark's two limits of accuracy is the same service. MI300X only
    with ``everyone``: its share of the data sheet was set by its rows (``fit_stacks.py``)."""
    machines = {**MLPERF, "MI300X": "mi300x"} if everyone else MLPERF
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for r in _csv(data / "mlperf_llm_loadgen.csv"):
        name = next((v for k, v in machines.items() if k in r["accelerator"]), None)
        benchmark = r["benchmark"].removesuffix(".9")
        if r["scenario"] != "Offline" or benchmark not in OFFLINE or name is None or not r["accel_per_node"]:
            continue
        if r["valid"] == "VALID" and float(r["tokens_per_s"] or 0) > 0:
            got = float(r["tokens_per_s"]) / (int(r["accel_per_node"]) * int(r["nodes"] or 1))
            answer = float(r["tokens_per_s"]) / float(r["samples_per_s"])
            best[benchmark, name] = max((got, answer), best.get((benchmark, name), (0.0, 0.0)))
    out = []
    for (benchmark, name), (got, answer) in best.items():
        model, dtype, prompts = OFFLINE[benchmark]
        ways = [
            deployment(name, model, "vllm" if name in STACKED else "trtllm", dtype, Layout(tp=n)) for n in (1, 2, 4, 8)
        ]
        shape = round(prompts * answer), round(answer)
        out.append(Case((benchmark,), name, got, functools.partial(_best, ways, *shape), _sd(ways[0])))
    return out


def mlenergy(data: Path) -> list[Case]:
    """Closed loops of vLLM that hold their limit of sequences in work full: text sets, one case for each choice of the
    machines' layouts. Lengths of answers are each row's own mean."""
    rows: dict[tuple[str, ...], dict[str, list[tuple[float, Deployment, int]]]] = defaultdict(lambda: defaultdict(list))
    for r in _csv(data / "mlenergy.csv"):
        if r["task"] not in ("lm-arena-chat", "gpqa"):
            continue
        try:
            arch = arch_of(r["model_id"])
        except WhywaitError:  # not in the catalogue
            continue
        devices, wide = int(r["num_gpus"]), int(r["expert_parallel"]) if arch.experts else 1
        name, kind = r["gpu_model"].lower(), {"fp8": "fp8_block", "mxfp4": "mxfp4"}.get(r["weight_precision"], "bf16")
        d = deployment(name, arch.name, "vllm", "bf16", Layout(tp=devices, ep=wide if wide > 1 else 1))
        held = ("bf16", "bf16", "bf16", "mxfp4") if kind == "mxfp4" else (kind, "bf16", kind)
        d = dataclasses.replace(d, precision=Precision(*held))
        at = rows[r["task"], r["model_id"], r["max_num_seqs"], kind]
        at[name].append((float(r["output_throughput_tokens_per_sec"]) / devices, d, round(float(r["avg_output_len"]))))
    out = []
    for (task, model, most, kind), by_machine in rows.items():
        for chosen in itertools.product(*by_machine.values()):
            laid = tuple(d.devices for _, d, _ in chosen)
            for name, (got, d, answer) in zip(by_machine, chosen, strict=True):
                ask = functools.partial(closed, d, PROMPT, answer, int(most))
                out.append(Case(("mlenergy", task, model, kind, most, laid), name, got, ask, _sd(d)))
    return out


def splitwise(data: Path) -> list[Case]:
    """Static batches of vLLM on A100 and H100 of 80 GB, by the times of a prompt and of a token: the answers of the
    longest ended before their length. BLOOM is not in the catalogue; a machine with capped power is none."""
    out = []
    for r in _csv(data / "splitwise_perf_model.csv"):
        name = {"a100-80gb": "a100", "h100-80gb": "h100"}.get(r["hardware"])
        if r["model"] != "llama2-70b" or name is None or float(r["token_time"] or 0) <= 0:
            continue
        tp, prompt, answer, batch = (int(r[k]) for k in ("tensor_parallel", "prompt_size", "token_size", "batch_size"))
        d = deployment(name, "llama-2-70b", "vllm", "bf16", Layout(tp=tp))
        d = dataclasses.replace(d, model=dataclasses.replace(d.model, max_context=0))  # measured past it
        took = (float(r["prompt_time"]) + float(r["token_time"]) * (answer - 1)) / 1e3
        ask = functools.partial(_batch, d, prompt, answer, batch)
        key = ("splitwise", tp, prompt, answer, batch)
        out.append(Case(key, name, batch * (prompt + answer) / took / tp, ask, _sd(d)))
    return first_of_each(out)


TABLES: Mapping[str, Callable[[Path], list[Case]]] = {
    "e2e": e2e, "argonne": argonne, "overview": overview, "mlperf": mlperf,
    "mlenergy": mlenergy, "splitwise": splitwise,
}  # fmt: skip


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def deployment(name: str, model: str, engine: str, dtype: str, layout: Layout) -> Deployment:
    device = machine(name)
    precision = Precision(dtype, "fp8" if dtype != "bf16" else "bf16", rate_name(dtype, device.flops))
    e = dataclasses.replace(engine_of(engine, device), prefix_cache=False, ahead=True)
    return Deployment(device, arch_of(model), precision, layout, 1, e)


def first_of_each(cases: Sequence[Case]) -> list[Case]:
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


def _batch(d: Deployment, prompt: int, answer: int, batch: int, dies: int = 1) -> float:
    """Tokens in and out per second and device (so many ``dies``) of one batch sent at once."""
    t = service.run_point(d, _same(batch, prompt, answer), "concurrency", batch, options=Options(keep="none"))[2]
    return batch * (prompt + answer) / float(np.nanmax(t.last) - np.nanmin(t.sent)) / d.devices * dies


def peak(d: Deployment, prompt: int, answer: int) -> float:
    """Output tokens per second and device with as many requests in work as fit, ``AT_ONCE`` at most."""
    fits = capacity(d, float(prompt + answer)).concurrency or 1.0
    return closed(d, prompt, answer, max(1, min(AT_ONCE, int(fits))))


def _best(ways: Sequence[Deployment], prompt: int, answer: int) -> float:
    """Of the layouts that hold it the fastest: who submits has tried them."""
    found = [0.0]
    for d in ways:
        with contextlib.suppress(WhywaitError):
            found.append(peak(d, prompt, answer))
    return max(found)


def closed(d: Deployment, prompt: int, answer: int, n: int) -> float:
    """Output tokens per second and device with ``n`` requests in work."""
    budget = max(d.engine.token_budget, prompt * d.layout.dp + n)  # prompts are not cut in pieces
    d = dataclasses.replace(d, engine=dataclasses.replace(d.engine, token_budget=budget))
    t = service.run_point(d, _same(2 * n, prompt, answer), "concurrency", n, options=Options(keep="none"))[2]
    return 2 * n * answer / float(np.nanmax(t.last) - np.nanmin(t.sent)) / d.devices


def _same(n: int, prompt: int, answer: int) -> Schedule:
    each = np.ones(n, np.int64)
    return Schedule(np.arange(n), 0 * each, prompt * each, answer * each, -each)
