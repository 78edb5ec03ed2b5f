"""What every result format is turned into before it becomes a Run: requests and load points in whole nanoseconds."""

from __future__ import annotations

import http
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from numpy.typing import NDArray

from whywait.convert.results_file import Bad

Ints = NDArray[np.int64]
T = TypeVar("T")

MOST_CHUNKS = 2_000_000  # times kept by default: each takes some 0.35 kB until the run is judged


@dataclass(slots=True)
class Asked:
    """One request as a tool tells it. Times are ns on the axis of its part; None is unknown.

    ``times`` are those of its content chunks, ascending, from the first token to the last; ``role_ns`` that of a chunk
    before them that carried no token. Where the part does not tell starts, ``sent`` is 0 and all count from there.
    """

    sent: int | None = None
    due: int | None = None
    accepted: int | None = None
    first: int | None = None
    first_answer: int | None = None
    last: int | None = None
    end: int | None = None
    connect: int | None = None
    times: Ints | None = None
    chunk_tokens: list[int] | None = None
    chunks: int | None = None  # content chunks, where their times are not kept
    role_ns: int | None = None
    prompt: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cached: int | None = None
    outcome: str = "ok"
    fault: str = "none"
    detail: str | None = None
    status: int | None = None
    klass: str | None = None
    session: str | None = None
    turn: int | None = None
    trace_id: str | None = None
    engine: dict[str, float] | None = None  # columns of the requests table that the engine told

    def forget_times(self) -> int:
        """Keep only how many chunks there were; that number."""
        n = 0 if self.times is None else len(self.times)
        if n:
            self.chunks, self.times = n, None
        return n


@dataclass
class Part:
    """One load point of one file.

    ``starts`` says how the sends are known: ``told`` by the file, or not, and then ``replayed`` (order and limit of
    requests in flight give them) or ``assumed`` (nothing does). ``wall``: the axis is Unix time. ``published`` are the
    tool's own figures of this point, by the names of ``analyze/published.py``.
    """

    mode: str
    target: float | None
    requests: list[Asked]
    starts: str = "told"
    wall: bool = False
    begin: int | None = None
    took: int | None = None  # its own duration
    label: str | None = None
    published: dict[str, float] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)  # counters of the engine: by how much over the point
    kept: int = 0  # times of chunks in the requests that were added
    forgotten: int = 0  # and those that are not kept

    def add(self, r: Asked, most: int) -> None:
        """One more request of a file of any length: when more than ``most`` chunks have come, no times are kept."""
        self.kept += 0 if r.times is None else len(r.times)
        self.requests.append(r)
        if self.forgotten:
            self.forgotten += r.forget_times()
        elif self.kept > most:
            self.forgotten = sum(q.forget_times() for q in self.requests)


@dataclass
class Source:
    """What one file (or folder) says: its load points and the facts about tool, service and engine."""

    tool: str
    files: list[Path]
    parts: list[Part]
    version: str | None = None
    ended_ns: int | None = None  # Unix time, where only that is told
    engine: dict[str, Any] = field(default_factory=dict)
    endpoint: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)  # keys of a Workload, or nothing
    facts: dict[str, Any] = field(default_factory=dict)  # what else the tool says of the run
    command: str | None = None
    partial: str = ""
    notes: list[dict[str, str]] = field(default_factory=list)
    definitions: dict[str, str] = field(default_factory=dict)  # how the tool's own figure differs from ours
    bad: Faults | None = None
    made_by: str | None = None  # where the file is whywait's own and says it


class Faults:
    """Counts values that cannot be, by field: one bad value does not cost the file, a pattern of them is told."""

    def __init__(self) -> None:
        self.by: dict[str, int] = {}
        self.rows = 0

    def read(self, of: Callable[..., T], *args: Any) -> T | None:
        """``of(*args)``, or None where that is ``Bad``."""
        try:
            return of(*args)
        except Bad as exc:
            self.note(str(exc))
            return None

    def note(self, what: str) -> None:
        key = re.sub(r"\d{2,}", "N", what)[:120]
        if key in self.by or len(self.by) < 50:
            self.by[key] = self.by.get(key, 0) + 1

    @property
    def doubts(self) -> list[dict[str, str]]:
        if not self.by:
            return []
        worst = sorted(self.by.items(), key=lambda item: -item[1])
        told = "; ".join(f"{what} ({n})" for what, n in worst[:4]) + ("; …" if len(worst) > 4 else "")
        return [doubt(f"{sum(self.by.values())} values of the file cannot be and are null here", told,
                      "was the file changed or damaged?")]  # fmt: skip


