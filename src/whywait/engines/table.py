"""What whywait knows of one engine, as data: the names it uses, the flags it takes, the fields it answers.

The canonical vocabulary is here too (``GAUGES``, ``COUNTERS``, ``HISTOGRAMS``, ``LIMITS``): analysis and verdicts speak
only these names, so a new engine is a new table and no new code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GAUGES: Mapping[str, str] = {
    "running": "requests being worked on (prefill or decode)",
    "waiting": "requests accepted and queued",
    "kv_use": "share of the KV space held by requests in work, 0..1",
    "slots_total": "sequences that can be in work at once",
    "slots_busy": "slots in work",
    "slots_prefilling": "busy slots that have not produced a token yet",
    "slot_kv_use_max": "fullest busy slot: tokens held / its own context, 0..1",
    "kv_tokens_used": "tokens held by requests in work (a prompt counts whole from the start of its prefill)",
    "kv_tokens_idle": "tokens kept for reuse in slots or blocks not in work",
    "kv_tokens_total": "tokens the KV space can hold",
    "output_tokens_in_flight": "tokens produced so far by requests not yet finished",
    "retracted": "requests pushed out of work for want of KV space, not yet back",
    "prefix_hit_rate": "share of prompt tokens found in the prefix cache lately, 0..1 (where no counter says it)",
    "acceptance_rate": "share of draft tokens accepted lately, 0..1 (where no counter says it)",
}
COUNTERS: Mapping[str, str] = {
    "requests_total": "requests finished, whatever the reason",
    "rejections_total": "requests refused at admission",
    "prompt_tokens_total": "prompt tokens, cached ones included",
    "prompt_tokens_computed_total": "prompt tokens computed, cached ones excluded",
    "cached_tokens_total": "prompt tokens read from a cache",
    "output_tokens_total": "tokens produced",
    "preemptions_total": "requests pushed out of work for want of KV space",
    "prefill_seconds_total": "seconds of prefill summed over requests (not device time: requests overlap)",
    "decode_seconds_total": "seconds of decode summed over requests (not device time: requests overlap)",
    "decode_steps_total": "engine iterations, prefill ones included",
    "draft_rounds_total": "verification rounds of speculative decoding",
    "draft_tokens_total": "tokens proposed by speculation",
    "accepted_tokens_total": "proposed tokens that were accepted",
    "prefix_queries_total": "prompt tokens looked up in the prefix cache",
    "prefix_hits_total": "prompt tokens found in the prefix cache",
    "handover_bytes_total": "bytes of KV handed over from prefill to decode engines",
    "handover_save_seconds_total": "seconds hand-overs took to leave the prefill engine",
    "handover_link_seconds_total": "seconds hand-overs spent on the way",
    "handover_wait_seconds_total": "seconds hand-overs waited for a place at a decode engine",
    "handover_restore_seconds_total": "seconds hand-overs took to be read in by the decode engine",
    "handover_blocked_seconds_total": "seconds decode engines did nothing else because they read KV in",
    "handover_failures_total": "hand-overs that failed",
    "restore_gaps_total": "gaps between tokens of streams in which another's KV was read in",
    "restore_gap_seconds_total": "seconds of those gaps",
    "other_gaps_total": "all other gaps between tokens at the decode engines",
    "other_gap_seconds_total": "seconds of those gaps",
}
HISTOGRAMS: Mapping[str, str] = {
    "ttft_seconds": "arrival at the engine to first token",
    "itl_seconds": "gap between tokens",
    "tpot_seconds": "mean time per output token after the first, one per request",
    "e2e_seconds": "arrival at the engine to last token",
    "queue_seconds": "waiting for a place in a batch",
    "prefill_seconds": "first scheduled to first token",
    "decode_seconds": "first to last token",
    "handover_seconds": "end of prefill to the decode engine's having the KV",
    "iteration_tokens": "tokens computed in one engine iteration",
}
LIMITS: Mapping[str, str] = {
    "slots": "how many sequences are worked on at once",
    "kv_space": "how many tokens the KV space holds",
    "kv_dtype": "how many bytes a token's KV takes",
    "context": "longest sequence accepted",
    "token_budget": "tokens computed in one iteration",
    "prefill_chunk": "how much of a neighbour's prefill one decode step has to sit through",
    "prefix_cache": "reuse of the KV of equal beginnings",
    "kv_offload": "KV kept in host memory instead of being computed again",
    "speculation": "draft tokens verified in one step",
    "weight_dtype": "bytes of weights read per step",
    "cpu_threads": "cores the engine computes with",
    "frontend": "processes or threads that parse, tokenise and stream",
    "tensor_parallel": "devices one model is spread over",
    "queue_limit": "requests that may wait before they are refused",
    "metrics": "what makes the engine publish its metrics",
    "request_metrics": "what makes the engine report its stages with every answer",
    "traces": "what makes the engine send its spans (OTLP)",
    "profiler": "how its own profiler is run while the load is on",
}
#: What ``log_patterns`` may find; see ``lab/capacity.py`` for what is made of it.
LOG_FACTS: Mapping[str, str] = {
    "kv_tokens": "tokens the KV space holds; where several cores of one engine say it, the sum counts",
    "context": "longest sequence accepted, tokens",
    "concurrency": "how many sequences of that length fit (a number, maybe with decimals)",
    "slots": "sequences worked on at once",
    "slot_tokens": "tokens one slot holds",
    "kv_unified": "``true`` where all slots share the space of one",
    "tensor_parallel": "devices one layer is spread over",
    "pipeline_parallel": "stages the layers are cut into",
    "data_parallel": "copies of the model behind one address",
}


class Metric(NamedTuple):
    """Canonical name of a native one: value × ``scale``, only where every (label, value) of ``where`` holds."""

    name: str
    scale: float = 1.0
    where: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class EngineTable:
    """One engine. Keys of ``metrics`` and ``histograms`` are native; names in ``old_*`` count only where the page has
    no current name for the same thing (some versions publish both, and adding them would count twice).

    ``info`` turns labels of an info metric into gauges: canonical name -> alternatives, each a product of labels.
    ``sums`` are canonical counters made of others, present only when every part is. ``late_counters`` grow only when a
    request (or its prefill) ends, so over short windows they lag what was really done. ``request_fields`` are dotted
    paths into the objects that the last stream events carry beside the answer -> columns of the requests table.
    ``log_patterns`` are regular expressions with one group, by ``LOG_FACTS``. ``driven`` tells a table that was tried
    on the real engine from one written by its documentation. The ``*_body`` are JSON merged into a request:
    always (``extra_body``), to get a token count with every chunk, to keep one request from reading the prefix cache
    (``{unique}`` stands for a fresh text). ``spread`` are the flags whose numbers multiplied are the devices it uses,
    with all their spellings, by names of ``LOG_FACTS``; each is 1 where it is not given. With a flag of
    ``spread_alike`` its copies share the devices of one.
    """

    name: str
    title: str
    driven: bool = True
    metric_prefixes: tuple[str, ...] = ()
    server_headers: tuple[str, ...] = ()
    owned_by: tuple[str, ...] = ()
    metrics: Mapping[str, tuple[Metric, ...]] = field(default_factory=dict)
    old_metrics: Mapping[str, tuple[Metric, ...]] = field(default_factory=dict)
    histograms: Mapping[str, str] = field(default_factory=dict)
    old_histograms: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Mapping[str, tuple[tuple[str, ...], ...]]] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    late_counters: frozenset[str] = frozenset()
    flags: Mapping[str, str] = field(default_factory=dict)
    request_fields: Mapping[str, str] = field(default_factory=dict)
    log_patterns: Mapping[str, str] = field(default_factory=dict)
    spread: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spread_alike: tuple[str, ...] = ()
    metrics_path: str = "/metrics"
    slots_path: str | None = None
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    per_token_body: Mapping[str, Any] = field(default_factory=dict)
    no_cache_body: Mapping[str, Any] = field(default_factory=dict)
    version_pages: tuple[tuple[str, str], ...] = ()  # (path, key in its JSON), the newer first
