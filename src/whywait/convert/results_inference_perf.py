"""Results of inference-perf: the folder of a run, or its ``per_request_lifecycle_metrics.json``.

Read in the sources of inference-perf 0.1, 0.2, 0.4 and 0.7 (``reportgen/base.py``, ``apis/base.py``). Times are seconds
of a monotonic clock. A request does not say which stage it was of; stages follow one another, so the counts of their
own reports say it.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import numpy as np

from whywait.convert import results_file as rf
from whywait.convert.results_part import Asked, Faults, Part, Source, doubt, ended
from whywait.errors import UsageError

TOOL = "inference-perf"
REQUESTS = "per_request_lifecycle_metrics.json"
_STAGE = re.compile(r"stage_(\d{1,6})_lifecycle_metrics\.json")
_UNTIL = re.compile(r"""^\s+end:\s*['"]?(\d{4}-\d\d-\d\dT[\d:.]+)(Z|\+00:00)""", re.M)
_FIGURES = {
    "time_to_first_token": "ttft_ms", "time_per_output_token": "tpot_ms", "request_latency": "latency_ms",
}  # fmt: skip
_QUANTILES = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_DEFINITIONS = {
    "tpot_ms": "its TPOT divides by its own tokenizer's count of the output, whatever the first chunk held; ours by "
    "the service's usage",
    "output_tokens_per_s": "it counts the output by its own tokenizer; ours is the service's usage",
    "latency_ms": "its latency is to the end of the response",
}


def is_requests(rows: Any) -> bool:
    first = rows[0] if isinstance(rows, list) and rows else None
    return isinstance(first, dict) and {"start_time", "end_time", "info"} <= set(first)


def read(path: Path) -> Source:
    """
    Raises:
        UsageError: no request in it, or it was written without what a request needs.
    """
    rows = rf.parsed(path)
    if not is_requests(rows):
        raise UsageError(f"{path}: no list of requests with start_time, end_time and info",
                         "report: request_lifecycle: per_request: true")  # fmt: skip
    source = Source(TOOL, [path], [], definitions=_DEFINITIONS)
    bad = source.bad = Faults()
    found = []
    for row in rows:
        bad.rows += 1
        if isinstance(row, dict):
            found.append(_request(row, bad))
        else:
            bad.note("a request that is no object")
    found.sort(key=lambda r: (r.sent is None, r.sent or 0))
    stages = _stages(path.parent, source)
    counted = sum(n for _, n in stages)
    if stages and counted != len(found):
        source.notes.append(doubt("stages are one load point here", f"their reports count {counted} requests, the "
                                  f"file holds {len(found)}", "keep the folder of a run whole"))  # fmt: skip
        stages = []
    if not stages:
        source.notes.append(doubt("how load was offered is not known", "no report of a stage is beside the file",
                                  "report: request_lifecycle: per_stage: true"))  # fmt: skip
        source.parts.append(Part("concurrency", None, found))
    for stage, n in stages:
        mine, found = found[:n], found[n:]
        mode, target = _load(stage)
        source.parts.append(Part(mode, target, mine, published=_published(stage, bad)))
    source.ended_ns = _until(path.parent)
    return source


def _request(row: dict[str, Any], bad: Faults) -> Asked:
    info, error = row.get("info"), row.get("error")
    m = rf.got(info, "response_metrics") or info
    usage = rf.got(m, "server_usage")
    r = Asked(sent=bad.read(rf.instant, row.get("start_time"), "start_time"))
    r.end = bad.read(rf.instant, row.get("end_time"), "end_time")
    r.prompt = _first(bad, (usage, "prompt_tokens"), (usage, "input_tokens"), (info, "input_tokens"),
                      (rf.got(info, "request_metrics", "text"), "input_tokens"))  # fmt: skip
    r.output = _first(bad, (usage, "completion_tokens"), (usage, "output_tokens"), (m, "output_tokens"))
    r.cached = bad.read(rf.count, rf.got(usage, "prompt_tokens_details", "cached_tokens"), "cached_tokens")
    r.reasoning = bad.read(rf.count, rf.got(usage, "completion_tokens_details", "reasoning_tokens"), "reasoning_tokens")
    r.klass = rf.text(rf.got(info, "lora_adapter"))
    if error:
        how = ended(rf.text(rf.got(error, "error_msg"), 20_000), kind=rf.text(rf.got(error, "error_type")),
                    status=_status(rf.got(error, "error_type")))  # fmt: skip
        r.outcome, r.fault, r.detail, r.status = how["outcome"], how["fault"], how["detail"], how["status"]
        r.output = r.output or None
    times = _times(m, bad)
    if times is not None:
        r.times, r.first, r.last = times, int(times[0]), int(times[-1])
        if r.end is not None:
            r.end = max(r.end, r.last)
    return r


def _times(m: Any, bad: Faults) -> Any:
    """Stamps of the chunks with content; where they are not kept those of tokens, one stamp for all of a chunk."""
    told = rf.got(m, "chunk_times") or rf.got(m, "output_token_times")
    if not isinstance(told, list) or not told:
        return None
    stamps = [bad.read(rf.instant, t, "chunk_times") for t in told]
    if any(s is None for s in stamps):
        return None
    times = np.unique(np.array(stamps, dtype=np.int64))
    return times if len(times) else None


def _first(bad: Faults, *where: tuple[Any, str]) -> int | None:
    for holder, key in where:
        n = bad.read(rf.count, rf.got(holder, key), key)
        if n:
            return n
    return None


def _status(kind: Any) -> int | None:
    found = re.fullmatch(r"HTTP Error (\d{3})", kind) if isinstance(kind, str) else None
    return int(found[1]) if found else None


def _stages(folder: Path, source: Source) -> list[tuple[dict[str, Any], int]]:
    """The reports of the stages in order, with how many requests each is of."""
    names = [(int(m[1]), p) for p in folder.iterdir() if (m := _STAGE.fullmatch(p.name))] if folder.is_dir() else []
    out = []
    for _, path in sorted(names)[:1000]:
        stage = rf.parsed(path)
        n = rf.got(stage, "load_summary", "count")
        if isinstance(n, int) and not isinstance(n, bool) and n >= 0:
            out.append((stage, n))
            source.files.append(path)
    return out


def _load(stage: dict[str, Any]) -> tuple[str, float | None]:
    most = rf.whole(rf.got(stage, "load_summary", "concurrency"))
    rate = rf.positive(rf.got(stage, "load_summary", "requested_rate"))
    if most is not None:
        return "concurrency", float(most)
    if rate is not None:
        return "rate", rate
    return "concurrency", None


def _published(stage: dict[str, Any], bad: Faults) -> dict[str, float]:
    out: dict[str, float] = {}
    for key, name in _FIGURES.items():
        for their, our in _QUANTILES.items():
            found = bad.read(rf.number, rf.got(stage, "successes", "latency", key, their), key)
            if found is not None:
                out[f"{name}.{our}"] = found * 1e3
    for key, name in (("requests_per_sec", "requests_per_s"), ("output_tokens_per_sec", "output_tokens_per_s")):
        found = bad.read(rf.number, rf.got(stage, "successes", "throughput", key), key)
        if found is not None:
            out[name] = found
    count = bad.read(rf.count, rf.got(stage, "successes", "count"), "count")
    if count is not None:
        out["requests"] = float(count)
    return out


def _until(folder: Path) -> int | None:
    """Unix time of the end, by the reports of stages that tell the time of day."""
    found = []
    for path in sorted(folder.glob("inference-perf.partial.stage_*.yaml"))[:1000]:
        for at, _ in _UNTIL.findall(rf.head(path).decode("utf-8", "replace")):
            try:
                t = datetime.datetime.fromisoformat(at[:26]).replace(tzinfo=datetime.timezone.utc)
            except ValueError:
                continue
            found.append(int(t.timestamp() * 1000) * 10**6)
    return max(found, default=None)
