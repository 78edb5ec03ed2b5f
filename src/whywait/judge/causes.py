"""The rules: each looks at the evidence for one cause and returns verdicts, or none where the cause has no business.

A rule never guesses: without evidence its verdict is ``undecided`` with the cheapest step that would decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whywait.judge.evidence import MIXED, Evidence, Seen, ratio
from whywait.judge.verdict import Verdict
from whywait.physics.cost import Machine, Model, decode_step_s
from whywait.units import ms, number, percent

ABSENT, PRESENT = 0.02, 0.10  # share of time below which a wait is ruled out, above which it is named


def queue(e: Evidence) -> list[Verdict]:
    """Waiting for a place: behind the slot (sequence) limit, for KV space, or a load that outruns the service."""
    out = []
    known = [p for p in e.plain if p.how.get("queue", "unknown") != "unknown"]
    quiet = [p for p in known if p.share["queue"] < ABSENT]
    worst = max(known, key=lambda p: p.share["queue"], default=None)
    if quiet:
        names = ", ".join(f"{p.target:g}" for p in quiet)
        facts = [_waited(p) for p in quiet[:3]]
        closed = quiet[0].mode == "concurrency"
        claim = "No queue for a place at " + (f"concurrency {names}" if closed else f"{names} requests/s")
        out.append(Verdict("queue", claim, "fails", quiet[-1].share["queue"], where=quiet[-1].name,
                           how=quiet[-1].how["queue"], evidence=tuple(facts), point=quiet[-1].number))  # fmt: skip
    if worst is None or worst.share["queue"] < PRESENT:
        return out
    return [*out, _queue_cause(e, worst)]


def _queue_cause(e: Evidence, p: Seen) -> Verdict:
    slots, seen_limit = e.engine.get("slots"), e.seen_limit()
    evidence, against = [_waited(p)], []
    waiting, running, kv = p.gauges["waiting"], p.gauges["running"], p.gauges["kv_use"]
    if waiting:
        trend = "" if p.waiting_trend is None else f", {p.waiting_trend:+.1f} from the first third to the last"
        evidence.append(
            f"the engine's own queue held {waiting[0]:.1f} requests on average (max {waiting[1]:.0f}{trend})"
        )
    if running and slots:
        evidence.append(f"{running[0]:.1f} requests were in work on average, of {slots} places")
    blocked = p.preemptions or 0
    if kv and (kv[1] >= 0.95 or blocked) and (not slots or not running or running[1] < slots):
        facts = [*evidence, f"KV space was up to {percent(kv[1])} full; {blocked:.0f} preemptions"]
        lever = _more_kv(e)
        claim = f"At {p.name} requests wait for KV space"
        return Verdict("kv space", claim, "holds", p.share["queue"], where=p.name, how=p.how["queue"],
                       evidence=tuple(facts), lever=lever, point=p.number)  # fmt: skip
    by_slots = p.causes.get("queue", {}).get("slot limit", 0.0)
    full = bool(slots and running and running[1] >= slots and running[0] >= 0.8 * slots)
    against += _more_slots_would(e, p, slots)
    if p.mode == "rate" and (p.waiting_trend or 0) > 2:
        claim = f"{p.target:g} requests/s outrun the service: its queue grows"
        return Verdict("rate beyond capacity", claim, "holds", p.share["queue"], where=p.name, how=p.how["queue"],
                       evidence=tuple(evidence), lever="less load, or more replicas", point=p.number)  # fmt: skip
    if slots and (by_slots > 0.5 or full):
        evidence.append(
            f"{p.target:g} in flight against {slots} slots" if p.mode == "concurrency" else f"{slots} slots"
        )
        claim = f"At {p.name} requests queue behind the engine's limit of {slots} at a time"
        lever = f"raise the limit: {e.flag('slots') or 'the sequence limit'} (now {slots})"
        return Verdict("queue behind the slot limit", claim, "holds", p.share["queue"], where=p.name,
                       how=p.how["queue"], evidence=tuple(evidence), against=tuple(against), lever=lever,
                       next_step=e.by("run once more with twice the slots", "slots"), point=p.number)  # fmt: skip
    if not slots and seen_limit and waiting and (not kv or kv[1] < 0.9):
        evidence.append(f"never more than {seen_limit} were in work while others waited, and KV space was not full")
        claim = f"At {p.name} requests queue behind a limit of {seen_limit} at a time (inferred)"
        return Verdict("queue behind the slot limit", claim, "holds", p.share["queue"], where=p.name, how="inferred",
                       evidence=tuple(evidence), against=tuple(_more_slots_would(e, p, seen_limit)),
                       lever=f"raise the limit: {e.flag('slots') or 'sequences at once'} (now {seen_limit}, inferred)",
                       next_step=e.by("run once more with twice as many", "slots"), point=p.number)  # fmt: skip
    claim = f"At {p.name} requests queue inside the engine; which limit holds them is not visible"
    step = f"start the engine by --launch, or look up its limit ({e.flag('slots') or 'sequences at once'})"
    return Verdict("queue", claim, "undecided", p.share["queue"], where=p.name, how=p.how["queue"],
                   evidence=tuple(evidence), against=tuple(against), next_step=step, point=p.number)  # fmt: skip


def _more_slots_would(e: Evidence, p: Seen, slots: int | None) -> list[str]:
    """What the batch's own scaling says a higher limit would buy."""
    single = e.single()
    full = [q.tokens_per_s for q in e.plain if q.tokens_per_s and q.mode == p.mode and slots and q.target >= slots]
    gain = ratio(max(full, default=None), single.tokens_per_s) if single else None
    if gain is None or not slots or slots < 2 or gain > 0.6 * slots:
        return []
    return [f"{slots} at a time make only {gain:.1f}× the tokens/s of one: more places would turn much of this queue "
            "into slower decode rather than remove it"]  # fmt: skip


