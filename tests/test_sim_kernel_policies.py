"""Schedulers of the simulator, each on loads small enough to be worked out by hand. A step takes 1 s and 0.1 s per
token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim_kernel_cases import chained, plain_load, simple_cost
from whywait.sim.kernel import run
from whywait.sim.state import (
    FIFO,
    KEEP_FULL,
    KEEP_SHARE,
    LEAST_LOAD,
    LFU,
    LLAMA_CPP,
    LRU,
    PREFIX,
    SGLANG,
    STATIC,
    TRTLLM,
    Load,
    Pool,
    Result,
    Settings,
)

PRICE = simple_cost(1.0, 0.1)


def served(load: Load, pool: Pool, **settings: object) -> Result:
    return run(load, [pool], [PRICE], Settings(**{"steps": -1, "macro": False, **settings}))


def test_vllm_mixes_a_chunk_with_decoding():
    """8 tokens a step: A's 6 and 2 of B; then A's token and B's other 4; then both decode."""
    result = served(plain_load([0, 0], [6, 6], [3, 2]), Pool(token_budget=8))
    np.testing.assert_allclose(result.steps.took_s, [1.8, 1.5, 1.2])
    np.testing.assert_array_equal(result.steps.prefill_tokens, [8, 4, 0])
    np.testing.assert_array_equal(result.steps.decode_seqs, [0, 1, 2])
    np.testing.assert_array_equal(result.steps.context_sum, [0, 7, 8 + 7])
    np.testing.assert_array_equal(result.steps.pairs, [21 + 3, 2 * 4 + 10, 0])
    np.testing.assert_allclose(result.first_s, [1.8, 3.3])
    np.testing.assert_allclose(result.last_s, [4.5, 4.5])


def test_sglang_computes_prompts_first():
    """The same load: B's other 4 tokens come alone, A's answer stands still meanwhile."""
    result = served(
        plain_load([0, 0], [6, 6], [3, 2]), Pool(policy=SGLANG, token_budget=8, block=1, reserve=KEEP_SHARE)
    )
    np.testing.assert_allclose(result.steps.took_s, [1.8, 1.4, 1.2, 1.1])
    np.testing.assert_array_equal(result.steps.decode_seqs, [0, 0, 2, 1])
    np.testing.assert_allclose(result.first_s, [1.8, 3.2])
    np.testing.assert_allclose(result.last_s, [5.5, 4.4])


def test_sglang_mixes_when_told():
    pool = Pool(policy=SGLANG, token_budget=8, block=1, reserve=KEEP_SHARE, mixed=True)
    result = served(plain_load([0, 0], [6, 6], [3, 2]), pool)
    np.testing.assert_array_equal(result.steps.decode_seqs, [0, 1, 2])
    np.testing.assert_allclose(result.steps.took_s, [1.8, 1.5, 1.2])


def test_vllm_preempts_the_last_when_a_block_is_missing():
    """4 blocks of 4 tokens: both prompts of 7 fill them; at the ninth token B must go. It comes back when A is
    done, and computes its 7 + 2 tokens again."""
    result = served(plain_load([0, 0], [7, 7], [4, 4]), Pool(blocks=4, block=4))
    np.testing.assert_allclose(result.steps.took_s, [2.4, 1.2, 1.1, 1.1, 1.9, 1.1])
    np.testing.assert_array_equal(result.steps.kv_used, [4, 4, 3, 3, 3, 3])
    np.testing.assert_array_equal(result.preempted, [0, 1])
    np.testing.assert_array_equal(result.recomputed, [0, 9])
    np.testing.assert_allclose(result.last_s, [5.8, 8.8])


def test_what_is_preempted_finds_its_own_blocks_again():
    """The same with the prefix cache: of B's two blocks A takes the last for its third; the first is still there."""
    result = served(plain_load([0, 0], [7, 7], [4, 4]), Pool(blocks=4, block=4, prefix_cache=True))
    np.testing.assert_array_equal(result.recomputed, [0, 5])
    np.testing.assert_allclose(result.last_s, [5.8, 5.8 + 1.5 + 1.1])


