"""The journey of ``whywait plan``: candidates screened, sized, simulated in draws, compared with what was measured, and
the five questions answered or left open. Part of the application layer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whywait import __version__, planning_facts, planning_more
from whywait.analyze.bill import Ask as BillAsk
from whywait.analyze.bill import bill
from whywait.core.workload import SLO_KEYS
from whywait.errors import UsageError
from whywait.judge import plan as judged
from whywait.judge import plan_answers, plan_money, plan_sense
from whywait.judge.plan import Floats, Row
from whywait.judge.plan_told import CALIBRATED, OTHER, PRIOR
from whywait.physics import machines
from whywait.physics.prices import Offer
from whywait.planning_ask import Ask
from whywait.planning_facts import Measured
from whywait.planning_loads import Want
from whywait.planning_quality import Tested, quality_of, quality_state
from whywait.planning_search import Drawn, Progress, Search, Sized, finalists, idle_w, needed
from whywait.planning_space import Shape, Space, low_precision, shapes_of, space_of
from whywait.planning_told import calibrated
from whywait.sim import service
from whywait.sim.draws import basis as drawn_from
from whywait.sim.jit import COMPILED
from whywait.simulating import known_error
from whywait.twin.told import Told

FIGURES = ("cost", "goodput", "latency", "energy", "share", "ttft_ms_p95", "tpot_ms_p95", "power_w")


def plan(ask: Ask, progress: Progress | None = None) -> dict[str, Any]:
    """The whole argument as plain JSON values.

    Raises:
        UsageError: nothing to try, no SLO, an unknown name, or nothing that fits.
    """
    want = _want(ask)
    shapes, refused = shapes_of(ask.space)
    if not shapes:
        first = refused[0]
        raise UsageError(
            f"no candidate can be: {first['name']}: {first['why']}", "other machines, layouts or techniques"
        )
    shapes, calibrations = calibrated(ask.runs if ask.calibrate else (), shapes, ask.baseline, progress)
    model = shapes[0].deployment.model
    needs = {s.name: low_precision(s.deployment) for s in shapes}
    tested = quality_of(ask.quality, model, [n for n in needs.values() if n])
    names = list(dict.fromkeys(s.machine for s in shapes))
    money = plan_money.basis(ask.offers, names, ask.terms, ask.currency)
    search = Search(want, money.offers, progress)
    states = {s.name: quality_state(needs[s.name], tested) for s in shapes}
    sized, dropped, chosen = _screened(search, shapes, states)
    drawn = search.draw(chosen)
    rows, entries = _rows(drawn, states, money, search)
    runs = _given(ask, search, money, (model.name, tested))
    for m in (m for found, _ in runs for m in found):
        rows.append(m.row)
        entries[m.row.name] = m.entry
    found: dict[str, Any] = {
        "whywait_version": __version__, "kind": "plan", "inputs": ask.as_dict(),
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__, "compiled": COMPILED},
        "model": {"name": model.name, "source": model.source}, "want": _wanted(want, ask),
        "basis": {"terms": money.terms, "currency": money.currency, "mixed": money.mixed, "unpriced": money.unpriced,
                  "offers": {m: plan_money.plain(o) if o else None for m, o in money.offers.items()}},
        "catalogue": [_machine(n, shapes) for n in names],
        "counts": _counts(shapes, sized, refused, dropped, (chosen, search)),
        "refused": refused, "screened": [*dropped, *_short(sized)],
        "quality": [t.as_dict() for t in tested], "runs": [story for _, story in runs],
        "calibrations": calibrations,
        "workload": planning_facts.workload_facts(ask.workload, ask.rate, ask.workload_file),
    }  # fmt: skip
    _judge(found, rows, entries)
    found["beyond_budget"] = _beyond(found, rows, shapes, (states, money, search))
    sure = [x.shape for x in chosen if states[x.shape.name][0] in judged.TESTED]
    found["by_prior"] = _by_prior(sure, states, money, (want, progress))
    order = {r.name: i for i, r in enumerate(judged.ranked(rows))}
    best = sorted((d for d in drawn if d.name in order), key=lambda d: order[d.name])
    found |= planning_more.more(search, best, rows, (ask, money, states))
    for r in found["rows"]:
        r |= found["extra"].get(r["name"], {"headroom": None, "headroom_open": None, "growth": None, "loss": None})
    del found["extra"]
    found["bill"] = _billed(found, best, search, money)
    found["questions"] = plan_answers.questions(found)
    found["headline"] = plan_answers.headline(found)
    return found


def _screened(
    search: Search, shapes: Sequence[Shape], states: Mapping[str, tuple[str, str]]
) -> tuple[list[Sized], list[dict[str, str]], list[Sized]]:
    """What was sized, what was left out and why, and what goes on."""

    def tested(s: Shape) -> bool:
        return states[s.name][0] in judged.TESTED

    sized, dropped = search.screen(shapes)
    dropped += search.least(sized, tested)
    return sized, dropped, finalists(sized, tested)


def _beyond(
    found: Mapping[str, Any], rows: Sequence[Row], shapes: Sequence[Shape],
    of: tuple[Mapping[str, tuple[str, str]], plan_money.Basis, Search],
) -> dict[str, Any] | None:  # fmt: skip
    """Where nothing within the budget may be first, what would be without it; None where nothing would, or there is no
    need to ask."""
    states, money, search = of
    if found["first"] is not None or search.want.budget is None:
        return None
    free = Search(dataclasses.replace(search.want, budget=None), money.offers, search.progress)
    drawn = free.draw(_screened(free, shapes, states)[-1])
    runs = [dataclasses.replace(r, affordable=True) for r in rows if not r.affordable]
    order = judged.ranked([*_rows(drawn, states, money, free)[0], *runs])
    if not order or not order[0].eligible:
        return None
    return {"name": order[0].name, "paid": order[0].figures["paid"], "hourly": order[0].figures["hourly"]}


def _given(
    ask: Ask, search: Search, money: plan_money.Basis, of: tuple[str, Sequence[Tested]]
) -> list[tuple[list[Measured], dict[str, Any]]]:
    """Of every run that was given the candidates that it is, and its story."""

    def price(machine: str | None) -> Offer | None:
        """Of a run's machine, which need not be among the candidates': by the same terms."""
        return plan_money.basis(ask.offers, [machine or ""], money.terms, money.currency).offers[machine or ""]

    mean = (float(search.loads.sample.prompt_tokens.mean()), float(search.loads.sample.output_tokens.mean()))
    model, told = of[0], planning_facts.Told(of[1], ask.baseline)
    return [planning_facts.measured(r, search.want, price, (*mean, model), told) for r in ask.runs]


def _want(ask: Ask) -> Want:
    slo = {k: v for k, v in ask.slo.items() if k in SLO_KEYS}
    if not slo and not any(c.slo for c in ask.workload.classes):
        raise UsageError("which SLO? goodput needs one", "--slo ttft=1s,tpot=40ms, or slo in the workload")
    for key, limit in (*slo.items(), *((k, v) for c in ask.workload.classes for k, v in c.slo.items())):
        if not limit > 0:
            raise UsageError(
                f"--slo: {key.removesuffix('_ms')} of {limit:g} ms can be kept by nothing", "ttft=1s,tpot=40ms"
            )
    if "ttfa_ms" in slo:
        raise UsageError("--slo: the simulator has no time to first answer token", "ttft, tpot or e2e")
    return Want(ask.workload, ask.rate, slo, ask.share, ask.seed, ask.jobs, ask.draws, ask.budget)


def _wanted(want: Want, ask: Ask) -> dict[str, Any]:
    classes = {} if want.slo else {c.name: dict(c.slo) for c in want.workload.classes}
    return {"rate": want.rate, "slo": dict(want.slo), "slo_of_classes": classes, "share": want.share,
            "growth": ask.growth, "budget": ask.budget}  # fmt: skip


def _rows(
    drawn: Sequence[Drawn], states: Mapping[str, tuple[str, str]], money: plan_money.Basis, search: Search
) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """A row per candidate that was simulated whole, and what stands beside it."""
    rows, entries = [], {}
    for d in drawn:
        offer = money.offers.get(d.shape.machine)
        central = _figures(d, d.central, offer, search)
        each = [_figures(d, f, offer, search) for f in d.draws]
        draws = {
            k: np.array([np.nan if e[k] is None else e[k] for e in each], dtype=float) for k in (*FIGURES, "hourly")
        }
        draws = {k: v for k, v in draws.items() if np.isfinite(v).any()}
        state, note = states[d.shape.name]
        if (need := _need(d, drawn, offer, search)) is not None:
            draws["cost"] = need
        afford = plan_money.within(central["paid"], search.want.budget)
        rows.append(Row(d.name, d.shape.group, d.shape.name, central, draws, d.meets, state, afford))
        entries[d.name] = {
            "kind": "simulated", "machine": d.shape.machine, "engine": d.shape.engine, "layout": d.shape.layout,
            "apply": d.shape.apply, "narrow": list(low_precision(d.shape.deployment)),
            "devices": d.deployment.devices, "replicas": d.replicas, "quality_note": note,
            "known_error": None if d.shape.told else known_error(d.deployment),
            "prior": drawn_from(d.shape.told.plain if d.shape.told else d.deployment), "doubts": _doubts(d),
            **_basis(d.shape.told), "whole_nodes": plan_money.whole_nodes(
                offer, d.deployment.devices, central["power_w"], idle_w(d.deployment), d.deployment.machine.node),
        }  # fmt: skip
    return rows, entries


def _by_prior(
    shapes: Sequence[Shape], states: Mapping[str, tuple[str, str]], money: plan_money.Basis,
    how: tuple[Want, Progress | None],
) -> dict[str, Any] | None:  # fmt: skip
    """What would be first without the runs, of the kinds that were looked at closely and may be first: sized and drawn
    anew, by the prior alone. None where no run speaks of any of them."""
    if not any(s.told for s in shapes):
        return None
    plain = [s if s.told is None else dataclasses.replace(s, deployment=s.told.plain, told=None) for s in shapes]
    search = Search(how[0], money.offers, how[1])
    sized, _ = search.screen(plain)
    search.least(sized)
    rows, _ = _rows(search.draw([x for x in sized if x.least is not None]), states, money, search)
    order = [r for r in judged.ranked(rows) if r.eligible]
    if not order:
        return {"first": None, "shape": None, "cost": None, "kinds": len(shapes)}
    return {"first": order[0].name, "shape": order[0].shape, "cost": order[0].figures["cost"], "kinds": len(shapes)}


def _basis(told: Told | None) -> dict[str, Any]:
    """What the figures of a candidate rest on: a run of its own machine, of another one, or the prior."""
    return {"basis": PRIOR if told is None else CALIBRATED if told.own else OTHER,
            "calibrated_by": told.run if told else None}  # fmt: skip


def _doubts(d: Drawn) -> list[str]:
    s = d.deployment.speculation
    if s is None:
        return []
    return [f"that drafts are accepted (the first with {s.acceptance[0]:.2f}) is known of other loads, not of this one"]


def _need(d: Drawn, drawn: Sequence[Drawn], offer: Offer | None, search: Search) -> Floats | None:
    """Draws of what 1,000 good requests cost with as many of the shape as the draw needs: what is not known of a
    service mostly decides how many of it are bought."""
    mine = [x for x in drawn if x.shape.name == d.shape.name]
    money = [_figures(x, x.central, offer, search)["hourly"] for x in mine]
    if any(m is None for m in money):
        return None
    sizes = [(m or 0.0, [f.get("goodput_share") or 0.0 for f in x.draws]) for m, x in zip(money, mine, strict=True)]
    good = (d.central.get("goodput_share") or 0.0) * search.want.rate
    return needed(sizes, search.want.share) / (good * 3600) * 1000 if good else None


def _figures(d: Drawn, f: Mapping[str, float | None], offer: Offer | None, search: Search) -> dict[str, float | None]:
    """``goodput`` is the share of good requests × the rate: what came in a span of the simulation varies."""
    want, dep = search.want, d.deployment
    share = f.get("goodput_share")
    good = None if share is None else share * want.rate
    watts = f.get("power_w")
    hour = plan_money.per_hour(offer, dep.devices, watts, idle_w(dep), dep.machine.node)
    at = {"ttft_ms": f.get("ttft_ms_p95"), "tpot_ms": f.get("tpot_ms_p95"), "itl_ms": f.get("tpot_ms_p95"),
          "e2e_ms": f.get("e2e_ms_p95")}  # fmt: skip
    limits = [v / limit for k, limit in want.limits.items() if (v := at.get(k)) is not None]
    return {
        "cost": None if hour is None or not good else hour / (good * 3600) * 1000, "goodput": good, "share": share,
        "latency": max(limits) if limits else None, "energy": None if watts is None or not good else watts / good,
        "ttft_ms_p95": at["ttft_ms"], "tpot_ms_p95": at["tpot_ms"], "power_w": watts, "hourly": hour,
        "paid": plan_money.paid(offer, hour),
    }  # fmt: skip


def _judge(found: dict[str, Any], rows: Sequence[Row], entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Order, ties, dominance and front, into ``found``."""
    order, lost, front = judged.ranked(rows), judged.dominated(rows), set(judged.front(rows))
    tied = judged.ties(rows)
    first = order[0] if order and order[0].eligible else None
    found |= {"first": first.name if first else None, "ties": tied, "rows": []}
    for i, r in enumerate(order):
        figures = {}
        for key in FIGURES:
            low, high = judged.interval(r.draws.get(key))
            value = r.figures.get(key)
            if key != "cost" and value is not None and low is not None and high is not None:
                low, high = min(low, value), max(high, value)  # of cost it is of what is needed, not of this size
            figures[key] = {"value": value, "low": low, "high": high}
        sure = judged.better(first, r) if first is not None and r is not first else None
        found["rows"].append({
            "rank": i + 1, "name": r.name, "shape": r.shape, "group": r.group, "meets": r.meets, "quality": r.quality,
            "eligible": r.eligible, "tie": r.name in tied, "front": r.name in front, "dominated_by": lost.get(r.name),
            "first_is_cheaper": sure, "hourly": r.figures.get("hourly"), "paid": r.figures.get("paid"),
            "affordable": r.affordable, "figures": figures, **entries[r.name],
        })  # fmt: skip


