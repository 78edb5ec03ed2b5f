"""The requests of a measured Run as schedules that a simulator can be given: the very lengths, arrivals, sessions and
shared beginnings. Part of the application layer: the recipe that made the load is played again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.observed import Observed
from whywait.core.run import Run
from whywait.core.schedule import Schedule, Workload
from whywait.core.table import Table
from whywait.errors import UsageError, WhywaitError
from whywait.load.recipe import Load, schedule_of
from whywait.units import NS_PER_S, load_name

LEAST, MOST = 200, 500  # requests of a point that are simulated: enough for its medians, and quick
WAVES = 8  # of a closed loop, where there is room for them


@dataclass(frozen=True)
class Asked:
    """A load: ``counted`` (bool per row) are those whose figures count; ``note`` what could not be rebuilt."""

    name: str
    mode: str
    target: float
    schedule: Schedule
    counted: np.ndarray[Any, np.dtype[np.bool_]]
    warm: bool = False
    note: str = ""

    @property
    def at(self) -> tuple[float, float, float]:
        """Of the lengths asked for; requests in flight are the target's, where that is what the load sets."""
        s = self.schedule
        return (math.log(max(self.target, 0.1)), math.log(max(float(s.prompt_tokens.mean()), 1.0)),
                math.log(max(float(s.output_tokens.mean()), 1.0)))  # fmt: skip


def asked(run: Run, o: Observed) -> Asked:
    """The requests of a measured point, in the order they were sent; those that failed are left out.

    Raises:
        UsageError: their lengths are not known.
    """
    rows = o.all_rows[np.argsort(run.requests["sent_ns"][o.all_rows], kind="stable")]
    req = run.requests.where(rows)
    prompt = _known(req["prompt_tokens"], req["asked_prompt_tokens"])
    output = _known(req["output_tokens"], req["content_chunks"])
    use = (req["outcome"] == 0) & np.isfinite(prompt) & np.isfinite(output)
    if not use.any():
        raise UsageError(f"{o.name}: the lengths of its requests are not known",
                         "the service must send usage (stream_options.include_usage)")  # fmt: skip
    most = int(min(max(LEAST, WAVES * o.in_flight), MOST))
    use &= np.cumsum(use) <= most
    req, rows, n = req.where(use), rows[use], int(use.sum())
    due = np.full(n, -1, np.int64)
    if o.mode != "concurrency":
        at = np.where(np.isnan(req["due_ns"]), req["sent_ns"], req["due_ns"])
        due = np.maximum(np.rint(at - at.min()), 0).astype(np.int64)
    ids = req["id"].astype(np.int64)
    more, note = _structure(run, o, req)
    names = tuple(dict.fromkeys(str(c) for c in req["class"])) or ("default",)
    klass = np.array([names.index(str(c)) for c in req["class"]], np.int64)
    order = np.argsort(due, kind="stable") if o.mode != "concurrency" else np.arange(n)
    schedule = Schedule(ids, klass, np.maximum(prompt[use], 1).astype(np.int64),
                        np.maximum(output[use], 1).astype(np.int64), due, names, **more)  # fmt: skip
    lost = int(len(o.all_rows) - n) if len(o.all_rows) <= most else int((~use[: np.flatnonzero(use)[-1] + 1]).sum())
    if lost:
        note = "; ".join(filter(None, (note, f"{lost} requests that did not end well are left out")))
    counted = np.isin(rows, o.rows)
    counted = counted if counted.any() else np.ones(n, dtype=bool)
    target = float(o.target) if o.target is not None else n * NS_PER_S / max(float(due.max(initial=1)), 1.0)
    return Asked(o.name, o.mode, target, schedule.take(order), counted[order], _workload(run).cache == "warm", note)


