"""What the words and signs of a report mean."""

from __future__ import annotations

DEFINITIONS = {
    "TTFT": "Time to first token: first token − origin. The origin is when the request was due in an open loop (rate), "
    "so that every lateness counts, and when it was sent in a closed loop (concurrency).",
    "ITL": "Inter-token latency: each gap between chunks divided by the tokens of its chunk, pooled over requests, by "
    "token. A chunk is not a token; gaps whose tokens are unknown are left out, and a doubt says so.",
    "TPOT": "Time per output token: (last − first token) ÷ (tokens − tokens of the first chunk), one per request. Does "
    "not apply where all tokens came at once; an interval where the service does not count its tokens.",
    "End to end": "Last token − origin. What comes after the last token (usage, end of stream) is the tail, apart.",
    "Goodput": "Requests per second that ended well within every SLO; its share is of all requests that were due, with "
    "the failed, truncated and timed-out ones in the denominator. Effective tokens are those of the good ones.",
    "Cost of a good request": "All joules, money or device time of the steady window ÷ the good requests in it: what "
    "failed, was late or was cut off is charged to the good. Nothing good: null, never 0. Prices are of the offers "
    "named, with their date.",
    "Phases": "Every nanosecond of a request is in exactly one of client, network, frontend, queue, prefill, decode, "
    "stalled decode (a long gap in another request's prefill), tail, not explained; they add up exactly.",
    "Device": "Wall time × devices, every instant in one category by what our requests show. Without the engine's "
    "steps it is seen from outside. Idle with work queued: requests waited while the device was not fed.",
    "How it is known": "Measured: the engine's own figure, or a stamp. Derived: growth of the engine's counters and "
    "histograms. Inferred: from our stamps and its gauges. Modelled: a formula over data sheets. Unknown: no evidence.",
    "Verdict": "Holds: the evidence shows it. Not the cause: the evidence speaks against it. Undecided: not enough of "
    "either; never a guess.",
    "Knee": "The load after which throughput gains less than 10 % per doubling while waiting grows.",
    "Steady window": "Warm-up ends when the load is in flight and its first tokens are there; drain begins when less "
    "than the load is left. Latencies are of requests that began in it, rates of the time in it.",
    "KV space, running, waiting": "The engine's own gauges, as read; a line is broken where nothing was read for long. "
    "In flight is counted by the client: sent and not yet ended.",
    "Curves of distributions": "The share of requests (of ITL: of tokens) at or below a value. The band of one value "
    "per request holds the whole curve with 95 %; that of ITL is from resampled requests, since gaps of one are alike.",
    "Intervals": "Two-sided 95 %. “?” is a bound that so few requests cannot give (36 bound p90, 72 p95, 368 p99); "
    "“–” is unknown or does not apply, and never zero.",
}  # fmt: skip
