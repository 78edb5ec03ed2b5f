"""What is told while a point runs: one line that moves on a terminal, else a plain line every few seconds.

No colour anywhere, and a cursor that moves (``\\r``, nothing else) only on a terminal that can: not in a pipe, a file,
with ``TERM=dumb`` or where ``CI`` is set. All of it goes to stderr. First doubts get a line of their own, once each.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO, cast

from whywait.report.live_doubts import first_doubts
from whywait.units import NS_PER_MS, load_name, number, plain, seconds

LINE_S = 5.0  # between two lines where nothing moves
LEFT = 7  # the time left goes first where there is no room: what the service does matters more
RECENT_S = 5.0  # rates are of so long
LEAST_ENDED = 3  # before so many have ended nothing is said of when the rest will


class Live:
    """Called by the driver about twice a second with its ``Progress``. ``spans`` are the lengths of the load points
    that will come, s (None: until its requests are done); ``budget_s`` is the time of the whole journey, from now."""

    def __init__(
        self, stream: TextIO | None = None, spans: Sequence[float | None] = (), budget_s: float | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._moving = can_move(self._stream)
        self._spans = spans
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._point: object = None
        self._first: int | None = None
        self._recent: deque[tuple[float, int, int]] = deque()
        self._history: list[tuple[float, int]] = []
        self._said: set[str] = set()
        self._next_line = 0.0
        self._shown = 0  # columns of the moving line that is on the screen
        self._hidden: TextIO | None = None

    def __call__(self, p: Any) -> None:
        if p.point is not self._point:
            self._point, self._next_line = p.point, 0.0
            self._first = p.point.number if self._first is None else self._first
            self._recent.clear()
            self._history.clear()
        self._recent.append((p.elapsed_s, p.ended, p.chunks))
        self._history.append((p.elapsed_s, p.in_flight))
        while len(self._recent) > 2 and p.elapsed_s - self._recent[1][0] >= RECENT_S:
            self._recent.popleft()
        doubts = [(key, said) for key, said in first_doubts(p, self._history) if key not in self._said]
        for key, said in doubts:
            self._said.add(key)
            self.clear()
            print(plain(f"doubt so far: {said}"), file=self._stream, flush=True)
        if self._moving:
            self._move(p)
        elif p.elapsed_s >= self._next_line:
            self._next_line = p.elapsed_s + LINE_S
            print(plain("  ".join(text for _, text in self.parts(p))), file=self._stream, flush=True)

    def parts(self, p: Any) -> list[tuple[int, str]]:
        """(how dispensable, text), in the order in which they are read."""
        so_far, what = p.so_far, load_name(p.point.mode, p.point.target, p.point.label)
        if len(self._spans) > 1 and self._first is not None:
            what += f" [{p.point.number - self._first + 1}/{len(self._spans)}]"
        of = "" if p.point.duration_s is None else f"/{p.point.duration_s:.0f}"
        done = f"{p.ended}/{p.planned} done" if not p.point.elastic else f"{p.ended} done"
        failed = f", {so_far.failed} failed" if so_far.failed else ""
        out = [(0, what), (1, f"{p.elapsed_s:.0f}{of} s"), (2, done + failed), (2, f"{p.in_flight} in flight")]
        out += [(5, text) for text in self._rates(p)]
        for name, value, more, rank in (("TTFT", p.ttft_ns(0.5), p.ttft_ns(0.95), 4),
                                        ("TPOT", p.tpot_ns(0.5), p.tpot_ns(0.95), 6)):  # fmt: skip
            if value is not None:
                tail = "" if more is None else f" (p95 {_rough(more)})"
                out.append((rank, f"{name} {_rough(value)}{tail}"))
        left = self._left(p)
        return [*out, (LEFT, left)] if left else out

    def _rates(self, p: Any) -> list[str]:
        """Of the last seconds. Tokens by what the ended requests had per chunk; where that is not known, chunks."""
        if not self._recent:
            return []
        (t0, ended, chunks), so_far = self._recent[0], p.so_far
        span = p.elapsed_s - t0
        if span <= 0:
            return []
        of_chunks = (p.chunks - chunks) / span
        per_chunk = so_far.tokens / so_far.chunks if so_far.chunks else None
        tokens = f"{number(of_chunks)} chunks/s" if per_chunk is None else f"{number(of_chunks * per_chunk)} tok/s"
        return [f"{number((p.ended - ended) / span)} req/s", tokens]

    def _left(self, p: Any) -> str:
        """Time left of this point, and of all of them where that is known."""
        here: float | None = None
        if p.point.duration_s is not None:
            here = max(0.0, p.point.duration_s - p.elapsed_s)
        elif p.ended >= LEAST_ENDED and p.elapsed_s > 0:
            here = (p.planned - p.ended) * p.elapsed_s / p.ended
        if self._deadline is not None:
            return f"about {seconds(max(0.0, self._deadline - time.monotonic()))} left of all"
        if here is None:
            return ""
        if here == 0.0:
            return "the last are ending"
        later = self._spans[p.point.number - (self._first or 0) + 1 :]
        known = [s for s in later if s is not None]
        if not later or len(known) < len(later):
            return f"about {seconds(here)} left"
        return f"about {seconds(here)} left, {seconds(here + sum(known))} of all"

    # the line that moves

    def _move(self, p: Any) -> None:
        if self._hidden is None and self._stream is sys.stderr:
            self._hidden = sys.stderr
            sys.stderr = cast(TextIO, _Above(self._hidden, self.clear))
            self._stream = self._hidden
        width = max(20, shutil.get_terminal_size().columns - 1)  # a longer line would wrap and pile up
        line = plain(fitting(self.parts(p), width))
        print(f"\r{line:<{max(self._shown, len(line))}}"[: width + 1], end="", file=self._stream, flush=True)
        self._shown = len(line)

    def clear(self) -> None:
        """Leave the moving line: what is printed next begins where it stood."""
        if self._shown:
            print(f"\r{'':<{self._shown}}\r", end="", file=self._stream, flush=True)
            self._shown = 0

    def done(self) -> None:
        """No more will come."""
        self.clear()
        if self._hidden is not None:
            sys.stderr, self._hidden = self._hidden, None


class _Above:
    """Stands for stderr while a line moves there: whatever else is said first takes the line away."""

    def __init__(self, stream: TextIO, clear: Callable[[], None]) -> None:
        self._stream, self._clear = stream, clear

    def write(self, text: str) -> int:
        if text:
            self._clear()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _rough(ns: float) -> str:
    """Two figures: they are counted in buckets 12 % wide."""
    value = float(f"{ns / NS_PER_MS:.2g}")
    return f"{value / 1000:g} s" if value >= 10_000 else f"{value:g} ms"


def fitting(parts: Sequence[tuple[int, str]], width: int) -> str:
    """The parts in their order, without the most dispensable ones where they are wider than ``width``."""
    kept = list(parts)
    while len(kept) > 1 and len("  ".join(text for _, text in kept)) > width:
        worst = max(rank for rank, _ in kept)
        kept.pop(max(i for i, (rank, _) in enumerate(kept) if rank == worst))
    return "  ".join(text for _, text in kept)[:width]


def can_move(stream: TextIO) -> bool:
    """Whether the cursor may be moved there: a terminal that knows how, and a person before it."""
    if not stream.isatty() or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return False
    return os.environ.get("CI", "").lower() in ("", "0", "false")


class Counter:
    """So many of so many: a line that is written over, else one every few seconds. Takes itself away at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._moving = can_move(self._stream)
        self._shown, self._next_line = 0, time.monotonic() + LINE_S

    def __call__(self, what: str, done: int, of: int) -> None:
        line = plain(f"{what}: {done} of {of}")
        if self._moving:
            tail = f"\r{'':<{len(line)}}\r" if done == of else ""
            print(f"\r{line:<{self._shown}}{tail}", end="", file=self._stream, flush=True)
            self._shown = 0 if done == of else len(line)
        elif (now := time.monotonic()) >= self._next_line and done < of:
            self._next_line = now + LINE_S
            print(line, file=self._stream, flush=True)


_last: Live | None = None


def watcher(spans: Sequence[float | None] = (), budget_s: float | None = None) -> Live:
    """What the driver calls; it writes to stderr until :func:`done`."""
    global _last
    done()
    _last = Live(None, spans, budget_s)
    return _last


def done() -> None:
    """Leave the moving line, wherever it is."""
    global _last
    if _last is not None:
        _last.done()
        _last = None