#: In an open loop every one of these tools counts from the send.
FROM_DUE = "it counts from the send, an open loop here from when the request was due"


def definitions(source: Source, part: Part) -> dict[str, str]:
    """How the tool's own figures of a part differ from ours, by figure."""
    found = dict(source.definitions)
    if part.mode != "concurrency" and any(r.due is not None for r in part.requests):
        for name in ("ttft_ms", "e2e_ms"):
            found[name] = "; ".join(filter(None, (FROM_DUE, found.get(name))))
    return found


def doubt(what: str, why: str, then: str) -> dict[str, str]:
    return {"what": what, "why": why, "next": then}


# --- how requests end


_REASONS = {s.phrase.lower(): s.value for s in http.HTTPStatus if s.value >= 300}
_STATUS = re.compile(r"\b(?:status(?:[ _]?code)?|http(?: error)?|error code)\W{0,3}([3-5]\d\d)\b", re.I)
_WORDS = (
    ("timeout", "service", re.compile(r"time(d)?[ _-]?out", re.I)),
    ("refused", "service", re.compile(r"refused|cannot connect|connect call failed|name or service|unreachable", re.I)),
    ("reset", "service", re.compile(r"reset by peer|disconnected|broken pipe|connection (lost|closed|aborted)|"
                                    r"payload is not completed|incomplete (chunked )?read", re.I)),
    ("cancelled", "user", re.compile(r"cancel", re.I)),
)  # fmt: skip
_TYPE = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Timeout|Disconnected))\b")


def ended(said: str | None, status: int | None = None, kind: str | None = None) -> dict[str, Any]:
    """Outcome, fault, detail and status from what a tool keeps of an error. Of its text only a type is kept: messages
    echo prompts and answers."""
    said = (said or "")[-20_000:]  # of a traceback the end says what it was
    last = said.strip().rsplit("\n", 1)[-1]
    if status is None and (found := _STATUS.search(said)):
        status = int(found[1])
    if status is None:
        status = _REASONS.get(last.strip().lower()) or next(
            (c for p, c in _REASONS.items() if last.lower().startswith(f"{p}:")), None
        )
    if status is not None and 300 <= status < 600:
        outcome = "shed" if status in (429, 503) else "http_error"
        fault = "user" if 300 <= status < 500 and outcome == "http_error" else "service"
        return {"outcome": outcome, "fault": fault, "detail": str(status), "status": status}
    types = _TYPE.findall(f"{kind or ''} {said}")
    detail = (types[-1] if types else kind or "")[:60] or "error, not further told"
    for outcome, fault, words in _WORDS:
        if words.search(f"{kind or ''} {last}"):
            return {"outcome": outcome, "fault": fault, "detail": detail, "status": None}
    if "never received a valid chunk" in last.lower():
        return {"outcome": "truncated", "fault": "service", "detail": "no chunk with a token", "status": None}
    return {"outcome": "protocol", "fault": "service", "detail": detail, "status": None}


def place(url: Any) -> str | None:
    """A URL without what may be a secret in it: user, password, query."""
    if not isinstance(url, str) or len(url) > 2000:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https"):
        return None
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def after(start: int, gaps: Iterable[int]) -> Ints:
    """Times of chunks: the first at ``start``, each other one gap later (ns)."""
    steps = np.fromiter(gaps, dtype=np.int64)
    out: Ints = np.concatenate(([start], start + np.cumsum(steps)))
    return out


def ascending(times: Ints) -> bool:
    return bool((np.diff(times) >= 0).all())
