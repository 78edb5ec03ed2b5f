"""The journey of ``whywait simulate``: a deployment under several loads, as a saved Run, with an interval for each
figure from draws of what is not known and from seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whywait import app
from whywait.core.schedule import Schedule, Workload
from whywait.errors import UsageError
from whywait.judge.hourly import hours
from whywait.load.recipe import Load, schedule_of
from whywait.options import new_directory
from whywait.physics import machines
from whywait.physics.arch import Arch
from whywait.physics.catalog import weights_said
from whywait.physics.dtypes import known, rate_name
from whywait.physics.layout import Precision
from whywait.physics.step import StepWork, seconds
from whywait.sim import techniques
from whywait.sim.capacity import check_layout, smallest_tp, wider_for
from whywait.sim.catalog import machine_named, model_named
from whywait.sim.changes import as_published
from whywait.sim.deployment import Deployment
from whywait.sim.draws import basis, prior_draws
from whywait.sim.engines import engine_of
from whywait.sim.grid import Cell, grid, numbers
from whywait.sim.jit import COMPILED
from whywait.sim.loads import Options, cost_of
from whywait.sim.result import MODELLED, Point, describe, run_of, unfinished
from whywait.sim.service import figures_of, run_point, window

QUANTILES = (0.1, 0.9)  # of an 80 % interval
FEW = 10  # draws below which an 80 % interval is hardly one
DRAWS, LEAST_DRAWS, PLAIN_DRAWS = 60, 16, 16
HEAVY = 200_000  # requests simulated in all draws of a point beyond which there are fewer draws
RATE_S, DOUBLED, MOST = 60.0, 2, 100_000  # s of load at a rate; how often it is made twice as long; requests at most
ENOUGH = 400  # requests of a point where nobody says how many: they bound a p99
SEEDS = 8
SAME = ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "goodput_share")  # of a point's summary
#: Median absolute error of TPOT and TTFT (mean of a load) by engine without calibration; each configuration predicted
#: by what others taught, limits as launched: the tables of docs/simulator.md. First dense models, then those with
#: experts, latent or linear attention.
COMPARED = ("H100 SXM", "H200 SXM", "B200", "B300")  # the machines of those
KNOWN_ERROR = {
    "vllm": ((0.06, 0.19), (0.10, 0.19)),
    "sglang": ((0.10, 0.23), (0.10, 0.41)),
    "trtllm": ((0.10, 0.09), (0.13, 0.30)),
}


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
    remarks: tuple[str, ...] = ()  # on how the deployment was chosen


@dataclass(frozen=True)
class Simulated:
    """``result`` is what any Run gives; ``points[i]["figures"][name]`` is ``{"value", "low", "high"}`` with an 80 %
    interval (None where not known). ``notes`` say what the figures rest on."""

    plan: Plan
    result: app.Result
    points: list[dict[str, Any]]
    notes: list[str]

    def _repr_html_(self) -> str:
        from whywait.report import notebook, simulate

        said = (describe(self.plan.deployment), self.as_dict(), self.result.headline)
        return notebook.as_html(lambda out: simulate.print_simulated(*said, out))

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
    device, arch = machine_named(machine), by_its_name(model_named(model), model)
    d = Deployment(device, arch, precision_of(arch, device, precision), engine=engine_of(engine, device))
    named = [part.partition("=")[0].strip() for part in layout.split(",") if part.strip()]
    for i, name in enumerate(named):
        if name not in techniques.LAYOUT:
            raise UsageError(
                f"{name} is no part of a layout", f"use {', '.join(techniques.LAYOUT)}; others with --apply"
            )
        if name in named[:i]:
            raise UsageError(f"the layout says {name} twice", "say it once")
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


def laid_out(d: Deployment, workload: Workload, loads: Sequence[Load]) -> tuple[Deployment, str]:
    """``d``, whose devices are many and whose layout nobody said, with the least tp that has KV space for the load; and
    why, in words."""
    sample, _ = schedule_of(Load("concurrency", 1, 400), workload, 0, 0)
    prompt, answer = float(sample.prompt_tokens.mean()), float(sample.output_tokens.mean())
    wider, room, need = wider_for(
        d, lambda one: max(in_work(one, x, prompt, answer) for x in loads) * (prompt + answer)
    )
    how = f"tp={wider.layout.tp}" + (f", replicas={wider.replicas}" if wider.replicas > 1 else "")
    why = f"holds {room:,.0f} tokens of KV, and the load keeps about {need:,.0f} in work"
    least = "the least tp that " if room >= need else "no tp has room for the load: this one "
    return wider, f"layout {how}: {least}{why}; another with --layout"


def in_work(d: Deployment, load: Load, prompt: float, answer: float) -> float:
    """Requests at once in all of ``d``: of a closed loop its target; of a rate, by Little's law, as many as arrive
    while one decodes, with steps as long as so many make them. As many as the engines have places for at most."""
    places = float(d.engine.max_seqs * d.replicas)
    if load.mode == "concurrency":
        return min(load.target, places)
    cost, rate, n = cost_of(d), load.target / d.replicas, 1.0
    for _ in range(50):
        row = (n, n, n * (prompt + answer / 2), n * (prompt + answer / 2), 0.0, 0.0, 0.0)
        step = float(seconds(cost, StepWork(*(np.array([x]) for x in row)))[0])
        n = min(max(1.0, rate * answer * step), float(d.engine.max_seqs))
    return n * d.replicas


def by_its_name(arch: Arch, name: str) -> Arch:
    """``arch`` with the weights that the name asked for says it is published in (``qwen3-32b-fp8``); said in its
    source."""
    said = weights_said(name)
    own = Path(name).exists() or arch.source.startswith("given by the user")
    if not said or own or (arch.native_experts or arch.native).startswith(said):
        return arch
    source = f"{arch.source}; weights in {said}, as the name {name!r} says"
    return dataclasses.replace(arch, native=said, native_experts="", source=source)


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
    if narrow and "compute" not in parts and (plain or "weights" in parts) and compute != narrow:
        found = dataclasses.replace(found, compute=narrow)  # asked for: capacity refuses it with what there is
    return as_published(arch, found)


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
        load, point, o = _central(plan, load, number)
        made = [_schedule(plan, load, number, k) for k in range(SEEDS)]
        mode, target = load.mode, load.target
        points.append(point)
        draws, sampled = _draws(plan, made[0][0]), dataclasses.replace(o, keep="sample")
        rows.append((len(cells), draws))
        for k, efficiency in enumerate(prior_draws(d, draws, plan.seed)):
            drawn = dataclasses.replace(d, efficiency=efficiency)
            cells.append(Cell(drawn, len(schedules) + k % SEEDS, mode, target, plan.seed + k, sampled))
        schedules += [s for s, _ in made]
    got = grid(cells, schedules, plan.jobs, progress)
    facts = {"command": list(plan.command), "seed": plan.seed, "workload": plan.workload.as_dict(),
             "doubts": [dict(MODELLED), *_left_out(plan.workload), *_in_step(plan)]}  # fmt: skip
    kept = app.keep(run_of(d, points, _options(plan, "chunks"), facts), directory)
    bands = [_point(p, got[at : at + n], plan, told)
             for p, (at, n), told in zip(points, rows, kept.summary["points"], strict=True)]  # fmt: skip
    plan = dataclasses.replace(plan, remarks=(*plan.remarks, *_given_up(plan, kept.summary["points"])))
    said = [f"{doubt['what']}: {doubt['why']}" for doubt in unfinished(points)]
    return Simulated(plan, kept, bands, said + notes(plan, [n for _, n in rows], bands))


def _left_out(w: Workload) -> list[dict[str, str]]:
    """What was asked for and is not simulated, as doubts."""
    what = [name for name, asked in (("the ramp", w.ramp_s > 0), ("max_in_flight", w.max_in_flight)) if asked]
    why = "the simulated client has no such thing"
    return [
        {"what": f"{name} was not simulated", "why": why, "next": "leave it out of the measurement too"}
        for name in what
    ]


def _central(plan: Plan, load: Load, number: int) -> tuple[Load, Point, Options]:
    """The point that is kept, and its load as it was bounded: a rate of which nobody says how long is made longer until
    it has a steady window. One beyond capacity may have none however long it is."""
    bounded = _bounded(plan, load)
    for again in range(DOUBLED, -1, -1):
        schedule, send_s = _schedule(plan, bounded, number, 0)
        o = dataclasses.replace(_options(plan, "chunks"), send_s=send_s)
        found = run_point(plan.deployment, schedule, load.mode, load.target, plan.seed, options=o)
        longer = bounded is not load and load.mode == "rate" and not window(found[2])[2]
        if not again or not longer or 2 * len(schedule) > MOST:
            break
        bounded = dataclasses.replace(bounded, requests=2 * len(schedule))
    return bounded, Point(load.mode, load.target, *found, load.label), o


def _bounded(plan: Plan, load: Load) -> Load:
    """Where nobody says how many requests, more than a live service would be sent: they cost nothing here."""
    own = plan.workload.stages or plan.workload.trace or plan.workload.fitted
    if load.requests is not None or load.duration_s is not None or (own and load.mode != "concurrency"):
        return load
    by_load = 10 * load.target if load.mode == "concurrency" else RATE_S * load.target
    enough = max(ENOUGH, round(by_load)) if load.mode == "concurrency" else max(ENOUGH, min(MOST, round(by_load)))
    return dataclasses.replace(load, requests=enough)


def _schedule(plan: Plan, load: Load, number: int, k: int) -> tuple[Schedule, float | None]:
    """The requests of a point by the ``k``-th seed."""
    return schedule_of(load, dataclasses.replace(plan.workload, seed=plan.workload.seed + k), 0, number)


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


def _given_up(plan: Plan, points: Sequence[dict[str, Any]]) -> list[str]:
    """Requests that ran into the client's timeout, in words: they count in no latency."""
    lost = [(p["target"], p["counts"].get("timeout", 0), sum(p["counts"].values())) for p in points]
    return [f"at {target:g}, {n:,} of {of:,} requests were given up after {plan.workload.timeout_s:g} s: --timeout"
            for target, n, of in lost if n]  # fmt: skip


