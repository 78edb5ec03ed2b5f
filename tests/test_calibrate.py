"""Prompt lengths come out by the service's own count; and what a row of a schedule becomes as messages."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from whywait.core.schedule import Lengths, RequestClass, Schedule, Workload
from whywait.engines import by_name
from whywait.load import calibrate
from whywait.load.crew import Writer
from whywait.load.preflight import Target
from whywait.load.prompts import Fit, Prompter
from whywait.load.recipe import closed_schedule
from whywait.load.turns import Turns, languages_of, shares
from whywait.net.endpoint import parse_url


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    """The budget of time would make what these tests see depend on how busy the machine is."""
    monkeypatch.setattr(calibrate, "EXACT_S", 600.0)


def L(text):
    return Lengths.parse(text)


def pieces(text: str) -> int:
    """How the services here count: word pieces of three letters, every other sign by itself. No line fits that."""
    return len(re.findall(r"[A-Za-z]{1,3}|[^\sA-Za-z]", text))


def template(messages: list[dict[str, str]]) -> str:
    return "".join(f"<<{m['role']}>>\n{m['content']}\n" for m in messages) + "<<assistant>>"


class Service(ThreadingHTTPServer):
    """As vLLM or llama.cpp answer: a whole completion with usage, /tokenize, /apply-template."""

    def __init__(self, engine: str, tokenizer: bool = True, skew: int = 0, usage: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.engine, self.tokenizer, self.skew, self.usage = engine, tokenizer, skew, usage
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append((path, body))
        if path.endswith("completions"):
            text = template(body["messages"]) if "messages" in body else body["prompt"]
            usage = {"prompt_tokens": pieces(text) + self.skew, "completion_tokens": 1}
            kind = {"text": "x"} if "prompt" in body else {"message": {"content": "x"}}
            done = {"choices": [{"index": 0, "finish_reason": "length", **kind}]}
            return 200, {**done, "usage": usage} if self.usage else done
        if not self.tokenizer:
            return 404, {}
        if path == "/apply-template" and self.engine == "llama.cpp":
            return 200, {"prompt": template(body["messages"])}
        if path == "/tokenize" and self.engine == "llama.cpp":
            return 200, {"tokens": [1] * pieces(body["content"])}
        if path == "/tokenize":
            return 200, {"count": pieces(template(body["messages"]) if "messages" in body else body["prompt"])}
        return 404, {}


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.answer(self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(engine: str = "vllm", dialect: str = "chat", **more: Any) -> Iterator[tuple[Service, Target]]:
    server = Service(engine, **more)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        endpoint = parse_url(f"http://127.0.0.1:{server.server_port}", dialect)
        yield server, Target(endpoint, "m", engine=by_name(engine))
    finally:
        server.shutdown()
        server.server_close()


def counted(prompter: Prompter, schedule: Schedule, workload: Workload, row: int) -> int:
    turns = Turns(prompter, schedule, languages_of(workload))
    return pieces(template([m._asdict() for m in turns.messages(row)]))


CHAT = Workload((RequestClass(prompt_tokens=L("uniform(150,400)")),))
AGENT = Workload(
    (
        RequestClass("agent", 1, L("uniform(150,300)"), L("40"), turns=L("2"), tool_calls=L("1"),
                     tool_result_tokens=L("90"), shared=0.5, language=("en", "code")),
    )
)  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("dialect", ["chat", "completions"])
@pytest.mark.parametrize("skew", [0, 5])
def test_lengths_are_exact_where_the_service_counts_for_us(engine, dialect, skew):
    schedule = closed_schedule(CHAT, 30)
    with serving(engine, dialect, skew=skew) as (server, target):
        prompter, doubts = calibrate.calibrate(target, CHAT, Prompter())
        found = calibrate.counter(target, CHAT, prompter)
        assert found is not None
        assert found.offset == skew  # what usage counts beyond the tokenizer is found by real requests
        prompter = calibrate.exact(found, prompter, schedule, CHAT)
        writer, used = Writer(target, prompter, CHAT, stream=False), []
        for row in range(len(schedule)):
            body = json.loads(writer.body(row, schedule))
            used.append(server.answer("/v1/completions", body)[1]["usage"]["prompt_tokens"])
    assert doubts == []
    off = np.array(used) - schedule.prompt_tokens
    assert (off == 0).all()  # a word has up to five pieces here; what it is too long by is cut from its end


def test_histories_are_exact_too():
    schedule = closed_schedule(AGENT, 16)
    with serving() as (_, target):
        prompter, _ = calibrate.calibrate(target, AGENT, Prompter())
        found = calibrate.counter(target, AGENT, prompter)
        prompter = calibrate.exact(found, prompter, schedule, AGENT)
    off = [counted(prompter, schedule, AGENT, row) - int(schedule.prompt_tokens[row]) for row in range(16)]
    assert schedule.prompt_tokens.max() > 400
    assert np.abs(off).max() <= 1
    assert off.count(0) >= 14


def test_histories_come_near_without_a_tokenizer():
    schedule = closed_schedule(AGENT, 40)
    with serving(tokenizer=False) as (_, target):
        prompter, _ = calibrate.calibrate(target, AGENT, Prompter())
        assert calibrate.counter(target, AGENT, prompter) is None
    assert 4 <= prompter.per_message <= 8  # two signs each side of a role of two to three pieces
    asked = schedule.prompt_tokens.sum()
    assert sum(counted(prompter, schedule, AGENT, row) for row in range(40)) == pytest.approx(asked, rel=0.1)


@pytest.mark.parametrize("more", [{"tokenizer": False}, {"usage": False}])
def test_no_counter_where_the_service_does_not_say(more):
    with serving(**more) as (_, target):
        assert calibrate.counter(target, CHAT, Prompter()) is None
    with serving() as (_, target):
        assert calibrate.counter(dataclasses.replace(target, engine=None), CHAT, Prompter()) is None


def test_a_counter_that_disagrees_with_usage_is_not_believed(monkeypatch):
    with serving() as (server, target):
        real = server.answer
        monkeypatch.setattr(server, "answer", lambda p, b: (200, {"count": 33}) if p == "/tokenize" else real(p, b))
        assert calibrate.counter(target, CHAT, Prompter()) is None


def test_counting_has_an_end(monkeypatch):
    monkeypatch.setattr(calibrate, "EXACT_CALLS", 10)
    schedule = closed_schedule(CHAT, 500)
    with serving() as (server, target):
        found = calibrate.counter(target, CHAT, Prompter())
        before = len(server.asked)
        prompter = calibrate.exact(found, Prompter(), schedule, CHAT)
        assert len(server.asked) - before <= 10 + 4 + calibrate.TRIMS
    assert 1 <= len(prompter.exact) <= 10


def test_without_usage_lengths_are_guessed_and_that_is_said():
    with serving(usage=False) as (_, target):
        prompter, (doubt,) = calibrate.calibrate(target, CHAT, Prompter())
    assert prompter == Prompter()
    assert doubt["what"] == "prompt lengths are guessed"


def test_where_long_probes_do_not_fit_the_context_short_ones_tell(monkeypatch):
    long = Workload((RequestClass(prompt_tokens=L("900")),))
    with serving() as (server, target):
        real = server.answer

        def tight(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            code, said = real(path, body)
            fits = said.get("usage", {}).get("prompt_tokens", 0) < 1000
            return (code, said) if fits else (400, {"error": {"message": "longer than the context"}})

        monkeypatch.setattr(server, "answer", tight)
        prompter, doubts = calibrate.calibrate(target, long, Prompter())
    assert not doubts
    assert prompter.fits["en"].per_unit > 1.3 * Prompter().fit("en").per_unit  # so longer probes were refused


def test_every_language_gets_a_line_of_its_own():
    workload = Workload((RequestClass(language=("en", "de")), RequestClass(language=("zh",))))
    with serving() as (_, target):
        prompter, _ = calibrate.calibrate(target, workload, Prompter())
    assert set(prompter.fits) == {"en", "de", "zh"}
    assert prompter.fits["de"].per_unit > prompter.fits["en"].per_unit > prompter.fits["zh"].per_unit


# What the run itself shows


def _run_of(prompter, workload, n=40):
    schedule = closed_schedule(workload, n)
    counts = [(int(i), counted(prompter, schedule, workload, row)) for row, i in enumerate(schedule.id)]
    return schedule, counts


@pytest.mark.parametrize("lengths", ["uniform(100,400)", "250"])
def test_the_next_point_is_nearer_after_one_was_measured(lengths):
    workload = Workload((RequestClass(prompt_tokens=L(lengths)),))
    prompter = Prompter(fits={"en": Fit(12, 1.0)})
    schedule, counts = _run_of(prompter, workload)
    before = np.mean([t for _, t in counts]) / schedule.prompt_tokens.mean() - 1
    assert before > 0.2
    for _ in range(2):
        prompter = calibrate.refined(prompter, schedule, workload, counts)
        schedule, counts = _run_of(prompter, workload)
    assert np.mean([t for _, t in counts]) == pytest.approx(schedule.prompt_tokens.mean(), rel=0.02)


def test_a_few_requests_and_histories_refine_nothing():
    prompter = Prompter()
    schedule, counts = _run_of(prompter, CHAT, 5)
    assert calibrate.refined(prompter, schedule, CHAT, counts) == prompter
    schedule, counts = _run_of(prompter, AGENT, 16)
    assert calibrate.refined(prompter, schedule, AGENT, counts) == prompter


# Messages


def test_a_turn_begins_with_all_that_was_said_before():
    """Word for word, or the service's prefix cache would find nothing of it."""
    schedule = closed_schedule(AGENT, 8)
    turns = Turns(Prompter(salt="x"), schedule, languages_of(AGENT))
    for row in range(8):
        said = turns.messages(row)
        turn = int(schedule.turn[row])
        assert [m.role for m in said] == ["system", "user", *["assistant", "user"] * turn]
        if turn:
            assert said[: len(said) - 2] == turns.messages(row - 1)
            assert said[-1].content.startswith("Tool result: ") == bool(schedule.tool[row])


