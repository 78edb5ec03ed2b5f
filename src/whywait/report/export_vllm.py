"""A load point in the shape of ``vllm bench serve --save-result --save-detailed`` (vLLM 0.32), by vLLM's definitions.

They are not whywait's: times count from when a request was sent, over the whole point with its warm-up and drain; TPOT
divides by the tokens less one; ITL is the gap between two stream events, whatever they carry; percentiles are numpy's.
Whatever a Run does not know is null, where vLLM would write 0: see ``docs/export.md``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np

from whywait.analyze.latency import OK
from whywait.core.columns import KINDS
from whywait.core.table import Array
from whywait.report.export import Chosen
from whywait.units import NS_PER_S

PERCENTILES = (50, 90, 95, 99)
BACKENDS = {"chat": "openai-chat", "completions": "openai", "responses": "openai-responses"}
_ROLE = KINDS.index("role")
_COLUMNS = ("sent_ns", "first_ns", "last_ns", "end_ns", "prompt_tokens", "output_tokens")


def write_point(chosen: Chosen, number: int, out: TextIO) -> None:
    """Write one load point. The lists of all gaps, which are long, are written request by request."""
    found = _Point(chosen, number)
    head, details = found.head(), found.details()
    out.write("{\n")
    for key, value in {**head, **found.figures()}.items():
        out.write(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)},\n")
    for key, values in details.items():
        out.write(f"{json.dumps(key)}: {json.dumps(values, allow_nan=False)},\n")
    out.write('"itls": [')
    for i, gaps in enumerate(found.gaps()):
        out.write(("" if not i else ", ") + json.dumps(gaps, allow_nan=False))
    out.write("]\n}\n")


class _Point:
    def __init__(self, chosen: Chosen, number: int) -> None:
        self.chosen, self.number, self.row = chosen, number, chosen.point_row(number)
        rows = chosen.of_point(number)
        self.req = chosen.run.requests.where(rows)
        sent, first, last, end, self.prompt, self.output = (self.req[c] for c in _COLUMNS)
        self.ok = (self.req["outcome"] == OK) & ~np.isnan(sent)
        self.sent = sent
        self.ttft = (first - sent) / NS_PER_S
        self.latency = (np.where(np.isnan(last) & self.ok, end, last) - sent) / NS_PER_S
        with np.errstate(divide="ignore", invalid="ignore"):
            self.tpot = np.where(self.output > 1, (self.latency - self.ttft) / (self.output - 1), np.nan)
        self.told = chosen.starts(number) is None
        self.seconds = (self.row["end_ns"] - self.row["start_ns"]) / NS_PER_S
        self._gap_row, self._gap = self._gaps(rows)

    def _gaps(self, rows: Array) -> tuple[Array, Array]:
        """Seconds between the content chunks of a request, and whose they are (by place in this point)."""
        c = self.chosen.content
        place = np.full(len(self.chosen.run.requests), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        same = (c.row[1:] == c.row[:-1]) & (place[c.row[1:]] >= 0)
        row = place[c.row[1:][same]]
        order = np.argsort(row, kind="stable")
        return row[order], ((c.t[1:] - c.t[:-1])[same] / NS_PER_S)[order]

    def head(self) -> dict[str, Any]:
        m, mode = self.chosen.run.manifest, self.row["mode"]
        ended = datetime.datetime.fromtimestamp(self.chosen.unix(self.row["end_ns"]) / 1e9, datetime.timezone.utc)
        backend = BACKENDS.get(str(m.endpoint.get("dialect")), "openai-chat")
        target = self.row["target"]
        return {
            "date": ended.strftime("%Y%m%d-%H%M%S") if self.chosen.dated else None,
            "endpoint_type": backend,
            "backend": backend,
            "label": self.row["label"],
            "model_id": m.engine.get("model"),
            "tokenizer_id": None,
            "num_prompts": len(self.req),
            "request_rate": {"concurrency": "inf", "trace": "trace"}.get(mode, target),
            "burstiness": 1.0 if mode == "rate" and m.workload.get("arrivals") == "poisson" else None,
            "max_concurrency": None if mode != "concurrency" or target is None else int(target),
            **{f"whywait_{k.removeprefix('whywait_')}": v for k, v in self.chosen.labels_of(self.number).items()},
            "whywait_point": self.number,
        }

    def figures(self) -> dict[str, Any]:
        ok, s = self.ok, self.seconds
        done = int(ok.sum())
        prompt, output = _sum(self.prompt[ok]), _sum(self.output[ok])
        peak = self._peaks()
        out: dict[str, Any] = {
            "duration": s,
            "completed": done,
            "failed": len(ok) - done,
            "total_input_tokens": prompt,
            "total_output_tokens": output,
            "request_throughput": _per(done, s),
            "request_goodput": self._goodput(),
            "output_throughput": _per(output, s),
            "total_token_throughput": None if prompt is None or output is None else _per(prompt + output, s),
            "max_output_tokens_per_s": peak[0],
            "max_concurrent_requests": peak[1],
            "rtfx": None,
        }
        gaps = self._gap[ok[self._gap_row]]
        values = {"ttft": self.ttft[ok], "tpot": self.tpot[ok], "itl": gaps, "e2el": self.latency[ok]}
        for name, of in values.items():
            out |= _stats(name, of[~np.isnan(of)] * 1e3)
        return out

    def details(self) -> dict[str, Any]:
        """A value per request, in the order of their ids; null where there is none."""
        m = self.chosen.run.manifest
        errors = ["" if ok else " ".join(w for w in (outcome or "", detail or "") if w)
                  for ok, outcome, detail in zip(self.ok.tolist(), self.req.text("outcome"),
                                                 self.req["detail"].tolist(), strict=True)]  # fmt: skip
        waited = np.nan_to_num((self.sent - self.req["due_ns"]) / NS_PER_S, nan=np.nan)
        capped = m.workload.get("max_in_flight") is not None
        return {
            "input_lens": _whole(self.prompt),
            "output_lens": _whole(np.where(self.ok, self.output, 0)),
            "ttfts": _list(self.ttft),
            "latencies": _list(self.latency),
            "start_times": _list(self.sent / NS_PER_S) if self.told else [None] * len(errors),
            "queue_times": _list(waited) if capped else [None] * len(errors),
            "generated_texts": [None] * len(errors),
            "errors": errors,
        }

    def gaps(self) -> Iterator[list[float]]:
        edges = np.searchsorted(self._gap_row, np.arange(len(self.req) + 1))
        for a, z in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield self._gap[a:z].tolist()

    def _goodput(self) -> float | None:
        """Requests per second within the SLO, by these very definitions (a TPOT of one token counts as 0)."""
        slo = self.chosen.run.manifest.slo
        known = {"ttft_ms": self.ttft, "tpot_ms": np.where(self.output <= 1, 0.0, self.tpot), "e2e_ms": self.latency}
        bounds = {k: v for k, v in slo.items() if k in known}
        if not bounds or len(bounds) < len(slo):
            return None
        good = self.ok.copy()
        for key, most in bounds.items():
            good &= known[key] * 1e3 <= most
        return _per(int(good.sum()), self.seconds)

    def _peaks(self) -> tuple[float | None, int | None]:
        """Stream events, and requests at work, in the fullest second since the first of the good was sent; None where
        what overlaps what is not known."""
        ok = np.flatnonzero(self.ok & (self.latency >= 0))
        if not len(ok) or not self.chosen.overlaps_known(self.number):
            return None, None
        zero = self.sent[ok].min() / NS_PER_S
        begun = (self.sent[ok] / NS_PER_S - zero).astype(np.int64)
        ended = (self.sent[ok] / NS_PER_S + self.latency[ok] - zero).astype(np.int64)
        size = int(ended.max()) + 2
        busy = np.cumsum(np.bincount(begun, minlength=size) - np.bincount(ended + 1, minlength=size))
        c, rows = self.chosen.content, np.zeros(len(self.chosen.run.requests), dtype=bool)
        rows[self.chosen.of_point(self.number)[ok]] = True
        times = c.t[rows[c.row]] / NS_PER_S - zero
        times = times[times >= 0].astype(np.int64)
        return (float(np.bincount(times).max()) if len(times) else None), int(busy.max())


def _stats(name: str, ms: Array) -> dict[str, float | None]:
    kinds = (("mean", np.mean), ("median", np.median), ("std", np.std))
    out: dict[str, float | None] = {f"{k}_{name}_ms": float(f(ms)) if len(ms) else None for k, f in kinds}
    out |= {f"p{p}_{name}_ms": float(np.percentile(ms, p)) if len(ms) else None for p in PERCENTILES}
    return out


def _sum(values: Array) -> int | None:
    """None where one of them is not known: a total of the rest would be too small."""
    return None if np.isnan(values).any() else int(values.sum())


def _per(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds


def _list(values: Array) -> list[float | None]:
    return [None if np.isnan(v) else v for v in values.tolist()]


def _whole(values: Array) -> list[int | None]:
    return [None if np.isnan(v) else int(v) for v in values.tolist()]
