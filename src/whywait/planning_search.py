"""How many of each shape the load needs, and what they do then: bound, search, draws. Part of the application layer.

Three steps, each dearer and more exact than the one before, each on fewer candidates: a rate that a shape surely does
not exceed (``sim.bound``); one replica at its share of the rate, by halving; the whole service, simulated in draws of
what is not known.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.core.schedule import Schedule
from whywait.errors import UsageError
from whywait.judge.plan import state_of
from whywait.judge.plan_money import busy_hour, least_paid, within
from whywait.physics import power
from whywait.physics.prices import Offer
from whywait.planning_loads import FULL, MOST, Loads, Want
from whywait.planning_space import Shape
from whywait.sim.bound import Bound, bound
from whywait.sim.deployment import Deployment
from whywait.sim.draws import prior_draws
from whywait.sim.grid import Cell, grid
from whywait.sim.loads import Options, capacities_of

Found = Mapping[str, float | None]
Progress = Callable[[str, int, int], None]
KEEP = 2.0  # a shape that is dearer than so many times the best, at its bound, is not simulated
FINAL = 12  # shapes simulated in draws
NEAR = 1.5  # times the cheapest tested: what costs more is not one per engine
STEPS = 4  # sizes tried until the draws are sure
SEEDS = 4
BATCH = 16  # shapes sized before the best of them leaves others out, at least
LEAST = 240  # requests of one replica's trial
DENSE, WIDER = 16, 1.12  # sizes are tried one by one up to so many replicas, then so much farther apart
BEYOND = 1.5  # times the dearest size tried, where a draw keeps the SLO at none
OVER = "over the budget"
REACH = 6.0  # times the replicas that the bound asks for that are tried at most


@dataclass
class Sized:
    """A shape on its way: its bound, the sizes that come in question, the least one that keeps the SLO with one replica
    simulated (None: none does), and what that replica did."""

    shape: Shape
    bound: Bound
    ladder: tuple[int, ...]
    price: float | None
    least: int | None = None
    seen: dict[int, Found] = field(default_factory=dict)
    why: str = ""
    offer: Offer | None = None
    cut: bool = False  # larger sizes would come in question, but for the budget

    def hourly(self, n: int) -> float | None:
        many = n * self.shape.devices
        if self.offer is not None:
            many = self.offer.billed(many, self.shape.deployment.machine.node)
        return None if self.price is None else many * self.price


@dataclass
class Drawn:
    """A candidate simulated whole: the central figures, and those of each draw."""

    shape: Shape
    replicas: int
    central: Found
    draws: Sequence[Found]
    meets: str

    @property
    def name(self) -> str:
        """How many devices, of what: ``8 × H100 SXM tp=2``."""
        return f"{self.shape.devices * self.replicas} × {self.shape.name}"

    @property
    def deployment(self) -> Deployment:
        return self.shape.times(self.replicas)


class Trial(NamedTuple):
    """A load point to be simulated; ``factor``: what latencies are really over simulated ones, by bound, as a run that
    was calibrated on has it."""

    cell: Cell
    factor: Mapping[str, float]

    @property
    def deployment(self) -> Deployment:
        return self.cell.deployment

    @property
    def plain(self) -> Cell:
        """With limits that a simulated latency is to keep for the real one to keep its own."""
        o = self.cell.options
        if not self.factor:
            return self.cell
        own = dataclasses.replace(o, slo=self._held(o.slo),
                                  slo_of_classes={k: self._held(v) for k, v in o.slo_of_classes.items()})  # fmt: skip
        return dataclasses.replace(self.cell, options=own)

    def _held(self, slo: Mapping[str, float]) -> dict[str, float]:
        return {k: v / self.factor.get(k, 1.0) for k, v in slo.items()}

    def really(self, f: dict[str, float | None]) -> dict[str, float | None]:
        """Figures as they would be measured."""
        by = {k: self.factor.get(k[: k.find("_ms") + 3], 1.0) for k in f if "_ms" in k} if self.factor else {}
        return {k: v * by[k] if v is not None and k in by else v for k, v in f.items()}


class Search:
    def __init__(self, want: Want, prices: Mapping[str, Offer | None], progress: Progress | None = None) -> None:
        self.want, self.prices, self.progress = want, prices, progress
        self.loads = Loads(want)
        classes = {c.name: dict(c.slo) for c in want.workload.classes if c.slo}
        self.options = Options("none", want.workload.timeout_s, warm=want.workload.cache == "warm", slo=dict(want.slo),
                               slo_of_classes=classes)  # fmt: skip
        self.simulated = 0
        self.middle: dict[tuple[str, str], Mapping[str, float]] = {}  # factors in the median by machine and engine …
        self.where: dict[tuple[str, str], tuple[float, ...]] = {}  # … and the load they are of

    def screen(self, shapes: Sequence[Shape]) -> tuple[list[Sized], list[dict[str, str]]]:
        """Every shape with its bound and its sizes; and those that the bound alone rules out."""
        out, dropped = [], []
        for i, s in enumerate(shapes):
            self._say("bounds", i + 1, len(shapes))
            try:
                b = bound(
                    s.deployment, self.loads.sample, self.want.limits.get("tpot_ms"), s.told.sd if s.told else None
                )
            except UsageError as exc:
                dropped.append({"name": s.name, "by": "capacity", "why": exc.message})
                continue
            offer = self.prices.get(s.machine)
            price = None if offer is None else busy_hour(offer, s.machine)
            ladder, why, cut = self._ladder(s, b)
            if not ladder:
                dropped.append({"name": s.name, "by": "budget" if why.startswith(OVER) else "bound", "why": why})
            else:
                out.append(Sized(s, b, ladder, price, offer=offer, cut=cut))
        return out, dropped

    def _ladder(self, s: Shape, b: Bound) -> tuple[tuple[int, ...], str, bool]:
        """Sizes that may do, ascending: none below what the bound asks for even if the machine is better than its
        fit; why there is none; and whether the budget took some."""
        if b.surely <= 0:
            return (), b.why, False
        need = self.want.rate * self.want.share
        low, high = max(1, math.ceil(need / b.surely)), math.ceil(REACH * self.want.rate / b.requests_per_s) + 4
        sizes = [n for n in s.counts if n >= low] if s.counts else _sizes(low, high)
        if not sizes:
            most = max(s.counts)
            return (), f"{most * s.devices} devices serve at most {most * b.surely:.3g} requests/s, by its bound", False
        tried = len(sizes)
        if (budget := self.want.budget) is not None and (offer := self.prices.get(s.machine)) is not None:
            watts, node = idle_w(s.deployment), s.deployment.machine.node
            sizes = [n for n in sizes if within(least_paid(offer, n * s.devices, watts, node), budget)]
            if not sizes:
                return (), f"{OVER}: the rate needs {low * s.devices} devices at least, by its bound", True
        return tuple(sizes), "", len(sizes) < tried

    def least(self, sized: Sequence[Sized], tested: Callable[[Shape], bool] = lambda _: True) -> list[dict[str, str]]:
        """Finds the least size of each, by halving, the cheapest bounds first; what even at its bound costs more than
        ``KEEP`` times the best found is left out and named. What may be ranked first is held against the best of those
        that may (``tested``): narrower numbers are cheaper, and would leave nothing to compare."""
        dropped: list[dict[str, str]] = []
        order = sorted(sized, key=lambda x: (x.price is None, x.hourly(x.ladder[0]) or 0.0))
        batch = max(BATCH, len(order) // 4)
        best = {True: math.inf, False: math.inf}
        for start in range(0, len(order), batch):
            part = []
            for x in order[start : start + batch]:
                floor = x.hourly(x.ladder[0])
                if floor is not None and floor > KEEP * best[tested(x.shape)]:
                    x.why = f"at its bound it costs more than {KEEP:g} times the best"
                    dropped.append({"name": x.shape.name, "by": "cost at its bound", "why": x.why})
                else:
                    part.append(x)
            self._halve(part)
            for x in part:
                if x.least is not None and (hour := x.hourly(x.least)) is not None:
                    best[False] = min(best[False], hour)
                    best[True] = min(best[True], hour) if tested(x.shape) else best[True]
        return dropped

    def _halve(self, part: Sequence[Sized]) -> None:
        ends = {id(x): (0, len(x.ladder)) for x in part}  # least is at an index in [low, high]; high: none
        while open_ := [x for x in part if ends[id(x)][0] < ends[id(x)][1]]:
            asked = []
            for x in open_:
                low, high = ends[id(x)]
                asked.append(x.ladder[min((low + high) // 2, low + 6)])  # the first sizes are the likely ones
            pairs = list(zip(open_, asked, strict=True))
            cells = [self.cell(x.shape.deployment, self.want.rate / n, LEAST) for x, n in pairs]
            found = self.run(cells, "one replica of each")
            for x, n, f in zip(open_, asked, found, strict=True):
                x.seen[n] = f
                low, high = ends[id(x)]
                at = x.ladder.index(n)
                ends[id(x)] = (low, at) if self.keeps(f) else (at + 1, high)
        for x in part:
            at = ends[id(x)][0]
            x.least = x.ladder[at] if at < len(x.ladder) else None
            if x.least is None:
                got = max((f.get("goodput_share") or 0.0 for f in x.seen.values()), default=0.0)
                over = f"{OVER}: " if x.cut else ""
                x.why = (f"{over}with {x.ladder[-1] * x.shape.devices} devices {got:.0%} of the requests keep the SLO, "
                         f"{self.want.share:.0%} are asked for")  # fmt: skip

    def keeps(self, f: Found) -> bool:
        return (f.get("goodput_share") or 0.0) >= self.want.share

    def draw(self, finalists: Sequence[Sized]) -> list[Drawn]:
        """Each finalist at its least size and the one below, and at larger ones until the draws are sure (``STEPS`` at
        most)."""
        self._settle(finalists)
        at = {id(x): x.ladder.index(x.least) for x in finalists if x.least is not None}
        todo = [x for x in finalists if id(x) in at]
        below = [(x.shape, x.ladder[at[id(x)] - 1]) for x in todo if at[id(x)] > 0]
        out: list[Drawn] = []
        for step in range(STEPS):
            asked = [(x.shape, x.ladder[at[id(x)]]) for x in todo]
            got = self._drawn([*asked, *(below if not step else [])])
            out += got
            todo = [x for x, d in zip(todo, got, strict=False) if d.meets != "holds" and at[id(x)] + 1 < len(x.ladder)]
            for x in todo:
                at[id(x)] = _next(x.ladder, at[id(x)], step)
            if not todo:
                break
        return out

    def _settle(self, finalists: Sequence[Sized]) -> None:
        """What runs that were calibrated on have latencies off by, at the load that one of their candidates gets: of a
        machine and an engine its first among the finalists."""
        s = self.loads.sample
        for x in finalists:
            told, key, f = x.shape.told, _kind(x.shape.deployment), x.seen.get(x.least or 0, {})
            if told is None or key in self.middle:
                continue
            many = ((f.get("running") or 0.0) + (f.get("waiting") or 0.0)) * told.before.replicas
            at = (many, float(s.prompt_tokens.mean()), float(s.output_tokens.mean()))
            self.where[key] = tuple(math.log(max(v, 0.1)) for v in at)
            self.middle[key] = told.factor(self.where[key])

    def _draws(self, shape: Shape, n: int) -> list[tuple[Deployment, Mapping[str, float]]]:
        """``n`` replicas in each draw of what is not known, and the factors of it: of the posterior where a run speaks
        of them, else of the prior."""
        seed, d, many = seed_of(shape.group, self.want.seed), shape.times(n), self.want.draws
        if shape.told is None:
            return [(dataclasses.replace(d, efficiency=e), {}) for e in prior_draws(d, many, seed)]
        factors = shape.told.factors(self.where[_kind(d)], many, seed)
        drawn = [dataclasses.replace(one, replicas=n) for one in shape.told.draws(many, seed)]
        return list(zip(drawn, factors, strict=True))

    def _drawn(self, of: Sequence[tuple[Shape, int]]) -> list[Drawn]:
        cells: list[Trial] = []
        for shape, n in of:
            cells.append(self.whole(shape.times(n), self.want.rate, keep="sample"))
            for k, (one, factor) in enumerate(self._draws(shape, n)):
                trial = self.whole(one, self.want.rate, k=1 + k % SEEDS, keep="sample")
                cells.append(trial._replace(factor=factor))
        found = self.run(cells, "whole services in draws")
        each = 1 + self.want.draws
        out = []
        for i, (shape, n) in enumerate(of):
            mine = [_of_all(f, n / cells[i * each].deployment.replicas) for f in found[i * each : (i + 1) * each]]
            shares = [f.get("goodput_share") or 0.0 for f in mine[1:]]
            out.append(Drawn(shape, n, mine[0], mine[1:], state_of(shares, self.want.share)))
        return out

    def whole(self, d: Deployment, rate: float, *, k: int = 0, keep: str = "none", longer: bool = False,
              change: Callable[[Schedule], Schedule] | None = None) -> Trial:  # fmt: skip
        """All of ``d`` under ``rate``; of a service so large that ``MOST`` requests are over before it is in its steady
        state, as many of its replicas as they keep busy, at their share of the rate."""
        needed = rate * self.loads.span * (2 if longer else 1)
        part = min(d.replicas, max(1, math.floor(d.replicas * MOST / needed)))
        mine = rate * part / d.replicas
        least = self.loads.long(mine) if longer else FULL
        return self.cell(dataclasses.replace(d, replicas=part), mine, least, k=k, keep=keep, change=change)

    def cell(self, d: Deployment, rate: float, least: int, *, k: int = 0, keep: str = "none",
             change: Callable[[Schedule], Schedule] | None = None) -> Trial:  # fmt: skip
        o = dataclasses.replace(self.options, keep=keep)
        made = Cell(d, self.loads.at(rate, k, least, change), "rate", rate, self.want.seed + k, o)
        return Trial(made, self.middle.get(_kind(d), {}))

    def run(self, trials: Sequence[Trial], what: str) -> list[dict[str, float | None]]:
        """The figures of each, in order; of one that cannot be (it does not fit) none."""
        able = [i for i, t in enumerate(trials) if self._fits(t.cell)]
        self.simulated += len(able)
        tell = None if self.progress is None else lambda done, of: self._say(what, done, of)
        found: list[dict[str, float | None]] = [{} for _ in trials]
        cells = [trials[i].plain for i in able]
        for i, f in zip(able, grid(cells, self.loads.list, self.want.jobs, tell), strict=True):
            found[i] = trials[i].really(f)
        return found

    def _fits(self, c: Cell) -> bool:
        """Whether the longest request of its schedule has room: schedules of other seeds have longer ones."""
        s = self.loads.list[c.schedule]
        try:
            capacities_of(c.deployment, float((s.prompt_tokens + s.output_tokens).max(initial=2)))
        except UsageError:
            return False
        return True

    def _say(self, what: str, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(what, done, of)


def finalists(sized: Sequence[Sized], tested: Callable[[Shape], bool], most: int = FINAL) -> list[Sized]:
    """Those to be simulated in draws: of every machine the cheapest, and the cheapest whose answers are tested; of
    every machine under an engine the cheapest tested, where it is near the best (how sure it is, it has of its own);
    the quickest; then the cheapest of all. ``most``, or twice as many where there are so many machines and engines."""
    able = sorted((x for x in sized if x.least is not None), key=_price)
    may = [x for x in able if tested(x.shape)]
    chosen: list[Sized] = []

    def take(found: Sequence[Sized]) -> None:
        chosen.extend(x for x in found if not any(x is c for c in chosen))

    for machine in dict.fromkeys(x.shape.machine for x in able):
        take([x for x in may if x.shape.machine == machine][:1])
        take([x for x in able if x.shape.machine == machine][:1])
    for group in dict.fromkeys(x.shape.group for x in may if _hour(x) <= NEAR * _hour(may[0])):
        take([x for x in may if x.shape.group == group][:1])
    quick = sorted(able, key=lambda x: x.seen[x.least or 0].get("tpot_ms_p95") or math.inf)
    take([x for x in quick if tested(x.shape)][:1])
    must = min(len(chosen), 2 * most)
    for machine in dict.fromkeys(x.shape.machine for x in able):
        take([x for x in may if x.shape.machine == machine][1:2])
    take(may[: most // 2])
    take(able)
    return chosen[: max(most, must)]


def _hour(x: Sized) -> float:
    hour = x.hourly(x.least or 0)
    return math.inf if hour is None else hour


def _kind(d: Deployment) -> tuple[str, str]:
    return d.machine.name, d.engine.policy


def _of_all(f: Found, many: float) -> Found:
    """Figures of a part as those of the whole, ``many`` times as large."""
    watts = f.get("power_w")
    return {**f, "power_w": None if watts is None else watts * many}


def _price(x: Sized) -> tuple[bool, float, int]:
    hour = None if x.least is None else x.hourly(x.least)
    return hour is None, hour or 0.0, (x.least or 0) * x.shape.devices


def _sizes(low: int, high: int) -> list[int]:
    out, n = [], low
    while n <= high:
        out.append(n)
        n = max(n + 1, math.ceil(n * WIDER) if n >= DENSE else n + 1)
    return out or [low]


def _next(ladder: Sequence[int], at: int, step: int) -> int:
    """A size about a sixth larger each time, and at least the next one."""
    want = ladder[at] * (1.0 + 0.15 * (step + 1))
    return next((i for i in range(at + 1, len(ladder)) if ladder[i] >= want), min(at + 1, len(ladder) - 1))


def seed_of(group: str, seed: int) -> int:
    """The same for a group everywhere and always."""
    return seed + int.from_bytes(hashlib.sha256(group.encode()).digest()[:4], "big")


def idle_w(d: Deployment) -> float | None:
    return power.idle_w(d.machine) if d.machine.tdp_w is not None else None


def needed(mine: Sequence[tuple[float, Sequence[float]]], share: float) -> NDArray[np.float64]:
    """In each draw, the least money of the sizes that keep the SLO in it; half as much again as the dearest where none
    does. ``mine``: of each size its money and the share of good requests in each draw."""
    dear = BEYOND * max(money for money, _ in mine)
    each = [np.where(np.asarray(shares, dtype=float) >= share, money, dear) for money, shares in mine]
    found: NDArray[np.float64] = np.min(each, axis=0)
    return found
