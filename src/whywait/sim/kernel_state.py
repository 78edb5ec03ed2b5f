"""What the kernel keeps while it runs. Records with plain fields: numba sees rows of structured arrays, plain Python
sees objects with the same names.

Contexts of decoding sequences are kept as ``base + grow · counter`` in units of 1/ONE tokens, ``counter`` being the
engine's decode steps so far: whole numbers, so that many steps at once change them exactly as one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from whywait.sim.jit import COMPILED

SHIFT = 16
ONE = 1 << SHIFT
NEVER = 1 << 62
IDLE, READY, BUSY = range(3)
ARRIVES, LOADED, HANDED = range(3)  # kinds of events
KINDS = 4
NOBODY = -1
Address = Any
BOTH, PREFILL, DECODE = range(3)  # roles of an engine


@dataclass
class Slot:
    """A sequence that an engine has admitted."""

    row: int = -1
    prompt: int = 0  # tokens to prefill, with those made before a preemption
    done: int = 0  # tokens whose KV is there, while prefilling
    take: int = 0  # prompt tokens of this step
    busy: int = 0
    decoding: int = 0
    base: int = 0
    grow: int = 0  # tokens per decode step, · ONE
    start: int = 0  # counter when decoding began
    end: int = 0  # counter when the last token is out
    held: int = 0  # blocks; of a decoder only where the growth is not by one token a step
    own: int = 0  # blocks of the chain that are registered (or could not be)
    left: int = 0  # when it was last left, by the engine's stamp


@dataclass
class Engine:
    """A replica: limits, cost of a step, and where it stands."""

    id: int = 0
    kind: int = 0
    role: int = BOTH
    # limits, as in Pool
    policy: int = 0
    max_seqs: int = 0
    token_budget: int = 0
    chunked: int = 1
    blocks: int = 0
    block: int = 16
    reserve: int = 0
    priority: int = 0
    prefix_cache: int = 0  # blocks shared by content
    slot_cache: int = 0  # slots keep the KV of their last request
    max_context: int = 0
    prompt_tokens: int = 0
    long_prompt: int = 0
    mixed: int = 0
    whole_prompt: int = 1
    watermark: int = 0  # blocks
    evict: int = 0
    ahead: int = 0
    wait_steps: int = 0
    wait_share: float = 0.0
    receive_every: int = 1
    drafts: int = 0
    tiers: int = 0
    draft_share: float = 0.0
    ratio_start: float = 0.0
    ratio_min: float = 0.0
    ratio_decay: float = 0.0
    reply_s: float = 0.0
    # cost, as in StepCost
    step_s: float = 0.0
    prefill_step_s: float = 0.0
    seq_s: float = 0.0
    kv_s: float = 0.0
    window_s: float = 0.0
    window: int = 0
    prefill_seq_s: float = 0.0
    pair_s: float = 0.0
    window_pair_s: float = 0.0
    floor_s: float = 0.0
    floor_seq_s: float = 0.0
    # where it stands
    mode: int = IDLE
    t: float = 0.0
    counter: int = 0
    running: int = 0
    prefilling: int = 0
    decoding: int = 0
    waiting: int = 0
    free: int = 0  # blocks, with those below
    blank: int = 0  # blocks with nothing worth keeping
    oldest: int = NOBODY  # ends of the list of idle blocks
    newest: int = NOBODY
    shared: int = 0  # ids of shared blocks
    runs: int = NOBODY  # first unused run
    idle: int = 0  # shared blocks in the heap
    stamp: int = 0
    loading: int = 0  # requests whose blocks are on their way up
    promised: int = 0  # blocks that requests which are loading will still need
    next_end: int = NEVER  # counter of the earliest end among decoders
    ctx_base: int = 0  # sums over decoders
    ctx_grow: int = 0
    blocked: int = 0  # nothing waiting can start before something ends
    again: int = 0  # plan after one step
    inbox: int = 0  # requests that came and were not seen yet, chained from …
    inbox_head: int = NOBODY
    inbox_tail: int = NOBODY
    seen: float = 0.0  # what came by then is seen
    unlooked: int = 0  # decode steps since the last look
    waited: int = 0  # steps that prompts have been put off for
    full: int = 0  # SGLang: no admission until a sequence leaves
    ratio: float = 0.0  # … of the answers to keep room for, as of step ``ratio_at``
    ratio_at: int = 0
    in_flight: int = 0  # hand-overs reserved here
    link_s: float = 0.0  # when the link of a prefill engine is free
    gone: int = 0  # static batching: ended sequences of the batch
    # the steps in flight
    n: int = 0
    end: float = 0.0
    first_s: float = 0.0  # cost of the first …
    slope_s: float = 0.0  # … and what each further one costs more
    least_s: float = 0.0
    decodes: int = 0  # decoders take part
    tokens: int = 0  # of prompts
    seqs: int = 0  # prompts
    pairs: int = 0
    window_pairs: int = 0
    context: float = 0.0
    used: int = 0
    queued: int = 0  # waiting when they began
    # totals
    made: int = 0
    preemptions: int = 0
    prompts: int = 0  # prompt tokens computed
    drafted: int = 0
    accepted: int = 0


@dataclass
class Request:
    """A row of the load, where it stands, and what became of it."""

    prompt: int = 1
    output: int = 1
    think_s: float = 0.0
    chain_at: int = 0
    chain_n: int = 0  # blocks of its chain that others may share
    run: int = NOBODY  # its private blocks, freed by a preemption and not yet used otherwise
    loaded: int = 0  # blocks it holds while it waits, having been loaded
    parked: int = 0  # blocks it holds at its prefill engine after the prefill
    parked_s: float = math.nan  # since when
    decoder: int = NOBODY  # engine that decodes it, with a split
    made: int = 0  # tokens out before a preemption
    level: int = 0  # of priority
    follow: int = NOBODY  # the next in its queue
    child: int = NOBODY  # first row released by the end of this one …
    sibling: int = NOBODY  # … and the next of those
    sent_s: float = math.nan
    queued_s: float = math.nan
    scheduled_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    handover_s: float = math.nan
    cached: int = 0
    preempted: int = 0
    recomputed: int = 0
    replica: int = NOBODY
    refused: int = 0


@dataclass
class Node:
    """KV blocks that no sequence holds, or that several may: one shared block (by its id), or, past the shared
    ones, a run of private blocks that were freed together."""

    use: int = -1  # of a shared block: sequences that hold it; 0: idle; −1: not on the device
    size: int = 1  # blocks of a run
    before: int = NOBODY  # neighbours in the list of idle ones (on the device or in a tier), oldest first
    behind: int = NOBODY
    owner: int = NOBODY  # of a run: the preempted row that may take it back
    hits: int = 0
    tier: int = 0  # level below the device where it is; 0: none
    place: int = NOBODY  # in the heap, where eviction goes by key
    key: int = 0  # idle ones with the smallest go first


@dataclass
class Tier:
    """A level of KV cache below the device, and the link to it."""

    blocks: int = 0
    count: int = 0
    oldest: int = NOBODY
    newest: int = NOBODY
    block_s: float = 0.0
    latency_s: float = 0.0
    idle_s: float = 0.0  # when the link is free


@dataclass
class Level:
    """Requests of one priority waiting at one engine: a linked list over rows."""

    head: int = NOBODY
    tail: int = NOBODY


@dataclass
class Event:
    at: float = 0.0
    code: int = 0  # row · KINDS + kind


@dataclass
class Row:
    """Of the record of steps; see state.Steps."""

    t_s: float = 0.0
    took_s: float = 0.0
    n: int = 0
    prefill_tokens: int = 0
    prefill_seqs: int = 0
    decode_seqs: int = 0
    context_sum: float = 0.0
    pairs: int = 0
    kv_used: int = 0
    waiting: int = 0
    replica: int = 0


@dataclass
class World:
    """What the engines share, and where everything is (an address when compiled, else the array itself); see
    ``kernel_access``."""

    now: float = 0.0
    next: int = 0  # place in the order of arrivals
    arrivals: int = 0
    events: int = 0  # in the heap
    engines: int = 1
    first: int = 1  # engines of the first pool
    routing: int = 0
    turn: int = 0  # of round robin
    seed: int = 0
    macro: int = 1
    closed: int = 0
    limit_s: float = math.inf
    frontend_s: float = 0.0
    frontend_token_s: float = 0.0
    rows: int = 0  # of the steps record in use
    whole: int = 0  # rows kept whole before thinning
    stride: int = 1
    skipped: int = 0
    drain: int = 0  # stop when the record is full
    left: int = 0  # requests that have not ended
    fault: int = 0  # blocks were asked for that are not free: the kernel contradicts itself
    parked: int = 0  # prefilled requests that wait for a reservation
    cap: int = 0  # hand-overs reserved at one decode engine; 0: no cap
    token_s: float = 0.0  # hand-over of a prompt token
    latency_s: float = 0.0
    decode_turn: int = 0
    # where
    at_engines: Address = 0
    at_slots: Address = 0
    at_order: Address = 0
    at_phase: Address = 0
    at_linear: Address = 0
    at_accept: Address = 0
    at_links: Address = 0
    at_nodes: Address = 0
    at_heap: Address = 0
    at_tiers: Address = 0
    at_requests: Address = 0
    at_levels: Address = 0
    at_due: Address = 0
    at_events: Address = 0
    at_rows: Address = 0
    # and how much of it per engine (or kind of engine, or in all)
    seats: int = 0
    block: int = 0
    tokens: int = 0
    drafts: int = 0
    nodes: int = 0
    ids: int = 0
    tiers: int = 0
    levels: int = 0
    size: int = 0  # of the record of steps


@dataclass
class Link:
    """A block of a chain."""

    id: int = 0  # of the shared block, by content
    mine: int = 0  # 1: the row it belongs to holds that shared block


@dataclass
class Whole:
    n: int = 0


@dataclass
class Real:
    x: float = 0.0


def dtype_of(kind: type) -> np.dtype[np.void]:
    size = {"int": "i8", "Address": "i8", "float": "f8"}
    return np.dtype([(f.name, size[str(f.type)]) for f in fields(kind)], align=True)


def records(kind: type, shape: int | tuple[int, ...]) -> Any:
    """An array of ``kind`` with its defaults: of records when compiled, else of objects."""
    if not COMPILED:
        array = np.empty(shape, dtype=object)
        flat = array.reshape(-1)
        for place in range(len(flat)):
            flat[place] = kind()
        return array
    one = np.array(tuple(f.default for f in fields(kind)), dtype_of(kind))
    table = np.empty(shape, one.dtype)
    words = one.dtype.itemsize // 8  # every field is one word: copied as such they take a fraction of the time
    table.reshape(-1).view(np.int64).reshape(-1, words)[:] = one.reshape(1).view(np.int64)
    return table
