"""Engines as data: the vocabulary, finding out which one answers, and what the real ones were seen to give."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from whywait.core.columns import REQUESTS
from whywait.engines import COUNTERS, ENGINES, GAUGES, HISTOGRAMS, LIMITS, EngineTable, by_name, detect
from whywait.engines.llama_cpp import slot_gauges
from whywait.probe.prometheus import canonical, page_facts, parse

SHARED = Path(__file__).parents[2] / "shared" / "engines"
TABLES = list(ENGINES.values())


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_tables_speak_the_vocabulary(table: EngineTable) -> None:
    for metrics in (table.metrics, table.old_metrics):
        for native, ours in metrics.items():
            assert native.startswith(table.metric_prefixes)
            assert {m.name for m in ours} <= GAUGES.keys() | COUNTERS.keys()
    for native in (*table.histograms, *table.old_histograms):
        assert native.startswith(table.metric_prefixes)
    assert {*table.histograms.values(), *table.old_histograms.values()} <= HISTOGRAMS.keys()
    assert {name for gauges in table.info.values() for name in gauges} <= GAUGES.keys()
    assert table.sums.keys() | table.late_counters | {p for v in table.sums.values() for p in v} <= COUNTERS.keys()
    assert table.flags.keys() <= LIMITS.keys()
    assert set(table.request_fields.values()) <= {c.name for c in REQUESTS}
    for pattern in table.log_patterns.values():
        assert re.compile(pattern).groups == 1


def test_names_do_not_mix() -> None:
    names = [*GAUGES, *COUNTERS, *HISTOGRAMS]
    assert len(names) == len(set(names))
    assert all(n.endswith("_total") for n in COUNTERS)
    assert not [n for n in (*GAUGES, *HISTOGRAMS) if n.rpartition("_")[2] in ("bucket", "sum", "count")]


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ({"metrics_text": "# HELP vllm:x y\nvllm:num_requests_running 0"}, "vllm"),
        ({"metrics_text": "llamacpp:requests_processing 0"}, "llama.cpp"),
        ({"metrics_text": "python_info 1"}, None),
        ({"headers": {"server": "llama.cpp"}}, "llama.cpp"),
        ({"headers": {"Server": "uvicorn"}}, None),
        ({"headers": {"Server": "uvicorn"}, "models_json": {"data": [{"owned_by": "vllm"}]}}, "vllm"),
        ({"models_json": {"data": [{"id": "x", "owned_by": "llamacpp"}]}}, "llama.cpp"),
        ({"models_json": {"data": [{"owned_by": "openai"}, 3]}}, None),
        ({"models_json": ["data"]}, None),
        ({"models_json": {"data": None}}, None),
        ({"metrics_text": "vllm:x 1", "headers": {"Server": "llama.cpp"}}, "vllm"),
        ({}, None),
    ],
)
def test_detect(args: dict[str, Any], want: str | None) -> None:
    found = detect(**args)
    assert (found.name if found else None) == want


def test_by_name() -> None:
    assert by_name("vllm") is ENGINES["vllm"]
    assert by_name("nobody") is by_name(None) is None


def slot(n_ctx: int = 512, held: int | None = None, busy: bool = False, decoded: int = 0) -> dict[str, Any]:
    """As build 11549 answers; a slot that never worked has no token fields."""
    out: dict[str, Any] = {"id": 0, "n_ctx": n_ctx, "speculative": False, "is_processing": busy}
    if held is not None:
        token = {"has_next_token": busy, "n_remain": 5 if busy else -1, "n_decoded": decoded}
        out |= {"id_task": 1, "n_prompt_tokens": held, "n_prompt_tokens_processed": 1, "next_token": [token]}
    return out


def test_slots_fresh() -> None:
    got = slot_gauges([slot(), slot()])
    assert got["slots_total"] == 2
    assert got["slots_busy"] == got["slots_prefilling"] == got["kv_tokens_used"] == 0
    assert "kv_use" not in got
    assert "slot_kv_use_max" not in got


def test_slots_at_work() -> None:
    slots = [slot(held=128, busy=True, decoded=8), slot(held=256, busy=True), slot(held=100), slot()]
    got = slot_gauges(slots, unified=False)
    assert (got["slots_busy"], got["slots_prefilling"], got["output_tokens_in_flight"]) == (2, 1, 8)
    assert (got["kv_tokens_used"], got["kv_tokens_idle"], got["kv_tokens_total"]) == (384, 100, 2048)
    assert got["kv_use"] == 384 / 2048
    assert got["slot_kv_use_max"] == 0.5
    assert slot_gauges(slots, unified=True)["kv_use"] == 384 / 512
    assert set(got) <= GAUGES.keys()


def test_slots_do_not_guess_the_space() -> None:
    assert "kv_use" not in slot_gauges([slot(held=300, busy=True), slot(held=100)])
    assert slot_gauges([slot(held=300, busy=True), slot(held=300)])["kv_tokens_total"] == 1024  # more than one slot's
    assert slot_gauges([slot(held=300, busy=True)])["kv_use"] == 300 / 512  # a single slot is the space


def test_slots_of_older_versions() -> None:
    old = {"id": 0, "n_ctx": 512, "is_processing": True, "next_token": {"n_decoded": 3}}
    got = slot_gauges([old, slot()])
    assert got == {"slots_total": 2, "slots_busy": 1, "slots_prefilling": 0, "output_tokens_in_flight": 3}
    assert slot_gauges([]) == {
        "slots_total": 0, "slots_busy": 0, "slots_prefilling": 0, "output_tokens_in_flight": 0,
        "kv_tokens_used": 0, "kv_tokens_idle": 0,
    }  # fmt: skip


def page(path: str) -> dict[str, float]:
    """Canonical values of a recorded page, summed over labels (buckets apart)."""
    file = SHARED / path
    if not file.exists():
        pytest.skip(f"{file} is not there")
    text = file.read_text()
    table = detect(metrics_text=text)
    assert table is not None
    assert table.name == ("vllm" if path.startswith("vllm") else "llama.cpp")
    out: dict[str, float] = {}
    for s in canonical(parse(text).samples, table):
        if not s.name.endswith("_bucket") or s.labels["le"] == "+Inf":
            out[s.name] = out.get(s.name, 0) + s.value
    return out


@pytest.mark.shared
def test_llama_cpp_recorded() -> None:
    got = page("llama_cpp/metrics.txt")
    assert got == {
        "prompt_tokens_computed_total": 1028, "cached_tokens_total": 498, "prompt_tokens_total": 1526,
        "prefill_seconds_total": 5.75956, "output_tokens_total": 1216, "decode_seconds_total": 91.427,
        "decode_steps_total": 322, "draft_rounds_total": 0, "draft_tokens_total": 0, "accepted_tokens_total": 0,
        "running": 0, "waiting": 0,
    }  # fmt: skip
    assert page("llama_cpp/metrics_idle.txt")["prompt_tokens_total"] == 0


@pytest.mark.shared
def test_vllm_recorded() -> None:
    got = page("vllm/smollm_preempt_metrics.txt")
    want = {
        "running": 0, "waiting": 0, "kv_use": 0, "requests_total": 36, "rejections_total": 0,
        "prompt_tokens_total": 2461, "prompt_tokens_computed_total": 2173, "cached_tokens_total": 288,
        "output_tokens_total": 2955,
        "preemptions_total": 7, "prefix_queries_total": 2461, "prefix_hits_total": 288, "kv_tokens_total": 1280,
        "decode_steps_total": 946, "ttft_seconds_count": 36, "ttft_seconds_bucket": 36, "itl_seconds_count": 2919,
        "tpot_seconds_count": 36, "e2e_seconds_count": 36, "queue_seconds_sum": 1.6155276999979833,
        "prefill_seconds_sum": 21.49304864700298, "prefill_seconds_total": 21.49304864700298,
        "decode_seconds_total": 354.8086629149989, "iteration_tokens_sum": 5128,
    }  # fmt: skip
    assert {k: got[k] for k in want} == want
    # What makes sense by itself: computed + cached = all, and every iteration's tokens are prompt or output.
    assert got["prompt_tokens_computed_total"] + got["cached_tokens_total"] == got["prompt_tokens_total"]
    assert got["itl_seconds_count"] == got["output_tokens_total"] - got["requests_total"]
    assert got["iteration_tokens_sum"] == got["prompt_tokens_computed_total"] + got["output_tokens_total"]


@pytest.mark.shared
def test_vllm_recorded_speculation_and_idle() -> None:
    spec = page("vllm/spec_ngram_metrics.txt")
    assert (spec["draft_rounds_total"], spec["draft_tokens_total"], spec["accepted_tokens_total"]) == (576, 1656, 1656)
    idle = page("vllm/metrics_idle.txt")
    assert idle["output_tokens_total"] == 0
    assert "draft_tokens_total" not in idle  # absent, not 0
    text = (SHARED / "vllm/spec_ngram_metrics.txt").read_text()
    facts = page_facts(parse(text).samples, ENGINES["vllm"])
    assert facts["num_gpu_blocks"].isdigit()
    assert facts["enable_prefix_caching"] in ("True", "False")


@pytest.mark.shared
def test_llama_cpp_recorded_answers() -> None:
    file = SHARED / "llama_cpp" / "errors_and_misc.txt"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    text = file.read_text()
    models = next(json.loads(line) for line in text.splitlines() if line.startswith('{"models"'))
    found = detect(models_json=models)
    assert found is not None
    assert found.name == "llama.cpp"
    timings = json.loads(re.findall(r"^\{.*\"timings\".*\}$", text, re.M)[0])
    for path in ("timings.prompt_ms", "timings.predicted_ms", "timings.prompt_n", "timings.cache_n"):
        assert path in found.request_fields
        assert isinstance(timings["timings"][path.partition(".")[2]], int | float)
