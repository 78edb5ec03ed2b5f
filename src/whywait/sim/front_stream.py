"""One answer of the simulated service on its way: tokens in from the engine's steps, bytes out, its stamps kept."""

from __future__ import annotations

from collections.abc import Callable

from whywait.net.reply import SSE, Reply
from whywait.sim.front_ask import Ask
from whywait.sim.front_metrics import Told
from whywait.sim.front_write import Answer, Stages
from whywait.units import NS_PER_MS, NS_PER_S

MOST_UNREAD = 1 << 22  # bytes kept for a client that does not read; then it is cut off
LOOK_EVERY = 64  # tokens
SERVER = {"Server": "whywait-sim"}
P = "vllm:"


class Stream:
    """``output`` tokens for ``ask``, ended by ``finish``. Stamps are ns on the monotonic axis, by the timetable; 0: not
    yet. ``ended`` is told once, and why."""

    def __init__(self, ask: Ask, reply: Reply, told: Told, output: int, finish: str) -> None:
        self.ask, self.reply, self.told = ask, reply, told
        self.output, self.finish = output, finish
        self.n = self.cached = 0
        self.over = False
        self.looked_up = True  # in a prefix cache
        self.arrived_ns = reply.request.accepted_ns
        self.queued_ns = self.scheduled_ns = self.first_ns = self.last_ns = 0
        self.ended: Callable[[str], None] = lambda _why: None
        reply.on_gone = self.gone

    def start(self, serial: int, created: int, queued_ns: int) -> None:
        """It was accepted and will reach the engine at ``queued_ns``; a stream's head goes out."""
        self.queued_ns = queued_ns
        if self.ask.stream:
            self.reply.start(200, {**SSE, **SERVER})
        self.answer = Answer(self.ask, serial, created, self.reply.chunked)

    def scheduled(self, at_ns: int, cached: int) -> None:
        self.scheduled_ns, self.cached = at_ns, cached
        self.told.observe(P + "request_queue_time_seconds", max(0, at_ns - self.queued_ns) / NS_PER_S)
        if self.looked_up:
            self.told.add(P + "prefix_cache_queries_total", self.ask.prompt_tokens)
            self.told.add(P + "prefix_cache_hits_total", cached)

    def tokens(self, count: int, at_ns: int) -> None:
        """The hot path: one send for each step of each stream."""
        if self.over:
            return
        count = min(count, self.output - self.n)
        self.n += count
        if not self.first_ns:
            self._first(at_ns)
        else:
            self.told.observe(P + "inter_token_latency_seconds", (at_ns - self.last_ns) / NS_PER_S)
        self.last_ns = at_ns
        if self.n >= self.output:
            self._end(count)
        elif self.ask.stream:
            self.reply.push(self.answer.content(count, self.n))
            if self.n % LOOK_EVERY == 0 and self.reply.request.conn.pending > MOST_UNREAD:
                self.reply.abort()

    def _first(self, at_ns: int) -> None:
        told, prompt = self.told, self.ask.prompt_tokens
        self.first_ns = at_ns
        told.observe(P + "time_to_first_token_seconds", (at_ns - self.arrived_ns) / NS_PER_S)
        told.add(P + "prompt_tokens_total", prompt)
        told.add(P + "prompt_tokens_cached_total", self.cached)
        if self.ask.stream:
            self.reply.push(self.answer.opening())

    def _end(self, count: int) -> None:
        self.over = True
        stages = self.stages()
        if self.ask.stream:
            self.reply.end(self.answer.closing(count, self.n, self.finish, self.cached, stages))
        else:
            body = self.answer.whole(self.n, self.finish, self.cached, stages)
            self.reply.send(200, body, headers=SERVER)
        self._account()
        self.ended(self.finish)

    def gone(self) -> None:
        """The client hung up."""
        if not self.over:
            self.over = True
            self.ended("abort")

    def stages(self) -> Stages:
        ms = NS_PER_MS
        return Stages(
            max(0, self.scheduled_ns - self.queued_ns) / ms,
            (self.first_ns - self.scheduled_ns) / ms,
            (self.last_ns - self.first_ns) / ms,
        )

    def _account(self) -> None:
        """What vLLM tells of a request when it has ended."""
        observe, s = self.told.observe, NS_PER_S
        first, last, begun = self.first_ns, self.last_ns, self.scheduled_ns
        observe(P + "e2e_request_latency_seconds", (last - self.arrived_ns) / s)
        observe(P + "request_prefill_time_seconds", (first - begun) / s)
        observe(P + "request_decode_time_seconds", (last - first) / s)
        observe(P + "request_inference_time_seconds", (last - begun) / s)
        if self.n > 1:
            observe(P + "request_time_per_output_token_seconds", (last - first) / s / (self.n - 1))
        observe(P + "request_prompt_tokens", self.ask.prompt_tokens)
        observe(P + "request_generation_tokens", self.n)
        observe(P + "request_params_n", 1)
        if self.ask.limit is not None:
            observe(P + "request_params_max_tokens", self.ask.limit)
