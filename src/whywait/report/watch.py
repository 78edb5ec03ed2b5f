"""The live view of ``watch``: the verdict over the last window, both accounts as bars, each replica, what to doubt."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whywait.report.text import DEVICE_NAMES, MARK, PHASE_NAMES
from whywait.units import ms, number, percent

BAR = 40
COLOURS = {"queue": "red", "prefill": "blue", "decode": "green", "stall": "magenta", "unknown": "bright_black",
           "prefill_busy": "blue", "decode_busy": "green", "idle_no_work": "white", "idle_host": "red",
           "idle_kv_blocked": "magenta", "throttled": "yellow"}  # fmt: skip
NAMES = {**DEVICE_NAMES, "idle_kv_blocked": "idle, no KV space", "throttled": "throttled"}
VERDICTS = 4


def view(summary: dict[str, Any], verdicts: list[Any], where: str, window_s: float) -> RenderableType:
    """One frame. ``summary`` and ``verdicts`` are those of a Run of one window."""
    head = Text.assemble(("whywait watch ", "bold"), f"{where} · last {window_s:.0f} s · {time.strftime('%H:%M:%S')}")
    if not summary["points"]:
        return Group(head, Text("no reading yet", style="dim"))
    p = summary["points"][-1]
    parts: list[RenderableType] = [head, Text()]
    for v in verdicts[:VERDICTS]:
        parts += _verdict(v)
    parts += [Text(), _load(p), Text(), _bar("requests wait for", p["phases"], PHASE_NAMES, "requests")]
    if slow := p["passive"]["slowest"]:
        rest = {k: {"share": v, "how": "measured"} for k, v in slow["shares"].items()}
        parts.append(_bar("the slowest tenth", rest, PHASE_NAMES, "requests"))
    shares = {k: {"share": v, "how": p["occupancy"]["how"][k]} for k, v in p["occupancy"]["shares"].items()}
    parts += [_bar("the device is in", shares, NAMES, "device"), Text(), _latencies(p), Text(), _replicas(p)]
    for d in summary["doubts"]:
        parts.append(Text(f"  {d['what']}: {d['why']}", style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _verdict(v: Any) -> list[RenderableType]:
    mark, style = MARK[v.state]
    share = f"  {percent(v.share)} of {v.of}" if v.share is not None and v.state != "fails" else ""
    out: list[RenderableType] = [
        Text.assemble((f"{mark} ", style), (v.claim, "bold" if v.state == "holds" else ""), (share, "cyan"))
    ]
    if v.state == "holds" and v.lever:
        out.append(Text(f"    what would change it: {v.lever}", style="dim"))
    elif v.state == "undecided" and v.next_step:
        out.append(Text(f"    to settle it: {v.next_step}", style="dim"))
    return out


def _load(p: dict[str, Any]) -> Text:
    own, engine = p["passive"], p["passive"]["engine"]
    facts = [("arriving/s", number(own["arriving_per_s"])), ("ended/s", number(p["requests_per_s"])),
             ("in flight", number(own["in_flight"])),
             ("queued", number(p["queue"])), ("batch", number(engine["batch"])),
             ("KV space", percent(p["kv_use"])), ("output tokens/s", number(p["output_tokens_per_s"])),
             ("steps/s", number(engine["steps_per_s"])), ("cached", percent(p["cached_share"])),
             ("accepted", percent(p["acceptance"]))]  # fmt: skip
    return Text("   ").join(Text.assemble((f"{k} ", "dim"), (v, "bold")) for k, v in facts if v != "–")


def _bar(title: str, parts: dict[str, Any], names: dict[str, str], what: str) -> RenderableType:
    """A stacked bar of shares, with a legend that says how each is known."""
    known = [(k, v["share"], v["how"]) for k, v in parts.items() if v["share"]]
    if not known:
        return Text(f"{title}: no {what} seen", style="dim")
    bar, legend, done = Text(), Text(), 0.0
    for name, share, how in known:
        width = round((done + share) * BAR) - round(done * BAR)
        done += share
        bar.append("█" * width, COLOURS.get(name, "cyan"))
        if share >= 0.005:
            legend.append(f" {names.get(name, name)} {percent(share)}", COLOURS.get(name, "cyan"))
            legend.append(f" ({how})" if how != "unknown" else "", "dim")
    return Text.assemble(f"{title:<18} ", bar, " ", legend)


def _latencies(p: dict[str, Any]) -> RenderableType:
    """Of the engine's histograms or spans; where it has neither, that is said."""
    if not any(p[key]["n"] for key in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")):
        return Text("no latencies: the engine publishes none, or no request ended", style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    for name in ("in the engine", "mean", "p50", "p95", "p99", "requests"):
        table.add_column(name, justify="left" if name == "in the engine" else "right", no_wrap=True)
    for key, name in (("ttft_ms", "TTFT"), ("itl_ms", "gap"), ("tpot_ms", "TPOT"), ("e2e_ms", "end to end")):
        found = p[key]
        if found["n"]:
            cells = [_between(found, q) for q in ("p50", "p95", "p99")]
            table.add_row(name, ms(found["mean"]) if found["mean"] is not None else "–", *cells, str(found["n"]))
    return table


def _between(found: dict[str, Any], q: str) -> str:
    """A percentile of a histogram lies in its bucket; that is what is known."""
    low, high = found["ci"][q]
    if low is None:
        return "–"
    if high is None:
        return f"> {ms(low)}"
    unit, name = (1e3, "s") if high >= 1000 else (1.0, "ms")
    return f"{low / unit:.3g}–{high / unit:.3g} {name}"


def _replicas(p: dict[str, Any]) -> RenderableType:
    rows = p["passive"]["replicas"]
    if len(rows) < 2:
        return Text()
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    names = ("replica", "running", "waiting", "KV space", "tokens/s", "preemptions", "restarts")
    for name in names:
        table.add_column(name, justify="left" if name == "replica" else "right")
    for r in rows:
        table.add_row(Text(r["instance"] or r["source"]), number(r["running"]), number(r["waiting"]),
                      percent(r["kv_use"]), number(r["output_tokens_per_s"]), number(r["preemptions"]),
                      number(r["restarts"]))  # fmt: skip
    return table
