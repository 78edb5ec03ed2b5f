"""What each wait is, in a paragraph beyond the line of the vocabulary, for docs/waits, a report and ``catalog``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Text with `code` in it, by cause.
WHAT: Final[Mapping[str, str]] = {
    "weight-read-bound decode": (
        "Each decode step reads every weight that takes part once, however few sequences it works for. With a "
        "small batch that reading is the step: the matrix units wait for memory. More sequences share the same "
        "reads, so throughput grows nearly with the batch while the step hardly does. It is the healthy state of a "
        "GPU with few requests."
    ),
    "KV-read-bound decode": (
        "A step also reads the keys and values of every token of every sequence in it. These bytes are shared with "
        "nobody: they grow with the batch and with the length of the contexts, and past a point they are more than "
        "the weights. A larger batch then gains nothing."
    ),
    "compute-bound decode": (
        "Each further sequence makes the step longer in proportion: the arithmetic is the limit, not memory. On "
        "GPUs that takes hundreds of sequences (or wide speculation); on CPUs a handful is enough."
    ),
    "compute-bound prefill": (
        "Prompts take their time to compute: a prompt of n tokens is about 2·n·(active parameters) operations, and "
        "attention on top that grows with n². All tokens of a prompt are computed side by side, so this is "
        "arithmetic and not memory."
    ),
    "neighbour's prefill": (
        "Requests that decode share their steps with the prompts of others. A step that computes a long prompt "
        "lasts as long as that prompt, and every stream beside it stands still. It is a wait where the prompts "
        "that cause it are of another kind than the request that waits."
    ),
    "poor speculation": (
        "Speculation proposes several tokens and checks them in one step. Proposals that are rejected were "
        "computed for nothing, and what proposes them takes its time as well. Below some acceptance it costs more "
        "than it saves, the more so the larger the batch."
    ),
    "slot limit": (
        "An engine works on a limited number of sequences at once. Who comes when all places are taken waits, "
        "though KV space and the device may have room for more."
    ),
    "kv space": (
        "Every token of every request in work holds its keys and values in a space of fixed size. When it is full "
        "new requests wait though places are free, and engines push requests out of work (preempt, retract) and "
        "compute them again later."
    ),
    "long requests": (
        "Places are held until an answer ends. A few long answers hold most of the places most of the time, and "
        "many short requests wait for them, as in a shop where one till serves whole carts."
    ),
    "rate beyond capacity": (
        "More requests come per second than are finished. The queue grows as long as that lasts, so latencies have "
        "no value of their own: they depend on how long one looked."
    ),
    "prefix cache off": (
        "Prompts that begin alike (a system prompt, a conversation so far, few-shot examples) have the same keys "
        "and values there. Without a prefix cache they are computed again each time."
    ),
    "prefix-cache thrash": (
        "The prefix cache is on, but what it keeps is evicted before it comes again: the set of beginnings in use "
        "is larger than the space that requests in work leave for it. Just below that size nearly all is found, "
        "just above it nearly nothing."
    ),
    "host CPU": (
        "Something other than the model takes the time: the HTTP server, the tokenizer, the scheduler between two "
        "steps, detokenising and streaming. The device has work queued and does nothing."
    ),
    "cpu quota": (
        "The engine's control group (a container's CPU limit) has used up its time for this period, and all its "
        "threads are stopped until the next. CPU use looks moderate, since it is an average over the stops."
    ),
    "noisy neighbour": (
        "The engine's computing threads are ready to run, but other processes run on their cores. Layers are "
        "computed by all threads together, so one thread that lost its core holds up all of them."
    ),
    "network latency": (
        "The path between client and service takes its time: distance, handshakes of new connections, a gateway or "
        "proxy that adds its own. Every request pays it alike, at any load."
    ),
    "buffering proxy": (
        "Something between client and engine collects the stream and hands it on in pieces: a proxy with response "
        "buffering, compression, a buffer in the server. Tokens come in bursts, and the first burst late."
    ),
    "the client itself": (
        "The measuring client had too little CPU to send when requests were due, or to read when bytes came. "
        "Kernel stamps keep the times of what arrived true, but requests that were sent late are another load than "
        "the one that was asked for."
    ),
    "want of load": (
        "Nobody asks for more. The batch is small, or the device has nothing to do at all, and what a step costs "
        "is shared by few. It is not a fault: it says that the same device could do more for the same price."
    ),
    "load shedding": (
        "Requests are refused because the service is full: 429 or 503 by the engine's own queue limit, or by a "
        "gateway before it. The requests that were let in look fine; the refused ones are the ones that waited for "
        "nothing."
    ),
    "interconnect": (
        "A model spread over several devices sums up partial results in every layer (all-reduce), sends tokens to "
        "experts (all-to-all), or hands KV over from prefill to decode engines. The devices wait for each other's "
        "data."
    ),
    "throttling": (
        "Power or heat lowers the device's clocks, so that the same work takes longer. Nothing in the engine shows it."
    ),
    "unexplained": (
        "A good part of the requests' time lies in nothing that was read. It is never a verdict that holds, but "
        "the honest word for *not known*, with what would have to be read."
    ),
    "no success": ("No request of the point succeeded, so there is nothing whose time could be accounted for."),
}
