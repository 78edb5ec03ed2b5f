"""Files that are damaged, hostile or huge: one line that names the file and what to do, or a sound Run; never more
memory than a bound, never a traceback."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests import imported_files as files
from tests.imported_files import DATA, imported, put
from whywait import cli
from whywait.convert import results, results_file
from whywait.convert.results_part import ended
from whywait.core.check import violations
from whywait.errors import UsageError

SMALL = ("vllm-0.32-c4.json", "sglang-0.5.23-failures.jsonl", "guidellm-0.8.1-failures.json")
FOLDERS = ("aiperf-0.13-failures/profile_export.jsonl", "inference-perf-0.7-c4/per_request_lifecycle_metrics.json")


def refused(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What ``whywait import`` says of it: a line, and one with a hint."""
    assert cli.main(["import", str(path), "--out", str(tmp_path / "run"), *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("whywait: ")
    assert len(said.strip().splitlines()) == 2
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    return said


WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "of blanks": (b"  \n\n ", "is empty"),
    "text": (b"hello\nworld\n", "is of no known format"),
    "another object": (b'{"a": 1}', "is of no known format"),
    "an empty list": (b"[]", "is of no known format"),
    "cut off": (b'{"endpoint_type": "vllm", "ttfts": [1', "was it copied whole"),
    "nested deep": (b'{"endpoint_type": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep"),
    "zipped and cut": (gzip.compress(b'{"endpoint_type": "vllm"}' * 9999)[:60], "is damaged"),
    "zip of nothing": (gzip.compress(b""), "is empty"),
    "only totals of vllm": (b'{"endpoint_type": "vllm", "request_throughput": 1}', "--save-detailed"),
    "only totals of sglang": (
        b'{"backend": "x", "dataset_name": "y", "max_concurrency": 1, "request_throughput": 1}', "--output-details"),
    "a list that is none": (b'{"endpoint_type": "vllm", "ttfts": 3, "itls": []}', "'ttfts' should be a list"),
    "lists of unlike length": (
        b'{"endpoint_type": "vllm", "ttfts": [1], "itls": [], "input_lens": [1], "output_lens": [1]}',
        "'itls' should hold 1"),
    "a summary of inference-perf": (b'{"load_summary": {}, "successes": {}}', "give the folder"),
    "totals of aiperf alone": (b'{"aiperf_version": "1", "request_throughput": {}}', "is not beside it"),
    "guidellm without requests": (b'{"benchmarks": [{"requests": {}, "metrics": {}}]}', "no request in it"),
    "vllm without requests": (
        b'{"endpoint_type": "vllm", "ttfts": [], "itls": [], "input_lens": [], "output_lens": []}', "no request in it"),
    "guidellm of numbers": (b'{"guidellm_version": 1, "benchmarks": [1]}', "no list of benchmarks"),
    "zeros": (b"\0" * 5000, "is of no known format"),
    "no utf-8": (b"\xff\xfe{\0", "is of no known format"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_result_is_told_in_one_line(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, said = WRONG[what]
    path = tmp_path / "file"
    path.write_bytes(raw)
    assert said in refused(path, tmp_path, capsys)


def test_paths_that_are_not_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in refused(tmp_path / "nowhere", tmp_path, capsys)
    (tmp_path / "folder").mkdir()
    assert "no result file in this folder" in refused(tmp_path / "folder", tmp_path, capsys)


def test_a_folder_of_results_is_a_sweep_and_what_is_none_of_them_is_passed_over(tmp_path: Path) -> None:
    for c in (1, 2):
        put(tmp_path / f"c{c}.json", files.vllm_2025(max_concurrency=c))
    put(tmp_path / "notes.json", {"a": 1})
    put(tmp_path / "log.txt", "x")
    run, _ = imported(tmp_path)
    assert run.points["target"].tolist() == [1.0, 2.0]


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"ttfts": [-0.5, 0.25, 0.0]}, "ttfts: a negative time"),
    "text": ({"ttfts": ["fast", 0.25, 0.0]}, "ttfts: a number was expected, found str"),
    "infinite": ({"ttfts": [float("inf"), 0.25, 0.0]}, "ttfts: infinite"),
    "a million years": ({"ttfts": [1e14, 0.25, 0.0]}, "longer than a hundred days"),
    "hundreds of digits": ({"output_lens": [10**400, 3, 0]}, "output_lens: a number of hundreds of digits"),
    "half a token": ({"output_lens": [2.5, 3, 0]}, "output_lens: no count"),
    "true": ({"input_lens": [True, 10, 10]}, "input_lens: a number was expected, found bool"),
    "gaps of text": ({"itls": [["x", 0.25], [0.5, 0.25], []]}, "itls: a number"),
    "a negative gap": ({"itls": [[-0.25, 0.25], [0.5, 0.25], []]}, "itls: a negative time"),
    "start before time": ({"start_times": [-1.0, 0.0, 0.0]}, "start_times: no time"),
    "a huge start": ({"start_times": [1e300, 0.0, 0.0]}, "start_times: no time"),
    "a figure of text": ({"mean_ttft_ms": "n/a"}, "mean_ttft_ms: a number"),
}  # fmt: skip


@pytest.mark.parametrize("what", VALUES)
def test_a_value_that_cannot_be_is_null_and_told_and_costs_no_other(what: str, tmp_path: Path) -> None:
    more, said = VALUES[what]
    run, _ = imported(put(tmp_path / "x.json", files.vllm_2025(**more)))
    assert violations(run) == []
    assert len(run.requests) == 3
    (doubt,) = [d for d in run.manifest.doubts if "cannot be" in d["what"]]
    assert said in doubt["why"]


def test_nan_is_null_and_text_that_is_no_utf_8_does_not_matter(tmp_path: Path) -> None:
    row = files.vllm_2025(ttfts=[float("nan"), 0.25, 0.0], mean_tpot_ms=float("nan"))
    path = tmp_path / "x.json"
    path.write_bytes(json.dumps(row).encode().replace(b'"generated_texts": ["a"', b'"generated_texts": ["\xff\xfe"'))
    run, _ = imported(path)
    assert violations(run) == []
    assert len(run.requests) == 3
    assert run.requests["first_ns"].tolist()[1] == 250e6


def test_a_line_cut_off_at_the_end_costs_only_itself(tmp_path: Path) -> None:
    whole = (DATA / "aiperf-0.13-c4/profile_export.jsonl").read_bytes()
    path = tmp_path / "profile_export.jsonl"
    path.write_bytes(whole[:-300])
    run, _ = imported(path)
    assert len(run.requests) == 11
    assert any("cut off while it was written" in d["why"] for d in run.manifest.doubts)
    path.write_bytes(b"garbage\n" * 5000 + whole)
    with pytest.raises(UsageError, match=r"no JSON|no object"):
        imported(path, form="aiperf")


def test_an_error_of_an_engine_is_told_without_its_text() -> None:
    trace = (
        "Traceback (most recent call last):\n  prompt: my secret\naiohttp.client_exceptions.ServerDisconnectedError: x"
    )
    assert ended(trace)["outcome"] == "reset"
    assert "secret" not in str(ended(trace))
    assert ended("Service Unavailable: {secret}")["status"] == 503
    assert ended("HTTPStatusError(\"Client error '404 Not Found' for url\")")["outcome"] == "protocol"
    assert ended("", status=404)["fault"] == "user"
    assert ended("asyncio.exceptions.TimeoutError")["outcome"] == "timeout"
    assert ended("x" * 10_000_000)["outcome"] == "protocol"


def test_no_more_than_a_bound_is_read_of_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "DOCUMENT_BYTES", 3 * results_file.MIB)
    row = json.dumps(files.vllm_2025(endpoint_type="vllm", filler="x" * 4 * results_file.MIB))
    said = refused(put(tmp_path / "x.json", row), tmp_path, capsys)
    assert "more than 3 MiB in one JSON document" in said or "longer than 3 MiB" in said
    assert "jq" in said
    bomb = tmp_path / "x.json.gz"  # a small file that would be a large one
    bomb.write_bytes(gzip.compress(b'{"endpoint_type": "' + bytes(60 * results_file.MIB), 1))
    assert bomb.stat().st_size < results_file.MIB
    tracemalloc.start()
    refused(bomb, tmp_path, capsys)
    assert tracemalloc.get_traced_memory()[1] < 40 * results_file.MIB
    tracemalloc.stop()


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    one = (DATA / "aiperf-0.13-c4/profile_export.jsonl").read_text().splitlines()[-1]
    padded = one[:-1] + ', "padding": "' + "x" * 20_000 + '"}\n'
    path = put(tmp_path / "profile_export.jsonl", padded * 1000)  # 21 MB
    tracemalloc.start()
    (source,) = results.read([path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source.parts[0].requests) == 1000
    assert peak < 10 * results_file.MIB


def test_yaml_needs_a_package_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    said = refused(DATA / "guidellm-0.8.1-r6.yaml", tmp_path, capsys)
    assert "needs PyYAML" in said
    assert "kind=json" in said


def test_yaml_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    path = put(tmp_path / "x.yaml", "benchmarks:\n- [unclosed")
    assert "no YAML" in refused(path, tmp_path, capsys)
    put(path, "benchmarks: !!python/object/apply:os.system ['echo no']\n")
    assert "no YAML" in refused(path, tmp_path, capsys)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _leaves(inner, (*path, key))
    return found


ODD = (None, -1, 0, 1e308, -1e308, 10**30, float("nan"), float("inf"), "", "x", True, [], {}, [None], {"a": None}, 3.5)


@pytest.mark.parametrize("name", [*SMALL, *FOLDERS])
def test_any_change_of_a_file_gives_a_sound_run_or_one_line(name: str, tmp_path: Path) -> None:
    """60 files with one to six values replaced by odd ones, anywhere in them."""
    rng = random.Random(name)
    raw = (DATA / name).read_text()
    rows = [json.loads(line) for line in raw.splitlines()] if name.endswith(".jsonl") else [json.loads(raw)]
    places = [(i, p) for i, row in enumerate(rows) for p in _leaves(row)]
    path, runs = tmp_path / Path(name).name, 0
    for _ in range(60):
        copy = json.loads(json.dumps(rows))
        for i, where in rng.sample(places, rng.randint(1, 6)):
            holder = copy[i]
            try:
                for key in where[:-1]:
                    holder = holder[key]
                holder[where[-1]] = rng.choice(ODD)
            except (TypeError, KeyError, IndexError):
                continue
        put(path, "\n".join(map(json.dumps, copy)))
        try:
            run, _ = imported(path)
        except UsageError:  # anything else fails
            continue
        runs += 1
        assert violations(run) == [], name
    assert runs > 30
