"""Folds events into a Run. Everything is spooled to disk as it happens, so a killed run is still a Run.

The spool is two append-only files: ``spool/log.jsonl`` (points, requests sent and ended) and ``spool/chunks.bin``
(four little-endian int64 per chunk). Finishing and recovering read them by the same code.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from whywait.core.columns import KINDS
from whywait.core.events import Accepted, Failed, Finished, Reading, Sent, Step, next_state
from whywait.core.run import Manifest, Run, manifest_of
from whywait.core.table import Table
from whywait.errors import UsageError

FLUSH_CHUNKS = 16_384
_CLOCK_BITS, _KIND_BITS = 1, 3


class Recorder:
    """One per process of a run. Not thread-safe. ``chunk`` is the lean path: no object is made per chunk."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        spool = directory / "spool"
        refuse_used(directory)
        try:
            spool.mkdir(parents=True)
        except OSError as exc:
            raise UsageError(f"cannot write to {directory}: {exc.strerror}", "choose another --out") from exc
        self.manifest = manifest
        self._log = (spool / "log.jsonl").open("ab", buffering=0)
        self._bin = (spool / "chunks.bin").open("ab", buffering=0)
        self._lines: list[bytes] = []
        self._chunks = array("q")
        self._state: dict[int, str] = {}
        self._write("manifest", dataclasses.asdict(manifest))
        self.flush()

    def begin_point(self, row: Mapping[str, Any], planned: Iterable[Mapping[str, Any]]) -> None:
        """Start a load point. ``planned``: what is known of each request before it is sent (id, class, lengths)."""
        rows = list(planned)
        self._write("point", {**row, "planned": len(rows)})
        for r in rows:
            self._state[r["id"]] = "due"
        self._write("plan", rows)
        self.flush()

    def end_point(self, point: int, end_ns: int, unsent: Sequence[int] = ()) -> None:
        """Close the point. ``unsent`` were planned only as an upper bound (closed loop by time) and are not counted."""
        self._write("end", {"point": point, "end_ns": end_ns, "unplanned": list(unsent)})
        for i in unsent:
            self._state.pop(i, None)
        self.flush()

    def event(self, e: Sent | Accepted | Finished | Failed | Reading | Step) -> None:
        """Record an event other than a chunk.

        Raises:
            ValueError: it may not follow what came before (invariant 2).
        """
        if isinstance(e, (Reading, Step)):
            self._write(type(e).__name__.lower(), e._asdict())
            return
        name = type(e).__name__
        state = next_state(self._state.get(e.id, "unplanned, or ended"), name)
        if isinstance(e, Sent):
            self._write("sent", [e.id, e.t_ns])
        elif isinstance(e, Accepted):
            self._write("accepted", [e.id, e.t_ns, e.status])
        else:
            end = {} if e.facts["outcome"] == "never_sent" else {"end_ns": e.t_ns}
            self._write("ended", {"id": e.id, **end, **e.facts})
        if state == "done":
            del self._state[e.id]
        else:
            self._state[e.id] = state

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:
        """One content chunk; ``t_low_ns`` −1 when exact; ``meta`` from :func:`chunk_meta`."""
        buf = self._chunks
        buf.extend((id_, t_ns, t_low_ns, meta))
        if len(buf) >= FLUSH_CHUNKS * 4:
            self._bin.write(buf.tobytes())
            del buf[:]

    def flush(self) -> None:
        """Hand everything to the kernel: from here on it survives kill −9."""
        # Chunks first, so that a request the log calls ended has all of its chunks, wherever a kill falls.
        if self._chunks:
            self._bin.write(self._chunks.tobytes())
            del self._chunks[:]
        if self._lines:
            self._log.write(b"".join(self._lines))
            self._lines.clear()

    def finish(self, manifest: Manifest, extra_readings: Sequence[Mapping[str, Any]] = ()) -> Run:
        """Close the spool and make the Run (not saved yet; the spool stays until :func:`discard_spool`)."""
        self.flush()
        self._log.close()
        self._bin.close()
        return _assemble(self.directory, manifest, extra_readings)

    def peek(self, extra_readings: Sequence[Mapping[str, Any]] = ()) -> Run:
        """The Run so far; recording goes on."""
        self.flush()
        return _assemble(self.directory, self.manifest, extra_readings)

    def _write(self, what: str, value: Any) -> None:
        self._lines.append(orjson.dumps([what, value]) + b"\n")


def refuse_used(directory: Path) -> None:
    """A run is never written over another.

    Raises:
        UsageError: ``directory`` holds one, whole or cut off, or is a file.
    """
    if (directory / "manifest.json").exists() or (directory / "spool").exists():
        raise UsageError(f"{directory} already holds a run", "choose another --out")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file, not a folder", "choose another --out")


def chunk_meta(kind: int, tokens: int | None, clock: int) -> int:
    """Kind, clock and tokens (None when unknown) of a chunk in one integer."""
    known = 0 if tokens is None else tokens + 1
    return (known << (_KIND_BITS + _CLOCK_BITS)) | (kind << _CLOCK_BITS) | clock


def discard_spool(directory: Path) -> None:
    """Remove the spool of a Run that has been saved whole."""
    shutil.rmtree(directory / "spool", ignore_errors=True)


def recover(directory: Path) -> Run:
    """A Run from the spool of a process that did not live to finish it, labelled PARTIAL.

    Raises:
        UsageError: there is neither a Run nor a spool.
    """
    if not (directory / "spool" / "log.jsonl").exists():
        raise UsageError(f"{directory} holds no whywait run", "a run is a folder with manifest.json in it")
    readings = [r for f in sorted((directory / "spool").glob("readings*.jsonl")) for r in read_readings(f)]
    run = _assemble(directory, None, readings)
    reason = "the process that recorded it ended before it was finished"
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, partial=True, partial_reason=reason))


