"""The kernel compiled and as plain Python: the same bits. And one engine at true pace is as one of a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.sim_kernel_cases import cost, plain_load, scenario
from whywait.sim.kernel import run
from whywait.sim.online import Online
from whywait.sim.rng import draw, seeded
from whywait.sim.state import LLAMA_CPP, SGLANG, STATIC, TRTLLM, VLLM, Pool, Settings

ROOT = Path(__file__).parents[1]
PROGRAM = """
import hashlib
from tests.sim_kernel_cases import POLICIES, scenario
from whywait.sim.jit import COMPILED
from whywait.sim.kernel import run
print(COMPILED)
for policy in POLICIES.values():
    for seed in range(20, 26):
        result = run(*scenario(seed, policy))
        digest = hashlib.sha256()
        for column in (*result[:11], *result.steps):
            digest.update(column.tobytes())
        print(policy, seed, digest.hexdigest(), result.drafted, result.accepted, result.end_s.hex())
"""


def digests(form: str) -> list[str]:
    environ = {**os.environ, "WHYWAIT_SIM": form, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_compiled_and_plain_give_the_same_bits():
    pytest.importorskip("numba", reason="the compiled form needs the extra 'sim'")
    compiled, plain = digests("compiled"), digests("python")
    assert (compiled[0], plain[0]) == ("True", "False")
    assert len(plain) == 31
    assert compiled[1:] == plain[1:]


@pytest.mark.parametrize("policy", [VLLM, SGLANG, TRTLLM, LLAMA_CPP, STATIC])
def test_at_true_pace_requests_get_their_tokens_as_in_a_whole_run(policy):
    load, (pool, *_), (price, *_), _ = scenario(2, policy)
    pool = pool._replace(frontend_s=0.0, frontend_token_s=0.0, reply_s=0.0, priority=False, drafts=0, acceptance=())
    load = load._replace(after=np.full(len(load.prompt), -1), priority=np.zeros(len(load.prompt), np.int64))
    whole = run(load, [pool], [price], Settings(macro=False))
    engine, now, came, ends = Online(pool, price), 0.0, 0, {}
    first: dict[int, float] = {}
    tokens = np.zeros(len(load.prompt), np.int64)
    while True:
        while came < len(tokens) and load.arrive_s[came] <= now:
            chain = load.chain[load.chain_at[came] : load.chain_at[came + 1]].tolist()
            at = float(load.arrive_s[came])
            taken = engine.add(came, int(load.prompt[came]), int(load.output[came]), chain, at)
            assert taken != whole.refused[came]
            came += 1
        took, news = engine.step(now)
        if took == 0.0:
            now = min(engine.due(), load.arrive_s[came] if came < len(tokens) else np.inf)
            if now == np.inf:
                break
            continue
        now += took
        for item in news:
            tokens[item.id] += item.tokens
            if item.first:
                first[item.id] = now
            if item.finished:
                ends[item.id] = now
    served = ~whole.refused
    np.testing.assert_array_equal(tokens[served], load.output[served])
    np.testing.assert_allclose([first[row] for row in np.flatnonzero(served)], whole.first_s[served], rtol=1e-9)
    np.testing.assert_allclose([ends[row] for row in np.flatnonzero(served)], whole.last_s[served], rtol=1e-9)
    gauges = engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_used) == (0, 0, 0.0)
    assert gauges.preemptions == whole.preempted.sum()
    assert gauges.prefix_queries >= load.prompt[served].sum()


def test_at_true_pace_rows_and_names_are_used_again():
    engine, now = Online(Pool(blocks=40, prefix_cache=True, max_seqs=4), cost()), 0.0
    for k in range(3000):
        assert engine.add(k, 40, 2, [f"{k}-0", f"{k}-1"], now)
        for _ in range(2):
            took, _ = engine.step(now)
            now += took
    assert engine.step(now) == (0.0, [])
    assert engine.gauges().generation_tokens == 6000
    assert len(engine._w.requests) == 1024
    assert len(engine._w.links) < 10_000


def test_draws_are_uniform_and_differ_by_seed_and_row():
    def some(seed: int, row: int) -> list[float]:
        one, two = seeded(seed, row, 3)
        out = []
        for _ in range(200):
            u, one, two = draw(one, two)
            out.append(u)
        return out

    if not hasattr(draw, "py_func"):
        values = np.array([some(seed, row) for seed in range(5) for row in range(20)])
        assert values.mean() == pytest.approx(0.5, abs=0.01)
        assert values.var() == pytest.approx(1 / 12, rel=0.03)
        assert len({tuple(row) for row in values[:, :3].tolist()}) == 100
        assert abs(np.corrcoef(values[:, 0], np.arange(100))[0, 1]) < 0.25


def test_seeds_change_what_is_drawn():
    load = plain_load([0.0] * 4, [8] * 4, [100] * 4)
    pool = Pool(drafts=2, acceptance=(0.5, 0.5))
    runs = [run(load, [pool], [cost()], Settings(seed=seed)).accepted for seed in range(4)]
    assert len(set(runs)) > 1
