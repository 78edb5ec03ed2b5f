"""Imported Runs: every rule of Runs holds, the tools' own figures come out of their rows, and what a file does not hold
is null."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import imported_files as files
from tests.imported_files import DATA, REAL, compared, imported, put
from whywait import cli, importing
from whywait.analyze.latency import per_request
from whywait.analyze.occupancy import device_account
from whywait.analyze.phases import PHASES, account
from whywait.analyze.summary import summarize
from whywait.convert import results, results_build, results_file
from whywait.core.check import violations
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.units import NS_PER_MS

needs_yaml = pytest.mark.skipif("not __import__('importlib').util.find_spec('yaml')")
EACH = [pytest.param(n, marks=needs_yaml) if n.endswith("yaml") else n for n in REAL]


def outcomes(run: Run) -> dict[str, int]:
    return {name: int(n) for i, name in enumerate(OUTCOMES) if (n := (run.requests["outcome"] == i).sum())}


# --- what holds for every Run


@pytest.mark.parametrize("name", EACH)
def test_every_rule_of_runs_holds_for_each_tool(name: str, tmp_path: Path) -> None:
    run, _ = imported(DATA / name)
    assert violations(run) == []  # 1, 3, 8, chunks
    assert len(run.requests) == run.points["planned"].sum() > 0
    assert Run.load(run.save(tmp_path)) == run  # 6
    assert imported(DATA / name)[0] == run  # 5: the same file is the same Run
    acc = account(run)
    assert acc.phases.shape[1] == len(PHASES)
    assert (acc.phases.sum(axis=1) == acc.total_ns).all()  # 4
    for number in run.points["point"].tolist():
        one = run.point(number)
        d = device_account(one)
        assert sum(d.ns.values()) == d.total_ns  # 10
    for p in summarize(run, acc)["points"]:  # 8
        assert p["in_flight"]["peak"] >= p["in_flight"]["mean"] > 0
        assert p["peak_tokens_per_s"] is None or p["peak_tokens_per_s"] >= p["output_tokens_per_s"] > 0
        assert sum(p["counts"].values()) == p["window"]["requests"] + p["window"]["dropped"]
    ttft = per_request(run).ttft_ms
    assert (ttft[~np.isnan(ttft)] > 0).all()


@pytest.mark.parametrize("name", EACH)
def test_formats_are_told_by_what_is_in_the_file(name: str, tmp_path: Path) -> None:
    src = DATA / name
    path = src / "per_request_lifecycle_metrics.json" if src.is_dir() and "inference" in name else src
    path = path / "profile_export.jsonl" if path.is_dir() else path
    other = tmp_path / "named otherwise"
    shutil.copyfile(path, other)
    assert results.sniff(other) == REAL[name]
    zipped = tmp_path / "zipped"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert results.sniff(zipped) == REAL[name]
    a, b = imported(other)[0], imported(zipped)[0]
    assert a.requests == b.requests
    assert len(a.requests) > 0


@pytest.mark.parametrize("name", EACH)
def test_the_tools_own_figures_come_out_or_the_definition_that_differs_is_named(name: str) -> None:
    run, sources = imported(DATA / name)
    found, doubts = compared(run, sources)
    assert len(found) >= 6
    assert not [d for d in doubts if "no difference of definitions is known" in d["why"]]
    exact = [f for f in found if f.name in ("requests", "requests_per_s") or f.name.startswith("latency_ms")]
    assert exact
    assert all(f.agrees for f in exact), exact


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("vllm-0.32-c4.json", ("ttft_ms", "tpot_ms", "output_tokens")), ("sglang-0.5.23-c4.jsonl", ("ttft_ms", "tpot_ms")),
     ("aiperf-0.13-c4", ("ttft_ms", "tpot_ms", "chunk_gap_ms", "e2e_ms")),
     ("aiperf-0.3-c4", ("ttft_ms", "tpot_ms", "e2e_ms", "requests_per_s", "output_tokens_per_s")),
     ("guidellm-0.8.1-c4.json", ("ttft_ms", "tpot_by_token_ms", "output_tokens_per_s")),
     ("inference-perf-0.7-c4", ("ttft_ms", "latency_ms"))],
)  # fmt: skip
def test_in_a_closed_loop_of_one_token_a_chunk_they_are_the_same_figures(name: str, kinds: tuple[str, ...]) -> None:
    found, _ = compared(*imported(DATA / name))
    for kind in kinds:
        mine = [f for f in found if f.name.partition(".")[0] == kind]
        assert mine, kind
        assert all(f.agrees for f in mine), mine


def test_a_figure_that_nothing_explains_is_told_as_such(tmp_path: Path) -> None:
    row = json.loads((DATA / "vllm-0.32-c4.json").read_text())
    row["completed"], row["mean_ttft_ms"] = 500, 9.0
    _, doubts = compared(*imported(put(tmp_path / "x.json", row)))
    by = {d["what"]: d["why"] for d in doubts}
    why = by["requests that ended well is not what the tool itself published"]
    assert "12.0 here, 500 there: no difference of definitions" in why
    assert "TTFT is not what the tool itself published" in by


# --- definitions of single tools


@pytest.mark.parametrize(("off", "agrees"), [(1.02, True), (0.98, True), (1.1, False), (0.9, False)])
def test_a_rate_may_be_off_by_the_ends_of_the_run_and_no_more(off: float, agrees: bool, tmp_path: Path) -> None:
    row = json.loads((DATA / "vllm-0.32-c4.json").read_text())
    row["request_throughput"] = row["completed"] / row["duration"] * off
    found, doubts = compared(*imported(put(tmp_path / "x.json", row)))
    (rate,) = [f for f in found if f.name == "requests_per_s"]
    assert rate.agrees == agrees
    assert any("requests/s is not what the tool itself published" in d["what"] for d in doubts) != agrees


def test_a_short_last_gap_is_an_end_only_where_it_is_far_below_the_others(tmp_path: Path) -> None:
    """With fewer chunks than tokens the gap before the last is all that tells an end without a token."""
    for last, chunks in ((0.05, 5), (0.03, 5), (0.01, 4)):  # of 0.1: an end comes at once
        itls = [[0.1, 0.1, 0.1, last]] * 3
        path = put(
            tmp_path / "x.json", files.vllm_2025(output_lens=[9] * 3, itls=itls, ttfts=[0.2] * 3, errors=[""] * 3)
        )
        run, _ = imported(path)
        assert (run.requests["content_chunks"] == chunks).all(), last


def test_ids_follow_the_schedule_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    """GuideLLM writes the good requests first, AIPerf them as they end; pairs of two runs are made by id."""
    for name in REAL:
        if name.endswith("yaml"):
            continue
        req = imported(DATA / name)[0].requests
        for point in np.unique(req["point"]):
            mine = req.where(req["point"] == point)
            began = np.where(np.isnan(mine["due_ns"]), mine["sent_ns"], mine["due_ns"])
            assert (np.diff(began[~np.isnan(began)]) >= 0).all(), name
    run, _ = imported(DATA / "guidellm-0.8.1-failures.json")
    bad = np.flatnonzero(run.requests["outcome"] != 0)
    assert bad.min() < len(run.requests) - len(bad)  # not all at the end
    skipped = {"metadata": {"context_overflow_skip": True, "benchmark_phase": "profiling"}, "metrics": {}}
    rows = files.aiperf_0_3(tmp_path).read_text().splitlines()
    put(tmp_path / "profile_export.jsonl", "\n".join([json.dumps(skipped), *reversed(rows)]))
    run, _ = imported(tmp_path / "profile_export.jsonl")
    assert run.requests.text("outcome") == ["ok", "ok", "cancelled", "never_sent"]


def test_a_role_chunk_is_no_first_token() -> None:
    """vllm bench serve stamps the first chunk with choices; of the stub that one carries only a role."""
    run, _ = imported(DATA / "vllm-0.32-chat.json")
    row = json.loads((DATA / "vllm-0.32-chat.json").read_text())
    assert row["mean_ttft_ms"] < 4
    assert np.median(per_request(run).ttft_ms) > 60  # what the stub does
    assert (run.requests["content_chunks"] == 8).all()
    assert run.chunks.text("kind").count("role") == len(run.requests)
    first = np.array([run.chunks["t_ns"][run.chunks["id"] == i].min() for i in run.requests["id"]])
    assert ((first - run.requests["sent_ns"]) / NS_PER_MS < 7).all()
    tail = (run.requests["end_ns"] - run.requests["last_ns"]) / NS_PER_MS
    assert (tail >= 0).all()


def test_on_vllm_itself_the_role_comes_with_the_first_token() -> None:
    run, sources = imported(DATA / "vllm-0.32-on-vllm-chat.json")
    found, _ = compared(run, sources)
    ttft = {f.name: f for f in found if f.name.startswith("ttft_ms")}
    assert all(f.agrees for f in ttft.values()), ttft


def test_chunks_of_several_tokens_leave_tpot_an_interval() -> None:
    run, _ = imported(DATA / "vllm-0.32-failures.json")
    ok = run.requests["outcome"] == 0
    lat = per_request(run)
    assert (run.requests["content_chunks"][ok] == 2).all()  # 8 tokens in two chunks; the end is none
    assert (lat.tpot_low_ms[ok] < lat.tpot_high_ms[ok]).all()
    assert np.isnan(run.chunks["tokens"]).all()


def test_failures_stay_in_the_denominator_and_keep_no_text() -> None:
    for name in (n for n in REAL if "failures" in n):
        run, _ = imported(DATA / name)
        assert outcomes(run)["shed"] >= 2, name
        bad = run.requests.where(run.requests["outcome"] != 0)
        assert (bad["status"] == 503).all(), name
        assert set(bad["detail"]) == {"503"}, name
        assert np.isnan(bad["first_ns"]).all(), name
        assert "told to fail" not in str(run.requests.rows()) + str(run.manifest), name


def test_engine_stages_of_vllm_are_read_from_guidellm() -> None:
    run, _ = imported(DATA / "guidellm-0.8.1-on-vllm.json")
    req = run.requests
    for name in ("engine_queue_ms", "engine_prefill_ms", "engine_decode_ms"):
        assert (req[name] >= 0).all(), name
    ttft = per_request(run).ttft_ms
    assert (req["engine_queue_ms"] + req["engine_prefill_ms"] < ttft).all()
    phases = summarize(run)["points"][0]["phases"]
    assert phases["queue"]["how"] == phases["prefill"]["how"] == "measured"


def test_the_service_counts_tokens_where_it_does() -> None:
    """inference-perf's tokenizer counts 32 where the service made 8."""
    run, _ = imported(DATA / "inference-perf-0.7-c4")
    assert (run.requests["output_tokens"] == 8).all()
    assert 11 < np.median(per_request(run).tpot_ms) < 13


