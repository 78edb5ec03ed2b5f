"""Workload: what to send, as a recipe with a seed. ``docs/workloads.md`` describes the file; a test keeps it true."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whywait.core import bounded
from whywait.core.fitted import Fitted
from whywait.core.lengths import Lengths
from whywait.errors import UsageError
from whywait.units import NS_PER_S, parse_duration

SLO_KEYS = ("ttft_ms", "ttfa_ms", "tpot_ms", "itl_ms", "e2e_ms")
CACHE_MODES = ("cold", "warm", "natural")
ARRIVALS = ("poisson", "constant", "gamma", "burst")
LANGUAGES = ("en", "zh", "es", "de", "ar", "code")
_ONE, _SHORT, _USUAL, _ANSWER, _RESULT = (Lengths("fixed", n) for n in (1, 24, 128, 64, 200))


@dataclass(frozen=True)
class RequestClass:
    """A kind of request: its share of the traffic, lengths and SLO.

    ``prompt_tokens`` is what one turn brings anew, the first turn's shared part included. ``thinking_tokens`` come on
    top of the answer's ``output_tokens``. ``shared`` is the share of the (first) prompt that is one of ``groups``
    system prompts. A session has ``turns``, each after ``think_ms``; of a turn the service first answers ``tool_calls``
    times with a short ``tool_output_tokens`` and is sent ``tool_result_tokens`` after ``tool_ms``.
    """

    name: str = "default"
    share: float = 1.0
    prompt_tokens: Lengths = _USUAL
    output_tokens: Lengths = _ANSWER
    slo: dict[str, float] = field(default_factory=dict)
    thinking_tokens: Lengths | None = None
    language: tuple[str, ...] = ("en",)
    shared: float = 0.0
    groups: int = 1
    turns: Lengths = _ONE
    turn_tokens: Lengths | None = None  # what a later turn brings; as prompt_tokens when None
    think_ms: Lengths | None = None
    tool_calls: Lengths | None = None
    tool_output_tokens: Lengths = _SHORT
    tool_result_tokens: Lengths = _RESULT
    tool_ms: Lengths | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.shared < 1:
            raise UsageError(f"shared must be a share from 0 to below 1, not {self.shared}")
        if self.groups < 1:
            raise UsageError(f"groups must be at least 1, not {self.groups}")
        unknown = [x for x in self.language if x not in LANGUAGES]
        if unknown or not self.language:
            raise UsageError(f"language {', '.join(unknown) or '(none)'} is not there", f"use {', '.join(LANGUAGES)}")

    @property
    def requests_per_session(self) -> float:
        return self.turns.mean * (1 + (self.tool_calls.mean if self.tool_calls else 0))


@dataclass(frozen=True)
class Stage:
    """A stretch of an open loop: ``rate`` requests per second, growing evenly to ``to`` where that is given."""

    rate: float
    duration_s: float
    to: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.rate < math.inf and 0 <= self.end < math.inf and self.rate + self.end > 0):
            raise UsageError(f"a stage needs a rate in requests per second, not {self.rate} to {self.end}")
        if not 0 < self.duration_s < math.inf:
            raise UsageError(f"a stage needs a duration above 0, not {self.duration_s} s")

    @property
    def end(self) -> float:
        return self.rate if self.to is None else self.to

    @property
    def requests(self) -> float:
        return (self.rate + self.end) / 2 * self.duration_s


@dataclass(frozen=True)
class Workload:
    """What to send. Of the arrivals only ``ramp_s`` matters in closed loop: its first requests are spread over it.

    ``arrivals``: exponential gaps, equal ones, gamma with the coefficient of variation ``cv``, or groups of ``burst``
    at equal distances. ``stages`` make the rate change; ``trace`` is a file of requests, replayed ``speed`` times as
    fast. ``max_in_flight`` bounds an open loop: what is due then waits in the client, and that wait counts.
    """

    classes: tuple[RequestClass, ...] = (RequestClass(),)
    arrivals: str = "poisson"
    cache: str = "cold"
    temperature: float = 0.0
    timeout_s: float = 300.0
    ignore_eos: bool = True
    seed: int = 1
    cv: float = 2.0
    burst: int = 8
    stages: tuple[Stage, ...] = ()
    trace: str = ""
    speed: float = 1.0
    max_in_flight: int | None = None
    ramp_s: float = 0.0
    fitted: Fitted | None = None  # learnt from a log by ``whywait workload fit``; brings lengths, gaps and reuse

    def __post_init__(self) -> None:
        shares = [c.share for c in self.classes]
        if not all(0 <= share < math.inf for share in shares) or sum(shares) <= 0:
            raise UsageError("a workload needs at least one class with a positive share, and none below 0")
        if self.cache not in CACHE_MODES:
            raise UsageError(f"cache must be one of {', '.join(CACHE_MODES)}, not {self.cache!r}")
        if self.arrivals not in ARRIVALS:
            raise UsageError(f"arrivals must be one of {', '.join(ARRIVALS)}, not {self.arrivals!r}")
        if self.seed < 0:
            raise UsageError(f"seed must be at least 0, not {self.seed}")
        for name in ("temperature", "ramp_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0 < self.timeout_s < math.inf:
            raise UsageError(f"timeout_s must be a number of seconds above 0, not {self.timeout_s}")
        for name in ("cv", "speed"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be a number above 0, not {getattr(self, name)}")
        for name in ("burst", "max_in_flight"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if sum(map(bool, (self.stages, self.trace, self.fitted))) > 1:
            raise UsageError("stages, a trace and what was fitted exclude each other", "each brings its own times")

    @property
    def has_sessions(self) -> bool:
        return any(c.requests_per_session > 1 for c in self.classes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a manifest; :meth:`from_dict` reads them back."""
        out = dataclasses.asdict(dataclasses.replace(self, fitted=None))
        out["fitted"] = self.fitted.as_dict() if self.fitted else None
        for raw, c in zip(out["classes"], self.classes, strict=True):
            lengths = {k: getattr(c, k) for k in _LENGTHS}
            raw.update({k: None if v is None else str(v) for k, v in lengths.items()}, language=list(c.language))
        out["classes"], out["stages"] = list(out["classes"]), list(out["stages"])
        return out

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "workload", folder: Path | None = None) -> Workload:
        """From the tables of a file or a manifest; ``class`` and ``stage`` are lists of tables.

        Raises:
            UsageError: an unknown key or a bad value; the message names it.
        """
        raw = {k: v for k, v in raw.items() if v is not None}
        classes = _tables(raw, "class", "classes", where) or [{}]
        stages = _tables(raw, "stage", "stages", where)
        fitted = raw.pop("fitted", None)
        if fitted is not None and not isinstance(fitted, dict):
            raise UsageError(f"{where}: fitted must be a table, not {fitted!r}", "whywait workload fit writes one")
        _check(raw, {f.name for f in dataclasses.fields(cls)} - {"classes", "stages", "fitted"} | _PER_CLASS, where)
        shared = {k: raw.pop(k) for k in _PER_CLASS if k in raw}
        if raw.get("trace") and folder is not None:
            raw["trace"] = str(folder / raw["trace"])
        made = tuple(_class({**shared, **c}, i, f"{where} class {i}", folder) for i, c in enumerate(classes))
        steps = tuple(_stage(s, f"{where} stage {i}") for i, s in enumerate(stages))
        learnt = Fitted.from_dict(fitted, f"{where} fitted") if fitted is not None else None
        return cls(made, stages=steps, fitted=learnt, **raw)

    @classmethod
    def from_toml(cls, path: Path) -> Workload:
        """Read a workload file; see ``docs/workloads.md``.

        Raises:
            UsageError: not readable, not TOML, an unknown key or a bad value; the message names it.
        """
        try:
            raw = bounded.toml(bounded.read_text(path, 16 * bounded.MIB))
        except OSError as exc:
            raise UsageError(
                f"cannot read workload {path}: {exc.strerror}", "a TOML file, see docs/workloads.md"
            ) from exc
        except ValueError as exc:
            raise UsageError(f"{path} is not valid TOML: {exc}") from exc
        return cls.from_dict(raw, str(path), path.parent)


