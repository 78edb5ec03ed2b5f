"""What a technique of ``whywait try`` is, as data. Arm A goes without it, arm B with it, all else alike.

A technique says beforehand what it promises to cut (a word of the closed vocabulary), what must be shown to have become
better, and what it is expected to cost. ``a`` and ``b`` are settings of the embedded engine, which runs on any machine;
``flags`` are what turns it off and on in an engine that a user brings (``--engine 'vllm serve MODEL'``), as its
documentation says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whywait.core.lengths import Lengths
from whywait.core.workload import RequestClass, Workload
from whywait.lab.arms import embedded_text, with_flags


@dataclass(frozen=True)
class Point:
    """A load point of every round; the first of a technique is the main one and has no label. ``target`` is in flight,
    or per second where ``mode`` is rate."""

    target: float
    requests: int
    label: str = ""
    mode: str = "concurrency"


@dataclass(frozen=True)
class Show:
    """A claim: B moves ``metric`` ``up`` or down at the point labelled ``at``; ``price``: as what it costs."""

    metric: str
    up: bool
    at: str = ""
    price: bool = False


@dataclass(frozen=True)
class Technique:
    """``a`` and ``b``: settings of the embedded engine, or an arm as ``whywait ab`` takes it. ``flags``: program →
    (flags of A, flags of B). ``says`` is one line; ``cost`` what is to be paid, in words. ``changes_answers``: B may
    answer otherwise than A does, so that its quality is part of the price."""

    says: str
    a: Mapping[str, Any] | str
    b: Mapping[str, Any] | str
    workload: Workload
    points: tuple[Point, ...]
    promise: str
    shows: tuple[Show, ...]
    cost: str
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    changes_answers: bool = False

    def arms(self, engine: str = "embedded", program: str = "") -> tuple[str, str] | None:
        """What ``whywait ab`` takes as --a and --b; None where there is no recipe for that program."""
        if engine == "embedded":
            a, b = (x if isinstance(x, str) else embedded_text(x) for x in (self.a, self.b))
            return a, b
        if program not in self.flags:
            return None
        off, on = self.flags[program]
        return with_flags(engine, off), with_flags(engine, on)


def one_class(prompt: int, output: int, **more: Any) -> tuple[RequestClass, ...]:
    return (RequestClass(prompt_tokens=Lengths("fixed", prompt), output_tokens=Lengths("fixed", output), **more),)
