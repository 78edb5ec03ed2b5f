"""A plan as text for a terminal, and as rows of CSV: the answer first, then the candidates, then what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whywait.judge.plan_answers import limits
from whywait.judge.plan_told import SHORT, changed, foot, made
from whywait.judge.plan_worded import if_tested, load, looked, utilisation, whole_nodes
from whywait.report.text import console
from whywait.units import ms, number, percent

Plan = Mapping[str, Any]
MARK = {"answered": ("●", "bold green"), "in part": ("◐", "yellow"), "open": ("○", "bold red")}
KEEPS = {"holds": "yes", "undecided": "maybe", "fails": "no"}
MOST_ROWS, MOST_REFUSED, MOST_DOUBTS, MOST_EVIDENCE, MOST_NEVER = 12, 3, 4, 5, 3
CSV_HEAD = (
    "rank", "candidate", "kind", "machine", "devices", "replicas", "engine", "layout", "techniques", "keeps_slo",
    "quality", "tie", "front", "dominated_by", "per_hour", "paid_per_hour", "currency",
    "whole_nodes_devices", "whole_nodes_paid_per_hour",
    "cost_per_1000_good", "cost_low", "cost_high",
    "goodput_per_s", "goodput_low", "goodput_high", "share", "ttft_p95_ms", "tpot_p95_ms", "j_per_good", "j_low",
    "j_high", "headroom", "keeps_without_a_node", "basis", "calibrated_by", "terms", "prices_of",
    "price_source",
)  # fmt: skip


def csv_rows(p: Plan) -> Iterator[list[Any]]:
    """A row of ``CSV_HEAD`` per candidate that was looked at closely."""
    for row in p["rows"]:
        r = {**row.get("served", {}), **row}  # of a run: what it says it measured
        f = r["figures"]
        yield [
            r["rank"], r["name"], r["kind"], r["machine"], r["devices"], r["replicas"], r.get("engine"),
            r.get("layout"), r.get("apply"), r["meets"], r["quality"], r["tie"], r["front"], r["dominated_by"],
            r["hourly"], r["paid"], p["basis"]["currency"], *_whole(r),
            *(f["cost"][k] for k in ("value", "low", "high")),
            *(f["goodput"][k] for k in ("value", "low", "high")), f["share"]["value"], f["ttft_ms_p95"]["value"],
            f["tpot_ms_p95"]["value"], *(f["energy"][k] for k in ("value", "low", "high")), r["headroom"],
            r["loss"]["keeps"] if r["loss"] else None, r["basis"], r["calibrated_by"],
            *(o[k] if (o := p["basis"]["offers"].get(r["machine"])) else None for k in ("terms", "date", "source")),
        ]  # fmt: skip


def _whole(r: Plan) -> tuple[int, float | None]:
    """Devices of the nodes it is on, and what is paid an hour for all of them."""
    w = r["whole_nodes"]
    return (w["devices"], w["paid"]) if w else (r["devices"], r["paid"])


def print_plan(p: Plan, directory: str, out: Console | None = None) -> None:
    out = out or console()
    out.print(Text(f"\n{p['headline']}", style="bold"))
    for line in filter(None, (asked(p), money(p), whole_nodes(p), looked(p), made(p), changed(p))):
        out.print(Text(line, style="dim"))
    out.print()
    out.print(_table(p))
    for line in marks(p):
        out.print(Text(f"  {line}", style="dim"))
    out.print(Text("\nThe five questions", style="bold"))
    for i, q in enumerate(p["questions"], 1):
        sign, style = MARK[q["state"]]
        out.print(
            Text.assemble(
                (f"{sign} ", style), (f"{i}. {q['question']} ", "bold"), (f"{q['state']}: ", style), q["answer"]
            )
        )
        for line in q["evidence"][:MOST_EVIDENCE]:
            out.print(Text(f"     {line}", style="dim"))
        if len(q["evidence"]) > MOST_EVIDENCE:
            out.print(Text(f"     … {len(q['evidence']) - MOST_EVIDENCE} more in plan.html", style="dim"))
        if q["command"]:
            out.print(Text(f"     → {q['command']}", style="cyan"))
    _section(out, "What would turn it over", turning(p))
    _section(out, "The cheapest experiment that could change the decision", experiment(p))
    _section(out, "How it was screened", screening(p))
    _section(out, "What it rests on", resting(p, True))
    out.print(Text(f"\nkept in {directory}: plan.html (the argument), plan.json, plan.csv"))


def asked(p: Plan) -> str:
    w = p["want"]
    said = f"{p['model']['name']} at {number(w['rate'])} requests/s, {load(p)}; {percent(w['share'])} "
    said += f"of them within {limits(w)}"
    return said + (f"; at most {number(w['budget'])} {p['basis']['currency']} an hour paid" if w["budget"] else "")


def money(p: Plan) -> str:
    """Currency, terms and date of every amount."""
    b = p["basis"]
    dates = sorted({o["date"] for o in b["offers"].values() if o})
    if not dates:
        return f"money: no price is known in {b['currency']} by terms {b['terms']} (--price, --terms)"
    terms = "by terms that differ" if b["mixed"] else b["terms"]
    whose = "" if p["inputs"].get("own_prices") else ", estimates and lists that ship with whywait"
    terms += f", {used}" if (used := utilisation(p)) else ""
    return f"money: {b['currency']}, {terms}, prices of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}{whose}"


def rows_of(p: Plan) -> list[list[str]]:
    """Candidate, keeps SLO, what it rests on, answers, money paid an hour, per 1,000 good, good/s, TTFT, TPOT, J,
    headroom, a node lost."""
    out = []
    for r in p["rows"]:
        f = r["figures"]
        out.append([
            _sign(p, r) + r["name"], KEEPS[r["meets"]], r["basis"], r["quality"], number(r["paid"]),
            _with(f["cost"], number), number(f["goodput"]["value"]), ms(f["ttft_ms_p95"]["value"]),
            ms(f["tpot_ms_p95"]["value"]), number(f["energy"]["value"]), _headroom(r), _node(r),
        ])  # fmt: skip
    return out


HEAD = ("candidate", "SLO kept", "from", "answers", "paid per hour", "per 1,000 good", "good/s", "TTFT p95", "TPOT p95",
        "J per good", "headroom", "a node less")  # fmt: skip


def _table(p: Plan) -> Table:
    """A row per kind of engine, at the size that ranks best; the rest is in the files."""
    head = ("candidate", "SLO", "from", "answers", f"{p['basis']['currency']}/h", "/1k good", "80 %", "TTFT", "TPOT",
            "room", "−node")  # fmt: skip
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=True, header_style="bold")
    for i, name in enumerate(head):
        table.add_column(
            name,
            justify="left" if i < 4 else "right",
            no_wrap=i > 0,
            max_width=30 if not i else None,
            style="dim" if name == "80 %" else "",
        )
    for r in shown(p):
        f = r["figures"]
        c = f["cost"]
        band = "" if c["low"] is None or c["value"] is None else f"{c['low']:.2g}–{c['high']:.2g}"
        quality = "–" if r["quality"] == "as published" else "tested" if r["quality"] == "holds" else r["quality"]
        late = [number(f[k]["value"]) for k in ("ttft_ms_p95", "tpot_ms_p95")]
        cells = [_sign(p, r) + r["name"], KEEPS[r["meets"]], SHORT[r["basis"]], quality, number(r["paid"]),
                 number(c["value"]), band, *late, _headroom(r), _node(r)]  # fmt: skip
        table.add_row(*(Text(x) for x in cells))
    return table


def shown(p: Plan, most: int = MOST_ROWS) -> list[Plan]:
    """Of each kind of engine the size that ranks best, so many at most: those that may be first, then the others."""
    best: dict[str, Plan] = {}
    for r in p["rows"]:
        best.setdefault(r["shape"], r)
    found = list(best.values())
    able, never = ([r for r in found if r["eligible"] is x] for x in (True, False))
    some = min(MOST_NEVER, len(never))  # of those that may not be first a few are seen: they may be cheaper
    head = able[: most - some]
    return head + never[: most - len(head)]


def _node(r: Plan) -> str:
    return "–" if not r["loss"] else "keeps" if r["loss"]["keeps"] else percent(r["loss"]["share"])


def _sign(p: Plan, r: Plan) -> str:
    return "▶ " if r["name"] == p["first"] else "= " if r["tie"] else "× " if r["dominated_by"] else "  "


def _headroom(r: Plan) -> str:
    if r["headroom"] is None:
        return "–"
    return f"{'≥ ' if r['headroom_open'] else ''}{percent(r['headroom'])}" if r["headroom"] else "< 10 %"


def _with(f: Plan, show: Callable[[float | None], str]) -> str:
    if f["low"] is None or f["value"] is None:
        return show(f["value"])
    low, high = show(f["low"]), show(f["high"])
    if low == high == show(f["value"]):
        return low
    plain, _, unit = low.rpartition(" ")
    if unit and plain and high.endswith(f" {unit}"):
        low = plain
    return f"{show(f['value'])} ({low}–{high})"


def marks(p: Plan, page: bool = False) -> list[str]:
    """What the signs before the candidates mean, and what is left out; ``page``: where words are not cut short."""
    out = []
    if p["first"]:
        out.append(
            "▶ first by cost, of those that keep the SLO in 90 % of the draws, answers as published or tested; "
            "80 %: what it costs with as many as it turns out to need"
        )
    if p["first"] and not page:
        out.append(f"{p['basis']['currency']}/h: paid, used or not; /1k good: per 1,000 good requests, by the hours of "
                   "use; TTFT and TPOT: 95th percentile, ms; answers: – as published; "
                   "room: for more load; −node: share of good requests without one node")  # fmt: skip
    out += ["in brackets: 80 % of the draws; TTFT and TPOT: 95th percentile"] if page else foot(p)
    if p["ties"]:
        out.append("= a tie with the first: with as many of each as it turns out to need, the difference is inside the "
                   "error (listed are sizes that surely do)")  # fmt: skip
    if any(r["dominated_by"] for r in p["rows"]):
        out.append(
            "× dominated: nowhere better than another one, surely worse in one of cost, goodput, latency, energy"
        )
    if len(p["rows"]) > len(shown(p)) and not page:
        out.append(f"{len(p['rows']) - len(shown(p))} more candidates (other sizes and kinds), and joules, in plan.csv")
    front = [r["name"] for r in p["rows"] if r["front"]]
    names = ", ".join(front[:5]) + (" …" if len(front) > 5 else "")
    out.append(f"Pareto front (cost, goodput, latency, energy): {len(front)} of {len(p['rows'])}: {names}")
    doubts = [f"{r['name']}: {d}" for r in shown(p) for d in r["doubts"]]
    return out + doubts[:MOST_DOUBTS] + (["… and more of that kind in plan.json"] if len(doubts) > MOST_DOUBTS else [])


def turning(p: Plan) -> list[str]:
    s = p["sensitivity"]
    if p["first"] is None:
        return ["nothing is first, so no assumption was moved"]
    flips = [f for f in s["flips"] if f["flips"]]
    stay = [f"{f['assumption']} {f['by']}" for f in s["flips"] if not f["flips"]]
    out = [f"{f['assumption']} {f['by']}: {f['first'] or f['note']}" + _ahead(f)
           for f in flips]  # fmt: skip
    if not flips:
        out.append("none of the assumptions that were moved puts another one first")
    if stay:
        out.append(f"unmoved by {', '.join(stay)}")
    for b in s["break_even"]:
        moved = f"{b['factor'] - 1:+.0%}".replace("%", " %").replace("-", "−")
        out.append(f"{b['machine']} draws level with the first if its price moves by {moved}")
    return out + [f"{x['assumption']}: not tried, {x['why']}" for x in s["skipped"]]


def _ahead(f: Plan) -> str:
    if f["first"] is None or f["margin"] is None:
        return " is first" if f["first"] else ""
    return " is first, level with the next" if f["margin"] < 0.005 else f" is first, {percent(f['margin'])} ahead"


def experiment(p: Plan) -> list[str]:
    money, out = p["basis"]["currency"], []
    for e in p["experiments"][:2]:
        if e["change"] < 0.05:
            continue
        price = "" if e["costs"] is None else f", about {number(e['costs'])} {money}"
        what = f"measure one replica of {e['shape']} ({_devices(e['devices'])} for {e['hours']:g} h{price})"
        out.append(f"{what}: it changes the decision with probability {percent(e['change'])} and saves "
                   f"{number(e['saves'])} {money} an hour of use in the mean")  # fmt: skip
        out.append(f"{e['serve']} (one replica of {e['replicas']}), then")
        out += [f"→ {e['command']}", f"→ {e['then']}"]
    if p["untested"]:
        narrow = next("+".join(r["narrow"]) for r in p["rows"] if r["name"] == p["untested"][0])
        out.append(f"compare the answers (one engine of each kind): {if_tested(p)}")
        out.append(f"→ whywait quality URL-A URL-B --load --out DIR, then whywait plan … --quality {narrow}=DIR")
    return out or ["none of those looked at would change it with a probability of 5 % or more"]


def _devices(n: int) -> str:
    return "1 device" if n == 1 else f"{n} devices"


def screening(p: Plan) -> list[str]:
    c, draws = p["counts"], p["inputs"]["draws"]
    out = [
        f"{c['candidates']:,} candidates ({c['shapes']:,} kinds of engine, so many of each as come in question)",
        f"by what holds the model and can be dealt out: {c['refused']} kinds out",
        f"by an optimistic bound on their rate: {c['by_bound']} kinds out; {c['by_cost']} more since even by it they "
        "cost over twice the best (a quicker one at twice the price may be lost by that)",
        *([f"by the budget: {c['by_budget']} kinds out"] if p["want"]["budget"] is not None else []),
        f"by one replica at its share of the rate: {c['too_small']:,} sizes too small, {c['larger_than_needed']:,} "
        f"larger than needed, {c['not_at_any_size']} kinds at no size",
        f"{c['in_draws']} of {c['sized']} kinds went on (of each machine and engine the cheapest, the quickest), "
        f"simulated whole in {draws} draws of what is not known; {c['points_simulated']:,} load points in all",
    ]
    for r in p["refused"][:MOST_REFUSED]:
        out.append(f"cannot be: {r['name']}: {r['why']}")
    if len(p["refused"]) > MOST_REFUSED:
        out.append(f"… and {len(p['refused']) - MOST_REFUSED} more in plan.json")
    return out


def resting(p: Plan, brief: bool = False) -> list[str]:
    """``brief``: where data sheets are from is said in the page."""
    out = list(dict.fromkeys(f"{r['group']}: {r['prior']}" for r in p["rows"] if r.get("prior")))
    out += list(dict.fromkeys(r["known_error"] for r in p["rows"] if r.get("known_error")))
    if brief:
        out.append("data sheets and prices: each with its source and date in plan.html")
    for m in () if brief else p["catalogue"]:
        out.append(f"{m['name']}: {m['source']}; read {m['read_in']}")
    if p["basis"]["mixed"]:
        out.append("the terms of the prices differ between machines: no terms has an offer for all (--terms, --price)")
    out += [
        f"no price for {m} in {p['basis']['currency']}: it cannot be ranked by cost" for m in p["basis"]["unpriced"]
    ]
    out += [u for run in p["runs"] for u in run["unused"]]
    return out


def _section(out: Console, title: str, lines: list[str]) -> None:
    out.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        out.print(Text(f"  {line}", style="cyan" if line.startswith("→") else ""))
