"""Workload (a recipe and a seed) and Schedule (one row per request). Pure; the same seed gives the same bytes."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

SLO_KEYS = ("ttft_ms", "ttfa_ms", "tpot_ms", "itl_ms", "e2e_ms")
CACHE_MODES = ("cold", "warm", "natural")


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, at most ``cap``: ``fixed(a)``, ``uniform(a, b)`` or ``lognormal(median a, sigma b)``."""

    kind: str = "fixed"
    a: float = 128
    b: float = 0
    cap: int = 1 << 20

    @classmethod
    def parse(cls, value: int | float | str) -> Lengths:
        """``128``, ``"uniform(64,512)"``, ``"lognormal(256,0.6)"``, ``"lognormal(256,0.6,max=2048)"``.

        Raises:
            UsageError: none of these forms, or not positive.
        """
        text = str(value).strip().replace(" ", "")
        form = re.fullmatch(r"(?:(uniform|lognormal|fixed)\()?([\d.]+)(?:,([\d.]+))?(?:,max=(\d+))?\)?", text)
        bad = UsageError(f"{value!r} is not a length", "use 128, uniform(64,512) or lognormal(256,0.6,max=2048)")
        if not form or bool(form[1]) != text.endswith(")"):
            raise bad
        try:
            a, b, cap = float(form[2]), float(form[3] or 0), int(form[4] or 1 << 20)
        except ValueError:
            raise bad from None
        kind = form[1] or "fixed"
        if a < 1 or cap < 1 or (kind == "uniform" and b < a) or (kind == "fixed" and form[3]):
            raise bad
        return cls(kind, a, b, cap)

    def sample(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """``n`` lengths in tokens, each ≥ 1 and ≤ ``cap``."""
        if self.kind == "uniform":
            x = rng.integers(int(self.a), int(self.b) + 1, n).astype(np.float64)
        elif self.kind == "lognormal":
            x = self.a * np.exp(self.b * rng.standard_normal(n))
        else:
            x = np.full(n, self.a)
        return np.clip(np.rint(x), 1, self.cap).astype(np.int64)

    def __str__(self) -> str:
        tail = f",max={self.cap}" if self.cap != 1 << 20 else ""
        # 15 digits: %g alone would turn 1048576 into 1.04858e+06.
        if self.kind == "fixed":
            return f"{self.a:.15g}{tail}"
        return f"{self.kind}({self.a:.15g},{self.b:.15g}{tail})"


@dataclass(frozen=True)
class RequestClass:
    """A kind of request with its share of the traffic, lengths and SLO."""

    name: str = "default"
    share: float = 1.0
    prompt_tokens: Lengths = Lengths("fixed", 128)
    output_tokens: Lengths = Lengths("fixed", 64)
    slo: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """What to send. ``arrivals`` matters in open loop only (``poisson`` or ``constant``)."""

    classes: tuple[RequestClass, ...] = (RequestClass(),)
    arrivals: str = "poisson"
    cache: str = "cold"
    temperature: float = 0.0
    timeout_s: float = 300.0
    ignore_eos: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        shares = [c.share for c in self.classes]
        if not all(0 <= share < math.inf for share in shares) or sum(shares) <= 0:
            raise UsageError("a workload needs at least one class with a positive share, and none below 0")
        if self.cache not in CACHE_MODES:
            raise UsageError(f"cache must be one of {', '.join(CACHE_MODES)}, not {self.cache!r}")
        if self.arrivals not in ("poisson", "constant"):
            raise UsageError(f"arrivals must be poisson or constant, not {self.arrivals!r}")
        if self.seed < 0:
            raise UsageError(f"seed must be at least 0, not {self.seed}")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature must be at least 0, not {self.temperature}")
        if not 0 < self.timeout_s < math.inf:
            raise UsageError(f"timeout_s must be a number of seconds above 0, not {self.timeout_s}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        out = dataclasses.asdict(self)
        for raw, c in zip(out["classes"], self.classes, strict=True):
            raw["prompt_tokens"], raw["output_tokens"] = str(c.prompt_tokens), str(c.output_tokens)
        out["classes"] = list(out["classes"])
        return out

    @classmethod
    def from_toml(cls, path: Path) -> Workload:
        """Read a workload file; see ``docs/workloads.md``.

        Raises:
            UsageError: not readable, not TOML, an unknown key or a bad value; the message names it.
        """
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise UsageError(f"cannot read workload {path}: {exc.strerror}") from exc
        except (ValueError, UnicodeDecodeError) as exc:
            raise UsageError(f"{path} is not valid TOML: {exc}") from exc
        classes = raw.pop("class", [{}])
        if not isinstance(classes, list) or not all(isinstance(c, dict) for c in classes):
            raise UsageError(f"{path}: class is not a list of tables", "begin each class with [[class]]")
        known = {f.name for f in dataclasses.fields(cls)} - {"classes"}
        _check(raw, known | _PER_CLASS, f"{path}")
        shared = {k: raw.pop(k) for k in _PER_CLASS if k in raw}
        return cls(tuple(_class(c, shared, i, path) for i, c in enumerate(classes)), **raw)


# What each key holds in a file; lengths are read by Lengths.parse. bool is apart: to Python, true is also a number.
_NUMBER, _WHOLE, _TEXT, _SWITCH, _TABLE = "a number", "a whole number", "a text", "true or false", "a table"
_PYTHON = {_NUMBER: (int, float), _WHOLE: (int,), _TEXT: (str,), _SWITCH: (bool,), _TABLE: (dict,)}
_HOLDS = {
    **dict.fromkeys(("arrivals", "cache", "name"), _TEXT),
    **dict.fromkeys(("temperature", "timeout_s", "share", *SLO_KEYS), _NUMBER),
    "seed": _WHOLE,
    "ignore_eos": _SWITCH,
    "slo": _TABLE,
}
_PER_CLASS = {"prompt_tokens", "output_tokens", "slo"}


def _class(raw: dict[str, Any], shared: dict[str, Any], index: int, path: Path) -> RequestClass:
    where = f"{path} class {index}"
    _check(raw, {f.name for f in dataclasses.fields(RequestClass)}, where)
    merged = {**shared, **raw}
    for key in ("prompt_tokens", "output_tokens"):
        if key in merged:
            try:
                merged[key] = Lengths.parse(merged[key])
            except UsageError as exc:
                raise UsageError(f"{where}: {key}: {exc.message}", exc.hint) from None
    merged.setdefault("name", f"class{index}" if index else "default")
    slo = merged.get("slo", {})
    _check(slo, set(SLO_KEYS), f"{where} slo")
    for key, limit in slo.items():
        if not 0 < limit < math.inf:
            raise UsageError(f"{where} slo: {key} must be a number of milliseconds above 0, not {limit}")
    return RequestClass(**merged)


def _check(raw: dict[str, Any], known: set[str], where: str) -> None:
    """Refuse a key that means nothing, and a value of another kind than the key holds."""
    extra = sorted(set(raw) - known)
    if extra:
        raise UsageError(f"{where}: unknown key {extra[0]!r}", f"known keys: {', '.join(sorted(known))}")
    for key, value in raw.items():
        holds = _HOLDS.get(key)
        if holds and (not isinstance(value, _PYTHON[holds]) or isinstance(value, bool) != (holds == _SWITCH)):
            raise UsageError(f"{where}: {key} must be {holds}, not {value!r}")


@dataclass(frozen=True, eq=False)
class Schedule:
    """One row per request, as columns of equal length. ``due_ns`` is −1 in closed loop (due when a place is free)."""

    id: NDArray[np.int64]
    klass: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    due_ns: NDArray[np.int64]
    class_names: tuple[str, ...] = ("default",)

    def __len__(self) -> int:
        return len(self.id)

    def to_bytes(self) -> bytes:
        """Canonical bytes: equal schedules are equal bytes (invariant 5)."""
        head = "\0".join(self.class_names).encode()
        cols = (self.id, self.klass, self.prompt_tokens, self.output_tokens, self.due_ns)
        return head + b"\1" + b"".join(c.astype("<i8").tobytes() for c in cols)

    def shard(self, k: int, n: int) -> Schedule:
        """Every ``n``-th row from ``k``: the shards together are the whole (invariant 7)."""
        return dataclasses.replace(
            self, **{f: getattr(self, f)[k::n] for f in ("id", "klass", "prompt_tokens", "output_tokens", "due_ns")}
        )
