"""What goes into the kernel and what comes out: arrays, one row per request. Times are seconds, sizes tokens or KV
blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]

VLLM, SGLANG, TRTLLM, LLAMA_CPP, STATIC = range(5)
POLICY = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM, "llama.cpp": LLAMA_CPP, "static": STATIC}
KEEP_NONE, KEEP_FULL, KEEP_SHARE = range(3)
RESERVE = {"none": KEEP_NONE, "full": KEEP_FULL, "share": KEEP_SHARE}
LRU, FIFO, LFU = range(3)
EVICTION = {"lru": LRU, "fifo": FIFO, "lfu": LFU}
ROUND_ROBIN, LEAST_LOAD, PREFIX = range(3)
ROUTE = {"round robin": ROUND_ROBIN, "least load": LEAST_LOAD, "prefix": PREFIX}


class Load(NamedTuple):
    """One row per request, in order of id."""

    arrive_s: F8  # (n,) arrival at the service; unused in a closed loop and where ``after`` is given
    after: I8  # (n,) row whose end releases it; −1: none
    think_s: F8  # (n,) pause after that end
    prompt: I8  # (n,) tokens, at least 1
    output: I8  # (n,) tokens, at least 1
    priority: I8  # (n,) lower is served first, where the pool schedules by priority
    klass: I8  # (n,) free for the caller; the kernel does not read it
    chain_at: I8  # (n + 1,) offsets into chain; all 0: nothing shared
    # (m,) dense ids (0..h−1) of KV blocks by content, whole blocks only; may go on past the prompt into the answer
    chain: I8


class Pool(NamedTuple):
    """The scheduler of one kind of engine and its limits."""

    policy: int = VLLM
    max_seqs: int = 256
    token_budget: int = 8192  # tokens a step may compute
    chunked: bool = True
    blocks: int = 10**6  # KV blocks of one engine
    block: int = 16  # tokens of one
    reserve: int = KEEP_NONE
    priority: bool = False
    prefix_cache: bool = False
    max_context: int = 0  # prompt + answer; longer ones are refused; 0: no limit (but the KV cache)
    prompt_tokens: int = 0  # SGLang's max_prefill_tokens: prompt tokens admitted in one step; 0: no limit
    long_prompt: int = 0  # vLLM's long_prefill_token_threshold: most tokens of one prompt in a step; 0: no limit
    mixed: bool = False  # SGLang's --enable-mixed-chunk
    whole_prompt: bool = True  # vLLM admits a prompt only when all of it fits
    ahead: bool = False  # plans a step when the one before begins: sees only what had come by then
    wait_steps: int = 0  # steps that new prompts are put off for while a sequence decodes and …
    wait_share: float = 0.0  # … all that wait fill less than this share of token_budget
    receive_every: int = 1  # decode steps between two looks for new requests
    watermark: float = 0.0  # share of the blocks that admission leaves free
    ratio: float = 0.7  # SGLang: share of the answers still to come that admission keeps room for, at first …
    ratio_min: float = 0.098  # … at least …
    ratio_decay: float = 0.001003  # … and what each decode step takes off
    evict: int = LRU
    drafts: int = 0  # speculative tokens per step
    acceptance: tuple[float, ...] = ()  # by position, each given that all before were accepted
    draft_share: float = 0.0  # time of one draft token as a share of a plain decode step
    frontend_s: float = 0.0
    frontend_token_s: float = 0.0
    reply_s: float = 0.0
    tier_blocks: tuple[int, ...] = ()  # levels below the device, nearest first
    tier_block_s: tuple[float, ...] = ()  # time of one block over the level's link
    tier_latency_s: tuple[float, ...] = ()


class Settings(NamedTuple):
    concurrency: int = 0  # requests (or sessions) in flight; 0: open loop
    seed: int = 0
    steps: int = 20_000  # rows of the steps record: the first half whole, then thinned; 0: none; −1: all
    macro: bool = True
    limit_s: float = float("inf")  # stop here; what is unfinished stays NaN
    routing: int = ROUND_ROBIN
    engines: tuple[int, ...] = (1,)  # of each pool; with two pools: prefill, decode
    handover_token_s: float = 0.0  # seconds of a prompt token over a prefill engine's link, after overlap
    handover_latency_s: float = 0.0
    handover_in_flight: int = 0  # reserved at one decode engine; 0: no cap


class Steps(NamedTuple):
    """A row is one step, or ``n`` pure decode steps in a row; figures are of the first, ``took_s`` of all."""

    t_s: F8
    took_s: F8
    n: I8
    prefill_tokens: I8
    prefill_seqs: I8
    decode_seqs: I8
    context_sum: F8  # tokens the decoders read
    pairs: F8  # pairs of tokens the prompts' chunks look back at
    kv_used: I8  # blocks after the first step
    waiting: I8  # when the first step began
    replica: I8


class Result(NamedTuple):
    """Times on the load's clock; NaN: never."""

    sent_s: F8  # (n,) arrival, or the release by another's end
    queued_s: F8  # the scheduler received it
    scheduled_s: F8  # first step with work of it begins
    first_s: F8  # first token is with the client
    last_s: F8
    cached: I8  # prompt tokens found in the cache at first admission
    preempted: I8  # times
    recomputed: I8  # tokens computed again after preemptions
    replica: I8  # engine that served (prefilled) it; −1 none
    handover_s: F8  # prefill end to the decode engine's having its KV; NaN without a split
    refused: NDArray[np.bool_]  # can never fit
    drafted: int
    accepted: int
    end_s: float
    steps: Steps
    steps_stride: int  # 1: every row; else one in so many past the first half
