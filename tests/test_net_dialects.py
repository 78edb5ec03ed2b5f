"""Each dialect through the real client, against the stub: the same timetable, the same figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.test_stream_cases import closed, content, measure, outcomes
from whywait.cli import main
from whywait.core.run import Run
from whywait.load.preflight import find, first_request
from whywait.load.stub import StubProcess
from whywait.net.endpoint import parse_url

DIALECTS = ("chat", "completions", "responses")


@pytest.fixture(scope="module")
def stub() -> Iterator[Any]:
    with StubProcess("--ttft-ms", "1", "--gap-ms", "1", "--tokens", "8") as s:
        yield s


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
def test_figures_are_the_same_in_every_dialect(stub: Any, tmp_path: Any, dialect: str, stream: bool) -> None:
    plan = {"tokens": 6, "reasoning_tokens": 2, "prompt_tokens": 9, "cached_tokens": 4}
    run, s = measure(stub.url, tmp_path / "r", closed(4, 2), plan=plan, dialect=dialect, stream=stream)
    r = run.requests
    assert outcomes(run) == {"ok": 4}
    for column, value in (("prompt_tokens", 9), ("output_tokens", 6), ("reasoning_tokens", 2), ("cached_tokens", 4)):
        assert r[column].tolist() == [value] * 4
    if stream:
        assert r["content_chunks"].tolist() == [6] * 4
        kinds = content(run).text("kind")
        # Completions know no field for thoughts: they are text like any other.
        assert kinds.count("reasoning") == (0 if dialect == "completions" else 8)
        assert s["points"][0]["itl_ms"]["n"] == 20  # usage equals the chunks: one token in each
        assert set(run.chunks.text("clock")) == {"kernel"}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("error_event:2", "inband_error"), ("truncate:3", "truncated"), ("no_done", "truncated"), ("reset:2", "reset"),
     ("split", "ok"), ("close_delimited", "ok"), ("hold", "ok"), ("no_usage", "ok"), ("html", "protocol")],
)  # fmt: skip
def test_endings_of_responses(stub: Any, tmp_path: Any, fault: str, outcome: str) -> None:
    run, _ = measure(stub.url, tmp_path / "r", plan={"fault": fault}, dialect="responses", timeout_s=20.0)
    assert outcomes(run) == {outcome: 3}


def test_length_is_the_finish_reason_of_an_incomplete_response(stub: Any) -> None:
    target = find(parse_url(stub.url + "/v1/responses"), None)
    assert target.endpoint.dialect == "responses"
    from whywait.core.schedule import Workload

    facts = first_request(target, Workload(), True, tokens=4)
    assert (facts["finish_reason"], facts["output_tokens"]) == ("max_output_tokens", 4)


def test_a_run_by_the_command_line(stub: Any, tmp_path: Any) -> None:
    out = tmp_path / "run"
    flags = ["--dialect", "responses", "--requests", "5", "--no-floor", "--out", str(out)]
    assert main(["run", stub.url, *flags]) == 0
    run = Run.load(out)
    assert outcomes(run) == {"ok": 5}
    assert run.manifest.endpoint["dialect"] == "responses"
