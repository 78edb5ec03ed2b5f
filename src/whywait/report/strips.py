"""What was read beside the requests, over the same time: KV space, queue, running, in flight, power; low panels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from whywait.analyze.counters import Series, series
from whywait.analyze.window import sweep
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.report.svg import At, Html, Plot, Scale, table
from whywait.units import NS_PER_S, number

MOST_SAMPLES = 400  # drawn of a line; of more, the highest of each stretch
SILENT, LEAST_SILENT_S = 5, 2.0  # no reading for so many usual intervals, and for so long: nothing is known there
HEIGHT, PITCH = 46, 84  # px of a panel, and from one to the next
Span = tuple[float, float]
Join = Callable[..., Any]


class Line(NamedTuple):
    """A line over time: its name, style, times (ns) and values, and who says so. All of them: only what is drawn is
    thinned, so that every figure is of the whole."""

    name: str
    style: str
    t: Array
    value: Array
    source: str

    @property
    def mean(self) -> float:
        """Weighted by time; a value holds until the next, but not over a silence."""
        took = np.where(self.silent, 0.0, np.diff(self.t))
        return float(np.average(self.value[:-1], weights=took)) if took.sum() > 0 else float(self.value.mean())

    @property
    def silent(self) -> Array:
        """Which of the times between two values are so long that nothing is known of them."""
        took = np.diff(self.t)
        if len(took) < 2 or self.style == "g-flight":  # the client's own sends are all there
            return np.zeros(len(took), dtype=bool)
        found: Array = took > max(SILENT * float(np.median(took)), LEAST_SILENT_S * NS_PER_S)
        return found


class Strip(NamedTuple):
    """A panel: its title, the top of its scale (None: the highest value), and its lines."""

    title: str
    most: float | None
    lines: list[Line]


def strips(run: Run, one: Run, span: Span) -> list[Strip]:
    """The panels of a point for ``span`` (ns), those without a reading left out; ``run`` has all readings, ``one`` the
    point's requests."""
    rd = run.readings
    busy = [_flying(one, span),
            _gauge(series(rd, "waiting"), ("waiting", "g-waiting", "the engine"), span, np.sum),
            _gauge(series(rd, "running"), ("running", "g-running", "the engine"), span, np.sum)]  # fmt: skip
    kv = _gauge(series(rd, "kv_use"), ("KV space in use, %", "g-kv_use", "the engine"), span, np.mean, 100.0)
    panels = [Strip("requests", None, [x for x in busy if x]), Strip("KV space in use, %", 100.0, [kv] if kv else [])]
    power = _power(run, span)
    panels.append(Strip("power, W", None, [power] if power else []))
    return [s for s in panels if s.lines]


def heights(found: list[Strip]) -> int:
    """Pixels that the panels take below what they are drawn under."""
    return PITCH * len(found)


def draw(plot: Plot, found: list[Strip], top: float, x: Callable[[float], float]) -> None:
    """The panels below each other from ``top`` on; ``x`` places nanoseconds."""
    for i, strip in enumerate(found):
        highest = max((float(line.value.max()) for line in strip.lines), default=0.0)
        scale = Scale(0, strip.most or max(1.0, highest) * 1.05)
        names = {line.name: KEYS[line.style] for line in strip.lines}
        words = ", ".join(f"{name} ({how})" for name, how in names.items())
        title = f"{strip.title}: {words}" if len(names) > 1 else f"{words}"
        lines = [(line.style, [(x(t), v) for t, v in part]) for line in strip.lines for part in _parts(line)]
        plot.strip(top + PITCH * i + 34, title, scale, lines)


#: How a line looks, in words: style is never told by colour alone.
KEYS = {"g-flight": "dotted", "g-waiting": "thick, amber", "g-running": "thin line", "g-kv_use": "thin line",
        "g-power": "thin line"}  # fmt: skip


def strips_table(found: list[Strip], zero_ns: float, where: str) -> Html:
    """Least, mean and most of each line; ``where`` names the load point."""
    rows = [[line.name, number(float(line.value.min())), number(line.mean), number(float(line.value.max())),
             f"{(float(line.t[int(np.argmax(line.value))]) - zero_ns) / NS_PER_S:.2f} s", line.source, len(line.t)]
            for s in found for line in s.lines]  # fmt: skip
    head = ["what", "least", "mean over time", "most", "most at", "said by", "readings"]
    return table(head, rows, f"What was read over this time, at {where}")


