"""A client that runs for hours: what a request took is let go of when it ends, though nobody collects garbage then."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.load.stub import StubProcess
from whywait.net import timers as module
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.endpoint import parse_url

BODY = b'{"model":"stub","messages":[{"role":"user","content":"a"}],"stream":true,"max_tokens":2}'


class _Nobody:
    """A sink that counts what ended, and keeps nothing."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        if isinstance(e, (Finished, Failed)):
            self.outcomes[e.facts["outcome"]] += 1

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:
        pass


def _alive() -> Counter[str]:
    kinds = ("Flight", "Response", "Call", "HttpResponseParser", "SseParser", "ChatAnswer")
    return Counter(type(o).__name__ for o in gc.get_objects() if type(o).__name__ in kinds)


@pytest.fixture
def stub():
    with StubProcess("--ttft-ms", "0", "--gap-ms", "0") as s:
        yield s


def _send(client: Client, n: int, at_once: int = 8) -> None:
    sent = ended = 0
    while ended < n:
        while sent < n and client.in_flight < at_once:
            client.send(Call(sent, sent, client.clock.now(), BODY))
            sent += 1
        ended += len(client.poll(20_000_000))


def test_nothing_is_left_of_requests_that_ended(stub: StubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STALE", 50)
    sink = _Nobody()
    client = Client(parse_url(stub.url), sink, Clock())
    gc.collect()
    gc.disable()
    try:
        _send(client, 40)
        before = _alive()
        _send(client, 1_000)
        after = _alive()
        assert sink.outcomes == {"ok": 1_040}
        # Of a thousand requests no more than the timers that may be stale and what is in flight.
        assert all(after[k] - before[k] <= 120 for k in after), (before, after)
        assert after["HttpResponseParser"] <= 8
        assert len(client._timers) <= 120
    finally:
        gc.enable()
        client.close()


def test_a_timeout_still_comes_when_timers_were_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timers of those in flight stay, whatever ends beside them."""
    monkeypatch.setattr(module, "MOST_STALE", 5)
    with StubProcess("--ttft-ms", "0", "--gap-ms", "0", "--fault", "hang", "--fault-every", "100") as stub:
        sink = _Nobody()
        client = Client(parse_url(stub.url), sink, Clock())
        client.warm(4)
        ended = sent = 0
        while ended < 150:
            while sent < 150 and client.in_flight < 4:
                client.send(Call(sent, sent, client.clock.now(), BODY, timeout_ns=1_000_000_000))
                sent += 1
            ended += len(client.poll(20_000_000))
        client.close()
    assert sink.outcomes == {"ok": 149, "timeout": 1}
