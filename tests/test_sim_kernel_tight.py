"""The simulator's kernel where KV is short: nothing stands still, and no block is taken that is not free."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim_kernel_cases import POLICIES, Scenario, plain_load, simple_cost, tight
from whywait.sim import kernel
from whywait.sim.jit import COMPILED
from whywait.sim.kernel_build import Tables, get, put, world
from whywait.sim.kernel_state import NOBODY
from whywait.sim.state import KEEP_SHARE, SGLANG, STATIC, VLLM, Pool, Settings

SCENARIOS = range(50) if COMPILED else range(28, 36)
PRICE = simple_cost(1.0, 0.1)


def served(case: Scenario) -> tuple[Tables, int, int]:
    """What the kernel keeps at the end, how the loop ended, and the most blocks that an engine used at once, as a
    multiple of what it has."""
    w, most = world(*case), 0.0
    blocks = get(w.engines, "blocks")
    while True:
        state = kernel.loop(w.world)
        rows = int(get(w.world, "rows")[0])
        used, engine = get(w.rows, "kv_used")[:rows], get(w.rows, "replica")[:rows]
        most = max(most, float((used / blocks[engine]).max(initial=0.0)))
        assert (used >= 0).all()
        if state != 1:
            return w, state, most
        put(w.world, 0, {"rows": 0})


def settled(case: Scenario) -> int:
    """Every request has ended and every block is free again; the number of preemptions."""
    w, state, most = served(case)
    assert state == 0
    assert most <= 1.0
    assert not np.isnan(get(w.requests, "last_s")[get(w.requests, "refused") == 0]).any()
    assert (get(w.requests, "refused") == 0).any()
    np.testing.assert_array_equal(get(w.engines, "free"), get(w.engines, "blocks"))
    for name in ("running", "waiting", "promised", "in_flight", "loading", "inbox"):
        assert (get(w.engines, name) == 0).all(), name
    assert get(w.world, "parked")[0] == 0
    assert get(w.world, "left")[0] == 0
    return int(get(w.engines, "preemptions").sum())


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "static"])
def test_of_a_split_short_of_kv_every_request_ends(policy):
    preempted = sum(settled(tight(seed, POLICIES[policy], True)) for seed in SCENARIOS)
    assert preempted > 0 or policy == "llama.cpp"


@pytest.mark.parametrize("policy", POLICIES)
def test_of_one_engine_short_of_kv_every_request_ends(policy):
    preempted = sum(settled(tight(seed, POLICIES[policy], False)) for seed in SCENARIOS)
    assert preempted > 0 or policy in ("llama.cpp", "static")


def test_what_is_preempted_comes_before_the_next_hand_over():
    """A decode engine of 8 blocks of 4 tokens, hand-overs of 3: of A, B, C the third waits parked. B, preempted at the
    tenth of its tokens, must have its blocks back before C gets any, though C needs fewer."""
    load = plain_load([0, 0, 0], [11, 11, 11], [12, 12, 2])
    pools = [Pool(blocks=100, block=4), Pool(blocks=8, block=4)]
    given = Settings(engines=(1, 1), handover_token_s=0.001, handover_latency_s=0.01)
    result = kernel.run(load, pools, [PRICE, PRICE], given)
    assert result.preempted.tolist() == [0, 1, 0]
    assert result.last_s[0] < result.last_s[1]
    assert result.first_s[2] + result.handover_s[2] > result.last_s[0]


def test_a_prefill_engine_keeps_no_room_for_answers():
    """Answers of 400 tokens, of which the prefill engine gives one: its 40 tokens hold all three prompts at once."""
    load = plain_load([0, 0, 0], [8, 8, 8], [400, 400, 400])
    pool = Pool(policy=SGLANG, block=1, reserve=KEEP_SHARE, blocks=2000)
    result = kernel.run(load, [pool, pool], [PRICE, PRICE], Settings(engines=(1, 1)))
    small = kernel.run(load, [pool._replace(blocks=420), pool], [PRICE, PRICE], Settings(engines=(1, 1)))
    np.testing.assert_array_equal(small.first_s, result.first_s)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_static_batch_has_room_for_its_end(drafts):
    """Answers of 800 tokens beside short ones, which stay in the batch until the long one is out."""
    load = plain_load([0.0] * 8, [16] * 8, [800, 2, 2, 2, 2, 2, 2, 2])
    pool = Pool(policy=STATIC, blocks=62, max_seqs=8, drafts=drafts, acceptance=(0.8, 0.6, 0.4)[:drafts])
    settings = Settings(steps=-1, seed=3)
    assert settled((load, [pool], [PRICE], settings)) == 0
    result = kernel.run(load, [pool], [PRICE], settings)
    assert (result.scheduled_s > 0).any()  # not all of them at once


def test_blocks_that_are_not_there_end_the_run(monkeypatch):
    """An engine that counts free blocks it does not have: no memory is written past a list's end."""
    load, pool = plain_load([0], [64], [4]), Pool(policy=VLLM, blocks=8, prefix_cache=True)

    def broken(*given: object) -> Tables:
        w = world(*given)
        put(w.engines, 0, {"blank": 1, "oldest": NOBODY})
        return w

    monkeypatch.setattr(kernel, "world", broken)
    with pytest.raises(AssertionError, match="not free"):
        kernel.run(load, [pool], [PRICE], Settings())
