"""Results of ``vllm bench serve`` and of SGLang's ``bench_serving``: an object per run, with a list per figure.

Read in the sources of vLLM 0.32 (``benchmarks/serve.py``, ``lib/endpoint_request_func.py``) and its older script
(``benchmarks/benchmark_serving.py`` of 2024 and 2025), of SGLang 0.5.23 (``benchmark/serving.py``) and an older
``bench_serving.py`` of 2025. All times are seconds of a monotonic clock. What each list
means is in ``docs/import.md``.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from whywait.convert import results_file as rf
from whywait.convert import results_own as own
from whywait.convert.results_part import Asked, Faults, Part, Source, after, doubt, ended
from whywait.errors import UsageError

VLLM, SGLANG = "vllm bench serve", "SGLang bench_serving"
LISTS = ("input_lens", "output_lens", "ttfts", "itls")
MORE = ("latencies", "start_times", "queue_times", "errors")
_FIGURE = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "chunk_gap_ms", "e2el": "e2e_ms", "e2e_latency": "e2e_ms"}
_TOTALS = {
    "request_throughput": "requests_per_s", "output_throughput": "output_tokens_per_s", "completed": "requests",
    "total_output_tokens": "output_tokens", "total_input_tokens": "prompt_tokens",
}  # fmt: skip
_COUNTERS = {
    "spec_decode_draft_tokens": "draft_tokens_total", "spec_decode_accepted_tokens": "accepted_tokens_total",
    "spec_decode_num_drafts": "draft_rounds_total",
}  # fmt: skip
EARLY, LATE = 0.2, 2.0  # a gap below or above this many usual ones is not one between two tokens
NEARLY = 0.9  # of the streams: what is so in fewer is no habit of the server's
_DEFINITIONS = {
    VLLM: {
        "ttft_ms": "its TTFT is the first chunk with choices, also one with a role and no token",
        "tpot_ms": "its TPOT is (last chunk − first chunk) / (tokens − 1), whatever those chunks held",
        "chunk_gap_ms": "its ITL is the gap between chunks, those without a token included",
        "e2e_ms": "its end to end is to the last chunk with choices, also one without a token",
    },
    SGLANG: {
        "tpot_ms": "its TPOT is (end of the stream − first chunk) / (tokens − 1), whatever the first chunk held; the "
        "end is not in the file, ours is the last token",
        "chunk_gap_ms": "its ITL divides a gap by the tokens of its chunk where the engine tells them",
        "e2e_ms": "its end to end is to the end of the stream, which is not in the file; ours is to the last token",
        "output_tokens": "where the stream brought no usage its count is the length that was asked for",
        "prompt_tokens": "its total is of the lengths asked for; ours of the server's count, where it gave one",
    },
}


def is_serving(row: dict[str, Any]) -> str | None:
    """Which of both tools wrote such an object, else None."""
    if "endpoint_type" in row or ("tokenizer_id" in row and "request_throughput" in row):
        return "vllm"
    if "request_throughput" in row and {"dataset_name", "total_throughput", "sharegpt_output_len"} & set(row):
        return "sglang"
    return "vllm" if {"ttfts", "itls"} <= set(row) else None


def read(path: Path, form: str) -> Source:
    """One file: each object in it (a file may be appended to) is a load point.

    Raises:
        UsageError: it holds no results, or only totals.
    """
    tool = VLLM if form == "vllm" else SGLANG
    source, rows = Source(tool, [path], [], definitions=_DEFINITIONS[tool]), 0
    source.bad = Faults()
    for where, row in _objects(path):
        rows += 1
        if "ttfts" not in row:
            flag = "--save-detailed" if form == "vllm" else "--output-details"
            raise UsageError(f"{path}: {where} holds only totals ('ttfts' is missing)", f"run {tool} with {flag}")
        source.parts.append(_part(row, source, f"{path}: {where}"))
    if not rows:
        raise UsageError(f"{path}: no result in it", f"it should hold what {tool} wrote")
    return source


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file that is one document, or has one per line; a line that was cut off is told."""
    first: Exception | None = None
    whole: Any = None
    try:
        whole = rf.value(rf.document(path))
    except (rf.Bad, UsageError) as exc:
        first = exc.with_traceback(None)  # or its frames would keep what was read
    if isinstance(whole, dict):
        yield "the result", whole
        return
    good = 0
    for number, raw in rf.lines(path):
        try:
            row = rf.value(raw)
        except rf.Bad:
            row = None
        if isinstance(row, dict):
            good += 1
            yield f"line {number}", row
    if not good:
        if isinstance(first, UsageError):
            raise first
        said = first or "no JSON object"
        raise UsageError(f"{path}: {said}", "was it copied whole? a run that was cut off leaves half a file")