def _waited(p: Seen) -> str:
    return (f"at {p.name} {percent(p.share['queue'])} of the requests' time is queue for a place "
            f"({ms(p.mean_ms['queue'])} of {ms(sum(p.mean_ms.values()))}, {p.how.get('queue')})")  # fmt: skip


def neighbours_prefill(e: Evidence) -> list[Verdict]:
    """Decode that stands still while a neighbour's prompt is computed."""
    known = [p for p in e.points if p.ok and p.how.get("stall", "unknown") != "unknown"]
    mixed = [p for p in e.points if p.ok and p.label == MIXED]
    if not known:
        return [_mixed_gaps(e, mixed[0])] if mixed else []
    worst = max(known, key=_neighbour)
    decoding = worst.share["stall"] + worst.share["decode"]
    part = worst.share["stall"] / decoding if decoding else 0.0
    if _neighbour(worst) < 0.05:
        if not mixed:
            return []
        claim = "Long prompts beside short ones do not hold up decode"
        return [Verdict("neighbour's prefill", claim, "fails", _neighbour(worst), where=worst.name,
                        evidence=(f"such waits are {percent(_neighbour(worst))} of the requests' time",),
                        point=worst.number)]  # fmt: skip
    alike = next((p for p in e.plain if p.target == worst.target and p.number != worst.number), None)
    evidence = [f"at {worst.name} decode stands still {percent(part)} of its time, in gaps that fall inside another "
                f"request's prefill ({ms(worst.mean_ms['stall'])} per request)"]  # fmt: skip
    if worst.share["turn"] >= 0.01:
        evidence.append(f"another {percent(worst.share['turn'])} of the time requests with a place wait for the end of "
                        f"such a prefill before their own ({ms(worst.mean_ms['turn'])} per request)")  # fmt: skip
    if alike is not None and alike.p("chunk_gap_ms", "p99") is not None:
        evidence.append(f"p99 gap between chunks {ms(worst.p('chunk_gap_ms', 'p99'))}, against "
                        f"{ms(alike.p('chunk_gap_ms', 'p99'))} at the same concurrency without them")  # fmt: skip
    lever = f"smaller prefill pieces: {e.flag('prefill_chunk') or 'chunked prefill'}; costs the long prompts some TTFT"
    claim = f"At {worst.name}, requests stand still for a neighbour's prefill"
    return [Verdict("neighbour's prefill", claim, "holds", _neighbour(worst), where=worst.name,
                    how=worst.how["stall"], evidence=tuple(evidence), lever=lever, point=worst.number,
                    next_step="repeat with a smaller prefill piece and compare the p99 gap")]  # fmt: skip


def _neighbour(p: Seen) -> float:
    return p.share["stall"] + p.share["turn"]


def _mixed_gaps(e: Evidence, mixed: Seen) -> Verdict:
    """The engine does not say when it prefills: the gaps with and without long prompts are all there is."""
    alike = next((p for p in e.plain if p.target == mixed.target), None)
    here = mixed.p("chunk_gap_ms", "p99")
    there = alike.p("chunk_gap_ms", "p99") if alike else None
    grown = ratio(here, there)
    facts = () if grown is None else (f"p99 gap {ms(here)} with long prompts, {ms(there)} without",)
    claim = "Whether a neighbour's prefill stops decode is not visible: the engine does not say when it prefills"
    return Verdict("neighbour's prefill", claim, "undecided", None, where=mixed.name, how="inferred", evidence=facts,
                   next_step=f"lower {e.flag('token_budget') or 'the token budget of a step'} and compare the p99 gap",
                   point=mixed.number)  # fmt: skip


