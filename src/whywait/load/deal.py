"""Deals a load point out to the shards of a run."""

from __future__ import annotations

import dataclasses

import numpy as np

from whywait.core.schedule import Schedule
from whywait.load.driver import Point

EXACT_SPLIT = 16  # below so many places per shard, requests are dealt by place


def split(point: Point, n: int) -> list[Point | None]:
    """The point dealt to ``n`` shards: requests, and places in flight or the rate, add up exactly. None: nothing for
    that shard, since there are fewer places than shards. A cap of an open loop is dealt as places are."""
    limit = int(point.target) if point.closed else point.max_in_flight
    if limit is None:
        return [_open(point, point.schedule.shard(k, n), None) for k in range(n)]
    places = _shares(limit, n)
    parts = _dealt(point.schedule, places)
    some: list[Point | None] = [
        dataclasses.replace(point, target=p, schedule=s) if point.closed else _open(point, s, p)
        for p, s in zip(places, parts, strict=False)
    ]  # fmt: skip
    return some + [None] * (n - len(some))


def _open(point: Point, schedule: Schedule, most: int | None) -> Point | None:
    if not len(schedule):
        return None
    share = len(schedule) / max(1, len(point.schedule))
    return dataclasses.replace(point, target=point.target * share, schedule=schedule, max_in_flight=most)


def _dealt(schedule: Schedule, places: list[int]) -> list[Schedule]:
    """The requests of each shard that has any of the ``places``."""
    n = sum(p > 0 for p in places)
    if len(set(places[:n])) == 1 or places[0] > EXACT_SPLIT:
        return [schedule.shard(k, n) for k in range(n)]
    # A shard with more places gets more of the requests, or it would be done before the others.
    by_place = [schedule.shard(j, sum(places)).id for j in range(sum(places))]
    ends = np.cumsum(places[:n])
    ids = [np.concatenate(by_place[e - p : e]) for e, p in zip(ends, places, strict=False)]
    return [schedule.take(np.isin(schedule.id, mine)) for mine in ids]


def _shares(whole: int, n: int) -> list[int]:
    return [whole // n + (k < whole % n) for k in range(n)]