def test_by_priority_the_less_urgent_waits_and_is_preempted():
    load = plain_load([0, 0, 0.5], [7, 7, 7], [4, 4, 1])._replace(priority=np.array([2, 1, 0]))
    result = served(load, Pool(blocks=4, block=4, priority=True, max_seqs=1))
    assert np.argsort(result.scheduled_s).tolist() == [1, 2, 0]
    result = served(load, Pool(blocks=4, block=4, priority=True))
    assert result.preempted.tolist() == [1, 0, 0]


def test_trtllm_keeps_room_for_the_whole_answer():
    """3 of 4 blocks are kept for A, so B begins when A is done."""
    result = served(plain_load([0, 0], [7, 7], [4, 4]), Pool(policy=TRTLLM, blocks=4, block=4, reserve=KEEP_FULL))
    np.testing.assert_allclose(result.scheduled_s, [0, 5.0])
    np.testing.assert_allclose(result.last_s, [5.0, 10.0])
    assert result.preempted.sum() == 0


def test_trtllm_pauses_when_it_uses_all_blocks():
    result = served(plain_load([0, 0], [7, 7], [4, 4]), Pool(policy=TRTLLM, blocks=4, block=4))
    assert result.preempted.tolist() == [0, 1]


def test_trtllm_cuts_prompts_at_whole_blocks_or_not_at_all():
    load = plain_load([0, 0], [6, 7], [1, 1])
    cut = served(load, Pool(policy=TRTLLM, token_budget=11, block=4, reserve=KEEP_FULL))
    np.testing.assert_array_equal(cut.steps.prefill_tokens, [6 + 4, 3])
    whole = served(load, Pool(policy=TRTLLM, token_budget=11, block=4, reserve=KEEP_FULL, chunked=False))
    np.testing.assert_array_equal(whole.steps.prefill_tokens, [6, 7])


def test_sglang_takes_back_the_shortest_answer_and_admits_carefully_after():
    """62 tokens of KV. A ratio of 0 lets both in; grown to 62, the one with fewer tokens out goes."""
    load = plain_load([0, 0], [10, 10], [40, 40])
    pool = Pool(policy=SGLANG, blocks=62, block=1, reserve=KEEP_SHARE, ratio=0.0, ratio_min=0.0)
    result = served(load, pool)
    assert result.preempted.tolist() == [0, 1]
    assert (result.steps.kv_used <= 62).all()
    careful = served(load, pool._replace(ratio=1.0, ratio_min=1.0))
    assert careful.preempted.sum() == 0


def test_a_static_batch_runs_to_the_end_of_its_longest():
    pool = Pool(policy=STATIC, max_seqs=2, reserve=KEEP_FULL)
    result = served(plain_load([0, 0, 0.1], [4, 4, 4], [2, 5, 2]), pool)
    np.testing.assert_array_equal(result.steps.decode_seqs, [0, 2, 2, 2, 2, 0, 1])
    np.testing.assert_allclose(result.last_s[:2], [1.8 + 1.2, 1.8 + 4 * 1.2])
    assert result.scheduled_s[2] == pytest.approx(result.last_s[1])


def test_llama_cpp_has_as_many_sequences_as_slots_and_fills_batches_with_prompts():
    pool = Pool(policy=LLAMA_CPP, max_seqs=2, token_budget=8, block=1, blocks=1000, reserve=KEEP_FULL)
    result = served(plain_load([0, 0, 0], [6, 6, 6], [3, 2, 1]), pool)
    np.testing.assert_array_equal(result.steps.prefill_tokens[:2], [8, 4])
    assert result.scheduled_s[2] == pytest.approx(result.last_s[:2].min())


