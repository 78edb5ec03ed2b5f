"""The closed list of causes: what each means, and the family whose rules look for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from whywait.judge.what import WHAT

FAMILIES: Final = ("work", "queue", "cache", "host", "path", "load", "device", "none")


class Cause(NamedTuple):
    """``meaning`` in one line; ``family`` is one of ``FAMILIES``."""

    meaning: str
    family: str


CAUSES: Final[Mapping[str, Cause]] = {
    "weight-read-bound decode": Cause(
        "a step spends its time reading the weights, which a larger batch shares", "work"
    ),
    "KV-read-bound decode": Cause("a step spends its time reading the KV of its sequences: long contexts", "work"),
    "compute-bound decode": Cause("each further sequence makes the step longer in proportion", "work"),
    "compute-bound prefill": Cause("prompts take their time to compute", "work"),
    "neighbour's prefill": Cause("requests stand still while another's prompt is computed", "work"),
    "poor speculation": Cause("draft tokens are computed and rejected", "work"),
    "slot limit": Cause("requests wait for one of the sequences that are worked on at once", "queue"),
    "kv space": Cause("requests wait for, or are pushed out of, the space for keys and values", "queue"),
    "long requests": Cause("few long answers hold the places that many short ones wait for", "queue"),
    "rate beyond capacity": Cause("more requests come than are finished: the queue grows", "queue"),
    "prefix cache off": Cause("equal beginnings of prompts are computed again each time", "cache"),
    "prefix-cache thrash": Cause(
        "equal beginnings are evicted before they come again: the cache is too small", "cache"
    ),
    "host CPU": Cause("frontend, tokeniser or scheduler: the device idles with work queued", "host"),
    "cpu quota": Cause("the control group of the engine has used up its CPU time", "host"),
    "noisy neighbour": Cause("the engine's threads are ready but others run on their cores", "host"),
    "network latency": Cause("the path between client and service takes its time", "path"),
    "buffering proxy": Cause("something on the path collects tokens before it hands them on", "path"),
    "the client itself": Cause("this client had too little CPU to send and read in time", "path"),
    "want of load": Cause("the batch is small, or the device idle, because nobody asks for more", "load"),
    "load shedding": Cause("requests are refused because the service is full", "load"),
    "interconnect": Cause("devices wait for data of each other", "device"),
    "throttling": Cause("power or heat lowers the device's clocks", "device"),
    "unexplained": Cause("time that nothing read accounts for", "none"),
    "no success": Cause("no request succeeded", "none"),
}


def told(cause: str) -> dict[str, str]:
    """What there is to read of ``cause`` where docs/ is not at hand: ``name, meaning, what, page``."""
    return {"name": cause, "meaning": CAUSES[cause].meaning, "what": WHAT[cause].replace("`", ""), "page": page(cause)}


def page(cause: str) -> str:
    """Where docs/ tells of ``cause``: how it looks, what changes it, how the verdict did."""
    return f"docs/waits/{re.sub(r'[^a-z0-9]+', '-', cause.lower().replace(chr(39), '')).strip('-')}.md"
