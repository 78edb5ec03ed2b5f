"""Other people's logs → Trace: when requests came, how long they were, what prefixes they shared. No text is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from whywait.core.schedule import Schedule
from whywait.errors import UsageError
from whywait.units import NS_PER_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Record:
    """One request of a log. ``at_s`` is on any axis that the log's files share."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[Hashable] = ()
    session: Hashable | None = None
    turn: int | None = None
    klass: str = "default"
    took_s: float | None = None  # until its answer ended
    think_s: float | None = None  # from the end of the turn before


class Bad(Exception):
    """A line that is not what its format says; ``str`` of it is what was expected."""


class Skip(Exception):
    """A line that is right and is no request to replay; ``str`` of it says why (counted by reason)."""


@dataclass(eq=False)
class Trace:
    """Requests in order of arrival; ``at_s`` counts from the first. ``chains`` (numbered blocks) is None where the log
    tells nothing of prefixes; ``session`` is −1 and ``turn`` 0 where it tells nothing of sessions; ``think_s`` (from
    the end of the turn before) is NaN for first turns and where the log does not say when answers ended."""

    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    klass: Ints
    class_names: tuple[str, ...]
    session: Ints
    turn: Ints
    think_s: Floats
    chains: list[list[int]] | None = None
    block_tokens: int | None = None
    source: str = ""
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.at_s)


class Lines:
    """Reads a file's lines through ``parse`` and counts what did not fit, so that a log with some garbage is still of
    use and a file of another kind is told at its first line."""

    def __init__(self, path: Path, parse: Callable[[str], Record | None]) -> None:
        self.path, self._parse = path, parse
        self.good = self.bad = 0
        self.first_bad = ""
        self.skipped: dict[str, int] = {}

    def records(self, lines: Iterable[str], first: int = 1) -> Iterator[Record]:
        """The records of ``lines``, the first of which is line ``first`` of the file."""
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                record = self._parse(line)
            except Bad as exc:
                self.bad += 1
                self.first_bad = self.first_bad or f"line {number}: expected {exc}"
            except Skip as exc:
                self.skipped[str(exc)] = self.skipped.get(str(exc), 0) + 1
            else:
                if record is not None:
                    self.good += 1
                    yield record

    def notes(self) -> list[str]:
        """What was left out, for the user.

        Raises:
            UsageError: more lines were bad than good, so the file is of another kind or broken.
        """
        if self.bad > self.good:
            raise UsageError(f"{self.path}: {self.first_bad}", "give the format by --format, or repair the file")
        out = []
        if self.bad:
            out.append(f"{self.path.name}: {self.bad} of {self.bad + self.good} lines left out; {self.first_bad}")
        return out + [f"{self.path.name}: {n} left out: {why}" for why, n in sorted(self.skipped.items())]


def build(records: Iterable[Record], source: str, notes: list[str], block_tokens: int | None = None) -> Trace:
    """Sort by arrival and number what must not be kept: sessions and blocks get numbers by first appearance, so not
    even a hash of them remains.

    Raises:
        UsageError: there is no request at all.
    """
    rows = sorted(records, key=lambda r: r.at_s)
    if not rows:
        more = f" ({'; '.join(notes)})" if notes else ""
        raise UsageError(f"no request in the log{more}", "the formats are in docs/recording.md")
    blocks: dict[Hashable, int] = {}
    chains = None
    if any(r.blocks for r in rows):
        chains = [[blocks.setdefault(b, len(blocks)) for b in r.blocks] for r in rows]
        if block_tokens is None:
            # Blocks of words: how many tokens one is, by the requests long enough to tell.
            long = [(r.prompt_tokens, len(r.blocks)) for r in rows if len(r.blocks) >= 4]
            tokens = [p / n for p, n in long or [(r.prompt_tokens, len(r.blocks)) for r in rows if r.blocks]]
            block_tokens = max(1, round(float(np.median(tokens))))
    sessions: dict[Hashable, int] = {}
    session = [-1 if r.session is None else sessions.setdefault(r.session, len(sessions)) for r in rows]
    names = tuple(sorted({r.klass for r in rows}))
    at = np.array([r.at_s for r in rows], np.float64)
    return Trace(
        at - at[0],
        np.array([r.prompt_tokens for r in rows], np.int64),
        np.array([r.output_tokens for r in rows], np.int64),
        np.array([names.index(r.klass) for r in rows], np.int64),
        names,
        np.array(session, np.int64),
        _turns(rows, session),
        _thinks(rows, session),
        chains,
        block_tokens if chains is not None else None,
        source,
        notes,
    )


