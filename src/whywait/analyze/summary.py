"""A Run in figures: the dict with stable keys that ``summary.json`` holds, and the knee of a sweep."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from whywait.analyze import passive
from whywait.analyze.bill import energy_figures
from whywait.analyze.classes import by_class as figures_by_class
from whywait.analyze.counters import gauge
from whywait.analyze.goodput import goodput
from whywait.analyze.integrity import miscounted, strange
from whywait.analyze.latency import latency_summary, per_request
from whywait.analyze.occupancy import device_account
from whywait.analyze.offered import errors, invalid, offered
from whywait.analyze.parts import by_class, by_latency
from whywait.analyze.phases import DECODE, PHASES, PREFILL, STALL, RequestAccount, account, point_account
from whywait.analyze.pools import unbalanced
from whywait.analyze.roofline import OTHER, apportion, roofline
from whywait.analyze.speculation import speculation
from whywait.analyze.stats import Doubt, t975
from whywait.analyze.stats import summary as of_values
from whywait.analyze.streams import Content, content
from whywait.analyze.thinking import thinking
from whywait.analyze.trust import doubts
from whywait.analyze.window import Window, in_flight, request_rate, starts_inside, token_bins, token_rate, window_of
from whywait.core.columns import OUTCOMES
from whywait.core.run import DEFINITIONS, Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS, load_name

GAIN = 0.1  # less growth of throughput than this for a doubling of the load is no growth
_BLOCKS = 10  # pieces of the window from whose spread the interval of the token rate is made

_WHY_NULL = {
    "kv_use": (
        "the engine does not tell its KV space or what of it is used",
        "give the engine's metrics page (llama.cpp: --metrics --slots)",
    ),
    "queue": ("no reading of waiting requests", "give the engine's metrics page"),
    "memory_bytes": ("no reading of the engine's memory", "run on the engine's host, or give a GPU exporter"),
    "power_w": ("no power meter could be read", "run where NVML or RAPL are readable"),
    "energy_j_per_good_request": ("no energy was read, or nothing is known to be good", "whywait bill RUN says which"),
    "output_tokens_per_s": ("the service does not say how many tokens it sent", "ask for usage (include_usage)"),
    "answer_tokens_per_s": ("reasoning tokens are not told apart in the usage", "ask for usage with its details"),
    "cached_share": ("the service does not say which prompt tokens were cached", "ask for usage with its details"),
}


def summarize(run: Run, acc: RequestAccount | None = None) -> dict[str, Any]:
    """The summary of ``run``: plain JSON values, None where unknown with the reason in ``doubts``.

    Keys: ``whywait_version, schema_version, definitions, made_by, partial, invalid`` (see ``offered.py``), ``slo,
    slo_of_classes, points, knee, verdicts, doubts``; ``verdicts`` is left empty for the judge. Each point has ``point,
    label, mode, target, window``, the latency summaries ``first_byte_ms, ttft_ms, ttfa_ms, e2e_ms, tail_ms, tpot_ms,
    chunk_gap_ms, itl_ms`` and the engine's own ``engine_ttft_ms`` (``stats.summary``), rates per
    second of the window ``output_tokens_per_s`` (of ``ok``
    requests, with ``output_tokens_per_s_ci``), ``wasted_tokens_per_s`` (of the others), ``peak_tokens_per_s,
    effective_tokens_per_s, answer_tokens_per_s, requests_per_s, goodput_requests_per_s``, ``goodput_share`` of all due
    requests, ``classes`` (see ``classes.py``), ``offered`` and ``errors`` (see ``offered.py``), ``counts`` by outcome,
    ``in_flight``, ``thinking``, ``cached_share``, ``acceptance``, ``tokens_per_step`` and ``draft_tokens_per_request``
    (see ``speculation.py``), ``engine_steps``, ``kv_use``, ``queue``, ``memory_bytes``, ``power_w``,
    ``energy_j_per_good_request``, ``energy_j_per_million_effective_tokens``, ``energy_how`` and ``energy_state`` (see
    ``bill.energy_figures``), ``phases``, ``by_latency`` and ``by_class`` (see ``parts.py``), ``occupancy``, ``mbu``,
    ``mfu`` and ``decode_step`` (see ``roofline.py``). Latencies are those of ``ok`` requests that began in the window;
    counts and shares are of all. ``acc`` is ``account(run)`` when
    the caller has it.
    """
    acc = account(run) if acc is None else acc
    points, by_point = [], []
    for number in run.points["point"].tolist():
        point, more = summarize_point(run, number, acc)
        points.append(point)
        by_point += [(number, d) for d in more]
    m = run.manifest
    return {
        "whywait_version": m.whywait_version,
        "schema_version": m.schema_version,
        "definitions": DEFINITIONS,
        "made_by": m.made_by,
        "described": m.engine.get("described"),
        "partial": m.partial,
        "invalid": invalid(points),
        "slo": dict(m.slo),
        "slo_of_classes": {c["name"]: c["slo"] for c in m.workload.get("classes") or () if c.get("slo")},
        "points": points,
        "knee": knee(points),
        "verdicts": [],
        "doubts": _named([*doubts(run), *acc.doubts, *_together(by_point, len(points)), *_nulls(points)], points),
    }


def _named(found: list[Doubt], points: list[dict[str, Any]]) -> list[Doubt]:
    """Load points by what they are ("concurrency 16"), not by a number that no table shows."""
    names = {p["point"]: load_name(p["mode"], p["target"], p["label"]) for p in points}

    def name(text: str) -> str:
        return re.sub(r"\bpoint (\d+)((?:, \d+)*)", lambda m: ", ".join(
            names.get(int(n), f"point {n}") for n in [m[1], *m[2].split(", ")[1:]]), text)  # fmt: skip

    return [{k: name(v) for k, v in d.items()} for d in found]


def _together(found: list[tuple[int, Doubt]], points: int) -> list[Doubt]:
    """The same doubt at several points is one doubt that names them."""
    at: dict[tuple[str, ...], list[int]] = {}
    for number, d in found:
        at.setdefault(tuple(d.values()), []).append(number)
    out: list[Doubt] = []
    for (what, why, next_), numbers in at.items():
        where = "" if len(numbers) == points else f" at point {', '.join(map(str, numbers))}"
        out.append({"what": what + where, "why": why, "next": next_})
    return out


def summarize_point(run: Run, number: int, acc: RequestAccount | None = None) -> tuple[dict[str, Any], list[Doubt]]:
    """One entry of ``points`` (see :func:`summarize`) and the doubts that arose; ``acc`` is ``account(run)``."""
    acc = account(run) if acc is None else acc
    one = run.point(number)
    w, c = window_of(one), content(one)
    inside = starts_inside(one, w.start_ns, w.end_ns) if not w.whole else np.ones(len(one.requests), dtype=bool)
    latency, found = latency_summary(one, inside, c)
    found += miscounted(one, c) + strange(one)
    lat = per_request(one)
    ok = lat.ok
    tokens, peak, missing = token_rate(one, c, w, ok)
    good = goodput(one, run.manifest.slo, w, c)
    found += _uncounted(missing, good.uncertain)
    top, mean = in_flight(one, w.start_ns, w.end_ns)
    roof, said = roofline(run, number), speculation(run, number, inside, (w.start_ns, w.end_ns))
    phases, more = _phases(run, number, acc, inside, roof["decode_step"])
    point = {
        "point": number,
        "label": one.points["label"][0],
        "mode": one.points.text("mode")[0],
        "target": _value(one.points["target"][0]),
        "window": _window(w),
        **latency,
        "engine_ttft_ms": _engine_ttft(run, one, ok & inside, w),
        "output_tokens_per_s": tokens,
        "output_tokens_per_s_ci": _rate_ci(one, c, w, ok),
        "wasted_tokens_per_s": token_rate(one, c, w, ~ok)[0],
        "peak_tokens_per_s": peak,
        "effective_tokens_per_s": good.effective_tokens_per_s,
        "answer_tokens_per_s": good.answer_tokens_per_s,
        "requests_per_s": request_rate(one, w, ok),
        "goodput_requests_per_s": good.requests_per_s,
        "goodput_share": good.share,
        "classes": figures_by_class(one, good, inside, w, lat),
        "offered": offered(one),
        "errors": errors(one),
        "counts": {name: int((one.requests["outcome"] == i).sum()) for i, name in enumerate(OUTCOMES)},
        "in_flight": {"peak": top, "mean": mean},
        "thinking": thinking(one, ok & inside, _work(acc, number)),
        "cached_share": _cached(one),
        "acceptance": said.acceptance,
        "tokens_per_step": said.tokens_per_step,
        "draft_tokens_per_request": said.per_request,
        "engine_steps": passive.steps(run, (w.start_ns, w.end_ns)),
        **_resources(run, w),
        **energy_figures(run, number, c, w),
        "phases": phases,
        "by_latency": by_latency(one, acc, inside),
        "by_class": by_class(one, acc, inside),
        "occupancy": _occupancy(run, w, roof["decode_step"]),
        **roof,
    }
    if passive.is_passive(one):
        own, found = passive.figures(run, (w.start_ns, w.end_ns))
        return {**point, **own}, found
    return point, [*found, *more, *unbalanced(point["occupancy"])]


def _uncounted(missing: int, uncertain: int) -> list[Doubt]:
    found: list[Doubt] = []
    if missing:
        found.append(
            {
                "what": f"{missing} requests are not in the token rates",
                "why": "the service gave no usage for them, and a chunk is not a token",
                "next": "ask for usage (stream_options.include_usage)",
            }
        )
    if uncertain:
        found.append(
            {
                "what": f"{uncertain} requests may or may not be within the SLO",
                "why": "their bounds lie on both sides of it",
                "next": "ask the service for token counts per chunk; look for buffering",
            }
        )
    return found


def knee(points: list[dict[str, Any]]) -> int | None:
    """Index of the point after which throughput no longer grows while waiting does, or None.

    Over points of one mode (those with a label only if all have one: they were for something else) by rising target:
    the first whose successors all gain less than 10 % in output tokens per second (requests where tokens are unknown)
    per doubling of the target, and with the next of which the queue, the time to first token or end-to-end time grows.
    Where both rates have intervals and they leave room for a full doubling, there is no evidence and so no knee.
    """
    if len({p["mode"] for p in points}) != 1:
        return None
    plain = [i for i, p in enumerate(points) if not p.get("label")] or range(len(points))
    order = [i for i in plain if points[i]["target"] and _throughput(points[i])]
    order.sort(key=lambda i: float(points[i]["target"]))
    for at, i in enumerate(order[:-1]):
        later = [points[j] for j in order[at + 1 :] if points[j]["target"] > points[i]["target"]]
        if later and all(_flat(points[i], b) for b in later) and _waits(points[i], later[0]):
            return i
    return None


def _throughput(p: dict[str, Any]) -> float | None:
    found = p["output_tokens_per_s"] if p["output_tokens_per_s"] is not None else p["requests_per_s"]
    return None if found is None else float(found)


def _flat(a: dict[str, Any], b: dict[str, Any]) -> bool:
    before, after = _throughput(a), _throughput(b)
    doublings = math.log2(b["target"] / a["target"])
    if not before or after is None or (after / before) ** (1 / doublings) - 1 >= GAIN:
        return False
    low, high = (p.get("output_tokens_per_s_ci") or [None, None] for p in (a, b))
    if low[0] and high[1]:
        return bool(high[1] / low[0] < 2**doublings)
    return True


def _waits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.get("queue") is not None and b.get("queue") is not None and b["queue"] > a["queue"] + 0.5:
        return True
    for name in ("ttft_ms", "e2e_ms"):
        before, after = a[name]["p50"], b[name]["p50"]
        if before and after and after > before * (1 + GAIN):
            return True
    return False


def _rate_ci(one: Run, c: Content, w: Window, ok: Array) -> list[float | None]:
    """Interval of the mean token rate from the means of ten pieces of the window (batch means, Student's t)."""
    if w.seconds < 1:
        return [None, None]
    counted, _ = token_bins(one, c, w, ok, _BLOCKS)
    if counted is None:
        return [None, None]
    rates = counted * _BLOCKS / w.seconds
    half = t975(_BLOCKS - 1) * float(rates.std(ddof=1)) / math.sqrt(_BLOCKS)
    return [max(float(rates.mean()) - half, 0.0), float(rates.mean()) + half]


def _window(w: Window) -> dict[str, Any]:
    return {
        "start_ns": w.start_ns,
        "end_ns": w.end_ns,
        "whole_point": w.whole,
        "requests": w.requests,
        "dropped": w.dropped,
        "why": w.why or None,
    }


def _work(acc: RequestAccount, number: int) -> Array:
    """Prefill, and decode with its stalls, of each request of a point (int64 ns; requests × 2)."""
    spent = acc.phases[acc.point == number]
    out: Array = np.stack((spent[:, PREFILL], spent[:, DECODE] + spent[:, STALL]), axis=1)
    return out


def _cached(one: Run) -> float | None:
    cached, prompt = one.requests["cached_tokens"], one.requests["prompt_tokens"]
    known = ~np.isnan(cached) & ~np.isnan(prompt)
    total = float(prompt[known].sum())
    return float(cached[known].sum()) / total if total else None


def _engine_ttft(run: Run, one: Run, which: Array, w: Window) -> dict[str, Any]:
    """The engine's own time to first token, to stand beside ours: of the same requests where it tells each (spans),
    else its histogram over the window."""
    told = one.requests["engine_ttft_ms"][which]
    if not np.isnan(told).all():
        return of_values(told)
    return passive.latency(run, "ttft_seconds", (w.start_ns, w.end_ns))


def _resources(run: Run, w: Window) -> dict[str, Any]:
    """Readings of the window."""
    span, rd = (w.start_ns, w.end_ns), run.readings
    kv, queue = gauge(rd, "kv_use", span, combine="mean"), gauge(rd, "waiting", span)
    memory = gauge(rd, "memory_used_bytes", span, "gpu") or gauge(rd, "pss_bytes", span, "process/engine")
    memory = memory or gauge(rd, "rss_bytes", span, "process/engine")
    return {
        "kv_use": kv.mean if kv else None,
        "kv_use_max": kv.high if kv else None,
        "queue": queue.mean if queue else None,
        "queue_max": queue.high if queue else None,
        "memory_bytes": memory.high if memory else None,
    }


def _phases(
    run: Run, number: int, acc: RequestAccount, inside: Array, step: dict[str, Any] | None
) -> tuple[dict[str, Any], list[Doubt]]:
    """Mean phases per request that began in the window, failed ones too; of the point where requests say less."""
    rows = np.flatnonzero(acc.point == number)[inside]
    if not len(rows):
        return {}, []
    how, causes = acc.how[number], {k: dict(v) for k, v in acc.causes.get(number, {}).items()}
    if step is not None:  # what no cause takes of decode goes by the model of a step
        seen = causes.setdefault("decode", {})
        left = max(0.0, 1.0 - sum(seen.values()))
        seen.update({k: v * left for k, v in step["shares"].items() if k != OTHER and v})
    found, more = point_account(run, number, acc), []
    if found is not None:
        ms = {k: (v["ms"], v["how"]) for k, v in found["phases"].items()}
        causes, more = {k: v for k, v in causes.items() if how[k] == ms[k][1]}, found["doubts"]
    else:
        mean = acc.phases[rows].mean(axis=0) / NS_PER_MS
        ms = {p: (float(mean[i]), how[p]) for i, p in enumerate(PHASES)}
    total, told = sum(v for v, _ in ms.values()), acc.evidence.get(number, {})
    return {p: _phase(p, v, total, (causes.get(p, {}), told.get(p, ""))) for p, v in ms.items()}, more


def _phase(name: str, ms: tuple[float, str], total: float, why: tuple[dict[str, float], str]) -> dict[str, Any]:
    took, how = ms
    unseen = how == "unknown" and name != "unknown" and took == 0  # absent is null: nothing here could have seen it
    share = None if unseen or not total else took / total
    return {"ms": None if unseen else took, "share": share, "how": how, "causes": why[0], "evidence": why[1]}


def _occupancy(run: Run, w: Window, step: dict[str, Any] | None) -> dict[str, Any]:
    a = device_account(run, w.start_ns, w.end_ns)
    total = a.total_ns
    shares = {
        k: None if a.how[k] == "unknown" and k != "unknown" and not v else v / total if total else None
        for k, v in a.ns.items()
    }
    busy = [a.busy_low_ns / total, a.busy_high_ns / total] if total else [None, None]
    decode = None
    if step is not None and total:
        decode = {k: v / total for k, v in apportion(a.ns["decode_busy"], step["shares"]).items()}
    blocked = None if a.kv_blocked_ns is None or not total else a.kv_blocked_ns / total
    return {
        "devices": a.devices,
        "wall_ns": a.end_ns - a.start_ns,
        "shares": shares,
        "how": a.how,
        "busy": busy,
        "decode": decode,
        "kv_blocked": blocked,
        "pool_idle": a.pool_idle_ns / total if total else None,
        "notes": a.notes,
    }


def _nulls(points: list[dict[str, Any]]) -> list[Doubt]:
    out: list[Doubt] = []
    for key, (why, next_) in _WHY_NULL.items():
        at = [str(p["point"]) for p in points if p[key] is None]
        if at:
            where = "" if len(at) == len(points) else f" at point {', '.join(at)}"
            out.append({"what": f"{key} is unknown{where}", "why": why, "next": next_})
    for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
        at = [str(p["point"]) for p in points if p[key]["n"] == 0 and "passive" not in p]
        if at:
            why = "no request ended well with the stamps or token counts it takes"
            next_ = "see the counts of outcomes and the service's log"
            out.append({"what": f"{key} is unknown at point {', '.join(at)}", "why": why, "next": next_})
    return out


def _value(x: Any) -> float | None:
    return None if np.isnan(x) else float(x)