def test_stages_of_inference_perf_are_points() -> None:
    run, _ = imported(DATA / "inference-perf-0.7-rates")
    assert run.points["target"].tolist() == [5.0, 10.0]
    assert run.points.text("mode") == ["rate", "rate"]
    assert run.points["planned"].tolist() == [10, 10]


def test_warm_up_of_aiperf_is_left_out_and_clocks_are_unix() -> None:
    run, _ = imported(DATA / "aiperf-0.13-c4")
    assert len(run.requests) == 12
    tool = run.manifest.client["imported"]["tools"][0]
    assert (tool["version"], tool["warmup_requests"]) == ("0.13.0", 2)
    assert 1.79e18 < run.manifest.zero_unix_ns < 1.81e18
    assert (run.requests["accepted_ns"] >= run.requests["sent_ns"]).all()
    assert np.isnan(run.requests["due_ns"]).all()  # a closed loop has no timetable
    assert not np.isnan(imported(DATA / "aiperf-0.13-r6")[0].requests["due_ns"]).any()


def test_the_manifest_says_where_it_comes_from() -> None:
    run, _ = imported(DATA / "aiperf-0.13-c4", engine={"name": "vllm"}, slo={"ttft_ms": 1.0})
    m = run.manifest
    assert (m.made_by, m.engine, m.slo) == ("imported", {"name": "vllm", "model": "tiny"}, {"ttft_ms": 1.0})
    by_name = {f["name"]: f for f in m.client["imported"]["tools"][0]["files"]}
    path = DATA / "aiperf-0.13-c4" / "profile_export.jsonl"
    assert by_name["profile_export.jsonl"]["sha256"] == results_file.digest(path)[0]
    assert by_name["profile_export.jsonl"]["bytes"] == path.stat().st_size


