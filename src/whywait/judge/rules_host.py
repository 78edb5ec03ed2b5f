"""The host of the engine: a CPU quota, other processes on its cores, its own frontend and scheduler."""

from __future__ import annotations

from dataclasses import replace

from whywait.judge.evidence import Evidence, Seen
from whywait.judge.verdict import Verdict
from whywait.units import ms, percent

LOST = 0.15  # of the time the computing threads wanted a core
AT_QUOTA = 0.9  # of the quota used: no more can be had, whoever else runs
THROTTLED = 0.2  # of the quota's periods
SERVING = 0.3  # of the engine's CPU time, by what serves rather than computes
SATURATED = 0.6  # of the time, in which a serving process wants a core
EXPLAINS = 0.4  # of the time outside, by what serving threads ran or wanted to run; not asked for where they use
OUTWEIGHS = 0.5  # of the engine's CPU time
FRONTEND = 0.15  # of the requests' time
UNFED = 0.2  # of the time with work, in which the device runs nothing
UNUSED = 0.1  # a device that is busy less than this is hardly the one the engine computes on


def host(e: Evidence) -> list[Verdict]:
    out = []
    for p in e.plain or e.points:
        if p.cpu.run is not None:
            out += quota(p) or noise(e, p)
        out += frontend(e, p)
    return out


def quota(p: Seen) -> list[Verdict]:
    c = p.cpu
    periods, spent = c.throttled_periods or 0.0, c.throttled or 0.0
    if periods < THROTTLED or spent <= 0.01:
        return []
    at = c.quota is not None and c.run is not None and c.run >= AT_QUOTA * c.quota
    lost = max(c.lost or 0.0, 0.0) if at else min(c.lost if c.lost is not None else spent, spent)
    facts = [f"the control group was throttled in {percent(periods)} of its periods, {spent:.2f} s per second"]
    if c.quota is not None:
        facts.append(f"the engine used {c.run:.2f} of {c.quota:.2f} cores that its quota allows")
    if c.lost is not None:
        facts.append(f"its computing threads were ready without a core {percent(c.lost)} of the time they wanted one")
    share = max(min(lost, 1.0) * p.working, 0.0)
    return [
        Verdict(
            "cpu quota",
            f"At {p.name} the engine has used up its CPU quota",
            "holds",
            share,
            where=p.name,
            how="derived",
            evidence=tuple(facts),
            cost="cores that others have now",
            lever="raise the quota of the engine's control group (cpu.max, or the container's CPU limit)",
            gain=f"up to {percent(share)} of the requests' time",
            next_step="raise the quota and repeat",
            point=p.number,
        )
    ]


def noise(e: Evidence, p: Seen) -> list[Verdict]:
    c = p.cpu
    if c.lost is None or c.wait is None or p.starved < LOST:
        return []
    share = p.starved * p.working
    facts = [f"the engine's computing threads were ready without a core {percent(c.lost)} of the time they wanted "
             f"one ({c.wait:.2f} s per second and thread)"]  # fmt: skip
    name = f" (most: {c.neighbour})" if c.neighbour else ""
    where = e.flag("cpu_threads")
    lever = "give the engine cores of its own (taskset, cpuset), away from other processes"
    if where:
        lever += f"; no more threads than free cores: {where}"
    verdict = Verdict("noisy neighbour", f"At {p.name} other processes run on the engine's cores", "holds", share,
                      where=p.name, how="derived", evidence=tuple(facts), lever=lever, point=p.number,
                      gain=f"up to {percent(share)} of the requests' time", cost="cores that others have now",
                      next_step="stop the neighbour, or move the engine, and repeat")  # fmt: skip
    if c.others is None:
        claim = f"At {p.name} the engine's threads wait for cores; who has them was not read"
        return [_replaced(verdict, claim, tuple(facts))]
    facts.append(f"others used {c.others:.2f} cores of those it may run on{name}")
    if c.others < 0.3 * c.wait:  # of one thread's wait at least must be somebody else's doing
        claim = f"At {p.name} the engine's threads wait for cores, mostly for each other or this client"
        return [_replaced(verdict, claim, tuple(facts))]
    return [replace(verdict, evidence=tuple(facts))]


def _replaced(v: Verdict, claim: str, facts: tuple[str, ...]) -> Verdict:
    return Verdict(v.cause, claim, "undecided", v.share, where=v.where, how=v.how, evidence=facts, point=v.point,
                   next_step="as many threads as cores, then repeat: " + v.lever)  # fmt: skip


