"""One engine stepped at true pace, with requests that come as they come: the same plan and the same steps as a whole
run."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from whywait.physics.step import StepCost
from whywait.sim.kernel import receive_now, step_now
from whywait.sim.kernel_build import Tables, get, grown, located, put, world
from whywait.sim.kernel_state import NOBODY, SHIFT, Link, records
from whywait.sim.state import Load, Pool, Settings

ROWS = 1024  # requests at first; doubled when they are not enough


class Tokens(NamedTuple):
    """What a request got by a step."""

    id: Hashable
    tokens: int
    first: bool  # its first token is among them
    finished: bool


class Gauges(NamedTuple):
    """Where the engine stands, and counters since its start."""

    running: int
    waiting: int
    kv_used: float  # share of the blocks, 0–1
    prompt_tokens: int  # computed or found in the cache, of prompts that have been admitted
    generation_tokens: int
    preemptions: int
    prefix_queries: int  # tokens
    prefix_hits: int
    drafted: int
    accepted: int


class Online:
    """``add`` requests, then ``step``: it says how long the step takes and what comes out at its end; the caller
    waits that long and calls again. Times are seconds on the caller's clock, which must not go back."""

    def __init__(self, pool: Pool, cost: StepCost, seed: int = 0) -> None:
        self._pool = pool._replace(frontend_s=0.0, frontend_token_s=0.0, reply_s=0.0)
        none = np.zeros(0, np.int64)
        load = Load(np.zeros(0), none, np.zeros(0), none, none, none, none, np.zeros(1, np.int64), none)
        self._ids = 4 * pool.blocks + sum(pool.tier_blocks) if pool.prefix_cache else 0
        settings = Settings(seed=seed, steps=0, macro=False)
        self._w: Tables = grown(world(load, [self._pool], [cost], settings, self._ids), ROWS)
        self._spare = list(range(ROWS - 1, -1, -1))
        self._live: dict[int, Hashable] = {}
        self._out: dict[int, int] = {}
        self._names: dict[Hashable, int] = {}
        self._unnamed = list(range(self._ids - 1, -1, -1))
        self._chains: dict[int, list[int]] = {}
        self._past: list[int] = []
        self._chain_end = 0

    def add(self, id: Hashable, prompt_tokens: int, output_tokens: int, chain: Sequence[Hashable], now: float) -> bool:
        """A request arrives; ``chain`` names the whole blocks of its prompt (and of its answer, if known) by
        content. False: it can never fit and is refused."""
        if not self._spare:
            rows = len(self._w.requests)
            self._w = grown(self._w, rows)
            self._spare = list(range(2 * rows - 1, rows - 1, -1))
        row = self._spare.pop()
        named = self._named(chain) if self._pool.prefix_cache else []
        self._w = self._place_chain(row, named)
        fresh = {"prompt": prompt_tokens, "output": output_tokens, "made": 0, "loaded": 0, "run": NOBODY, "refused": 0}
        times = ("queued_s", "scheduled_s", "first_s", "last_s")
        put(self._w.requests, row, {**fresh, **dict.fromkeys(times, math.nan), "child": NOBODY, "preempted": 0})
        receive_now(self._w.world, row, now)
        if self._of(row, "refused"):
            self._spare.append(row)
            return False
        self._live[row], self._out[row], self._chains[row] = id, 0, named
        return True

    def step(self, now: float) -> tuple[float, list[Tokens]]:
        """Plans one step at ``now``: its seconds, and what requests have got when it ends. (0.0, []): nothing to do."""
        took = float(step_now(self._w.world, now))
        return took, self._news() if took > 0.0 else []

    def due(self) -> float:
        """When something is next due by itself (a load from a tier below); infinity: nothing."""
        return float(get(self._w.events[:1], "at")[0]) if int(get(self._w.world, "events")[0]) else math.inf

    def gauges(self) -> Gauges:
        engine = {name: int(get(self._w.engines, name)[0]) for name in _READ}
        blocks = max(engine["blocks"], 1)
        return Gauges(
            running=engine["running"],
            waiting=engine["waiting"],
            kv_used=(blocks - engine["free"]) / blocks,
            prompt_tokens=engine["queries"],
            generation_tokens=engine["made"],
            preemptions=engine["preemptions"],
            prefix_queries=engine["queries"],
            prefix_hits=engine["hits"],
            drafted=engine["drafted"],
            accepted=engine["accepted"],
        )

    def _of(self, row: int, name: str) -> Any:
        return get(self._w.requests[row : row + 1], name)[0]

    def _news(self) -> list[Tokens]:
        """Compares tokens out with those told before."""
        w, news = self._w, []
        count, counter = (int(get(w.engines, name)[0]) for name in ("running", "counter"))
        slots = w.slots[0][get(w.order[0, :count], "n")]
        rows, decoding, grow, start = (get(slots, name).tolist() for name in ("row", "decoding", "grow", "start"))
        out = {}
        for row, decodes, by, since in zip(rows, decoding, grow, start, strict=True):
            if decodes and row in self._live:
                out[row] = int(self._of(row, "made")) + 1 + ((by * (counter - since)) >> SHIFT)
        live = list(self._live)
        ended = [row for row, last in zip(live, get(w.requests[live], "last_s"), strict=True) if not math.isnan(last)]
        for row in ended:
            out[row] = int(self._of(row, "output"))
        for row, total in out.items():
            if total > self._out[row]:
                first, done = self._out[row] == 0, row in ended
                news.append(Tokens(self._live[row], total - self._out[row], first, done))
                self._out[row] = total
        for row in ended:
            del self._live[row], self._out[row]
        if ended:
            self._recycle(ended)
        return news

    def _recycle(self, ended: list[int]) -> None:
        """Rows that ended may be given to others, once no slot remembers them."""
        named = set(get(self._w.slots[0], "row").tolist())
        self._past += ended
        for row in [row for row in self._past if row not in named]:
            self._past.remove(row)
            self._spare.append(row)
            del self._chains[row]

    def _named(self, chain: Sequence[Hashable]) -> list[int]:
        """Numbers for blocks by content; ends where numbers run out."""
        named: list[int] = []
        for name in chain:
            if name not in self._names:
                if not self._unnamed:
                    self._forget(set(named))
                if not self._unnamed:
                    break
                self._names[name] = self._unnamed.pop()
            named.append(self._names[name])
        return named

    def _forget(self, needed: set[int]) -> None:
        """Frees the numbers of blocks that are nowhere any more."""
        use, tier = get(self._w.nodes[0][: self._ids], "use"), get(self._w.nodes[0][: self._ids], "tier")
        kept = needed.union(*self._chains.values())
        gone = [name for name, k in self._names.items() if use[k] < 0 and tier[k] == 0 and k not in kept]
        self._unnamed += [self._names.pop(name) for name in gone]

    def _place_chain(self, row: int, named: list[int]) -> Tables:
        """Puts a chain into the array of chains, packing that when it is full."""
        w, n = self._w, len(named)
        at = self._chain_end
        if at + n > len(w.links):
            w, at = self._pack(n)
        put(w.links, slice(at, at + n), {"id": named, "mine": 0})
        put(w.requests, row, {"chain_at": at, "chain_n": n})
        self._chain_end = at + n
        return w

    def _pack(self, n: int) -> tuple[Tables, int]:
        """Moves the chains of live requests together, into arrays with room for as many again and ``n`` more."""
        w = self._w
        whole = sum(len(chain) for chain in self._chains.values())
        links = records(Link, 2 * (whole + n) + ROWS)
        at = 0
        for row, named in self._chains.items():
            old, m = int(self._of(row, "chain_at")), len(named)
            put(links, slice(at, at + m), {"id": named, "mine": get(w.links[old : old + m], "mine")})
            put(w.requests, row, {"chain_at": at})
            at += m
        return located(w._replace(links=links)), at


_READ = ("running", "waiting", "blocks", "free", "made", "preemptions", "queries", "hits", "drafted", "accepted")
