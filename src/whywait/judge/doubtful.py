"""What holds only as far as nothing else hides: work is what is left when nothing waits, so a verdict of work is
withheld where a wait could not have been seen.

A wait that was seen stays: its evidence does not rest on the rest being known.
"""

from __future__ import annotations

from dataclasses import replace

from whywait.judge.evidence import Evidence, Seen
from whywait.judge.rules_device import unknown_step
from whywait.judge.rules_work import MEETS
from whywait.judge.verdict import WORK, Verdict
from whywait.units import ms, percent

HIDES = 0.25  # of the requests' time unexplained: a wait may be in it, larger than most work
SOME = 0.15  # unexplained; hides what is smaller
IDLE = 0.4  # of the device's time without any request: want of load whatever else is true
RUNS = 0.1  # cores: what uses less while requests are computed is a proxy, not the engine
PRESENT = 0.6  # of the time that requests are computed on a CPU, its threads must at least want to run
SLOWED, SLOWED_MS = 1.3, 5.0  # tokens arrive this many times as far apart as they are made, and that much more
LARGER = "other work takes more of the time, and what bounds that is not known"
SMALL = "whether the batch is small only for want of load is not known"
LEFT_OUT = 0.25  # of the gaps: what the others show need not be a step
BUSY = 0.3  # of the time requests are computed by their stamps, for either to be said


def withheld(v: Verdict, e: Evidence) -> Verdict:
    """``v``, or the same undecided, with why and what would decide."""
    p = next((q for q in e.points if q.number == v.point), None)
    if v.state != "holds" or v.kind != WORK or p is None:
        return v
    if v.cause == "want of load" and p.mode != "concurrency" and p.device.get("idle_no_work", 0.0) >= IDLE:
        return v
    why, step = _hidden(v, e, p) or _slowed(v, p) or _cores(v, e, p) or _drafts(v, e, p) or ("", "")
    if not why:
        return v
    return replace(v, state="undecided", against=(*v.against, why), next_step=step,
                   claim=f"{v.claim}, as far as can be seen: {why}")  # fmt: skip


def _hidden(v: Verdict, e: Evidence, p: Seen) -> tuple[str, str] | None:
    unknown = p.share["unknown"]
    if unknown < SOME or (unknown < HIDES and unknown <= (v.share or 0.0)):
        return None
    return f"{percent(unknown)} of the requests' time is not explained, and a wait may hide in it", unknown_step(e, p)


def _slowed(v: Verdict, p: Seen) -> tuple[str, str] | None:
    """A path, or a client, that takes longer for a token than the engine does."""
    made, came = p.streams.engine_gap_ms, p.streams.client_gap_ms
    if v.cause.endswith("decode") and (made is None or p.streams.client_gap_ms is None):
        return _other_steps(p)
    if not v.cause.endswith("decode") or made is None or came is None or came < SLOWED * made + SLOWED_MS:
        return None
    return (f"the engine makes a token every {ms(made)}, and they arrive every {ms(came)}",
            "measure the engine's own address, past any proxy")  # fmt: skip


def _other_steps(p: Seen) -> tuple[str, str] | None:
    """The engine says nothing of its steps, and the gaps that stand for them are not most of them: chunks of a known
    number of tokens are far quicker than the tokens of the same requests, more than their stalls explain."""
    step, token = p.p("itl_ms"), p.p("tpot_ms")
    left_out, decode = p.itl_left_out, p.share["decode"]
    if step is None or token is None or left_out is None or left_out < LEFT_OUT or not decode:
        return None
    if token < SLOWED * step * (1 + p.share["stall"] / decode) + SLOWED_MS:
        return None
    return (f"a step is taken as {ms(step)}, by gaps that leave out {percent(left_out)} of them, and the same "
            f"requests' tokens are {ms(token)} apart (TPOT)",
            "ask for token ids or usage per chunk, or read the engine's metrics (a /metrics page)")  # fmt: skip


def lesser(found: list[Verdict]) -> list[Verdict]:
    """``found`` with work undecided where another work of the same load is larger and undecided, or where it may be but
    what a small batch looks like."""
    most: dict[int | None, float] = {}
    for v in found:
        if v.kind == WORK and v.state == "undecided":
            most[v.point] = max(most.get(v.point, 0.0), v.share or 0.0)
    out = [_second(v, LARGER) if v.kind == WORK and v.state == "holds" and v.of == "request time"
           and (v.share or 0.0) < most.get(v.point, 0.0) else v for v in found]  # fmt: skip
    # A small batch mostly reads weights, whatever else is true: whether it need be small comes first.
    small = {v.point for v in found if v.cause == "want of load" and v.state == "undecided"}
    return [_second(v, SMALL) if v.cause == "weight-read-bound decode" and v.state == "holds" and v.point in small
            else v for v in out]  # fmt: skip


def _second(v: Verdict, why: str) -> Verdict:
    return replace(v, state="undecided", against=(*v.against, why), claim=f"{v.claim}; {why}",
                   next_step="measure a second concurrency: whywait sweep URL --concurrency 1,8")  # fmt: skip


def _cores(v: Verdict, e: Evidence, p: Seen) -> tuple[str, str] | None:
    """Slow cores stretch all work alike, so without the engine's own threads nothing tells them from work. A step that
    meets the roofline is not stretched; a GPU that was read has its own account."""
    if e.machine.get("engine_is_local") is None or e.machine.get("gpus") or _meets_model(v, p):
        return None
    step = "run whywait on the engine's host, or an agent there: whywait agent"
    # By the stamps alone: the device account is cut to the CPU time that was read.
    busy = (1 - p.device.get("idle_no_work", 0.0)) * p.working
    if p.cpu.run is None or (p.cpu.run < RUNS and busy >= BUSY):
        return "whether the engine had the cores it wanted was not read", step
    wanted = p.cpu.hot
    if e.machine.get("engine_is_local") and wanted is not None and busy >= BUSY and wanted < PRESENT * busy:
        return (f"the engine's busiest thread ran or wanted to run {percent(wanted)} of the time only, though requests "
                f"were computed {percent(busy)} of it", "see what stops the engine's process: cpulimit, a debugger, "
                "disk, or a device that was not read")  # fmt: skip
    return None


def _meets_model(v: Verdict, p: Seen) -> bool:
    error = (p.summary.get("decode_step") or {}).get("error")
    return v.cause.endswith("decode") and error is not None and abs(error) <= MEETS


def _drafts(v: Verdict, e: Evidence, p: Seen) -> tuple[str, str] | None:
    """Tokens drafted in vain look like compute of each sequence."""
    told = e.paged or p.draft is not None or e.machine.get("engine_is_local") is None
    if v.cause != "compute-bound decode" or told or _meets_model(v, p):
        return None
    flag = e.flag("metrics")
    return ("whether tokens are drafted in vain cannot be seen without the engine's metrics",
            f"let the engine publish its metrics ({flag or 'a /metrics page'})")  # fmt: skip
