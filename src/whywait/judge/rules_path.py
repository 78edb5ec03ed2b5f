"""Between client and engine: the network, something that buffers, and this client itself."""

from __future__ import annotations

from dataclasses import replace

from whywait.judge.evidence import Evidence, Seen
from whywait.judge.verdict import MATTERS, Verdict
from whywait.units import ms, percent

PRESENT = 0.05  # of the requests' time
UNSEEN = 0.1  # cores: an engine that is not read, or a proxy in its place
TOKENISE_MS = 0.1  # a token of the prompt, by slow tokenisers: what a frontend may take of a constant cost
TIGHT = 1.5  # median over 5th percentile of a cost that is the same for every request
ENOUGH = 5  # requests
FLOOR_MS = 20.0  # a constant cost below this is what any stack takes
WITH_FIRST = 0.3  # of the requests, whose first token came with others
TOGETHER = 0.5  # of the chunks in one read with the one before
LATE = 0.5  # of the coalesced reads, while our own loop was late
LAG_MS = 5.0, 60.0  # our own loop read this late: median, p99 (which must exceed the usual gap between tokens too)
#: Or others used that many cores, and it hardly ever had one when it wanted: then a lesser delay is no accident. (Where
#: engine and client merely share cores, the client waits as much.)
HARDLY, HARDLY_MS, OTHERS = 0.8, (1.0, 10.0), 0.5
BUNCHES, BUNCHES_MS = 0.3, 5.0  # of the usual gap between tokens (which may not be known); at p99
STARVED = 0.5  # of the time our own loop wanted a core


def path(e: Evidence) -> list[Verdict]:
    out = []
    for p in e.plain or e.points:
        sick = client(e, p)
        held = [] if sick else buffering(e, p)
        far = _far(p)
        if far and held and held[0].share == PRESENT:
            held = []  # a path that varies bunches what it delays: there is nothing that is held for long
        out += sick + held + ([] if sick else network(e, p, bool(held) and not far))
    return out


def client(e: Evidence, p: Seen) -> list[Verdict]:
    """Our own loop sent or read late: then what it saw says as much of it as of the service."""
    s, facts = p.streams, []
    gap = s.engine_gap_ms or p.step_ms or 0.0
    lag = e.lag_ms or (0.0, 0.0)
    slow = lag[0] >= LAG_MS[0] or lag[1] >= max(LAG_MS[1], gap)
    hardly = (p.client_lost or 0.0) >= HARDLY and (p.neighbours or 0.0) >= OTHERS
    slow = slow or (hardly and lag[0] >= HARDLY_MS[0] and lag[1] >= HARDLY_MS[1])
    starved = p.client_lost is not None and p.client_lost >= STARVED
    # Being late can only bring together what lies closer than that.
    late_enough = lag[1] >= max(BUNCHES_MS, BUNCHES * gap)
    bunched = (s.together or 0.0) >= 0.1 and (e.late_reads or 0.0) >= LATE and late_enough
    if p.client_lost is not None:
        facts.append(f"this client's loop was ready without a core {percent(p.client_lost)} of the time it wanted one")
    if e.lag_ms is not None:
        facts.append(f"it read {ms(e.lag_ms[0])} (median) and {ms(e.lag_ms[1])} (p99) after data had come")
    if s.together:
        facts.append(f"{percent(s.together)} of the chunks came in one read with the one before")
    late = p.share["client"] if _own_lag(p) else 0.0
    if not (late >= 0.1 or (starved and (slow or bunched))):
        return []
    # What it read late, of the usual gap: of a skewed spread the mean lies between median and p99.
    behind = min(p.client_lost or 0.0, (lag[0] * lag[1]) ** 0.5 / gap if gap else 1.0) if starved else 0.0
    share = min(max(late, s.together or 0.0, behind, MATTERS), 1.0)
    if late >= 0.1:
        facts.append(f"requests were sent {ms(p.mean_ms['client'])} after they were due")
    return [Verdict("the client itself", f"At {p.name} this client is short of CPU: what it saw is its own delay too",
                    "holds", share, where=p.name, how="derived", evidence=tuple(facts), point=p.number,
                    lever="give whywait cores of its own, lower the load, or more --processes",
                    gain="the figures become the service's own", cost="another core for the client",
                    next_step="run the client on an idle machine or core and repeat")]  # fmt: skip


