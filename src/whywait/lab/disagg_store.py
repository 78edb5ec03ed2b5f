"""Where KV lies between two engines, and the link it is carried over: files on tmpfs with a bound, and timers.

The link is one per prefill engine. It carries one hand-over after the other at its rate; the delay comes on top and
does not occupy it (a long wire, not a slow one). Without a rate and a delay it takes no time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns

from whywait.errors import UsageError
from whywait.lab.state import process_alive, start_mark
from whywait.net.loop import Loop
from whywait.units import NS_PER_S

TMPFS = Path("/dev/shm")  # noqa: S108 - a folder of ours in it, for its owner only
STEM = "whywait-kv-"
MOST_BYTES = 1 << 30


def make_folder(wanted: str = "") -> Path:
    """A new folder for the files of this process: below ``wanted``, else on tmpfs where that can be written to, else
    among temporary files. Those that killed processes left behind are removed.

    Raises:
        UsageError: ``wanted`` cannot be written to.
    """
    prefix = f"{STEM}{os.getpid()}-{start_mark(os.getpid()) or 0}-"
    for place in [Path(wanted)] if wanted else [TMPFS, Path(tempfile.gettempdir())]:
        with contextlib.suppress(OSError):
            _sweep(place)
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    raise UsageError(f"no folder for KV can be made in {wanted or tempfile.gettempdir()}", "folder=PATH of the arm")


def _sweep(place: Path) -> None:
    for old in place.glob(f"{STEM}*"):
        found = re.match(rf"{STEM}(\d+)-(\d+)-", old.name)
        if found and not process_alive(int(found[1]), found[2] if found[2] != "0" else None):
            shutil.rmtree(old, ignore_errors=True)


class Store:
    """Files of KV by name, at most ``most`` bytes of them together (by what a token took so far).

    ``used`` counts what was reserved for files being written and what written ones really take.
    """

    def __init__(self, folder: Path, most: int = MOST_BYTES) -> None:
        self.folder, self.most = folder, most
        self.used = self.peak = 0
        self._sizes: dict[str, int] = {}
        self._serial = 0
        self._per_token = 0.0

    def fits(self, tokens: int) -> bool:
        """Whether there is room now; unknown sizes are let in (the file system then says no)."""
        return not self._sizes or self.used + tokens * self._per_token <= self.most

    def too_large(self, tokens: int) -> bool:
        """It never will fit."""
        return tokens * self._per_token > self.most

    def reserve(self, tokens: int) -> str:
        self._serial += 1
        name = f"{self._serial}.kv"
        self._take(name, round(tokens * self._per_token))
        return name

    def written(self, name: str, tokens: int, size: int) -> None:
        self._take(name, size)
        if tokens:
            self._per_token = size / tokens

    def remove(self, name: str) -> None:
        self.used -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)

    def _take(self, name: str, size: int) -> None:
        self.used += size - self._sizes.get(name, 0)
        self._sizes[name] = size
        self.peak = max(self.peak, self.used)


class Link:
    """``carry`` calls ``then`` when so many bytes have come over."""

    def __init__(self, loop: Loop, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self._loop, self._delay_s, self._rate = loop, delay_s, bytes_per_s
        self._free_ns = 0

    def carry(self, size: int, then: Callable[[], None]) -> None:
        if not self._delay_s and not self._rate:
            then()
            return
        begin = max(monotonic_ns(), self._free_ns)
        self._free_ns = begin + (round(size / self._rate * NS_PER_S) if self._rate else 0)
        self._loop.call_at(self._free_ns + round(self._delay_s * NS_PER_S), then)
