"""The engine's own work: prompts, decode steps, prompts that hold up others' decode, and drafts computed in vain."""

from __future__ import annotations

from dataclasses import replace

from whywait.judge.evidence import MIXED, Evidence, Seen, ratio
from whywait.judge.rules_load import NARROW
from whywait.judge.verdict import WORK, Verdict
from whywait.physics.cost import COMPUTE, KV, WEIGHTS, Machine, Model, decode_step_s
from whywait.units import ms, percent

PREFILL = 0.25  # of the requests' time from which prefill is named
NEIGHBOUR = 0.05
BIG = 0.4  # of the computed prompt tokens in prompts far above the median: the neighbours are of another kind
MEETS = 0.3  # a modelled step may differ from the measured by this share of it
POOR = 0.3  # share of draft tokens accepted below which speculation costs more than it gives
BETWEEN = (0.4, 0.6)  # parts of a step that show neither
TURNED = 0.3  # of a step at the load in question, shared by its batch: below it the rest decides


def prompt(p: Seen) -> float:
    """Prefill, own and of requests of the same kind that one has to sit through."""
    return p.share["prefill"] + p.share["turn"] + p.share["stall"] * _by_neighbour(p)


def _by_neighbour(p: Seen) -> float:
    causes = p.causes.get("stall")
    return 1.0 if not causes else causes.get("neighbour's prefill", 0.0)


def _other_kind(p: Seen) -> bool:
    return p.label == MIXED or p.work.big_prompts >= BIG


def prefill(e: Evidence) -> list[Verdict]:
    out = []
    for p in e.plain:
        alike = not _other_kind(p)
        share = prompt(p) if alike else p.share["prefill"]
        if not p.known("prefill") or share < PREFILL:
            continue
        facts = [f"prefill is {percent(p.share['prefill'])} of the requests' time ({ms(p.mean_ms['prefill'])} each, "
                 f"{p.how['prefill']})"]  # fmt: skip
        if alike and share > p.share["prefill"] + 0.02:
            facts.append(
                f"another {percent(share - p.share['prefill'])} is waiting for others' prompts of the same kind"
            )
        if p.work.prompt and p.mean_ms["prefill"]:
            facts.append(f"prompts have {p.work.prompt:.0f} tokens (median)")
        mfu = (p.summary.get("mfu") or {}).get("prefill")
        if mfu is not None:
            facts.append(f"it computes at {percent(mfu)} of what the machine can (modelled)")
        out.append(
            Verdict(
                "compute-bound prefill",
                f"At {p.name} prompts take {percent(share)} of the time to compute",
                "holds",
                share,
                where=p.name,
                how=p.how["prefill"],
                evidence=tuple(facts),
                kind=WORK,
                lever="shorter prompts, or reuse of equal beginnings: " + (e.flag("prefix_cache") or "a prefix cache"),
                point=p.number,
                gain=f"up to {percent(share)} of the requests' time",
                cost="KV space for what is kept",
                next_step="send the same prompt twice: if the second is no faster, nothing is reused",
            )
        )
    return out


