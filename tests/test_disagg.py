"""The front of a split over fake engines: the way of a request, what goes wrong at each step, what is given back."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_stub import StubEngine
from whywait.engines import by_name
from whywait.errors import UsageError
from whywait.lab.arms import arm_of, varied
from whywait.lab.disagg import Fleet, places
from whywait.lab.disagg_call import Backend
from whywait.lab.disagg_front import Pages, Replicas, Split
from whywait.lab.disagg_store import Store, make_folder
from whywait.probe.prometheus import PageReader

CHAT = "/v1/chat/completions"


class Set:
    """A split before fake engines, on a thread of its own."""

    def __init__(self, front: Pages, prefill: list[StubEngine], decode: list[StubEngine], folder: Path) -> None:
        self.front, self.prefill, self.decode, self.folder = front, prefill, decode, folder
        self.port = front.server.port

    def files(self) -> list[str]:
        return [p.name for p in self.folder.iterdir()]

    def quiet(self) -> bool:
        """All slots are free and nothing lies between the engines."""
        front = self.front
        assert isinstance(front, Split)
        free = all(len(e.free) == e.slots and not e.load for e in front.decode)
        return free and all(len(e.free) == e.slots for e in front.prefill) and not front._all and not self.files()


@contextlib.contextmanager
def split(folder: Path, slots: int = 2, prefill: int = 1, most: int = 1 << 30, **more: Any) -> Iterator[Set]:
    link = more.pop("link", (0.0, 0.0))
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(StubEngine(folder, **more)) for _ in range(prefill)]
        then = [stack.enter_context(StubEngine(folder, **more))]
        both = [Backend(e.url, 1) for e in first], [Backend(e.url, slots) for e in then]
        front = Split(both, Store(folder, most), link)
        stack.enter_context(running(front))
        yield Set(front, first, then, folder)


@contextlib.contextmanager
def running(front: Pages) -> Iterator[None]:
    thread = threading.Thread(target=front.run)
    thread.start()
    try:
        yield
    finally:
        front.loop.stop()
        thread.join()
        front.close()


def post(port: int, prompt: str = "hello", **more: Any) -> tuple[int, bytes]:
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 4, **more}
    conn.request("POST", CHAT, json.dumps(body))
    try:
        answer = conn.getresponse()
        return answer.status, answer.read()
    finally:
        conn.close()


def get(port: int, path: str) -> tuple[int, bytes]:
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    conn.request("GET", path)
    answer = conn.getresponse()
    found = answer.status, answer.read()
    conn.close()
    return found


def until(true: Any) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(e.removeprefix(b"data: ")) for e in body.split(b"\n\n") if e.startswith(b"data: {")]


def counter(port: int, name: str) -> float:
    rows = PageReader(by_name("llama.cpp")).read(get(port, "/metrics")[1].decode())  # type: ignore[arg-type]
    return sum(value for n, _, value in rows if n == name)


def test_the_way_of_a_request(tmp_path: Path) -> None:
    with split(tmp_path) as s:
        status, body = post(s.port, "river", temperature=0, cache_prompt=False)
        found = events(body)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        assert [e["choices"][0]["delta"]["content"] for e in found[:-1]] == ["river"] * 4
        asked = s.prefill[0].seen(CHAT)[0]
        assert (asked["max_tokens"], asked["stream"], asked["cache_prompt"]) == (1, False, False)
        assert asked["messages"] == [{"role": "user", "content": "river"}]
        asked = s.decode[0].seen(CHAT)[0]
        assert (asked["max_tokens"], asked["stream"], asked["cache_prompt"], asked["id_slot"]) == (4, True, True, 0)
        # What the answer says of itself is of the whole request, not of the token that was computed again.
        timings = found[-1]["timings"]
        assert (timings["prompt_n"], timings["cache_n"], timings["prompt_ms"]) == (10, 0, 6.0)
        assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert timings["handover_bytes"] == 500
        assert 0 < timings["handover_ms"] < timings["split_ttft_ms"]
        until(s.quiet)
        assert counter(s.port, "handover_bytes_total") == 500
        assert counter(s.port, "handover_seconds_count") == 1
        assert counter(s.port, "handover_blocked_seconds_total") == 0.002
        assert counter(s.port, "other_gaps_total") == 3
        assert (counter(s.port, "prompt_tokens_computed_total"), counter(s.port, "output_tokens_total")) == (10, 7)
        assert counter(s.port, "decode_steps_total") == 6  # both engines'


def test_pages_that_the_client_asks_for(tmp_path: Path) -> None:
    with split(tmp_path) as s:
        assert get(s.port, "/health")[0] == 200
        assert len(json.loads(get(s.port, "/slots")[1])) == 2
        assert json.loads(get(s.port, "/props")[1])["total_slots"] == 2
        assert get(s.port, "/v1/models")[0] == 200
        assert get(s.port, "/nowhere")[0] == 404
        s.decode[0].faults["/health"] = 503
        assert get(s.port, "/health")[0] == 503


@pytest.mark.parametrize(
    ("where", "fault", "status", "word"),
    [
        (("prefill", CHAT), 400, 400, "as ordered"),
        (("prefill", CHAT), "reset", 502, "prefill engine does not answer"),
        (("prefill", "save"), 500, 502, "could not be saved"),
        (("prefill", "save"), "reset", 502, "could not be saved"),
        (("decode", "restore"), 400, 502, "could not be restored"),
        (("decode", "restore"), "reset", 502, "could not be restored"),
        (("decode", CHAT), 503, 503, "as ordered"),
        (("decode", CHAT), "reset", 502, "decode engine does not answer"),
    ],
)
def test_what_fails_is_said_and_given_back(
    tmp_path: Path, where: tuple[str, str], fault: Any, status: int, word: str
) -> None:
    side, path = where
    with split(tmp_path) as s:
        engine = getattr(s, side)[0]
        engine.faults[path] = fault
        got, body = post(s.port)
        assert got == status
        assert word in json.loads(body)["error"]["message"]
        until(s.quiet)
        engine.faults.clear()
        assert post(s.port)[0] == 200  # the next one finds everything free
        assert counter(s.port, "handover_failures_total") == (path in ("save", "restore"))


def test_a_stream_that_breaks_off_says_so_in_band(tmp_path: Path) -> None:
    with split(tmp_path) as s:
        s.decode[0].faults["stream"] = 3
        status, body = post(s.port)
        assert status == 200
        assert "broke off" in events(body)[-1]["error"]["message"]
        assert b"[DONE]" not in body
        until(s.quiet)


def test_an_engine_that_is_gone(tmp_path: Path) -> None:
    with (
        StubEngine(tmp_path) as engine,
        running(front := Split(([Backend("http://127.0.0.1:9", 1)], [Backend(engine.url, 1)]), Store(tmp_path))),
    ):
        status, body = post(front.server.port)
        assert (status, "refused" in json.loads(body)["error"]["message"]) == (502, True)
        assert get(front.server.port, "/health")[0] == 503


@pytest.mark.parametrize("body", [b"no json", b"[1]", b'{"n":2,"prompt":"a"}', b'{"prompt":["a","b"]}'])
def test_what_a_split_cannot_do_is_refused(tmp_path: Path, body: bytes) -> None:
    with split(tmp_path) as s:
        conn = http.client.HTTPConnection("127.0.0.1", s.port, timeout=20)
        conn.request("POST", "/v1/completions", body)
        answer = conn.getresponse()
        assert (answer.status, "error" in json.loads(answer.read())) == (400, True)
        conn.close()
        assert not s.prefill[0].calls


def leave(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), 20)
    body = json.dumps({"messages": [{"role": "user", "content": "gone"}], "stream": True}).encode()
    sock.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    return sock


@pytest.mark.parametrize("where", ["prefill", "save", "restore", "decode"])
def test_a_client_that_leaves_frees_everything(tmp_path: Path, where: str) -> None:
    with split(tmp_path, tokens=10_000, gap_s=0.01) as s:
        engine = s.prefill[0] if where in ("prefill", "save") else s.decode[0]
        path = CHAT if where in ("prefill", "decode") else where
        if where == "prefill":
            engine.faults[CHAT] = "hang"
        elif where != "decode":
            engine.faults[path] = 0.1  # it takes its time
        sock = leave(s.port)
        until(lambda: engine.seen(path))
        sock.close()
        until(s.quiet)
        if path == CHAT:
            until(lambda: engine.cancelled == 1)
        assert counter(s.port, "handover_failures_total") == 0


def test_a_client_that_leaves_the_queue_or_the_link(tmp_path: Path) -> None:
    with split(tmp_path, link=(30.0, 0.0)) as s:
        sock = leave(s.port)
        until(s.files)
        sock.close()
        until(s.quiet)
        s.prefill[0].faults[CHAT] = "hang"
        first, second = leave(s.port), leave(s.port)
        until(lambda: counter(s.port, "waiting") == 1)
        second.close()
        until(lambda: counter(s.port, "waiting") == 0)
        first.close()
        until(s.quiet)


def test_first_come_first_served(tmp_path: Path) -> None:
    with split(tmp_path, slots=1, prefill_s=0.02) as s:
        threads = []
        for i in range(6):
            threads.append(threading.Thread(target=post, args=(s.port, f"p{i}")))
            threads[-1].start()
            until(lambda n=i: len(s.front._all) + len(s.decode[0].seen(CHAT)) > n)  # type: ignore[attr-defined]
        for t in threads:
            t.join()
        for engine in (s.prefill[0], s.decode[0]):
            assert [b["messages"][0]["content"] for b in engine.seen(CHAT)] == [f"p{i}" for i in range(6)]
        assert s.decode[0].most_streams == 1
        until(s.quiet)


def test_slots_are_never_shared(tmp_path: Path) -> None:
    """Every stream finds its own prompt's KV in the slot it was given: else the fake engine computes it anew."""
    with split(tmp_path, slots=3, prefill=2, tokens=6) as s:
        found: list[tuple[int, bytes]] = []
        threads = [threading.Thread(target=lambda n=n: found.append(post(s.port, f"p{n}"))) for n in range(24)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert [status for status, _ in found] == [200] * 24
        assert s.decode[0].most_streams <= 3
        assert all(len(e.seen(CHAT)) for e in s.prefill)
        recomputed = [events(body)[-1]["timings"]["recomputed_n"] for _, body in found]
        assert recomputed == [1] * 24
        until(s.quiet)


def test_a_slow_link_holds_up_its_own_requests_only(tmp_path: Path) -> None:
    """While one hand-over is on its way (for half a minute), a stream that came over before goes on to its end."""
    with split(tmp_path, link=(0.0, 0.0), tokens=30, gap_s=0.005) as s:
        assert isinstance(s.front, Split)
        done: list[int] = []
        early = threading.Thread(target=lambda: done.append(post(s.port, "early")[0]))
        early.start()
        until(lambda: s.decode[0].seen(CHAT))
        s.front.link_of(s.front.prefill[0])._delay_s = 30.0
        sock = leave(s.port)
        until(s.files)
        early.join()
        assert done == [200]
        assert s.files()  # still on its way
        sock.close()
        until(s.quiet)


def test_the_link_takes_its_time(tmp_path: Path) -> None:
    with split(tmp_path, link=(0.05, 500 / 0.05)) as s:
        body = post(s.port, "river")[1]
        assert events(body)[-1]["timings"]["handover_ms"] >= 100  # 50 of delay, 50 for 500 bytes
        assert counter(s.port, "handover_link_seconds_total") >= 0.1


def test_space_between_the_engines_is_bounded(tmp_path: Path) -> None:
    with split(tmp_path, slots=8, most=1100, link=(0.05, 0.0)) as s:
        post(s.port, "first")  # from here on it knows what a token takes
        threads = [threading.Thread(target=post, args=(s.port, f"more{i}")) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert isinstance(s.front, Split)
        assert s.front.store.peak <= 1100
        assert len(s.decode[0].seen(CHAT)) == 7
        s.front.store.most = 100
        assert post(s.port, "large")[0] == 507
        until(s.quiet)


def test_replicas_share_the_load_and_change_nothing(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(StubEngine(tmp_path, tokens=20, gap_s=0.005)) for _ in range(2)]
        front = Replicas([Backend(e.url, 2) for e in engines])
        stack.enter_context(running(front))
        port = front.server.port
        threads = [threading.Thread(target=post, args=(port, f"p{i}")) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert [len(e.seen(CHAT)) for e in engines] == [2, 2]
        assert "id_slot" not in engines[0].seen(CHAT)[0]
        assert counter(port, "prompt_tokens_computed_total") == 20
        engines[0].faults[CHAT] = 429
        engines[1].faults[CHAT] = "reset"
        assert sorted(post(port)[0] for _ in range(2)) == [429, 502]
        until(lambda: not any(e.load for e in front.decode))


# --- what a user writes, and where things go


def test_arms() -> None:
    got = arm_of("split:prefill=1,decode=2,slots=4,ctx=1024,delay_ms=50,rate_mb_s=12.5")
    assert got.kind == "split"
    fleet = Fleet.from_dict(got.settings)
    assert (fleet.engines, fleet.delay_ms, fleet.rate_mb_s, fleet.engine.ctx_per_slot) == (3, 50.0, 12.5, 1024)
    two = Fleet.from_dict(arm_of("replicas:3,slots=2").settings)
    assert (two.engines, two.replicas, two.engine.slots) == (3, 3, 2)
    assert Fleet.from_dict(arm_of("replicas").settings).replicas == 2
    for bad in (
        "split:prefill=0",
        "split:speed=9",
        "replicas:0",
        "replicas:2,decode=1",
        "split:delay_ms=-1",
        "split:2",
    ):
        with pytest.raises(UsageError):
            arm_of(bad)


def test_a_setting_is_varied() -> None:
    assert varied("split:decode=1,delay_ms=5", "delay_ms", "100") == "split:decode=1,delay_ms=100"
    assert varied("embedded", "slots", "8") == "embedded:slots=8"
    assert varied("embedded:parallel=2,ctx=512", "slots", "8") == "embedded:ctx=512,slots=8"
    assert varied("vllm serve m --x {budget}", "budget", "512") == "vllm serve m --x 512"
    for arm, name in (("vllm serve m", "budget"), ("http://x:1", "slots"), ("split", "colour"), ("embedded", "port:")):
        with pytest.raises(UsageError):
            varied(arm, name, "1")


def test_engines_are_kept_apart() -> None:
    assert places(2, 1, (0, 1)) == ([(0,), (1,)], ())  # the client runs on both
    assert places(2, 2, tuple(range(8))) == ([(0, 1), (2, 3)], (4, 5, 6, 7))
    assert places(3, 1, (0, 1)) == ([(), (), ()], ())


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    old = tmp_path / "whywait-kv-999999999-1-x"
    old.mkdir()
    (old / "1.kv").write_text("KV")
    made = make_folder(str(tmp_path))
    assert made.is_dir()
    assert not old.exists()
    assert make_folder(str(tmp_path)) != made  # ours lives
    assert made.exists()
    with pytest.raises(UsageError):
        make_folder(str(tmp_path / "none" / "such"))
