"""What may be told of a load point while it runs: counts, latencies so far, and what the client knows against itself.

Rough by purpose: latencies are counted in buckets 12 % wide, those of requests that are still in flight among them. The
figures of a result come from the recorded run, never from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.net.client import Client, Sink
from whywait.net.stamps import LagHistogram

if TYPE_CHECKING:
    from whywait.load.driver import Point

MOST_FLIGHTS = 256
Sparse = Mapping[Any, int]


@dataclass
class SoFar:
    """Latencies by bucket (``LagHistogram``): how many requests are in each. Of several processes they add up."""

    ttft: dict[int, int] = field(default_factory=dict)
    tpot: dict[int, int] = field(default_factory=dict)
    tokens: float = 0.0  # of ended requests whose count the service told
    chunks: int = 0  # of those same requests
    failed: int = 0
    last_failure: str = ""
    reads: int = 0
    coalesced_reads: int = 0
    user_reads: int = 0  # without a kernel stamp
    send_lag_ns: float | None = None  # p99 of sent − due

    def add(self, other: SoFar) -> None:
        """Take another process's into this one; the lag is the worst of them."""
        for mine, theirs in ((self.ttft, other.ttft), (self.tpot, other.tpot)):
            for k, n in theirs.items():
                mine[int(k)] = mine.get(int(k), 0) + n
        for name in ("tokens", "chunks", "failed", "reads", "coalesced_reads", "user_reads"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_failure = self.last_failure or other.last_failure
        self.send_lag_ns = max((x for x in (self.send_lag_ns, other.send_lag_ns) if x is not None), default=None)


@dataclass
class Progress:
    """What a live view may show while a point runs; the driver updates it in place."""

    point: Point
    sent: int = 0
    ended: int = 0
    in_flight: int = 0
    chunks: int = 0
    elapsed_s: float = 0.0
    so_far: SoFar = field(default_factory=SoFar)

    @property
    def planned(self) -> int:
        """Requests of the point; an upper bound where its time may end before (``Point.elastic``)."""
        return len(self.point.schedule)

    def ttft_ns(self, q: float) -> float | None:
        return quantile(self.so_far.ttft, q)

    def tpot_ns(self, q: float) -> float | None:
        return quantile(self.so_far.tpot, q)


def quantile(buckets: Sparse, q: float) -> float | None:
    """Quantile ``q`` of counts by bucket, ns; None of none."""
    h = LagHistogram()
    for k, n in buckets.items():
        h.counts[int(k)] += n
        h.n += n
    return h.quantile(q)


class Watched:
    """A sink before the recorder: notes latencies of what ends, and which requests failed (what comes after those is
    not sent). The lean path of chunks goes past it."""

    def __init__(self, recorder: Sink, closed: bool) -> None:
        self._recorder, self._closed = recorder, closed
        self.failed = set[int]()
        self.chunk = recorder.chunk
        self._ttft, self._tpot = LagHistogram(), LagHistogram()
        self._sent: dict[int, int] = {}
        self._tokens, self._chunks = 0.0, 0

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        if isinstance(e, Sent):
            self._sent[e.id] = e.t_ns
        elif isinstance(e, Failed):
            self.failed.add(e.id)
            self._sent.pop(e.id, None)
        elif isinstance(e, Finished):
            self._ended(e)
        self._recorder.event(e)

    def _ended(self, e: Finished) -> None:
        sent, f = self._sent.pop(e.id, None), e.facts
        first, last, n, chunks = f.get("first_ns"), f.get("last_ns"), f.get("output_tokens"), f.get("content_chunks")
        origin = sent if self._closed else f.get("due_ns")
        if n and chunks:
            self._tokens += n
            self._chunks += chunks
        if first is None or origin is None:
            return
        self._ttft.add(first - origin)
        k = f.get("first_chunk_tokens") or (1 if n == chunks else None)  # as latency.py infers it; else unknown
        if n and k and last is not None and n > k and last > first:
            self._tpot.add((last - first) // (n - k))

    def so_far(self, client: Client) -> SoFar:
        """All ended requests, and the first tokens of those in flight (of many only while none has ended: it takes a
        microsecond each, between two turns of the loop)."""
        ttft = _sparse(self._ttft)
        early, flights = LagHistogram(), client.flights()
        for f in flights if len(flights) <= MOST_FLIGHTS or not ttft else ():
            if f.first >= 0:
                early.add(f.first - (f.sent if self._closed else f.call.due_ns))
        for k, count in _sparse(early).items():
            ttft[k] = ttft.get(k, 0) + count
        out = SoFar(ttft, _sparse(self._tpot), self._tokens, self._chunks, len(self.failed), client.last_failure)
        out.reads, out.coalesced_reads, out.user_reads = client.reads, client.coalesced_reads, client.user_stamps
        out.send_lag_ns = client.send_lag.quantile(0.99)
        return out


def _sparse(h: LagHistogram) -> dict[int, int]:
    return {i: n for i, n in enumerate(h.counts) if n}


def together(said: Iterable[Mapping[str, Any]]) -> SoFar:
    """Those of several processes, as they came over a pipe (keys of JSON are text)."""
    out = SoFar()
    for one in said:
        out.add(SoFar(**one))
    return out


def clients_together(clients: list[dict[str, Any]]) -> dict[str, Any]:
    """What the shards' clients know of their own error, together: counts add up; of lags, and of the share of a core,
    the worst shard's count, since a mean would hide the one that was late."""
    if not clients:
        return {}
    out: dict[str, Any] = {}
    for name, first in clients[0].items():
        if name in ("shard", "where"):
            continue
        values = [c[name] for c in clients if name in c]
        if isinstance(first, dict):
            keys = {k: None for v in values for k in v}
            out[name] = {k: max((v[k] for v in values if v.get(k) is not None), default=None) for k in keys}
        elif isinstance(first, (int, float)) and not isinstance(first, bool):
            out[name] = sum(values)
        else:
            out[name] = first
    return {**out, "processes": len(clients), "shards": clients}