def test_llama_cpp_goes_to_the_slot_that_knows_the_prompt():
    """Slot A keeps 0–3, slot B 4–7; the third request begins like the second one, then ends otherwise."""
    load = plain_load([0, 0, 50, 100], [8, 8, 8, 8], [1, 1, 1, 1])
    load = chained(load, [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 8, 9], [4, 5, 8, 10]])
    pool = Pool(policy=LLAMA_CPP, max_seqs=2, block=2, blocks=100, reserve=KEEP_FULL, prefix_cache=True)
    assert served(load, pool).cached.tolist() == [0, 0, 4, 6]
    assert served(load, pool._replace(prefix_cache=False)).cached.tolist() == [0, 0, 0, 0]
    short = served(load, pool._replace(blocks=9, max_seqs=2))  # too little to keep both
    assert short.cached[2] in (0, 4)
    assert (short.steps.kv_used <= 9).all()


def test_a_prompt_known_whole_is_computed_from_its_last_block_on():
    load = chained(plain_load([0, 10, 20], [32, 32, 40], [2, 2, 2]), [[0, 1], [0, 1], [0, 1]])
    result = served(load, Pool(prefix_cache=True))
    assert result.cached.tolist() == [0, 16, 32]
    np.testing.assert_array_equal(result.steps.prefill_tokens[result.steps.prefill_tokens > 0], [32, 16, 8])


def test_an_answer_is_found_by_the_turn_that_follows():
    load = chained(plain_load([0, 0], [16, 40], [17, 2]), [[0, 1], [0, 1]])
    load = load._replace(after=np.array([-1, 0]))
    assert served(load, Pool(prefix_cache=True)).cached.tolist() == [0, 32]


@pytest.mark.parametrize(("evict", "kept"), [(LRU, 0), (FIFO, 1), (LFU, 0)])
def test_what_is_evicted_depends_on_the_rule(evict, kept):
    """Room for two of three one-block beginnings (and one block to work in): X, Y, X again, then Z; which is still
    there?"""
    prompts = [[0], [1], [0], [2], [0], [1]]
    load = chained(plain_load([0, 10, 20, 30, 40, 50], [17] * 6, [1] * 6), prompts)
    result = served(load, Pool(blocks=4, prefix_cache=True, evict=evict))
    hits = (result.cached > 0).tolist()
    assert hits[2]
    assert hits[4 + kept]


def test_a_block_that_went_down_a_tier_comes_back_over_the_link():
    """X is pushed out by Y and Z, and comes back in 0.5 s + 2 blocks · 0.25 s, while its request waits."""
    load = chained(plain_load([0, 10, 20, 30], [40] * 4, [1] * 4), [[0, 1], [2, 3], [4, 5], [0, 1]])
    pool = Pool(blocks=4, prefix_cache=True, tier_blocks=(8,), tier_block_s=(0.25,), tier_latency_s=(0.5,))
    result = served(load, pool)
    assert result.cached.tolist() == [0, 0, 0, 32]
    assert result.scheduled_s[3] == pytest.approx(31.0)
    gone = served(load, pool._replace(tier_blocks=(), tier_block_s=(), tier_latency_s=()))
    assert gone.cached.tolist() == [0, 0, 0, 0]


def test_two_loads_from_a_tier_queue_for_the_link():
    arrive = [0, 10, 20, 30, 40, 50, 50]
    chains = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1], [2, 3]]
    load = chained(plain_load(arrive, [40] * 7, [1] * 7), chains)
    pool = Pool(blocks=8, prefix_cache=True, tier_blocks=(20,), tier_block_s=(1.0,), tier_latency_s=(0.0,))
    result = served(load, pool)
    np.testing.assert_allclose(np.sort(result.scheduled_s[5:]), [52.0, 54.0], atol=1.9)
    assert result.scheduled_s[6] >= 54.0