def _turns(rows: list[Record], session: list[int]) -> Ints:
    """The log's own turn where it has one, else the order within the session."""
    seen: dict[int, int] = {}
    out = []
    for r, s in zip(rows, session, strict=True):
        turn = 0 if s < 0 else seen.get(s, 0) if r.turn is None else r.turn
        seen[s] = turn + 1
        out.append(turn)
    return np.array(out, np.int64)


def _thinks(rows: list[Record], session: list[int]) -> Floats:
    """A turn that began before the answer to the one before had ended was not thought about at all: 0."""
    out = np.full(len(rows), np.nan)
    last: dict[int, Record] = {}
    for i, (r, s) in enumerate(zip(rows, session, strict=True)):
        before = last.get(s)
        if s >= 0 and before is not None:
            if r.think_s is not None:
                out[i] = r.think_s
            elif before.took_s is not None:
                out[i] = max(0.0, r.at_s - before.at_s - before.took_s)
        last[s] = r
    return out


def whole(value: Any, what: str, least: int = 0) -> int:
    """``value`` as a whole number ≥ ``least``.

    Raises:
        Bad: it is not; the message is "expected ``what``".
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Bad(f"{what}, found {shown(value)}") from None
    if isinstance(value, bool) or not number.is_integer() or not least <= number < 1 << 40:
        raise Bad(f"{what}, found {shown(value)}")
    return int(number)


def shown(value: Any) -> str:
    """A value for a message. Text is never repeated: a log's fields may hold prompts."""
    return "nothing" if value is None else f"{value!r}" if isinstance(value, (int, float)) else type(value).__name__


def write_schedule(trace: Trace, path: Path) -> None:
    """The exact replay file: a JSON object per request and line, in order of arrival.

    Raises:
        UsageError: the file cannot be written.
    """
    named = trace.class_names != ("default",)
    lines = []
    for i in range(len(trace)):
        row: dict[str, Any] = {
            "at_s": round(float(trace.at_s[i]), 9),
            "prompt_tokens": int(trace.prompt_tokens[i]),
            "output_tokens": int(trace.output_tokens[i]),
        }
        if named:
            row["class"] = trace.class_names[int(trace.klass[i])]
        if trace.session[i] >= 0:
            row |= {"session_id": int(trace.session[i]), "turn": int(trace.turn[i])}
        if not np.isnan(trace.think_s[i]):
            row["think_s"] = round(float(trace.think_s[i]), 9)
        if trace.chains is not None:
            row |= {"hash_ids": trace.chains[i], "block_tokens": trace.block_tokens}
        lines.append(orjson.dumps(row))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(lines) + b"\n")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc


def from_schedule(schedule: Schedule) -> Trace:
    """What a schedule would send. A turn that follows another is put where the other one began plus its think time,
    because how long the answer takes is the service's to say."""
    at = np.maximum(schedule.due_ns, 0)
    thought = (schedule.after_rows() >= 0) & ((schedule.due_ns < 0) | (schedule.think_ns > 0))
    # One pass is enough: a turn comes after the one before it.
    for i, j in enumerate(schedule.after_rows().tolist()):
        if j >= 0:
            at[i] = max(at[i], at[j] + schedule.think_ns[i])
    notes = ["turns after the first are shown as if answers took no time"] if schedule.has_sessions else []
    rows = (
        Record(
            at_s=at[i] / NS_PER_S,
            prompt_tokens=int(schedule.prompt_tokens[i]),
            output_tokens=int(schedule.output_tokens[i]),
            blocks=schedule.blocks[i] if schedule.blocks else (),
            session=int(schedule.session_id[i]) if schedule.session_id[i] >= 0 else None,
            turn=int(schedule.turn[i]),
            klass=schedule.class_names[int(schedule.klass[i])],
            think_s=schedule.think_ns[i] / NS_PER_S if thought[i] else None,
        )
        for i in range(len(schedule))
    )
    return build(rows, "workload", notes, schedule.block_tokens or None)