def test_what_vllm_counts_of_speculation_is_the_points(tmp_path: Path) -> None:
    counted = {"spec_decode_draft_tokens": 40, "spec_decode_accepted_tokens": 30, "spec_decode_num_drafts": 10}
    path = put(tmp_path / "x.json", json.loads((DATA / "vllm-0.32-c4.json").read_text()) | counted)
    run, _ = imported(path, path)
    assert violations(run) == []
    for p in summarize(run)["points"]:
        assert p["acceptance"] == pytest.approx(0.75)


# --- older versions


def test_vllm_before_start_times_is_replayed_in_its_order(tmp_path: Path) -> None:
    run, _ = imported(put(tmp_path / "x.json", files.vllm_2025()))
    assert violations(run) == []
    assert outcomes(run) == {"ok": 2, "shed": 1}
    # Two at a time: the third goes when the first of them ends, both after a second.
    assert run.requests["sent_ns"].tolist() == [0.0, 0.0, 1e9]
    assert run.points.text("mode") == ["concurrency"]
    assert any("worked out" in d["what"] for d in run.manifest.doubts)
    assert run.manifest.zero_unix_ns == 1_735_787_045_000_000_000 - 2_000_000_000
    lat = per_request(run)
    assert lat.ttft_ms[:2].tolist() == [500.0, 250.0]
    assert lat.tpot_ms[:2].tolist() == [250.0, 375.0]


