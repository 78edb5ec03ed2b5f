"""Engines whose steps mix prompts with decoding: vLLM, TensorRT-LLM's in-flight batching, llama.cpp's server.

All give every decoder its token first, then go on with the prompts begun, then start waiting ones. They differ in what
they keep free for answers (nothing and preempt; or all of them), in how prompts are cut, and in which
place a request gets.
"""

from __future__ import annotations

from whywait.sim.cache import cached_blocks
from whywait.sim.handover import load_below
from whywait.sim.inbox import put_off
from whywait.sim.jit import jit
from whywait.sim.kernel_access import request, running
from whywait.sim.kernel_blocks import blocks_of, growth
from whywait.sim.kernel_queue import first_waiting, pop_waiting
from whywait.sim.kernel_slots import admit, chunk, preempt, victim, wanted
from whywait.sim.kernel_state import NOBODY, Engine, Request, World
from whywait.sim.policies_slots import choose_place, purge_places
from whywait.sim.state import KEEP_FULL, LLAMA_CPP, TRTLLM


@jit
def plan_mixed(w: World, eng: Engine) -> None:
    """Running ones first: a token of each decoder, the next chunk of each prompt; then the waiting, in order, while
    sequences, tokens and blocks allow. A block that is missing for a running one is taken from the last."""
    before = eng.preemptions
    while growth(w, eng, 1) > eng.free:
        preempt(w, eng, victim(w, eng))
    budget = eng.token_budget - eng.decoding * (1 + eng.drafts)
    if eng.prefilling > 0:
        budget = continue_prompts(w, eng, budget)
    short = eng.preemptions > before and eng.running > 0
    off = eng.waiting > 0 and put_off(w, eng, budget)
    if not short and not off and eng.waiting > 0:
        admit_waiting(w, eng, budget)
    eng.decodes = 1 if eng.decoding > 0 else 0
    # Of a prompt that is admitted by its first chunk decoding may evict what it would have had to wake; then it fits.
    shifts = eng.prefix_cache == 1 and eng.whole_prompt == 0 and eng.running < eng.max_seqs
    counts = eng.wait_steps > 0 and eng.running < eng.max_seqs  # steps that the waiting are put off for, one by one
    sure = not short and not shifts and not counts
    eng.blocked = 1 if eng.waiting > 0 and sure else 0
    eng.again = 1 if eng.waiting > 0 and not sure else 0


@jit
def most_of(eng: Engine, left: int, budget: int) -> int:
    """Tokens of a prompt with ``left`` to go that this step may compute; 0: none."""
    part = min(left, eng.long_prompt) if eng.long_prompt > 0 else left
    if part > budget:
        if eng.chunked == 0:
            return 0
        part = budget
    if part < left and eng.policy == TRTLLM:  # it cuts at whole blocks
        part = part // eng.block * eng.block
    return max(part, 0)


@jit
def continue_prompts(w: World, eng: Engine, budget: int) -> int:
    """The next chunk of every prompt begun, in order; the budget left."""
    k = 0
    while k < eng.running:
        slot = running(w, eng, k)
        if slot.decoding == 1:
            k += 1
            continue
        row = slot.row
        part = most_of(eng, slot.prompt - slot.done, budget)
        while blocks_of(eng, slot.done + part) - slot.held > eng.free - growth(w, eng, 1):
            last = victim(w, eng)
            gone = running(w, eng, last)
            budget += gone.take if gone.decoding == 0 else 1 + eng.drafts
            gone.take = 0
            preempt(w, eng, last)
            if last == k:
                part = 0
                break
            if last < k:
                k -= 1
        if k < eng.running and running(w, eng, k).row == row:
            chunk(w, eng, slot, part)
            budget -= part
            k += 1
    return budget


@jit
def admit_waiting(w: World, eng: Engine, budget: int) -> None:
    while eng.running < eng.max_seqs and budget > 0:
        row = first_waiting(w, eng)
        if row == NOBODY or (eng.running + 1) * (1 + eng.drafts) > eng.token_budget:
            break
        one = request(w, row)
        prompt = one.prompt + one.made
        if eng.policy == LLAMA_CPP:
            found = choose_place(w, eng, row)
            idle, below = found, 0
        elif one.loaded > 0:
            found, idle, below = one.loaded, 0, 0
        else:
            found, idle, below = cached_blocks(w, eng, one, prompt)
        part = most_of(eng, prompt - found * eng.block, budget)
        first = prompt if below > 0 else found * eng.block + part
        if not fits(w, eng, one, first, found - idle):
            break
        if below > 0:
            pop_waiting(w, eng, row)
            load_below(w, eng, row, found, below)
            continue
        if part == 0:
            break
        pop_waiting(w, eng, row)
        admit(w, eng, row, found, part)
        budget -= part
        if eng.slot_cache == 1:
            purge_places(w, eng)


@jit
def fits(w: World, eng: Engine, one: Request, tokens: int, there: int) -> bool:
    """Whether the blocks for a request's first ``tokens`` (or for all the engine wants to have for it) are free,
    ``there`` of them being held by others or by itself already."""
    need = blocks_of(eng, tokens)
    if eng.reserve == KEEP_FULL or eng.whole_prompt == 1:
        need = wanted(eng, one)
    spare = eng.free - growth(w, eng, 1)
    if one.loaded == 0:
        spare -= eng.promised
    if eng.running > 0:
        spare -= eng.watermark
    return need - there <= spare
