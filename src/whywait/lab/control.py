"""What ``whywait engine start | stop | status | list`` does, as plain dictionaries for the command line to print."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from whywait.errors import UsageError
from whywait.lab import ask, launch, places, state
from whywait.lab.settings import Settings

DEFAULT_NAME = "default"


def engine_start(
    name: str = DEFAULT_NAME, settings: Settings | None = None, *, say: launch.Say | None = None
) -> dict[str, Any]:
    """Start an embedded engine that keeps running until it is stopped."""
    state.check_name(name)
    with places.locked(places.engines_dir()):  # two starts of one name: the second finds the first's
        if (there := state.find(name)) is not None:
            raise UsageError(f"an engine '{name}' runs already at {there.url}", f"whywait engine stop {name}")
        return _describe(launch.start_embedded(settings, name=name, detached=True, say=say))


def engine_stop(name: str = DEFAULT_NAME) -> dict[str, Any]:
    engine = _known(name)
    launch.stop(engine)
    return {**_describe(engine), "running": state.alive(engine), "healthy": False}


def engine_status(name: str = DEFAULT_NAME) -> dict[str, Any]:
    return _describe(_known(name))


def engine_list() -> list[dict[str, Any]]:
    return [_describe(engine) for engine in state.running()]


def _known(name: str) -> state.Engine:
    engine = state.find(name)
    if engine is None:
        names = ", ".join(e.name for e in state.running())
        raise UsageError(
            f"no engine '{name}' is running", f"running: {names}" if names else f"whywait engine start {name}"
        )
    return engine


def _describe(engine: state.Engine) -> dict[str, Any]:
    uptime = max(0.0, time.time() - engine.started_at)
    plain = {**asdict(engine), "command": list(engine.command), "cpus": list(engine.cpus)}
    return {**plain, "running": True, "healthy": ask.ready(engine.url), "uptime_s": round(uptime, 1)}