def test_sessions_share_their_beginning_and_nothing_after_it():
    schedule = closed_schedule(AGENT, 8)
    turns = Turns(Prompter(salt="x"), schedule, {"": ("en",)})
    (sys_a, user_a, *_), (sys_b, user_b, *_) = turns.messages(0), turns.messages(4)
    shorter = min(sys_a.content, sys_b.content, key=len)
    assert sys_a.content.startswith(shorter)
    assert sys_b.content.startswith(shorter)
    assert user_a.content[:9] != user_b.content[:9]
    other = Turns(Prompter(salt="y"), schedule, {"": ("en",)}).messages(0)
    assert other[0].content[:9] != sys_a.content[:9]  # nor with the run before


def test_equal_blocks_become_equal_text():
    schedule = dataclasses.replace(
        closed_schedule(Workload(), 3), prompt_tokens=np.array([120, 160, 100]),
        blocks=((1, 2, 3), (1, 2, 9, 4), (5, 2, 3)), block_tokens=50,
    )  # fmt: skip
    turns = Turns(Prompter(), schedule, {"": ("en",)})
    a, b, c = (turns.messages(row)[0].content for row in range(3))
    whole = round(50 / 1.3)
    assert a.split()[: 2 * whole + 1] == b.split()[: 2 * whole + 1]
    assert a.split()[: 2 * whole + 4] != b.split()[: 2 * whole + 4]
    assert a.split()[1:whole] != c.split()[1:whole]
    assert len(b.split()) > len(a.split()) > len(c.split())


