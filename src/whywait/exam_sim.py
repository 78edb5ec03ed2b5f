"""The exam's simulated part: services of numbers whose bottleneck is known because it was built in, judged by the same
rules as any Run. Part of the application layer, beside ``exam_score``.

A case is a deployment from the catalogue, one thing wrong with it or with its load, and the causes that are right
answers. What bounds a healthy step (weights, KV, compute) is not guessed: it is read off the step times that the
simulator was given.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from whywait import app
from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.exam_score import Marked, mark
from whywait.lab.exam import Case, Point, chat, mixed
from whywait.load.recipe import Load, schedule_of
from whywait.physics.layout import Layout, Precision
from whywait.sim import result
from whywait.sim.catalog import machine_named, model_named
from whywait.sim.deployment import Deployment, Speculation
from whywait.sim.engines import engine_of
from whywait.sim.loads import Options, cost_of
from whywait.sim.service import figures, run_point

ENGINE: Final = "simulated"
BEGIN, END = "<!-- simulated: begin -->", "<!-- simulated: end -->"
#: Machine, model, tensor parallel size, type of the weights, engine: from one small card to a node.
SERVICES: Final = (
    ("l40s", "llama-3.1-8b", 1, "fp8", "vllm"),
    ("a100", "llama-3.1-8b", 1, "bf16", "vllm"),
    ("h100", "llama-3.1-8b", 1, "bf16", "sglang"),
    ("h100", "qwen3-32b", 2, "fp8", "vllm"),
    ("h200", "llama-3.1-70b", 4, "bf16", "vllm"),
    ("h200", "qwen3-14b", 1, "bf16", "trtllm"),
    ("b200", "llama-3.1-70b", 2, "fp8", "sglang"),
    ("mi300x", "llama-3.1-70b", 2, "bf16", "vllm"),
)
MOSTLY: Final = 0.6  # of a step, from which it is bound by that part
WORK: Final = ("weight-read-bound decode", "KV-read-bound decode", "compute-bound decode")
BESIDE: Final = ("want of load", *WORK, "compute-bound prefill")


@dataclass(frozen=True)
class SimCase:
    """``case`` in the exam's terms; ``deployment`` is what is simulated."""

    case: Case
    deployment: Deployment


def service(number: int, **engine: Any) -> Deployment:
    machine, model, tp, dtype, policy = SERVICES[number % len(SERVICES)]
    precision, device = Precision(weights=dtype, compute=dtype), machine_named(machine)
    usual = replace(engine_of(policy, device), max_seqs=256, token_budget=8192)
    return Deployment(device, model_named(model), precision, Layout(tp=tp), engine=replace(usual, **engine))


def _holding(d: Deployment, tokens: int) -> Deployment:
    """With KV space for so many tokens."""
    return replace(d, engine=replace(d.engine, kv_blocks=-(-tokens // d.engine.block)))


def _closed(target: float, seconds: float = 30.0) -> tuple[Point, ...]:
    return (Point("concurrency", 1, 10.0), Point("concurrency", target, seconds))


def _opened(rate: float, seconds: float = 30.0) -> tuple[Point, ...]:
    return (Point("concurrency", 1, 10.0), Point("rate", rate, seconds))


def capacity_rps(d: Deployment, w: Workload) -> float:
    """Requests per second of a closed loop wide enough to be full."""
    schedule, _ = schedule_of(Load("concurrency", 256, requests=1200), w, 0, 0)
    return float(figures(d, schedule, "concurrency", 256)["requests_per_s"])


def alone_s(d: Deployment, w: Workload) -> float:
    """Seconds of a request that has the service for itself."""
    schedule, _ = schedule_of(Load("concurrency", 1, requests=8), w, 0, 0)
    return float(np.median(figures(d, schedule, "concurrency", 1)["e2e_s"]))


def kv_share(d: Deployment, sequences: int, context: int) -> float:
    """The part of KV reads in a decode step, by the step times that the simulator goes by."""
    cost, read = cost_of(d), sequences * context
    linear = float(np.interp(sequences, cost.grid, cost.linear_s))
    kv = cost.kv_s * read
    return kv / (cost.step_s + linear + cost.seq_s * sequences + kv)


Made = tuple[str, tuple[str, ...], tuple[str, ...], Deployment, Workload, tuple[Point, ...]]


def _queue(at: int, rng: np.random.Generator) -> Iterator[Made]:
    """Slots, KV space, too high a rate, few long answers among short ones."""
    prompt, output = int(rng.integers(100, 900)), int(rng.integers(100, 300))
    slots = int(rng.choice([2, 4, 8]))
    yield ("slots", ("slot limit",), WORK, service(at, max_seqs=slots), chat(prompt, output), _closed(4 * slots))
    fits = int(rng.integers(4, 9))
    narrow = _holding(service(at), fits * (prompt + output + 32))
    yield ("kv", ("kv space",), WORK, narrow, chat(prompt, output), _closed(5 * fits))
    limited = service(at, max_seqs=16)
    rate = capacity_rps(limited, chat(prompt, output)) * float(rng.uniform(1.5, 2.5))
    yield ("rate", ("rate beyond capacity",), ("slot limit", *WORK), limited, chat(prompt, output), _opened(rate))
    two = mixed((64, 8), (64, int(rng.integers(800, 1600))), 0.2)
    yield ("long-answers", ("long requests",), ("slot limit", *WORK), service(at, max_seqs=4), two, _closed(16, 60))


def _cache(at: int, rng: np.random.Generator) -> Iterator[Made]:
    prompt, groups = int(rng.integers(2000, 6000)), int(rng.integers(2, 6))
    shared = chat(prompt, 24, shared=0.9, groups=groups)
    beside = ("compute-bound prefill", *WORK)
    yield ("cache-off", ("prefix cache off",), beside, service(at, prefix_cache=False), shared, _closed(8))
    many = int(rng.choice([24, 32, 40]))
    small = _holding(service(at, max_seqs=4), (many // 3) * prompt)
    yield ("thrash", ("prefix-cache thrash",), (*beside, "kv space"), small,
           chat(prompt, 24, shared=0.9, groups=many), _closed(4))  # fmt: skip
    drafts = int(rng.integers(3, 7))
    spec = Speculation("draft", drafts, (float(rng.uniform(0.02, 0.12)),) * drafts, 0.05)
    yield ("draft", ("poor speculation",), BESIDE, replace(service(at), speculation=spec), chat(200, 200), _closed(8))


def _work(at: int, rng: np.random.Generator) -> Iterator[Made]:
    """Work itself, where nothing stands in its way."""
    long = int(rng.integers(6000, 16000))
    two = mixed((64, 200), (long, 4), 0.25)
    yield ("neighbour", ("neighbour's prefill",), ("compute-bound prefill",),
           service(at, token_budget=16384, max_seqs=12), two, _closed(12))  # fmt: skip
    yield ("prefill", ("compute-bound prefill",), BESIDE, service(at, token_budget=16384), chat(long, 2),
           _closed(4))  # fmt: skip
    yield ("weights", ("weight-read-bound decode", "want of load"), (), service(at), chat(100, 250), _closed(8))
    long = int(rng.integers(12000, 20000))
    n = next((n for n in (16, 32, 64, 128) if kv_share(service(at), n, long) >= MOSTLY), 256)
    # The engine is full, so that it is not short of load as well.
    yield ("deep-context", ("KV-read-bound decode",), WORK, service(at, token_budget=32768, max_seqs=n),
           chat(long, 250, shared=0.99, groups=1, cache="warm"), _closed(n))  # fmt: skip
    wide = replace(service(at, max_seqs=2048, token_budget=16384))
    yield ("wide", ("compute-bound decode",), WORK, wide, chat(24, 150), _closed(1024, 20))
    easy = service(at)
    rate = float(rng.uniform(0.1, 0.4)) / alone_s(easy, chat(300, 60))  # in flight
    yield ("seldom", ("want of load",), BESIDE, easy, chat(300, 60), _opened(rate, 60))
    yield ("few", ("want of load", "weight-read-bound decode"), (), easy, chat(200, 120), _closed(3))


FAMILIES: Final[tuple[Callable[[int, np.random.Generator], Iterator[Made]], ...]] = (_queue, _cache, _work)


def cases(rounds: int = 16, seed: int = 5, names: str = "*") -> list[SimCase]:
    """Fourteen bottlenecks in each round, each on another service with other lengths and loads.

    Raises:
        UsageError: no such round, or no case of such a name.
    """
    if rounds < 1:
        raise UsageError(f"{rounds} rounds are no exam", "--rounds 1 or more")
    out = []
    for k in range(rounds):
        rng = np.random.default_rng([seed, k])
        for family in FAMILIES:
            for name, accepted, symptoms, d, w, points in family(k, rng):
                case = Case(f"sim-{name}-{k}", ENGINE, name, accepted, replace(w, seed=k + 1), points,
                            symptoms=tuple(s for s in symptoms if s not in accepted))  # fmt: skip
                out.append(SimCase(case, d))
    found = [c for c in out if fnmatch.fnmatchcase(c.case.name, names)]
    if not found:
        raise UsageError(f"no simulated case is named {names}", "whywait exam simulate --list shows them")
    return found


def listing(found: Sequence[SimCase]) -> list[str]:
    """A line for each case: its service, its load, and what is right of it."""
    out = []
    for c in found:
        d, last = c.deployment, c.case.points[-1]
        load = f"{last.mode} {last.target:.3g}"
        out.append(f"{c.case.name:<22} {d.model.name} on {d.devices} × {d.machine.name}, {d.engine.policy}; {load}; "
                   f"{' or '.join(c.case.accepted)}")  # fmt: skip
    return out


def markdown(marked: Sequence[Marked]) -> str:
    """The generated part of ``docs/exam.md``: per bottleneck, then what was not right."""
    out = [
        "| built in | services | right first | symptom first | undecided | confident and wrong |",
        "|---|---|---|---|---|---|",
    ]
    kinds = list(dict.fromkeys(m.case.fault for m in marked))
    for kind in [*kinds, ""]:
        mine = [m for m in marked if not kind or m.case.fault == kind]
        n = [sum(m.mark == k for m in mine) for k in ("right", "symptom", "undecided", "wrong")]
        name = f"{kind} ({' or '.join(mine[0].case.accepted)})" if kind else "all"
        out.append(f"| {name} | {len(mine)} | {n[0]} ({n[0] / len(mine):.0%}) | {n[1]} | {n[2]} | {n[3]} |")
    amiss = [m for m in marked if m.mark != "right"]
    out += ["", *(f"- {m.case.name}: {m.mark}; claimed {', '.join(m.claimed[:3]) or 'nothing'}; "
                  f"true {' or '.join(m.case.accepted)}" for m in amiss)]  # fmt: skip
    return "\n".join(out) + "\n"


def simulated(c: SimCase) -> app.Result:
    """The case's Run, simulated and judged."""
    made, first = [], 0
    w = c.case.workload
    o = Options(keep="chunks", warm=w.cache == "warm", timeout_s=w.timeout_s)
    for number, p in enumerate(c.case.points):
        schedule, _ = schedule_of(Load(p.mode, p.target, duration_s=p.seconds), w, first, number)
        first += len(schedule)
        o = replace(o, send_s=p.seconds if p.mode == "concurrency" else None)
        made.append(result.Point(p.mode, p.target, *run_point(c.deployment, schedule, p.mode, p.target, 1, options=o)))
    run = result.run_of(c.deployment, made, o, {"workload": w.as_dict(), "seed": w.seed})
    return app.analysed(run, Path(c.case.name))


def _marked(c: SimCase) -> Marked:
    return mark(c.case, simulated(c).verdicts)


def score(found: Sequence[SimCase], jobs: int = 0) -> list[Marked]:
    """Simulate and judge each, over ``jobs`` processes (0: all cores); the order is that of ``found``."""
    if jobs == 1 or len(found) < 4:
        return [_marked(c) for c in found]
    with ProcessPoolExecutor(jobs or None, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_marked, found, chunksize=1))
