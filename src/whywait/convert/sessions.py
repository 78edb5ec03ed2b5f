"""Trace → what its sessions and classes are like: turns, pauses, how the history grows, lengths by class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from whywait.convert.traces import Trace
from whywait.core.curves import Curve, Floats, Ints, curve
from whywait.core.kinds import Bucket, Kind

LEAST_PAUSE_S, LEAST_GROWTH = 1e-2, 20.0  # differences below these are rounding
MOST_CLASSES, OTHER = 20, "other"
CONTINUES = 0.5  # of later turns, for a log to be one whose prompts hold the history

Buckets = Callable[[NDArray[np.bool_], NDArray[np.float64] | None], tuple[Bucket, ...]]


class Requests(Protocol):
    """What a trace and drawn rows have in common, in this regard."""

    @property
    def at_s(self) -> Floats: ...

    @property
    def session(self) -> Ints: ...


@dataclass(frozen=True)
class Units:
    """``before``: the row of the turn before (−1: a first turn); ``size``: requests of each unit, by its first row."""

    before: Ints
    first: Ints
    size: Ints

    @property
    def starts(self) -> NDArray[np.bool_]:
        return self.before < 0


def units(requests: Requests) -> Units:
    """Sessions and requests of none, in the order of rows; the turns of a session come in order of time."""
    last: dict[int, int] = {}
    before: list[int] = []
    first: list[int] = []
    for i, s in enumerate(requests.session.tolist()):
        j = last.get(s, -1) if s >= 0 else -1
        before.append(j)
        first.append(i if j < 0 else first[j])
        last[s] = i
    at = np.array(first, np.int64)
    return Units(np.array(before, np.int64), at, np.bincount(at, minlength=len(at))[np.unique(at)].astype(np.int64))


def blocks_of(trace: Trace) -> Floats:
    """Blocks that each prompt's length makes."""
    out: Floats = np.maximum(1, np.ceil(trace.prompt_tokens / (trace.block_tokens or 1)))
    return out


def wanted(trace: Trace, u: Units) -> bool:
    """Whether the log has anything to learn here: turns, or several classes."""
    return int(u.starts.sum()) > 1 and (bool((u.before >= 0).any()) or len(trace.class_names) > 1)


def learn(trace: Trace, u: Units, reuse: Floats | None, hit: Floats | None, buckets: Buckets) -> tuple[Kind, ...]:
    """A kind per class, the largest of them; ``buckets`` learns the lengths of the rows of a mask.

    A unit is of the class of its first request. ``reuse`` is the reused part of each prompt, ``hit`` its blocks.
    """
    klass = trace.klass[u.first]
    names = list(trace.class_names)
    counts = np.bincount(klass[u.starts], minlength=len(names))
    if len(names) > MOST_CLASSES:
        rare = np.argsort(-counts, kind="stable")[MOST_CLASSES - 1 :]
        klass = np.where(np.isin(klass, rare), len(names), klass)
        names.append(OTHER)
    out = []
    for i, name in enumerate(names):
        mine = klass == i
        if mine.any():
            share = float(f"{(mine & u.starts).sum() / u.starts.sum():.6g}")
            out.append(_kind(trace, u, mine, (name, share), (reuse, hit, buckets)))
    return tuple(out)


def _kind(
    trace: Trace,
    u: Units,
    mine: NDArray[np.bool_],
    named: tuple[str, float],
    more: tuple[Floats | None, Floats | None, Buckets],
) -> Kind:
    (name, share), (reuse, hit, buckets) = named, more
    later = np.flatnonzero(mine & ~u.starts)
    if not len(later):
        return Kind(name, share, buckets(mine, reuse))
    prev = u.before[later]
    grown = trace.prompt_tokens[later] - trace.prompt_tokens[prev] - trace.output_tokens[prev]
    goes_on = grown > 0
    if goes_on.mean() < CONTINUES:  # its prompts are not histories, or are counted without them
        goes_on[:] = False
    base = mine.copy()
    base[later[goes_on]] = False
    size = np.bincount(u.first[mine], minlength=len(mine))[mine & u.starts]
    think = trace.think_s[later]
    known = think[~np.isnan(think)]
    between = trace.at_s[later] - trace.at_s[prev]
    at = later[goes_on]
    keeps = None
    if hit is not None and len(at):
        keeps = curve(np.minimum(1.0, hit[at] / blocks_of(trace)[u.before[at]]), 0.1)
    grows = _curve(grown[goes_on], LEAST_GROWTH)
    return Kind(
        name, share, buckets(base, reuse), curve(size, 1.0),
        _curve(known, LEAST_PAUSE_S),
        None if len(known) else curve(between, LEAST_PAUSE_S),
        grows, 0.0 if grows is None else float(f"{1 - goes_on.mean():.6g}"),
        _curve(trace.prompt_tokens[at], LEAST_GROWTH), _curve(trace.output_tokens[at], LEAST_GROWTH), keeps,
    )  # fmt: skip


def _curve(values: Floats | Ints, floor: float) -> Curve | None:
    return curve(values, floor) if len(values) else None
