"""Columns to Parquet and back: arro3 reads and writes the file, nanoarrow carries numpy buffers in and out.

Why not pyarrow: it alone is 170 MB unpacked, see ``docs/decisions/0001-parquet-without-pyarrow.md``. The files are
plain Parquet (zstd) that pyarrow, pandas, polars and DuckDB read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import arro3.core as ac
import arro3.io as aio
import nanoarrow as na
import numpy as np
from numpy.typing import NDArray

from whywait.core import footer
from whywait.core.atomic import replaced
from whywait.core.columns import SCHEMA_VERSION, Column
from whywait.core.cstream import Batches
from whywait.core.packed import Packed, pack

Array = NDArray[Any]
READ_ROWS = 1 << 17
MOST_FOOTER = 16 << 20  # bytes; that of a hundred million rows has a hundredth
MOST_ROWS = 40  # for each byte of a file of plain columns: a bomb
MOST_PACKED = 4000  # of packed ones: chunks of one read are alike, and zstd writes a thousand in a few bytes
_DICTIONARY = ac.DataType.dictionary(ac.DataType.int32(), ac.DataType.string())
PACK_FROM = 1 << 21  # rows; a table with fewer is held as plain arrays


def write(path: Path, spec: Sequence[Column], cols: Mapping[str, Array], n: int) -> None:
    """Write atomically: a reader sees the old file, or the whole new one."""
    write_pieces(path, spec, [(cols, n)])


def write_pieces(path: Path, spec: Sequence[Column], pieces: Iterable[tuple[Mapping[str, Array], int]]) -> int:
    """The same, of a table that comes in pieces (columns, rows) and is never in memory whole. Returns its rows.

    Raises:
        OSError: the disk did not take it; nothing is left of what was written.
    """
    schema = ac.Schema([_field(c) for c in spec], metadata={"whywait.schema_version": str(SCHEMA_VERSION)})
    feed = _Feed(schema, spec, pieces)
    with replaced(path) as new, new.open("wb") as file:
        out = _Out(file)
        try:
            aio.write_parquet(_stream(schema, feed), out, compression="zstd(3)")
        except Exception as exc:
            raise feed.error or exc from None
        if out.error is not None:
            raise out.error
    return feed.rows


def _stream(schema: Any, feed: _Feed) -> Any:
    try:
        return ac.RecordBatchReader.from_batches(schema, iter(feed))
    except TypeError:  # arro3 0.8
        return Batches(schema, iter(feed))


class _Feed:
    """Record batches, made when the writer asks for them. What goes wrong here reaches it as text only: it is kept."""

    def __init__(self, schema: Any, spec: Sequence[Column], pieces: Iterable[tuple[Mapping[str, Array], int]]) -> None:
        self._schema, self._spec, self._pieces = schema, spec, pieces
        self.rows = 0
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            for cols, n in self._pieces:
                arrays = [_encode(c, cols[c.name], n) for c in self._spec]
                self.rows += n
                yield ac.RecordBatch.from_arrays(arrays, schema=self._schema)
        except BaseException as exc:
            self.error = exc
            raise


class _Out:
    """The file as the writer sees it, which panics when a disk is full: nothing ever fails there, we do so after it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as exc:
                self.error = exc
        return len(data)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._file.flush()
            except OSError as exc:
                self.error = exc

    def read(self, size: int = -1) -> bytes:
        raise NotImplementedError  # the writer looks whether there is one; it never calls it

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def read(path: Path, spec: Sequence[Column], packs: bool = False) -> dict[str, Array | Packed]:
    """Columns of ``spec`` that the file has; a column the file lacks is left out (null to the caller). ``packs``: of a
    long table (``PACK_FROM``) they are packed as they come in, and never in memory as plain arrays."""
    _check_ends(path)
    parts: dict[str, list[Any]] = {}
    sizes: list[int] = []
    try:
        reader, batches = _reader(path)
        have = set(reader.schema.names)
        mine = [c for c in spec if c.name in have]
        parts = {c.name: [] for c in mine}
        packed = {c.name: packs and c.type in ("i64", "enum") for c in mine}
        a_byte = MOST_PACKED if packs else MOST_ROWS
        most = max(1 << 20, a_byte * path.stat().st_size)
        for batch in batches:
            if not batch.num_rows:
                continue
            sizes.append(batch.num_rows)
            if sum(sizes) > most:
                raise ValueError(f"it unfolds to more than {a_byte} rows for each of its bytes")
            for c in mine:
                values = _decode_one(c, batch.column(c.name))
                parts[c.name].append(pack(values) if packed[c.name] else values)
    except BaseException as exc:
        # The reader panics on some damage, and a panic is no Exception: it would pass every handler above.
        if type(exc).__name__ == "PanicException":
            raise ValueError(str(exc)) from exc
        raise
    # One column after another: only one is ever there twice.
    out: dict[str, Array | Packed] = {}
    for c in mine:
        found = parts.pop(c.name)
        if packed[c.name] and found:
            whole = Packed(found, sizes, _kind(c))
            out[c.name] = whole if len(whole) >= PACK_FROM else np.array(whole.dense())
        else:
            out[c.name] = _joined(c, found)
    return out