def _in_step(plan: Plan) -> list[dict[str, str]]:
    """Requests all alike keep step with each other in a closed loop: a doubt of its own."""
    w = plan.workload
    alike = all(x.kind == "fixed" for c in w.classes for x in (c.prompt_tokens, c.output_tokens)) and len(w.classes) < 2
    closed = any(load.mode == "concurrency" and load.target > 1 for load in plan.loads)
    if not alike or not closed or w.trace or w.fitted:
        return []
    return [{"what": "all requests are of the same length, so they begin and end together",
             "why": "simulated ones keep step: TTFT has p50 = p99 and goodput is all or nothing",
             "next": "--prompt-tokens 'lognormal(1000,0.6)' --output-tokens 'lognormal(200,0.5)'"}]  # fmt: skip


def load_in_words(plan: Plan, sizes: Sequence[int]) -> str:
    """What is asked of the service; ``sizes``: requests of each point."""
    w = plan.workload
    many = f"{min(sizes):,}–{max(sizes):,}" if min(sizes) != max(sizes) else f"{sizes[0]:,}"
    if w.trace or w.fitted:
        what = f"the requests of {w.trace or 'a fitted workload'}"
    else:
        what = "; ".join(
            (f"{c.name}: " if len(w.classes) > 1 else "") + f"prompts of {c.prompt_tokens} tokens, answers of "
            f"{c.output_tokens}" for c in w.classes
        )  # fmt: skip
    modes = {x.mode for x in plan.loads}
    how = "closed loop" if modes == {"concurrency"} else "open loop" if modes == {"rate"} else "its own arrivals"
    return f"load: {how}, {what}; {many} requests a point"


