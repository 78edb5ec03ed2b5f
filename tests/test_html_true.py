"""What the report says is true to the figure: the account behind the zoom, means over time, bounds, costs, the knee."""

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
from tests.test_html_charts import view_of
from tests.test_passive import loaded, watched
from whywait.analyze.bill import bill
from whywait.analyze.latency import per_request
from whywait.analyze.phases import PHASES, account
from whywait.analyze.streams import gaps
from whywait.core.run import Run
from whywait.engines import ENGINES
from whywait.report import cost, curves, ecdf, lanes, neighbours, parts, stacks, strips, svg, timelines
from whywait.report.cards import STATES
from whywait.report.html import render
from whywait.report.trial_html import forest
from whywait.report.view import View
from whywait.units import ms, plain

STALLS = 20


def held_up() -> Run:
    """A request whose decode stands still in twenty prefills of others: far more stalls than are drawn."""
    rows: list[dict[str, Any]] = []
    chunks: list[dict[str, Any]] = []
    times, t = [2 * S], 2 * S
    for k in range(STALLS):
        for _ in range(9):
            t += 20 * MS
            times.append(t)
        begin, t = t, t + (100 + k) * MS
        times.append(t)
        rows.append({"id": k + 1, "sent_ns": begin, "first_ns": t, "last_ns": t, "end_ns": t, "rtt_ns": 0,
                     "connect_ns": 0, "engine_prefill_ms": float((t - begin) / MS), "engine_queue_ms": 0.0,
                     "output_tokens": 1, "content_chunks": 1, "prompt_tokens": 4000})  # fmt: skip
        chunks += stream(k + 1, [t])
    first = {"id": 0, "sent_ns": 2 * S - 20 * MS, "first_ns": times[0], "last_ns": times[-1], "end_ns": times[-1],
             "rtt_ns": 0, "connect_ns": 0, "engine_prefill_ms": 20.0, "engine_queue_ms": 0.0,
             "output_tokens": len(times), "content_chunks": len(times), "prompt_tokens": 64}  # fmt: skip
    return make_run([first, *rows], [*stream(0, times), *chunks])


def test_the_zoom_has_the_account_of_a_request_and_not_what_is_drawn_of_it() -> None:
    run = held_up()
    view = View(run, analysed(run), account(run))
    assert STALLS > lanes.MOST_STALLS
    [point] = timelines.data(view, timelines.timelines(view)[1])["points"]
    rows = {row[0]: row for row in point["requests"]}
    spent = view.acc.phases[0]
    assert spent[PHASES.index("stall")] > 1.5 * S
    assert len(rows) == STALLS + 1
    for k, row in rows.items():
        assert row[11] == [round(v / 1000) for v in view.acc.phases[k].tolist()]
    drawn = sum(length for k, length in zip(rows[0][9][::3], rows[0][9][2::3], strict=True) if PHASES[k] == "stall")
    assert drawn < 0.5 * rows[0][11][PHASES.index("stall")]  # which is why
    # The longest gap is that of the other picture: from when, how long, the usual, in whose prefill.
    begin, length, usual, shared, whose = rows[0][12]
    assert (length, usual, whose) == (119_000, 20_000, STALLS)
    assert shared == 119_000
    assert begin == pytest.approx((run.requests["sent_ns"][STALLS] - (2 * S - 20 * MS)) / 1000)
    assert rows[1][12] is None  # of one chunk there is no gap


def test_of_chunks_that_came_several_in_one_read_no_gap_is_told() -> None:
    run = buffered()
    view = View(run, analysed(run), account(run))
    g = gaps(view.one(view.points[0])[1])
    assert neighbours.gap_of(run, g, 0, view.acc.phases) is None


