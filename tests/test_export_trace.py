"""The Perfetto trace: read back by the format's own library, nested as it should be, and true to the account."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, messy_runs, stream
from whywait.analyze.phases import PHASES, account
from whywait.analyze.placed import placed
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.report.export import Chosen, choose
from whywait.report.trace import write_trace

pb: Any = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


class Slice(NamedTuple):
    track: str
    name: str
    start: int
    end: int
    depth: int
    facts: dict[str, Any]


class Trace:
    """The parsed trace: slices by a stack per track, instants, counters. Fails where the file breaks the rules."""

    def __init__(self, raw: bytes) -> None:
        trace = pb.Trace()
        trace.ParseFromString(raw)
        self.packets = list(trace.packet)
        self.tracks: dict[int, Any] = {}
        self.slices: list[Slice] = []
        self.instants: list[Slice] = []
        self.counts: dict[str, list[tuple[int, float]]] = defaultdict(list)
        names: dict[int, str] = {}
        keys: dict[int, str] = {}
        open_: dict[int, list[tuple[str, int, dict[str, Any]]]] = defaultdict(list)
        assert self.packets[0].sequence_flags == 1  # a sequence that interns must begin by clearing
        for p in self.packets:
            assert p.trusted_packet_sequence_id == 1
            names |= {e.iid: e.name for e in p.interned_data.event_names}
            keys |= {e.iid: e.name for e in p.interned_data.debug_annotation_names}
            if p.HasField("track_descriptor"):
                assert p.track_descriptor.uuid not in self.tracks
                if p.track_descriptor.parent_uuid:
                    assert p.track_descriptor.parent_uuid in self.tracks
                self.tracks[p.track_descriptor.uuid] = p.track_descriptor
            if not p.HasField("track_event"):
                continue
            e = p.track_event
            track = self.tracks[e.track_uuid]
            stack = open_[e.track_uuid]
            facts = {keys[a.name_iid]: getattr(a, a.WhichOneof("value")) for a in e.debug_annotations}
            name = e.name or names.get(e.name_iid, "")
            if e.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
                assert name
                assert not stack or stack[-1][1] <= p.timestamp
                stack.append((name, p.timestamp, facts))
            elif e.type == pb.TrackEvent.TYPE_SLICE_END:
                name, start, facts = stack.pop()
                assert start <= p.timestamp
                self.slices.append(Slice(self.path(e.track_uuid), name, start, p.timestamp, len(stack), facts))
            elif e.type == pb.TrackEvent.TYPE_INSTANT:
                self.instants.append(Slice(self.path(e.track_uuid), name, p.timestamp, p.timestamp, len(stack), facts))
            else:
                assert track.HasField("counter")
                self.counts[self.path(e.track_uuid)].append((p.timestamp, e.double_counter_value))
        assert not any(open_.values())

    def path(self, uuid: int) -> str:
        track = self.tracks[uuid]
        return (self.path(track.parent_uuid) + " / " if track.parent_uuid else "") + track.name

    def requests(self) -> dict[int, Slice]:
        return {s.facts["id"]: s for s in self.slices if s.depth == 0 and "id" in s.facts}

    def phases(self, id_: int) -> list[Slice]:
        mine = self.requests()[id_]
        return [s for s in self.slices if s.track == mine.track and s.depth > 0 and mine.start <= s.start
                and s.end <= mine.end and s.end > s.start]  # fmt: skip


def trace_of(chosen: Chosen, chunks: bool = True) -> tuple[Trace, dict[str, int]]:
    out = io.BytesIO()
    counts = write_trace(chosen, out, chunks)
    return Trace(out.getvalue()), counts


@given(messy_runs(orderly=False))
def test_placed_parts_fill_every_request(run: Run) -> None:
    acc = account(run)
    found = placed(run, acc)
    assert (np.diff(found.edges, axis=1) >= 0).all()
    assert (found.edges[:, -1] - found.edges[:, 0] == acc.total_ns).all()
    for row in range(len(run.requests)):
        spent = dict.fromkeys(range(len(PHASES)), 0)
        for phase, start, end in found.parts(row):
            spent[phase] += end - start
        stalled = [b - a for a, b in found.stalls(row)]
        assert all(v > 0 for v in stalled)
        decode, stall = PHASES.index("decode"), PHASES.index("stall")
        # Decode holds the stalls of its time, as many as have a gap to lie in.
        assert spent[decode] + spent[stall] == acc.phases[row, decode] + acc.phases[row, stall]
        assert spent[stall] + sum(stalled) <= acc.phases[row, stall]
        for i in range(len(PHASES)):
            assert i in (decode, stall) or spent[i] == acc.phases[row, i]
        edges = found.stalls(row)
        assert all(b <= c for (_, b), (c, _) in itertools.pairwise(edges))
        assert all(found.edges[row, 8] <= a and b <= found.edges[row, 9] for a, b in edges)


@given(messy_runs(orderly=False))
def test_any_run_is_a_lawful_trace(run: Run) -> None:
    chosen = choose(run)
    trace, counts = trace_of(chosen)
    assert len(trace.requests()) == len(run.requests) == counts["requests"]
    chunks = [s for s in trace.instants if s.name != "PARTIAL"]
    assert len(chunks) == len(run.chunks) == counts["chunks"]


def service(**more: Any) -> Run:
    run = Service(slots=2, noise=0.1).closed(4, 12, zero_unix_ns=1_700_000_000_000_000_000, **more)
    end = int(run.points["end_ns"][0])
    rows = [*gauge_rows("running", [(t, 2.0) for t in range(S, end, S // 2)]),
            *gauge_rows("kv_use", [(t, 0.25) for t in range(S, end, S // 2)]),
            *gauge_rows("power_watts", [(t, 300.0) for t in range(S, end, S // 2)], "gpu", gpu="0"),
            *gauge_rows("output_tokens_total", [(t, t / S * 40) for t in range(S, end, S // 2)]),
            *gauge_rows("cpu_seconds_total", [(S, 1.0), (2 * S, 9.0)], "sampler")]  # fmt: skip
    read = Table.from_rows("readings", [{"answered_ns": r["asked_ns"], **r} for r in rows])
    steps = Table.from_rows("steps", [
        {"t_ns": S, "took_ns": 50 * MS, "prefill_tokens": 100, "decode_seqs": 0, "kv_used": 4.0, "bound_by": "compute"},
        {"t_ns": S + 50 * MS, "took_ns": 100 * MS, "prefill_tokens": 0, "decode_seqs": 2, "kv_used": 5.0, "count": 5},
    ])  # fmt: skip
    return Run(run.manifest, run.points, run.requests, run.chunks, steps, read)


def test_phases_chunks_steps_and_counters() -> None:
    run = service()
    trace, counts = trace_of(choose(run))
    acc = account(run)
    for row, id_ in enumerate(run.requests["id"].tolist()):
        spent = dict.fromkeys(PHASES, 0)
        for s in trace.phases(id_):
            spent[s.name] += s.end - s.start
        spent["decode"] -= spent["stall"]  # it lies inside
        assert spent == dict(zip(PHASES, acc.phases[row].tolist(), strict=True))
        assert trace.requests()[id_].facts["prompt_tokens"] == 100
    assert any(s.name == "queue" for s in trace.phases(5))
    assert [s.name for s in trace.instants].count("answer") == len(run.chunks)
    assert all(s.depth >= 2 for s in trace.instants)  # inside a phase of its request
    assert counts["steps"] == 2
    assert [s.name for s in trace.slices if "bound_by" in s.facts or "count" in s.facts] == ["prefill", "decode"]
    by = {path.rpartition(" / ")[2]: values for path, values in trace.counts.items()}
    assert {v for _, v in by["KV space in use"]} == {25.0}
    assert {v for _, v in by["power gpu=0"]} == {300.0}
    assert {round(v, 6) for _, v in by["output tokens"][:-1]} == {40.0}
    assert max(v for _, v in by["in flight"]) == 4
    assert not any("sampler" in path for path in trace.counts)


def test_the_rate_of_a_counter_stands_from_the_reading_that_begins_its_gap() -> None:
    run = Service().closed(1, 2)
    rows = gauge_rows("output_tokens_total", [(S, 0.0), (2 * S, 10.0), (4 * S, 70.0)])
    read = Table.from_rows("readings", [{"answered_ns": r["asked_ns"], **r} for r in rows])
    trace, _ = trace_of(choose(Run(run.manifest, run.points, run.requests, run.chunks, run.steps, read)))
    (told,) = [values for path, values in trace.counts.items() if path.endswith("output tokens")]
    assert told == [(S, 10.0), (2 * S, 30.0), (4 * S, 0.0)]


def test_lanes_hold_one_request_at_a_time_and_are_no_more_than_it_takes() -> None:
    run = service()
    trace, _ = trace_of(choose(run))
    lanes: dict[str, list[Slice]] = defaultdict(list)
    for s in trace.requests().values():
        lanes[s.track].append(s)
    assert len(lanes) == 4
    for mine in lanes.values():
        mine.sort(key=lambda s: s.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))


def test_the_time_of_day_is_a_clock_snapshot_and_absent_where_there_is_none() -> None:
    trace, _ = trace_of(choose(service()))
    clocks = {c.clock_id: c.timestamp for p in trace.packets for c in p.clock_snapshot.clocks}
    assert clocks == {6: 0, 1: 1_700_000_000_000_000_000}
    bare, _ = trace_of(choose(Service().closed(1, 2)))
    assert not any(p.HasField("clock_snapshot") for p in bare.packets)


def test_points_requests_and_chunks_can_be_chosen() -> None:
    run = join([Service().closed(1, 4), Service().closed(2, 6)])
    only, _ = trace_of(choose(run, point=1))
    assert sorted(only.requests()) == [4, 5, 6, 7, 8, 9]
    two, counts = trace_of(choose(run, ids=[5, 7]))
    assert sorted(two.requests()) == [5, 7]
    assert (
        max(v for path, of in two.counts.items() if path.endswith("in flight") for _, v in of) == 2
    )  # with the untold
    assert counts["chunks"] == 32
    bare, counts = trace_of(choose(run, limit=3), chunks=False)
    assert sorted(bare.requests()) == [0, 1, 2]
    assert counts["chunks"] == 0
    assert not bare.instants


def test_a_partial_run_says_so_and_a_failure_is_seen() -> None:
    run = make_run([{"sent_ns": 0, "end_ns": 5 * S, "outcome": "timeout", "detail": "no token"}, {"sent_ns": 0,
                    "first_ns": S, "last_ns": S, "end_ns": S, "output_tokens": 1}], stream(1, [S]), partial=True,
                   partial_reason="killed", made_by="imported")  # fmt: skip
    trace, _ = trace_of(choose(run))
    assert [s.facts["reason"] for s in trace.instants if s.name == "PARTIAL"] == ["killed"]
    assert trace.path(1).startswith("PARTIAL run (imported): killed")
    failed = trace.requests()[0]
    assert failed.name == "request 0 (timeout)"
    assert failed.facts["detail"] == "no token"
    load = next(s for s in trace.slices if s.facts.get("mode"))
    assert load.facts["partial"] is True
    assert load.facts["made_by"] == "imported"


def test_times_before_the_zero_of_a_run_keep_their_distance() -> None:
    run = make_run([{"sent_ns": -2 * S, "first_ns": -S, "last_ns": S, "end_ns": S}], stream(0, [-S, S]),
                   points=[{"start_ns": -2 * S, "end_ns": S}], zero_unix_ns=10 * S)  # fmt: skip
    trace, _ = trace_of(choose(run))
    mine = trace.requests()[0]
    assert (mine.start, mine.end) == (0, 3 * S)
    clocks = {c.clock_id: c.timestamp for p in trace.packets for c in p.clock_snapshot.clocks}
    assert clocks == {6: 0, 1: 8 * S}
