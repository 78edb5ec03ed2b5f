"""What whywait's own export in the shape of ``vllm bench serve`` says of itself, in keys that vLLM does not have."""

from __future__ import annotations

import re
from typing import Any

from whywait.convert import results_file as rf
from whywait.convert.results_part import Asked, Source, doubt, ended
from whywait.core.columns import MADE_BY, OUTCOMES

TOOL = "whywait export"
PREFIX = "whywait_"
_ORIGIN = "whywait_made_by"
FAULTS = {"cancelled": "user", "censored": "none", "never_sent": "none"}
_STATUS = re.compile(r"[3-5]\d\d")
_TOLD = ("made_by", "definitions", "clock", "starts", "partial_reason", "point")
#: How figures of the file differ from ours, which are made of the same rows.
DEFINITIONS = {
    "ttft_ms": "the file counts from the send, as vLLM does",
    "tpot_ms": "the file has (last − first) / (tokens − 1), as vLLM does, whatever the first chunk held",
    "e2e_ms": "the file counts from the send, as vLLM does",
}


def is_own(row: dict[str, Any]) -> bool:
    return row.get(_ORIGIN) in MADE_BY


def starts(row: dict[str, Any]) -> str | None:
    """How sends are known that the run's own source did not tell: ``assumed`` or ``replayed``; None: told."""
    return (rf.text(row.get(PREFIX + "starts")) or "").partition(":")[0] or None if is_own(row) else None


def name_failures(requests: list[Asked], errors: list[Any]) -> None:
    """Outcome and detail of those that did not end well, which the export words ``outcome detail``. Whose fault it was
    is not in the file but where the outcome says it."""
    for r, error in zip(requests, errors, strict=False):
        outcome, _, detail = error.partition(" ") if isinstance(error, str) else ("", "", "")
        if outcome not in OUTCOMES:
            continue
        r.status = int(detail) if _STATUS.fullmatch(detail) else None
        r.fault = ended(None, r.status)["fault"] if outcome == "http_error" else FAULTS.get(outcome, "service")
        r.outcome, r.detail = outcome, detail[:60] or None


def note(row: dict[str, Any], source: Source) -> None:
    """Where the figures come from, whether the run was cut off, which engine it was."""
    source.tool, source.definitions = TOOL, DEFINITIONS
    source.version = rf.text(row.get(PREFIX + "version"))
    source.made_by = row[_ORIGIN] if source.made_by in (None, "measured", "imported") else source.made_by
    if row.get(PREFIX + "partial") is True:
        source.partial = rf.text(row.get(PREFIX + "partial_reason"), 200) or "the run was cut off"
    if name := rf.text(row.get(PREFIX + "engine")):
        source.engine.setdefault("name", name)
    said = {k: row[PREFIX + k] for k in _TOLD if isinstance(row.get(PREFIX + k), (str, int))}
    source.notes.append(doubt("the run is read back from an export of it",
                              "which holds its requests, not what was read of the engine beside them",
                              "use the folder of the run itself, where there is one"))  # fmt: skip
    source.facts.setdefault("whywait", []).append({k: v[:200] if isinstance(v, str) else v for k, v in said.items()})
