"""A load point as a benchmark report of llm-d-benchmark, schema 0.2.1 (JSON, which is YAML too).

The schema is that of the package ``llmd-benchmark-report`` 0.2.1. It has no null: what a Run does not know is left out.
Figures are of the steady window by whywait's definitions, which ``scenario.load.native.config`` names; what the schema
has no place for (both accounts, doubts) is under ``results.profiling.whywait``.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

import numpy as np

from whywait.analyze.counters import joined, series
from whywait.analyze.latency import OK
from whywait.analyze.streams import gaps
from whywait.analyze.summary import summarize
from whywait.analyze.window import starts_inside
from whywait.core.columns import OUTCOMES
from whywait.core.table import Array
from whywait.report.export import Chosen
from whywait.units import NS_PER_S

VERSION = "0.2.1"
LEVELS = {"p0p1": 0.001, "p1": 0.01, "p5": 0.05, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9,
          "p95": 0.95, "p99": 0.99, "p99p9": 0.999}  # fmt: skip
INCOMPLETE = ("censored", "cancelled", "truncated")
UNSENT = OUTCOMES.index("never_sent")
#: Reading → (name in the schema, unit, factor, source it is taken from). A percentage is the mean over engines or
#: devices, all else their sum.
RESOURCES = (
    ("kv_use", "kv_cache_usage", "percent", 100.0, ""),
    ("running", "running_requests", "count", 1.0, ""),
    ("waiting", "waiting_requests", "count", 1.0, ""),
    ("power_watts", "power_consumption", "Watts", 1.0, "gpu"),
    ("busy_share", "gpu_utilization", "percent", 100.0, "gpu"),
    ("memory_used_bytes", "gpu_memory_usage", "bytes", 1.0, "gpu"),
    ("rss_bytes", "cpu_memory_usage", "bytes", 1.0, "process/engine"),
)


def reports(chosen: Chosen) -> dict[int, dict[str, Any]]:
    """A benchmark report for each chosen point: the schema describes one point of a sweep."""
    summary = summarize(chosen.run, chosen.account)
    return {p["point"]: _report(chosen, p, summary) for p in summary["points"] if p["point"] in chosen.points}


def _report(chosen: Chosen, p: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    number, row = p["point"], chosen.point_row(p["point"])
    seconds = (row["end_ns"] - row["start_ns"]) / NS_PER_S
    time = {"duration": f"PT{seconds:.6f}S"}
    if chosen.dated:
        time |= {"start": chosen.iso(row["start_ns"]), "end": chosen.iso(row["end_ns"])}
    label = str(chosen.run.manifest.engine.get("name") or "engine")
    about = {"uid": str(uuid.uuid5(uuid.UUID(chosen.uid), f"point {number}")), "eid": chosen.uid, "time": time,
             "description": f"{chosen.title}, {chosen.load(number)}"}  # fmt: skip
    told = {"phases": p["phases"], "occupancy": p["occupancy"], "window": p["window"], "offered": p["offered"],
            "counts": p["counts"], "goodput_share": p["goodput_share"], "slo": summary["slo"],
            "doubts": summary["doubts"], **chosen.labels_of(number)}  # fmt: skip
    return _known({
        "version": VERSION,
        "run": about,
        "scenario": {"stack": [_stack(chosen, label)], "load": _load(chosen, number)},
        "results": {
            "request_performance": {"aggregate": _aggregate(chosen, p)},
            "observability": {"components": [_seen(chosen, p, label)]},
            "profiling": {"whywait": told},
        },
    })  # fmt: skip


def _stack(chosen: Chosen, label: str) -> dict[str, Any]:
    """The service; a generic component where its accelerator, which the schema asks of an engine, is not known."""
    m = chosen.run.manifest
    native = {"args": {"command": m.engine.get("command")} if m.engine.get("command") else None,
              "config": {k: v for k, v in m.engine.items() if not isinstance(v, (dict, list))}}  # fmt: skip
    common = {"tool": label, "tool_version": str(m.engine.get("version") or "unknown")}
    model, gpu = m.engine.get("model"), _accelerator(chosen)
    if gpu is None or not model:
        standard: dict[str, Any] = {"kind": "generic", **common, "model": {"name": model} if model else None}
    else:
        layout = (m.engine.get("deployment") or {}).get("layout") or {}
        parallel = {k: int(layout[k]) for k in ("tp", "dp", "pp", "ep") if layout.get(k)}
        replicas = int((m.engine.get("deployment") or {}).get("replicas") or 1)
        standard = {"kind": "inference_engine", **common, "role": "replica", "replicas": replicas,
                    "model": {"name": model}, "accelerator": {**gpu, "parallelism": parallel}}  # fmt: skip
    return {"metadata": {"label": label, "cfg_id": _hash(native)}, "standardized": standard, "native": native}


def _accelerator(chosen: Chosen) -> dict[str, Any] | None:
    """Model and count of the devices, where the run names them."""
    m = chosen.run.manifest
    named = [g.get("name") for g in m.machine.get("gpus") or () if isinstance(g, dict) and g.get("name")]
    machine = ((m.engine.get("deployment") or {}).get("machine") or {}).get("name")
    name = named[0] if named else machine
    return None if not name else {"model": name, "count": int(m.engine.get("devices") or len(named) or 1)}


def _load(chosen: Chosen, number: int) -> dict[str, Any] | None:
    """The workload; None where not even the length of a prompt is known, which the schema asks for."""
    m, row = chosen.run.manifest, chosen.point_row(number)
    req = chosen.run.requests.where(chosen.of_point(number))
    classes = m.workload.get("classes") or []
    asked = [classes[0].get(k) if len(classes) == 1 else None for k in ("prompt_tokens", "output_tokens")]
    prompt = _length(asked[0], req["prompt_tokens"], req["asked_prompt_tokens"])
    if prompt is None:
        return None
    closed = row["mode"] == "concurrency"
    standard = {
        "tool": "whywait" if m.made_by != "imported" else "imported by whywait",
        "tool_version": m.whywait_version,
        "source": "unknown" if m.made_by == "imported" else "sampled",
        "stage": number,
        "input_seq_len": prompt,
        "output_seq_len": _length(asked[1], req["output_tokens"], req["asked_output_tokens"]),
        "rate_qps": None if closed else row["target"],
        "concurrency": int(row["target"]) if closed and (row["target"] or 0) >= 1 else None,
        "multi_turn": {"enabled": True} if np.nan_to_num(req["turn"]).any() else None,
    }
    config = {"workload": m.workload, "seed": m.seed, "slo_ms": m.slo, "mode": row["mode"], "made_by": m.origin,
              "definitions": f"whywait {m.definitions} (docs/metrics.md): TTFT and latency count from when a request "
              "was due in an open loop, figures are of the steady window"}  # fmt: skip
    native = {"args": {"command": list(m.command)}, "config": config}
    return {"metadata": {"cfg_id": _hash(config)}, "standardized": standard, "native": native}


def _length(asked: Any, real: Array, wanted: Array) -> dict[str, Any] | None:
    """How long the sequences were asked to be, in the schema's few words; with what they were."""
    have = real[~np.isnan(real)] if not np.isnan(real).all() else wanted[~np.isnan(wanted)]
    if not len(have):
        return None
    seen = {"value": float(have.mean()), "min": int(have.min()), "max": max(int(have.max()), 1)}
    if have.min() == have.max():
        return {**seen, "distribution": "fixed"}
    kind = str(asked or "").partition("(")[0].strip()
    names = {"uniform": "uniform", "normal": "gaussian"}
    return {**seen, "distribution": names.get(kind, "other"), "std_dev": float(have.std())}


