"""The journey of ``whywait find``: probes at rates that ``judge.search`` asks for, watched while they run.

Part of the application layer. A probe is a load point in open loop that ends as soon as it has answered: nothing more
is sent, what is in flight may end, and only then comes the next probe.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait import app
from whywait.core.columns import KINDS
from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.core.pacer import Chains, OpenLoop
from whywait.core.recorder import Recorder, discard_spool
from whywait.core.run import Manifest, Run
from whywait.core.table import Table
from whywait.errors import UsageError
from whywait.judge.search import ALPHA, BLOCK_S, Ask, Look, Rule, Search, Seen, enough, look
from whywait.judge.slo import scores
from whywait.lab.state import Engine
from whywait.load.crew import Report, Solo, Writer
from whywait.load.driver import Point
from whywait.session import Options, Say, Session, stderr
from whywait.units import NS_PER_MS, NS_PER_S

ROLE = KINDS.index("role")
SETTLE = 5  # single requests at most, until one is as quick as at first, after requests had to be cut off


def find(
    options: Options,
    rules: tuple[Rule, ...],
    budget_s: float = 600.0,
    max_rate: float | None = None,
    *,
    watch: app.Watch | None = None,
    engine: Engine | None = None,
) -> app.Result:
    """The highest rate at which the service keeps ``rules``, as the interval ``summary["find"]["low"], ["high"]``.

    Raises:
        WhywaitError: before anything was measured. Afterwards what there is comes back, labelled PARTIAL.
    """
    deadline = time.monotonic() + budget_s
    slo = {key: limit for r in rules for key, limit in r.limits.items()}
    options = dataclasses.replace(options, slo=slo, processes=1)
    probes: list[dict[str, Any]] = []
    with Session(options, stderr, watch, engine) as s:
        tap = _tapped(s)
        search = _first_guess(s, max_rate)
        s.recorder.note(find=found(search, rules, probes, budget_s, s.reason))
        while search is not None and not s.reason and (ask := search.next(deadline - time.monotonic())):
            probe = _probe(s, tap, search, ask, rules)
            if not (s.reason and probe["answer"] == "undecided"):  # cut off before it said anything
                probes.append(probe)
                _say_probe(stderr, probe)
            s.recorder.note(find=found(search, rules, probes, budget_s, s.reason))
        s.recorder.note(find=found(search, rules, probes, budget_s, s.reason))
        result = app.keep(s.finish(), s.directory)
        discard_spool(s.directory)
    return dataclasses.replace(result, interrupted=s.interrupted)


def found(
    search: Search | None, rules: tuple[Rule, ...], probes: list[dict[str, Any]], budget_s: float, cut_short: str = ""
) -> dict[str, Any]:
    """The ``find`` part of a summary: plain JSON values, rates in requests per second, None where not known.

    ``cut_short`` is what ended the search before its time, or ''.
    """
    out = {
        "low": search.low if search else None,
        "high": search.high if search else None,
        "decided": bool(search and search.decided),
        "why": search.why if search else "no single request succeeded" if not cut_short else "",
        "max_rate": search.max_rate if search else None,
        "rules": [{"name": r.name, "limits": r.limits, "share": r.share} for r in rules],
        "error_probability": ALPHA,
        "budget_s": budget_s,
        "cut_short": cut_short,
        "probes": probes,
    }
    plain: dict[str, Any] = json.loads(json.dumps(out))  # numpy's floats among them
    return plain


def _first_guess(s: Session, max_rate: float | None) -> Search | None:
    """From the time of a few requests alone: half of what the slots could do, or one stream's worth where unknown."""
    s.point(app.Load("concurrency", 1, requests=3, label="one at a time"))
    if not s.last_e2e_s:
        return None
    rate = max(1.0, (s.slots or 2) / 2) / s.last_e2e_s
    return Search(min(rate, max_rate or rate), max_rate, min(max(2 * s.last_e2e_s, 2.0), 60.0))


