"""One non-blocking connection: connecting, TLS, bytes out, bytes in with their kernel stamp. No HTTP."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import TYPE_CHECKING

from whywait.net import stamps
from whywait.net.endpoint import Endpoint

if TYPE_CHECKING:
    from whywait.net.client import Flight

MAX_TUNNEL = 1 << 16
READ_SIZE = 256 * 1024  # at least 64 KB: in smaller reads every piece would carry the last packet's stamp


class ProxyError(OSError):
    """The proxy does not let us through."""


class Conn:
    """``state``: connecting → (tunnel →) (handshake →) idle ⇄ busy → closed. Socket and TLS errors are raised to the
    caller. ``ended``: the peer said goodbye inside TLS; the connection itself may stay open."""

    __slots__ = ("_failed", "_incoming", "_outgoing", "_poller", "_proxy_said", "_tls", "_tunnel", "ended", "flight",
                 "fresh", "kernel", "opened", "out", "sock", "state", "tls_from")  # fmt: skip

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, poller: stamps.Poller, now: int) -> None:
        family, address = endpoint.address
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.kernel = False
        if not endpoint.unix:  # a Unix socket has neither delays nor stamps
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.kernel = stamps.enable(self.sock)
        self.state = "connecting"
        self.flight: Flight | None = None
        self.fresh = True  # no response has come over it yet
        self.opened = now
        self.tls_from = -1  # when its TLS handshake began, as the client noted
        self.out = b""
        self.ended = False
        self._tunnel, self._proxy_said = endpoint.tunnel(), b""
        self._poller = poller
        self._tls: ssl.SSLObject | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        if tls is not None:
            self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=endpoint.host)
        self._failed = self.sock.connect_ex(address)
        if self._failed not in (0, errno.EINPROGRESS):
            self.state = "broken"
        poller.add(self.sock, write=True)

    def writable(self) -> None:
        """The socket takes bytes: the connection is there (or failed), or pending output can go on.

        Raises:
            OSError: connecting or sending failed. ssl.SSLError: the handshake failed.
        """
        if self.state in ("connecting", "broken"):
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code or self.state == "broken":
                raise OSError(code or self._failed, "connect failed")
            if self._tunnel:
                self.state, self.out = "tunnel", self._tunnel
                self._flush()
                self._poller.change(self.sock, write=bool(self.out))
            else:
                self.state = "handshake"
                self._handshake()
        elif self.out:
            self._flush()

    def send(self, data: bytes) -> None:
        if self._tls is not None:
            self._tls.write(data)
            data = self._outgoing.read()
        self.out += data
        self._flush()

    def receive(self, view: memoryview) -> tuple[memoryview | bytes, int, int]:
        """(plain bytes, raw length, kernel stamp or 0). Raw length 0 is the end; −1: nothing there after all."""
        try:
            n, ancillary, _, _ = self.sock.recvmsg_into([view], stamps.ANCILLARY)
        except (BlockingIOError, InterruptedError):
            return b"", -1, 0
        kernel = stamps.unix_ns(ancillary) if self.kernel else 0
        if self._tls is None:
            return view[:n], n, kernel
        if n == 0:
            return b"", 0, kernel
        if self.state == "tunnel":
            self._through(bytes(view[:n]))
            return b"", n, kernel
        self._incoming.write(view[:n])
        if self.state == "handshake":
            self._handshake()
        return self._decrypt(), n, kernel

    def waiting(self) -> bytes | None:
        """A byte that came over this idle connection and was not read yet, b'' where the peer has closed it, None where
        there is neither; always None over TLS, which speaks among itself."""
        if self._tls is not None:
            return None
        try:
            return self.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def close(self) -> None:
        self.state = "closed"
        self._poller.remove(self.sock)
        self.sock.close()

    def _flush(self) -> None:
        try:
            sent = self.sock.send(self.out) if self.out else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        before, self.out = self.out, self.out[sent:]
        if self.out or before is not self.out:
            self._poller.change(self.sock, write=bool(self.out))

    def _through(self, data: bytes) -> None:
        """The proxy's answer to CONNECT; what follows its head is the service's.

        Raises:
            ProxyError: it is a no, or no HTTP.
        """
        self._proxy_said += data
        head, end, rest = self._proxy_said.partition(b"\r\n\r\n")
        if not end and len(self._proxy_said) <= MAX_TUNNEL:
            return
        words = head.split(b"\r\n", 1)[0].split()
        said = words[1].decode("latin-1") if len(words) > 1 and words[0].startswith(b"HTTP/1.") else ""
        if not end or not (len(said) == 3 and said.startswith("2")):
            what = f"answers {said}" if said.isdigit() and len(said) == 3 else "does not speak HTTP"
            raise ProxyError(errno.ECONNREFUSED, f"the proxy {what}")
        self._incoming.write(rest)
        self.state = "handshake"
        self._handshake()

    def _handshake(self) -> None:
        if self._tls is not None:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.out += self._outgoing.read()
                self._flush()
                self._poller.change(self.sock, write=bool(self.out))
                return
            self.out += self._outgoing.read()
            self._flush()
        self._poller.change(self.sock, write=bool(self.out))
        self.state = "idle"

    def _decrypt(self) -> bytes:
        assert self._tls is not None
        parts = []
        try:
            while self.state != "handshake":
                piece = self._tls.read(READ_SIZE)
                if not piece:
                    self.ended = True
                    break
                parts.append(piece)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)
