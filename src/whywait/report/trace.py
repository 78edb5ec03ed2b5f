"""A Run as a Perfetto trace (protobuf, TrackEvent): requests, their phases and chunks, engine steps, counters.

Opens in ui.perfetto.dev and in ``trace_processor``. Written packet by packet, so a run of a million chunks is never in
memory as a trace. Needs the extra ``perfetto``, which brings the format's own library.

Times are those of the run (ns after its zero, or after its first instant where that is earlier: the format has no
negative ones) on the trace's boot clock; a clock snapshot ties them to the time of day.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from whywait.analyze.counters import series
from whywait.analyze.phases import PHASES, STALL
from whywait.analyze.window import sweep
from whywait.core.columns import KINDS
from whywait.core.table import Array
from whywait.errors import MissingExtra
from whywait.report.export import Chosen
from whywait.units import NS_PER_MS, NS_PER_S

SEQUENCE = 1  # of packets; all of ours are one
CLEARED, NEEDS = 1, 2  # TracePacket.SequenceFlags
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type
BOOTTIME, REALTIME = 6, 1  # BuiltinClock
_DECODE = PHASES.index("decode")

#: Gauges as counter tracks: name → (title, unit, factor).
GAUGES: Mapping[str, tuple[str, str, float]] = {
    "running": ("running", "requests", 1),
    "waiting": ("waiting", "requests", 1),
    "slots_busy": ("slots busy", "slots", 1),
    "slots_prefilling": ("slots in prefill", "slots", 1),
    "kv_use": ("KV space in use", "%", 100),
    "kv_tokens_used": ("KV tokens in use", "tokens", 1),
    "kv_tokens_idle": ("KV tokens kept for reuse", "tokens", 1),
    "output_tokens_in_flight": ("tokens of requests in work", "tokens", 1),
    "retracted": ("pushed out for want of KV", "requests", 1),
    "power_watts": ("power", "W", 1),
    "busy_share": ("busy", "%", 100),
    "memory_used_bytes": ("memory in use", "B", 1),
    "rss_bytes": ("resident memory", "B", 1),
    "busiest_thread_share": ("busiest thread", "%", 100),
    "tasks_runnable": ("tasks runnable", "tasks", 1),
}
#: Counters as rates between readings: name → (title, unit).
RATES: Mapping[str, tuple[str, str]] = {
    "output_tokens_total": ("output tokens", "tokens/s"),
    "prompt_tokens_computed_total": ("prompt tokens computed", "tokens/s"),
    "decode_steps_total": ("engine steps", "steps/s"),
    "preemptions_total": ("preemptions", "requests/s"),
    "cpu_seconds_total": ("cores in use", "cores"),
    "cgroup_throttled_seconds_total": ("throttled", "s/s"),
    "cpu_busy_seconds_total": ("cores busy", "cores"),
}
#: Columns of a request that are told with it, where known.
TOLD = ("class", "session_id", "turn", "replica", "attempt", "trace_id", "asked_prompt_tokens", "asked_output_tokens",
        "prompt_tokens", "output_tokens", "reasoning_tokens", "cached_tokens", "outcome", "fault", "detail", "status",
        "finish_reason", "engine_queue_ms", "engine_prefill_ms", "engine_decode_ms", "draft_tokens",
        "accepted_tokens")  # fmt: skip


class Writer:
    """Packets into a file, with the names interned that come again and again."""

    def __init__(self, out: IO[bytes], zero_ns: int = 0) -> None:
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
            from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
        except ImportError:
            raise MissingExtra("a Perfetto trace", "perfetto") from None
        self._pb: Any = pb
        self._out = StreamingTraceProtoBuilder(out)
        self._names: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._tracks = 0
        self._zero_ns = zero_ns  # time of the run that is 0 in the trace
        self.packets = 0

    def start(self, unix_ns: int | None) -> None:
        """The beginning; ``unix_ns``: the time of day of the run's zero, None where it has none."""
        packet = self._pb.TracePacket(trusted_packet_sequence_id=SEQUENCE, sequence_flags=CLEARED)
        if unix_ns is not None:
            for clock, at in ((BOOTTIME, 0), (REALTIME, unix_ns + self._zero_ns)):
                packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=at)
            packet.clock_snapshot.primary_trace_clock = BOOTTIME
        packet.trace_packet_defaults.timestamp_clock_id = BOOTTIME
        self._write(packet)

    def track(self, name: str, parent: int = 0, rank: int = 0, unit: str | None = None, about: str = "") -> int:
        """A new track under ``parent`` (0: none) in the order of ``rank``; with ``unit`` a counter. Returns its id."""
        self._tracks += 1
        packet = self._pb.TracePacket(trusted_packet_sequence_id=SEQUENCE)
        track = packet.track_descriptor
        track.uuid, track.name, track.sibling_order_rank, track.child_ordering = self._tracks, name, rank, 3
        if about:
            track.description = about
        if parent:
            track.parent_uuid = parent
        if unit is not None:
            track.counter.unit_name = unit
        self._write(packet)
        return self._tracks

    def begin(self, track: int, t_ns: int, name: str, facts: Mapping[str, Any] | None = None) -> None:
        self._event(self._packet(t_ns, BEGIN, track), name, facts or {})

    def end(self, track: int, t_ns: int) -> None:
        self._write(self._packet(t_ns, END, track))

    def instant(self, track: int, t_ns: int, name: str, facts: Mapping[str, Any] | None = None) -> None:
        self._event(self._packet(t_ns, INSTANT, track), name, facts or {})

    def count(self, track: int, t_ns: int, value: float) -> None:
        packet = self._packet(t_ns, COUNTER, track)
        packet.track_event.double_counter_value = value
        self._write(packet)

    def _event(self, packet: Any, name: str, facts: Mapping[str, Any]) -> None:
        event = packet.track_event
        if name.startswith("request "):  # comes once
            event.name = name
        else:
            event.name_iid = self._interned(packet, self._names, "event_names", name)
        for key, value in facts.items():
            note = event.debug_annotations.add()
            note.name_iid = self._interned(packet, self._keys, "debug_annotation_names", key)
            if isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int):
                note.int_value = value
            elif isinstance(value, float):
                note.double_value = value
            else:
                note.string_value = str(value)
        self._write(packet)

    def _packet(self, t_ns: int, kind: int, track: int) -> Any:
        packet = self._pb.TracePacket(
            timestamp=max(t_ns - self._zero_ns, 0), trusted_packet_sequence_id=SEQUENCE, sequence_flags=NEEDS
        )
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _interned(self, packet: Any, known: dict[str, int], field: str, name: str) -> int:
        if name not in known:
            known[name] = len(known) + 1
            getattr(packet.interned_data, field).add(iid=known[name], name=name)
        return known[name]

    def _write(self, packet: Any) -> None:
        self._out.write_packet(packet)
        self.packets += 1


