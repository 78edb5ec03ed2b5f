"""The cases of docs/streams.md, one test each: what other tools get wrong, against the right value.

A service whose truth is known (the stub) through the real client, recorder and analysis where the case is about a
figure; figures of time are compared with the service's own timetable, never with a clock of the test.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from tests.analysis_runs import MS, S, Service, gauge_rows, make_run, stream
from whywait.analyze.summary import summarize
from whywait.core.recorder import Recorder
from whywait.core.run import Manifest, Run
from whywait.core.schedule import Schedule, Workload
from whywait.load.driver import Driver, Point
from whywait.load.prompts import Prompter
from whywait.load.recipe import closed_schedule, open_schedule
from whywait.load.stub import StubProcess, StubThread
from whywait.load.stub_plan import Options
from whywait.net.client import Client
from whywait.net.clock import Clock
from whywait.net.dialect import request_body
from whywait.net.endpoint import parse_url
from whywait.net.reach import Reach

QUICK = {"ttft_ms": 5, "gap_ms": 2, "tokens": 6}


@pytest.fixture(scope="module")
def stub() -> Any:
    with StubProcess() as s:
        yield s


def closed(n: int = 3, concurrency: int = 3) -> Point:
    return Point(0, "concurrency", concurrency, closed_schedule(Workload(), n))


def measure(url: str, out: Path, point: Point | None = None, **more: Any) -> tuple[Run, dict[str, Any]]:
    """A load point through client, driver and recorder; the Run and its summary. ``more``: ``plan`` of the stub,
    ``options`` and ``text`` of the request, ``reach`` and ``dialect`` of the endpoint, the rest is the driver's."""
    plan, options = {**QUICK, **more.pop("plan", {})}, more.pop("options", {})
    text = more.pop("text", lambda row: f"hello {row}")
    dialect, manifest = more.pop("dialect", "chat"), more.pop("manifest", {})
    endpoint = parse_url(url, dialect, reach=more.pop("reach", None))
    clock = Clock()
    recorder = Recorder(out, Manifest(zero_unix_ns=clock.zero_unix_ns))
    client = Client(endpoint, recorder, clock)

    def body(row: int, schedule: Schedule) -> bytes:
        asked = {"stream": more.get("stream", True), "stream_options": {"include_usage": True}, "stub": plan, **options}
        return request_body(dialect, "stub", text(row), int(schedule.output_tokens[row]), asked)

    try:
        driver = Driver(client, recorder, clock, body, **more)
        driver.run(point or closed())
        facts = {**client.facts(), "cpu_ns_by_point": {str(k): v for k, v in driver.cpu_ns.items()}}
        run = recorder.finish(Manifest(zero_unix_ns=clock.zero_unix_ns, client=facts, **manifest))
    finally:
        client.close()
    return run, summarize(run)


def outcomes(run: Run) -> Counter[str | None]:
    return Counter(run.requests.text("outcome"))


def content(run: Run) -> Any:
    return run.chunks.where(run.chunks["kind"] != 0)


def doubt(summary: dict[str, Any], text: str) -> bool:
    return any(text in d["what"] or text in d["why"] for d in summary["doubts"])


COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def test_case_01_an_error_after_tokens_is_an_error_and_its_tokens_are_kept_apart(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "r", plan={"fault": "error_event:4"}, options=COUNTED)
    p = s["points"][0]
    assert outcomes(run) == {"inband_error": 3}
    assert len(content(run)) == 12
    assert p["output_tokens_per_s"] == 0  # of the good ones there are none
    assert p["wasted_tokens_per_s"] > 0
    assert p["ttft_ms"]["n"] == 0
    held, _ = measure(stub.url, tmp_path / "b", plan={"fault": "error_hold:4"}, timeout_s=30.0)
    assert outcomes(held) == {"inband_error": 3}  # though the connection stays open


