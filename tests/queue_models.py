"""Queues whose knee is known, and searches run on them: hundreds side by side, an array row for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.judge.search import BLOCK_S, Look, Rule, Search, Seen, enough, look

Array = Any
Served = tuple[Array, Array]  # (searches, requests): time to first token and end-to-end, seconds from due


@dataclass(frozen=True)
class Model:
    """``serve(due, rng)`` gives what becomes of requests due at ``due`` (searches, requests)."""

    name: str
    serve: Callable[[Array, np.random.Generator], Served]
    rules: tuple[Rule, ...]
    tokens: int
    first_rate: float
    warm_s: float
    knee: float | None = None  # by formula


def many_servers(k: int, service: Callable[[np.random.Generator, tuple[int, int]], Array]) -> Any:
    """First come, first served by ``k`` servers; the first token comes when service begins."""

    def serve(due: Array, rng: np.random.Generator) -> Served:
        took = service(rng, due.shape)
        begin = np.empty_like(due)
        if k == 1:  # Lindley's recursion as a running maximum
            before = np.cumsum(took, axis=1) - took
            begin = before + np.maximum.accumulate(due - before, axis=1)
        else:  # Kiefer and Wolfowitz: each request goes to the server that is free first
            free = np.zeros((len(due), k))
            rows = np.arange(len(due))
            for i in range(due.shape[1]):
                j = free.argmin(axis=1)
                begin[:, i] = np.maximum(due[:, i], free[rows, j])
                free[rows, j] = begin[:, i] + took[:, i]
        return begin - due, begin + took - due

    return serve


def batching(slots: int, tokens: int, base_s: float, per_seq_s: float, prefill_s: float) -> Any:
    """Continuous batching: a step makes a token for everyone, and takes longer the more there are."""

    def serve(due: Array, rng: np.random.Generator) -> Served:
        n, m = due.shape
        due = np.concatenate((due, np.full((n, 1), np.inf)), axis=1)
        first, end = np.zeros((n, m + 1)), np.zeros((n, m + 1))
        left, who = np.zeros((n, slots), dtype=int), np.full((n, slots), m)
        clock, at, rows = np.zeros(n), np.zeros(n, dtype=int), np.arange(n)
        while (at < m).any() or left.any():
            idle = ~left.any(axis=1) & (at < m)
            clock[idle] = np.maximum(clock, due[rows, at])[idle]
            fresh = np.zeros(n)
            while True:
                free = left.argmin(axis=1)
                go = (due[rows, at] <= clock) & (left[rows, free] == 0)
                if not go.any():
                    break
                r, f = rows[go], free[go]
                left[r, f], who[r, f] = tokens, at[go]
                fresh[go] += 1
                at[go] += 1
            busy = left > 0
            clock += base_s + per_seq_s * busy.sum(axis=1) + prefill_s * fresh
            for stamp, count in ((first, tokens), (end, 1)):
                r, f = np.nonzero(left == count)
                stamp[r, who[r, f]] = clock[r]
            left -= busy
        return first[:, :m] - due[:, :m], end[:, :m] - due[:, :m]

    return serve


def scores(model: Model, ttft: Array, e2e: Array) -> Array:
    """(rules, …): measured / limit, the worst of each rule's limits."""
    value = {"ttft_ms": ttft * 1e3, "e2e_ms": e2e * 1e3, "tpot_ms": (e2e - ttft) * 1e3 / max(1, model.tokens - 1)}
    return np.stack([np.max([value[k] / limit for k, limit in r.limits.items()], axis=0) for r in model.rules])


def poisson(rates: Array, seconds: Array, rng: np.random.Generator) -> Array:
    """Due times (searches, requests), enough of them to cover ``seconds`` of each."""
    n = int(np.max(rates * seconds + 5 * np.sqrt(rates * seconds) + 10))
    return np.cumsum(rng.exponential(1.0, (len(rates), n)) / rates[:, None], axis=1)


