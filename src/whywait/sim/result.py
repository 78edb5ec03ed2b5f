"""What the kernel found as a Run, so that everything that reads a measured Run reads it too."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.core.columns import FAULTS, OUTCOMES
from whywait.core.run import Manifest, Run
from whywait.core.table import Table
from whywait.physics.dtypes import bytes_of
from whywait.physics.memory import weights_bytes
from whywait.physics.models import Shape
from whywait.sim import gauges, tokens
from whywait.sim.deployment import Deployment, Layout, Precision
from whywait.sim.loads import Options, Prepared
from whywait.sim.power import Drawn, drawn
from whywait.sim.service import Times
from whywait.sim.state import Result
from whywait.units import NS_PER_S

GAP_S = 1.0  # between load points, and before the first
TABLE = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "tensorrt-llm",
    "llama.cpp": "llama.cpp",
    "static": "static batching",
}
OK, TIMEOUT, CENSORED, NEVER, REFUSED = (
    OUTCOMES.index(x) for x in ("ok", "timeout", "censored", "never_sent", "http_error")
)
SERVICE, NO_FAULT, USER = (FAULTS.index(x) for x in ("service", "none", "user"))
MODELLED = {
    "what": "every figure of this run is modelled",
    "why": "a simulator made it: a scheduler over a table of step times; no such service was measured",
    "next": "calibrate it on a run of your own (docs/what-if.md)",
}


class Point(NamedTuple):
    """One load point: how it was offered and what came out. ``label`` as in the points table."""

    mode: str
    target: float
    prepared: Prepared
    found: Result
    times: Times
    label: str | None = None


def run_of(d: Deployment, points: list[Point], options: Options, facts: dict[str, Any] | None = None) -> Run:
    """The load points one after another as one Run; ``facts`` are further fields of its manifest."""
    parts: dict[str, list[Table]] = {k: [] for k in ("requests", "chunks", "steps", "readings")}
    rows, at, first_id = [], GAP_S, 0
    counted = gauges.Counters()
    for number, p in enumerate(points):
        start = round(at * NS_PER_S)
        req, chunks, row = _point(p, (number, start, first_id), options)
        rows.append(row)
        parts["requests"].append(req)
        if chunks is not None:
            parts["chunks"].append(chunks)
        power = drawn(d, p.prepared, p.found)
        if options.keep != "none":
            parts["steps"].append(_steps(p, power, start))
            parts["readings"].append(gauges.readings(d, p, power, (start, row["end_ns"]), counted))
        at, first_id = row["end_ns"] / NS_PER_S + GAP_S, first_id + len(p.prepared.schedule)
    tables = {k: Table.concat(v) if v else Table.empty(k) for k, v in parts.items()}
    given = {**_manifest(d, points, options), **(facts or {})}
    given["doubts"] = [*given["doubts"], *unfinished(points)]
    manifest = Manifest(made_by="simulated", **given)
    return Run(manifest, Table.from_rows("points", rows), **tables)


def unfinished(points: list[Point]) -> list[dict[str, str]]:
    """A doubt per load point whose requests did not all end although nothing stopped them: a defect of the simulator,
    and its figures are of the others only."""
    out = []
    for p in points:
        stuck = int((np.isnan(p.found.last_s) & ~p.found.refused).sum())
        if stuck and math.isinf(p.prepared.settings.limit_s):
            what = f"{stuck:,} of {len(p.found.last_s):,} requests at {p.mode} {p.target:g} never ended"
            why = "the simulated scheduler stood still, a defect of whywait; the figures leave these requests out"
            out.append({"what": what, "why": why, "next": "do not use the figures, and report the command"})
    return out


def _point(p: Point, place: tuple[int, int, int], options: Options) -> tuple[Table, Table | None, dict[str, Any]]:
    number, start, first_id = place
    t, s, w = p.times, p.prepared.schedule, p.prepared.warmed
    n = len(s)

    def ns(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.rint(x * NS_PER_S) + start

    found = tokens.tokens_of(p.prepared, p.found, t) if options.keep == "chunks" else None
    outcome, fault, detail = _outcomes(p, options)
    sent, first, last = ns(t.sent), ns(t.first), ns(t.last)
    accepted = np.fmin(ns(t.accepted), first)
    made = _made(p, found)
    thinking = np.minimum(s.thinking_tokens, made)
    first_answer = _first_answer(p, found, first, last, start)
    none = np.full(n, np.nan)
    unsent = outcome == NEVER
    cached = np.where(np.isnan(t.first), np.nan, p.found.cached[w:])
    ids = np.arange(first_id, first_id + n)
    cols: dict[str, Any] = {
        "point": np.full(n, number), "id": ids, "class": np.array(s.class_names, dtype=object)[s.klass],
        "session_id": np.where(s.session_id < 0, np.nan, s.session_id - s.id[0] + first_id if n else 0),
        "turn": s.turn.astype(float), "replica": np.maximum(p.found.replica[w:], 0), "attempt": np.ones(n, np.int64),
        "due_ns": np.where(np.isnan(t.due), np.nan, ns(t.due)), "sent_ns": sent, "accepted_ns": accepted,
        "first_ns": first, "first_answer_ns": first_answer, "last_ns": last,
        "end_ns": np.where(unsent, np.nan, np.fmax(ns(t.end), np.nan_to_num(last))),
        "connect_ns": np.where(unsent, np.nan, 0.0),
        "asked_prompt_tokens": s.prompt_tokens.astype(float), "asked_output_tokens": s.output_tokens.astype(float),
        "prompt_tokens": np.where(unsent, np.nan, s.prompt_tokens), "output_tokens": np.where(unsent, np.nan, made),
        "reasoning_tokens": np.where(s.thinking_tokens > 0, thinking, np.nan), "cached_tokens": cached,
        "outcome": outcome, "fault": fault, "detail": detail, "status": np.where(outcome == OK, 200.0, np.nan),
        "finish_reason": np.array([None, "length"], dtype=object)[(outcome == OK).astype(int)],
        "first_chunk_tokens": np.where(np.isnan(first), np.nan, 1.0),
        "engine_queue_ms": (t.scheduled - t.accepted) * 1e3,
        "engine_prefill_ms": (t.first - t.scheduled) * 1e3 - reply_ms(p),
        "engine_decode_ms": np.where(t.ok, (t.last - t.first) * 1e3, none),
        "engine_ttft_ms": (t.first - t.accepted) * 1e3 - reply_ms(p),
        "engine_e2e_ms": np.where(t.ok, (t.last - t.accepted) * 1e3 - reply_ms(p), none),
        "engine_handover_ms": p.found.handover_s[w:] * 1e3, "handover_bytes": _handed(p),
        "engine_prefill_tokens": s.prompt_tokens - cached + np.where(np.isnan(cached), 0, p.found.recomputed[w:]),
    }  # fmt: skip
    chunks = None
    if found is not None:
        count = np.bincount(found.row, minlength=n).astype(float)
        cols["content_chunks"] = count
        at = np.clip(ns(found.t), first[found.row], last[found.row])
        chunks = Table("chunks", {"id": ids[found.row], "t_ns": at.astype(np.int64), "tokens": found.tokens,
                                  "kind": tokens.kind_of(found, s.thinking_tokens),
                                  "clock": np.full(len(at), tokens.KERNEL_CLOCK)})  # fmt: skip
    ends = cols["end_ns"][~np.isnan(cols["end_ns"])]
    due = cols["due_ns"][~np.isnan(cols["due_ns"])]
    row = {"point": number, "mode": p.mode, "target": None if p.mode == "trace" and np.isnan(p.target) else p.target,
           "planned": n, "start_ns": start, "label": p.label,
           "end_ns": int(max(ends.max(initial=start), due.max(initial=start)))}  # fmt: skip
    return Table("requests", cols), chunks, row


def _handed(p: Point) -> NDArray[np.float64]:
    """Bytes of KV that each request's prefill engine handed over; NaN where none were."""
    moved = ~np.isnan(p.found.handover_s[p.prepared.warmed :])
    return np.where(moved, np.rint(p.prepared.schedule.prompt_tokens * p.prepared.kv_token_bytes), np.nan)


