"""TensorRT-LLM, by its documentation: never run here.

``trtllm-serve`` publishes ``trtllm_*`` at ``/prometheus/metrics`` when its configuration file holds
``return_perf_metrics: true`` (its ``/metrics`` is JSON, and reading it takes the entries away). The same engine under
Triton publishes ``nv_trt_llm_*`` at Triton's own ``/metrics``, a port apart: give it by ``--metrics-url``.
"""

from __future__ import annotations

from whywait.engines.table import EngineTable, Metric

_P, _T = "trtllm_", "nv_trt_llm_"
_REQUESTS, _BLOCKS = "request_type", "kv_cache_block_type"

TABLE = EngineTable(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    driven=False,
    metric_prefixes=(_P, _T),
    owned_by=("tensorrt_llm",),
    metrics={
        _P + "request_success_total": (Metric("requests_total"),),
        _P + "kv_cache_utilization": (Metric("kv_use"),),
        _P + "kv_cache_hit_rate": (Metric("prefix_hit_rate"),),
        _T + "request_metrics": (
            Metric("running", where=((_REQUESTS, "scheduled"),)),
            Metric("waiting", where=((_REQUESTS, "waiting"),)),
            Metric("slots_total", where=((_REQUESTS, "max"),)),
        ),
        _T + "kv_cache_block_metrics": (Metric("kv_use", where=((_BLOCKS, "fraction"),)),),
        _T + "inflight_batcher_metrics": (
            Metric("retracted", where=(("inflight_batcher_specific_metric", "paused_requests"),)),
        ),
    },
    histograms={
        _P + "time_to_first_token_seconds": "ttft_seconds",
        _P + "time_per_output_token_seconds": "tpot_seconds",
        _P + "e2e_request_latency_seconds": "e2e_seconds",
        _P + "request_queue_time_seconds": "queue_seconds",
    },
    late_counters=frozenset({"requests_total"}),
    flags={
        "slots": "--max_batch_size N",
        "kv_space": "--kv_cache_free_gpu_memory_fraction F",
        "kv_dtype": "kv_cache_config: {dtype: fp8} in --config FILE",
        "context": "--max_seq_len N",
        "token_budget": "--max_num_tokens N",
        "prefill_chunk": "enable_chunked_prefill: true in --config FILE, with --max_num_tokens N",
        "prefix_cache": "kv_cache_config: {enable_block_reuse: true} in --config FILE",
        "kv_offload": "kv_cache_config: {host_cache_size: BYTES} in --config FILE",
        "speculation": "speculative_config in --config FILE",
        "weight_dtype": "a checkpoint of fewer bits",
        "frontend": "--num_postprocess_workers N",
        "tensor_parallel": "--tp_size N",
        "metrics": "return_perf_metrics: true in --config FILE",
        "profiler": "TLLM_PROFILE_START_STOP=100-150 nsys profile -c cudaProfilerApi -t cuda,nvtx trtllm-serve …",
    },
    log_patterns={"kv_tokens": r"max tokens in paged KV cache \((\d+)\)"},
    spread={"tensor_parallel": ("--tp_size",), "pipeline_parallel": ("--pp_size",)},
    metrics_path="/prometheus/metrics",
    ignore_eos=True,
    version_pages=(("/version", "version"),),
)
