"""A columnar table in memory (numpy) and on disk (Parquet); see ``core/columns.py`` for what the columns mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whywait.core.atomic import replaced
from whywait.core.columns import TABLES, Column
from whywait.core.packed import Packed
from whywait.errors import UsageError

Array = NDArray[Any]
_T = TypeVar("_T")
SAVE_ROWS = 1 << 20  # rows that are written at once


def once(made: dict[Any, Any], what: Any, make: Callable[[], _T]) -> _T:
    """What ``make`` gives, made at the first call only and kept in ``made`` under ``what``."""
    if what not in made:
        made[what] = make()
    found: _T = made[what]
    return found


class Table:
    """Immutable by habit: every operation gives a new table. ``len(t)`` rows; ``t["name"]`` is a numpy array, of a long
    table made anew at each call from a shorter form (see :mod:`whywait.core.packed`): ask once, for few rows."""

    __slots__ = ("_cols", "_index", "_made", "name")

    def __init__(self, name: str, cols: Mapping[str, Array | Packed]) -> None:
        self.name = name
        self._index: dict[str, dict[str | None, Array]] = {}
        self._made: dict[Any, Any] = {}
        spec = TABLES[name]
        sizes = {len(c) for c in cols.values()}
        if len(sizes) > 1:
            raise ValueError(f"columns of {name} differ in length: {sorted(sizes)}")
        n = sizes.pop() if sizes else 0
        self._cols = {c.name: _as_column(c, cols[c.name]) if c.name in cols else _nulls(c, n) for c in spec}

    @classmethod
    def empty(cls, name: str) -> Table:
        return cls(name, {})

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Rows as mappings; an absent key or None is null. Unknown keys are an error (a typo would lose data)."""
        known = {c.name for c in TABLES[name]}
        for row in rows:
            if not known.issuperset(row):
                raise ValueError(f"unknown columns for {name}: {sorted(set(row) - known)}")
        return cls(name, {c.name: _from_values(c, [r.get(c.name) for r in rows]) for c in TABLES[name]})

    def __len__(self) -> int:
        return len(next(iter(self._cols.values())))

    def __getitem__(self, column: str) -> Array:
        found = self._cols[column]
        return found.dense() if isinstance(found, Packed) else found

    def packed(self, column: str) -> Packed | None:
        """The column in its shorter form, where it has one."""
        found = self._cols[column]
        return found if isinstance(found, Packed) else None

    def rows_with(self, column: str, value: str | None) -> Array:
        """Where a text column has ``value``: row numbers, ascending. The column is gone through once, at the first
        call: the analysis asks the readings for names hundreds of times."""
        if column not in self._index:
            found: dict[str | None, list[int]] = {}
            for row, v in enumerate(self[column].tolist()):
                found.setdefault(v, []).append(row)
            self._index[column] = {v: np.array(rows, dtype=np.int64) for v, rows in found.items()}
        return self._index[column].get(value, np.zeros(0, dtype=np.int64))

    def memo(self, what: Any, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, made at the first call only. Nobody may write to it."""
        return once(self._made, what, make)

    def where(self, mask: Array) -> Table:
        """Rows where ``mask`` (bool) is true, or rows by an index array, in that order."""
        return Table(self.name, {k: self[k][mask] for k in self._cols})

    def cut(self, start: int, stop: int) -> Table:
        """Rows ``start`` … ``stop`` (not included), without a copy of them."""
        out = Table.__new__(Table)
        out.name, out._index, out._made = self.name, {}, {}
        out._cols = {k: v[start:stop] for k, v in self._cols.items()}
        return out

    def pieces(self, rows: int = SAVE_ROWS) -> Iterator[Table]:
        """The table in pieces of at most so many rows, whose columns take little memory; of an empty one none."""
        return (self.cut(a, a + rows) for a in range(0, len(self), rows))

    def replace(self, **cols: Array) -> Table:
        return Table(self.name, {**self._cols, **cols})

    def text(self, column: str) -> list[str | None]:
        """An enum column as its strings."""
        spec = next(c for c in TABLES[self.name] if c.name == column)
        return [None if v < 0 else spec.values[v] for v in self[column].tolist()]

    def rows(self) -> list[dict[str, Any]]:
        """Plain Python rows; null is None, enums are strings, integers are integers."""
        lists: dict[str, list[Any]] = {}
        for c in TABLES[self.name]:
            col = self[c.name]
            if c.type == "enum":
                lists[c.name] = self.text(c.name)
            elif c.type == "i64" and c.nullable:
                lists[c.name] = [None if np.isnan(v) else int(v) for v in col]
            elif c.type == "f64":
                lists[c.name] = [None if np.isnan(v) else float(v) for v in col]
            else:
                lists[c.name] = col.tolist()
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table) or self.name != other.name or len(self) != len(other):
            return False
        return all(_same(self[k], other[k]) for k in self._cols)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def concat(cls, tables: Sequence[Table]) -> Table:
        first = tables[0]
        return cls(first.name, {k: np.concatenate([t[k] for t in tables]) for k in first._cols})

    def save(self, path: Path) -> None:
        from whywait.core.parquet import write_pieces

        cuts = self.pieces() if len(self) else iter([self])
        write_pieces(path, TABLES[self.name], (({k: t[k] for k in t._cols}, len(t)) for t in cuts))

    @classmethod
    def load(cls, name: str, path: Path) -> Table:
        from whywait.core.parquet import read

        try:
            return cls(name, read(path, TABLES[name], packs=name == "chunks"))
        except FileNotFoundError:
            return cls.empty(name)
        except Exception as exc:
            raise UsageError(
                f"{path} is not a readable whywait table: {exc}", "was it cut short or written by something else?"
            ) from exc


class Stored(Table):
    """A table that lies in a Parquet file and is read when one of its columns is asked for. Its length is known."""

    __slots__ = ("_loaded", "_rows", "path")

    def __init__(self, name: str, path: Path, rows: int) -> None:
        self.name, self.path, self._rows, self._index, self._made = name, path, rows, {}, {}
        self._loaded: dict[str, Array | Packed] | None = None

    @classmethod
    def write(cls, name: str, path: Path, pieces: Iterable[tuple[Mapping[str, Array], int]]) -> Stored:
        """Write a table that is never in memory whole; see :func:`whywait.core.parquet.write_pieces`."""
        from whywait.core.parquet import write_pieces

        return cls(name, path, write_pieces(path, TABLES[name], pieces))

    @property
    def _cols(self) -> dict[str, Array | Packed]:  # type: ignore[override]
        if self._loaded is None:
            self._loaded = Table.load(self.name, self.path)._cols
        return self._loaded

    def __len__(self) -> int:
        return self._rows

    def save(self, path: Path) -> None:
        """Where it lies already there is nothing to write; elsewhere it is copied, unread."""
        if path.resolve() == self.path.resolve():
            return
        with replaced(path) as new:
            shutil.copyfile(self.path, new)


def _same(a: Array, b: Array) -> bool:
    if a.dtype.kind == "f":
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.array_equal(a, b))


def _nulls(c: Column, n: int) -> Array:
    if not c.nullable and n:
        raise ValueError(f"column {c.name} may not be null")
    return _from_values(c, [None] * n) if n else np.empty(0, dtype=_dtype(c))


def _dtype(c: Column) -> Any:
    return {"i64": np.float64 if c.nullable else np.int64, "f64": np.float64, "str": object, "enum": np.int8}[c.type]


def _as_column(c: Column, values: Array | Packed) -> Array | Packed:
    if isinstance(values, Packed):
        return values
    out = np.asarray(values)
    if not c.nullable and out.dtype.kind == "f" and np.isnan(out).any():
        raise ValueError(f"column {c.name} may not be null")
    return out if out.dtype == _dtype(c) else out.astype(_dtype(c))


def _from_values(c: Column, values: Iterable[Any]) -> Array:
    vals = list(values)
    if not c.nullable and any(v is None for v in vals):
        raise ValueError(f"column {c.name} may not be null")
    if c.type == "enum":
        code = {v: i for i, v in enumerate(c.values)}
        return np.array([-1 if v is None else code[v] for v in vals], dtype=np.int8)
    if c.type == "str":
        out = np.empty(len(vals), dtype=object)
        out[:] = [None if v is None else str(v) for v in vals]
        return out
    if c.type == "i64" and not c.nullable:
        return np.array(vals, dtype=np.int64)
    return np.array([np.nan if v is None else v for v in vals], dtype=np.float64)
