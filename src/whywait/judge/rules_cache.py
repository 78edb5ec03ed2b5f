"""Equal beginnings of prompts that are computed again although an earlier request had them."""

from __future__ import annotations

from dataclasses import replace

from whywait.judge.evidence import Evidence, Seen
from whywait.judge.rules_work import prompt
from whywait.judge.verdict import Verdict
from whywait.units import percent

OFFERED = 0.2  # of the prompt tokens an earlier request began with too
MISSED = 0.5  # of what was offered


def reuse(e: Evidence) -> list[Verdict]:
    out = []
    for p in e.plain:
        r = p.reuse
        if r.offered is None or r.hit is None or r.offered < OFFERED:
            continue
        missed = max(1 - r.hit / r.offered, 0.0)
        facts = [f"{percent(r.offered)} of the prompt tokens sent had been sent before, {percent(r.hit)} were reused"]
        if missed < MISSED:
            if r.hit >= 0.7 * r.offered:
                out.append(Verdict("prefix cache off", "Equal beginnings of prompts are reused", "fails", 0.0,
                                   where=p.name, evidence=tuple(facts), point=p.number))  # fmt: skip
            continue
        # Prefill time goes by the tokens computed; what should have been reused is that part of it.
        spared = (r.offered - r.hit) / max(1 - r.hit, 1e-9)
        share = spared * prompt(p)
        out.append(_verdict(e, p, share, facts))
    return out


def _verdict(e: Evidence, p: Seen, share: float, facts: list[str]) -> Verdict:
    r = p.reuse
    thrash = Verdict(
        "prefix-cache thrash",
        f"At {p.name} shared beginnings are evicted before they come again",
        "holds",
        share,
        where=p.name,
        how="derived",
        point=p.number,
        evidence=tuple(facts),
        cost="memory",
        gain=f"up to {percent(share)} of the requests' time",
        lever=_keep_more(e),
        next_step="send a single group of equal beginnings: it should be reused",
    )
    if r.looked is False or (r.looked is None and not r.any_hit):
        why = "the engine does not look prefixes up" if r.looked is False else "not one token came from a cache"
        claim = f"At {p.name} equal beginnings of prompts are computed again each time"
        return replace(thrash, cause="prefix cache off", claim=claim, evidence=(*facts, why),
                       lever=f"turn reuse on: {e.flag('prefix_cache') or 'a prefix cache'}",
                       cost="KV space for what is kept", next_step="turn it on and repeat")  # fmt: skip
    facts.append("some tokens do come from a cache, so that it is on" if r.any_hit else
                 "the engine looks prefixes up and does not find them")  # fmt: skip
    if r.groups > 1:
        facts.append(f"{r.groups} different beginnings are in use")
    return replace(thrash, evidence=tuple(facts))


def _keep_more(e: Evidence) -> str:
    ways = (e.by("more KV space", "kv_space"), e.by("KV kept in host memory", "kv_offload"),
            e.by("more places that keep a prefix", "slots"), "send equal beginnings to the same replica")  # fmt: skip
    return "; ".join(ways)
