"""Fronts of a fleet when an engine dies, says less than others, or is asked what a split cannot do."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.analysis_runs import MS, S, gauge_rows, make_run
from tests.engine_stub import StubEngine
from tests.test_disagg import CHAT, counter, events, get, post, running, split, until
from whywait.analyze.handover import handovers
from whywait.lab.disagg_call import Backend
from whywait.lab.disagg_front import Replicas, _unfit


def test_a_replica_that_dies_under_streams_is_not_the_least_loaded_one(tmp_path: Path) -> None:
    """A stream that breaks off takes its place off the engine once; what is dead gets nothing while another lives."""
    with contextlib.ExitStack() as stack:
        lives, dies = (stack.enter_context(StubEngine(tmp_path, tokens=40, gap_s=0.01)) for _ in range(2))
        front = Replicas([Backend(lives.url, 2), Backend(dies.url, 2)])
        stack.enter_context(running(front))
        port = front.server.port
        dies.faults["stream"] = 3
        found: list[Any] = []

        def one() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # broken off
                found.append(post(port)[0])

        threads = [threading.Thread(target=one) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        until(lambda: not lives.streams)
        assert [e.load for e in front.decode] == [0, 0]


def test_the_next_requests_go_to_the_replica_that_lives(tmp_path: Path) -> None:
    with StubEngine(tmp_path, tokens=40, gap_s=0.01) as lives:
        dead = Backend("http://127.0.0.1:9", 2)  # refuses at once, so it never has a load
        front = Replicas([dead, Backend(lives.url, 2)])
        with running(front):
            port = front.server.port
            held = threading.Thread(target=post, args=(port,))
            held.start()
            until(lambda: lives.streams)
            assert [post(port)[0] for _ in range(4)] == [200] * 4
            held.join()
            assert len(lives.seen(CHAT)) == 5
            assert (dead.gone, dead.load) == (True, 0)
            get(port, "/metrics")
            assert dead.gone


def test_a_replica_that_is_back_is_asked_again(tmp_path: Path) -> None:
    with StubEngine(tmp_path) as a, StubEngine(tmp_path) as b:
        front = Replicas([Backend(a.url, 2), Backend(b.url, 2)])
        front.decode[0].gone = True
        with running(front):
            get(front.server.port, "/metrics")
            assert [post(front.server.port)[0] for _ in range(2)] == [200, 200]
        assert (len(a.seen(CHAT)), len(b.seen(CHAT))) == (1, 1)


def test_all_replicas_dead_is_an_error() -> None:
    front = Replicas([Backend("http://127.0.0.1:9", 2), Backend("http://127.0.0.1:9", 2)])
    with running(front):
        status, body = post(front.server.port)
    assert (status, json.loads(body)["error"]["type"]) == (502, "upstream_error")


def test_what_an_engine_does_not_tell_is_not_0(tmp_path: Path) -> None:
    with split(tmp_path) as s:
        s.decode[0].silent = ("restore_ms", "prompt_ms")
        timings = events(post(s.port)[1])[-1]["timings"]
        assert timings["recomputed_ms"] is None
        assert timings["prompt_ms"] is None  # of it only a part is known
        page = get(s.port, "/metrics")[1].decode()
        assert "handover_blocked_seconds_total" not in page
        assert counter(s.port, "handover_seconds_count") == 1


def test_a_counter_that_falls_silent_makes_no_figure() -> None:
    rows = [{"due_ns": S, "sent_ns": S, "first_ns": S + 100 * MS, "last_ns": S + 700 * MS, "end_ns": S + 700 * MS}]
    count = gauge_rows("handover_seconds_count", [(S - 10 * MS, 0.0), (S + 100 * MS, 1.0), (S + 710 * MS, 4.0)])
    blocked = gauge_rows("handover_blocked_seconds_total", [(S - 10 * MS, 0.0), (S + 20 * MS, 0.0)])
    assert handovers(make_run(rows, readings=[*count, *blocked]), 0)["handover_blocked_ms"] is None


@pytest.mark.parametrize(
    ("n", "word"), [(0, "n of 0"), (2, "n of 2"), (True, "n of true"), ("1", 'n of "1"'), (1, ""), (None, "")]
)
def test_how_many_answers_a_split_gives(n: object, word: str) -> None:
    said = _unfit({"prompt": "a", "n": n})
    assert said.startswith(word)
    assert bool(said) is bool(word)
