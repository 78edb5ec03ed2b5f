"""vLLM (V1 engine; names of 0.6–0.32). Its histograms are complete, its gauges are set once per iteration."""

from __future__ import annotations

from whywait.engines.table import EngineTable, Metric

_P = "vllm:"

TABLE = EngineTable(
    name="vllm",
    title="vLLM",
    metric_prefixes=(_P,),
    owned_by=("vllm",),
    metrics={
        _P + "num_requests_running": (Metric("running"),),
        _P + "num_requests_waiting": (Metric("waiting"),),
        _P + "kv_cache_usage_perc": (Metric("kv_use"),),  # 0..1 in spite of its name
        _P + "request_success_total": (Metric("requests_total"),),
        _P + "admission_rejections_total": (Metric("rejections_total"),),
        _P + "prompt_tokens_total": (Metric("prompt_tokens_total"),),
        _P + "prompt_tokens_by_source_total": (
            Metric("prompt_tokens_computed_total", where=(("source", "local_compute"),)),
        ),
        _P + "prompt_tokens_cached_total": (Metric("cached_tokens_total"),),
        _P + "generation_tokens_total": (Metric("output_tokens_total"),),
        _P + "num_preemptions_total": (Metric("preemptions_total"),),
        _P + "request_prefill_time_seconds_sum": (Metric("prefill_seconds_total"),),
        _P + "request_decode_time_seconds_sum": (Metric("decode_seconds_total"),),
        _P + "iteration_tokens_total_count": (Metric("decode_steps_total"),),
        _P + "spec_decode_num_drafts_total": (Metric("draft_rounds_total"),),
        _P + "spec_decode_num_draft_tokens_total": (Metric("draft_tokens_total"),),
        _P + "spec_decode_num_accepted_tokens_total": (Metric("accepted_tokens_total"),),
        _P + "prefix_cache_queries_total": (Metric("prefix_queries_total"),),
        _P + "prefix_cache_hits_total": (Metric("prefix_hits_total"),),
    },
    old_metrics={
        _P + "gpu_cache_usage_perc": (Metric("kv_use"),),
        _P + "gpu_prefix_cache_queries_total": (Metric("prefix_queries_total"),),
        _P + "gpu_prefix_cache_hits_total": (Metric("prefix_hits_total"),),
        _P + "request_prefill_kv_computed_tokens_sum": (Metric("prompt_tokens_computed_total"),),
    },
    histograms={
        _P + "time_to_first_token_seconds": "ttft_seconds",
        _P + "inter_token_latency_seconds": "itl_seconds",
        _P + "request_time_per_output_token_seconds": "tpot_seconds",
        _P + "e2e_request_latency_seconds": "e2e_seconds",
        _P + "request_queue_time_seconds": "queue_seconds",
        _P + "request_prefill_time_seconds": "prefill_seconds",
        _P + "request_decode_time_seconds": "decode_seconds",
        _P + "iteration_tokens_total": "iteration_tokens",
    },
    old_histograms={_P + "time_per_output_token_seconds": "itl_seconds"},  # it held gaps, whatever its name said
    info={
        _P + "cache_config_info": {
            "kv_tokens_total": (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")),
        }
    },
    facts=("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks",
           "kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_offloading_size"),
    flags={
        "slots": "--max-num-seqs N",
        "kv_space": "--gpu-memory-utilization F or --kv-cache-memory-bytes N",
        "kv_dtype": "--kv-cache-dtype fp8",
        "context": "--max-model-len N",
        "token_budget": "--max-num-batched-tokens N",
        "prefill_chunk": "--max-num-batched-tokens N or --long-prefill-token-threshold N",
        "prefix_cache": "--enable-prefix-caching",
        "kv_offload": "--kv-offloading-size GIB",
        "speculation": "--speculative-config JSON",
        "weight_dtype": "--quantization METHOD",
        "cpu_threads": "VLLM_CPU_OMP_THREADS_BIND=A-B (CPU backend)",
        "frontend": "--api-server-count N",
        "tensor_parallel": "--tensor-parallel-size N",
        "queue_limit": "--max-num-queued-reqs N",
        "metrics": "on unless --disable-log-stats",
        "request_metrics": "--enable-per-request-metrics --enable-prompt-tokens-details",
        "traces": "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf vllm serve … --otlp-traces-endpoint "
                  "http://HOST:4318/v1/traces",
        # Older versions read the folder from VLLM_TORCH_PROFILER_DIR instead.
        "profiler": "start it with --profiler-config.profiler=torch --profiler-config.torch_profiler_dir=DIR, then "
                    "POST /start_profile, and /stop_profile a few seconds later; open DIR in Perfetto",
    },
    request_fields={
        "metrics.queue_time_ms": "engine_queue_ms",
        "metrics.time_to_first_token_ms": "engine_prefill_ms",  # scheduled to first token: the queue is not in it
        "metrics.generation_time_ms": "engine_decode_ms",
    },
    log_patterns={
        "kv_tokens": r"KV cache size: (\d[\d,]*) tokens",
        "context": r"Maximum concurrency for (\d[\d,]*) tokens per request",
        "concurrency": r"Maximum concurrency for \d[\d,]* tokens per request: ([\d.,]+)x",
        "tensor_parallel": r"\btensor_parallel_size=(\d+)",
        "pipeline_parallel": r"\bpipeline_parallel_size=(\d+)",
    },
    spread={
        "tensor_parallel": ("--tensor-parallel-size", "-tp"),
        "pipeline_parallel": ("--pipeline-parallel-size", "-pp"),
        "data_parallel": ("--data-parallel-size", "-dp"),  # each of its cores logs 1 of itself
        "prefill_context_parallel": ("--prefill-context-parallel-size", "-pcp"),
    },
    ignore_eos=True,
    per_token_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    no_cache_body={"cache_salt": "{unique}"},
    version_pages=(("/version", "version"),),
)  # fmt: skip
