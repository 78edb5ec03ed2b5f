"""Many simulated load points over all cores, or a cluster's. What comes out does not depend on how many there were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.core.schedule import Schedule
from whywait.sim.deployment import Deployment
from whywait.sim.jit import COMPILED
from whywait.sim.journal import digests
from whywait.sim.loads import Options
from whywait.sim.service import figures
from whywait.sim.spread import Progress, Work, spread

#: Work (tokens to be simulated in all) below which one process is quicker than starting others.
ALONE = 20_000_000 if COMPILED else 400_000
SLO = {"ttft_ms": "ttft_s", "tpot_ms": "tpot_s", "itl_ms": "tpot_s", "e2e_ms": "e2e_s"}


@dataclass(frozen=True)
class Cell:
    """One load point: ``schedule`` is its number in the list of schedules."""

    deployment: Deployment
    schedule: int
    mode: str
    target: float
    seed: int = 0
    options: Options = field(default_factory=Options)


def grid(
    cells: Sequence[Cell], schedules: Sequence[Schedule], jobs: int = 0, progress: Progress | None = None
) -> list[dict[str, float | None]]:
    """:func:`numbers` of each cell, in their order; see :func:`whywait.sim.spread.spread`."""
    tokens = sum(int(schedules[c.schedule].output_tokens.sum()) for c in cells)
    named = digests()

    def about(c: Cell) -> tuple[Any, ...]:
        return dataclasses.replace(c, schedule=0), named(schedules[c.schedule])

    return spread(Work(_one, list(cells), list(schedules), about), jobs, tokens < ALONE, progress)


def _one(c: Cell, schedules: Sequence[Schedule]) -> dict[str, float | None]:
    return one(c, schedules[c.schedule])


def one(c: Cell, schedule: Schedule) -> dict[str, float | None]:
    return numbers(figures(c.deployment, schedule, c.mode, c.target, c.seed, options=c.options), schedule, c.options)


def numbers(f: dict[str, Any], schedule: Schedule, options: Options) -> dict[str, float | None]:
    """What ``figures`` found, as one number each (None: not known): latencies in ms over the requests that began in the
    steady window, means of it, and goodput where there is an SLO."""
    which = f["ok"] & f["inside"]
    out: dict[str, float | None] = {}
    for key in ("ttft", "tpot", "e2e", "queue"):
        values = f[f"{key}_s"][which] * 1e3
        values = values[~np.isnan(values)]
        out[f"{key}_ms_mean"] = float(values.mean()) if len(values) else None
        for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
            out[f"{key}_ms_{name}"] = float(np.percentile(values, q)) if len(values) else None
    for key in ("output_tokens_per_s", "requests_per_s", "running", "waiting", "kv_use", "cached_share", "acceptance",
                "power_w", "joules_per_token"):  # fmt: skip
        value = f.get(key)
        out[key] = None if value is None or np.isnan(value) else float(value)
    out["preemptions"] = float(f["preemptions"])
    good = _good(f, schedule, options)
    out["goodput_share"] = None if good is None or not len(good) else float(good.mean())
    out["goodput_requests_per_s"] = None if good is None else float(f["progress"][good].sum()) / f["seconds"]
    return out


def _good(f: dict[str, Any], schedule: Schedule, options: Options) -> Any:
    """Which requests kept their SLO: that of all, else of their class; None where there is none."""
    if not options.slo and not any(options.slo_of_classes.values()):
        return None
    good = f["ok"].copy()
    for i, name in enumerate(schedule.class_names):
        mine = schedule.klass == i
        for key, limit in (options.slo or options.slo_of_classes.get(name, {})).items():
            values = f[SLO.get(key, "ttft_s")] * 1e3
            good[mine] &= ~(values[mine] > limit)
    return good