def test_bodies_keep_the_cache_for_what_is_to_share_and_only_for_that():
    """llama.cpp's switch would turn all reuse off, vLLM's salt only that between different names."""
    agents, chats = closed_schedule(AGENT, 8, first_id=7), closed_schedule(CHAT, 8)
    assert shares(agents, 0)
    assert not shares(chats, 0)
    for engine in ("vllm", "llama.cpp"):
        endpoint = parse_url("http://127.0.0.1:1")
        target = Target(endpoint, "m", engine=by_name(engine))
        writer = Writer(target, Prompter(salt="abc"), AGENT)
        shared = [json.loads(writer.body(row, agents)) for row in range(8)]
        alone = [json.loads(writer.body(row, chats)) for row in range(8)]
        if engine == "vllm":
            assert {b["cache_salt"] for b in shared} == {"abc"}
            assert len({b["cache_salt"] for b in alone}) == 8
        else:
            assert not any("cache_prompt" in b for b in shared)
            assert all(b["cache_prompt"] is False for b in alone)
        assert [len(b["messages"]) for b in shared] == [2, 4, 6, 8, 2, 4, 6, 8]
        assert [b["max_tokens"] for b in shared] == agents.output_tokens.tolist()


def test_dialects_without_roles_get_the_text_in_order():
    for dialect, key in (("completions", "prompt"), ("responses", "input")):
        target = Target(parse_url("http://127.0.0.1:1", dialect), "m")
        schedule = closed_schedule(AGENT, 4)
        body = json.loads(Writer(target, Prompter(), AGENT).body(1, schedule))
        said = Turns(Prompter(), schedule, languages_of(AGENT)).messages(1)
        if key == "prompt":
            assert body["prompt"] == "\n\n".join(m.content for m in said)
        else:
            assert body["input"] == [m._asdict() for m in said]


# A warm cache


def test_warming_sends_every_prompt_that_will_come_again_whole_and_once():
    workload = Workload((RequestClass(prompt_tokens=L("uniform(100,300)")),), cache="warm")
    schedule = closed_schedule(workload, 50, first_id=1000)
    with serving() as (server, target):
        writer = Writer(target, Prompter(cache="warm"), workload)
        assert writer.warm(schedule).answered == 8
        sent = [body for path, body in server.asked]
    assert all(b["max_tokens"] == 1 and not b["stream"] for b in sent)
    warm = [b["messages"][0]["content"].split() for b in sent]
    for row in range(50):
        text = json.loads(writer.body(row, schedule))["messages"][0]["content"].split()
        body = len(text) - 22  # the question at its end comes earlier in a shorter prompt
        assert any(w[:body] == text[:body] and len(w) >= len(text) for w in warm)
