"""Two streams at once: what a second one costs, and whether a long prompt stops another's decode."""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.fits import ratio
from whywait.analyze.stats import Estimate
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array, Table
from whywait.units import NS_PER_MS

SINGLES, PAIR, BESIDE = "singles", "two at once", "a long prompt beside a decode"  # how labels of points end
OK = OUTCOMES.index("ok")
FREE, IN_TURN = 1.1, 1.8  # step of two streams / step of one
WHOLE, NONE = 0.6, 0.25  # stall / the prompt's own TTFT
LEAST = 3  # pairs


def points_of(run: Run, *endings: str) -> list[int]:
    """Numbers of the points whose label ends so."""
    labels = zip(run.points["point"].tolist(), run.points["label"].tolist(), strict=True)
    return [p for p, label in labels if label and label.endswith(endings)]


def first_or_end_ns(requests: Table) -> Array:
    """The first token; of an answer of one token without any text (a special token, half a character) its end."""
    bare = np.isnan(requests["first_ns"]) & ((requests["output_tokens"] == 1) | (requests["asked_output_tokens"] == 1))
    out: Array = np.where(bare, requests["end_ns"], requests["first_ns"])
    return out


def second_stream(run: Run) -> dict[str, Any]:
    """``kind``: ``serialised`` (the second waits until the first has ended), ``free``, ``batched``, ``in turn``, or
    ``shared`` (batched or free)."""
    singles, stamps = _singles(run), _stamps(run)
    rows, apart = [], 0
    for point in points_of(run, PAIR):
        both = _both(run, point, "pair", "pair")
        if both is None:
            continue
        a, b = both
        alone = _nearest(singles, point)
        together = min(a["last_ns"], b["last_ns"]) - max(a["first_ns"], b["first_ns"])
        if together < 0.25 * min(a["last_ns"] - a["first_ns"], b["last_ns"] - b["first_ns"]):
            apart += 1
            continue
        step = _step_in(stamps, (a, b), max(a["first_ns"], b["first_ns"]), min(a["last_ns"], b["last_ns"]))
        if alone is not None and step is not None:
            rows.append((step / alone[0], max(_ttft(a), _ttft(b)) / alone[1]))
    found = np.array(rows, dtype=float).reshape(-1, 2)
    steps, waits = ratio(found[:, 0]), ratio(found[:, 1])
    kind, why = _second_kind(steps, apart, len(rows))
    return {"kind": kind, "state": "undecided" if kind == "undecided" else "holds", "why": why,
            "step_ratio": steps._asdict(), "ttft_ratio": waits._asdict(), "one_after_the_other": apart,
            "n": apart + len(rows)}  # fmt: skip


def _second_kind(steps: Estimate, apart: int, together: int) -> tuple[str, str]:
    if apart >= LEAST and apart >= 4 * together:
        return "serialised", "the second stream gets its first token when the first has ended: one slot"
    if apart > together / 4 or together < LEAST or steps.value is None or steps.lo is None or steps.hi is None:
        return "undecided", "too few pairs, or they do not agree"
    if steps.hi < FREE:
        return "free", "a second stream does not slow the first: the cost of a step is shared"
    if steps.hi < IN_TURN and steps.lo <= 1.02:
        return "shared", f"a step for two takes at most {steps.hi:.2f} times that for one"
    if steps.hi < IN_TURN:
        return "batched", f"a step for two takes {steps.value:.2f} times that for one: partly shared"
    if steps.lo > IN_TURN:
        return "in turn", f"a step for two takes {steps.value:.2f} times that for one: nothing is shared"
    return "undecided", f"a step for two takes between {steps.lo:.2f} and {steps.hi:.2f} times that for one"


def long_neighbour(run: Run, prompts: Table) -> dict[str, Any]:
    """``kind``: ``whole`` (decode stands still for the whole prefill), ``chunked``, ``none`` or ``queued``.

    Stalls are in units of the long prompt's own time to first token when it is alone; ``stall_ms`` is the worst gap.
    """
    stamps, rows, queued = _stamps(run), [], 0
    for point in points_of(run, BESIDE):
        both = _both(run, point, "neighbour", "long")
        if both is None:
            continue
        a, b = both
        alone = _alone(prompts, b)
        times = stamps.get(int(a["id"]), np.empty(0))
        gaps, begins = np.diff(times), times[:-1]
        before = gaps[times[1:] <= b["sent_ns"]]
        if alone is None or len(before) < 2 or b["sent_ns"] >= a["last_ns"]:
            continue
        usual = float(np.median(before))
        if alone < 4 * usual:
            rows.append((np.nan,) * 5)
            continue
        if b["first_ns"] - a["last_ns"] > 0.7 * alone:
            queued += 1
            continue
        beside = gaps[(times[1:] > b["sent_ns"]) & (begins < b["first_ns"])] - usual
        extra = np.maximum(beside, 0.0)
        rows.append((float(extra.max()) / alone, float(extra.sum()) / alone, float((extra > usual).sum()),
                     float(extra.max()) / NS_PER_MS, float(b["prompt_tokens"] or np.nan)))  # fmt: skip
    found = np.array(rows, dtype=float).reshape(-1, 5)
    short = int(np.isnan(found[:, 0]).sum())
    found = found[~np.isnan(found[:, 0])]
    floor = np.maximum(found[:, :2], 1e-3)
    worst, total = ratio(floor[:, 0]), ratio(floor[:, 1])
    kind, why = _long_kind(worst, total, found[:, 2], queued, short)
    out: dict[str, Any] = {"kind": kind, "state": "undecided" if kind == "undecided" else "holds", "why": why,
                           "n": len(found) + queued, "worst_share": worst._asdict(), "total_share": total._asdict(),
                           "stalls": float(np.median(found[:, 2])) if len(found) else None,
                           "stall_ms": ratio(np.maximum(found[:, 3], 1e-3))._asdict()}  # fmt: skip
    tokens = float(np.median(found[:, 4])) if len(found) else np.nan
    chunk = tokens * min(1.0, worst.value or 0.0) if kind == "chunked" else np.nan
    out["chunk_tokens"] = float(chunk) if np.isfinite(chunk) else None
    return out


