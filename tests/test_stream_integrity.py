"""Answers that end well and are strange all the same: each is said, and no answer is taken for another's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.hostile import DONE, EVENT, SSE, Answer, Peer, Service
from tests.test_stream_cases import closed, doubt, measure, outcomes
from whywait.analyze.summary import summarize
from whywait.core.columns import STRANGE
from whywait.core.recorder import Recorder
from whywait.core.run import Manifest
from whywait.core.schedule import Workload
from whywait.load.driver import Driver, Point
from whywait.load.recipe import closed_schedule
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.dialect import chat_body
from whywait.net.endpoint import parse_url

STOP, END = DONE.split(b"\n\n", 1)[0] + b"\n\n", b"data: [DONE]\n\n"
PATH = "/v1/chat/completions"


def stream(*events: bytes) -> bytes:
    data = b"".join(events)
    return SSE + b"Content-Length: %d\r\n\r\n" % len(data) + data


def event(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps({"choices": [], **fields}) + b"\n\n"


def usage(n: int) -> bytes:
    return event(usage={"prompt_tokens": 3, "completion_tokens": n})


def says(*events: bytes) -> Answer:
    return lambda peer: peer.say(stream(*events))


EMPTY = event(choices=[{"index": 0, "delta": {"content": ""}}])
SPOILT = {
    "as it should be": ((EVENT * 4, STOP, usage(5), END), None),  # a stop token has no text
    "usage and an empty delta after it": ((EVENT * 4, STOP, EMPTY, usage(4), END), None),
    "one choice ends before another": ((EVENT, STOP, EVENT.replace(b'"index":0', b'"index":1') * 3, END), None),
    "output after [DONE]": ((EVENT * 2, STOP, END, EVENT), STRANGE[1]),
    "output after the finish reason": ((EVENT * 2, STOP, EVENT, END), STRANGE[1]),
    "no json between": ((EVENT * 2, b"data: oh\n\n", EVENT, STOP, END), STRANGE[0]),
    "a choice that is none": ((EVENT * 2, b'data: {"choices":[7]}\n\n', EVENT, STOP, END), STRANGE[0]),
    "both": ((EVENT * 2, b"data: {\n\n", STOP, EVENT, END), "; ".join(STRANGE)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_strange_in_an_answer_is_said(name: str, tmp_path: Path) -> None:
    events, strange = SPOILT[name]
    with Service({PATH: says(*events)}) as service:
        run, summary = measure(service.url + "/v1", tmp_path / "run", closed(4, 1))
    assert outcomes(run) == {"ok": 4}
    assert set(run.requests["detail"].tolist()) == {strange}
    for what in STRANGE:
        assert doubt(summary, f"4 answers that ended well hold {what}") == (what in (strange or ""))


@pytest.mark.parametrize(("chunks", "tokens", "said"), [(6, 3, True), (4, 3, False), (4, 4, False), (3, 9, False)])
def test_more_chunks_than_tokens_are_said(chunks: int, tokens: int, said: bool, tmp_path: Path) -> None:
    with Service({PATH: says(EVENT * chunks, STOP, usage(tokens), END)}) as service:
        _, summary = measure(service.url + "/v1", tmp_path / "run", closed(4, 1))
    assert doubt(summary, "4 requests have more chunks with output than tokens in their usage") == said


def test_arguments_of_tools_may_be_cut_finer(tmp_path: Path) -> None:
    call = event(choices=[{"index": 0, "delta": {"tool_calls": [{"function": {"arguments": "x"}}]}}])
    with Service({PATH: says(call * 6, STOP, usage(3), END)}) as service:
        _, summary = measure(service.url + "/v1", tmp_path / "run", closed(4, 1))
    assert not doubt(summary, "more chunks with output than tokens")


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """It is there before the next request is sent, which goes over another connection."""
    said = threading.Event()

    def twice(peer: Peer) -> None:
        peer.say(stream(EVENT * 4, STOP, END))
        peer.say(stream(EVENT * 9, STOP, END)[:-1])
        said.set()

    def slowly(peer: Peer) -> None:
        peer.say(stream(EVENT * 4, STOP, END))
        peer.stop.wait(0.05)
        peer.say(stream(EVENT * 9, STOP, END))
        said.set()

    for number, answer in enumerate((twice, slowly)):
        said.clear()
        clock = Clock()
        recorder = Recorder(tmp_path / str(number), Manifest(zero_unix_ns=clock.zero_unix_ns))
        with Service({PATH: answer}) as service:
            client = Client(parse_url(service.url + "/v1"), recorder, clock)
            driver = Driver(client, recorder, clock, lambda row, schedule: chat_body("m", "x", 4, {"stream": True}))
            driver.run(Point(0, "concurrency", 1, closed_schedule(Workload(), 1)))
            assert said.wait(10)
            driver.run(Point(1, "concurrency", 1, closed_schedule(Workload(), 1, first_id=1)))
            client.close()
        run = recorder.finish(Manifest(zero_unix_ns=clock.zero_unix_ns, client=client.facts()))
        assert outcomes(run) == {"ok": 2}
        assert run.requests["content_chunks"].tolist() == [4, 4]
        assert client.unasked >= 1
        assert doubt(summarize(run), f"{client.unasked} times bytes came over a connection that nothing was asked over")


def test_what_came_and_was_not_read_yet_is_seen_before_sending() -> None:
    """No poll lies between the end of one answer and the next request: the connection is looked at all the same."""
    said = threading.Event()

    def late(peer: Peer) -> None:
        peer.say(stream(EVENT * 4, STOP, END))
        if peer.stop.wait(0.05) or said.is_set():
            return
        peer.say(stream(EVENT * 9, STOP, END))
        said.set()

    class Counts:
        def __init__(self) -> None:
            self.chunks: dict[int, int] = {0: 0, 1: 0}

        def event(self, e: object) -> None: ...

        def chunk(self, id_: int, t_ns: int, low_ns: int, meta: int) -> None:
            self.chunks[id_] += 1

    clock, sink = Clock(), Counts()
    with Service({PATH: late}) as service:
        client = Client(parse_url(service.url + "/v1"), sink, clock)
        body = chat_body("m", "x", 4, {"stream": True})
        for row in (0, 1):
            client.send(Call(row, row, clock.now(), body))
            while not client.poll(10_000_000):
                pass
            assert said.wait(10)
        client.close()
    assert sink.chunks == {0: 4, 1: 4}
    assert client.unasked == 1