def _aggregate(chosen: Chosen, p: dict[str, Any]) -> dict[str, Any]:
    rows, run = chosen.of_point(p["point"]), chosen.run
    outcome = run.requests["outcome"][rows]
    w = p["window"]
    inside = (
        np.ones(len(rows), dtype=bool) if w["whole_point"] else starts_inside(run, w["start_ns"], w["end_ns"])[rows]
    )
    mine = rows[(outcome == OK) & inside]
    lat, req = chosen.latency, run.requests
    done, cut = int((outcome == OK).sum()), int(np.isin(outcome, [OUTCOMES.index(k) for k in INCOMPLETE]).sum())
    total = int((outcome != UNSENT).sum())
    prompt, output = req["prompt_tokens"][mine], req["output_tokens"][mine]
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = lat.e2e_ms[mine] / np.where(output > 0, output, np.nan)
    rate, tokens = p["requests_per_s"], p["output_tokens_per_s"]
    given = None if rate is None or not len(prompt) or np.isnan(prompt).any() else rate * float(prompt.mean())
    both = None if given is None or tokens is None else given + tokens
    return {
        "requests": {"total": total, "failures": total - done - cut, "incomplete": cut,
                     "input_length": _stats(prompt, "count"), "output_length": _stats(output, "count")},
        "latency": {
            "time_to_first_token": _stats(lat.ttft_ms[mine] / 1e3, "s"),
            "time_per_output_token": _stats(lat.tpot_ms[mine] / 1e3, "s/token"),
            "normalized_time_per_output_token": _stats(spread / 1e3, "s/token"),
            "inter_token_latency": _itl(chosen, mine, p),
            "request_latency": _stats(lat.e2e_ms[mine] / 1e3, "s"),
        },
        "throughput": {name: None if v is None else {"units": unit, "mean": v} for name, unit, v in (
            ("request_rate", "queries/s", rate), ("output_token_rate", "tokens/s", tokens),
            ("input_token_rate", "tokens/s", given), ("total_token_rate", "tokens/s", both))},
    }  # fmt: skip


