"""What all exports have in common: which part of a Run is told, its name, its labels and its time of day."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from whywait.analyze.goodput import was_due
from whywait.analyze.latency import Latency, per_request
from whywait.analyze.phases import RequestAccount, account
from whywait.analyze.placed import Placed, placed
from whywait.analyze.streams import Content, content
from whywait.core.run import Run, sends
from whywait.core.table import Array, Table
from whywait.errors import UsageError
from whywait.units import load_name

#: Where the times of a run begin that has no time of day of its own (a simulated one): 2000-01-01T00:00:00Z.
NO_CLOCK_NS = 946_684_800_000_000_000
MADE_UP = "the run has no time of day; its times begin at one that was made up"
#: How sends are known that an imported file did not tell; the word before the colon is ``core.run.sends``'s.
STARTS = {
    "assumed": "assumed: the source did not tell when requests were sent; they are laid out evenly by the rate, and "
    "what overlaps what is not known",
    "replayed": "replayed: the source did not tell when requests were sent; each was put where one before it ended",
}
_NAMESPACE = uuid.UUID("5f4c2f6e-7a51-5c0f-9d6c-2f3a8d0a77f1")  # of the ids that exports give runs


@dataclass(frozen=True)
class Chosen:
    """The part of a Run that is exported: ``points`` by number, ``rows`` of ``run.requests`` in order of their id.

    ``run`` stays whole: what a request waited for depends on its neighbours, told or not. ``name`` is that of the run's
    folder; ``start_unix_ns`` the time of day given for the run's zero where the run has none.
    """

    run: Run
    points: tuple[int, ...]
    rows: Array
    whole: bool = True
    name: str = ""
    start_unix_ns: int | None = None

    @cached_property
    def content(self) -> Content:
        return content(self.run)

    @cached_property
    def account(self) -> RequestAccount:
        return account(self.run, self.content)

    @cached_property
    def placed(self) -> Placed:
        return placed(self.run, self.account, self.content)

    @cached_property
    def latency(self) -> Latency:
        return per_request(self.run)

    @property
    def has_clock(self) -> bool:
        return self.run.manifest.zero_unix_ns > 0

    @property
    def dated(self) -> bool:
        """Whether its time of day is its own, or was given."""
        return self.has_clock or self.start_unix_ns is not None

    @property
    def zero_unix_ns(self) -> int:
        """Time of day of the run's zero; a conventional one where the run has none and none was given."""
        if self.has_clock:
            return self.run.manifest.zero_unix_ns
        return NO_CLOCK_NS if self.start_unix_ns is None else self.start_unix_ns

    @property
    def span(self) -> tuple[int, int]:
        """(start, end) of the chosen points, ns."""
        points = self.run.points.where(np.isin(self.run.points["point"], self.points))
        return int(points["start_ns"].min()), int(points["end_ns"].max())

    @cached_property
    def due(self) -> Array:
        """The chosen rows without what never came due: of a run that was cut off, the rest of its plan."""
        found: Array = self.rows[was_due(self.run)[self.rows]]
        return found

    def of_point(self, number: int) -> Array:
        """The chosen rows that came due at a point."""
        found: Array = self.due[self.run.requests["point"][self.due] == number]
        return found

    def point_row(self, number: int) -> dict[str, Any]:
        return self.run.points.where(self.run.points["point"] == number).rows()[0]

    def load(self, number: int) -> str:
        """A point in words: ``concurrency 8``."""
        p = self.point_row(number)
        return load_name(p["mode"], p["target"], p["label"])

    def unix(self, t_ns: float) -> int:
        return self.zero_unix_ns + round(t_ns)

    def iso(self, t_ns: float) -> str:
        """A time as ISO 8601 in UTC, to the microsecond."""
        at = datetime.datetime.fromtimestamp(self.unix(t_ns) // 1000 / 1e6, datetime.timezone.utc)
        return at.isoformat(timespec="microseconds").replace("+00:00", "Z")

    @property
    def uid(self) -> str:
        """An id of the run that is the same at every export of it."""
        m = self.run.manifest
        said = (m.zero_unix_ns, m.seed, m.made_by, tuple(m.command), len(self.run.requests),
                self.run.requests["sent_ns"][:1].tolist())  # fmt: skip
        return str(uuid.uuid5(_NAMESPACE, repr(said)))

    @property
    def labels(self) -> dict[str, Any]:
        """What every export says of where the figures come from; PARTIAL runs, made-up clocks and made-up sends are
        told here."""
        m = self.run.manifest
        found = [self.starts(n) for n in self.points]
        out = {
            "made_by": m.origin,
            "whywait_version": m.whywait_version,
            "definitions": m.definitions,
            "engine": m.engine.get("name"),
            "model": m.engine.get("model"),
            "partial": m.partial,
            "partial_reason": m.partial_reason or None,
            "clock": None if self.dated else MADE_UP,
            "starts": next((words for words in STARTS.values() if words in found), None),
        }
        return {k: v for k, v in out.items() if v is not None}

    def starts(self, number: int) -> str | None:
        """Of a point whose source did not tell when its requests were sent: where their times come from. None: told."""
        return STARTS.get(self._sends.get(number, ""))

    def overlaps_known(self, number: int) -> bool:
        """Whether what overlaps what at a point is more than a layout."""
        return self._sends.get(number) != "assumed"

    @cached_property
    def _sends(self) -> dict[int, str]:
        return sends(self.run)

    def labels_of(self, number: int) -> dict[str, Any]:
        """The labels of one load point, where a form holds one."""
        return replace(self, points=(number,)).labels

    @property
    def title(self) -> str:
        """The run in a few words, PARTIAL first."""
        m = self.run.manifest
        words = [str(v) for v in (m.engine.get("name"), m.engine.get("model")) if v]
        told = " ".join([self.name or "run", f"({', '.join([m.origin, *words])})"])
        return f"PARTIAL {told}: {m.partial_reason or 'cut off'}" if m.partial else told


def choose(run: Run, point: int | None = None, ids: Iterable[int] | None = None, limit: int | None = None) -> Chosen:
    """The part of ``run`` that was asked for.

    Raises:
        UsageError: no such point or request, or nothing to export.
    """
    numbers = run.points["point"].tolist()
    if not numbers:
        raise UsageError("this run has no load point", "there is nothing to export")
    if point is not None and point not in numbers:
        raise UsageError(f"this run has no point {point}", f"it has {_few(numbers)}")
    points = tuple(numbers if point is None else [point])
    rows = np.flatnonzero(np.isin(run.requests["point"], points))
    rows = rows[np.argsort(run.requests["id"][rows], kind="stable")]
    whole = len(rows)
    if ids is not None:
        wanted = np.unique(np.fromiter(ids, dtype=np.int64))
        have = np.isin(run.requests["id"][rows], wanted)
        missing = wanted[~np.isin(wanted, run.requests["id"][rows])]
        if len(missing):
            where = "" if point is None else f" at point {point}"
            raise UsageError(f"there is no request {_few(missing.tolist())}{where}", _ids(run.requests["id"][rows]))
        rows = rows[have]
    rows = rows if limit is None else rows[:limit]
    return Chosen(run, points, rows, len(rows) == whole)


def _few(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (", …" if len(numbers) > 8 else "")


def _ids(ids: Array) -> str:
    return f"ids are {ids.min()} to {ids.max()}" if len(ids) else "it has no requests"


def parted(run: Run, points: tuple[int, ...], rows: Array) -> Run:
    """Only these requests with their chunks, these points, and the steps and readings of their time."""
    pts = run.points.where(np.isin(run.points["point"], points))
    req = run.requests.where(rows)
    chunks = run.chunks.where(np.isin(run.chunks["id"], req["id"]))
    if len(pts) == len(run.points):
        return Run(run.manifest, pts, req, chunks, run.steps, run.readings)
    steps, read = (_within(t, column, pts) for t, column in ((run.steps, "t_ns"), (run.readings, "asked_ns")))
    return Run(run.manifest, pts, req, chunks, run.steps.where(steps), run.readings.where(read))


def _within(table: Table, column: str, points: Table) -> Array:
    """Rows whose time lies in one of the points (bool)."""
    t, inside = table[column], np.zeros(len(table), dtype=bool)
    for start, end in zip(points["start_ns"].tolist(), points["end_ns"].tolist(), strict=True):
        inside |= (t >= start) & (t <= end)
    return inside
