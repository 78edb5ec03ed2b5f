"""A workload learnt from a log: numbers only, from which any amount of like traffic can be drawn.

Three parts, each as empirical quantile functions so that no shape is assumed: *stages* (gaps between arrivals, stretch
by stretch), *buckets* (prompt lengths, and for each the outputs that went with them, so their correlation stays) and
*reuse* (how much of a prompt an earlier one began with, and how long ago that was).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.errors import UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A quantile function: where (0 to 1, growing) and how much there; a straight line in between.
Curve = tuple[tuple[float, ...], tuple[float, ...]]
TOLERANCE, MOST_KNOTS = 0.01, 64


@dataclass(frozen=True)
class Stage:
    """A stretch of the log: ``requests`` gaps in ``seconds``; ``cv`` of the gaps; ``lag1`` how much a gap resembles the
    one before (rank correlation)."""

    requests: int
    seconds: float
    cv: float
    lag1: float
    gaps: Curve


@dataclass(frozen=True)
class Bucket:
    """Requests with prompts of like length: their share, both lengths and the reused part (0 to 1) of the prompt."""

    share: float
    prompt: Curve
    output: Curve
    reuse: Curve | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Requests drawn: arrival in seconds from the first, lengths, and prefix blocks where the log told of any."""

    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    chains: list[list[int]] | None