def _probe(s: Session, tap: _Tap, search: Search, ask: Ask, rules: tuple[Rule, ...]) -> dict[str, Any]:
    number, single = tap.point + 1, s.last_e2e_s or 1.0
    watch = _Watch(tap, ask, rules, search.warm_s, drain_s=max(10.0, 3 * search.warm_s))
    tap.crew.steer = watch
    try:
        s.point(app.Load("rate", ask.rate, duration_s=ask.cap_s + 2 * BLOCK_S))
    finally:
        tap.crew.steer = None
    judged = watch.last or look(tap.seen(rules, s.clock.now()), rules, search.warm_s)
    if not s.reason:
        search.tell(ask, judged, rules)
    for _ in range(SETTLE if watch.cut and not s.reason else 0):
        s.point(app.Load("concurrency", 1, requests=1, label="until it is quiet again"))
        if s.last_e2e_s and s.last_e2e_s < 2 * single:
            break
    s.last_e2e_s = single
    return _as_dict(number, ask, judged)


def _as_dict(number: int, ask: Ask, judged: Look) -> dict[str, Any]:
    rules = [
        {"share": None if e.n == 0 else e.share, "share_interval": list(between), "requests": e.n,
         "effective_requests": e.n_eff, "clear": e.clear}
        for e, between in zip(judged.evidence, judged.shares, strict=True)
    ]  # fmt: skip
    slope = [judged.slope.value, judged.slope.lo, judged.slope.hi]
    return {"point": number, "rate": ask.rate, "answer": judged.answer or "undecided", "why": judged.why,
            "seconds": judged.now, "in_flight_slope_per_s": slope, "rules": rules}  # fmt: skip


def _say_probe(say: Say, probe: dict[str, Any]) -> None:
    shares = ", ".join("–" if r["share"] is None else f"{r['share']:.1%}" for r in probe["rules"])
    say(f"{probe['rate']:.3g} requests/s: {probe['answer']} after {probe['seconds']:.0f} s ({shares} good)")


def _tapped(s: Session) -> _Tap:
    if not isinstance(s.crew, Solo):
        raise UsageError("find drives its load from one process", "leave out --processes")
    solo = s.crew
    crew = _Steered(solo)
    tap = _Tap(s.recorder, crew)
    solo.recorder = solo.client.recorder = tap  # type: ignore[assignment] # a recorder in all but name
    s.crew = crew
    return tap


class _Steered:
    """A crew of one whose open-loop points may be ended while they run."""

    def __init__(self, solo: Solo) -> None:
        self.solo = solo
        self.steer: _Watch | None = None

    def run(self, point: Point, writer: Writer) -> str:
        if self.steer is None:
            return self.solo.run(point, writer)
        if point.schedule.has_sessions:
            raise UsageError("find does not search with sessions", "give a workload of single requests")
        probe = _Probe(**{f.name: getattr(point, f.name) for f in dataclasses.fields(Point)})
        probe.steer, probe.duration_s = self.steer, None
        return self.solo.run(probe, writer)

    def report(self) -> Report:
        return self.solo.report()

    def close(self) -> None:
        self.solo.close()


@dataclass
class _Probe(Point):
    """A point whose schedule is an upper bound."""

    steer: Callable[[int], bool] | None = None

    @property
    def elastic(self) -> bool:
        return True

    def pacer(self, start_ns: int) -> OpenLoop:
        pacer = _Until(self.schedule.due_ns, start_ns, most=self.max_in_flight, chains=Chains.of(self.schedule))
        pacer.over = self.steer or pacer.over
        return pacer


class _Until(OpenLoop):
    """The timetable, until ``over`` says so; then nothing is due any more. Asked on every turn of the loop."""

    over: Callable[[int], bool] = staticmethod(lambda _now: False)

    def take(self, now_ns: int) -> tuple[int, int] | None:
        if self.over(now_ns):
            self._next = len(self._due)
        return super().take(now_ns)


class _Watch:
    """Looks at a running probe after each block; once it has said enough, waits a while for its requests to end."""

    def __init__(self, tap: _Tap, ask: Ask, rules: tuple[Rule, ...], warm_s: float, drain_s: float) -> None:
        self._tap, self._ask, self._rules, self._warm_s = tap, ask, rules, warm_s
        self._drain_ns = round(drain_s * NS_PER_S)
        self._look_ns = round((warm_s + BLOCK_S) * NS_PER_S)
        self._give_up_ns = 0
        self.last: Look | None = None
        self.cut = False

    def __call__(self, now_ns: int) -> bool:
        since = now_ns - self._tap.start_ns
        if self._give_up_ns:
            if since >= self._give_up_ns and not self.cut:
                self.cut = True
                self._tap.crew.solo.client.cancel_all("censored", "the probe was over")
            return True
        if since < self._look_ns:
            return False
        self.last = look(self._tap.seen(self._rules, now_ns), self._rules, self._warm_s)
        self._look_ns = since + round(max(BLOCK_S * NS_PER_S, 0.05 * since))
        if enough(self.last, self._ask, self._rules):
            self._give_up_ns = since + self._drain_ns
        return bool(self._give_up_ns)


