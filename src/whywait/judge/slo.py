"""What a user asks of a service, with the share of requests that must keep it, and how far each request is from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whywait.analyze.latency import per_request
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.errors import UsageError
from whywait.judge.search import Rule
from whywait.units import NS_PER_MS, parse_duration

# Not itl: the worst gap of a request needs its chunks, and requests are judged while they run.
KEYS = ("ttft", "ttfa", "tpot", "e2e")
EXAMPLE = "such as ttft=500ms@p95,tpot=50ms@p95"


def parse_rules(text: str, share: float) -> tuple[Rule, ...]:
    """``'ttft=500ms@p95,e2e=10s'``: a rule for each limit with its own share; those without share one, together.

    Raises:
        UsageError: not of this form.
    """
    if not 0 < share < 1:
        raise UsageError(f"--share: {share:g} is not between 0 and 1", "--share 0.95")
    joint: dict[str, float] = {}
    rules = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = (x.strip() for x in part.partition("="))
        limit, at, quantile = value.partition("@")
        name = name.removesuffix("_ms")
        if name not in KEYS or not limit:
            raise UsageError(f"--slo: {part!r} is not METRIC=TIME[@pNN]", f"{EXAMPLE}; metrics: {', '.join(KEYS)}")
        try:
            ms = parse_duration(limit, "ms") / NS_PER_MS
            asked = float(quantile.strip().removeprefix("p")) / 100 if at else share
        except ValueError as exc:
            raise UsageError(f"--slo: {part!r}: {exc}", EXAMPLE) from None
        if not 0 < asked < 1 or not ms > 0:
            raise UsageError(f"--slo: {part!r}: a limit above 0 and a percentile between 0 and 100", EXAMPLE)
        if at:
            rules.append(Rule(name, {f"{name}_ms": ms}, asked))
        else:
            joint[f"{name}_ms"] = ms
    if joint:
        rules.append(Rule(" and ".join(k.removesuffix("_ms") for k in joint), joint, share))
    if not rules:
        raise UsageError("find needs an SLO", f"--slo {EXAMPLE.removeprefix('such as ')}")
    return tuple(rules)


def scores(run: Run, rules: Sequence[Rule]) -> Array:
    """(rules, requests): measured / limit, the worst of a rule's limits; inf where it failed or is not known.

    Up to 1 is what ``goodput.meets`` calls good (chunks apart, which are not looked at).
    """
    lat = per_request(run)
    tpot = np.where(np.isnan(lat.tpot_ms), lat.tpot_high_ms, lat.tpot_ms)
    value = {
        "ttft_ms": lat.ttft_ms,
        "ttfa_ms": lat.ttfa_ms,
        "e2e_ms": lat.e2e_ms,
        "tpot_ms": np.where(lat.tpot_applies, tpot, 0.0),
    }
    rows = [np.max([value[k] / limit for k, limit in r.limits.items()], axis=0) for r in rules]
    found = np.stack(rows) if len(lat.ok) else np.zeros((len(rules), 0))
    return np.where(lat.ok & ~np.isnan(found), found, np.inf)
