"""Exports of figures: OpenMetrics by a parser, Grafana by what is exported, llm-d by its package, vLLM's by hand."""

from __future__ import annotations

import functools
import importlib.resources
import io
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, messy_runs, stream
from whywait.analyze.phases import PHASES, account
from whywait.analyze.summary import summarize
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.errors import UsageError
from whywait.report import export_families as f
from whywait.report.export import Chosen, choose
from whywait.report.export_grafana import dashboard, queries
from whywait.report.export_llmd import reports
from whywait.report.export_metrics import MOST_STEPS, write_metrics
from whywait.report.export_vllm import write_point

ZERO = 1_700_000_000_000_000_000
SLO = {"ttft_ms": 100.0}


def service(**more: Any) -> Run:
    """Two points of a service with an SLO, gauges and meters."""
    engine = {"name": "vllm", "model": "org/m", "version": "0.32"}
    first = Service(slots=2, noise=0.2, engine=engine).closed(1, 6, zero_unix_ns=ZERO, slo=SLO, **more)
    run = join([first, Service(slots=2, noise=0.2, engine=engine).closed(4, 12)])
    end = int(run.points["end_ns"].max())
    every = range(0, end, S // 4)
    rows = [*gauge_rows("running", [(t, 2.0) for t in every]), *gauge_rows("waiting", [(t, 1.0) for t in every]),
            *gauge_rows("kv_use", [(t, 0.5) for t in every]),
            *gauge_rows("power_watts", [(t, 300.0) for t in every], "gpu", gpu="0"),
            *gauge_rows("energy_joules_total", [(t, 300.0 * t / S) for t in every], "gpu", gpu="0"),
            *gauge_rows("output_tokens_total", [(t, 40.0 * t / S) for t in every])]  # fmt: skip
    read = Table.from_rows("readings", [{"answered_ns": r["asked_ns"], **r} for r in rows])
    return Run(run.manifest, run.points, run.requests, run.chunks, run.steps, read)


def text_of(chosen: Chosen, **more: Any) -> str:
    out = io.StringIO()
    write_metrics(chosen, out, **more)
    return out.getvalue()


def families_of(text: str) -> dict[str, Any]:
    """Parsed by the reference parser of OpenMetrics. It drops samples of histograms with more than one time (it keeps
    the set of samples it has seen across times), so it is given one time after another."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    found: dict[str, Any] = {}
    assert text.endswith("# EOF\n")
    family: list[str] = []
    for line in [*text.splitlines()[:-1], "# TYPE end counter"]:
        if line.startswith("# TYPE") and family:
            head = [x for x in family if x.startswith("#")]
            by_time: dict[str, list[str]] = defaultdict(list)
            for x in family:
                if not x.startswith("#"):
                    by_time[x.rpartition(" ")[2]].append(x)
            for at, lines in by_time.items():
                (got,) = parser.text_string_to_metric_families("\n".join([*head, *lines, "# EOF\n"]))
                assert got.name not in found or found[got.name].type == got.type
                have = found.setdefault(got.name, got)
                if have is not got:
                    have.samples += got.samples
                assert all(float(s.timestamp) == float(at) for s in got.samples)
            family = []
        family.append(line)
    return found


def values(found: dict[str, Any], name: str, sample: str, **labels: str) -> list[tuple[float, float]]:
    return [(float(s.timestamp), s.value) for s in found[name].samples
            if s.name == name + sample and labels.items() <= s.labels.items()]  # fmt: skip


def test_openmetrics_is_parsed_and_true() -> None:
    run = service()
    found = families_of(text_of(choose(run)))
    for name, got in found.items():
        family = next(x for x in f.FAMILIES if x.name == name)
        assert (got.type, got.unit) == (family.kind, family.unit)
    done = values(found, "whywait_requests", "_total", point="1", outcome="ok")
    assert [v for _, v in done] == sorted(v for _, v in done)
    assert (done[0][1], done[-1][1]) == (0, 12)
    assert done[-1][0] == pytest.approx((ZERO + int(run.points["end_ns"][1])) / S, abs=1e-3)
    assert values(found, "whywait_output_tokens", "_total", point="1")[-1][1] == pytest.approx(12 * 16)
    assert values(found, "whywait_prompt_tokens", "_total", point="0")[-1][1] == 600
    assert values(found, "whywait_ttft_seconds", "_count", point="1")[-1][1] == 12
    mine = run.requests["point"] == 1
    ttft = (run.requests["first_ns"] - run.requests["sent_ns"])[mine] / S
    assert values(found, "whywait_ttft_seconds", "_sum", point="1")[-1][1] == pytest.approx(ttft.sum())
    for bound in ("0.05", "0.1", "0.5", "+Inf"):
        last = values(found, "whywait_ttft_seconds", "_bucket", point="1", le=bound)[-1][1]
        assert last == (ttft <= float(bound)).sum()
    acc = account(run)
    for i, phase in enumerate(PHASES):
        if acc.phases[mine, i].any():
            told = values(found, "whywait_request_phase_seconds", "_total", point="1", phase=phase)
            assert told[-1][1] == pytest.approx(acc.phases[mine, i].sum() / S)
    assert max(v for _, v in values(found, "whywait_in_flight_requests", "", point="1")) == 4
    assert {v for _, v in values(found, "whywait_engine_kv_use_ratio", "")} == {0.5}
    assert values(found, "whywait_device_power_watts", "", gpu="0")
    good = values(found, "whywait_good_requests", "_total", point="1")[-1][1]
    assert good == (ttft <= 0.1).sum() > 0
    summary = summarize(run)["points"][1]
    assert values(found, "whywait_window_ttft_seconds", "", point="1", quantile="0.95")[-1][1] == pytest.approx(
        summary["ttft_ms"]["p95"] / 1e3
    )
    assert values(found, "whywait_good_request_energy_joules", "", point="1")


def test_each_series_has_ascending_times_and_one_value_each() -> None:
    last: dict[str, float] = {}
    text = text_of(choose(service()), step_ns=S // 10)
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, at = line.rpartition(" ")[0].rpartition(" ")[0], None, float(line.rpartition(" ")[2])
            assert last.get(series, -1.0) < at
            last[series] = at
    steps = sum(line.startswith('whywait_requests_total{run="run",point="1"') for line in text.splitlines())
    assert steps > 10
    assert steps <= MOST_STEPS + 1


def test_what_is_not_known_is_absent() -> None:
    run = make_run([{"sent_ns": 0, "first_ns": S, "last_ns": 2 * S, "end_ns": 2 * S}], stream(0, [S, 2 * S]))
    found = families_of(text_of(choose(run)))
    assert not {"whywait_prompt_tokens", "whywait_output_tokens", "whywait_tpot_seconds", "whywait_good_requests",
                "whywait_engine_kv_use_ratio", "whywait_device_power_watts"} & found.keys()  # fmt: skip
    assert found["whywait_ttft_seconds"]


def test_labels_of_others_stay_text() -> None:
    labels = json.dumps({"le": "1", "a-b": 'x"\n\\', "1st": "y", "run": "z", "__name__": "n"})
    rows = [{"asked_ns": t, "answered_ns": t, "source": "metrics/0", "name": "running", "labels": labels, "value": 1.0}
            for t in (0, S)]  # fmt: skip
    base = Service(engine={"model": 'evil"} 1\n# EOF\n'}).closed(1, 2, start=0)
    run = Run(base.manifest, base.points, base.requests, base.chunks, base.steps, Table.from_rows("readings", rows))
    found = families_of(text_of(choose(run)))
    assert found["whywait_run"].samples[0].labels["model"] == 'evil"} 1\n# EOF\n'
    told = found["whywait_engine_running_requests"].samples[0].labels
    assert told["a_b"] == 'x"\n\\'
    assert told["run"] == "run"
    assert told["label_run"] == "z"
    assert told["label___name__"] == "n"


def test_at_end_is_the_older_format_without_times() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    run = service(partial=True, partial_reason="killed")
    text = text_of(choose(run), at_end=True)
    found = {m.name: m for m in parser.text_string_to_metric_families(text)}
    assert all(s.timestamp is None for m in found.values() for s in m.samples)
    assert "# UNIT" not in text
    done = [s.value for s in found["whywait_requests"].samples if s.labels["point"] == "1"]
    assert done == [12.0]
    told = found["whywait_run_info"].samples[0].labels
    assert (told["partial"], told["partial_reason"]) == ("true", "killed")


@settings(max_examples=15)  # parsing takes its time
@given(messy_runs())
def test_any_run_gives_metrics_that_parse(run: Run) -> None:
    families_of(text_of(choose(run), step_ns=4 * S))


def test_a_reading_is_told_as_long_as_it_is_of_now() -> None:
    base = make_run([{"sent_ns": 0, "end_ns": 60 * S}])
    read = Table.from_rows("readings", [{"answered_ns": r["asked_ns"], **r} for r in gauge_rows("running", [(0, 2.0)])])
    run = Run(base.manifest, base.points, base.requests, base.chunks, base.steps, read)
    told = [float(line.rpartition(" ")[2]) for line in text_of(choose(run)).splitlines()
            if line.startswith("whywait_engine_running_requests{")]  # fmt: skip
    assert [t - told[0] for t in told] == [float(t) for t in range(16)]  # 15 s, then nothing


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    """Prometheus' le: at most the bound."""
    run = make_run([{"sent_ns": 0, "first_ns": 100 * MS, "last_ns": 2 * S, "end_ns": 2 * S}])
    lines = [line for line in text_of(choose(run), at_end=True).splitlines() if "ttft_seconds_bucket" in line]
    counts = {line.split('le="')[1].split('"')[0]: line.rpartition(" ")[2] for line in lines}
    assert (counts["0.075"], counts["0.1"], counts["0.15"]) == ("0", "1", "1")


# --- Grafana

_METRIC = re.compile(r"\bwhywait_\w+")


def test_panels_ask_for_what_is_exported() -> None:
    run = service()
    text = text_of(choose(run))
    exported = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    board = dashboard(choose(run))
    asked = {m for q in queries(board) for m in _METRIC.findall(q)}
    possible = {x.name + s for x in f.FAMILIES for s in SAMPLES[x.kind]}
    assert asked <= possible
    missing = asked - exported
    # This run has no device's busy share, no CPU time of processes; all else is there under the very name.
    assert missing == {"whywait_device_busy_ratio", "whywait_process_cpu_seconds_total"}
    assert len(asked) > 20


SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",), "info": ("_info",),
           "summary": ("", "_count", "_sum")}  # fmt: skip