def strips_reading(found: list[Strip]) -> str:
    """The panels in a sentence or two; empty where there is none."""
    lines = {line.style: line for s in found for line in s.lines}
    out = []
    if w := lines.get("g-waiting"):
        most = float(w.value.max())
        out.append(f"The engine's own queue {f'held up to {most:.0f}' if most else 'stayed empty'}.")
    if kv := lines.get("g-kv_use"):
        out.append(f"KV space was {number(kv.mean)} % full on average, up to {number(float(kv.value.max()))} %.")
    if power := lines.get("g-power"):
        out.append(f"Power was {number(power.mean)} W on average, up to {number(float(power.value.max()))} W.")
    if not {"g-waiting", "g-running", "g-kv_use"} & set(lines):
        out.append("The engine's own gauges were not read.")
    return " ".join(out)


def _gauge(found: list[Series], what: tuple[str, str, str], span: Span, join: Join, times: float = 1.0) -> Line | None:
    """The series of a gauge joined inside ``span``."""
    name, style, source = what
    inside = [s.t_ns[(s.t_ns >= span[0]) & (s.t_ns <= span[1])] for s in found]
    t = np.unique(np.concatenate(inside)) if inside else np.zeros(0)
    if not len(t):
        return None
    values = join([np.interp(t, s.t_ns, s.values) for s in found], axis=0) * times
    sources = sorted({s.source for s in found})
    said = f"{source} ({sources[0]}{f' and {len(sources) - 1} more' if len(sources) > 1 else ''})"
    return Line(name, style, t, values, said)


def _flying(one: Run, span: Span) -> Line | None:
    """Requests in flight, counted exactly by when each was sent and ended."""
    t, count = sweep(one.requests["sent_ns"], one.requests["end_ns"])
    inside = (t >= span[0]) & (t <= span[1])
    if not inside.any():
        return None
    return Line("in flight", "g-flight", t[inside].astype(float), count[inside].astype(float), "the client's own sends")


def _power(run: Run, span: Span) -> Line | None:
    """Watts of the GPUs together; else of the CPU packages and their memory, from the growth of their counters."""
    gpus = series(run.readings, "power_watts", "gpu")
    if gpus:
        simulated, told = run.manifest.made_by == "simulated", run.manifest.engine.get("devices")
        # A meter is a device; the simulator has one for all devices of an engine.
        many = told if simulated and isinstance(told, int) else len(gpus)
        source = "the simulator" if simulated else "the devices"
        name = f"power of {many} device{'' if many == 1 else 's'}, W"
        return _gauge(gpus, (name, "g-power", source), span, np.sum)
    grown = []
    for name in ("package_energy_joules_total", "dram_energy_joules_total"):
        for s in series(run.readings, name, "host"):
            took, more = np.diff(s.t_ns) / NS_PER_S, np.diff(s.values)
            fine = (took > 0) & (more >= 0)
            if fine.any():
                watts, at = (more / np.where(fine, took, 1))[fine], s.asked_ns[1:][fine]
                grown.append(Series(s.source, s.labels, at, s.answered_ns[1:][fine], watts))
    return _gauge(grown, ("power of the CPU packages, W", "g-power", "RAPL"), span, np.sum)


def _thinned(t: Array, values: Array, most: int = MOST_SAMPLES) -> tuple[Array, Array]:
    if len(t) <= most:
        return t, values
    edges = np.linspace(0, len(t), most + 1).astype(int)[:-1]
    top = np.maximum.reduceat(values, edges)
    return t[edges], top


def _parts(line: Line) -> list[list[At]]:
    """The points that are drawn of a line, apart where nothing was read for long: no line over what nobody saw."""
    edges, whole, out = [0, *(np.flatnonzero(line.silent) + 1).tolist(), len(line.t)], len(line.t), []
    for a, b in itertools.pairwise(edges):
        t, value = _thinned(line.t[a:b], line.value[a:b], max(round(MOST_SAMPLES * (b - a) / whole), 2))
        out.append(list(zip(t.tolist(), value.tolist(), strict=True)))
    return out
