"""Reads the spools of a run back into a Run: of one process or of several, whole or cut off, by the same code.

Bounded in memory whatever the length of the run: requests are folded into columns, and chunks, which are many, pass
through in pieces. They lie in the order of their arrival; a Run wants them by request. Requests come and go in time,
so the chunks of a range of requests lie near each other, and each range is gathered from its own stretch of the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from whywait.core import bounded
from whywait.core.columns import KINDS, OUTCOMES, REQUESTS, TABLES, Column
from whywait.core.run import Manifest, Run, manifest_of, together
from whywait.core.table import Array, Stored, Table

CLOCK_BITS, KIND_BITS = 1, 3
ROW = 32  # bytes of a chunk in chunks.bin: four little-endian int64
MOST_LINE = 64 << 20  # a long plan is several
PIECE = 1 << 18  # chunks read at once
BUCKET = 1 << 18  # chunks of a range of requests that are sorted together
_ROLE = KINDS.index("role")
_CENSORED, _NEVER = OUTCOMES.index("censored"), OUTCOMES.index("never_sent")


def assemble(
    spools: Sequence[Path],
    manifest: Manifest | None,
    extra: Iterable[Mapping[str, Any]] = (),
    store: Path | None = None,
    with_chunks: bool = True,
) -> Run:
    """The Run that these spools hold together (their union: request ids are disjoint).

    ``manifest`` None: the first that a spool has. ``store``: write the chunks there, a Parquet file, instead of
    bringing them into memory; the Run's chunks are then read from it when they are asked for. Without chunks, the
    requests that are still open have no tokens yet.
    """
    fold = Fold()
    for spool in spools:
        fold.log(spool / "log.jsonl")
    chunks = Chunks([spool / "chunks.bin" if with_chunks else None for spool in spools], fold.requests.sorted_ids())
    fold.close(chunks)
    readings = readings_table(f for spool in spools for f in sorted(spool.glob("readings*.jsonl")))
    rows = [*fold.readings, *extra]
    return Run(
        manifest or fold.manifest or Manifest(),
        Table.from_rows("points", [fold.points[k] for k in sorted(fold.points)]),
        fold.requests.table(),
        chunks.table() if store is None else Stored.write("chunks", store, chunks.pieces()),
        Table.from_rows("steps", fold.steps),
        Table.concat([Table.from_rows("readings", rows), readings]) if rows else readings,
    )


def lines(path: Path) -> Iterator[Any]:
    """The JSON lines of a file up to one that is torn, by a kill or a full disk; none when there is no file."""
    if not path.exists():
        return
    with path.open("rb") as f:
        while line := _line(f):
            if not line.endswith(b"\n"):
                return
            try:
                yield bounded.loads(line, 4 << 30)
            except ValueError:
                return


def _line(file: IO[bytes]) -> bytes:
    """The next line, or as much as there may be of one. Text has no zeros: what a disk never wrote is zeros."""
    parts, size = [], 0
    while size < MOST_LINE and (part := file.readline(1 << 20)):
        parts.append(part)
        size += len(part)
        if part.endswith(b"\n") or b"\0" in part:
            break
    return b"".join(parts)


def readings_table(paths: Iterable[Path]) -> Table:
    """Readings that samplers spooled. A line that is no reading (torn in the middle of a kill) is passed over."""
    asked, answered, value = array("q"), array("q"), array("d")
    texts: tuple[list[str | None], ...] = ([], [], [])
    words: dict[str | None, str | None] = {}  # each text once, not once per reading
    for path in paths:
        with path.open("rb") as f:
            while (line := _line(f)).endswith(b"\n"):
                try:
                    a, b, source, name, labels, v = orjson.loads(line)
                    if not (isinstance(source, str) and isinstance(name, str) and isinstance(labels, str | None)):
                        continue
                    times = array("q", (a, b))
                    value.append(float("nan") if v is None else v)
                except (ValueError, TypeError, OverflowError):
                    continue
                asked.append(times[0])
                answered.append(times[1])
                for column, text in zip(texts, (source, name, labels), strict=True):
                    column.append(words.setdefault(text, text))
    numbers = {k: np.array(v) for k, v in (("asked_ns", asked), ("answered_ns", answered), ("value", value))}
    named = {k: _objects(v) for k, v in zip(("source", "name", "labels"), texts, strict=True)}
    return Table("readings", {**numbers, **named})


def _objects(values: list[str | None]) -> Array:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


class Requests:
    """The requests table while it grows: columns with room to spare, a few hundred bytes for each request."""

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self._n = 0
        self._cols = {c.name: _blank(c, 1024) for c in REQUESTS}
        self._spec = {c.name: c for c in REQUESTS}
        self._codes = {c.name: {v: i for i, v in enumerate(c.values)} for c in REQUESTS if c.type == "enum"}
        self._words: dict[str, str] = {}

    def add(self, facts: Mapping[str, Any]) -> None:
        if self._n == len(self._cols["id"]):
            self._cols = {k: np.concatenate([v, _blank(self._spec[k], len(v))]) for k, v in self._cols.items()}
        self.at[facts["id"]] = self._n
        self._n += 1
        self.put(facts["id"], facts)

    def put(self, id_: int, facts: Mapping[str, Any]) -> None:
        """Set columns of a request; an unknown one is an error, since a typo would lose data."""
        row = self.at[id_]
        for name, value in facts.items():
            spec = self._spec[name]
            if spec.type == "enum":
                value = -1 if value is None else self._codes[name][value]
            elif spec.type == "str":
                value = value if value is None else self._words.setdefault(str(value), str(value))
            elif value is None:
                value = np.nan
            self._cols[name][row] = value

    def drop(self, id_: int) -> None:
        del self.at[id_]

    def outcome(self, code: int) -> list[int]:
        """Ids of the requests with this outcome."""
        return [i for i, row in self.at.items() if self._cols["outcome"][row] == code]

    def get(self, id_: int, column: str) -> Any:
        return self._cols[column][self.at[id_]]

    def sorted_ids(self) -> Array:
        return np.sort(np.fromiter(self.at, dtype=np.int64, count=len(self.at)))

    def table(self) -> Table:
        rows = np.fromiter(self.at.values(), dtype=np.int64, count=len(self.at))
        rows = rows[np.argsort(self._cols["id"][rows], kind="stable")]
        return Table("requests", {k: v[rows] for k, v in self._cols.items()})


def _blank(c: Column, n: int) -> Array:
    if c.type == "str":
        return np.empty(n, dtype=object)
    if c.type == "enum":
        return np.full(n, -1, dtype=np.int8)
    return np.full(n, np.nan) if c.nullable else np.zeros(n, dtype=np.int64)


class Fold:
    """What the logs say, line by line. The shards of a run have the same points, each with requests of its own."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.points: dict[int, dict[str, Any]] = {}
        self.requests = Requests()
        self.readings: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self._elastic: set[int] = set()  # points that end by time: what was not sent was no plan
        self._open: list[tuple[set[int], int]] = []  # per log: points it began and did not end, the last time it says
        self._point = 0
        self._last = 0

    def log(self, path: Path) -> None:
        self._last = 0
        mine: set[int] = set()
        for what, value in lines(path):
            getattr(self, f"_on_{what}")(value)
            if what == "point":
                mine.add(value["point"])
            elif what == "end":
                mine.discard(value["point"])
        self._open.append((mine, self._last))

    @property
    def open_points(self) -> set[int]:
        """Points that a log began and did not end."""
        return {p for open_, _ in self._open for p in open_}

    @property
    def last_ns(self) -> int:
        return max((last for _, last in self._open), default=0)

    def close(self, chunks: Chunks) -> None:
        """Points and requests that a kill left open end at the last thing seen; their tokens so far stay counted."""
        for (open_, last), at in zip(self._open, chunks.last_ns, strict=True):
            for number in open_:
                p = self.points[number]
                p["end_ns"] = max(last, at, p["start_ns"], p.get("end_ns", 0))
        requests, elastic = self.requests, self._elastic & self.open_points
        for i in requests.outcome(_NEVER):
            if i in chunks.seen:  # its chunks reached the disk, the line that it was sent did not
                requests.put(i, {"outcome": "censored"})
            elif (point := int(requests.get(i, "point"))) in elastic:  # the plan was only an upper bound
                self.points[point]["planned"] -= 1
                requests.drop(i)
        open_ids = [i for i in requests.outcome(_CENSORED) if np.isnan(requests.get(i, "end_ns"))]
        for i, (n, first, last) in chunks.content_of(open_ids).items():
            end_ns = self.points[int(requests.get(i, "point"))]["end_ns"]
            facts = {"end_ns": end_ns, "detail": "in flight when the run ended", "content_chunks": n}
            requests.put(i, {**facts, **({"first_ns": first, "last_ns": last} if n else {})})

    def _on_manifest(self, v: Any) -> None:
        self.manifest = self.manifest or manifest_of(v, "the spool")

    def _on_journey(self, v: Any) -> None:
        if self.manifest is not None:  # what a journey that decides as it goes has found so far
            self.manifest.journey.update(v)

    def _on_point(self, v: Any) -> None:
        self._point = v["point"]
        if v.pop("elastic", False):
            self._elastic.add(self._point)
        have = self.points.get(self._point)
        if have is None:
            have = self.points[self._point] = {**v, "planned": 0}  # planned: until its plan is read
        else:  # another shard's part of it
            have["target"] = together(have["target"], v["target"])
            have["start_ns"] = min(have["start_ns"], v["start_ns"])
        self._seen(v["start_ns"])

    def _on_plan(self, rows: Any) -> None:
        self.points[self._point]["planned"] += len(rows)
        for r in rows:
            about = {"point": self._point, "replica": 0, "attempt": 1, "outcome": "never_sent", "fault": "none"}
            self.requests.add({**about, **r})

    def _on_sent(self, v: Any) -> None:
        self.requests.put(v[0], {"sent_ns": v[1], "outcome": "censored"})
        self._seen(v[1])

    def _on_accepted(self, v: Any) -> None:
        self.requests.put(v[0], {"accepted_ns": v[1], "status": v[2]})
        self._seen(v[1])

    def _on_ended(self, v: Any) -> None:
        self.requests.put(v["id"], v)
        self._seen(v.get("end_ns", 0))

    def _on_end(self, v: Any) -> None:
        point = self.points[v["point"]]
        point["end_ns"] = max(v["end_ns"], point.get("end_ns", 0))
        point["planned"] -= len(v["unplanned"])
        for i in v["unplanned"]:
            self.requests.drop(i)

    def _on_reading(self, v: Any) -> None:
        self.readings.append(v)

    def _on_step(self, v: Any) -> None:
        self.steps.append(v)

    def _seen(self, t_ns: int) -> None:
        self._last = max(self._last, t_ns)