def write_trace(chosen: Chosen, out: IO[bytes], chunks: bool = True) -> dict[str, int]:
    """Write the trace of ``chosen``; without ``chunks`` only their requests. Returns how much of what is in it.

    Raises:
        MissingExtra: the extra ``perfetto`` is not installed.
    """
    first = int(chosen.placed.edges[chosen.rows, 0].min(initial=0))
    w = Writer(out, min(first, chosen.span[0], 0))
    w.start(chosen.zero_unix_ns if chosen.has_clock else None)
    root = _points(w, chosen)
    told = _requests(w, chosen, root, _Chunks(chosen) if chunks else None)
    steps = _steps(w, chosen, root)
    _counters(w, chosen, root)
    return {"requests": len(chosen.due), "chunks": told, "steps": steps, "packets": w.packets}


def _points(w: Writer, chosen: Chosen) -> int:
    """The load points, their steady windows, where the run comes from. Returns the track above all others."""
    track = w.track(chosen.title, about="load points of the run; the steady window is the part that is measured")
    for number in chosen.points:
        p = chosen.point_row(number)
        facts = {
            "point": number,
            "mode": p["mode"],
            "target": p["target"],
            "planned": p["planned"],
            **chosen.labels_of(number),
        }
        w.begin(track, p["start_ns"], chosen.load(number), {k: v for k, v in facts.items() if v is not None})
        if p["steady_start_ns"] is not None and p["steady_end_ns"] is not None:
            w.begin(track, max(p["steady_start_ns"], p["start_ns"]), "steady window")
            w.end(track, min(p["steady_end_ns"], p["end_ns"]))
        w.end(track, p["end_ns"])
    m = chosen.run.manifest
    if m.partial:
        w.instant(track, chosen.span[1], "PARTIAL", {"reason": m.partial_reason or "cut off"})
    return track


