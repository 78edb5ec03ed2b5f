"""One OpenAI-compatible port before several engines: a split into prefill and decode, or plain replicas of one engine.

One loop, nothing blocks. A split takes requests first come, first served: one prompt at a time at each prefill engine,
and hand-overs go to the decode engine with the fewest streams as places come free there. Replicas are the baseline: a
request goes at once to the one with the fewest requests (in turn where that is even) and passes through unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, Final

import orjson

from whywait.lab.disagg_call import Backend, Call, as_object, ask
from whywait.lab.disagg_counts import Counts, deferred_of, engine_lines, gauge_lines
from whywait.lab.disagg_pass import DECODE, OVER, PLACE, QUEUE, SAVE, Passage
from whywait.lab.disagg_store import Link, Store
from whywait.net.loop import Loop
from whywait.net.reply import Reply, Request, error
from whywait.net.serve import Server

ASKED: Final = ("/v1/chat/completions", "/v1/completions")
PASSED: Final = ("/v1/models", "/models", "/tokenize", "/detokenize", "/apply-template", "/props")
MOST_WAITING: Final = 4096
PATIENCE_NS: Final = 500_000_000  # for pages of engines; then what they said last stands


class Pages:
    """What both fronts answer beside the work itself. ``engines`` are all of them."""

    def __init__(self, prefill: Sequence[Backend], decode: Sequence[Backend], host: str, port: int) -> None:
        self.loop = Loop()
        self.prefill, self.decode = tuple(prefill), tuple(decode)
        self.server = Server(self._handle, host, port, loop=self.loop)
        self.counts = Counts()

    @property
    def engines(self) -> tuple[Backend, ...]:
        return (*self.prefill, *self.decode)

    def run(self, stop: Callable[[], bool] | None = None) -> None:
        self.loop.run(stop)

    def close(self) -> None:
        self.server.close()
        self.loop.close()

    def asked(self, request: Request, reply: Reply) -> None:
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Of the metrics page, what is the front's own."""
        raise NotImplementedError

    def _handle(self, request: Request, reply: Reply) -> None:
        path = request.path
        if path in ASKED and request.method == "POST":
            self.asked(request, reply)
        elif path == "/metrics":
            Gather(self.loop, self.engines, path, lambda _: self._metrics(reply))
        elif path == "/health":
            Gather(self.loop, self.engines, path, lambda found: _health(reply, found))
        elif path == "/slots":
            Gather(self.loop, self.decode, path, lambda found: _slots(reply, found))
        elif path in PASSED:
            body = request.body if request.method == "POST" else None
            ask(self.loop, self.decode[0], path, body, lambda *found: self._passed(path, reply, *found))
        else:
            reply.send(404, orjson.dumps(error(f"no {path} here", "not_found_error", 404)))

    def _metrics(self, reply: Reply) -> None:
        lines = [*engine_lines(self.prefill, self.decode), *self.lines()]
        reply.send(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4")

    def _passed(self, path: str, reply: Reply, status: int, body: bytes, reason: str) -> None:
        if reason:
            reply.send(502, orjson.dumps(error(f"the engine does not answer ({reason})", "upstream_error", 502)))
            return
        if path == "/props" and status == 200:
            props = {**as_object(body), "total_slots": sum(e.slots for e in self.decode)}
            body = orjson.dumps(props)
        reply.send(status, body)


class Gather:
    """The same page of several engines at once: ``then`` is told (status, body) of each, None where one did not answer
    in time. Metrics pages are kept with the engine."""

    def __init__(
        self, loop: Loop, engines: Sequence[Backend], path: str, then: Callable[[list[tuple[int, bytes] | None]], None]
    ) -> None:
        self._then = then
        self._found: list[tuple[int, bytes] | None] = [None] * len(engines)
        self._left, self._path, self._engines = len(engines), path, engines
        self._calls = [ask(loop, e, path, None, self._taker(i)) for i, e in enumerate(engines)]
        loop.call_at(monotonic_ns() + PATIENCE_NS, self._late)

    def _taker(self, i: int) -> Callable[[int, bytes, str], None]:
        def take(status: int, body: bytes, reason: str) -> None:
            self._engines[i].gone = reason == "refused"
            if not reason:
                self._found[i] = (status, body)
                if self._path == "/metrics" and status == 200:
                    self._engines[i].page = body
            self._left -= 1
            if not self._left:
                self._done()

        return take

    def _late(self) -> None:
        for call in self._calls:
            call.cancel()
        self._done()

    def _done(self) -> None:
        then, self._then = self._then, lambda _: None
        then(self._found)


class Split(Pages):
    """``link``: (delay in seconds, bytes/s; 0 is no limit) of each prefill engine's way out."""

    def __init__(
        self,
        engines: tuple[Sequence[Backend], Sequence[Backend]],
        store: Store,
        link: tuple[float, float] = (0.0, 0.0),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(*engines, host, port)
        self.store = store
        self._links = {id(e): Link(self.loop, *link) for e in self.prefill}
        self._waiting: deque[Passage] = deque()
        self._unsaved: deque[Passage] = deque()
        self._parked: deque[Passage] = deque()
        self._all: set[Passage] = set()
        self._turning = self._again = False

    def asked(self, request: Request, reply: Reply) -> None:
        body = as_object(request.body)
        why = _unfit(body)
        if why:
            reply.send(400, orjson.dumps(error(why, "invalid_request_error", 400)))
            return
        if len(self._waiting) >= MOST_WAITING:
            reply.send(503, orjson.dumps(error("too many requests wait", "overloaded_error", 503)))
            return
        passage = Passage(self, request, reply, body)
        self._all.add(passage)
        self._waiting.append(passage)
        self._turn()

    def link_of(self, engine: Backend) -> Link:
        return self._links[id(engine)]

    def changed(self, passage: Passage) -> None:
        if passage.step == PLACE:
            self._parked.append(passage)
        elif passage.unsaved:
            self._unsaved.append(passage)
        elif passage.step == OVER:
            self._all.discard(passage)
        self._turn()

    def restored(self, engine: Backend) -> None:
        for p in self._all:
            if p.step == DECODE and p.target is engine:
                p.touched = True

    def _turn(self) -> None:
        """Whoever can go on does. What that changes is seen in another round, not from within."""
        self._again = True
        if self._turning:
            return
        self._turning = True
        while self._again:
            self._again = False
            _next(self._parked, PLACE, self._place)
            _next(self._unsaved, SAVE, self._save)
            _next(self._waiting, QUEUE, self._prefill)
        self._turning = False

    def _place(self, p: Passage) -> bool:
        free = [e for e in self.decode if e.free]
        if free:
            p.restore(min(free, key=lambda e: e.load))
        return bool(free)

    def _save(self, p: Passage) -> bool:
        ready = self.store.fits(p.tokens) or self.store.too_large(p.tokens)
        if ready:
            p.save()
        return ready

    def _prefill(self, p: Passage) -> bool:
        free = [e for e in self.prefill if e.free]
        if free:
            p.prefill(max(free, key=lambda e: len(e.free)))
        return bool(free)

    def lines(self) -> list[str]:
        waiting = sum(p.step == QUEUE for p in self._waiting)
        return [*gauge_lines(len(self._all) - waiting, waiting), *self.counts.lines()]


class Replicas(Pages):
    """Engines side by side. One that refuses connections gets nothing while another takes them; its metrics page, which
    the client reads throughout, tells when it is back."""

    def __init__(self, engines: Sequence[Backend], host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((), engines, host, port)
        self._next = 0

    def asked(self, request: Request, reply: Reply) -> None:
        self._send(request, reply, self.decode)

    def _send(self, request: Request, reply: Reply, among: Sequence[Backend]) -> None:
        n = len(self.decode)
        order = {id(e): (i - self._next) % n for i, e in enumerate(self.decode)}
        to = min(among, key=lambda e: (e.gone, e.load, order[id(e)]))
        self._next = (self._next + order[id(to)] + 1) % n
        others = [e for e in among if e is not to]
        # What was refused has not been read: it may be sent to another.
        again = (lambda: self._send(request, reply, others)) if others else None
        Through(self.loop, to, request, reply, again)

    def lines(self) -> list[str]:
        waiting = deferred_of(self.decode)
        return gauge_lines(max(sum(e.load for e in self.decode) - waiting, 0), waiting)


class Through:
    """One request to one engine and back, unchanged; ``refused`` is done where that engine takes no connection."""

    def __init__(
        self, loop: Loop, to: Backend, request: Request, reply: Reply, refused: Callable[[], None] | None = None
    ) -> None:
        self._to, self._reply, self._refused = to, reply, refused
        to.load += 1
        reply.on_gone = self._gone
        self._call = Call(loop, to, request.path, request.body, self)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._to.gone = False
        self._reply.start(status, {"Content-Type": headers.get("content-type", "application/json")})

    def data(self, data: bytes) -> None:
        self._reply.write(data)

    def end(self, reason: str) -> None:
        self._to.load -= 1
        self._reply.on_gone = None  # an abort below would take it off again
        self._to.gone = reason == "refused"
        if reason and self._reply.started:
            self._reply.abort()
        elif self._to.gone and self._refused:
            self._refused()
        elif reason:
            said = error(f"the engine does not answer ({reason})", "upstream_error", 502)
            self._reply.send(502, orjson.dumps(said))
        else:
            self._reply.end()

    def _gone(self) -> None:
        self._call.cancel()
        self._to.load -= 1


def _next(queue: deque[Passage], step: int, go: Callable[[Passage], bool]) -> None:
    """Those at the head of a queue go on while they can; who has left it in the meantime is forgotten."""
    while queue:
        if queue[0].step == step and not go(queue[0]):
            return
        queue.popleft()


def _unfit(body: Mapping[str, Any]) -> str:
    """Why a split cannot take this request; '' if it can."""
    prompt = body.get("prompt")
    if not body:
        return "the body is not a JSON object"
    if (n := body.get("n")) is not None and (n != 1 or n is True):
        return f"n of {orjson.dumps(n).decode()[:20]}: one answer per request here"
    if isinstance(prompt, list) and not all(isinstance(x, int) for x in prompt):
        return "several prompts in one request: one here"
    return ""


def _health(reply: Reply, found: Sequence[tuple[int, bytes] | None]) -> None:
    well = all(x is not None and x[0] == 200 for x in found)
    said = {"status": "ok"} if well else error("not every engine is well", "unavailable_error", 503)
    reply.send(200 if well else 503, orjson.dumps(said))


def _slots(reply: Reply, found: Sequence[tuple[int, bytes] | None]) -> None:
    try:
        rows = [row for x in found for row in orjson.loads(x[1] if x else b"null")]
    except (orjson.JSONDecodeError, TypeError):
        reply.send(503, orjson.dumps(error("not every engine tells its slots", "unavailable_error", 503)))
        return
    reply.send(200, orjson.dumps(rows))
