"""What was simulated, kept in a file as it is done, so that what is interrupted goes on where it was.

A line of JSON per cell, by a key that says all that its figures depend on: what was simulated, and the code and the
numpy that simulated it. A line that is torn is passed over, one of another code is not asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import whywait
from whywait.core import bounded
from whywait.core.schedule import Schedule
from whywait.errors import UsageError

HEAD = {"whywait": "cells", "version": 1}
MOST_LINE = 1 << 20
Figures = Mapping[str, float | None]


class Journal:
    """The file at ``path``, read now and appended to.

    Raises:
        UsageError: it is another kind of file, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._known: dict[str, dict[str, float | None]] = {}
        try:
            whole = self._read()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if not whole:
                self._write(HEAD)
        except OSError as exc:
            raise UsageError(f"cannot keep cells in {self.path}: {exc.strerror}", "another file by --cells") from None

    def _read(self) -> bool:
        """Whether it is there and begun."""
        if not self.path.exists():
            return False
        a_folder = "a folder, " if self.path.is_dir() else ""
        strange = UsageError(f"{self.path} is {a_folder}no file of cells", "another file by --cells")
        if not self.path.is_file():
            raise strange
        begun = False
        for line in bounded.lines(self.path, MOST_LINE):
            try:
                value = json.loads(line)
                if begun and all(v is None or isinstance(v, (int, float)) for v in value["figures"].values()):
                    self._known[value["cell"]] = value["figures"]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                value = None
            if not begun and value != HEAD:
                raise strange
            begun = True
        return begun

    def get(self, key: str) -> dict[str, float | None] | None:
        return self._known.get(key)

    def add(self, key: str, figures: Figures) -> None:
        """
        Raises:
            UsageError: the disk does not take it.
        """
        self._known[key] = dict(figures)
        try:
            self._write({"cell": key, "figures": self._known[key]})
        except OSError as exc:
            raise UsageError(f"cannot keep cells in {self.path}: {exc.strerror}", "another file by --cells") from None

    def _write(self, value: Mapping[str, Any]) -> None:
        # A line begins with a new line's end: what a kill tore before it stays a line of its own.
        data = b"" if value is HEAD else b"\n"
        data += json.dumps(value).encode()
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


@functools.lru_cache(maxsize=1)
def code() -> str:
    """Names what simulates: this code with its tables, and the numpy it reckons with."""
    found = hashlib.sha256(f"{whywait.__version__} {np.__version__}".encode())
    root = Path(whywait.__file__).parent
    for part in ("core", "physics", "sim", "twin"):
        for file in sorted((root / part).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return found.hexdigest()


def key(*what: Any) -> str:
    """Names what was simulated, by its content."""
    found = hashlib.sha256(code().encode())
    for part in what:
        found.update(digest(part).encode())
    return found.hexdigest()[:32]


def digest(value: Any) -> str:
    """Equal values of equal types, equal texts: dataclasses by their fields, numbers by their bits, arrays by bytes.

    Raises:
        TypeError: a kind of value that is not known here.
    """
    if value is None or isinstance(value, (bool, int, str, np.integer)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, (float, np.floating)):
        return f"float:{float(value).hex()}"
    if isinstance(value, Schedule):
        return _short(value.to_bytes())
    if isinstance(value, np.ndarray):
        return _short(f"{value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
    if isinstance(value, Mapping):
        inside = sorted((digest(k), digest(v)) for k, v in value.items())
    elif isinstance(value, (list, tuple)):
        inside = [("", digest(v)) for v in value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [(f.name, digest(getattr(value, f.name))) for f in dataclasses.fields(value)]
    else:
        raise TypeError(f"no digest of {type(value).__name__}")
    return _short(f"{type(value).__name__}{inside}".encode())


def digests() -> Callable[[Any], str]:
    """:func:`digest` of what many cells have in common: each once, for as long as it lives."""
    names: dict[int, str] = {}

    def named(value: Any) -> str:
        if id(value) not in names:
            names[id(value)] = digest(value)
        return names[id(value)]

    return named


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
