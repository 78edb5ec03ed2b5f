"""Runs of one workload whose truth is known: simulated ones by seed, and a service whose speed wanders meanwhile."""

from __future__ import annotations

import dataclasses

import numpy as np

from whywait import simulating
from whywait.core.run import Manifest, Run
from whywait.core.schedule import Workload
from whywait.core.table import Table
from whywait.load.recipe import Load, schedule_of
from whywait.sim import techniques
from whywait.sim.loads import Options as SimOptions
from whywait.sim.service import simulate

S, MS = 1_000_000_000, 1_000_000
SIMULATED = {
    "closed, 8 in flight, 200 requests": (Load("concurrency", 8, 200), {"output_tokens": "lognormal(64,0.5)"}),
    "closed, 32 in flight, 400 requests": (
        Load("concurrency", 32, 400),
        {"prompt_tokens": "lognormal(256,0.8)", "output_tokens": "lognormal(64,0.8)"},
    ),
    "open, 20/s Poisson, 300 requests": (Load("rate", 20, 300), {"output_tokens": "lognormal(64,0.5)"}),
    "open, 8/s, short of slots": (Load("rate", 8, 200), {"output_tokens": "lognormal(200,0.5)"}),
}
SLOTS = {"open, 8/s, short of slots": "max-seqs=12"}
NOISY = {
    "8 in flight, steady": (8, 0.0, 0.02),
    "8 in flight, speed wanders 5 %": (8, 0.05, 0.02),
    "2 in flight, speed wanders 10 %": (2, 0.1, 0.05),
}


def simulated(case: str, seed: int, how: str = "") -> Run:
    """One draw (``seed``) of a case on one H100; ``how`` changes the deployment."""
    load, fields = SIMULATED[case]
    workload = Workload.from_dict({**fields, "seed": seed})
    d = simulating.deployment_of("h100", "llama-3.1-8b")
    d = techniques.apply(",".join(filter(None, (SLOTS.get(case, ""), how))), d)
    schedule = schedule_of(load, workload, 0, 0)[0]
    run = simulate(d, schedule, load.mode, load.target, seed, options=SimOptions(keep="chunks"))
    manifest = dataclasses.replace(run.manifest, workload={**fields, "seed": seed}, seed=seed)
    return dataclasses.replace(run, manifest=manifest)


def noisy(case: str, seed: int, slower: float = 0.0, drift: float = 0.0, requests: int = 240) -> Run:
    """A closed loop on as many slots as are in flight; the speed is an autocorrelated series over time. ``slower`` is
    the part by which every token takes longer, ``drift`` the standard deviation of a whole run's speed."""
    width, wander, jitter = NOISY[case]
    rng, lengths = np.random.default_rng([seed, 7]), np.random.default_rng(3)
    tokens = lengths.integers(8, 64, requests)
    steps = rng.standard_normal(4000)
    speed = np.empty(4000)
    speed[0] = steps[0]
    for i in range(1, 4000):  # a tenth of a second each, remembered for about half a second
        speed[i] = 0.8 * speed[i - 1] + np.sqrt(1 - 0.8**2) * steps[i]
    run_speed = np.exp(drift * rng.standard_normal()) * (1 + slower)
    free, rows = [S] * width, []
    for i, n in enumerate(tokens.tolist()):
        sent = min(free)
        place = free.index(sent)
        now = np.exp(wander * speed[(sent // (100 * MS)) % 4000]) * run_speed
        first = sent + round(50 * MS * now * np.exp(jitter * rng.standard_normal()))
        last = first + round((n - 1) * 15 * MS * now * np.exp(jitter * rng.standard_normal()))
        free[place] = last + MS
        rows.append({
            "point": 0, "id": i, "replica": 0, "attempt": 1, "outcome": "ok", "fault": "none", "due_ns": sent,
            "sent_ns": sent, "accepted_ns": first, "first_ns": first, "first_answer_ns": first, "last_ns": last,
            "end_ns": last, "connect_ns": 0, "rtt_ns": 0, "output_tokens": n, "prompt_tokens": 100,
            "asked_prompt_tokens": 100, "asked_output_tokens": n, "content_chunks": n, "first_chunk_tokens": 1,
            "engine_prefill_ms": (first - sent) / MS, "engine_queue_ms": 0.0,
        })  # fmt: skip
    point = {"point": 0, "mode": "concurrency", "target": width, "planned": requests, "start_ns": S,
             "end_ns": max(r["end_ns"] for r in rows)}  # fmt: skip
    manifest = Manifest(seed=1, workload={"seed": 1}, engine={"slots": width, "model": "numbers"})
    tables = {name: Table.empty(name) for name in ("chunks", "steps", "readings")}
    return Run(manifest, Table.from_rows("points", [point]), Table.from_rows("requests", rows), **tables)
