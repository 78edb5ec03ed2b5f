"""Which process listens on a local port: so that a service given by URL can be watched like one we launched."""

from __future__ import annotations

import os
from pathlib import Path

LISTEN = "0A"


def listening_pids(port: int, root: str = "/") -> tuple[int, ...]:
    """Process numbers that hold a listening TCP socket on ``port``; empty where this cannot be seen.

    Reads /proc/net/tcp and tcp6, then the open files of every process that may be looked into.
    """
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(root, "proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return ()
    return tuple(sorted(pid for pid in _pids(root) if inodes & _sockets(root, pid)))


def _pids(root: str) -> list[int]:
    try:
        return [int(d) for d in os.listdir(Path(root, "proc")) if d.isdigit()]
    except OSError:
        return []


def _sockets(root: str, pid: int) -> set[str]:
    folder = Path(root, "proc", str(pid), "fd")
    out = set()
    try:
        for fd in os.listdir(folder):
            try:
                out.add(os.readlink(folder / fd))
            except OSError:
                continue
    except OSError:
        return set()
    return out
