"""The simulator's kernel: what must hold on any load, and queues whose answer is known."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.sim_kernel_cases import POLICIES, cost, plain_load, scenario, simple_cost
from whywait.sim.kernel import loop, run
from whywait.sim.kernel_build import Tables, get, put, world
from whywait.sim.kernel_state import SHIFT
from whywait.sim.state import KEEP_FULL, KEEP_NONE, STATIC, VLLM, Load, Pool, Result, Settings

SEEDS = range(6)
CASES = [(seed, policy) for policy in POLICIES.values() for seed in SEEDS]
NAMES = [f"{name}-{seed}" for name in POLICIES for seed in SEEDS]
TIMES = ("sent_s", "queued_s", "scheduled_s", "first_s", "last_s", "handover_s")
COUNTS = ("cached", "preempted", "recomputed", "replica", "refused")


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, int], Result]:
    return {case: run(*scenario(*case)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_many_steps_at_once_are_the_steps_one_by_one(case, results):
    load, pools, costs, settings = scenario(*case)
    one, many = run(load, pools, costs, settings._replace(macro=False)), results[case]
    for name in TIMES:
        np.testing.assert_allclose(getattr(many, name), getattr(one, name), rtol=1e-9, atol=1e-9)
    for name in COUNTS:
        np.testing.assert_array_equal(getattr(many, name), getattr(one, name))
    assert many.steps.n.sum() == one.steps.n.sum()
    assert many.accepted == one.accepted
    np.testing.assert_allclose(many.steps.took_s.sum(), one.steps.took_s.sum(), rtol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_request_ends_once_in_order_and_tokens_add_up(case, results):
    load, pools, _, _ = scenario(*case)
    result = results[case]
    ends = ~np.isnan(result.last_s)
    np.testing.assert_array_equal(ends, ~result.refused)
    assert (result.queued_s >= result.sent_s)[ends].all()
    assert (result.scheduled_s >= result.queued_s)[ends].all()
    assert (result.first_s > result.scheduled_s)[ends].all()
    assert (result.last_s >= result.first_s)[ends].all()
    one = load.output == 1
    np.testing.assert_array_equal(result.last_s[ends & one], result.first_s[ends & one])
    steps = result.steps
    assert steps.prefill_tokens.sum() == (load.prompt - result.cached + result.recomputed)[ends].sum()
    if pools[0].policy != STATIC and not pools[0].drafts:
        out = (steps.decode_seqs * steps.n).sum() + (1 + result.preempted[ends]).sum()
        prompts_cut = result.preempted.sum() > 0  # one preempted while its prompt was computed gave no token by it
        assert out >= load.output[ends].sum() if prompts_cut else out == load.output[ends].sum()
    assert (steps.kv_used >= 0).all()
    assert (steps.kv_used <= pools[0].blocks).all()
    budget = pools[0].token_budget + pools[0].max_seqs * (1 + pools[0].drafts)
    if pools[0].chunked:
        assert steps.prefill_tokens.max(initial=0) <= budget + pools[0].block
    assert steps.decode_seqs.max(initial=0) <= pools[0].max_seqs


@pytest.mark.parametrize("case", CASES[::3], ids=NAMES[::3])
def test_the_same_seed_gives_the_same_bytes(case, results):
    again = run(*scenario(*case))
    for name in (*TIMES, *COUNTS):
        assert getattr(again, name).tobytes() == getattr(results[case], name).tobytes()
    for one, other in zip(again.steps, results[case].steps, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_no_engine_stands_still_while_a_request_waits(case, results):
    _, pools, _, settings = scenario(*case)
    if settings.engines != (1,) or pools[0].tier_blocks:
        pytest.skip("one engine, nothing on its way from a tier")
    result = results[case]
    ends = result.steps.t_s + result.steps.took_s
    idle_from, idle_to = ends[:-1], result.steps.t_s[1:]
    gaps = idle_to - idle_from > 1e-9
    assert (idle_to - idle_from > -1e-9).all()
    open_from, open_to = result.queued_s[~result.refused], result.last_s[~result.refused] - pools[0].reply_s
    for start, end in zip(idle_from[gaps], idle_to[gaps], strict=True):
        assert not ((open_from < end - 1e-9) & (open_to > start + 1e-9)).any()


def used_blocks(w: Tables, e: int) -> int:
    """Blocks that the sequences of an engine hold, counted from what is known of each."""
    engine = {
        name: int(get(w.engines, name)[e]) for name in ("running", "counter", "drafts", "reserve", "block", "shared")
    }
    held, rows = 0, []
    for place in get(w.order[e], "n")[: engine["running"]]:
        slot = {n: int(get(w.slots[e][place : place + 1], n)[0]) for n in ("row", "held", "decoding", "base", "grow")}
        if slot["decoding"] and not engine["drafts"] and engine["reserve"] != KEEP_FULL:
            slot["held"] = -(-((slot["base"] + slot["grow"] * engine["counter"]) >> SHIFT) // engine["block"])
        held += slot["held"]
        rows.append(slot["row"])
    requests: dict[str, Any] = {
        n: get(w.requests, n) for n in ("parked", "loaded", "replica", "decoder", "chain_at", "chain_n")
    }
    for row in np.flatnonzero(requests["parked"]):
        if requests["replica"][row] == e:
            held += requests["parked"][row]
            rows.append(row)
    for row in np.flatnonzero(requests["loaded"]):
        if (requests["decoder"][row] if requests["decoder"][row] >= 0 else requests["replica"][row]) == e:
            held += requests["loaded"][row]
            rows += [row] if requests["decoder"][row] < 0 else []
    referred = sum(int(get(w.links[a : a + n], "mine").sum()) for row in rows
                   for a, n in [(requests["chain_at"][row], requests["chain_n"][row])])  # fmt: skip
    use = get(w.nodes[e][: engine["shared"]], "use")
    assert use[use > 0].sum() == referred
    return int(held - referred + (use > 0).sum())


def idle_blocks(w: Tables, e: int) -> int:
    """Blocks that are free, by walking the list or heap of them."""
    nodes, shared = w.nodes[e], int(get(w.engines, "shared")[e])
    size, behind = get(nodes, "size"), get(nodes, "behind")
    count = int(get(w.engines, "blank")[e]) + int(get(w.engines, "idle")[e])
    node = int(get(w.engines, "oldest")[e])
    while node >= 0:
        count += int(size[node]) if node >= shared else 1
        node = int(behind[node])
    return count


@pytest.mark.parametrize("case", CASES[::2], ids=NAMES[::2])
def test_used_and_free_blocks_are_all_blocks_at_any_time(case, results):
    load, pools, costs, settings = scenario(*case)
    end = results[case].end_s
    w = world(load, pools, costs, settings._replace(steps=100))
    for part in np.linspace(0.02, 1.0, 25):
        put(w.world, 0, {"limit_s": part * end + 1e-9})
        assert loop(w.world) == 0
        for e in range(len(w.engines)):
            free = int(get(w.engines, "free")[e])
            assert free + used_blocks(w, e) == pools[0].blocks
            if int(get(w.engines, "prefix_cache")[e]):
                assert idle_blocks(w, e) == free
    assert all(get(w.engines, "free") == pools[0].blocks)


def poisson(n: int, rate: float, output: Any, seed: int = 1) -> Load:
    rng = np.random.default_rng(seed)
    return plain_load(np.cumsum(rng.exponential(1 / rate, n)).tolist(), [8] * n, output)


def test_the_wait_for_a_single_slot_is_pollaczek_and_khinchines():
    """Service of ``output`` steps of 0.1 s each, at 60 % load: mean wait λ E[S²] / 2 (1 − ρ)."""
    rng = np.random.default_rng(3)
    for output in (np.full(8000, 5), rng.choice([2, 8], 8000)):
        service = 0.1 * output
        rate = 0.6 / service.mean()
        pool = Pool(max_seqs=1, blocks=1000)
        result = run(poisson(8000, rate, output.tolist()), [pool], [simple_cost(0.1)], Settings())
        expected = rate * (service**2).mean() / 2 / (1 - 0.6)
        assert (result.scheduled_s - result.queued_s).mean() == pytest.approx(expected, rel=0.08)


def test_littles_law_holds():
    load = poisson(3000, 20.0, [30] * 3000)
    result = run(load, [Pool()], [cost()], Settings(steps=-1))
    steps = result.steps
    mean_in = (result.last_s - result.queued_s).sum() / result.end_s
    rate = len(load.prompt) / result.end_s
    assert mean_in == pytest.approx(rate * (result.last_s - result.queued_s).mean())
    decoding = (steps.decode_seqs * steps.took_s).sum() / result.end_s
    in_decode = (result.last_s - result.first_s).sum() / result.end_s
    assert decoding == pytest.approx(in_decode, rel=1e-6)


def test_alone_a_request_waits_for_its_own_prompt_and_nothing_else():
    price = cost()
    load = plain_load([0.0] * 3, [100, 200, 300], [10, 1, 20])
    result = run(load, [Pool()], [price], Settings(concurrency=1))
    for row, prompt in enumerate((100, 200, 300)):
        linear = float(np.interp(prompt, price.grid, price.linear_s))
        pairs = prompt * (prompt + 1) / 2
        step = price.step_s + linear + price.prefill_step_s + price.prefill_seq_s + price.pair_s * pairs
        assert result.first_s[row] - result.sent_s[row] == pytest.approx(step, rel=1e-12)
    np.testing.assert_array_equal(result.sent_s[1:], result.last_s[:-1])


def test_a_closed_loop_keeps_its_number_in_flight():
    load = plain_load([0.0] * 40, [50] * 40, [20] * 40)
    result = run(load, [Pool(frontend_s=0.01)], [cost()], Settings(concurrency=4))
    events = sorted([(t, 1) for t in result.sent_s] + [(t, -1) for t in result.last_s], key=lambda e: (e[0], e[1]))
    flying = list(itertools.accumulate(e[1] for e in events))
    assert max(flying) == 4
    np.testing.assert_allclose(result.queued_s - result.sent_s, 0.01)


def test_a_session_goes_on_after_its_pause():
    load = plain_load([0.0, 9.0, 9.0], [10, 10, 10], [2, 2, 2])
    load = load._replace(after=np.array([-1, 0, 1]), think_s=np.array([0.0, 1.5, 0.25]))
    result = run(load, [Pool()], [simple_cost(0.1)], Settings())
    assert result.sent_s[1] == pytest.approx(result.last_s[0] + 1.5)
    assert result.sent_s[2] == pytest.approx(result.last_s[1] + 0.25)


def test_the_time_limit_leaves_the_rest_unfinished():
    load = plain_load([0.0, 0.0, 50.0], [10, 10, 10], [5, 5000, 5])
    result = run(load, [Pool()], [simple_cost(0.1)], Settings(limit_s=20.0, macro=False))
    assert np.isnan(result.last_s).tolist() == [False, True, True]
    assert np.isnan(result.queued_s).tolist() == [False, False, True]
    assert result.end_s <= 20.0


def test_the_record_of_steps_is_bounded_and_whole_when_asked():
    load = poisson(400, 5.0, [30] * 400)
    whole = run(load, [Pool()], [simple_cost(0.01, 1e-4)], Settings(steps=-1, macro=False))
    few = run(load, [Pool()], [simple_cost(0.01, 1e-4)], Settings(steps=100, macro=False))
    assert len(whole.steps.n) > 2000
    assert len(few.steps.n) <= 100
    np.testing.assert_array_equal(few.steps.t_s[:50], whole.steps.t_s[:50])
    assert few.steps_stride > 1
    assert np.isin(few.steps.t_s, whole.steps.t_s).all()
    assert (np.diff(few.steps.t_s) > 0).all()
    assert few.steps.t_s[-1] > 0.8 * whole.steps.t_s[-1]
    none = run(load, [Pool()], [simple_cost(0.01, 1e-4)], Settings(steps=0))
    assert len(none.steps.n) == 0
    np.testing.assert_allclose(none.last_s, whole.last_s, rtol=1e-9)


def test_what_can_never_fit_is_refused_and_does_not_stop_the_others():
    load = plain_load([0.0] * 4, [10, 4000, 10, 10], [10, 10, 4000, 10])
    result = run(load, [Pool(blocks=100)], [simple_cost(0.01)], Settings(concurrency=1))
    assert result.refused.tolist() == [False, True, True, False]
    assert np.isfinite(result.last_s[[0, 3]]).all()
    assert run(load, [Pool(max_context=19)], [simple_cost(0.01)], Settings()).refused.all()


def test_the_host_hides_until_it_is_the_longer():
    price = simple_cost(0.01)._replace(kv_s=1e-5, floor_s=0.012)
    load = plain_load([0.0], [100], [400])
    pool = Pool(reserve=KEEP_NONE, policy=VLLM)
    result = run(load, [pool], [price], Settings(steps=-1, macro=False))
    context = 100 + np.arange(1, 400)
    np.testing.assert_allclose(result.steps.took_s[1:], np.maximum(0.01 + 1e-5 * context, 0.012))
    many = run(load, [pool], [price], Settings())
    assert many.last_s[0] == pytest.approx(result.last_s[0], rel=1e-12)