def _long_kind(worst: Estimate, total: Estimate, stalls: Array, queued: int, short: int) -> tuple[str, str]:
    n = len(stalls)
    if queued >= LEAST and queued >= 4 * n:
        return "queued", "the long prompt begins when the other stream has ended: one slot"
    if n < LEAST or queued > n / 4:
        lone = "the longest prompt takes less than four decode steps: a stall could not be seen"
        return "undecided", lone if short > n + queued else "too few such pairs, or they do not agree"
    if worst.lo is not None and worst.lo > WHOLE:
        return "whole", "decode stands still for the whole prefill of a neighbour (or a piece as long as this prompt)"
    if total.hi is not None and total.hi < NONE:
        return "none", "decode goes on beside a neighbour's prefill"
    pieces = worst.hi is not None and worst.hi < WHOLE and total.lo is not None and total.lo > NONE
    if pieces and float(np.median(stalls)) >= 2:
        return "chunked", "decode goes on between pieces of the neighbour's prefill"
    return "undecided", "the stalls are neither clearly of the whole prefill nor of pieces"


def _both(run: Run, point: int, one: str, other: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    mine = run.requests.where((run.requests["point"] == point) & (run.requests["outcome"] == OK))
    rows = mine.replace(first_ns=first_or_end_ns(mine)).rows()
    rows = sorted((r for r in rows if r["first_ns"] is not None), key=lambda r: (r["class"] != one, r["first_ns"]))
    if [r["class"] for r in rows] != [one, other]:
        return None
    return rows[0], rows[1]


def _singles(run: Run) -> list[tuple[int, float, float]]:
    """(Point, median step, median TTFT) of the single answers of each round at the shortest context, ns."""
    out = []
    stamps = _stamps(run)
    for point in points_of(run, SINGLES):
        mine = (run.requests["point"] == point) & (run.requests["class"] == "decode") & (run.requests["outcome"] == OK)
        rows = [r for r in run.requests.where(mine).rows() if r["first_ns"] is not None]
        steps = [s for r in rows if (s := _step_in(stamps, (r,), r["first_ns"], r["last_ns"])) is not None]
        if steps:
            out.append((point, float(np.median(steps)), float(np.median([_ttft(r) for r in rows]))))
    return out


def _nearest(singles: list[tuple[int, float, float]], point: int) -> tuple[float, float] | None:
    """Step and TTFT of one stream in the three rounds around, so that drift falls out and one bad answer too."""
    if not singles:
        return None
    near = sorted(singles, key=lambda s: abs(s[0] - point))[:3]
    return float(np.median([s[1] for s in near])), float(np.median([s[2] for s in near]))


def _alone(prompts: Table, b: dict[str, Any]) -> float | None:
    """TTFT of such a long prompt when nothing else runs, ns."""
    like = prompts.where(prompts["asked_prompt_tokens"] == b["asked_prompt_tokens"])
    return float(np.median(first_or_end_ns(like) - like["sent_ns"])) if len(like) else None


def _ttft(r: dict[str, Any]) -> float:
    return float(r["first_ns"] - r["sent_ns"] - (r["connect_ns"] or 0))


def _stamps(run: Run) -> dict[int, Array]:
    """Arrival of the content chunks of each request of a point of pairs or of singles, in order, ns."""
    ids, times = run.chunks["id"], run.chunks["t_ns"].astype(np.float64)
    content = run.chunks["kind"] != 0
    ids, times = ids[content], times[content]
    order = np.lexsort((times, ids))
    ids, times = ids[order], times[order]
    edges = np.flatnonzero(np.diff(ids)) + 1
    return {int(i[0]): t for i, t in zip(np.split(ids, edges), np.split(times, edges), strict=True) if len(i)}


def _step_in(stamps: dict[int, Array], rows: tuple[dict[str, Any], ...], low: float, high: float) -> float | None:
    """Mean gap of these requests' chunks between two instants, ns; None with fewer than 3 gaps each."""
    out = []
    for r in rows:
        t = stamps.get(int(r["id"]), np.empty(0))
        t = t[(t >= low) & (t <= high)]
        if len(t) < 4:
            return None
        out.append((t[-1] - t[0]) / (len(t) - 1))
    return float(np.mean(out))
