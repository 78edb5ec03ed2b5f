"""Many simulated load points over all cores. What comes out does not depend on how many processes there were."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.core.schedule import Schedule
from whywait.errors import UsageError
from whywait.sim.deployment import Deployment
from whywait.sim.jit import COMPILED
from whywait.sim.loads import Options
from whywait.sim.service import figures

Progress = Callable[[int, int], None]
#: Work (tokens to be simulated in all) below which one process is quicker than starting others.
ALONE = 20_000_000 if COMPILED else 400_000
PATIENCE_S = 2.0  # between looks at whether all processes still live, where nothing comes back
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
    ``progress`` is told how many are done, of how many. Whatever ends it early (Ctrl-C too) ends the processes.

    Raises:
        UsageError: one of the processes was killed, as the system does when memory runs out.
    """
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
    with _all_or_none((list(cells), list(schedules)), jobs) as pool:
        with _children_deaf():
            futures = {pool.submit(_piece, part): len(part) for part in _parts(len(cells), jobs)}
            pool.submit(int)  # its watcher looks at the processes anew: it has not seen the last, were that killed now
        done = 0
        for future in _as_done(pool, set(futures)):
            for i, got in future.result():
                found[i] = got
            done += futures[future]
            if progress:
                progress(done, len(cells))
    return [f for f in found if f is not None]


def _as_done(pool: ProcessPoolExecutor, left: set[Future[Any]]) -> Iterator[Future[Any]]:
    """Each of ``left`` when it is done. The pool's own watcher may miss a process that is killed while others start."""
    lost = 0
    while left:
        done, left = wait(left, PATIENCE_S, FIRST_COMPLETED)
        yield from done
        dead = not done and any(not p.is_alive() for p in (pool._processes or {}).values())
        lost = lost + 1 if dead else 0
        if lost > 2:
            raise BrokenProcessPool


@contextlib.contextmanager
def _all_or_none(known: tuple[list[Cell], list[Schedule]], jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that know cells and schedules, for as long as the block runs; ended at once where it fails. They
    go by a file: what a process is started with, or given to do, is written to a pipe, and with more than that holds
    who writes would wait for a process to read, for ever where it is killed meanwhile."""
    with tempfile.NamedTemporaryFile(prefix="whywait-") as file:
        pickle.dump(known, file)
        file.flush()
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _give, (file.name,))
        with _ended(pool):
            yield pool


@contextlib.contextmanager
def _ended(pool: ProcessPoolExecutor) -> Iterator[None]:
    """However the block ends, its processes are killed: they hold nothing, and one that waits for work behind another
    that was killed from outside would never hear that there is none."""
    try:
        yield
    except BrokenProcessPool:
        raise UsageError("a process that simulated was killed from outside: out of memory?",
                         "fewer at once: --jobs 1") from None  # fmt: skip
    finally:
        for p in list((pool._processes or {}).values()):
            p.kill()
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _children_deaf() -> Iterator[None]:
    """Processes started inside never see a Ctrl-C of the terminal: it is this one that ends them. What would end this
    one meanwhile waits until they are all known, or one that is just starting would be left behind."""
    waiting: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    taken = {n: h for n in (signal.SIGINT, signal.SIGTERM) if callable(h := signal.getsignal(n))} if main else {}
    for number in taken:
        signal.signal(number, lambda n, _frame: waiting.append(n))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in taken.items():
            signal.signal(number, handler)
    if waiting:
        raise KeyboardInterrupt


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


_cells: list[Cell] = []
_schedules: list[Schedule] = []


def _give(file: str) -> None:
    """In a new process: the cells and what they choose from are read once."""
    with open(file, "rb") as f:
        _cells[:], _schedules[:] = pickle.load(f)  # noqa: S301 - written by the process that started this one


def _piece(part: range) -> list[tuple[int, dict[str, float | None]]]:
    return [(i, one(_cells[i], _schedules[_cells[i].schedule])) for i in part]


def _parts(n: int, jobs: int) -> Iterator[range]:
    size = max(1, -(-n // (jobs * PIECES)))
    for start in range(0, n, size):
        yield range(start, min(start + size, n))
