"""Workload → Schedule: classes, lengths, sessions and arrival times from one seed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.core import fitted
from whywait.core.schedule import Ints, RequestClass, Schedule, Workload
from whywait.core.timetable import read_schedule
from whywait.load import arrivals
from whywait.units import NS_PER_MS, NS_PER_S

GROUPS_PER_CLASS = 1 << 20


@dataclass(frozen=True)
class Load:
    """One load point: ``target`` requests in flight (``concurrency``) or per second (``rate``; ``trace`` where the
    workload brings its own times and keeps them).

    ``requests`` or ``duration_s`` bounds it; with neither, 10 requests per place in flight, or 30 s of a rate.
    """

    mode: str
    target: float
    requests: int | None = None
    duration_s: float | None = None
    label: str | None = None
    workload: Workload | None = None


def schedule_of(load: Load, workload: Workload, first_id: int, number: int) -> tuple[Schedule, float | None]:
    """The requests of a point, and how long it is to send them (None: until they are all sent)."""
    n, seconds = load.requests, load.duration_s
    if load.mode == "concurrency":
        if n is None and seconds is None:
            n = max(10, round(load.target) * 10)
        return closed_schedule(workload, n or _enough(seconds or 0, load.target), first_id, number), seconds
    if workload.stages or workload.trace or workload.fitted:
        rate = None if load.mode == "trace" else load.target
        schedule = open_schedule(workload, rate, n, first_id, number)
        if seconds is not None:
            schedule = schedule.take(_starts(schedule) < seconds * NS_PER_S)
        return schedule, seconds
    seconds = seconds or (30.0 if n is None else None)
    n = n or max(1, round(load.target * (seconds or 30)))
    return open_schedule(workload, load.target, n, first_id, number), seconds


def _starts(schedule: Schedule) -> Ints:
    """When each request may be sent at the earliest, ns: a later turn not before its session began."""
    due: Ints = schedule.due_ns.copy()
    after = schedule.after_rows()
    for row in np.flatnonzero(after >= 0).tolist():  # a turn comes after the one before it
        due[row] = max(due[row], due[after[row]] + schedule.think_ns[row])
    return due


def _enough(duration_s: float, concurrency: float) -> int:
    """Rows for a closed loop bounded by time: more than it can use at 5 ms a request, but not without end."""
    return min(200_000, max(1000, round(duration_s * concurrency * 200)))


def closed_schedule(workload: Workload, n: int, first_id: int = 0, salt: int = 0) -> Schedule:
    """``n`` requests without due times, for a closed loop."""
    if workload.trace or workload.fitted:
        rows = open_schedule(workload, None, n, first_id, salt)
        return dataclasses.replace(rows, due_ns=np.full(len(rows), -1, np.int64))
    return _Rows(workload, n, salt).schedule(first_id)


def open_schedule(workload: Workload, rate: float | None, n: int | None, first_id: int = 0, salt: int = 0) -> Schedule:
    """Requests at ``rate`` per second from time 0, by the workload's arrivals.

    Stages, a trace and what was fitted bring their own rate and number; ``rate`` then scales them to that mean, and
    ``n`` takes the first so many. Turns after a session's first are due after the one before. Without those three
    neither may be None.
    """
    if workload.trace or workload.fitted:
        return _replayed(workload, rate, n, first_id)
    if workload.stages:
        stages = arrivals.scaled(workload.stages, rate)
        total = sum(s.requests for s in stages)
        most = math.ceil(total + 6 * _spread(workload) * math.sqrt(total + 1)) + workload.burst
        units = arrivals.unit_times(workload, min(most, n or most), salt)
        n = max(1, int((units < total).sum()))
        rows = _Rows(workload, n, salt)
        starts = np.minimum(_per_session(units[: rows.sessions], rows), total * (1 - 1e-9))
        due = arrivals.at_stages(starts, stages)
        return rows.schedule(first_id, due)
    if rate is None or n is None:
        raise ValueError("an open loop needs a rate and a number of requests, stages or a trace")
    rows = _Rows(workload, n, salt)
    units = arrivals.unit_times(workload, rows.sessions, salt)
    return rows.schedule(first_id, arrivals.at_rate(_per_session(units, rows), rate))


def _spread(workload: Workload) -> float:
    """Standard deviation of a gap as a share of its mean: how far the number in a span may stray."""
    return {"gamma": workload.cv, "poisson": 1.0}.get(workload.arrivals, 0.0)


def mean_rate(workload: Workload) -> float | None:
    """Requests per second that the workload itself brings, or None where it only has the rate it is given."""
    if workload.stages:
        return arrivals.mean_rate(workload.stages)
    if workload.fitted:
        return workload.fitted.rate * workload.speed
    if workload.trace:
        return _rate_of(read_schedule(Path(workload.trace), 0, workload.speed))
    return None


def _rate_of(schedule: Schedule) -> float:
    span = int(schedule.due_ns.max()) / NS_PER_S
    return (len(schedule) - 1) / span if span > 0 else float(len(schedule))


def _per_session(units: NDArray[np.float64], rows: _Rows) -> NDArray[np.float64]:
    """Of sessions only the starts arrive; each brings several requests, so they come that much further apart."""
    return units * (rows.n / max(1, rows.sessions))


def _replayed(workload: Workload, rate: float | None, n: int | None, first_id: int) -> Schedule:
    if workload.fitted:
        f = workload.fitted
        return _drawn(f.sample(n, workload.seed, rate or f.rate * workload.speed), workload, first_id)
    path, speed = Path(workload.trace), workload.speed
    if rate is not None:
        speed = rate / _rate_of(read_schedule(path, 0, 1.0, n))
    return read_schedule(path, first_id, speed, n)


def _drawn(got: fitted.Rows, workload: Workload, first_id: int) -> Schedule:
    """A turn waits for the one before and then for its think time; where the log told only when turns began, it waits
    for the one before and begins no earlier than it did there."""
    n = len(got.at_s)
    ids = np.arange(first_id, first_id + n, dtype=np.int64)
    blocks = tuple(tuple(c) for c in got.chains) if got.chains else ()
    size = round(workload.fitted.block_tokens or 0) if blocks and workload.fitted else 0
    names = got.class_names if len(got.class_names) > 1 else (workload.classes[0].name,)
    known = ~np.isnan(got.think_s)
    due = np.where(known, -1, np.rint(got.at_s * NS_PER_S)).astype(np.int64)
    think = np.where(known, np.rint(np.nan_to_num(got.think_s) / workload.speed * NS_PER_S), 0).astype(np.int64)
    return Schedule(
        ids, got.klass, got.prompt_tokens, got.output_tokens, due, names,
        session_id=np.where(got.session < 0, -1, got.session + first_id), turn=got.turn,
        after_id=np.where(got.turn > 0, ids - 1, -1), think_ns=think, blocks=blocks, block_tokens=size,
    )  # fmt: skip


class _Rows:
    """The requests of a generated workload, without times: session after session, turn after turn."""

    def __init__(self, workload: Workload, n: int, salt: int) -> None:
        self.workload, self.n, self.salt = workload, n, salt
        rng = self._rng = np.random.default_rng([workload.seed, salt, 3])
        shares = np.array([c.share for c in workload.classes])
        klass = _deal(shares / shares.sum(), n, rng)  # shares are of requests, so a class of long sessions has few
        self.plans = [_plan(c, int((klass == i).sum()), rng) for i, c in enumerate(workload.classes)]
        sessions = [len(p.sizes) for p in self.plans]
        if sum(sessions) != n:
            klass = rng.permutation(np.repeat(np.arange(len(sessions)), sessions))
        size = np.ones(len(klass), np.int64)
        for i, p in enumerate(self.plans):
            size[klass == i] = p.sizes
        self.sessions = len(klass)
        self.start = np.cumsum(size) - size  # row of each session's first request
        self.size, self.klass = size, np.repeat(klass, size)
        self.first = np.repeat(self.start, size)  # per row
        self.turn = np.arange(n) - self.first

    def schedule(self, first_id: int, starts_s: NDArray[np.float64] | None = None) -> Schedule:
        n, classes = self.n, self.workload.classes
        c = self._columns()
        due = np.full(n, -1, np.int64)
        if starts_s is not None:
            due[self.start] = np.rint(starts_s * NS_PER_S).astype(np.int64)
        ids = np.arange(first_id, first_id + n, dtype=np.int64)
        alone = np.repeat(self.size, self.size) == 1
        return Schedule(
            ids, self.klass, self._whole_prompts(c), c["output"] + c["thinking"], due, tuple(k.name for k in classes),
            np.where(alone, -1, self.first + first_id), self.turn, np.where(self.turn > 0, ids - 1, -1),
            c["think_ns"], c["prefix_group"], c["prefix_tokens"], c["thinking"], c["tool"],
        )  # fmt: skip

    def _columns(self) -> dict[str, Ints]:
        names = ("new", "output", "thinking", "think_ns", "tool", "prefix_tokens", "prefix_group")
        cols = {k: np.full(self.n, -1 if k == "prefix_group" else 0, np.int64) for k in names}
        classes = self.workload.classes
        for i, (c, plan) in enumerate(zip(classes, self.plans, strict=True)):
            mine = np.flatnonzero(self.klass == i)
            values = _class_rows(c, plan, self.turn[mine], self._rng)
            if c.shared:
                # Cold: other prompts at every point, so that none finds what the point before left in the cache.
                base = i + (self.salt * len(classes) if self.workload.cache == "cold" else 0)
                values["prefix_group"] += base * GROUPS_PER_CLASS
            for name, column in values.items():
                cols[name][mine] = column
        for name in ("prefix_group", "prefix_tokens"):  # all turns begin with the system prompt of the first
            cols[name] = cols[name][self.first]
        return cols

    def _whole_prompts(self, cols: dict[str, Ints]) -> Ints:
        """All that was brought so far, and all that was answered to earlier turns, thinking left out."""
        added = cols["new"].copy()
        later = np.flatnonzero(self.turn > 0)
        added[later] += cols["output"][later - 1]
        running = np.cumsum(added)
        whole: Ints = running - (running - added)[self.first]
        return whole


class _Plan(NamedTuple):
    """Sessions of one class: requests of each; and of each request, whether it brings a tool's result and whether its
    answer is a call to a tool."""

    sizes: Ints
    tool: NDArray[np.bool_]
    call: NDArray[np.bool_]


def _plan(c: RequestClass, n: int, rng: np.random.Generator) -> _Plan:
    """Sessions of ``n`` requests together; the last one is cut to fit."""
    if n == 0 or c.requests_per_session <= 1:
        return _Plan(np.ones(n, np.int64), np.zeros(n, bool), np.zeros(n, bool))
    turns = c.turns.sample(n, rng)
    turns = turns[: int(np.searchsorted(np.cumsum(turns), n)) + 1]
    calls = c.tool_calls.sample(int(turns.sum()), rng) if c.tool_calls else np.zeros(int(turns.sum()), np.int64)
    session = np.repeat(np.repeat(np.arange(len(turns)), turns), calls + 1)[:n]
    begun = np.cumsum(calls + 1) - (calls + 1)
    at = (np.arange(int((calls + 1).sum())) - np.repeat(begun, calls + 1))[:n]
    return _Plan(np.bincount(session), at > 0, at < np.repeat(calls, calls + 1)[:n])


def _class_rows(c: RequestClass, plan: _Plan, turn: Ints, rng: np.random.Generator) -> dict[str, Ints]:
    n = len(turn)
    out = {"new": c.prompt_tokens.sample(n, rng), "output": c.output_tokens.sample(n, rng)}
    if c.turn_tokens:
        out["new"] = np.where(turn > 0, c.turn_tokens.sample(n, rng), out["new"])
    if c.tool_calls:
        out["new"] = np.where(plan.tool, c.tool_result_tokens.sample(n, rng), out["new"])
        out["output"] = np.where(plan.call, c.tool_output_tokens.sample(n, rng), out["output"])
    if c.thinking_tokens:
        out["thinking"] = c.thinking_tokens.sample(n, rng)
    if c.think_ms or c.tool_ms:
        user, tool = (x.sample(n, rng) if x else np.zeros(n, np.int64) for x in (c.think_ms, c.tool_ms))
        out["think_ns"] = np.where(turn == 0, 0, np.where(plan.tool, tool, user)) * NS_PER_MS
    if c.shared:
        out["prefix_group"] = rng.integers(0, c.groups, n)
        out["prefix_tokens"] = np.rint(c.shared * out["new"]).astype(np.int64)
    out["tool"] = plan.tool.astype(np.int64)
    return out


def _deal(shares: NDArray[np.float64], n: int, rng: np.random.Generator) -> Ints:
    """Classes in the asked proportions to within one request, in random order.

    Independent draws would miss small shares in short runs: 10 % of 30 requests is none at all in 4 % of seeds.
    """
    bounds = np.rint(np.cumsum(shares) * n).astype(int)
    klass = np.searchsorted(bounds, np.arange(n), side="right").astype(np.int64)
    return rng.permutation(np.minimum(klass, len(shares) - 1))
