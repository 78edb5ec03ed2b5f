"""A socket per request in flight takes a file descriptor each: as many as this process may have."""

from __future__ import annotations

import contextlib

#: Tried where the hard limit itself is refused: macOS says "unlimited" and takes no more than OPEN_MAX.
LESS = (65_536, 10_240)


def many_sockets() -> None:
    """Raise the soft limit of open files as far as it goes; quietly nothing where there is no such limit."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):
        return
    for wanted in (hard, *LESS):
        if wanted == soft:
            return
        if wanted != hard and soft >= 0 and wanted < soft:
            continue
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
