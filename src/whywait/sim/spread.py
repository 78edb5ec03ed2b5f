"""Much simulated work that does not depend on each other, over processes of this machine or a Ray cluster's workers.

What comes out does not depend on where it was done, nor on how often it was interrupted.
"""

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
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from whywait.errors import UsageError
from whywait.net import cluster
from whywait.sim import over_ray
from whywait.sim.journal import Journal, key

Progress = Callable[[int, int], None]
Figures = dict[str, float | None]
Got = list[tuple[int, Figures]]
PATIENCE_S = 2.0  # between looks at whether all processes still live, where nothing comes back
PIECES = 4  # of the cells, per process: so that a slow one does not leave the others idle


@dataclass(frozen=True)
class Work:
    """``task(item, known)`` of each item: a module's function, since it is called in other processes. ``about`` says
    of an item all that its figures depend on (for its name in a journal)."""

    task: Callable[[Any, Any], Figures]
    items: Sequence[Any]
    known: Any
    about: Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Where:
    """``ray``: the address of a cluster whose workers do it, '' for this machine; ``cells``: a file that keeps what is
    done, '' for none."""

    ray: str = ""
    cells: str = ""


HERE = Where()
_where: ContextVar[Where] = ContextVar("where", default=HERE)


@contextlib.contextmanager
def over(where: Where) -> Iterator[None]:
    """All that is spread inside goes there.

    Raises:
        UsageError: there is no such cluster; MissingExtra: Ray is not installed here.
    """
    if where.ray:
        cluster.ray_of(where.ray)
    token = _where.set(where)
    try:
        yield
    finally:
        _where.reset(token)


def spread(work: Work, jobs: int = 0, alone: bool = False, progress: Progress | None = None) -> list[Figures]:
    """The figures of each item, in their order. ``jobs`` processes at most (0: one per core this may run on);
    ``alone``: so little that this process is quicker than starting others. ``progress`` is told how many are done, of
    how many. Whatever ends it early (Ctrl-C too) ends the processes; what was done until then is kept, if anywhere.

    Raises:
        UsageError: one of the processes was killed, as the system does when memory runs out; the cluster is gone.
    """
    where, n = _where.get(), len(work.items)
    found: list[Figures | None] = [None] * n
    with contextlib.ExitStack() as stack:
        journal, keys = None, []
        if where.cells:
            journal = stack.enter_context(contextlib.closing(Journal(where.cells)))
            keys = [key(work.task.__qualname__, *work.about(x)) for x in work.items]
            found = [journal.get(k) for k in keys]
        left = [i for i, f in enumerate(found) if f is None]
        done = n - len(left)
        if progress and done:
            progress(done, n)
        for got in _somewhere(work, left, (where.ray, jobs), alone):
            for i, figures in got:
                found[i] = figures
                if journal is not None:
                    journal.add(keys[i], figures)
            done += len(got)
            if progress:
                progress(done, n)
    return [f for f in found if f is not None]


def _somewhere(work: Work, left: Sequence[int], where: tuple[str, int], alone: bool) -> Iterator[Got]:
    ray, jobs = where
    if not left:
        return
    if alone or len(left) < 2 or (not ray and (jobs or cores()) == 1):
        for i in left:
            yield [(i, work.task(work.items[i], work.known))]
    elif ray:
        yield from over_ray.pieces(ray, (work.task, list(work.items), work.known), left, jobs)
    else:
        yield from _over_processes(work, left, jobs or cores())


def _over_processes(work: Work, left: Sequence[int], jobs: int) -> Iterator[Got]:
    # A fresh interpreter each: forking a process with threads (numba's, the terminal's) may hang.
    with _all_or_none((work.task, list(work.items), work.known), jobs) as pool:
        with _children_deaf():
            futures = {pool.submit(_piece, part) for part in _parts(left, jobs)}
            pool.submit(int)  # its watcher looks at the processes anew: it has not seen the last, were that killed now
        for future in _as_done(pool, futures):
            yield future.result()


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
def _all_or_none(known: tuple[Any, ...], jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that know the work, for as long as the block runs; ended at once where it fails. They
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


_given: list[Any] = []


def _give(file: str) -> None:
    """In a new process: the work is read once."""
    with open(file, "rb") as f:
        _given[:] = pickle.load(f)  # noqa: S301 - written by the process that started this one


def _piece(part: Sequence[int]) -> Got:
    task, items, known = _given
    return [(i, task(items[i], known)) for i in part]


def _parts(left: Sequence[int], jobs: int) -> Iterator[Sequence[int]]:
    size = max(1, -(-len(left) // (jobs * PIECES)))
    for start in range(0, len(left), size):
        yield left[start : start + size]
