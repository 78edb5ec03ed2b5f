"""``whywait doctor [URL]``: what this machine and a service can and cannot measure, and how to enable the rest."""

from __future__ import annotations

import argparse
import json
import sys

from whywait import doctoring
from whywait.errors import EXIT_OK, GateFailed, UsageError
from whywait.report.doctor import print_doctor
from whywait.verbs import measure, reading


def doctor(args: argparse.Namespace) -> int:
    required = [name.strip() for text in args.require for name in text.split(",") if name.strip()]
    found = examined(args)
    if args.json:
        json.dump(found.as_dict(), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        print_doctor(found.sections)
    states = found.states
    if found.error is not None:
        raise found.error
    if unknown := [name for name in required if name not in states]:
        raise UsageError(f"--require: no line is called {', '.join(unknown)}", f"one of {', '.join(states)}")
    if lost := [f"{name} ({states[name]})" for name in required if states[name] != "can"]:
        raise GateFailed(f"required and not there: {', '.join(lost)}", "the lines above say what would enable it")
    return EXIT_OK


def examined(args: argparse.Namespace) -> doctoring.Findings:
    """What there is to find, by the flags, nothing printed of it.

    Raises:
        UsageError: a flag that does not go with it, or names what cannot be used.
    """
    reading.engine_file(args)
    if not args.stream:
        raise UsageError("doctor looks at streams", "leave out --no-stream")
    if args.launch:
        raise UsageError("doctor starts no engine", "start it, and give its URL")
    return doctoring.examine(measure._options(args, None), engine_port=args.engine_port)
