"""The record of steps: bounded."""

from __future__ import annotations

from typing import Any

from whywait.sim.jit import jit
from whywait.sim.kernel_state import Clock, Engine, Row


@jit
def record(rows: Any, clock: Clock, eng: Engine) -> None:
    """A row for the steps in flight; past the rows kept whole only every ``stride``-th."""
    size = len(rows)
    if size == 0:
        return
    if clock.rows >= clock.whole and clock.drain == 0:
        clock.skipped += 1
        if clock.skipped < clock.stride:
            return
        clock.skipped = 0
        if clock.rows == size:
            thin(rows, clock)
    put(rows[clock.rows], eng)
    clock.rows += 1


@jit
def put(row: Row, eng: Engine) -> None:
    row.t_s = eng.t
    row.took_s = eng.end - eng.t
    row.n = eng.n
    row.prefill_tokens = eng.tokens
    row.prefill_seqs = eng.seqs
    row.decode_seqs = eng.decoding if eng.decodes == 1 else 0
    row.context_sum = eng.context
    row.pairs = eng.pairs
    row.kv_used = eng.used
    row.waiting = eng.waiting
    row.replica = eng.id


@jit
def thin(rows: Any, clock: Clock) -> None:
    """Drops every other of the rows past those kept whole."""
    keep = clock.whole
    for i in range(clock.whole + 1, clock.rows, 2):
        spare = rows[keep]
        rows[keep] = rows[i]
        rows[i] = spare
        keep += 1
    clock.rows = keep
    clock.stride *= 2
