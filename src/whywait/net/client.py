"""Streamed requests over non-blocking sockets, stamped by the kernel when their bytes arrive.

One event loop, no threads. The clock of every chunk is the kernel's receive stamp, so our own lateness does not move
it; several content events in one read make intervals instead of false zeros. DESIGN 4 gives the measurements.
"""

from __future__ import annotations

import errno
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.core.recorder import chunk_meta
from whywait.net import stamps
from whywait.net.clock import Clock
from whywait.net.conn import READ_SIZE, Conn, ProxyError
from whywait.net.dialect import ROLE
from whywait.net.endpoint import Endpoint
from whywait.net.outcome import facts_of
from whywait.net.timers import Timers
from whywait.net.wire import LARGE, MAX_HELD, Response, WireError, request_bytes, traceparent
from whywait.units import NS_PER_MS

BATCH_FROM, BATCH_NS, BATCH_MAX_NS = 16, 24_000, 5_000_000
BATCH_SHARE = 500  # of a request's time: one part in so many, so that a closed loop stays as busy as asked
DONE_GRACE_NS = 50 * NS_PER_MS
LATE_NS = NS_PER_MS // 2
KERNEL, USER = 0, 1


class Call(NamedTuple):
    """One request to send: the schedule's row, its id, when it was due, its JSON body."""

    row: int
    id: int
    due_ns: int
    body: bytes
    stream: bool = True
    timeout_ns: int = 300_000 * NS_PER_MS
    tap: Callable[[dict[str, Any]], None] | None = None


class Sink(Protocol):
    """Where events go; :class:`whywait.core.recorder.Recorder` is the usual one."""

    def event(self, e: Sent | Accepted | Finished | Failed) -> None: ...

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None: ...


class Flight:
    """A request on its way. Times are ns after zero, −1 until known."""

    __slots__ = (
        "accepted", "answer", "attempt", "call", "chunks", "connect", "deadline", "done_ns", "first", "first_tokens",
        "last", "prev", "response", "retrans", "sent", "tls",
    )  # fmt: skip

    def __init__(self, call: Call, now: int, endpoint: Endpoint) -> None:
        self.call = call
        self.sent = now
        self.deadline = now + call.timeout_ns
        self.attempt = 1
        self.connect = 0
        self.tls: int | None = None
        self.retrans: int | None = None
        self.first_tokens: int | None = None
        self.chunks = 0
        self.response = Response(call.stream, call.tap, endpoint.dialect, endpoint.reach.lenient_eof)
        self.accepted = self.first = self.answer = self.last = self.done_ns = -1
        self.prev = now


