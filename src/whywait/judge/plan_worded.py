"""Sentences of a plan that the terminal, the page and the five questions share. Pure: a plan as JSON values in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whywait.core.workload import RequestClass
from whywait.units import number, percent

Plan = Mapping[str, Any]
MOST = 3


def load(p: Plan) -> str:
    """How long prompts and answers are, and by whose word: defaults are nobody's load."""
    w, classes, plain = p["workload"], p["inputs"]["workload"]["classes"], RequestClass()
    p50 = [f"{w[k]['p50']:,.0f}" for k in ("prompt_tokens", "output_tokens")]
    lengths = f"prompts p50 {p50[0]} and answers p50 {p50[1]} tokens"
    nobody = all(str(c[k]) == str(getattr(plain, k)) for c in classes for k in ("prompt_tokens", "output_tokens"))
    if w["kind"] not in ("recipe", "stages") or not nobody:
        return lengths + (f" ({w['file']})" if w["file"] else "")
    return (f"prompts of {p50[0]} and answers of {p50[1]} tokens, which is the default and nobody's "
            "load (--workload, --prompt-tokens, --output-tokens)")  # fmt: skip


def looked(p: Plan) -> str:
    """How many kinds of engine were simulated whole, where not all that can do it were."""
    c = p["counts"]
    if c["in_draws"] >= c["sized"]:
        return ""
    return (f"looked at closely: {c['in_draws']} of the {c['sized']} kinds of engine that can do it; another may be as "
            "good (fewer --machines, --engines, --layouts or --apply look at more of each)")  # fmt: skip


def hour(p: Plan, r: Plan) -> str:
    """What an hour of a candidate is: paid, used or not, and of use where that is another amount."""
    money, paid, used = p["basis"]["currency"], r["paid"], r["hourly"]
    if paid is None or used is None:
        return f"an hour of it in {money} is not known"
    if paid >= 0.9995 * used:
        return f"{number(paid)} {money} an hour"
    return f"{number(paid)} {money} an hour paid, {number(used)} an hour of use (utilisation {percent(paid / used)})"


def offer(machine: str, o: Plan | None) -> str:
    """An offer with both hours, its terms, date and source."""
    if o is None:
        return f"{machine}: no offer in the price book"
    return f"{machine}: {device_hour(o)}, {o['terms']}, {o['name']} ({o['date']}; {o['source']})"


def device_hour(o: Plan) -> str:
    price = f"{number(o['paid_per_device_hour'])} {o['currency']} a device-hour"
    if o["utilisation"] == 1:
        return price
    return f"{price} paid, {number(o['per_device_hour'])} one of use (utilisation {percent(o['utilisation'])})"


def none_first(p: Plan) -> str:
    """Why no candidate is first, and what would be beyond the budget."""
    said = (
        f"No candidate may be ranked first{within(p)}: none surely keeps the SLO with tested answers and a known price"
    )
    return said + beyond(p)


def within(p: Plan) -> str:
    budget = p["want"]["budget"]
    return "" if budget is None else f" within {number(budget)} {p['basis']['currency']} an hour paid"


def beyond(p: Plan) -> str:
    """The cheapest that surely does where the budget is not asked; empty where there is no budget."""
    if p["want"]["budget"] is None:
        return ""
    best = p["beyond_budget"]
    if best is None:
        return "; beyond it none does either"
    return f"; beyond it the cheapest that does is {best['name']}: {hour(p, best)}"


def if_tested(p: Plan) -> str:
    """What tested answers of the cheapest narrow numbers would change."""
    name = p["untested"][0]
    if p["first"] is not None:
        return f"{name} would cost less than the first"
    paid = next(r for r in p["rows"] if r["name"] == name)
    return f"{name}, at {hour(p, paid)}, surely keeps the SLO and would be first if its answers were tested and held"


def tied(p: Plan, first: Plan) -> tuple[str, list[str]]:
    """What a tie with the first is about, and those that tie, each with what is paid an hour for the size listed."""
    others = [r for r in p["rows"] if r["tie"] and r["shape"] != first["shape"]]
    sizes = any("run" not in r for r in (first, *others))  # of what is simulated the size is not sure
    why = "inside the error of how many each needs" if sizes else "inside the error"
    return why, [f"{r['name']} ({number(r['paid'])})" for r in others]


def tie(p: Plan, first: Plan) -> str:
    why, others = tied(p, first)
    if not others:
        return ""
    more = f" and {len(others) - 2} more" if len(others) > 2 else ""
    return f"; a tie, {why}, with {', '.join(others[:2])}{more}"


def grown(p: Plan, first: Plan) -> str:
    """Whether the first is enough for the growth that was said; empty where none was."""
    want, share = p["want"], first["growth"]
    if not want["growth"]:
        return ""
    more = f"the growth of {percent(want['growth'])}"
    if share is None:
        return f"; whether it takes {more} was not simulated"
    if share >= want["share"]:
        return f"; it takes {more}"
    return (f"; not enough for {more}, at which {percent(share)} of the requests are good (--rate "
            f"{want['rate'] * (1 + want['growth']):g} plans for it)")  # fmt: skip


def whole_nodes(p: Plan) -> str:
    """What whole nodes come to, for the first and those that tie with it; empty where they fill theirs."""
    told = [r for r in p["rows"] if r["name"] == p["first"] or r["tie"]] or p["rows"][:1]
    parts = [(r, w) for r in told[:MOST] if (w := r["whole_nodes"])]
    if not parts:
        return ""
    said = "; ".join(f"{r['name']}: of nodes of {w['node']}, {w['devices']} paid for {r['devices']}, "
                     f"{number(w['paid'])} {p['basis']['currency']} an hour" for r, w in parts)  # fmt: skip
    if all(w["included"] for _, w in parts):
        return f"sold by node, which is in every figure: {said}"
    return f'where only whole nodes can be had: {said} (sold_by = "node" in a price book counts so)'


def utilisation(p: Plan) -> str:
    """The share of the hours paid for that are of use, of the offers compared by; empty where all of them are."""
    shares = sorted({o["utilisation"] for o in p["basis"]["offers"].values() if o})
    if not shares or shares[0] == 1:
        return ""
    return f"utilisation {' to '.join(dict.fromkeys((percent(shares[0]), percent(shares[-1]))))}"
