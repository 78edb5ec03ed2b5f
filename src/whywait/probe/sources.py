"""What the sampler asks: pages, the machine, groups of processes, devices, agents on other machines."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from whywait.core.secrets import hide_header
from whywait.net.reach import Reach
from whywait.probe import Row
from whywait.probe.config import Config
from whywait.probe.pages import Fetcher, MetricsPage, SlotsPage, fetcher
from whywait.probe.process import Group


class Source(Protocol):
    """``sample`` gives rows, or None when there was no answer; then ``why`` says in a word or two what went wrong."""

    name: str

    @property
    def why(self) -> str: ...

    def sample(self) -> list[Row] | None: ...

    def close(self) -> None: ...


class Timed:
    """A source that is a function of the time; no rows means no answer."""

    why = "nothing to read"

    def __init__(self, name: str, get: Callable[[float], list[Row]], close: Callable[[], None] = lambda: None) -> None:
        self.name, self._get, self.close = name, get, close

    def sample(self) -> list[Row] | None:
        return self._get(time.monotonic()) or None


class Groups:
    """Process groups by name; new ones may come while we run."""

    def __init__(self, start: Callable[[Source], None]) -> None:
        self._start = start
        self.by_name: dict[str, Group] = {}
        self._named = {os.getpid()}  # ourselves, and every process that was named: each belongs to its own group only

    def add(self, pids: Mapping[str, Iterable[int]]) -> None:
        self._named |= {p for numbers in pids.values() for p in numbers}
        for name, numbers in pids.items():
            if name in self.by_name:
                self.by_name[name].add(numbers)
            else:
                group = self.by_name[name] = Group(numbers, strangers=self._named)
                self._start(Timed(f"process/{name}", group.sample))


def sources_of(config: Config, groups: Groups) -> list[Source]:
    headers, reach = config.headers(), Reach.from_json(os.environ.get(config.reach_env or "", "{}"))
    for name, value in reach.headers:
        hide_header(name, value)
    out: list[Source] = [
        MetricsPage(f"metrics/{i}", fetcher(url, headers, config.timeout_s, reach, config.home), config.engine)
        for i, url in enumerate(config.metrics_urls)
    ]
    if config.slots_url:
        out.append(SlotsPage("slots/0", Fetcher(config.slots_url, headers, config.timeout_s, reach), config.kv_unified))
    if config.host and sys.platform.startswith("linux"):  # elsewhere there is nothing to read: not a lost probe
        out.append(Timed("host", machine(groups)))
    if config.gpu:
        out += [Timed(name, device.sample, device.close) for name, device in devices()]
    for i, url in enumerate(config.gpu_urls):
        from whywait.probe.dcgm import DcgmPage

        out.append(DcgmPage(f"gpu/{i}", fetcher(url, headers, config.timeout_s, reach, config.home)))
    token = config.secret(config.agent_token_env)
    for i, url in enumerate(config.agents):
        from whywait.probe.agent import READINGS, AgentPage

        own = {"Authorization": f"Bearer {token}"} if token else {}
        alone = dataclasses.replace(reach, headers=())  # what the service is told is none of the agent's business
        out.append(AgentPage(f"agent/{i}", Fetcher(url.rstrip("/") + READINGS, own, config.timeout_s, alone)))
    return out


class Devices(Protocol):
    """What a vendor's library shows of this machine's devices."""

    def sample(self, now_s: float) -> list[Row]: ...

    def close(self) -> None: ...


def devices() -> list[tuple[str, Devices]]:
    """(source name, devices) of each vendor whose library finds any here."""
    from whywait.probe.amd import RocmSmi
    from whywait.probe.gpu import Nvml

    nvml, rocm = Nvml.open(), RocmSmi.open()
    out: list[tuple[str, Devices]] = [("gpu", nvml)] if nvml is not None else []
    return out + ([("gpu/amd" if out else "gpu", rocm)] if rocm is not None else [])


def machine(groups: Groups) -> Callable[[float], list[Row]]:
    """The machine's own counters, and what they leave for others than our groups."""
    from whywait.probe.host import System
    from whywait.probe.neighbours import Neighbours

    system, neighbours = System(), Neighbours(groups.by_name)
    return lambda now_s: system.sample(now_s) + neighbours.sample(now_s)
