"""What is drawn from a fit that knows classes or sessions: lengths by class, turns that follow each other.

A *unit* is a session, or a request that belongs to none. A turn either *continues* (its prompt is all that was said
before, and something new) or begins anew, as the first one does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whywait.core.curves import Curve, Floats, Ints, curve_of, deal, draw, even, number, ranked, tables
from whywait.errors import UsageError

CURVES = ("turns", "think_s", "between_s", "grows", "later_prompt", "later_output", "keeps")


@dataclass(frozen=True)
class Bucket:
    """Requests with prompts of like length: their share, both lengths and the reused part (0 to 1) of the prompt."""

    share: float
    prompt: Curve
    output: Curve
    reuse: Curve | None = None


@dataclass(frozen=True)
class Kind:
    """A class of requests. ``share`` is of units; ``buckets`` are of turns that begin anew.

     ``turns``: requests per unit (None: one). ``think_s``: from the end of a turn to the start of the next;
    ``between_s``: from start to start, where the log does not say when answers ended. ``grows``: tokens a turn brings
    beyond what was said before (None: no turn continues); ``anew``: the share of later turns that begin anew;
    ``later_prompt`` and ``later_output``: lengths of turns that continue, histories included; ``keeps``: how much of
    the prompt before a turn continues with.
    """

    name: str
    share: float
    buckets: tuple[Bucket, ...]
    turns: Curve | None = None
    think_s: Curve | None = None
    between_s: Curve | None = None
    grows: Curve | None = None
    anew: float = 0.0
    later_prompt: Curve | None = None
    later_output: Curve | None = None
    keeps: Curve | None = None


class Lengths(NamedTuple):
    """Per request: lengths, the reused part of the prompt, or of the prompt before where the turn continues."""

    prompt: Floats
    output: Floats
    reuse: Floats
    continues: Any


def from_buckets(buckets: tuple[Bucket, ...], n: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Prompt, output and reused part of ``n`` requests that begin anew."""
    which = deal(np.array([b.share for b in buckets]), n, rng)
    prompt, output, reuse = np.ones(n), np.ones(n), np.zeros(n)
    for i, b in enumerate(buckets):
        mine = np.flatnonzero(which == i)
        prompt[mine] = draw(b.prompt, even(len(mine), rng))
        output[mine] = draw(b.output, even(len(mine), rng))
        if b.reuse:
            reuse[mine] = draw(b.reuse, even(len(mine), rng))
    return prompt, output, reuse


