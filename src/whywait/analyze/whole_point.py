"""A load point as the usual serving benchmarks count it: the whole of it, warm-up and drain included, every request.

For people who compare with `vllm bench serve`, SGLang's ``bench_serving`` and their like. What differs from whywait's
own figures, which are those of the steady window, is in docs/terminal.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.goodput import bounds, meets
from whywait.analyze.latency import OK, latency_summary, per_request
from whywait.analyze.streams import content
from whywait.analyze.window import Window, in_flight, token_rate
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.units import NS_PER_S

CENSORED = OUTCOMES.index("censored")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def whole_point(run: Run, number: int) -> dict[str, Any]:
    """Figures of one load point from its start to the end of its last request; None where unknown.

    Keys: ``mode, target, label, seconds, completed, failed, censored, prompt_tokens, output_tokens`` (of ``ok``
    requests; None where the service told none of it), ``requests_per_s, good_per_s`` (None without an SLO),
    ``output_tokens_per_s, peak_tokens_per_s, total_tokens_per_s, peak_in_flight`` and the latencies of every ``ok``
    request as ``stats.summary`` gives them: ``ttft_ms, tpot_ms, itl_ms, e2e_ms``.
    """
    one = run.point(number)
    req, c = one.requests, content(one)
    ok = req["outcome"] == OK
    start, end = int(one.points["start_ns"][0]), int(one.points["end_ns"][0])
    if len(req) and not np.isnan(req["end_ns"]).all():
        end = int(np.nanmax(req["end_ns"]))
    w = Window(start, max(end, start), True, len(req), 0)
    slo = dict(run.manifest.slo)
    good = int(meets(one, slo, c, per_request(one)).sum()) if bounds(one, slo) else None
    prompt, output = (_sum(req[name][ok]) for name in ("prompt_tokens", "output_tokens"))
    found, _ = latency_summary(one, None, c)
    both = None if prompt is None or output is None else prompt + output
    return {
        "mode": one.points.text("mode")[0],
        "target": None if np.isnan(one.points["target"][0]) else float(one.points["target"][0]),
        "label": one.points["label"][0],
        "seconds": w.seconds,
        "completed": int(ok.sum()),
        "failed": int((~ok).sum()),
        "censored": int((req["outcome"] == CENSORED).sum()),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": _per(int(ok.sum()), w),
        "good_per_s": _per(good, w),
        "output_tokens_per_s": _per(output, w),
        "peak_tokens_per_s": token_rate(one, c, w, ok)[1],
        "total_tokens_per_s": _per(both, w),
        "peak_in_flight": in_flight(one, start, w.end_ns)[0],
        **{name: found[name] for name in LATENCIES},
    }


def _sum(values: Any) -> int | None:
    """None where the service did not tell it of every request: a sum over some would pass for one over all."""
    return None if not len(values) or np.isnan(values).any() else int(values.sum())


def _per(count: int | None, w: Window) -> float | None:
    return None if count is None or w.end_ns <= w.start_ns else count * NS_PER_S / (w.end_ns - w.start_ns)
