"""Waiting for a place: behind a limit or few long answers, for KV space, or because more comes than is finished."""

from __future__ import annotations

from whywait.judge.evidence import Evidence, Seen, ratio
from whywait.judge.verdict import Verdict
from whywait.units import ms, number, percent

ABSENT, PRESENT = 0.02, 0.10  # share of time below which a wait is ruled out, above which it is named
KV_ALL = 0.97
SHED = 0.05  # of the requests, ended with an error
GROWS = 2.0  # requests in the queue, and
GROWS_BY = 1.5  # times as many at the end as at the beginning
LONG_TIME, LONG_FEW = 0.6, 0.5  # long answers: this much of the service time by at most that much of the requests


def queue(e: Evidence) -> list[Verdict]:
    """One verdict of the worst point that matters and, where it is another, of the worst beyond; and where none is."""
    failing = [v for p in e.points if (v := _kv_errors(e, p)) is not None]
    known = [p for p in e.plain if p.known("queue")]
    quiet = [p for p in known if p.share["queue"] < ABSENT and not (p.preemptions or 0) and not outrun(p)]
    out = failing + (_none(quiet) if quiet else [])
    for p in known:
        if p.share["queue"] >= PRESENT or outrun(p) or _pushed(p):
            out += _cause(e, p)
    return out


def _none(quiet: list[Seen]) -> list[Verdict]:
    names = ", ".join(f"{p.target:g}" for p in quiet)
    claim = "No queue for a place at " + (
        f"concurrency {names}" if quiet[0].mode == "concurrency" else f"{names} requests/s"
    )
    last = quiet[-1]
    return [Verdict("slot limit", claim, "fails", last.share["queue"], where=last.name, how=last.how["queue"],
                    evidence=tuple(waited(p) for p in quiet[:3]), point=last.number)]  # fmt: skip


def waited(p: Seen) -> str:
    return (f"at {p.name} {percent(p.share['queue'])} of the requests' time is queue for a place "
            f"({ms(p.mean_ms['queue'])} of {ms(p.total_ms)}, {p.how.get('queue')})")  # fmt: skip


def outrun(p: Seen) -> bool:
    """More came than was finished: the number in the service grew all the while, by stamps of our own."""
    if p.mode == "concurrency":
        return False
    waiting, pending, ttft = p.gauges.get("waiting"), p.work.pending, p.work.ttft_growth
    by_stamps = pending is not None and pending[1] - pending[0] > 2 * GROWS and pending[1] > GROWS_BY * pending[0]
    by_gauge = waiting is not None and (waiting.growth or 0.0) > GROWS
    slower = ttft is not None and ttft[1] > GROWS_BY * ttft[0]
    return (by_stamps and slower) or (by_gauge and pending is None) or (by_gauge and by_stamps)


def _pushed(p: Seen) -> bool:
    return (p.preemptions or 0) > 0 or ((r := p.gauges.get("retracted")) is not None and r.high > 0)


def _facts(e: Evidence, p: Seen) -> list[str]:
    facts = [waited(p)]
    waiting, running, kv = p.gauges["waiting"], p.gauges["running"], p.gauges["kv_use"]
    if waiting is not None:
        trend = "" if waiting.growth is None else f", {waiting.growth:+.1f} from the first third to the last"
        facts.append(
            f"the engine's own queue held {waiting.mean:.1f} requests on average (max {waiting.high:.0f}{trend})"
        )
    if running is not None:
        limit = e.engine.get("slots")
        facts.append(f"{running.mean:.1f} requests were in work on average (max {running.high:.0f}"
                     + (f" of {limit} places)" if limit else ")"))  # fmt: skip
    if kv is not None:
        facts.append(f"KV space was {percent(kv.mean)} full on average, up to {percent(kv.high)}")
    return facts


def _cause(e: Evidence, p: Seen) -> list[Verdict]:
    if outrun(p):
        return [_rate(e, p)]
    if (found := _kv(e, p)) is not None:
        return [found]
    return _limit(e, p)