def read_readings(path: Path) -> list[dict[str, Any]]:
    """Readings a sampler spooled: JSON arrays in the order of the readings table; a torn last line is left out."""
    names = ("asked_ns", "answered_ns", "source", "name", "labels", "value")
    return [dict(zip(names, row, strict=True)) for row in _json_lines(path)]


def _json_lines(path: Path) -> Iterable[Any]:
    with path.open("rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                return  # torn by a kill or a full disk: the last line only
            try:
                yield json.loads(line)
            except ValueError:
                return


class _Spool:
    """What the log says, folded."""

    def __init__(self) -> None:
        self.manifest = Manifest()
        self.points: dict[int, dict[str, Any]] = {}
        self.requests: dict[int, dict[str, Any]] = {}
        self.readings: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self._point = 0
        self.last_ns = 0

    def add(self, what: str, v: Any) -> None:
        getattr(self, f"_{what}")(v)

    def _manifest(self, v: Any) -> None:
        self.manifest = manifest_of(v, "the spool")

    def _point_(self, v: Any) -> None:
        self._point = v["point"]
        self.points[self._point] = {**v, "planned": 0}  # until its plan is read: a kill may fall between the two
        self._seen(v["start_ns"])

    def _plan(self, rows: Any) -> None:
        self.points[self._point]["planned"] = len(rows)
        for r in rows:
            self.requests[r["id"]] = {"point": self._point, "replica": 0, "attempt": 1, "outcome": "never_sent",
                                      "fault": "none", **r}  # fmt: skip

    def _sent(self, v: Any) -> None:
        r = self.requests[v[0]]
        r["sent_ns"], r["outcome"] = v[1], "censored"
        self._seen(v[1])

    def _accepted(self, v: Any) -> None:
        self.requests[v[0]].update(accepted_ns=v[1], status=v[2])
        self._seen(v[1])

    def _ended(self, v: Any) -> None:
        self.requests[v["id"]].update(v)
        self._seen(v.get("end_ns", 0))

    def _end(self, v: Any) -> None:
        point = self.points[v["point"]]
        point["end_ns"] = v["end_ns"]
        point["planned"] -= len(v["unplanned"])
        for i in v["unplanned"]:
            del self.requests[i]

    def _reading(self, v: Any) -> None:
        self.readings.append(v)

    def _step(self, v: Any) -> None:
        self.steps.append(v)

    def _seen(self, t_ns: int) -> None:
        self.last_ns = max(self.last_ns, t_ns)


def _assemble(directory: Path, manifest: Manifest | None, extra_readings: Sequence[Mapping[str, Any]]) -> Run:
    spool = _Spool()
    for what, value in _json_lines(directory / "spool" / "log.jsonl"):
        spool.add("point_" if what == "point" else what, value)
    chunks = _chunks(directory / "spool" / "chunks.bin", np.array(sorted(spool.requests), dtype=np.int64))
    if len(chunks):
        spool.last_ns = max(spool.last_ns, int(chunks["t_ns"].max()))
    _close_open_ends(spool, chunks)
    return Run(
        manifest or spool.manifest,
        Table.from_rows("points", [spool.points[k] for k in sorted(spool.points)]),
        Table.from_rows("requests", [spool.requests[k] for k in sorted(spool.requests)]),
        chunks,
        Table.from_rows("steps", spool.steps),
        Table.from_rows("readings", [*spool.readings, *extra_readings]),
    )


def _close_open_ends(spool: _Spool, chunks: Table) -> None:
    """Points and requests that a kill left open end at the last thing seen; their tokens so far stay counted."""
    for p in spool.points.values():
        p.setdefault("end_ns", max(spool.last_ns, p["start_ns"]))
    for i in np.unique(chunks["id"]).tolist():
        # Its chunks reached the disk, the line that it was sent did not.
        if spool.requests[i]["outcome"] == "never_sent":
            spool.requests[i]["outcome"] = "censored"
    open_ = {i for i, r in spool.requests.items() if r["outcome"] == "censored" and "end_ns" not in r}
    if not open_:
        return
    mine = chunks.where(np.isin(chunks["id"], list(open_)) & (chunks["kind"] != KINDS.index("role")))
    for i in open_:
        r = spool.requests[i]
        t = mine["t_ns"][mine["id"] == i]
        r["end_ns"] = spool.points[r["point"]]["end_ns"]
        r["detail"] = "in flight when the run ended"
        r["content_chunks"] = len(t)
        if len(t):
            r["first_ns"], r["last_ns"] = int(t.min()), int(t.max())


def _chunks(path: Path, ids: Any) -> Table:
    raw = np.fromfile(path, dtype="<i8") if path.exists() else np.empty(0, dtype="<i8")
    raw = raw[: len(raw) // 4 * 4].reshape(-1, 4)
    raw = raw[np.isin(raw[:, 0], ids)]
    order = np.lexsort((np.arange(len(raw)), raw[:, 0]))
    raw = raw[order]
    meta = raw[:, 3]
    tokens = (meta >> (_KIND_BITS + _CLOCK_BITS)) - 1
    low = raw[:, 2].astype(np.float64)
    return Table(
        "chunks",
        {
            "id": raw[:, 0].copy(),
            "t_ns": raw[:, 1].copy(),
            "t_low_ns": np.where(low < 0, np.nan, low),
            "kind": ((meta >> _CLOCK_BITS) & ((1 << _KIND_BITS) - 1)).astype(np.int8),
            "tokens": np.where(tokens < 0, np.nan, tokens.astype(np.float64)),
            "clock": (meta & 1).astype(np.int8),
        },
    )
