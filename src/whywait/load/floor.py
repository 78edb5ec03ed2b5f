"""The client's own error, measured against a service whose truth is known: the stub stamps each chunk it sends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.load.stub import StubProcess
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.dialect import chat_body
from whywait.net.endpoint import parse_url
from whywait.units import NS_PER_MS, NS_PER_S


class _Probe:
    """Takes the place of a recorder: keeps (our stamp, interval low) of each content chunk, in order of arrival."""

    def __init__(self) -> None:
        self.t: list[int] = []
        self.low: list[int] = []
        self.truth: list[int] = []
        self.requests: dict[int, dict[str, Any]] = {}

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        row = self.requests.setdefault(e.id, {})
        if isinstance(e, Sent):
            row["sent"] = e.t_ns
        elif isinstance(e, (Finished, Failed)):
            row.update(e.facts)

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:  # noqa: ARG002
        if meta & 0b1110:  # not a role chunk
            self.t.append(t_ns)
            self.low.append(t_low_ns)

    def tap(self, obj: dict[str, Any]) -> None:
        if "stub_ns" in obj:
            self.truth.append(obj["stub_ns"])


def measure_floor(
    streams: int, seconds: float = 1.0, tokens_per_s: float = 50.0, stub_cpus: Iterable[int] | None = None
) -> dict[str, Any]:
    """Stamp error against the stub's own send stamps, with ``streams`` requests in flight for about ``seconds``.

    Starts are spread over one chunk period, as they are in real traffic. Returned, in ms: ``stamp_error_ms`` (p50,
    p99 over chunks stamped exactly), ``ttft_error_ms``, ``gap_error_ms`` (|ours − true|, p50 and p99), and
    ``cpu_us_per_chunk``, ``chunks_per_s``, ``coalesced_share``, ``streams``. Loopback: it shows that our own loop does
    not enter the figures, not what a network card adds.
    """
    gap_ms = 1000.0 / tokens_per_s
    tokens = max(2, round(seconds * tokens_per_s))
    probe = _Probe()
    with StubProcess(cpus=stub_cpus) as stub:
        clock = Clock()
        client = Client(parse_url(stub.url), probe, clock)
        try:
            cpu_ns, wall_ns = _drive(client, clock, probe, (streams, tokens, gap_ms))
        finally:
            client.close()
    return {"streams": streams, "tokens_per_s": tokens_per_s, **_report(probe, client, clock, cpu_ns, wall_ns)}


def _drive(client: Client, clock: Clock, probe: _Probe, load: tuple[int, int, float]) -> tuple[int, int]:
    streams, tokens, gap_ms = load
    options = {"stream": True, "stub": {"ttft_ms": 50, "gap_ms": gap_ms, "tokens": tokens}}
    body = chat_body("stub", "calibration", tokens, options)
    client.warm(streams)
    spread = gap_ms * NS_PER_MS / streams
    start = clock.now() + 5 * NS_PER_MS
    sent = 0
    limit = start + round((tokens * gap_ms * 5 + 10_000) * NS_PER_MS)
    cpu = time.process_time_ns()
    while (sent < streams or client.in_flight) and clock.now() < limit:
        now = clock.now()
        while sent < streams and now >= start + sent * spread:
            client.send(Call(sent, sent, round(start + sent * spread), body, tap=probe.tap))
            sent += 1
        due = start + sent * spread
        client.poll(round(max(0, due - now)) if sent < streams else 100 * NS_PER_MS)
    return time.process_time_ns() - cpu, clock.now() - start


def _report(probe: _Probe, client: Client, clock: Clock, cpu_ns: int, wall_ns: int) -> dict[str, Any]:
    n = min(len(probe.t), len(probe.truth))
    ours = np.array(probe.t[:n], dtype=np.int64)
    truth = np.array(probe.truth[:n], dtype=np.int64) - clock.zero_unix_ns
    exact = np.array(probe.low[:n], dtype=np.int64) < 0
    error = np.abs(ours - truth)[exact] / NS_PER_MS
    return {
        "chunks": n,
        "stamp_error_ms": _quantiles(error),
        "cpu_us_per_chunk": cpu_ns / 1000 / n if n else None,
        "chunks_per_s": n / (wall_ns / NS_PER_S) if wall_ns else None,
        "coalesced_share": float(1 - exact.mean()) if n else None,
        "user_clock_reads": client.user_stamps,
        "failed": sum(1 for r in probe.requests.values() if r.get("outcome") != "ok"),
    }


def _quantiles(x: Any) -> dict[str, float | None]:
    if not len(x):
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(x, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def floor_line(floor: dict[str, Any]) -> str:
    """The sentence printed before every run."""
    error = floor["stamp_error_ms"]
    if error["p99"] is None:
        return "client floor: not measured (the stub answered nothing)"
    clock = "user clock" if floor["user_clock_reads"] else "kernel stamps"
    return (
        f"client floor at {floor['streams']} streams ({clock}): chunks stamped {error['p50'] * 1000:.0f} µs (p50), "
        f"{error['p99'] * 1000:.0f} µs (p99) after they were sent; below {max(error['p99'], 0.001):.2g} ms these "
        "numbers are the client"
    )
