"""Two queues: the requests that wait at an engine, and the events to come."""

from __future__ import annotations

from typing import Any

from whywait.sim.jit import jit
from whywait.sim.kernel_state import NOBODY, Clock, Engine


@jit
def push_back(levels: Any, requests: Any, eng: Engine, row: int) -> None:
    one = requests[row]
    level = levels[eng.id, one.level]
    one.follow = NOBODY
    if level.head == NOBODY:
        level.head = row
    else:
        requests[level.tail].follow = row
    level.tail = row
    eng.waiting += 1


@jit
def push_front(levels: Any, requests: Any, eng: Engine, row: int) -> None:
    one = requests[row]
    level = levels[eng.id, one.level]
    one.follow = level.head
    if level.head == NOBODY:
        level.tail = row
    level.head = row
    eng.waiting += 1


@jit
def first_waiting(levels: Any, eng: Engine) -> int:
    """The row that is next at this engine, or NOBODY."""
    if eng.waiting > 0:
        for k in range(levels.shape[1]):
            row = levels[eng.id, k].head
            if row != NOBODY:
                return row  # type: ignore[no-any-return]
    return NOBODY


@jit
def pop_waiting(levels: Any, requests: Any, eng: Engine, row: int) -> None:
    """Takes out ``row``, which first_waiting gave."""
    one = requests[row]
    levels[eng.id, one.level].head = one.follow
    eng.waiting -= 1


@jit
def before(at: float, code: int, other: Any) -> bool:
    return at < other.at or (at == other.at and code < other.code)  # type: ignore[no-any-return]


@jit
def push_event(heap: Any, clock: Clock, at: float, code: int) -> None:
    """Into a heap by time, then by code."""
    i = clock.events
    clock.events += 1
    while i > 0:
        up = (i - 1) // 2
        if not before(at, code, heap[up]):
            break
        heap[i].at, heap[i].code = heap[up].at, heap[up].code
        i = up
    heap[i].at, heap[i].code = at, code


@jit
def pop_event(heap: Any, clock: Clock) -> int:
    """Takes out the first; its code."""
    first = heap[0].code
    clock.events -= 1
    n = clock.events
    at, code = heap[n].at, heap[n].code
    i = 0
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        if down + 1 < n and before(heap[down + 1].at, heap[down + 1].code, heap[down]):
            down += 1
        if before(at, code, heap[down]):
            break
        heap[i].at, heap[i].code = heap[down].at, heap[down].code
        i = down
    heap[i].at, heap[i].code = at, code
    return first  # type: ignore[no-any-return]
