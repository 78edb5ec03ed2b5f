"""Deals a load point out to the shards of a run."""

from __future__ import annotations

import dataclasses

import numpy as np

from whywait.load.driver import Point

EXACT_SPLIT = 16  # below so many places per shard, requests are dealt by place


def split(point: Point, n: int) -> list[Point | None]:
    """The point dealt to ``n`` shards: requests, and places in flight or the rate, add up exactly. None: nothing for
    that shard, since there are fewer places than shards."""
    if not point.closed:
        most = _shares(point.max_in_flight, n) if point.max_in_flight is not None else [None] * n
        parts = [point.schedule.shard(k, n) for k in range(n)]
        whole = max(1, len(point.schedule))
        return [
            dataclasses.replace(point, target=point.target * len(s) / whole, schedule=s, max_in_flight=m)
            if len(s) and m != 0 else None
            for s, m in zip(parts, most, strict=True)
        ]  # fmt: skip
    places = _shares(int(point.target), n)
    n = sum(p > 0 for p in places)
    if len(set(places[:n])) == 1 or places[0] > EXACT_SPLIT:
        parts = [point.schedule.shard(k, n) for k in range(n)]
    else:  # a shard with more places gets more of the requests, or it would be done before the others
        by_place = [point.schedule.shard(j, sum(places)).id for j in range(sum(places))]
        ends = np.cumsum(places[:n])
        ids = [np.concatenate(by_place[e - p : e]) for e, p in zip(ends, places, strict=False)]
        parts = [point.schedule.take(np.isin(point.schedule.id, mine)) for mine in ids]
    some: list[Point | None] = [
        dataclasses.replace(point, target=p, schedule=s) for p, s in zip(places, parts, strict=False)
    ]
    return some + [None] * (len(places) - n)


def _shares(whole: int, n: int) -> list[int]:
    return [whole // n + (k < whole % n) for k in range(n)]