def test_drafts_that_are_always_right_divide_the_steps():
    load = plain_load([0], [8], [1 + 4 * 5])
    result = served(load, Pool(drafts=3, acceptance=(1.0, 1.0, 1.0)))
    assert len(result.steps.n) == 1 + 5
    np.testing.assert_allclose(result.steps.took_s[1:], 1.0 + 0.1 * 4)
    assert (result.drafted, result.accepted) == (15, 15)
    wrong = served(load, Pool(drafts=3, acceptance=(0.0, 1.0, 1.0), draft_share=0.1))
    assert len(wrong.steps.n) == 1 + 20
    np.testing.assert_allclose(wrong.steps.took_s[1:], 1.4 + 0.3 * 1.1)
    assert wrong.accepted == 0


def test_acceptance_is_by_position():
    """With 0.8 and 0.5 a step gives 1 + 0.8 + 0.8 · 0.5 tokens on average."""
    n = 60
    load = plain_load([0.0] * n, [8] * n, [401] * n)
    result = run(load, [Pool(drafts=2, acceptance=(0.8, 0.5))], [PRICE], Settings(seed=5))
    assert 1 + result.accepted / (result.drafted / 2) == pytest.approx(2.2, rel=0.03)
    other = run(load, [Pool(drafts=2, acceptance=(0.8, 0.5))], [PRICE], Settings(seed=6))
    assert other.accepted != result.accepted


def test_round_robin_and_least_load():
    load = plain_load([0, 0.1, 0.2, 0.3], [4] * 4, [50, 1, 50, 1])
    assert served(load, Pool(), engines=(2,)).replica.tolist() == [0, 1, 0, 1]
    load = plain_load([0, 0.1, 5.0, 5.1], [4] * 4, [50, 1, 50, 1])
    assert served(load, Pool(), engines=(2,), routing=LEAST_LOAD).replica.tolist() == [0, 1, 1, 0]


def test_by_prefix_a_request_goes_where_its_beginning_is():
    load = chained(plain_load([0, 0.1, 20, 30], [40] * 4, [1] * 4), [[0, 1], [2, 3], [2, 3], [0, 1]])
    result = served(load, Pool(prefix_cache=True), engines=(2,), routing=PREFIX)
    assert result.replica.tolist() == [0, 1, 1, 0]
    assert result.cached.tolist() == [0, 0, 32, 32]


def split(load: Load, **settings: object) -> Result:
    given = {"steps": -1, "engines": (1, 1), "handover_token_s": 0.05, "handover_latency_s": 0.5, **settings}
    return run(load, [Pool(), Pool()], [PRICE, PRICE], Settings(**given))


def test_a_split_hands_kv_over_a_link_with_a_queue():
    """Both prompts are computed at once (2.6 s); the link takes 0.5 s + 8 · 0.05 s for each, one after the other."""
    result = split(plain_load([0, 0], [8, 8], [2, 2]))
    np.testing.assert_allclose(result.first_s, [2.6, 2.6])
    np.testing.assert_allclose(result.handover_s, [0.9, 1.8])
    np.testing.assert_allclose(result.last_s, [2.6 + 0.9 + 1.1, 2.6 + 0.9 + 1.1 + 1.1])
    assert set(result.steps.replica.tolist()) == {0, 1}


def test_a_cap_on_reservations_holds_hand_overs_back():
    """With room for one on its way, the second begins only when the first has come: no matter that there are two
    links."""
    load = plain_load([0, 0], [8, 8], [2, 2])
    free = split(load, engines=(2, 1))
    np.testing.assert_allclose(free.handover_s, [0.9, 0.9])
    capped = split(load, engines=(2, 1), handover_in_flight=1)
    np.testing.assert_allclose(np.sort(capped.handover_s), [0.9, 1.8])


def test_a_prefill_engine_holds_kv_until_it_is_handed_over():
    """3 blocks at the prefill engine: the second prompt of 2 blocks waits for the first one's hand-over."""
    load = plain_load([0, 0], [32, 32], [2, 2])
    pools = [Pool(blocks=3), Pool()]
    given = Settings(engines=(1, 1), handover_latency_s=5.0)
    result = run(load, pools, [PRICE, PRICE], given)
    assert result.scheduled_s[1] == pytest.approx(result.first_s[0] + 5.0)
