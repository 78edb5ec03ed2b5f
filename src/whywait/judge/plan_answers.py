"""The five questions before hardware is bought, each answered with its evidence or left open with the command that
would answer it. Pure: a plan as JSON values in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whywait.judge.plan_told import CALIBRATED, OTHER, said
from whywait.judge.plan_worded import beyond, grown, hour, if_tested, none_first, offer, tie, within
from whywait.units import ms, number, percent

ANSWERED, OPEN, PARTLY = "answered", "open", "in part"
#: From so many requests of a log a tail is told at all: two-sided 95 % bounds of p99 need 368.
ENOUGH = 368
KEEPS = {"holds": "in every simulated draw", "undecided": "in some simulated draws", "fails": "no"}
BURSTY = 1.3  # coefficient of variation of gaps from which a load is burstier than Poisson

Plan = Mapping[str, Any]


def questions(p: Plan) -> list[dict[str, Any]]:
    """Each as ``question, state, answer, evidence, command`` (what would answer it, or make it surer)."""
    goodput = _goodput(p)
    return [_load(p), _where(p), goodput, _quality(p), _cost(p, goodput)]


def headline(p: Plan) -> str:
    """What to buy, in a sentence; or what stands in the way."""
    rows = {r["name"]: r for r in p["rows"]}
    if p["first"] is None:
        if not rows:
            return "No candidate keeps the SLO at this rate" + _why_none(p)
        return none_first(p)
    first = rows[p["first"]]
    money = p["basis"]["currency"]
    cost = number(first["figures"]["cost"]["value"])
    said = f"{first['name']}: {hour(p, first)}, {cost} {money} per 1,000 good requests"
    if (by := p["basis"]["offers"].get(first["machine"])) is not None:
        said += f" ({by['terms']}, {by['date']})"
    return said + grown(p, first) + tie(p, first)


def _why_none(p: Plan) -> str:
    """The budget, or what stands in the way of the first that was left out."""
    if any("over the budget" in d["why"] for d in p["screened"]):
        return within(p) + beyond(p)
    return f": {p['screened'][0]['name']}: {p['screened'][0]['why']}" if p["screened"] else ""


def limits(want: Plan) -> str:
    """The SLO in words: of all requests, or of each class."""

    def said(slo: Mapping[str, float]) -> str:
        return ", ".join(f"{k.removesuffix('_ms').upper()} ≤ {ms(v)}" for k, v in slo.items()) or "no limit"

    if want["slo"]:
        return said(want["slo"])
    return "their own SLO (" + "; ".join(f"{name}: {said(slo)}" for name, slo in want["slo_of_classes"].items()) + ")"


def _answer(question: str, state: str, answer: str, evidence: Sequence[str], command: str = "") -> dict[str, Any]:
    return {
        "question": question,
        "state": state,
        "answer": answer,
        "evidence": [e for e in evidence if e],
        "command": command,
    }


def _load(p: Plan) -> dict[str, Any]:
    w, want = p["workload"], p["want"]
    name = "Is the load real?"
    learn = "whywait workload fit LOG --out workload.toml (LOG: requests of your service; whywait record writes one)"
    facts = [
        f"{w['requests']:,} requests looked at; prompts p50 {number(w['prompt_tokens']['p50'])}, p99 "
        f"{number(w['prompt_tokens']['p99'])} tokens; answers p50 {number(w['output_tokens']['p50'])}, p99 "
        f"{number(w['output_tokens']['p99'])}",
        _bursts(w), _reuse(w), _thinking(w), _growth(w, want),
    ]  # fmt: skip
    if w["kind"] in ("recipe", "stages"):
        fixed = f"; fixed lengths ({', '.join(w['fixed'])}): a load of one length has no tail" if w["fixed"] else ""
        source = w["file"] or "flags and defaults"
        said = f"It is a guess: lengths and arrivals were written down ({source}), not learnt from a log{fixed}."
        return _answer(name, OPEN, said, facts, learn)
    few = w["requests"] < ENOUGH
    own = w["own_rate"]
    moved = own is not None and abs(want["rate"] / own - 1) > 0.1
    said = (
        f"Its lengths and gaps are those of {'a trace' if w['kind'] == 'trace' else 'a log'} ({w['file'] or 'given'})"
    )
    doubts = [
        f"of {w['requests']} requests only: p99 is not bounded" if few else "",
        f"its own mean rate is {number(own)}/s, planned is {number(want['rate'])}/s, all gaps scaled" if moved else "",
    ]
    state = PARTLY if any(doubts) else ANSWERED
    return _answer(name, state, said + "".join(f"; {d}" for d in doubts if d) + ".", facts, learn if few else "")


def _bursts(w: Plan) -> str:
    cv = w["gap_cv"]
    if cv is None:
        return ""
    kind = "burstier than Poisson" if cv > BURSTY else "as even as Poisson or more"
    return f"gaps between arrivals: coefficient of variation {cv:.2f}, {kind}"


def _reuse(w: Plan) -> str:
    if w["prefix"] is not None and w["prefix"]["hit_rate"] is not None:
        hit = percent(w["prefix"]["hit_rate"])
        return f"shared beginnings: an unlimited cache would hold {hit} of the prompts' blocks"
    if w["shared_share"]:
        return f"shared beginnings: {percent(w['shared_share'])} of the prompt tokens, as written down"
    return "shared beginnings: none are known; if there are any, this plan buys too much"


def _thinking(w: Plan) -> str:
    if w["thinking_tokens_mean"] is not None:
        return f"thinking: {number(w['thinking_tokens_mean'])} tokens a request in the mean"
    return "thinking tokens: not told apart from answers"


def _growth(w: Plan, want: Plan) -> str:
    said = f"growth planned for: {percent(want['growth'])}" if want["growth"] else "growth: none was said (--growth)"
    over = w["rate_over_time"]["requests"]
    third = len(over) // 3
    if w["kind"] in ("recipe", "stages") or third < 2 or not sum(over[:third]):
        return said
    change = sum(over[-third:]) / sum(over[:third]) - 1
    more = "more" if change >= 0 else "fewer"
    return f"{said}; within the log the last third has {percent(abs(change))} {more} requests than the first"


def _where(p: Plan) -> dict[str, Any]:
    name = "Where does the time go?"
    command = "whywait diagnose URL --load --out RUN, then whywait plan … --run RUN"
    if not p["runs"]:
        return _answer(
            name, OPEN, "No measured run was given: what the service waits on today is not known.", [], command
        )
    evidence, lacks, further = [], [], ""
    for run in p["runs"]:
        held = [v for v in run["verdicts"] if v["state"] == "holds"]
        lacks.append(_lacks(run, held))
        further = further or next((t for v in run["verdicts"] if not held and (t := _typed(v["next_step"]))), "")
        said = "" if run is p["runs"][0] else f": {run['headline'] or 'no verdict'}"
        evidence.append("; ".join([f"of {run['run']} ({run['made_by']}){said}", *filter(None, [run["other"]]),
                                  *run.get("doubts", ())]))  # fmt: skip
        evidence += [f"{v['claim']}: {'; '.join(v['evidence'][:2])}" for v in held[:2]]
        evidence += [text for q in run["points"][-1:] if (text := _account(q))]
    answer = p["runs"][0]["headline"] or "The run was not decided."
    if not all(lacks):
        return _answer(name, ANSWERED, answer, evidence)
    own = all(run["made_by"] == "measured" and not run["other"] for run in p["runs"])
    why = "; ".join(dict.fromkeys(lacks))
    return _answer(name, PARTLY, f"{answer.rstrip('.')}. Not wholly, since {why}.", evidence,
                   (further if own else "") or command)  # fmt: skip


def _lacks(run: Plan, held: Sequence[Plan]) -> str:
    """Why a run does not answer where the time of the planned service goes; empty where it does."""
    if run["made_by"] != "measured":
        return f"{run['run']} is {run['made_by']}: it is not what your service waits on"
    if run["other"]:
        return f"{run['run']}: {run['other']}"
    return "" if held else f"no verdict on {run['run']} holds"


def _typed(step: str) -> str:
    """The command that a next step names; empty where it names none."""
    at = step.find("whywait ")
    return f"{step[at:]} --out RUN, then whywait plan … --run RUN" if at >= 0 else ""


def _account(point: Plan) -> str:
    """The mean phases of a load point, the largest first, and what the devices did meanwhile."""
    phases = point["phases"] or {}
    means = {k: v["ms"] for k, v in phases.items() if isinstance(v, Mapping) and v.get("ms")}
    where = f"{point['mode']} {'' if point['target'] is None else format(point['target'], 'g')}".strip()
    top = sorted(means, key=lambda k: -means[k])[:4]
    said = [f"mean request at {where}: " + ", ".join(f"{k} {ms(means[k])}" for k in top)] if means else []
    shares = {k: v for k, v in ((point["occupancy"] or {}).get("shares") or {}).items() if v}
    if shares:
        most = sorted(shares, key=lambda k: -shares[k])[:4]
        said.append("devices: " + ", ".join(f"{k.replace('_', ' ')} {percent(shares[k])}" for k in most))
    return "; ".join(said)


def _keeps(r: Mapping[str, Any]) -> str:
    """A plan draws; only what was measured under this load is seen to keep it."""
    seen = {"holds": "yes, measured", "undecided": "not sure", "fails": "no"}
    return (seen if r["kind"] == "measured" else KEEPS)[r["meets"]]


def _goodput(p: Plan) -> dict[str, Any]:
    name = "What goodput under the SLO, not what peak?"
    rows, want = p["rows"], p["want"]
    slo = limits(want)
    held = [r for r in rows if r["meets"] == "holds"]
    evidence = [f"asked: {number(want['rate'])} requests/s, {percent(want['share'])} of them within {slo}"]
    evidence += [_room(r, want) for r in rows if r["name"] == p["first"]]
    evidence += [said(c) for c in p["calibrations"]]
    for r in rows[:5]:
        g = r["figures"]["goodput"]
        evidence.append(
            f"{r['name']} ({r['basis']}): {number(g['value'])}/s good ({_band(g)}), keeps the SLO: {_keeps(r)}"
        )
    errors = dict.fromkeys(r["known_error"] for r in rows if r.get("known_error"))
    evidence += list(errors)
    measured = any(r["kind"] == "measured" and r["meets"] != "undecided" for r in rows)
    drawn = "" if measured else " in every simulated draw"
    kept = (
        f"{len(held)} of {len(rows)} candidates looked at closely keep it{drawn}"
        if held
        else "No candidate surely does"
    )
    by_runs = sum(r["basis"] in (CALIBRATED, OTHER) for r in rows)
    by_run = f"; {by_runs} are calibrated on your run" if by_runs else ""
    answer = kept + by_run + ("." if measured else "; none of them was measured under this load.")
    told = [e for e in p["experiments"] if e["command"]]
    own = next((e for e in told if any(r["name"] == p["first"] and r["group"] == e["of"] for r in rows)), None)
    trial = own or (told[0] if told else None)
    if trial:
        one = f"one replica of {trial['replicas']}"
        answer += f" To measure it, {trial['serve']} ({one}), and afterwards {trial['then']}"
    command = trial["command"] if trial else ""
    return _answer(name, ANSWERED if held and measured else PARTLY, answer, evidence, command)


def _room(r: Plan, want: Plan) -> str:
    """What the first has left: for more load, for the growth that was said, for the loss of a node."""
    if r["headroom"] is None:
        return ""
    room = f"{r['name']} has room for {'at least ' if r['headroom_open'] else ''}{percent(r['headroom'])} more load"
    grown = (
        ""
        if r["growth"] is None
        else f"; with the growth of {percent(want['growth'])}, {percent(r['growth'])} of the requests are good"
        + (
            ""
            if r["growth"] >= want["share"]
            else f" (too few: plan for it with --rate {want['rate'] * (1 + want['growth']):g})"
        )
    )
    return f"{room}{grown}; without one node, {percent(r['loss']['share'])}"


def _quality(p: Plan) -> dict[str, Any]:
    name = "Is quality re-tested?"
    narrow = [r for r in p["rows"] if r["quality"] != "as published"]
    if not narrow:
        return _answer(name, ANSWERED, "No candidate looked at closely uses numbers narrower than published.", [])
    by: dict[str, list[str]] = {}
    for r in narrow:
        by.setdefault(r["quality"], []).append(r["name"])
    kinds = {state: list(dict.fromkeys(r["shape"] for r in narrow if r["quality"] == state)) for state in by}
    evidence = [f"{state}: {', '.join(k[:4])}" + (f" and {len(k) - 4} more kinds" if len(k) > 4 else "")
                for state, k in kinds.items()]  # fmt: skip
    evidence += list(dict.fromkeys(f"{'+'.join(r['narrow']) or r['name']}: {r['quality_note']}" for r in narrow))
    open_ = by.get("untested", []) + by.get("undecided", [])
    first = next((r for r in narrow if r["name"] in (p["untested"] or open_)), None)
    what = "+".join(first["narrow"]) if first else ""
    command = f"whywait quality URL-A URL-B --load --out DIR, then whywait plan … --quality {what}=DIR" if open_ else ""
    if first is not None and not what:  # a run that does not tell its numbers
        command = "whywait plan … --baseline bf16-weights,bf16-kv (the numbers that the service really had)"
    answer = "Every candidate of narrower numbers was tested." if not open_ else (
        f"{len(open_)} candidates of narrower numbers are not tested; none of them is ranked first."
        + (f" {if_tested(p)}." if p["untested"] else ""))  # fmt: skip
    return _answer(name, PARTLY if open_ and len(by) > 1 else OPEN if open_ else ANSWERED, answer, evidence, command)


def _cost(p: Plan, goodput: Plan) -> dict[str, Any]:
    """Never surer than the ``goodput`` that it is divided by, and open where nothing is first."""
    name = "What does a good request cost?"
    rows, basis = p["rows"], p["basis"]
    money = basis["currency"]
    priced = [r for r in rows if r["figures"]["cost"]["value"] is not None]
    evidence = []
    for r in priced[:3]:
        cost, energy = r["figures"]["cost"], r["figures"]["energy"]
        evidence.append(f"{r['name']}: {number(cost['value'])} {money} per 1,000 good ({_band(cost)}), "
                        f"{number(energy['value'])} J each ({_band(energy)})")  # fmt: skip
    evidence += [offer(m, o) for m, o in basis["offers"].items()]
    bill = p["bill"]
    if bill and bill["money"] and (gap := _gap(bill["money"][0])):
        evidence.append(f"bill of {bill['of']}: a million effective tokens {gap}")
    own_prices = "whywait plan … --price prices.toml (docs/bill.md)"
    if not priced and (rows or not any(basis["offers"].values())):
        return _answer(name, OPEN, "No price is known for any machine.", evidence, own_prices)
    if p["first"] is None:
        best = p["beyond_budget"]
        other = "with other machines, layouts or counts" if best is None else f"--budget {best['paid'] * 1.001:.4g}/h"
        return _answer(name, OPEN, "Nothing is first, so it is open what a good request will cost.", evidence,
                       f"whywait plan … {other}")  # fmt: skip
    shipped = (
        "; prices are those that ship: estimates and lists, use your own" if not p["inputs"].get("own_prices") else ""
    )
    f = priced[0]["figures"]
    answer = (f"{priced[0]['name']}: {number(f['cost']['value'])} {money} per 1,000 good requests, "
              f"{number(f['energy']['value'])} J each{shipped}")  # fmt: skip
    sure = goodput["state"] == ANSWERED
    answer += "." if sure else "; no surer than question 3, whose goodput it is divided by."
    state = ANSWERED if sure and not (shipped or basis["unpriced"] or basis["mixed"]) else PARTLY
    return _answer(name, state, answer, evidence, own_prices if shipped else "" if sure else goodput["command"])


def _gap(m: Plan) -> str:
    effective, raw = m["per_million_effective_tokens"]["value"], m["per_million_output_tokens"]["value"]
    if effective is None or raw is None:
        return ""
    return f"{number(effective)} {m['currency']}, raw {number(raw)}"


def _band(f: Plan) -> str:
    if f["low"] is None:
        return "interval not known"
    return f"{number(f['low'])}–{number(f['high'])}"