def parse_stages(text: str) -> tuple[Stage, ...]:
    """``'5:30s,5-20:60s'``: 30 s at 5 requests per second, then a minute growing to 20.

    Raises:
        UsageError: not of that form.
    """
    out = []
    for part in text.split(","):
        rates, _, time = part.partition(":")
        first, dash, last = rates.partition("-")
        try:
            seconds = parse_duration(time) / NS_PER_S
            out.append(Stage(float(first), seconds, float(last) if dash else None))
        except ValueError:
            hint = "use RATE:TIME or FROM-TO:TIME, such as 5:30s,5-20:60s"
            raise UsageError(f"{part!r} is not a stage", hint) from None
    return tuple(out)


# What each key holds in a file; lengths are read by Lengths.parse. bool is apart: to Python, true is also a number.
_NUMBER, _WHOLE, _TEXT, _SWITCH, _TABLE = "a number", "a whole number", "a text", "true or false", "a table"
_PYTHON = {_NUMBER: (int, float), _WHOLE: (int,), _TEXT: (str,), _SWITCH: (bool,), _TABLE: (dict,)}
_HOLDS = {
    **dict.fromkeys(("arrivals", "cache", "name", "trace"), _TEXT),
    **dict.fromkeys(
        ("temperature", "timeout_s", "share", "cv", "speed", "ramp_s", "shared", "rate", "to", *SLO_KEYS), _NUMBER
    ),
    **dict.fromkeys(("seed", "burst", "max_in_flight", "groups"), _WHOLE),
    "ignore_eos": _SWITCH,
    "slo": _TABLE,
}
_LENGTHS = ("prompt_tokens", "output_tokens", "thinking_tokens", "turns", "turn_tokens", "think_ms", "tool_calls",
            "tool_output_tokens", "tool_result_tokens", "tool_ms")  # fmt: skip