def true_knee(
    model: Model, low: float, high: float, *, requests: int = 20_000, copies: int = 32, rounds: int = 12
) -> float:
    """The knee by bisection on long simulations (the same random numbers at each rate)."""
    for _ in range(rounds):
        mid = math.sqrt(low * high)
        due = np.cumsum(np.random.default_rng(5).exponential(1.0, (copies, requests)), axis=1) / mid
        good = scores(model, *model.serve(due, np.random.default_rng(6)))[:, :, requests // 10 :] <= 1
        fine = all(g.mean() >= r.share for g, r in zip(good, model.rules, strict=True))
        low, high = (mid, high) if fine else (low, mid)
    return math.sqrt(low * high)


def seen_at(now: float, served: tuple[Any, ...], limits: Sequence[float]) -> Seen:
    """What a client sees ``now`` seconds into a probe; ``limits``: TTFT limit of each rule (s)."""
    due, score, ttft, e2e = served
    n = int(np.searchsorted(due, now))
    due, end, score = due[:n], due[:n] + e2e[:n], score[:, :n].copy()
    open_ = end > now
    silent = due + ttft[:n] > now
    score[:, open_] = np.nan
    for row, limit in zip(score, limits, strict=True):
        row[silent & (now - due > limit)] = np.maximum(now - due, 0)[silent & (now - due > limit)] / limit
    return Seen(now, due, np.where(open_, np.nan, end), score)


@dataclass
class Found:
    search: Search
    probes: list[tuple[float, Look]]
    seconds: float
    requests: int

    def holds(self, knee: float) -> bool:
        return (self.search.low or 0.0) <= knee <= (self.search.high or math.inf)


def run_searches(model: Model, seeds: int, budget_s: float, seed: int = 0) -> list[Found]:
    """As many searches at once, each with its own randomness; a probe that ends early still paid for its drain."""
    rng = np.random.default_rng(seed)
    found = [Found(Search(model.first_rate, warm_s=model.warm_s), [], 0.0, 0) for _ in range(seeds)]
    limits = [r.limits.get("ttft_ms", math.inf) / 1e3 for r in model.rules]
    while True:
        asks = [f.search.next(budget_s - f.seconds) for f in found]
        going = [i for i, a in enumerate(asks) if a is not None]
        if not going:
            return found
        rates = np.array([asks[i].rate for i in going])
        caps = np.array([asks[i].cap_s + BLOCK_S for i in going])
        due = poisson(rates, caps, rng)
        ttft, e2e = model.serve(due, rng)
        score = scores(model, ttft, e2e)
        for row, i in enumerate(going):
            _probe(model, found[i], asks[i], (due[row], score[:, row], ttft[row], e2e[row], limits))


def _probe(model: Model, f: Found, ask: Any, served: tuple[Any, ...]) -> None:
    now = model.warm_s + BLOCK_S
    while True:
        seen = seen_at(now, served[:4], served[4])
        judged = look(seen, model.rules, model.warm_s)
        if enough(judged, ask, model.rules):
            break
        now += max(BLOCK_S, 0.05 * now)
    f.search.tell(ask, judged, model.rules)
    f.probes.append((ask.rate, judged))
    drain = np.nanmax(
        np.where(np.isnan(seen.end), served[0][: len(seen.due)] + served[3][: len(seen.due)], 0), initial=now
    )
    f.seconds += float(min(drain, now + 30))
    f.requests += len(seen.due)


def erlang_c(k: int, load: float) -> float:
    """Probability of waiting in M/M/k with ``load`` erlangs (Erlang 1917; by the recursion of the B formula)."""
    b = 1.0
    for i in range(1, k + 1):
        b = load * b / (i + load * b)
    return b / (1 - load / k * (1 - b))


def mmk_knee(k: int, mu: float, wait_s: float, share: float) -> float:
    """Rate at which P(wait > ``wait_s``) = C exp(-(k mu - rate) wait) is 1 - ``share`` in M/M/k."""
    low, high = 0.0, k * mu
    for _ in range(60):
        mid = (low + high) / 2
        low, high = (
            (mid, high) if erlang_c(k, mid / mu) * math.exp(-(k * mu - mid) * wait_s) <= 1 - share else (low, mid)
        )
    return low


def _ttft(limit_ms: float, share: float = 0.95) -> tuple[Rule, ...]:
    return (Rule("ttft", {"ttft_ms": limit_ms}, share),)


def _lognormal(mean: float, sigma: float) -> Any:
    return lambda rng, shape: mean * rng.lognormal(-(sigma**2) / 2, sigma, shape)


MODELS = {
    "M/M/1": Model("M/M/1", many_servers(1, lambda r, s: r.exponential(0.1, s)), _ttft(500), 1, 5.0, 1.0,
                   mmk_knee(1, 10.0, 0.5, 0.95)),
    "M/M/16": Model("M/M/16", many_servers(16, lambda r, s: r.exponential(1.0, s)), _ttft(500), 1, 1.0, 2.0,
                    mmk_knee(16, 1.0, 0.5, 0.95)),
    "M/D/4": Model("M/D/4", many_servers(4, lambda r, s: np.full(s, 0.25)), _ttft(500), 1, 4.0, 1.0),
    "M/G/8": Model("M/G/8", many_servers(8, _lognormal(0.5, 1.0)), _ttft(300), 1, 2.0, 1.0),
    "batching": Model("batching", batching(32, 40, 0.02, 0.001, 0.01),
                      (Rule("ttft", {"ttft_ms": 300.0}, 0.95), Rule("tpot", {"tpot_ms": 50.0}, 0.95)), 40, 1.0, 2.0),
}  # fmt: skip
