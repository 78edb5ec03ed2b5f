"""Both accounts of a service that was only watched, from readings whose truth is known."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analysis_runs import S, gauge_rows, make_run
from whywait.analyze.counters import delta
from whywait.analyze.passive import figures, load, replicas
from whywait.analyze.summary import summarize
from whywait.analyze.trust import doubts, foreign
from whywait.core.run import Run
from whywait.judge.diagnose import judge

SPAN = (0, 40 * S)
TIMES = [k * S for k in range(-1, 42)]


def counter(name: str, per_s: float, source: str = "metrics/0", start: float = 100, **labels: str) -> list[Any]:
    return gauge_rows(name, [(t, start + per_s * t / S) for t in TIMES], source, **labels)


def level(name: str, value: float, source: str = "metrics/0") -> list[Any]:
    return gauge_rows(name, [(t, value) for t in TIMES], source)


def watched(*parts: list[Any], **manifest: Any) -> Run:
    point = {"mode": "rate", "target": 2.0, "start_ns": SPAN[0], "end_ns": SPAN[1], "planned": 0}
    return make_run([], readings=[row for part in parts for row in part], points=[point], **manifest)


def loaded(waiting: float = 3.0, running: float = 4.0, per_s: float = 2.0) -> list[list[Any]]:
    """A service at 2 requests/s in which 3 wait, 1 is in prefill and 3 decode: 1.5 s, 0.5 s and 1.5 s each."""
    return [level("running", running), level("waiting", waiting), counter("requests_total", per_s),
            counter("prefill_seconds_total", 1.0), counter("output_tokens_total", 100.0),
            counter("e2e_seconds_sum", 3.5 * per_s), counter("e2e_seconds_count", per_s)]  # fmt: skip


def test_request_time_by_littles_law() -> None:
    run = watched(*loaded())
    got, found = figures(run, SPAN)
    assert found == []
    account = {p: (round(v["ms"]), v["share"], v["how"]) for p, v in got["phases"].items() if v["ms"] is not None}
    assert account == {
        "queue": (1500, pytest.approx(3 / 7), "derived"),
        "prefill": (500, pytest.approx(1 / 7), "derived"),
        "decode": (1500, pytest.approx(3 / 7), "derived"),
    }
    assert {v["how"] for p, v in got["phases"].items() if v["ms"] is None} == {"unknown"}
    assert (got["requests_per_s"], got["output_tokens_per_s"]) == (pytest.approx(2), pytest.approx(100))
    assert got["passive"]["requests"] == 80
    assert got["passive"]["in_flight"] == 7
    assert got["in_flight"] == {"peak": 7, "mean": 7}
    assert load(run, SPAN) == ("rate", 2.0)


def test_shares_without_a_rate() -> None:
    run = watched(level("running", 4), level("waiting", 4), level("slots_prefilling", 1, "slots/0"))
    got, _ = figures(run, SPAN)
    assert {p: v["share"] for p, v in got["phases"].items() if v["share"]} == {"queue": 0.5, "prefill": 0.125,
                                                                              "decode": 0.375}  # fmt: skip
    assert all(v["ms"] is None for v in got["phases"].values())
    assert load(run, SPAN) == ("concurrency", 8.0)
    assert got["requests_per_s"] is got["passive"]["requests"] is None


def test_histograms_alone_give_means() -> None:
    run = watched(
        counter("queue_seconds_sum", 1.0), counter("queue_seconds_count", 2.0),
        counter("ttft_seconds_sum", 1.4), counter("ttft_seconds_count", 2.0),
    )  # fmt: skip
    got, _ = figures(run, SPAN)
    ms = {p: v["ms"] for p, v in got["phases"].items() if v["ms"] is not None}
    assert ms == {"queue": pytest.approx(500), "prefill": pytest.approx(200)}


@pytest.mark.parametrize(
    ("parts", "cached"),
    [
        ([counter("prompt_tokens_total", 100.0), counter("cached_tokens_total", 25.0)], 0.25),
        ([counter("prefix_queries_total", 50.0), counter("prefix_hits_total", 30.0)], 0.6),
        ([counter("prompt_tokens_total", 100.0), counter("cached_tokens_total", 130.0)], 1.0),
        ([level("prefix_hit_rate", 0.4)], 0.4),
        ([counter("prompt_tokens_total", 100.0)], None),
    ],
)
def test_the_cached_share_by_tokens_by_lookups_or_as_the_engine_says(parts: list[Any], cached: float | None) -> None:
    assert figures(watched(*parts), SPAN)[0]["cached_share"] == (None if cached is None else pytest.approx(cached))


@pytest.mark.parametrize(
    ("parts", "accepted"),
    [
        ([counter("draft_tokens_total", 40.0), counter("accepted_tokens_total", 10.0)], 0.25),
        ([level("acceptance_rate", 0.7)], 0.7),
        (
            [level("acceptance_rate", 0.7), counter("draft_tokens_total", 4.0), counter("accepted_tokens_total", 2.0)],
            0.5,
        ),
        ([], None),
    ],
)
def test_acceptance_by_tokens_else_as_the_engine_says(parts: list[Any], accepted: float | None) -> None:
    assert figures(watched(*parts), SPAN)[0]["acceptance"] == (None if accepted is None else pytest.approx(accepted))


def test_an_unsteady_window_is_a_doubt() -> None:
    parts = loaded()
    parts[5] = counter("e2e_seconds_sum", 20.0)  # requests that ended took 10 s each
    _, found = figures(watched(*parts), SPAN)
    assert [d["what"] for d in found] == ["the window was not steady"]


def test_device_time_by_gauges() -> None:
    steps = [(t, 2.0 if 0 <= t < 10 * S else 0.0) for t in TIMES]
    queue = [(t, 1.0 if 0 <= t < 20 * S else 0.0) for t in TIMES]
    kv = [(t, 1.0 if t >= 15 * S else 0.2) for t in TIMES]
    run = watched(gauge_rows("running", steps), gauge_rows("waiting", queue), gauge_rows("kv_use", kv))
    got, _ = figures(run, SPAN)
    shares = got["occupancy"]["shares"]
    assert shares["decode_busy"] == pytest.approx(10 / 40)
    assert shares["idle_host"] == pytest.approx(5 / 40)
    assert shares["idle_kv_blocked"] == pytest.approx(5 / 40)
    assert shares["idle_no_work"] == pytest.approx(20 / 40)
    assert shares["throttled"] is None
    assert got["in_flight"]["peak"] == 3
    assert sum(v or 0 for v in shares.values()) == pytest.approx(1)


def test_the_devices_own_readings_count_when_only_watching() -> None:
    gpu = [
        row
        for number, share in (("0", 0.7), ("1", 0.0))
        for row in gauge_rows("busy_share", [(t, share) for t in TIMES], "gpu", gpu=number)
    ]
    run = watched(level("running", 2.0), level("waiting", 0.0), gpu)
    account = figures(run, SPAN)[0]["occupancy"]
    assert account["shares"]["decode_busy"] == pytest.approx(0.7)
    assert account["shares"]["idle_host"] == pytest.approx(0.3)
    assert account["how"]["idle_host"] == "derived"
    assert sum(v or 0 for v in account["shares"].values()) == pytest.approx(1)
    assert "kernel" in account["notes"]["idle_host"]


def test_time_without_readings_is_unknown() -> None:
    few = [(t, 2.0) for t in TIMES if t <= 10 * S]
    run = watched(gauge_rows("running", few), gauge_rows("waiting", few))
    got, _ = figures(run, SPAN)
    assert got["occupancy"]["shares"]["unknown"] == pytest.approx(27 / 40)  # the last speaks for three intervals
    assert got["occupancy"]["busy"] == [pytest.approx(13 / 40), pytest.approx(1)]


def test_nothing_read_says_nothing() -> None:
    got, _ = figures(watched(), SPAN)
    assert got["phases"] == {}
    assert got["passive"]["active"] is False
    assert got["occupancy"]["busy"] == [None, None]
    assert got["ttft_ms"]["n"] == 0
    assert got["ttft_ms"]["p50"] is None


def test_replicas_are_added_and_told_apart() -> None:
    second = [("requests_total", 0.5), ("output_tokens_total", 25)]
    parts = [*loaded(), level("running", 1, "metrics/1"), level("waiting", 0, "metrics/1")]
    parts += [counter(name, per_s, "metrics/1") for name, per_s in second]
    run = watched(*parts)
    got, _ = figures(run, SPAN)
    assert got["requests_per_s"] == pytest.approx(2.5)
    assert got["passive"]["in_flight"] == pytest.approx(8)
    assert got["occupancy"]["devices"] == 2
    rows = replicas(run, SPAN)
    assert [(r["source"], r["running"], r["waiting"]) for r in rows] == [("metrics/0", 4, 3), ("metrics/1", 1, 0)]
    assert [r["output_tokens_per_s"] for r in rows] == [pytest.approx(100), pytest.approx(25)]


def test_a_replica_is_named_where_a_prometheus_names_it() -> None:
    parts = [level("running", 1, f"promql/{k}") for k in range(3)]
    parts += [gauge_rows("answered", [(0, 1.0)], f"promql/{k}", instance=f"gpu-{k}:8000") for k in range(2)]
    assert [r["instance"] for r in replicas(watched(*parts), SPAN)] == ["gpu-0:8000", "gpu-1:8000", None]


def test_a_restart_is_bridged_and_told() -> None:
    values = [(t, float(t / S * 10 if t < 20 * S else (t / S - 20) * 10)) for t in TIMES]
    run = watched(level("running", 1), gauge_rows("output_tokens_total", values))
    assert replicas(run, SPAN)[0]["restarts"] == 1
    grown = delta(run.readings, "output_tokens_total", SPAN)
    assert grown is not None
    assert 380 <= grown.value <= 400


def test_a_label_that_appears_late_began_at_zero() -> None:
    late = gauge_rows("requests_total", [(t, (t / S - 20) * 3) for t in TIMES if t > 20 * S], finished_reason="abort")
    run = watched(counter("requests_total", 2.0, finished_reason="stop"), late)
    grown = delta(run.readings, "requests_total", SPAN)
    assert grown is not None
    assert grown.value == pytest.approx(80 + 60)
    assert grown.per_s == pytest.approx(140 / 40)


def test_a_replica_that_came_late_counts_for_as_long_as_it_was_read() -> None:
    late = gauge_rows("output_tokens_total", [(t, 500 + t / S * 10) for t in TIMES if t >= 30 * S], "metrics/1")
    grown = delta(watched(counter("output_tokens_total", 10.0), late).readings, "output_tokens_total", SPAN)
    assert grown is not None
    assert grown.value == pytest.approx(400 + 100)
    assert (grown.end_ns - grown.start_ns) / S == pytest.approx(40)


def test_foreign_traffic_over_several_replicas() -> None:
    """Ten requests of 8 tokens through a router: each replica counts what it served; one left out is a doubt."""
    requests = [{"sent_ns": k * S, "first_ns": k * S + 1, "last_ns": k * S + S // 2, "end_ns": k * S + S // 2,
                 "output_tokens": 8, "asked_output_tokens": 8} for k in range(1, 11)]  # fmt: skip
    point = {"start_ns": 0, "end_ns": 20 * S}

    def page(tokens: float, source: str) -> list[Any]:
        grows = [(-S, 7.0), (0, 7.0), (11 * S, 7.0 + tokens), (21 * S, 7.0 + tokens)]
        return gauge_rows("output_tokens_total", grows, source)

    both = make_run(requests, readings=page(48, "metrics/0") + page(32, "metrics/1"), points=[point])
    assert [f.excess for f in foreign(both)] == [0]
    one = make_run(requests, readings=page(48, "metrics/0"), points=[point])
    assert "the service's counters saw less than we sent" in {d["what"] for d in doubts(one)}
    more = make_run(requests, readings=page(48, "metrics/0") + page(200, "metrics/1"), points=[point])
    assert "others use the service too" in {d["what"] for d in doubts(more)}


def test_the_summary_and_the_verdict_of_a_watched_run() -> None:
    run = watched(*loaded(waiting=12.0), level("slots_total", 4), engine={"name": "vllm", "slots": 4})
    summary = summarize(run)
    verdicts = judge(run, summary, {"slots": "--max-num-seqs N"})
    lead = verdicts[0]
    assert lead.state == "holds"
    assert "limit" in lead.cause
    assert lead.share == pytest.approx(12 / 16)
    told = {d["what"] for d in summary["doubts"]}
    assert not any("percentiles" in w or "whole points" in w or "ttft_ms is unknown" in w for w in told)


def test_an_idle_service_waits_for_load() -> None:
    run = watched(level("running", 0), level("waiting", 0), counter("output_tokens_total", 0))
    [verdict] = judge(run, summarize(run))
    assert (verdict.cause, verdict.state) == ("want of load", "holds")


def test_an_unread_service_is_undecided() -> None:
    run = watched()
    [verdict] = judge(run, summarize(run))
    assert verdict.state == "undecided"


def test_spans_of_others_tell_each_request() -> None:
    """18 quick requests and two that queued: the mean, and what the slowest tenth waits for."""
    rows = []
    for k in range(20):
        queue = 900.0 if k >= 18 else 0.0
        told = {"queue_ms": queue, "prefill_ms": 20.0, "decode_ms": 70.0, "e2e_ms": queue + 100.0, "output_tokens": 8.0}
        for name, value in told.items():
            rows += gauge_rows(name, [(k * S, value)], "trace", trace=f"t{k}")
    got, _ = figures(watched(*loaded(), rows), SPAN)
    assert got["passive"]["spans"] == 20
    assert got["phases"]["queue"] == {"ms": 90, "share": pytest.approx(90 / 190), "how": "measured", "causes": {}}
    assert got["phases"]["unknown"]["ms"] == pytest.approx(10)
    assert (got["e2e_ms"]["n"], got["e2e_ms"]["p50"]) == (20, 100)
    assert got["tpot_ms"]["p50"] == 10
    assert got["passive"]["slowest"]["requests"] == 2
    assert got["passive"]["slowest"]["shares"]["queue"] == pytest.approx(0.9)
    few, _ = figures(watched(*loaded(), rows[:20]), SPAN)  # four requests speak for nobody
    assert few["phases"]["queue"]["how"] == "derived"
