"""The bill: what a good request and a million effective tokens cost in joules and money. Pure: a Run in, a dict out.

All that was drawn and paid in a load point's window is divided by what was good in it: requests that ended well within
their SLO, and their output tokens, reasoning included (effective tokens, DESIGN 3). What failed, was late, truncated or
timed out is thereby charged to the good; so is what the client cut off itself (the end of the run), which is named
apart. Beside it stand answer tokens alone, and the raw figure per output token whoever it was for, so that the gap is
seen. Nothing good: the cost of a good one is null, the total is stated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whywait.analyze.bill_counted import counted, per
from whywait.analyze.bill_shares import Groups, shared, shares_of
from whywait.analyze.bill_work import ANSWER, EFFECTIVE, GOOD, RAW, Work, blocks_of, work_of
from whywait.analyze.energy import DEVICES, HOST, MODEL, Energy, between, energy_of
from whywait.analyze.energy_checks import checks_of, worst
from whywait.analyze.energy_model import PowerModel, the_machine
from whywait.analyze.passive import is_passive
from whywait.analyze.phases import RequestAccount, account
from whywait.analyze.sharing import DEVICE_TIME
from whywait.analyze.stats import cluster_bootstrap
from whywait.analyze.streams import Content, content
from whywait.analyze.window import Window, window_of
from whywait.core.run import DEFINITIONS, Run
from whywait.core.table import Array
from whywait.physics.prices import Offer, of_machine, shipped

#: Name of a figure → (what it is divided by, how many of that it is for).
PER: dict[str, tuple[str, float]] = {
    "per_good_request": (GOOD, 1.0),
    "per_million_effective_tokens": (EFFECTIVE, 1e6),
    "per_million_answer_tokens": (ANSWER, 1e6),
    "per_million_output_tokens": (RAW, 1e6),
}
UNKNOWN = "no energy is known"
LEAST_BLOCKS = 8  # fewer pieces of a window say little about how it varies


@dataclass(frozen=True)
class Ask:
    """What the Run does not hold: the offers to price it by, how many devices serve (None: as the Run says), the power
    to assume where none was metered, the rule by which the terminal shares, an SLO (None: the Run's)."""

    offers: tuple[Offer, ...] = ()
    devices: int | None = None
    model: PowerModel | None = None
    rule: str = DEVICE_TIME
    slo: dict[str, float] | None = field(default=None)


def offered(run: Run, ask: Ask | None = None) -> Ask:
    """``ask``; where it names no offer, with the shipped ones for the machine of ``run``."""
    ask, machine = ask or Ask(), the_machine(run)
    if ask.offers or machine is None:
        return ask
    return replace(ask, offers=of_machine(shipped(), machine.name))


def bill(run: Run, ask: Ask | None = None) -> dict[str, Any]:
    """The bill of every load point: plain JSON values, None where unknown with the reason beside.

    Keys: ``made_by, machine, slo, rule, points``; each point has ``point, label, mode, target, window`` (``seconds,
    whole``), ``work`` (requests and tokens in the window, by what became of them), ``counted`` (of a service that was
    only watched: see ``bill_counted``, with ``by_counters`` in ``energy`` and ``money``; else None), ``energy``
    (``joules, low, high, how, devices, read, device_joules, host_joules, idle, parts, state, checks``, and ``per_…``
    figures in joules), ``money`` (one entry per offer with ``name, terms, currency, date, source, device_hours, items,
    total`` and ``per_…``) and ``shares`` (see ``bill_shares``). A figure is ``value`` with its 95 % interval ``low,
    high`` (None where the window is too short to resample) and ``why`` where it is null.
    """
    ask = Ask() if ask is None else ask
    acc = account(run)
    machine = the_machine(run)
    return {
        "whywait_version": run.manifest.whywait_version,
        "definitions": DEFINITIONS,
        "made_by": run.manifest.made_by,
        "partial": run.manifest.partial,
        "machine": machine.name if machine else None,
        "slo": dict(run.manifest.slo if ask.slo is None else ask.slo),
        "rule": ask.rule,
        "points": [_point(run, int(n), acc, ask) for n in run.points["point"].tolist()],
    }


def energy_figures(run: Run, number: int, c: Content, w: Window) -> dict[str, Any]:
    """The bill's energy of a load point for its summary, by the Run's own SLO and without a model of power:
    ``energy_j_per_good_request``, ``energy_j_per_million_effective_tokens``, ``power_w`` (of all devices, and of the
    host where it was read), ``energy_how`` and ``energy_state``; None where unknown."""
    one = run.point(number)
    work, e = work_of(one, c, w, run.manifest.slo), energy_of(run, (w.start_ns, w.end_ns))
    known, per = e.joules is not None, _per(e.joules, work, None, None)
    return {
        "power_w": e.joules / e.seconds if e.joules is not None and e.seconds else None,
        "energy_j_per_good_request": per["per_good_request"]["value"],
        "energy_j_per_million_effective_tokens": per["per_million_effective_tokens"]["value"],
        "energy_how": (MODEL if run.manifest.made_by == "simulated" else e.how) if known else None,
        "energy_state": worst(checks_of(run, number, e, w)) if known else None,
    }


def by_request(run: Run, ask: Ask | None = None, made: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The share of every request in the joules and the money of its point's window, by ``ask.rule``: rows of ``point,
    id, class, prompt_tokens, output_tokens`` (made in the window), ``outcome, good, rule, nanojoules`` and, per offer,
    ``billionths EUR: its name`` (None where the amount is not known or the rule cannot be applied). Those of a point
    sum to its amounts exactly. ``made``: ``bill(run, ask)`` when the caller has it."""
    ask = Ask() if ask is None else ask
    acc, slo = account(run), run.manifest.slo if ask.slo is None else ask.slo
    for p in (made or bill(run, ask))["points"]:
        one = run.point(p["point"])
        w, c = window_of(one), content(one)
        work = work_of(one, c, w, slo)
        amounts = {"nanojoules": p["energy"]["joules"]}
        amounts |= {f"billionths {m['currency']}: {m['name']}": m["total"] for m in p["money"]}
        each = shares_of(one, Groups(c, w, work, acc, acc.point == p["point"]), list(amounts.values()), ask.rule)
        outcomes = one.requests.text("outcome")
        for i, row in enumerate(one.requests.rows()):
            tokens = float(work.tokens[i])
            yield {
                "point": p["point"], "id": row["id"], "class": row["class"], "prompt_tokens": row["prompt_tokens"],
                "output_tokens": None if np.isnan(tokens) else tokens, "outcome": outcomes[i],
                "good": bool(work.good[i]), "rule": ask.rule,
                **{k: None if parts is None else parts[i] for k, parts in zip(amounts, each, strict=True)},
            }  # fmt: skip


def _point(run: Run, number: int, acc: RequestAccount, ask: Ask) -> dict[str, Any]:
    one = run.point(number)
    w, c = window_of(one), content(one)
    slo = run.manifest.slo if ask.slo is None else ask.slo
    work = work_of(one, c, w, slo)
    e = energy_of(run, (w.start_ns, w.end_ns), ask.devices, ask.model)
    checks = checks_of(run, number, e, w)
    pieces = _pieces(run, e, work, w)
    target = float(one.points["target"][0])
    money = [_money(_whole(o, e, run), e, work, pieces) for o in ask.offers]
    mine = acc.point == number
    done = counted(run, (w.start_ns, w.end_ns)) if is_passive(one) else None
    own = {} if done is None else {"by_counters": per((e.joules, e.low, e.high), done, UNKNOWN)}
    for m in money if done is not None else []:
        m["by_counters"] = per((m["total"],) * 3, done or {}, m["why"] or "the total is not known")
    return {
        "point": number,
        "label": one.points["label"][0],
        "mode": one.points.text("mode")[0],
        "target": None if np.isnan(target) else target,
        "window": {"start_ns": w.start_ns, "end_ns": w.end_ns, "seconds": w.seconds, "whole": w.whole},
        "work": work.as_dict(),
        "counted": done,
        "energy": {
            **_energy(e, run.manifest.made_by == "simulated"),
            "state": worst(checks),
            "checks": [dict(c.__dict__) for c in checks],
            **_per(e.joules, work, pieces, _bounds(e, pieces.joules if pieces else None)),
            **own,
        },
        "money": money,
        "shares": shared(one, Groups(c, w, work, acc, mine), e.joules, money, ask.rule),
    }


@dataclass(frozen=True)
class _Pieces:
    """Equal pieces of the window: their length in s, what was done in each, joules of each (None: not known)."""

    seconds: float
    done: dict[str, Array | None]
    joules: Array | None


def _pieces(run: Run, e: Energy, work: Work, w: Window) -> _Pieces | None:
    gaps = [p.gap_s for p in e.parts if p.gap_s]
    n = blocks_of(w, max(gaps, default=0.0))
    if n < LEAST_BLOCKS:
        return None
    edges = np.linspace(w.start_ns, w.end_ns, n + 1)
    found = between(run, e, [round(x) for x in edges.tolist()])
    return _Pieces(w.seconds / n, work.in_pieces(edges), None if found is None else np.array(found))


def _energy(e: Energy, simulated: bool) -> dict[str, Any]:
    idle = None if e.idle.watts is None else e.idle.watts * e.seconds
    devices = e.of(DEVICES)
    return {
        "joules": e.joules,
        "low": e.low,
        "high": e.high,
        "how": MODEL if simulated and e.how else e.how or None,
        "devices": e.devices,
        "devices_how": None if e.devices is None else e.devices_how,
        "devices_by": e.devices_by or None,
        "read": e.read,
        "device_joules": devices,
        "host_joules": e.of(HOST),
        "watts": None if e.joules is None or not e.seconds else e.joules / e.seconds,
        "idle": {"watts": e.idle.watts, "joules": idle, "how": e.idle.how or None, "why": e.idle.why or None,
                 "share": None if idle is None or not devices else min(idle / devices, 1.0),
                 "host_watts": e.idle_host_w if e.with_host else None, "all_watts": e.idle_w},
        "unused": list(e.unused),
        "parts": [{k: v for k, v in p.__dict__.items() if k != "swing_w"} for p in e.parts],
    }  # fmt: skip


def _whole(o: Offer, e: Energy, run: Run) -> Offer:
    """An offer of whole nodes with the price that a device that serves has by it; of devices as it is."""
    machine = the_machine(run)
    if o.sold_by == "device" or not e.devices:
        return o
    if machine is None:
        return replace(
            o, note="; ".join(filter(None, (o.note, "how many devices its nodes have is not known: by device")))
        )
    by = o.billed(e.devices, machine.node) / e.devices
    each = None if o.per_device_hour is None else o.per_device_hour * by
    capex = None if o.capex is None else o.capex * by
    return replace(o, per_device_hour=each, capex=capex, hosting=o.hosting * by)


def _money(o: Offer, e: Energy, work: Work, pieces: _Pieces | None) -> dict[str, Any]:
    """What the window cost by an offer; ``total`` is None, with the reason, where a part of it is not known."""
    hours = None if e.devices is None else e.devices * e.seconds / 3600
    items: dict[str, float | None] = {k: None if hours is None else hours * v for k, v in o.hourly().items()}
    why = "" if hours is not None else "how many devices serve is not known (--devices)"
    if not o.all_in:
        items["power"] = None if e.joules is None else e.joules * o.per_joule
        idle = o.idle_joules(e.idle_w, e.seconds)
        if idle != 0.0:
            items["power of idle hours"] = None if idle is None else idle * o.per_joule
        unknown = [k for k in ("power", "power of idle hours") if k in items and items[k] is None]
        host = " (what the host draws idle: --power-model host_w=…)" if e.with_host and e.idle_host_w is None else ""
        why = why or "; ".join(f"{k} is not known{host if 'idle' in k else ''}" for k in unknown)
    total = None if why else float(sum(v or 0.0 for v in items.values()))
    each = None
    if total is not None and pieces is not None:
        power = items.get("power") or 0.0
        n = round(e.seconds / pieces.seconds)
        drawn = _bounds(e, pieces.joules) if power else None
        fixed = np.full(n, (total - power) / n)
        least, most = drawn if drawn is not None else (np.full(n, power / n / (o.per_joule or 1.0)),) * 2
        each = fixed + least * o.per_joule, fixed + most * o.per_joule
    return {
        "name": o.name,
        "terms": o.terms,
        "currency": o.currency,
        "date": o.date,
        "source": o.source,
        "note": o.note or None,
        "device_hours": hours,
        "per_device_hour": float(sum(o.hourly().values())),
        "per_kwh": None if o.all_in else o.per_joule * 3.6e6,
        "items": items,
        "total": total,
        "why": why or None,
        **_per(total, work, pieces, each, why or "the total is not known"),
    }


def _bounds(e: Energy, joules: Array | None) -> tuple[Array, Array] | None:
    """The least and the most joules of each piece: as far as the meters' own bounds go (window edges, a model's)."""
    if joules is None or not e.joules:
        return None
    low, high = (e.joules if x is None else x for x in (e.low, e.high))
    return joules * (low / e.joules), joules * (high / e.joules)


def _per(
    total: float | None,
    work: Work,
    pieces: _Pieces | None,
    each: tuple[Array, Array] | None,
    unknown: str = UNKNOWN,
) -> dict[str, Any]:
    """``total`` by each thing in :data:`PER`; ``each`` is the least and the most of every piece of the window."""
    out: dict[str, Any] = {}
    for name, (what, many) in PER.items():
        count, why = work.count(what)
        if total is None or not count:
            out[name] = {"value": None, "low": None, "high": None, "why": why if not count else unknown}
            continue
        done = None if pieces is None else pieces.done.get(what)
        low, high = (None, None) if each is None or done is None else _interval(each, done)
        out[name] = {"value": total / count * many, "low": None if low is None else low * many,
                     "high": None if high is None else high * many, "why": None}  # fmt: skip
    return out


def _interval(amounts: tuple[Array, Array], done: Array) -> tuple[float | None, float | None]:
    """95 % of Σ amounts / Σ done when pieces of the window are drawn again, with the amounts' own bounds; high is None
    where a draw had nothing done."""

    def ratio(drawn: Array) -> Array:
        with np.errstate(divide="ignore"):
            each = [(drawn @ a) / (drawn @ done) for a in amounts]
        out: Array = np.stack(each, axis=1)
        return out

    low, high = cluster_bootstrap(len(done), ratio, np.random.default_rng(1))
    return float(low[0]), float(high[1]) if np.isfinite(high[1]) else None
