"""A Run as OpenMetrics text: counters and histograms as they grew over the run, each sample with its time.

``promtool tsdb create-blocks-from openmetrics`` turns that into blocks of a Prometheus, where ``rate()`` and
``histogram_quantile()`` work as on a live service. ``at_end`` gives the last values only, without times and in
Prometheus' older text format (0.0.4), for a textfile collector or a Pushgateway, which take nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import numpy as np

from whywait.analyze.counters import series
from whywait.analyze.goodput import meets
from whywait.analyze.latency import OK
from whywait.analyze.phases import PHASES
from whywait.analyze.streams import gaps
from whywait.analyze.summary import summarize
from whywait.analyze.window import Window, sweep, token_bins
from whywait.core.columns import OUTCOMES
from whywait.core.table import Array
from whywait.report import export_families as f
from whywait.report.export import Chosen
from whywait.report.export_families import Family
from whywait.units import NS_PER_MS, NS_PER_S

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0,
          7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)  # fmt: skip
MOST_STEPS = 240
STALE_NS = 15 * NS_PER_S  # a reading older than this is no reading of now
QUANTILES = {"p50": "0.5", "p90": "0.9", "p95": "0.95", "p99": "0.99"}
_OURS = {"run", "point", "load", "le", "quantile", "source"}
_Sample = tuple[str, Mapping[str, str], float, "float | None"]  # suffix, labels, value, time (ns after the zero)


def write_metrics(chosen: Chosen, out: TextIO, step_ns: int | None = None, at_end: bool = False) -> int:
    """Write ``chosen`` (whole points); ``step_ns`` between samples, at most ``MOST_STEPS`` of a point. Returns the
    number of samples."""
    parts = [_Part(chosen, number, step_ns, summary) for number, summary in _summaries(chosen).items()]
    n = 0
    for family in f.FAMILIES:
        found = [s for part in parts for s in part.samples(family, at_end)]
        if not found:
            continue
        out.write(_head(family, at_end))
        for suffix, labels, value, t in found:
            said = ",".join(f'{k}="{_text(v)}"' for k, v in labels.items())
            at = "" if at_end or t is None else f" {chosen.unix(t) / NS_PER_S:.3f}"
            out.write(f"{family.name}{suffix}{{{said}}} {_number(value)}{at}\n")
        n += len(found)
    if not at_end:
        out.write("# EOF\n")
    return n


def _head(family: Family, older: bool) -> str:
    """The lines above a family; in the older format they name the samples, and there is neither unit nor info."""
    name, kind = family.name, family.kind
    if older:
        name += {"counter": "_total", "info": "_info"}.get(kind, "")
        kind = "gauge" if kind == "info" else kind
    unit = f"# UNIT {name} {family.unit}\n" if family.unit and not older else ""
    return f"# TYPE {name} {kind}\n{unit}# HELP {name} {_text(family.about)}\n"


def step_of(chosen: Chosen, step_ns: int | None = None) -> int:
    """Between the samples of the longest chosen point, ns."""
    points = chosen.run.points.where(np.isin(chosen.run.points["point"], chosen.points))
    longest = int((points["end_ns"] - points["start_ns"]).max())
    return max(step_ns or NS_PER_S, -(-longest // MOST_STEPS))


def _summaries(chosen: Chosen) -> dict[int, dict[str, Any]]:
    summary = summarize(chosen.run, chosen.account)
    return {p["point"]: p for p in summary["points"] if p["point"] in chosen.points}


class _Part:
    """One load point: the times of its samples, and what had happened by each."""

    def __init__(self, chosen: Chosen, number: int, step_ns: int | None, summary: dict[str, Any]) -> None:
        self.chosen, self.number, self.summary = chosen, number, summary
        p = chosen.point_row(number)
        self.start, self.end = p["start_ns"], max(p["end_ns"], p["start_ns"] + 1)
        step = max(step_ns or NS_PER_S, (self.end - self.start) / MOST_STEPS)
        self.steps = max(1, math.ceil((self.end - self.start) / step))
        self.times = np.linspace(self.start, self.end, self.steps + 1)
        self.labels = {"run": chosen.name or "run", "point": str(number), "load": chosen.load(number)}
        self.rows = chosen.of_point(number)
        self.req = chosen.run.requests.where(self.rows)
        self.ended = np.where(np.isnan(self.req["end_ns"]), self.end, self.req["end_ns"])
        self.ok = self.req["outcome"] == OK

    def samples(self, family: Family, at_end: bool) -> Iterator[_Sample]:
        found = self._samples(family)
        if not at_end:
            return found
        last: dict[tuple[str, tuple[tuple[str, str], ...]], _Sample] = {}
        for s in found:
            key = (s[0], tuple(s[1].items()))
            last[key] = s
        return iter(last.values())

    def _samples(self, family: Family) -> Iterator[_Sample]:
        lat = self.chosen.latency
        if family is f.INFO:
            told = self.chosen.labels_of(self.number)
            facts = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in told.items()}
            yield from (("_info", {**self.labels, **facts}, 1.0, t) for t in (self.start, self.end))
        elif family is f.REQUESTS:
            for code, outcome in enumerate(OUTCOMES):
                mine = self.req["outcome"] == code
                if mine.any() or code == OK:
                    yield from self._counter({"outcome": outcome}, self._grown(self.ended[mine]))
        elif family is f.GOOD:
            if self.chosen.run.manifest.slo or any(c.get("slo") for c in self._classes()):
                run = self.chosen.run
                good = meets(run, run.manifest.slo, self.chosen.content, lat)[self.rows]
                yield from self._counter({}, self._grown(self.ended[good]))
        elif family is f.PROMPT:
            yield from self._tokens(self.req["prompt_tokens"])
        elif family is f.OUTPUT:
            yield from self._output()
        elif family is f.PHASE:
            yield from self._phases()
        elif family in (f.TTFT, f.TPOT, f.E2E):
            values = {f.TTFT: lat.ttft_ms, f.TPOT: lat.tpot_ms, f.E2E: lat.e2e_ms}[family][self.rows]
            keep = self.ok & ~np.isnan(values)
            yield from self._histogram(self.ended[keep], values[keep] * NS_PER_MS / NS_PER_S)
        elif family is f.GAP:
            yield from self._gaps()
        elif family is f.IN_FLIGHT:
            if not self.chosen.overlaps_known(self.number):
                return
            times, counts = sweep(self.req["sent_ns"], self.req["end_ns"])
            yield from self._gauge({}, np.append(0, counts)[np.searchsorted(times, self.times, side="right")])
        elif family in f.READINGS.values() or family in f.TOTALS.values():
            yield from self._readings(family)
        else:
            yield from self._window(family)

    def _classes(self) -> list[dict[str, Any]]:
        return list(self.chosen.run.manifest.workload.get("classes") or ())

    def _grown(self, at: Array, amount: Array | None = None) -> Array:
        """How much had come by each of the times."""
        order = np.argsort(at, kind="stable")
        one = np.ones(len(at)) if amount is None else amount[order]
        return np.append(0.0, np.cumsum(one))[np.searchsorted(at[order], self.times, side="right")]

    def _counter(self, labels: Mapping[str, str], values: Array) -> Iterator[_Sample]:
        told = {**self.labels, **labels}
        return (("_total", told, v, t) for t, v in zip(self.times.tolist(), values.tolist(), strict=True))

    def _gauge(self, labels: Mapping[str, str], values: Array) -> Iterator[_Sample]:
        told = {**self.labels, **labels}
        pairs = zip(self.times.tolist(), values.tolist(), strict=True)
        return (("", told, v, t) for t, v in pairs if not math.isnan(v))

    def _tokens(self, tokens: Array) -> Iterator[_Sample]:
        """Absent where one of the ok requests has no count: a total of the rest would be too small."""
        if self.ok.any() and not np.isnan(tokens[self.ok]).any():
            yield from self._counter({}, self._grown(self.ended[self.ok], tokens[self.ok]))

    def _output(self) -> Iterator[_Sample]:
        run, which = self.chosen.run, np.zeros(len(self.chosen.run.requests), dtype=bool)
        which[self.rows[self.ok]] = True
        bins, missing = token_bins(
            run, self.chosen.content, Window(self.start, self.end, True, 0, 0), which, self.steps
        )
        if bins is not None and not missing and which.any():
            yield from self._counter({}, np.append(0.0, np.cumsum(bins)))

    def _phases(self) -> Iterator[_Sample]:
        acc = self.chosen.account
        how = acc.how.get(int(self.labels["point"]), {})
        for i, phase in enumerate(PHASES):
            spent = acc.phases[self.rows, i] / NS_PER_S
            if how.get(phase, "unknown") == "unknown" and not spent.any():
                continue  # nothing here could have seen it
            yield from self._counter({"phase": phase, "how": how.get(phase, "unknown")}, self._grown(self.ended, spent))

    def _gaps(self) -> Iterator[_Sample]:
        g, place = gaps(self.chosen.content), np.zeros(len(self.chosen.run.requests), dtype=bool)
        place[self.rows[self.ok]] = True
        mine = place[g.row]
        if mine.any():
            yield from self._histogram((g.begin_ns + g.value)[mine], g.value[mine] / NS_PER_S)

    def _histogram(self, at: Array, values: Array) -> Iterator[_Sample]:
        """Cumulative over the times, and over the buckets as the format has it."""
        if not len(values):
            return
        when = np.searchsorted(self.times, at, side="left").clip(0, self.steps)
        bucket = np.searchsorted(np.array(BOUNDS), values, side="left")  # le: at most the bound
        width = len(BOUNDS) + 1
        counts = np.bincount(when * width + bucket, minlength=(self.steps + 1) * width).reshape(-1, width)
        total = counts.cumsum(axis=0).cumsum(axis=1)
        sums = np.cumsum(np.bincount(when, values, minlength=self.steps + 1))
        names = [{**self.labels, "le": _number(b)} for b in (*BOUNDS, math.inf)]
        for i, t in enumerate(self.times.tolist()):
            yield from (("_bucket", name, n, t) for name, n in zip(names, total[i].tolist(), strict=True))
            yield "_count", self.labels, int(total[i, -1]), t
            yield "_sum", self.labels, float(sums[i]), t

    def _readings(self, family: Family) -> Iterator[_Sample]:
        names = [k for k, v in (*f.READINGS.items(), *f.TOTALS.items()) if v is family]
        for s in series(self.chosen.run.readings, names[0]):
            if s.source.startswith("sampler"):
                continue
            last = np.searchsorted(s.t_ns, self.times, side="right") - 1
            fresh = (last >= 0) & (self.times - s.t_ns[np.maximum(last, 0)] <= STALE_NS)
            values = np.where(fresh, s.values[np.maximum(last, 0)], np.nan)
            labels = {"source": s.source, **{_label(k): str(v) for k, v in s.labels.items()}}
            suffix = "_total" if family.kind == "counter" else ""
            yield from ((suffix, told, v, t) for _, told, v, t in self._gauge(labels, values))

    def _window(self, family: Family) -> Iterator[_Sample]:
        p, at = self.summary, float(self.end)
        summaries = {f.WINDOW_TTFT: "ttft_ms", f.WINDOW_TPOT: "tpot_ms", f.WINDOW_ITL: "itl_ms", f.WINDOW_E2E: "e2e_ms"}
        gauges = {f.WINDOW_RATE: "requests_per_s", f.WINDOW_TOKENS: "output_tokens_per_s",
                  f.WINDOW_GOODPUT: "goodput_requests_per_s", f.WINDOW_SHARE: "goodput_share",
                  f.ENERGY: "energy_j_per_good_request"}  # fmt: skip
        if family in summaries:
            of = p[summaries[family]]
            for name, quantile in QUANTILES.items():
                if of.get(name) is not None:
                    yield "", {**self.labels, "quantile": quantile}, of[name] / 1e3, at
            if of.get("mean") is not None and of.get("n"):
                yield "_count", self.labels, of["n"], at
                yield "_sum", self.labels, of["mean"] * of["n"] / 1e3, at
        elif family is f.WINDOW_DEVICE:
            shares = (p.get("occupancy") or {}).get("shares") or {}
            yield from (("", {**self.labels, "state": k}, v, at) for k, v in shares.items() if v is not None)
        elif p.get(gauges[family]) is not None:
            yield "", self.labels, p[gauges[family]], at


def _label(name: str) -> str:
    """A label name that Prometheus takes and that is none of ours."""
    plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    return f"label_{plain}" if plain in _OURS or not re.match(r"[a-zA-Z_]", plain) or plain.startswith("__") else plain


def _text(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
