"""Whether a figure of energy may be believed: each way in which it could be wrong, looked at, as a three-state check.

``fails``: it is wrong, or is of something else; ``undecided``: it may be, or nothing tells; ``holds``: looked at and
found well. The whole is as good as the worst of them. What NVML calls power is a mean over the last second on newer
devices (an instant, or 100 ms, on others), so that a trapezoid of it lags by as much: its edges are allowed for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whywait.analyze.device_evidence import ELSEWHERE
from whywait.analyze.energy import COUNTER, DEVICES, HOST, MODEL, POWER, Energy, Part
from whywait.analyze.energy_model import the_machine
from whywait.analyze.passive import is_passive
from whywait.analyze.trust import FOREIGN, foreign
from whywait.analyze.window import Window
from whywait.core.run import Run
from whywait.physics.fitted import fitted
from whywait.units import number, percent

HOLDS, UNDECIDED, FAILS = "holds", "undecided", "fails"
LONG_S = 30.0  # invariant 11: counter and integrated power are compared over windows of at least this
AGREE = 0.05  # by which they may differ, beside what the trailing mean allows
TRAILING_S = 1.0
EDGES = 0.02  # of the energy: how sure the window's edges are
WHOLE = 0.99  # of the window must be read
GAP = 0.1  # of the window without a reading
LATE = 0.02  # of the window: how long a reading may take to be answered
BUSY_MARGIN = 0.1


@dataclass(frozen=True)
class Check:
    """``what`` was looked at, its ``state``, and ``why`` in figures."""

    what: str
    state: str
    why: str


def worst(checks: list[Check]) -> str:
    """The state of the whole: a failed check fails it, one undecided leaves it undecided; none gives undecided."""
    states = {c.state for c in checks}
    return FAILS if FAILS in states else UNDECIDED if UNDECIDED in states or not states else HOLDS


def checks_of(run: Run, number_of_point: int, e: Energy, w: Window) -> list[Check]:
    """Every check of ``e``, the energy of window ``w`` of one load point of ``run`` (whole)."""
    found = [_simulated(run, e)] if run.manifest.made_by == "simulated" else [_meter(e)]
    found += [_device_set(e), _window(e, w, metered=e.how != MODEL and run.manifest.made_by != "simulated")]
    parts = [p for p in e.parts if p.joules is not None and p.how != MODEL]
    if parts:
        each: tuple[Callable[[Energy, list[Part]], Check], ...] = (_edges, _sampling, _resets)
        found += [*(c(e, parts) for c in each), _agreement(e, parts, run.manifest.made_by != "simulated")]
    found += _host(run, e)
    watched = is_passive(run.point(number_of_point))  # all of its work is others', and is what is billed
    return found if watched else [*found, _traffic(run, number_of_point)]


def _meter(e: Energy) -> Check:
    what = "a meter was read"
    lost = [f"{p.name}: {p.why}" for p in e.parts if p.joules is None and p.scope == DEVICES]
    if e.joules is None:
        why = "; ".join(lost) or "no energy counter and no power reading of the service's devices"
        return Check(what, UNDECIDED, f"{why}. NVML, a DCGM exporter (--gpu-metrics-url), RAPL; or --power-model")
    if e.how == MODEL:
        by = " and the busy time" if any(p.scope == DEVICES for p in e.parts) else ", all the time"
        return Check(what, UNDECIDED, f"no: the energy is modelled by the stated watts{by}")
    if e.how == POWER:
        return Check(what, UNDECIDED, "no counter could be used: power was integrated, a trailing mean of samples")
    return Check(what, HOLDS, f"an energy counter of each device ({e.read})")


def _device_set(e: Energy) -> Check:
    what = "the devices are the service's"
    if e.joules is None or not e.read:
        return Check(what, UNDECIDED, "none was read")
    if e.busy is not None and e.busy < ELSEWHERE and e.how != MODEL:
        return Check(what, FAILS, f"those read were busy {percent(e.busy)} of the time: the engine runs on others")
    if e.devices is None:
        return Check(what, UNDECIDED, f"{e.read} were read; how many serve is not known (--devices)")
    if e.devices_how == "inferred" and e.read == e.devices:
        rest = f", not {', '.join(e.unused)}" if e.unused else ""
        why = f"as many as were busy are taken ({e.devices}{rest}); --devices says how many serve"
        return Check(what, UNDECIDED, why)
    if not any(p.scope == DEVICES for p in e.parts):
        return Check(what, HOLDS, f"the engine computes on the host's processors ({e.devices_by or 'as the run says'})")
    serve = f"{e.devices} serve ({e.devices_by})" if e.devices_by else f"{e.devices} serve"
    if e.read < e.devices:
        return Check(what, FAILS, f"{serve}, {e.read} were read: the energy is too small")
    if e.read > e.devices:
        why = f"{serve}, {e.read} were read, and which serve cannot be told: the energy is too large"
        return Check(what, FAILS, why)
    if e.unused and not e.by_ids:
        why = f"{serve}: the {e.devices} busiest, without {', '.join(e.unused)}"
        sure = e.others_busy is not None and e.busy is not None and e.others_busy < e.busy - BUSY_MARGIN
        told = f"{why} (at most {percent(e.others_busy)} busy against {percent(e.busy)})"
        return Check(what, HOLDS if sure else UNDECIDED, told)
    return Check(what, HOLDS, f"{serve}, {e.read} were read")


def _simulated(run: Run, e: Energy) -> Check:
    """What a simulated device's readings are worth: the error of the power model on measured services."""
    what = "a meter was read"
    if e.joules is None:
        return Check(what, UNDECIDED, "none: the rated power of the simulated machine is not known")
    machine = the_machine(run)
    known = {x["machine"]: x for x in fitted()["power_errors"]}
    found = known.get(machine.fit if machine else "", known["default"])
    of = "" if found["machine"] == "default" or machine is None else f" of {machine.name}"
    why = (f"none: the power is the simulator's; on measured services{of} it was off by {percent(found['median'])} in "
           f"the median, {percent(found['p90'])} in the worst tenth, the error of the step's time apart")  # fmt: skip
    return Check(what, UNDECIDED, why)


