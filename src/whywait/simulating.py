"""The journey of ``whywait simulate``: a deployment under several loads, as a saved Run, with an interval for each
figure from draws of what is not known and from seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait import app
from whywait.core.schedule import Schedule, Workload
from whywait.errors import UsageError
from whywait.load.recipe import Load, schedule_of
from whywait.options import new_directory
from whywait.physics import machines
from whywait.physics.arch import Arch
from whywait.physics.dtypes import known, rate_name
from whywait.physics.layout import Precision
from whywait.sim import techniques
from whywait.sim.capacity import check_layout, smallest_tp
from whywait.sim.catalog import machine_named, model_named
from whywait.sim.changes import as_published
from whywait.sim.deployment import Deployment
from whywait.sim.draws import basis, prior_draws
from whywait.sim.engines import engine_of
from whywait.sim.grid import Cell, grid, numbers
from whywait.sim.jit import COMPILED
from whywait.sim.loads import Options
from whywait.sim.result import MODELLED, Point, run_of, unfinished
from whywait.sim.service import figures_of, run_point

QUANTILES = (0.1, 0.9)  # of an 80 % interval
DRAWS, LEAST_DRAWS, PLAIN_DRAWS = 60, 16, 16
HEAVY = 200_000  # requests simulated in all draws of a point beyond which there are fewer draws
ENOUGH = 400  # requests of a point where nobody says how many: they bound a p99
SEEDS = 8
#: Median absolute error of TPOT and TTFT (mean of a load) by engine, prior only, on about 110 loads of 60
#: configurations of the public record (closed loops on H100, H200, B200, B300), each engine at its default limits.
KNOWN_ERROR = {"vllm": (0.08, 0.39), "sglang": (0.08, 0.71), "trtllm": (0.21, 0.70)}


@dataclass(frozen=True)
class Plan:
    """What is to be simulated. ``loads`` as of ``run`` and ``sweep``; ``jobs`` processes at most (0: all cores)."""

    deployment: Deployment
    workload: Workload
    loads: tuple[Load, ...]
    slo: dict[str, float] = field(default_factory=dict)
    seed: int = 1
    draws: int | None = None
    jobs: int = 0
    out: str | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Simulated:
    """``result`` is what any Run gives; ``points[i]["figures"][name]`` is ``{"value", "low", "high"}`` with an 80 %
    interval (None where not known). ``notes`` say in words what the figures rest on."""

    plan: Plan
    result: app.Result
    points: list[dict[str, Any]]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        d = self.plan.deployment
        return {"deployment": describe(d), "applied": list(d.applied), "devices": d.devices, "points": self.points,
                "notes": self.notes, "summary": self.result.summary, "run": str(self.result.directory)}  # fmt: skip


def deployment_of(
    machine: str, model: str, engine: str = "vllm", *, precision: str | None = None, count: int | None = None,
    layout: str = "",
) -> Deployment:  # fmt: skip
    """A deployment by names. ``layout`` as of ``--layout``: techniques that say how devices are used,
    ``tp=2,replicas=2``. With ``count`` devices: replicas fill them where the layout does not say how many; without a
    layout the smallest tp that fits.

    Raises:
        UsageError: an unknown name, or a layout that does not go with model, machine or count.
    """
    device, arch = machine_named(machine), model_named(model)
    d = Deployment(device, arch, precision_of(arch, device, precision), engine=engine_of(engine, device))
    for technique, _ in techniques.parse(layout):
        if technique.name not in techniques.LAYOUT:
            raise UsageError(
                f"{technique.name} is no part of a layout", f"use {', '.join(techniques.LAYOUT)}; others with --apply"
            )
    d = dataclasses.replace(techniques.apply(layout, d), applied=())
    if count is None:
        return d
    if not layout:
        tp = smallest_tp(d, count)
        d = dataclasses.replace(d, layout=dataclasses.replace(d.layout, tp=tp))
    said = {t.name for t, _ in techniques.parse(layout)}
    if d.split is None and "replicas" not in said and count % d.layout.devices == 0:
        d = dataclasses.replace(d, replicas=count // d.layout.devices)
    if d.devices != count:
        raise UsageError(f"the layout uses {d.devices} devices, not {count}",
                         f"--count {d.devices}, or another layout")  # fmt: skip
    check_layout(d, d.layout)
    return d


def precision_of(arch: Arch, device: machines.Accelerator, name: str | None) -> Precision:
    """``fp8``, or by parts: ``weights=fp8,kv=fp8``; by default what the model's weights are published in.

    Raises:
        UsageError: an unknown type of numbers.
    """
    parts = dict(p.partition("=")[::2] for p in (name or "").split(",") if "=" in p)
    plain = [p for p in (name or "").split(",") if p and "=" not in p]
    weights = parts.get("weights") or (plain[0] if plain else arch.native)
    experts = parts.get("experts") or (None if plain or "weights" in parts else arch.native_experts or None)
    compute = parts.get("compute") or rate_name(weights, device.flops)
    wide = {"fp16": "bf16", "half": "bf16", "float16": "bf16", "bfloat16": "bf16"}
    found = Precision(wide.get(weights, weights), parts.get("kv", "bf16"), compute, experts)
    unknown = [k for k in parts if k not in ("weights", "kv", "compute", "experts")]
    for dtype in (found.weights, found.kv, found.experts or "bf16"):
        if not known(dtype) or unknown:
            raise UsageError(f"--precision: {unknown[0] if unknown else dtype!r} is not known",
                             "such as bf16, fp8, int4, fp4; or weights=fp8,kv=fp8,experts=mxfp4")  # fmt: skip
    narrow = {"fp8": "fp8", "fp4": "fp4", "nvfp4": "fp4"}.get(found.weights)
    if narrow and "compute" not in parts and plain and compute != narrow:
        found = dataclasses.replace(found, compute=narrow)  # asked for: capacity refuses it with what there is
    return as_published(arch, found)


def describe(d: Deployment) -> str:
    """In a line: model, precision, devices, layout, engine."""
    p, at = d.precision, d.layout
    types = p.weights + (f", KV {p.kv}" if p.kv != "bf16" else "") + (f", experts {p.experts}" if p.experts else "")
    ways = [f"{k}={getattr(at, k)}" for k in ("tp", "pp", "dp", "ep") if getattr(at, k) > 1]
    ways += [f"pd={d.split.prefill}:{d.split.decode}"] if d.split else []
    ways += [f"replicas={d.replicas}"] if d.replicas > 1 else []
    where = f"{d.devices} × {d.machine.name}" + (f" ({', '.join(ways)})" if ways else "")
    return f"{d.model.name} ({types}) on {where}, {d.engine.policy}"


def simulate(plan: Plan, progress: Callable[[int, int], None] | None = None) -> Simulated:
    """Simulate every load point, save the Run, analyse it as any other, and give each figure its interval.

    Raises:
        UsageError: the deployment is impossible, or the load is more than one run holds.
    """
    d, points, rows = plan.deployment, [], []
    directory = new_directory(plan.out)
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty", "choose a new folder for --out")
    cells: list[Cell] = []
    schedules: list[Schedule] = []
    for number, load in enumerate(plan.loads):
        made = [_schedule(plan, load, number, k) for k in range(SEEDS)]
        o = dataclasses.replace(_options(plan, "chunks"), send_s=made[0][1])
        mode, target = load.mode, load.target
        prepared, found, times = run_point(d, made[0][0], mode, target, plan.seed, options=o)
        points.append(Point(mode, target, prepared, found, times, load.label))
        draws, sampled = _draws(plan, made[0][0]), dataclasses.replace(o, keep="sample")
        rows.append((len(cells), draws))
        for k, efficiency in enumerate(prior_draws(d, draws, plan.seed)):
            drawn = dataclasses.replace(d, efficiency=efficiency)
            cells.append(Cell(drawn, len(schedules) + k % SEEDS, mode, target, plan.seed + k, sampled))
        schedules += [s for s, _ in made]
    got = grid(cells, schedules, plan.jobs, progress)
    bands = [_point(p, got[at : at + n], plan) for p, (at, n) in zip(points, rows, strict=True)]
    facts = {"command": list(plan.command), "seed": plan.seed, "workload": plan.workload.as_dict(),
             "doubts": [dict(MODELLED), *_left_out(plan.workload)]}  # fmt: skip
    run = run_of(d, points, _options(plan, "chunks"), facts)
    said = [f"{doubt['what']}: {doubt['why']}" for doubt in unfinished(points)] + notes(plan, [n for _, n in rows])
    return Simulated(plan, app.keep(run, directory), bands, said)


def _left_out(w: Workload) -> list[dict[str, str]]:
    """What was asked for and is not simulated, as doubts."""
    what = [name for name, asked in (("the ramp", w.ramp_s > 0), ("max_in_flight", w.max_in_flight)) if asked]
    why = "the simulated client has no such thing"
    return [
        {"what": f"{name} was not simulated", "why": why, "next": "leave it out of the measurement too"}
        for name in what
    ]


def _schedule(plan: Plan, load: Load, number: int, k: int) -> tuple[Schedule, float | None]:
    """The requests of a point by the ``k``-th seed. Where nobody says how many, more than a live service would be sent:
    they cost nothing here."""
    if load.requests is None and load.duration_s is None:
        enough = max(ENOUGH, round(load.target) * 10) if load.mode == "concurrency" else ENOUGH
        if load.mode == "concurrency" or not (plan.workload.stages or plan.workload.trace or plan.workload.fitted):
            load = dataclasses.replace(load, requests=enough)
    workload = dataclasses.replace(plan.workload, seed=plan.workload.seed + k)
    return schedule_of(load, workload, 0, number)


def _draws(plan: Plan, schedule: Schedule) -> int:
    """By the size of the load, never by how fast this machine is: the figures are the same everywhere."""
    if plan.draws:
        return plan.draws
    most = DRAWS if COMPILED else PLAIN_DRAWS
    return max(LEAST_DRAWS, min(most, HEAVY // max(len(schedule), 1)))


def _options(plan: Plan, keep: str) -> Options:
    w = plan.workload
    slo = {c.name: dict(c.slo) for c in w.classes if c.slo}
    return Options(keep, w.timeout_s, warm=w.cache == "warm", slo=plan.slo, slo_of_classes=slo)


def _point(p: Point, drawn: Sequence[dict[str, float | None]], plan: Plan) -> dict[str, Any]:
    """Each figure of the central run, with the 10th and 90th percentile of the draws."""
    schedule, o = p.prepared.schedule, _options(plan, "steps")
    central = numbers(figures_of(p.prepared, p.found, p.times, plan.deployment), schedule, o)
    out: dict[str, Any] = {}
    for name, value in central.items():
        seen = np.array([r[name] for r in drawn if r[name] is not None], dtype=float)
        low, high = np.quantile(seen, QUANTILES) if len(seen) else (math.nan, math.nan)
        band = None if value is None or not len(seen) else (min(float(low), value), max(float(high), value))
        out[name] = {"value": value, "low": band and band[0], "high": band and band[1]}
    for name, figure in cost_figures(plan.deployment, out).items():
        out[name] = figure
    c = p.prepared.capacities[-1]
    return {"mode": p.mode, "target": p.target, "label": p.label, "requests": len(schedule), "figures": out,
            "kv_tokens": c.tokens * p.prepared.settings.engines[-1], "fits": c.concurrency}  # fmt: skip


def cost_figures(d: Deployment, figures: dict[str, Any]) -> dict[str, Any]:
    """US dollars per million output tokens, at the price range of a device-hour; none where it is not known."""
    rate, price = figures["output_tokens_per_s"], d.machine.price_usd_h
    if price is None or not rate["value"]:
        return {}
    hours = d.devices / 3600 * 1e6
    mid = (price[0] + price[1]) / 2
    low = price[0] * hours / rate["high"] if rate["high"] else None
    high = price[1] * hours / rate["low"] if rate["low"] else None
    return {"usd_per_million_tokens": {"value": mid * hours / rate["value"], "low": low, "high": high}}


def known_error(d: Deployment) -> str:
    """How wrong such predictions were where the truth is known, in words."""
    found = KNOWN_ERROR.get(d.engine.policy)
    if found is None:
        return f"known error: none, no measured service of {d.engine.policy} was compared"
    tpot, ttft = found
    return (f"known error of {d.engine.policy} on measured services, no calibration: TPOT {tpot:.0%}, TTFT {ttft:.0%} "
            "in the median; often too short a TTFT (docs/simulator.md)")  # fmt: skip


def notes(plan: Plan, draws: Sequence[int]) -> list[str]:
    """What the figures rest on: how they were made, their known error, and where every number comes from."""
    d = plan.deployment
    many = f"{min(draws)}–{max(draws)}" if min(draws) != max(draws) else str(draws[0])
    price = (
        f"; price {d.machine.price_usd_h[0]:g}–{d.machine.price_usd_h[1]:g} US$ per device-hour"
        if d.machine.price_usd_h
        else ""
    )
    out = [
        "modelled, prior only: no run of this service was used",
        f"intervals: 80 %, from {many} draws of the fitted coefficients, each with its own seed of the load",
        known_error(d),
        f"coefficients: {basis(d)}",
        f"model: {d.model.name}, {d.model.source}",
        f"machine: {d.machine.name}, {d.machine.source}{price}",
    ]
    if d.applied:
        by = [(t, a) for text in d.applied for t, a in techniques.parse(text)]
        out += [f"{a.text}: {t.changes}; cuts {t.cuts}; price: {t.price}" for t, a in by]
    return out
