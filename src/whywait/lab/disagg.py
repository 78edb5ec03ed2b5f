"""Several embedded engines behind one port: prefill split from decode, or replicas side by side. What a user writes.

``split:prefill=1,decode=1,slots=4,ctx=1024,delay_ms=0,rate_mb_s=200`` · ``replicas:2,slots=4,ctx=1024``. Names that are
not the fleet's own are settings of its engines. ``slots`` are those of each decode engine (of each replica).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from whywait.errors import UsageError
from whywait.lab import ask, launch, models, state
from whywait.lab.cpus import Cpus, allowed_cpus, cpu_split, usable_count
from whywait.lab.settings import Settings
from whywait.lab.state import Engine

SPLIT, REPLICAS = "split", "replicas"
MOST_ENGINES: Final = 64
READY_S: Final = 600.0


@dataclass(frozen=True)
class Fleet:
    """``replicas`` of 0 is a split. ``delay_ms`` and ``rate_mb_s`` (10⁶ bytes/s; 0: no limit) make every hand-over slow
    on purpose. ``space_mb`` bounds what lies between the engines (10⁶ bytes), in ``folder`` ('' is tmpfs)."""

    prefill: int = 1
    decode: int = 1
    replicas: int = 0
    delay_ms: float = 0.0
    rate_mb_s: float = 0.0
    space_mb: float = 1024.0
    folder: str = ""
    engine: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for what in ("prefill", "decode"):
            if not 1 <= getattr(self, what) <= MOST_ENGINES:
                raise UsageError(f"{what} of {getattr(self, what)} is out of range", f"1 … {MOST_ENGINES} engines")
        if not 0 <= self.replicas <= MOST_ENGINES:
            raise UsageError(f"{self.replicas} replicas are out of range", f"1 … {MOST_ENGINES}")
        for what in ("delay_ms", "rate_mb_s", "space_mb"):
            if not 0 <= getattr(self, what) < 1e9:
                raise UsageError(f"{what} of {getattr(self, what)} is out of range", "0 or more")

    @property
    def engines(self) -> int:
        return self.replicas or self.prefill + self.decode

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fleet:
        own = {f.name for f in fields(cls)} - {"engine"}
        mine = {k: v for k, v in values.items() if k in own}
        return cls(**mine, engine=Settings.from_dict({k: v for k, v in values.items() if k not in own}))


#: The settings of each kind, with their type; see ``lab.arms``.
OWN: Final[Mapping[str, Mapping[str, type]]] = {
    SPLIT: {"prefill": int, "decode": int, "delay_ms": float, "rate_mb_s": float, "space_mb": float, "folder": str},
    REPLICAS: {"replicas": int},
}


def places(engines: int, threads: int, allowed: Cpus) -> tuple[list[Cpus], Cpus]:
    """CPUs of each engine, apart from each other, and what is left for the client; empty is not pinned.

    Where the CPUs are just enough for the engines, client and front run on all of them: their wake-ups are short, and
    the kernel lets them in (the engines run at lower priority). With fewer CPUs nobody is pinned.
    """
    if len(allowed) < engines * threads:
        return [()] * engines, ()
    mine = [tuple(allowed[i * threads : (i + 1) * threads]) for i in range(engines)]
    return mine, tuple(allowed[engines * threads :])


def placed(fleet: Fleet) -> tuple[list[Cpus], Cpus]:
    """:func:`places` on this machine."""
    allowed = allowed_cpus()
    if not allowed or usable_count() < len(allowed):
        return [()] * fleet.engines, ()
    split = cpu_split()
    spare = len(allowed) > fleet.engines * (fleet.engine.threads or 1) and split[0] and split[1]
    if spare:  # the client has its own, chosen by whole cores
        return places(fleet.engines, fleet.engine.threads or 1, split[0])[0], split[1]
    return places(fleet.engines, fleet.engine.threads or 1, allowed)


def start(fleet: Fleet, say: Callable[[str], None] | None = None) -> Engine:
    """Start the engines and the front before them; return when it serves. The front's process is their parent.

    Raises:
        EngineDied: one of them did not start.
    """
    model = fleet.engine.model or str(models.default_model(say=say))
    threads = fleet.engine.threads or 1
    fleet = replace(fleet, engine=replace(fleet.engine, model=model, threads=threads))
    cpus, _ = placed(fleet)
    kind = REPLICAS if fleet.replicas else SPLIT
    name = state.check_name(launch._free_name(kind))
    log = state.log_path(name)
    config = {**asdict(fleet), "cpus": cpus, "name": name, "parent_pid": os.getpid()}
    argv = [sys.executable, "-m", "whywait.lab.disagg_main", "--config", json.dumps(config)]
    child = launch._spawn(argv, log, env=launch._import_env(), detached=False)
    with launch._ended_on_failure(child):
        answer = launch._first_line(child, READY_S)
        if answer is None:
            raise launch._died(f"the {kind} service", child, log, "check the model file, the context and the folder")
        got = ask.llama_slots(answer["url"])
        per = got.ctx_per_slot
        engine = Engine(
            name=name,
            kind=kind,
            url=answer["url"],
            pid=child.pid,
            model=ask.first_model(answer["url"]).name,
            log=str(log),
            command=tuple(argv),
            model_path=model,
            slots=got.count,
            max_num_seqs=got.count,
            ctx_per_slot=per,
            kv_tokens=per * got.count if per and got.count else None,
            threads=fleet.engines * threads,
            cpus=tuple(sorted({c for one in cpus for c in one})),
            started_at=time.time(),
            start_mark=state.start_mark(child.pid),
        )
        state.save(engine)
    return engine
