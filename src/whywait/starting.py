"""The arms of ``ab``, ``try`` and ``quality`` as services: started, or reached where they run. Application layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from whywait import app
from whywait.core import secrets
from whywait.errors import ArmNotStarted, EngineDied
from whywait.lab.arms import EMBEDDED, Arm, command_of
from whywait.lab.disagg import OWN, Fleet
from whywait.lab.settings import Settings
from whywait.lab.state import Engine
from whywait.net.endpoint import Endpoint, parse_url, read_key
from whywait.options import Options, Say, may_load


def _start(arm: Arm, say: Say) -> contextlib.AbstractContextManager[Engine | None]:
    """How an arm is started, by its kind; one of another kind runs already."""
    if arm.kind == "command":
        return app.command(command_of(arm), say=say)
    if arm.kind == EMBEDDED:
        return app.embedded(Settings.from_dict(dict(arm.settings)), say=say)
    if arm.kind in OWN:
        return app.fleet(Fleet.from_dict(arm.settings), say=say)
    return contextlib.nullcontext()


@contextlib.contextmanager
def started(arm: Arm, name: str, say: Say) -> Iterator[Engine | None]:
    """A fresh process of the arm, pinned as ``diagnose`` pins it; None for a service that runs already."""
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(_start(arm, say))
        except EngineDied as exc:
            raise ArmNotStarted(f"arm {name} did not start: {exc.message}", exc.hint) from exc
        yield engine


def endpoint_of(options: Options, url: str) -> Endpoint:
    key = read_key(options.api_key_file)
    secrets.hide(key)
    return parse_url(url, options.dialect, key, options.workload.timeout_s, options.reach)


def allowed(arms: Iterable[Arm], options: Options) -> None:
    """
    Raises:
        UsageError: a service of another machine would be sent load without a word; before any arm is sent anything.
    """
    for arm in arms:
        if arm.kind == "url":
            may_load(endpoint_of(options, arm.text), options)
