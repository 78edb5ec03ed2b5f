"""Where the engine's metrics are read when it is not from the service itself: pages of replicas, or a Prometheus.

Part of the application layer, beneath the session: it joins the probes with what was found of the service.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from whywait.core.table import Table
from whywait.engines import EngineTable, detect
from whywait.errors import UsageError
from whywait.load.preflight import UNREAD, Target
from whywait.net.reach import Reach, page_url
from whywait.probe.pages import fetcher
from whywait.probe.promql import Prometheus
from whywait.units import NS_PER_S

SCRAPES = 4  # a stretch of time shorter than so many scrapes says little
LOOK_BACK_S = 3600.0  # an engine that a Prometheus has seen within this is the one that is measured


def read_elsewhere(target: Target, urls: tuple[str, ...], prometheus: Prometheus | None) -> Target:
    """``target`` with the pages and the engine found there; as it is where neither is given.

    Raises:
        UsageError: a page does not answer or is of no engine, pages are of different engines, or both are given.
        Unreachable, Unauthorized, NotAnEndpoint: of the Prometheus.
    """
    if urls and prometheus is not None:
        raise UsageError("--metrics-url and --prometheus would count everything twice", "give one of them")
    if prometheus is not None:
        now = time.time()
        return _known(target, prometheus.table(now - LOOK_BACK_S, now), ())
    if not urls:
        return target
    return _known(target, engine_of(urls, target.endpoint.reach, target.endpoint.home), urls)


def engine_of(urls: tuple[str, ...], reach: Reach, home: str = "") -> EngineTable:
    """The engine that all these pages are of.

    Raises:
        UsageError: see :func:`read_elsewhere`.
    """
    found: dict[str, EngineTable] = {}
    for url in dict.fromkeys(urls):
        if not url.startswith("unix://"):
            page_url(url, "--metrics-url", "such as http://host:8000/metrics")
        page = fetcher(url, {}, 5.0, reach, home)
        body = page.get()
        page.close()
        if body is None:
            raise UsageError(f"--metrics-url {url} does not answer ({page.why})", "give the URL of the page itself")
        table = detect(metrics_text=body.decode("utf-8", "replace"))
        if table is None:
            raise UsageError(f"--metrics-url {url} is of no engine whywait knows", "another engine: --engine-file")
        found[table.name] = table
    if len(found) > 1:
        raise UsageError(f"--metrics-url: pages of {' and '.join(found)}", "replicas are of one engine")
    return next(iter(found.values()))


def _known(target: Target, table: EngineTable, urls: tuple[str, ...]) -> Target:
    notes = tuple(n for n in target.notes if n["what"] != UNREAD)
    return dataclasses.replace(target, engine=table, metrics_urls=urls, notes=notes)


def scrape_ns(readings: Table) -> float:
    """Usual time between two readings of an engine's gauges, ns; 0 where that is not known."""
    gaps = []
    named = readings.where(readings["name"] == "running")
    for source in set(named["source"].tolist()):
        times = np.unique(named["asked_ns"][named["source"] == source])
        gaps.append(np.diff(times))
    found = np.concatenate(gaps) if gaps else np.zeros(0)
    return float(np.median(found)) if len(found) else 0.0


def too_few(readings: Table, shortest_ns: float) -> dict[str, str] | None:
    """A doubt where the shortest stretch that is judged holds fewer than ``SCRAPES`` readings."""
    scrape = scrape_ns(readings)
    if shortest_ns >= SCRAPES * scrape:
        return None
    why = f"they are {scrape / NS_PER_S:.0f} s apart, and {shortest_ns / NS_PER_S:.0f} s are judged by them"
    return {"what": "a point or window holds only a few readings", "why": why,
            "next": "longer points (--duration), a longer --window or --last"}  # fmt: skip