def test_case_02_a_clean_end_that_says_nothing_is_truncated_unless_taken(stub: Any, tmp_path: Path) -> None:
    run, _ = measure(stub.url, tmp_path / "a", plan={"fault": "truncate:4"})
    assert outcomes(run) == {"truncated": 3}
    run, _ = measure(stub.url, tmp_path / "b", plan={"fault": "truncate:4"}, reach=Reach(lenient_eof=True))
    assert outcomes(run) == {"ok": 3}
    assert all("--lenient-eof" in d for d in run.requests["detail"])
    run, _ = measure(stub.url, tmp_path / "c", plan={"fault": "no_done"})
    assert outcomes(run) == {"ok": 3}  # a finish reason is enough


def test_case_03_the_role_chunk_is_no_token_and_the_first_byte_is_apart(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "r", plan={"ttft_ms": 400})
    role = run.chunks.where(run.chunks["kind"] == 0)
    assert len(role) == 3
    first = dict(zip(run.requests["id"].tolist(), run.requests["first_ns"].tolist(), strict=True))
    # By the stub's timetable the role chunk goes with the headers and the token 400 ms later.
    assert all(first[i] - t > 30 * MS for i, t in zip(role["id"].tolist(), role["t_ns"].tolist(), strict=True))
    assert run.requests["content_chunks"].tolist() == [6, 6, 6]
    p = s["points"][0]
    assert p["ttft_ms"]["p50"] - p["first_byte_ms"]["p50"] > 30


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_case_04_thoughts_are_tokens_and_the_answer_has_its_own_time(stub: Any, tmp_path: Path, key: str) -> None:
    plan = {"tokens": 6, "reasoning_tokens": 4, "reasoning_key": key, "gap_ms": 50}
    run, s = measure(stub.url, tmp_path / "a", plan=plan)
    r, p = run.requests, s["points"][0]
    assert (r["first_answer_ns"] - r["first_ns"] > 20 * MS).all()  # four gaps of 50 ms by the timetable
    assert p["ttfa_ms"]["p50"] > p["ttft_ms"]["p50"]
    run, _ = measure(stub.url, tmp_path / "b", plan={**plan, "reasoning_tokens": 6})
    assert outcomes(run) == {"ok": 3}
    assert np.isnan(run.requests["first_answer_ns"]).all()
    assert (run.requests["first_ns"] > 0).all()


def test_case_05_several_tokens_per_chunk(stub: Any, tmp_path: Path) -> None:
    plan = {"tokens": 12, "tokens_per_chunk": 4, "gap_ms": 20}
    counted, s = measure(stub.url, tmp_path / "a", plan=plan, options=COUNTED)
    assert content(counted)["tokens"].tolist() == [4] * 9
    p, r = s["points"][0], counted.requests
    assert p["itl_ms"]["mean"] == pytest.approx(p["chunk_gap_ms"]["mean"] / 4)
    span = (r["last_ns"] - r["first_ns"]) / MS
    assert p["tpot_ms"]["mean"] == pytest.approx(float((span / (12 - 4)).mean()))  # those of the first chunk are free
    unknown, s = measure(stub.url, tmp_path / "b", plan=plan)
    p, r = s["points"][0], unknown.requests
    span = (r["last_ns"] - r["first_ns"]) / MS
    low, high = p["tpot_ms"]["bounds"]["mean"]
    assert (low, high) == pytest.approx((float((span / 11).mean()), float((span / 2).mean())))  # k of the first: 1 … 10
    assert p["itl_ms"]["n"] == 0
    assert doubt(s, "a chunk is not a token")
    _, s = measure(stub.url, tmp_path / "c", plan={"tokens": 6})
    assert s["points"][0]["itl_ms"]["n"] == 15  # as many tokens as chunks: one in each