_PER_CLASS = {f.name for f in dataclasses.fields(RequestClass)} - {"name", "share"}


def _tables(raw: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """The list of tables under either of two names; the last of ``names`` says where, for the complaint."""
    *keys, where = names
    found = [raw.pop(k) for k in keys if k in raw]
    tables = found[0] if found else []
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise UsageError(f"{where}: {keys[0]} is not a list of tables", f"begin each {keys[0]} with [[{keys[0]}]]")
    if found and not tables and keys[0] == "class":
        raise UsageError(f"{where}: class is empty", "leave it out, or begin each class with [[class]]")
    return tables


def _class(raw: dict[str, Any], index: int, where: str, folder: Path | None) -> RequestClass:
    made = {k: v for k, v in raw.items() if v is not None}
    _check(made, {f.name for f in dataclasses.fields(RequestClass)}, where)
    for key in _LENGTHS:
        if key in made:
            try:
                made[key] = Lengths.parse(made[key], folder)
            except UsageError as exc:
                raise UsageError(f"{where}: {key}: {exc.message}", exc.hint) from None
    made.setdefault("name", f"class{index}" if index else "default")
    if isinstance(made.get("language"), str):
        made["language"] = made["language"].replace(",", " ").split()
    if "language" in made:
        if not isinstance(made["language"], list) or not all(isinstance(x, str) for x in made["language"]):
            raise UsageError(f"{where}: language must be a text or a list of texts, not {made['language']!r}")
        made["language"] = tuple(made["language"])
    slo = made.get("slo", {})
    _check(slo, set(SLO_KEYS), f"{where} slo")
    for key, limit in slo.items():
        if not 0 < limit < math.inf:
            raise UsageError(f"{where} slo: {key} must be a number of milliseconds above 0, not {limit}")
    return RequestClass(**made)


def _stage(raw: dict[str, Any], where: str) -> Stage:
    made = {k: v for k, v in raw.items() if v is not None}
    duration = made.pop("duration", made.pop("duration_s", None))
    _check(made, {"rate", "to"}, where)
    try:
        seconds = parse_duration(str(duration)) / NS_PER_S
    except ValueError:
        raise UsageError(f"{where}: duration must be a time such as 30s, not {duration!r}") from None
    if "rate" not in made:
        raise UsageError(f"{where}: rate is missing", 'such as rate = 5, duration = "30s"')
    return Stage(made["rate"], seconds, made.get("to"))


def _check(raw: dict[str, Any], known: set[str], where: str) -> None:
    """Refuse a key that means nothing, and a value of another kind than the key holds."""
    extra = sorted(set(raw) - known)
    if extra:
        raise UsageError(f"{where}: unknown key {extra[0]!r}", f"known keys: {', '.join(sorted(known))}")
    for key, value in raw.items():
        holds = _HOLDS.get(key)
        if holds and (not isinstance(value, _PYTHON[holds]) or isinstance(value, bool) != (holds == _SWITCH)):
            raise UsageError(f"{where}: {key} must be {holds}, not {value!r}")