def _own_lag(p: Seen) -> bool:
    """Whether late sends are this client's doing: a cap on the requests in flight was asked for."""
    o = p.summary.get("offered") or {}
    own, limit = o.get("client_lag_ms"), o.get("lag_limit_ms")
    return own is None or limit is None or own > limit


def buffering(e: Evidence, p: Seen) -> list[Verdict]:
    """Tokens that the engine made one by one arrive together, though our loop was in time."""
    s = p.streams
    if s.together is None or s.chunks is None or s.bursts is None or s.chunks < 4:
        return []
    held = p.causes.get("decode", {}).get("buffering", 0.0) * p.share["decode"]
    together = s.together >= TOGETHER and s.bursts <= 0.5 * s.chunks
    if not together or ((e.late_reads or 0.0) >= LATE and s.together < 0.8):
        return []
    # Accepted drafts come together too, but the first token, which the prefill makes, comes alone.
    drafted = 0.0
    if p.draft is not None and p.draft.rounds:
        drafted = p.draft.accepted / (p.draft.accepted + p.draft.rounds)
    alone = not held and s.with_first is not None and s.with_first < WITH_FIRST
    if alone and s.together <= drafted + 0.1:
        return []
    facts = [f"{percent(s.together)} of the chunks came in one read with the one before: {s.bursts:.0f} reads for "
             f"{s.chunks:.0f} chunks of a request"]  # fmt: skip
    if s.first_share is not None:
        facts.append(f"the first token came after {percent(s.first_share)} of the end-to-end time")
    if held:
        facts.append(f"the engine was decoding for {percent(held)} of the requests' time before anything arrived")
    elif s.engine_gap_ms:
        facts.append(f"the engine made a token every {ms(s.engine_gap_ms)}")
    if e.lag_ms is not None:
        facts.append(f"this client was in time: it read {ms(e.lag_ms[1])} late at p99")
    # What is held waits for what comes with it: no longer than the engine takes to make so many.
    hold = _hold_ms(p)
    share = max(held, PRESENT, min((s.first_share or 0.0) * s.together * _decoding(p),
                                   1.0 if hold is None else hold / max(p.total_ms, 1e-9)))  # fmt: skip
    if alone and p.draft is None and not e.paged:
        claim = f"At {p.name} tokens arrive together, though the first comes alone: a path that holds them, or drafts"
        return [Verdict("buffering proxy", claim, "undecided", share, where=p.name, evidence=tuple(facts),
                        next_step="measure the engine's own address, past the proxy", point=p.number)]  # fmt: skip
    return [
        Verdict(
            "buffering proxy",
            f"At {p.name} something on the path holds tokens back and hands them on together",
            "holds",
            min(share, 1.0),
            where=p.name,
            how="measured",
            evidence=tuple(facts),
            point=p.number,
            lever="turn response buffering off where the stream passes (nginx: proxy_buffering off, or the "
            "header X-Accel-Buffering: no)",
            gain="tokens appear when they are made; end-to-end time stays",
            cost="more, smaller packets",
            next_step="measure the engine's own address, past the proxy",
        )
    ]


def _hold_ms(p: Seen) -> float | None:
    s = p.streams
    gap = s.engine_gap_ms or s.client_gap_ms  # on the whole tokens arrive as they are made, but for the first burst
    return None if not gap or not s.chunks else gap * s.chunks / max(s.bursts or 1.0, 1.0)


def _far(p: Seen) -> bool:
    """Whether every request pays more outside the engine than holding its tokens together explains."""
    low, hold = p.streams.outside_ms[0] if p.streams.outside_ms else None, _hold_ms(p)
    return low is not None and hold is not None and low > FLOOR_MS + 1.5 * hold


