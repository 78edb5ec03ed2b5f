"""Results of GuideLLM: a report with a list of benchmarks, JSON or YAML; each benchmark is a load point.

Read in the sources of GuideLLM 0.2, 0.3 (a request holds its own times), 0.4 to 0.8 (``info.timings`` does).
Times are Unix seconds, of first and last token only: the chunks between are not kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whywait.convert import results_file as rf
from whywait.convert.results_part import Asked, Faults, Part, Source, doubt, ended, place
from whywait.errors import UsageError
from whywait.units import NS_PER_MS

TOOL = "GuideLLM"
_CLOSED = {"synchronous", "concurrent", "throughput"}
_FIGURES = {
    "time_to_first_token_ms": ("ttft_ms", 1.0), "inter_token_latency_ms": ("tpot_by_token_ms", 1.0),
    "request_latency": ("latency_ms", 1e3),
}  # fmt: skip
_RATES = {"requests_per_second": "requests_per_s", "output_tokens_per_second": "output_tokens_per_s"}
_DEFINITIONS = {
    "tpot_by_token_ms": "its ITL is (last − first) / (tokens − 1), weighted by tokens, whatever the first chunk held",
    "output_tokens_per_s": "its rate is over the time from the first start to the last end that it measured",
    "requests_per_s": "its rate is over the time from the first start to the last end that it measured",
    "requests": "it keeps a sample of the requests when asked to (sample_requests)",
}
#: Columns of ours, by vLLM's own figures of a request (``metrics`` in its answer), in ms. What it calls time to first
#: token there counts from when the request was scheduled: it is the prefill, without the queue.
_ENGINE = {
    "queue_time_ms": "engine_queue_ms", "time_to_first_token_ms": "engine_prefill_ms",
    "generation_time_ms": "engine_decode_ms",
}  # fmt: skip
_DRAFTS = {"num_draft_tokens": "draft_tokens", "num_accepted_draft_tokens": "accepted_tokens"}


def is_report(row: dict[str, Any]) -> bool:
    found = row.get("benchmarks")
    return isinstance(found, list) and all(isinstance(b, dict) and "requests" in b and "metrics" in b for b in found)


def read(path: Path) -> Source:
    """
    Raises:
        UsageError: it is no report of GuideLLM, or holds no request.
    """
    report = rf.yaml(path) if is_yaml(path) else rf.parsed(path)
    if not isinstance(report, dict) or not is_report(report):
        raise UsageError(f"{path}: no list of benchmarks with requests in it", "guidellm … --output kind=json,path=…")
    source = Source(TOOL, [path], [], version=rf.text(rf.got(report, "metadata", "guidellm_version")),
                    definitions=_DEFINITIONS)  # fmt: skip
    source.bad = Faults()
    for b in report["benchmarks"]:
        source.parts.append(_part(b, source))
    return source


def is_yaml(path: Path) -> bool:
    return not rf.head(path).lstrip().startswith((b"{", b"["))


def _part(b: dict[str, Any], source: Source) -> Part:
    bad = source.bad or Faults()
    mode, target, cap = _load(b)
    part = Part(mode, target, [], wall=True, published=_published(b, bad))
    for status in ("successful", "errored", "incomplete"):
        rows = rf.got(b, "requests", status)
        for row in rows if isinstance(rows, list) else ():
            bad.rows += 1
            if isinstance(row, dict):
                part.requests.append(_request(row, status, mode != "concurrency", bad))
            else:
                bad.note(f"requests.{status}: no object")
    begin, end = (bad.read(rf.instant, b.get(k), k) for k in ("start_time", "end_time"))
    part.begin = begin
    part.took = end - begin if begin is not None and end is not None and end > begin else None
    _missing(b, part, source)
    _facts(b, source, cap)
    return part


def _request(row: dict[str, Any], status: str, open_loop: bool, bad: Faults) -> Asked:
    info = row.get("info") or row.get("scheduler_info")
    t = rf.got(info, "timings") or {}

    def at(*keys: str) -> int | None:
        found = ((rf.got(t, k), k) if rf.got(t, k) is not None else (row.get(k), k) for k in keys)
        value, key = next(((v, k) for v, k in found if v is not None), (None, ""))
        return bad.read(rf.instant, value, key)

    r = Asked(sent=at("request_start", "start_time", "resolve_start"))
    first, last = at("first_token_iteration", "first_token_time"), at("last_token_iteration", "last_token_time")
    r.first, r.last = first, last if first is not None else None
    r.end = at("request_end", "end_time", "resolve_end")
    targeted = at("targeted_start") if t else bad.read(rf.instant, rf.got(info, "targeted_start_time"), "targeted")
    r.due = targeted if open_loop else None
    r.prompt = bad.read(rf.count, row.get("prompt_tokens"), "prompt_tokens") or None
    r.cached = bad.read(rf.count, row.get("cached_tokens"), "cached_tokens")
    told = "output_metrics" not in row or rf.got(row, "output_metrics", "total_tokens") is not None
    r.output = (bad.read(rf.count, row.get("output_tokens"), "output_tokens") or None) if told else None
    r.chunks = bad.read(rf.count, rf.got(t, "token_iterations"), "token_iterations") or None
    answer = at("first_output_token_iteration")
    r.first_answer = answer if answer is not None and first is not None and answer >= first else None
    if (rf.got(info, "history_len") or rf.got(info, "turn_index") or 0) != 0:
        r.session = rf.text(rf.got(info, "conversation_id"))
        r.turn = bad.read(rf.count, rf.got(info, "turn_index"), "turn_index")
    r.trace_id = rf.text(row.get("response_id"))
    r.engine = _engine(row.get("response_metrics"), bad)
    if status == "incomplete":
        r.outcome, r.fault, r.detail = "censored", "none", "in flight when the benchmark ended"
    elif status == "errored":
        how = ended(rf.text(row.get("error") or rf.got(info, "error"), 20_000))
        r.outcome, r.fault, r.detail, r.status = how["outcome"], how["fault"], how["detail"], how["status"]
    return r


def _engine(found: Any, bad: Faults) -> dict[str, float] | None:
    out = {}
    for theirs, ours in _ENGINE.items() if isinstance(found, dict) else ():
        took = bad.read(rf.span, found.get(theirs), theirs, 1e6)
        if took is not None:
            out[ours] = took / NS_PER_MS
    for theirs, ours in _DRAFTS.items():
        n = bad.read(rf.count, rf.got(found, "speculative_decoding", theirs), theirs)
        if n is not None:
            out[ours] = float(n)
    return out or None


def _load(b: dict[str, Any]) -> tuple[str, float | None, int | None]:
    """Mode, target and the cap on requests in flight of an open loop."""
    s = rf.got(b, "config", "strategy") or rf.got(b, "args", "strategy") or rf.got(b, "scheduler", "strategy")
    kind = str(rf.got(s, "type_") or rf.got(s, "kind") or "")
    cap, streams, rate = (rf.whole(rf.got(s, "max_concurrency")), rf.whole(rf.got(s, "streams")),
                          rf.positive(rf.got(s, "rate")))  # fmt: skip
    if kind in ("constant", "poisson", "async") and rate is not None:
        return "rate", rate, cap
    if kind == "trace":
        return "trace", None, cap
    if kind == "synchronous":
        return "concurrency", 1.0, None
    if kind == "concurrent" and streams is not None:
        return "concurrency", float(streams), None
    return "concurrency", None if cap is None else float(cap), None


def _published(b: dict[str, Any], bad: Faults) -> dict[str, float]:
    out: dict[str, float] = {}
    for key, (name, scale) in _FIGURES.items():
        mean = bad.read(rf.number, rf.got(b, "metrics", key, "successful", "mean"), key)
        if mean is not None:
            out[f"{name}.mean"] = mean * scale
    for key, name in _RATES.items():
        mean = bad.read(rf.number, rf.got(b, "metrics", key, "successful", "mean"), key)
        if mean is not None:
            out[name] = mean
    total = bad.read(rf.count, rf.got(b, "metrics", "request_totals", "successful"), "request_totals")
    if total is not None:
        out["requests"] = float(total)
    return out


def _missing(b: dict[str, Any], part: Part, source: Source) -> None:
    total = rf.whole(rf.got(b, "metrics", "request_totals", "total"))
    if total is not None and total > len(part.requests):
        left = total - len(part.requests)
        source.notes.append(doubt(f"{left} of {total} requests are not in the file", "a sample was kept",
                                  "run GuideLLM without a limit on the samples it keeps"))  # fmt: skip


def _facts(b: dict[str, Any], source: Source, cap: int | None) -> None:
    backend = rf.got(b, "config", "backend") or b.get("worker")
    model = rf.text(rf.got(backend, "model") or rf.got(backend, "backend_model"))
    url = place(rf.got(backend, "target") or rf.got(backend, "backend_target"))
    if model:
        source.engine.setdefault("model", model)
    if url:
        source.endpoint.setdefault("url", url)
    if cap:
        source.workload.setdefault("max_in_flight", cap)
