"""Prompts as chains of KV blocks: which requests begin alike, so that a cache can find it, as dense numbers.

A chain names the whole blocks at the beginning of a request that some other request also has; what nobody else has
needs no name. Equal numbers are equal text from the first token on.
"""

from __future__ import annotations

import numpy as np

from whywait.core.schedule import Ints, Schedule

WARM_PROMPTS = 8  # prompts that a warm workload repeats where nothing is shared by name; as the load driver sends them


def chains(s: Schedule, block: int, warm: bool = False) -> tuple[Ints, Ints]:
    """``(at, ids)``: the chain of row i is ``ids[at[i] : at[i + 1]]``, blocks of ``block`` tokens, dense from 0.

    A chain may go on beyond the prompt: those blocks hold the answer, which the next turn of the session repeats. Of a
    prompt given by named pieces a block counts as known by the piece that its end lies in. ``warm``: prompts that share
    nothing by name repeat one of ``WARM_PROMPTS``.
    """
    rows = _named(s, block) if s.blocks else _grouped(s, block, warm)
    lengths = np.fromiter((len(r) for r in rows), np.int64, len(rows))
    at = np.concatenate(([0], np.cumsum(lengths)))
    if not at[-1]:
        return at, np.zeros(0, np.int64)
    flat = np.concatenate([r for r in rows if len(r)])
    _, dense = np.unique(flat, return_inverse=True)
    return at, dense.ravel().astype(np.int64)


def _named(s: Schedule, block: int) -> list[Ints]:
    """Pieces form a tree: a node is a piece after all before it, and owns the blocks that end in it."""
    piece = s.block_tokens
    nodes: dict[tuple[int, int], int] = {}
    first: list[int] = []  # number of a node's first block
    total = 0
    out: list[Ints] = []
    for row, names in enumerate(s.blocks):
        whole = int(s.prompt_tokens[row]) // block
        node, parts, done = -1, [], 0
        for i, name in enumerate(names):
            until = min(whole, (i + 1) * piece // block)
            key = (node, name)
            found = nodes.get(key)
            if found is None:
                found = nodes[key] = len(first)
                first.append(total)
                total += (i + 1) * piece // block - i * piece // block
            node = found
            if until > done:
                parts.append(np.arange(first[node], first[node] + until - done))
                done = until
        out.append(np.concatenate(parts) if parts else np.zeros(0, np.int64))
    return _shared_only(out, total)


def _shared_only(rows: list[Ints], total: int) -> list[Ints]:
    """Cut each chain behind its last block that another row has too."""
    seen = np.zeros(total, np.int64)
    for r in rows:
        seen[r] += 1
    return [r[: int(np.searchsorted(-seen[r], -1, "left"))] for r in rows]


def _grouped(s: Schedule, block: int, warm: bool) -> list[Ints]:
    """By system prompts and sessions. Numbers: (owner, position) packed, the owner a group, a session or a warm
    prompt."""
    n, wide = len(s), 1 << 32
    group, shared = s.prefix_group.copy(), np.where(s.prefix_group >= 0, s.prefix_tokens, 0) // block
    alone = s.session_id < 0
    if warm:
        again = (group < 0) & alone
        group[again], shared[again] = -2 - s.id[again] % WARM_PROMPTS, s.prompt_tokens[again] // block
    reach = _reach(s, block)
    if not shared.any() and not reach.any():
        return [np.zeros(0, np.int64)] * n
    _, owner = np.unique(group, return_inverse=True)
    _, mine = np.unique(s.session_id, return_inverse=True)
    base = int(owner.max()) + 1
    out = []
    for i in range(n):
        head = np.arange(shared[i]) + owner.ravel()[i] * wide
        tail = np.arange(shared[i], max(reach[i], shared[i])) + (base + mine.ravel()[i]) * wide
        out.append(np.concatenate((head, tail)))
    return out


def _reach(s: Schedule, block: int) -> Ints:
    """How many blocks of each request another turn of its session has too: those of the turn before (with its answer),
    and its own, with its answer, where a turn follows. Thinking is not repeated, so an answer after it is not
    either."""
    reach: Ints = np.zeros(len(s), np.int64)
    after = s.after_rows()
    later = np.flatnonzero((after >= 0) & (s.session_id >= 0))
    said = np.where(s.thinking_tokens > 0, 0, s.output_tokens)
    for row in later.tolist():
        before = int(after[row])
        if s.session_id[before] != s.session_id[row]:
            continue
        held = min(int(s.prompt_tokens[before] + said[before]), int(s.prompt_tokens[row])) // block
        reach[row], reach[before] = max(reach[row], held), max(reach[before], held)
    return reach
