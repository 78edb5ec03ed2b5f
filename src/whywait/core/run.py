"""Run: the one saved type. A manifest and five tables; three kinds of producer write it, everything else reads it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from whywait import __version__
from whywait.core import bounded, sums
from whywait.core.atomic import replaced
from whywait.core.columns import MADE_BY, SCHEMA_VERSION, TABLES
from whywait.core.secrets import clean
from whywait.core.table import Array, Table, once
from whywait.errors import UsageError

#: The version of docs/metrics.md by which figures are made of a Run. 2: energy per good request, as in a bill.
DEFINITIONS = "2"
#: Chunks of a Run of which everything that was made is kept; of one with more only what was made of one point.
MOST_KEPT = 3_000_000
_T = TypeVar("_T")
#: The doubt of a measurement whose service said itself that it is a simulated one.
SIMULATED_SERVICE = "the service is simulated (whywait serve-sim)"


@dataclass(frozen=True)
class Manifest:
    """Where a Run comes from. Times in tables are nanoseconds after ``zero_unix_ns`` (CLOCK_REALTIME)."""

    made_by: str = "measured"
    schema_version: int = SCHEMA_VERSION
    whywait_version: str = __version__
    definitions: str = DEFINITIONS
    zero_unix_ns: int = 0
    command: list[str] = field(default_factory=list)
    seed: int = 0
    endpoint: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    clock: list[dict[str, Any]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, float] = field(default_factory=dict)
    journey: dict[str, Any] = field(
        default_factory=dict
    )  # what was to be measured, by whose choice; to resume it; no secrets
    halves: list[dict[str, Any]] = field(default_factory=list)  # of a resumed run: the runs it was put together from
    partial: bool = False
    partial_reason: str = ""
    doubts: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # a file may hold anything
            kind = type(f.default_factory() if callable(f.default_factory) else f.default)
            if not isinstance(getattr(self, f.name), kind):
                raise ValueError(f"{f.name} must be of type {kind.__name__}")
        if not all(isinstance(v, (int, float)) for v in self.slo.values()):
            raise ValueError("the bounds of an SLO must be numbers")
        if self.made_by not in MADE_BY:
            raise ValueError(f"made_by must be one of {MADE_BY}")

    @property
    def origin(self) -> str:
        """``made_by``, but ``simulated`` too where a measurement was of a service that is itself simulated."""
        own = any(isinstance(d, dict) and d.get("what") == SIMULATED_SERVICE for d in self.doubts)
        return "simulated" if own else self.made_by


@dataclass(frozen=True)
class Run:
    """Immutable. The five tables are :class:`~whywait.core.table.Table`; ``core/columns.py`` says what they hold."""

    manifest: Manifest
    points: Table
    requests: Table
    chunks: Table
    steps: Table
    readings: Table
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # see memo

    def table(self, name: str) -> Table:
        found: Table = getattr(self, name)
        return found

    def point(self, number: int) -> Run:
        """Only the rows of one load point (readings by time). Of a run of many chunks only the last one asked for is
        kept, with all that was made of it; of others every one is."""
        kept: dict[int, Run] = self._made.setdefault("point", {})
        if number not in kept:
            found = self._point(number)
            if len(self.chunks) > MOST_KEPT:
                kept.clear()
            kept[number] = found
        return kept[number]

    def memo(self, what: str, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, made at the first call only: many parts of the analysis ask for the same few things.
        Nobody may write to it."""
        return once(self._made, what, make)

    def by_request(self, what: str, make: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """:meth:`memo` of arrays with a value per request; a load point has them from the run, once that has them."""
        return self.memo(f"by request: {what}", make)

    def _point(self, number: int) -> Run:
        pts, mine = self.points.where(self.points["point"] == number), self.requests["point"] == number
        req = self.requests.where(mine)
        start, end = int(pts["start_ns"][0]), int(pts["end_ns"][0])
        chunks = chunks_of(self, req["id"])
        steps = self.steps.where((self.steps["t_ns"] >= start) & (self.steps["t_ns"] <= end))
        asked = self.readings["asked_ns"]
        out = Run(self.manifest, pts, req, chunks, steps, self.readings.where((asked >= start) & (asked <= end)))
        of_requests = {k: v for k, v in self._made.items() if k.startswith("by request")}
        out._made.update({k: tuple(a[mine] for a in v) for k, v in of_requests.items()})
        return out

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write the tables, their checksums and ``manifest.json``, which goes last: it marks the Run as whole."""
        out = Path(directory)
        out.mkdir(parents=True, exist_ok=True)
        (out / sums.FILE).unlink(missing_ok=True)  # those of what is written over
        for name in TABLES:
            table = self.table(name)
            path = out / f"{name}.parquet"
            if name == "steps" and not len(table):
                path.unlink(missing_ok=True)
                continue
            table.save(path)
        write_json(out / sums.FILE, sums.of_all(out / f"{name}.parquet" for name in TABLES))
        write_json(out / "manifest.json", dataclasses.asdict(self.manifest))
        return out

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Run:
        """Read a saved Run; one that was cut off while running comes back whole as far as it went, labelled PARTIAL.

        Raises:
            UsageError: no Run there, damaged, or written by a newer whywait.
        """
        path = Path(directory)
        if not (path / "manifest.json").exists():
            from whywait.core.recorder import recover

            return recover(path)
        manifest = _read_manifest(path)
        for name in ("points", "requests"):  # without these a Run would not be poorer but wrong: no load, no failures
            if not (path / f"{name}.parquet").exists():
                raise UsageError(f"{path / name}.parquet is missing", "was the run copied whole?")
        sums.check(path)
        return cls(manifest, **{name: Table.load(name, path / f"{name}.parquet") for name in TABLES})


def chunks_of(run: Run, ids: Array) -> Table:
    """The chunks of these requests (ids, any order). Those that lie together, as in a saved run, are no copy."""
    span = _together(run, ids)
    return run.chunks.where(np.isin(run.chunks["id"], ids)) if span is None else run.chunks.cut(*span)


def _together(run: Run, ids: Array) -> tuple[int, int] | None:
    """From which to which chunk they are those of ``ids`` and of no other request; None where they are scattered."""
    values, counts = run.memo("runs", lambda: runs_of(run.chunks, "id"))
    mine = np.flatnonzero(np.isin(values, ids))
    if not len(mine):
        return 0, 0
    first, last = int(mine[0]), int(mine[-1])
    if last - first + 1 != len(mine):
        return None
    start = int(counts[:first].sum())
    return start, start + int(counts[first : last + 1].sum())


def runs_of(table: Table, column: str) -> tuple[Array, Array]:
    """Values of a column of whole numbers and how many of each lie in a row, neighbours unequal."""
    packed = table.packed(column)
    if packed is not None:
        return packed.runs()
    values = table[column]
    new = np.flatnonzero(np.append(len(values) > 0, values[1:] != values[:-1]))
    return values[new], np.diff(np.append(new, len(values)))


def manifest_of(raw: dict[str, Any], where: str) -> Manifest:
    """A manifest from what was written down; facts that this version does not know are passed over.

    Raises:
        UsageError: written by a newer whywait.
    """
    if raw.get("schema_version", 0) > SCHEMA_VERSION:
        raise UsageError(
            f"{where} was written by whywait {raw.get('whywait_version')} (schema {raw['schema_version']})",
            "upgrade whywait to read it",
        )
    known = {f.name for f in dataclasses.fields(Manifest)}
    return Manifest(**{k: v for k, v in raw.items() if k in known})


def _read_manifest(path: Path) -> Manifest:
    file = path / "manifest.json"
    try:
        return manifest_of(bounded.read_json(file, 512 * bounded.MIB), str(path))
    except (ValueError, TypeError, AttributeError) as exc:
        raise UsageError(f"{file} is damaged: {exc}", "restore it from a copy") from exc


def write_json(path: Path, value: Any) -> None:
    """Atomic; keys keep their order; NaN is refused, since absent is null."""
    text = clean(json.dumps(value, indent=2, allow_nan=False)) + "\n"
    with replaced(path) as new:
        new.write_text(text)


def doubt(what: str, why: str, next_: str) -> dict[str, str]:
    """One of :attr:`Manifest.doubts`: what is in doubt, why, and what to do next."""
    return {"what": what, "why": why, "next": next_}


def laid_out(run: Run) -> Array:
    """Load points (numbers) whose requests were laid out on the axis by nothing but a rate: an imported file did not
    say when they were sent. Durations of requests hold there; what overlaps what is not known."""
    return np.array([k for k, v in sends(run).items() if v == "assumed"], dtype=np.int64)


def sends(run: Run) -> dict[int, str]:
    """How it is known when the requests of an imported load point (number) were sent, where the file did not say:
    ``replayed`` (by the limit of requests in flight) or ``assumed`` (see :func:`laid_out`)."""
    imported = run.manifest.client.get("imported")
    found = imported.get("starts") if isinstance(imported, dict) else None
    return {int(k): str(v) for k, v in found.items() if v != "told"} if isinstance(found, dict) else {}


_TIMES = {
    "points": ("start_ns", "end_ns", "steady_start_ns", "steady_end_ns"),
    "requests": ("due_ns", "sent_ns", "accepted_ns", "first_ns", "first_answer_ns", "last_ns", "end_ns"),
    "chunks": ("t_ns", "t_low_ns"),
    "steps": ("t_ns",),
    "readings": ("asked_ns", "answered_ns"),
}


def with_zero(run: Run, zero_unix_ns: int) -> Run:
    """The same run told from another zero; spans of time (``connect_ns``, ``rtt_ns``, ``took_ns``) are no times."""
    by = run.manifest.zero_unix_ns - zero_unix_ns
    tables = {name: run.table(name) for name in TABLES}
    moved = {name: t.replace(**{c: t[c] + by for c in _TIMES[name]}) for name, t in tables.items()} if by else tables
    return Run(dataclasses.replace(run.manifest, zero_unix_ns=zero_unix_ns), **moved)


def before_point(run: Run, number: int) -> Run:
    """Only what belongs to the load points before ``number``."""
    points = run.points.where(run.points["point"] < number)
    requests = run.requests.where(run.requests["point"] < number)
    chunks = chunks_of(run, requests["id"])
    end = int(points["end_ns"].max()) if len(points) else 0
    steps, readings = run.steps, run.readings
    return Run(run.manifest, points, requests, chunks, steps.where(steps["t_ns"] <= end),
               readings.where(readings["asked_ns"] <= end))  # fmt: skip


def concat(runs: list[Run]) -> Run:
    """The union of runs with one zero: shards of one run, or a run and its resumption. Request ids must not clash.

    Points with the same number are one point: planned requests and targets add up, and its times span both.
    """
    zero = {r.manifest.zero_unix_ns for r in runs}
    if len(zero) > 1:
        raise ValueError("runs have different zeros; shift them first")
    tables = {name: Table.concat([r.table(name) for r in runs]) for name in TABLES}
    ids = tables["requests"]["id"]
    if len(np.unique(ids)) != len(ids):
        raise ValueError("request ids clash between the runs")
    order = np.argsort(ids, kind="stable")
    tables["requests"] = tables["requests"].where(order)
    chunks = tables["chunks"]
    tables["chunks"] = chunks.where(np.lexsort((chunks["t_ns"], chunks["id"])))
    tables["points"] = _merge_points(tables["points"])
    m = runs[0].manifest
    doubts = [d for i, r in enumerate(runs) for d in r.manifest.doubts if d not in runs[0].manifest.doubts or i == 0]
    clock = [c for r in runs for c in r.manifest.clock]
    partial = any(r.manifest.partial for r in runs)
    reason = "; ".join(r.manifest.partial_reason for r in runs if r.manifest.partial_reason)
    return Run(dataclasses.replace(m, doubts=doubts, clock=clock, partial=partial, partial_reason=reason), **tables)


def together(a: float | None, b: float | None) -> float | None:
    """The target of a point that shards share: requests in flight and rates add up."""
    return None if a is None or b is None else round(a + b, 9)


def _merge_points(points: Table) -> Table:
    rows: dict[int, dict[str, Any]] = {}
    for row in points.rows():
        have = rows.setdefault(row["point"], row)
        if have is not row:
            have["planned"] += row["planned"]
            have["target"] = together(have["target"], row["target"])
            have["start_ns"] = min(have["start_ns"], row["start_ns"])
            have["end_ns"] = max(have["end_ns"], row["end_ns"])
            have["steady_start_ns"] = have["steady_end_ns"] = None
    return Table.from_rows("points", [rows[k] for k in sorted(rows)])
