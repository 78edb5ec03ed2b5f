"""Where the lab keeps things on disk, and the two habits that make sharing them safe: lock, and move into place."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from whywait.errors import UsageError


def cache_dir() -> Path:
    """The user's cache: ``$WHYWAIT_CACHE``, else ``$XDG_CACHE_HOME/whywait``, else ``~/.cache/whywait``."""
    if own := os.environ.get("WHYWAIT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "whywait"
    return Path("~/.cache/whywait").expanduser()


def engines_dir() -> Path:
    """State files and logs of running engines: gone with the login session where the system offers such a place."""
    if run := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(run) / "whywait" / "engines"
    return cache_dir() / "engines"


def ensure_dir(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(f"cannot write to {path}: {err.strerror or err}", "set WHYWAIT_CACHE to a folder") from None
    return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel drops it when the holder dies, so no stale lock is possible."""
    ensure_dir(folder)
    try:
        import fcntl
    except ImportError:  # no such lock on this system: moves into place stay atomic, work may be done twice
        yield
        return
    with open(folder / ".lock", "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """``folder`` (made where it is missing) for this process alone; held already by it, once more is nothing. The lock
    is the kernel's, on the folder itself: nothing stays behind.

    Raises:
        UsageError: another process works in it.
    """
    where = folder.absolute()
    if where in _claims or (where.exists() and not where.is_dir()):
        yield
        return
    where.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(where, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another whywait works in {folder}", "wait for it, or choose another --out") from None
        except OSError:  # a file system without locks
            yield
            return
        _claims.add(where)
        yield
    finally:
        _claims.discard(where)
        os.close(handle)


_claims: set[Path] = set()


@contextlib.contextmanager
def moved_into(target: Path) -> Iterator[Path]:
    """A temporary path beside ``target`` that replaces it in one step, or vanishes when the block fails."""
    ensure_dir(target.parent)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