def _itl(chosen: Chosen, mine: Array, p: dict[str, Any]) -> dict[str, Any] | None:
    """Gaps per token, weighted by tokens; left out where the summary withholds them."""
    if p["itl_ms"].get("mean") is None:
        return None
    g, which = gaps(chosen.content), np.zeros(len(chosen.run.requests), dtype=bool)
    which[mine] = True
    keep = which[g.row] & (g.tokens >= 1)
    return _stats(np.repeat(g.value[keep] / g.tokens[keep], g.tokens[keep].astype(np.int64)) / NS_PER_S, "s/token")


def _seen(chosen: Chosen, p: dict[str, Any], label: str) -> dict[str, Any]:
    """What was read beside the load in the window: the service's engines and devices together at each reading."""
    window = p["window"]["start_ns"], p["window"]["end_ns"]
    found: dict[str, Any] = {}
    for name, called, unit, factor, source in RESOURCES:
        parts = [s for s in series(chosen.run.readings, name, source or None)
                 if not s.source.startswith(("host", "process/client"))]  # fmt: skip
        seen = joined(parts, window, "mean" if unit == "percent" else "sum")
        if seen is not None:
            found[called] = _stats(seen[1] * factor, unit)
    return {"component_label": label, "aggregate": found or None}


def _stats(values: Array, units: str) -> dict[str, Any] | None:
    """The schema's statistics of a sample; None without one."""
    have = values[np.isfinite(values)]
    if not len(have):
        return None
    levels = np.quantile(have, list(LEVELS.values())).tolist()
    return {"units": units, "mean": float(have.mean()), "stddev": float(have.std()), "min": float(have.min()),
            **dict(zip(LEVELS, levels, strict=True)), "max": float(have.max())}  # fmt: skip


def _hash(config: Any) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what is null: the schema tells the unknown by its absence."""
    return {k: _known(v) if isinstance(v, dict) else v for k, v in facts.items() if v is not None}
