"""The verb ``export``: a saved Run in, files of other tools' forms out, an exit code back."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from typing import Any

from whywait import exporting
from whywait.core.columns import TABLES
from whywait.errors import EXIT_OK, UsageError
from whywait.session import stderr
from whywait.units import size
from whywait.verbs.measure import duration

MOST_IDS = 10_000_000
TIMED = ("otlp", "openmetrics", "grafana")  # forms in which every time is one of day
#: What to do with a file, in a line on stderr.
NEXT = {
    "perfetto": "open it in https://ui.perfetto.dev (it stays on your machine), or query it with trace_processor",
    "openmetrics": "promtool tsdb create-blocks-from openmetrics FILE DATA-FOLDER puts it into a Prometheus",
    "grafana": "Grafana: Dashboards, New, Import; its data come from --to openmetrics",
}


def export(args: argparse.Namespace) -> int:
    if args.json and args.out == "-":
        raise UsageError("--json and --out - both want stdout", "leave one of them out")
    told = exported(args)
    if args.json:
        json.dump(told, sys.stdout, indent=2, allow_nan=False)
        print()
    _say(args, told)
    return EXIT_OK


def exported(args: argparse.Namespace) -> dict[str, Any]:
    """What was written, or sent, by the flags."""
    return exporting.export(args.run_dir, _ask(args))


def _ask(args: argparse.Namespace) -> exporting.Ask:
    return exporting.Ask(
        to=args.to,
        out=args.out,
        point=args.point,
        ids=_ids(args.requests) if args.requests else None,
        limit=args.limit,
        tables=tuple(dict.fromkeys(args.table or TABLES)),
        chunks=args.chunks,
        step_ns=round(duration(args.step, "--step") * 1e9) if args.step else None,
        at_end=args.at_end,
        start_unix_ns=_start(args.start) if args.start else None,
        endpoint=args.endpoint,
        remote=args.remote,
        headers=tuple(args.header),
    )


def _ids(text: str) -> list[int]:
    """``'3,7-12'`` → [3, 7, 8, …, 12].

    Raises:
        UsageError: not such a list.
    """
    out: list[int] = []
    for part in text.split(","):
        low, dash, high = (x.strip() for x in part.partition("-"))
        if not low.isascii() or not low.isdigit() or (dash and not (high.isascii() and high.isdigit())):
            raise UsageError(f"--requests: {part.strip()!r} is no id and no range of ids", "such as --requests 3,7-12")
        first, last = int(low), int(high or low)
        if last < first or last - first + len(out) >= MOST_IDS:
            raise UsageError(f"--requests: {part.strip()!r} is not a range that can be listed", "such as 7-12")
        out += range(first, last + 1)
    return out


def _start(text: str) -> int:
    """``now`` or a time of ISO 8601 (UTC where it names no zone) → ns since 1970.

    Raises:
        UsageError: neither.
    """
    if text == "now":
        return time.time_ns()
    try:
        at = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise UsageError(f"--start: {text!r} is no time", "now, or such as 2026-11-30T12:00:00Z") from None
    at = at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)
    return round(at.timestamp()) * 1_000_000_000


def _say(args: argparse.Namespace, told: dict[str, Any]) -> None:
    """What was done, on stderr: data is on stdout alone."""
    counts = [f"{told['requests']:,} requests"]
    counts += [f"{told[k]:,} {k}" for k in ("chunks", "spans", "samples", "packets") if told.get(k)]
    counts += [f"{n:,} {name}" for name, n in (told.get("rows") or {}).items() if name != "requests"]
    if not told["dated"] and args.to in TIMED:
        stderr(
            "this run has no time of day: its times begin at 2000-01-01; --start now, or a time, puts them elsewhere"
        )
    if told["starts"]:
        stderr(f"times of sends are {told['starts']}")
    if told["partial"]:
        stderr(f"PARTIAL: {told['partial_reason'] or 'the run was cut off'}")
    if told.get("endpoint"):
        lost = told["rejected_spans"]
        stderr(f"sent to {told['endpoint']}: {', '.join(counts)}" + (f"; {lost} were rejected" if lost else ""))
    for file in told.get("files", ()):
        stderr(f"wrote {file['path']} ({size(file['bytes'])})")
    if told.get("files"):
        if args.to != "grafana":
            stderr(f"in it: {', '.join(counts)}")
        if args.to in NEXT and not args.at_end:
            stderr(f"  → {NEXT[args.to]}")
