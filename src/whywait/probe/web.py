"""The small HTTP servers of the probes: who may ask, how many at once, and how an answer is written."""

from __future__ import annotations

import hmac
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from whywait import __version__

IDLE_S = 30.0
MOST_CONNECTIONS = 64  # each has a thread and may bring a body


def allowed(token: str | None, said: str | None) -> bool:
    """Whether an Authorization header is that of ``token``; without one, all may come."""
    return token is None or hmac.compare_digest((said or "").encode(), f"Bearer {token}".encode())


def whole_number(text: str | None) -> int | None:
    """A Content-Length, or None when it is not one."""
    found = (text or "").strip()
    return int(found) if found.isascii() and found.isdigit() and len(found) < 19 else None


def url_of(listening: socket.socket) -> str:
    """Where it can be reached, for people; of one that listens everywhere the host is left for them to say."""
    host, port = listening.getsockname()[:2]
    host = "HOST" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not listened on
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(ThreadingHTTPServer):
    """Answers on a socket that listens already; a connection too many is closed at once."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(listening.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread; a signal instead may come when there is one, which gives the place back itself
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # whoever asked has hung up


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"whywait/{__version__}", ""
    timeout = IDLE_S

    def answer(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
