"""Many simulated load points over all cores. What comes out does not depend on how many processes there were."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.core.schedule import Schedule
from whywait.sim.deployment import Deployment
from whywait.sim.jit import COMPILED
from whywait.sim.loads import Options
from whywait.sim.service import figures

Progress = Callable[[int, int], None]
#: Work (tokens to be simulated in all) below which one process is quicker than starting others.
ALONE = 20_000_000 if COMPILED else 400_000
PIECES = 4  # of the cells, per process: so that a slow one does not leave the others idle
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
    """:func:`numbers` of each cell, in their order. ``jobs`` processes at most (0: one per core this may run on);
    ``progress`` is told how many are done, of how many."""
    jobs = jobs or cores()
    tokens = sum(int(schedules[c.schedule].output_tokens.sum()) for c in cells)
    if jobs == 1 or len(cells) < 2 or tokens < ALONE:
        out = []
        for i, c in enumerate(cells):
            out.append(one(c, schedules[c.schedule]))
            if progress:
                progress(i + 1, len(cells))
        return out
    found: list[dict[str, float | None] | None] = [None] * len(cells)
    # A fresh interpreter each: forking a process with threads (numba's, the terminal's) may hang.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _give, (list(schedules),)) as pool:
        futures = {pool.submit(_piece, [(i, cells[i]) for i in part]): len(part) for part in _parts(len(cells), jobs)}
        done = 0
        for future in as_completed(futures):
            for i, got in future.result():
                found[i] = got
            done += futures[future]
            if progress:
                progress(done, len(cells))
    return [f for f in found if f is not None]


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


_schedules: list[Schedule] = []


def _give(schedules: list[Schedule]) -> None:
    """In a new process: what all cells choose from is sent once."""
    _schedules[:] = schedules


def _piece(cells: list[tuple[int, Cell]]) -> list[tuple[int, dict[str, float | None]]]:
    return [(i, one(c, _schedules[c.schedule])) for i, c in cells]


def _parts(n: int, jobs: int) -> Iterator[range]:
    size = max(1, -(-n // (jobs * PIECES)))
    for start in range(0, n, size):
        yield range(start, min(start + size, n))
