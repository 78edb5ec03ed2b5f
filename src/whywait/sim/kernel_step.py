"""The time of a step, of many decode steps in a row, and how many may be taken at once."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_access import linear_at, running
from whywait.sim.kernel_blocks import growth
from whywait.sim.kernel_state import BUSY, NEVER, ONE, Engine, World


@jit
def linear(w: World, kind: int, tokens: int) -> float:
    top = w.tokens - 2
    if tokens <= top:
        return linear_at(w, kind, tokens).x
    return linear_at(w, kind, top).x + (tokens - top) * linear_at(w, kind, top + 1).x


@jit
def windowed(w: World, eng: Engine) -> tuple[int, int, int]:
    """Of the decoders at the next step: tokens read by layers with a window, their growth per step (both · ONE),
    and for how many steps that growth holds."""
    total, grow, steady = 0, 0, NEVER
    limit = eng.window * ONE
    for k in range(eng.running):
        slot = running(w, eng, k)
        if slot.decoding == 1:
            context = slot.base + slot.grow * (eng.counter + 1)
            if context < limit:
                total += context
                grow += slot.grow
                steady = min(steady, (limit - context + slot.grow - 1) // slot.grow)
            else:
                total += limit
    return total, grow, steady


@jit
def took(eng: Engine, n: int) -> float:
    """Of the first ``n`` steps of those in flight: each costs ``slope_s`` more than the one before, and none less than
    ``least_s``."""
    first, slope, least = eng.first_s, eng.slope_s, eng.least_s
    if n == 1:
        return max(first, least)
    hidden = 0  # steps shorter than the host's least
    if first < least:
        hidden = n
        if slope > 0.0 and first + slope * n > least:
            hidden = min(n, int((least - first) / slope) + 1)
    rest = n * (n - 1) // 2 - hidden * (hidden - 1) // 2
    return least * hidden + first * (n - hidden) + slope * rest


@jit
def begin(w: World, eng: Engine) -> None:
    """Sets going what was planned: what its steps cost, and how many of them."""
    batch = eng.decoding if eng.decodes == 1 else 0
    first = eng.step_s + linear(w, eng.kind, eng.tokens + batch * (1 + eng.drafts))
    if eng.seqs > 0:
        first += eng.prefill_step_s + eng.prefill_seq_s * eng.seqs
        first += eng.pair_s * eng.pairs + eng.window_pair_s * eng.window_pairs
    slope, steady = 0.0, NEVER
    eng.context = 0.0
    if batch > 0:
        eng.context = (eng.ctx_base + eng.ctx_grow * (eng.counter + 1)) / ONE
        reads = eng.seq_s * batch + eng.kv_s * eng.context
        slope = eng.kv_s * eng.ctx_grow / ONE
        if eng.window > 0:
            seen, grow, steady = windowed(w, eng)
            reads += eng.window_s * (seen / ONE)
            slope += eng.window_s * (grow / ONE)
        if eng.drafts > 0:
            draft = eng.draft_share * eng.drafts
            reads += draft * (eng.step_s + linear(w, eng.kind, batch) + reads)
            slope += draft * slope
        first += reads
    eng.first_s, eng.slope_s = first, slope
    eng.least_s = eng.floor_s + eng.floor_seq_s * (batch + eng.seqs)
    eng.n = 1
    if w.macro == 1 and eng.seqs == 0 and eng.again == 0:
        eng.n = reach(w, eng, min(steady, eng.next_end - eng.counter))
    eng.end = eng.t + took(eng, eng.n)
    eng.used = eng.blocks - eng.free + growth(w, eng, 1) if eng.decodes == 1 else eng.blocks - eng.free
    eng.queued = eng.waiting + eng.inbox
    eng.mode = BUSY


@jit
def reach(w: World, eng: Engine, most: int) -> int:
    """Decode steps, up to ``most``, that the free blocks allow; at least 1 (the plan has made room for one)."""
    if growth(w, eng, most) <= eng.free:
        return most
    low, high = 1, most  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if growth(w, eng, middle) <= eng.free:
            low = middle
        else:
            high = middle
    return low


@jit
def reached(eng: Engine, at: float) -> int:
    """How many of the steps in flight until the first boundary not before ``at``; all of them if that is later."""
    low, high = 0, eng.n
    while high - low > 1:
        middle = (low + high) // 2
        if eng.t + took(eng, middle) >= at:
            high = middle
        else:
            low = middle
    return high


@jit
def cut(eng: Engine, at: float) -> None:
    """Ends the steps in flight at the first boundary not before ``at``."""
    n = reached(eng, at)
    if n < eng.n:
        eng.n = n
        eng.end = eng.t + took(eng, n)


@jit
def look_back(done: int, take: int, window: int) -> int:
    """Pairs of tokens that ``take`` prompt tokens after ``done`` look back at, themselves included; in a window if >
    0."""
    if window == 0 or done + take <= window:
        return done * take + take * (take + 1) // 2
    grows = max(0, window - done)  # tokens that still see all before them
    return done * grows + grows * (grows + 1) // 2 + (take - grows) * window
