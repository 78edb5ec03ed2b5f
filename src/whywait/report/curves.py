"""Throughput against latency: p50 with its interval and p95, a mark per load point, the SLO and the knee."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from whywait.report.svg import Html, Labels, Plot, details, figure, ms_scale, scale_for, table, tag
from whywait.report.view import BEHIND, Point, View, bounds, from_to, load_name, signs, with_bounds
from whywait.units import ms, number, percent

KEPT = 0.95  # share of requests within the SLO from which a load is said to keep it
STEADY = 0.03  # throughput that changes by less has stayed
SHAPES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end-to-end time"}


def curve(view: View, metric: str, name: str) -> Html:
    """Latency (p50 with its interval, p95) against throughput, a mark per load point."""
    rate = ("output_tokens_per_s", "output tokens/s")
    if all(p[rate[0]] is None for p in view.points):
        rate = ("requests_per_s", "requests/s")
    key, ident, title = rate[0], f"curve-{metric.removesuffix('_ms')}", f"Throughput and {name}"
    drawn = [p for p in view.drawn if p[key] is not None and p[metric]["p50"] is not None]
    reading, behind = curve_reading(view, metric, name, rate), _curve_table(view, metric, name, rate)
    if view.summary["slo"].get(metric):
        reading = f"{reading} {kept_reading(view)}".rstrip()
    if not drawn:
        return figure(title, reading, [behind], ident)
    slo = view.summary["slo"].get(metric)
    values = [v for p in drawn for v in (*bounds(p[metric], "p50"), p[metric]["p50"], p[metric]["p95"])]
    near = slo is not None and slo <= 4 * max(v for v in values if v is not None)
    y, per, unit = ms_scale([*values, *([slo] if near else [])])
    x = scale_for([v for p in drawn for v in (p[key], *(p.get(f"{key}_ci") or []))], log=False)
    plot = Plot(190, top=24)
    plot.x_axis(x, rate[1])
    plot.y_axis(y, f"{name}, {unit}" + (" (log)" if y.log else ""))

    def place(rate_: float, latency_ms: float) -> tuple[float, float]:
        return x(rate_), plot.height * (1 - y(latency_ms / per))

    open_ = " (? upper bound unknown)" if any(bounds(p[metric], "p95")[1] is None for p in drawn) else ""
    notes = [f"● p50, bars: 95 % intervals where known · ○ p95{open_}"]
    if near:
        level = place(0, slo)[1]
        plot.line((0, level), (1, level), "slo")
        plot.text((0, level - 4), f"SLO {ms(slo)}", "slo-label halo", dx=4)
    elif slo is not None:
        notes.append(f"the SLO of {ms(slo)} is far above what is drawn")
    _curve_marks(view, plot, drawn, (metric, key), place)
    body = [plot.svg(title, reading, ident), tag("p", " · ".join(notes), class_="note"), signs(view), behind]
    return figure(title, reading, body, ident)


def leading(view: View) -> str:
    """The latency that the first screen shows against throughput: the one whose SLO most requests miss, else that with
    the p95 nearest to its SLO, else TTFT (or what there is)."""
    known = [m for m in SHAPES if any(p[m]["p50"] is not None for p in view.points)] or list(SHAPES)
    slo = view.summary["slo"]

    def over(metric: str) -> float:
        """The largest p95 (else p50) in units of the SLO."""
        found = [p[metric]["p95"] or p[metric]["p50"] or 0.0 for p in view.points]
        return max(found, default=0.0) / slo[metric] if slo.get(metric) else -1.0

    def missed(metric: str) -> int:
        """Requests that took longer, ramp-up and end of a point too, as in the share of good ones."""
        limit = slo.get(metric)
        return sum(int((getattr(lat, metric) > limit).sum()) for _, lat, _ in view.samples) if limit else 0

    return max(known, key=lambda m: (missed(m), over(m)))


def kept_reading(view: View) -> str:
    """Up to which load nearly all requests are good, where an SLO was given; else nothing."""
    seen = [p for p in view.plain if p["goodput_share"] is not None]
    if not view.summary["slo"] or not seen:
        return ""
    good = [p for p in seen if p["goodput_share"] >= KEPT]
    worst = min(seen, key=lambda p: p["goodput_share"])
    if worst["goodput_share"] >= KEPT:
        least = math.floor(100 * worst["goodput_share"])  # not rounded up: one that missed it is not none
        much = "all requests" if worst["goodput_share"] == 1 else f"{least} % of the requests or more"
        return f"The SLO is kept by {much} at every load."
    told = f"by {percent(worst['goodput_share'])} at {load_name(worst)}"
    if not good:
        return f"The SLO is kept by {percent(KEPT)} of the requests at no load: {told}."
    best = max(good, key=lambda p: p["goodput_requests_per_s"] or 0.0)
    rate = f" ({number(best['goodput_requests_per_s'])} good requests/s)"
    return f"The SLO is kept by {percent(best['goodput_share'])} of the requests at {load_name(best)}{rate}, {told}."


def _curve_marks(
    view: View, plot: Plot, drawn: list[Point], keys: tuple[str, str], place: Callable[[float, float], Any]
) -> None:
    metric, key = keys
    line = [p for p in drawn if not view.marked(p)]
    for q in ("p95", "p50") if len(line) > 1 else ():
        plot.path([place(p[key], p[metric][q]) for p in line if p[metric][q] is not None], f"line-{q}")
    labels = Labels(plot)
    for p in drawn:
        rate, found = p[key], p[metric]
        at = place(rate, found["p50"])
        (low, up), (left, right) = bounds(found, "p50"), p.get(f"{key}_ci") or (None, None)
        if low is not None and up is not None:
            plot.line(place(rate, low), place(rate, up), "whisker")
        if left is not None and right is not None:
            plot.line(place(left, found["p50"]), place(right, found["p50"]), "whisker thin")
        quantiles = f"p50 {with_bounds(found, 'p50')}, p95 {with_bounds(found, 'p95')}"
        tip = f"{load_name(p)}: {number(rate)} per second, {quantiles}"
        if p is view.knee:
            plot.mark(at, "ring", "knee", tip)
        if found["p95"] is not None:
            high = place(rate, found["p95"])
            plot.mark(high, "dot", "p95", tip)
            labels.keep_clear(high, 6)
            if bounds(found, "p95")[1] is None:
                plot.text((high[0], high[1] - 7), "?", "tick", "middle")
        plot.mark(at, "diamond" if view.marked(p) else "dot", "p50", tip)
        labels.keep_clear(at, 9 if p is view.knee else 6)
    for p in sorted(drawn, key=lambda p: p is not view.knee):
        labels.put(place(p[key], p[metric]["p50"]), view.short(p), wide=p is view.knee)


def curve_reading(view: View, metric: str, name: str, rate: tuple[str, str]) -> str:
    key, unit = rate
    seen = [p for p in view.plain if p[key] and p[metric]["p50"] is not None]
    if not seen:
        return f"Nothing to draw: no load point has both {unit} and {name}."
    a, b, knee = seen[0], seen[-1], view.knee
    if a is b:
        return f"At {load_name(a)}: {number(a[key])} {unit}, {name} {ms(a[metric]['p50'])} (p50)."
    if knee is not None and knee is not b and any(p is knee for p in seen):
        gain = b[key] / knee[key] - 1
        doublings, per = math.log2(b["target"] / knee["target"]), ""
        if doublings > 1.01 and gain >= STEADY:
            each = (b[key] / knee[key]) ** (1 / doublings) - 1
            per = f", {each * 100:+.0f} % per doubling of the load"
        to = f"go from {number(knee[key])} to {number(b[key])} ({gain * 100:+.0f} %{per})"
        to = f"stay at {number(b[key])}" if abs(gain) < STEADY else to
        more = ": more load only adds waiting" if gain < STEADY else ""
        return (f"From {from_to(knee, b)} {unit} {to} while {name} goes from {ms(knee[metric]['p50'])} to "
                f"{ms(b[metric]['p50'])} (p50){more}.")  # fmt: skip
    times = f"{number(b[key] / a[key])}×"
    return (f"From {from_to(a, b)} {unit} go from {number(a[key])} to {number(b[key])} ({times}) and "
            f"{name} from {ms(a[metric]['p50'])} to {ms(b[metric]['p50'])} (p50); no knee was found.")  # fmt: skip


def _curve_table(view: View, metric: str, name: str, rate: tuple[str, str]) -> Html:
    key, unit = rate
    rows = [[load_name(p), number(p[key]), *(with_bounds(p[metric], q) for q in ("p50", "p95")), p[metric]["n"],
             percent(p["goodput_share"]), "knee" if p is view.knee else ""] for p in view.points]  # fmt: skip
    head = ["load", unit, f"{name} p50 [95 % interval]", f"{name} p95 [95 % interval]", "requests", "good, of all due",
            "knee"]  # fmt: skip
    return details(BEHIND, table(head, rows, f"{unit} and {name} by load point; ? is unknown"))
