"""Figures of a trial, and how ``client_accuracy.py`` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from accuracy_clients import Floats, Ints, Job, Trial

Row = dict[str, Any]

TTFT, GAP = ("p50", "p95", "mean"), ("p50", "p99")
RATIOS = ("stamp_error_p50", "stamp_error_p99", "cpu_per_chunk", "chunks_per_s")
# What issue A1 expects of whywait's client in one process, on a machine with nothing else to do.
EXPECTED = {"streams": 256, "stamp_p50_us": 20, "stamp_p99_us": 500, "cpu_us": 20, "error_percent": 1,
            "chunks_per_s": 45_000}  # fmt: skip


def stats(x: Any, names: Sequence[str]) -> dict[str, float | None]:
    """Mean and percentiles by name; all None of nothing."""
    if not len(x):
        return dict.fromkeys(names)
    return {n: float(np.mean(x)) if n == "mean" else float(np.percentile(x, int(n[1:]))) for n in names}


def against(said: dict[str, Any], truth: dict[str, Any] | float) -> dict[str, float | None]:
    """Error of each figure in percent of the true one."""
    out: dict[str, float | None] = {}
    for name, value in said.items():
        true = truth.get(name) if isinstance(truth, dict) else truth
        out[name] = None if value is None or not true else (value - true) / true * 100
    return out


def compared(said: dict[str, Any], stub: dict[str, Any] | None, nominal: float) -> Row:
    return {
        "client": said,
        "stub": stub,
        "error_percent": against(said, stub) if stub else dict.fromkeys(said),
        "nominal": nominal,
        "nominal_error_percent": against(said, nominal),
    }


def figures(job: Job, trial: Trial) -> Row:
    """What a trial of whywait or aiohttp says; every key of ``blank`` filled."""
    n, stream, truth = len(trial.t), trial.stream, trial.truth
    new = np.diff(stream, prepend=-1) != 0
    begin = np.flatnonzero(new)
    place = np.arange(n) - np.repeat(begin, np.diff(np.append(begin, n)))
    exact = trial.low < 0
    held = (trial.low <= truth) & (truth <= trial.t)
    late_us = (truth - trial.due[stream] - place * job.gap_ns) / 1e3
    first, sent = trial.first[stream[begin]], trial.sent[stream[begin]]
    ttft, true_ttft = stats((first - sent) / 1e6, TTFT), stats((truth[begin] - sent) / 1e6, TTFT)
    gap, true_gap = (g / 1e6 for g in (trial.gap[: 0 if trial.withheld else None], np.diff(truth)[~new[1:]]))
    stub_rate, kept = rates(job, trial, begin)
    return {
        **blank(job),
        "chunks": n,
        "streams_ok": trial.streams_ok,
        "chunks_per_s": stub_rate and kept and stub_rate * kept,
        "stub_chunks_per_s": stub_rate,
        "kept_share": kept,
        "stamp_error_us": {**stats(np.abs(trial.t - truth)[exact] / 1e3, ("p50", "p99")), "n": int(exact.sum())},
        "coalesced_share": shared(stream, trial.t),
        "intervals_hold_share": float(held[~exact].mean()) if not exact.all() else None,
        "cpu_us_per_chunk": trial.cpu_ns / 1e3 / n if n else None,
        "cpu_share": trial.cpu_ns / trial.wall_ns,
        "ttft_ms": compared(ttft, true_ttft, job.ttft_ms),
        "gap_ms": compared(stats(gap, GAP), stats(true_gap, GAP), job.gap_ms),
        "gap_withheld": trial.withheld,
        "read_lag_p99_ms": trial.read_lag_p99_ms,
        "stub_late_us": stats(late_us, ("p50", "p99")),
    }


def rates(job: Job, trial: Trial, begin: Any) -> tuple[float | None, float | None]:
    """Chunks per second that the stub sent while all streams were open, and the share of it that the client kept up
    with: the time the stub took to send everything, over the time until the client was done with it."""
    truth = trial.truth
    if not len(truth):
        return None, None
    opened, closed = int(truth[begin].max()), int(truth[np.append(begin[1:], len(truth)) - 1].min())
    if closed - opened < job.gap_ns:  # a short trial, or a slow start: everything counts
        opened, closed = int(truth.min()), int(truth.max())
    sent = int(((truth > opened) & (truth <= closed)).sum())
    start, end = int(truth.min()), int(truth.max())
    kept = min(1.0, (end - start) / max(trial.wall_ns - start, 1))
    return sent / max((closed - opened) / 1e9, 1e-9), kept


def blank(job: Job) -> Row:
    """Every key, with what is known beforehand."""
    nothing = dict.fromkeys(GAP)
    return {
        "client": job.client, "streams": job.streams, "stubs": len(job.urls),
        "offered_chunks_per_s": job.streams * 1000 / job.gap_ms, "chunks_expected": job.streams * job.tokens,
        "chunks": None, "streams_ok": 0, "chunks_per_s": None, "stub_chunks_per_s": None,
        "kept_share": None, "stamp_error_us": {**nothing, "n": 0},
        "coalesced_share": None, "intervals_hold_share": None, "cpu_us_per_chunk": None, "cpu_share": None,
        "ttft_ms": compared(dict.fromkeys(TTFT), None, job.ttft_ms),
        "gap_ms": compared(dict.fromkeys(GAP), None, job.gap_ms), "gap_withheld": False, "read_lag_p99_ms": None,
        "stub_late_us": dict(nothing), "others_cpu_share": None, "ratio_to_whywait": dict.fromkeys(RATIOS),
        "failed": None,
    }  # fmt: skip


def shared(stream: Ints, t: Ints) -> float | None:
    """Share of chunks that came in one read with another of their stream, so that one stamp is all there is."""
    if not len(t):
        return None
    same = (np.diff(stream) == 0) & (np.diff(t) == 0)
    return float((np.append(same, False) | np.insert(same, 0, False)).mean())


def figures_of_aiperf(job: Job, records: Iterable[Row]) -> Row:
    """AIPerf's own TTFT and chunk gaps. It does not keep the stub's stamps, so only the timetable can judge them."""
    good = [r["metrics"] for r in records if not r.get("error") and r.get("metrics")]
    gaps: list[float] = [v for m in good for v in m.get("inter_chunk_latency", {}).get("value", ())]
    ttft: Floats = np.array([m["time_to_first_token"]["value"] for m in good if "time_to_first_token" in m])
    ends = [r["metadata"] for r in records if r.get("metrics")]
    span_s = (max(m["request_end_ns"] for m in ends) - min(m["request_start_ns"] for m in ends)) / 1e9 if ends else 0
    ideal_s = job.aiperf_ramp_s + (job.ttft_ms + (job.tokens - 1) * job.gap_ms) / 1e3
    row = blank(job)
    return {
        **row,
        "chunks": len(gaps) + len(ttft),
        "streams_ok": len(good),
        "chunks_per_s": row["offered_chunks_per_s"] * min(1.0, ideal_s / span_s) if ends else None,
        "kept_share": min(1.0, ideal_s / span_s) if ends else None,
        "ttft_ms": compared(stats(ttft, TTFT), None, job.ttft_ms),
        "gap_ms": compared(stats(gaps, GAP), None, job.gap_ms),
    }


def add_ratios(rows: Iterable[Row]) -> None:
    """Each row's figures as multiples of whywait's at the same number of streams."""
    rows = list(rows)
    ours = {r["streams"]: measures(r) for r in rows if r["client"] == "whywait"}
    for row in rows:
        mine = measures(row)
        base = ours.get(row["streams"], {})
        row["ratio_to_whywait"] = {k: ratio(v, base.get(k)) for k, v in mine.items()}


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def measures(row: Row) -> dict[str, float | None]:
    error = row["stamp_error_us"]
    return dict(zip(RATIOS, (error["p50"], error["p99"], row["cpu_us_per_chunk"], row["chunks_per_s"]), strict=True))


# --- for people


def us(value: float | None) -> str:
    """Microseconds, milliseconds from 1,000 up."""
    if value is None:
        return "–"
    digits = 1 if value < 100 else 0
    return (
        f"{value:.{digits}f} µs"
        if value < 999.5
        else f"{value / 1e3:.3g} ms"
        if value < 1e6
        else f"{value / 1e6:.3g} s"
    )


def signed(value: float | None) -> str:
    if value is None:
        return "–"
    value = round(value, 2) + 0.0  # no minus before a zero
    return f"{value:+.2f} %" if abs(value) < 10 else f"{value:+,.0f} %"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.0f} %" if value >= 0.1 else f"{value * 100:.2g} %"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}×" if value < 9.95 else f"{value:,.0f}×"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool) -> str:
    """Aligned for a terminal, or as Markdown; the first two columns are to the left."""
    lines = [list(head), *map(list, rows)]
    if markdown:
        rule = ["---" if i < 2 else "---:" for i in range(len(head))]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))
    width = [max(len(cells[i]) for cells in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, width, strict=True))
        ).rstrip()
        for cells in lines
    )


def main_table(rows: Iterable[Row], markdown: bool) -> str:
    head = ("streams", "client", "stamp error p50", "p99", "CPU/chunk", "TTFT mean", "true", "error p50", "p95", "mean",
            "gap error p50", "p99", "coalesced", "chunks/s", "kept up")  # fmt: skip
    lines = []
    for r in rows:
        by = "error_percent" if r["ttft_ms"]["stub"] else "nominal_error_percent"
        mark = "" if r["ttft_ms"]["stub"] else "*"
        ttft, gap = r["ttft_ms"][by], r["gap_ms"][by]
        mean, rate = r["ttft_ms"]["client"]["mean"], r["chunks_per_s"]
        true = (r["ttft_ms"]["stub"] or {}).get("mean") or r["ttft_ms"]["nominal"]
        gaps = ["withheld"] * 2 if r["gap_withheld"] else [signed(gap[q]) + mark for q in GAP]
        lines.append([
            f"{r['streams']:,}", r["client"], us(r["stamp_error_us"]["p50"]), us(r["stamp_error_us"]["p99"]),
            us(r["cpu_us_per_chunk"]), "–" if mean is None else f"{mean:.1f} ms", f"{true:.1f}{mark}",
            *(signed(ttft[q]) + mark for q in TTFT), *gaps, share(r["coalesced_share"]), count(rate),
            share(r["kept_share"]),
        ])  # fmt: skip
    return table(head, lines, markdown)


def ratio_table(rows: Iterable[Row], markdown: bool) -> str:
    head = ("streams", "against whywait in the same run", "stamp error p50", "p99", "CPU/chunk", "chunks/s")
    lines = [
        [f"{r['streams']:,}", r["client"], *(times(r["ratio_to_whywait"][k]) for k in RATIOS)]
        for r in rows
        if r["client"] != "whywait" and any(v is not None for v in r["ratio_to_whywait"].values())
    ]
    return table(head, lines, markdown) if lines else ""


def saturation_table(rows: Iterable[Row], markdown: bool) -> str:
    head = ("client", "verdict", "streams", "offered", "chunks/s", "kept", "lag p99", "CPU", "coalesced",
            "stub late p99")  # fmt: skip
    lines = [
        [r["client"], r["verdict"], f"{r['streams']:,}", count(r["offered_chunks_per_s"]), count(r["chunks_per_s"]),
         share(r["kept_share"]), us(r["lag_p99_ms"] and r["lag_p99_ms"] * 1e3), share(r["cpu_share"]),
         share(r["coalesced_share"]),          us(r["stub_late_us"]["p99"])]
        for r in rows
    ]  # fmt: skip
    return table(head, lines, markdown)


def reading(rows: Sequence[Row]) -> str:
    """The table in a sentence or two, at the number of streams that the expectation is about, else the most."""
    ours = {r["streams"]: r for r in rows if r["client"] == "whywait" and r["chunks"]}
    if not ours:
        return ""
    n = EXPECTED["streams"] if EXPECTED["streams"] in ours else max(ours)
    mine = ours[n]
    error = mine["stamp_error_us"]
    out = (
        f"At {n:,} streams whywait's stamps are {us(error['p50'])} (p50) and {us(error['p99'])} (p99) off the truth, "
        f"for {us(mine['cpu_us_per_chunk'])} of CPU per chunk with parsing and recording"
    )
    for r in rows:
        relative = r["ratio_to_whywait"]
        if r["streams"] == n and r is not mine and relative["stamp_error_p50"]:
            p50, p99, cpu = (times(relative[k]) for k in RATIOS[:3])
            out += f"; {r['client']}'s are {p50} and {p99} as far off, for {cpu} the CPU"
        elif r["streams"] == n and r is not mine and r["chunks"]:
            said = r["ttft_ms"]["client"]["mean"]
            out += f"; {r['client']} says the TTFT is {said:.0f} ms, which is {r['ttft_ms']['nominal']:g} ms"
    return f"{out}." + (f" {verdict(mine)}" if n == EXPECTED["streams"] else "")


def verdict(row: Row) -> str:
    error, e = row["stamp_error_us"], EXPECTED
    worst = [abs(v) for key in ("ttft_ms", "gap_ms") for v in row[key]["error_percent"].values() if v is not None]
    checks: list[tuple[str, float | None, float]] = [
        (f"p50 ≤ {e['stamp_p50_us']} µs", error["p50"], e["stamp_p50_us"]),
        (f"p99 ≤ {e['stamp_p99_us']} µs", error["p99"], e["stamp_p99_us"]),
        (f"CPU ≤ {e['cpu_us']} µs", row["cpu_us_per_chunk"], e["cpu_us"]),
        (f"TTFT and gaps within {e['error_percent']} %", max(worst, default=None), e["error_percent"]),
    ]
    said = [f"{name} {'met' if value is not None and value <= limit else 'MISSED'}" for name, value, limit in checks]
    return f"Expected there: {', '.join(said)}."


def saturation_reading(found: dict[str, Row]) -> str:
    out = []
    for client, s in found.items():
        if s["chunks_per_s_per_core"] is None:
            out.append(f"{client} did not keep up with even {s['steps'][0]['offered_chunks_per_s']:,.0f} chunks/s.")
            continue
        least = "" if s["limit"] == "client behind" else "at least "
        relative = s["ratio_to_whywait"]
        versus = f", {times(relative)} whywait's" if relative and client != "whywait" else ""
        out.append(f"{client} keeps up with {least}{s['chunks_per_s_per_core']:,.0f} chunks/s on one core "
                   f"({s['streams']:,} streams){versus}.")  # fmt: skip
        if client == "whywait":
            met = s["chunks_per_s_per_core"] >= EXPECTED["chunks_per_s"]
            out.append(f"Expected ≥ {EXPECTED['chunks_per_s']:,}: {'met' if met else 'MISSED'}.")
    return " ".join(out)


def render(result: Row, markdown: bool) -> str:
    """The whole result, for a terminal or for docs/benchmarks.md."""
    parts: list[str] = [machine_line(result)]
    parts += [f"{'**Warning:** ' if markdown else 'WARNING: '}{w}" for w in result["warnings"]]
    rows = result["rows"]
    good = [r for r in rows if not r["failed"]]
    if good:
        parts += [main_table(good, markdown), ratio_table(good, markdown)]
        if any(not r["ttft_ms"]["stub"] for r in good):
            parts.append("* by the timetable alone: this client does not keep the stub's stamps")
        if any((r["coalesced_share"] or 0) > 0.5 for r in good):
            parts.append("Where most chunks are coalesced the CPU per chunk is low because several share one read; the "
                         "times of all but the last of them are lost.")  # fmt: skip
        parts.append(reading(good))
    found: dict[str, Row] = result["saturation"] or {}
    if found:
        parts += [
            saturation_table([s for f in found.values() for s in f["steps"]], markdown),
            saturation_reading(found),
        ]
    parts += [f"{r['client']} at {r['streams']:,} streams failed: {r['failed']}" for r in rows if r["failed"]]
    parts += [f"{client} was left out: {why}" for client, why in result["absent"].items()]
    return "\n\n".join(p for p in parts if p)


def machine_line(result: Row) -> str:
    m, s = {"cpu": "unknown CPU", "os": "?", "kernel": "", "python": "?", **result["machine"]}, result["settings"]
    cores = f"{m.get('cores_allowed', m.get('cores', '?'))} cores{' (virtual)' if m.get('virtual') else ''}"
    cpus = "not pinned" if not s["client_cpus"] else f"client on CPU {s['client_cpus'][0]}, stub on {s['stub_cpus'][0]}"
    return (
        f"{m['cpu']}, {cores}, {m['os']} {m['kernel']}, Python {m['python']}; load average at start "
        f"{result['load_average'][0]:.2f}; {s['seconds']:g} s at {s['rate']:g} chunks/s per stream, loopback; {cpus}"
    )
