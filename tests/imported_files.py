"""Result files of other tools: real ones (tests/data/import, see its README) and constructed ones of older versions,
written by what the sources of those versions say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whywait.analyze import published
from whywait.convert import results
from whywait.convert.results_build import Given, build
from whywait.convert.results_part import Source, definitions
from whywait.core.run import Run

DATA = Path(__file__).parent / "data" / "import"
#: Real files, with the tool that their content gives away.
REAL = {
    "vllm-0.32-c4.json": "vllm", "vllm-0.32-chat.json": "vllm", "vllm-0.32-r8.json": "vllm",
    "vllm-0.32-failures.json": "vllm", "vllm-0.32-on-vllm-chat.json": "vllm", "vllm-0.32-on-vllm-c4.json": "vllm",
    "sglang-0.5.23-c4.jsonl": "sglang", "sglang-0.5.23-r8.jsonl": "sglang", "sglang-0.5.23-failures.jsonl": "sglang",
    "aiperf-0.13-c4": "aiperf", "aiperf-0.13-r6": "aiperf", "aiperf-0.13-failures": "aiperf",
    "aiperf-0.3-c4": "aiperf", "aiperf-0.3-r6": "aiperf", "aiperf-0.3-failures": "aiperf",
    "guidellm-0.8.1-c4.json": "guidellm", "guidellm-0.8.1-r6.yaml": "guidellm",
    "guidellm-0.8.1-failures.json": "guidellm", "guidellm-0.8.1-on-vllm.json": "guidellm",
    "inference-perf-0.7-c4": "inference-perf", "inference-perf-0.7-rates": "inference-perf",
    "inference-perf-0.7-failures": "inference-perf",
}  # fmt: skip


def imported(*paths: Path, form: str = "auto", **given: Any) -> tuple[Run, list[Source]]:
    sources = results.read(paths, form)
    return build(sources, Given(**given)), sources


def compared(run: Run, sources: list[Source]) -> tuple[list[published.Figure], list[dict[str, str]]]:
    parts = [(s, p) for s in sources for p in s.parts]
    found = published.figures(run, {i: p.published for i, (_, p) in enumerate(parts)})
    return found, published.disagreements(found, {i: definitions(s, p) for i, (s, p) in enumerate(parts)})


def put(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def vllm_2025(**more: Any) -> dict[str, Any]:
    """vLLM's benchmark_serving.py of 2025: no start times, no latencies; the goodput key had a colon in it."""
    return {
        "date": "20250102-030405", "backend": "vllm", "model_id": "m", "tokenizer_id": "m", "num_prompts": 3,
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2, "duration": 2.0, "completed": 2,
        "total_input_tokens": 20, "total_output_tokens": 6, "request_throughput": 1.0, "request_goodput:": None,
        "output_throughput": 3.0, "total_token_throughput": 13.0, "input_lens": [10, 10, 10],
        "output_lens": [3, 3, 0], "ttfts": [0.5, 0.25, 0.0], "itls": [[0.25, 0.25], [0.5, 0.25], []],
        "generated_texts": ["a", "b", ""], "errors": ["", "", "Too Many Requests"], "mean_ttft_ms": 375.0,
        "mean_tpot_ms": 312.5, **more,
    }  # fmt: skip


def sglang_2025(**more: Any) -> dict[str, Any]:
    """SGLang's bench_serving.py of 2025: no tag, no server_info."""
    return {
        "backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": None,
        "sharegpt_output_len": None, "random_input_len": 8, "random_output_len": 4, "random_range_ratio": 0.0,
        "duration": 1.0, "completed": 2, "total_input_tokens": 16, "total_output_tokens": 8,
        "total_output_tokens_retokenized": 8, "request_throughput": 2.0, "input_throughput": 16.0,
        "output_throughput": 8.0, "mean_e2e_latency_ms": 400.0, "mean_ttft_ms": 100.0, "mean_itl_ms": 100.0,
        "input_lens": [8, 8], "output_lens": [4, 4], "ttfts": [0.1, 0.1], "itls": [[0.1] * 3, [0.1] * 3],
        "generated_texts": ["", ""], "errors": ["", ""], **more,
    }  # fmt: skip


