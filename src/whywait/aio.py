"""The same functions as :mod:`whywait.api` for a running event loop: each runs in a thread of its own and is awaited.

Cancelling the task ends a measurement as Ctrl-C would: what was measured is kept, labelled PARTIAL. What
only computes (``what_if``, ``simulate``, ``plan``, ``bill``, ``compare``, …) runs to its end unheard.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from whywait import api
from whywait.session import CANCELLED

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    @functools.wraps(function)
    async def away(*args: P.args, **kwargs: P.kwargs) -> T:
        context, ended = contextvars.copy_context(), threading.Event()
        context.run(CANCELLED.set, ended)
        call = functools.partial(context.run, function, *args, **kwargs)
        work = asyncio.get_running_loop().run_in_executor(None, call)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            ended.set()
            await asyncio.wait([work])  # it leaves a folder that can be read
            raise

    return away


run = _awaited(api.run)
sweep = _awaited(api.sweep)
diagnose = _awaited(api.diagnose)
find = _awaited(api.find)
probe_service = _awaited(api.probe_service)
resume = _awaited(api.resume)
watch = _awaited(api.watch)
doctor = _awaited(api.doctor)
history = _awaited(api.history)
catalog = _awaited(api.catalog)
simulate = _awaited(api.simulate)
what_if = _awaited(api.what_if)
ab = _awaited(api.ab)
try_technique = _awaited(api.try_technique)
quality = _awaited(api.quality)
plan = _awaited(api.plan)
bill = _awaited(api.bill)
compare = _awaited(api.compare)
import_results = _awaited(api.import_results)
export = _awaited(api.export)