def _shown(told: dict[str, Any], name: str) -> float | None:
    """A figure of ``_point`` as the analysis has it; None where it has none or withholds it."""
    base, _, q = name.rpartition("_")
    found = told[base].get(q) if base in ("ttft_ms", "tpot_ms", "e2e_ms") else told.get(name) if name in SAME else None
    return float(found) if isinstance(found, (int, float)) else None


def _point(p: Point, drawn: Sequence[dict[str, float | None]], plan: Plan, told: dict[str, Any]) -> dict[str, Any]:
    """Each figure of the central run, with the 10th and 90th percentile of the draws. ``told``: the point's summary;
    where it has the figure, its value is taken, so that ``show`` says the same, and the draws, which are reckoned from
    means, go in proportion."""
    schedule, o = p.prepared.schedule, _options(plan, "steps")
    central = numbers(figures_of(p.prepared, p.found, p.times, plan.deployment), schedule, o)
    out: dict[str, Any] = {}
    for name, value in central.items():
        seen = np.array([r[name] for r in drawn if r[name] is not None], dtype=float)
        low, high = np.quantile(seen, QUANTILES) if len(seen) else (math.nan, math.nan)
        shown = _shown(told, name)
        if shown is not None and value:
            low, high, value = low * shown / value, high * shown / value, shown
        band = None if value is None or len(seen) < 2 else (min(float(low), value), max(float(high), value))
        out[name] = {"value": value, "low": band and band[0], "high": band and band[1]}
    for name, figure in cost_figures(plan.deployment, out).items():
        out[name] = figure
    c = p.prepared.capacities[-1]
    return {"mode": p.mode, "target": p.target, "label": p.label, "requests": len(schedule), "figures": out,
            "kv_tokens": c.tokens * p.prepared.settings.engines[-1], "fits": c.concurrency,
            "engines": p.prepared.settings.engines[-1]}  # fmt: skip


