"""How quick the simulator's kernel is on one core, and how its time grows.

    python benchmarks/sim_speed.py [--requests 1000000] [--growth]

A dense model of 7B parameters, 6 requests/s (Poisson), prompts and answers of about 500 tokens; then the same
with blocks shared by content, too few of them, and drafts. CPU seconds of one run each: figures and their
ratios, no verdicts.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from whywait.physics.step import StepCost
from whywait.sim.jit import COMPILED
from whywait.sim.kernel import run
from whywait.sim.state import Load, Pool, Settings

BLOCK = 16


def cost() -> StepCost:
    """A 7B-class model in bf16 on a device of 1 PFLOP/s and 3.35 TB/s, half of each achieved."""
    grid = np.unique(np.round(np.geomspace(1, 16_384, 40)).astype(np.int64))
    linear = np.maximum(14e9 / 2.3e12, 14e9 * grid / 0.5e15)
    kv = 131_072 / 2.3e12
    return StepCost(grid, linear, 0.0008, 0.0003, 4e-6, kv, 0.0, 0, 5e-5, 1.2e-9, 0.0)


def load(n: int, rate: float, shared: bool) -> Load:
    rng = np.random.default_rng(1)
    prompt, output = rng.integers(250, 750, n), rng.integers(250, 750, n)
    zero, chain_at, chain = np.zeros(n, np.int64), np.zeros(n + 1, np.int64), np.zeros(0, np.int64)
    if shared:  # each prompt begins like those of its group, for 8–24 blocks
        blocks = np.minimum(rng.integers(8, 25, n), prompt // BLOCK)
        chain_at = np.concatenate([[0], np.cumsum(blocks)])
        within = np.arange(chain_at[-1]) - np.repeat(chain_at[:-1], blocks)
        chain = np.repeat(rng.integers(0, 200, n), blocks) * 24 + within
        chain = np.unique(chain, return_inverse=True)[1].astype(np.int64)
    arrive = np.cumsum(rng.exponential(1 / rate, n))
    return Load(arrive, zero - 1, np.zeros(n), prompt, output, zero, zero, chain_at, chain)


def measure(name: str, n: int, given: Load, pool: Pool) -> float:
    began = resource.getrusage(resource.RUSAGE_SELF)
    result = run(given, [pool], [cost()], Settings())
    ended = resource.getrusage(resource.RUSAGE_SELF)
    own, system = ended.ru_utime - began.ru_utime, ended.ru_stime - began.ru_stime
    took = max(own + system, 1e-9)
    print(
        f"{name:<38} {n:>10,} requests {took:7.2f} s CPU ({system:.2f} s of it the kernel's, for fresh memory)"
        f" {n / took:10,.0f} requests/s"
        f"   (preempted {int(result.preempted.sum()):,}, cached tokens {int(result.cached.sum()):,},"
        f" drafts accepted {result.accepted:,})"
    )
    return n / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--growth", action="store_true", help="also 10³ … 10⁷ requests")
    options = parser.parse_args()
    plain = Pool(blocks=30_000)
    rich = Pool(blocks=2_200, prefix_cache=True, drafts=3, acceptance=(0.7, 0.6, 0.5), draft_share=0.05)
    began = time.process_time()
    run(load(10, 6.0, True), [rich], [cost()], Settings())
    print(f"{'compiled' if COMPILED else 'plain Python'}: the first call took {time.process_time() - began:.1f} s CPU")
    n = options.requests
    quick = measure("plain", n, load(n, 6.0, False), plain)
    slow = measure("blocks by content, preemption, drafts", n // 10, load(n // 10, 12.0, True), rich)
    print(f"the plain case is {quick / slow:.1f} times quicker")
    for power in range(3, 8) if options.growth else ():
        measure(f"plain, 10^{power}", 10**power, load(10**power, 6.0, False), plain)


if __name__ == "__main__":
    main()
