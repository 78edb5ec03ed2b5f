"""``whywait serve-sim``: a simulated service behind an OpenAI-compatible API on this machine, at true pace."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import replace

from whywait import simulating, whatif
from whywait.analyze.observed import observed
from whywait.core.lengths import Lengths
from whywait.core.run import Run
from whywait.errors import EXIT_OK, UsageError
from whywait.judge.calibrate import Calibration
from whywait.judge.calibrate_fit import calibrate
from whywait.net.limits import many_sockets
from whywait.net.reach import is_loopback
from whywait.session import stderr
from whywait.sim import catalog
from whywait.sim.deployment import Deployment
from whywait.sim.front import Front
from whywait.sim.front_engine import engines_of, warm_up
from whywait.sim.front_service import servable, service_of
from whywait.sim.jit import COMPILED
from whywait.sim.result import describe
from whywait.twin.asked import asked
from whywait.twin.baseline import baseline_of
from whywait.twin.model import Twin, points_of, prior_of
from whywait.verbs.signals import stopped_by_signals
from whywait.verbs.simulate import deployment_of

LATE_S = 0.005  # lateness (p99) from which on the pace was not the true one


def serve_sim(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    if args.host != "localhost" and not is_loopback(args.host):
        raise UsageError(
            f"--host {args.host}: other machines could reach it", "it is for this machine only: leave it out"
        )
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is no port", "0 … 65535; 0 is any free one")
    catalog.use(args.catalog)
    found, rests_on = _service(args)
    d = servable(found)
    label = f"modelled: {describe(d)}; {rests_on}"
    service = replace(
        service_of(d, args.served_name, args.max_model_len, label),
        drawn=Lengths.parse(args.output_tokens), speed=args.speed, seed=args.seed,
    )  # fmt: skip
    if COMPILED:
        stderr("compiling the simulator (half a minute or more at the first start, kept for later ones)")
        warm_up(d)
    else:
        stderr("the simulator runs as plain Python; pip install 'whywait[sim]' compiles it")
    try:
        front = Front(service, engines_of(d, args.seed), args.host, args.port)
    except OSError as exc:
        raise UsageError(f"cannot listen on {args.host}:{args.port}: {exc.strerror}", "another port, or 0") from None
    stderr(label)
    stderr(f"{simulating.known_error(d)}; nothing here was measured on that machine")
    pace = "" if args.speed == 1 else f", {args.speed:g} times as fast"
    space = f"{d.replicas} × {service.kv_blocks * service.block:,} tokens of KV"
    stderr(f"{space}; a request has at most {service.context:,}; 4 bytes are a token{pace}")
    at = f"{front.server.url}/v1"
    if args.json:
        facts = {"url": at, "model": service.model, "modelled": label, "speed": args.speed, "context": service.context}
        print(json.dumps(facts), flush=True)
    else:
        print(f"{at} serves {service.model}; stop with Ctrl-C", flush=True)
    _ready_for_many()
    with stopped_by_signals(front.server.stop):
        front.server.run()
    _said(front)
    return EXIT_OK


def _service(args: argparse.Namespace) -> tuple[Deployment, str]:
    """What is served, and in words what its times rest on.

    Raises:
        UsageError: the flags do not say a service that can be.
    """
    if args.run and args.calibration:
        raise UsageError("--run is calibrated on itself", "give it or --calibration")
    if not args.run:
        d = deployment_of(args)
        if not args.calibration:
            return d, "prior only: no run of this service was used"
        return Twin(d, ()).at(Calibration.load(args.calibration).multipliers()), f"calibrated by {args.calibration}"
    run = Run.load(args.run)
    seen = observed(run)
    if not seen:
        raise UsageError(f"no request of {args.run} ended well", "whywait show says what happened")
    base = baseline_of(run, args.baseline or "")
    twin = Twin(base.deployment, tuple(asked(run, o) for o in seen), dict(run.manifest.slo))
    stderr(f"calibrating on {args.run}, {len(seen)} load points")
    found = calibrate(points_of(seen), twin.predict, prior_of(base.deployment, base.cpu))
    ask = whatif.Ask(args.apply or "", args.machine, args.model, args.layout)
    told = "calibrated on" if found.calibrated else "one load point, which is no calibration, of"
    return whatif.changed(twin.at(found.multipliers()), ask), f"{told} {args.run}"


def _ready_for_many() -> None:
    many_sockets()
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