class Client:
    """Sends calls and stamps what comes back. ``poll`` drives everything; finished calls are returned from it."""

    def __init__(self, endpoint: Endpoint, recorder: Sink, clock: Clock) -> None:
        self.endpoint, self.recorder, self.clock = endpoint, recorder, clock
        self.in_flight = 0
        self.reads = self.coalesced_reads = self.coalesced_late = self.chunks = self.coalesced_chunks = 0
        self.user_stamps = self.succeeded = self.failed = self.failed_in_a_row = self.timeouts = self.unasked = 0
        self.last_failure = ""
        self.lag = stamps.LagHistogram()  # kernel stamp → our read
        self.send_lag = stamps.LagHistogram()  # due → sent
        self._poller = stamps.Poller()
        self._conns: dict[int, Conn] = {}
        self._idle: list[Conn] = []
        self._timers = Timers()
        self._finished: list[tuple[int, int]] = []
        self._view = memoryview(bytearray(READ_SIZE))
        self._tls = endpoint.tls()
        self._target, self._headers = endpoint.target, endpoint.headers()
        self._trace = "" if any(h.lower() == "traceparent" for h in self._headers) else endpoint.trace_prefix
        self._woke = 0
        self._typical = 1_000 * NS_PER_MS  # time of a request, ns, smoothed; a guess until some have ended

    def warm(self, n: int) -> None:
        """Open up to ``n`` connections ahead, so that a closed loop does not start with a connection storm."""
        for _ in range(n - len(self._conns)):
            self._open(self.clock.now())
        busy, limit = ("connecting", "tunnel", "handshake"), self.clock.now() + 2_000 * NS_PER_MS
        while any(c.state in busy for c in self._conns.values()) and self.clock.now() < limit:
            self.poll(NS_PER_MS * 20)

    def send(self, call: Call) -> None:
        """Send now. Lateness against ``due_ns`` is recorded, never hidden."""
        now = self.clock.now()
        flight = Flight(call, now, self.endpoint)
        self.in_flight += 1
        self.send_lag.add(now - call.due_ns)
        self.recorder.event(Sent(call.id, now))
        self._assign(self._take_idle() or self._open(now), flight)

    def poll(self, timeout_ns: int) -> list[tuple[int, int]]:
        """Wait at most ``timeout_ns`` for bytes; handle all there are. Returns (row, end_ns) of calls that ended."""
        clock, first = self.clock, self._timers.next_ns()
        now = clock.now()
        if first is not None:
            timeout_ns = min(timeout_ns, first - now)
        # How long bytes may have lain there because we were busy with others (not because nothing came).
        behind = now - self._woke if self._woke else 0
        # Bytes are stamped whether we look or not, so with many streams we look at several at once: that halves the
        # CPU. Not where it would make one stream's chunks coalesce.
        batch = min(BATCH_NS * self.in_flight, BATCH_MAX_NS, self._typical // BATCH_SHARE)
        if self.in_flight >= BATCH_FROM and behind < batch < timeout_ns and self.coalesced_reads * 50 <= self.reads:
            time.sleep((batch - behind) / 1e9)
        ready = self._poller.wait(max(0, timeout_ns))
        self._woke = woke = clock.now()
        clock.resync(woke)
        due = first is not None and first <= woke  # if we stood still, what came meanwhile is not late
        for fd in (*ready, *self._poller.wait(0)) if due else ready:
            conn = self._conns.get(fd)
            if conn is not None:
                self._ready(conn, behind, woke)
        if due:
            self._expire()
        out, self._finished = self._finished, []
        return out

    def cancel_all(self, outcome: str, detail: str) -> None:
        """Give up everything in flight (end of a run, Ctrl-C); each is recorded with what it had so far."""
        for conn in list(self._conns.values()):
            if conn.flight is not None:
                self._fail(conn, outcome, "none", detail)

    def flights(self) -> list[Flight]:
        return [c.flight for c in self._conns.values() if c.flight is not None]

    def close(self) -> None:
        self.cancel_all("cancelled", "the client closed")
        for conn in list(self._conns.values()):
            self._drop(conn)
        self._poller.close()

    def facts(self) -> dict[str, Any]:
        """What the client knows of its own error, for the manifest. Times in ms."""

        def q(h: stamps.LagHistogram) -> dict[str, float | None]:
            values = {"p50": h.quantile(0.5), "p99": h.quantile(0.99)}
            return {k: None if v is None else v / NS_PER_MS for k, v in values.items()}

        return {
            "reads": self.reads, "chunks": self.chunks, "coalesced_chunks": self.coalesced_chunks,
            "coalesced_reads": self.coalesced_reads, "coalesced_reads_while_late": self.coalesced_late,
            "unasked": self.unasked, "user_clock_reads": self.user_stamps, "read_lag_ms": q(self.lag),
            "send_lag_ms": q(self.send_lag),
        }  # fmt: skip

    # connections

    def _take_idle(self) -> Conn | None:
        while self._idle:
            conn = self._idle.pop()
            if conn.state == "idle":
                if (waits := conn.waiting()) is None:
                    return conn
                self.unasked += bool(waits)  # it would be taken for the answer to what is sent now
                self._drop(conn)
        return None

    def _open(self, now: int) -> Conn:
        conn = Conn(self.endpoint, self._tls, self._poller, now)
        self._conns[conn.sock.fileno()] = conn
        return conn

    def _assign(self, conn: Conn, flight: Flight) -> None:
        conn.flight = flight
        self._timers.at(flight.deadline, conn, flight)
        if conn.state == "idle":
            flight.retrans = stamps.tcp_info(conn.sock)[1]
            self._start(conn, flight)

    def _start(self, conn: Conn, flight: Flight) -> None:
        conn.state = "busy"
        try:
            headers = self._headers
            if self._trace:
                headers = {**headers, "traceparent": traceparent(self._trace, flight.call.id, flight.attempt)}
            conn.send(request_bytes(self._target, self.endpoint.netloc, flight.call.body, headers))
        except OSError as exc:
            self._lost(conn, exc)

    def _ready(self, conn: Conn, behind: int, woke: int) -> None:
        try:
            if conn.state in ("connecting", "broken") or conn.out:
                conn.writable()
                data: memoryview | bytes = b""
                n, kernel = -1, 0
            else:
                data, n, kernel = conn.receive(self._view)
        except OSError as exc:  # ssl.SSLError is one
            self._lost(conn, exc)
            return
        flight = conn.flight
        if conn.state == "handshake" and conn.tls_from < 0:
            conn.tls_from = self.clock.now()
        elif conn.state == "idle":
            if flight is not None:
                now = self.clock.now()
                flight.connect = now - max(flight.sent, conn.opened)
                flight.tls = now - max(flight.sent, conn.tls_from) if conn.tls_from >= 0 else None
                flight.retrans = 0
                self._start(conn, flight)
            elif conn.fresh and n != 0:
                conn.fresh = False
                self._idle.append(conn)
            elif n == 0 or data or conn.ended:
                self.unasked += bool(data)
                self._drop(conn)  # closed while idle, or it speaks unasked (TLS may, among itself)
            return
        if n > 0 and flight is not None:
            if data:
                self._read(conn, flight, (data, n, kernel), behind, woke)
            if conn.ended and conn.state != "closed":
                self._eof(conn)
        elif n == 0:
            self._eof(conn)

    def _drop(self, conn: Conn) -> None:
        if conn.state != "closed":
            del self._conns[conn.sock.fileno()]
            conn.close()

    # bytes in

    def _read(
        self, conn: Conn, flight: Flight, got: tuple[memoryview | bytes, int, int], behind: int, woke: int
    ) -> None:
        data, n, kernel = got
        now = self.clock.now()
        stamp = self.clock.from_kernel(kernel, now) if kernel else None
        if stamp is None:
            t, source = now, USER
            self.user_stamps += 1
        else:
            t, source = stamp, KERNEL
            self.lag.add(now - t)
        self.reads += 1
        response = flight.response
        try:
            response.feed(data)
            if response.held > LARGE and sum(f.response.held for f in self.flights()) > MAX_HELD:
                raise WireError(f"unfinished events and bodies of more than {MAX_HELD} bytes")
        except WireError as exc:
            self._fail(conn, "protocol", "service", str(exc))
            return
        if flight.accepted < 0 and response.headers_done:
            flight.accepted = max(t, flight.sent)
            self.recorder.event(Accepted(flight.call.id, flight.accepted, response.status))
        if response.events:
            self._stamp(flight, t, source, n == READ_SIZE, behind + now - woke > LATE_NS)
        flight.prev = t
        if response.complete:
            self._finish(conn, flight, t)
        elif response.answer.over and flight.done_ns < 0:
            flight.done_ns = t
            self._timers.at(now + DONE_GRACE_NS, conn, flight)

    def _stamp(self, flight: Flight, t: int, source: int, filled: bool, late: bool) -> None:
        """Give the events of one read their times."""
        events = flight.response.events
        t = max(t, flight.accepted, flight.last)
        left = 1 if len(events) == 1 else sum(1 for e in events if e[0] != ROLE)
        coalesced = left > 1 or filled
        low = -1
        if coalesced:
            self.coalesced_reads += 1
            self.coalesced_chunks += left
            self.coalesced_late += late
            low = flight.prev
        add, id_ = self.recorder.chunk, flight.call.id
        for kind, tokens in events:
            if kind == ROLE:
                if flight.first < 0:
                    add(id_, t, low, chunk_meta(kind, tokens, source))
                continue
            left -= 1
            if flight.first < 0:
                flight.first, flight.first_tokens = t, tokens
            if flight.answer < 0 and kind > 1:
                flight.answer = t
            flight.chunks += 1
            self.chunks += 1
            # The stamp is that of the last packet, so the last content event of a read is exact.
            add(id_, t, low if left or filled else -1, chunk_meta(kind, tokens, source))
            flight.last = t
        events.clear()

    def _eof(self, conn: Conn) -> None:
        flight = conn.flight
        if flight is None:
            self._drop(conn)
        elif flight.response.eof() or flight.accepted >= 0:
            self._finish(conn, flight, self.clock.now(), closed=True)
        else:
            self._lost(conn, OSError(errno.ECONNRESET, "closed before an answer"))

    # endings

    def _finish(self, conn: Conn, flight: Flight, t: int, closed: bool = False) -> None:
        facts = {**self._times(conn, flight), **facts_of(flight.response, flight.chunks)}
        kind = Finished if facts["outcome"] == "ok" else Failed
        self._close(flight, kind(flight.call.id, max(t, flight.sent, flight.last), facts))
        conn.flight = None
        if closed or not flight.response.complete or not flight.response.keep_alive:
            self._drop(conn)
        else:
            conn.fresh, conn.state = False, "idle"
            self._idle.append(conn)

    def _close(self, flight: Flight, event: Finished | Failed) -> None:
        self.recorder.event(event)
        self.in_flight -= 1
        self.unasked += flight.response.unasked
        flight.response.close()
        self._timers.ended(flight)
        if event.facts["outcome"] == "ok":
            self.succeeded += 1
            self.failed_in_a_row = 0
        else:
            self.failed += 1
            self.failed_in_a_row += 1
            self.timeouts += event.facts["outcome"] == "timeout"
            self.last_failure = f"{event.facts['outcome']}: {event.facts['detail']}"
        self._typical += (event.t_ns - flight.sent - self._typical) // 16
        self._finished.append((flight.call.row, event.t_ns))

    def _times(self, conn: Conn, flight: Flight) -> dict[str, Any]:
        rtt, retrans = stamps.tcp_info(conn.sock) if conn.state != "closed" else (None, None)
        first, answer, last = (None if v < 0 else v for v in (flight.first, flight.answer, flight.last))
        return {
            "due_ns": flight.call.due_ns, "attempt": flight.attempt, "rtt_ns": rtt,
            "connect_ns": flight.connect, "tls_ns": flight.tls,
            "retransmits": None if retrans is None or flight.retrans is None else retrans - flight.retrans,
            "first_ns": first, "first_answer_ns": answer, "last_ns": last,
            "content_chunks": flight.chunks if flight.call.stream else None,
            "first_chunk_tokens": flight.first_tokens,
        }  # fmt: skip

    def _fail(self, conn: Conn, outcome: str, fault: str, detail: str) -> None:
        flight = conn.flight
        if flight is not None:
            facts = {**facts_of(flight.response, flight.chunks), **self._times(conn, flight)}
            facts.update(outcome=outcome, fault=fault, detail=detail)
            self._close(flight, Failed(flight.call.id, max(self.clock.now(), flight.sent, flight.prev), facts))
            conn.flight = None
        self._drop(conn)

    def _lost(self, conn: Conn, exc: OSError) -> None:
        """The connection broke. An idle one that the server had closed is not its fault: sent again, once."""
        flight = conn.flight
        if flight is None:
            self._drop(conn)
        elif isinstance(exc, ProxyError):
            self._fail(conn, "refused", "network", str(exc.strerror))
        elif isinstance(exc, ssl.SSLError):
            self._fail(conn, "protocol", "service", f"TLS: {exc.reason or type(exc).__name__}")
        elif not conn.fresh and not flight.response.started and flight.attempt == 1:
            conn.flight = None
            self._drop(conn)
            flight.attempt = 2
            self._assign(self._open(self.clock.now()), flight)
        elif exc.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT):
            fault = "service" if exc.errno == errno.ECONNREFUSED else "network"
            self._fail(conn, "refused", fault, errno.errorcode[exc.errno])
        else:
            self._fail(conn, "reset", "service", errno.errorcode.get(exc.errno or 0, "connection lost"))

    def _expire(self) -> None:
        now = self.clock.now()
        for conn, flight in self._timers.due(now):
            if flight.done_ns >= 0:
                self._finish(conn, flight, flight.done_ns, closed=True)  # all was said; the connection was held open
            elif now >= flight.deadline and flight.response.answer.finished:
                self._finish(conn, flight, flight.prev, closed=True)  # a finish reason came, and then nothing
            elif now >= flight.deadline:
                self._fail(conn, "timeout", "service", f"no end within {flight.call.timeout_ns / 1e9:g} s")
