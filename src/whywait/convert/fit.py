"""Trace → Fitted (what like traffic is drawn from), what a trace looks like, and how far the one is from the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.convert.sessions import LEAST_PAUSE_S, blocks_of, learn, units, wanted
from whywait.convert.traces import Trace
from whywait.core.atomic import replaced
from whywait.core.curves import Curve, curve
from whywait.core.fitted import Fitted, Rows, Stage
from whywait.core.kinds import Bucket
from whywait.core.prefix import hits
from whywait.errors import UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STAGE_REQUESTS, MOST_STAGES = 300, 24
BUCKET_REQUESTS, MOST_BUCKETS = 100, 20
# Differences below these are rounding.
LEAST_GAP_S, LEAST_TOKENS = 1e-3, 20.0
#: The quantiles a fit is judged by.
JUDGED = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
SHOWN = (0.0, *JUDGED, 1.0)
BINS = 60


def fit(trace: Trace) -> Fitted:
    """Learn the trace.

    Raises:
        UsageError: fewer than two requests, so there is not one gap.
    """
    n = len(trace)
    if n < 2:
        raise UsageError(f"a fit needs at least two requests, not {n}")
    hit, ago = hits(trace.chains) if trace.chains is not None else (None, None)
    reuse = None
    if trace.chains is not None and hit is not None:
        reuse = np.minimum(1.0, hit * _unhashed(trace) / blocks_of(trace))
    u = units(trace)
    block_tokens = trace.block_tokens if reuse is not None else None
    if not wanted(trace, u):
        return Fitted(_stages(trace.at_s), _buckets(trace, reuse), block_tokens, _ago(ago))

    def buckets(mine: NDArray[np.bool_], reuse: Floats | None) -> tuple[Bucket, ...]:
        return _buckets(trace, reuse, mine)

    hashed = (hit * _unhashed(trace)).astype(np.float64) if hit is not None else None
    kinds = learn(trace, u, reuse, hashed, buckets)
    # Sessions arrive; their later turns come when the one before has ended.
    return Fitted(_stages(trace.at_s[u.starts]), (), block_tokens, _ago(ago), kinds, n)


def _unhashed(trace: Trace) -> float:
    """Blocks the lengths make over those there are: a last block that was not full has no hash in many logs. Drawn
    prompts have one, so reuse grows by this to give the same hit rate."""
    there = sum(map(len, trace.chains or []))
    return float(blocks_of(trace).sum()) / there if there else 1.0


def _ago(ago: Ints | None) -> Curve | None:
    if ago is None:
        return None
    far = ago[ago > 0]
    return curve(far if len(far) else np.ones(1), 1.0)


def _stages(at: Floats) -> tuple[Stage, ...]:
    gaps = np.diff(at)
    n = max(1, min(MOST_STAGES, len(gaps) // STAGE_REQUESTS))
    # Of equally many requests, not of equal time: a rush is cut finely where it is, and a quiet night is one stretch.
    which = np.arange(len(gaps)) * n // max(1, len(gaps))
    out = []
    for k in range(n):
        mine = gaps[which == k]
        if len(mine):
            seconds, mean = float(mine.sum()), float(mine.mean())
            cv = float(mine.std() / mean) if mean > 0 else 0.0
            out.append(Stage(len(mine), round(seconds, 6), round(cv, 3), _lag1(mine), curve(mine, LEAST_GAP_S)))
    return tuple(out)


def _lag1(x: Floats) -> float:
    """Rank correlation of neighbours; 0 where it cannot be told."""
    if len(x) < 20 or np.ptp(x) == 0:
        return 0.0
    ranks = _ranks(x)
    r = np.corrcoef(ranks[:-1], ranks[1:])[0, 1]
    return round(float(r), 3) if np.isfinite(r) else 0.0


def _ranks(x: Floats | Ints) -> Floats:
    return np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(np.float64)


def _buckets(trace: Trace, reuse: Floats | None, of: NDArray[np.bool_] | None = None) -> tuple[Bucket, ...]:
    prompt, output = trace.prompt_tokens, trace.output_tokens
    if of is not None:
        prompt, output, reuse = prompt[of], output[of], reuse[of] if reuse is not None else None
    n = max(1, min(MOST_BUCKETS, len(prompt) // BUCKET_REQUESTS))
    edges = np.unique(np.quantile(prompt, np.linspace(0, 1, n + 1)))
    which = np.clip(np.searchsorted(edges, prompt, side="right") - 1, 0, max(0, len(edges) - 2))
    out = []
    for k in range(max(1, len(edges) - 1)):
        mine = which == k
        if mine.any():
            again = curve(reuse[mine], 0.1) if reuse is not None else None
            share = float(f"{mine.mean():.6g}")
            both = [curve(x[mine], LEAST_TOKENS) for x in (prompt, output)]
            out.append(Bucket(share, both[0], both[1], again))
    return tuple(out)


def describe(trace: Trace) -> dict[str, Any]:
    """What a trace looks like, as plain values. Absent is None."""
    gaps = np.diff(trace.at_s)
    span = float(trace.at_s[-1])
    n = len(trace)
    bins = min(BINS, max(1, n // 5))
    per_bin, edges = np.histogram(trace.at_s, bins=bins, range=(0.0, max(span, 1e-9)))
    return {
        "format": trace.source,
        "requests": n,
        "span_s": span,
        "rate_per_s": (n - 1) / span if span > 0 else None,
        "gap_s": _summary(gaps) if len(gaps) else None,
        "gap_cv": _cv(gaps),
        "rate_over_time": {"bin_s": float(edges[1] - edges[0]), "requests": per_bin.tolist()},
        "cv_per_window": [{"seconds": s.seconds, "requests": s.requests, "cv": s.cv} for s in _stages(trace.at_s)]
        if n > 1 else [],
        "prompt_tokens": _summary(trace.prompt_tokens),
        "output_tokens": _summary(trace.output_tokens),
        "prompt_histogram": _histogram(trace.prompt_tokens),
        "output_histogram": _histogram(trace.output_tokens),
        "length_correlation": _rank_correlation(trace.prompt_tokens, trace.output_tokens),
        "classes": {name: int((trace.klass == i).sum()) for i, name in enumerate(trace.class_names)},
        "prefix": _prefix(trace.chains, trace.block_tokens),
        "sessions": _sessions(trace),
        "notes": trace.notes,
    }  # fmt: skip


def hit_rate(chains: list[list[int]] | None) -> float | None:
    """Share of all prefix blocks that an unlimited cache would have held."""
    blocks = sum(map(len, chains)) if chains is not None else 0
    return float(hits(chains)[0].sum()) / blocks if chains is not None and blocks else None


def errors(trace: Trace, rows: Rows | Trace) -> dict[str, Any]:
    """How far ``rows`` is from the trace: the worst relative error over the JUDGED quantiles, and the hit rates.

    A gap counts by at least a millisecond, a length by at least 20 tokens: below, rounding is all there is. Gaps are
    those between sessions (and requests of none): later turns come when the service has answered. ``turns`` are of
    those too; ``think_s`` counts by at least 10 ms; ``class_share`` is the largest difference in share of requests.
    """
    of, got = units(trace), units(rows)
    turns = bool((of.before >= 0).any() and (got.before >= 0).any())
    starts = (trace.at_s[of.starts], np.sort(rows.at_s[got.starts])) if turns else (trace.at_s, rows.at_s)
    pairs: dict[str, tuple[Floats | Ints, Floats | Ints, float]] = {
        "prompt_tokens": (trace.prompt_tokens, rows.prompt_tokens, LEAST_TOKENS),
        "output_tokens": (trace.output_tokens, rows.output_tokens, LEAST_TOKENS),
        "gap_s": (np.diff(starts[0]), np.diff(starts[1]), LEAST_GAP_S),
    }
    if turns:
        pairs["turns"] = (of.size, got.size, 1.0)
        thought = [t[~np.isnan(t)] for t in (trace.think_s, rows.think_s)]
        if all(map(len, thought)):
            pairs["think_s"] = (thought[0], thought[1], LEAST_PAUSE_S)
    out: dict[str, Any] = {}
    for name, (want, have, least) in pairs.items():
        if len(want) and len(have):
            x, y = (np.quantile(values, JUDGED) for values in (want, have))
            out[name] = float(np.max(np.abs(y - x) / np.maximum(x, least)))
    if len(trace.class_names) > 1:
        shares = [_class_shares(x) for x in (trace, rows)]
        out["class_share"] = max(abs(shares[0].get(k, 0) - shares[1].get(k, 0)) for k in {*shares[0], *shares[1]})
    a, b = (float(x[-1]) for x in starts)
    out["span_s"] = abs(b - a) / max(a, 1e-3)
    out["hit_rate"], out["hit_rate_drawn"] = hit_rate(trace.chains), hit_rate(rows.chains)
    return out


def _class_shares(rows: Rows | Trace) -> dict[str, float]:
    counts = np.bincount(rows.klass, minlength=len(rows.class_names)) / len(rows.klass)
    return dict(zip(rows.class_names, counts.tolist(), strict=False))


def to_toml(fitted: Fitted, trace: Trace, replay: str) -> str:
    """A workload file that draws from the fit. Numbers only."""
    table = fitted.as_dict()
    stages, buckets, classes = table.pop("stage"), table.pop("bucket", []), table.pop("class", [])
    lines = [
        f"# Learnt by whywait workload fit from {len(trace)} requests ({trace.source}). No text is in here.",
        f"# The same requests one by one: replace [fitted] by trace = {_value(replay)}",
        'cache = "natural"     # prefixes repeat as they did in the log',
        "seed = 1", "", "[fitted]",
        *(f"{k} = {_value(v)}" for k, v in table.items()),
    ]  # fmt: skip
    for name, tables in (("stage", stages), ("bucket", buckets)):
        for t in tables:
            lines += ["", f"[[fitted.{name}]]", *(f"{k} = {_value(v)}" for k, v in t.items())]
    for c in classes:
        inner = c.pop("bucket")
        lines += ["", "[[fitted.class]]", *(f"{k} = {_value(v)}" for k, v in c.items())]
        for t in inner:
            lines += ["", "[[fitted.class.bucket]]", *(f"{k} = {_value(v)}" for k, v in t.items())]
    return "\n".join(lines) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write whole or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc


def _value(v: Any) -> str:
    if isinstance(v, list):
        return f"[{', '.join(map(_value, v))}]"
    if isinstance(v, str):
        return '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(v) if isinstance(v, int) else f"{v:.10g}"


def _summary(x: Floats | Ints) -> dict[str, float]:
    names = ("min", *(f"p{q * 100:g}" for q in JUDGED), "max")
    return {"mean": float(x.mean()), **dict(zip(names, np.quantile(x, SHOWN).tolist(), strict=True))}


def _cv(x: Floats) -> float | None:
    return float(x.std() / x.mean()) if len(x) > 1 and x.mean() > 0 else None


def _histogram(x: Ints) -> dict[str, list[float]]:
    """Equal steps of the logarithm: lengths span three powers of ten."""
    low, high = max(1, int(x.min())), int(x.max()) + 1
    edges = np.unique(np.rint(np.geomspace(low, max(high, low + 1), 21)))
    counts, _ = np.histogram(x, bins=edges)
    return {"edges": edges.tolist(), "requests": counts.tolist()}


def _rank_correlation(a: Ints, b: Ints) -> float | None:
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _prefix(chains: list[list[int]] | None, block_tokens: int | None) -> dict[str, Any] | None:
    """Reuse with an unlimited cache, and how many requests begin with the same block (a system prompt, mostly)."""
    if chains is None:
        return None
    hit, ago = hits(chains)
    roots: dict[int, int] = {}
    for c in chains:
        if c:
            roots[c[0]] = roots.get(c[0], 0) + 1
    sizes = np.array(sorted(roots.values(), reverse=True) or [0])
    far = ago[ago > 0]
    return {
        "hit_rate": hit_rate(chains),
        "block_tokens": block_tokens,
        "blocks": sum(map(len, chains)),
        "distinct_blocks": len({b for c in chains for b in c}),
        "requests_with_a_hit": float((hit > 0).mean()),
        "groups": len(roots),
        "shared_groups": int((sizes > 1).sum()),
        "largest_groups": sizes[:10].tolist(),
        "requests_ago": _summary(far) if len(far) else None,
    }


def _sessions(trace: Trace) -> dict[str, Any] | None:
    mine = trace.session >= 0
    if not mine.any():
        return None
    _, turns = np.unique(trace.session[mine], return_counts=True)
    order = np.lexsort((trace.at_s, trace.session))
    same = (np.diff(trace.session[order]) == 0) & (trace.session[order][1:] >= 0)
    between = np.diff(trace.at_s[order])[same]
    return {
        "sessions": len(turns),
        "requests": int(mine.sum()),
        "turns": _summary(turns),
        "between_turns_s": _summary(between) if len(between) else None,
    }
