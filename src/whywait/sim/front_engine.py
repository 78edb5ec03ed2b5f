"""The kernel's engines as the simulated service steps them: requests with numbers of their own come, and may leave."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.physics.step import StepCost
from whywait.sim.deployment import Deployment
from whywait.sim.front_chains import Chains, heap_of, nodes_of
from whywait.sim.front_metrics import Now
from whywait.sim.front_pace import New, Step
from whywait.sim.front_step import LEAVES, LEFT, begin_step, come, drop, end_step, tell
from whywait.sim.jit import COMPILED
from whywait.sim.kernel_build import Tables, get, located, put, world
from whywait.sim.kernel_state import NOBODY, Request, records
from whywait.sim.loads import capacities_of, cost_of, pool_of
from whywait.sim.state import LRU, Load, Pool, Settings

LEVELS = 16  # of priority: −8 … 7; what is beyond goes with the last
ROWS = 4096 + 64  # requests at once, beside those of slots that keep their KV
MOST_IDS = 1 << 21  # blocks of equal content that are told apart
RUNS = 1 << 16


def engines_of(d: Deployment, seed: int) -> list[Online]:
    """The replicas of a deployment.

    Raises:
        UsageError: it does not fit.
    """
    pool, cost = pool_of(d, capacities_of(d)[0], 0), cost_of(d)
    return [Online(pool, cost, seed + i) for i in range(d.replicas)]


def warm_up(d: Deployment) -> None:
    """Runs what is compiled at its first call, on an engine of its own: requests that come, end and leave."""
    engine = Online(pool_of(d, capacities_of(d)[0], 0), cost_of(d), rows=8)
    for id, output in ((1, 2), (2, 50)):
        engine.add(New(id, 20, output, (0, 1)), 0.0)
    now = 0.0
    for _ in range(5):
        step = engine.step(now)
        now += step.took_s if step else 0.0
    engine.drop(2)


class Online:
    """One engine. A row of the kernel's tables is used again when its request has ended."""

    def __init__(self, pool: Pool, cost: StepCost, seed: int = 0, rows: int = ROWS) -> None:
        rows += pool.max_seqs
        self._blocks, self._drafts, self._by_priority = pool.blocks, pool.drafts, pool.priority
        pool = pool._replace(max_context=0)  # the front refuses what is too long
        w = world(_empty(rows), [pool], [cost], Settings(seed=seed, steps=0, macro=False))
        self._slots_keep = bool(get(w.engines, "slot_cache")[0])
        ids = min(MOST_IDS, 2 * (pool.blocks + sum(pool.tier_blocks)) + 1024)
        ids = ids if get(w.engines, "prefix_cache")[0] else 0
        runs = max(1, min(pool.blocks, RUNS))
        put(w.engines, 0, {"shared": ids, "runs": ids})
        nodes = nodes_of(ids, runs)
        self._chains = Chains(nodes, ids, keep=self._slots_keep)
        heap = heap_of(ids if pool.evict != LRU else 0)
        self._w: Tables = located(w._replace(links=self._chains.links, nodes=nodes, heap=heap))
        self._rows: dict[int, int] = {}  # id -> row
        self._leaving: set[int] = set()  # rows whose client has gone, and that cannot leave yet
        self._ids = np.full(rows, NOBODY)
        self._output = np.zeros(rows, np.int64)
        self._free = deque(range(rows))
        self._given, self._gone = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._told, self._tokens, self._fresh = (np.zeros(pool.max_seqs, np.int64) for _ in range(3))
        self._blank = records(Request, 1)

    def add(self, new: New, at_s: float) -> None:
        row = self._free_row()
        self._rows[new.id], self._ids[row], self._output[row] = row, new.id, new.output
        self._given[row] = self._gone[row] = 0
        at, n = self._chains.add(row, new.chain)
        if self._chains.moved:
            self._follow()
        w = self._w
        if COMPILED:
            w.requests[row] = self._blank[0]
        else:
            w.requests[row] = Request()
        level = min(max(new.priority + LEVELS // 2, 0), LEVELS - 1) if self._by_priority else 0
        put(w.requests, row, {"prompt": new.prompt, "output": new.output, "chain_at": at, "chain_n": n, "level": level,
                              "sent_s": at_s})  # fmt: skip
        if not come(w.world, row, at_s):
            raise RuntimeError("the front took a request that can never fit")

    def drop(self, id: int) -> None:
        row = self._rows.get(id)
        if row is None:
            return
        if drop(self._w.world, row):
            self._over(row)
        else:
            self._gone[row] = LEAVES
            self._leaving.add(row)

    def step(self, now_s: float) -> Step | None:
        w = self._w
        before = self._engine("preemptions")
        busy = begin_step(w.world, now_s, self._gone)
        for row in [r for r in self._leaving if self._gone[r] == LEFT]:
            self._over(row)
        if not busy:
            wait = self._loading_s(now_s)
            return None if wait is None else Step(wait, (), (), 0, (), self._now())
        count, new = tell(w.world, self._given, self._told, self._tokens, self._fresh)
        rows, tokens = self._told[:count].tolist(), self._tokens[:count].tolist()
        ids = [int(self._ids[row]) for row in rows]
        fresh = [(int(self._ids[row]), int(w.requests["cached"][row] if COMPILED else w.requests[row].cached))
                 for row in self._fresh[:new].tolist()]  # fmt: skip
        step = self._described(ids, tokens, fresh, before)
        end_step(w.world)
        for row in rows:
            if self._given[row] >= self._output[row]:
                self._over(row)
        return step

    def _described(self, ids: list[int], tokens: list[int], fresh: list[tuple[int, int]], preempted: int) -> Step:
        took = self._engine("end") - self._engine("t")
        drafts = int(self._engine("decoding")) if self._drafts and self._engine("decodes") else 0
        accepted = max(0, sum(tokens) - len(tokens)) if drafts else 0
        return Step(float(took), ids, tokens, int(self._engine("tokens")), fresh, self._now(),
                    int(self._engine("preemptions") - preempted), drafts, drafts * self._drafts, accepted)  # fmt: skip

    # --- rows

    def _free_row(self) -> int:
        kept = set(get(self._w.slots, "row").ravel().tolist()) if self._slots_keep else ()
        for _ in range(len(self._free)):
            row = self._free.popleft()
            if row not in kept:
                return row
            self._free.append(row)
        raise RuntimeError("more requests than rows")

    def _over(self, row: int) -> None:
        id = int(self._ids[row])
        if self._rows.pop(id, None) is not None:
            self._ids[row] = NOBODY
            self._leaving.discard(row)
            self._chains.drop(row)
            self._free.append(row)

    # --- what the kernel keeps

    def _engine(self, name: str) -> Any:
        engines = self._w.engines
        return getattr(engines[0], name) if not COMPILED else engines[name][0]

    def _now(self) -> Now:
        return Now(
            int(self._engine("running")),
            int(self._engine("waiting") + self._engine("inbox")),
            self._engine("used") / self._blocks,
        )

    def _loading_s(self, now_s: float) -> float | None:
        """Until the next block is up from a tier; None: nothing is on its way."""
        if not get(self._w.world, "events")[0]:
            return None
        return max(1e-6, float(get(self._w.events[:1], "at")[0]) - now_s)

    def _follow(self) -> None:
        """The chains were moved."""
        self._w = located(self._w._replace(links=self._chains.links))
        for row, (at, _) in self._chains.where.items():
            put(self._w.requests, row, {"chain_at": at})


def _empty(rows: int) -> Load:
    """Rows for requests to come; of each level of priority there are some."""
    zero, one = np.zeros(rows, np.int64), np.ones(rows, np.int64)
    levels = np.arange(rows, dtype=np.int64) % LEVELS
    nothing: NDArray[np.int64] = np.zeros(0, np.int64)
    return Load(
        np.full(rows, np.inf), -one, np.zeros(rows), one, one, levels, zero, np.zeros(rows + 1, np.int64), nothing
    )