@dataclass
class _Tap:
    """Stands before the recorder and remembers what became of the present point's requests."""

    recorder: Recorder
    crew: _Steered
    point: int = -1
    start_ns: int = 0
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    score: dict[int, tuple[float, ...]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorder, name)

    def begin_point(self, row: dict[str, Any], planned: Any) -> None:
        planned = list(planned)
        self.point, self.start_ns = row["point"], row["start_ns"]
        base = {"point": self.point, "replica": 0, "attempt": 1, "outcome": "never_sent", "fault": "none"}
        self.rows = {r["id"]: {**base, **r} for r in planned}
        self.score, self.ended, self.silent = {}, [], set()
        self.recorder.begin_point(row, planned)

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        self.recorder.event(e)
        if isinstance(e, Sent):
            self.rows[e.id]["sent_ns"] = e.t_ns
            self.silent.add(e.id)
        elif isinstance(e, (Finished, Failed)):
            self.rows[e.id].update(e.facts, end_ns=e.t_ns)
            self.ended.append(e.id)

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:
        if id_ in self.silent and (meta >> 1) & 7 != ROLE:
            self.silent.discard(id_)
            self.rows[id_].setdefault("first_ns", t_ns)
        self.recorder.chunk(id_, t_ns, t_low_ns, meta)

    def seen(self, rules: tuple[Rule, ...], now_ns: int) -> Seen:
        """What has become of all that was due by now."""
        self._judge(rules)
        due = [r for r in self.rows.values() if r.get("due_ns", math.inf) <= now_ns]
        end = np.array([r.get("end_ns", math.nan) for r in due], dtype=np.float64)
        score = np.array([self.score.get(r["id"]) or _open(r, rules, now_ns) for r in due], dtype=np.float64)
        at = np.array([r["due_ns"] for r in due], dtype=np.float64)
        due_s, end_s = (at - self.start_ns) / NS_PER_S, (end - self.start_ns) / NS_PER_S
        return Seen((now_ns - self.start_ns) / NS_PER_S, due_s, end_s, score.reshape(-1, len(rules)).T)

    def _judge(self, rules: tuple[Rule, ...]) -> None:
        """Score what has ended since the last look, by the definitions of the analysis."""
        if not self.ended:
            return
        rows = [self.rows[i] for i in self.ended]
        point = {"point": self.point, "mode": "rate", "planned": len(rows), "start_ns": self.start_ns, "end_ns": 0}
        tables = [Table.from_rows(name, []) for name in ("chunks", "steps", "readings")]
        run = Run(Manifest(), Table.from_rows("points", [point]), Table.from_rows("requests", rows), *tables)
        self.score.update(zip(self.ended, map(tuple, scores(run, rules).T.tolist()), strict=True))
        self.ended = []


def _open(row: dict[str, Any], rules: tuple[Rule, ...], now_ns: int) -> list[float]:
    """Scores of a request still open: NaN, or how far past its limit it surely is."""
    waited = (now_ns - row["due_ns"]) / NS_PER_MS
    first, tokens = row.get("first_ns"), row.get("asked_output_tokens") or 0
    out = []
    for rule in rules:
        least = [waited / rule.limits["e2e_ms"]] if "e2e_ms" in rule.limits else []
        if "ttft_ms" in rule.limits and first is None:
            least.append(waited / rule.limits["ttft_ms"])
        if "tpot_ms" in rule.limits and first is not None and tokens > 1:
            # It has at most the tokens it asked for, and takes their time already.
            least.append((now_ns - first) / NS_PER_MS / (tokens - 1) / rule.limits["tpot_ms"])
        out.append(worst if (worst := max(least, default=0.0)) > 1 else math.nan)
    return out
