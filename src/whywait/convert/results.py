"""Results of other load tools → Run: which format each file is, and the parts put together.

A pure producer: files in, a Run out. Each format's own definitions are in its module; what they become is in
``results_build.py``. Formats are told by what is in a file, never by its name alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whywait.convert import results_aiperf as aiperf
from whywait.convert import results_file as rf
from whywait.convert import results_guidellm as guidellm
from whywait.convert import results_inference_perf as inference_perf
from whywait.convert import results_serving as serving
from whywait.convert.results_part import MOST_CHUNKS, Source
from whywait.errors import UsageError

FORMATS = ("auto", "vllm", "sglang", "aiperf", "guidellm", "inference-perf")
KNOWN = "vllm bench serve --save-detailed, SGLang --output-details, AIPerf, GuideLLM, inference-perf"
SUMMARY = "summary"  # of inference-perf, which is no result of single requests
SNIFFED = 64 * rf.MIB  # a document up to this is parsed to tell its format, where its beginning does not
_IN_FOLDER = (inference_perf.REQUESTS, aiperf.RECORDS, "benchmarks.json", "benchmarks.yaml")
_ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".yaml", ".yml")


def read(paths: Sequence[Path], form: str = "auto", most: int = MOST_CHUNKS) -> list[Source]:
    """Each file, or each folder of a run, as a source of load points; in the order given. ``most``: times of chunks
    that are kept of a file of lines, which may be of any length.

    Raises:
        UsageError: a file cannot be read, is of no known format, is damaged, or holds no single requests.
    """
    out: list[Source] = []
    seen: set[Path] = set()
    for path in [p for given in paths for p in _files(given)]:
        kind = sniff(path) if form == "auto" else form
        if kind == "aiperf" and _is_totals(path):
            path = aiperf.records_of(path)
        if path.resolve() in seen:  # both files of one run were given
            continue
        seen.add(path.resolve())
        source = _read(path, kind, most)
        source.parts = [p for p in source.parts if p.requests]
        if not source.parts:
            raise UsageError(f"{path}: no request in it", "did the run send any?")
        out.append(source)
    return out


def _read(path: Path, kind: str, most: int) -> Source:
    if kind in ("vllm", "sglang"):
        return serving.read(path, kind)
    if kind == "aiperf":
        return aiperf.read(path, most)
    return guidellm.read(path) if kind == "guidellm" else inference_perf.read(path)


def _files(path: Path) -> list[Path]:
    """The file itself, or what a folder holds: the requests of one run, else every result file in it."""
    if not path.is_dir():
        return [path]
    for name in _IN_FOLDER:
        if (path / name).is_file():
            return [path / name]
    found = []
    for p in sorted(path.iterdir())[:1000]:
        if p.is_file() and p.name.endswith(_ENDINGS):
            try:
                sniff(p)
            except UsageError:
                continue
            found.append(p)
    if not found:
        raise UsageError(f"{path}: no result file in this folder", f"known: {KNOWN}")
    return found


def sniff(path: Path) -> str:
    """The format of a file, by what is in it.

    Raises:
        UsageError: it cannot be read or is none of the known ones; says what it looks like where that is known.
    """
    if not path.is_file():
        raise UsageError(f"cannot read {path}: {'it is no file' if path.exists() else 'there is no such file'}",
                         "give result files, or the folder of a run")  # fmt: skip
    head = rf.head(path)
    if not head.strip():
        raise UsageError(f"{path} is empty", "did the run end before it wrote its results?")
    if not head.lstrip().startswith((b"{", b"[")):
        if head.lstrip().startswith((b"benchmarks:", b"config:", b"metadata:", b"conclusions:")):
            return "guidellm"
        raise UsageError(f"{path} is of no known format", f"known: {KNOWN}")
    kind = _of(_first_line(head)) or _by_keys(head)
    if kind is None and _short(path):
        kind = _of(rf.parsed(path))
    if kind == SUMMARY:
        raise UsageError(f"{path} is a summary of inference-perf, without its requests",
                         f"give the folder of the run, or {inference_perf.REQUESTS}")  # fmt: skip
    if kind is None:
        raise UsageError(f"{path} is of no known format", f"known: {KNOWN}; or say which with --format")
    return kind


def _of(found: Any) -> str | None:
    if inference_perf.is_requests(found):
        return "inference-perf"
    if not isinstance(found, dict):
        return None
    if aiperf.is_records(found) or aiperf.is_totals(found):
        return "aiperf"
    if guidellm.is_report(found):
        return "guidellm"
    if {"load_summary", "successes"} <= set(found):
        return SUMMARY
    return serving.is_serving(found)


def _first_line(head: bytes) -> Any:
    try:
        return rf.value(head.lstrip().split(b"\n", 1)[0])
    except rf.Bad:
        return None


def _by_keys(head: bytes) -> str | None:
    """By the words at the beginning of a document too long to be parsed for this; the most telling first."""
    marks = (
        ("aiperf", (b'"benchmark_phase"',)), ("aiperf", (b'"aiperf_version"',)),
        ("guidellm", (b'"guidellm_version"',)), ("guidellm", (b'"generative_benchmark',)),
        ("inference-perf", (b'"start_time"', b'"end_time"', b'"info"')),
        ("vllm", (b'"endpoint_type"',)), ("vllm", (b'"tokenizer_id"',)),
        ("sglang", (b'"backend"', b'"dataset_name"', b'"max_concurrency"')),
    )  # fmt: skip
    return next((kind for kind, words in marks if all(w in head for w in words)), None)


def _short(path: Path) -> bool:
    return path.stat().st_size <= SNIFFED


def _is_totals(path: Path) -> bool:
    """Whether an AIPerf file holds totals, and not requests, a line each."""
    head = rf.head(path)
    first = _first_line(head)
    if isinstance(first, dict):
        return aiperf.is_totals(first)
    return any(word in head for word in (b'"aiperf_version"', b'"input_config"', b'"request_throughput"'))
