"""Kernel receive stamps and TCP_INFO: the parts of the client that know Linux. Elsewhere they answer 'not here'."""

from __future__ import annotations

import select
import selectors
import socket
import struct
import sys
from typing import Any

SO_TIMESTAMPING = 37
_RX_SOFTWARE, _SOFTWARE = 1 << 3, 1 << 4
ANCILLARY = 128
_TIMESPEC = struct.Struct("@qq")
LINUX = sys.platform == "linux"


def enable(sock: socket.socket) -> bool:
    """Ask for software receive stamps on a TCP socket; False where the system has none (then: user clock)."""
    if not LINUX:
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, _RX_SOFTWARE | _SOFTWARE)
    except OSError:
        return False
    return True


def unix_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The software receive stamp in ``recvmsg`` ancillary data, CLOCK_REALTIME ns; 0 when there is none."""
    for _, kind, data in ancillary:
        if kind == SO_TIMESTAMPING:
            s, ns = _TIMESPEC.unpack_from(data)
            return int(s) * 1_000_000_000 + int(ns)
    return 0


def tcp_info(sock: socket.socket) -> tuple[int | None, int | None]:
    """(smallest RTT in ns, segments retransmitted so far) of a connection, None where the kernel does not say.

    Offsets are those of ``struct tcp_info`` in linux/tcp.h: tcpi_total_retrans at 100, tcpi_min_rtt at 148 (µs).
    """
    if not LINUX:
        return None, None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return None, None
    retrans = struct.unpack_from("=I", raw, 100)[0] if len(raw) >= 104 else None
    rtt = struct.unpack_from("=I", raw, 148)[0] if len(raw) >= 152 else None
    return (None if rtt is None or rtt == 0xFFFFFFFF else rtt * 1000), retrans


class Poller:
    """epoll where there is one, else whatever ``selectors`` finds; timeouts in ns with better than 1 ms resolution."""

    def __init__(self) -> None:
        self._epoll: Any = select.epoll() if LINUX else None
        self._other: Any = None if LINUX else selectors.DefaultSelector()

    def add(self, sock: socket.socket, write: bool = False) -> None:
        if self._epoll is not None:
            self._epoll.register(sock, select.EPOLLOUT if write else select.EPOLLIN)
        else:
            self._other.register(sock, selectors.EVENT_WRITE if write else selectors.EVENT_READ)

    def change(self, sock: socket.socket, write: bool) -> None:
        if self._epoll is not None:
            self._epoll.modify(sock, select.EPOLLOUT if write else select.EPOLLIN)
        else:
            self._other.modify(sock, selectors.EVENT_WRITE if write else selectors.EVENT_READ)

    def remove(self, sock: socket.socket) -> None:
        (self._epoll if self._epoll is not None else self._other).unregister(sock)

    def wait(self, timeout_ns: int) -> list[int]:
        """Ready file descriptors. epoll counts in whole ms, so short waits go through select on the epoll itself."""
        if self._epoll is None:
            return [key.fd for key, _ in self._other.select(max(0, timeout_ns) / 1e9)]
        ready = self._epoll.poll(0)  # under load something is usually there: no need to sleep and be woken
        if not ready and timeout_ns >= 5_000_000:
            # Wake a little early; the caller's loop then waits the rest finely.
            ready = self._epoll.poll((timeout_ns - 2_000_000) / 1e9)
        elif not ready and timeout_ns > 0:
            if self._epoll.fileno() < 1024:
                select.select([self._epoll], [], [], timeout_ns / 1e9)
            ready = self._epoll.poll(0)
        return [fd for fd, _ in ready]

    def close(self) -> None:
        (self._epoll if self._epoll is not None else self._other).close()


class LagHistogram:
    """Durations in ns, log-bucketed (12 % wide): how late our own reads were, without keeping each."""

    __slots__ = ("counts", "n")

    def __init__(self) -> None:
        self.counts = [0] * 512
        self.n = 0

    def add(self, ns: int) -> None:
        if ns < 8:
            index = max(ns, 0)
        else:
            bits = ns.bit_length()
            index = ((bits - 3) << 3) + ((ns >> (bits - 4)) & 7)
        self.counts[index if index < 512 else 511] += 1
        self.n += 1

    def quantile(self, q: float) -> float | None:
        """Middle of the bucket that holds quantile ``q``, ns; None when empty."""
        if not self.n:
            return None
        need, seen = q * self.n, 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= need:
                if index < 8:
                    return float(index)
                bits = (index >> 3) + 3
                return ((8 + (index & 7)) + 0.5) * float(1 << (bits - 4))
        return None
