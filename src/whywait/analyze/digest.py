"""What comparing two Runs takes and no more: figures with intervals, a row per request, pieces of the window.

A digest is made from a Run, from a ``summary.json`` alone (then without rows and pieces), or read from a baseline: the
same as a small JSON that people keep beside their code (``analyze/baseline.py``). Nothing in it but numbers, names of
classes and the facts of the manifest (the command as it was typed among them); no prompts.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from whywait.analyze import compare
from whywait.analyze.bill import Ask, bill
from whywait.analyze.goodput import meets, was_due
from whywait.analyze.latency import per_request
from whywait.analyze.occupancy import CATEGORIES, device_account
from whywait.analyze.phases import PHASES, RequestAccount, account, point_account
from whywait.analyze.stats import QUANTILES
from whywait.analyze.streams import Content, content
from whywait.analyze.window import Window, starts_inside, token_bins, window_of
from whywait.core.columns import OUTCOMES
from whywait.core.run import Manifest, Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S, load_name

PIECES = 10  # of a window, from whose spread the interval of a rate is made
FEW_PIECES = 6  # of a window, for what comes from the engine's histograms: each piece needs several readings
MOST_ROWS = 20_000  # of a point: more tell nothing that these do not
TIMED = ("ttft_ms", "tpot_ms", "e2e_ms")  # per request
SPREAD = (*TIMED, "ttfa_ms", "first_byte_ms", "itl_ms", "chunk_gap_ms")  # told by quantiles
AT = (*QUANTILES, "mean")
ENERGY, COST = "energy_j_per_good_request", "cost_per_good_request"
UNTRIED = ("never_sent", "censored", "cancelled")  # outcomes that are no failure of the service
PER_TIME = ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "effective_tokens_per_s")


@dataclass(frozen=True)
class Point:
    """One load point. ``rows`` are columns of equal length, in the order of the schedule: ``rank`` (place in the
    schedule), ``asked_in, asked_out`` (tokens), ``klass`` (index into ``classes``), ``begin_s``, bools ``ok, good, due,
    tried`` (not one of ``UNTRIED``), ``inside`` (began in the window), ``ttft_ms, tpot_ms, e2e_ms`` (NaN unknown), and
    ms in a phase or cause by name (0 where it is not known: see ``told``). ``pieces`` holds rates per second and device
    shares of ``PIECES`` equal pieces of the window. ``repeats`` are values of a figure in further runs of the same."""

    mode: str
    target: float | None
    label: str | None
    seconds: float
    busy: float
    figures: dict[str, float | None]
    bounds: dict[str, tuple[float | None, float | None]]
    counts: dict[str, int]
    classes: tuple[str, ...] = ()
    rows: dict[str, Array] | None = None
    pieces: dict[str, Array] | None = None
    derived: tuple[str, ...] = ()  # phases of the point as a whole, which no request knows
    notes: dict[str, str] = field(default_factory=dict)  # of a figure: what it is by
    repeats: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, float | None, str]:
        return self.mode, self.target, self.label or ""

    @property
    def load(self) -> str:
        return load_name(self.mode, self.target, self.label)


@dataclass(frozen=True)
class Digest:
    """``facts`` are plain values: ``made_by, definitions, schema_version, whywait_version, date, model, workload, seed,
    slo, slo_of_classes, engine, machine, asked, command, partial, invalid, doubts``; None where the source does not
    tell. ``source`` is run, summary or baseline; ``runs`` counts the runs in it."""

    name: str
    source: str
    facts: dict[str, Any]
    points: tuple[Point, ...]
    runs: int = 1

    @property
    def places(self) -> list[tuple[Any, int]]:
        """Of every load point its key and, of those of one key, how many were before it."""
        keys = [p.key for p in self.points]
        return [(k, keys[:i].count(k)) for i, k in enumerate(keys)]


def told(p: Point, name: str) -> float | None:
    """A figure of one side; None unknown. A cause that is not named took no time where its phase is known request by
    request and mostly told apart; else it may have taken any part of it."""
    value = p.figures.get(name)
    if not name.startswith(compare.CAUSE):
        return value
    phase = name.split(".")[1]
    whole = p.figures.get(compare.PHASE + phase)
    if whole is None or (p.figures.get(compare.UNTOLD + phase) or 0.0) > whole / 2:
        return None
    return 0.0 if value is None and p.rows is not None and phase not in p.derived else value


def digest(run: Run, summary: Mapping[str, Any], name: str, ask: Ask | None = None) -> Digest:
    """Of a Run and its summary; ``ask`` prices it (see ``bill``)."""
    m = run.manifest
    acc = account(run)
    priced = {p["point"]: p for p in bill(run, ask)["points"]}
    points = [_point(run, p, acc, priced.get(p["point"])) for p in summary["points"]]
    return Digest(name, "run", as_read(_facts(m, summary)), tuple(points))


def as_read(facts: Any) -> Any:
    """As a file would give it back; what is no finite number is null."""
    return json.loads(json.dumps(facts, default=str), parse_constant=lambda _: None)


def _facts(m: Manifest, summary: Mapping[str, Any]) -> dict[str, Any]:
    options = m.journey.get("options") or {}
    return {
        "made_by": m.made_by, "definitions": m.definitions, "schema_version": m.schema_version,
        "whywait_version": m.whywait_version, "date": day_of(m.zero_unix_ns), "model": m.engine.get("model"),
        "workload": m.workload or None, "slo": dict(m.slo),
        "seed": m.workload.get("seed", None if m.made_by == "imported" else m.seed),
        "slo_of_classes": summary.get("slo_of_classes") or {},
        "engine": {k: v for k, v in m.engine.items() if k not in ("model", "model_shape")},
        "machine": {k: v for k, v in m.machine.items() if k not in ("engine_rates", "engine_is_local")},
        "asked": {k: options.get(k, m.endpoint.get(k)) for k in ("dialect", "stream", "body", "processes")},
        "command": list(m.command), "partial": m.partial_reason or "cut short" if m.partial else "",
        "invalid": list(summary.get("invalid") or ()), "described": m.engine.get("described"),
    }  # fmt: skip


def of_summary(summary: Mapping[str, Any], name: str, manifest: Manifest | None = None) -> Digest:
    """Of a ``summary.json`` without its tables, and the manifest where that is beside it.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: it is not what ``analyze.summary`` makes.
    """
    known = ("made_by", "definitions", "schema_version", "whywait_version", "slo", "slo_of_classes", "described")
    facts = {k: summary.get(k) for k in known}
    facts |= {"slo": dict(summary.get("slo") or {}), "partial": "cut short" if summary.get("partial") else ""}
    facts |= {"invalid": list(summary.get("invalid") or ()), "model": None, "workload": None, "seed": None}
    if manifest is not None:
        facts = _facts(manifest, summary)
    points = [_bare(p) for p in summary["points"]]
    return Digest(name, "summary", as_read(facts), tuple(points))


def with_repeats(first: Digest, others: Sequence[Digest]) -> Digest:
    """``first`` with the figures of further runs of the same, so that what differs between runs is known. A load point
    that one of them lacks has no repeats."""
    points = []
    at = [dict(zip(d.places, d.points, strict=True)) for d in others]
    for place, p in zip(first.places, first.points, strict=True):
        same = [points_of[place] for points_of in at if place in points_of]
        found: dict[str, tuple[float, ...]] = {}
        if len(same) == len(others):
            for name in p.figures:
                values = [q.figures.get(name) for q in (p, *same)]
                if all(v is not None for v in values):
                    found[name] = tuple(float(v) for v in values if v is not None)
        points.append(replace(p, repeats=found))
    return replace(first, points=tuple(points), runs=1 + len(others))


def day_of(unix_ns: int) -> str | None:
    """UTC, to the second; None where the Run has no clock (simulated, imported)."""
    if unix_ns <= 0:
        return None
    return datetime.datetime.fromtimestamp(unix_ns / NS_PER_S, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _point(run: Run, point: Mapping[str, Any], acc: RequestAccount, priced: Mapping[str, Any] | None) -> Point:
    number = int(point["point"])
    one = run.point(number)
    w, c = window_of(one), content(one)
    found = _bare(point)
    more = {n: v for n, v in compare.figures(run, point).items() if n not in found.figures}
    figures, bounds, notes = {**found.figures, **more}, dict(found.bounds), {}
    if priced is not None:
        for name, value, low, high, note in _prices(priced):
            figures[name], bounds[name], notes[name] = value, (low, high), note
    rows, classes = _rows(one, c, w, (acc, np.flatnonzero(acc.point == number)))
    derived = tuple(p for p, v in point["phases"].items() if v["how"] == "derived")
    return replace(
        found, figures=figures, bounds=bounds, notes=notes, rows=rows, classes=classes,
        pieces=_with(_pieces(run, one, c, w), _phase_pieces(one, w) if derived else {}), derived=derived,
    )  # fmt: skip


def _bare(p: Mapping[str, Any]) -> Point:
    """What the summary of a point tells by itself.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: it is damaged.
    """
    figures: dict[str, float | None] = {}
    bounds: dict[str, tuple[float | None, float | None]] = {}
    for name in SPREAD:
        known = p.get(name) or {}
        for q in AT:
            figures[f"{name}.{q}"] = number(known.get(q), f"{name}.{q}")
            low, high = (known.get("ci") or {}).get(q) or (None, None)
            bounds[f"{name}.{q}"] = (number(low), number(high))
    figures |= {n: _at(p, n) for n in compare.METRICS if n not in figures}
    low, high = p.get("output_tokens_per_s_ci") or (None, None)
    bounds["output_tokens_per_s"] = (number(low), number(high))
    figures |= {compare.PHASE + k: number(v.get("ms"), f"phases.{k}") for k, v in (p.get("phases") or {}).items()}
    shares = (p.get("occupancy") or {}).get("shares") or {}
    figures |= {compare.DEVICE + k: number(shares.get(k)) for k in CATEGORIES}
    counts = {k: int(number(v, k) or 0) for k, v in p["counts"].items()}
    tried = sum(counts.values()) - sum(counts.get(k, 0) for k in UNTRIED)
    figures["failed_share"] = 1 - counts.get("ok", 0) / tried if tried else None
    w = p["window"]
    seconds = number((w["end_ns"] - w["start_ns"]) / NS_PER_S) or 0.0
    busy = number((p.get("in_flight") or {}).get("mean"), "in_flight.mean") or 0.0
    label = None if p["label"] is None else str(p["label"])
    return Point(str(p["mode"]), number(p["target"], "target"), label, seconds, busy, figures, bounds, counts)


def number(x: Any, what: str = "a figure") -> float | None:
    """``what`` out of a file; None stays unknown.

    Raises:
        ValueError: it is no finite number, such as NaN or a text.
    """
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, Real) or not math.isfinite(x):
        raise ValueError(f"{what} is {x!r:.40}, not a number")
    return float(x)


def _prices(priced: Mapping[str, Any]) -> list[tuple[str, float | None, float | None, float | None, str]]:
    """Energy and money per good request with their bounds, and by what: the meter, or the first offer."""
    e = priced["energy"]
    each = e["per_good_request"]
    out = [(ENERGY, each["value"], each["low"], each["high"], str(e["how"] or each["why"] or ""))]
    for offer in priced["money"][:1]:
        each = offer["per_good_request"]
        said = f"{offer['currency']}, {offer['name']} of {offer['date']}"
        out.append((COST, each["value"], each["low"], each["high"], said))
    return out


def _rows(one: Run, c: Content, w: Window, acc: tuple[RequestAccount, Array]) -> tuple[dict[str, Array], Any]:
    """Columns of :class:`Point`, and the names of the classes."""
    req, lat = one.requests, per_request(one)
    names = [str(v or "") for v in req["class"]]
    classes = tuple(sorted(set(names)))
    code = {n: i for i, n in enumerate(classes)}
    begin = (lat.origin_ns - float(one.points["start_ns"][0])) / NS_PER_S
    cols: dict[str, Array] = {
        "rank": req["id"] - (int(req["id"].min()) if len(req) else 0),
        "asked_in": _first_known(req["asked_prompt_tokens"], req["prompt_tokens"]),
        "asked_out": req["asked_output_tokens"],
        "klass": np.array([code[n] for n in names], dtype=np.int64),
        "begin_s": begin,
        "ok": lat.ok,
        "good": meets(one, one.manifest.slo, c, lat),
        "due": was_due(one),
        "tried": ~np.isin(req["outcome"], [OUTCOMES.index(k) for k in UNTRIED]),
        "inside": np.ones(len(req), bool) if w.whole else starts_inside(one, w.start_ns, w.end_ns),
        **{name: getattr(lat, name) for name in TIMED},
    }
    whole, mine = acc
    for i, phase in enumerate(PHASES):
        cols[compare.PHASE + phase] = whole.phases[mine, i] / NS_PER_MS
    for (phase, cause), ns in whole.cause_ns.items():
        if cause != "unknown" and ns[mine].any():
            cols[f"{compare.CAUSE}{phase}.{cause}"] = ns[mine] / NS_PER_MS
    return thinned({k: v[np.argsort(cols["rank"], kind="stable")] for k, v in cols.items()}, MOST_ROWS), classes


def thinned(cols: dict[str, Array], most: int) -> dict[str, Array]:
    """At most ``most`` rows, spread over the schedule and chosen by their place in it alone: two runs of one schedule
    keep the same ones."""
    if len(cols["rank"]) <= most:
        return cols
    order = np.argsort(cols["rank"] * 2_654_435_761 % 2**32, kind="stable")[:most]
    keep = np.sort(order)
    return {k: v[keep] for k, v in cols.items()}


def _pieces(run: Run, one: Run, c: Content, w: Window) -> dict[str, Array] | None:
    """Rates and device shares of equal pieces of the window; None where it is shorter than a second."""
    if w.seconds < 1 or not len(one.requests):
        return None
    ok = per_request(one).ok
    good = meets(one, one.manifest.slo, c)
    edges = np.linspace(w.start_ns, w.end_ns, PIECES + 1).astype(np.int64)
    spans = [replace(w, start_ns=a, end_ns=b) for a, b in itertools.pairwise(edges.tolist())]
    length = w.seconds / PIECES
    out: dict[str, Array] = {}
    for tokens, requests, which in (("output_tokens_per_s", "requests_per_s", ok),
                                    ("effective_tokens_per_s", "goodput_requests_per_s", good)):  # fmt: skip
        counted, _ = token_bins(one, c, w, which, PIECES)
        if counted is not None:
            out[tokens] = counted / length
        # Those that ended in a piece: spread over all they took, neighbours would differ too little from each other.
        out[requests] = np.histogram(one.requests["end_ns"][which], edges)[0] / length
    accounts = [device_account(run, s.start_ns, s.end_ns) for s in spans]
    for k in CATEGORIES:
        out[compare.DEVICE + k] = np.array([a.ns[k] / a.total_ns if a.total_ns else 0.0 for a in accounts])
    return out


def _phase_pieces(one: Run, w: Window) -> dict[str, Array]:
    """Phases that only the engine's histograms know (mean ms per request), in pieces of the window; a piece that they
    do not cover is NaN."""
    edges = np.linspace(w.start_ns, w.end_ns, FEW_PIECES + 1).astype(np.int64)
    which = np.searchsorted(edges, np.nan_to_num(one.requests["sent_ns"], nan=-1), side="right") - 1
    inside = (which >= 0) & (which < FEW_PIECES)
    numbers = np.arange(FEW_PIECES)
    rows = one.points.where(np.zeros(FEW_PIECES, dtype=np.int64))
    steady = {"steady_start_ns": edges[:-1].astype(float), "steady_end_ns": edges[1:].astype(float)}
    points = rows.replace(point=numbers, start_ns=edges[:-1], end_ns=edges[1:], **steady)
    requests = one.requests.replace(point=np.clip(which, 0, FEW_PIECES - 1)).where(inside)
    cut = Run(one.manifest, points, requests, one.chunks.where(np.isin(one.chunks["id"], requests["id"])),
              one.steps, one.readings)  # fmt: skip
    acc = account(cut)
    out = {p: np.full(FEW_PIECES, np.nan) for p in PHASES}
    for i in numbers.tolist():
        found = point_account(cut, i, acc) if i in acc.how else None
        for p, v in (found["phases"] if found else {}).items():
            out[p][i] = v["ms"]
    return {compare.PHASE + p: v for p, v in out.items()}


def _with(a: dict[str, Array] | None, b: dict[str, Array]) -> dict[str, Array] | None:
    return {**(a or {}), **b} if a or b else None


def _first_known(a: Array, b: Array) -> Array:
    found: Array = np.where(np.isnan(a), b, a)
    return found


def _at(p: Mapping[str, Any], name: str) -> float | None:
    found: Any = p
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if isinstance(found, bool) else number(found, name)


__all__ = ["AT", "COST", "ENERGY", "PER_TIME", "SPREAD", "TIMED", "Digest", "Point", "digest", "of_summary", "told"]