def test_the_dashboard_is_whole() -> None:
    run = service()
    board = dashboard(choose(run))
    assert json.loads(json.dumps(board)) == board
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for p in board["panels"]:
        g = p["gridPos"]
        cells = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert not cells & taken
        assert g["x"] + g["w"] <= 24
        taken |= cells
        assert len({t["refId"] for t in p["targets"]}) == len(p["targets"])
    known = {v["name"] for v in board["templating"]["list"]} | {"__range"}
    used = set(re.findall(r"\$(\w+)", "".join(queries(board)))) | set(re.findall(r"\$\{(\w+)\}", json.dumps(board)))
    assert used <= known
    for q in queries(board):
        assert q.count("(") == q.count(")")
        assert q.count("{") == q.count("}")
    assert board["time"]["from"].startswith("2023-11-14T22:13:1")


# --- llm-d


@functools.cache
def schema() -> Any:
    """What checks against the package's JSON schema."""
    package, jsonschema = pytest.importorskip("llmd_benchmark_report"), pytest.importorskip("jsonschema")
    text = (importlib.resources.files(package) / "br_v0_2_json_schema.json").read_text()
    return jsonschema.Draft202012Validator(json.loads(text))


def valid(report: dict[str, Any]) -> None:
    """By the pydantic models and by the JSON schema of the package llmd-benchmark-report."""
    package = pytest.importorskip("llmd_benchmark_report")
    package.BenchmarkReportV02(**json.loads(json.dumps(report, allow_nan=False)))
    schema().validate(report)


