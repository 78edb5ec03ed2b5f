"""Records events. Everything is spooled to disk as it happens, so a killed run is still a Run.

A spool is two append-only files: ``spool/log.jsonl`` (points, requests sent and ended) and ``spool/chunks.bin``
(four little-endian int64 per chunk). Finishing and recovering read them by the same code, ``core/spool.py``. A run of
several processes has a spool for each (``spool-0``, ``spool-1``, …) beside that of the process that started them.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from whywait.core.events import Accepted, Failed, Finished, Reading, Sent, Step, next_state
from whywait.core.run import Manifest, Run
from whywait.core.secrets import clean_bytes
from whywait.core.spool import CLOCK_BITS, KIND_BITS, assemble
from whywait.errors import UsageError

FLUSH_CHUNKS = 16_384
PLAN_ROWS = 2_000  # per line of the log: a plan of a million requests is never one object


class Recorder:
    """One per process of a run. Not thread-safe. ``chunk`` is the lean path: no object is made per chunk.

    A disk that is full raises nothing here: ``complaint`` says so, what could not be written is kept and offered again
    with the next write, and whoever drives the load ends it.
    """

    def __init__(self, directory: Path, manifest: Manifest, spool: str = "spool") -> None:
        self.directory = directory
        self.spool = directory / spool
        if spool == "spool":
            refuse_used(directory)
        try:
            self.spool.mkdir(parents=True)
            self._log = _Appender(self.spool / "log.jsonl")
            self._bin = _Appender(self.spool / "chunks.bin")
        except OSError as exc:
            raise UsageError(f"cannot write to {directory}: {exc.strerror}", "choose another --out") from exc
        self.manifest = manifest
        self._lines: list[bytes] = []
        self._chunks = array("q")
        self._state: dict[int, str] = {}
        self._noted: dict[str, Any] = {}
        self._closed = False
        self._write("manifest", dataclasses.asdict(manifest))
        self.flush()
        if self.complaint:
            raise UsageError(f"cannot write to {directory}: {self.complaint}", "choose another --out")

    @property
    def complaint(self) -> str:
        """What the disk says when it does not take what is to be written; '' as long as all is well."""
        return self._log.error or self._bin.error

    def note(self, **journey: Any) -> None:
        """What a journey that decides as it goes has found so far, for ``manifest.journey``: a killed run still knows
        it. Plain JSON values."""
        self._noted.update(journey)
        self._write("journey", journey)
        self.flush()

    def begin_point(self, row: Mapping[str, Any], planned: Iterable[Mapping[str, Any]]) -> None:
        """Start a load point. ``planned``: what is known of each request before it is sent (id, class, lengths)."""
        self._write("point", dict(row))
        rows = iter(planned)
        while part := list(itertools.islice(rows, PLAN_ROWS)):
            self._write("plan", part)
            self.flush()
            for r in part:
                self._state[r["id"]] = "due"
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
        if self._closed:
            return
        # Chunks first, so that a request the log calls ended has all of its chunks, wherever a kill falls.
        if self._chunks or self._bin.error:
            self._bin.write(self._chunks.tobytes())
            del self._chunks[:]
        if (self._lines or self._log.error) and not self._bin.error:
            self._log.write(b"".join(self._lines))
            self._lines.clear()

    def close(self) -> None:
        """Write what is left and close the files; the spool stays."""
        self.flush()
        self._closed = True
        self._log.close()
        self._bin.close()

    def finish(self, manifest: Manifest, extra_readings: Sequence[Mapping[str, Any]] = ()) -> Run:
        """Close the spool and make the Run: chunks on disk, the rest in memory and not saved yet. The spool stays
        until :func:`discard_spool`.

        Raises:
            UsageError: the disk is full. The spool is kept, and is a Run as far as it goes.
        """
        self.close()
        manifest = dataclasses.replace(manifest, journey={**manifest.journey, **self._noted})
        if self.complaint:
            raise full_disk(self.directory, self.complaint)
        try:
            return assemble(spools_of(self.directory), manifest, extra_readings, self.directory / "chunks.parquet")
        except OSError as exc:
            raise full_disk(self.directory, exc.strerror or str(exc)) from exc

    def peek(self, extra_readings: Sequence[Mapping[str, Any]] = ()) -> Run:
        """The Run so far, without its chunks, of all spools; recording goes on."""
        self.flush()
        return assemble(spools_of(self.directory), self.manifest, extra_readings, with_chunks=False)

    def _write(self, what: str, value: Any) -> None:
        self._lines.append(clean_bytes(orjson.dumps([what, value])) + b"\n")


class _Appender:
    """A file that is only appended to. What the disk did not take is offered again from the very byte where it
    stopped, so a full disk never leaves a torn row in the middle."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._left = b""
        self.error = ""

    def write(self, data: bytes) -> None:
        data = self._left + data
        self.error = ""
        try:
            while data:
                data = data[self._file.write(data) :]  # a disk about to be full takes a part
        except OSError as exc:
            self.error = exc.strerror or str(exc)
        self._left = data

    def close(self) -> None:
        self._file.close()


def full_disk(directory: Path, why: str) -> UsageError:
    return UsageError(
        f"the disk did not take the whole run ({why}); what was recorded until then is in {directory}",
        f"free some space, then whywait show {directory}",
    )


def refuse_used(directory: Path) -> None:
    """A run is never written over another.

    Raises:
        UsageError: ``directory`` holds one, whole or cut off, or anything else, or is a file.
    """
    if (directory / "manifest.json").exists() or spools_of(directory):
        raise UsageError(f"{directory} already holds a run", "choose another --out")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file, not a folder", "choose another --out")
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty", "choose a new folder for --out")


def spools_of(directory: Path) -> list[Path]:
    """The spools of a run: of the process that started it, then of its shards by number."""
    shards = [p for p in directory.glob("spool-*") if p.name[6:].isdigit()]
    main = [directory / "spool"] if (directory / "spool").exists() else []
    return [*main, *sorted(shards, key=lambda p: int(p.name[6:]))]


def chunk_meta(kind: int, tokens: int | None, clock: int) -> int:
    """Kind, clock and tokens (None when unknown) of a chunk in one integer."""
    known = 0 if tokens is None else tokens + 1
    return (known << (KIND_BITS + CLOCK_BITS)) | (kind << CLOCK_BITS) | clock


def discard_spool(directory: Path) -> None:
    """Remove the spools of a Run that has been saved whole."""
    for spool in spools_of(directory):
        shutil.rmtree(spool, ignore_errors=True)


def recover(directory: Path) -> Run:
    """A Run from the spools of a process that did not live to finish it, labelled PARTIAL. Nothing is written.

    Raises:
        UsageError: there is neither a Run nor a spool.
    """
    spools = [s for s in spools_of(directory) if (s / "log.jsonl").exists()]
    if not spools:
        raise UsageError(f"{directory} holds no whywait run", "a run is a folder with manifest.json in it")
    try:
        run = assemble(spools, None)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        what = f"{directory} holds a damaged spool ({type(exc).__name__}: {exc})"
        raise UsageError(what, "restore it from a copy") from exc
    reason = "the process that recorded it ended before it was finished"
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, partial=True, partial_reason=reason))
