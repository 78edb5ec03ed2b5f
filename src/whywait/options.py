"""What a journey is told (every field a flag of the command line), and where what it makes goes."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whywait.core import secrets
from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.load.recipe import Load
from whywait.net.endpoint import Endpoint
from whywait.net.reach import Reach
from whywait.probe.options import Probes
from whywait.probe.promql import Prometheus
from whywait.units import plain

Say = Callable[[str], None]
QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
LAST_DIRECTORY: ContextVar[Path | None] = ContextVar("last_directory", default=None)  # of what was measured last


@dataclass(frozen=True)
class Options:
    """What a journey needs to know: flags of the command line, and what the journey itself decides."""

    url: str = ""
    model: str | None = None
    dialect: str = "chat"
    api_key_file: str | None = None
    workload: Workload = field(default_factory=Workload)
    stream: bool = True
    load_ok: bool = False
    out: str | None = None
    slo: dict[str, float] = field(default_factory=dict)
    seed: int = 1
    floor: bool = True
    metrics_hz: float = 4.0
    max_requests: int | None = None  # the ceiling printed before load, when known
    processes: int = 1  # over Ray 0: one per worker
    ray: str = ""  # the address of a cluster whose workers drive the load
    loads: tuple[Load, ...] = ()  # what is to be measured, where that is known before
    single_stream_ok: bool = False  # the journey itself keeps to one stream where load is not allowed
    climbs: bool = False  # the journey itself decides which loads it measures, one after another
    command: tuple[str, ...] = ()
    reach: Reach = field(default_factory=Reach)  # TLS, proxy, headers
    probes: Probes = field(default_factory=Probes)  # what else is read beside the load
    body: dict[str, Any] = field(default_factory=dict)  # fields merged into every request
    metrics_urls: tuple[str, ...] = ()  # pages of the replicas, in place of the service's own
    prometheus: Prometheus | None = None  # where the readings of the engine come from instead
    tokenizer: str = ""  # a tokenizer.json or its folder, where the service does not count prompts itself
    salt: str = ""  # keeps cold prompts apart from other runs'; '' a new one each time
    text_seed: int | None = None  # of the prompts' texts, where that is not the workload's


#: Options that a resumed run takes from the first. Not what holds secrets (headers, proxy, keys), which are given anew.
KEPT = ("url", "model", "dialect", "stream", "slo", "seed", "metrics_hz", "processes", "ray", "body",
        "metrics_urls", "tokenizer")  # fmt: skip


def journey_of(o: Options) -> dict[str, Any]:
    """What a manifest keeps of them: for ``resume``, and for the verdict whose loads they were."""
    loads = [{k: getattr(x, k) for k in ("mode", "target", "requests", "duration_s", "label")} for x in o.loads]
    options = {k: getattr(o, k) for k in KEPT}
    return {"options": options, "headers": [n for n, _ in o.reach.headers], "loads": loads, "climbs": o.climbs}


def may_load(endpoint: Endpoint, o: Options) -> None:
    """
    Raises:
        UsageError: load on a service of another machine needs a word.
    """
    if endpoint.loopback or o.load_ok or o.single_stream_ok:
        return
    ceiling = f"up to {o.max_requests} requests" if o.max_requests else "load"
    raise UsageError(
        f"{endpoint.netloc} is not this machine, and this would send it {ceiling}",
        "add --load if you may load that service",
    )


def new_directory(out: str | None) -> Path:
    found = _new_directory(out)
    LAST_DIRECTORY.set(found)
    return found


def _new_directory(out: str | None) -> Path:
    if out:
        return Path(out)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("whywait-runs")
    for tail in ("", *(f"-{i}" for i in range(2, 100))):
        if not (base / f"{stamp}{tail}").exists():
            return base / f"{stamp}{tail}"
    raise UsageError(f"too many runs in {base} at this second", "give --out")


def stderr(line: str) -> None:
    """What a journey says beside its result; nothing where the Python API asked for quiet."""
    if not QUIET.get():
        print(plain(secrets.clean(line)), file=sys.stderr, flush=True)
