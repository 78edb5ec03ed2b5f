"""The metric families an export has, by Prometheus' conventions: base units, the unit at the end of the name.

The OpenMetrics writer and the Grafana dashboard both read this list, so that no panel asks for what is not exported.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """``kind`` is OpenMetrics' type; ``unit`` the last word of the name, or '' for a count of things."""

    name: str
    kind: str
    unit: str
    about: str


INFO = Family("whywait_run", "info", "", "Where the figures come from.")
REQUESTS = Family("whywait_requests", "counter", "", "Requests that ended, by outcome.")
GOOD = Family("whywait_good_requests", "counter", "", "Requests that ended ok and within the SLO.")
PROMPT = Family("whywait_prompt_tokens", "counter", "tokens", "Prompt tokens of requests that ended ok.")
OUTPUT = Family("whywait_output_tokens", "counter", "tokens", "Output tokens of ok requests, when their chunks came.")
PHASE = Family(
    "whywait_request_phase_seconds",
    "counter",
    "seconds",
    "Time of requests that ended, by what they waited for; of an ok one the phases add up to e2e and tail.",
)
TTFT = Family("whywait_ttft_seconds", "histogram", "seconds", "Time to first token of ok requests, from their origin.")
TPOT = Family(
    "whywait_tpot_seconds", "histogram", "seconds", "Mean time per output token after the first, ok requests."
)
E2E = Family("whywait_e2e_seconds", "histogram", "seconds", "Origin to last token of ok requests.")
GAP = Family("whywait_chunk_gap_seconds", "histogram", "seconds", "Time between content chunks of ok requests.")
IN_FLIGHT = Family("whywait_in_flight_requests", "gauge", "requests", "Requests sent and not ended.")

#: Readings beside the load: name of the reading → family.
READINGS: dict[str, Family] = {
    "running": Family("whywait_engine_running_requests", "gauge", "requests", "Requests in work, by the engine."),
    "waiting": Family("whywait_engine_waiting_requests", "gauge", "requests", "Requests queued, by the engine."),
    "slots_busy": Family("whywait_engine_busy_slots", "gauge", "slots", "Slots in work, by the engine."),
    "kv_use": Family("whywait_engine_kv_use_ratio", "gauge", "ratio", "Share of the KV space in use, by the engine."),
    "kv_tokens_used": Family("whywait_engine_kv_used_tokens", "gauge", "tokens", "Tokens held by requests in work."),
    "power_watts": Family("whywait_device_power_watts", "gauge", "watts", "Power of a device."),
    "busy_share": Family("whywait_device_busy_ratio", "gauge", "ratio", "Share of the time a device was busy."),
    "memory_used_bytes": Family("whywait_device_memory_used_bytes", "gauge", "bytes", "Memory in use on a device."),
    "rss_bytes": Family("whywait_process_resident_memory_bytes", "gauge", "bytes", "Resident memory of a process."),
}
#: Counters beside the load, likewise.
TOTALS: dict[str, Family] = {
    "output_tokens_total": Family("whywait_engine_output_tokens", "counter", "tokens", "By the engine's own counter."),
    "preemptions_total": Family("whywait_engine_preemptions", "counter", "", "By the engine's own counter."),
    "energy_joules_total": Family("whywait_device_energy_joules", "counter", "joules", "By the device's own meter."),
    "cpu_seconds_total": Family("whywait_process_cpu_seconds", "counter", "seconds", "CPU time of a process."),
}

# Of the steady window, as in summary.json: once, at the end of a point.
WINDOW_TTFT = Family("whywait_window_ttft_seconds", "summary", "seconds", "TTFT of the steady window; exact quantiles.")
WINDOW_TPOT = Family("whywait_window_tpot_seconds", "summary", "seconds", "TPOT of the steady window; exact quantiles.")
WINDOW_ITL = Family("whywait_window_itl_seconds", "summary", "seconds", "ITL of the steady window, weighted by tokens.")
WINDOW_E2E = Family("whywait_window_e2e_seconds", "summary", "seconds", "End to end of the steady window.")
WINDOW_RATE = Family("whywait_window_requests_per_second", "gauge", "", "Rate of ok requests in the steady window.")
WINDOW_TOKENS = Family(
    "whywait_window_output_tokens_per_second", "gauge", "", "Output token rate of the steady window."
)
WINDOW_GOODPUT = Family("whywait_window_goodput_requests_per_second", "gauge", "", "Rate of requests within the SLO.")
WINDOW_SHARE = Family("whywait_window_goodput_ratio", "gauge", "ratio", "Good requests of all that were due.")
WINDOW_DEVICE = Family("whywait_window_device_time_ratio", "gauge", "ratio",
                       "Share of wall time x devices by what the devices were in.")  # fmt: skip
ENERGY = Family("whywait_good_request_energy_joules", "gauge", "joules", "Energy of the window by good request.")

FAMILIES = (INFO, REQUESTS, GOOD, PROMPT, OUTPUT, PHASE, TTFT, TPOT, E2E, GAP, IN_FLIGHT, *READINGS.values(),
            *TOTALS.values(), WINDOW_TTFT, WINDOW_TPOT, WINDOW_ITL, WINDOW_E2E, WINDOW_RATE, WINDOW_TOKENS,
            WINDOW_GOODPUT, WINDOW_SHARE, WINDOW_DEVICE, ENERGY)  # fmt: skip
