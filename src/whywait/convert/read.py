"""Files → Trace: which format each is, and the parts put together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from whywait.convert import formats, servegen
from whywait.convert.openai_log import INPUT, OUTPUT, OpenAiLog
from whywait.convert.recording import HEAD, Recording
from whywait.convert.traces import Lines, Record, Trace, build
from whywait.core import bounded
from whywait.errors import UsageError
from whywait.net.record import FILE

CSV = {"azure": formats.azure, "burstgpt": formats.burstgpt}
JSONL: dict[str, Callable[[str], Record]] = {
    "mooncake": formats.mooncake, "llmservingsim": formats.llmservingsim, "schedule": formats.schedule,
}  # fmt: skip
FORMATS = ("auto", "openai", "recording", *CSV, *JSONL, "servegen")
HEAD_BYTES = 1 << 16


def read(paths: Sequence[Path], form: str = "auto") -> Trace:
    """All of ``paths`` as one trace, on the time axis the files share.

    Raises:
        UsageError: a file cannot be read, is of no known format or mostly garbage, or they hold no request.
    """
    paths = [path / FILE if path.is_dir() else path for path in paths]  # the folder of a recording will do
    known = {path: sniff(path) if form == "auto" else form for path in paths}
    kinds = sorted(set(known.values()))
    if len(kinds) > 1:
        told = ", ".join(f"{p.name} is {k}" for p, k in known.items())
        raise UsageError(f"files of different formats cannot be one workload: {told}")
    kind, notes, records = kinds[0], [], []
    log = OpenAiLog()
    if kind == "servegen":
        clients = sorted({servegen.pair(path)[0] for path in paths})
        for number, path in enumerate(clients):
            records += servegen.client(path, number)
        notes.append(f"ServeGen holds distributions: {len(records)} requests of {len(clients)} clients were drawn")
        return build(records, kind, notes)
    for number, path in enumerate(paths):
        found, more = _file(path, kind, log)
        if kind in ("mooncake", "schedule") and len(paths) > 1:
            for r in found:  # their numbers mean something within one file only
                r.blocks = [(number, b) for b in r.blocks]
                r.session = None if r.session is None else (number, r.session)
        records += found
        notes += more
    block = formats.MOONCAKE_BLOCK if kind == "mooncake" else None
    return build(records, kind, notes, block or _own_block(paths[0], kind))


def _file(path: Path, kind: str, log: OpenAiLog) -> tuple[list[Record], list[str]]:
    lines, recording = _open(path), Recording()
    first = 1
    if kind in CSV:
        first = 2
        header = next(lines, "")
        row_of = CSV[kind]
        reader = Lines(path, formats.csv_reader(header, row_of))
    elif kind == "recording":
        reader = Lines(path, recording.parse)
    else:
        reader = Lines(path, log.parse if kind == "openai" else JSONL[kind])
    records = list(reader.records(lines, first))
    notes = reader.notes()
    if recording.cut:
        notes.append(f"{path.name}: {recording.cut} left out: requests that had not ended when the recording did")
    return records, notes


def _open(path: Path) -> Iterator[str]:
    try:
        path.open("rb").close()
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}", "give a log or a trace, see docs/recording.md") from exc
    return (raw.decode("utf-8-sig", "replace") for raw in bounded.lines(path))


def sniff(path: Path) -> str:
    """The format of a file, by its first line.

    Raises:
        UsageError: it cannot be read or is none of the known ones.
    """
    try:
        with path.open("rb") as f:
            head = f.read(HEAD_BYTES)
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}", "give a log or a trace, see docs/recording.md") from exc
    text = head.decode("utf-8-sig", "replace").lstrip()
    first = text.split("\n", 1)[0].strip()
    kind = _csv_kind(first.lower()) or _json_kind(path, text)
    if kind is None:
        expected = "a header of Azure or BurstGPT, or a JSON object with a time and usage"
        raise UsageError(
            f"{path}: line 1: expected {expected}", f"known formats: {', '.join(FORMATS[1:])}; see --format"
        )
    return kind


def _csv_kind(header: str) -> str | None:
    if "contexttokens" in header:
        return "azure"
    if "request tokens" in header:
        return "burstgpt"
    return "servegen" if re.fullmatch(r"[\d.]+,[\d.e+-]+,[\d.e+-]*,[a-z]*,[\d.e+-]*,[\d.e+-]*", header) else None


def _json_kind(path: Path, text: str) -> str | None:
    if re.match(r'\{\s*"\d+":\s*\{\s*"(input|output)_tokens"', text):
        return "servegen"
    row: Any = None
    try:
        row = bounded.loads(next((line for line in bounded.lines(path) if line.strip()), b""))
    except (ValueError, OSError):
        # The first line may be the one torn; its words still tell.
        row = dict.fromkeys(re.findall(r'"(\w+)"\s*:', text[:4096]))
    if not isinstance(row, dict) or not row:
        return None
    if HEAD in row:
        return "recording"
    marks = {"mooncake": "input_length", "llmservingsim": "input_toks"}
    named = next((kind for kind, key in marks.items() if key in row), None)
    if named is None and "prompt_tokens" in row and ("at_s" in row or "timestamp_ms" in row):
        return "schedule"
    if named is None and set(row) & {"usage", "response", "request", "body", "messages", *INPUT, *OUTPUT}:
        return "openai"
    return named


def _own_block(path: Path, kind: str) -> int | None:
    """The block size a replay file of ours says."""
    if kind != "schedule":
        return None
    try:
        size = bounded.loads(next(bounded.lines(path), b"")).get("block_tokens")
    except (ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None