def neighbours_prefill(e: Evidence) -> list[Verdict]:
    """Decode that stands still while a neighbour's prompt of another kind is computed."""
    out = []
    for p in (q for q in e.points if q.ok):
        if not p.known("stall"):
            if p.label == MIXED:
                out.append(_mixed_gaps(e, p))
            continue
        stall = p.share["stall"] * _by_neighbour(p)
        share = stall + p.share["turn"]
        decoding = p.share["stall"] + p.share["decode"]
        if stall < NEIGHBOUR or share < NEIGHBOUR:
            if p.label == MIXED:
                out.append(
                    Verdict(
                        "neighbour's prefill",
                        "Long prompts beside short ones do not hold up decode",
                        "fails",
                        share,
                        where=p.name,
                        point=p.number,
                        evidence=(f"such waits are {percent(share)} of the requests' time",),
                    )
                )
            continue
        facts = [f"decode stands still {percent(stall / decoding)} of its time, in gaps that fall inside another "
                 f"request's prefill ({ms(p.mean_ms['stall'])} per request)"]  # fmt: skip
        if p.share["turn"] >= 0.01:
            facts.append(
                f"another {percent(p.share['turn'])} of the time requests with a place wait for the end of such "
                f"a prefill before their own ({ms(p.mean_ms['turn'])} per request)"
            )
        alike = next((q for q in e.plain if q.target == p.target and q.number != p.number), None)
        if alike is not None and alike.p("chunk_gap_ms", "p99") is not None:
            facts.append(f"p99 gap between chunks {ms(p.p('chunk_gap_ms', 'p99'))}, against "
                         f"{ms(alike.p('chunk_gap_ms', 'p99'))} at the same concurrency without them")  # fmt: skip
        other = _other_kind(p)
        if other and p.work.big_prompts:
            facts.append(f"{percent(p.work.big_prompts)} of the prompt tokens belong to prompts far above the median")
        elif not other:
            facts.append("all prompts are of one kind, so that each is in turn the neighbour")
        lever = f"smaller prefill pieces: {e.flag('prefill_chunk') or 'chunked prefill'}"
        out.append(
            Verdict(
                "neighbour's prefill",
                f"At {p.name}, requests stand still for a neighbour's prefill",
                "holds",
                share if other else stall,
                where=p.name,
                how=p.how["stall"],
                evidence=tuple(facts),
                lever=lever,
                point=p.number,
                kind=0 if other else WORK,
                gain="shorter worst gaps (p99)",
                cost="the long prompts' time to first token",
                next_step="repeat with a smaller prefill piece and compare the p99 gap",
            )
        )
    return out


def _mixed_gaps(e: Evidence, mixed: Seen) -> Verdict:
    """The engine does not say when it prefills: the gaps with and without long prompts are all there is."""
    alike = next((p for p in e.plain if p.target == mixed.target), None)
    here, there = mixed.p("chunk_gap_ms", "p99"), alike.p("chunk_gap_ms", "p99") if alike else None
    facts = () if ratio(here, there) is None else (f"p99 gap {ms(here)} with long prompts, {ms(there)} without",)
    claim = "Whether a neighbour's prefill stops decode is not visible: the engine does not say when it prefills"
    return Verdict("neighbour's prefill", claim, "undecided", None, where=mixed.name, how="inferred", evidence=facts,
                   next_step=f"lower {e.flag('token_budget') or 'the token budget of a step'} and compare the p99 gap",
                   point=mixed.number)  # fmt: skip


def speculation(e: Evidence) -> list[Verdict]:
    out = []
    for p in (q for q in e.plain if q.draft is not None):
        d = p.draft
        assert d is not None
        decode = p.share["decode"] + p.share["stall"]
        lost = d.lost
        share = lost * decode
        facts = [f"{percent(d.rate)} of {d.proposed:.0f} proposed tokens were accepted"]
        if d.rounds:
            facts.append(
                f"{d.proposed / d.rounds:.1f} proposed per round; {percent(lost)} of the positions computed were for "
                "nothing"
            )
        lever = f"turn it off, or propose fewer: {e.flag('speculation') or 'speculation'}"
        base = Verdict(
            "poor speculation",
            f"At {p.name} {percent(1 - d.rate)} of the draft tokens are rejected",
            "holds",
            share,
            where=p.name,
            how="derived",
            evidence=tuple(facts),
            lever=lever,
            point=p.number,
            gain=f"at most {percent(share)} of the requests' time",
            cost="none where drafts never agree",
            next_step="run once more without speculation: the same load is then faster or not",
        )
        if d.rate < POOR and share >= 0.02:
            out.append(base)
        elif d.rate >= 2 * POOR:
            out.append(Verdict(base.cause, f"Speculation agrees {percent(d.rate)} of the time", "fails", share,
                               where=p.name, evidence=tuple(facts), point=p.number))  # fmt: skip
    return out


