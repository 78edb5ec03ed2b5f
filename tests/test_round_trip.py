"""What an export in another tool's form keeps of where its figures come from, when it is read again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import MS, S, Service, make_run, stream
from tests.imported_files import DATA, imported, put
from tests.test_export_figures import bench, text_of
from whywait import cli
from whywait.analyze.latency import per_request
from whywait.analyze.summary import summarize
from whywait.core.check import violations
from whywait.core.run import SIMULATED_SERVICE, Run
from whywait.report.export import choose
from whywait.report.export_llmd import reports
from whywait.report.export_spans import batches

ZERO = 1_700_000_000_250_000_000
ASSUMED, REPLAYED = "sglang-0.5.23-r8.jsonl", "sglang-0.5.23-c4.jsonl"


def back(run: Run, folder: Path, number: int = 0) -> Run:
    """Exported in the shape of vllm bench serve, and imported."""
    again, _ = imported(put(folder / "x.json", bench(run, number)))
    assert violations(again) == []
    return again


def test_a_simulated_run_stays_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Service(engine={"name": "vllm", "model": "m"}).closed(2, 6, made_by="simulated")
    again = back(run, tmp_path)
    assert again.manifest.made_by == "simulated"
    assert again.manifest.engine == {"model": "m", "name": "vllm"}
    assert again.manifest.zero_unix_ns == 0
    assert set(again.chunks.text("clock")) == {"kernel"}  # as a simulated run has it: nobody's loop was late
    (tool,) = again.manifest.client["imported"]["tools"]
    assert tool["tool"] == "whywait export"
    assert tool["whywait"][0]["definitions"] == run.manifest.definitions
    assert "made up" in tool["whywait"][0]["clock"]
    assert bench(again)["whywait_made_by"] == "simulated"  # and again
    path, out = put(tmp_path / "sim.json", bench(run)), str(tmp_path / "run")
    assert cli.main(["import", str(path), "--out", out]) == 0
    assert "SIMULATED" in capsys.readouterr().out
    assert cli.main(["compare", out, out]) == 0
    told = capsys.readouterr()
    assert "is simulated" in told.out + told.err


def test_a_measurement_of_a_simulated_service_is_exported_as_simulated(tmp_path: Path) -> None:
    doubt = {"what": SIMULATED_SERVICE, "why": "", "next": ""}
    run = Service().closed(2, 6, doubts=[doubt])
    assert bench(run)["whywait_made_by"] == "simulated"
    assert "(simulated)" in choose(run).title
    assert back(run, tmp_path).manifest.made_by == "simulated"


def test_a_measured_run_is_imported_and_a_mixture_is_told(tmp_path: Path) -> None:
    measured, simulated = (Service().closed(2, 6, made_by=m) for m in ("measured", "simulated"))
    again = back(measured, tmp_path)
    assert again.manifest.made_by == "imported"
    assert set(again.chunks.text("clock")) == {"user"}
    both = [put(tmp_path / f"{n}.json", bench(r)) for n, r in (("a", measured), ("b", simulated))]
    run, _ = imported(*both)
    assert run.manifest.made_by == "simulated"  # the lesser claim
    assert any("times: measured, simulated" in d["why"] for d in run.manifest.doubts)


def test_a_run_that_was_cut_off_stays_so(tmp_path: Path) -> None:
    m = back(Service().closed(2, 6, partial=True, partial_reason="killed"), tmp_path).manifest
    assert (m.partial, m.partial_reason) == (True, "killed")
    assert not back(Service().closed(2, 6), tmp_path).manifest.partial


def test_how_requests_failed_is_kept(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"sent_ns": 0, "first_ns": MS, "last_ns": S, "end_ns": S, "output_tokens": 2},
        {"sent_ns": 1, "end_ns": S, "outcome": "http_error", "detail": "404", "status": 404, "fault": "user"},
        {"sent_ns": 2, "end_ns": S, "outcome": "http_error", "detail": "500", "status": 500, "fault": "service"},
        {"sent_ns": 3, "end_ns": S, "outcome": "timeout", "detail": "no token", "fault": "service"},
        {"sent_ns": 4, "end_ns": S, "outcome": "cancelled", "fault": "user"},
    ]
    run = make_run(rows, stream(0, [MS, S]))
    again = back(run, tmp_path)
    for name in ("outcome", "fault"):
        assert again.requests.text(name) == run.requests.text(name)
    for name in ("detail", "status"):
        assert [r[name] for r in again.requests.rows()] == [r[name] for r in run.requests.rows()]


def test_the_last_token_of_streams_of_several_tokens_a_chunk_is_kept(tmp_path: Path) -> None:
    """An end that came at once after the last token would look the same in a file of vLLM's own."""
    times = [*(200 * MS + 50 * MS * i for i in range(10)), 654 * MS]
    rows = [{"sent_ns": 0, "first_ns": times[0], "last_ns": times[-1], "end_ns": times[-1], "output_tokens": 42}] * 4
    run = make_run(rows, [c for i in range(4) for c in stream(i, times)])
    again = back(run, tmp_path)
    assert per_request(again).e2e_ms.tolist() == pytest.approx([654.0] * 4)
    assert (again.requests["content_chunks"] == 11).all()
    theirs = {k: v for k, v in bench(run).items() if not k.startswith("whywait_")}
    cut, _ = imported(put(tmp_path / "vllm.json", theirs))
    assert per_request(cut).e2e_ms.tolist() == pytest.approx([650.0] * 4)


