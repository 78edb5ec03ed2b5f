"""Requests as tools tell them → the tables of a Run, with the invariants that every Run keeps.

What the files do not hold is null. Stamps that contradict each other by no more than two clocks may are put in order,
others are null and counted. Where a file does not say when requests were sent, they are laid out, and the Run says so.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.convert import results_file as rf
from whywait.convert.results_part import MOST_CHUNKS, Asked, Faults, Ints, Part, Source, doubt
from whywait.core.columns import CLOCKS, FAULTS, KINDS, OUTCOMES
from whywait.core.run import Manifest, Run
from whywait.core.table import Array, Table
from whywait.units import NS_PER_MS, NS_PER_S

CLOCKS_APART = 5 * NS_PER_MS  # stamps of two clocks may contradict each other by so much
TOGETHER = NS_PER_MS // 10  # chunks that a tool's loop stamped closer than this came in one read
LONGEST = 50 * 86_400 * NS_PER_S  # of a run
APART = NS_PER_S  # between points whose files share no clock
SIMULATED = "simulated"  # ``made_by`` of a run, and so of one that a file of ours holds
_STAMPS = ("due", "sent", "accepted", "first", "last", "end")


@dataclass
class Given:
    """What a user adds to the files: columns of the manifest."""

    engine: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, float] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    chunks: int = MOST_CHUNKS  # times of chunks at most; with more of them none are kept, and latencies stay


def build(sources: Sequence[Source], given: Given) -> Run:
    """One Run of all load points, numbered in the order of the files."""
    parts = [(s, p) for s in sources for p in s.parts]
    for source, part in parts:
        bad = source.bad = source.bad or Faults()
        if part.starts != "told":
            _lay_out(part)
        _in_reach(part, bad)
        for r in part.requests:
            _in_order(r, bad)
        part.requests.sort(key=_turn)
    left = _chunks_left((p for _, p in parts), given.chunks)
    zero, at = _axis(parts)
    points = [_point(part, number, at[number]) for number, (_, part) in enumerate(parts)]
    rows = [(number, r) for number, (_, part) in enumerate(parts) for r in part.requests]
    clocks = [CLOCKS.index("kernel" if s.made_by == SIMULATED else "user") for s, _ in parts]
    kept = [] if left else [(i, n, r) for i, (n, r) in enumerate(rows) if r.times is not None]
    chunks = [_stream(r, i, at[n], clocks[n]) for i, n, r in kept]
    return Run(
        _manifest(sources, parts, given, zero, left),
        Table.from_rows("points", points),
        _request_table(rows, at),
        _chunk_table(chunks),
        Table.empty("steps"),
        Table.from_rows("readings", [r for n, (s, p) in enumerate(parts) for r in _readings(s, p, points[n])]),
    )


def _chunks_left(parts: Iterable[Part], most: int) -> int:
    """How many times of chunks are left out: none, or all of them."""
    total = sum(p.forgotten + sum(len(r.times) for r in p.requests if r.times is not None) for p in parts)
    return total if total > most else 0


# --- the axis


def _axis(parts: list[tuple[Source, Part]]) -> tuple[int, list[int]]:
    """Unix time of the Run's zero, and what to add to the stamps of each part.

    Parts that tell Unix time and do not overlap keep their distances; else points follow one another.
    """
    spans = [_extent(p) for _, p in parts]
    if all(p.wall for _, p in parts):
        order = sorted(spans)
        if order and all(a[1] <= b[0] for a, b in itertools.pairwise(order)):
            zero = order[0][0]
            return zero, [-zero] * len(parts)
    out, free = [], 0
    for low, high in spans:
        out.append(free - low)
        free += high - low + APART
    zero = spans[0][0] if parts and parts[0][1].wall else 0
    ended = parts[0][0].ended_ns if parts else None
    if not zero and ended is not None and spans:
        zero = max(ended - (spans[0][1] - spans[0][0]), 0)
    return zero, out


def _extent(part: Part) -> tuple[int, int]:
    """First and last time of a part on its own axis (ns)."""
    begins = [t for r in part.requests for t in (r.due, r.sent) if t is not None]
    begin = min([*begins, *([part.begin] if part.begin is not None else [])], default=0)
    last = [t for r in part.requests for t in (r.sent, r.first, r.last, r.end) if t is not None]
    return begin, max([*last, begin + (part.took or 0)], default=begin)


def _lay_out(part: Part) -> None:
    """Sends of a part that does not tell them. Closed loop: the k-th goes when a place is free, in the order of the
    file, which is what the tools do. Open loop: evenly, which nothing supports but the rate."""
    if part.starts == "assumed":
        step = NS_PER_S / part.target if part.target else 0
        for i, r in enumerate(part.requests):
            _move(r, round(i * step) - (r.sent or 0))
        return
    free = [0] * max(1, min(int(part.target or 1), len(part.requests) or 1))
    for r in part.requests:
        at = heapq.heappop(free)
        _move(r, at - (r.sent or 0))
        heapq.heappush(free, r.end if r.end is not None else at)


def _move(r: Asked, by: int) -> None:
    for name in (*_STAMPS, "first_answer", "role_ns"):
        if (t := getattr(r, name)) is not None:
            setattr(r, name, t + by)
    if r.times is not None:
        r.times = r.times + by


# --- requests


def _in_reach(part: Part, bad: Faults) -> None:
    """Nothing of a run lies months from the rest of it: such stamps are another clock's, or damage."""
    known = [r.sent for r in part.requests if r.sent is not None]
    if not known:
        return
    middle = sorted(known)[len(known) // 2]
    for r in part.requests:
        for name in (*_STAMPS, "first_answer", "role_ns"):
            t = getattr(r, name)
            if t is not None and abs(t - middle) > LONGEST:
                bad.note(f"{name}: months from the other requests")
                setattr(r, name, None)
    if part.begin is not None and abs(part.begin - middle) > LONGEST:
        bad.note("start: months from the requests")
        part.begin = None
    if part.took is not None and part.took > LONGEST:
        part.took = None


def _in_order(r: Asked, bad: Faults) -> None:
    """Times of a request in their legal order; those that cannot be are null, and so is what rests on them."""
    if r.sent is None:
        r.accepted = r.first = r.last = r.first_answer = r.times = None
    if r.first is not None and r.sent is not None and r.first <= r.sent:
        bad.note("a first token at or before its send")
        r.first = r.last = r.first_answer = r.times = None
    if r.due is not None and r.sent is not None and r.due > r.sent:
        if r.due - r.sent > CLOCKS_APART:
            bad.note("sent before it was due")
        r.due = r.sent
    if r.accepted is not None and r.sent is not None and r.accepted < r.sent:
        r.accepted = r.sent if r.sent - r.accepted <= CLOCKS_APART else None
    if r.accepted is not None and r.first is not None and r.accepted > r.first:
        r.accepted = r.first if r.accepted - r.first <= CLOCKS_APART else None
    low = max((t for t in (r.sent, r.accepted, r.first) if t is not None), default=None)
    if low is not None and r.last is not None and r.last < low:
        bad.note("a last token before the first")
        r.last = r.times = None
    low = max((t for t in (low, r.last) if t is not None), default=None)
    if low is not None and r.end is not None and r.end < low:
        if low - r.end > CLOCKS_APART:
            bad.note("an end before the last token")
        r.end = low
    if r.first_answer is not None:
        high = r.first_answer if r.last is None else r.last
        if r.first is None or not r.first <= r.first_answer <= high:
            r.first_answer = None
    if r.times is not None and (r.first != r.times[0] or r.last != r.times[-1] or (np.diff(r.times) < 0).any()):
        bad.note("chunks that do not fit their request")
        r.times = None
    if r.role_ns is not None and r.accepted is not None and r.role_ns < r.accepted:
        r.role_ns = None


def _turn(r: Asked) -> tuple[bool, int]:
    """Place in the schedule, which ids are to follow: by when a request was due, else sent. Tools write their rows as
    requests end, or the good ones first; what was never sent goes last."""
    at = r.sent if r.due is None else r.due
    return at is None, at or 0


def _request_table(rows: list[tuple[int, Asked]], at: list[int]) -> Table:
    """By column: a row as an object of its own would take more memory than the file it was read from."""
    n = len(rows)

    def floats(of: Callable[[Asked], float | None]) -> Array:
        return np.fromiter((np.nan if (v := of(r)) is None else v for _, r in rows), np.float64, n)

    def times(of: Callable[[Asked], int | None]) -> Array:  # moved as whole numbers: Unix ns do not fit a float
        return np.fromiter((np.nan if (v := of(r)) is None else v + at[p] for p, r in rows), np.float64, n)

    def texts(of: Callable[[Asked], str | None]) -> Array:
        out = np.empty(n, dtype=object)
        out[:] = [of(r) for _, r in rows]
        return out

    told = sorted({name for _, r in rows for name in r.engine or ()})
    return Table("requests", {
        "point": np.fromiter((p for p, _ in rows), np.int64, n), "id": np.arange(n), "replica": np.zeros(n, np.int64),
        "attempt": np.ones(n, np.int64), "class": texts(lambda r: r.klass), "session_id": _sessions(rows),
        "turn": floats(lambda r: r.turn), "trace_id": texts(lambda r: r.trace_id), "due_ns": times(lambda r: r.due),
        "sent_ns": times(lambda r: r.sent), "accepted_ns": times(lambda r: r.accepted),
        "first_ns": times(lambda r: r.first), "first_answer_ns": times(lambda r: r.first_answer),
        "last_ns": times(lambda r: r.last), "end_ns": times(lambda r: r.end), "connect_ns": floats(lambda r: r.connect),
        "prompt_tokens": floats(lambda r: r.prompt), "output_tokens": floats(lambda r: r.output),
        "reasoning_tokens": floats(lambda r: r.reasoning), "cached_tokens": floats(lambda r: r.cached),
        "content_chunks": floats(lambda r: r.chunks if r.times is None else len(r.times)),
        "outcome": np.fromiter((OUTCOMES.index(r.outcome) for _, r in rows), np.int8, n),
        "fault": np.fromiter((FAULTS.index(r.fault) for _, r in rows), np.int8, n),
        "detail": texts(lambda r: r.detail), "status": floats(lambda r: r.status),
        **{name: floats(lambda r, k=name: (r.engine or {}).get(k)) for name in told},  # type: ignore[misc]
    })  # fmt: skip


def _sessions(rows: list[tuple[int, Asked]]) -> Array:
    """Sessions get numbers by first appearance; the tools' own ids are not kept."""
    seen: dict[tuple[int, str], int] = {}
    numbers = (np.nan if r.session is None else seen.setdefault((p, r.session), len(seen)) for p, r in rows)
    return np.fromiter(numbers, np.float64, len(rows))


def _point(part: Part, number: int, shift: int) -> dict[str, Any]:
    begin, end = (t + shift for t in _extent(part))
    row = {"point": number, "mode": part.mode, "target": part.target, "planned": len(part.requests), "start_ns": begin,
           "end_ns": end, "label": None}  # fmt: skip
    if part.starts == "assumed":  # there is no steady part of what was laid out
        row |= {"steady_start_ns": begin, "steady_end_ns": end}
    return row


def _readings(source: Source, part: Part, point: dict[str, Any]) -> list[dict[str, Any]]:
    """Counters of the engine that the tool read before and after: only by how much they grew is told."""
    ends = (("start_ns", 0.0), ("end_ns", 1.0))
    return [
        {"asked_ns": point[at], "answered_ns": point[at], "source": source.tool, "name": name, "value": value * share}
        for at, share in ends
        for name, value in part.grown.items()
    ]


# --- chunks


def _stream(r: Asked, number: int, shift: int, clock: int) -> dict[str, Any]:
    """Chunks of a request: several that the tool's loop stamped within a moment came in one read, and are intervals."""
    assert r.times is not None
    t = r.times + shift
    low = np.full(len(t), np.nan)
    near = np.zeros(len(t), dtype=bool)
    near[1:] = np.diff(t) < TOGETHER
    begin = np.maximum.accumulate(np.where(near, 0, np.arange(len(t))))  # of each run of near ones, the first
    group = near.copy()
    group[:-1] |= near[1:]
    inside = group & (begin > 0)
    low[inside] = t[begin[inside] - 1]
    low[group & (begin == 0) & near] = t[0]
    found: dict[str, Any] = {"id": number, "t": t, "low": low, "kind": _kinds(r, len(t)), "clock": clock}
    if r.role_ns is not None:
        found["t"] = np.concatenate(([r.role_ns + shift], t))
        found["low"] = np.concatenate(([np.nan], low))
        found["kind"] = np.concatenate(([KINDS.index("role")], found["kind"]))
    return found


def _kinds(r: Asked, n: int) -> Ints:
    kind = np.full(n, KINDS.index("answer"), dtype=np.int64)
    if r.first_answer is not None and r.times is not None and r.reasoning:
        kind[r.times < r.first_answer] = KINDS.index("reasoning")
    return kind


def _chunk_table(streams: list[dict[str, Any]]) -> Table:
    if not streams:
        return Table.empty("chunks")
    size = [len(s["t"]) for s in streams]
    return Table("chunks", {
        "id": np.repeat(np.array([s["id"] for s in streams], dtype=np.int64), size),
        "t_ns": np.concatenate([s["t"] for s in streams]).astype(np.int64),
        "t_low_ns": np.concatenate([s["low"] for s in streams]),
        "kind": np.concatenate([s["kind"] for s in streams]).astype(np.int8),
        "clock": np.repeat(np.array([s["clock"] for s in streams], dtype=np.int8), size),
    })  # fmt: skip


# --- the manifest


def _manifest(
    sources: Sequence[Source], parts: list[tuple[Source, Part]], given: Given, zero: int, left: int
) -> Manifest:
    first = sources[0]
    doubts = [d for s in sources for d in [*s.notes, *(s.bad.doubts if s.bad else [])]]
    doubts += _differences(sources, parts) + _laid_out(parts)
    if left:
        doubts.append(doubt("the times of chunks are left out", f"there are {left:,}, and no more than "
                            f"{given.chunks:,} are kept: chunk gaps and ITL are unknown",
                            f"--chunks {left} keeps them, with about {left * 0.35e-6:.1f} GB of memory"))  # fmt: skip
    partial = "; ".join(dict.fromkeys(s.partial for s in sources if s.partial))
    imported = {
        "tools": [
            {"tool": s.tool, "version": s.version, "command": s.command, **s.facts, "files": _files(s)} for s in sources
        ],
        "starts": {str(i): p.starts for i, (_, p) in enumerate(parts)},
        "labels": {str(i): p.label for i, (_, p) in enumerate(parts) if p.label},
        "published": {str(i): p.published for i, (_, p) in enumerate(parts)},
    }
    engine: dict[str, Any] = {}
    for s in sources:
        engine |= {k: v for k, v in s.engine.items() if k not in engine}
    return Manifest(
        made_by=SIMULATED if any(s.made_by == SIMULATED for s in sources) else "imported",
        zero_unix_ns=zero,
        command=given.command,
        endpoint=first.endpoint,
        engine=engine | given.engine,
        machine=given.machine,
        workload=first.workload,
        client={"imported": imported},
        clock=[{"source": "the tool's own", "unix": "told" if all(p.wall for _, p in parts) else "not told"}],
        slo=given.slo,
        partial=bool(partial),
        partial_reason=partial,
        doubts=list({tuple(d.items()): d for d in doubts}.values()),
    )


def _files(source: Source) -> list[dict[str, Any]]:
    out = []
    for path in source.files:
        sha, size = rf.digest(path)
        out.append({"name": path.name, "sha256": sha, "bytes": size})
    return out


def _differences(sources: Sequence[Source], parts: list[tuple[Source, Part]]) -> list[dict[str, str]]:
    """What the files disagree in, though they are one Run here."""
    found = []
    told = (
        ("model", [s.engine.get("model") for s in sources]),
        ("endpoint", [s.endpoint.get("url") for s in sources]),
        ("times", ["simulated" if s.made_by == SIMULATED else "measured" for s in sources]),
    )
    for name, values in told:
        said = sorted({str(v) for v in values if v})
        if len(said) > 1:
            found.append(f"{name}: {', '.join(said[:4])}")
    tools = sorted({s.tool for s in sources})
    if len(tools) > 1:
        found.append(f"tool: {', '.join(tools)}")
    modes = {p.mode for _, p in parts}
    out = []
    if found:
        out.append(doubt("the files are of different services or tools", "; ".join(found), "import them apart"))
    if len(modes) > 1:
        out.append(doubt("points of open and closed loops are in one run", "they have no common axis of load",
                         "import them apart"))  # fmt: skip
    return out


def _laid_out(parts: list[tuple[Source, Part]]) -> list[dict[str, str]]:
    out = []
    replayed = [(i, p) for i, (_, p) in enumerate(parts) if p.starts == "replayed"]
    if replayed:
        off = [_extent(p)[1] - _extent(p)[0] for _, p in replayed]
        told = [p.took for _, p in replayed]
        apart = max((abs(a / b - 1) for a, b in zip(off, told, strict=True) if b), default=0.0)
        why = "the file has no start times; each request was put where one before it ended, in the order of the file"
        out.append(doubt("when requests were sent is worked out",
                         f"{why}; lengths of points are {apart:.0%} off at most",
                         "a newer version of the tool, or another format, keeps start times"))  # fmt: skip
    if any(p.starts == "assumed" for _, p in parts):
        out.append(doubt("when requests were sent is not known: they are laid out evenly",
                         "the file has no start times and the load was open; what overlaps what, and so concurrency, "
                         "queues and the device account, is not known",
                         "a tool or version that keeps start times"))  # fmt: skip
    return out