def test_case_06_the_peak_weighs_chunks_by_their_tokens() -> None:
    times = [50 * MS + i * 100 * MS for i in range(40)]
    tokens: list[int | None] = [1] * 20 + [5] * 20
    requests = [{"sent_ns": 0, "first_ns": times[0], "last_ns": times[-1], "end_ns": 4 * S, "output_tokens": 120,
                 "content_chunks": 40}]  # fmt: skip
    p = summarize(make_run(requests, stream(0, times, tokens=tokens)))["points"][0]
    assert p["output_tokens_per_s"] == pytest.approx(120 / 4)
    assert p["peak_tokens_per_s"] == pytest.approx(50)  # ten chunks of five, not ten tokens
    assert p["peak_tokens_per_s"] >= p["output_tokens_per_s"]


def test_case_07_peak_concurrency_is_exact() -> None:
    # Three that touch end to end, and a short one inside: never more than two, though a second holds all four.
    spans = [(0, 300), (300, 600), (600, 900), (310, 320)]
    rows = [{"sent_ns": a * MS, "end_ns": b * MS, "first_ns": b * MS, "last_ns": b * MS} for a, b in spans]
    assert summarize(make_run(rows))["points"][0]["in_flight"] == {"peak": 2, "mean": pytest.approx(910 / 900)}


def test_case_08_latency_ends_at_the_last_token_however_long_the_rest_takes(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "a", plan={"tail_ms": 600})
    r, p = run.requests, s["points"][0]
    assert outcomes(run) == {"ok": 3}
    assert ((r["end_ns"] - r["last_ns"]) > 150 * MS).all()
    assert p["tail_ms"]["p50"] > 150
    assert p["e2e_ms"]["p50"] == pytest.approx(float(np.median(r["last_ns"] - r["sent_ns"])) / MS)
    held, _ = measure(stub.url, tmp_path / "b", plan={"fault": "hold"}, timeout_s=30.0)
    assert outcomes(held) == {"ok": 3}  # [DONE] was said; nobody waits for the connection
    assert held.requests["output_tokens"].tolist() == [6, 6, 6]
    held, s = measure(stub.url, tmp_path / "c", plan={"fault": "hold:1"}, timeout_s=1.5)
    assert outcomes(held) == {"ok": 3}  # a finish reason, and then nothing, not even [DONE]
    r = held.requests
    assert (r["end_ns"] - r["sent_ns"] < 1500 * MS).all()  # it ended when the last was heard of it
    assert s["points"][0]["e2e_ms"]["p50"] == pytest.approx(float(np.median(r["last_ns"] - r["sent_ns"])) / MS)


def test_case_09_missing_usage_is_unknown_and_empty_choices_are_legal(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "a", plan={"fault": "no_usage"})
    assert outcomes(run) == {"ok": 3}
    assert np.isnan(run.requests["output_tokens"]).all()
    assert (run.requests["asked_output_tokens"] > 0).all()  # what was asked for is not what came
    assert s["points"][0]["output_tokens_per_s"] is None
    assert doubt(s, "output_tokens_per_s is unknown")
    run, _ = measure(stub.url, tmp_path / "b", plan={"fault": "usage_null_choices"})
    assert outcomes(run) == {"ok": 3}
    assert run.requests["output_tokens"].tolist() == [6, 6, 6]


def test_case_10_a_second_count_is_a_cross_check_and_its_disagreement_is_said(stub: Any, tmp_path: Path) -> None:
    ids = {"return_token_ids": True}
    run, s = measure(stub.url, tmp_path / "a", plan={"fault": "miscount:3"}, options=ids)
    assert run.requests["output_tokens"].tolist() == [9, 9, 9]  # the service's own usage, whatever the chunks say
    assert doubt(s, "the tokens counted in their chunks are not their usage")
    _, s = measure(stub.url, tmp_path / "b", options=ids)
    assert not doubt(s, "the tokens counted in their chunks")