def _requests(w: Writer, chosen: Chosen, root: int, chunks: _Chunks | None) -> int:
    """A group of tracks per point, a track per place in flight; returns the number of chunks told."""
    told, edges = 0, chosen.placed.edges
    for number in chosen.points:
        rows = chosen.of_point(number)
        rows = rows[np.argsort(edges[rows, 0], kind="stable")]
        if not len(rows):
            continue
        about, made_up = "a track per place in flight; a slice per request, its phases and chunks inside", ""
        if (starts := chosen.starts(number)) is not None:
            about, made_up = f"{about}; sends are {starts}", f", sends {starts.partition(':')[0]}"
        group = w.track(f"requests, {chosen.load(number)}{made_up}", root, 10 + number, about=about)
        if chosen.overlaps_known(number):
            _in_flight(w, chosen, number, group)
        lanes: dict[int, int] = {}
        for row, lane in zip(rows.tolist(), _lanes(edges[rows, 0], edges[rows, -1]), strict=True):
            if lane not in lanes:
                lanes[lane] = w.track(f"place {lane + 1}", group, lane + 1)
            told += _request(w, chosen, row, lanes[lane], chunks)
    return told


def _in_flight(w: Writer, chosen: Chosen, number: int, group: int) -> None:
    """How many requests of a point, told or not, were on their way at a time."""
    flight = w.track("in flight", group, 0, "requests")
    everyone = chosen.run.requests["point"] == number
    times, counts = sweep(*(chosen.run.requests[k][everyone] for k in ("sent_ns", "end_ns")))
    for t, n in zip(times.tolist(), counts.tolist(), strict=True):
        w.count(flight, t, n)


def _lanes(start: Array, end: Array) -> Iterator[int]:
    """The lowest free lane for each of these intervals, in the order of their starts."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for a, z in zip(start.tolist(), end.tolist(), strict=True):
        while busy and busy[0][0] <= a:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (max(z, a + 1), lane))
        yield lane


def _request(w: Writer, chosen: Chosen, row: int, track: int, chunks: _Chunks | None) -> int:
    """A request, its phases inside it, its chunks and stalls inside those; returns the number of chunks."""
    acc, edges = chosen.account, chosen.placed.edges
    facts = _facts(chosen, row)
    how = acc.how[int(acc.point[row])]
    causes = _causes(chosen, row)
    mine = chunks.of(facts["id"]) if chunks is not None else []
    name = f"request {facts['id']}" + ("" if facts["outcome"] == "ok" else f" ({facts['outcome']})")
    w.begin(track, int(edges[row, 0]), name, facts)
    at, n = 0, len(mine)

    def until(t_ns: int) -> None:
        """The chunks that came before this time, at the place they have among the slices."""
        nonlocal at
        while at < n and mine[at][0] < t_ns:
            at = _chunk(w, track, mine, at)

    for phase, start, end in chosen.placed.parts(row):
        until(start)
        w.begin(track, start, PHASES[phase], {"how": how[PHASES[phase]], **causes.get(PHASES[phase], {})})
        decoding = phase == _DECODE and start == int(edges[row, 8])
        for a, b in chosen.placed.stalls(row) if decoding else ():
            until(a + 1)
            w.begin(track, a, PHASES[STALL], causes.get("stall"))
            w.end(track, b)
        until(end + decoding)  # the last token is the end of decode, and belongs to it
        w.end(track, end)
    until(1 << 62)
    w.end(track, int(edges[row, -1]))
    return n


def _chunk(w: Writer, track: int, mine: list[tuple[int, int, float, float]], at: int) -> int:
    t, kind, low, tokens = mine[at]
    facts: dict[str, Any] = {} if math.isnan(tokens) else {"tokens": int(tokens)}
    if not math.isnan(low):
        facts["earlier by at most, ms"] = (t - low) / NS_PER_MS
    w.instant(track, t, KINDS[kind], facts)
    return at + 1


class _Chunks:
    """The chunks of each chosen request in order of time, without a copy per request."""

    def __init__(self, chosen: Chosen) -> None:
        table = chosen.run.chunks
        order = np.lexsort((table["t_ns"], table["id"]))
        if not chosen.whole:
            order = order[np.isin(table["id"][order], chosen.run.requests["id"][chosen.rows])]
        self._id = table["id"][order]
        self._cols = [table[c][order] for c in ("t_ns", "kind", "t_low_ns", "tokens")]

    def of(self, id_: int) -> list[tuple[int, int, float, float]]:
        a, b = np.searchsorted(self._id, [id_, id_ + 1])
        return list(zip(*(c[a:b].tolist() for c in self._cols), strict=True))


def _facts(chosen: Chosen, row: int) -> dict[str, Any]:
    """What is told with a request: its columns and its latencies, as far as they are known."""
    one = chosen.run.requests.where(np.array([row])).rows()[0]
    lat = chosen.latency
    times = {k: float(getattr(lat, k)[row]) for k in ("ttft_ms", "tpot_ms", "e2e_ms")}
    facts = {"id": one["id"], **{k: one[k] for k in TOLD}, **{k: v for k, v in times.items() if np.isfinite(v)}}
    return {k: v for k, v in facts.items() if v is not None}


def _causes(chosen: Chosen, row: int) -> dict[str, dict[str, float]]:
    """Phase → cause → milliseconds of a request, as facts of the phase's slice."""
    out: dict[str, dict[str, float]] = {}
    for (phase, cause), ns in chosen.account.cause_ns.items():
        if ns[row] and cause != "unknown":
            out.setdefault(phase, {})[f"{cause}, ms"] = float(ns[row]) / NS_PER_MS
    return out


