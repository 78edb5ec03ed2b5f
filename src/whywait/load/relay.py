"""A shard on another machine: there a relay starts it and fetches its spool as it grows, here a link passes on both.

What the shard says and is told are the same bytes as through the pipes of a local one, and its spool lies here as
that of a local one does, at most a second behind: merging, dying and PARTIAL are those of ``load/shards.py``. The
relay is an actor of Ray, a process beside the shard's own: none of Ray's threads shares an interpreter with the client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from whywait.load.link import Job, Link
from whywait.net.cluster import PINGS, Node, Offset, first_line, offset
from whywait.units import NS_PER_MS

PIECE = 64 << 10  # bytes told at once: more would go by Ray's object store, which may write them to a disk, key and all
FETCH = 4 << 20  # bytes of a spool at once
HEAR_S = 0.4  # a relay answers after so long at the latest
SILENT_S = 20.0  # a relay that has not answered after so long is lost
AGAIN = 20  # looks at a clock between two points

PREFIX, LOCK = "whywait-shard-", "in-use"
FLOOR = "import json; from whywait.load.floor import measure_floor; print(json.dumps(measure_floor(16, seconds=1.0)))"


class Relay:
    """On the shard's machine. Each method is called over the network, several at once."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._told: dict[int, bytes] = {}
        self._next = 0
        self._telling = threading.Lock()
        self._words = b""
        self._ended = False
        self._directory = Path()
        self._lock: IO[str]
        self._files: list[_Growing] = []

    def now(self) -> int:
        return time.monotonic_ns()

    def floor(self) -> dict[str, Any] | str:
        """What a client on this machine is good for, idle; or why that cannot be said."""
        try:
            done = subprocess.run([sys.executable, "-c", FLOOR], capture_output=True, text=True, timeout=60, check=True)
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        except (OSError, subprocess.SubprocessError, ValueError) as exc:
            return first_line(exc)

    def reach(self, family: int, address: Any, timeout_s: float) -> float | str:
        """Milliseconds that connecting to the service takes from here, the quickest of three; or what the system says
        of it."""
        best = 1e9
        try:
            for _ in range(3):
                with socket.socket(family, socket.SOCK_STREAM) as s:
                    s.settimeout(timeout_s)
                    began = time.monotonic_ns()
                    s.connect(address)
                    best = min(best, (time.monotonic_ns() - began) / NS_PER_MS)
        except OSError as exc:
            return exc.strerror or str(exc)
        return best

    def start(self, shard: int) -> str:
        """Start a shard's process; the folder that its spool is to wait in."""
        _swept()
        self._directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = (self._directory / LOCK).open("w")
        _locked(self._lock)
        spool = self._directory / f"spool-{shard}"
        self._files = [_Growing(spool / "chunks.bin"), _Growing(spool / "log.jsonl")]
        self._link = Link()
        return str(self._directory)

    def tell(self, number: int, data: bytes) -> None:
        """A piece of what the shard is told; the network may have let a later one pass. Only one call ever waits for a
        shard that takes nothing, so that the others are free to listen."""
        assert self._link is not None
        self._told[number] = data
        while self._next in self._told and self._telling.acquire(blocking=False):
            try:
                while (piece := self._told.pop(self._next, None)) is not None:
                    self._link.tell(piece)
                    self._next += 1
            finally:
                self._telling.release()

    def hear(self, wait_s: float) -> tuple[bytes, bytes, bytes, bool]:
        """(chunks, log, words, whether that was all) since the last time, within ``wait_s``.

        The log never tells of chunks, nor words of a log, that have not come: what was there when they were said is
        sent before them, chunks first, if need be in several answers.
        """
        assert self._link is not None
        chunks, log = self._files
        if not chunks.behind and not log.behind:
            if not self._ended and not self._words and select.select([self._link.out], [], [], wait_s)[0]:
                data = os.read(self._link.out, 1 << 20)
                self._words, self._ended = data, not data
            log.look()
            chunks.look()
        if chunks.behind > FETCH:
            return chunks.take(), b"", b"", False
        sent = chunks.take()
        if log.behind > FETCH:
            return sent, log.take(), b"", False
        words, self._words = self._words, b""
        return sent, log.take(), words, self._ended

    def fate(self) -> str:
        assert self._link is not None
        return self._link.fate()

    def kill(self) -> None:
        """End the shard's process; what it recorded can still be fetched."""
        if self._link is not None:
            self._link.kill()

    def close(self, kill: bool) -> None:
        """End the shard and leave nothing behind."""
        if self._link is not None:
            self._link.hang_up(kill)
        self._lock.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _swept() -> None:
    """What relays left behind that were killed: nobody holds its lock any more."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("w") as file:
            if _locked(file):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _locked(file: IO[str]) -> bool:
    """Whether the file is ours now, for as long as it is open."""
    import fcntl  # not everywhere

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class _Growing:
    """A file that is appended to, read in pieces up to where it was when last looked at."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._size = path, 0, 0

    @property
    def behind(self) -> int:
        return self._size - self._at

    def look(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._size = self._path.stat().st_size

    def take(self) -> bytes:
        if not self.behind:
            return b""
        with self._path.open("rb") as f:
            f.seek(self._at)
            data = f.read(min(FETCH, self.behind))
        self._at += len(data)
        return data


class RelayLink(Link):
    """The link to a shard by its relay on ``node``. ``actor`` is the relay's handle, ``ray`` the connected module."""

    lead_ns = 250 * NS_PER_MS  # told by way of two processes and a network

    def __init__(self, ray: Any, node: Node, actor: Any) -> None:
        self._ray, self._node, self._actor = ray, node, actor
        self.where = node.name
        self.complaint = ""
        self.offset = self._measured()
        self._zero_mono_ns, self._used_ns, self._moved = 0, self.offset.ns, 0
        self._gone = ""
        self._said = 0
        self.out, self._in_pipe = os.pipe()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return None

    @property
    def process(self) -> str:
        return ""

    def begin(self, job: Job) -> None:
        """Start it; its spool here is where that of a local one would be."""
        self._zero_mono_ns = job.zero_mono_ns
        there = Path(self._ray.get(self._actor.start.remote(job.shard), timeout=SILENT_S))
        spool = job.directory / f"spool-{job.shard}"
        spool.mkdir(parents=True)
        self._thread = threading.Thread(target=self._listen, args=(spool,), daemon=True)
        self._thread.start()
        zero = job.zero_mono_ns + self._used_ns
        self.tell(pickle.dumps(dataclasses.replace(job, directory=there, zero_mono_ns=zero, passing=True)))

    def tell(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            with contextlib.suppress(Exception):  # it is dead, which its silence says too
                self._actor.tell.remote(self._said, data[at : at + PIECE])
            self._said += 1

    def fate(self) -> str:
        if self._gone:
            return f"is lost: {self._gone}"
        try:
            return str(self._ray.get(self._actor.fate.remote(), timeout=SILENT_S))
        except Exception as exc:
            return f"is lost: {_why(exc)}"

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # a relay that is dead, or stands still itself, is noticed by its silence
            self._actor.kill.remote()

    def close(self, kill: bool) -> None:
        if self._thread is not None and not kill:
            self._thread.join(SILENT_S)
        self._closing = True
        with contextlib.suppress(Exception):
            self._ray.get(self._actor.close.remote(kill), timeout=1.0 if self._gone else SILENT_S)
        if self._thread is not None:
            self._thread.join(SILENT_S)
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)
        os.close(self.out)

    def zero(self) -> int | None:
        if self._gone:
            return None
        try:
            found = self._measured(AGAIN)
        except Exception:  # its silence will be noticed
            return None
        both = self.offset.narrowed(found)
        self.offset = both or found
        if both is not None:
            return None
        self._moved += found.ns - self._used_ns
        self._used_ns = found.ns
        return self._zero_mono_ns + found.ns

    def clock(self) -> dict[str, Any]:
        return {"where": self.where, "clock_ahead_ns": self._used_ns, "offset_ns": self.offset.ns - self._used_ns,
                "offset_error_ns": self.offset.error_ns, "set_again_ns": self._moved}  # fmt: skip

    def _measured(self, n: int = PINGS) -> Offset:
        return offset(lambda: int(self._ray.get(self._actor.now.remote(), timeout=SILENT_S)), n)

    def _listen(self, spool: Path) -> None:
        ended = False
        try:
            with (spool / "chunks.bin").open("ab", 0) as chunks, (spool / "log.jsonl").open("ab", 0) as log:
                while not ended:
                    more, lines, words, ended = self._ray.get(self._actor.hear.remote(HEAR_S), timeout=SILENT_S)
                    try:
                        _all(chunks.write, more)
                        _all(log.write, lines)
                        _all(lambda data: os.write(self._in_pipe, data), words)
                    except OSError as exc:
                        self._gone = exc.strerror or str(exc)
                        self.complaint = "" if self._closing else self._gone
                        return
        except Exception as exc:
            self._gone = _why(exc)
        finally:
            os.close(self._in_pipe)


def _why(exc: BaseException) -> str:
    name = type(exc).__name__
    if "imeout" in name:
        return f"it has not answered for {SILENT_S:.0f} s"
    return "its node is gone, or cut off from here" if name == "ActorUnavailableError" else first_line(exc)


def _all(write: Callable[[bytes], int], data: bytes) -> None:
    """Write all of it: a disk about to be full takes a part."""
    while data:
        data = data[write(data) :]
