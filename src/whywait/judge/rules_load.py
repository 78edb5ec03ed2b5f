"""The load: too little to fill the device, or so much that the service refuses some of it."""

from __future__ import annotations

from whywait.judge.evidence import Evidence, Seen, ratio
from whywait.judge.verdict import WORK, Verdict
from whywait.units import number, percent

NARROW = 4  # in flight: from one to fewer than this kernels change, so that no line leads to many more
UNUSED = 0.15  # of the throughput that is there
IDLE = 0.4  # of the device's time without any request
SHED = 0.02  # of the requests


def want_of_load(e: Evidence) -> list[Verdict]:
    """A device that could do more if more were asked of it."""
    p = e.focus
    if p is None:
        return []
    idle = p.device.get("idle_no_work", 0.0)
    limit, flight = e.limit(), p.in_flight or p.target
    facts = [f"at {p.name} the device has no request at all {percent(idle)} of the time",
             f"{flight:.1f} requests are in flight on average" + (f", of {limit} places" if limit else "")]  # fmt: skip
    base = Verdict("want of load", f"At {p.name} the device waits for load", "holds", idle, of="device time",
                   where=p.name, how="measured", evidence=tuple(facts), point=p.number, kind=WORK,
                   lever="send more at once, share the device, or take a smaller one",
                   gain="more tokens per second for the same price", cost="longer steps for each request",
                   next_step="whywait sweep URL --concurrency with more than now")  # fmt: skip
    if p.mode != "concurrency" and idle >= IDLE:
        return [base]
    if limit is not None and flight >= 0.75 * limit:
        full = f"its places are full: {flight:.1f} requests in flight, {limit} worked on at a time"
        return [_other(base, "fails", f"At {p.name} the batch is not short of load", (*facts, full))]
    waiting = p.gauges.get("waiting")
    if p.share["queue"] >= 0.1 or (waiting is not None and waiting.mean >= 1):
        waits = f"requests wait: {percent(p.share['queue'])} of their time is queue"
        return [_other(base, "fails", f"At {p.name} the batch is not short of load", (*facts, waits))]
    low = e.lower(p)
    if low is None:
        return [_other(base, "undecided", "Whether more load would fill the device is not known", tuple(facts))]
    return _scaled(e, p, low, base)


def _scaled(e: Evidence, p: Seen, low: Seen, base: Verdict) -> list[Verdict]:
    """What throughput did from a smaller load to this one says what a larger would do: steps of shared + n x each."""
    gain, grown = ratio(p.tokens_per_s, low.tokens_per_s), ratio(p.in_flight or p.target, low.in_flight or low.target)
    if gain is None or grown is None or grown < 1.5:
        return [_other(base, "undecided", "Whether more load would fill the device is not known", base.evidence)]
    fact = (f"{grown:.1f} times as many in flight as at {low.name} make {gain:.2f} times the tokens/s "
            f"({number(p.tokens_per_s)} against {number(low.tokens_per_s)})")  # fmt: skip
    n = p.in_flight or p.target
    # T(n) = n / (s + n e): with a load k times as large T grows by k (s + m e) / (s + k m e); s / (m e) follows.
    s = (gain - 1) / (1 - gain / grown) if gain < grown else float("inf")
    room = min(e.limit() or 2 * n, _held(p, n))
    m = n / grown
    reach = room / m
    best = reach if s == float("inf") else reach * (s + 1) / (s + reach)
    unused = 1 - gain / best if best > gain else 0.0
    facts = (*base.evidence, fact)
    if unused < UNUSED and n < NARROW and room >= 2 * n:
        claim = f"So few in flight do not tell what {room:.0f} at once would make"
        return [_other(base, "undecided", claim, facts, unused)]
    if unused < UNUSED:
        return [_other(base, "fails", f"At {p.name} more load would gain little ({percent(unused)})", facts, unused)]
    claim = f"At {p.name} the batch is small for want of load: {percent(unused)} less than with {room:.0f} at once"
    return [
        Verdict(
            base.cause,
            claim,
            "holds",
            max(unused, base.share or 0.0),
            of="device throughput",
            where=p.name,
            how="modelled",
            evidence=facts,
            lever=base.lever,
            gain=base.gain,
            cost=base.cost,
            next_step=f"measure concurrency {room:.0f}",
            point=p.number,
            kind=WORK,
        )
    ]


def _held(p: Seen, n: float) -> float:
    """How many requests like these the KV space holds, by what ``n`` take of it; no bound where that is not read."""
    kv = p.gauges.get("kv_use")
    return n / kv.mean if kv is not None and kv.mean > 0 else float("inf")


def _other(v: Verdict, state: str, claim: str, facts: tuple[str, ...], share: float | None = None) -> Verdict:
    return Verdict(v.cause, claim, state, v.share if share is None else share, of=v.of, where=v.where, how="inferred",
                   evidence=facts, next_step="" if state == "fails" else "measure a second concurrency: "
                   "whywait sweep URL --concurrency 1,8", point=v.point, kind=WORK)  # fmt: skip


def shedding(e: Evidence) -> list[Verdict]:
    """Requests refused at the door. (429 and 503; other errors are failures, not waiting.)"""
    out = []
    for p in e.points:
        counts = p.summary.get("counts") or {}
        tried = sum(n for k, n in counts.items() if k not in ("never_sent", "censored", "cancelled"))
        shed = counts.get("shed", 0)
        share = shed / tried if tried else 0.0
        if not tried and p.rejected and p.ok:
            share, shed = p.rejected / (p.rejected + p.ok), round(p.rejected)
        if share < SHED:
            continue
        facts = [f"{shed} of {tried or shed + p.ok} requests were refused ({percent(share)}; 429 or 503)"]
        if p.rejected:
            facts.append(f"the engine itself counts {p.rejected:.0f} refusals")
        elif p.rejected is not None:
            facts.append("the engine itself refused none: something before it does")
        out.append(
            Verdict(
                "load shedding",
                f"At {p.name} {percent(share)} of the requests are refused",
                "holds",
                share,
                of="requests",
                where=p.name,
                evidence=tuple(facts),
                point=p.number,
                lever=f"raise what is admitted: {e.flag('queue_limit') or 'the limit of the gateway'}; or "
                "less load, or more replicas",
                gain="requests wait instead of being refused",
                cost="a longer queue",
                next_step="look up who answers 429: the engine's log or the gateway's",
            )
        )
    return out