def decode(e: Evidence) -> list[Verdict]:
    """What bounds a decode step at concurrency 1: what the batch shares (the weights) or what each sequence adds.

    Model: a step of n sequences takes shared + n x each. Two widths give both. The median gap stands for the step, so
    that stalls by prefill do not enter. Sharing shows weight reads (with unpacking), growth shows compute.
    """
    one = e.single()
    base = _step_ms(one) if one is not None else None
    if one is None or base is None or one.share["decode"] < PRESENT:
        return []
    slots = e.engine.get("slots") or e.seen_limit() or float("inf")
    step = f"measure a second concurrency: whywait sweep URL --concurrency 1,{min(8, int(min(slots, 8)))}"
    facts = [f"at {one.name} decode is {percent(one.share['decode'])} of the requests' time, {ms(base)} a step"]
    least = _least(e)
    lines = _roofline(e, least, base)
    undecided = Verdict(
        "decode",
        "Decode takes most of the time; what bounds a step needs a second concurrency",
        "undecided",
        one.share["decode"],
        where=one.name,
        how="modelled",
        evidence=(*facts, *lines),
        next_step=step,
        point=one.number,
    )
    widths = [(min(p.target, slots), _step_ms(p)) for p in e.plain if p.mode == "concurrency" and p.target > 1]
    usable = [(width, wide) for width, wide in widths if wide is not None and width > 1]
    if not usable:
        return [undecided]
    width, wide = min(usable, key=lambda x: x[0])
    each = max(0.0, (wide - base) / (width - 1))
    shared = max(0.0, base - each)
    part = shared / (shared + each) if shared + each > 0 else 0.0
    facts.append(
        f"a step of {width:g} sequences takes {ms(wide)}: {ms(shared)} that the batch shares, and {ms(each)} "
        "for each sequence (modelled)"
    )
    found = replace(undecided, evidence=(*facts, *lines))
    if 0.4 < part < 0.6:
        claim = f"Decode is bound about equally by weight reads and fixed costs ({percent(part)}) and by compute"
        settle = "more requests at each concurrency (a larger --budget), or a profiler of the engine"
        return [replace(found, claim=claim, next_step=settle)]
    return [_bound(e, found, part, shared, least)]


def _bound(e: Evidence, found: Verdict, part: float, shared: float, least: dict[str, float] | None) -> Verdict:
    kind, lever = "compute", f"more cores or faster kernels: {e.flag('cpu_threads') or 'a faster device'}"
    against: tuple[str, ...] = ()
    if part >= 0.6:
        kind, lever = "weight reads", f"larger batches are nearly free; {e.by('fewer bytes', 'weight_dtype')}"
        if least is not None and least["weight reads"] < 0.5 * shared:
            against = (
                f"reading alone needs only {ms(least['weight reads'])} of the shared {ms(shared)} at the rate measured "
                "here; the rest is unpacking or overhead of a step, which a batch shares too",
            )
    size = percent(part if kind == "weight reads" else 1 - part)
    return replace(
        found,
        cause=f"decode bound by {kind}",
        claim=f"At {found.where} decode is bound by {kind} ({size} of a step, modelled)",
        state="holds",
        against=against,
        lever=lever,
        next_step="a profiler of the engine would settle it (perf stat: cache misses, IPC)",
    )


def _step_ms(p: Seen) -> float | None:
    return p.p("itl_ms") or p.p("tpot_ms") or p.p("chunk_gap_ms")


def _least(e: Evidence) -> dict[str, float] | None:
    """Roofline of a decode step of one sequence, ms by resource; None where machine or model are not known."""
    rates, size, params = e.machine.get("engine_rates"), e.engine.get("model_bytes"), e.engine.get("model_params")
    if not rates or not size or not params:
        return None
    machine = Machine(rates["read_bytes_per_s"], rates["f32_flops_per_s"], rates["how"])
    return {k: v * 1e3 for k, v in decode_step_s(Model(size, params), machine, 1).items()}


def _roofline(e: Evidence, least: dict[str, float] | None, step: float | None) -> list[str]:
    if least is None or not step:
        return []
    rates = e.machine["engine_rates"]
    reads = ms(least["weight reads"])
    return [f"roofline (modelled): of the {ms(step)} weight reads need at least {reads} and compute "
            f"{ms(least['compute'])} ({rates['how']}, threads: {rates['threads']})"]  # fmt: skip