@dataclass(frozen=True)
class Fitted:
    """See the module. ``block_tokens`` and ``ago`` (in requests) are there when prefixes were seen."""

    stages: tuple[Stage, ...]
    buckets: tuple[Bucket, ...]
    block_tokens: int | None = None
    ago: Curve | None = None

    @property
    def requests(self) -> int:
        """In the log, the first of them (which has no gap before it) included."""
        return sum(s.requests for s in self.stages) + 1

    @property
    def rate(self) -> float:
        """Mean requests per second of the log."""
        return sum(s.requests for s in self.stages) / max(1e-9, sum(s.seconds for s in self.stages))

    def sample(self, n: int | None = None, seed: int = 1, rate: float | None = None) -> Rows:
        """``n`` requests (default: as many as the log had). With ``rate`` all gaps are scaled to that mean rate.

        Fewer are the beginning of the log's stages, more go through them again.
        """
        n = self.requests if n is None else n
        rng = np.random.default_rng([seed, 11])
        at = self._arrivals(n, rng) / (1.0 if rate is None else rate / self.rate)
        kind = _deal(np.array([b.share for b in self.buckets]), n, rng)
        prompt, output, reuse = np.ones(n), np.ones(n), np.zeros(n)
        for i, b in enumerate(self.buckets):
            mine = np.flatnonzero(kind == i)
            prompt[mine] = _draw(b.prompt, _even(len(mine), rng))
            output[mine] = _draw(b.output, _even(len(mine), rng))
            if b.reuse:
                reuse[mine] = _draw(b.reuse, _even(len(mine), rng))
        prompt_tokens, output_tokens = (np.maximum(1, np.rint(x)).astype(np.int64) for x in (prompt, output))
        chains = None
        if self.block_tokens and self.ago:
            count = np.ceil(prompt_tokens / self.block_tokens).astype(np.int64)
            ago = np.maximum(1, np.rint(_draw(self.ago, _even(n, rng)))).astype(np.int64)
            chains = _chains(count, np.rint(reuse * count).astype(np.int64), ago)
        return Rows(at, prompt_tokens, output_tokens, chains)

    def _arrivals(self, n: int, rng: np.random.Generator) -> Floats:
        gaps: list[Floats] = [np.zeros(1)]
        left = n - 1
        while left > 0:
            for stage in self.stages:
                take = min(stage.requests, left)
                # All of the stage is drawn even when a part is wanted, so that a short run is a true beginning.
                gaps.append(_draw(stage.gaps, _even(stage.requests, rng, stage.lag1))[:take])
                left -= take
                if left <= 0:
                    break
        return np.cumsum(np.concatenate(gaps))[:n]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for TOML and JSON; :meth:`from_dict` takes them back."""
        out: dict[str, Any] = {}
        if self.block_tokens and self.ago:
            out |= {"block_tokens": self.block_tokens, "ago": [list(x) for x in self.ago]}
        out["stage"] = [_plain(s) for s in self.stages]
        out["bucket"] = [_plain(b) for b in self.buckets]
        return out

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "fitted") -> Fitted:
        """Read what :meth:`as_dict` gave.

        Raises:
            UsageError: a part is missing or is not what it should be; the message names it.
        """
        stages, buckets = [], []
        for i, s in enumerate(_tables(raw, "stage", where)):
            at = f"{where} stage {i}"
            requests, seconds, cv, lag1 = (_number(s, k, at) for k in ("requests", "seconds", "cv", "lag1"))
            stages.append(Stage(int(requests), seconds, cv, lag1, _curve(s, "gaps", at)))
            if stages[-1].requests < 1:
                raise UsageError(f"{at}: requests must be at least 1")
        for i, b in enumerate(_tables(raw, "bucket", where)):
            at = f"{where} bucket {i}"
            reuse = _curve(b, "reuse", at) if "reuse" in b else None
            lengths = [_curve(b, k, at) for k in ("prompt", "output")]
            buckets.append(Bucket(_number(b, "share", at), lengths[0], lengths[1], reuse))
        if sum(b.share for b in buckets) <= 0:
            raise UsageError(f"{where}: no bucket has a share above 0")
        block = int(_number(raw, "block_tokens", where)) if "block_tokens" in raw else None
        if block is not None and block < 1:
            raise UsageError(f"{where}: block_tokens must be at least 1, not {block}")
        ago = _curve(raw, "ago", where) if block else None
        return cls(tuple(stages), tuple(buckets), block, ago)


def curve(values: Floats | Ints, floor: float) -> Curve:
    """The quantile function of ``values`` by as few knots as keep it within 1 % (of at least ``floor``), at most 64.

    Knots go where they are needed: a value that is there many times gets two, so it is not smeared, and so do the few
    largest, which make up much of the sum in a log with long pauses.
    """
    x = np.sort(np.asarray(values, np.float64))
    n = len(x)
    knots = {0, n - 1}
    work = [_worst(x, 0, n - 1, floor)]
    while work and len(knots) < MOST_KNOTS:
        work.sort()
        error, at, low, high = work.pop()
        if error <= TOLERANCE:
            break
        knots.add(at)
        work += [_worst(x, low, at, floor), _worst(x, at, high, floor)]
    index = sorted(knots)
    where = (float(f"{(i + 0.5) / n:.7g}") for i in index)
    return tuple(where), tuple(float(f"{x[i]:.6g}") for i in index)


def _worst(x: Floats, low: int, high: int, floor: float) -> tuple[float, int, int, int]:
    """(error, index) of the value that the line from ``low`` to ``high`` misses most, and the two ends."""
    if high - low < 2:
        return 0.0, low, low, high
    line = np.linspace(x[low], x[high], high - low + 1)
    off = np.abs(line - x[low : high + 1]) / np.maximum(x[low : high + 1], floor)
    at = int(np.argmax(off[1:-1])) + 1
    return float(off[at]), low + at, low, high


def _draw(c: Curve, u: Floats) -> Floats:
    out: Floats = np.interp(u, *c)
    return out


def _even(n: int, rng: np.random.Generator, lag1: float = 0.0) -> Floats:
    """``n`` numbers spread evenly over (0, 1) in random order: their quantiles are exact at any ``n``.

    With ``lag1`` the order is that of a Gaussian chain, so like follows like.
    """
    if n == 0:
        return np.zeros(0)
    noise = rng.standard_normal(n)
    if lag1:
        rho = 2 * math.sin(math.pi / 6 * max(-0.95, min(0.95, lag1)))  # rank correlation to that of the Gaussian
        keep = math.sqrt(max(0.0, 1 - rho * rho))
        for i in range(1, n):
            noise[i] = rho * noise[i - 1] + keep * noise[i]
    ranks = np.empty(n)
    ranks[np.argsort(noise, kind="stable")] = np.arange(n)
    out: Floats = (ranks + 0.5) / n
    return out


def _deal(shares: Floats, n: int, rng: np.random.Generator) -> Ints:
    """Buckets in their proportions to within one request, in random order."""
    bounds = np.rint(np.cumsum(shares / shares.sum()) * n).astype(int)
    kind = np.minimum(np.searchsorted(bounds, np.arange(n), side="right"), len(shares) - 1)
    return rng.permutation(kind).astype(np.int64)


def _chains(count: Ints, reuse: Ints, ago: Ints) -> list[list[int]]:
    """Each request begins with the first ``reuse`` blocks of an earlier one that is long enough, the nearest to ``ago``
    requests back; the rest of its blocks are new."""
    out: list[list[int]] = []
    fresh = 0
    for i, (n, h, back) in enumerate(zip(count.tolist(), reuse.tolist(), ago.tolist(), strict=True)):
        shared: list[int] = []
        if h and i:
            shared = out[_nearest(count[:i], h, i - back)][:h]
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


def _plain(x: Stage | Bucket) -> dict[str, Any]:
    table = dataclasses.asdict(x).items()
    return {k: [list(part) for part in v] if isinstance(v, tuple) else v for k, v in table if v is not None}


def _tables(raw: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    value = raw.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise UsageError(f"{where}: needs at least one [[{where}.{key}]]", "whywait workload fit writes them")
    return value


def _number(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{where}: {key} must be a number, not {value!r}")
    return float(value)


def _curve(raw: Mapping[str, Any], key: str, where: str) -> Curve:
    value = raw.get(key)
    bad = UsageError(f"{where}: {key} must be two lists of equal length, shares from 0 to 1 and values from 0 up, "
                     "neither decreasing")  # fmt: skip
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, list) and part for part in value):
        raise bad
    if any(isinstance(v, bool) or not isinstance(v, (int, float)) for part in value for v in part):
        raise bad
    at, amount = (np.array(part, np.float64) for part in value)
    if len(at) != len(amount) or not (np.isfinite(amount).all() and at[0] >= 0 and at[-1] <= 1 and amount[0] >= 0):
        raise bad
    if (np.diff(at) < 0).any() or (np.diff(amount) < 0).any():
        raise bad
    return tuple(at.tolist()), tuple(amount.tolist())