def test_llmd_reports_are_valid_and_true() -> None:
    run = service()
    found = reports(choose(run))
    assert list(found) == [0, 1]
    summary = summarize(run)
    for number, report in found.items():
        valid(report)
        p = summary["points"][number]
        told = report["results"]["request_performance"]["aggregate"]
        assert told["requests"]["total"] == (6, 12)[number]
        assert told["requests"]["failures"] == 0
        latency = {"time_to_first_token": "ttft_ms", "time_per_output_token": "tpot_ms", "request_latency": "e2e_ms"}
        for theirs, ours in latency.items():
            for q in ("mean", "p50", "p95"):
                assert told["latency"][theirs][q] == pytest.approx(p[ours][q] / 1e3), (theirs, q)
        assert told["latency"]["inter_token_latency"]["mean"] == pytest.approx(p["itl_ms"]["mean"] / 1e3)
        assert told["throughput"]["request_rate"]["mean"] == p["requests_per_s"]
        assert told["throughput"]["output_token_rate"]["mean"] == p["output_tokens_per_s"]
        (seen,) = report["results"]["observability"]["components"]
        assert seen["aggregate"]["kv_cache_usage"]["mean"] == 50.0
        assert seen["aggregate"]["power_consumption"]["max"] == 300.0
        assert report["results"]["profiling"]["whywait"]["phases"].keys() == set(PHASES)
    load = found[1]["scenario"]["load"]["standardized"]
    assert load["concurrency"] == 4
    assert load["input_seq_len"] == {"distribution": "fixed", "value": 100.0, "min": 100, "max": 100}
    assert found[0]["run"]["eid"] == found[1]["run"]["eid"]
    assert found[0]["run"]["uid"] != found[1]["run"]["uid"]
    assert found == reports(choose(run))  # the same ids every time