def reply_ms(p: Point) -> float:
    return p.prepared.pools[-1].reply_s * 1e3


def _outcomes(p: Point, options: Options) -> tuple[Any, Any, Any]:
    t, w = p.times, p.prepared.warmed
    n = len(p.prepared.schedule)
    outcome = np.full(n, CENSORED)
    late = (
        ~t.ok
        & ~np.isnan(t.sent)
        & (t.end - np.where(np.isnan(t.origin), t.sent, t.origin) >= options.timeout_s * (1 - 1e-12))
    )
    outcome[late], outcome[t.ok], outcome[np.isnan(t.sent)] = TIMEOUT, OK, NEVER
    refused = p.found.refused[w:].astype(bool)
    outcome[refused] = REFUSED
    fault = np.where(outcome == TIMEOUT, SERVICE, NO_FAULT)
    fault[refused] = USER
    detail = np.full(n, None, dtype=object)
    detail[refused] = "longer than the engine's context or KV space"
    return outcome.astype(np.int8), fault.astype(np.int8), detail


def _made(p: Point, found: tokens.Tokens | None) -> NDArray[np.float64]:
    """Tokens that reached the client: of requests given up midway, in proportion to the time."""
    t, w, output = p.times, p.prepared.warmed, p.prepared.schedule.output_tokens.astype(float)
    if found is not None:
        part = np.bincount(found.row, weights=found.tokens, minlength=len(output))
    else:
        whole = p.found.last_s[w:] - p.found.first_s[w:]
        with np.errstate(divide="ignore", invalid="ignore"):
            part = 1 + np.floor((output - 1) * np.clip((t.last - t.first) / whole, 0, 1))
        part = np.where(np.isnan(t.first), 0, np.nan_to_num(part, nan=1.0))
    return np.where(t.ok, output, part)


