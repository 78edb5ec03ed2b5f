"""The verb ``history``: a folder of runs in; a list, a figure over time, CSV, JSON or a page out."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from whywait import listing
from whywait.core.secrets import clean
from whywait.errors import EXIT_OK, UsageError
from whywait.report import history as report
from whywait.session import stderr
from whywait.verbs import measure
from whywait.verbs.gated import write_page


def history(args: argparse.Namespace) -> int:
    measure._writable(args.html)
    seen = listed(args)
    found = seen.found
    if args.html:
        write_page(Path(args.html), seen.html(), "the runs are")
        stderr(f"report: {args.html}")
    if args.csv and args.csv != "-":
        _csv(Path(args.csv), found)
    if args.json:
        sys.stdout.write(clean(json.dumps(found, indent=2, allow_nan=False)) + "\n")
    elif args.csv == "-":
        csv.writer(sys.stdout, lineterminator="\n").writerows(report.csv_rows(found))
    else:
        report.print_history(found)
    return EXIT_OK


def listed(args: argparse.Namespace) -> listing.Listed:
    """The runs that the flags choose.

    Raises:
        UsageError: no such folder or figure, or a number that cannot be.
    """
    if args.last is not None and args.last < 1:
        raise UsageError("--last must be 1 or more")
    choice = listing.Choice(args.figure, args.at or "", args.model or "", args.engine or "", args.last)
    return listing.Listed(listing.history(Path(args.directory), choice))


def _csv(path: Path, found: dict[str, object]) -> None:
    """
    Raises:
        UsageError: it cannot be written there.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(report.csv_rows(found))
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", "give a file in a folder that exists") from None
    stderr(f"csv: {path}")
