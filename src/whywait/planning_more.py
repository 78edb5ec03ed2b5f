"""What is asked of the best candidates only: headroom, the loss of a node, what turns the ranking over, and the
experiment that would tell. Part of the application layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whywait import planning_trial
from whywait.core.schedule import Schedule
from whywait.judge import plan_money, plan_sense
from whywait.judge.plan import TESTED, Floats, Row
from whywait.physics.prices import Offer
from whywait.planning_loads import scaled_output, scaled_reuse
from whywait.planning_search import Drawn, Search, idle_w
from whywait.planning_space import Shape
from whywait.sim.deployment import Deployment

GROWN = (1.1, 1.25, 1.5, 2.0, 3.0)
SHOWN, VARIED = 6, 5  # candidates looked at for headroom; shapes whose ranking is tried under other assumptions
BY = 0.3
TRIAL_H = 0.5  # hours of an experiment: start, warm-up, a few load points
Change = Callable[[Schedule], Schedule]


def more(
    search: Search, best: Sequence[Drawn], rows: Sequence[Row],
    of: tuple[Any, plan_money.Basis, Mapping[str, tuple[str, str]]],
) -> dict[str, Any]:  # fmt: skip
    """``extra`` by name (headroom, growth, loss), ``sensitivity``, ``experiments``, ``untested``."""
    ask, money, states = of
    settled = [d for d in best if d.meets == "holds"][:SHOWN] or list(best[:SHOWN])
    sense = _sensitivity(search, settled, ask, money, (states, best, rows))
    return {"extra": _headroom(search, settled, ask.growth), "sensitivity": sense,
            "experiments": _experiments(search, best, rows, ask, money),
            "untested": plan_sense.untested(rows)}  # fmt: skip


def _headroom(search: Search, of: Sequence[Drawn], growth: float) -> dict[str, dict[str, Any]]:
    """Of each: how much more load it takes, whether the growth, and what is left when a node is lost."""
    grown = sorted({*GROWN, *([1 + growth] if growth else [])})
    cells, where = [], []
    for d in of:
        for g in grown:
            where.append((d, g))
            cells.append(search.whole(d.deployment, search.want.rate * g, longer=True))
        lost = lost_with_a_node(d.deployment)
        if lost < d.replicas:
            where.append((d, 0.0))
            cells.append(search.whole(d.shape.times(d.replicas - lost), search.want.rate, longer=True))
    found = search.run(cells, "growth and a lost node")
    out: dict[str, dict[str, Any]] = {}
    for d in of:
        shares = {g: f.get("goodput_share") or 0.0 for (one, g), f in zip(where, found, strict=True) if one is d}
        after = shares.pop(0.0, 0.0)
        held = 1.0
        for g in grown:
            if shares[g] < search.want.share:
                break
            held = g
        out[d.name] = {
            "headroom": held - 1, "headroom_open": held == grown[-1],
            "growth": shares[1 + growth] if growth else None,
            "loss": {"replicas": lost_with_a_node(d.deployment), "share": after, "keeps": after >= search.want.share},
        }  # fmt: skip
    return out


def lost_with_a_node(d: Deployment) -> int:
    """Replicas that go with a node of the machine; all, where a replica spans nodes or there is but one node."""
    each = d.devices // max(d.replicas, 1)
    return min(d.replicas, max(1, math.ceil(max(d.machine.node, 1) / each)))


def _sensitivity(
    search: Search, settled: Sequence[Drawn], ask: Any, money: plan_money.Basis,
    of: tuple[Mapping[str, tuple[str, str]], Sequence[Drawn], Sequence[Row]],
) -> dict[str, Any]:  # fmt: skip
    states, best, rows = of
    if not any(r.eligible for r in rows):  # nothing is first, so nothing can take its place
        return {"by": BY, "base": {}, "flips": [], "skipped": [], "break_even": [], "terms": []}
    able = [d for d in settled if states[d.shape.name][0] in TESTED] or list(settled)
    shapes: dict[str, Drawn] = {}
    for d in able:
        shapes.setdefault(d.shape.name, d)
    top = list(shapes.values())[:VARIED]
    plain = _costs(search, top, money, None, 1.0)
    safe = {d.shape.name: _safe(d, search, money) for d in top}
    base = {n: safe[n] if c is not None else None for n, c in plain.items()}

    def moved(costs: dict[str, float | None]) -> dict[str, float | None]:
        """The cost of the size that the draws asked for, by as much as the central one moved."""
        out: dict[str, float | None] = {}
        for n, c in costs.items():
            was, held = plain[n], base[n]
            out[n] = None if c is None or was is None or held is None else held * (c / was if was else 1.0)
        return out

    machine_of = {d.shape.name: d.shape.machine for d in top}
    wide, machines = _of_each_machine(base, machine_of, (best, rows), search, money)
    varied = plan_sense.priced(wide, machines, BY)
    drawn = {d.shape.machine for d in best}
    skipped = [{"assumption": f"price of {m}", "why": _no_price_of(o, m in drawn)}
               for m, o in money.offers.items() if m not in machines.values()]  # fmt: skip
    for name, change, acceptance, why in _assumptions(search, top):
        if why:
            skipped.append({"assumption": name, "why": why})
            continue
        for by in (1 + BY, 1 - BY):
            costs = _costs(search, top, money, change(by) if change else None, by if acceptance else 1.0)
            varied.append(plan_sense.Varied(name, f"{by - 1:+.0%}".replace("-", "−").replace("%", " %"), moved(costs)))
    terms = []
    for b in plan_money.all_terms(ask.offers, list(money.offers), money.currency):
        other = {n: _at_other(c, shapes[n], money, b) for n, c in base.items()}
        if any(c is not None for c in other.values()):
            varied.append(plan_sense.Varied("terms", b.terms, other))
            terms.append({"terms": b.terms, "costs": other})
    return {"by": BY, "base": base, "flips": [f.as_dict() for f in plan_sense.flips(base, varied)], "skipped": skipped,
            "break_even": plan_sense.break_even(wide, machines), "terms": terms}  # fmt: skip


def _of_each_machine(
    base: Mapping[str, float | None], machine_of: Mapping[str, str], of: tuple[Sequence[Drawn], Sequence[Row]],
    search: Search, money: plan_money.Basis,
) -> tuple[dict[str, float | None], dict[str, str]]:  # fmt: skip
    """Costs and machines of the shapes whose ranking is tried, and of every other machine its best that may be first:
    a price is moved without simulating."""
    best, rows = of
    able = {r.name for r in rows if r.eligible}
    costs, machines = dict(base), dict(machine_of)
    for d in best:
        if d.name in able and d.shape.machine not in machines.values():
            costs[d.shape.name], machines[d.shape.name] = _safe(d, search, money), d.shape.machine
    return costs, machines


def _no_price_of(o: Offer | None, drawn: bool) -> str:
    """Why the price of a machine was not moved."""
    if o is None:
        return "it has none"
    return "none of it surely keeps the SLO with tested answers" if drawn else "no kind of it was left"


def _safe(d: Drawn, search: Search, money: plan_money.Basis) -> float | None:
    hour = _hour(d, d.replicas, money)
    good = (d.central.get("goodput_share") or 0.0) * search.want.rate
    return None if hour is None or not good else hour / (good * 3600) * 1000


def _at_other(cost: float | None, d: Drawn, now: plan_money.Basis, then: plan_money.Basis) -> float | None:
    """The cost by other offers: in proportion to what an hour of the same devices comes to, their power in it."""
    hours = _hour(d, d.replicas, now), _hour(d, d.replicas, then)
    return None if cost is None or hours[0] is None or hours[1] is None or not hours[0] else cost * hours[1] / hours[0]


def _assumptions(search: Search, top: Sequence[Drawn]) -> list[tuple[str, Callable[[float], Change] | None, bool, str]]:
    """(name, what it does to the load, whether acceptance moves, why it cannot be tried)."""
    s = search.loads.sample
    reuse = "" if (s.prefix_tokens > 0).any() or s.blocks else "no beginnings are shared in this load"
    drafts = "" if any(d.deployment.speculation for d in top) else "none of the best uses drafts"
    return [("output length", scaled_output, False, ""), ("prefix hit rate", scaled_reuse, False, reuse),
            ("acceptance of drafts", None, True, drafts)]  # fmt: skip


def _costs(
    search: Search, top: Sequence[Drawn], money: plan_money.Basis, change: Change | None, acceptance: float
) -> dict[str, float | None]:
    """Cost of 1,000 good requests of each shape, its size chosen anew by the central simulation: the least of those
    around its own that keeps the SLO."""
    asked, cells = [], []
    for d in top:
        low = max(1, math.floor(d.replicas * 0.65))
        high = math.ceil(d.replicas * 1.5) + 1
        for n in _spread(low, high):
            one = _accepting(d.shape.times(n), acceptance)
            asked.append((d, n))
            cells.append(search.whole(one, search.want.rate, change=change))
    found = search.run(cells, "other assumptions")
    out: dict[str, float | None] = {d.shape.name: None for d in top}
    for (d, n), f in zip(asked, found, strict=True):
        if out[d.shape.name] is None and search.keeps(f):
            hour = _hour(d, n, money)
            good = (f["goodput_share"] or 0.0) * search.want.rate
            out[d.shape.name] = None if hour is None else hour / (good * 3600) * 1000
    return out


def _spread(low: int, high: int) -> list[int]:
    if high - low < 9:
        return list(range(low, high + 1))
    return sorted({round(x) for x in np.linspace(low, high, 9).tolist()})


def _hour(d: Drawn, n: int, money: plan_money.Basis) -> float | None:
    """Money of an hour of use of ``n`` replicas."""
    offer, node = money.offers.get(d.shape.machine), d.deployment.machine.node
    return plan_money.per_hour(offer, n * d.shape.devices, d.central.get("power_w"), idle_w(d.deployment), node)


def _accepting(d: Deployment, by: float) -> Deployment:
    if d.speculation is None or by == 1.0:
        return d
    moved = tuple(min(1.0, a * by) for a in d.speculation.acceptance)
    return dataclasses.replace(d, speculation=dataclasses.replace(d.speculation, acceptance=moved))


def _experiments(
    search: Search, best: Sequence[Drawn], rows: Sequence[Row], ask: Any, money: plan_money.Basis
) -> list[dict[str, Any]]:
    by_name = {d.name: d for d in best}
    hourly: dict[str, Floats] = {}
    for r in rows:
        hour = r.figures.get("hourly")
        shares = r.draws.get("share")
        if hour is not None and shares is not None and r.affordable:
            hourly[r.name] = np.where(shares >= search.want.share, hour, np.inf)
    tested = {r.name for r in rows if r.quality in TESTED}
    small: dict[str, Shape] = {}  # what would be measured: one replica of a group's best
    for name, d in by_name.items():
        if name in tested:
            small.setdefault(d.shape.group, d.shape)
    price = {g: _trial(s, money) for g, s in small.items()}
    out = []
    for e in plan_sense.experiments(rows, hourly, price):
        shape = small.get(e.of)
        if shape is None:  # a run that was measured already
            continue
        replicas = next(d.replicas for d in best if d.shape.name == shape.name)
        out.append({**e.as_dict(), "command": planning_trial.sweep(search.want.rate / replicas, ask),
                    "serve": planning_trial.serving(shape), "then": planning_trial.afterwards(shape, ask),
                    "shape": shape.name, "devices": shape.devices, "replicas": replicas,
                    "hours": TRIAL_H})  # fmt: skip
    return out


def _trial(s: Shape, money: plan_money.Basis) -> float | None:
    offer = money.offers.get(s.machine)
    return None if offer is None else TRIAL_H * s.devices * plan_money.busy_hour(offer, s.machine)