def _first_answer(p: Point, found: tokens.Tokens | None, first: Any, last: Any, start: int) -> Any:
    """When thinking ended: the chunk with the first token after it, else in proportion."""
    s, t = p.prepared.schedule, p.times
    thinking, output = s.thinking_tokens, np.maximum(s.output_tokens - 1, 1)
    if found is not None:
        out = np.full(len(s), np.nan)
        answer = np.flatnonzero(tokens.kind_of(found, thinking) == tokens.ANSWER)[::-1]
        out[found.row[answer]] = np.rint(found.t[answer] * NS_PER_S) + start  # the earliest is written last
        return np.clip(out, first, last)
    share = np.where(t.ok & (thinking < s.output_tokens), thinking / output, np.nan)
    return np.where(thinking == 0, first, np.rint(first + (last - first) * np.minimum(share, 1)))


def _steps(p: Point, power: Drawn, start: int) -> Table:
    s, shift = p.found.steps, p.times.shift_s
    keep = s.t_s >= shift
    t, took = (np.rint((x[keep]) * NS_PER_S).astype(np.int64) for x in (s.t_s - shift, s.took_s))
    one = sum(p.prepared.settings.engines) == 1
    replica = np.full(int(keep.sum()), np.nan) if one else s.replica[keep].astype(float)
    return Table("steps", {
        "t_ns": t + start, "took_ns": took, "prefill_tokens": s.prefill_tokens[keep],
        "decode_seqs": s.decode_seqs[keep],
        "kv_used": s.kv_used[keep], "bound_by": power.bound_by[keep], "replica": replica, "count": s.n[keep],
    })  # fmt: skip


def describe(d: Deployment) -> str:
    """In a line: model, precision, devices, layout, engine."""
    p, at = d.precision, d.layout
    types = p.weights + (f", KV {p.kv}" if p.kv != "bf16" else "") + (f", experts {p.experts}" if p.experts else "")
    ways = [f"{k}={getattr(at, k)}" for k in ("tp", "pp", "dp", "ep") if getattr(at, k) > 1]
    ways += [f"pd={d.split.prefill}:{d.split.decode}"] if d.split else []
    ways += [f"replicas={d.replicas}"] if d.replicas > 1 else []
    where = f"{d.devices} × {d.machine.name}" + (f" ({', '.join(ways)})" if ways else "")
    return f"{d.model.name} ({types}) on {where}, {d.engine.policy}"


def shape_of(d: Deployment) -> Shape:
    """The model in totals, as a manifest keeps it."""
    a = d.model
    table = float(a.vocab * a.hidden)
    # The tables are counted in 16 bits by weights_bytes, so one precision gives the count of parameters.
    params = weights_bytes(a, Precision(), Layout()) / bytes_of("bf16")
    up = 3 if a.gated else 2
    expert = float(a.expert_layers * a.experts * up * a.hidden * a.expert_inter)
    width = a.heads * a.head_size if not a.latent else a.heads * (2 * a.latent + a.rope) / 2
    windowed = a.window if a.window and a.window_layers == a.attention_layers else None
    return Shape(params, weights_bytes(a, d.precision, Layout()), float(a.attention_layers * a.kv_values),
                 float(a.attention_layers * width), a.layers, 0.0 if a.tied else table, expert,
                 a.chosen / a.experts if a.experts else 1.0, windowed, a.source)  # fmt: skip


def _manifest(d: Deployment, points: list[Point], o: Options) -> dict[str, Any]:
    e, capacities = d.engine, points[0].prepared.capacities
    engines = points[0].prepared.settings.engines
    last, count = capacities[-1], engines[-1]
    engine = {
        "name": TABLE[e.policy], "kind": "simulated", "model": d.model.name, "model_shape": shape_of(d).as_dict(),
        "slots": e.max_seqs * count, "kv_tokens": last.tokens * count, "kv_blocks": max(c.blocks for c in capacities),
        "block_size": e.block, "devices": d.devices, "enable_prefix_caching": e.prefix_cache,
        "kv_dtype": "f16" if d.precision.kv == "bf16" else d.precision.kv,
        "ctx_per_slot": e.max_context or d.model.max_context,
        "described": describe(d), "deployment": plain(d), "capacity": [c.as_dict() for c in capacities],
    }  # fmt: skip
    machine = {"gpus": [{"name": d.machine.name} for _ in range(d.devices)], "source": d.machine.source,
               "engine_is_local": None}  # fmt: skip
    if d.split is not None:  # engines of each pool, devices of each engine
        first = d.split.prefill_layout or d.layout
        engine["pools"] = {"prefill": [d.replicas * d.split.prefill, first.devices],
                           "decode": [d.replicas * d.split.decode, d.layout.devices]}  # fmt: skip
    return {"engine": engine, "machine": machine, "slo": dict(o.slo), "doubts": [dict(MODELLED)],
            "clock": [{"offset_error_ns": 0, "steps": 0}]}  # fmt: skip


def plain(d: Deployment) -> dict[str, Any]:
    """A deployment as the plain values that a manifest may hold."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(d)))
    return found
