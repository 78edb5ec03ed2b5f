"""Pieces of simulated work on the workers of a Ray cluster: the very functions, and the same bits or none."""

from __future__ import annotations

import hashlib
import pickle
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from whywait.errors import UsageError, WhywaitError
from whywait.net import cluster

Got = list[tuple[int, dict[str, float | None]]]
PIECES = 8  # per CPU: what a killed worker loses, and what is not kept yet, is small
PATIENCE_S = 1.0
MOST = 3  # times that a piece is tried on another worker, where one was killed


def pieces(address: str, given: tuple[Any, ...], left: Sequence[int], most: int) -> Iterator[Got]:
    """``piece`` of all of ``left``, in parts as they are done. A worker that is killed costs its part only: it is done
    on another one. ``most``: workers at once, 0 for all. What is under way when this ends early is not called back (Ray
    2.60 may abort the process that cancels what is just being completed): it ends by itself, and with our process.

    Raises:
        UsageError: no cluster, or a worker that reckons differently, or that dies again and again.
    """
    ray = cluster.ray_of(address)
    nodes = cluster.nodes_of(ray)
    cluster.looked_at(ray, nodes, all_of_them=False)  # what one does that is just dying, another does
    cpus = min(sum(n.cpus for n in nodes), most or 1 << 30)
    data = pickle.dumps(given)
    name, held, ours = hashlib.sha256(data).hexdigest(), ray.put(data), bits()
    do = ray.remote(num_cpus=1, max_retries=MOST, scheduling_strategy="SPREAD")(piece)
    size = max(1, -(-len(left) // (cpus * PIECES)))
    todo = [tuple(left[at : at + size]) for at in range(0, len(left), size)]
    waiting: list[Any] = []
    room = cpus if most else 2 * cpus  # so that none waits for us
    while todo or waiting:
        while todo and len(waiting) < room:
            waiting.append(do.remote(held, name, todo.pop(0), ours))
        done, waiting = ray.wait(waiting, num_returns=1, timeout=PATIENCE_S)
        for future in done:
            yield _got(ray, future)


def _got(ray: Any, future: Any) -> Got:
    try:
        found: Got = ray.get(future)
        return found
    except Exception as exc:
        cause = getattr(exc, "cause", None)
        if isinstance(cause, WhywaitError):
            raise cause from None
        raise UsageError(f"a worker of the Ray cluster that simulated is lost: {cluster.first_line(exc)}",
                         "the same command goes on with what is missing (--cells)") from None  # fmt: skip


_given: dict[str, tuple[Callable[[Any, Any], dict[str, float | None]], Sequence[Any], Any]] = {}


def piece(data: bytes, name: str, part: Sequence[int], ours: dict[str, str]) -> Got:
    """On a worker: the figures of this part of the work in ``data``, read once.

    Raises:
        UsageError: this worker's arithmetic is not that of whoever asked.
    """
    mine = bits()
    if mine != ours:
        what = ", ".join(f"{k} {mine[k]} (here {ours[k]})" for k in ours if mine[k] != ours[k])
        raise UsageError(f"the Ray worker {platform.node()} reckons differently: {what}",
                         "the same versions, and processors of one kind, on every node") from None  # fmt: skip
    if name not in _given:
        _given.clear()
        _given[name] = pickle.loads(data)  # noqa: S301 - from the process that asked
    task, items, known = _given[name]
    return [(i, task(items[i], known)) for i in part]


def bits() -> dict[str, str]:
    """What figures may depend on beside the code: numpy, and what this processor makes of exponentials, logarithms,
    powers and sums (numpy chooses its routines by the processor)."""
    x = np.random.default_rng(7).random(20_011) * 40 + 1e-9
    single = np.array([x.sum(), x.mean(), np.percentile(x, 95), np.interp(3.3, np.sort(x), x)])
    made = (np.exp(-x), np.log(x), np.log1p(x), x**0.37, np.sqrt(x), np.cumsum(x), np.sin(x), single)
    found = hashlib.sha256(b"".join(m.tobytes() for m in made)).hexdigest()[:12]
    return {"numpy": np.__version__, "arithmetic": found, "machine": platform.machine()}
