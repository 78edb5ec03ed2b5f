"""Goodput: requests, and their tokens, that ended well and within the SLO, against all that were due."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from whywait.analyze.latency import Latency, per_request, worst_itl_ms
from whywait.analyze.streams import Content, alike, content
from whywait.analyze.window import Window, request_rate, token_rate, window_of
from whywait.core.columns import KINDS, OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.core.workload import SLO_KEYS
from whywait.errors import UsageError

_NOT_REASONING = KINDS.index("answer"), KINDS.index("tool")


@dataclass(frozen=True)
class Goodput:
    """``meets`` is bool per request of the point; ``share`` is of all due requests, whatever became of them (None when
    none was due). Rates are per second of the window, None where unknown. ``uncertain`` requests count as failing
    (or meeting) by their likely value though their bounds lie on both sides of the SLO."""

    meets: Array
    due: int
    share: float | None
    requests_per_s: float | None
    effective_tokens_per_s: float | None
    answer_tokens_per_s: float | None
    uncertain: int


def meets(run: Run, slo: Mapping[str, float], c: Content | None = None, lat: Latency | None = None) -> Array:
    """Which requests (bool) are ``ok`` and within every bound of their SLO.

    Args:
        run: any number of points.
        slo: bounds in ms: ``ttft_ms, ttfa_ms, tpot_ms, e2e_ms`` and ``itl_ms`` (the request's worst gap per token).
            A request of a class that has bounds of its own in the manifest's workload is held to those instead.
        c: ``content(run)`` when the caller has it.
        lat: ``per_request(run)`` when the caller has it.

    A metric that is not known fails its bound, except TPOT and ITL where all tokens came in the first chunk. Where TPOT
    is withheld, or a chunk's tokens are unknown, a certain upper bound decides.

    Raises:
        UsageError: an unknown key or a bound that is not a positive number.
    """
    c = content(run) if c is None else c
    lat = per_request(run) if lat is None else lat
    good: Array = lat.ok.copy()
    for key, bound in bounds(run, slo).items():  # infinite where a request's class does not ask: nothing is past it
        unasked = np.isinf(bound)
        if key == "itl_ms":
            within = (worst_itl_ms(run, c) <= bound) | ~lat.tpot_applies
        elif key == "tpot_ms":
            within = (lat.tpot_ms <= bound) | (lat.tpot_high_ms <= bound) | ~lat.tpot_applies
        else:
            within = getattr(lat, key) <= bound
        good &= within | unasked
    return good


def bounds(run: Run, slo: Mapping[str, float]) -> dict[str, Array]:
    """Each bound in ms that any request is held to, one value per request; infinite where it is not.

    Raises:
        UsageError: an unknown key or a bound that is not a positive number.
    """
    name = run.requests["class"]
    asked: list[tuple[Array, Mapping[str, float]]] = []
    rest = np.ones(len(name), dtype=bool)
    for c in run.manifest.workload.get("classes") or ():
        if c.get("slo"):
            mine = name == c.get("name")
            rest &= ~mine
            asked.append((mine, c["slo"]))
    out: dict[str, Array] = {}
    for mine, wanted in [(rest, slo), *asked]:
        for key, bound in wanted.items():
            if key not in SLO_KEYS or not bound > 0:
                hint = f"bounds in ms above 0 for {', '.join(SLO_KEYS)}"
                raise UsageError(f"SLO {key}={bound} is not understood", hint)
            out.setdefault(key, np.full(len(name), np.inf))[mine] = bound
    return out


def was_due(run: Run) -> Array:
    """Which requests came due before their point ended: of a run cut short, those later in the plan never did."""
    req = run.requests
    end = run.points["end_ns"][np.searchsorted(run.points["point"], req["point"])]
    never = (req["outcome"] == OUTCOMES.index("never_sent")) & run.manifest.partial
    early: Array = ~never | (req["due_ns"] <= end)
    return early


def goodput(run: Run, slo: Mapping[str, float], w: Window | None = None, c: Content | None = None) -> Goodput:
    """Goodput of one load point. ``w`` defaults to its steady window, ``c`` to ``content(run)``; units as in
    :class:`Goodput`. An empty ``slo`` takes every ``ok`` request as good. Answer tokens are output without reasoning.

    Raises:
        UsageError: see :func:`meets`.
    """
    w = window_of(run) if w is None else w
    c = content(run) if c is None else c
    lat = per_request(run)
    good = meets(run, slo, c, lat)
    due = int(was_due(run).sum())
    answers = answer_tokens(run)
    only = answers_only(run, c, answers)
    counted = run.requests.replace(output_tokens=answers)
    bare = Run(run.manifest, run.points, counted, run.chunks, run.steps, run.readings)
    return Goodput(
        meets=good,
        due=due,
        share=float(good.sum()) / due if due else None,
        requests_per_s=request_rate(run, w, good),
        effective_tokens_per_s=token_rate(run, c, w, good)[0],
        answer_tokens_per_s=token_rate(bare, only, w, good)[0],
        uncertain=_uncertain(lat, bounds(run, slo)),
    )


def answer_tokens(run: Run) -> Array:
    """Output tokens of each request without its reasoning (float64, NaN unknown).

    Where the service does not say, a stream whose first token is an answer token is taken to hold no reasoning.
    """
    req = run.requests
    reasoning = req["reasoning_tokens"]
    plain = np.isnan(reasoning) & (req["first_answer_ns"] == req["first_ns"])
    out: Array = req["output_tokens"] - np.where(plain, 0.0, reasoning)
    return out


def answers_only(run: Run, c: Content, answers: Array) -> Content:
    """``c`` with the tokens of the answer chunks only: as the service says, else the request's answer tokens
    (``answers``: :func:`answer_tokens`) spread evenly."""

    def make() -> Content:
        answer = np.isin(c.kind, _NOT_REASONING)
        if not np.isnan(alike(c.tokens)).any():
            return dataclasses.replace(c, tokens_spread=np.where(answer, c.tokens, 0.0))
        chunks = np.bincount(c.row[answer], minlength=len(run.requests))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (answers / chunks)[c.row]
        spread = np.where(answer, np.where(np.isnan(c.tokens), share, c.tokens), 0.0)
        return dataclasses.replace(c, tokens_spread=spread)

    return c.memo("answers only", make)


def _uncertain(lat: Latency, slo: Mapping[str, Array]) -> int:
    either = np.zeros(len(lat.ids), dtype=bool)
    for key, low, high in (
        ("ttft_ms", lat.ttft_low_ms, lat.ttft_ms),
        ("e2e_ms", lat.e2e_low_ms, lat.e2e_ms),
        ("tpot_ms", lat.tpot_low_ms, lat.tpot_high_ms),
    ):
        if key in slo:
            either |= (low <= slo[key]) & ~(high <= slo[key]) & np.isfinite(slo[key])
    return int((either & lat.ok).sum())
