"""``whywait watch``: a service in production, by what it and its machine say; no load is sent."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from rich import live as rich_live

from whywait import app, observing
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNDECIDED, UsageError
from whywait.report import live, text
from whywait.report.watch import view
from whywait.session import stderr
from whywait.verbs import measure, reading
from whywait.verbs.probes import probes_of

MOST_HZ = 20.0
REFRESH_S = 3.0  # of the live view


def watch(args: argparse.Namespace) -> int:
    reading.engine_file(args)
    options = _options(args)
    moving = not (args.json or args.once) and live.can_move(sys.stdout)
    result: app.Result | None = None
    with observing.Watcher(options) as watcher:
        stderr(f"watching {_where(options)}: nothing is sent but requests for its metrics")
        if watcher.spans_at:
            stderr(f"spans of the engine are taken at {watcher.spans_at}")
        if moving:
            result = _live(watcher, options)
        else:
            for result in watcher.windows(options.window_s):
                _print(args, result, options)
        kept = watcher.finish()
    if kept is not None:
        stderr(f"run kept in {kept.directory}: whywait show {kept.directory}")
    if result is None:
        stderr("whywait: ended before a window was whole")
        return EXIT_INTERRUPTED
    if args.strict and not any(v.state == "holds" for v in result.verdicts):
        return EXIT_UNDECIDED
    return EXIT_OK


def watched(args: argparse.Namespace, each: Callable[[app.Result], object]) -> app.Result:
    """The journey by its flags, nothing printed: the kept run, else the last window.

    Raises:
        KeyboardInterrupt: it was ended before a window was whole.
    """
    reading.engine_file(args)
    options, last = _options(args), None
    with observing.Watcher(options) as watcher:
        for last in watcher.windows(options.window_s):
            each(last)
        kept = watcher.finish()
    if last is None:
        raise KeyboardInterrupt
    return kept or last


def _live(watcher: observing.Watcher, options: observing.Watch) -> app.Result | None:
    result = None
    with rich_live.Live(console=text.console(), screen=False, auto_refresh=False) as shown:
        for result in watcher.windows(min(REFRESH_S, options.window_s)):
            shown.update(view(result.summary, result.verdicts, _where(options), options.window_s), refresh=True)
    return result


def _print(args: argparse.Namespace, result: app.Result, options: observing.Watch) -> None:
    if args.json:
        json.dump(document(result, options), sys.stdout, indent=2 if args.once else None, allow_nan=False)
        print(flush=True)
    else:
        text.console().print(view(result.summary, result.verdicts, _where(options), options.window_s))


def document(result: app.Result, options: observing.Watch) -> dict[str, Any]:
    """The summary of a window as ``--json`` prints it, with when it was (Unix seconds) and how long."""
    points, zero = result.run.points, result.run.manifest.zero_unix_ns
    at = [(float(points[c][-1]) + zero) / 1e9 if len(points) else None for c in ("start_ns", "end_ns")]
    window = {"start_unix_s": at[0], "end_unix_s": at[1], "seconds": options.window_s}
    return {"watched": _where(options), "window": window, **result.summary}


def _where(options: observing.Watch) -> str:
    return options.url or (options.prometheus.url if options.prometheus else "")


def _options(args: argparse.Namespace) -> observing.Watch:
    if args.hz > MOST_HZ:
        raise UsageError(f"--hz {args.hz:g} would cost the service more than it tells", f"at most {MOST_HZ:g}")
    window_s = measure.duration(args.window, "--window")
    length_s = measure.duration(args.length, "--for") if args.length else None
    if window_s * args.hz < 3 and not args.prometheus:
        raise UsageError("a window must hold at least 3 looks", "a longer --window, or a higher --hz")
    reach = measure._reach(args)
    found = observing.Watch(
        url=args.url or "",
        model=args.model,
        api_key_file=args.api_key_file,
        window_s=window_s,
        length_s=length_s,
        hz=args.hz,
        out=args.out,
        slo=measure.slo(args.slo),
        reach=reach,
        metrics_urls=tuple(args.metrics_url),
        prometheus=reading.prometheus(args, reach),
        probes=probes_of(args),
        command=measure._command(args),
    )
    return dataclasses.replace(found, length_s=window_s) if args.once else found