class _File:
    """One ``chunks.bin``: which pieces hold chunks of each request (by its rank among the ids)."""

    def __init__(self, path: Path | None, ids: Array) -> None:
        self.path, self.ids = path or Path(), ids
        self.rows = path.stat().st_size // ROW if path is not None and path.exists() else 0
        self.first = np.full(len(ids), 1 << 40, dtype=np.int64)
        self.last = np.full(len(ids), -1, dtype=np.int64)

    def pieces(self, lo: int = 0, hi: int = 1 << 40) -> Iterator[tuple[int, Array]]:
        """(number, rows) of the pieces ``lo`` … ``hi``, rows of known requests only."""
        for k in range(lo, min(hi + 1, -(-self.rows // PIECE))):
            count = min(PIECE, self.rows - k * PIECE) * 4
            raw = np.fromfile(self.path, dtype="<i8", count=count, offset=k * PIECE * ROW).reshape(-1, 4)
            known = self.ids[np.minimum(np.searchsorted(self.ids, raw[:, 0]), len(self.ids) - 1)] == raw[:, 0]
            yield k, raw if known.all() else raw[known]


class Chunks:
    """The chunks of a run, on disk in the order of their arrival, given out by request."""

    def __init__(self, paths: Sequence[Path | None], ids: Array) -> None:
        self.ids = ids
        self._files = [_File(path, ids) for path in paths] if len(ids) else []
        self._count = np.zeros(len(ids), dtype=np.int64)
        self.last_ns = [0] * len(paths)
        for i, file in enumerate(self._files):
            for k, raw in file.pieces():
                rank = np.searchsorted(ids, raw[:, 0])
                self._count += np.bincount(rank, minlength=len(ids))
                file.first[rank] = np.minimum(file.first[rank], k)
                file.last[rank] = k
                if len(raw):
                    self.last_ns[i] = max(self.last_ns[i], int(raw[:, 1].max()))
        self.seen = set(ids[self._count > 0].tolist())

    def content_of(self, wanted: Sequence[int]) -> dict[int, tuple[int, int, int]]:
        """Of each of these requests: content chunks, time of the first, time of the last."""
        mine = np.sort(np.array(wanted, dtype=np.int64))
        n, first, last = (np.zeros(len(mine), np.int64) for _ in range(3))
        first += 1 << 62
        rank = np.searchsorted(self.ids, mine)
        for file in self._files if len(mine) else ():
            for _, raw in file.pieces(int(file.first[rank].min()), int(file.last[rank].max())):
                at = np.minimum(np.searchsorted(mine, raw[:, 0]), len(mine) - 1)
                ok = (mine[at] == raw[:, 0]) & (_kind(raw) != _ROLE)
                at, t = at[ok], raw[ok, 1]
                n += np.bincount(at, minlength=len(mine))
                np.minimum.at(first, at, t)
                np.maximum.at(last, at, t)
        return dict(zip(mine.tolist(), zip(n.tolist(), first.tolist(), last.tolist(), strict=True), strict=True))

    def pieces(self) -> Iterator[tuple[dict[str, Array], int]]:
        """Columns of the chunks table, range of requests by range; within a request in the order they were recorded."""
        ends = np.cumsum(self._count)
        lo = 0
        while lo < len(self.ids):
            before = int(ends[lo - 1]) if lo else 0
            hi = max(lo + 1, int(np.searchsorted(ends, before + BUCKET, side="right")))
            raw = self._range(lo, hi)
            if len(raw):
                yield _columns(raw[np.argsort(raw[:, 0], kind="stable")]), len(raw)
            lo = hi

    def _range(self, lo: int, hi: int) -> Array:
        """The rows of the requests of rank ``lo`` … ``hi`` (not included), as they lie on disk."""
        out = np.empty((int(self._count[lo:hi].sum()), 4), dtype=np.int64)
        n = 0
        for file in self._files if len(out) else ():
            for _, raw in file.pieces(int(file.first[lo:hi].min()), int(file.last[lo:hi].max())):
                part = raw[(raw[:, 0] >= self.ids[lo]) & (raw[:, 0] <= self.ids[hi - 1])]
                out[n : n + len(part)] = part
                n += len(part)
        return out

    def table(self) -> Table:
        parts = [Table("chunks", cols) for cols, _ in self.pieces()]
        return Table.concat(parts) if parts else Table.empty("chunks")


def _kind(raw: Array) -> Array:
    kind: Array = (raw[:, 3] >> CLOCK_BITS) & ((1 << KIND_BITS) - 1)
    return kind


def _columns(raw: Array) -> dict[str, Array]:
    tokens = (raw[:, 3] >> (KIND_BITS + CLOCK_BITS)) - 1
    low = raw[:, 2].astype(np.float64)
    cols = {
        "id": raw[:, 0].copy(),
        "t_ns": raw[:, 1].copy(),
        "t_low_ns": np.where(low < 0, np.nan, low),
        "kind": _kind(raw).astype(np.int8),
        "tokens": np.where(tokens < 0, np.nan, tokens.astype(np.float64)),
        "clock": (raw[:, 3] & 1).astype(np.int8),
    }
    assert cols.keys() == {c.name for c in TABLES["chunks"]}
    return cols
