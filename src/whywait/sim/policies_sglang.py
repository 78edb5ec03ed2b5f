"""SGLang: prompts first. A step is either new prompts or one token of every decoder (or both, when mixing is on)."""

from __future__ import annotations

from whywait.sim.cache import cached_blocks
from whywait.sim.handover import load_below
from whywait.sim.jit import jit
from whywait.sim.kernel_access import request, running
from whywait.sim.kernel_blocks import blocks_of, growth
from whywait.sim.kernel_queue import first_waiting, pop_waiting
from whywait.sim.kernel_slots import admit, answer, chunk, emitted, preempt
from whywait.sim.kernel_state import NOBODY, Engine, World

CLIP = 4096  # most tokens of an answer that admission reckons with
AHEAD = 20  # decode steps that retraction makes room for


@jit
def plan_sglang(w: World, eng: Engine) -> None:
    """New prompts if any may run, else a decode step; when blocks run short, requests with the shortest answers so far
    are taken back."""
    eng.again, eng.decodes = 0, 0
    if eng.mixed == 1:
        retract(w, eng)
    tokens = 0
    fresh = eng.decoding == 0  # the mark that it is full is on the batch of decoders; a new one has none
    if fresh:
        eng.full = 0
    if eng.prefilling > 0 or (eng.waiting > 0 and eng.full == 0):
        tokens = plan_prompts(w, eng)
        if fresh:
            eng.full = 0
    if tokens == 0 and eng.mixed == 0:
        retract(w, eng)
        if eng.again == 1 and eng.decoding == 0:  # the last decoder gave its blocks to the prompt that was cut
            eng.full = 0
            tokens = plan_prompts(w, eng)
            eng.full = 0
    if eng.decoding > 0 and (tokens == 0 or eng.mixed == 1):
        eng.decodes = 1
    eng.blocked = eng.full


@jit
def ratio(eng: Engine) -> float:
    """Share of the answers still to come that admission keeps room for."""
    return max(eng.ratio_min, eng.ratio - eng.ratio_decay * (eng.counter - eng.ratio_at))


@jit
def to_come(w: World, eng: Engine) -> int:
    """Tokens that the decoders will still give."""
    total = 0
    for k in range(eng.running):
        slot = running(w, eng, k)
        if slot.decoding == 1:
            one = request(w, slot.row)
            total += min(CLIP, one.output - one.made - emitted(eng, slot))
    return total


@jit
def plan_prompts(w: World, eng: Engine) -> int:
    """Goes on with the prompt that was cut, then admits the waiting; the tokens planned."""
    mixed = eng.decoding if eng.mixed == 1 else 0
    budget = eng.token_budget - mixed if eng.chunked == 1 else 1 << 40
    prompts = eng.prompt_tokens - mixed if eng.prompt_tokens > 0 else 1 << 40
    planned = 0
    spare = (eng.free - growth(w, eng, 1)) * eng.block - int(to_come(w, eng) * ratio(eng)) - mixed
    if eng.prefilling > 0:
        planned, keeps = continue_cut(w, eng, budget)
        spare -= keeps
    while eng.running < eng.max_seqs and planned < budget and planned < prompts:
        row = first_waiting(w, eng)
        if row == NOBODY:
            return planned
        one = request(w, row)
        prompt = one.prompt + one.made
        left = min(CLIP, answer(eng, one) - one.made)
        found, idle, below = one.loaded, 0, 0
        if one.loaded == 0:
            found, idle, below = cached_blocks(w, eng, one, prompt)
        extend = prompt - found * eng.block
        total = extend + left + eng.block
        promised = eng.promised if one.loaded == 0 else 0  # its own is among it
        fits = blocks_of(eng, prompt) - found + idle <= eng.free - growth(w, eng, 1) - promised
        if not fits or (total + (idle + promised) * eng.block > spare and eng.running > 0):
            eng.full = 1
            return planned
        if below > 0:
            pop_waiting(w, eng, row)
            spare -= (idle + below) * eng.block
            load_below(w, eng, row, found, below)
            continue
        if planned > 0 and planned + extend > prompts:
            return planned
        part = min(extend, budget - planned)
        if part < extend:
            part = part // eng.block * eng.block
            if part == 0:
                return planned
        pop_waiting(w, eng, row)
        admit(w, eng, row, found, part)
        planned += blocks_of(eng, part) * eng.block
        spare -= blocks_of(eng, part) * eng.block + eng.block + idle * eng.block + (left if part == extend else 0)
    if eng.running >= eng.max_seqs:
        eng.full = 1
    return planned


@jit
def continue_cut(w: World, eng: Engine, budget: int) -> tuple[int, int]:
    """The next chunk of the prompt that was cut (there is one at most): its tokens, and what it keeps of the room."""
    planned, keeps = 0, 0
    for k in range(eng.running):
        slot = running(w, eng, k)
        if slot.decoding == 0:
            left = slot.prompt - slot.done
            room = (slot.held + eng.free - growth(w, eng, 1)) * eng.block - slot.done
            part = min(left, budget - planned, room)
            if part < left:
                part = part // eng.block * eng.block
            chunk(w, eng, slot, max(part, 0))
            planned += max(part, 0)
            if part == left:
                one = request(w, slot.row)
                keeps += min(CLIP, answer(eng, one) - one.made)
            keeps += blocks_of(eng, max(part, 0)) * eng.block + eng.block
    return planned, keeps


@jit
def retract(w: World, eng: Engine) -> None:
    """Takes decoders back, fewest tokens out and longest prompt first, until the others can go on for some steps."""
    if growth(w, eng, 1) <= eng.free:
        return
    while eng.decoding > 0:
        preempt(w, eng, shortest(w, eng))
        eng.full, eng.again = 0, 1
        enough = eng.decoding <= 1 or eng.free * eng.block >= AHEAD * eng.decoding
        if enough and growth(w, eng, 1) <= eng.free:
            break
    out, whole = 0, 0
    for k in range(eng.running):
        slot = running(w, eng, k)
        if slot.decoding == 1:
            one = request(w, slot.row)
            out += one.made + emitted(eng, slot)
            whole += one.output
    eng.ratio = min(1.0, (out + AHEAD * eng.decoding) / max(whole, 1))
    eng.ratio_at = eng.counter


@jit
def shortest(w: World, eng: Engine) -> int:
    """Place in the order of the decoder with the fewest tokens out; of several the one with the longest prompt, then
    the last."""
    best, fewest, longest = NOBODY, 0, 0
    for k in range(eng.running):
        slot = running(w, eng, k)
        if slot.decoding == 1:
            one = request(w, slot.row)
            out = one.made + emitted(eng, slot)
            if best == NOBODY or out < fewest or (out == fewest and one.prompt >= longest):
                best, fewest, longest = k, out, one.prompt
    return best
