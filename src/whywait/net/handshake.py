"""How long it takes to open a connection: TCP, then TLS. Blocking, one at a time, and nothing is sent over it."""

from __future__ import annotations

import socket
import time

from whywait.net.endpoint import Endpoint


def handshake_ms(endpoint: Endpoint, timeout_s: float = 5.0) -> tuple[float | None, float | None]:
    """(Time to connect, time of the TLS handshake after it), ms.

    Through a proxy the first is the proxy's and the second None; the second is None without TLS too. A connection that
    does not come about gives (None, None): what is wrong the measured requests tell.
    """
    family, address = endpoint.address
    tls = endpoint.tls() if endpoint.proxy is None else None
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.settimeout(timeout_s)
            began = time.perf_counter()
            s.connect(address)
            connected = time.perf_counter()
            if tls is None:
                return (connected - began) * 1e3, None
            with tls.wrap_socket(s, server_hostname=endpoint.host):
                return (connected - began) * 1e3, (time.perf_counter() - connected) * 1e3
    except OSError:  # ssl.SSLError is one
        return None, None
