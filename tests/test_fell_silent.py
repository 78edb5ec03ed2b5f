"""Sources that fall silent midway, pages that are no longer an engine's, and figures that cannot be what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.analysis_runs import S, gauge_rows, make_run
from whywait.analyze.counters import gauge
from whywait.analyze.phases import point_account
from whywait.analyze.summary import summarize
from whywait.analyze.trust import doubts
from whywait.errors import Unreachable
from whywait.load.preflight import UNREAD, find
from whywait.load.stub import StubThread
from whywait.net.endpoint import parse_url
from whywait.net.outcome import facts_of
from whywait.net.wire import Response
from whywait.probe.pages import Fetcher, MetricsPage


def _steady(readings: list[dict[str, Any]]) -> Any:
    """Ten requests a second for 4 s, each 100 ms to its first token."""
    rows = [{"sent_ns": t, "first_ns": t + S // 10, "last_ns": t + S // 5, "end_ns": t + S // 5, "output_tokens": 2}
            for t in range(0, 4 * S, S // 10)]  # fmt: skip
    return make_run(rows, readings=readings, points=[{"target": 2, "start_ns": 0, "end_ns": 5 * S}])


@pytest.mark.parametrize("until", [1, 2, 5])
def test_a_counter_that_fell_silent_is_of_the_requests_it_saw(until: int) -> None:
    # 80 ms of prefill per request, however long it was read: the rest is not the path's.
    read = [(t, 0.8 * t / S) for t in range(0, min(until, 4) * S + 1, S // 4)] + ([(5 * S, 3.2)] if until == 5 else [])
    account = point_account(_steady(gauge_rows("prefill_seconds_total", read)), 0)
    assert account is not None
    assert account["phases"]["prefill"]["ms"] == pytest.approx(80, rel=0.15)


@pytest.mark.parametrize(("until", "known"), [(5, True), (2, False)])
def test_energy_of_a_part_is_not_shared_among_all(until: int, known: bool) -> None:
    read = [{**r, "source": "gpu"} for r in gauge_rows("energy_joules_total", [(0, 0.0), (until * S, 100.0 * until)])]
    point = summarize(_steady(read))["points"][0]
    assert point["power_w"] == (pytest.approx(100) if known else None)
    assert (point["energy_j_per_good_request"] is not None) is known


def test_a_page_that_stopped_being_the_engines_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [b"", b"llamacpp:requests_processing 1\n", b"<!doctype html><title>Sign in</title>",
             b"llamacpp:requests_processing 2\n"]  # fmt: skip
    monkeypatch.setattr(Fetcher, "get", lambda self: pages.pop(0))
    page = MetricsPage("metrics/0", Fetcher("http://127.0.0.1:1/metrics", {}, 1.0), "llama.cpp")
    got = [page.sample() for _ in range(4)]
    assert got == [[], [("running", None, 1.0)], None, [("running", None, 2.0)]]
    assert page.why


def test_a_share_beyond_one_is_left_out_and_doubted() -> None:
    run = _steady([*gauge_rows("kv_use", [(t, 73.0) for t in range(0, 4 * S, S)]),
                   *gauge_rows("waiting", [(t, 73.0) for t in range(0, 4 * S, S)])])  # fmt: skip
    assert gauge(run.readings, "kv_use", (0, 4 * S)) is None
    assert gauge(run.readings, "waiting", (0, 4 * S)) is not None
    said = [d for d in doubts(run) if "kv_use is not a share" in d["what"]]
    assert len(said) == 1
    assert "scale" in said[0]["next"]


def _facts(usage: dict[str, Any], events: int) -> dict[str, Any]:
    response = Response(stream=True)
    response.status = 200
    for _ in range(events):
        response.answer.read({"choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": usage})
    response.answer.read({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    assert [tokens for kind, tokens in response.events if kind] == [None] * events
    return facts_of(response, events)


def test_zeros_in_the_usage_of_an_answer_are_unknown() -> None:
    facts = _facts({"prompt_tokens": 0, "completion_tokens": 0}, 3)
    assert facts["prompt_tokens"] is None
    assert facts["output_tokens"] is None


def test_without_any_output_zero_is_zero() -> None:
    assert _facts({"prompt_tokens": 7, "completion_tokens": 0}, 0)["output_tokens"] == 0


def test_a_unix_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"gone\.sock: No such file"):
        find(parse_url(f"unix://{tmp_path}/gone.sock"), None)


@pytest.mark.parametrize("page", [None, "<html>Sign in</html>"])
def test_metrics_that_cannot_be_read_have_a_next_step(page: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.load.preflight.metrics_page", lambda _endpoint: ("/metrics", page))
    with StubThread() as stub:
        unread = [n for n in find(parse_url(stub.url), None).notes if n["what"] == UNREAD]
    assert len(unread) == 1
    assert unread[0]["next"]
