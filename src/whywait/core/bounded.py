"""What somebody else wrote, read within bounds: files of any size, JSON of any depth. No more memory than is said here.

A file may be anything: a disk image, ``/dev/zero``, a text nested a million times. Whoever reads one says how much it
may be; what is more, or no text, is an error of one line and never a process that takes all the memory there is.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from whywait.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 1 << 20
#: Of a file that people write or that holds figures: workloads, prices, catalogues, plans, manifests.
MOST_TEXT = 64 * MIB
MOST_DOTS = 200  # of one key of TOML, or of one item of a list
_OBJECT, _LIST, _ITEM = 200, 64, 36  # bytes that an object, a list and a value of JSON take once parsed, about


class TooHeavy(ValueError):
    """JSON that would take more memory than it may."""


def weight(data: bytes) -> int:
    """About how many bytes ``data`` (JSON) takes once parsed; three quick passes, no parsing."""
    if len(data) < 4096:
        return 50 * len(data)
    return len(data) + _OBJECT * data.count(b"{") + _LIST * data.count(b"[") + _ITEM * data.count(b",")


def loads(data: bytes, most: int = 1024 * MIB) -> Any:
    """A value of JSON.

    Raises:
        TooHeavy, ValueError: it would take more than ``most`` bytes, is no JSON, or is nested too deep.
    """
    if weight(data) > most:
        raise TooHeavy(f"it would take more than {most // MIB} MiB of memory")
    return _parsed(data)


def _parsed(data: bytes) -> Any:
    """By orjson, without looking for garbage meanwhile: of millions of values that takes six times as long."""
    pause = len(data) > MIB and gc.isenabled()
    if pause:
        gc.disable()
    try:
        return orjson.loads(data)
    finally:
        if pause:
            gc.enable()


def read_bytes(path: Path, most: int = MOST_TEXT, hint: str = "") -> bytes:
    """The whole of a file.

    Raises:
        OSError: it cannot be read. UsageError: it holds more than ``most`` bytes; no more than that is ever read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UsageError(
            f"{path} is larger than {most // MIB} MiB, which no such file is", hint or "is it the right file?"
        )
    return data


def read_text(path: Path, most: int = MOST_TEXT, hint: str = "") -> str:
    """The same as UTF-8 text, with or without a byte order mark.

    Raises:
        OSError, UsageError: as of :func:`read_bytes`. UnicodeDecodeError: it is no text.
    """
    return read_bytes(path, most, hint).decode("utf-8-sig").replace("\r\n", "\n")


def lines(path: Path, most: int = 16 * MIB) -> Iterator[bytes]:
    """The lines of a file, one in memory at a time.

    Raises:
        OSError: it cannot be read. UsageError: a line is longer than ``most`` bytes.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most:
                raise UsageError(f"{path}: line {number} is longer than {most // MIB} MiB", "is it the right file?")
            yield line


def read_json(path: Path, most: int = MOST_TEXT, hint: str = "") -> Any:
    """A JSON document of ours (NaN and the like, which Python's own writer leaves, are read).

    Raises:
        OSError, UsageError: as of :func:`read_bytes`. ValueError: it is no JSON, or is nested too deep.
    """
    data = read_bytes(path, most, hint)
    if weight(data) > 16 * most:
        raise TooHeavy(f"it would take more than {16 * most // MIB} MiB of memory")
    try:
        return _parsed(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def toml(text: str) -> dict[str, Any]:
    """A document of TOML.

    Raises:
        ValueError: it is none, or nested too deep; a key of thousands of parts would take hours.
    """
    if any(item.count(".") > MOST_DOTS for line in text.split("\n") for item in line.split(",")):
        raise ValueError("a key of too many parts")
    try:
        return dict(tomllib.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
