"""Requests of others, as the engine's spans tell of them: where the time of each went, without one request of ours."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from whywait.analyze.phases import PHASES
from whywait.analyze.stats import summary
from whywait.core.run import Run
from whywait.core.table import Array

SOURCE = "trace"  # of such readings; one per figure, labelled with the trace it belongs to
FIGURES = ("queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "e2e_ms", "output_tokens")
LEAST = 5  # requests with spans, from which they speak for a window


def figures(run: Run, span: tuple[int, int]) -> dict[str, Any]:
    """What takes the place of figures from histograms; {} where fewer than ``LEAST`` requests had spans.

    ``ttft_ms``, ``e2e_ms``, ``tpot_ms`` as ``stats.summary``, ``phases`` as in the summary, ``slowest`` (shares of
    the slowest tenth by end-to-end time) and ``spans`` (how many requests). Spans arrive some seconds after the end of
    a request: those that arrived in ``span`` count.
    """
    got = _table(run, span)
    n = len(got["e2e_ms"])
    if n < LEAST:
        return {}
    out: dict[str, Any] = {"spans": n, "phases": _phases(got, np.ones(n, dtype=bool))}
    for key in ("ttft_ms", "e2e_ms"):
        if not np.isnan(got[key]).all():
            out[key] = summary(got[key])
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(got["output_tokens"] > 1, got["decode_ms"] / (got["output_tokens"] - 1), np.nan)
    if not np.isnan(tpot).all():
        out["tpot_ms"] = summary(tpot)
    whole = got["e2e_ms"]
    if not np.isnan(whole).all():
        slow = whole >= np.nanquantile(whole, 0.9)
        shares = {p: v["share"] for p, v in _phases(got, slow).items() if v["share"] is not None}
        out["slowest"] = {"requests": int(slow.sum()), "e2e_ms": float(np.nanmean(whole[slow])), "shares": shares}
    return out


def _table(run: Run, span: tuple[int, int]) -> dict[str, Array]:
    rd = run.readings
    inside = (rd["source"] == SOURCE) & (rd["asked_ns"] >= span[0]) & (rd["asked_ns"] <= span[1])
    row_of: dict[str, int] = {}
    values: list[tuple[int, str, float]] = []
    for i in np.flatnonzero(inside).tolist():
        if rd["name"][i] in FIGURES and rd["labels"][i]:
            trace = str(json.loads(rd["labels"][i]).get("trace"))
            row = row_of.setdefault(trace, len(row_of))
            values.append((row, rd["name"][i], float(rd["value"][i])))
    out = {name: np.full(len(row_of), np.nan) for name in FIGURES}
    for row, name, value in values:
        out[name][row] = value
    return out


def _phases(got: dict[str, Array], which: Array) -> dict[str, Any]:
    """Mean ms of the phases that spans tell; what they leave of the end-to-end time is unknown."""
    out: dict[str, dict[str, Any]] = {p: {"ms": None, "share": None, "how": "unknown", "causes": {}} for p in PHASES}
    means = {}
    for phase in ("queue", "prefill", "decode"):
        values = got[f"{phase}_ms"][which]
        if not np.isnan(values).all():
            means[phase] = float(np.nanmean(values))
    whole = got["e2e_ms"][which]
    if not np.isnan(whole).all():
        means["unknown"] = max(float(np.nanmean(whole)) - sum(means.values()), 0.0)
    total = sum(means.values())
    for phase, ms in means.items():
        how = "unknown" if phase == "unknown" else "measured"
        out[phase].update(ms=ms, share=ms / total if total else None, how=how)
    return out