def decode(e: Evidence) -> list[Verdict]:
    """What bounds a decode step: what the batch shares (the weights) or what each sequence adds.

    Model: a step of n sequences takes shared + n x each. Two widths give both. The median gap stands for the step, so
    that stalls by prefill do not enter; time that the threads had no core is taken out of both.
    """
    p = e.focus
    if p is None or p.share["decode"] < 0.1 or _step_ms(p) is None:
        return []
    modelled = _by_model(e, p)
    if modelled is not None:
        return [modelled]
    limit = e.limit() or float("inf")
    widths = sorted({(min(_width(q), limit), s) for q in e.plain if (s := _step_ms(q)) is not None})
    widths = [w for w in widths if w[0] >= 1]
    facts = [f"decode is {percent(p.share['decode'])} of the requests' time, {ms(p.step_ms)} a step"]
    facts += _roofline(e, _least(e), _step_ms(p))
    step = f"measure a second concurrency: whywait sweep URL --concurrency 1,{min(8, int(min(limit, 8)))}"
    if limit < 2:  # there is no second width while it works on one at a time
        step = f"give it more places ({e.flag('slots') or 'sequences at once'}), then measure a second concurrency"
    undecided = Verdict("weight-read-bound decode", "What bounds a decode step needs a second concurrency", "undecided",
                        p.share["decode"], where=p.name, how="modelled", evidence=tuple(facts), next_step=step,
                        point=p.number, kind=WORK)  # fmt: skip
    if len(widths) < 2 or widths[-1][0] < 1.5 * widths[0][0]:
        return [undecided]
    mine = min(_width(p), limit)
    (n1, t1), (n2, t2) = widths[0], min((w for w in widths if w[0] >= 1.5 * widths[0][0]),
                                        key=lambda w: abs(w[0] - mine))  # fmt: skip
    each = max(0.0, (t2 - t1) / (n2 - n1))
    shared = max(0.0, t1 - each * n1)
    return [_bound(e, undecided, (n1, t1, n2, t2), (shared, each, mine or n2))]


def _bound(
    e: Evidence, base: Verdict, seen: tuple[float, float, float, float], parts: tuple[float, float, float]
) -> Verdict:
    """``parts``: ms that the batch shares, ms of each sequence, and how many sequences the load in question has in a
    step: what bounds a step of one need not bound a step of many."""
    n1, t1, n2, t2 = seen
    shared, each, width = parts
    part = shared / (shared + each) if shared + each > 0 else 0.0
    here = shared / (shared + each * width) if shared + each > 0 else 0.0
    facts = (*base.evidence, f"a step of {n1:g} takes {ms(t1)}, of {n2:g} {ms(t2)}: {ms(shared)} that the batch shares "
             f"and {ms(each)} for each sequence (modelled)")  # fmt: skip
    turned = part >= BETWEEN[1] and here <= TURNED  # a wide step is no longer what a narrow one is
    if not turned and (BETWEEN[0] < part < BETWEEN[1] or here < BETWEEN[0] < part):
        claim = (f"Decode is bound about equally by weight reads and fixed costs ({percent(part)} of a step of one, "
                 f"{percent(here)} of one of {width:.0f}) and by compute")  # fmt: skip
        return Verdict(base.cause, claim, "undecided", base.share, where=base.where, how="modelled", evidence=facts,
                       next_step="more requests at each concurrency, or "
                       + e.profile("what of a step grows with the batch"), point=base.point, kind=WORK)  # fmt: skip
    if part < BETWEEN[1] and n2 < NARROW and (e.limit() or 2 * n2) >= 2 * n2:
        return replace(base, evidence=facts, claim=f"A step of {n2:g} takes nearly {n2:g} times that of one; whether a "
                       "wider one does, so few do not tell")  # fmt: skip
    kind, size = ("weights", here) if part >= BETWEEN[1] and not turned else (_of_each(e), 1 - here)
    return _named(e, base, kind, size, facts)


