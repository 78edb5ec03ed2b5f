"""The record of steps: bounded."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_access import row_at
from whywait.sim.kernel_state import Engine, Row, World


@jit
def record(w: World, eng: Engine) -> None:
    """A row for the steps in flight; past the rows kept whole only every ``stride``-th."""
    size = w.size
    if size == 0:
        return
    if w.rows >= w.whole and w.drain == 0:
        w.skipped += 1
        if w.skipped < w.stride:
            return
        w.skipped = 0
        if w.rows == size:
            thin(w)
    put(row_at(w, w.rows), eng)
    w.rows += 1


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
    row.waiting = eng.queued
    row.replica = eng.id


@jit
def thin(w: World) -> None:
    """Drops every other of the rows past those kept whole."""
    keep = w.whole
    for i in range(w.whole + 1, w.rows, 2):
        move(row_at(w, i), row_at(w, keep))
        keep += 1
    w.rows = keep
    w.stride *= 2


@jit
def move(row: Row, to: Row) -> None:
    to.t_s = row.t_s
    to.took_s = row.took_s
    to.n = row.n
    to.prefill_tokens = row.prefill_tokens
    to.prefill_seqs = row.prefill_seqs
    to.decode_seqs = row.decode_seqs
    to.context_sum = row.context_sum
    to.pairs = row.pairs
    to.kv_used = row.kv_used
    to.waiting = row.waiting
    to.replica = row.replica
