"""What is read beside the load: the sampler and its probes, from the flags to the doubts they leave.

Part of the application layer, like ``session.py``, whose helper it is.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from whywait.core.run import Run
from whywait.errors import InternalError
from whywait.lab.disagg import OWN
from whywait.lab.state import Engine
from whywait.load.preflight import Target
from whywait.net.clock import Clock
from whywait.net.endpoint import Endpoint
from whywait.net.reach import Reach
from whywait.probe.listener import listening_pids
from whywait.probe.options import Probes
from whywait.probe.sampler import Config, SamplerProcess
from whywait.probe.spans import joined, unmeasured

KEY, REACH = "WHYWAIT_SAMPLER_KEY", "WHYWAIT_SAMPLER_REACH"  # secrets reach the sampler by its environment
HURRIED_S = 1.0  # patience with spans after Ctrl-C


class Watching:
    """The probes of one session. Make it before the load; what it opens, :meth:`stop` closes.

    Raises:
        UsageError: a flag names what cannot be used.
    """

    def __init__(self, probes: Probes, reach: Reach | None = None) -> None:
        self._traces = probes.traces
        self._prepared = probes.prepare(reach)
        self._where = self._prepared.where
        self._sampler: SamplerProcess | None = None
        self.complaints: list[dict[str, str]] = []  # doubts

    @property
    def trace_prefix(self) -> str:
        """What the trace ids of this run begin with; '' when nobody listens for spans."""
        return self._prepared.prefix

    @property
    def agents(self) -> list[dict[str, Any]]:
        """What each agent said of its machine, for the manifest."""
        return self._prepared.agents

    @property
    def where(self) -> str:
        """The address that waits for spans; ''  when none does."""
        return self._where

    def addressed(self, endpoint: Endpoint) -> Endpoint:
        """For requests of ours that are not measured: their spans are not taken for those of others."""
        return dataclasses.replace(endpoint, trace_prefix=unmeasured(self.trace_prefix))

    def loaded(self, target: Target) -> Target:
        """For the requests that are measured: with trace ids where spans are expected."""
        endpoint = dataclasses.replace(target.endpoint, trace_prefix=self.trace_prefix)
        return dataclasses.replace(target, endpoint=endpoint)

    def start(self, target: Target, engine: Engine | None, clock: Clock, spool: Path, hz: float) -> None:
        """Begin to sample into ``spool``; where that fails, it is a complaint."""
        endpoint = target.endpoint
        env = {KEY: endpoint.api_key or "", REACH: endpoint.reach.as_json(), **self._prepared.env}
        try:
            config = dataclasses.replace(_config(target, engine), zero_unix_ns=clock.zero_unix_ns, spool=str(spool))
            self._sampler = SamplerProcess(dataclasses.replace(config, hz=hz, **self._prepared.settings), env)
            self._sampler.start()
        except (InternalError, OSError) as exc:
            self._sampler = None
            self._complain("nothing was sampled beside the load", str(exc))

    def add_client(self, pids: list[int]) -> None:
        """Processes that drive load too."""
        if self._sampler is not None:
            self._sampler.add_pids("client", pids)

    @property
    def pid(self) -> int | None:
        """Of the sampler, while it runs."""
        return self._sampler.pid if self._sampler is not None else None

    def stop(self, spans_of: int = 0, hurry: bool = False) -> None:
        """End the sampler; first let it receive the spans of ``spans_of`` requests. Idempotent."""
        if self._sampler is not None:
            if self._traces and spans_of:
                self._sampler.wait_for_spans(spans_of, *((HURRIED_S,) if hurry else ()))
            self._sampler.stop()
            if self._sampler.complaint:
                last = self._sampler.complaint.splitlines()[-1]
                self._complain("the metrics sampler had trouble", last)
            self._sampler = None
        self._prepared.close()

    def finished(self, run: Run) -> Run:
        """The Run with what spans say of its requests, and the doubts they leave."""
        if not self._traces:
            return run
        found = joined(run)
        doubts: list[dict[str, Any]] = [*found.run.manifest.doubts, *found.doubts(self.where)]
        return dataclasses.replace(found.run, manifest=dataclasses.replace(found.run.manifest, doubts=doubts))

    def _complain(self, what: str, why: str) -> None:
        next_ = "run it again: what follows its last reading is not known"
        self.complaints.append({"what": what, "why": why, "next": next_})


def _unified(engine: Engine | None) -> bool | None:
    """Whether its slots share one KV space (with a single slot it is all the same); None where nobody told us."""
    if engine is None or engine.kind not in ("embedded", *OWN) or engine.kv_tokens is None:
        return None
    return engine.kv_tokens == engine.ctx_per_slot


def _config(t: Target, engine: Engine | None) -> Config:
    here = t.endpoint.loopback
    return Config(
        zero_unix_ns=0,
        spool="",
        metrics_urls=t.metrics_urls,
        home=t.endpoint.home,
        slots_url=t.slots_url,
        engine=t.engine.name if t.engine else None,
        kv_unified=_unified(engine),
        pids=_pids(t, engine),
        host=here,
        gpu=here and not t.simulated,
        api_key_env=KEY,
        reach_env=REACH,
    )


def _pids(target: Target, engine: Engine | None) -> dict[str, tuple[int, ...]]:
    endpoint = target.endpoint
    found: tuple[int, ...] = (engine.pid,) if engine is not None else ()
    if not found and endpoint.loopback and not endpoint.unix and not target.simulated:
        found = tuple(p for p in listening_pids(endpoint.port) if p != os.getpid())
    return {"client": (os.getpid(),), **({"engine": found} if found else {})}
