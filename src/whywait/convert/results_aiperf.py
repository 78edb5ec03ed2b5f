"""Results of AIPerf: ``profile_export.jsonl`` (a line per request) and beside it ``profile_export_aiperf.json``.

Held against real files of AIPerf 0.3 and 0.13; 0.6 was read in its sources (``common/models/record_models.py``,
``metrics/types``). Starts and ends are Unix nanoseconds; durations are of a monotonic clock, each with its unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from whywait.convert import results_file as rf
from whywait.convert.results_part import MOST_CHUNKS, Asked, Faults, Part, Source, after, ascending, doubt, ended, place
from whywait.errors import UsageError
from whywait.units import NS_PER_MS

TOOL = "AIPerf"
RECORDS, TOTALS = "profile_export.jsonl", "profile_export_aiperf.json"
_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9, "seconds": 1e9}
_RATES = {"poisson", "constant", "gamma", "rate", "concurrency_burst"}
_FIGURES = {
    "time_to_first_token": "ttft_ms", "inter_token_latency": "tpot_ms", "inter_chunk_latency": "chunk_gap_ms",
    "request_latency": "e2e_ms",
}  # fmt: skip
_TOTALS = {
    "request_throughput": "requests_per_s", "output_token_throughput": "output_tokens_per_s",
    "request_count": "requests", "total_osl": "output_tokens", "total_isl": "prompt_tokens",
}  # fmt: skip
_QUANTILES = {"avg": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_DEFINITIONS = {
    "tpot_ms": "its ITL is (latency − TTFT) / (tokens − 1), whatever tokens the first chunk held, by its own count of "
    "tokens unless --use-server-token-count",
    "output_tokens": "its count is its tokenizer's unless --use-server-token-count; ours is the service's usage",
    "prompt_tokens": "its count is its tokenizer's unless --use-server-token-count; ours is the service's usage",
    "output_tokens_per_s": "its count of tokens is its tokenizer's unless --use-server-token-count",
}


def is_records(row: dict[str, Any]) -> bool:
    return isinstance(row.get("metadata"), dict) and isinstance(row.get("metrics"), dict)


def is_totals(row: dict[str, Any]) -> bool:
    return "aiperf_version" in row or ("input_config" in row and isinstance(row.get("request_throughput"), dict))


def records_of(path: Path) -> Path:
    """The file of requests that a file of totals belongs to.

    Raises:
        UsageError: it is not there.
    """
    stem = path.name.removesuffix(".gz").removesuffix(".json").removesuffix("_aiperf")
    for name in (f"{stem}.jsonl", f"{stem}.jsonl.gz", RECORDS):
        if (path.parent / name).is_file():
            return path.parent / name
    raise UsageError(f"{path} holds only totals, and {stem}.jsonl is not beside it", "aiperf … --export-level records")


def totals_of(path: Path) -> Path | None:
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    names = (f"{stem}_aiperf.json", f"{stem}.json", f"{stem}_aiperf.json.gz", TOTALS)
    return next((path.parent / n for n in names if (path.parent / n).is_file()), None)


def read(path: Path, most: int = MOST_CHUNKS) -> Source:
    """``path`` is the file of requests; its totals are taken from beside it. ``most``: times of chunks.

    Raises:
        UsageError: no request in it, or most lines are of something else.
    """
    source = Source(TOOL, [path], [], definitions=_DEFINITIONS)
    bad = source.bad = Faults()
    beside = totals_of(path)
    totals = rf.parsed(beside) if beside else {}
    if beside and isinstance(totals, dict) and is_totals(totals):
        source.files.append(beside)
    else:
        totals = {}
        source.notes.append(doubt("how load was offered is not known", f"{TOTALS} is not beside {path.name}",
                                  "keep both files of a run together"))  # fmt: skip
    mode, target, cap = _load(totals)
    part = Part(mode, target, [], wall=True, published=_published(totals, bad))
    warm = 0
    for row in _rows(path, bad):
        if rf.got(row, "metadata", "benchmark_phase") == "warmup":
            warm += 1
        else:
            part.add(_request(row, bad, mode != "concurrency"), most)
    if not part.requests:
        raise UsageError(f"{path}: no request of the profiling phase in it", "was it copied whole?")
    if all((r.turn or 0) == 0 for r in part.requests):
        for r in part.requests:
            r.session = r.turn = None
    source.parts.append(part)
    _facts(totals, source)
    if warm:
        source.facts["warmup_requests"] = warm
    if cap:
        source.workload["max_in_flight"] = cap
    return source


def _rows(path: Path, bad: Faults) -> Iterator[dict[str, Any]]:
    good = 0
    wrong: str | None = None
    for number, raw in rf.lines(path):
        try:
            row = rf.value(raw)
        except rf.Bad as exc:
            row = None
            wrong = wrong or f"line {number}: {exc}"
        if isinstance(row, dict) and is_records(row):
            good += 1
            yield row
        else:
            bad.note("a line that is no record (the run was cut off while it was written?)")
            wrong = wrong or f"line {number}: no object with 'metadata' and 'metrics'"
            if sum(bad.by.values()) > 100 + good:
                break
    if wrong and not good:
        raise UsageError(f"{path}: {wrong}", "give AIPerf's profile_export.jsonl")


def _request(row: dict[str, Any], bad: Faults, open_loop: bool) -> Asked:
    meta, m, error = row["metadata"], row["metrics"], row.get("error")
    r = Asked(sent=_stamp(meta, "request_start_ns", bad), accepted=_stamp(meta, "request_ack_ns", bad))
    bad.rows += 1
    r.due = _stamp(meta, "credit_issued_ns", bad) if open_loop else None
    r.end = _stamp(meta, "request_end_ns", bad)
    r.session, r.turn = rf.text(meta.get("x_correlation_id")), bad.read(rf.count, meta.get("turn_index"), "turn_index")
    r.trace_id = rf.text(meta.get("x_request_id"))
    r.prompt = _count(m, bad, "usage_prompt_tokens", "input_sequence_length")
    r.output = _count(m, bad, "usage_completion_tokens", "output_sequence_length")
    r.reasoning = _count(m, bad, "usage_reasoning_tokens", "reasoning_token_count")
    r.cached = _count(m, bad, "usage_prompt_cache_read_tokens")
    r.connect = _span(m, "http_req_connecting", bad)
    if meta.get("was_cancelled"):
        r.outcome, r.fault, r.detail = "cancelled", "user", "cancelled by the tool's plan"
    elif meta.get("context_overflow_skip"):
        r.outcome, r.fault, r.detail = "never_sent", "none", "longer than the context"
        r.sent = r.accepted = r.end = None
    elif isinstance(error, dict) or error:
        said = error if isinstance(error, dict) else {"message": str(error)}
        code = said.get("code")
        how = ended(rf.text(said.get("message"), 20_000), code if isinstance(code, int) else None,
                    rf.text(said.get("type")))  # fmt: skip
        r.outcome, r.fault, r.detail, r.status = how["outcome"], how["fault"], how["detail"], how["status"]
    if r.sent is not None:
        _stamps(r, m, bad)
    return r


def _stamps(r: Asked, m: dict[str, Any], bad: Faults) -> None:
    """First and last token and the chunks between: all durations from the send."""
    assert r.sent is not None
    ttft, took, answer = (
        _span(m, k, bad) for k in ("time_to_first_token", "request_latency", "time_to_first_output_token")
    )
    if ttft:
        r.first = r.sent + ttft
        r.last = None if took is None else r.sent + max(took, ttft)
        r.first_answer = None if not answer else r.sent + answer
        r.times = _chunks(r.first, m, bad)
        if r.times is not None:
            r.last = int(r.times[-1])
    if took is not None and r.end is not None:  # two clocks: the end by the wall, the last token by the other
        r.end = max(r.end, r.last or r.sent + took)


def _chunks(first: int, m: dict[str, Any], bad: Faults) -> Any:
    field = m.get("inter_chunk_latency")
    gaps, unit = rf.got(field, "value"), _UNITS.get(str(rf.got(field, "unit")))
    if not isinstance(gaps, list) or unit is None:
        return None if field is not None or "output_sequence_length" not in m else np.array([first], dtype=np.int64)
    steps = [bad.read(rf.span, g, "inter_chunk_latency", unit) for g in gaps]
    if None in steps:
        return None
    times = after(first, [s for s in steps if s is not None])
    return times if ascending(times) else None


def _stamp(meta: dict[str, Any], key: str, bad: Faults) -> int | None:
    return bad.read(rf.instant, meta.get(key), key, 1.0)


def _span(m: dict[str, Any], key: str, bad: Faults) -> int | None:
    field = m.get(key)
    if field is None:
        return None
    unit = _UNITS.get(str(rf.got(field, "unit")))
    if unit is None:
        bad.note(f"{key}: in a unit that is none of time")
        return None
    return bad.read(rf.span, rf.got(field, "value"), key, unit)


def _count(m: dict[str, Any], bad: Faults, *keys: str) -> int | None:
    found = (bad.read(rf.count, rf.got(m, k, "value"), k) for k in keys)
    return next((n for n in found if n is not None), None)


def _load(totals: dict[str, Any]) -> tuple[str, float | None, int | None]:
    """Mode, target and the cap on requests in flight of an open loop, by the configuration that the totals repeat."""
    config = totals.get("input_config")
    phases = rf.got(config, "phases")
    old = rf.got(config, "loadgen")
    found: Any = old if isinstance(old, dict) else None
    if isinstance(phases, list):
        found = next((p for p in phases if isinstance(p, dict) and p.get("kind", p.get("name")) == "profiling"), None)
    if not isinstance(found, dict):
        return "concurrency", None, None
    most, rate = rf.whole(found.get("concurrency")), rf.positive(found.get("rate", found.get("request_rate")))
    if rate is not None:
        return "rate", rate, most
    if "schedule" in str(found.get("type", "")) or rf.got(config, "input", "fixed_schedule"):
        return "trace", None, most
    return "concurrency", None if most is None else float(most), None


def _published(totals: dict[str, Any], bad: Faults) -> dict[str, float]:
    out: dict[str, float] = {}
    for key, name in _FIGURES.items():
        unit = _UNITS.get(str(rf.got(totals, key, "unit")))
        for their, our in _QUANTILES.items():
            found = bad.read(rf.number, rf.got(totals, key, their), key)
            if found is not None and unit is not None:
                out[f"{name}.{our}"] = found * unit / NS_PER_MS
    for key, name in _TOTALS.items():
        found = bad.read(rf.number, rf.got(totals, key, "avg"), key)
        if found is not None:
            out[name] = found
    return out


def _facts(totals: dict[str, Any], source: Source) -> None:
    source.version = rf.text(totals.get("aiperf_version"))
    config = totals.get("input_config")
    items, names = rf.got(config, "models", "items"), rf.got(config, "endpoint", "model_names")
    first = items[0] if isinstance(items, list) and items else None
    model = rf.text(rf.got(first, "name")) or rf.text(names[0] if isinstance(names, list) and names else None)
    if model:
        source.engine["model"] = model
    urls = rf.got(config, "endpoint", "urls") or rf.got(config, "endpoint", "url")
    url = place(urls[0] if isinstance(urls, list) and urls else urls)
    if url:
        source.endpoint["url"] = url
    source.command = rf.text(rf.got(totals, "run_info", "cli_command") or rf.got(config, "cli_command"), 2000)
    if totals.get("was_cancelled"):
        source.partial = "AIPerf was cancelled"
    elif totals.get("is_complete") is False:
        source.partial = rf.text(totals.get("incomplete_reason")) or "AIPerf says that it did not finish"
