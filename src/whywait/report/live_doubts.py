"""What can already be doubted while a point runs. The doubts of a result are made afterwards, of the recorded run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from whywait.units import NS_PER_MS, NS_PER_S, ms

LATE_NS = 5 * NS_PER_MS  # as offered.py: sent later than this, a point may be invalid
SILENT_S = 10.0
COALESCED = 0.1
LEAST_SENT, LEAST_READS = 20, 200
FAILED = 0.05
GROWN, GROWN_FROM, GROWN_S = 2.0, 16, 10.0


def first_doubts(p: Any, history: Sequence[tuple[float, int]]) -> Iterator[tuple[str, str]]:
    """(key, sentence) of each; the same key every time it holds. ``history``: (s, in flight) of this point so far."""
    s, point = p.so_far, p.point
    if s.failed:
        many = "many" if p.ended >= LEAST_SENT and s.failed > FAILED * p.ended else "some"
        yield f"failed-{many}", f"{s.failed} of {p.ended} requests failed so far ({s.last_failure})"
    if p.sent >= LEAST_SENT and s.send_lag_ns is not None and s.send_lag_ns > LATE_NS and not point.max_in_flight:
        yield "late", f"the client sends late: {ms(s.send_lag_ns / NS_PER_MS)} at p99; free a core for it"
    if not point.closed and not point.max_in_flight and (behind := _due(p) - p.sent) > max(3, 0.02 * p.sent):
        yield "behind", f"the client is behind: {behind} requests are due and not sent; --processes, or a lower rate"
    if s.reads >= LEAST_READS and s.coalesced_reads > COALESCED * s.reads:
        share = s.coalesced_reads / s.reads
        why = "a proxy that buffers, or a client or server short of CPU"
        yield "coalesced", f"{share:.0%} of the reads brought several chunks at once ({why}); their times are intervals"
    if s.reads and s.user_reads > s.reads / 2:
        yield "user clock", "times are by the client's own clock: no kernel receive stamps here (whywait doctor)"
    if p.in_flight and p.elapsed_s >= SILENT_S and not s.ttft and not p.chunks:
        yield "silent", f"no token has come in {p.elapsed_s:.0f} s"
    if not point.closed and (grown := _growing(history)) is not None:
        yield "grows", f"in flight grows, {grown[0]} to {grown[1]}: the service does not keep up with this rate"


def _due(p: Any) -> int:
    """How many requests were due by now, by the plan (those that follow another's end are not counted)."""
    due = p.point.schedule.due_ns
    return int(((due >= 0) & (due <= (p.elapsed_s - 0.5) * NS_PER_S)).sum())


def _growing(history: Sequence[tuple[float, int]]) -> tuple[int, int] | None:
    """In flight at half the time and now, when it has at least doubled since and is no handful."""
    if not history or history[-1][0] < GROWN_S:
        return None
    now, half = history[-1], next(n for t, n in history if t >= history[-1][0] / 2)
    return (half, now[1]) if now[1] >= max(GROWN_FROM, GROWN * half) else None