def test_figures_of_a_panel_are_of_all_its_readings_weighted_by_time() -> None:
    t = [S + i * 10 * MS for i in range(5000)]
    v = [7.0 if i % 50 == 0 else 0.0 for i in range(5000)]
    v[100] = 9.0
    base = Service(slots=2).closed(2, 4)
    run = dataclasses.replace(
        base, readings=make_run([], readings=gauge_rows("waiting", list(zip(t, v, strict=True)))).readings
    )
    [line] = [x for s in strips.strips(run, run, (float(t[0]), float(t[-1]))) for x in s.lines if "wait" in x.style]
    assert line.mean == pytest.approx(np.mean(v[:-1]))  # not that of the highest of each stretch
    assert (line.value.min(), line.value.max(), len(line.t)) == (0.0, 9.0, 5000)
    [drawn] = strips._parts(line)
    assert len(drawn) == strips.MOST_SAMPLES
    assert max(y for _, y in drawn) == 9.0
    # A value holds until the next: 1 for one second, 5 for three; none over a silence.
    uneven = strips.Line("x", "g-waiting", np.array([0.0, 1.0, 4.0]) * S, np.array([1.0, 5.0, 2.0]), "the engine")
    assert uneven.mean == pytest.approx(4.0)
    at = np.append(np.arange(0.0, 4.0, 0.5), 60.0) * S
    quiet = strips.Line("x", "g-waiting", at, np.array([1.0] * 7 + [9.0, 1.0]), "the engine")
    assert quiet.mean == pytest.approx(1.0)
    assert [len(part) for part in strips._parts(quiet)] == [8, 1]


def test_one_meter_of_the_simulator_is_of_all_its_devices() -> None:
    rows = gauge_rows("power_watts", [(S + i * 100 * MS, 1800.0) for i in range(20)], "gpu/0")
    run = dataclasses.replace(Service().closed(2, 8), readings=make_run([], readings=rows).readings)
    for made_by, name in (("simulated", "power of 4 devices, W"), ("measured", "power of 1 device, W")):
        mine = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, made_by=made_by,
                                                                     engine={"devices": 4}))  # fmt: skip
        found = strips.strips(mine, mine, (float(S), 3.0 * S))
        assert name in [x.name for s in found for x in s.lines]


