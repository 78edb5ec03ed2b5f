"""The client benchmark runs, accounts for every chunk, and says what it left out. Nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "client_accuracy.py"
RESULT = {"benchmark", "version", "taken", "machine", "load_average", "settings", "rows", "saturation", "absent",
          "warnings"}  # fmt: skip
ROW = {
    "client", "streams", "stubs", "offered_chunks_per_s", "chunks_expected", "chunks", "streams_ok", "chunks_per_s",
    "stub_chunks_per_s", "kept_share", "stamp_error_us", "coalesced_share", "intervals_hold_share", "cpu_us_per_chunk",
    "cpu_share", "ttft_ms", "gap_ms", "gap_withheld", "read_lag_p99_ms", "stub_late_us", "others_cpu_share",
    "ratio_to_whywait", "failed",
}  # fmt: skip
COMPARED = {"client", "stub", "error_percent", "nominal", "nominal_error_percent"}

if not SCRIPT.exists():
    pytest.skip("benchmarks/ is not here", allow_module_level=True)


def bench(folder: Path, *flags: str, hide: str = "") -> tuple[dict[str, Any], str]:
    """Result and printed text of a tiny trial; ``hide`` makes a module impossible to import."""
    out = folder / "out.json"
    path = [os.environ.get("PYTHONPATH", "")]
    if hide:
        (folder / f"{hide}.py").write_text("raise ImportError('hidden')\n")
        path.insert(0, str(folder))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PATH": ""}
    command = [sys.executable, str(SCRIPT), "--streams", "4", "--seconds", "0.3", "--json", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def check(row: dict[str, Any], client: str, chunks: int = 4 * 15) -> None:
    assert set(row) == ROW
    assert row["client"] == client
    assert row["failed"] is None
    assert row["chunks"] == row["chunks_expected"] == chunks  # every chunk accounted for
    assert row["streams_ok"] == row["streams"] == 4
    assert 0 < row["stamp_error_us"]["n"] <= chunks
    for key, names in (("ttft_ms", {"p50", "p95", "mean"}), ("gap_ms", {"p50", "p99"})):
        assert set(row[key]) == COMPARED
        assert all(set(row[key][k]) == names for k in COMPARED - {"nominal"})
    assert row["ttft_ms"]["stub"]["p50"] >= 50  # the stub is never early
    assert row["stub_late_us"]["p50"] >= 0
    assert set(row["ratio_to_whywait"]) == {"stamp_error_p50", "stamp_error_p99", "cpu_per_chunk", "chunks_per_s"}


def test_whywait_alone_and_what_is_missing_is_named(tmp_path: Path) -> None:
    result, text = bench(tmp_path, hide="aiohttp")
    assert set(result) == RESULT
    assert result["machine"]["cores"] >= 1
    (row,) = result["rows"]
    check(row, "whywait")
    assert set(row["ratio_to_whywait"].values()) == {1.0}
    assert row["intervals_hold_share"] in (None, 1.0)  # the truth lies in every interval that was claimed
    assert set(result["absent"]) == {"aiohttp", "aiperf"}
    assert "hidden" in result["absent"]["aiohttp"]
    for client, why in result["absent"].items():
        assert f"{client} was left out: {why}" in text
    assert "At 4 streams whywait's stamps are" in text


def test_aiohttp_beside_it_as_markdown(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    result, text = bench(tmp_path, "--clients", "whywait,aiohttp", "--markdown")
    assert result["absent"] == {}
    for row, client in zip(result["rows"], ("whywait", "aiohttp"), strict=True):
        check(row, client)
    assert result["rows"][1]["ratio_to_whywait"]["cpu_per_chunk"] > 0
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[2].strip() for line in table[:4]] == ["client", "---", "whywait", "aiohttp"]
    assert len({line.count("|") for line in table[:4]}) == 1


def test_aiperf_is_read_from_its_export(tmp_path: Path) -> None:
    """A stand-in that writes what AIPerf 0.13 writes."""
    record = {
        "metadata": {"benchmark_phase": "profiling", "request_start_ns": 10**18, "request_end_ns": 10**18 + 34 * 10**7},
        "metrics": {"time_to_first_token": {"value": 60.0, "unit": "ms"},
                    "inter_chunk_latency": {"value": [20.0] * 14, "unit": "ms"}},
        "error": None,
    }  # fmt: skip
    warm = {**record, "metadata": {**record["metadata"], "benchmark_phase": "warmup"}}
    lines = "".join(json.dumps(r) + "\n" for r in (warm, *[record] * 4))
    fake = tmp_path / "aiperf"
    fake.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--output-artifact-dir') + 1])\nout.mkdir()\n"
        f"(out / 'profile_export.jsonl').write_text({lines!r})\n"
    )
    fake.chmod(0o755)
    result, text = bench(tmp_path, "--clients", "aiperf", "--aiperf", str(fake))
    (row,) = result["rows"]
    assert set(row) == ROW
    assert row["chunks"] == row["chunks_expected"] == 60
    assert row["ttft_ms"]["stub"] is None
    assert row["ttft_ms"]["nominal_error_percent"]["p50"] == pytest.approx(20)
    assert row["gap_ms"]["nominal_error_percent"] == {"p50": 0, "p99": 0}
    assert row["cpu_us_per_chunk"] is None  # its start-up cannot be told apart
    assert "by the timetable alone" in text


def test_a_client_that_fails_is_named_and_the_exit_code_says_so(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        bench(tmp_path, "--clients", "aiperf", "--aiperf", "/bin/false")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["rows"][0]["failed"].startswith("aiperf: exit code 1")
    assert set(result["rows"][0]) == ROW


STAND_IN = """#!{python}
import json, pathlib, sys, threading, time, urllib.request

