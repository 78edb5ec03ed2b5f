"""``whywait serve-sim``: a simulated service behind an OpenAI-compatible API on this machine, at true pace."""

from __future__ import annotations

import argparse
import gc
import resource
import sys
from dataclasses import replace

from whywait import simulating
from whywait.core.lengths import Lengths
from whywait.errors import EXIT_OK, UsageError
from whywait.net.reach import is_loopback
from whywait.session import stderr
from whywait.sim import catalog
from whywait.sim.front import Front
from whywait.sim.front_engine import engines_of
from whywait.sim.front_service import servable, service_of
from whywait.verbs.signals import stopped_by_signals
from whywait.verbs.simulate import deployment_of

LATE_S = 0.005  # lateness (p99) from which on the pace was not the true one


def serve_sim(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    if args.host != "localhost" and not is_loopback(args.host):
        raise UsageError(f"--host {args.host}: other machines could reach it", "it serves this machine only: leave --host out")
    catalog.use(args.catalog)
    d = servable(deployment_of(args))
    label = f"modelled: {simulating.describe(d)}"
    service = replace(
        service_of(d, args.served_name, args.max_model_len, label),
        drawn=Lengths.parse(args.output_tokens), speed=args.speed, seed=args.seed,
    )  # fmt: skip
    try:
        front = Front(service, engines_of(d, args.seed), args.host, args.port)
    except (OSError, OverflowError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise UsageError(f"cannot listen on {args.host}:{args.port}: {why}", "another port, or --port 0") from None
    stderr(label)
    stderr(f"{simulating.KNOWN_ERROR}; nothing here was measured on that machine")
    pace = "" if args.speed == 1 else f", {args.speed:g} times as fast"
    stderr(f"{d.replicas} × {service.kv_blocks * service.block:,} tokens of KV, at most {service.context:,} per request; "
           f"4 bytes are a token{pace}")  # fmt: skip
    print(f"{front.server.url}/v1 serves {service.model}; stop with Ctrl-C", flush=True)
    _ready_for_many()
    with stopped_by_signals(front.server.stop):
        front.server.run()
    _said(front)
    return EXIT_OK


def _ready_for_many() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a full collection in the middle of a step is milliseconds of lateness


def _said(front: Front) -> None:
    """How far the timetable was kept, which is what the figures of a client are worth."""
    late = front.lateness()
    median, high = late.quantile(0.5), late.quantile(0.99)
    print(f"{front.requests:,} requests, {front.refused:,} refused", file=sys.stderr)
    if median is None or high is None:
        return
    stderr(f"tokens left late by at most {median * 1e3:.3g} ms (half of {late.histogram.number:,} steps), "
           f"{high * 1e3:.3g} ms (99 %), {late.worst * 1e3:.3g} ms (the worst)")  # fmt: skip
    if front.slipped_s > 0:
        stderr(f"this machine could not keep the pace: the timetable was moved by {front.slipped_s:.3g} s in all; use "
               "--speed 0.5, fewer streams, or free a core for it")  # fmt: skip
    elif high > LATE_S:
        stderr("this machine did not keep the pace all the time: free a core for it, or use --speed 0.5")