def _short(sized: Sequence[Sized]) -> list[dict[str, str]]:
    return [{"name": x.shape.name, "by": "budget" if x.cut else "one replica simulated", "why": x.why} for x in sized
            if x.least is None and x.why and "at its bound" not in x.why]  # fmt: skip


def _counts(
    shapes: Sequence[Shape], sized: Sequence[Sized], refused: Sequence[Any], dropped: Sequence[Mapping[str, str]],
    rest: tuple[Sequence[Sized], Search],
) -> dict[str, Any]:  # fmt: skip
    """How many candidates (a shape and how many of it) each step looked at and dropped."""
    chosen, search = rest
    smaller = sum(x.ladder.index(x.least) for x in sized if x.least is not None)
    larger = sum(len(x.ladder) - 1 - x.ladder.index(x.least) for x in sized if x.least is not None)
    return {
        "shapes": len(shapes) + len(refused),
        "candidates": sum(len(x.ladder) for x in sized) + len(dropped) + len(refused),
        "refused": len(refused), "by_bound": sum(d["by"] in ("bound", "capacity") for d in dropped),
        "by_cost": sum(d["by"] == "cost at its bound" for d in dropped),
        "too_small": smaller, "larger_than_needed": larger,
        "by_budget": sum(d["by"] == "budget" for d in [*dropped, *_short(sized)]),
        "not_at_any_size": sum(x["by"] != "budget" for x in _short(sized)),
        "sized": sum(x.least is not None for x in sized), "in_draws": len(chosen), "points_simulated": search.simulated,
    }  # fmt: skip


