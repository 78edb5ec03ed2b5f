"""Files of requests ⇄ Schedule: JSON Lines or Parquet, a row per request. Numbers only; no text is kept in them.

Columns: ``at_s`` (or ``timestamp_ms``), ``prompt_tokens``, ``output_tokens`` and, where known, ``class``,
``session_id``, ``turn``, ``think_s``, ``thinking_tokens`` and ``hash_ids`` (in Parquet its JSON). Mooncake's own names
(``timestamp``, ``input_length``, ``output_length``) are understood too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from whywait.core import bounded
from whywait.core.columns import Column
from whywait.core.schedule import Ints, Schedule
from whywait.errors import UsageError
from whywait.units import NS_PER_S

Row = dict[str, Any]
BLOCK_TOKENS = 512  # of a trace with block names that does not say how long a block is: Mooncake's
_ALIASES = {"timestamp": "timestamp_ms", "input_length": "prompt_tokens", "output_length": "output_tokens"}
_SPEC = (
    Column("at_s", "f64", "s", "when it was sent, from the first"),
    Column("timestamp_ms", "f64", "ms", "the same in milliseconds"),
    Column("prompt_tokens", "i64", "tokens", "the whole prompt"),
    Column("output_tokens", "i64", "tokens", "the answer, thinking included"),
    Column("class", "str", "", "kind of request"),
    Column("session_id", "str", "", "conversation"),
    Column("turn", "i64", "", "turn in it, from 0"),
    Column("think_s", "f64", "s", "pause before the turn, after the answer to the one before"),
    Column("thinking_tokens", "i64", "tokens", "part of output_tokens that is reasoning"),
    Column("hash_ids", "str", "", "names of the prompt's blocks, a JSON list: equal names are equal text"),
    Column("block_tokens", "i64", "tokens", "length of a block"),
)


MOST = 5_000_000  # requests of one file: each takes a kilobyte while they are read


def read_schedule(path: Path, first_id: int = 0, speed: float = 1.0, limit: int | None = None) -> Schedule:
    """The file's requests by time, from 0; gaps and pauses are divided by ``speed``. A session's turns follow another.

    Raises:
        UsageError: not readable, or a row is not a request; the message names the row.
    """
    rows = [_row(raw, i, path) for i, raw in enumerate(islice(_raw(path), MOST + 1), 1)]
    if len(rows) > MOST:
        raise UsageError(f"{path} holds more than {MOST:,} requests", "split it")
    if not rows:
        raise UsageError(f"{path} holds no requests")
    rows.sort(key=lambda r: r["at"])  # stable: equal times keep the order of the file
    return _schedule(rows[:limit], first_id, speed)


def write_schedule(path: Path, schedule: Schedule) -> Path:
    """As Parquet, or as JSON Lines where ``path`` ends in ``.jsonl``."""
    rows = list(_rows(schedule))
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in rows))
        return path
    from whywait.core.parquet import write

    cols = {}
    for c in _SPEC:
        values = [r.get(c.name) for r in rows]
        if c.type == "str":
            text: Any = np.empty(len(rows), dtype=object)
            text[:] = [
                None if v is None else orjson.dumps(v).decode() if isinstance(v, list) else str(v) for v in values
            ]
            cols[c.name] = text
        else:
            cols[c.name] = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
    write(path, _SPEC, cols, len(rows))
    return path


def _raw(path: Path) -> Iterable[Row]:
    try:
        if path.suffix == ".parquet":
            from whywait.core.parquet import read

            cols = {name: np.asarray(col).tolist() for name, col in read(path, _SPEC).items()}
            rows = [dict(zip(cols, values, strict=True)) for values in zip(*cols.values(), strict=True)]
            return [
                {k: v for k, v in r.items() if v is not None and not (isinstance(v, float) and math.isnan(v))}
                for r in rows
            ]
        with path.open("rb"):  # what cannot be opened is told here
            pass
    except OSError as exc:
        raise UsageError(
            f"cannot read the trace {path}: {exc.strerror}",
            "a file of requests, JSON Lines or Parquet; docs/workloads.md",
        ) from None
    except ValueError as exc:
        raise UsageError(f"{path} is not a readable Parquet file: {exc}") from None
    return _lines(path)


def _lines(path: Path) -> Iterator[Row]:
    for i, line in enumerate(bounded.lines(path), 1):
        if not line.strip():
            continue
        try:
            row = bounded.loads(line)
        except ValueError as exc:
            raise UsageError(f"{path} line {i} is not JSON: {exc}", "a trace is JSON Lines or Parquet") from None
        if not isinstance(row, dict):
            raise UsageError(f"{path} line {i} is not a JSON object", "a row per request; see docs/workloads.md")
        yield {_ALIASES.get(str(k), str(k)): v for k, v in row.items()}


def _row(raw: Row, number: int, path: Path) -> Row:
    def take(name: str, least: float, default: Any = None) -> Any:
        value = raw.get(name, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf
        if not good:
            what = f"{name} is {'missing' if value is None else f'{value!r}'}"
            raise UsageError(f"{path} row {number}: {what}", f"a number of at least {least:g}")
        return value

    blocks = raw.get("hash_ids") or []
    if isinstance(blocks, str):
        try:
            blocks = orjson.loads(blocks)
        except orjson.JSONDecodeError:
            blocks = None
    if not isinstance(blocks, list) or not all(isinstance(b, (int, str)) for b in blocks):
        raise UsageError(f"{path} row {number}: hash_ids is not a list of names")
    at = take("timestamp_ms", 0) / 1e3 if "timestamp_ms" in raw else take("at_s", 0)
    return {
        "at": at, "prompt": int(take("prompt_tokens", 1)), "output": int(take("output_tokens", 1)),
        "class": str(raw.get("class", "default")), "session": raw.get("session_id"), "turn": raw.get("turn"),
        "think": take("think_s", 0, 0), "thinking": int(take("thinking_tokens", 0, 0)), "blocks": blocks,
        "block_tokens": int(take("block_tokens", 1, BLOCK_TOKENS)),
    }  # fmt: skip


def _schedule(rows: list[Row], first_id: int, speed: float) -> Schedule:
    n = len(rows)
    names = tuple(dict.fromkeys(r["class"] for r in rows))
    ints = {k: np.array([r[k] for r in rows], np.int64) for k in ("prompt", "output", "thinking")}
    due = np.array([r["at"] - rows[0]["at"] for r in rows]) / speed * NS_PER_S
    session, turn, after = _sessions(rows)
    block_names: dict[Any, int] = {}
    blocks = tuple(tuple(block_names.setdefault(b, len(block_names)) for b in r["blocks"]) for r in rows)
    return Schedule(
        np.arange(first_id, first_id + n, dtype=np.int64),
        np.array([names.index(r["class"]) for r in rows], np.int64),
        ints["prompt"], ints["output"], np.rint(due).astype(np.int64), names,
        session_id=np.where(session < 0, -1, session + first_id), turn=turn,
        after_id=np.where(after < 0, -1, after + first_id),
        think_ns=np.rint(np.array([r["think"] for r in rows]) / speed * NS_PER_S).astype(np.int64),
        thinking_tokens=np.minimum(ints["thinking"], ints["output"] - 1),
        blocks=blocks if block_names else (), block_tokens=rows[0]["block_tokens"] if block_names else 0,
    )  # fmt: skip


def _sessions(rows: list[Row]) -> tuple[Ints, Ints, Ints]:
    """First row, turn and row before of each row; −1, 0, −1 where it belongs to no session. Turns go by time: a file
    that numbers them otherwise was sorted by something else than when they were sent."""
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    session, turn, after = (np.full(len(rows), v, np.int64) for v in (-1, 0, -1))
    for i, r in enumerate(rows):
        if r["session"] is None:
            continue
        key = str(r["session"])
        session[i] = first.setdefault(key, i)
        if key in last:
            after[i], turn[i] = last[key], turn[last[key]] + 1
        last[key] = i
    return session, turn, after


def _rows(s: Schedule) -> Iterator[Row]:
    for i in range(len(s)):
        row: Row = {"at_s": max(int(s.due_ns[i]), 0) / NS_PER_S, "prompt_tokens": int(s.prompt_tokens[i]),
                    "output_tokens": int(s.output_tokens[i]), "class": s.class_names[s.klass[i]]}  # fmt: skip
        if s.session_id[i] >= 0:
            row.update(session_id=str(s.session_id[i]), turn=int(s.turn[i]))
        if s.think_ns[i]:
            row["think_s"] = int(s.think_ns[i]) / NS_PER_S
        if s.thinking_tokens[i]:
            row["thinking_tokens"] = int(s.thinking_tokens[i])
        if s.blocks:
            row.update(hash_ids=list(s.blocks[i]), block_tokens=s.block_tokens)
        yield row