if sys.argv[1] == "--help":
    sys.exit()
config = json.loads(pathlib.Path(sys.argv[2]).read_text())
group, out = config["data"]["shared_prefix"], pathlib.Path(config["storage"]["local_storage"]["path"])
body = json.dumps({{"model": "stub", "stream": True, "max_tokens": group["output_len"],
                    "messages": [{{"role": "user", "content": "x"}}]}}).encode()
records = []


def drive():
    request = urllib.request.Request(config["server"]["base_url"] + "/v1/chat/completions", body,
                                     {{"Content-Type": "application/json"}})
    start, times = time.perf_counter(), []
    for line in urllib.request.urlopen(request):
        if b'"stub_ns"' in line:
            times.append(time.perf_counter() + 0.1)  # it reads its clock 100 ms late
    records.append({{"start_time": start, "error": None, "info": {{"response_metrics": {{"chunk_times": times}}}}}})


threads = [threading.Thread(target=drive) for _ in range(group["num_prompts_per_group"])]
[t.start() for t in threads]
[t.join() for t in threads]
out.mkdir()
(out / "per_request_lifecycle_metrics.json").write_text(json.dumps(records))
"""


def test_peers_are_judged_by_the_stub_and_a_broken_one_is_named(tmp_path: Path) -> None:
    """Stand-ins for the programs; one works but is late, one breaks, one is not there."""
    for name, text in (
        ("inference-perf", STAND_IN.format(python=sys.executable)),
        ("guidellm", f"#!{sys.executable}\nprint('starting')\nraise SystemExit('no such option: --profile')\n"),
    ):
        program = tmp_path / name / "bin" / name
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT.with_name("peers.py")), "--venvs", str(tmp_path), "--no-install",
               "--markdown", "--peers", "inference-perf,guidellm,aiperf", "--streams", "4", "--seconds", "0.3",
               "--json", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr  # since one broke
    result = json.loads(out.read_text())
    late, broken = result["rows"]
    assert (late["peer"], late["failed"], late["streams_ok"]) == ("inference-perf", None, 4)
    assert late["chunks"] == late["chunks_expected"] == late["chunks_sent"] == 60
    assert late["ttft_error_ms"] >= 100
    assert late["ttft_ms"]["stub"]["p50"] >= 50
    assert late["gap_ms"]["stub"]["mean"] == pytest.approx(20, rel=0.2)
    assert late["cpu_us_per_chunk"] > 0
    assert broken["failed"] == "exit code 1; no such option: --profile"
    assert broken["ttft_error_ms"] is broken["cpu_us_per_chunk"] is broken["chunks"] is None  # never 0
    assert set(result["absent"]) == {"aiperf"}
    assert "aiperf was left out: not installed here" in done.stdout
    assert "guidellm at 4 streams failed: exit code 1; no such option" in done.stdout
    assert {c["peer"]: c["packages"] for c in result["costs"]} == {"inference-perf": None, "guidellm": None}
    assert "| 4 | inference-perf |" in done.stdout
