"""Readings on disk while they are taken: JSON lines, appended, readable after kill -9 of anyone.

A line is ``[asked_ns, answered_ns, source, name, labels, value]``.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import orjson

from whywait.core.secrets import clean_bytes
from whywait.probe import Row
from whywait.units import NS_PER_S

COLUMNS = ("asked_ns", "answered_ns", "source", "name", "labels", "value")
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
    rows = []
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    for line in raw.split(b"\n"):
        try:
            values = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(values, list) and len(values) == len(COLUMNS):
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows
