"""The simulated service as clients meet it: a plain engine underneath, so that every figure has a known value."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.front_engine import BLOCK, Plain
from whywait import app, simulating
from whywait.analyze.latency import OK
from whywait.cli import main, parser
from whywait.core.lengths import Lengths
from whywait.engines import detect, vllm
from whywait.errors import EXIT_USAGE, UsageError
from whywait.judge.calibrate import Prior, prior_only
from whywait.net.dialect import ChatAnswer
from whywait.physics.step import StepCost
from whywait.probe.prometheus import canonical, page_facts, parse
from whywait.sim import front_stream, kernel
from whywait.sim.deployment import Deployment, Split
from whywait.sim.front import Front, Service
from whywait.sim.front_ask import Blocks, Refused, layout, read
from whywait.sim.front_engine import Online, engines_of
from whywait.sim.front_metrics import Histogram, Late, Now, Told
from whywait.sim.front_pace import SLIP_NS, New, Pace, Step
from whywait.sim.front_service import servable, service_of
from whywait.sim.kernel_build import get
from whywait.sim.state import (
    FIFO,
    KEEP_FULL,
    KEEP_SHARE,
    LFU,
    LLAMA_CPP,
    SGLANG,
    STATIC,
    TRTLLM,
    VLLM,
    Load,
    Pool,
    Settings,
)
from whywait.sim.techniques import apply
from whywait.verbs.serve_sim import _service

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
CONTEXT = 2048
H200 = ("--machine", "h200", "--model", "llama-3.1-8b")


def service(**more: Any) -> Service:
    cache = {"block_size": str(BLOCK), "num_gpu_blocks": "1000", "enable_prefix_caching": "True"}
    return Service(**{"model": "m", "context": CONTEXT, "block": BLOCK, "kv_blocks": 1000, "cache": cache, **more})


class Served:
    """A front on a thread. ``kept`` is a connection that is used again."""

    def __init__(self, engines: Sequence[Any] = (), **more: Any) -> None:
        self.engines = list(engines) or [Plain()]
        self.front = Front(service(**more), self.engines)
        self.url = self.front.server.url
        self._thread = threading.Thread(target=self.front.server.run, daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        self.kept = http.client.HTTPConnection("127.0.0.1", self.front.server.port, timeout=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.kept.close()
        self.front.server.stop()
        self._thread.join()

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, bytes]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self.kept.request(method, path, data, {"Content-Type": kind} if data is not None else {})
        answer = self.kept.getresponse()
        return answer.status, answer.read()

    def chat(self, text: str = "what do you wait for?", tokens: int = 4, **more: Any) -> dict[str, Any]:
        status, body = self.ask("POST", CHAT, {**message(text), "max_tokens": tokens, **more})
        assert status == 200, body
        said: dict[str, Any] = json.loads(body)
        return said

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, [DONE] checked and taken off."""
        status, out = self.ask("POST", path, {"stream": True, **body})
        assert status == 200, out
        parts = out.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

    def metric(self, name: str, **labels: str) -> float:
        page = parse(self.ask("GET", "/metrics")[1].decode())
        found = [s for s in page.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, name
        return sum(s.value for s in found)


def message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@contextlib.contextmanager
def hanging(served: Served, **body: Any) -> Iterator[socket.socket]:
    """A stream that was begun and is read no further than its head."""
    data = json.dumps({**message("hello"), "stream": True, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.socket() as sock:
        sock.settimeout(20)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # soon full, for those that do not read on
        sock.connect(("127.0.0.1", served.front.server.port))
        sock.sendall(head + data)
        assert sock.recv(15).startswith(b"HTTP/1.1 200")
        yield sock


def until(true: Any) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as s:
        yield s


# --- answers


def test_a_stream_has_a_token_per_event_and_says_its_usage(served: Served) -> None:
    events = served.events(CHAT, **message("x" * 40), max_tokens=5, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["delta"]["content"] for e in events[1:-1]] == [" tok"] * 5
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 5 + ["length"]
    assert events[-1]["choices"] == []
    # A head for the message and one for the answer, four tokens each, and 40 bytes of text.
    assert events[-1]["usage"] == {"prompt_tokens": 18, "total_tokens": 23, "completion_tokens": 5,
                                   "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    assert {e["model"] for e in events} == {"m"}
    assert len({e["id"] for e in events}) == 1


def test_usage_comes_with_every_event_where_it_is_asked_for(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = served.events(CHAT, **message("hi"), max_tokens=3, stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in events] == [0, 1, 2, 3, 3]
    assert all(e["usage"]["total_tokens"] == e["usage"]["prompt_tokens"] + e["usage"]["completion_tokens"]
               for e in events)  # fmt: skip
    answer = ChatAnswer()
    for event in events:
        answer.event(b"", json.dumps(event).encode())
    assert [tokens for _, tokens in answer.events if tokens is not None] == [1, 1, 1]


def test_a_completion_is_of_a_text_or_of_token_ids(served: Served) -> None:
    events = served.events(PLAIN, prompt="x" * 64, max_tokens=2, return_token_ids=True)
    assert [e["choices"][0]["text"] for e in events] == [" tok", " tok"]
    assert all(len(e["choices"][0]["token_ids"]) == 1 for e in events)
    for prompt in ([5] * 7, [[5] * 7], ["x" * 28]):
        status, body = served.ask("POST", PLAIN, {"prompt": prompt})
        said = json.loads(body)
        assert status == 200
        assert said["usage"]["prompt_tokens"] == 7
        assert said["usage"]["completion_tokens"] == 16  # OpenAI's default
        assert said["choices"][0] == {"index": 0, "text": " tok" * 16, "logprobs": None, "finish_reason": "length",
                                      "stop_reason": None}  # fmt: skip


def test_a_whole_answer_says_where_its_time_went() -> None:
    with Served([Plain(step_s=0.01, token_s=0.0)]) as s:
        said = s.chat(tokens=4)
    assert said["choices"][0]["message"] == {"role": "assistant", "content": " tok" * 4}
    assert said["metrics"]["time_to_first_token_ms"] == pytest.approx(10)
    assert said["metrics"]["generation_time_ms"] == pytest.approx(30)


def test_an_answer_without_a_limit_is_drawn_and_stops() -> None:
    with Served([Plain(step_s=1e-4)], drawn=Lengths("uniform", 5, 9)) as s:
        lengths = set()
        for _ in range(20):
            said = s.chat(max_tokens=None)
            assert said["choices"][0]["finish_reason"] == "stop"
            lengths.add(said["usage"]["completion_tokens"])
        assert lengths <= set(range(5, 10))
        assert len(lengths) > 1
        assert s.chat(max_tokens=None, min_tokens=30)["usage"]["completion_tokens"] == 30
        both = s.chat(max_completion_tokens=2, max_tokens=9)
        assert both["usage"]["completion_tokens"] == 2


# --- refusals

BAD: list[tuple[int, str, dict[str, Any]]] = [
    (400, "messages", {}),
    (400, "messages", {"messages": []}),
    (400, "messages", {"messages": "hello"}),
    (400, "role", {"messages": [{"content": "hello"}]}),
    (400, "content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (400, "max_tokens", {**message("x"), "max_tokens": 0}),
    (400, "max_tokens", {**message("x"), "max_tokens": "lots"}),
    (400, "max_tokens", {**message("x"), "max_tokens": True}),
    (400, "max_tokens", {**message("x"), "max_tokens": CONTEXT + 1}),
    (400, "input_tokens", {**message("x" * 4 * CONTEXT)}),
    (400, "input_tokens", {**message("x" * 4 * 2000), "max_tokens": 100}),
    (400, "min_tokens", {**message("x"), "max_tokens": 2, "min_tokens": 3}),
    (400, "temperature", {**message("x"), "temperature": -1}),
    (400, "stream", {**message("x"), "stream": "yes"}),
    (400, "stream_options", {**message("x"), "stream_options": [1]}),
    (400, "n", {**message("x"), "n": 2}),
    (404, "model", {**message("x"), "model": "another"}),
]


@pytest.mark.parametrize(("status", "param", "body"), BAD, ids=[f"{p}-{i}" for i, (_, p, _) in enumerate(BAD)])
def test_refused_as_vllm_would(served: Served, status: int, param: str, body: dict[str, Any]) -> None:
    got, said = served.ask("POST", CHAT, body)
    error = json.loads(said)["error"]
    assert got == error["code"] == status
    assert param in error["param"]
    assert error["message"]


def test_what_is_not_a_request_is_refused_and_the_connection_goes_on(served: Served) -> None:
    for body in (b"{", b"[]", b"\xff\xfe", b""):
        assert served.ask("POST", CHAT, body)[0] == 400
    assert served.ask("POST", CHAT, b"{}", "text/plain")[0] == 400
    assert served.ask("POST", "/v1/responses", {})[0] == 404
    assert served.ask("GET", CHAT)[0] == 405
    assert served.ask("POST", "/metrics", {})[0] == 405
    assert served.ask("POST", PLAIN, {"prompt": ["a", "b"]})[0] == 400
    assert served.chat()["choices"]


def test_the_longest_request_that_fits_is_taken() -> None:
    # 8 tokens of heads and 4 of text, and the answer.
    with Served([Plain(step_s=1e-5)], context=64) as s:
        assert s.chat("x" * 16, tokens=52)["usage"]["total_tokens"] == 64
        assert s.ask("POST", CHAT, {**message("x" * 16), "max_tokens": 53})[0] == 400
        said = s.chat("x" * 16, max_tokens=None)  # what is drawn is cut to what fits
        assert said["usage"]["total_tokens"] <= 64


def test_too_many_at_once_are_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.sim.front.MOST_IN_FLIGHT", 1)
    with Served([Plain(step_s=0.05)]) as s, hanging(s, max_tokens=1000):
        status, body = s.ask("POST", CHAT, message("x"))
        assert status == 503
        assert "1 requests" in json.loads(body)["error"]["message"]
        assert s.metric("vllm:admission_rejections_total") == 1


# --- clients that leave


def test_a_client_that_hangs_up_frees_its_place() -> None:
    engine = Plain(step_s=0.002, seqs=1)
    with Served([engine]) as s:
        with hanging(s, max_tokens=1500):
            with hanging(s, max_tokens=1500):  # waits for the place
                until(lambda: len(engine.waiting) == 1)
            until(lambda: not engine.waiting)
            assert engine.running
        until(lambda: not engine.running)
        assert s.chat()["usage"]["completion_tokens"] == 4
        assert s.metric("vllm:request_success_total", finished_reason="abort") == 2
        assert s.metric("vllm:request_success_total", finished_reason="length") == 1
        until(lambda: s.metric("vllm:num_requests_running") == 0)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_stream, "MOST_UNREAD", 0)
    monkeypatch.setattr(front_stream, "LOOK_EVERY", 1)
    engine = Plain(step_s=1e-5)
    with Served([engine], context=1 << 21) as s, hanging(s, max_tokens=1 << 20):
        until(lambda: s.metric("vllm:request_success_total", finished_reason="abort") == 1)
        assert not engine.running


# --- pages


def test_pages(served: Served) -> None:
    models = json.loads(served.ask("GET", "/v1/models")[1])
    assert models["data"][0] == json.loads(served.ask("GET", "/v1/models/m")[1])
    assert models["data"][0]["max_model_len"] == CONTEXT
    assert served.ask("GET", "/health") == (200, b"")
    assert "whywait" in json.loads(served.ask("GET", "/version")[1])["version"]
    assert served.ask("GET", "/nothing")[0] == 404


def test_tokenize_counts_as_usage_does(served: Served) -> None:
    for asked in (message("how many tokens?"), {"prompt": "how many tokens?"}):
        said = json.loads(served.ask("POST", "/tokenize", {"model": "m", **asked})[1])
        used = json.loads(served.ask("POST", CHAT if "messages" in asked else PLAIN, {**asked, "max_tokens": 1})[1])
        assert said["count"] == len(said["tokens"]) == used["usage"]["prompt_tokens"]
    assert served.ask("POST", "/tokenize", {"model": "another", "prompt": "x"})[0] == 404
    assert served.ask("POST", "/tokenize", {"model": "m"})[0] == 400


def test_the_metrics_are_vllms_and_add_up() -> None:
    with Served([Plain(step_s=0.004, token_s=0.0)]) as s:
        text = "a long enough beginning, " * 20
        for _ in range(3):
            s.chat(text, tokens=5)
        body = s.ask("GET", "/metrics")[1].decode()
    assert detect(metrics_text=body) is vllm.TABLE
    page = parse(body)
    ours = {sample.name: sample.value for sample in canonical(page.samples, vllm.TABLE) if "le" not in sample.labels}
    prompt = 8 + len(text) // 4
    whole = prompt // BLOCK * BLOCK  # of each prompt after the first, its whole blocks are found
    assert ours["prompt_tokens_total"] == 3 * prompt == ours["prefix_queries_total"]
    assert ours["prefix_hits_total"] == ours["cached_tokens_total"] == 2 * whole
    assert ours["prompt_tokens_computed_total"] == 3 * prompt - 2 * whole
    assert ours["output_tokens_total"] == 15
    assert ours["kv_tokens_total"] == 16000
    assert ours["requests_total"] == 0  # the last of the page: of those that ended in an error
    assert ours["iteration_tokens_sum"] == 3 * prompt - 2 * whole + 15
    for name in ("ttft_seconds", "e2e_seconds", "queue_seconds", "prefill_seconds", "decode_seconds", "tpot_seconds"):
        assert ours[f"{name}_count"] == 3
    assert ours["itl_seconds_count"] == 12
    assert ours["itl_seconds_sum"] == pytest.approx(12 * 0.004)
    assert ours["decode_seconds_sum"] == pytest.approx(3 * 4 * 0.004)
    assert ours["prefill_seconds_sum"] == pytest.approx(3 * 0.004)
    assert page_facts(page.samples, vllm.TABLE)["block_size"] == "16"
    buckets = [x for x in page.samples if x.name == "vllm:inter_token_latency_seconds_bucket"]
    assert [x.value for x in buckets] == [12.0] * len(buckets)  # 4 ms is below the first bound
    late = next(x for x in page.samples if x.name == "whywait_sim_lateness_seconds_count")
    assert late.value == 15


def test_conversations_find_the_turns_before_in_the_cache() -> None:
    with Served([Plain(step_s=1e-4)]) as s:
        first = [{"role": "system", "content": "s" * 200}, {"role": "user", "content": "u" * 200}]
        said = s.chat(messages=first, tokens=64)
        answer = said["choices"][0]["message"]["content"]
        again = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
        cached = s.chat(messages=again)["usage"]["prompt_tokens_details"]["cached_tokens"]
        # All of the turn before, the answer included, in whole blocks; vLLM too keeps the blocks of answers.
        assert cached == said["usage"]["total_tokens"] // BLOCK * BLOCK
        assert s.chat(messages=again, cache_salt="mine")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    with Served([Plain(step_s=1e-4)], prefix_cache=False) as s:
        for _ in range(2):
            assert s.chat("x" * 400)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert s.metric("vllm:prefix_cache_queries_total") == 0


@pytest.mark.parametrize(("routing", "counts"), [("round robin", [2, 2]), ("least load", [4, 0]), ("prefix", [4, 0])])
def test_replicas_are_engines_of_one_page(routing: str, counts: list[int]) -> None:
    """One after the other, so the least loaded is always the first."""
    with Served([Plain(step_s=1e-4), Plain(step_s=1e-4)], routing=routing) as s:
        for _ in range(4):
            s.chat("x" * 400)
        each = [s.metric("vllm:request_success_total", engine=str(i)) for i in range(2)]
    assert each == counts


def test_routing_by_prefix_brings_a_beginning_back_to_where_it_was() -> None:
    with Served([Plain(step_s=1e-4), Plain(step_s=1e-4)], routing="prefix") as s:
        s.chat("a" * 400)
        with hanging(s, max_tokens=1000):  # busies the first, where both would be free
            s.chat("b" * 400)
            assert s.metric("vllm:generation_tokens_total", engine="1") == 4
            s.chat("a" * 400)
            assert s.metric("vllm:prefix_cache_hits_total", engine="0") > 0


# --- the pace


class Turned:
    """A loop whose clock is told: timers run when they are due, or ``late`` after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.timers, self.serial = 10**12, [], 0  # type: ignore[var-annotated]
        self.late_ns = 0
        monkeypatch.setattr("whywait.sim.front_pace.monotonic_ns", lambda: self.now)

    def at(self, t_ns: int, fn: Any) -> None:
        self.serial += 1
        self.timers.append((t_ns, self.serial, fn))

    def run(self) -> None:
        while self.timers:
            self.timers.sort()
            t_ns, serial, fn = self.timers.pop(0)
            self.now = max(self.now, t_ns + self.late_ns)
            again = fn()
            if again is not None:
                self.timers.append((again, serial, fn))


class Noted:
    def __init__(self, pace: Pace, id: int, output: int) -> None:
        self.pace, self.id, self.left = pace, id, output
        self.stamps: list[int] = []
        self.begun = 0

    def scheduled(self, at_ns: int, cached: int) -> None:
        self.begun = at_ns

    def tokens(self, count: int, at_ns: int) -> None:
        self.stamps.append(at_ns)
        self.left -= count
        if not self.left:
            self.pace.ended(self.id)


def paced(loop: Turned, engine: Plain, speed: float = 1.0, reply_s: float = 0.0) -> Pace:
    return Pace(engine, Told(CONTEXT), loop.at, speed, reply_s)


@pytest.mark.parametrize("late_ms", [0, 3, 500])
def test_lateness_does_not_add_up(monkeypatch: pytest.MonkeyPatch, late_ms: int) -> None:
    loop = Turned(monkeypatch)
    pace = paced(loop, Plain(step_s=0.01, token_s=0.001), reply_s=0.002)
    note = Noted(pace, 1, 5)
    zero = loop.now
    pace.add(New(1, 20, 5), zero + 1_000_000, note)
    loop.late_ns = late_ms * 1_000_000
    loop.run()
    # Frontend 1 ms, first step 10 + 20 · 1 ms, then 10 ms each; 2 ms to the client.
    assert [(t - zero) / 1e6 for t in note.stamps] == pytest.approx([33, 43, 53, 63, 73])
    assert note.begun == zero + 1_000_000
    late = pace.told.late
    assert late.histogram.number == 5
    assert late.worst == pytest.approx(late_ms / 1e3)
    assert pace.told.slipped_s == 0


def test_far_behind_the_timetable_moves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Turned(monkeypatch)
    pace = paced(loop, Plain(step_s=0.01, token_s=0.0))
    note = Noted(pace, 1, 3)
    pace.add(New(1, 1, 3), loop.now, note)
    loop.late_ns = 2 * SLIP_NS
    loop.run()
    assert [b - a for a, b in zip(note.stamps, note.stamps[1:], strict=False)] == [2 * SLIP_NS + 10_000_000] * 2
    assert pace.told.slipped_s == pytest.approx(6)


def test_twice_the_speed_is_half_the_time_on_the_clock_and_none_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Turned(monkeypatch)
    engine = Plain(step_s=0.01, token_s=0.0)
    pace = paced(loop, engine, speed=2.0)
    zero, notes = loop.now, []
    for id, after in ((1, 0), (2, 7_000_000)):
        notes.append(Noted(pace, id, 3))
        pace.add(New(id, 1, 3), zero + after, notes[-1])
    loop.run()
    assert [(t - zero) / 1e6 for t in notes[0].stamps] == pytest.approx([5, 10, 15])
    assert [(t - zero) / 1e6 for t in notes[1].stamps] == pytest.approx([15, 20, 25])
    assert engine.times == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05])


def test_an_idle_engine_begins_when_work_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Turned(monkeypatch)
    pace = paced(loop, Plain(step_s=0.01, token_s=0.0))
    zero, first, second = loop.now, Noted(pace, 1, 1), Noted(pace, 2, 1)
    pace.add(New(2, 1, 1), zero + 50_000_000, second)
    pace.add(New(1, 1, 1), zero + 2_000_000, first)
    loop.run()
    assert first.stamps == [zero + 12_000_000]
    assert second.stamps == [zero + 60_000_000]
    assert pace.now == Now(0, 0, 0.0)


def test_one_that_left_before_it_reached_the_engine_is_not_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Turned(monkeypatch)
    engine = Plain()
    pace = paced(loop, engine)
    pace.add(New(1, 1, 1), loop.now + 5, Noted(pace, 1, 1))
    pace.drop(1)
    loop.run()
    assert not engine.running
    assert pace.told.counters["vllm:generation_tokens_total"] == 0


def test_a_step_that_gives_several_tokens_is_one_event() -> None:
    class Drafts(Plain):
        def step(self, now_s: float) -> Step | None:
            if not self.waiting:
                return None
            new = self.waiting.popleft()
            return Step(0.001, [new.id], [new.output], new.prompt, [(new.id, 0)], Now(1, 0, 0.1), 0, 1, 7, 5)

    with Served([Drafts()], speculates=True) as s:
        events = s.events(PLAIN, prompt="x", max_tokens=6, return_token_ids=True)
        assert [len(e["choices"][0]["token_ids"]) for e in events] == [6]
        assert s.metric("vllm:spec_decode_num_draft_tokens_total") == 7
        assert s.metric("vllm:spec_decode_num_accepted_tokens_total") == 5


# --- pieces


def test_blocks_are_equal_as_far_as_their_texts_are() -> None:
    blocks = Blocks(BLOCK, 1000)
    one = blocks.chain(b"a" * 64 * 3 + b"rest")
    assert len(one) == 3
    assert blocks.chain(b"a" * 64 * 2 + b"b" * 64)[:2] == one[:2]
    assert blocks.chain(b"b" * 64 + b"a" * 64)[1] not in one  # the same piece after another beginning
    assert blocks.chain(b"a" * 63) == []
    assert blocks.chain(b"a" * 64, "salt")[0] not in one


def test_blocks_that_were_not_seen_for_long_are_forgotten() -> None:
    blocks = Blocks(BLOCK, 4)
    kept, lost = blocks.chain(b"k" * 64), blocks.chain(b"l" * 64)
    for i in range(10):
        blocks.chain(bytes([i]) * 64)
        assert blocks.chain(b"k" * 64) == kept
    assert blocks.chain(b"l" * 64) != lost


def test_a_turn_begins_with_the_turn_before_it() -> None:
    first = [{"role": "user", "content": "odd length"}]
    later = [*first, {"role": "assistant", "content": "é"}, {"role": "tool", "content": [{"text": "a"}]}]
    assert layout(later).startswith(layout(first))
    assert len(layout(later)) % 4 == 0


def test_nothing_in_a_body_raises_anything_else() -> None:
    odd: list[Any] = [None, True, 0, -1, 1.5, 1e308, "", "\ud800", [], [[]], {}, {"a": 1}]
    fields = ("messages", "prompt", "model", "stream", "stream_options", "max_tokens", "min_tokens", "n", "priority",
              "temperature", "cache_salt", "ignore_eos", "stop", "return_token_ids")  # fmt: skip
    taken = 0
    for field in fields:
        for value in odd:
            for chat in (True, False):
                body = json.dumps({**message("x"), "prompt": "x", field: value}).encode()
                with contextlib.suppress(Refused):
                    taken += read(body, chat).prompt_tokens > 0
    assert taken > 100


def test_quantiles_of_lateness_are_bounds() -> None:
    late = Late()
    assert late.quantile(0.5) is None
    for value in (-0.1, 1e-5, 3e-5, 0.9, 70.0):
        late.observe(value)
    assert late.quantile(0.5) == pytest.approx(5e-5)
    assert late.quantile(1.0) == late.worst == 70.0
    h = Histogram((1, 2))
    h.observe(1, 3)
    assert list(h.lines("x", 'a="b"'))[:2] == ['x_bucket{a="b",le="1.0"} 3', 'x_bucket{a="b",le="2.0"} 3']


# --- the kernel's engines underneath


def load_of(n: int, seed: int, block: int) -> tuple[Load, list[list[int]]]:
    """Requests in identical pairs that share beginnings with others, so that every block is known by content."""
    rng = np.random.default_rng(seed)
    arrive = np.cumsum(rng.exponential(0.02, n))
    prompt, output, group = rng.integers(5, 600, n), rng.integers(1, 80, n), rng.integers(0, 6, n)
    for column in (prompt, output, group):
        column[1::2] = column[::2]
    names: dict[tuple[int, int, int], int] = {}
    chains = []
    for i in range(n):
        keys = ((int(group[i]), j, i // 2 if j >= 20 else 0) for j in range((prompt[i] + output[i]) // block))
        chains.append([names.setdefault(key, len(names)) for key in keys])
    at = np.concatenate(([0], np.cumsum([len(c) for c in chains])))
    zero = np.zeros(n, np.int64)
    priority = rng.integers(0, 3, n)
    return Load(arrive, zero - 1, np.zeros(n), prompt, output, priority, zero, at,
                np.array([x for c in chains for x in c])), chains  # fmt: skip


GRID, LINEAR_S = np.array([1, 64, 8192]), np.array([0.004, 0.005, 0.2])
COST = StepCost(GRID, LINEAR_S, 0.001, 0.0005, 1e-5, 1e-8, 0.0, 0, 1e-4, 1e-9, 0.0)
POOLS = {
    "vllm": Pool(VLLM, prefix_cache=True, blocks=400, max_seqs=32),
    "preempts, by priority": Pool(VLLM, prefix_cache=True, blocks=120, max_seqs=32, priority=True),
    "no prefix cache": Pool(VLLM, blocks=120, max_seqs=32),
    "sglang": Pool(SGLANG, prefix_cache=True, blocks=300, max_seqs=32, reserve=KEEP_SHARE),
    "trtllm": Pool(TRTLLM, prefix_cache=True, blocks=300, max_seqs=32, reserve=KEEP_FULL),
    "llama.cpp": Pool(LLAMA_CPP, prefix_cache=True, blocks=400, max_seqs=8, reserve=KEEP_FULL),
    "static": Pool(STATIC, blocks=2000, max_seqs=8),
    "drafts": Pool(VLLM, prefix_cache=True, blocks=300, max_seqs=32, drafts=3, acceptance=(0.8, 0.6, 0.4)),
    "tier": Pool(VLLM, prefix_cache=True, blocks=120, max_seqs=32, tier_blocks=(10_000,), tier_block_s=(1e-3,),
                 tier_latency_s=(1e-4,)),
    "lfu": Pool(VLLM, prefix_cache=True, blocks=120, max_seqs=32, evict=LFU),
    "fifo, sglang, a tier": Pool(SGLANG, prefix_cache=True, blocks=150, max_seqs=32, reserve=KEEP_SHARE, evict=FIFO,
                                 tier_blocks=(10_000,), tier_block_s=(1e-3,), tier_latency_s=(1e-4,)),
    "ahead": Pool(VLLM, prefix_cache=True, blocks=200, max_seqs=16, ahead=True, priority=True),
    "looks seldom": Pool(SGLANG, prefix_cache=True, blocks=200, max_seqs=16, reserve=KEEP_SHARE, receive_every=7),
    "puts off": Pool(TRTLLM, prefix_cache=True, blocks=300, max_seqs=32, reserve=KEEP_FULL, ahead=True, wait_steps=5,
                     wait_share=0.3),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_stepped_one_by_one_the_kernel_gives_what_it_gives_in_one_go(name: str) -> None:
    n, pool = 100, POOLS[name]
    load, chains = load_of(n, 1, pool.block)
    whole = kernel.run(load, [pool], [COST], Settings(seed=1, macro=False, steps=0))
    engine = Online(pool, COST, 1, rows=n)
    first, last, cached = np.full(n, np.nan), np.full(n, np.nan), np.full(n, -1)
    got, preempted, now, k = np.zeros(n, int), 0, 0.0, 0
    while True:
        while k < n and load.arrive_s[k] <= now:
            new = New(k, int(load.prompt[k]), int(load.output[k]), chains[k], int(load.priority[k]))
            engine.add(new, float(load.arrive_s[k]))
            k += 1
        coming = float(load.arrive_s[k]) if k < n else float("inf")
        step = engine.step(now)
        if step is None or not (step.ids or step.prefill_tokens):
            now = min(coming, now + step.took_s if step else float("inf"))
            if now == float("inf"):
                break
            continue
        preempted += step.preempted
        now += step.took_s
        for id, hit in step.scheduled:
            cached[id] = hit
        for id, count in zip(step.ids, step.tokens, strict=True):
            first[id] = now if not got[id] else first[id]
            got[id] += count
            last[id] = now if got[id] == load.output[id] else last[id]
    assert got.tolist() == load.output.tolist()
    assert np.array_equal(first, whole.first_s)
    assert np.array_equal(last, whole.last_s)
    assert cached.tolist() == whole.cached.tolist()
    assert preempted == whole.preempted.sum()


@pytest.mark.parametrize("name", [n for n in POOLS if n != "static"])
def test_who_leaves_gives_everything_back(name: str) -> None:
    """Waiting, in prefill, decoding, loading: at the end all blocks are free, and the engine is as good as new."""
    pool = POOLS[name]
    load, chains = load_of(60, 2, pool.block)
    rng = np.random.default_rng(3)
    engine = Online(pool, COST, 1, rows=60)
    now, there, ended, k = 0.0, set[int](), 0, 0
    for _ in range(5000):
        if k < 60 and rng.random() < 0.3:
            engine.add(New(k, int(load.prompt[k]), int(load.output[k]), chains[k], int(load.priority[k])), now)
            there.add(k)
            k += 1
        if there and rng.random() < 0.1:
            gone = int(rng.choice(sorted(there)))
            engine.drop(gone)
            there.discard(gone)
        step = engine.step(now)
        now += step.took_s if step else 0.01
        if step is None and k == 60:
            break
        for id, count in zip(step.ids, step.tokens, strict=True) if step else ():
            assert id in there
            load.output[id] -= count
            if not load.output[id]:
                there.discard(id)
                ended += 1
    assert step is None
    assert not there
    assert 10 < ended < 60
    free = get(engine._w.engines, "free")[0]
    assert free == pool.blocks
    assert sorted(engine._free) == list(range(60 + pool.max_seqs))
    engine.add(New(99, 100, 5, chains[0]), now)
    got = 0
    while step := engine.step(now):
        now += step.took_s
        got += sum(step.tokens)
    assert got == 5


@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 1), (2, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("seen", [True, False])
def test_who_leaves_a_queue_leaves_the_others_in_order(gone: tuple[int, ...], seen: bool) -> None:
    """Of three that wait, in the engine's queue or not yet seen by it; then one more comes."""
    engine = Online(Pool(VLLM, max_seqs=1, receive_every=1 if seen else 1000), COST, 1, rows=8)
    engine.add(New(9, 10, 40), 0.0)
    now = 0.0
    for _ in range(3):
        step = engine.step(now)
        assert step is not None
        now += step.took_s
    for id in range(3):
        engine.add(New(id, 10, 2), now)
    step = engine.step(now)
    assert step is not None
    assert (step.now.waiting, engine._engine("inbox")) == (3, 0 if seen else 3)
    for id in gone:
        engine.drop(id)
    now += step.took_s
    engine.add(New(3, 10, 2), now)
    order = []
    while step := engine.step(now):
        now += step.took_s
        order += [id for id, _ in step.scheduled]
    assert order == [id for id in range(4) if id not in gone]
    assert sorted(engine._free) == list(range(9))


@pytest.mark.parametrize("loaded", [False, True])
def test_who_leaves_while_its_blocks_come_up_gives_them_back(loaded: bool) -> None:
    """It leaves before they are there, or after, while another has the only place."""
    pool = Pool(VLLM, prefix_cache=True, blocks=40, max_seqs=1, tier_blocks=(1000,), tier_block_s=(1e-3,),
                tier_latency_s=(1e-4,))  # fmt: skip
    engine = Online(pool, COST, 1, rows=8)
    now = 0.0
    for id, first in ((1, 0), (2, 100)):  # the second pushes the first down
        engine.add(New(id, 600, 1, range(first, first + 37)), now)
        step = engine.step(now)
        assert step is not None
        now += step.took_s
    engine.add(New(3, 330, 5, range(20)), now)
    step = engine.step(now)
    assert step is not None
    assert (step.ids, engine._engine("loading")) == ((), 1)
    engine.add(New(4, 10, 30), now)
    end = now + (0.1 if loaded else 0.0)
    while step is not None and now <= end:
        step = engine.step(now)
        now += step.took_s if step else 0.0
    assert (engine._engine("loading"), engine._engine("waiting")) == ((0, 1) if loaded else (1, 0))
    engine.drop(3)
    given = []
    while step := engine.step(now):
        now += step.took_s
        given += step.ids
    assert set(given) == {4}
    assert engine._engine("free") == pool.blocks
    assert engine._engine("promised") == 0
    assert sorted(engine._free) == list(range(9))


def test_ids_of_blocks_are_used_again() -> None:
    """Far more content than the cache holds: what was evicted frees its id, what is there is found."""
    pool = Pool(VLLM, prefix_cache=True, blocks=40, max_seqs=4)
    engine = Online(pool, COST, 1, rows=8)
    now, hits = 0.0, 0
    for i in range(1000):
        numbers = [10 * (i // 2) + j for j in range(10)]  # each twice in a row
        engine.add(New(i, 170, 1, numbers), now)
        step = engine.step(now)
        assert step is not None
        now += step.took_s
        hits += step.scheduled[0][1]
    assert hits == 500 * 160
    assert len(engine._chains._ids) <= 2 * 40 + 1024


# --- a deployment


def deployment(**more: Any) -> Deployment:
    d = simulating.deployment_of("h200", "llama-3.1-8b")
    return dataclasses.replace(d, **more)


def test_what_a_deployment_serves() -> None:
    d = servable(deployment())
    said = service_of(d, label="modelled")
    assert said.context == said.kv_blocks * said.block > 100_000
    assert said.cache["num_gpu_blocks"] == str(said.kv_blocks)
    assert service_of(d, "mine", 4096).context == 4096
    assert service_of(d, "mine").model == "mine"
    with pytest.raises(UsageError, match="more than"):
        service_of(d, context=1 << 40)
    uncut = dataclasses.replace(d, engine=dataclasses.replace(d.engine, chunked=False, token_budget=2048))
    assert service_of(uncut).context == 2048
    with pytest.raises(UsageError, match="prefill and decode"):
        servable(deployment(split=Split(1, 1)))
    by_token = dataclasses.replace(d.engine, block=1, kv_blocks=1600)
    assert servable(deployment(engine=by_token)).engine.kv_blocks == 100


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llama.cpp", "static"])
@pytest.mark.parametrize(("draft", "limit"), [("", 0), ("", 500), ("spec-ngram", 500)])
def test_the_longest_request_that_is_taken_fits_the_engine(engine: str, draft: str, limit: int) -> None:
    """Also where --max-model-len is more than the engine's own limit."""
    d = simulating.deployment_of("h200", "llama-3.1-8b", engine=engine)
    d = apply(draft, dataclasses.replace(d, engine=dataclasses.replace(d.engine, max_context=limit)))
    d = servable(dataclasses.replace(d, engine=dataclasses.replace(d.engine, kv_blocks=4000 // d.engine.block)))
    most = service_of(dataclasses.replace(d, engine=dataclasses.replace(d.engine, max_context=0))).context
    assert 1900 < most <= 4000
    context = service_of(d, context=most).context
    assert context == most
    one = engines_of(d, 1)[0]
    one.add(New(1, context - 3, 3), 0.0)
    now, got = 0.0, 0
    while step := one.step(now):
        now += step.took_s
        got += sum(step.tokens)
    assert got == 3


def test_a_client_sees_what_the_simulator_says() -> None:
    """Our own client's TTFT and TPOT of an 8B model on an H200, against the stamps of the simulation."""
    d = servable(deployment())
    front = Front(dataclasses.replace(service_of(d, "m"), speed=3.0), engines_of(d, 1))
    thread = threading.Thread(target=front.server.run, daemon=True)
    thread.start()
    try:
        result = app.measure(
            app.Options(url=front.server.url, floor=False),
            [app.Load("concurrency", c, requests=6) for c in (1, 3)],
        )
    finally:
        front.server.stop()
        thread.join()
    run = result.run
    assert run.manifest.engine["name"] == "vllm"
    assert any("simulated" in doubt["what"] for doubt in run.manifest.doubts)
    assert run.manifest.machine["engine_is_local"] is None
    req = run.requests
    assert (req["outcome"] == OK).all()
    # The client may be late, never early: the stamps of the simulation are the truth.
    decode_ms = (req["last_ns"] - req["first_ns"]) / 1e6
    assert np.median(decode_ms - req["engine_decode_ms"]) == pytest.approx(0, abs=20)
    ttft = (req["first_ns"] - req["sent_ns"]) / 1e6
    engine_ms = req["engine_queue_ms"] + req["engine_prefill_ms"]
    assert (ttft > engine_ms).all()
    rates = [point["output_tokens_per_s"] for point in result.summary["points"]]
    assert rates[1] > rates[0]


def test_the_verb_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "whywait", "serve-sim", *H200, "--speed", "4"]
    env = {**os.environ, "WHYWAIT_SIM": "python", "PYTHONPATH": str(Path(app.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split("/v1")[0]
        assert "Ctrl-C" in line
        host, port = url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        body = json.dumps({**message("hello"), "max_tokens": 3})
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        said = json.loads(connection.getresponse().read())
        connection.close()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert said["usage"]["completion_tokens"] == 3
    assert "modelled" in err
    assert "prior only" in err
    assert "known error of vllm on measured services, no calibration: TPOT" in err
    assert "plain Python" in err
    assert "1 requests" in err
    assert "late by at most" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--host", "0.0.0.0"], "other machines"),
        (["--layout", "pd=1:1"], "prefill and decode"),
        (["--model", "lama-3.1-8b"], "lama"),
        (["--port", "99999"], "no port"),
        (["--calibration", "nothing.json"], "nothing.json"),
        (["--run", "nothing"], "nothing"),
        (["--max-model-len", "999999999"], "max-model-len"),
        (["--output-tokens", "many"], "many"),
    ],
)
def test_the_verb_refuses_in_one_line(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-sim", *H200, *flags]) == EXIT_USAGE
    err = capsys.readouterr().err
    assert why in err
    assert "Traceback" not in err


def test_a_kept_calibration_is_what_is_served(tmp_path: Path) -> None:
    prior = Prior({"weights": 0.1, "reply": 0.1}, {"weights": 0.5, "reply": 1.0})
    kept = prior_only(prior).save(tmp_path / "c.json")
    args = parser().parse_args(["serve-sim", *H200, "--calibration", str(kept)])
    d, rests_on = _service(args)
    assert d.efficiency.weights == pytest.approx(np.exp(0.5))
    assert d.engine.reply_s == pytest.approx(np.exp(1.0) * deployment().engine.reply_s)
    assert str(kept) in rests_on
