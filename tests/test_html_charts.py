"""What the report's charts are made of: bands of distributions, panels over time, cost, the request at p99."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import MS, S, Service, gauge_rows, make_run, stream
from tests.bill_runs import meters, service
from tests.pages import analysed, checked, mixed, page, sweep
from tests.test_passive import level, loaded, watched
from whywait.analyze.bill import bill
from whywait.analyze.latency import per_request
from whywait.analyze.phases import account
from whywait.analyze.streams import gaps
from whywait.analyze.summary import summarize
from whywait.core.run import Run
from whywait.report import cost, curves, ecdf, strips
from whywait.report.html import render
from whywait.report.neighbours import longest_gap
from whywait.report.view import View


def view_of(run: Run, **more: Any) -> View:
    return View(run, {**summarize(run), **more}, account(run))


def test_the_band_of_a_distribution_holds_the_true_curve_nineteen_times_in_twenty():
    rng = np.random.default_rng(3)
    p: dict[str, Any] = {"point": 0}
    for n in (10, 100):
        missed = 0
        for _ in range(400):
            found = ecdf.line(p, np.append(rng.exponential(1.0, n), math.nan))
            assert found.n == n
            true = 1 - np.exp(-found.values)
            # Just below a step the curve is lower by 1/n: both sides must hold the truth.
            missed += bool((true < found.low).any() or (true > np.minimum(found.high, 1)).any())
            assert (found.high - found.low).max() <= 2 * math.sqrt(math.log(40) / (2 * n)) + 1e-9
        assert missed <= 0.05 * 400 + 2 * math.sqrt(0.05 * 0.95 * 400)
    table = page(Service(slots=8, noise=0.3).closed(4, 60)).words["td"]
    assert any(re.fullmatch(r"± 1\d %", cell) for cell in table)  # sqrt(ln 40 / 120) is 17.5 %


def test_quantiles_of_a_curve_are_those_of_the_other_figures():
    run = sweep()
    view = view_of(run)
    for p, lat, keep in view.samples:
        found = ecdf.line(p, lat.ttft_ms[keep])
        for q in ("p50", "p90", "p95", "p99"):
            assert found.levels[ecdf.LEVELS.index(int(q[1:]) / 100)] == pytest.approx(p["ttft_ms"][q])
        c = view.one(p)[1]
        g = gaps(c)
        mine = keep[g.row] & (g.tokens > 0)
        pooled = ecdf._pooled(p, g.row[mine], g.value[mine] / MS / g.tokens[mine], g.tokens[mine])
        assert pooled.levels[ecdf.LEVELS.index(0.95)] == pytest.approx(p["itl_ms"]["p95"])


def test_pooled_gaps_are_resampled_by_request():
    rng = np.random.default_rng(5)
    # 30 requests, each with gaps of its own speed: gaps of one are alike, so that 3,000 gaps say little more than 30.
    row = np.repeat(np.arange(30), 100)
    value = rng.uniform(10, 40, 30)[row] * rng.uniform(0.95, 1.05, len(row))
    p: dict[str, Any] = {"point": 0}
    line = ecdf._pooled(p, row, value, np.ones(len(row)))
    assert np.all(np.diff(line.share) >= 0)
    assert line.share[-1] == 1.0
    at = len(line.values) // 2
    assert line.share[at] == pytest.approx((value <= line.values[at]).mean())
    width = (line.high - line.low).max()
    assert width > 3 * 2 * 1.96 * 0.5 / math.sqrt(len(row))  # far wider than gaps taken for independent would say
    assert width < 2 * 2 * 1.96 * 0.5 / math.sqrt(30) * 1.2
    weighted = ecdf._pooled(p, row, value, np.where(value < np.median(value), 3.0, 1.0))
    half = int(np.searchsorted(weighted.values, np.median(value)))
    assert weighted.share[half] == pytest.approx(0.75, abs=0.03)


def test_the_curve_that_leads_is_that_of_the_slo_which_is_missed_by_most():
    run = sweep()
    assert curves.leading(view_of(run, slo={})) == "ttft_ms"
    assert curves.leading(view_of(run, slo={"e2e_ms": 1.0, "ttft_ms": 1e6})) == "e2e_ms"
    # One request in a hundred far over its limit is missed more than a p95 just below its own.
    well = Service(noise=0.2).closed(4, 200)
    first = np.where(well.requests["id"] % 100 == 7, well.requests["last_ns"], well.requests["first_ns"])
    slow = dataclasses.replace(well, requests=well.requests.replace(first_ns=first))
    took = per_request(well)
    slo = {"ttft_ms": 2 * np.nanmax(took.ttft_ms), "e2e_ms": 1.01 * np.nanmax(took.e2e_ms)}
    assert slo["ttft_ms"] < np.nanmin(took.e2e_ms)
    assert curves.leading(view_of(well, slo=slo)) == "e2e_ms"
    assert curves.leading(view_of(slow, slo=slo)) == "ttft_ms"
    view = view_of(dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, slo={"ttft_ms": 100.0})))
    said = curves.kept_reading(view)
    assert re.match(r"The SLO is kept by \d+ % of the requests at [14] in flight \(", said), said
    assert re.search(r", by \d+ % at (8|16) in flight\.$", said)
    assert "at no load" in curves.kept_reading(view_of(Service().closed(4, 20, slo={"ttft_ms": 0.001})))


def test_panels_show_what_was_read_and_break_where_nothing_was():
    base = Service(slots=2).closed(4, 40)
    end = int(base.points["end_ns"][0])
    seen = [t for t in range(S, end, 100 * MS) if not 2 * S < t - S < 5 * S]  # silent for three seconds
    rows = [r for name, v in (("waiting", 2.0), ("kv_use", 0.5)) for r in gauge_rows(name, [(t, v) for t in seen])]
    rows += [r for i in (0, 1) for r in gauge_rows("power_watts", [(t, 100.0) for t in seen], f"gpu/{i}")]
    run = dataclasses.replace(base, readings=make_run([], readings=rows).readings)
    found = strips.strips(run, run, (float(S), float(end)))
    lines = {line.style: line for s in found for line in s.lines}
    assert set(lines) == {"g-flight", "g-waiting", "g-kv_use", "g-power"}
    assert lines["g-power"].value.max() == 200  # of both devices
    assert lines["g-flight"].value.max() == 4
    assert lines["g-flight"].source == "the client's own sends"
    assert len(strips._parts(lines["g-waiting"])) == 2
    reading = strips.strips_reading(found)
    assert "The engine's own queue held up to 2." in reading
    assert "Power was 200 W on average" in reading
    assert "KV space was 50.0 % full" in reading


def test_power_of_the_host_is_the_growth_of_its_counters():
    rows = gauge_rows("package_energy_joules_total", [(S + i * S, 50.0 * i) for i in range(10)], "host")
    run = dataclasses.replace(Service().closed(1, 9), readings=make_run([], readings=rows).readings)
    [power] = [x for s in strips.strips(run, run, (float(S), 10.0 * S)) for x in s.lines if x.style == "g-power"]
    assert power.value == pytest.approx(50.0)
    assert power.source.startswith("RAPL")


def test_without_metrics_the_client_s_own_count_still_stands_in_the_timeline():
    found = page(Service().closed(4, 20))
    assert "The engine's own gauges were not read." in found.text
    assert "the client's own sends" in found.words["td"]


def test_of_many_readings_the_highest_of_each_stretch_is_drawn():
    t, v = np.arange(10_000.0), np.zeros(10_000)
    v[4321] = 7.0
    at, kept = strips._thinned(t, v)
    assert len(kept) == strips.MOST_SAMPLES
    assert kept.max() == 7.0
    assert abs(at[kept.argmax()] - 4321) <= 25


def test_the_cost_chart_says_what_the_bill_says():
    run = service(readings=meters(300.0))
    view = view_of(run)
    found = bill(run)
    chart = str(cost.cost(view, found))
    each = found["points"][0]["energy"]["per_good_request"]["value"]
    assert each is not None
    reading = cost.cost_reading(view, found, cost.panels(found))
    assert reading.startswith(f"A good request takes {each:.3g}"[:24])
    assert " J of energy" in reading
    assert "No price is known for this machine" in chart
    # Unknown is a dash with its reason, never 0.
    nothing = bill(dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, slo={"ttft_ms": 1e-6})))
    said = cost.cost_reading(view, nothing, cost.panels(nothing))
    assert said.startswith("There is nothing good to charge: of ")
    assert cost.panels(nothing) == []
    assert 'role="img"' not in str(cost.cost(view, nothing))


def test_a_watched_service_is_charged_by_its_counters():
    run = watched(*loaded())
    said = cost.cost_reading(view_of(run), {"points": []}, [])
    assert "No request was ours" in said
    meter = gauge_rows("energy_joules_total", [(t * S // 10, 30.0 * t) for t in range(-20, 430)], "gpu/0")
    run = watched(*loaded(), meter, engine={"devices": 1})
    view, found = view_of(run), bill(run)
    [p] = found["points"]
    each = p["energy"]["by_counters"]["per_request"]["value"]
    assert each == pytest.approx(150, rel=0.05)  # 300 W at 2 requests a second
    said = cost.cost_reading(view, found, cost.panels(found))
    assert said.startswith(f"A request takes {each:.3g} J of energy at 2 requests/s")
    assert said.endswith("by the engine's counters, how many were good is not known.")
    assert "A request takes" in page(run).text


def _histogram(base: str, bounds: tuple[object, ...], cumulative: tuple[float, ...]) -> list[Any]:
    rows: list[Any] = []
    for bound, n in zip(bounds, cumulative, strict=True):
        rows += gauge_rows(f"{base}_bucket", [(t * S, n * t / 40) for t in range(41)], le=str(bound))
    return rows + gauge_rows(f"{base}_sum", [(t * S, t * 1.0) for t in range(41)])


def test_a_watched_service_has_curves_of_its_histograms_as_far_as_its_buckets_tell():
    buckets = _histogram("ttft_seconds", (0.1, 0.5, 1, "+Inf"), (20.0, 60.0, 70.0, 80.0))
    run = watched(*loaded(), level("kv_use", 0.4), buckets)
    found = page(run)
    assert {a["aria-labelledby"] for a in found.all("figure")} >= {"ecdf-ttft-h", "phases-h"}
    assert "Median TTFT: 100 ms – 500 ms at 2 requests/s" in found.text
    assert "between the bounds of the engine's buckets" in found.text
    table = render(run, analysed(run)).split("TTFT: quantiles")[-1].split("</table>")[0]
    cells = re.findall(r"<td>(.*?)</td>", table)
    assert cells[0] == "80"
    assert cells[2:5] == ["at most 100 ms", "at most 100 ms", "100 ms – 500 ms"]
    assert cells[-2:] == ["more than 1,000 ms"] * 2  # p95 and p99 lie above the last bound
    assert "watched, nothing was sent at 1 load point" in found.text
    assert "requests ok / planned" not in found.text  # no figure of requests that were never sent
    assert "ecdf-e2e-h" not in {a["aria-labelledby"] for a in found.all("figure")}


def test_the_request_at_p99_names_whose_prefill_its_longest_gap_is():
    run = mixed()
    acc = account(run)
    view = View(run, analysed(run), acc)
    one, c = view.one(view.points[0])
    gap = longest_gap(one, gaps(c), 3, acc.phases)
    assert gap is not None
    assert gap.whose == 4
    assert gap.length == 220 * MS
    assert gap.shared == pytest.approx(200 * MS)
    assert "200 ms of it in the prefill of #" in page(run).text
    smooth = make_run([{"sent_ns": S, "first_ns": S, "last_ns": 2 * S, "end_ns": 2 * S}],
                      stream(0, [S + i * 20 * MS for i in range(51)]))  # fmt: skip
    assert longest_gap(smooth, gaps(View(smooth, analysed(smooth), account(smooth)).one({"point": 0})[1]), 0,
                       account(smooth).phases) is None  # fmt: skip


def test_no_script_and_no_data_where_there_is_nothing_to_zoom():
    run = watched(*loaded())
    text = render(run, analysed(run))
    assert "<script" not in text
    checked(text)


def test_a_search_for_the_highest_rate_stands_in_its_report():
    def probe(rate: float, answer: str, share: float) -> dict[str, Any]:
        rule = {"share": share, "share_interval": [share - 0.02, min(share + 0.02, 1.0)], "requests": 200}
        return {"rate": rate, "answer": answer, "rules": [rule], "seconds": 12.0}

    find = {"low": 4.0, "high": 8.0, "decided": True, "why": "", "cut_short": None, "error_probability": 0.05,
            "probes": [probe(8.0, "no", 0.6), probe(4.0, "yes", 0.99)]}  # fmt: skip
    run = Service().open([200 * MS] * 30, rate=5)
    found = checked(render(run, analysed(run, find=find)))
    assert "The highest rate" in found.words["h2"]
    assert "The SLO is kept at 4.00 requests/s and missed at 8.00: the knee is between." in found.text
    assert {"97.0% – 100.0%", "58.0% – 62.0%"} <= set(found.words["td"])
