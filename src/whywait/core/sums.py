"""Checksums of the tables of a saved Run: what a disk or a copy changed is told, and no figure is made of it.

Parquet has none that is looked at: of single bits changed in its pages, most give other values without a word.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from whywait.core import bounded
from whywait.errors import UsageError

FILE = "checksums.json"
_PIECE = 1 << 20


def of(path: Path) -> str:
    """CRC-32 of a file (ISO 3309, as gzip has it), in eight hexadecimal digits after its name.

    Raises:
        OSError: it cannot be read.
    """
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found = zlib.crc32(piece, found)
    return f"crc32:{found:08x}"


def of_all(paths: Iterable[Path]) -> dict[str, str]:
    """By file name, of those that are there."""
    return {p.name: of(p) for p in paths if p.exists()}


def check(folder: Path) -> None:
    """Whether the tables are what was written; a folder without checksums (of an older whywait) is not looked at.

    Raises:
        UsageError: one is not.
    """
    file = folder / FILE
    if not file.exists():
        return
    try:
        wanted = bounded.read_json(file, bounded.MIB)
        names = {str(k): str(v) for k, v in wanted.items()}
    except (OSError, ValueError, AttributeError) as exc:
        raise UsageError(f"{file} is damaged: {exc}", "restore it from a copy; without it nothing is checked") from None
    for name, value in names.items():
        path = folder / Path(name).name
        try:
            same = of(path) == value
        except FileNotFoundError:
            continue  # a run may do without its larger tables
        except OSError as exc:
            raise UsageError(f"cannot read {path}: {exc.strerror}") from None
        if not same:
            hint = f"restore it from a copy; if it was changed on purpose, remove {FILE}"
            raise UsageError(f"{path} is damaged: it is not what was written (checksum)", hint)