def _part(row: dict[str, Any], source: Source, where: str) -> Part:
    lists = {name: _list(row, name, where) for name in (*LISTS, *MORE)}
    n = len(lists["ttfts"] or ())
    for name in LISTS:
        if lists[name] is None or len(lists[name] or ()) != n:
            raise UsageError(f"{where}: '{name}' should hold {n} values, one per request", "was the file changed?")
    bad = source.bad or Faults()
    begun = lists["start_times"] or ()
    told = len(begun) == n and any(t is not None for t in begun) and own.starts(row) is None
    part = Part(*_load(row, n), requests=[], starts="told" if told else "replayed")
    timed = part.mode != "concurrency"
    if timed and not told:
        part.starts = "assumed"
    for i in range(n):
        bad.rows += 1
        part.requests.append(_request({k: v[i] for k, v in lists.items() if v and i < len(v)}, bad, timed, told))
    backend = str(row.get("backend") or row.get("endpoint_type") or "")
    skipped = None if own.is_own(row) else _not_tokens(part.requests, backend, source.tool)
    capped = timed and bool(row.get("max_concurrency")) and any(r.due is not None for r in part.requests)
    source.notes += [d for d in (skipped, _waiting() if capped else None) if d and d not in source.notes]
    part.took = bad.read(rf.span, row.get("duration"), "duration")
    part.published = _published(row, bad)
    counted = {name: bad.read(rf.count, row.get(key), key) for key, name in _COUNTERS.items()}
    part.grown = {name: float(n) for name, n in counted.items() if n is not None}
    _facts(row, source, part)
    if own.is_own(row):
        own.note(row, source)
        own.name_failures(part.requests, lists["errors"] or [])
    return part


def _list(row: dict[str, Any], name: str, where: str) -> list[Any] | None:
    found = row.get(name)
    if found is not None and not isinstance(found, list):
        raise UsageError(f"{where}: '{name}' should be a list, it is {type(found).__name__}", "was the file changed?")
    return found


def _load(row: dict[str, Any], n: int) -> tuple[str, float | None]:
    rate, most = rf.positive(row.get("request_rate")), rf.whole(row.get("max_concurrency"))
    if row.get("request_rate") == "trace":
        return "trace", None
    if rate is not None:
        return "rate", rate
    return "concurrency", float(max(n, 1) if most is None else min(most, max(n, 1)))


def _request(v: dict[str, Any], bad: Faults, timed: bool, told: bool) -> Asked:
    r = Asked(sent=bad.read(rf.instant, v.get("start_times"), "start_times") if told else 0)
    error = v.get("errors")
    r.prompt = bad.read(rf.count, v["input_lens"], "input_lens") or None
    ttft = bad.read(rf.span, v["ttfts"], "ttfts")
    if error or (not ttft and not v["output_lens"]):
        how = ended(error if isinstance(error, str) else None)
        r.outcome, r.fault, r.detail, r.status = how["outcome"], how["fault"], how["detail"], how["status"]
    else:
        r.output = bad.read(rf.count, v["output_lens"], "output_lens") or None
    if r.sent is None:
        return r
    if timed and (waited := bad.read(rf.span, v.get("queue_times"), "queue_times")) is not None:
        r.due = r.sent - waited
    latency = bad.read(rf.span, v.get("latencies"), "latencies")
    if ttft:
        gaps = v["itls"] if isinstance(v["itls"], list) else []
        steps = [bad.read(rf.span, g, "itls") for g in gaps]
        r.first = r.last = r.sent + ttft
        if steps and None not in steps:
            r.times = after(r.first, [s for s in steps if s is not None])
            r.last = int(r.times[-1])
        elif steps:
            r.last = None if latency is None else r.sent + latency
        else:
            r.times = np.array([r.first], dtype=np.int64)
    if r.outcome == "ok" and latency:
        r.end = max(r.sent + latency, r.last or 0)
        if r.last is not None and 0 < r.last - r.sent - latency < 1000:  # a sum of rounded gaps
            r.end = r.last
    elif r.outcome == "ok":
        r.end = r.last
    return r


