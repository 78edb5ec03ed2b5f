"""Workers of a Ray cluster as the places of a run's shards: chosen, looked at, started; what is in doubt of each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from whywait.core.resume import LOST
from whywait.core.run import doubt
from whywait.errors import UsageError
from whywait.load.relay import Relay, RelayLink
from whywait.net import cluster
from whywait.net.cluster import Node
from whywait.net.endpoint import Endpoint
from whywait.net.reach import Reach
from whywait.units import NS_PER_MS, NS_PER_S

UNSURE_MS = 1.0  # a clock known no better, or that went astray by more, is a doubt
LATE_MS = 5.0  # p99 of sends, beyond which a shard that is alone with it is named
FARTHER_MS = 1.0  # a way to the service longer than the others' by so much is in its TTFT
AT_ONCE = 8  # calls of a relay: none waits for one that listens

Doubts = list[dict[str, str]]


class Workers:
    """``n`` shards' places on the cluster at ``address``; 0: one on every node that has a CPU to give. More than nodes
    are spread evenly. Each takes one CPU of the cluster for as long as this is open.

    Raises:
        UsageError: no cluster, a node that cannot run a shard, or no CPU free in time; each says which.
        MissingExtra: Ray is not installed here.
    """

    def __init__(
        self, address: str, n: int, endpoint: Endpoint, files: Reach | None = None, tokenizer: str = ""
    ) -> None:
        self._ray = cluster.ray_of(address)
        nodes = cluster.nodes_of(self._ray)
        r = files or Reach()
        needed = [str(f) for f in (r.ca, r.cert, r.key, tokenizer) if f]
        found = cluster.looked_at(self._ray, nodes, needed)
        if n > sum(node.cpus for node in nodes):
            raise UsageError(f"{n} shards, and the cluster has {sum(x.cpus for x in nodes)} CPUs",
                             f"--processes {sum(x.cpus for x in nodes)}, or leave it out: one per node")  # fmt: skip
        self.nodes = _spread(nodes, n or len(nodes))
        self._hosts = {node.id: f["boot"] or node.address for node, f in zip(nodes, found, strict=True)}
        _same_loopback(endpoint, nodes, found)
        make = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, max_concurrency=AT_ONCE)(Relay)
        self._actors = [make.options(scheduling_strategy=cluster.there(x)).remote() for x in self.nodes]
        self.ways_ms = self._reached(endpoint)

    def _reached(self, endpoint: Endpoint) -> list[float]:
        """How long it takes each to connect to the service: ms.

        Raises:
            UsageError: one cannot, or has no CPU for us.
        """
        family, address = endpoint.address
        asked = [a.reach.remote(family, address, cluster.CONNECT_S) for a in self._actors]
        out = []
        for node, future in zip(self.nodes, asked, strict=True):
            try:
                way = self._ray.get(future, timeout=cluster.START_S)
            except Exception as exc:
                self.close()
                late = "imeout" in type(exc).__name__
                why = f"no CPU came free in {cluster.START_S:.0f} s" if late else cluster.first_line(exc)
                raise UsageError(f"no shard on {node.name}: {why}", "ray status says what uses the cluster") from None
            if isinstance(way, str):
                self.close()
                raise UsageError(f"{node.name} cannot reach {endpoint.netloc}: {way}",
                                 "an address that every node of the cluster reaches")  # fmt: skip
            out.append(float(way))
        return out

    def links(self) -> list[RelayLink]:
        """A link to each, its clock measured against ours; begun by ``Shards``."""
        with ThreadPoolExecutor(8) as pool:
            pairs = zip(self.nodes, self._actors, strict=True)
            return list(pool.map(lambda x: RelayLink(self._ray, *x), pairs))

    def floors(self) -> dict[str, dict[str, Any] | str]:
        """What a client is good for on each machine, by node; one after another where nodes share a machine."""
        todo = {node.id: (node, actor) for node, actor in zip(self.nodes, self._actors, strict=True)}
        by_host: dict[str, list[tuple[Node, Any]]] = {}
        for node, actor in todo.values():
            by_host.setdefault(self._hosts[node.id], []).append((node, actor))
        with ThreadPoolExecutor(max(1, len(by_host))) as pool:
            return {name: f for one in pool.map(self._floors_of, by_host.values()) for name, f in one.items()}

    def _floors_of(self, host: Sequence[tuple[Node, Any]]) -> dict[str, dict[str, Any] | str]:
        out: dict[str, dict[str, Any] | str] = {}
        for node, actor in host:
            try:
                out[node.name] = self._ray.get(actor.floor.remote(), timeout=2 * cluster.START_S)
            except Exception as exc:
                out[node.name] = cluster.first_line(exc)
        return out

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def _spread(nodes: Sequence[Node], n: int) -> list[Node]:
    """``n`` places on nodes in turn, none with more than its CPUs."""
    room = {x.id: x.cpus for x in nodes}
    out: list[Node] = []
    while len(out) < n:
        for node in nodes:
            if len(out) < n and room[node.id] > 0:
                room[node.id] -= 1
                out.append(node)
    return out


def _same_loopback(endpoint: Endpoint, nodes: Sequence[Node], found: Sequence[Mapping[str, Any]]) -> None:
    """
    Raises:
        UsageError: the service's address means another machine to a node than it does here.
    """
    if not endpoint.loopback:
        return
    mine = cluster.here()
    for node, there in zip(nodes, found, strict=True):
        if (there["boot"], there["net"]) != (mine["boot"], mine["net"]):
            raise UsageError(f"{endpoint.netloc} is this machine, and to {node.name} it is that one",
                             "the address by which the nodes reach the service, and --load")  # fmt: skip


def worst(floors: Mapping[str, dict[str, Any] | str]) -> dict[str, Any]:
    """The floor that holds for all of them; {} where one is not known."""
    known = [f for f in floors.values() if isinstance(f, dict) and f["stamp_error_ms"]["p99"] is not None]
    return max(known, key=lambda f: f["stamp_error_ms"]["p99"]) if len(known) == len(floors) and known else {}


def floor_doubts(floors: Mapping[str, dict[str, Any] | str]) -> Doubts:
    return [doubt(f"the floor of the client on {name} was not measured", f, "") for name, f in floors.items()
            if isinstance(f, str)]  # fmt: skip


def way_doubts(nodes: Sequence[Node], ways_ms: Sequence[float]) -> Doubts:
    """Shards that are farther from the service than the others: their requests' times have the way in them."""
    usual = statistics.median_low(ways_ms) if ways_ms else 0.0
    far = {x.name: w for x, w in zip(nodes, ways_ms, strict=True) if w - usual > max(FARTHER_MS, usual)}
    return [doubt(f"{name} is farther from the service than the others",
                   f"connecting takes {way:.1f} ms from there, {usual:.1f} ms from the usual one: the TTFT of its "
                   "requests has the difference", "workers in one place, or read its shard by itself")
            for name, way in far.items()]  # fmt: skip