def frontend(e: Evidence, p: Seen) -> list[Verdict]:
    """Work outside the model: requests parsed, tokenised, scheduled and streamed while the device idles."""
    return _by_process(e, p) or _by_accounts(e, p) or _by_device(e, p)


def _by_process(e: Evidence, p: Seen) -> list[Verdict]:
    """A serving process of its own that wants a core nearly all the time, and uses much of the engine's CPU time."""
    c = p.cpu
    if c.serving_top is None or not c.run:
        return []
    name, ran, wanted = c.serving_top
    if ran < SERVING * c.run or ran + wanted < SATURATED:
        return []
    share = min(p.share["frontend"] + p.share["unknown"] + p.working * ran / c.run, 1.0)
    facts = [
        f"the serving process ({name}) wanted a core {percent(min(ran + wanted, 1.0))} of the time and used {ran:.2f} "
        f"of one: {percent(ran / c.run)} of the engine's CPU time"
    ]
    if p.share["frontend"]:
        facts.append(f"{ms(p.mean_ms['frontend'])} of each request pass in neither queue, model nor path")
    return [_host_cpu(e, p, share, facts)]


def _by_accounts(e: Evidence, p: Seen) -> list[Verdict]:
    """Threads that do not compute use much CPU while requests are in neither queue, prefill nor decode."""
    c = p.cpu
    outside = sum(p.share[k] for k in ("frontend", "unknown"))
    spent_ms = sum(p.mean_ms[k] for k in ("frontend", "unknown"))
    if not c.run or c.serving is None or outside < FRONTEND or not p.known("prefill") or not p.ok:
        return []
    wanted_ms = (c.serving + (c.serving_wait or 0.0)) * p.seconds / p.ok * 1e3
    explained = c.serving >= OUTWEIGHS * c.run or wanted_ms >= EXPLAINS * spent_ms
    if c.serving < SERVING * c.run or c.run < 0.1 or not explained:
        return []
    facts = [f"{percent(outside)} of the requests' time ({ms(spent_ms)} each) is in neither queue, prefill nor decode",
             f"threads of the engine that do not compute used {c.serving:.2f} of its {c.run:.2f} cores: "
             f"{ms(c.serving * p.seconds / p.ok * 1e3)} of CPU per request"]  # fmt: skip
    return [_host_cpu(e, p, outside, facts)]


def _by_device(e: Evidence, p: Seen) -> list[Verdict]:
    """A GPU that runs nothing while requests are in work: nobody feeds it. Where threads lack cores or the quota is
    used up, those are why. Of several devices one may wait for another (pipeline stages): nothing here tells that."""
    account = p.summary.get("occupancy") or {}
    note = (account.get("notes") or {}).get("idle_host", "")
    worked = 1 - p.device.get("idle_no_work", 0.0)
    share = p.device.get("idle_host", 0.0) / worked if worked > 0 else 0.0
    starved = p.starved >= LOST or (p.cpu.throttled_periods or 0.0) >= THROTTLED
    if "GPU" not in note or e.engine.get("threads") or starved or not UNFED <= share <= 1 - UNUSED:
        return []
    facts = [f"{note}: of the time with work it ran nothing for {percent(share)}"]
    if p.cpu.run is not None:
        facts.append(f"the engine's processes used {p.cpu.run:.2f} cores meanwhile")
    step = e.profile("gaps between kernels, and what the scheduler does in them")
    claim = f"At {p.name} the device idles with work queued: the engine's host side does not feed it"
    found = replace(_host_cpu(e, p, share, facts), of="device time", next_step=step, claim=claim)
    if (account.get("devices") or 1) > 1:
        claim = f"At {p.name} devices idle with work queued: the host does not feed them, or they wait for each other"
        return [replace(found, state="undecided", claim=claim, lever="", gain="", cost="")]
    return [found]


def _host_cpu(e: Evidence, p: Seen, share: float, facts: list[str]) -> Verdict:
    lever = "more or faster cores for what parses, tokenises and streams: " + (e.flag("frontend") or "more frontends")
    return Verdict("host CPU", f"At {p.name} the engine's frontend is busier than its model", "holds", share,
                   where=p.name, how="derived", evidence=tuple(facts), lever=lever, point=p.number,
                   gain=f"up to {percent(share)} of the requests' time", cost="cores",
                   next_step="perf top on the serving process while it is busy")  # fmt: skip