def sizes(kinds: tuple[Kind, ...], units: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """The kind of each unit, and how many requests it has."""
    which = deal(np.array([k.share for k in kinds]), units, rng)
    size = np.ones(units, np.int64)
    for i, k in enumerate(kinds):
        mine = np.flatnonzero(which == i)
        if k.turns:
            size[mine] = np.maximum(1, np.rint(draw(k.turns, even(len(mine), rng))))
    return which, size


def lengths(kinds: tuple[Kind, ...], klass: Ints, turn: Ints, rng: np.random.Generator) -> Lengths:
    """Of requests in sessions: ``klass`` and ``turn`` per row, the turns of a session one after another."""
    n = len(klass)
    new, output, reuse, continues = np.ones(n), np.ones(n), np.zeros(n), np.zeros(n, bool)
    for i, k in enumerate(kinds):
        mine = np.flatnonzero(klass == i)
        later = mine[turn[mine] > 0]
        if k.grows and len(later):
            goes_on = later[deal(np.array([1 - k.anew, k.anew]), len(later), rng) == 0]
            continues[goes_on] = True
            new[goes_on] = draw(k.grows, even(len(goes_on), rng))
            if k.later_output:
                output[goes_on] = draw(k.later_output, even(len(goes_on), rng))
            reuse[goes_on] = draw(k.keeps, even(len(goes_on), rng)) if k.keeps else 1.0
        base = mine[~continues[mine]]
        new[base], output[base], reuse[base] = from_buckets(k.buckets, len(base), rng)
    new, output = (np.maximum(1, np.rint(x)) for x in (new, output))
    # All that was brought since the last turn that began anew, and all that was answered to it.
    added = new.copy()
    after = np.flatnonzero(continues)
    added[after] += output[after - 1]
    running = np.cumsum(added)
    begun = np.maximum.accumulate(np.where(continues, 0, np.arange(n)))
    prompt = running - (running - added)[begun]
    for i, k in enumerate(kinds):
        mine = np.flatnonzero((klass == i) & continues)
        if k.later_prompt:  # sums of independent draws miss the tails: the order is theirs, the lengths are the log's
            prompt[mine] = draw(k.later_prompt, ranked(prompt[mine]))
    prompt = np.maximum(1, np.rint(prompt))
    for row in after.tolist():
        prompt[row] = max(prompt[row], prompt[row - 1] + output[row - 1] + 1)
    return Lengths(prompt, output, reuse, continues)


def pauses(kinds: tuple[Kind, ...], klass: Ints, turn: Ints, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Of each request the think time before it (NaN: none, or not known), and how long after the start of the turn
    before it starts at the earliest (0 for first turns)."""
    think, wait = np.full(len(klass), np.nan), np.zeros(len(klass))
    for i, k in enumerate(kinds):
        later = np.flatnonzero((klass == i) & (turn > 0))
        if k.think_s:
            think[later] = wait[later] = draw(k.think_s, even(len(later), rng))
        elif k.between_s:
            wait[later] = draw(k.between_s, even(len(later), rng))
    return think, wait


def as_dict(k: Kind) -> dict[str, Any]:
    """Plain values; absent ones left out."""
    out = {"name": k.name, "share": k.share, "anew": k.anew}
    out |= {c: [list(part) for part in v] for c in CURVES if (v := getattr(k, c)) is not None}
    return {**out, "bucket": [plain(b) for b in k.buckets]}


def from_dicts(raw: Mapping[str, Any], where: str) -> tuple[Kind, ...]:
    """Read what :func:`as_dict` gave, from ``raw["class"]``.

    Raises:
        UsageError: a part is missing or is not what it should be; the message names it.
    """
    out = []
    for i, k in enumerate(tables(raw, "class", where)):
        at = f"{where} class {i}"
        name = k.get("name")
        if not isinstance(name, str) or not name:
            raise UsageError(f"{at}: name must be a text, not {name!r}")
        curves = {c: curve_of(k, c, at) for c in CURVES if c in k}
        anew, share = number(k, "anew", at), number(k, "share", at)
        if not 0 <= anew <= 1 or share < 0:
            raise UsageError(f"{at}: anew must be from 0 to 1, and share not below 0")
        out.append(Kind(name, share, read_buckets(k, at), anew=anew, **curves))
    if sum(k.share for k in out) <= 0:
        raise UsageError(f"{where}: no class has a share above 0")
    return tuple(out)


def read_buckets(raw: Mapping[str, Any], where: str) -> tuple[Bucket, ...]:
    """The ``[[….bucket]]`` of a table.

    Raises:
        UsageError: as of :func:`from_dicts`.
    """
    out = []
    for i, b in enumerate(tables(raw, "bucket", where)):
        at = f"{where} bucket {i}"
        reuse = curve_of(b, "reuse", at) if "reuse" in b else None
        prompt, output = (curve_of(b, k, at) for k in ("prompt", "output"))
        out.append(Bucket(number(b, "share", at), prompt, output, reuse))
    if sum(b.share for b in out) <= 0:
        raise UsageError(f"{where}: no bucket has a share above 0")
    return tuple(out)


def plain(x: Any) -> dict[str, Any]:
    """A dataclass of numbers and curves as plain values; absent ones left out."""
    table = dataclasses.asdict(x).items()
    return {k: [list(part) for part in v] if isinstance(v, tuple) else v for k, v in table if v is not None}