def test_case_11_reasoning_is_a_part_of_the_output(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "r", closed(12, 3), plan={"tokens": 6, "reasoning_tokens": 4})
    assert run.requests["output_tokens"].tolist() == [6] * 12
    assert run.requests["reasoning_tokens"].tolist() == [4] * 12
    thinking = s["points"][0]["thinking"]
    assert (thinking["reasoning_tokens"]["mean"], thinking["answer_tokens"]["mean"]) == (4, 2)


def test_case_12_other_lengths_than_asked_are_recorded_and_said(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "r")
    asked, real = run.requests["asked_output_tokens"], run.requests["output_tokens"]
    assert (asked > real).all()
    assert doubt(s, "lengths are not what was asked for")
    rows = [{"asked_output_tokens": 100, "output_tokens": n, "sent_ns": 0, "first_ns": 1, "last_ns": S, "end_ns": S}
            for n in (100, 99, 101)]  # fmt: skip
    assert not doubt(summarize(make_run(rows)), "lengths are not")


def test_case_13_cold_prompts_share_nothing_and_what_was_cached_is_beside_every_ttft(tmp_path: Path) -> None:
    with StubThread(Options(prefix_cache=8)) as s:
        share = {}
        for i, cache in enumerate(("cold", "cold", "warm", "natural")):
            prompter = Prompter(7, cache, salt=f"salt{i}")
            text = [prompter.turn(k, 0, 240) for k in range(24)]
            run, found = measure(s.url, tmp_path / str(i), closed(24, 2), text=text.__getitem__,
                                 manifest={"workload": {"cache": cache}})  # fmt: skip
            assert not np.isnan(run.requests["cached_tokens"]).any()
            share[i, cache] = found["points"][0]["cached_share"]
    assert share[0, "cold"] == share[1, "cold"] == 0  # not even the second time: the salt is of the run
    assert share[2, "warm"] > 0.5  # eight prompts again and again


def test_case_14_prompts_are_natural_and_acceptance_is_beside_the_result() -> None:
    words = Prompter(1, "natural").turn(3, 0, 400).lower().split()
    assert len(set(words)) > 0.3 * len(words)  # filler repeats itself, and speculation loves it
    rows = [{"sent_ns": 0, "first_ns": 1, "last_ns": S, "end_ns": S, "output_tokens": 5}]
    readings = [*gauge_rows("draft_tokens_total", [(0, 100.0), (S, 300.0)]),
                *gauge_rows("accepted_tokens_total", [(0, 50.0), (S, 200.0)])]  # fmt: skip
    assert summarize(make_run(rows, readings=readings))["points"][0]["acceptance"] == pytest.approx(0.75)
    assert summarize(make_run(rows))["points"][0]["acceptance"] is None


def test_case_15_the_start_burst_is_left_out_and_that_is_said(stub: Any, tmp_path: Path) -> None:
    _, s = measure(stub.url, tmp_path / "r", closed(80, 4), plan={"gap_ms": 5})
    window = s["points"][0]["window"]
    assert not window["whole_point"]
    assert window["dropped"] >= 4  # the burst
    assert window["requests"] + window["dropped"] == 80
    _, s = measure(stub.url, tmp_path / "few", closed(4, 4))
    assert s["points"][0]["window"]["whole_point"]
    assert doubt(s, "warm-up and drain included")


def test_case_16_ramp_and_drain_are_cut_by_overlap_and_the_censored_are_counted(stub: Any, tmp_path: Path) -> None:
    run = Service(slots=4).closed(4, 64)
    p = summarize(run)["points"][0]
    inside = run.requests["sent_ns"] >= p["window"]["start_ns"]
    inside &= run.requests["sent_ns"] <= p["window"]["end_ns"]
    assert p["window"]["requests"] == int(inside.sum()) < 64
    cut, s = measure(
        stub.url, tmp_path / "r", closed(40, 4), stop=lambda p: "enough" if p.sent >= 12 and p.ended < p.sent else ""
    )
    counts = s["points"][0]["counts"]
    assert counts["censored"] >= 1
    assert sum(counts.values()) == 40 == cut.points["planned"][0]


