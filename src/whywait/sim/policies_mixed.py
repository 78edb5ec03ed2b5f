"""Engines whose steps mix prompts with decoding: vLLM."""

from __future__ import annotations

from whywait.sim.cache import blocks_of, growth, running
from whywait.sim.jit import jit
from whywait.sim.kernel_queue import first_waiting, pop_waiting
from whywait.sim.kernel_slots import admit, chunk, preempt, victim
from whywait.sim.kernel_state import NOBODY, Engine, World


@jit
def plan_vllm(w: World, eng: Engine) -> None:
    """Running ones first: a token of each decoder, the next chunk of each prompt; then the waiting, in order, while
    sequences, tokens and blocks allow. A block that is missing for a running one is taken from the last."""
    short = make_room(w, eng)
    budget = eng.token_budget - eng.decoding * (1 + eng.drafts)
    if eng.prefilling > 0:
        budget, stopped = continue_prompts(w, eng, budget)
        short = short or stopped
    if not short:
        admit_waiting(w, eng, budget)
    eng.decodes = 1 if eng.decoding > 0 else 0
    eng.blocked = 1 if eng.waiting > 0 and not short else 0
    eng.again = 1 if short else 0


@jit
def make_room(w: World, eng: Engine) -> bool:
    """Preempts until every decoder has a block for its next token; whether it had to."""
    short = False
    while growth(w.room, eng, 1) > eng.free:
        preempt(w, eng, victim(w, eng))
        short = True
    return short


@jit
def most_of(eng: Engine, left: int, budget: int) -> int:
    """Tokens of a prompt with ``left`` to go that this step may compute."""
    take = min(left, budget)
    return min(take, eng.long_prompt) if eng.long_prompt > 0 else take


@jit
def continue_prompts(w: World, eng: Engine, budget: int) -> tuple[int, bool]:
    """The next chunk of every prompt begun; the budget left, and whether a sequence had to be preempted."""
    short = False
    k = 0
    while k < eng.running:
        slot = running(w.room, eng, k)
        if slot.decoding == 1:
            k += 1
            continue
        take = most_of(eng, slot.prompt - slot.done, budget)
        while blocks_of(eng, slot.done + take) - slot.held > eng.free - growth(w.room, eng, 1):
            last = victim(w, eng)
            gone = running(w.room, eng, last)
            budget += gone.take if gone.decoding == 0 else 1 + eng.drafts
            preempt(w, eng, last)
            short = True
            if last == k:
                take = 0
                break
            if last < k:
                k -= 1
        if take > 0:
            chunk(eng, slot, take)
            budget -= take
            k += 1
        elif k < eng.running and running(w.room, eng, k).row == slot.row:
            slot.take = 0
            k += 1
    return budget, short


@jit
def owed(w: World, eng: Engine) -> int:
    """Blocks that prompts begun will still need."""
    if eng.prefilling == 0 or eng.whole_prompt == 0:
        return 0
    total = 0
    for k in range(eng.running):
        slot = running(w.room, eng, k)
        if slot.decoding == 0:
            total += max(0, blocks_of(eng, slot.prompt) - slot.held)
    return total


@jit
def admit_waiting(w: World, eng: Engine, budget: int) -> None:
    while eng.running < eng.max_seqs and budget > 0:
        row = first_waiting(w.levels, eng)
        if row == NOBODY or (eng.running + 1) * (1 + eng.drafts) > eng.token_budget:
            break
        prompt = w.requests[row].prompt + w.requests[row].made
        cached = 0
        if eng.chunked == 0 and prompt - cached > budget:
            break
        take = most_of(eng, prompt - cached, budget)
        need = blocks_of(eng, prompt if eng.whole_prompt == 1 else cached + take)
        if eng.running > 0:
            need += eng.watermark + owed(w, eng)
        if need > eng.free - growth(w.room, eng, 1):
            break
        pop_waiting(w.levels, w.requests, eng, row)
        admit(w, eng, row, cached, take)
        budget -= take
