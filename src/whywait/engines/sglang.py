"""SGLang, by its documentation (production metrics, server arguments): never run here.

Its metrics are off unless ``--enable-metrics`` is given. Gauges are set once per decode interval (every 40 steps unless
``--decode-log-interval`` says otherwise), so they may be seconds old on a slow model. ``cache_hit_rate`` and the
speculation gauges speak of the last batch only; counters, where a version has them, are better.
"""

from __future__ import annotations

from whywait.engines.table import EngineTable, Metric

_P = "sglang:"

TABLE = EngineTable(
    name="sglang",
    title="SGLang",
    driven=False,
    metric_prefixes=(_P,),
    owned_by=("sglang",),
    metrics={
        _P + "num_running_reqs": (Metric("running"),),
        _P + "num_queue_reqs": (Metric("waiting"),),
        _P + "token_usage": (Metric("kv_use"),),
        _P + "num_used_tokens": (Metric("kv_tokens_used"),),
        _P + "max_total_num_tokens": (Metric("kv_tokens_total"),),
        _P + "num_retracted_reqs": (Metric("retracted"),),
        _P + "num_retracted_requests_total": (Metric("preemptions_total"),),
        _P + "realtime_tokens_total": (Metric("prompt_tokens_computed_total", where=(("mode", "prefill_compute"),)),),
        _P + "cache_hit_rate": (Metric("prefix_hit_rate"),),
        _P + "spec_accept_rate": (Metric("acceptance_rate"),),
        _P + "num_requests_total": (Metric("requests_total"),),
        _P + "prompt_tokens_total": (Metric("prompt_tokens_total"),),
        _P + "cached_tokens_total": (Metric("cached_tokens_total"),),
        _P + "generation_tokens_total": (Metric("output_tokens_total"),),
    },
    histograms={
        _P + "time_to_first_token_seconds": "ttft_seconds",
        _P + "inter_token_latency_seconds": "itl_seconds",
        _P + "e2e_request_latency_seconds": "e2e_seconds",
        _P + "queue_time_seconds": "queue_seconds",
    },
    old_histograms={_P + "time_per_output_token_seconds": "itl_seconds"},
    late_counters=frozenset({"requests_total", "prompt_tokens_total", "cached_tokens_total", "output_tokens_total"}),
    flags={
        "slots": "--max-running-requests N",
        "kv_space": "--mem-fraction-static F",
        "kv_dtype": "--kv-cache-dtype fp8_e4m3",
        "context": "--context-length N",
        "token_budget": "--max-prefill-tokens N",
        "prefill_chunk": "--chunked-prefill-size N",
        "prefix_cache": "no --disable-radix-cache",
        "kv_offload": "--enable-hierarchical-cache --hicache-ratio R",
        "speculation": "--speculative-algorithm NAME --speculative-draft-model-path DIR --speculative-num-steps N",
        "weight_dtype": "--quantization METHOD",
        "frontend": "--tokenizer-worker-num N",
        "tensor_parallel": "--tp-size N",
        "queue_limit": "--max-queued-requests N",
        "metrics": "--enable-metrics",
        "traces": "--enable-trace --otlp-traces-endpoint HOST:4317 (gRPC: --otlp-grpc-listen 4317)",
        "request_metrics": "--enable-cache-report",
        "profiler": "start it with SGLANG_TORCH_PROFILER_DIR=DIR, then POST /start_profile, and /stop_profile a few "
        "seconds later; open DIR in Perfetto",
    },
    log_patterns={
        "kv_tokens": r"max_total_num_tokens=(\d+)",
        "slots": r"max_running_requests=(\d+)",
        "context": r"context_len=(\d+)",
        "tensor_parallel": r"\btp_size=(\d+)",
        "pipeline_parallel": r"\bpp_size=(\d+)",
        "data_parallel": r"\bdp_size=(\d+)",
    },
    spread={
        "tensor_parallel": ("--tensor-parallel-size", "--tp-size", "--tp"),
        "pipeline_parallel": ("--pipeline-parallel-size", "--pp-size"),
        "data_parallel": ("--data-parallel-size", "--dp-size", "--dp"),
    },
    spread_alike=("--enable-dp-attention",),
    ignore_eos=True,
    version_pages=(("/server_info", "version"), ("/get_server_info", "version")),
)