def test_case_17_waiting_in_the_client_counts_from_when_it_was_due() -> None:
    rows = [{"due_ns": 0, "sent_ns": 500 * MS, "first_ns": 600 * MS, "last_ns": S, "end_ns": S, "output_tokens": 9}]
    run = make_run(rows, points=[{"mode": "rate", "target": 1.0, "start_ns": 0}])
    p = summarize(run)["points"][0]
    assert p["ttft_ms"]["p50"] == 600
    assert p["phases"]["client"]["ms"] == 500


def test_case_18_an_absolute_timetable_with_its_lag_and_its_bound(stub: Any, tmp_path: Path) -> None:
    schedule = open_schedule(Workload(arrivals="constant"), rate=100.0, n=50)
    run, s = measure(stub.url, tmp_path / "r", Point(0, "rate", 100.0, schedule), plan={"ttft_ms": 300})
    due = run.requests["due_ns"]
    assert np.diff(due).tolist() == [10 * MS] * 49  # whatever came back when
    offered = s["points"][0]["offered"]
    assert offered["asked_per_s"] == pytest.approx(100)
    assert offered["lag_ms"]["p99"] >= 0

    def late(by_ms: int) -> dict[str, Any]:
        rows = [{"due_ns": i * 10 * MS, "sent_ns": i * 10 * MS + (by_ms * MS if i > 50 else 0), "last_ns": 2 * S,
                 "first_ns": 2 * S, "end_ns": 2 * S} for i in range(100)]  # fmt: skip
        return summarize(make_run(rows, points=[{"mode": "rate", "target": 100.0, "start_ns": 0}]))

    assert late(1)["points"][0]["offered"]["valid"] is True
    assert late(200)["points"][0]["offered"]["valid"] is False
    assert doubt(late(200), "sends were 200 ms late")


def test_case_19_a_client_at_its_limit_says_so(stub: Any, tmp_path: Path) -> None:
    rows = [{"sent_ns": 0, "first_ns": 1, "last_ns": S, "end_ns": S, "output_tokens": 5}]
    assert doubt(summarize(make_run(rows, client={"cpu_ns_by_point": {"0": 0.95 * S}})), "95 % of a core")
    assert doubt(summarize(make_run(rows, client={"read_lag_ms": {"p99": 80.0}})), "reads were 80.0 ms late")
    assert not doubt(summarize(make_run(rows, client={"cpu_ns_by_point": {"0": 0.2 * S}})), "did not keep up")
    floor = {"stamp_error_ms": {"p50": 1.0, "p99": 500.0}}
    assert doubt(summarize(make_run(rows, client={"floor": floor})), "the client's own error")
    run, _ = measure(stub.url, tmp_path / "r")
    assert run.manifest.client["cpu_ns_by_point"]["0"] > 0  # it is looked at in every run


def test_case_20_no_hidden_cap_on_connections(tmp_path: Path) -> None:
    with StubProcess() as s:
        run, found = measure(s.url, tmp_path / "r", closed(600, 300), plan={"ttft_ms": 400})
    assert outcomes(run) == {"ok": 600}
    assert found["points"][0]["in_flight"]["peak"] == 300


def test_case_21_buffered_events_are_intervals_and_their_gaps_withheld(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "r", plan={"fault": "coalesce:3", "tokens": 12, "gap_ms": 10})
    low = content(run)["t_low_ns"]
    assert int(np.isfinite(low).sum()) >= 24  # two of each three at least
    p = s["points"][0]
    assert p["itl_ms"]["p50"] is None
    assert p["chunk_gap_ms"]["p50"] is None
    bounds = p["chunk_gap_ms"]["bounds"]["p50"]
    assert bounds[0] < 10 < bounds[1]  # the truth lies inside
    assert doubt(s, "came with others in one read")


