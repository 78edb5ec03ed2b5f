"""Which engines are running: one small file per engine, believed only while its process lives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from whywait.errors import UsageError
from whywait.lab import places

_LOGS_KEPT_S: Final = 7 * 86400.0


@dataclass(frozen=True)
class Engine:
    """A running engine. None is *unknown*, never *none*."""

    name: str
    kind: str  # "embedded", or "command": one started by a command line
    url: str  # base, without a path: http://127.0.0.1:38417
    pid: int  # the engine's own process, which also leads its process group
    model: str  # the name it serves
    log: str
    command: tuple[str, ...]
    model_path: str | None = None
    slots: int | None = None
    ctx_per_slot: int | None = None  # embedded: a slot's context; command: the longest request it takes
    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    threads: int | None = None
    cpus: tuple[int, ...] = ()  # pinned to these; empty: not pinned
    guard_pid: int | None = None  # the process that watches over a command
    guard_mark: str | None = None
    detached: bool = False  # keeps running when its starter ends
    started_at: float = 0.0  # seconds since the epoch; for people, and never subtracted from other clocks
    start_mark: str | None = None  # tells this process from a later one with the same id


def check_name(name: str) -> str:
    """Names become file names."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(f"'{name}' cannot name an engine", "letters, digits, dot, dash and underscore, 64 at most")
    return name


def state_path(name: str) -> Path:
    return places.engines_dir() / f"{check_name(name)}.json"


def log_path(name: str) -> Path:
    """Where the engine's log goes. Logs outlive their engines, to be read when one died; after a week they go."""
    folder = places.ensure_dir(places.engines_dir())
    for old in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < time.time() - _LOGS_KEPT_S and not old.with_suffix(".json").exists():
                old.unlink()
    return folder / f"{check_name(name)}.log"


def save(engine: Engine) -> None:
    with places.moved_into(state_path(engine.name)) as part:
        part.write_text(json.dumps(asdict(engine), indent=1), encoding="utf-8")


def load(path: Path) -> Engine | None:
    """None for a file that is gone or makes no sense: written by another version, or cut short by a full disk."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Engine)}
        values: dict[str, Any] = {key: value for key, value in raw.items() if key in known}
        return Engine(**{**values, "command": tuple(values["command"]), "cpus": tuple(values.get("cpus", ()))})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def forget(engine: Engine) -> None:
    """Remove the engine's file, unless another engine has taken the name since."""
    path = state_path(engine.name)
    current = load(path)
    if current is None or (current.pid, current.start_mark) == (engine.pid, engine.start_mark):
        path.unlink(missing_ok=True)


def running() -> list[Engine]:
    """Living engines, oldest first; the files of dead ones are removed."""
    found = []
    folder = places.engines_dir()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        engine = load(path)
        if engine is not None and alive(engine):
            found.append(engine)
            continue
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda e: (e.started_at, e.name))


def find(name: str) -> Engine | None:
    return next((e for e in running() if e.name == check_name(name)), None)


def alive(engine: Engine) -> bool:
    """The very process that was started: not dead, not a zombie, not a stranger with its id."""
    return process_alive(engine.pid, engine.start_mark)


def process_alive(pid: int, mark: str | None) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process, so not the one we started — unless we cannot tell
        return mark is None
    now = start_mark(pid)
    return now != "" and (mark is None or now is None or now == mark)


def start_mark(pid: int) -> str | None:
    """When the process began, as the kernel counts it; "" for a dead or zombie one; None where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    rest = text[text.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
    return "" if rest[0] in "ZX" else rest[19]


def signal_group(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)