def buffered(n: int = 12, tokens: int = 16) -> Run:
    """Requests whose chunks came eight in one read, 160 ms apart."""
    rows, chunks = [], []
    for i in range(n):
        t0 = S + i * S
        times = [t0 + 200 * MS + (k // 8) * 160 * MS for k in range(tokens)]
        lows: list[int | None] = [t - 160 * MS for t in times]
        rows.append({"sent_ns": t0, "first_ns": times[0], "last_ns": times[-1], "end_ns": times[-1],
                     "output_tokens": tokens, "content_chunks": tokens, "prompt_tokens": 10})  # fmt: skip
        chunks += stream(i, times, lows, [1] * tokens)
    return make_run(rows, chunks)


def test_of_coalesced_chunks_the_distribution_of_itl_has_bounds_only() -> None:
    run = buffered()
    summary = analysed(run)
    [p] = summary["points"]
    assert p["itl_ms"]["p50"] is None
    low, high = p["itl_ms"]["bounds"]["p50"]
    text = render(run, summary)
    found = checked(text)
    said = f"Median ITL: at most {ms(high)}" if low <= 0 else f"Median ITL: {ms(low)} – {ms(high)}"
    assert said in found.text
    reading = next(w for w in found.words["p"] if w.startswith("Median ITL"))
    assert "narrow" not in reading
    assert "whose chunks came several in one read" in text.split('id="ecdf-itl-h"')[1].split("</figure>")[0]
    line = ecdf.between(p, (np.array([0.0, 1.0, 5.0]), np.array([4.0, 2.0, np.nan])))
    assert line.n == 2
    for value, least, most in zip(line.values, line.low, line.high, strict=True):
        assert least == pytest.approx(np.mean(np.array([4.0, 2.0]) <= value))
        assert most == pytest.approx(np.mean(np.array([0.0, 1.0]) <= value))


def test_of_one_read_per_answer_the_bounds_of_tpot_are_drawn_and_not_that_none_ended_well() -> None:
    rows, chunks = [], []
    for i in range(6):
        t0, end = S + i * S, S + i * S + 500 * MS
        rows.append({"sent_ns": t0, "first_ns": end, "last_ns": end, "end_ns": end, "output_tokens": 5,
                     "content_chunks": 5, "prompt_tokens": 10})  # fmt: skip
        chunks += stream(i, [end] * 5, [t0 + 100 * MS] * 5, [1] * 5)
    found = page(make_run(rows, chunks))
    assert "No request ended well with what TPOT takes." not in found.text
    assert "Median TPOT: at most 100 ms at 1 in flight" in found.text  # 400 ms for four further tokens


def test_the_first_bucket_of_a_histogram_begins_at_0_and_its_quantiles_are_at_most_its_top() -> None:
    def rows(base: str) -> list[Any]:
        out: list[Any] = []
        for bound, n in (("0.01", 60.0), ("0.02", 80.0), ("+Inf", 80.0)):
            out += gauge_rows(f"{base}_bucket", [(t * S, n * t / 40) for t in range(41)], le=bound)
        return out + gauge_rows(f"{base}_sum", [(t * S, t * 1.0) for t in range(41)])

    run = watched(*loaded(), rows("tpot_seconds"), rows("itl_seconds"))
    text = render(run, analysed(run))
    found = checked(text)
    assert "Median TPOT: at most 10.0 ms at 2 requests/s." in found.text
    for name, what in (("TPOT", "requests"), ("ITL", "tokens")):
        table = text.split(f"{name}: quantiles")[-1].split("</table>")[0]
        assert re.findall(r"<th scope=\"col\">(.*?)</th>", table)[1] == what
        cells = re.findall(r"<td>(.*?)</td>", table)
        assert cells[0] == "80"
        assert cells[1] == "± 38 %"  # anywhere from 0 to 75 % below the top of the first bucket
        assert cells[2:7] == ["at most 10.0 ms"] * 4 + ["10.0 ms – 20.0 ms"]


def test_itl_is_per_token_in_its_distribution() -> None:
    rows, chunks = [], []
    for i in range(8):
        times = [S + i * S + 100 * MS + k * 40 * MS for k in range(10)]
        rows.append({"sent_ns": S + i * S, "first_ns": times[0], "last_ns": times[-1], "end_ns": times[-1],
                     "output_tokens": 20, "content_chunks": 10, "prompt_tokens": 10})  # fmt: skip
        chunks += stream(i, times, None, [2] * 10)
    assert "Median ITL: 20.0 ms at 1 in flight; narrow." in page(make_run(rows, chunks)).text


def test_bands_are_as_wide_as_95_percent_takes() -> None:
    assert ecdf._dkw(200) == pytest.approx(math.sqrt(math.log(2 / 0.05) / 400))
    rng = np.random.default_rng(2)
    row = np.arange(400)
    line = ecdf._pooled({"point": 0}, row, rng.uniform(0, 1, 400), np.ones(400))
    at = int(np.searchsorted(line.share, 0.5))
    # Of independent values each share is binomial: ± 1.96 standard errors, in all 2 × 1.96 × 0.5 / sqrt(n).
    assert line.high[at] - line.low[at] == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(400), rel=0.15)


def test_the_request_shown_is_at_p99_of_many() -> None:
    rows = [{"sent_ns": i * S, "first_ns": i * S + MS, "last_ns": i * S + (i + 2) * MS,
             "end_ns": i * S + (i + 2) * MS} for i in range(200)]  # fmt: skip
    run = make_run(rows)
    assert neighbours.focus(run, np.ones(200, dtype=bool)) == 198
    e2e = per_request(run).e2e_ms
    assert (e2e <= e2e[198]).mean() >= 0.99
    assert neighbours.focus(run, np.arange(200) < 5) == 4  # of few the slowest


def test_no_chunk_no_strokes_and_one_request_has_no_slowest() -> None:
    run = make_run([{"sent_ns": S, "first_ns": 2 * S, "last_ns": 3 * S, "end_ns": 3 * S, "output_tokens": 9}])
    found = page(run)
    assert "Strokes are its chunks" not in found.text
    assert "The slowest requests wait for the same" not in found.text
    assert "Of a single request there are no slowest and no others." in found.text
    assert "Strokes are its chunks." in page(mixed()).text
    assert "in 1 lane;" in found.text
    assert parts.bands_reading(view_of(sweep()), "e2e_ms") != "Of a single request there are no slowest and no others."


def test_the_added_time_is_a_share_of_what_was_added() -> None:
    view = view_of(sweep((1, 8)))
    a, b = view.plain[0], view.plain[-1]
    total = {id(p): sum(v["ms"] or 0 for v in p["phases"].values()) for p in (a, b)}
    added = max((b["phases"][k]["ms"] or 0) - (a["phases"][k]["ms"] or 0) for k in b["phases"])
    part = added / (total[id(b)] - total[id(a)])
    said = stacks.phases_reading(view)
    assert ("; the added time is queue" if part >= 0.95 else f"; {part:.0%} of".replace("%", " %")) in said
    # Beside the shares a bar of the mean time, as long as it is of the longest.
    chart = str(stacks.phases(view))
    mean = chart.split('x="61%"')[1:]
    first = [float(x) for x in re.findall(r'x="([\d.]+)%" y="[\d.]+" dx="5" class="value"', chart)]
    assert mean
    longest = max(sum(v["ms"] or 0 for v in p["phases"].values()) for p in view.points)
    want = [61 + 19 * sum(v["ms"] or 0 for v in p["phases"].values()) / longest for p in view.drawn]
    assert first == pytest.approx(want, abs=0.02)
    assert want[0] < 75


def _levels(*rates: float) -> dict[str, Any]:
    run = sweep((1, 4, 8))
    summary = analysed(run)
    for p, rate in zip(summary["points"], rates, strict=False):
        p["output_tokens_per_s"] = rate
        p["output_tokens_per_s_ci"] = None
    return {"run": run, "summary": {**summary, "knee": 0}}


def test_past_the_knee_the_gain_is_told_as_it_is() -> None:
    made = _levels(44.6, 50.0, 57.8)
    view = View(made["run"], made["summary"], account(made["run"]))
    said = curves.curve_reading(view, "ttft_ms", "TTFT", ("output_tokens_per_s", "output tokens/s"))
    assert "go from 44.6 to 57.8 (+30 %, +9 % per doubling of the load)" in said
    assert "only adds waiting" not in said
    assert "stops growing" not in render(made["run"], made["summary"])
    assert "past it a doubling of the load brings less than 10 % more throughput" in render(
        made["run"], made["summary"]
    )
    made = _levels(50.0, 50.5, 50.2)
    view = View(made["run"], made["summary"], account(made["run"]))
    said = curves.curve_reading(view, "ttft_ms", "TTFT", ("output_tokens_per_s", "output tokens/s"))
    assert "stay at 50.2 while" in said
    assert said.endswith("more load only adds waiting.")


def test_the_slo_is_kept_at_the_load_with_the_most_good_requests() -> None:
    made = _levels()
    shares = [(0.99, 2.0), (0.96, 7.0), (0.4, 3.0)]
    for p, (share, rate) in zip(made["summary"]["points"], shares, strict=False):
        p["goodput_share"], p["goodput_requests_per_s"] = share, rate
    made["summary"]["slo"] = {"ttft_ms": 100.0}
    view = View(made["run"], made["summary"], account(made["run"]))
    assert curves.kept_reading(view) == (
        "The SLO is kept by 96 % of the requests at 4 in flight (7.00 good requests/s), by 40 % at 8 in flight."
    )
    for worst, said in ((1.0, "all requests"), (0.997, "99 % of the requests or more")):
        for p in made["summary"]["points"]:
            p["goodput_share"] = worst
        assert curves.kept_reading(view) == f"The SLO is kept by {said} at every load."


def _bill(*cells: tuple[float, float | None, float | None]) -> tuple[View, dict[str, Any], list[cost.Panel]]:
    view = view_of(sweep((1, 4)))
    entries = {p["point"]: {"value": v, "low": a, "high": b, "why": None}
               for p, (v, a, b) in zip(view.plain, cells, strict=True)}  # fmt: skip
    found = {"points": [{"point": n, "counted": None, "shares": [{"spent_on": None}]} for n in entries], "slo": {}}
    return view, found, [cost.Panel("energy, J", "f-decode", entries)]


def test_no_load_is_called_the_cheapest_where_intervals_are_unknown_or_overlap() -> None:
    said = cost.cost_reading(*_bill((43.0, None, None), (44.0, None, None)))
    assert "the least" not in said
    assert said == ("A good request takes 43.0 J of energy at 1 in flight and 44.0 at 4 in flight; "
                    "not both intervals are known, so neither is called the cheaper.")  # fmt: skip
    assert "their intervals overlap" in cost.cost_reading(*_bill((43.0, 40.0, 46.0), (44.0, 42.0, 47.0)))
    assert "not both intervals are known" in cost.cost_reading(*_bill((43.0, 40.0, None), (90.0, 80.0, 99.0)))
    said = cost.cost_reading(*_bill((43.0, 40.0, 46.0), (86.0, 80.0, 90.0)))
    assert said == "A good request takes 43.0 J of energy at 1 in flight, the least; 2.00 times that at 4 in flight."


def test_why_energy_is_not_believed_stands_whole_below_its_table() -> None:
    run = service(readings=meters(300.0))
    found = bill(run)
    long = {"what": "a check", "state": "undecided", "why": "of its many words " * 40 + "none is cut"}
    found["points"][0]["energy"]["checks"] = [long]
    chart = str(cost.cost(view_of(run), found))
    assert "none is cut (every load)." in chart
    assert "…" not in chart.split("<table>")[-1]


def test_money_is_per_1000_good_requests_and_device_time_of_all_devices() -> None:
    run = service(readings=meters(300.0), devices=4)
    found = cost.figures(run)
    [p] = found["points"]
    offer = {"currency": "USD", "name": "ours", "date": "2026-11-01", "terms": "owned", "source": "us",
             "per_good_request": {"value": 0.002, "low": 0.0015, "high": None, "why": None}}  # fmt: skip
    found = {**found, "points": [{**p, "money": [offer]}]}
    panels = {x.fill: x for x in cost.panels(found)}
    assert panels["f-frontend"].name == "USD per 1,000 good requests (ours, 2026-11-01)"
    assert panels["f-frontend"].cells[0] == {"value": 2.0, "low": 1.5, "high": None, "why": None}
    good = p["work"]["good_requests"]
    assert panels["f-queue"].name == "device time, s"
    assert panels["f-queue"].value(found["points"][0]) == pytest.approx(4 * p["window"]["seconds"] / good)
    chart = str(cost.cost(view_of(run), found))
    heads = re.findall(r"<th scope=\"col\">(.*?)</th>", chart)
    assert "USD per 1,000 good requests (ours, 2026-11-01)" in heads
    assert "device time, s per good request" in heads
    assert "per good request per good request" not in chart
    assert "requests (ours, 2026-11-01) per good" not in chart


def test_of_a_watched_service_no_request_is_called_good_late_or_failed() -> None:
    run = watched(*loaded())
    chart = str(cost.cost(view_of(run), bill(run)))
    heads = re.findall(r"<th scope=\"col\">(.*?)</th>", chart)
    cells = re.findall(r"<td>(.*?)</td>", chart)
    assert cells[heads.index("good") - 1 : heads.index("failed")] == ["–", "–", "–"]
    assert "service time, s per request" in heads
    assert not [h for h in heads if h.endswith("per good request")]
    assert "every ok request is good" not in chart


def test_marks_that_turn_or_hide_text_are_replaced() -> None:
    for mark in "\u061c\u200b\u200e\u200f\u2028\u2029\u202e\u2060\u2066\ufeff\x1b":
        assert svg.esc(f"a{mark}b") == "a\ufffdb", hex(ord(mark))
        assert plain(f"a{mark}b") == "ab", hex(ord(mark))
    assert svg.esc("नमस्\u200dते é") == "नमस्\u200dते é"  # a joiner is a part of the word


def test_a_state_is_worded_so_that_it_is_not_read_as_its_contrary() -> None:
    assert STATES["fails"] == "○ Not the cause"
    assert "Ruled out" not in page(sweep()).text


def test_a_flag_has_no_brackets_of_its_own_where_it_is_told_in_brackets() -> None:
    flags = [flag for engine in ENGINES.values() for flag in engine.flags.values() if flag]
    assert len(flags) > 20
    assert not [flag for flag in flags if flag.startswith("(")]


def test_a_figure_without_interval_is_drawn_without_a_line() -> None:
    def entry(*ratio: float | None) -> dict[str, Any]:
        return {"scale": "ratio", "title": "x", "ratio": ratio}

    def lines(*entries: Any) -> int:
        return str(forest(dict(enumerate(entries)), "k")).count('class="axis"')

    assert lines(entry(1.1, 1.0, 1.2)) == 2
    assert lines(entry(1.1, None, None)) == 1
    assert lines(entry(1.1, 1.0, None)) == 2
    assert "1 without a line has no interval." in str(forest({"a": entry(1.1, None, None)}, "k"))
