"""Readings on disk while they are taken: JSON lines, appended, readable after kill -9 of anyone.

A line is ``[asked_ns, answered_ns, source, name, labels, value]``.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from whywait.core.secrets import clean_bytes
from whywait.probe import Row
from whywait.units import NS_PER_S

COLUMNS = ("asked_ns", "answered_ns", "source", "name", "labels", "value")
EMPTY_AT = 64 << 20
KEEP_EVERY_NS = 10 * NS_PER_S  # an unchanged histogram is written this often all the same, in case we are killed


class Spool:
    """Appends lines; one write per sample, so that a reader never sees half of one in the middle."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        self._lock = threading.Lock()
        self._open = True

    def write(self, asked: int, answered: int, source: str, rows: list[Row]) -> None:
        out = b"".join(
            orjson.dumps((asked, answered, source, name, labels, value), option=orjson.OPT_APPEND_NEWLINE)
            for name, labels, value in rows
        )
        out = clean_bytes(out)
        with self._lock:
            if self._open:
                os.write(self._fd, out)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._fd)


class Thinner:
    """Keeps back the rows of a histogram that did not grow; gives the last ones kept back before it grows again."""

    def __init__(self) -> None:
        self._state: dict[str, tuple[object, int, list[tuple[int, int, list[Row]]]]] = {}

    def split(self, asked: int, answered: int, rows: list[Row]) -> list[tuple[int, int, list[Row]]]:
        """What to write now, oldest first."""
        plain: list[Row] = []
        groups: dict[str, list[Row]] = {}
        for row in rows:
            base = _histogram(row[0])
            (groups.setdefault(base, []) if base else plain).append(row)
        out: list[tuple[int, int, list[Row]]] = []
        for base, group in groups.items():
            key = [r for r in group if r[0].endswith("_count")]
            old_key, written_at, held = self._state.get(base, (None, 0, []))
            if key == old_key and asked - written_at < KEEP_EVERY_NS:
                self._state[base] = (key, written_at, [(asked, answered, group)])
            else:
                out += held
                plain += group
                self._state[base] = (key, asked, [])
        return [*out, (asked, answered, plain)]

    def rest(self) -> list[tuple[int, int, list[Row]]]:
        """The last rows kept back, for the end."""
        return [item for _, _, held in self._state.values() for item in held]


def _histogram(name: str) -> str | None:
    base, _, suffix = name.rpartition("_")
    return base if suffix in ("bucket", "sum", "count") else None


def read_spool(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Readings of a spool as rows of the ``readings`` table. A line cut short or garbled is left out."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return list(_rows(raw.split(b"\n")))


class Tail:
    """The last readings of a spool that is still written, without reading it again from its beginning.

    Unless it is to be kept, a spool that has grown large is emptied once all of it was read: the writer only appends.
    """

    def __init__(self, path: Path, keep: bool) -> None:
        self._path, self._keep = path, keep
        self._at, self._part = 0, b""
        self._rows: deque[dict[str, Any]] = deque()

    def rows(self, since_ns: int) -> list[dict[str, Any]]:
        """Rows asked at ``since_ns`` or later; earlier ones are forgotten."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            new = b""
        self._at += len(new)
        *lines, self._part = (self._part + new).split(b"\n")
        self._rows.extend(_rows(lines))
        # Sources write beside each other, so the order is nearly that of time; what is late is forgotten late.
        while self._rows and self._rows[0]["asked_ns"] < since_ns:
            self._rows.popleft()
        if not self._keep and self._at > EMPTY_AT and not self._part and os.path.getsize(self._path) == self._at:
            os.truncate(self._path, 0)
            self._at = 0
        return [row for row in self._rows if row["asked_ns"] >= since_ns]


def _rows(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            values = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(values, list) and len(values) == len(COLUMNS):
            yield dict(zip(COLUMNS, values, strict=True))