def _steps(w: Writer, chosen: Chosen, root: int) -> int:
    """Engine iterations, simulated or traced: a track per engine."""
    steps, (start, end) = chosen.run.steps, chosen.span
    inside = steps.where((steps["t_ns"] + steps["took_ns"] >= start) & (steps["t_ns"] <= end))
    if not len(inside):
        return 0
    group = w.track(
        "engine steps", root, 1_000_000, about="iterations of the engine; a row may stand for several in a row"
    )
    replica = np.nan_to_num(inside["replica"], nan=-1)
    for n, number in enumerate(np.unique(replica).tolist()):
        track = w.track("engine" if number < 0 else f"engine {number:.0f}", group, n)
        kv = w.track(f"KV blocks in use{'' if number < 0 else f', engine {number:.0f}'}", group, 100 + n, "blocks")
        rows = inside.where(np.flatnonzero(replica == number))
        last = 0
        for s in rows.where(np.argsort(rows["t_ns"], kind="stable")).rows():
            began = max(s["t_ns"], last)  # never two at once
            last = max(s["t_ns"] + s["took_ns"], began)
            kinds = [k for k, v in (("prefill", s["prefill_tokens"]), ("decode", s["decode_seqs"])) if v]
            facts = {k: v for k, v in s.items() if v is not None and k not in ("t_ns", "took_ns")}
            w.begin(track, began, " + ".join(kinds) or "step", facts)
            w.end(track, last)
            if s["kv_used"] is not None:
                w.count(kv, began, s["kv_used"])
    return len(inside)


def _counters(w: Writer, chosen: Chosen, root: int) -> None:
    """What was read beside the load, a track per source, name and labels; nothing is drawn where nothing was read."""
    groups: dict[str, int] = {}
    drawn = [*GAUGES.items(), *((k, (*v, 0.0)) for k, v in RATES.items())]
    for rank, (name, (title, unit, factor)) in enumerate(drawn):
        for s in series(chosen.run.readings, name):
            t, values = _line(s.t_ns, s.values, factor)
            keep = _near(t, chosen)
            if not len(keep) or s.source.startswith("sampler"):  # what reading costs us is no affair of the service
                continue
            if s.source not in groups:
                groups[s.source] = w.track(s.source, root, 1_000_001 + len(groups), about="readings of this source")
            said = " ".join(f"{k}={v}" for k, v in sorted(s.labels.items()))
            track = w.track(f"{title} {said}".strip(), groups[s.source], rank, unit)
            for at, value in zip(t[keep].tolist(), values[keep].tolist(), strict=True):
                w.count(track, round(at), value)


def _line(t: Array, values: Array, factor: float) -> tuple[Array, Array]:
    """A gauge × ``factor``; a counter (factor 0) as its rate per second, told from the reading that begins each gap."""
    if factor:
        return t, values * factor
    grown, took = np.diff(values), np.diff(t) / NS_PER_S
    ok = (grown >= 0) & (took > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(ok, grown / took, 0.0)
    return np.append(t[:-1][ok], t[-1:]), np.append(rate[ok], 0.0)


def _near(t: Array, chosen: Chosen) -> Array:
    """Which readings belong to the chosen points (all of them where the whole run is told)."""
    if len(chosen.points) == len(chosen.run.points):
        return np.arange(len(t))
    start, end = chosen.span
    return np.flatnonzero((t >= start) & (t <= end))
