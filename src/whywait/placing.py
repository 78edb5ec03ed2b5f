"""Where the load of a session is driven from: this process, several of this machine, or workers of a Ray cluster.

Part of the application layer, like ``session.py``, whose helper it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whywait.core import secrets
from whywait.core.recorder import Recorder
from whywait.errors import InternalError
from whywait.load import over_ray
from whywait.load.crew import Crew, Report, Solo, Stop
from whywait.load.driver import Progress
from whywait.load.floor import floor_line, measure_floor
from whywait.load.link import Job
from whywait.load.preflight import Target
from whywait.load.shards import Shards, zero_of
from whywait.net.clock import Clock
from whywait.net.endpoint import Endpoint
from whywait.options import Options, Say

Watch = Callable[[Progress], None]


class Place:
    """Made once the service is known and before it is sent anything; ``doubts`` grow."""

    def __init__(self, options: Options, endpoint: Endpoint) -> None:
        self.doubts: list[dict[str, str]] = []
        self.floors: dict[str, Any] = {}  # by node
        self._processes = options.processes
        self._workers: over_ray.Workers | None = None
        if options.ray:
            w = over_ray.Workers(options.ray, options.processes, endpoint, options.reach, options.tokenizer)
            self._workers, self._processes = w, len(w.nodes)
            self.doubts += over_ray.way_doubts(w.nodes, w.ways_ms)

    @property
    def words(self) -> str:
        """Of a cluster, what is used of it; '' of this machine."""
        w = self._workers
        if w is None:
            return ""
        names = list(dict.fromkeys(x.name for x in w.nodes))
        many = f"{len(w.nodes)} shards on {len(names)} Ray workers" if len(w.nodes) > 1 else "1 shard on 1 Ray worker"
        return f"{many}: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"

    def floor(self, say: Say) -> dict[str, Any]:
        """What the client is good for where it will run, at the worst of the places; {} where that is not known."""
        if self._workers is not None:
            self.floors = self._workers.floors()
            self.doubts += over_ray.floor_doubts(self.floors)
            found = over_ray.worst(self.floors)
        else:
            try:
                found = measure_floor(16, seconds=1.0)
            except (InternalError, OSError) as exc:
                what = "the client's own floor was not measured"
                self.doubts.append({"what": what, "why": str(exc), "next": ""})
                return {}
        if found:
            say(floor_line(found) + (", on the worst of the workers" if self._workers is not None else ""))
        return found

    def crew(self, target: Target, recorder: Recorder, clock: Clock, watch: Watch, stop: Stop) -> Crew:
        """Who drives the points."""
        if self._processes == 1 and self._workers is None:
            return Solo(target, recorder, clock, watch, stop)
        zero, hidden = zero_of(clock), secrets.known()
        jobs = [Job(k, recorder.directory, zero, target, hidden) for k in range(self._processes)]
        return Shards(jobs, recorder, watch, stop, self._workers.links() if self._workers is not None else ())

    def pids(self, crew: Crew) -> Sequence[int]:
        """Processes of this machine that drive load beside this one."""
        return crew.pids if isinstance(crew, Shards) else ()

    def told(self, crew: Crew, report: Report) -> list[dict[str, str]]:
        """What is in doubt of single workers, in the end."""
        if self._workers is None or not isinstance(crew, Shards):
            return []
        return over_ray.shard_doubts(report.clock, report.client.get("shards", ())) + over_ray.lost_doubts(crew.kept_ns)

    def close(self) -> None:
        """Give the cluster's CPUs back. Idempotent."""
        if self._workers is not None:
            self._workers.close()
