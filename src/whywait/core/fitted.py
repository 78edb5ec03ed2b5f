"""A workload learnt from a log: numbers only, from which any amount of like traffic can be drawn.

Three parts, each as empirical quantile functions so that no shape is assumed: *stages* (gaps between arrivals, stretch
by stretch), *buckets* (prompt lengths, and for each the outputs that went with them, so their correlation stays) and
*reuse* (how much of a prompt an earlier one began with, and how long ago that was).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.core import kinds
from whywait.core.curves import (
    MOST_KNOTS,
    Curve,
    Floats,
    Ints,
    curve,
    curve_of,
    draw,
    even,
    number,
    tables,
)
from whywait.core.kinds import Bucket, Kind, from_buckets, plain
from whywait.errors import UsageError

__all__ = ["MOST_KNOTS", "Bucket", "Fitted", "Rows", "Stage", "curve"]


@dataclass(frozen=True)
class Stage:
    """A stretch of the log: ``requests`` gaps in ``seconds``; ``cv`` of the gaps; ``lag1`` how much a gap resembles the
    one before (rank correlation)."""

    requests: int
    seconds: float
    cv: float
    lag1: float
    gaps: Curve


@dataclass(frozen=True, eq=False)
class Rows:
    """Requests drawn: arrival in seconds from the first, lengths, and prefix blocks where the log told of any.

    Turns of a session are one after another; ``session`` is the first of its rows (−1: none). Of a later turn ``at_s``
    is the earliest there can be, as if answers took no time; ``think_s`` is NaN for first turns, and where it is not
    known, so that only ``at_s`` tells.
    """

    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    chains: list[list[int]] | None
    klass: Ints
    class_names: tuple[str, ...]
    session: Ints
    turn: Ints
    think_s: Floats


@dataclass(frozen=True)
class Fitted:
    """See the module. ``block_tokens`` and ``ago`` (in requests) are there when prefixes were seen.

    With ``kinds`` (classes or sessions were seen) there are no buckets but theirs, stages are of what arrives by itself
    (first turns), and ``total`` is the number of requests, later turns included.
    """

    stages: tuple[Stage, ...]
    buckets: tuple[Bucket, ...]
    block_tokens: int | None = None
    ago: Curve | None = None
    kinds: tuple[Kind, ...] = ()
    total: int | None = None

    @property
    def units(self) -> int:
        """Sessions, and requests of none; the first of them (which has no gap before it) included."""
        return sum(s.requests for s in self.stages) + 1

    @property
    def requests(self) -> int:
        """In the log."""
        return self.total or self.units

    @property
    def rate(self) -> float:
        """Mean requests per second of the log."""
        units = sum(s.requests for s in self.stages)
        each = self.requests / self.units
        return units * each / max(1e-9, sum(s.seconds for s in self.stages))

    def sample(self, n: int | None = None, seed: int = 1, rate: float | None = None) -> Rows:
        """``n`` requests (default: as many as the log had). With ``rate`` all gaps are scaled to that mean rate.

        Fewer are the beginning of the log's stages, more go through them again.
        """
        if self.kinds:
            return self._sample_units(n, seed, rate)
        n = self.requests if n is None else n
        rng = np.random.default_rng([seed, 11])
        at = self._arrivals(n, rng) / (1.0 if rate is None else rate / self.rate)
        prompt, output, reuse = from_buckets(self.buckets, n, rng)
        prompt_tokens, output_tokens = (np.maximum(1, np.rint(x)).astype(np.int64) for x in (prompt, output))
        chains = self._blocks(prompt_tokens, reuse, np.zeros(n, bool), rng)
        none, zero = np.full(n, -1, np.int64), np.zeros(n, np.int64)
        return Rows(at, prompt_tokens, output_tokens, chains, zero, (), none, zero, np.full(n, np.nan))

    def _sample_units(self, n: int | None, seed: int, rate: float | None) -> Rows:
        passes = 1 if n is None else -(-n // self.requests)
        while True:  # all of the log, as often as need be: rounding may leave a few turns less than it had
            rng = np.random.default_rng([seed, 11])
            units = self.units * passes
            which, size = kinds.sizes(self.kinds, units, rng)
            if n is None or size.sum() >= n:
                break
            passes += 1
        first = np.repeat(np.cumsum(size) - size, size)
        klass, turn = np.repeat(which, size), np.arange(len(first)) - first
        drawn = kinds.lengths(self.kinds, klass, turn, rng)
        think, wait = kinds.pauses(self.kinds, klass, turn, rng)
        starts = self._arrivals(units, rng) / (1.0 if rate is None else rate / self.rate)
        since = np.cumsum(wait)
        at = np.repeat(starts, size) + since - since[first]
        prompt, output = (x.astype(np.int64) for x in (drawn.prompt, drawn.output))
        chains = self._blocks(prompt, drawn.reuse, drawn.continues, rng)
        session = np.where(np.repeat(size, size) == 1, -1, first)
        names = tuple(k.name for k in self.kinds)
        m = len(at) if n is None else n
        return Rows(at[:m], prompt[:m], output[:m], chains[:m] if chains is not None else None, klass[:m], names,
                    session[:m], turn[:m], think[:m])  # fmt: skip

    def _blocks(self, prompt: Ints, reuse: Floats, continues: Any, rng: np.random.Generator) -> list[list[int]] | None:
        if not (self.block_tokens and self.ago):
            return None
        count = np.ceil(prompt / self.block_tokens).astype(np.int64)
        ago = np.maximum(1, np.rint(draw(self.ago, even(len(prompt), rng)))).astype(np.int64)
        before = np.where(continues, np.concatenate([[0], count[:-1]]), count)
        kept = np.minimum(np.rint(reuse * before).astype(np.int64), count)
        return _chains(count, kept, np.where(continues, 0, ago))

    def _arrivals(self, n: int, rng: np.random.Generator) -> Floats:
        gaps: list[Floats] = [np.zeros(1)]
        left = n - 1
        while left > 0:
            for stage in self.stages:
                take = min(stage.requests, left)
                # All of the stage is drawn even when a part is wanted, so that a short run is a true beginning.
                gaps.append(draw(stage.gaps, even(stage.requests, rng, stage.lag1))[:take])
                left -= take
                if left <= 0:
                    break
        return np.cumsum(np.concatenate(gaps))[:n]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for TOML and JSON; :meth:`from_dict` takes them back."""
        out: dict[str, Any] = {}
        if self.block_tokens and self.ago:
            out |= {"block_tokens": self.block_tokens, "ago": [list(x) for x in self.ago]}
        out["stage"] = [plain(s) for s in self.stages]
        if self.kinds:
            return {"requests": self.requests, **out, "class": [kinds.as_dict(k) for k in self.kinds]}
        out["bucket"] = [plain(b) for b in self.buckets]
        return out

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "fitted") -> Fitted:
        """Read what :meth:`as_dict` gave.

        Raises:
            UsageError: a part is missing or is not what it should be; the message names it.
        """
        stages = []
        for i, s in enumerate(tables(raw, "stage", where)):
            at = f"{where} stage {i}"
            requests, seconds, cv, lag1 = (number(s, k, at) for k in ("requests", "seconds", "cv", "lag1"))
            stages.append(Stage(int(requests), seconds, cv, lag1, curve_of(s, "gaps", at)))
            if stages[-1].requests < 1:
                raise UsageError(f"{at}: requests must be at least 1")
        made = kinds.from_dicts(raw, where) if "class" in raw else ()
        buckets = () if made else kinds.read_buckets(raw, where)
        total = int(number(raw, "requests", where)) if made else None
        block = int(number(raw, "block_tokens", where)) if "block_tokens" in raw else None
        if block is not None and block < 1:
            raise UsageError(f"{where}: block_tokens must be at least 1, not {block}")
        ago = curve_of(raw, "ago", where) if block else None
        return cls(tuple(stages), buckets, block, ago, made, total)


def _chains(count: Ints, reuse: Ints, ago: Ints) -> list[list[int]]:
    """Each request begins with the first ``reuse`` blocks of an earlier one that is long enough, the nearest to ``ago``
    requests back (0: of the one just before); the rest of its blocks are new."""
    out: list[list[int]] = []
    fresh = 0
    for i, (n, h, back) in enumerate(zip(count.tolist(), reuse.tolist(), ago.tolist(), strict=True)):
        shared: list[int] = []
        if h and i:
            shared = out[_nearest(count[:i], h, i - back) if back else i - 1][:h]
        new = n - len(shared)
        out.append(shared + list(range(fresh, fresh + new)))
        fresh += new
    return out


def _nearest(count: Ints, least: int, wanted: int) -> int:
    """The index nearest to ``wanted`` whose count is at least ``least``; the largest of all where none is."""
    for reach in (32, 1024, len(count)):  # nearly always there is one close by
        low = max(0, wanted - reach)
        found = np.flatnonzero(count[low : wanted + reach + 1] >= least) + low
        if len(found):
            return int(found[np.argmin(np.abs(found - wanted))])
    return int(np.argmax(count))
