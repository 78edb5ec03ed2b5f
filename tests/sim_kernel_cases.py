"""Random loads, schedulers and settings for the tests of the simulator's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whywait.physics.step import StepCost
from whywait.sim.state import (
    FIFO,
    KEEP_FULL,
    KEEP_NONE,
    KEEP_SHARE,
    LFU,
    LLAMA_CPP,
    LRU,
    SGLANG,
    STATIC,
    TRTLLM,
    VLLM,
    Load,
    Pool,
    Settings,
)

Scenario = tuple[Load, list[Pool], list[StepCost], Settings]


def cost(window: int = 0, floor_s: float = 0.0, **given: float) -> StepCost:
    """A step that costs a little of everything."""
    grid = np.unique(np.round(np.geomspace(1, 4096, 20)).astype(np.int64))
    whole = StepCost(
        grid, 0.005 + 0.00002 * grid, 0.001, 0.0005, 1e-5, 2e-8, 0.0, window, 1e-4, 1e-9, 0.0, floor_s, 0.0
    )
    if window:
        whole = whole._replace(window_s=3e-8, window_pair_s=1e-9)
    if floor_s:
        whole = whole._replace(floor_seq_s=1e-5)
    return whole._replace(**given)


def simple_cost(step_s: float, token_s: float = 0.0) -> StepCost:
    """``step_s`` a step and ``token_s`` a token."""
    grid = np.array([1, 1_000_000], np.int64)
    return StepCost(grid, token_s * grid, step_s, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0.0)


def plain_load(arrive_s: Sequence[float], prompt: Sequence[int], output: Sequence[int], priority: int = 0) -> Load:
    """Requests that share nothing."""
    n = len(arrive_s)
    zero = np.zeros(n, np.int64)
    lengths = np.asarray(prompt, np.int64), np.asarray(output, np.int64)
    return Load(np.asarray(arrive_s, float), zero - 1, np.zeros(n), *lengths, zero + priority, zero,
                np.zeros(n + 1, np.int64), np.zeros(0, np.int64))  # fmt: skip


def chained(load: Load, chains: Sequence[Sequence[int]]) -> Load:
    """The same with blocks known by content."""
    at = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])]).astype(np.int64)
    return load._replace(chain_at=at, chain=np.array([i for chain in chains for i in chain], np.int64))


def random_load(rng: np.random.Generator, n: int, block: int, shared: bool, sessions: bool) -> Load:
    """Poisson arrivals; where asked, beginnings in common, and later turns that go on from an earlier request's
    answer."""
    rate = float(rng.choice([2, 20, 200]))
    prompt, output = rng.integers(1, 400, n), rng.integers(1, 120, n)
    after, chains = np.full(n, -1, np.int64), []
    groups = [list(range(g * 100, g * 100 + 20)) for g in range(4)]
    fresh = iter(range(1000, 10**9))
    for row in range(n if shared else 0):
        start = groups[rng.integers(4)][: rng.integers(0, 21)]
        parent = int(rng.integers(0, row)) if sessions and row and rng.random() < 0.4 else -1
        if parent >= 0 and not (after == parent).any():
            after[row], prompt[row] = parent, prompt[parent] + output[parent] + rng.integers(1, 50)
            start = chains[parent]
        blocks = int(prompt[row] + output[row] - 1) // block
        chains.append([*start[:blocks], *(next(fresh) for _ in range(blocks - len(start)))])
    load = plain_load(np.cumsum(rng.exponential(1 / rate, n)).tolist(), prompt.tolist(), output.tolist())
    if shared:
        load = chained(load, chains)
        load = load._replace(chain=np.unique(load.chain, return_inverse=True)[1].astype(np.int64))
    think = np.where(after >= 0, rng.exponential(0.5, n), 0.0)
    return load._replace(after=after, think_s=think, priority=rng.integers(0, 3, n))


def random_pool(rng: np.random.Generator, policy: int) -> Pool:
    block = int(rng.choice([1, 16, 16, 32]))
    drafts = int(rng.choice([0, 0, 3]))
    prefix = bool(rng.random() < 0.6)
    tiers = prefix and policy in (VLLM, SGLANG, TRTLLM) and rng.random() < 0.5
    reserve = {VLLM: KEEP_NONE, SGLANG: KEEP_SHARE, TRTLLM: int(rng.choice([KEEP_FULL, KEEP_NONE]))}
    return Pool(
        policy=policy,
        max_seqs=int(rng.choice([4, 16, 64])),
        token_budget=int(rng.choice([256, 512, 2048])),
        chunked=bool(rng.random() < 0.8),
        blocks=int(rng.choice([600, 1200, 2000, 4000, 100_000]) // block) + 8,
        block=block,
        reserve=reserve.get(policy, KEEP_FULL),
        priority=bool(policy == VLLM and rng.random() < 0.3),
        prefix_cache=prefix,
        prompt_tokens=int(rng.choice([0, 1024])),
        long_prompt=int(rng.choice([0, 0, 100])) if policy == VLLM else 0,
        mixed=bool(rng.random() < 0.3),
        whole_prompt=bool(rng.random() < 0.7),
        watermark=float(rng.choice([0, 0.02])),
        evict=int(rng.choice([LRU, LRU, FIFO, LFU])),
        drafts=drafts,
        acceptance=(0.8, 0.6, 0.4)[:drafts],
        draft_share=0.1 if drafts else 0.0,
        frontend_s=0.002,
        frontend_token_s=1e-6,
        reply_s=0.001,
        tier_blocks=(50, 200) if tiers else (),
        tier_block_s=(1e-4, 1e-3) if tiers else (),
        tier_latency_s=(1e-3, 5e-3) if tiers else (),
    )


def scenario(seed: int, policy: int) -> Scenario:
    """A service and its load; the same for the same numbers."""
    rng = np.random.default_rng([seed, policy])
    pool = random_pool(rng, policy)
    load = random_load(rng, int(rng.integers(20, 100)), pool.block, pool.prefix_cache, bool(rng.random() < 0.4))
    price = cost(int(rng.choice([0, 0, 128])), float(rng.choice([0.0, 0.0, 0.008])))
    kinds = 2 if policy in (VLLM, SGLANG) and rng.random() < 0.25 else 1
    replicas = int(rng.choice([1, 1, 3]))
    settings = Settings(
        concurrency=int(rng.choice([0, 0, 1, 8])),
        seed=seed,
        steps=-1,
        routing=int(rng.integers(0, 3)),
        engines=(replicas, 2)[:kinds],
        handover_token_s=1e-5,
        handover_latency_s=0.001,
        handover_in_flight=int(rng.choice([0, 3])),
    )
    return load, [pool] * kinds, [price] * kinds, settings


POLICIES = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM, "llama.cpp": LLAMA_CPP, "static": STATIC}


def tight(seed: int, policy: int, split: bool) -> Scenario:
    """The same with hardly more KV than the longest request needs, split into prefill and decode engines or not."""
    rng = np.random.default_rng([seed, policy, int(split)])
    pool = random_pool(rng, policy)
    load = random_load(rng, int(rng.integers(20, 80)), pool.block, pool.prefix_cache, bool(rng.random() < 0.4))
    most = int((load.prompt + load.output).max()) + pool.drafts
    seqs, least = int(rng.choice([2, 8, 64])), -(-most // pool.block)
    budget = max(pool.token_budget, 4 * seqs, 0 if pool.chunked else most)
    reserve = int(rng.choice([KEEP_NONE, KEEP_FULL])) if policy == STATIC else pool.reserve
    pool = pool._replace(max_seqs=seqs, token_budget=budget, reserve=reserve, ahead=bool(rng.random() < 0.3))
    pools = [pool._replace(blocks=int(least * rng.choice(room)) + int(rng.integers(0, 3)))
             for room in ([1, 1.3, 2, 3], [1, 1.3, 2])[: 1 + split]]  # fmt: skip
    settings = Settings(
        concurrency=int(rng.choice([0, 0, 8, 40])),
        seed=seed,
        steps=-1,
        macro=bool(rng.random() < 0.7),
        limit_s=1e5,
        routing=int(rng.integers(0, 3)),
        engines=(int(rng.choice([1, 1, 3])), int(rng.choice([1, 2])))[: 1 + split],
        handover_token_s=float(rng.choice([1e-5, 1e-3])),
        handover_latency_s=0.001,
        handover_in_flight=int(rng.choice([0, 0, 3])),
    )
    return load, pools, [cost()] * len(pools), settings