def _rate(e: Evidence, p: Seen) -> Verdict:
    facts = _facts(e, p)
    if p.work.pending is not None:
        facts.append(f"requests in flight grew from {p.work.pending[0]:.1f} (first third) to {p.work.pending[1]:.1f}")
    if p.work.ttft_growth is not None:
        facts.append(f"time to first token went from {ms(p.work.ttft_growth[0])} to {ms(p.work.ttft_growth[1])}")
    done = p.summary.get("requests_per_s")
    if done:
        facts.append(f"{number(done)} requests/s are finished, {p.target:g} come")
    gain = f"at up to about {number(done)} requests/s the queue does not grow" if done else "the queue no longer grows"
    share = max(p.share["queue"] + p.share["unknown"] * (not p.known("queue")), PRESENT)
    return Verdict(
        "rate beyond capacity",
        f"{p.target:g} requests/s outrun the service: its queue grows",
        "holds",
        share,
        where=p.name,
        how=p.how.get("queue", "measured"),
        evidence=tuple(facts),
        lever="less load, or more replicas",
        gain=gain,
        cost="another replica's price",
        next_step="whywait find URL --slo ... gives the highest rate that holds",
        point=p.number,
    )


def _kv(e: Evidence, p: Seen) -> Verdict | None:
    """Space for keys and values: requests pushed out of work, or waiting while it is full and places are free."""
    running, waiting, kv = p.gauges["running"], p.gauges["waiting"], p.gauges["kv_use"]
    limit = e.engine.get("slots")
    # Where the limit was not told, a number in work that never varies is one; full space makes it go up and down.
    below = running is not None and running.mean < 0.9 * (limit or running.high)
    blocked = p.kv_tight and below and waiting is not None and waiting.mean >= 0.5
    if not (_pushed(p) or (blocked and kv is not None and kv.mean >= 0.6)):
        return None
    recompute = p.causes.get("stall", {}).get("preemption/recompute", 0.0) * p.share["stall"]
    share = (p.share["queue"] if below or not limit else 0.0) + recompute
    facts = _facts(e, p)
    if _pushed(p):
        facts.append(f"{p.preemptions or 0:.0f} requests were pushed out of work and computed again")
    if share < ABSENT:
        return None
    claim = f"At {p.name} requests wait for KV space" + (" and are pushed out of it" if _pushed(p) else "")
    return Verdict("kv space", claim, "holds", share, where=p.name, how=p.how.get("queue", "derived"),
                   evidence=tuple(facts), lever=more_kv(e), point=p.number,
                   gain=f"up to {percent(share)} of the requests' time", cost="memory, or precision of the KV",
                   next_step="run once more with twice the space: preemptions and the queue should go")  # fmt: skip


def _kv_errors(e: Evidence, p: Seen) -> Verdict | None:
    """Some engines neither queue nor push out what does not fit: they end it with an error."""
    kv = p.gauges["kv_use"]
    broken = sum(x["n"] for x in p.summary.get("errors") or () if x["fault"] == "service" and x["outcome"] != "shed")
    share = broken / p.tried if p.tried else 0.0
    if kv is None or kv.high < KV_ALL or share < SHED:
        return None
    facts = (f"{broken} of {p.tried} requests ended with an error of the service",
             f"meanwhile KV space was up to {percent(kv.high)} full")  # fmt: skip
    return Verdict("kv space", f"At {p.name} requests fail because KV space is used up", "holds", share, of="requests",
                   where=p.name, how="inferred", evidence=facts, lever=more_kv(e), point=p.number,
                   gain="requests end instead of failing", cost="memory, or precision of the KV",
                   next_step="the engine's log at that time; then once more with twice the space")  # fmt: skip


def more_kv(e: Evidence) -> str:
    return "; ".join((e.by("more KV space", "kv_space"), e.by("smaller KV", "kv_dtype")))


