"""What every part of the report looks at: a Run with its account and summary, its load points in the order they are
drawn, and their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from whywait.analyze.latency import Content, Latency, content, origin_ns, per_request
from whywait.analyze.phases import RequestAccount
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.report.svg import Html, clip, tag
from whywait.report.text import KNEE
from whywait.units import ms

MOST_ROWS = 24  # points drawn in a chart; the tables have all
MOST_KEPT = 3_000_000  # chunks of a Run whose points are all held at once
VISIBLE = 0.002  # a smaller share of a bar is not drawn
BEHIND = "Figures behind this chart"
Point = dict[str, Any]  # an entry of ``points`` in the summary


@dataclass(frozen=True)
class View:
    """A Run with its account and summary. ``points`` in the order drawn: plain ones by load, then the marked ones."""

    run: Run
    summary: dict[str, Any]
    acc: RequestAccount
    points: list[Point] = field(init=False)
    _ones: dict[int, tuple[Run, Content]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.run.manifest.origin == "simulated":
            object.__setattr__(self, "summary", _modelled(self.summary))
        given = self.summary["points"]
        order = sorted(range(len(given)), key=lambda i: (self.marked(given[i]), given[i]["target"] or 0.0, i))
        object.__setattr__(self, "points", [given[i] for i in order])

    def marked(self, p: Point) -> bool:
        """Whether a point is shown apart: it has a label, and not all have one."""
        return bool(p["label"]) and not all(q["label"] for q in self.summary["points"])

    @property
    def drawn(self) -> list[Point]:
        """The points that charts show: all, or some evenly over the load, and the knee."""
        at = set(np.linspace(0, len(self.points) - 1, min(len(self.points), MOST_ROWS)).round().astype(int).tolist())
        return [p for i, p in enumerate(self.points) if i in at or p is self.knee]

    @property
    def plain(self) -> list[Point]:
        return [p for p in self.points if not self.marked(p)]

    @property
    def knee(self) -> Point | None:
        at = self.summary.get("knee")
        found: Point | None = None if at is None else self.summary["points"][at]
        return found

    @property
    def axis(self) -> str:
        """What the load is counted in."""
        modes = {p["mode"] for p in self.points}
        return {"concurrency": "in flight", "rate": "requests/s"}.get("".join(modes), "load")

    def short(self, p: Point) -> str:
        """``8``, ``2/s``, ``trace``; ◆ marks a point shown apart, ◂ the knee."""
        target = "–" if p["target"] is None else f"{p['target']:g}"
        text = {"concurrency": target, "rate": f"{target}/s"}.get(p["mode"], "trace")
        return text + (" ◆" if self.marked(p) else "") + (" ◂" if p is self.knee else "")

    @property
    def passive(self) -> bool:
        """Whether the service was only watched: there is no request of ours at any point."""
        return bool(self.points) and all("passive" in p for p in self.points)

    def one(self, p: Point) -> tuple[Run, Content]:
        """The part of the Run that belongs to a point, and its chunks."""
        found = self._ones.get(p["point"])
        if found is None:
            run = self.run.point(p["point"])
            found = run, content(run)
            if len(self.run.chunks) <= MOST_KEPT:  # else each is made again when it is wanted, which costs time only
                self._ones[p["point"]] = found
        return found

    def counted(self, p: Point) -> tuple[Latency, Array]:
        """The latencies of a point's requests, and which of them count: ``ok``, begun in the window."""
        one, c = self.one(p)
        lat, origin, w = per_request(one, c), origin_ns(one), p["window"]
        inside = (origin >= w["start_ns"]) & (origin <= w["end_ns"])
        return lat, lat.ok & (inside | w["whole_point"])

    @cached_property
    def samples(self) -> list[tuple[Point, Latency, Array]]:
        """:meth:`counted` of every point that is drawn."""
        return [(p, *self.counted(p)) for p in self.drawn]


def _modelled(summary: dict[str, Any]) -> dict[str, Any]:
    """``summary`` of a service that is itself simulated: what was read off it is modelled, not measured."""

    def told(how: str) -> str:
        return "modelled" if how == "measured" else how

    points = []
    for p in summary["points"]:
        phases = {k: {**v, "how": told(v["how"])} for k, v in (p["phases"] or {}).items()}
        occupancy = {**p["occupancy"], "how": {k: told(v) for k, v in p["occupancy"]["how"].items()}}
        points.append({**p, "phases": phases or p["phases"], "occupancy": occupancy})
    return {**summary, "points": points}


def load_name(p: Point, label: bool = True) -> str:
    """A load point in words: ``8 in flight``, ``2 requests/s``, with its label."""
    target = "–" if p["target"] is None else f"{p['target']:g}"
    text = {"concurrency": f"{target} in flight", "rate": f"{target} requests/s"}.get(p["mode"], "the trace")
    return f"{text} ({clip(p['label'])})" if label and p["label"] else text


def signs(view: View) -> Html:
    """What the signs of the point names mean, and how many points are not drawn."""
    notes = [f"◂ knee: {KNEE}"] if view.knee is not None else []
    labels = dict.fromkeys(clip(p["label"]) for p in view.points if view.marked(p))
    notes += ["◆ " + ", ".join(list(labels)[:4])] if labels else []
    few, all_ = len(view.drawn), len(view.points)
    notes += [f"{few} of {all_} points are drawn; the table has all"] if few < all_ else []
    return tag("p", " · ".join(notes), class_="note") if notes else Html()


def from_to(a: Point, b: Point) -> str:
    first = load_name(a, False)
    return f"{first.split()[0] if a['mode'] == b['mode'] != 'trace' else first} to {load_name(b, False)}"


def bounds(found: dict[str, Any], q: str) -> tuple[float | None, float | None]:
    """The 95 % interval of a quantile of a latency summary; (None, None) where there is none."""
    low, high = (found.get("ci") or {}).get(q) or (None, None)
    return low, high


def with_bounds(found: dict[str, Any], q: str) -> str:
    """``12.0 ms [11.2 ms – ?]``."""
    low, high = bounds(found, q)
    text = f" [{'?' if low is None else ms(low)} – {'?' if high is None else ms(high)}]"
    return "–" if found[q] is None else ms(found[q]) + text