def aiperf_0_3(folder: Path, **more: Any) -> Path:
    """AIPerf 0.3: no credit stamp, no phase kinds; its configuration had ``loadgen``."""
    t = 1_700_000_000_000_000_000
    rows = []
    for i in range(3):
        at = t + i * 500_000_000
        rows.append({
            "metadata": {"session_num": i, "x_request_id": f"r{i}", "x_correlation_id": f"c{i // 2}",
                         "turn_index": i % 2, "request_start_ns": at,
                         "request_ack_ns": at + 4_000_000, "request_end_ns": at + 400_000_000,
                         "worker_id": "w", "record_processor_id": "p", "benchmark_phase": "profiling",
                         "was_cancelled": i == 2, **more},
            "metrics": {"time_to_first_token": {"value": 100.0, "unit": "ms"},
                        "request_latency": {"value": 400.0, "unit": "ms"},
                        "inter_chunk_latency": {"value": [100.0, 200.0], "unit": "ms"},
                        "output_sequence_length": {"value": 3, "unit": "tokens"},
                        "input_sequence_length": {"value": 7, "unit": "tokens"}},
            "error": {"code": 499, "type": "RequestCancellationError", "message": "x"} if i == 2 else None,
        })  # fmt: skip
    put(folder / "profile_export_aiperf.json", {
        "request_throughput": {"unit": "requests/sec", "avg": 1.6}, "time_to_first_token": {"unit": "ms", "avg": 100.0},
        "request_count": {"unit": "requests", "avg": 2.0},
        "input_config": {"endpoint": {"model_names": ["m"], "url": "http://me:secret@host:8000/v1?key=s"},
                         "loadgen": {"concurrency": 2, "request_count": 3}},
    })  # fmt: skip
    return put(folder / "profile_export.jsonl", "\n".join(map(json.dumps, rows)) + "\n")


def guidellm_0_2() -> dict[str, Any]:
    """GuideLLM 0.2 and 0.3: a request holds its own times; no schema version."""

    def row(at: float, **more: Any) -> dict[str, Any]:
        return {
            "type_": "generative_text_response", "request_id": "r", "request_type": "chat_completions",
            "scheduler_info": {"requested": True, "targeted_start_time": at - 0.01, "process_id": 0},
            "prompt": "secret prompt", "output": "secret answer", "prompt_tokens": 9, "output_tokens": 5,
            "start_time": at, "end_time": at + 0.6, "first_token_time": at + 0.1, "last_token_time": at + 0.5,
            "request_latency": 0.6, "time_to_first_token_ms": 100.0, "inter_token_latency_ms": 100.0, **more,
        }  # fmt: skip

    def mean(value: float) -> dict[str, Any]:
        return {"successful": {"mean": value, "count": 2}, "errored": None}

    failed = row(1002.0, type_="generative_text_error", error="ReadTimeout('secret')", output=None,
                 first_token_time=None, last_token_time=None, output_tokens=None)  # fmt: skip
    return {"benchmarks": [{
        "type_": "generative_benchmark", "start_time": 1000.0, "end_time": 1003.0,
        "args": {"strategy": {"type_": "constant", "rate": 1.0, "max_concurrency": None}},
        "worker": {"backend_target": "http://host:1", "backend_model": "m"},
        "requests": {"successful": [row(1000.0), row(1001.0)], "incomplete": [], "errored": [failed], "total": None},
        "metrics": {"request_totals": {"successful": 2, "errored": 1, "incomplete": 0, "total": 3},
                    "time_to_first_token_ms": mean(100.0), "inter_token_latency_ms": mean(100.0)},
    }]}  # fmt: skip


def inference_perf_0_2() -> list[dict[str, Any]]:
    """inference-perf 0.1 … 0.4: tokens and their times at the top of ``info``; no usage."""
    return [
        {"start_time": 50.0, "end_time": 51.0, "request": "secret", "response": "secret",
         "info": {"input_tokens": 4, "output_tokens": 3, "output_token_times": [50.2, 50.6, 51.0]}, "error": None},
        {"start_time": 50.5, "end_time": 50.6, "request": "secret", "response": "",
         "info": {"input_tokens": 4, "output_tokens": 0, "output_token_times": []},
         "error": {"error_type": "ClientConnectorError", "error_msg": "Cannot connect to host secret"}},
    ]  # fmt: skip
