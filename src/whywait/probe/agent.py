"""``whywait agent``: the readings of a machine, for a client on another; and the source that asks for them.

Every answer is one look, taken when it is asked for. Readings are stamped by the clock of whoever asks; the agent says
what time it has only so that the offset of the two clocks, within half a round trip, is known too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable

import orjson

from whywait import __version__
from whywait.probe import Row, host
from whywait.probe.listener import listening_pids
from whywait.probe.pages import Fetcher
from whywait.probe.prometheus import label_json
from whywait.probe.sources import Groups, Source, Timed, devices, machine
from whywait.probe.web import Handler, Server, allowed

READINGS, FACTS = "/v1/readings", "/v1/facts"
AGAIN_S = 0.05  # asked again so soon, it gives the same look
FIND_S = 5.0  # an engine that was restarted is found again
JSON = "application/json"
MOST_ROWS = 100_000  # of one look
_MEMO = 20_000


class Agent:
    """Looks at this machine: host, devices, and the engine's processes (numbers, or whoever listens on a port)."""

    def __init__(self, pids: Iterable[int] = (), engine_port: int | None = None) -> None:
        self._sources: list[Source] = []
        self._groups = Groups(self._sources.append)
        self._pids, self._port = tuple(pids), engine_port
        self._lock = threading.Lock()
        self._last: tuple[float, bytes] = (float("-inf"), b"")
        self._found_at = float("-inf")
        if sys.platform.startswith("linux"):
            self._sources.append(Timed("host", machine(self._groups)))
        self._sources += [Timed(name, device.sample, device.close) for name, device in devices()]

    def look(self) -> bytes:
        """``{"agent", "unix_ns", "rows": [[of, name, labels, value], …]}`` as JSON."""
        with self._lock:
            now = time.monotonic()
            if now - self._last[0] >= AGAIN_S:
                self._find(now)
                rows = [(s.name, *row) for s in self._sources for row in self._ask(s)]
                rows.append(("agent", "cpu_seconds_total", None, time.process_time()))
                body = {"agent": __version__, "unix_ns": time.time_ns(), "rows": rows}
                self._last = time.monotonic(), orjson.dumps(body)
            return self._last[1]

    def facts(self) -> bytes:
        return orjson.dumps({"agent": __version__, "machine": host.facts()})

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _ask(self, source: Source) -> list[Row]:
        """One source that fails must not silence the others."""
        try:
            rows = source.sample()
            why = "" if rows is not None else source.why
        except Exception as exc:
            rows, why = None, type(exc).__name__
        said = label_json({"why": why}) if why else None
        return [("answered", said, 0.0 if rows is None else 1.0), *(rows or [])]

    def _find(self, now: float) -> None:
        if now - self._found_at < FIND_S:
            return
        self._found_at = now
        pids = self._pids or (listening_pids(self._port) if self._port else ())
        pids = tuple(p for p in pids if p != os.getpid())
        if pids:
            self._groups.add({"engine": pids})


def serve(agent: Agent, listening: socket.socket, token: str | None) -> Server:
    """A server (not running yet) that answers on a socket that listens; only those who know ``token``, if any."""

    class Looks(Handler):
        def do_GET(self) -> None:
            if not allowed(token, self.headers.get("Authorization")):
                self.answer(401, b"{}", JSON)
            elif self.path == READINGS:
                self.answer(200, agent.look(), JSON)
            elif self.path == FACTS:
                self.answer(200, agent.facts(), JSON)
            else:
                self.answer(404, b"{}", JSON)

    return Server(listening, Looks)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


class AgentPage:
    """The readings of one agent. Each row's label ``of`` says what it is of: host, gpu, process/engine, agent.

    ``clock_offset_ns`` (the agent's clock minus ours) is right within ``clock_error_ns``, half the round trip.
    """

    def __init__(self, name: str, fetcher: Fetcher) -> None:
        self.name, self._fetcher = name, fetcher
        self._labels: dict[tuple[str, str | None], str | None] = {}
        self.why = ""

    def sample(self) -> list[Row] | None:
        before = time.time_ns()
        body = self._fetcher.get()
        after = time.time_ns()
        self.why = self._fetcher.why
        if body is None:
            return None
        try:
            said = orjson.loads(body)
            if len(said["rows"]) > MOST_ROWS:
                raise ValueError
            # null is what was not known there, and stays so here
            rows = [(str(name), self._with(of, labels), _number(v))
                    for of, name, labels, v in said["rows"] if v is not None]  # fmt: skip
            offset = int(said["unix_ns"]) - (before + after) // 2
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self.why = "not an agent"
            return None
        clock: list[Row] = [
            ("clock_offset_ns", None, float(offset)),
            ("clock_error_ns", None, (after - before) / 2),
        ]
        return rows + clock

    def close(self) -> None:
        self._fetcher.close()

    def _with(self, of: str, labels: str | None) -> str | None:
        key = (of, labels)
        if key not in self._labels:
            if len(self._labels) > _MEMO:  # threads and processes come and go
                self._labels.clear()
            said = json.loads(labels) if labels else {}
            self._labels[key] = label_json({**{k: str(v) for k, v in said.items()}, "of": str(of)})
        return self._labels[key]
