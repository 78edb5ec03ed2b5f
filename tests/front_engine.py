"""A plain engine for tests of the simulated service: first come first served, whole prompts, fixed costs."""

from __future__ import annotations

from collections import deque

from whywait.sim.front_metrics import Now
from whywait.sim.front_pace import New, Step

BLOCK = 16


class Plain:
    """A step takes ``step_s``, and ``token_s`` for each prompt token it computes; ``seqs`` requests at once."""

    def __init__(self, step_s: float = 0.002, token_s: float = 1e-5, seqs: int = 4, blocks: int = 1000) -> None:
        self.step_s, self.token_s, self.seqs, self.blocks = step_s, token_s, seqs, blocks
        self.waiting: deque[New] = deque()
        self.running: dict[int, list[int]] = {}  # id -> [left, tokens held]
        self.seen: set[int] = set()
        self.times: list[float] = []

    def add(self, new: New, now_s: float) -> None:
        self.waiting.append(new)

    def drop(self, id: int) -> None:
        self.running.pop(id, None)
        self.waiting = deque(new for new in self.waiting if new.id != id)

    def step(self, now_s: float) -> Step | None:
        self.times.append(now_s)
        scheduled, fresh = [], 0
        while self.waiting and len(self.running) < self.seqs:
            new = self.waiting.popleft()
            hits = [b in self.seen for b in new.chain] + [False]
            cached = min(hits.index(False), (new.prompt - 1) // BLOCK) * BLOCK
            self.seen.update(new.chain)
            self.running[new.id] = [new.output, new.prompt]
            scheduled.append((new.id, cached))
            fresh += new.prompt - cached
        if not self.running:
            return None
        held = sum(-(-tokens // BLOCK) for _, tokens in self.running.values())
        ids = list(self.running)
        now = Now(len(ids), len(self.waiting), held / self.blocks)
        for id in ids:
            self.running[id][0] -= 1
            self.running[id][1] += 1
            if not self.running[id][0]:
                del self.running[id]
        return Step(self.step_s + self.token_s * fresh, ids, [1] * len(ids), fresh, scheduled, now)
