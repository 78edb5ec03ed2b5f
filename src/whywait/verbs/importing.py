"""The verb ``import``: files of other tools in, a Run and what it says out."""

from __future__ import annotations

import argparse
from pathlib import Path

from whywait import app, importing
from whywait.errors import EXIT_OK, EXIT_UNDECIDED, GateFailed, UsageError
from whywait.judge.gates import failed_gates, parse_gates
from whywait.session import stderr
from whywait.verbs import measure


def import_(args: argparse.Namespace) -> int:
    gates = parse_gates(args.fail_if)
    found = imported(args)
    if args.report:
        app.write_report(found.result, Path(args.report))
        stderr(f"report: {args.report}")
    measure.tell(args, found.result)
    failed = failed_gates(gates, found.result.summary)
    if failed:
        raise GateFailed("; ".join(failed))
    if args.strict and not any(v.state == "holds" for v in found.result.verdicts):
        return EXIT_UNDECIDED
    return EXIT_OK


def imported(args: argparse.Namespace) -> importing.Imported:
    """The files that the flags name as a run in its folder."""
    if args.devices and not args.machine:
        raise UsageError("--devices: of which machine?", "add --machine h100")
    out = Path(args.out)
    if (out / "manifest.json").exists() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} holds something already", "give a new folder")
    on = (args.machine, args.devices or 1) if args.machine else None
    more = importing.given(args.engine, args.model, on, args.slots, measure.slo(args.slo))
    more.chunks = args.chunks
    more.command = ["import", *args.files, "--out", args.out]
    found = importing.import_results(args.files, out, args.format, more)
    for tool in found.result.run.manifest.client["imported"]["tools"]:
        version = f" {tool['version']}" if tool["version"] else " (version not told)"
        stderr(f"{tool['tool']}{version}: {', '.join(f['name'] for f in tool['files'])}")
    agree = sum(f.agrees for f in found.checked)
    if found.checked:
        stderr(f"{agree} of {len(found.checked)} figures are those that the tool itself published"
               + ("" if agree == len(found.checked) else "; the doubts say where definitions differ"))  # fmt: skip
    return found