def test_case_22_definitions_are_versioned_and_means_are_told_apart() -> None:
    # One request of 100 quick gaps and one of two slow ones: pooled and per request are other numbers.
    rows = [{"sent_ns": 0, "first_ns": 0, "last_ns": t * MS, "end_ns": S, "output_tokens": n, "content_chunks": n}
            for t, n in ((100, 101), (200, 3))]  # fmt: skip
    chunks = stream(0, [i * MS for i in range(101)]) + stream(1, [0, 100 * MS, 200 * MS])
    s = summarize(make_run(rows, chunks))
    assert s["definitions"]
    assert s["schema_version"]
    p = s["points"][0]
    assert p["itl_ms"]["mean"] == pytest.approx(300 / 102)  # over gaps
    assert p["tpot_ms"]["mean"] == pytest.approx((1 + 100) / 2)  # over requests
    said = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    assert "pooled" in said.lower()
    assert "per request" in said.lower()


def test_case_23_missing_is_not_zero(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "r", stream=False)
    assert np.isnan(run.requests["first_ns"]).all()
    p = s["points"][0]
    assert (p["ttft_ms"]["n"], p["ttft_ms"]["p50"], p["ttft_ms"]["mean"]) == (0, None, None)
    for key in ("queue", "kv_use", "power_w", "energy_j_per_good_request", "acceptance"):
        assert p[key] is None
    assert json.dumps(s, allow_nan=False)  # and nothing is NaN either


@pytest.mark.parametrize("code", [429, 503])
def test_case_24_shed_is_counted_and_never_sent_again_in_silence(tmp_path: Path, code: int) -> None:
    with StubProcess() as s:
        run, found = measure(s.url, tmp_path / "r", plan={"fault": f"http_{code}:7"})
        with urlopen(s.url + "/stub") as page:
            truth = json.load(page)
    assert outcomes(run) == {"shed": 3}
    assert truth["requests"] == 3
    assert run.requests["attempt"].tolist() == [1, 1, 1]
    assert set(run.requests["detail"]) == {f"{code}, Retry-After 7"}
    assert found["points"][0]["goodput_share"] in (None, 0)


def test_case_25_errors_are_grouped_and_never_quoted(stub: Any, tmp_path: Path) -> None:
    for fault, outcome, said in (
        ("html:502", "http_error", "502 text/html"),
        ("http_500", "http_error", "500 server_error 500"),
        ("wrong_model", "http_error", "404 NotFoundError 404"),
        ("error_event:2", "inband_error", "server_error 500"),
    ):
        _, s = measure(stub.url, tmp_path / fault, plan={"fault": fault}, text=lambda _: "a very secret prompt")
        (error,) = s["points"][0]["errors"]
        assert (error["outcome"], error["detail"], error["n"]) == (outcome, said, 3)
        everything = b"".join(f.read_bytes() for f in (tmp_path / fault).rglob("*") if f.is_file())
        for text in (b"secret", b"told to fail", b"does not exist", b"Welcome"):
            assert text not in everything
            assert text.decode() not in json.dumps(s)
    _, s = measure(stub.url, tmp_path / "fine")
    assert s["points"][0]["errors"] == []


def test_case_26_no_answer_in_time_is_a_timeout_and_its_work_is_charged(stub: Any, tmp_path: Path) -> None:
    run, s = measure(stub.url, tmp_path / "r", plan={"fault": "hang:4"}, options=COUNTED, timeout_s=1.5,
                     manifest={"slo": {"ttft_ms": 10_000.0}})  # fmt: skip
    p = s["points"][0]
    assert outcomes(run) == {"timeout": 3}
    assert run.requests["output_tokens"].tolist() == [4, 4, 4]  # as far as the service counted
    assert (run.requests["end_ns"] - run.requests["sent_ns"] >= 1500 * MS).all()
    assert p["wasted_tokens_per_s"] > 0
    assert p["goodput_share"] == 0  # good tokens would have to bear it