def test_sglang_in_an_open_loop_does_not_say_what_overlaps_what(tmp_path: Path) -> None:
    run, _ = imported(put(tmp_path / "x.jsonl", files.sglang_2025()), engine={"slots": 1})
    assert violations(run) == []
    assert per_request(run).e2e_ms.tolist() == pytest.approx([400.0, 400.0])
    (point,) = summarize(run)["points"]
    assert point["occupancy"]["shares"]["unknown"] == 1
    assert set(point["occupancy"]["how"].values()) == {"unknown"}
    assert point["phases"]["queue"]["how"] == "unknown"  # though 1 place is taken by the layout
    assert point["phases"]["stall"]["how"] == "unknown"
    assert any("laid out evenly" in d["what"] for d in run.manifest.doubts)
    assert run.manifest.engine["name"] == "sglang"


def test_aiperf_0_3_with_sessions_and_a_cancelled_request(tmp_path: Path) -> None:
    run, _ = imported(files.aiperf_0_3(tmp_path))
    assert violations(run) == []
    assert outcomes(run) == {"ok": 2, "cancelled": 1}
    assert run.requests["session_id"].tolist() == [0.0, 0.0, 1.0]
    assert run.requests["turn"].tolist() == [0.0, 1.0, 0.0]
    assert (run.points.text("mode"), run.points["target"].tolist()) == (["concurrency"], [2.0])
    assert run.manifest.endpoint == {"url": "http://host:8000/v1"}  # neither the password nor the key
    assert imported(tmp_path / "profile_export_aiperf.json")[0] == run
    (tmp_path / "profile_export_aiperf.json").unlink()
    alone, _ = imported(tmp_path / "profile_export.jsonl")
    assert np.isnan(alone.points["target"]).all()
    assert any("how load was offered" in d["what"] for d in alone.manifest.doubts)


