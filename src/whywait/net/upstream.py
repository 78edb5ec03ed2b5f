"""One outgoing connection on the same loop as the server's: connecting, TLS, bytes out, bytes in. No HTTP."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any

from whywait.net.loop import IN, OUT, Loop

READ_BYTES = 1 << 16
WORKING = (errno.EINPROGRESS, errno.EWOULDBLOCK)


def _nobody(_: object) -> None:
    """Who is told when nobody listens."""


class Upstream:
    """``on_data(bytes)`` and, once, ``on_closed(reason)``: '' when the peer ended it in order, else why it broke
    (``refused``, ``reset`` or ``tls``). Neither is called after ``close``. The callbacks may be set anew at any time.
    """

    def __init__(self, loop: Loop, address: tuple[int, Any], tls: ssl.SSLContext | None, host: str) -> None:
        self.on_data: Callable[[bytes], None] = _nobody
        self.on_closed: Callable[[str], None] = _nobody
        self.open, self.connected = True, False
        self._loop, self._out = loop, bytearray()
        self._paused = False
        self._tls: ssl.SSLObject | None = None
        self._inward, self._outward, self._plain_out = ssl.MemoryBIO(), ssl.MemoryBIO(), bytearray()
        self._shaken = tls is None
        if tls is not None:
            self._tls = tls.wrap_bio(self._inward, self._outward, server_hostname=host)
        self._sock = socket.socket(address[0], socket.SOCK_STREAM)
        self._sock.setblocking(False)
        with contextlib.suppress(OSError):  # a Unix socket has no such thing
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fd = self._sock.fileno()
        self._failed = False
        loop.watch(self.fd, self._ready, OUT)
        if self._sock.connect_ex(address[1]) not in (0, *WORKING):
            self._fail()

    def send(self, data: bytes) -> None:
        """All of ``data``, now or as soon as the socket takes it."""
        if self._tls is None:
            self._out += data
        elif self._shaken:
            self._tls.write(data)
            self._out += self._outward.read()
        else:
            self._plain_out += data
        # Also while connecting: to this machine that takes no time, and a turn of the loop is saved.
        self._flush()

    def pause(self) -> None:
        """Read nothing until ``resume``: who takes the bytes is slower than who sends them."""
        if self.open and not self._paused:
            self._paused = True
            self._loop.unwatch(self.fd)  # with an empty mask a hangup would still wake the loop, again and again

    def resume(self) -> None:
        if self.open and self._paused:
            self._paused = False
            self._loop.watch(self.fd, self._ready, IN | (OUT if self._out else 0))

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.unwatch(self.fd)
            self._sock.close()
            self._out.clear()
            self.on_data = self.on_closed = _nobody

    def _fail(self) -> None:
        """Not connected: told on the next turn, so that callers hear of it in one way only."""
        if not self._failed:
            self._failed = True
            self._loop.call_at(0, lambda: self._end("refused"))

    def _end(self, reason: str) -> None:
        if self.open:
            told = self.on_closed
            self.close()
            told(reason)

    def _ready(self, mask: int) -> None:
        if self._failed:
            return
        if not self.connected:
            if wrong := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                # Bytes are sent while connecting: a peer that took them and broke off has not refused.
                self._end("reset" if wrong in (errno.ECONNRESET, errno.EPIPE) else "refused")
                return
            self.connected = True
            self._loop.rewatch(self.fd, IN)
            if not self._shaken:
                self._handshake()
            self._flush()
            return
        if mask & OUT:
            self._flush()
        if mask & ~OUT and self.open and not self._paused:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end("reset")
            return
        if self._tls is None or not data:
            if data:
                self.on_data(data)
            else:
                self._end("" if self._shaken else "tls")
            return
        self._inward.write(data)
        self._handshake()
        plain = b"".join(self._decrypted()) if self._shaken and self.open else b""
        if plain:
            self.on_data(plain)

    def _handshake(self) -> None:
        if self._tls is None or self._shaken:
            return
        try:
            self._tls.do_handshake()
            self._shaken = True
            if self._plain_out:
                self._tls.write(self._plain_out)
                self._plain_out.clear()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._end("tls")
            return
        self._out += self._outward.read()
        self._flush()

    def _decrypted(self) -> list[bytes]:
        parts = []
        assert self._tls is not None
        try:
            while piece := self._tls.read(READ_BYTES):
                parts.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass  # after a goodbye the socket's own end follows
        except ssl.SSLError:
            self._end("tls")
        return parts

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as exc:
            if not self.connected:
                if exc.errno != errno.ENOTCONN:
                    self._fail()
                return
            # What the peer said before it closed may still lie in the buffer: the read tells.
            self._out.clear()
        if self.open and self.connected and not self._paused:
            self._loop.rewatch(self.fd, IN | (OUT if self._out else 0))
