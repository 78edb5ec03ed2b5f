"""Events of one request's life, and the table of their legal order. Times are nanoseconds after the run's zero."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sent(NamedTuple):
    id: int
    t_ns: int


class Accepted(NamedTuple):
    id: int
    t_ns: int
    status: int


class Chunk(NamedTuple):
    """``kind`` and ``clock`` are codes of ``core.columns``; ``t_low_ns`` and ``tokens`` are None when not known."""

    id: int
    t_ns: int
    t_low_ns: int | None
    kind: int
    tokens: int | None
    clock: int


class Finished(NamedTuple):
    """The stream ended by its own protocol. ``facts`` are columns of the requests table."""

    id: int
    t_ns: int
    facts: dict[str, Any]


class Failed(NamedTuple):
    """It did not. ``facts`` holds outcome, fault and detail, and what was learnt before."""

    id: int
    t_ns: int
    facts: dict[str, Any]


class Step(NamedTuple):
    t_ns: int
    took_ns: int
    prefill_tokens: int | None
    decode_seqs: int | None
    kv_used: float | None
    bound_by: str | None


class Reading(NamedTuple):
    asked_ns: int
    answered_ns: int
    source: str
    name: str
    labels: str | None
    value: float | None


# state -> event -> next state. "due" is where every scheduled request starts; "done" is the end of all.
ORDER: dict[str, dict[str, str]] = {
    "due": {"Sent": "sent", "Failed": "done"},
    "sent": {"Accepted": "accepted", "Failed": "done"},
    "accepted": {"Chunk": "accepted", "Finished": "done", "Failed": "done"},
    "done": {},
}


def next_state(state: str, event: str) -> str:
    """The state after ``event``.

    Raises:
        ValueError: the event may not happen in this state (invariant 2).
    """
    try:
        return ORDER[state][event]
    except KeyError:
        raise ValueError(f"{event} may not follow state {state!r}") from None