def _machine(name: str, shapes: Sequence[Shape]) -> dict[str, Any]:
    m = next(s.deployment.machine for s in shapes if s.machine == name)
    return {
        "name": m.name, "memory_bytes": m.memory_bytes, "read_bytes_per_s": m.read_bytes_per_s, "flops": dict(m.flops),
        "link_bytes_per_s": m.link_bytes_per_s, "node": m.node, "tdp_w": m.tdp_w, "read_in": machines.READ_IN,
        "source": machines.sources_in_full(m), "note": m.note or None,
    }  # fmt: skip


def _billed(
    found: Mapping[str, Any], best: Sequence[Drawn], search: Search, money: plan_money.Basis
) -> dict[str, Any] | None:
    """The bill of the first one: its run simulated and billed as ``whywait bill`` bills any run."""
    first = next((d for d in best if d.name == found["first"]), best[0] if best else None)
    if first is None:
        return None
    c = search.whole(first.deployment, search.want.rate, keep="sample").cell
    run = service.simulate(c.deployment, search.loads.list[c.schedule], c.mode, c.target, c.seed, options=c.options)
    offer = money.offers.get(first.shape.machine)
    if offer is not None and c.deployment.replicas < first.replicas:  # nodes that a part does not fill, all of it does
        offer = dataclasses.replace(offer, sold_by="device")
    got = bill(run, BillAsk(tuple([offer] if offer else ()), slo=dict(search.want.slo) or None))["points"][0]
    keys = ("per_good_request", "per_million_effective_tokens", "per_million_output_tokens")
    money_of = [{**{k: m[k] for k in keys}, "name": m["name"], "currency": m["currency"]} for m in got["money"]]
    return {"of": first.name, "replicas": c.deployment.replicas, "work": got["work"],
            "window_s": got["window"]["seconds"],
            "energy": {**{k: got["energy"][k] for k in keys}, "how": got["energy"]["how"]},
            "money": money_of}  # fmt: skip


__all__ = ["Ask", "Measured", "Progress", "Space", "plan", "plan_sense", "space_of"]