def _limit(e: Evidence, p: Seen) -> list[Verdict]:
    running, waiting = p.gauges["running"], p.gauges["waiting"]
    told, seen = e.engine.get("slots"), e.seen_limit()
    limit = told or seen
    by_slots = p.causes.get("queue", {}).get("slot limit", 0.0)
    full = bool(limit and running and running.high >= limit and running.mean >= 0.75 * limit)
    facts = _facts(e, p)
    peak = (p.summary.get("in_flight") or {}).get("peak")
    if told and peak is not None and peak <= told and p.mode == "concurrency":
        why = f"never more than {peak:.0f} requests were in flight, and the engine has {told} places"
        facts = [why, waited(p).replace("queue for a place", "in its queue all the same"), *facts[1:]]
        claim = f"At {p.name} no request waits for a place: there is one for each"
        return [Verdict("slot limit", claim, "fails", p.share["queue"], where=p.name, how=p.how["queue"],
                        evidence=tuple(facts), point=p.number)]  # fmt: skip
    if not limit or not (by_slots > 0.5 or full or (not running and waiting is None and by_slots > 0)):
        claim = f"At {p.name} requests queue inside the engine; which limit holds them is not visible"
        step = f"start the engine by --launch, or look up its limit ({e.flag('slots') or 'sequences at once'})"
        return [Verdict("slot limit", claim, "undecided", p.share["queue"], where=p.name, how=p.how["queue"],
                        evidence=tuple(facts), next_step=step, point=p.number)]  # fmt: skip
    if not told:
        facts.append(f"never more than {limit} were in work while others waited, and KV space was not full (inferred)")
    claim = f"At {p.name} requests queue behind the engine's limit of {limit} at a time"
    lever = f"raise the limit: {e.flag('slots') or 'sequences at once'} (now {limit}{'' if told else ', inferred'})"
    verdict = Verdict("slot limit", claim, "holds", p.share["queue"], where=p.name,
                      how=p.how["queue"] if told else "inferred", evidence=tuple(facts),
                      against=tuple(_more_would(e, p, limit)), lever=lever, point=p.number,
                      gain=f"up to {percent(p.share['queue'])} of the requests' time",
                      cost="each step serves more sequences, and takes more KV space",
                      next_step=e.by("run once more with twice the places", "slots"))  # fmt: skip
    return [*_long(e, p, limit, facts), verdict]


def _long(e: Evidence, p: Seen, limit: int, facts: list[str]) -> list[Verdict]:
    w = p.work
    if not (w.long_share >= LONG_TIME and 0 < w.long_n <= LONG_FEW and w.output and w.long_answer):
        return []
    facts = [f"{percent(w.long_n)} of the requests, with answers of about {w.long_answer:.0f} tokens (the median is "
             f"{w.output:.0f}), hold the {limit} places {percent(w.long_share)} of the time", *facts]  # fmt: skip
    claim = f"At {p.name} few long answers hold the {limit} places that the others wait for"
    return [Verdict("long requests", claim, "holds", min(p.share["queue"] + 0.001, 1.0), where=p.name,
                    how=p.how["queue"], evidence=tuple(facts), point=p.number,
                    lever=f"cap the answers (max_tokens), give long ones a service of their own, or more places: "
                    f"{e.flag('slots') or 'sequences at once'}", gain="short requests no longer wait for long ones",
                    cost="long answers are cut, or wait elsewhere",
                    next_step="send the short class alone: its queue should vanish")]  # fmt: skip


def _more_would(e: Evidence, p: Seen, limit: int) -> list[str]:
    """What the batch's own scaling says a higher limit would buy."""
    single = e.single()
    full = [q.tokens_per_s for q in e.plain if q.tokens_per_s and q.mode == p.mode and q.target >= limit]
    gain = ratio(max(full, default=None), single.tokens_per_s) if single else None
    if gain is None or limit < 2 or gain > 0.6 * limit:
        return []
    return [f"{limit} at a time make only {gain:.1f}× the tokens/s of one: more places would turn much of this queue "
            "into slower decode rather than remove it"]  # fmt: skip
