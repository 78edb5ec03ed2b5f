"""Runs whose truth is known: a small service with slots, made without any clock, and arbitrary messy Runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from whywait.core.columns import OUTCOMES
from whywait.core.run import Manifest, Run
from whywait.core.table import Table

# A test that fails when the machine is busy tells nothing of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MS = 1_000_000
S = 1_000_000_000


def make_run(
    requests: list[dict[str, Any]],
    chunks: list[dict[str, Any]] | None = None,
    readings: list[dict[str, Any]] | None = None,
    points: list[dict[str, Any]] | None = None,
    **manifest: Any,
) -> Run:
    """A Run of plain rows. Obvious columns are filled in; without ``points`` there is one that holds everything."""
    rows = [{"point": 0, "id": i, "replica": 0, "attempt": 1, "outcome": "ok", "fault": "none", **r}
            for i, r in enumerate(requests)]  # fmt: skip
    stamps = [r[k] for r in rows for k in ("sent_ns", "end_ns", "last_ns") if r.get(k) is not None]
    whole = {"start_ns": min(stamps, default=0), "end_ns": max(stamps, default=0)}
    pts = []
    for i, p in enumerate(points if points is not None else [{}]):
        number = p.get("point", i)
        planned = sum(1 for r in rows if r["point"] == number)
        pts.append({"point": number, "mode": "concurrency", "target": 1, "planned": planned, **whole, **p})
    full = [{"kind": "answer", "clock": "kernel", **c} for c in chunks or []]
    read = [{"answered_ns": r["asked_ns"], "source": "metrics/0", **r} for r in readings or []]
    return Run(
        Manifest(**manifest),
        Table.from_rows("points", pts),
        Table.from_rows("requests", rows),
        Table.from_rows("chunks", full),
        Table.empty("steps"),
        Table.from_rows("readings", read),
    )


def stream(
    id_: int, times: list[int], lows: list[int | None] | None = None, tokens: list[int | None] | None = None
) -> list[dict[str, Any]]:
    """Chunk rows of one request."""
    lows, tokens = lows or [None] * len(times), tokens or [None] * len(times)
    return [{"id": id_, "t_ns": t, "t_low_ns": a, "tokens": k} for t, a, k in zip(times, lows, tokens, strict=True)]


def gauge_rows(name: str, values: list[tuple[int, float]], source: str = "metrics/0", **labels: str) -> list[Any]:
    import json

    text = json.dumps(labels) if labels else None
    return [{"asked_ns": t, "name": name, "value": v, "labels": text, "source": source} for t, v in values]


@dataclass
class Service:
    """A service of numbers: ``slots`` places, first come first served; a request is in prefill, then decodes."""

    slots: int = 4
    prefill_ms: float = 50.0
    gap_ms: float = 20.0
    tokens: int = 16
    rtt_ns: int = 200_000
    noise: float = 0.0
    seed: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    truth_queue_ns: list[int] = field(default_factory=list)

    def closed(self, concurrency: int, requests: int, start: int = S, **more: Any) -> Run:
        """Closed loop at ``concurrency``: a request is sent as soon as one has ended."""
        free = [start] * min(concurrency, requests)
        return self._serve(free, [start] * requests, requests, {"mode": "concurrency", "target": concurrency}, more)

    def open(self, gaps_ns: list[int], start: int = S, rate: float = 1.0, **more: Any) -> Run:
        """Open loop with these gaps between due times."""
        due = [start + int(t) for t in np.cumsum(gaps_ns)]
        return self._serve(None, due, len(due), {"mode": "rate", "target": rate}, more)

    def _serve(self, free: list[int] | None, due: list[int], n: int, point: dict[str, Any], more: Any) -> Run:
        rng = np.random.default_rng(self.seed)
        places = [0] * self.slots
        rows, chunks = [], []
        self.truth_queue_ns = []
        for i in range(n):
            sent = due[i] if free is None else free.pop(free.index(min(free)))
            place = places.index(min(places))
            arrives = sent + self.rtt_ns
            begins = max(arrives, places[place])
            first = begins + round(self.prefill_ms * MS)
            steps = self.gap_ms * MS * (1 + self.noise * rng.standard_normal(self.tokens - 1).clip(-3, 3))
            times = [first, *(first + np.cumsum(np.rint(steps).astype(np.int64))).tolist()]
            last = int(times[-1])
            places[place] = last
            if free is not None:
                free.append(last + 10_000)
            self.truth_queue_ns.append(begins - arrives)
            rows.append({
                "id": i, "due_ns": sent, "sent_ns": sent, "accepted_ns": first, "first_ns": first,
                "first_answer_ns": first, "last_ns": last, "end_ns": last + 10_000, "connect_ns": 0,
                "rtt_ns": self.rtt_ns, "output_tokens": self.tokens, "content_chunks": self.tokens,
                "prompt_tokens": 100, "asked_prompt_tokens": 100, "asked_output_tokens": self.tokens,
                "engine_prefill_ms": self.prefill_ms, "cached_tokens": 0, "finish_reason": "length",
            })  # fmt: skip
            chunks += stream(i, [int(t) for t in times])
        ends = [r["end_ns"] for r in rows]
        point = {"start_ns": min(due), "end_ns": max(ends), **point}
        return make_run(rows, chunks, points=[point], engine={"slots": self.slots, **self.engine}, **more)


def join(runs: list[Run]) -> Run:
    """Runs of one point each as the points of one Run, one after the other in time."""
    tables: dict[str, list[Table]] = {name: [] for name in ("points", "requests", "chunks", "readings")}
    shift, ids = 0, 0
    for number, run in enumerate(runs):
        moved = _moved(run, shift, ids, number)
        for name, table in moved.items():
            tables[name].append(table)
        shift += int(run.points["end_ns"].max()) + S
        ids += len(run.requests)
    whole = {name: Table.concat(parts) for name, parts in tables.items()}
    return Run(runs[0].manifest, steps=Table.empty("steps"), **whole)


def _moved(run: Run, shift: int, ids: int, number: int) -> dict[str, Table]:
    out = {}
    for name in ("points", "requests", "chunks", "readings"):
        table = run.table(name)
        cols = {}
        for column in table._cols:
            if column.endswith("_ns") and column not in ("connect_ns", "rtt_ns", "took_ns"):
                cols[column] = table[column] + shift
        if "id" in table._cols:
            cols["id"] = table["id"] + ids
        if "point" in table._cols:
            cols["point"] = np.full(len(table), number)
        out[name] = table.replace(**cols)
    return out


_NS = st.integers(0, 20 * S)
_MAYBE_MS = st.one_of(st.none(), st.floats(0, 30_000, allow_nan=False))


@st.composite
def messy_requests(draw: st.DrawFn, orderly: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One request without an id and its chunks: any outcome, stamps missing, intervals, missing token counts.

    ``orderly``: the stamps that exist are in order (invariant 3); else they are arbitrary.
    """
    keys = ("due_ns", "sent_ns", "accepted_ns", "first_ns", "last_ns", "end_ns")
    times = draw(st.lists(_NS, min_size=6, max_size=6))
    if orderly:
        times = sorted(times)
    row: dict[str, Any] = dict(zip(keys, times, strict=True))
    outcome = draw(st.sampled_from(OUTCOMES))
    if outcome != "ok" or draw(st.booleans()):
        for key in keys:
            if draw(st.integers(0, 3)) == 0:
                row[key] = None
    row |= {
        "outcome": outcome,
        "connect_ns": draw(st.one_of(st.none(), st.integers(0, S))),
        "rtt_ns": draw(st.one_of(st.none(), st.integers(0, S))),
        "engine_prefill_ms": draw(_MAYBE_MS),
        "engine_queue_ms": draw(_MAYBE_MS),
        "engine_decode_ms": draw(_MAYBE_MS),
        "output_tokens": draw(st.one_of(st.none(), st.integers(0, 60))),
        "replica": draw(st.integers(0, 1)),
    }
    first, last = row["first_ns"], row["last_ns"]
    chunks: list[dict[str, Any]] = []
    if first is not None and last is not None and first <= last:
        inner = draw(st.lists(st.integers(first, last), max_size=6))
        t = sorted([first, *inner, last])
        lows = [draw(st.one_of(st.none(), st.integers(min(first, v), v))) for v in t]
        tokens = [draw(st.one_of(st.none(), st.integers(1, 4))) for _ in t]
        chunks = stream(0, t, lows, tokens)
        row["content_chunks"] = len(t)
    return row, chunks


@st.composite
def messy_runs(draw: st.DrawFn, orderly: bool = True) -> Run:
    """A whole Run of them, in one or two points, with or without readings and engine facts."""
    drawn = draw(st.lists(messy_requests(orderly), max_size=8))
    rows, chunks = [], []
    for i, (row, mine) in enumerate(drawn):
        rows.append({**row, "id": i, "point": draw(st.integers(0, 1))})
        chunks += [{**c, "id": i} for c in mine]
    waiting = draw(st.lists(st.tuples(_NS, st.integers(0, 3)), max_size=6))
    modes = draw(st.tuples(*[st.sampled_from(("concurrency", "rate", "trace"))] * 2))
    points = [{"point": i, "mode": m, "target": draw(st.integers(1, 4)), "start_ns": 0, "end_ns": 20 * S}
              for i, m in enumerate(modes)]  # fmt: skip
    engine = draw(
        st.sampled_from(({"slots": None}, {"slots": 1}, {"slots": 2, "threads": 2, "devices": 2}, {"devices": 3}))
    )
    readings = gauge_rows("waiting", [(t, float(v)) for t, v in sorted(waiting)])
    return make_run(rows, chunks, readings, points, engine=engine)