def test_aiperf_0_3_as_it_really_writes() -> None:
    run, (source,) = imported(DATA / "aiperf-0.3-c4")
    found, _ = compared(run, [source])
    assert len(found) == 25
    assert all(f.agrees for f in found)
    assert source.version is None, "its files do not tell it"
    assert str(source.command).startswith("aiperf profile ")
    assert run.points["target"].tolist() == [4.0]
    rate, _ = imported(DATA / "aiperf-0.3-r6")
    assert (rate.points.text("mode"), rate.points["target"].tolist()) == (["rate"], [6.0])
    assert np.isnan(rate.requests["due_ns"]).all(), "0.3 does not tell when its limiter let a request go"
    assert outcomes(imported(DATA / "aiperf-0.3-failures")[0])["shed"] == 2


def test_guidellm_0_2_holds_its_own_times(tmp_path: Path) -> None:
    run, _ = imported(put(tmp_path / "x.json", files.guidellm_0_2()))
    assert violations(run) == []
    assert outcomes(run) == {"ok": 2, "timeout": 1}
    assert per_request(run).ttft_ms[:2].tolist() == pytest.approx([110, 110], abs=0.01)  # from due: 10 ms before
    assert (run.points.text("mode"), run.points["target"].tolist()) == (["rate"], [1.0])
    assert len(run.chunks) == 0  # it keeps only the first and the last
    assert "secret" not in str(run.requests.rows()) + str(run.manifest)


def test_inference_perf_0_2_has_no_usage(tmp_path: Path) -> None:
    run, _ = imported(put(tmp_path / "x.json", files.inference_perf_0_2()))
    assert violations(run) == []
    assert outcomes(run) == {"ok": 1, "refused": 1}
    assert run.requests["output_tokens"][0] == 3
    assert per_request(run).tpot_ms[0] == pytest.approx(400)
    assert "secret" not in str(run.requests.rows())


def test_a_run_in_which_all_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = files.vllm_2025(ttfts=[0.0] * 3, output_lens=[0] * 3, itls=[[]] * 3, errors=["Bad Gateway"] * 3, completed=0)
    out = str(tmp_path / "run")
    assert cli.main(["import", str(put(tmp_path / "x.json", bad)), "--out", out]) == 0
    assert "3 of 3 requests failed (3 http error)" in capsys.readouterr().out
    assert cli.main(["show", out, "--strict"]) == 3
    assert cli.main(["bill", out, "--price-per-hour", "2", "--currency", "EUR"]) == 0
    run = Run.load(out)
    assert violations(run) == []
    assert outcomes(run) == {"http_error": 3}


def test_files_appended_to_and_several_files_are_several_points(tmp_path: Path) -> None:
    two = put(tmp_path / "x.json", "\n".join(json.dumps(files.vllm_2025(max_concurrency=c)) for c in (1, 2)))
    run, _ = imported(two, DATA / "vllm-0.32-c4.json")
    assert violations(run) == []
    assert run.points["target"].tolist() == [1.0, 2.0, 4.0]
    ends, starts = run.points["end_ns"], run.points["start_ns"]
    assert (starts[1:] > ends[:-1]).all()  # no common clock: one after the other
    assert any("different services" in d["what"] for d in run.manifest.doubts)


def test_files_that_share_unix_time_keep_their_distance() -> None:
    run, _ = imported(DATA / "aiperf-0.13-r6", DATA / "aiperf-0.13-c4")
    c4, _ = imported(DATA / "aiperf-0.13-c4")
    assert run.manifest.zero_unix_ns == c4.manifest.zero_unix_ns  # that one ran first
    assert run.points["start_ns"][1] == 0
    assert 30e9 < run.points["start_ns"][0] < 60e9
    assert any("open and closed" in d["what"] for d in run.manifest.doubts)


# --- through the command line


