"""A bad line between client and service: late, jittery, buffering, or with a gateway that turns requests away.

In user space, since kernels without ``netem`` are common; so ``TCP_INFO`` shows the round trip to the proxy, not the
one we make. ``python -m whywait.lab.faults_line CONFIG`` runs it in a process of its own, which ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import monotonic_ns
from typing import Any, Final

from whywait.errors import InternalError
from whywait.lab.cpus import Cpus, pin
from whywait.net.endpoint import parse_url
from whywait.net.loop import IN, OUT, Loop
from whywait.net.proxy import Exchange, Framing, Proxy
from whywait.net.reach import Reach
from whywait.net.reply import Reply, Request
from whywait.net.upstream import Upstream
from whywait.units import NS_PER_MS

READ_BYTES: Final = 1 << 16
_READY_S: Final = 30.0


@dataclass(frozen=True)
class Shape:
    """``delay_ms`` each way and up to ``jitter_ms`` more for each piece; of an answer ``hold_bytes`` are held back,
    until there are so many or it ends; beyond ``most`` requests in flight the answer is 429. 0: not."""

    upstream: str
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    hold_bytes: int = 0
    most: int = 0


@contextlib.contextmanager
def line(shape: Shape, cpus: Cpus = ()) -> Iterator[str]:
    """The address at which ``shape.upstream`` is reached through it, while the block runs.

    Raises:
        InternalError: it did not start.
    """
    from whywait.lab.launch import _import_env

    config = json.dumps({**asdict(shape), "cpus": cpus})
    argv = [sys.executable, "-m", "whywait.lab.faults_line", config]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_import_env())
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        ready, _, _ = select.select([child.stdout], [], [], _READY_S)
        url = child.stdout.readline().decode().strip() if ready else ""
        if not url:
            raise InternalError("the proxy in front of the service did not start")
        yield url
    finally:
        child.stdin.close()
        child.stdout.close()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Later:
    """One direction of a connection: what goes in comes out later, in order. ``give`` takes bytes, ``over`` the end."""

    def __init__(self, loop: Loop, shape: Shape, give: Callable[[bytes], None], over: Callable[[], None]) -> None:
        self._loop, self._shape, self._give, self._over = loop, shape, give, over
        self._due: deque[tuple[int, bytes | None]] = deque()
        self._last = 0

    def put(self, data: bytes | None) -> None:
        """``None``: the end."""
        shape = self._shape
        wait = shape.delay_ms + (random.uniform(0, shape.jitter_ms) if shape.jitter_ms else 0.0)
        if not wait:
            self._out(data)
            return
        self._last = max(self._last, monotonic_ns() + round(wait * NS_PER_MS))
        self._due.append((self._last, data))
        if len(self._due) == 1:
            self._loop.call_at(self._last, self._fire)

    def _fire(self) -> int | None:
        now = monotonic_ns()
        while self._due and self._due[0][0] <= now:
            self._out(self._due.popleft()[1])
        return self._due[0][0] if self._due else None

    def _out(self, data: bytes | None) -> None:
        if data is None:
            self._over()
        else:
            self._give(data)


class Held:
    """Holds the bytes of an answer back until there are ``size`` of them, or the answer ends."""

    def __init__(self, size: int, give: Callable[[bytes | None], None]) -> None:
        self._size, self._give = size, give
        self._kept = bytearray()
        self._framing = Framing()

    def put(self, data: bytes | None) -> None:
        if data is None:
            self._flush()
            self._give(None)
            return
        self._kept += data
        self._framing.feed(data)
        if self._framing.complete or self._framing.broken:
            self._flush()
            self._framing = Framing()
        while len(self._kept) >= self._size:
            self._give(bytes(self._kept[: self._size]))
            del self._kept[: self._size]

    def _flush(self) -> None:
        if self._kept:
            self._give(bytes(self._kept))
            self._kept.clear()


class Peer:
    """The client's end of a connection: bytes in to ``on_data`` (None: it has closed), bytes out by ``send``."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self._loop, self._sock, self.open = loop, sock, True
        self._out = bytearray()
        self._closing = False
        self.on_data: Callable[[bytes | None], None] = lambda _: None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._fd = sock.fileno()
        loop.watch(self._fd, self._ready)

    def send(self, data: bytes) -> None:
        if self.open:
            self._out += data
            self._flush()

    def end(self) -> None:
        """Close once all is sent."""
        self._closing = True
        self._flush()

    def _ready(self, mask: int) -> None:
        if mask & OUT:
            self._flush()
        if not (mask & ~OUT and self.open):
            return
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        self.on_data(data or None)

    def _flush(self) -> None:
        if not self.open:
            return
        try:
            if self._out:
                del self._out[: self._sock.send(self._out)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        if self._closing and not self._out:
            self.close()
        else:
            self._loop.rewatch(self._fd, IN | OUT if self._out else IN)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.unwatch(self._fd)
            self._sock.close()


class Line:
    """Listens, and joins each connection with one of its own to the service. Bytes, no HTTP but where answers end."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self.loop = shape, Loop()
        self._endpoint = parse_url(shape.upstream, reach=Reach(proxy="none"))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.loop.watch(self._listener.fileno(), self._accept)

    def _accept(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                self._join(Peer(self.loop, self._listener.accept()[0]))

    def _join(self, peer: Peer) -> None:
        upstream = Upstream(self.loop, self._endpoint.address, None, self._endpoint.host)
        there = Later(self.loop, self._shape, upstream.send, upstream.close)
        back = Later(self.loop, self._shape, peer.send, peer.end)
        answer = Held(self._shape.hold_bytes, back.put).put if self._shape.hold_bytes else back.put
        peer.on_data = there.put
        upstream.on_data = answer
        upstream.on_closed = lambda _reason: answer(None)


class Gateway(Proxy):
    """Lets so many requests in flight; what comes beyond is told to come again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(parse_url(shape.upstream, reach=Reach(proxy="none")), ("127.0.0.1", 0))
        self._most = shape.most

    @property
    def url(self) -> str:
        return self.server.url

    def _full(self, request: Request) -> bool:
        return request.method == "POST" and self.counts.in_flight >= self._most

    def _early(self, request: Request, reply: Reply) -> Exchange | None:
        return None if self._full(request) else super()._early(request, reply)

    def _handle(self, request: Request, reply: Reply) -> None:
        if self._full(request):
            body = b'{"error":{"message":"too many requests","type":"rate_limit_error","code":429}}'
            reply.send(429, body, headers={"Retry-After": "1"})
        else:
            super()._handle(request, reply)


def main(argv: list[str]) -> None:
    config: dict[str, Any] = json.loads(argv[0])
    pin(tuple(config.pop("cpus", ())))
    shape = Shape(**config)
    made = Gateway(shape) if shape.most else Line(shape)
    made.loop.watch(0, lambda _: made.loop.stop())  # the pipe from our parent: nothing ever comes, so it has closed
    print(made.url, flush=True)
    os.close(1)
    made.loop.run()


if __name__ == "__main__":
    main(sys.argv[1:])