def drawn(run: Run, base: Asked, text: str, n: int | None = None, seed: int = 0) -> Asked:
    """Another load of the same requests: ``concurrency=64`` or ``rate=8`` (requests per second, Poisson), in an order
    drawn by ``seed``, again and again where more are needed. The first seed keeps the order.

    Raises:
        UsageError: the text is neither.
    """
    mode, _, amount = text.partition("=")
    try:
        target = float(amount)
    except ValueError:
        target = 0.0
    if mode not in ("concurrency", "rate") or not 0 < target < 1e6:
        raise UsageError(f"--load {text!r} is not a load", "concurrency=64 or rate=8")
    need = n or int(min(max(len(base.schedule), 8 * target if mode == "concurrency" else 30 * target, 200), 2000))
    rng = np.random.default_rng([run.manifest.seed & 0xFFFFFFFF, seed, 11])
    once = rng.permutation(len(base.schedule)) if seed else np.arange(len(base.schedule))
    rows = once[np.arange(need) % len(base.schedule)]
    picked = base.schedule.take(rows)
    ids = np.arange(need, dtype=np.int64)
    due = np.full(need, -1, np.int64)
    if mode == "rate":
        due = np.rint(np.cumsum(rng.exponential(1 / target, need)) * NS_PER_S).astype(np.int64)
    nobody = np.full(need, -1, np.int64)
    schedule = dataclasses.replace(picked, id=ids, due_ns=due, session_id=nobody, after_id=nobody,
                                   turn=np.zeros(need, np.int64), think_ns=np.zeros(need, np.int64))  # fmt: skip
    skip = min(round(target) if mode == "concurrency" else need // 10, need // 3)
    note = "sessions are not kept: each request stands alone" if base.schedule.has_sessions else ""
    return Asked(load_name(mode, target), mode, target, schedule, np.arange(need) >= skip, base.warm, note)


def _known(first: Any, second: Any) -> Any:
    return np.where(np.isfinite(first), first, second)


def _workload(run: Run) -> Workload:
    return Workload.from_dict(run.manifest.workload, "the run's workload")


def _structure(run: Run, o: Observed, req: Table) -> tuple[dict[str, Any], str]:
    """Columns of sessions and shared beginnings for the given requests, from the recipe played again."""
    try:
        workload = _workload(run)
        shared = any(c.shared or c.requests_per_session > 1 for c in workload.classes)
        special = shared or workload.trace or workload.fitted or workload.cache == "warm"
        again = _again(run, o, workload) if special else None
    except (WhywaitError, OSError, TypeError, ValueError, KeyError) as exc:
        return {}, f"sessions and shared beginnings could not be rebuilt ({exc})"
    if again is None:
        return (
            {},
            "sessions and shared beginnings could not be rebuilt (the recipe's times are not kept)" if special else "",
        )
    ids = req["id"].astype(np.int64)
    at = np.searchsorted(again.id, ids)
    at = np.minimum(at, len(again) - 1)
    same = (again.id[at] == ids) & (
        again.output_tokens[at] == _known(req["asked_output_tokens"], again.output_tokens[at])
    )
    if not same.all():
        return {}, "sessions and shared beginnings could not be rebuilt (the recipe gives other requests today)"
    picked = again.take(at)
    names = ("session_id", "turn", "after_id", "think_ns", "prefix_group", "prefix_tokens", "thinking_tokens")
    more: dict[str, Any] = {k: getattr(picked, k) for k in names}
    more["after_id"] = np.where(np.isin(picked.after_id, ids), picked.after_id, -1)
    if picked.blocks:
        more.update(blocks=picked.blocks, block_tokens=picked.block_tokens)
    return more, ""


def _again(run: Run, o: Observed, workload: Workload) -> Schedule | None:
    """The schedule that the session made of this point, if it left its load; ids are unique in a run and go on from
    point to point."""
    loads: list[Mapping[str, Any]] = run.manifest.journey.get("loads") or []
    place = int(np.flatnonzero(run.points["point"] == o.point)[0])
    if place >= len(loads):
        return None
    load = Load(**{k: v for k, v in loads[place].items() if k != "workload"})
    first = int(run.requests["id"][run.requests["point"] == o.point].min())
    return schedule_of(load, workload, first, o.point)[0]