def _kind(c: Column) -> Any:
    """What a column is in memory, as ``core/columns.py`` says."""
    kinds = {"str": object, "enum": np.int8, "f64": np.float64}
    return kinds.get(c.type, np.float64 if c.nullable else np.int64)


def _reader(path: Path) -> tuple[Any, Iterable[Any]]:
    """(What has the schema, record batches.)"""
    with _mute():
        return _opened(path)


def _opened(path: Path) -> tuple[Any, Iterable[Any]]:
    try:
        reader = aio.read_parquet(str(path), batch_size=READ_ROWS)
        return reader, reader
    except TypeError:  # arro3 0.8: batches of 1,024 rows, too many to decode one by one
        table = aio.read_parquet(str(path)).read_all().combine_chunks()
        return table, table.to_batches()


@contextlib.contextmanager
def _mute() -> Iterator[None]:
    """A reader that panics writes a stack trace to the descriptor of stderr, before it tells us."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _check_ends(path: Path) -> None:
    """Tell a file that is not whole before the reader panics on it."""
    with path.open("rb") as f:
        head = f.read(4)
        size = f.seek(0, os.SEEK_END)
        f.seek(max(size - 8, 0))
        tail = f.read(8)
        length = int.from_bytes(tail[:4], "little")
        f.seek(max(size - 8 - length, 0))
        foot = f.read(min(length, MOST_FOOTER + 1))
    if head != b"PAR1" or tail[4:] != b"PAR1" or length > size - 12:
        raise ValueError("it does not begin and end as Parquet does")
    if length > MOST_FOOTER:
        raise ValueError(f"its footer has {length} bytes, which no table of ours has")
    footer.check(foot)


def _field(c: Column) -> Any:
    kind = {"i64": ac.DataType.int64, "f64": ac.DataType.float64}.get(c.type, ac.DataType.string)()
    return ac.Field(c.name, kind, nullable=c.nullable, metadata={"unit": c.unit, "meaning": c.meaning})


def _encode(c: Column, col: Array, n: int) -> Any:
    if c.type == "str":
        return ac.Array(col.tolist(), ac.DataType.string())
    if c.type == "enum":
        if (col >= len(c.values)).any() or (not c.nullable and (col < 0).any()):
            raise ValueError(f"column {c.name} holds a code outside {c.values}")
        if not n:  # arro3 0.8 takes no empty numpy array
            return ac.Array([], ac.DataType.string())
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


def _joined(c: Column, parts: list[Array]) -> Array:
    if not parts:
        return np.empty(0, dtype=_kind(c))
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
        return _enum_codes(c, chunk)
    values: Array = np.asarray(view.buffer(1))[:n]
    if not (ac.DataType.is_integer(chunk.type) or ac.DataType.is_floating(chunk.type)):
        raise ValueError(f"column {c.name} holds no numbers")
    if not c.nullable:
        return _whole(c, values) if c.type == "i64" else np.array(values, dtype=np.float64)
    out: Array = values.astype(np.float64)
    if ok is not None:
        out[~ok] = np.nan
    return out


def _whole(c: Column, values: Array) -> Array:
    """As int64; other writers may have made floats of them.

    Raises:
        ValueError: they are no whole numbers.
    """
    with np.errstate(invalid="ignore"):
        out = np.array(values, dtype=np.int64)
    if values.dtype.kind == "f" and not (out == values).all():
        why = "may not be null" if np.isnan(values).any() else "holds no whole numbers"
        raise ValueError(f"column {c.name} {why}")
    return out


def _enum_codes(c: Column, chunk: Any) -> Array:
    """Strings of a closed list to codes without a Python loop over rows."""
    n, view = len(chunk), na.c_array(chunk).view()
    offsets = np.asarray(view.buffer(1))[: n + 1]
    size = int(offsets[1] - offsets[0]) if n else 0
    text = np.asarray(view.buffer(2)).view(np.uint8)[int(offsets[0]) : int(offsets[-1])] if n else np.empty(0, np.uint8)
    if size and not chunk.null_count and len(text) == n * size and (np.diff(offsets) == size).all():
        rows = text.reshape(n, size)
        if (rows == rows[0]).all():  # one word throughout
            return np.full(n, _code_of(c, rows[0].tobytes().decode()), dtype=np.int8)
    coded = na.c_array(chunk.cast(_DICTIONARY))
    codes = np.asarray(coded.view().buffer(1)).view(np.int32)[coded.offset : coded.offset + n]
    words = [-1 if w is None else _code_of(c, w) for w in na.Array(coded.dictionary).to_pylist()]
    out: Array = np.append(np.array(words, dtype=np.int8), np.int8(-1))[codes]
    if chunk.null_count:
        valid = np.asarray(na.c_array(chunk).view().buffer(0)).view(np.uint8)
        out[~np.unpackbits(valid, count=n, bitorder="little").astype(bool)] = -1
    return out


def _code_of(c: Column, word: str) -> int:
    if word not in c.values:
        raise ValueError(f"column {c.name} holds a value outside {c.values}")
    return c.values.index(word)
