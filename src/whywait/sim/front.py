"""The simulated service as an OpenAI-compatible HTTP server on this machine: routes, admission, routing over replicas.

Everything runs on the thread of one loop: sockets, the engines' steps, and the tokens that leave at their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import time

import numpy as np
import orjson

from whywait import __version__
from whywait.core.lengths import Lengths
from whywait.net.reply import Reply, Request, error
from whywait.net.serve import Server
from whywait.sim import front_ask
from whywait.sim.front_ask import PATHS, WORD, Ask, Blocks, Refused, Room
from whywait.sim.front_metrics import Facts, Late, Told, page
from whywait.sim.front_pace import Engine, New, Pace
from whywait.sim.front_stream import SERVER, Stream
from whywait.units import NS_PER_S

MOST_IN_FLIGHT = 4096  # requests in work and waiting, of one replica
VERSION = f"0.32.0+whywait.sim.{__version__}"  # the version of vLLM whose answers these look like
TEXT = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
DRAWN = Lengths("lognormal", 256, 0.6)


@dataclass(frozen=True)
class Service:
    """What the server says and keeps to. Seconds are simulated. ``kv_blocks`` are of one replica, the tiers below its
    device included; ``drawn`` is how long an answer is that does not say ``max_tokens``."""

    model: str
    context: int
    block: int
    kv_blocks: int
    prefix_cache: bool = True
    frontend_s: float = 0.0
    frontend_token_s: float = 0.0
    reply_s: float = 0.0
    routing: str = "round robin"
    drawn: Lengths = DRAWN
    speed: float = 1.0
    seed: int = 1
    speculates: bool = False
    cache: Mapping[str, str] = field(default_factory=dict)  # labels of vllm:cache_config_info
    simulated: Mapping[str, str] = field(default_factory=dict)  # labels of whywait_sim_info


class Front:
    """The server; ``engines`` are its replicas."""

    def __init__(self, service: Service, engines: Sequence[Engine], host: str = "127.0.0.1", port: int = 0) -> None:
        self.service = service
        self.server = Server(self.handle, host, port)
        self._paces = [
            Pace(engine, Told(service.context), self.server.call_at, service.speed, service.reply_s)
            for engine in engines
        ]
        self._room, self._blocks = Room(service.context), Blocks(service.block, 2 * service.kv_blocks * len(engines))
        self._random = np.random.default_rng(service.seed)
        self._born = int(time())
        self.requests = self.rejected = self.refused = 0
        self._facts = Facts(service.model, service.cache, service.simulated, service.speed, service.speculates)
        self._homes: dict[int, Pace] = {}  # where a block was last seen, for routing by prefix
        self._pages: dict[str, Callable[[], bytes]] = {
            "/v1/models": lambda: orjson.dumps({"object": "list", "data": [self._card()]}),
            f"/v1/models/{service.model}": lambda: orjson.dumps(self._card()),
            "/version": lambda: orjson.dumps({"version": VERSION}),
            "/health": lambda: b"",
            "/ping": lambda: b"",
            "/metrics": self.metrics,
        }

    def handle(self, request: Request, reply: Reply) -> None:
        path, get = request.path, request.method in ("GET", "HEAD")
        posts = path in PATHS or path == "/tokenize"
        if get and path in self._pages:
            reply.send(200, self._pages[path](), TEXT if path == "/metrics" else JSON, SERVER)
        elif request.method == "POST" and posts:
            try:
                self._checked(request)
                if path in PATHS:
                    self._generate(front_ask.read(request.body, PATHS[path]), reply)
                else:
                    reply.send(200, self._tokenize(request.body), headers=SERVER)
            except Refused as exc:
                self.refused += 1
                said = error(exc.message, exc.kind, exc.status, exc.param)
                retry = {"Retry-After": "1"} if exc.status == 503 else {}
                reply.send(exc.status, orjson.dumps(said), headers={**SERVER, **retry})
        elif posts or path in self._pages:
            allow = {"Allow": "POST" if posts else "GET, HEAD"}
            reply.send(405, b'{"detail":"Method Not Allowed"}', headers={**SERVER, **allow})
        else:
            reply.send(404, b'{"detail":"Not Found"}', headers=SERVER)

    def _checked(self, request: Request) -> None:
        kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if kind != JSON:
            raise Refused(400, f"Content-Type must be {JSON}", "Bad Request")

    def _named(self, model: str) -> None:
        if model and model != self.service.model:
            message = f"The model `{model}` does not exist. Known here: {self.service.model}."
            raise Refused(404, message, "NotFoundError", "model")

    def _generate(self, ask: Ask, reply: Reply) -> None:
        service = self.service
        self._named(ask.model)
        ask = replace(ask, model=service.model)
        drawn = 1 if ask.limit is not None else int(service.drawn.sample(1, self._random)[0])
        output, finish = self._room.output(ask, drawn)
        # The answer is known beforehand, and the blocks it fills will be found by the next turn of a conversation.
        text = ask.text + WORD.encode() * output
        chain = self._blocks.chain(text, ask.salt) if service.prefix_cache else []
        pace = self._route(chain)
        if len(pace.sinks) >= MOST_IN_FLIGHT:
            self.rejected += 1
            raise Refused(503, f"{MOST_IN_FLIGHT} requests are here already", "ServiceUnavailableError")
        self.requests += 1
        stream = Stream(ask, reply, pace.told, output, finish)
        id, frontend_s = self.requests, service.frontend_s + service.frontend_token_s * ask.prompt_tokens
        ready_ns = stream.arrived_ns + int(frontend_s / service.speed * NS_PER_S)

        def ended(why: str) -> None:
            pace.told.finished[why] += 1
            (pace.drop if why == "abort" else pace.ended)(id)

        stream.ended, stream.looked_up = ended, service.prefix_cache
        stream.start(id, int(time()), ready_ns)
        if not stream.over:
            pace.add(New(id, ask.prompt_tokens, output, chain, ask.priority), ready_ns, stream)

    def _route(self, chain: Sequence[int]) -> Pace:
        """Which replica takes a request whose prompt has these blocks."""
        paces = self._paces
        if self.service.routing == "round robin":
            return paces[self.requests % len(paces)]
        least = min(paces, key=lambda pace: len(pace.sinks))
        if self.service.routing == "prefix" and len(paces) > 1:
            home = next((p for block in reversed(chain) if (p := self._homes.get(block))), least)
            self._homes.update(dict.fromkeys(chain, home))
            while len(self._homes) > self._blocks.most:
                del self._homes[next(iter(self._homes))]
            return home
        return least

    # --- pages

    def _tokenize(self, raw: bytes) -> bytes:
        body = front_ask.parsed(raw)
        model = body.get("model")
        self._named(model if isinstance(model, str) else "")
        tokens = front_ask.token_ids(front_ask.prompt_of(body, "messages" in body))
        return orjson.dumps({"count": len(tokens), "max_model_len": self.service.context, "tokens": tokens,
                             "token_strs": None})  # fmt: skip

    def _card(self) -> dict[str, object]:
        name = self.service.model
        return {"id": name, "object": "model", "created": self._born, "owned_by": "vllm", "root": name, "parent": None,
                "max_model_len": self.service.context}  # fmt: skip

    def metrics(self) -> bytes:
        return page(self._facts, [(pace.told, pace.now) for pace in self._paces], self.rejected)

    def lateness(self) -> Late:
        """Of the replica that was latest."""
        return max((pace.told.late for pace in self._paces), key=lambda late: late.worst)

    @property
    def slipped_s(self) -> float:
        return sum(pace.told.slipped_s for pace in self._paces)