def want_of_load(e: Evidence) -> list[Verdict]:
    """A device that could do more if more were asked of it."""
    one = e.single()
    if one is None:
        return []
    best = max(e.plain, key=lambda p: p.tokens_per_s or 0.0)
    gain = ratio(best.tokens_per_s, one.tokens_per_s)
    idle = one.device.get("idle_no_work", 0.0)
    facts = [f"at {one.name} the device has no request at all {percent(idle)} of the time (between requests)"]
    if gain is None or best is one:
        return [Verdict("want of load", "Whether more load would fill the device is not known", "undecided", idle,
                        of="device time", where=one.name, how="inferred", evidence=tuple(facts),
                        next_step="measure a second concurrency", point=one.number)]  # fmt: skip
    facts.append(
        f"{best.name} makes {gain:.2f}× its tokens/s ({number(best.tokens_per_s)} against {number(one.tokens_per_s)})"
    )
    lost = 1 - 1 / gain if gain > 1 else 0.0
    if lost < PRESENT:
        claim = f"One request at a time already fills the device ({gain:.2f}× at most)"
        return [Verdict("want of load", claim, "fails", max(lost, idle), of="device time", where=one.name,
                        how="measured", evidence=tuple(facts), point=one.number)]  # fmt: skip
    claim = f"At {one.name} the device waits for load: {percent(lost)} of the best throughput seen goes unused"
    return [Verdict("want of load", claim, "holds", lost, of="device throughput", where=one.name, evidence=tuple(facts),
                    lever=f"send more at once: throughput grows up to {best.name}", point=one.number)]  # fmt: skip


def prefill(e: Evidence) -> list[Verdict]:
    known = [p for p in e.plain if p.how.get("prefill", "unknown") != "unknown"]
    worst = max(known, key=lambda p: p.share["prefill"], default=None)
    if worst is None or worst.share["prefill"] < 0.25:
        return []
    fact = (f"at {worst.name} prefill is {percent(worst.share['prefill'])} of the requests' time "
            f"({ms(worst.mean_ms['prefill'])} per request, {worst.how['prefill']})")  # fmt: skip
    return [Verdict("prefill", f"At {worst.name} prompts take {percent(worst.share['prefill'])} of the time to compute",
                    "holds", worst.share["prefill"], where=worst.name, how=worst.how["prefill"], evidence=(fact,),
                    lever=e.by("reuse equal beginnings (ours are salted: --cache cold)", "prefix_cache"),
                    point=worst.number)]  # fmt: skip


def kv_space(e: Evidence) -> list[Verdict]:
    for p in e.plain:
        preempted, kv = p.preemptions, p.gauges["kv_use"]
        if preempted:
            facts = (
                f"{preempted:.0f} preemptions at {p.name}",
                f"KV space up to {percent(kv[1] if kv else None)} full",
            )
            return [Verdict("kv space", f"At {p.name} the engine runs out of KV space and computes again", "holds",
                            p.share["queue"] + p.share["stall"], where=p.name, evidence=facts, point=p.number,
                            lever=_more_kv(e))]  # fmt: skip
    return []


def _more_kv(e: Evidence) -> str:
    return f"{e.by('more KV space', 'kv_space')}; {e.by('smaller KV', 'kv_dtype')}"


def outside(e: Evidence) -> list[Verdict]:
    """Waits that are not the engine's: the network, and the client itself."""
    out = []
    for phase, cause, lever in (
        ("network", "network latency", "measure from nearer, or look for a proxy on the way"),
        ("client", "the client itself", "give whywait cores of its own, or lower the load"),
    ):
        worst = max(e.plain, key=_share_of(phase), default=None)
        if worst is not None and worst.share[phase] >= PRESENT:
            fact = f"at {worst.name} {percent(worst.share[phase])} of the requests' time ({ms(worst.mean_ms[phase])})"
            out.append(Verdict(cause, f"At {worst.name} requests wait for {cause}", "holds", worst.share[phase],
                               where=worst.name, how=worst.how[phase], evidence=(fact,), lever=lever,
                               point=worst.number))  # fmt: skip
    return out


def _share_of(phase: str) -> Callable[[Seen], float]:
    return lambda p: p.share[phase]


def unexplained(e: Evidence) -> list[Verdict]:
    worst = max(e.plain, key=lambda p: p.share["unknown"], default=None)
    if worst is None or worst.share["unknown"] < 0.15:
        return []
    step = f"let the engine publish its metrics ({e.flag('metrics') or 'a /metrics page'})"
    if e.flag("request_metrics"):
        step += f", or its stages per request ({e.flag('request_metrics')})"
    claim = f"At {worst.name} {percent(worst.share['unknown'])} of the requests' time is not explained by anything seen"
    return [Verdict("unexplained", claim, "undecided", worst.share["unknown"], where=worst.name, how="unknown",
                    next_step=step, point=worst.number)]  # fmt: skip


RULES = (queue, neighbours_prefill, decode, want_of_load, prefill, kv_space, outside, unexplained)