def test_import_show_bill_report_and_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = str(tmp_path / "run"), tmp_path / "r.html"
    src = str(DATA / "aiperf-0.13-c4")
    more = ["--engine", "vllm", "--model", "llama-3.1-8b", "--machine", "h100", "--slo", "ttft=90ms,tpot=20ms"]
    assert cli.main(["import", src, "--out", out, *more, "--report", str(page), "--json"]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert (summary["made_by"], summary["run"]) == ("imported", out)
    assert "AIPerf 0.13.0: profile_export.jsonl" in said.err
    assert "25 of 25 figures are those that the tool itself published" in said.err
    assert summary["points"][0]["goodput_share"] == pytest.approx(9 / 12)
    assert {v["state"] for v in summary["verdicts"]} == {"undecided"}  # one point, nothing of the engine
    assert "IMPORTED" in page.read_text()
    assert json.loads((Path(out) / "summary.json").read_text())["made_by"] == "imported"
    assert cli.main(["show", out, "--fail-if", "ttft_ms.p50>1"]) == 1
    assert "IMPORTED: measured by another tool" in capsys.readouterr().out
    assert cli.main(["bill", out, "--price-per-hour", "2", "--currency", "EUR"]) == 0
    assert cli.main(["import", src, "--out", out]) == 2
    assert "holds something already" in capsys.readouterr().err


def test_what_if_runs_on_an_imported_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = [str(DATA / n) for n in ("vllm-0.32-c4.json", "vllm-0.32-chat.json")]
    out = str(tmp_path / "run")
    given = ["--engine", "vllm", "--model", "llama-3.1-8b", "--machine", "h100"]
    assert cli.main(["import", *two, "--out", out, *given]) == 0
    assert cli.main(["what-if", out, "--apply", "fp8-kv"]) == 0
    assert "measured: meta-llama/Llama-3.1-8B" in capsys.readouterr().out


def test_the_python_call(tmp_path: Path) -> None:
    more = importing.given("sglang", slots=4, on=("h100", 2))
    found = importing.import_results([DATA / "sglang-0.5.23-c4.jsonl"], tmp_path / "run", more=more)
    assert found.result.run.manifest.engine == {"name": "sglang", "slots": 4, "devices": 2}
    assert [g["name"] for g in found.result.run.manifest.machine["gpus"]] == ["H100 SXM"] * 2
    assert all(f.agrees for f in found.checked)
    assert found.result.run.manifest.client["imported"]["checked"]["differ"] == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--engine", "nope"], "no such engine"), (["--machine", "nope"], "nope"),
     (["--devices", "2"], "of which machine"), (["--slo", "x"], "--slo"),
     (["--format", "inference-perf"], "no list of requests")],
)  # fmt: skip
def test_flags_that_cannot_be(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = str(DATA / "vllm-0.32-c4.json")
    assert cli.main(["import", src, "--out", str(tmp_path / "run"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_line_knows_every_format() -> None:
    (verbs,) = cli.parser()._subparsers._group_actions  # type: ignore[union-attr]
    flag = next(a for a in verbs.choices["import"]._actions if a.dest == "format")  # type: ignore[union-attr, index]
    assert tuple(flag.choices or ()) == results.FORMATS


@pytest.mark.parametrize("file", ["aiperf-0.13-c4", "vllm-0.32-c4.json"])
def test_too_many_chunks_are_left_out_and_told(file: str, tmp_path: Path) -> None:
    whole, _ = imported(DATA / file)
    n = len(whole.chunks)
    at_limit = importing.import_results([DATA / file], tmp_path / "a", more=results_build.Given(chunks=n)).result.run
    assert len(at_limit.chunks) == n
    run = importing.import_results([DATA / file], tmp_path / "b", more=results_build.Given(chunks=n - 1)).result.run
    assert run.requests["content_chunks"].tolist() == whole.requests["content_chunks"].tolist()
    assert any(f"there are {n:,}" in d["why"] and f"--chunks {n} " in d["next"] for d in run.manifest.doubts)
    assert len(run.chunks) == 0
    assert violations(run) == []
    assert any("chunks are left out" in d["what"] for d in run.manifest.doubts)
    assert not np.isnan(per_request(run).tpot_ms).any()
    assert dataclasses.asdict(run.manifest)["made_by"] == "imported"
