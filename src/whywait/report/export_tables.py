"""The tables of a Run as CSV or Parquet, in pieces, with a data dictionary made of the column registry."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from whywait.core.columns import TABLES, Column
from whywait.core.parquet import write_pieces
from whywait.core.run import Run
from whywait.core.table import Array, Table
from whywait.units import plain

PIECE = 1 << 16  # rows at once
DICTIONARY = ("table", "column", "type", "unit", "null", "values", "meaning")
TYPES = {"i64": "int64", "f64": "float64", "str": "string", "enum": "string"}
FORMULA = ("=", "+", "-", "@")  # a spreadsheet would run a cell that begins so; some do not see white space before


def dictionary() -> Iterator[dict[str, str]]:
    """A row per column of every table: what it is called, its type and unit, whether it may be empty, its meaning."""
    for table, spec in TABLES.items():
        for c in spec:
            yield dict(zip(DICTIONARY, (table, c.name, TYPES[c.type], c.unit, "yes" if c.nullable else "no",
                                        " ".join(c.values), c.meaning), strict=True))  # fmt: skip


def write_dictionary(out: IO[str]) -> None:
    writer = csv.DictWriter(out, DICTIONARY)
    writer.writeheader()
    writer.writerows(dictionary())


def write_csv(run: Run, name: str, out: IO[str]) -> int:
    """A table as CSV (RFC 4180, UTF-8, a header of column names; null is empty). Returns its rows.

    A text that a service sent loses its control characters (but tab and newline); one that a spreadsheet would take
    for a formula gets a ``'`` in front.
    """
    table, spec = run.table(name), TABLES[name]
    writer = csv.writer(out)  # its lines end in CRLF, so that both of these characters are quoted in a cell
    writer.writerow([c.name for c in spec])
    for piece in _pieces(table):
        writer.writerows(zip(*(_column(piece, c) for c in spec), strict=True))
    return len(table)


def write_parquet(run: Run, name: str, path: Path) -> int:
    """A table as Parquet (zstd) in row groups, unit and meaning as metadata of each column. Returns its rows."""
    spec = TABLES[name]
    parts: Iterator[tuple[Mapping[str, Array], int]] = (
        ({c.name: t[c.name] for c in spec}, len(t)) for t in _pieces(run.table(name))
    )
    return write_pieces(path, spec, parts)


def _pieces(table: Table) -> Iterator[Table]:
    for lo in range(0, len(table), PIECE):
        yield table.where(np.arange(lo, min(lo + PIECE, len(table))))


def _column(table: Table, c: Column) -> Sequence[Any]:
    col = table[c.name]
    if c.type == "enum":
        return [v or "" for v in table.text(c.name)]
    if c.type == "str":
        return ["" if v is None else _cell(v) for v in col.tolist()]
    if col.dtype.kind != "f":
        return list(col.tolist())
    whole = c.type == "i64"
    return ["" if v != v else int(v) if whole else v for v in col.tolist()]  # noqa: PLR0124 - NaN is null


def _cell(text: str) -> str:
    text = plain(text)
    return f"'{text}" if text.startswith(("\t", "\n")) or text.lstrip().startswith(FORMULA) else text
