"""A relay for tests: listens (TCP, Unix socket, TLS, or as an HTTP proxy) and passes bytes on to a service."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path


class Relay:
    """``with Relay(port) as r: r.port``. As a ``proxy`` it keeps each request's first lines in ``heads``."""

    def __init__(
        self, port: int, tls: ssl.SSLContext | None = None, unix: Path | None = None, proxy: bool = False, no: int = 0
    ) -> None:
        self._to, self._tls, self._proxy, self._no = port, tls, proxy, no
        if unix is not None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(unix))
            self._listener.listen()
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
        name = self._listener.getsockname()
        self.port = 0 if unix is not None else int(name[1])
        self.heads: list[str] = []
        self.accepted = 0
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Relay:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for s in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        for t in self._threads:
            t.join()
        for s in (self._listener, *self._socks):
            s.close()

    def _run(self, what, *args) -> None:
        thread = threading.Thread(target=what, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._run(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        self._socks.append(sock)
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                self._socks.append(sock)
            first = b""
            if self._proxy:
                while b"\r\n\r\n" not in first:
                    first += sock.recv(65536)
                self.heads.append(first.partition(b"\r\n\r\n")[0].decode("latin-1"))
                if self._no:
                    sock.sendall(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % self._no)
                    sock.shutdown(socket.SHUT_RDWR)
                    return
                if first.startswith(b"CONNECT"):
                    first = b""
                    sock.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:  # absolute form to origin form, and one request per connection is all a test needs
                    line, _, rest = first.partition(b"\r\n")
                    method, url, version = line.split()
                    first = b" ".join((method, b"/" + url.split(b"/", 3)[3], version)) + b"\r\n" + rest
            up = socket.create_connection(("127.0.0.1", self._to))
            self._socks.append(up)
            up.sendall(first)
            self._run(self._pump, up, sock)
            self._pump(sock, up)
        except OSError:  # ssl.SSLError is one: the client went away, or was not let in
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(65536):
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)
        except OSError:
            with contextlib.suppress(OSError):
                b.shutdown(socket.SHUT_RDWR)
