"""One answer of the stub on its way: the timetable kept, and what its fault makes of it."""

from __future__ import annotations

import random
from time import monotonic_ns, time_ns
from typing import Protocol

import orjson

from whywait.load.stub_plan import Ask, Options, Writer
from whywait.load.stub_responses import ResponsesWriter
from whywait.net.clock import bracket
from whywait.net.reply import SSE, error, sse
from whywait.net.serve import Reply, Server
from whywait.units import NS_PER_MS, NS_PER_S

GOLDEN = 0.6180339887498949  # multiples of it fill a circle evenly, however many there are


class Service(Protocol):
    """What a stream needs of the stub."""

    server: Server
    options: Options

    def release(self, stream: Stream, gone: bool = False) -> None: ...


class Stream:
    """One answer on its way. ``tick`` is the hot path: one template filled, one send."""

    def __init__(self, stub: Service, ask: Ask, reply: Reply, serial: int) -> None:
        self.stub, self.ask, self.reply, self.serial = stub, ask, reply, serial
        self.over = self.waited = False
        self.n = 0  # tokens sent
        self.origin = self.due = self.grid = 0
        self.gap, self.jitter = ask.gap_ns, int(ask.plan.jitter_ms * NS_PER_MS)
        self.left, self.size, self.frame = 0, 0, b""
        self.held: list[tuple[bytes, int, int]] = []
        reply.on_gone = self.gone

    def start(self) -> None:
        """A slot is ours: the timetable begins, for a request that had to wait for it, now."""
        ask, plan, loop, now = self.ask, self.ask.plan, self.stub.server, monotonic_ns()
        accepted = self.reply.request.accepted_ns
        self.wall = bracket()[0]  # once per stream, so that its due times are exactly gap apart
        self.writer = (ResponsesWriter if ask.dialect == "responses" else Writer)(
            ask, self.serial, (accepted + self.wall) // NS_PER_S
        )
        origin = (now if self.waited else accepted) + ask.ttft_ns
        if self.gap and (plan.spread or plan.shared_step):
            phase = 0 if plan.shared_step else int(self.serial * GOLDEN % 1 * self.gap)
            origin += (phase - origin) % self.gap
        self.origin = self.grid = self.due = origin
        if self.jitter:
            self.random = random.Random(self.stub.options.seed * 1_000_003 + self.serial)
            self.due += int(self.random.random() * self.jitter)
        runs = list(plan.layout(ask.tokens))
        if not ask.stream:
            self.due += max(0, sum(count for count, _, _ in runs) - 1) * self.gap
            loop.call_at(self.due, self.answer)
            return
        if ask.fault == "split":
            self.reply.request.conn.limit_send(1)
        self.reply.start(200, SSE, ask.fault != "close_delimited", self.writer.role(accepted + self.wall))
        self.push, chunked = self.reply.push, self.reply.chunked
        self.runs = [(count, size, self.writer.content(size, reasoning, chunked)) for count, size, reasoning in runs]
        slow = self.jitter or ask.fault == "coalesce"
        loop.call_at(self.due, (self.tick_slowly if slow else self.tick) if self.next_run() else self.finish)

    def next_run(self) -> bool:
        if self.runs:
            self.left, self.size, self.frame = self.runs.pop(0)
        return self.left > 0

    def tick(self) -> int | None:
        if self.over:
            return None
        due = self.due
        self.n += self.size
        self.push(self.frame % (time_ns(), due + self.wall, self.n))
        self.left -= 1
        if not self.left and not self.next_run():
            self.finish()
            return None
        self.due = due = due + self.gap
        return due

    def tick_slowly(self) -> int | None:
        """The same with jitter, and with several events kept back for one send."""
        if self.over:
            return None
        self.n += self.size
        self.held.append((self.frame, self.due + self.wall, self.n))
        self.left -= 1
        more = self.left > 0 or self.next_run()
        if not more or self.ask.fault != "coalesce" or len(self.held) >= (self.ask.number or 4):
            now = time_ns()
            self.push(b"".join(frame % (now, due, n) for frame, due, n in self.held))
            self.held.clear()
        if not more:
            self.finish()
            return None
        self.grid += self.gap
        late = int(self.random.random() * self.jitter) if self.jitter else 0
        self.due = max(self.due, self.grid + late)
        return self.due

    def finish(self) -> None:
        """The last token is out: say so, or do what the fault wants."""
        fault, reply, writer = self.ask.fault, self.reply, self.writer
        if self.over or fault == "hang":  # one that hangs keeps its slot until the client gives up
            return
        self.over = True
        if fault == "reset":
            reply.abort()
        elif fault == "truncate":
            reply.end()
        elif fault == "hold":  # all is said (with a number: but usage and [DONE]), and the connection stays open
            reply.write(writer.finish() + (writer.trailer() if self.ask.number is None else b""))
        elif fault in ("error_event", "error_hold"):
            said = sse(error("the stub was told to fail", "server_error", 500))
            (reply.end if fault == "error_event" else reply.write)(said)
        elif self.ask.plan.tail_ms:
            reply.write(writer.finish())
            later = self.due + int(self.ask.plan.tail_ms * NS_PER_MS)
            self.stub.server.call_at(later, lambda: reply.end(writer.trailer()))
        else:
            reply.end(writer.finish() + writer.trailer())
        self.stub.release(self)

    def answer(self) -> None:
        """Everything at once, for a request that did not ask for a stream."""
        fault, reply = self.ask.fault, self.reply
        if self.over or fault == "hang":
            return
        self.over, self.n = True, self.ask.tokens
        if fault == "split":
            reply.request.conn.limit_send(1)
        body = self.writer.whole(time_ns(), self.due + self.wall)
        if fault == "reset":
            reply.abort()
        elif fault == "truncate":
            reply.start(200, {"Content-Type": "application/json", "Content-Length": str(len(body))}, False)
            reply.end(body[: len(body) // 2])
        elif fault == "error_event":
            reply.send(500, orjson.dumps(error("the stub was told to fail", "server_error", 500)))
        elif fault == "close_delimited":
            reply.start(200, {"Content-Type": "application/json"}, False, body)
            reply.end()
        else:
            reply.send(200, body)
        self.stub.release(self)

    def gone(self) -> None:
        if not self.over:
            self.over = True
            self.stub.release(self, gone=True)

    def spent(self) -> dict[str, float]:
        """This stream's part in the counters of /metrics; times are the timetable's."""
        if not self.n:
            return {}
        cached = min(self.ask.plan.cached_tokens, self.ask.prompt_tokens)
        return {
            "prompt_tokens_total": self.ask.prompt_tokens - cached,
            "prompt_tokens_cached_total": cached,
            "prompt_seconds_total": self.ask.ttft_ns / NS_PER_S,
            "tokens_predicted_total": self.n,
            "tokens_predicted_seconds_total": max(0, min(self.due, monotonic_ns()) - self.origin) / NS_PER_S,
        }
