"""Engines that do not see a request at once: they schedule ahead, look now and then, or put prompts off."""

from __future__ import annotations

import numpy as np
import pytest

from whywait.physics.step import StepCost
from whywait.sim import kernel
from whywait.sim.state import SGLANG, TRTLLM, VLLM, Load, Pool, Result, Settings

STEP = 0.01


def cost() -> StepCost:
    """Every step takes 10 ms."""
    return StepCost(np.array([1, 2]), np.zeros(2), STEP, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0.0)


def served(pool: Pool, arrive: list[float], output: list[int], macro: bool = True, prompt: int = 8) -> Result:
    n = len(arrive)
    none, zero = np.full(n, -1), np.zeros(n, np.int64)
    load = Load(np.array(arrive), none, np.zeros(n), zero + prompt, np.array(output), zero, zero,
                np.zeros(n + 1, np.int64), zero[:0])  # fmt: skip
    return kernel.run(load, [pool], [cost()], Settings(macro=macro))


@pytest.mark.parametrize("policy", [VLLM, SGLANG, TRTLLM])
def test_what_comes_during_a_step_starts_in_the_one_after_the_next(policy: int) -> None:
    plain = Pool(policy=policy, token_budget=64, blocks=1000)
    arrive, output = [0.0, 0.105], [40, 4]  # the second comes in the middle of the eleventh step
    assert served(plain, arrive, output).scheduled_s[1] == pytest.approx(0.11)
    ahead = served(plain._replace(ahead=True), arrive, output)
    assert ahead.scheduled_s[1] == pytest.approx(0.12)
    assert ahead.scheduled_s[0] == 0.0  # an idle engine takes it at once
    assert ahead.first_s[1] == pytest.approx(0.13)


def test_the_inbox_is_looked_at_every_few_decode_steps() -> None:
    pool = Pool(policy=SGLANG, token_budget=64, blocks=1000, receive_every=10)
    # One step of prefill (after which it looks), then decode steps: it looks again at 0.11, 0.21 …
    found = served(pool, [0.0, 0.035, 0.115], [40, 4, 4])
    assert found.scheduled_s[1] == pytest.approx(0.11)
    # The second's prefill step ends at 0.12: it looks then.
    assert found.scheduled_s[2] == pytest.approx(0.12)


def test_prompts_wait_for_company_but_not_for_ever() -> None:
    pool = Pool(policy=TRTLLM, token_budget=64, blocks=1000, chunked=False, wait_steps=5, wait_share=0.5)
    alone = served(pool, [0.0, 0.035], [40, 4])
    assert alone.scheduled_s[0] == 0.0  # nothing decodes: nobody waits
    assert alone.scheduled_s[1] == pytest.approx(0.04 + 5 * STEP)
    company = served(pool, [0.0, 0.035, 0.035, 0.035, 0.035], [40, 4, 4, 4, 4])
    assert company.scheduled_s[1] == pytest.approx(0.04)  # 32 tokens and a decoder are half of 64


@pytest.mark.parametrize("policy", [VLLM, SGLANG, TRTLLM])
@pytest.mark.parametrize("more", [{"ahead": True}, {"receive_every": 7}, {"ahead": True, "receive_every": 3},
                                  {"wait_steps": 6, "wait_share": 0.8}])  # fmt: skip
def test_many_steps_at_once_are_the_same_as_one_by_one(policy: int, more: dict[str, float]) -> None:
    rng = np.random.default_rng(11)
    arrive = np.sort(rng.uniform(0, 4, 60)).tolist()
    output = rng.integers(1, 60, 60).tolist()
    pool = Pool(policy=policy, token_budget=64, max_seqs=6, blocks=200, block=16, **more)  # type: ignore[arg-type]
    macro, micro = (served(pool, arrive, output, m) for m in (True, False))
    assert not np.isnan(macro.last_s).any()
    for name in ("scheduled_s", "first_s", "last_s"):
        assert getattr(macro, name) == pytest.approx(getattr(micro, name), abs=1e-9)
    assert (macro.scheduled_s >= macro.queued_s).all()
