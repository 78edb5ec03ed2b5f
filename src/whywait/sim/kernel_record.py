"""The record of steps: bounded."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_state import Clock, Engine
from whywait.sim.state import Steps


@jit
def record(rows: Steps, clock: Clock, eng: Engine) -> None:
    """A row for the steps in flight; past the rows kept whole only every ``stride``-th."""
    size = len(rows.t_s)
    if size == 0:
        return
    if clock.rows >= clock.whole and clock.drain == 0:
        clock.skipped += 1
        if clock.skipped < clock.stride:
            return
        clock.skipped = 0
        if clock.rows == size:
            thin(rows, clock)
    put(rows, clock.rows, eng)
    clock.rows += 1


@jit
def put(rows: Steps, i: int, eng: Engine) -> None:
    rows.t_s[i] = eng.t
    rows.took_s[i] = eng.end - eng.t
    rows.n[i] = eng.n
    rows.prefill_tokens[i] = eng.tokens
    rows.prefill_seqs[i] = eng.seqs
    rows.decode_seqs[i] = eng.decoding if eng.decodes == 1 else 0
    rows.context_sum[i] = eng.context
    rows.pairs[i] = eng.pairs
    rows.kv_used[i] = eng.used
    rows.waiting[i] = eng.waiting
    rows.replica[i] = eng.id


@jit
def thin(rows: Steps, clock: Clock) -> None:
    """Drops every other of the rows past those kept whole."""
    keep = clock.whole
    for i in range(clock.whole + 1, clock.rows, 2):
        move(rows, i, keep)
        keep += 1
    clock.rows = keep
    clock.stride *= 2


@jit
def move(rows: Steps, i: int, to: int) -> None:
    rows.t_s[to] = rows.t_s[i]
    rows.took_s[to] = rows.took_s[i]
    rows.n[to] = rows.n[i]
    rows.prefill_tokens[to] = rows.prefill_tokens[i]
    rows.prefill_seqs[to] = rows.prefill_seqs[i]
    rows.decode_seqs[to] = rows.decode_seqs[i]
    rows.context_sum[to] = rows.context_sum[i]
    rows.pairs[to] = rows.pairs[i]
    rows.kv_used[to] = rows.kv_used[i]
    rows.waiting[to] = rows.waiting[i]
    rows.replica[to] = rows.replica[i]
