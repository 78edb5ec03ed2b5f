"""The exam of the verdict, as data: which known bottleneck is put where, what load a user would offer, and which causes
are right answers. ``exam_llama`` and ``exam_vllm`` hold the cases; ``whywait.exam`` runs and scores them.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.errors import UsageError

ENGINES: Final = ("embedded", "vllm")


@dataclass(frozen=True)
class Point:
    """A load point: ``target`` requests in flight, or per second when ``mode`` is ``rate``."""

    mode: str
    target: float
    seconds: float


@dataclass(frozen=True)
class Case:
    """One bottleneck at one strength, or (``fault`` empty) an engine at its base.

    ``points`` are the load; the last is the load that the user asks about, those before it are the reference.
    ``settings`` start the engine; ``put`` is a key of ``faults.FAULTS`` with ``args``. ``accepted`` are the causes that
    are right when ranked first; ``symptoms`` are true of the case but not its cause: neither right nor wrong. ``base``
    is the case in which the cause must not be claimed. ``together``: all of ``accepted`` were put in at once, and a
    right answer names them all. ``by``: what the user gave, a command to ``launch`` (the engine's own limits are then
    known) or only a ``url``.
    """

    name: str
    engine: str
    fault: str
    accepted: tuple[str, ...]
    workload: Workload
    points: tuple[Point, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    put: str = "nothing"
    args: Mapping[str, float] = field(default_factory=dict)
    symptoms: tuple[str, ...] = ()
    base: str = ""
    together: bool = False
    by: str = "launch"

    @property
    def engine_key(self) -> str:
        """Cases of one key run on one start of the engine."""
        return f"{self.engine} {json.dumps(dict(self.settings), sort_keys=True)}"


def closed(target: float, seconds: float = 18.0, single: float = 6.0) -> tuple[Point, ...]:
    """One request at a time for a reference, then ``target`` in flight."""
    return (Point("concurrency", 1, single), Point("concurrency", target, seconds))


def opened(rate: float, seconds: float = 18.0, single: float = 6.0) -> tuple[Point, ...]:
    """One request at a time for a reference, then ``rate`` per second, whatever comes back."""
    return (Point("concurrency", 1, single), Point("rate", rate, seconds))


def fixed(tokens: float) -> Lengths:
    return Lengths("fixed", tokens)


def chat(prompt: float, output: float, shared: float = 0.0, groups: int = 1, **more: Any) -> Workload:
    """Requests of one kind, of fixed lengths; ``more`` are fields of the workload."""
    one = RequestClass("default", 1.0, fixed(prompt), fixed(output), shared=shared, groups=groups)
    return Workload((one,), timeout_s=90.0, **more)


def mixed(usual: tuple[float, float], rare: tuple[float, float], share: float) -> Workload:
    """Two kinds of requests, (prompt, output) tokens each; ``share`` of them are rare."""
    return Workload(
        (
            RequestClass("usual", 1 - share, fixed(usual[0]), fixed(usual[1])),
            RequestClass("rare", share, fixed(rare[0]), fixed(rare[1])),
        ),
        timeout_s=90.0,
    )


def cases(engines: Sequence[str] = ENGINES, names: str = "*") -> list[Case]:
    """Those of ``engines`` whose name matches the glob ``names``.

    Raises:
        UsageError: none does.
    """
    from whywait.lab.exam_llama import CASES as LLAMA
    from whywait.lab.exam_vllm import CASES as VLLM

    found = [c for c in (*LLAMA, *VLLM) if c.engine in engines and fnmatch.fnmatchcase(c.name, names)]
    if not found:
        raise UsageError(f"no case is named {names}", "whywait exam score --list shows them")
    return found


def by_name() -> dict[str, Case]:
    return {c.name: c for c in cases()}
