"""Columns to Parquet and back: arro3 reads and writes the file, nanoarrow carries numpy buffers in and out.

Why not pyarrow: it alone is 170 MB unpacked, see ``docs/decisions/0001-parquet-without-pyarrow.md``. The files are
plain Parquet (zstd) that pyarrow, pandas, polars and DuckDB read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import arro3.core as ac
import arro3.io as aio
import nanoarrow as na
import numpy as np
from numpy.typing import NDArray

from whywait.core.columns import SCHEMA_VERSION, Column

Array = NDArray[Any]


def write(path: Path, spec: Sequence[Column], cols: Mapping[str, Array], n: int) -> None:
    """Write atomically: a reader sees the old file, or the whole new one."""
    fields, arrays = [], []
    for c in spec:
        meta = {"unit": c.unit, "meaning": c.meaning}
        kind = {"i64": ac.DataType.int64, "f64": ac.DataType.float64}.get(c.type, ac.DataType.string)()
        fields.append(ac.Field(c.name, kind, nullable=c.nullable, metadata=meta))
        arrays.append(_encode(c, cols[c.name], n))
    schema = ac.Schema(fields, metadata={"whywait.schema_version": str(SCHEMA_VERSION)})
    tmp = path.with_name(path.name + ".tmp")
    aio.write_parquet(ac.Table.from_arrays(arrays, schema=schema), str(tmp), compression="zstd(3)")
    os.replace(tmp, path)


def read(path: Path, spec: Sequence[Column]) -> dict[str, Array]:
    """Columns of ``spec`` that the file has; a column the file lacks is left out (null to the caller)."""
    _check_ends(path)
    try:
        table = aio.read_parquet(str(path)).read_all().combine_chunks()
    except BaseException as exc:
        # The reader panics on some damage, and a panic is no Exception: it would pass every handler above.
        if type(exc).__name__ == "PanicException":
            raise ValueError(str(exc)) from exc
        raise
    have = set(table.column_names)
    return {c.name: _decode(c, table.column(c.name)) for c in spec if c.name in have}


def _check_ends(path: Path) -> None:
    """Tell a file that is not whole before the reader panics on it, which writes a stack trace to stderr."""
    with path.open("rb") as f:
        head = f.read(4)
        size = f.seek(0, os.SEEK_END)
        f.seek(max(size - 8, 0))
        tail = f.read(8)
    if head != b"PAR1" or tail[4:] != b"PAR1" or int.from_bytes(tail[:4], "little") > size - 12:
        raise ValueError("it does not begin and end as Parquet does")


def _encode(c: Column, col: Array, n: int) -> Any:
    if c.type == "str":
        return ac.Array(col.tolist(), ac.DataType.string())
    if c.type == "enum":
        if (col >= len(c.values)).any() or (not c.nullable and (col < 0).any()):
            raise ValueError(f"column {c.name} holds a code outside {c.values}")
        words: Any = ac.Array([*c.values, None], ac.DataType.string())
        codes = np.where(col < 0, len(c.values), col).astype(np.int32)
        return words.take(ac.Array.from_arrow(na.c_array_from_buffers(na.int32(), n, [None, codes])))
    valid = None
    if c.nullable:
        ok = ~np.isnan(col)
        if not ok.all():
            valid = np.packbits(ok, bitorder="little")
            col = np.where(ok, col, 0)
    if c.type == "i64":
        col = col.astype(np.int64)
    kind = na.int64() if c.type == "i64" else na.float64()
    return ac.Array.from_arrow(na.c_array_from_buffers(kind, n, [valid, np.ascontiguousarray(col)]))


def _decode(c: Column, chunked: Any) -> Array:
    parts = [_decode_one(c, chunk) for chunk in chunked.chunks]
    if not parts:
        return np.empty(0, dtype=object if c.type == "str" else np.float64 if c.nullable else np.int64)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _decode_one(c: Column, chunk: Any) -> Array:
    if chunk.null_count and not c.nullable:
        raise ValueError(f"column {c.name} may not be null")
    if c.type == "str":
        words: Array = np.empty(len(chunk), dtype=object)
        words[:] = chunk.to_pylist()
        return words
    arr = na.c_array(chunk)
    view = arr.view()
    valid = np.asarray(view.buffer(0)) if arr.null_count else None
    n = len(arr)
    ok = None if valid is None else np.unpackbits(valid.view(np.uint8), count=n, bitorder="little").astype(bool)
    if c.type == "enum":
        return _enum_codes(c, view, n, ok)
    values: Array = np.asarray(view.buffer(1))[:n]
    if not c.nullable:
        return np.array(values)
    out: Array = values.astype(np.float64)
    if ok is not None:
        out[~ok] = np.nan
    return out


def _enum_codes(c: Column, view: Any, n: int, ok: Array | None) -> Array:
    """Strings of a closed list to codes without a Python loop over rows: by length, then letter by letter."""
    offsets = np.asarray(view.buffer(1))[: n + 1].astype(np.int64)
    data = np.append(np.asarray(view.buffer(2)).view(np.uint8), np.zeros(max(map(len, c.values)), np.uint8))
    start, length = offsets[:-1], np.diff(offsets)
    out = np.full(n, -1, dtype=np.int8)
    for code, word in enumerate(c.values):
        rows = np.flatnonzero(length == len(word))
        for j, letter in enumerate(word.encode()):
            rows = rows[data[start[rows] + j] == letter]
        out[rows] = code
    if ok is not None:
        out[~ok] = -1
    unknown = out < 0 if ok is None else (out < 0) & ok
    if unknown.any():
        raise ValueError(f"column {c.name} holds a value outside {c.values}")
    return out