def cost_figures(d: Deployment, figures: dict[str, Any]) -> dict[str, Any]:
    """US dollars per million output tokens by one offer, with the range of its terms; none where it is not known."""
    rate, hour = figures["output_tokens_per_s"], hours([d.machine])[d.machine.name]
    if hour is None or not rate["value"]:
        return {}
    each = d.devices / 3600 * 1e6
    low = hour.price * each / rate["high"] if rate["high"] else None
    high = hour.high * each / rate["low"] if rate["low"] else None
    return {"usd_per_million_tokens": {"value": hour.price * each / rate["value"], "low": low, "high": high}}


def known_error(d: Deployment) -> str:
    """How wrong such predictions were where the truth is known, in words."""
    found = KNOWN_ERROR.get(d.engine.policy)
    if d.efficiency.kernels != "fitted":
        return f"known error: none, no measured service was compared with --kernels {d.efficiency.kernels}"
    if d.machine.name not in COMPARED:
        return f"known error: none, no measured service was compared on this machine ({d.machine.name})"
    if found is None:
        return f"known error: none, no measured service of {d.engine.policy} was compared"
    other = bool(d.model.experts or d.model.latent or d.model.linear_layers)
    tpot, ttft = found[other]
    kind = "models with experts, latent or linear attention" if other else "dense models"
    return (f"known error of {d.engine.policy} on measured services, no calibration: TPOT {tpot:.0%}, TTFT {ttft:.0%} "
            f"in the median, {kind} at the limits they were launched with (docs/simulator.md)")  # fmt: skip


def notes(plan: Plan, draws: Sequence[int], points: Sequence[dict[str, Any]]) -> list[str]:
    """What the figures rest on: how they were made, their known error, and where every number comes from."""
    d = plan.deployment
    many = f"{min(draws)}–{max(draws)}" if min(draws) != max(draws) else str(draws[0])
    hour = hours([d.machine])[d.machine.name]
    kv, engines = points[-1]["kv_tokens"], points[-1]["engines"]
    out = [
        load_in_words(plan, [p["requests"] for p in points]),
        *plan.remarks,
        f"KV space: {kv:,} tokens" + (f" in {engines} engines" if engines > 1 else ""),
        "modelled, prior only: no run of this service was used",
        f"intervals: 80 %, from {many} draws of the fitted coefficients, each with its own seed of the load"
        + (f"; {FEW} or more make a steady one" if min(draws) < FEW else ""),
        known_error(d),
        f"coefficients: {basis(d)}",
        f"model: {d.model.name}, {d.model.source}",
        f"machine: {d.machine.name}, {d.machine.source}",
        *([f"price: {hour.said}"] if hour else []),
    ]
    if d.applied:
        by = [(t, a) for text in d.applied for t, a in techniques.parse(text)]
        out += [f"{a.text}: {t.changes}; cuts {t.cuts}; price: {t.price}" for t, a in by]
    return out
