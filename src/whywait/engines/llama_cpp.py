"""llama.cpp's ``llama-server`` (also the embedded engine, through ``xllamacpp``).

Learnt on the real thing (build 11549): ``/metrics`` and ``/slots`` answer at once even during a long prefill, but with
the state of the last iteration, so everything stands still while one long batch is computed. ``prompt_tokens_total``
grows when a prefill ends and ``tokens_predicted_total`` when a *request* ends. A slot that never worked has no token
fields at all. ``n_prompt_tokens`` of a slot is what it holds: the prompt, then prompt + output, and it stays after the
request ended (the tokens are kept for reuse). With ``--kv-unified`` every slot states the whole space as its ``n_ctx``,
and nothing the server answers tells that from separate slots of that size; only its log does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from whywait.engines.table import EngineTable, Metric

_P = "llamacpp:"
_S = "whywait_split:"  # what the front of several of these engines adds to their figures (lab/disagg_counts.py)
_HANDOVER = ("handover_bytes", "handover_save_seconds", "handover_link_seconds", "handover_wait_seconds",
             "handover_restore_seconds", "handover_blocked_seconds", "handover_failures", "restore_gaps",
             "restore_gap_seconds", "other_gaps", "other_gap_seconds")  # fmt: skip

TABLE = EngineTable(
    name="llama.cpp",
    title="llama.cpp server",
    metric_prefixes=(_P, _S),
    server_headers=("llama.cpp",),
    owned_by=("llamacpp",),
    metrics={
        _P + "requests_processing": (Metric("running"),),
        _P + "requests_deferred": (Metric("waiting"),),
        # Despite its name this one leaves cached tokens out (slot.n_prompt_tokens_processed).
        _P + "prompt_tokens_total": (Metric("prompt_tokens_computed_total"),),
        _P + "prompt_tokens_cached_total": (Metric("cached_tokens_total"),),
        _P + "tokens_predicted_total": (Metric("output_tokens_total"),),
        _P + "prompt_seconds_total": (Metric("prefill_seconds_total"),),
        _P + "tokens_predicted_seconds_total": (Metric("decode_seconds_total"),),
        _P + "n_decode_total": (Metric("decode_steps_total"),),
        _P + "spec_decode_num_drafts_total": (Metric("draft_rounds_total"),),
        _P + "spec_decode_num_draft_tokens_total": (Metric("draft_tokens_total"),),
        _P + "spec_decode_num_accepted_tokens_total": (Metric("accepted_tokens_total"),),
        **{f"{_S}{name}_total": (Metric(f"{name}_total"),) for name in _HANDOVER},
    },
    old_metrics={
        _P + "kv_cache_usage_ratio": (Metric("kv_use"),),
        _P + "kv_cache_tokens": (Metric("kv_tokens_used"),),
    },
    histograms={_S + "handover_seconds": "handover_seconds"},
    sums={"prompt_tokens_total": ("prompt_tokens_computed_total", "cached_tokens_total")},
    late_counters=frozenset(
        {
            "prompt_tokens_total",
            "prompt_tokens_computed_total",
            "cached_tokens_total",
            "prefill_seconds_total",
            "output_tokens_total",
            "decode_seconds_total",
            "draft_rounds_total",
            "draft_tokens_total",
            "accepted_tokens_total",
        }
    ),
    flags={
        "slots": "--parallel N",
        "kv_space": "--ctx-size N (divided by --parallel unless --kv-unified)",
        "kv_dtype": "--cache-type-k q8_0 --cache-type-v q8_0",
        "context": "--ctx-size N",
        "token_budget": "--batch-size N",
        "prefill_chunk": "--batch-size N --ubatch-size N",
        "prefix_cache": "--cache-reuse N (and not --no-cache-prompt)",
        "kv_offload": "--cache-ram MIB",
        "speculation": "--spec-type TYPE --spec-draft-model FILE --spec-draft-n-max N",
        "weight_dtype": "--model FILE (a GGUF of fewer bits)",
        "cpu_threads": "--threads N --threads-batch N",
        "frontend": "--threads-http N",
        "tensor_parallel": "--split-mode row --tensor-split A,B",
        "metrics": "--metrics --slots",
        "profiler": "perf record -g -p PID -- sleep 5; perf report (of a GPU: nsys profile llama-server …)",
    },
    request_fields={
        "timings.prompt_ms": "engine_prefill_ms",
        "timings.predicted_ms": "engine_decode_ms",
        "timings.prompt_n": "engine_prefill_tokens",
        "timings.cache_n": "cached_tokens",
        "timings.predicted_n": "output_tokens",
        "timings.draft_n": "draft_tokens",  # both only where any was proposed
        "timings.draft_n_accepted": "accepted_tokens",
        "timings.split_queue_ms": "engine_queue_ms",  # these four are the front's
        "timings.split_ttft_ms": "engine_ttft_ms",
        "timings.handover_ms": "engine_handover_ms",
        "timings.handover_bytes": "handover_bytes",
    },
    log_patterns={
        "slots": r"n_slots = (\d+)",
        "slot_tokens": r"n_ctx_slot = (\d+)",
        "kv_unified": r"kv_unified = '?(\w+)'?",
    },
    slots_path="/slots",
    ignore_eos=True,
    per_token_body={"timings_per_token": True},
    no_cache_body={"cache_prompt": False},
    version_pages=(("/props", "build_info"),),
)


def slot_gauges(slots: Iterable[Mapping[str, Any]], unified: bool | None = None) -> dict[str, float]:
    """Canonical gauges from the body of ``/slots``.

    ``unified`` is whether the slots share one KV space; None means not known, and then ``kv_tokens_total`` and
    ``kv_use`` are given only where they follow all the same (a single slot, or slots that together hold more than one
    slot's context). Versions whose slots do not say what they hold give only the counts.
    """
    rows = [s for s in slots if isinstance(s, Mapping)]
    busy = [s for s in rows if s.get("is_processing")]
    out: dict[str, float] = {
        "slots_total": len(rows),
        "slots_busy": len(busy),
        "slots_prefilling": sum(1 for s in busy if not _decoded(s)),
        "output_tokens_in_flight": sum(_decoded(s) for s in busy),
    }
    if any("n_prompt_tokens" not in s for s in busy):
        return out
    used = float(sum(s["n_prompt_tokens"] for s in busy))
    held = float(sum(s.get("n_prompt_tokens", 0) for s in rows))
    out |= {"kv_tokens_used": used, "kv_tokens_idle": held - used}
    sizes = [float(s.get("n_ctx", 0)) for s in rows]
    if not sizes or min(sizes) <= 0:
        return out
    if busy:
        out["slot_kv_use_max"] = max(s["n_prompt_tokens"] / s["n_ctx"] for s in busy)
    if unified is None and (len(rows) == 1 or held > max(sizes)):
        unified = False
    if unified is not None:
        out["kv_tokens_total"] = max(sizes) if unified else sum(sizes)
        out["kv_use"] = used / out["kv_tokens_total"]
    return out


def _decoded(slot: Mapping[str, Any]) -> int:
    token = slot.get("next_token") or {}
    if isinstance(token, list):  # an object in older versions, a list of one (per sequence) in newer ones
        token = token[0] if token else {}
    return int(token.get("n_decoded", 0))