def _not_tokens(requests: list[Asked], backend: str, tool: str) -> dict[str, str] | None:
    """Take chunks without a token out of the content: a role first, an end last. The tool stamps them all alike.

    A stream of n tokens, one per chunk, has n chunks; with one or two more in (nearly) all requests, which they are is
    told by the gaps beside them. With fewer chunks than tokens only an end that came with the chunk before it is told.
    """
    if tool != VLLM:
        return None
    known = [r for r in requests if r.outcome == "ok" and r.times is not None and len(r.times) > 2 and r.output]
    more = [_chunks(r) - int(r.output or 0) for r in known]
    extra = max(set(more), key=more.count) if more else 0
    mine = [r for r, m in zip(known, more, strict=True) if m == extra or (extra < 0 and m < 0)]
    if (extra not in (1, 2) and extra >= 0) or len(mine) < NEARLY * len(known) or not mine:
        return None
    role, end = _which(mine, extra, "chat" in backend)
    if extra > 0 and not role and not end:
        return doubt(f"{extra} chunks per stream carry no token, and which is not known",
                     f"{tool} stamps every chunk with choices; the gaps do not tell",
                     "measure with whywait itself")  # fmt: skip
    if not role and not end:
        return None
    for r in mine:
        assert r.times is not None
        if role:
            r.role_ns, r.times = int(r.times[0]), r.times[1:]
        if end:
            r.times = r.times[:-1]
        r.first, r.last = int(r.times[0]), int(r.times[-1])
    what = " and ".join(w for w, so in (("a role before the first token", role), ("an end after the last", end)) if so)
    return doubt(f"{what} came as chunks of their own and are not counted as tokens here",
                 f"{tool} counts every chunk with choices; so did {len(mine)} streams",
                 "none: TTFT, ITL and end to end are those of tokens")  # fmt: skip


def _chunks(r: Asked) -> int:
    return 0 if r.times is None else len(r.times)


def _which(requests: list[Asked], extra: int, chat: bool) -> tuple[bool, bool]:
    """Whether the first chunks are a role, and the last an end, by the gaps beside them against the usual one."""
    gaps = [np.diff(r.times) for r in requests if r.times is not None]
    first, last = (float(np.median([g[i] for g in gaps])) for i in (0, -1))
    before, after_ = (max(float(np.median(np.concatenate(g))), 1.0) for g in ([g[:-1] for g in gaps],
                                                                              [g[1:] for g in gaps]))  # fmt: skip
    ends = last < EARLY * before
    if extra < 0:
        return False, ends
    if extra == 2:
        return chat, chat
    role = chat and (first > LATE * after_ or (first < EARLY * after_ and not ends))
    return role, not role and ends


def _waiting() -> dict[str, str]:
    return doubt("latencies count from when a request was due, the wait for a place in flight included",
                 "an open loop with --max-concurrency; the tool itself counts from the send",
                 "compare with its e2el_including_client_queue")  # fmt: skip


def _published(row: dict[str, Any], bad: Faults) -> dict[str, float]:
    out: dict[str, float] = {}
    for key, found in row.items():
        match = _FIGURE.fullmatch(key)
        name = f"{_NAMES[match[2]]}.{match[1].replace('median', 'p50')}" if match else _TOTALS.get(key)
        figure = bad.read(rf.number, found, key) if name else None
        if name and figure is not None:
            out[name] = figure
    return out


def _facts(row: dict[str, Any], source: Source, part: Part) -> None:
    model, info = rf.text(row.get("model_id")), row.get("server_info")
    part.label = rf.text(row.get("label") or row.get("tag"), 80)
    if model:
        source.engine["model"] = model
    if rf.text(row.get("backend")) == "sglang" or isinstance(info, dict):
        source.engine.setdefault("name", "sglang")
    if isinstance(info, dict):
        _server(info, source)
    if (burst := rf.positive(row.get("burstiness"))) is not None:
        source.facts["burstiness"] = burst
    if part.mode != "concurrency" and (most := rf.whole(row.get("max_concurrency"))) is not None:
        source.workload["max_in_flight"] = most
    if source.tool == SGLANG:
        _asked_or_counted(row, source)
    when = rf.text(row.get("date"))
    if when and source.ended_ns is None:
        try:  # the tool's local time, whose zone it does not tell
            at = datetime.datetime.strptime(when, "%Y%m%d-%H%M%S").replace(tzinfo=datetime.timezone.utc)
        except ValueError:
            return
        source.ended_ns = int(at.timestamp()) * 10**9


def _server(info: dict[str, Any], source: Source) -> None:
    """What SGLang says of itself (``/server_info``), where the tool kept it."""
    engine = source.engine
    for key, name in (("version", "version"), ("model_path", "model"), ("kv_cache_dtype", "kv_dtype")):
        if (said := rf.text(info.get(key))) and said != "auto":
            engine.setdefault(name, said)
    for key, name in (("max_running_requests", "slots"), ("max_total_num_tokens", "kv_tokens"), ("tp_size", "devices")):
        if (n := rf.whole(info.get(key))) is not None:
            engine.setdefault(name, n)


def _asked_or_counted(row: dict[str, Any], source: Source) -> None:
    counted, again = (rf.whole(row.get(f"total_output_tokens{k}")) for k in ("", "_retokenized"))
    if counted and again and abs(again / counted - 1) > 0.02:
        d = doubt("output tokens may be those asked for, not those that came",
                  f"the tool says {counted}, its tokenizer counts {again} in the texts; where the stream has no usage "
                  "it takes the asked length", "ask for usage (stream_options.include_usage)")  # fmt: skip
        if d not in source.notes:
            source.notes.append(d)
