"""The recording proxy passes a request on as it comes; looking at it never holds bytes back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.test_record import Recording, ask
from whywait.net.loop import Loop

ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 95\r\n\r\n"
    b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":300,"completion_tokens":1}}  '
)
WAIT_S = 10.0


class Service:
    """Holds what came; answers only when told to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.got, self.ended, self.connections = b"", False, 0
        self._conns: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._conns.append(conn)
            threading.Thread(target=self._read, args=(conn,), daemon=True).start()

    def _read(self, conn: socket.socket) -> None:
        try:
            while data := conn.recv(1 << 16):
                self.got += data
        except OSError:
            pass
        self.ended = True

    def say(self, data: bytes) -> None:
        self._conns[-1].sendall(data)

    def close(self) -> None:
        self._listener.close()
        for conn in self._conns:
            conn.close()


def until(what: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def parts(words: int = 300) -> tuple[bytes, bytes]:
    text = " ".join(f"w{i}" for i in range(words))
    request = ask({"stream": False, "messages": [{"role": "user", "content": text}]})
    return request[: len(request) // 2], request[len(request) // 2 :]


def test_half_a_request_is_passed_on_before_the_rest_comes(tmp_path: Path) -> None:
    service, (first, rest) = Service(), parts()
    with Recording(service.url, tmp_path / "r") as recording, socket.create_connection(
        ("127.0.0.1", recording.port), WAIT_S
    ) as sock:  # fmt: skip
        sock.sendall(first)
        sent = first.partition(b"\r\n\r\n")[2]
        until(lambda: service.got.endswith(sent))
        assert f"content-length: {len(sent) + len(rest)}".encode() in service.got
        assert recording.rows("arrived") == []  # it is noted when it is whole
        sock.sendall(rest)
        until(lambda: service.got.endswith(rest))
        until(lambda: recording.rows("arrived"))
        service.say(ANSWER)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        until(recording.rows)
        sock.sendall(first + rest)  # the connections are of use again
        until(lambda: service.got.count(rest) == 2)
        service.say(ANSWER)
        until(lambda: len(recording.rows()) == 2)
    (row, _) = recording.rows()
    assert (row["outcome"], row["prompt_words"], len(row["blocks"]), row["prompt_tokens"]) == ("ok", 301, 4, 300)
    assert service.connections == 1
    service.close()


def test_an_answer_to_half_a_request_ends_both_connections(tmp_path: Path) -> None:
    service, (first, _) = Service(), parts()
    said = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    with Recording(service.url, tmp_path / "r") as recording, socket.create_connection(
        ("127.0.0.1", recording.port), WAIT_S
    ) as sock:  # fmt: skip
        sock.sendall(first)
        until(lambda: service.got)
        service.say(said)
        got = b""
        while data := sock.recv(1 << 16):
            got += data
        assert got == said
        until(lambda: service.ended)
    (row,) = recording.rows()
    assert (row["outcome"], row["status"], row["model"]) == ("http_error", 413, None)
    assert recording.proxy.counts.in_flight == 0
    service.close()


def test_a_client_that_leaves_in_the_middle_takes_the_service_along(tmp_path: Path) -> None:
    service, (first, _) = Service(), parts()
    with Recording(service.url, tmp_path / "r") as recording:
        with socket.create_connection(("127.0.0.1", recording.port), WAIT_S) as sock:
            sock.sendall(first)
            until(lambda: service.got)
        until(lambda: service.ended)
        until(lambda: recording.proxy.counts.in_flight == 0)
    assert recording.proxy.counts.unwatched == 0
    service.close()


def test_without_the_token_nothing_reaches_the_service(tmp_path: Path) -> None:
    service, (first, rest) = Service(), parts()
    with Recording(service.url, tmp_path / "r", token="sesame-open") as recording, socket.create_connection(
        ("127.0.0.1", recording.port), WAIT_S
    ) as sock:  # fmt: skip
        sock.sendall(first + rest)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
    assert (service.got, service.connections) == (b"", 0)
    service.close()


def test_a_client_that_connects_is_connected_before_it_asks(tmp_path: Path) -> None:
    service = Service()
    with Recording(service.url, tmp_path / "r") as recording, socket.create_connection(
        ("127.0.0.1", recording.port), WAIT_S
    ) as sock:  # fmt: skip
        until(lambda: service.connections == 1)
        for conn in service._conns:  # the service hangs up on an idle connection, and so do we
            conn.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    service.close()


def test_idle_work_waits_for_what_is_ready_and_is_not_starved() -> None:
    loop = Loop()
    a, b = socket.socketpair()
    order: list[str] = []
    loop.watch(a.fileno(), lambda _: order.append("bytes") or a.recv(1))  # type: ignore[func-returns-value]
    b.send(b"xx")
    left = [3]

    def work() -> int | None:
        order.append("work")
        left[0] -= 1
        return 1 if left[0] else None

    loop.when_idle(work)
    for _ in range(20):
        loop.step(0.01)
    assert order[0] == "bytes"
    assert order.count("work") == 3
    # Never idle: it is done all the same.
    left[0], order[:] = 1, []
    loop.when_idle(work)
    end = time.monotonic() + WAIT_S
    while "work" not in order and time.monotonic() < end:
        b.send(b"x")
        loop.step(0.01)
    assert "work" in order
    loop.close()
    a.close()
    b.close()
