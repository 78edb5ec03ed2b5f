"""Two queues: the requests that wait at an engine, and the events to come."""

from __future__ import annotations

from typing import Any

from whywait.sim.jit import jit
from whywait.sim.kernel_access import event_at, level_at, request
from whywait.sim.kernel_state import NOBODY, Engine, Level, World


@jit
def push_back(w: World, eng: Engine, row: int) -> None:
    push_last(w, level_at(w, eng.id, request(w, row).level), row)
    eng.waiting += 1


@jit
def push_last(w: World, level: Level, row: int) -> None:
    request(w, row).follow = NOBODY
    if level.head == NOBODY:
        level.head = row
    else:
        request(w, level.tail).follow = row
    level.tail = row


@jit
def push_front(w: World, eng: Engine, row: int) -> None:
    one = request(w, row)
    level = level_at(w, eng.id, one.level)
    one.follow = level.head
    if level.head == NOBODY:
        level.tail = row
    level.head = row
    eng.waiting += 1


@jit
def first_waiting(w: World, eng: Engine) -> int:
    """The row that is next at this engine, or NOBODY: those that hold loaded blocks first; others may need these."""
    if eng.waiting > 0:
        row = level_at(w, eng.id, w.levels - 2).head
        if row != NOBODY:
            return row
        for k in range(w.levels - 2):
            row = level_at(w, eng.id, k).head
            if row != NOBODY:
                return row
    return NOBODY


@jit
def pop_waiting(w: World, eng: Engine, row: int) -> None:
    """Takes out ``row``, which first_waiting gave."""
    one = request(w, row)
    level_at(w, eng.id, one.level if one.loaded == 0 else w.levels - 2).head = one.follow
    eng.waiting -= 1


@jit
def before(at: float, code: int, other: Any) -> bool:
    return at < other.at or (at == other.at and code < other.code)  # type: ignore[no-any-return]


@jit
def push_event(w: World, at: float, code: int) -> None:
    """Into a heap by time, then by code."""
    i = w.events
    w.events += 1
    while i > 0:
        up = (i - 1) // 2
        if not before(at, code, event_at(w, up)):
            break
        event_at(w, i).at, event_at(w, i).code = event_at(w, up).at, event_at(w, up).code
        i = up
    event_at(w, i).at, event_at(w, i).code = at, code


@jit
def pop_event(w: World) -> int:
    """Takes out the first; its code."""
    first = event_at(w, 0).code
    w.events -= 1
    n = w.events
    at, code = event_at(w, n).at, event_at(w, n).code
    i = 0
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        if down + 1 < n and before(event_at(w, down + 1).at, event_at(w, down + 1).code, event_at(w, down)):
            down += 1
        if before(at, code, event_at(w, down)):
            break
        event_at(w, i).at, event_at(w, i).code = event_at(w, down).at, event_at(w, down).code
        i = down
    event_at(w, i).at, event_at(w, i).code = at, code
    return first