def _window(e: Energy, w: Window, metered: bool) -> Check:
    what = "the window is steady and long"
    if w.whole:
        return Check(what, UNDECIDED, f"the whole point, warm-up and drain in it: {w.why or 'no steady part'}")
    if metered and e.seconds < LONG_S:
        why = f"{number(e.seconds)} s: meters that renew ten times a second or average over one want {LONG_S:.0f} s"
        return Check(what, UNDECIDED, why)
    return Check(what, HOLDS, f"{number(e.seconds)} s")


def _edges(e: Energy, _: list[Part]) -> Check:
    what = "the window's edges"
    if e.joules is None or e.low is None or e.high is None or e.joules <= 0:
        return Check(what, UNDECIDED, "no bounds")
    off = max(e.joules - e.low, e.high - e.joules) / e.joules
    why = f"samples around them leave {number(e.low)} to {number(e.high)} J, {percent(off)} off at most"
    return Check(what, HOLDS if off <= EDGES else UNDECIDED, why)


def _sampling(e: Energy, parts: list[Part]) -> Check:
    what = "sampling"
    least = min(p.covered for p in parts)
    gap = max((p.gap_s or 0.0) for p in parts)
    late = max(p.late_s for p in parts)
    why = (f"{min(p.samples for p in parts)} samples at least, {percent(least)} of the window covered, longest gap "
           f"{number(gap)} s, slowest answer {number(late)} s")  # fmt: skip
    well = least >= WHOLE and gap <= GAP * e.seconds and late <= LATE * e.seconds
    return Check(what, HOLDS if well else UNDECIDED, why)


def _resets(e: Energy, parts: list[Part]) -> Check:
    what = "no counter fell"
    fell = [p for p in e.parts if p.resets]
    if fell:
        return Check(what, UNDECIDED, "; ".join(f"{p.name}: {p.why or 'power was integrated instead'}" for p in fell))
    if not any(p.how == COUNTER for p in parts):
        return Check(what, UNDECIDED, "there is none")
    return Check(what, HOLDS, "each only grew")


def _agreement(e: Energy, parts: list[Part], metered: bool) -> Check:
    what = "counter and integrated power agree"
    both = [p for p in parts if p.how == COUNTER and p.integral is not None and p.joules]
    if not both:
        return Check(what, UNDECIDED, "only one of them was read")
    off, allowed, name = max(_apart(p) for p in both)
    why = f"{percent(off)} apart at most ({name}), {percent(allowed)} allowed"
    if e.seconds < LONG_S and metered:
        return Check(what, UNDECIDED, f"{why}; compared over {number(e.seconds)} s, {LONG_S:.0f} s are wanted")
    return Check(what, HOLDS if all(_apart(p)[0] <= _apart(p)[1] for p in both) else FAILS, why)


def _apart(p: Part) -> tuple[float, float, str]:
    joules = p.joules or 1.0
    allowed = AGREE + TRAILING_S * p.swing_w / joules
    return abs((p.integral or 0.0) - joules) / joules, allowed, p.name


def _host(run: Run, e: Energy) -> list[Check]:
    what = "the host"
    mine = [p for p in e.parts if p.scope == HOST]
    if not mine:
        none = "nobody simulates its power" if run.manifest.made_by == "simulated" else "RAPL was not readable"
        why = f"its energy is not in the figures: {none}, and no --power-model host_w=… was stated"
        return [Check(what, UNDECIDED, why)]
    if e.of(HOST) is None:
        return [Check(what, UNDECIDED, "; ".join(p.why for p in mine if p.why))]
    if mine[0].how == MODEL:
        return [Check(what, UNDECIDED, "modelled: the stated watts all the time")]
    if run.manifest.made_by == "measured" and run.manifest.machine.get("engine_is_local"):
        return [Check(what, UNDECIDED, "its counter holds the load client's work, too: both ran on this machine")]
    return [Check(what, HOLDS, f"{len(mine)} RAPL zones")]


def _traffic(run: Run, point: int) -> Check:
    what = "the work was ours"
    found = foreign(run, point)
    if not found:
        return Check(what, UNDECIDED, "the engine's counters were not read, so foreign traffic would not show")
    n = int((run.requests["point"] == point).sum())
    for f in found:
        if f.excess > FOREIGN * f.sent_low + (n if "tokens" in f.name else 1):
            why = f"{f.name} grew by {number(f.seen_low)}, we sent {number(f.sent_high)}: the energy served others, too"
            return Check(what, FAILS, why)
    return Check(what, HOLDS, "the engine's counters grew by what we sent")