def test_the_date_is_that_of_the_end(tmp_path: Path) -> None:
    run = Service().closed(2, 12, zero_unix_ns=ZERO)
    again = back(run, tmp_path)
    ends = [(r.manifest.zero_unix_ns + int(r.points["end_ns"][0])) / S for r in (run, again)]
    assert 0 <= ends[0] - ends[1] < 1  # a date has whole seconds


# --- sends that the source did not tell


def test_times_that_were_laid_out_are_told_as_such_by_every_form(tmp_path: Path) -> None:
    run, _ = imported(DATA / ASSUMED)
    chosen = choose(run)
    found = bench(run)
    n = len(run.requests)
    assert found["start_times"] == [None] * n
    assert found["whywait_starts"].startswith("assumed: ")
    assert found["max_concurrent_requests"] is found["max_output_tokens_per_s"] is None
    assert found["mean_ttft_ms"] > 0  # durations hold
    text = text_of(chosen)
    assert "whywait_in_flight_requests" not in text
    assert 'starts="assumed: ' in text.splitlines()[2]
    spans = [s for b in batches(chosen) for s in b["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    told = [a["value"]["stringValue"] for s in spans for a in s["attributes"] if a["key"] == "whywait.starts"]
    assert len(told) == n
    assert all(t.startswith("assumed: ") for t in told)
    assert reports(chosen)[0]["results"]["profiling"]["whywait"]["starts"].startswith("assumed: ")


@pytest.mark.parametrize("name", [ASSUMED, REPLAYED])
def test_the_doubt_comes_back(name: str, tmp_path: Path) -> None:
    run, _ = imported(DATA / name)
    again = back(run, tmp_path)
    assert again.manifest.client["imported"]["starts"] == run.manifest.client["imported"]["starts"]
    for column in ("sent_ns", "first_ns", "last_ns"):
        np.testing.assert_allclose(again.requests[column], run.requests[column], atol=10)
    doubts = [{d["what"] for d in r.manifest.doubts if d["what"].startswith("when requests were sent")}
              for r in (run, again)]  # fmt: skip
    assert doubts[0] == doubts[1] != set()
    shares = [summarize(r)["points"][0]["occupancy"]["shares"]["unknown"] for r in (run, again)]
    assert shares[0] == shares[1]
    assert (shares[0] == 1) == (name == ASSUMED)


def test_a_replay_counts_what_is_in_flight_and_says_what_it_is() -> None:
    run, _ = imported(DATA / REPLAYED)
    assert bench(run)["whywait_starts"].startswith("replayed: ")
    text = text_of(choose(run))
    assert "whywait_in_flight_requests" in text
    assert "exact" not in next(line for line in text.splitlines() if line.startswith("# HELP whywait_in_flight"))


def test_the_trace_of_a_layout_says_so_and_counts_nothing_in_flight() -> None:
    pytest.importorskip("perfetto")
    from tests.test_export_trace import trace_of

    run, _ = imported(DATA / ASSUMED)
    trace, _ = trace_of(choose(run))
    assert not any("in flight" in path for path in trace.counts)
    (group,) = [t for t in trace.tracks.values() if t.name.startswith("requests, ")]
    assert group.name.endswith(", sends assumed")
    assert "laid out evenly" in group.description
    load = next(s for s in trace.slices if s.facts.get("mode"))
    assert load.facts["starts"].startswith("assumed: ")


def test_of_several_points_each_says_its_own() -> None:
    run, _ = imported(DATA / ASSUMED, DATA / "vllm-0.32-r8.json")
    assert bench(run, 0)["whywait_starts"].startswith("assumed")
    assert "whywait_starts" not in bench(run, 1)
    assert None not in bench(run, 1)["start_times"]
    chosen = choose(run)
    assert chosen.labels["starts"].startswith("assumed")
    lines = [line for line in text_of(chosen).splitlines() if line.startswith("whywait_in_flight")]
    assert lines
    assert all('point="1"' in line for line in lines)


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert cli.main(["import", str(DATA / ASSUMED), "--out", out]) == 0
    capsys.readouterr()
    assert cli.main(["export", out, "--to", "otlp", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["starts"].startswith("assumed: ")
    assert "times of sends are assumed: " in said.err


def test_a_hostile_file_that_claims_to_be_ours(tmp_path: Path) -> None:
    found = bench(Service().closed(2, 6))
    odd: tuple[Any, ...] = (None, 7, [], {}, "x" * 10_000, True)
    for value in odd:
        ours = {k: value for k in found if k.startswith("whywait_")}
        for more in (ours, {**ours, "whywait_made_by": "simulated"}):
            run, _ = imported(put(tmp_path / "x.json", {**found, **more}))
            assert violations(run) == []
            assert len(str(run.manifest)) < 20_000
            assert isinstance(json.dumps(run.manifest.client), str)


def test_a_trace_stays_one(tmp_path: Path) -> None:
    run = make_run([{"due_ns": S * i, "sent_ns": S * i, "first_ns": S * i + MS, "last_ns": S * i + MS,
                     "end_ns": S * i + MS} for i in range(3)], [c for i in range(3) for c in stream(i, [S * i + MS])],
                   points=[{"mode": "trace", "target": None}])  # fmt: skip
    assert back(run, tmp_path).points.text("mode") == ["trace"]


def test_csv_of_hostile_texts_has_a_row_each(tmp_path: Path) -> None:
    import csv

    from whywait.report import export_tables

    texts = [
        "a\r=cmd|' /C calc'!A0",
        "\n=1+1",
        " =1+1",
        "\r=1",
        "x\r\ny",
        "a\x1b[2Jb\x00c",
        "\x1b=1",
        "two\nlines",
        "-",
    ]
    run = make_run([{"sent_ns": 0, "end_ns": 1, "detail": t} for t in texts])
    out = io.StringIO(newline="")
    export_tables.write_csv(run, "requests", out)
    raw = out.getvalue()
    rows = list(csv.DictReader(io.StringIO(raw, newline="")))
    assert [r["detail"] for r in rows] == [
        "a=cmd|' /C calc'!A0", "'\n=1+1", "' =1+1", "'=1", "x\ny", "a[2Jbc", "'=1", "two\nlines", "'-",
    ]  # fmt: skip
    assert raw.count("\r\n") == len(texts) + 1  # RFC 4180
    assert raw.replace("\r\n", "").count("\r") == 0
    assert not set(raw) & {"\x1b", "\x00"}
