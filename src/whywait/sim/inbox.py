"""What an engine does not see yet: requests that came while the next step was already planned, or between two looks.

Engines that schedule ahead (vLLM's async scheduling, the overlap of SGLang and TensorRT-LLM) plan a step when the one
before begins, so that what arrives during a step starts in the one after the next. SGLang may look for new requests
only every few decode steps (``--scheduler-recv-interval``). TensorRT-LLM may put new prompts off until they fill a step
(``batch_wait_timeout_iters``, ``batch_wait_max_tokens_ratio``).
"""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_access import level_at, request
from whywait.sim.kernel_queue import push_back
from whywait.sim.kernel_state import NOBODY, Engine, World
from whywait.sim.kernel_step import took


@jit
def lay_by(w: World, eng: Engine, row: int) -> None:
    """A request has come; the engine sees it when it looks."""
    request(w, row).follow = NOBODY
    if eng.inbox == 0:
        eng.inbox_head = row
    else:
        request(w, eng.inbox_tail).follow = row
    eng.inbox_tail = row
    eng.inbox += 1


@jit
def note_steps(eng: Engine) -> None:
    """The steps in flight have ended, ``eng.t`` being still their beginning: what the engine saw at its last look."""
    looked = 0  # after how many of them
    if eng.seqs > 0:
        eng.unlooked, looked = 0, 1
    else:
        since = eng.unlooked + eng.n
        eng.unlooked = since % eng.receive_every
        if since >= eng.receive_every:
            looked = eng.n - eng.unlooked
    if looked > 0:
        eng.seen = eng.t + took(eng, looked - 1 if eng.ahead == 1 else looked)


@jit
def take_in(w: World, eng: Engine) -> None:
    """Queues what the engine has seen. An idle engine sees all."""
    if eng.running + eng.waiting == 0:
        eng.seen, eng.unlooked = eng.t, 0
    while eng.inbox > 0 and request(w, eng.inbox_head).queued_s <= eng.seen:
        row = eng.inbox_head
        eng.inbox_head = request(w, row).follow
        eng.inbox -= 1
        push_back(w, eng, row)


@jit
def put_off(w: World, eng: Engine, budget: int) -> bool:
    """Whether the waiting are let wait for more of them: only while something decodes, and not for ever."""
    filled, places = eng.token_budget - budget, eng.max_seqs - eng.running
    if eng.wait_steps == 0 or eng.decoding == 0 or places == 0:
        return False
    enough = eng.wait_share * eng.token_budget
    for k in range(w.levels - 2):
        row = level_at(w, eng.id, k).head
        while row != NOBODY and places > 0 and filled < enough:
            filled += request(w, row).prompt + request(w, row).made
            places -= 1
            row = request(w, row).follow
    if filled >= enough or eng.waited >= eng.wait_steps:
        eng.waited = 0
        return False
    eng.waited += 1
    return True
