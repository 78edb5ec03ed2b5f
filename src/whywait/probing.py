"""The journey of ``whywait probe``: single streams, two at most, from which the costs of a service are inferred.

Part of the application layer. A few pilot requests size the experiments to the budget; then come rounds, each with all
experiments in random order, so that drift and noise show and fall on all of them alike. The Run that is left says by
class and label which request belongs to which experiment; ``analyze/singles.py`` makes the figures of it.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whywait import app
from whywait.analyze.pairs import BESIDE, PAIR, SINGLES
from whywait.core.recorder import discard_spool
from whywait.core.run import Run, write_json
from whywait.core.schedule import Lengths, RequestClass, Schedule, Workload
from whywait.lab.state import Engine
from whywait.net.handshake import handshake_ms
from whywait.session import Options, Say, Session, stderr
from whywait.units import NS_PER_S

MAX_ROUNDS, AIM_ROUNDS = 12, 5
LONGEST, SHORT = 4096, 24  # prompt tokens
LEAST = 4 * SHORT  # of the longest prompt: with less there is nothing to compare
STEPS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # of the way from the shortest prompt to the longest
WEIGHT = 16  # what a round costs, in times of the longest prompt or of an answer
MAX_ANSWER, MAX_BESIDE, PILOT_ANSWER = 48, 200, 16
HANDSHAKES = 8
WORKLOAD = Workload(classes=(RequestClass("default", 1.0, Lengths("fixed", 128), Lengths("fixed", 16)),))


class Row(NamedTuple):
    """One request: its experiment, lengths in tokens, the text it shares (−1: none), when it is due (−1: in turn)."""

    name: str
    prompt: int
    output: int
    block: int = -1
    due_ns: int = -1


@dataclass(frozen=True)
class Plan:
    """How long the prompts and answers are. ``one`` is the most tokens of "one token" that the dialect allows."""

    lengths: tuple[int, ...]
    answer: int
    beside: int
    delay_ns: int
    one: int = 1

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def singles(self, number: int, rng: random.Random) -> list[Row]:
        """Every single stream of a round, in random order; a repeat follows its first at once, and again at the end."""
        repeated = sorted({self.longest, self.lengths[len(self.lengths) // 2]})
        groups = [[Row("prompt", n, self.one)] for n in self.lengths]
        groups += [[Row("decode", SHORT, self.answer)] for _ in range(2)]
        groups += [[Row("decode deep", n, self.answer)] for n in (self.lengths[-3], self.longest)]
        firsts = [Row("first", n, self.one, number * len(repeated) + k) for k, n in enumerate(repeated)]
        groups += [[f, f._replace(name="again")] for f in firsts]
        rng.shuffle(groups)
        return [row for group in groups for row in group] + [f._replace(name="later") for f in firsts]

    def pair(self) -> list[Row]:
        return [Row("pair", SHORT, self.answer) for _ in range(2)]

    def long_beside(self) -> list[Row]:
        return [
            Row("neighbour", SHORT, self.beside, due_ns=0),
            Row("long", self.longest, self.one, due_ns=self.delay_ns),
        ]


def ceiling(longest: int = LONGEST) -> tuple[int, int]:
    """The most requests and tokens a probe sends, pilot and calibration included."""
    longest = max(longest, LEAST)
    plan = Plan(_ladder(longest), MAX_ANSWER, MAX_BESIDE, 0)
    rows = [*plan.singles(0, random.Random(0)), *plan.pair(), *plan.pair(), *plan.long_beside()]
    pilot = [Row("pilot", 128, PILOT_ANSWER)] * 20 + [Row("pilot", longest, 1)] * 4
    tokens = MAX_ROUNDS * sum(r.prompt + r.output for r in rows) + sum(r.prompt + r.output for r in pilot)
    return MAX_ROUNDS * len(rows) + len(pilot), tokens


def probe(
    options: Options,
    budget_s: float = 60.0,
    longest: int = LONGEST,
    *,
    say: Say = stderr,
    watch: app.Watch | None = None,
    engine: Engine | None = None,
) -> app.Result:
    """What one stream costs, by single streams and at most two at once; ``summary["probe"]`` holds the figures.

    Raises:
        WhywaitError: before anything was measured. Afterwards what there is comes back, labelled PARTIAL.
    """
    deadline = time.monotonic() + budget_s
    workload = dataclasses.replace(WORKLOAD, seed=options.seed, timeout_s=options.workload.timeout_s)
    options = dataclasses.replace(options, workload=workload, single_stream_ok=True, processes=1)
    with Session(options, say, watch, engine) as s:
        shook = [handshake_ms(s.target.endpoint) for _ in range(HANDSHAKES)]
        plan = _pilot(s, deadline, longest)
        if plan is not None:
            _rounds(s, plan, deadline, say)
        run = _told(s.finish(), shook, plan)
        result = app.keep(run, s.directory)
        write_json(s.directory / "probe.json", result.summary["probe"])
        discard_spool(s.directory)
        return dataclasses.replace(result, interrupted=s.interrupted)


def _pilot(s: Session, deadline: float, longest: int) -> Plan | None:
    """A few requests that tell how long prompts and answers may be for several rounds to fit into the time."""
    one = 16 if s.target.endpoint.dialect == "responses" else 1  # the least that dialect takes
    first = _timed(s, Row("pilot", SHORT, one), 3)
    answer = _timed(s, Row("pilot", SHORT, one + PILOT_ANSWER), 2)
    if first is None or answer is None:
        s.stop("no pilot request succeeded")
        return None
    step = max((answer - first) / PILOT_ANSWER, 1e-4)
    room = int(s.target.limits.get("ctx_per_slot") or longest + MAX_BESIDE + 64) - MAX_BESIDE - 64
    most = max(min(longest, room), LEAST)
    goal = max(deadline - time.monotonic(), 1.0) / AIM_ROUNDS / WEIGHT
    n, took = LEAST, first
    while True:
        seen = _timed(s, Row("pilot", min(n, most), one), 1)
        if seen is None:
            most = max(n // 4, LEAST)  # it does not take prompts of such a length
            break
        took = seen
        if took > goal or n >= most:
            break
        n *= 4
    n = min(n, most)
    if took > goal:
        n = max(LEAST, int(n * goal / took))
    took = took * n / max(min(most, n), 1)
    answers = int(min(max(goal / step, 8), MAX_ANSWER))
    beside = int(min(max(1.6 * min(took, goal) / step + 16, 24), MAX_BESIDE))
    return Plan(_ladder(n), answers, beside, round((first + 6 * step) * NS_PER_S), one)


def _ladder(longest: int) -> tuple[int, ...]:
    return tuple(round(SHORT + f * (longest - SHORT)) for f in STEPS)


def _timed(s: Session, row: Row, times: int) -> float | None:
    """Seconds such a request takes; None when none went well."""
    s.drive(_schedule(s, [row] * times), app.Load("concurrency", 1, label="pilot"))
    return None if s.reason else s.last_e2e_s


def _rounds(s: Session, plan: Plan, deadline: float, say: Say) -> None:
    rng = random.Random(s.options.seed)
    took = 0.0
    for number in range(MAX_ROUNDS):
        began = time.monotonic()
        if number and deadline - began < 1.1 * took:
            break
        points = [
            (SINGLES, plan.singles(number, rng)),
            (PAIR, plan.pair()),
            (PAIR, plan.pair()),
            (BESIDE, plan.long_beside()),
        ]
        rng.shuffle(points)
        for what, rows in points:
            if number and time.monotonic() > deadline:  # the service has become slower
                return
            beside = what == BESIDE
            load = app.Load("trace" if beside else "concurrency", 2 if what != SINGLES else 1)
            if not s.drive(_schedule(s, rows), dataclasses.replace(load, label=f"round {number + 1}: {what}")):
                return
        took = max(took, time.monotonic() - began)
    else:
        return
    if number < 4:
        say(f"only {number} rounds fitted into the time; a longer --budget makes the intervals narrower")


def _schedule(s: Session, rows: Sequence[Row]) -> Schedule:
    names = tuple(dict.fromkeys(r.name for r in rows))
    ids = np.arange(s.next_id, s.next_id + len(rows), dtype=np.int64)
    klass, prompt, output, due = (
        np.array(column, dtype=np.int64)
        for column in ([names.index(r.name) for r in rows], [r.prompt for r in rows], [r.output for r in rows],
                       [r.due_ns for r in rows])
    )  # fmt: skip
    shared = any(r.block >= 0 for r in rows)
    blocks = tuple((r.block,) if r.block >= 0 else () for r in rows) if shared else ()
    return Schedule(ids, klass, prompt, output, due, names, blocks=blocks)


def _told(run: Run, shook: list[tuple[float | None, float | None]], plan: Plan | None) -> Run:
    """The Run with what only this journey knows written into its manifest."""
    told: dict[str, Any] = {name: [pair[k] for pair in shook if pair[k] is not None]
                            for k, name in enumerate(("connect_ms", "tls_ms"))}  # fmt: skip
    told["plan"] = dataclasses.asdict(plan) if plan is not None else None
    journey = {**run.manifest.journey, "probe": told}
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, journey=journey))