def shard_doubts(clock: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]) -> Doubts:
    """What is in doubt of single shards: by the manifest's clocks, and each client's own word."""
    out: Doubts = []
    for c in clock:
        name = f"shard {c['shard']} on {c.get('where', 'this machine')}"
        unsure = (abs(c["offset_ns"]) + c["offset_error_ns"]) / NS_PER_MS
        if unsure > UNSURE_MS:
            out.append(doubt(f"times of {name} lie within ±{unsure:.1f} ms of the others'",
                              "its clock was read over the network: within a request all times are of one clock, "
                              "between shards and against the engine's readings they are not",
                              "a quicker network between whywait and its workers"))  # fmt: skip
        if abs(moved := c.get("set_again_ns", 0) / NS_PER_MS) > UNSURE_MS:
            out.append(doubt(f"the clock of {name} went astray by {moved:+.1f} ms", "it was set again before each "
                              "point: within one it is off by a part of that", "NTP on the workers"))  # fmt: skip
    lags = {(c["shard"], c["where"]): (c.get("send_lag_ms") or {}).get("p99") for c in shards if "where" in c}
    known = [v for v in lags.values() if v is not None]
    for (k, where), lag in lags.items():
        if lag is not None and lag > LATE_MS and lag > 3 * statistics.median_low(known):
            out.append(doubt(f"shard {k} on {where} sent late", f"{lag:.1f} ms (p99), the others "
                              f"{statistics.median_low(known):.1f} ms", "free a core for it there"))  # fmt: skip
    for c in shards:
        if "where" in c and c["reads"] and c["user_clock_reads"] == c["reads"]:
            out.append(doubt(f"shard {c['shard']} on {c['where']} had no kernel stamps", "its chunks are timed by "
                              "its own clock, which a busy machine makes late", "whywait doctor there"))  # fmt: skip
    return out


def lost_doubts(kept_ns: Mapping[str, int]) -> Doubts:
    """Shards that died: how far what they recorded is here."""
    return [doubt(f"{name}{LOST}", f"what it recorded is here up to {at / NS_PER_S:.1f} s; what it had not sent "
                   "home then, a second or as long as it was silent, died with it",
                   "run it again; whywait resume keeps the points that were whole")
            for name, at in kept_ns.items()]  # fmt: skip
