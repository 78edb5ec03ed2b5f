"""``whywait engine start|stop|status|list``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from whywait.lab import control
from whywait.lab.models import cached_synthetic
from whywait.lab.settings import Settings
from whywait.session import stderr

OURS = {"command", "detached", "started_at", "start_mark"}  # kept to know the process again; no news to a reader


def engine(args: argparse.Namespace) -> int:
    name = args.name or control.DEFAULT_NAME
    if args.action == "start":
        model = str(cached_synthetic(args.synthetic)) if args.synthetic else args.model
        settings = Settings(model=model, port=args.port, slots=args.slots, ctx_per_slot=args.ctx, threads=args.threads)
        _print(args, control.engine_start(name, settings, say=stderr))
    elif args.action == "stop":
        facts = control.engine_stop(name)
        if args.json:
            _print(args, facts)
        else:
            print(f"{name} is stopped")
    elif args.action == "status":
        _print(args, control.engine_status(name))
    else:
        found = control.engine_list()
        if args.json:
            print(json.dumps(found, indent=2))
        else:
            for e in found:
                print(f"{e['name']:<20} {e['url']:<28} {e['model']}")
            if not found:
                stderr("no engine is running; whywait engine start")
    return 0


def _print(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        if value not in (None, []) and key not in OURS:
            print(f"{key:<14} {value}")
