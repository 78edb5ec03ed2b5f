"""What to send before a point under ``--cache warm``: each beginning that requests share, once, and not every prompt.

Where nothing is shared by name, a warm workload repeats a few prompts (or sessions): then those are what comes again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from whywait.core.schedule import Schedule
from whywait.load.prompts import WARM_PROMPTS
from whywait.load.turns import Message, Turns

MOST, MOST_S = 256, 120.0  # so many beginnings, and so long, at most


@dataclass
class Warmed:
    """``answered`` of ``beginnings`` that come again; ``share`` of the tokens that come again is in those."""

    answered: int = 0
    beginnings: int = 0
    share: float = 1.0
    what: str = "shared beginnings"

    def __str__(self) -> str:
        if not self.beginnings:
            return "cache warmed: no beginning of a prompt comes again"
        part = "" if self.answered == self.beginnings else f" of {self.beginnings:,}"
        held = "" if not part else f" (they hold {self.share:.0%} of what is shared)"
        return f"cache warmed: {self.answered:,}{part} {self.what} were sent once{held}; they are in no figure"


def warm(turns: Turns, ask: Callable[[list[Message], int], bool]) -> Warmed:
    """Send what comes again, most worth first; ``ask(messages, row)`` sends it and tells whether it was answered."""
    work = sorted(_beginnings(turns), key=lambda w: -w[0])
    what = "shared beginnings" if _named(turns.schedule) else "prompts"
    out, until, sent = Warmed(beginnings=len(work), what=what), time.monotonic() + MOST_S, 0.0
    for worth, messages, row in work[:MOST]:
        if time.monotonic() > until:
            break
        if ask(messages(), row):
            out.answered += 1
            sent += worth
    out.share = sent / (sum(w[0] for w in work) or 1.0)
    return out


def _named(schedule: Schedule) -> bool:
    return bool(schedule.blocks or (schedule.prefix_group >= 0).any())


def _beginnings(turns: Turns) -> list[tuple[float, Callable[[], list[Message]], int]]:
    """(worth, messages, row) of each: worth is the tokens that others find there."""
    s = turns.schedule
    if s.blocks:
        found: list[tuple[float, Callable[[], list[Message]], int]] = []
        for names, count, row in shared_blocks(s):
            found.append((float(len(names) * count), partial(turns.beginning, row, names), row))
        return found
    if (s.prefix_group >= 0).any():
        longest, uses = dict[int, int](), Counter(s.prefix_group.tolist())
        for row, group in enumerate(s.prefix_group.tolist()):
            if group >= 0 and (group not in longest or s.prefix_tokens[row] > s.prefix_tokens[longest[group]]):
                longest[group] = row
        return [
            (float(s.prefix_tokens[row]) * uses[group], partial(turns.beginning, row), row)
            for group, row in longest.items()
            if uses[group] > 1
        ]
    return [(1.0, partial(turns.messages, row), row) for row in warm_rows(s)]


def shared_blocks(schedule: Schedule) -> list[tuple[tuple[int, ...], int, int]]:
    """(names, requests, a row) of each longest run of blocks from the start of a prompt that two requests or more have;
    a shorter one that it begins with needs no sending of its own."""
    counts: Counter[int] = Counter()
    ids: dict[tuple[int, int], int] = {}  # (the beginning before, block) → a number for the beginning with it
    paths = []
    for blocks in schedule.blocks:
        node, path = 0, []
        for name in blocks:
            node = ids.setdefault((node, name), len(ids) + 1)
            path.append(node)
        counts.update(path)
        paths.append(path)
    ends: dict[int, tuple[int, int]] = {}
    inner: set[int] = set()
    for row, path in enumerate(paths):
        depth = sum(counts[node] > 1 for node in path)  # counts never grow along a path
        inner.update(path[: depth - 1] if depth else ())
        if depth:
            ends.setdefault(path[depth - 1], (row, depth))
    return [
        (schedule.blocks[row][:depth], counts[node], row) for node, (row, depth) in ends.items() if node not in inner
    ]


def warm_rows(schedule: Schedule) -> list[int]:
    """The longest request of each prompt that will come again: sent once, they leave the others' text in the cache."""
    longest: dict[int, int] = {}
    for row, (i, session) in enumerate(zip(schedule.id.tolist(), schedule.session_id.tolist(), strict=True)):
        key = (i if session < 0 else session) % WARM_PROMPTS
        if key not in longest or schedule.prompt_tokens[row] > schedule.prompt_tokens[longest[key]]:
            longest[key] = row
    return sorted(longest.values())