def _decoding(p: Seen) -> float:
    """The part of the requests' time that the engine, as far as it says, decoded; all but prefill and queue else."""
    return max(1.0 - p.share["queue"] - p.share["prefill"] - p.share["turn"], 0.0)


def network(e: Evidence, p: Seen, buffered: bool) -> list[Verdict]:
    """A cost that every request pays outside the engine, whatever the load, while the gaps between tokens stay."""
    measured = p.share["network"]
    low = p.streams.outside_ms[0] if p.streams.outside_ms else None
    out = []
    if measured >= PRESENT and p.mean_ms["network"] >= FLOOR_MS / 4:
        fact = f"connecting and one round trip take {ms(p.mean_ms['network'])} of {ms(p.total_ms)} (TCP_INFO)"
        out.append(_latency(p, measured, "measured", [fact]))
    elif low is not None and not buffered and low >= FLOOR_MS and low / max(p.total_ms, 1e-9) >= PRESENT:
        out += _hidden(e, p, low)
    return out


def _hidden(e: Evidence, p: Seen, low: float) -> list[Verdict]:
    """The round trip that TCP shows is small (a proxy answers), yet every request takes longer outside the engine."""
    assert p.streams.outside_ms is not None
    _, mid, high = p.streams.outside_ms
    facts = [f"from sending to the first token {ms(low)} (5 % of requests less), {ms(mid)} (median), {ms(high)} (95 %) "
             "are in neither queue nor prefill"]  # fmt: skip
    base = e.single()
    constant = True
    if base is not None and base.number != p.number and base.streams.outside_ms:
        alone = base.streams.outside_ms[1]
        facts.append(f"at {base.name}, where nothing can wait, it is {ms(alone)} too" if alone >= low / 2
                     else f"at {base.name} it is {ms(alone)} only")  # fmt: skip
        constant = alone >= 0.5 * low
    explained = p.known("prefill") and p.known("queue")
    busy = _serving(p, low)
    if not constant or not explained or mid > TIGHT * low or p.ok < ENOUGH or (busy is not None and busy >= 0.5):
        return []
    if busy is not None:
        facts.append(
            f"the engine's serving threads used CPU for {percent(busy)} of that time: it did nothing meanwhile"
        )
    found = _latency(p, low / p.total_ms, "inferred", facts)
    unseen = p.cpu.run is None or p.cpu.run < UNSEEN
    if unseen and e.machine.get("engine_is_local") is not None and low < TOKENISE_MS * (p.work.prompt or 0.0):
        return [replace(found, state="undecided", claim=f"At {p.name} {ms(low)} pass outside queue and prefill: the "
                        "path, or the engine's own reading of long prompts, whose CPU time was not seen",
                        next_step="send short prompts: if that time stays it is the path")]  # fmt: skip
    if p.starved >= 0.3:
        return [replace(found, state="undecided", claim=f"At {p.name} {ms(low)} pass outside queue and prefill; on a "
                        "starved host that may be the path or the engine's frontend",
                        next_step="free the engine's cores first, then repeat")]  # fmt: skip
    return [found]


def _serving(p: Seen, low: float) -> float | None:
    """CPU time of what serves (not computes), per request, over the time outside the engine; None where not read."""
    if p.cpu.serving is None or not p.ok or not p.seconds:
        return None
    return p.cpu.serving * p.seconds / p.ok * 1e3 / low


def _latency(p: Seen, share: float, how: str, facts: list[str]) -> Verdict:
    return Verdict("network latency", f"At {p.name} every request waits {ms(share * p.total_ms)} for the path to the "
                   "service", "holds", share, where=p.name, how=how, evidence=tuple(facts), point=p.number,
                   lever="measure and serve from nearer, keep connections open, or look for a proxy on the way",
                   gain=f"up to {percent(share)} of the requests' time", cost="a place nearer to the users",
                   next_step="measure once on the engine's own host: the difference is the path")  # fmt: skip