def _of_each(e: Evidence) -> str:
    """What a further sequence adds to a step: the reading of its KV where the roofline of model and machine says that
    this takes longer than computing its token (which holds even where the whole step is not met), else compute."""
    found = e.focus.summary.get("decode_step") if e.focus is not None else None
    shares = found["shares"] if found else {}
    return "KV" if (shares.get(KV) or 0.0) > (shares.get(COMPUTE) or 0.0) else "compute"


def _named(e: Evidence, base: Verdict, kind: str, size: float, facts: tuple[str, ...]) -> Verdict:
    cause, lever, gain, cost = {
        "weights": (
            "weight-read-bound decode",
            f"larger batches are nearly free; {e.by('fewer bytes', 'weight_dtype')}",
            "tokens per second grow with the batch",
            "quality at fewer bits; longer steps at larger batches",
        ),
        "KV": (
            "KV-read-bound decode",
            f"{e.by('smaller KV', 'kv_dtype')}; shorter contexts",
            "step time in proportion to the bytes saved",
            "quality at fewer bits",
        ),
        "compute": (
            "compute-bound decode",
            f"more cores or faster kernels: {e.flag('cpu_threads') or 'a faster device'}",
            "step time in proportion",
            "hardware",
        ),
    }[kind]
    words = {"weights": "weight reads (and what else a batch shares)", "KV": "KV reads", "compute": "compute"}[kind]
    return Verdict(
        cause,
        f"At {base.where} decode is bound by {words} ({percent(size)} of a step, modelled)",
        "holds",
        base.share,
        where=base.where,
        how="modelled",
        evidence=facts,
        lever=lever,
        gain=gain,
        cost=cost,
        next_step=e.profile("kernels that wait for memory, against kernels that compute (on CPUs: cache misses, IPC)"),
        point=base.point,
        kind=WORK,
    )


def _by_model(e: Evidence, p: Seen) -> Verdict | None:
    """By the roofline of this model and machine, where it meets the step that was measured."""
    found = p.summary.get("decode_step")
    if not found or (found.get("error") is not None and abs(found["error"]) > MEETS):
        return None
    shares = {k: float(v or 0.0) for k, v in found["shares"].items()}
    top = max((WEIGHTS, KV, COMPUTE), key=lambda k: shares.get(k, 0.0))
    if shares.get(top, 0.0) < 0.5:
        return None
    facts = (f"decode is {percent(p.share['decode'])} of the requests' time, {ms(found['step_ms'])} a step of "
             f"{found['batch']:.1f} sequences with {found['context']:.0f} tokens of context",
             "of a step " + ", ".join(f"{k} {percent(v)}" for k, v in shares.items() if v >= 0.01)
             + f" ({found['how']}: {found['of']})")  # fmt: skip
    base = Verdict(
        "weight-read-bound decode", "", "undecided", p.share["decode"], where=p.name, point=p.number, kind=WORK
    )
    return _named(e, base, {WEIGHTS: "weights", KV: "KV", COMPUTE: "compute"}[top], shares[top], facts)


def _width(p: Seen) -> float:
    """How many sequences a step could hold, but for the engine's limit."""
    return p.target if p.mode == "concurrency" else p.in_flight or 0.0


def _step_ms(p: Seen) -> float | None:
    """A step without the time that the computing threads had no core."""
    step = p.step_ms
    return None if step is None else step * (1 - p.starved)


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
    return [f"roofline (modelled): for one sequence weight reads need at least {ms(least['weight reads'])} and compute "
            f"{ms(least['compute'])} ({rates['how']}, threads: {rates['threads']})"]  # fmt: skip
