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
    if not path.exists():
        raise FileNotFoundError(path)
    table = aio.read_parquet(str(path)).read_all().combine_chunks()
    have = set(table.column_names)
    return {c.name: _decode(c, table.column(c.name)) for c in spec if c.name in have}


def _encode(c: Column, col: Array, n: int) -> Any:
    if c.type == "str":
        return ac.Array(col.tolist(), ac.DataType.string())
    if c.type == "enum":
        words: Any = ac.Array([*c.values, None], ac.DataType.string())
        codes = np.where(col < 0, len(c.values), col).astype(np.int32)
        return words.take(ac.Array.from_numpy(codes))
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
    """Strings of a closed list to codes without a Python loop over rows: length and first two letters identify."""
    offsets = np.asarray(view.buffer(1))[: n + 1].astype(np.int64)
    data = np.append(np.asarray(view.buffer(2)).view(np.uint8), np.zeros(2, np.uint8)).astype(np.int64)
    keys = np.diff(offsets) * 65536 + data[offsets[:-1]] * 256 + data[offsets[:-1] + 1]
    known = {len(v) * 65536 + ord(v[0]) * 256 + ord((v + "\0")[1]): i for i, v in enumerate(c.values)}
    if len(known) != len(c.values):
        raise ValueError(f"the values of {c.name} need a longer key")
    out = np.full(n, -1, dtype=np.int8)
    for key, code in known.items():
        out[keys == key] = code
    if ok is not None:
        out[~ok] = -1
    unknown = out < 0 if ok is None else (out < 0) & ok
    if unknown.any():
        raise ValueError(f"column {c.name} holds a value outside {c.values}")
    return out
