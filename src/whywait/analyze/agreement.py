"""Do two engines think the same of the same text? Agreement of the distributions over the next token, and perplexity.

Pure. Both scored the same positions of the same texts (teacher forcing: each token is predicted from the true ones
before it, so that one early difference does not carry on). A is the reference P, B the changed one Q. At a position

    KL(P‖Q) = Σ p ln(p / q)      in nats; the mean over positions is what is reported, and its 99th percentile.

An engine lists only its k most probable tokens. S are the tokens in both lists, G those in A's alone. Outside S the
probabilities are summed before they are compared: G as one lump, whose share in B is at most |G| times the smallest
probability in B's list, and all others as a second. A function of the outcome never has more divergence than the
outcome (log-sum inequality; Cover & Thomas, *Elements of Information Theory*, 2nd ed., theorem 2.7.1), and B's share of
G is taken where it makes the sum least. So the figure is **never more than the true KL**. No list of k tokens bounds
it from above: B may give any of the others next to nothing. ``outside`` says how much of A's mass was lumped.

Positions of a text resemble each other: whole *texts* are resampled. Each interval is the wider of two, the expanded
percentile bootstrap (``stats.cluster_bootstrap``) and Student's t of the ratio of sums over texts (Cochran, *Sampling
Techniques*, 3rd ed., section 6.4); that of a share is at least as wide as Wilson's for independent positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whywait.analyze.stats import MIN_GROUPS, cluster_bootstrap, t975, weighted_percentile
from whywait.core.scored import Scored
from whywait.core.table import Array

FLOOR = 1e-6  # probability; engines' single-precision sums miss 1 by about so much or more
TIE = 1e-4  # relative: probabilities so near to each other are the same
SEED = 11
DRAWS = 1000
Z = 1.959963985
COLUMNS = ("same", "kl", "outside", "nll_a", "nll_b", "at")


def positions(a: Scored, b: Scored) -> dict[str, list[float | None]]:
    """Per position (a list per name of COLUMNS): ``same`` most probable token (1, 0), ``kl`` (nats, see above),
    ``outside`` (A's probability that was lumped), ``nll_a`` and ``nll_b`` (−ln of the real token's probability, nats;
    None where untold), ``at``.

    Raises:
        ValueError: they did not score the same positions.
    """
    if not np.array_equal(a.at, b.at):
        raise ValueError("both have to score the same positions")
    out: dict[str, list[float | None]] = {name: [] for name in COLUMNS}
    for i in range(len(a)):
        (ids_a, p), (ids_b, q) = _row(a, i), _row(b, i)
        known = len(p) > 0 and len(q) > 0
        kl, outside = divergence((ids_a, p), (ids_b, q)) if known else (None, None)
        out["same"].append(float(_first_in(ids_a[p.argmax()], (ids_b, q)) or _first_in(ids_b[q.argmax()], (ids_a, p)))
                           if known else None)  # fmt: skip
        out["kl"].append(kl)
        out["outside"].append(outside)
        out["nll_a"].append(_known(-float(a.own[i])))
        out["nll_b"].append(_known(-float(b.own[i])))
        out["at"].append(int(a.at[i]))
    return out


def divergence(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[float, float]:
    """(KL of at least so much in nats, A's probability outside the common list) of (tokens, probabilities) of each."""
    (ids_a, p), (ids_b, q) = a, b
    p, q = p / max(1.0, float(p.sum())), q / max(1.0, float(q.sum()))
    _, at_a, at_b = np.intersect1d(ids_a, ids_b, assume_unique=True, return_indices=True)
    common_p, common_q = np.maximum(p[at_a], FLOOR**2), np.maximum(q[at_b], FLOOR**2)
    alone = float(p.sum() - p[at_a].sum())
    rest_p = max(1.0 - float(p.sum()), FLOOR)
    rest_q = max(1.0 - float(common_q.sum()), FLOOR)
    total = float((common_p * np.log(common_p / common_q)).sum())
    if alone > FLOOR:
        # B's share of the tokens that only A lists: where the sum is least, or the most that B's list leaves room for.
        room = (len(ids_a) - len(at_a)) * float(q.min())
        share = min(rest_q * alone / (alone + rest_p), room, rest_q - FLOOR / 2)
        share = max(share, FLOOR / 2)
        total += alone * math.log(alone / share) + rest_p * math.log(rest_p / max(rest_q - share, FLOOR / 2))
    else:
        total += rest_p * math.log(rest_p / rest_q)
    return max(total, 0.0), max(1.0 - float(p[at_a].sum()), 0.0)


def figures(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all texts together say. Each has the lists of :func:`positions`.

    Keys: ``texts``, ``positions``; ``top1`` (share), ``kl_mean``, ``kl_p99`` (nats), ``perplexity_ratio`` (B / A), each
    with ``_low`` and ``_high`` (95 %; None below four texts); ``kl_p50``, ``kl_max``, ``outside`` (mean),
    ``perplexity_a``, ``perplexity_b``, ``untold`` (share of positions whose real token's probability either did not
    tell: they are in no perplexity). None where nothing is known.
    """
    rows = [_arrays(t) for t in texts]
    rows = [r for r in rows if len(r["at"])]
    n = sum(len(r["at"]) for r in rows)
    out: dict[str, Any] = {"texts": len(rows), "positions": n}
    same = [_told(r["same"]) for r in rows]
    kls = [_told(r["kl"]) for r in rows]
    out |= _ratio("top1", [(v.sum(), len(v)) for v in same], share=True)
    out |= _ratio("kl_mean", [(v.sum(), len(v)) for v in kls])
    out["kl_mean_low"] = None if out["kl_mean_low"] is None else max(out["kl_mean_low"], 0.0)
    out |= _percentile(kls)
    pooled = np.concatenate(kls) if kls else np.array([])
    out["kl_p50"] = float(np.quantile(pooled, 0.5)) if len(pooled) else None
    out["kl_max"] = float(pooled.max()) if len(pooled) else None
    lumped = np.concatenate([_told(r["outside"]) for r in rows]) if rows else np.array([])
    out["outside"] = float(lumped.mean()) if len(lumped) else None
    return out | _perplexity(rows, n)


def by_kind(texts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """:func:`figures` per ``kind`` of text, in order of appearance."""
    kinds = dict.fromkeys(str(t["kind"]) for t in texts)
    return {k: figures([t for t in texts if t["kind"] == k]) for k in kinds}


def _perplexity(rows: Sequence[Mapping[str, Array]], n: int) -> dict[str, Any]:
    both = [np.isfinite(r["nll_a"]) & np.isfinite(r["nll_b"]) for r in rows]
    count = int(sum(b.sum() for b in both))
    out: dict[str, Any] = {"untold": 1 - count / n if n else None, "perplexity_a": None, "perplexity_b": None}
    for name in ("a", "b"):
        total = sum(float(r[f"nll_{name}"][b].sum()) for r, b in zip(rows, both, strict=True))
        out[f"perplexity_{name}"] = math.exp(total / count) if count else None
    sums = [(float((r["nll_b"] - r["nll_a"])[b].sum()), int(b.sum())) for r, b in zip(rows, both, strict=True)]
    found = _ratio("perplexity_ratio", sums)
    return out | {k: None if v is None else math.exp(v) for k, v in found.items()}


def _ratio(name: str, sums: Sequence[tuple[float, int]], share: bool = False) -> dict[str, float | None]:
    """Σ of sums over Σ of counts, one pair per text, with its interval over texts."""
    told = [(float(s), c) for s, c in sums if c]
    if not told:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    total, count = np.array([s for s, _ in told]), np.array([float(c) for _, c in told])
    value = float(total.sum() / count.sum())
    low, high = value, value
    m = len(told)
    if m < MIN_GROUPS:
        return {name: value, f"{name}_low": None, f"{name}_high": None}
    lo, hi = cluster_bootstrap(m, lambda w: (w @ total) / (w @ count), np.random.default_rng(SEED), DRAWS)
    spread = (total - value * count) / count.mean()
    half = t975(m - 1) * float(np.sqrt((spread**2).sum() / (m - 1) / m))
    low, high = min(float(lo), value - half), max(float(hi), value + half)
    if share:
        below, above = _wilson(value, float(count.sum()))
        low, high = max(min(low, below), 0.0), min(max(high, above), 1.0)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _percentile(kls: Sequence[Array]) -> dict[str, float | None]:
    """The 99th percentile of KL over positions, texts resampled; no upper bound is known from few."""
    kls = [v for v in kls if len(v)]
    x = np.concatenate(kls) if kls else np.array([])
    out: dict[str, float | None] = {"kl_p99": None, "kl_p99_low": None, "kl_p99_high": None}
    if not len(x):
        return out
    out["kl_p99"] = weighted_percentile(x, 0.99)
    if len(kls) < MIN_GROUPS:
        return out
    order = np.argsort(x, kind="stable")
    text = np.repeat(np.arange(len(kls)), [len(v) for v in kls])[order]
    x = x[order]

    def stat(drawn: Array) -> Array:
        weights = np.cumsum(drawn[:, text], axis=1)
        at = (weights < 0.99 * weights[:, -1:] * (1 - 1e-12)).sum(axis=1)
        found: Array = x[np.minimum(at, len(x) - 1)]
        return found

    lo, hi = cluster_bootstrap(len(kls), stat, np.random.default_rng(SEED), 400)
    out["kl_p99_low"] = float(lo)
    out["kl_p99_high"] = float(hi) if len(x) >= 368 else None  # with fewer the sample may never have seen it
    return out


def _wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's interval of a share of n independent ones (J. Am. Stat. Assoc. 22 (1927))."""
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return middle - half, middle + half


CLAIMS: tuple[tuple[str, str, Callable[[float], str], int], ...] = (
    ("perplexity_ratio", "perplexity", lambda m: f"B's perplexity is at most {m:.3g} % above A's", 1),
    ("top1", "top1", lambda m: f"B's most probable token is A's in at least {100 - m:.4g} % of positions", -1),
)


def claims(found: Mapping[str, Any], margins: Mapping[str, float]) -> list[dict[str, Any]]:
    """Not inferior within the margin (per cent): *holds* when the whole interval is, *fails* when none of it is.

    ``margins``: ``perplexity`` (B above A) and ``top1`` (positions in which they differ). There is none on KL: what is
    known of it is a lower bound, which can show a loss and never its absence.
    """
    out = []
    for name, margin, says, side in CLAIMS:
        m = margins[margin]
        limit = 1 + m / 100 if side > 0 else 1 - m / 100
        value, low, high = (found[name + tail] for tail in ("", "_low", "_high"))
        state = "undecided"
        if low is not None and high is not None:
            good, bad = (high <= limit, low > limit) if side > 0 else (low >= limit, high < limit)
            state = "holds" if good else "fails" if bad else "undecided"
        out.append({"claim": says(m), "figure": name, "margin": m, "limit": limit, "state": state, "value": value,
                    "low": low, "high": high, "texts": found["texts"], "next_step":
                    _more(found, name, limit) if state == "undecided" else ""})  # fmt: skip
    return out


def _more(found: Mapping[str, Any], name: str, limit: float) -> str:
    """How many texts like these would decide: an interval narrows with the root of their number."""
    value, low, high, n = (*(found[name + t] for t in ("", "_low", "_high")), found["texts"])
    if value is None:
        return "nothing is known of it"
    if low is None or high is None:
        return f"{n} texts say nothing of others: give more (--text FILE, repeatable)"
    half, away = (high - low) / 2, abs(value - limit)
    if away <= half / 20:
        return "it lies at the limit itself: hardly any number of texts would decide"
    return f"about {math.ceil(n * (half / away) ** 2):,} texts like these {n} would decide"


def _first_in(token: int, other: tuple[Array, Array]) -> bool:
    """Whether the other finds no token more probable than this one, but for a tie: logits of 16 bits make many."""
    ids, p = other
    return bool((p[ids == token] >= p.max() * (1 - TIE)).any())


def _row(s: Scored, i: int) -> tuple[Array, Array]:
    told = ~np.isnan(s.logp[i])
    return s.ids[i][told], np.exp(s.logp[i][told])


def _arrays(text: Mapping[str, Any]) -> dict[str, Array]:
    return {k: np.array([np.nan if v is None else v for v in text[k]], dtype=np.float64) for k in COLUMNS}


def _told(values: Array) -> Array:
    out: Array = values[~np.isnan(values)]
    return out


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
