"""One line that moves while a point runs, or one line per point where there is no terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any, TextIO

from whywait.units import load_name


def watcher(stream: TextIO | None = None) -> Callable[[Any], None]:
    """A function for the driver to call with its ``Progress``; it writes to ``stream`` (stderr)."""
    stream = stream or sys.stderr
    moving = stream.isatty()
    said: set[object] = set()

    def watch(p: Any) -> None:
        what = load_name(p.point.mode, p.point.target)
        what += f" ({p.point.label})" if p.point.label else ""
        if not moving:
            if p.point.number not in said:
                said.add(p.point.number)
                print(f"measuring {what} …", file=stream, flush=True)
            return
        left = "" if p.point.duration_s is None else f" of {p.point.duration_s:.0f}"
        line = f"{what}: {p.elapsed_s:.0f}{left} s, {p.ended} done, {p.in_flight} in flight, {p.chunks} chunks"
        width = max(20, shutil.get_terminal_size().columns - 1)  # a longer line would wrap and pile up
        print(f"\r{line[:width]:<{width}}", end="", file=stream, flush=True)

    return watch


def done(stream: TextIO | None = None) -> None:
    """Leave the moving line."""
    stream = stream or sys.stderr
    if stream.isatty():
        print(f"\r{'':<{max(20, shutil.get_terminal_size().columns - 1)}}\r", end="", file=stream, flush=True)