def test_llmd_adds_up_engines_and_devices_and_takes_the_mean_of_shares() -> None:
    base = Service().closed(1, 6)
    end = int(base.points["end_ns"].max())
    every = range(0, end, S // 4)
    rows = [*(r for gpu, watts in (("0", 300.0), ("1", 400.0))
              for r in gauge_rows("power_watts", [(t, watts) for t in every], "gpu", gpu=gpu)),
            *(r for gpu, share in (("0", 0.2), ("1", 0.8))
              for r in gauge_rows("busy_share", [(t, share) for t in every], "gpu", gpu=gpu)),
            *(r for e in ("0", "1") for r in gauge_rows("running", [(t, 4.0) for t in every], engine=e)),
            *gauge_rows("kv_use", [(t, 0.25) for t in every], "metrics/0"),
            *gauge_rows("kv_use", [(t + S // 8, 0.75) for t in every], "metrics/1"),
            *gauge_rows("power_watts", [(t, 1e6) for t in every], "host")]  # fmt: skip
    read = Table.from_rows("readings", [{"answered_ns": r["asked_ns"], **r} for r in rows])
    run = Run(base.manifest, base.points, base.requests, base.chunks, base.steps, read)
    report = reports(choose(run))[0]
    valid(report)
    seen = report["results"]["observability"]["components"][0]["aggregate"]
    assert (seen["power_consumption"]["min"], seen["power_consumption"]["max"]) == (700.0, 700.0)
    assert seen["running_requests"]["mean"] == 8.0
    assert seen["gpu_utilization"]["mean"] == pytest.approx(50.0)
    assert seen["kv_cache_usage"]["mean"] == pytest.approx(50.0)  # though both were read at other times


def test_llmd_names_an_accelerator_only_where_it_is_known() -> None:
    bare = reports(choose(service()))[0]["scenario"]["stack"][0]["standardized"]
    assert (bare["kind"], bare["tool"], bare["tool_version"]) == ("generic", "vllm", "0.32")
    known = reports(choose(service(machine={"gpus": [{"name": "H200"}, {"name": "H200"}]})))[0]
    valid(known)
    engine = known["scenario"]["stack"][0]["standardized"]
    assert engine["kind"] == "inference_engine"
    assert (engine["accelerator"]["model"], engine["accelerator"]["count"]) == ("H200", 2)


@settings(max_examples=15)
@given(messy_runs())
def test_any_run_gives_valid_reports(run: Run) -> None:
    for report in reports(choose(run)).values():
        valid(report)


# --- vllm bench


def bench(run: Run, number: int = 0) -> dict[str, Any]:
    out = io.StringIO()
    write_point(choose(run), number, out)
    found: dict[str, Any] = json.loads(out.getvalue(), parse_constant=pytest.fail)
    return found


METRICS = ("ttft", "tpot", "itl", "e2el")
#: What vLLM 0.32 writes with --save-detailed and --percentile-metrics ttft,tpot,itl,e2el.
KEYS = {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
        "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens",
        "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts", "errors",
        "max_output_tokens_per_s", "max_concurrent_requests", "rtfx",
        *(f"{k}_{m}_ms" for m in METRICS for k in ("mean", "median", "std", "p99"))}  # fmt: skip


def test_vllm_bench_by_its_definitions() -> None:
    run = make_run(
        [{"sent_ns": S, "due_ns": 0, "first_ns": 2 * S, "last_ns": 4 * S, "end_ns": 5 * S, "prompt_tokens": 7,
          "output_tokens": 5, "content_chunks": 3},
         {"sent_ns": S, "due_ns": 0, "first_ns": 3 * S, "last_ns": 3 * S, "end_ns": 3 * S, "prompt_tokens": 9,
          "output_tokens": 1, "content_chunks": 1},
         {"sent_ns": S, "end_ns": 2 * S, "outcome": "http_error", "detail": "busy", "status": 503}],
        [*stream(0, [2 * S, 3 * S, 4 * S]), *stream(1, [3 * S]),
         {"id": 0, "t_ns": 3 * S // 2, "kind": "role"}],
        points=[{"mode": "rate", "target": 2.0, "start_ns": 0, "end_ns": 10 * S}],
        slo={"ttft_ms": 1500.0, "tpot_ms": 600.0}, workload={"arrivals": "poisson"}, zero_unix_ns=ZERO,
        engine={"model": "org/m"}, endpoint={"dialect": "completions"},
    )  # fmt: skip
    found = bench(run)
    assert found.keys() >= KEYS
    assert all(k in KEYS or re.match(r"whywait_|p(50|90|95)_", k) for k in found)
    assert (found["duration"], found["completed"], found["failed"]) == (10.0, 2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (16, 6)
    assert found["output_throughput"] == 0.6
    assert found["ttfts"] == [1.0, 2.0, None]  # from sent, not from due; none is null
    assert found["latencies"] == [3.0, 2.0, None]  # the tail is not in it
    assert found["itls"] == [[1.0, 1.0], [], []]  # the role is no chunk of content
    assert found["output_lens"] == [5, 1, 0]
    assert found["errors"] == ["", "", "http_error busy"]
    assert found["mean_tpot_ms"] == 500.0  # 2 s over 4 tokens; of one token there is none
    assert found["median_ttft_ms"] == 1500.0
    assert found["p99_e2el_ms"] == pytest.approx(np.percentile([3000, 2000], 99))
    assert found["request_goodput"] == 0.1
    assert (found["request_rate"], found["burstiness"], found["max_concurrency"]) == (2.0, 1.0, None)
    assert (found["backend"], found["model_id"]) == ("openai", "org/m")
    assert found["date"] == "20231114-221330"  # vLLM writes it after the run
    assert found["generated_texts"] == [None] * 3
    # Stream events by second since the first was sent: one in second 1, two in 2, one in 3. Both requests in 0 and 1.
    assert found["max_output_tokens_per_s"] == 2.0
    assert found["max_concurrent_requests"] == 2


def test_vllm_bench_tells_burstiness_of_poisson_arrivals_only() -> None:
    def told(mode: str, arrivals: str) -> Any:
        points = [{"mode": mode, "target": 2.0, "start_ns": 0, "end_ns": S}]
        return bench(make_run([{"sent_ns": 0, "end_ns": S}], points=points, workload={"arrivals": arrivals}))[
            "burstiness"
        ]

    assert told("rate", "poisson") == 1.0
    assert told("rate", "constant") is None
    assert told("concurrency", "poisson") is None


def test_vllm_bench_counts_one_token_as_within_any_tpot() -> None:
    """As vLLM does: there is no time between tokens to be too long."""
    row = {"sent_ns": 0, "first_ns": S, "last_ns": S, "end_ns": S, "output_tokens": 1}
    found = bench(make_run([row], stream(0, [S]), slo={"tpot_ms": 50.0}))
    assert found["request_goodput"] == 1.0


def test_llmd_reads_our_vllm_bench_file_as_vllms_own(tmp_path: Path) -> None:
    convert = pytest.importorskip("llmd_benchmark_report.native_to_br0_2")
    run = service()
    with (tmp_path / "bench.json").open("w") as out:
        write_point(choose(run), 1, out)
    told = convert.import_vllm_benchmark(str(tmp_path / "bench.json")).results.request_performance.aggregate
    mine = run.requests["point"] == 1
    ttft = (run.requests["first_ns"] - run.requests["sent_ns"])[mine] / MS
    assert told.latency.time_to_first_token.mean == pytest.approx(ttft.mean())
    assert told.latency.time_to_first_token.p95 == pytest.approx(np.percentile(ttft, 95))
    assert (told.requests.total, told.requests.failures) == (12, 0)
    assert told.requests.output_length.mean == 16


def test_vllm_bench_knows_no_zero_for_what_is_unknown() -> None:
    found = bench(make_run([{"sent_ns": 0, "end_ns": S, "outcome": "timeout"}], partial=True, partial_reason="killed"))
    assert found["mean_ttft_ms"] is None
    assert found["request_goodput"] is None
    assert found["date"] is None
    assert (found["whywait_partial"], found["whywait_partial_reason"]) == (True, "killed")
    bare = bench(make_run([{"sent_ns": 0, "first_ns": MS, "last_ns": S, "end_ns": S}], stream(0, [MS, S])))
    assert bare["total_output_tokens"] is None
    assert bare["output_throughput"] is None
    assert bare["mean_ttft_ms"] == 1.0


@settings(max_examples=40)
@given(messy_runs(orderly=False))
def test_any_run_gives_bench_results(run: Run) -> None:
    for number in run.points["point"].tolist():
        found = bench(run, number)
        n = int((run.requests["point"] == number).sum())
        assert {len(v) for v in found.values() if isinstance(v, list)} == {n}
        assert all(v is None or isinstance(v, str) or math.isfinite(v) for v in found.values()
                   if not isinstance(v, list))  # fmt: skip


def test_chosen_points_and_requests_must_exist() -> None:
    run = service()
    for ask, said in (({"point": 7}, "no point 7"), ({"ids": [3, 99]}, "no request 99"),
                      ({"point": 1, "ids": [0]}, "no request 0 at point 1")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            choose(run, **ask)
