"""Two queues: the requests that wait at an engine, and the events to come."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_state import Clock, Engine, Events, Queue

NOBODY = -1


@jit
def push_back(queue: Queue, eng: Engine, row: int) -> None:
    e, level = eng.id, queue.level[row]
    queue.follow[row] = NOBODY
    if queue.head[e, level] == NOBODY:
        queue.head[e, level] = row
    else:
        queue.follow[queue.tail[e, level]] = row
    queue.tail[e, level] = row
    eng.waiting += 1


@jit
def push_front(queue: Queue, eng: Engine, row: int) -> None:
    e, level = eng.id, queue.level[row]
    queue.follow[row] = queue.head[e, level]
    if queue.head[e, level] == NOBODY:
        queue.tail[e, level] = row
    queue.head[e, level] = row
    eng.waiting += 1


@jit
def first_waiting(queue: Queue, eng: Engine) -> int:
    """The row that is next at this engine, or NOBODY."""
    if eng.waiting == 0:
        return NOBODY
    for level in range(queue.head.shape[1]):
        if queue.head[eng.id, level] != NOBODY:
            return queue.head[eng.id, level]  # type: ignore[no-any-return]
    return NOBODY


@jit
def pop_waiting(queue: Queue, eng: Engine, row: int) -> None:
    """Takes out ``row``, which first_waiting gave."""
    queue.head[eng.id, queue.level[row]] = queue.follow[row]
    eng.waiting -= 1


@jit
def push_event(events: Events, clock: Clock, at: float, code: int) -> None:
    """Into a heap by time, then by code."""
    times, codes = events.heap_s, events.heap
    i = clock.events
    clock.events += 1
    while i > 0:
        up = (i - 1) // 2
        if times[up] < at or (times[up] == at and codes[up] <= code):
            break
        times[i], codes[i] = times[up], codes[up]
        i = up
    times[i], codes[i] = at, code


@jit
def pop_event(events: Events, clock: Clock) -> int:
    """Takes out the first; its code."""
    times, codes = events.heap_s, events.heap
    first = codes[0]
    clock.events -= 1
    n = clock.events
    at, code = times[n], codes[n]
    i = 0
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        right = down + 1
        if right < n and (times[right] < times[down] or (times[right] == times[down] and codes[right] < codes[down])):
            down = right
        if at < times[down] or (at == times[down] and code <= codes[down]):
            break
        times[i], codes[i] = times[down], codes[down]
        i = down
    times[i], codes[i] = at, code
    return first  # type: ignore[no-any-return]
