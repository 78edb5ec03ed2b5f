"""The energy of a stretch of time: of all devices of the service and of its host, each by the best meter there is.

A device's energy counter is read off straight lines at the window's edges; readings carry when they were asked for and
answered, so the samples around an edge bound it surely. Where there is no counter, or it started anew inside, the
trapezoid of power stands in (NVML's power is a trailing average, see ``energy_checks``). What no meter saw is null, or
modelled where the caller states a model. Pure: a Run in, figures out. Joules, watts, nanoseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from whywait.analyze.counters import Floats, Series, delta_of, series
from whywait.analyze.device_evidence import ELSEWHERE
from whywait.analyze.energy_model import IdlePower, PowerModel, idle_host_w, idle_power, modelled
from whywait.core.run import Run
from whywait.units import NS_PER_S

COVERED = 0.9  # of the window: a meter that was read for less says nothing of the rest
ALL = "all"  # the label of a series that stands for every device of the service (simulated runs)
DEVICES, HOST = "devices", "host"
CPU = "cpu"  # ``engine.device_kind`` of an engine on the machine's processors
COUNTER, POWER, MODEL = "counter", "power", "modelled"
DISTINCT_J, LAG_J = 1e5, 2e3  # counters above the first that stand closer than the second are of one device
_RAPL = ("package_energy_joules_total", "dram_energy_joules_total")


@dataclass(frozen=True)
class Meter:
    """One device (or RAPL zone): its energy counter and its power readings, where there are such."""

    name: str
    scope: str
    gpu: str
    counter: Series | None = None
    power: Series | None = None


@dataclass(frozen=True)
class Part:
    """What one meter says of a window. ``joules`` lies surely in [``low``, ``high``] as far as sampling goes; None
    where it cannot say, ``why`` then. ``integral`` is the trapezoid of power and ``swing_w`` its range, ``covered`` the
    share of the window read (with less than all of it ``joules`` is scaled up), ``gap_s`` the longest time without a
    sample, ``late_s`` the longest a reading took, ``samples`` how many lie inside."""

    name: str
    scope: str
    how: str
    joules: float | None
    low: float | None
    high: float | None
    integral: float | None = None
    covered: float = 0.0
    gap_s: float | None = None
    late_s: float = 0.0
    samples: int = 0
    resets: int = 0
    swing_w: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Energy:
    """The energy of ``start_ns`` … ``end_ns``. ``joules`` is of all ``parts``: the devices' and, where ``with_host``,
    the host's; None where the devices' is not known. ``devices`` is how many serve (None: not known), ``read`` how many
    were read, ``idle`` what they draw with nothing to do (``idle_host_w``: the host, in W), ``unused`` the devices of
    the machine that were left out, ``busy`` and ``others_busy`` how busy those read, and the busiest of the others, say
    they were. ``devices_how``: told (by the Run or the caller), or inferred (as many as were busy); ``devices_by`` who
    told, in words; ``by_ids``: which they are was told, too."""

    start_ns: int
    end_ns: int
    joules: float | None
    low: float | None
    high: float | None
    how: str
    parts: tuple[Part, ...]
    devices: int | None
    read: int
    idle: IdlePower
    busy: float | None = None
    unused: tuple[str, ...] = ()
    others_busy: float | None = None
    meters: tuple[Meter, ...] = field(default=(), repr=False)
    model: PowerModel | None = None
    devices_how: str = "told"
    devices_by: str = ""
    by_ids: bool = False
    idle_host_w: float | None = None

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S

    def of(self, scope: str) -> float | None:
        """Joules of the devices or of the host; None where not known."""
        mine = [p for p in self.parts if p.scope == scope]
        return None if not mine or any(p.joules is None for p in mine) else sum(p.joules or 0.0 for p in mine)

    @property
    def with_host(self) -> bool:
        return self.of(HOST) is not None

    @property
    def idle_w(self) -> float | None:
        """What all that is in ``joules`` draws with nothing to do: the devices and, where it is in, the host; None
        where a part of it is not known."""
        parts = [self.idle.watts] if self.of(DEVICES) is not None or not self.with_host else []
        return _sum([*parts, self.idle_host_w] if self.with_host else parts)


def energy_of(run: Run, window: tuple[int, int], devices: int | None = None, model: PowerModel | None = None) -> Energy:
    """The energy of ``window`` (ns) of a whole ``run``.

    Args:
        devices: how many devices serve, where the Run does not tell (or tells wrong); default by its manifest.
        model: watts to assume where no meter was read; everything from it is labelled modelled.
    """
    devices, by = (devices, "--devices") if devices is not None else told_devices(run)
    told = devices is not None
    devices = devices if told else _busy_devices(run, window)
    meters, unused, others = _chosen(run, window, devices)
    parts = [_part(m, window) for m in meters]
    read = sum(devices or 1 if m.gpu == ALL else 1 for m in meters)
    host = [_part(m, window) for m in _rapl(run)]
    if model is not None:
        if not any(p.joules is not None for p in parts) and model.busy_w is not None:
            parts = [_modelled(run, window, DEVICES, (model, devices))]
        if not any(p.joules is not None for p in host) and model.host_w is not None:
            host = [_modelled(run, window, HOST, (model, devices))]
    if not meters and not any(p.how == MODEL for p in parts) and host and _on_cpu(run):
        read = 1  # an engine on CPUs: its device is the host
    known = parts or (host if read and not meters else [])
    if not known or any(p.joules is None for p in known):
        total: tuple[float | None, float | None, float | None] = (None, None, None)
    else:
        counted = parts + [p for p in host if all(q.joules is not None for q in host)]
        total = (_sum([p.joules for p in counted]), _sum([p.low for p in counted]), _sum([p.high for p in counted]))
    order = (MODEL, POWER, COUNTER)
    how = next((h for h in order if any(p.how == h for p in known)), "") if total[0] is not None else ""
    idle = idle_power(run, [m.power for m in meters if m.power is not None], devices, model)
    used = _busy(run, window)
    seen = [used[m.name] for m in meters if m.name in used]
    busy, how_many = float(np.mean(seen)) if seen else None, "told" if told or devices is None else "inferred"
    return Energy(*window, *total, how, (*parts, *host), devices, read, idle, busy, unused, others, tuple(meters),
                  model, how_many, by, bool(meters) and {m.gpu for m in meters} == _ids(run),
                  idle_host_w(run, [m.counter for m in _rapl(run) if m.counter is not None], model))  # fmt: skip


def told_devices(run: Run) -> tuple[int | None, str]:
    """How many devices the Run itself says the engine uses, and who told it; of an engine on CPUs one: the machine."""
    engine = run.manifest.engine
    told = engine.get("devices")
    if isinstance(told, (int, float)) and told >= 1:
        return int(told), str(engine.get("devices_how") or "the run says so")
    gpus = run.manifest.machine.get("gpus")
    if gpus and engine.get("device_kind") != CPU:
        return (1, "its machine has one GPU") if len(gpus) == 1 else (None, "")
    return (1, "this machine has no GPU") if _on_cpu(run) else (None, "")


def _ids(run: Run) -> set[str]:
    """The numbers of the GPUs that the engine's processes have in use; empty where that was not seen."""
    return {str(i) for i in run.manifest.engine.get("device_ids") or ()}


def _on_cpu(run: Run) -> bool:
    """Whether the engine ran on this machine's processors: its processes were seen to; else (of a Run that does not
    say) it is local, and the machine was looked at for other devices."""
    if "device_kind" in run.manifest.engine:
        return bool(run.manifest.engine["device_kind"] == CPU)
    return run.manifest.machine.get("engine_is_local") is True and run.manifest.machine.get("gpus") == []


def between(run: Run, e: Energy, edges: list[int]) -> list[float] | None:
    """Joules of each piece between consecutive ``edges`` (ns), by the meters that ``e`` rests on; None where a piece is
    not covered. Scaled so that they add up to ``e.joules``."""
    if e.joules is None:
        return None
    meters = {m.name: m for m in (*e.meters, *_rapl(run))}
    pieces = []
    for a, b in pairwise(edges):
        total = 0.0
        for p in e.parts:
            if p.joules is None or (p.scope == HOST and not e.with_host):
                continue
            m = meters.get(p.name)
            if p.how == MODEL or m is None:
                found = modelled(run, (a, b), p.scope, e.model, e.devices)[0] if e.model else None
            else:
                part = _part(m, (a, b), p.how)
                found = part.joules
            if found is None:
                return None
            total += found
        pieces.append(total)
    scale = e.joules / sum(pieces) if sum(pieces) > 0 else 0.0
    return [x * scale for x in pieces]


def _chosen(
    run: Run, window: tuple[int, int], devices: int | None
) -> tuple[list[Meter], tuple[str, ...], float | None]:
    """The meters of the service's devices: of a machine with more of them the ``devices`` busiest, the names of the
    others, and how busy the busiest of those was (None where that was not read)."""
    found: dict[tuple[str, str], dict[str, Series]] = {}
    for name in ("energy_joules_total", "power_watts"):
        for s in series(run.readings, name, "gpu"):
            s = _possible(s)
            found.setdefault(_key(s), {}).setdefault(name, s)  # the slices of a device (MIG) all tell the whole's
    meters = [Meter(f"{source} {gpu}".strip(), DEVICES, gpu, f.get("energy_joules_total"), f.get("power_watts"))
              for (source, gpu), f in sorted(found.items())]  # fmt: skip
    meters = [m for i, m in enumerate(meters) if not any(_same(m, other, window) for other in meters[:i])]
    if run.manifest.engine.get("device_kind") == CPU:
        return [], (), None  # whatever GPUs there are, it is on none of them
    if devices is None or len(meters) <= devices or any(m.gpu == ALL for m in meters):
        return meters, (), None
    used = _busy(run, window)
    ids = _ids(run)
    mine = [m for m in meters if m.gpu in ids]
    if len(mine) == devices == len(ids):  # seen to be in use by the engine's processes
        rest = [m for m in meters if m not in mine]
        return mine, tuple(m.name for m in rest), max((used[m.name] for m in rest if m.name in used), default=None)
    if not all(m.name in used for m in meters):
        return meters, (), None  # which of them serve cannot be told
    order = sorted(meters, key=lambda m: used[m.name], reverse=True)
    out = order[devices:]
    return order[:devices], tuple(m.name for m in out), max(used[m.name] for m in out)


def _possible(s: Series) -> Series:
    """Without what no meter can have read: negative or endless values. What is left is judged by how much it covers."""
    real = np.isfinite(s.values) & (s.values >= 0)
    return s if real.all() else s._replace(asked_ns=s.asked_ns[real], answered_ns=s.answered_ns[real],
                                           values=s.values[real])  # fmt: skip


def _busy(run: Run, window: tuple[int, int]) -> dict[str, float]:
    """By the name of its meter the mean share of the window in which each device ran something."""
    used = {}
    for s in series(run.readings, "busy_share", "gpu"):
        inside = (s.t_ns >= window[0]) & (s.t_ns <= window[1])
        if inside.any():
            used[" ".join(_key(s)).strip()] = float(s.values[inside].mean())
    return used


def _busy_devices(run: Run, window: tuple[int, int]) -> int | None:
    """As many as were busy, where each says how busy it was; None where none was, or not all say."""
    meters = _chosen(run, window, None)[0]
    used = _busy(run, window)
    if not meters or any(m.gpu == ALL or m.name not in used for m in meters):
        return None  # one meter of all devices does not tell how many were busy
    return sum(used[m.name] >= ELSEWHERE for m in meters) or None


def _same(a: Meter, b: Meter, window: tuple[int, int]) -> bool:
    """Whether two sources read one device (NVML and an exporter of the same machine): the same number, and counters
    that stand alike. They count from when the driver was loaded, so those of two devices do not."""
    if a.gpu != b.gpu or a.counter is None or b.counter is None:
        return False
    at = [float(np.interp(window[0], m.t_ns, m.values)) for m in (a.counter, b.counter)]
    return min(at) > DISTINCT_J and abs(at[0] - at[1]) < LAG_J


def _key(s: Series) -> tuple[str, str]:
    own = {k: v for k, v in s.labels.items() if k not in ("name", "modelName", "mig")}
    return s.source, s.labels.get("gpu") or (json.dumps(own, sort_keys=True) if own else "")


def _rapl(run: Run) -> list[Meter]:
    """Packages and their memory: what the probe reads of RAPL does not wrap (it adds up what the counter grew by)."""
    return [
        Meter(f"{s.source} {name.partition('_')[0]} {s.labels.get('zone', '')}".strip(), HOST, "", s)
        for name in _RAPL
        for s in series(run.readings, name, "host")
    ]


def _part(m: Meter, window: tuple[int, int], how: str = "") -> Part:
    """What a meter says of a window; ``how`` holds it to one of its kinds."""
    by_counter = None if m.counter is None or how == POWER else _counted(m, window)
    by_power = None if m.power is None else _integrated(m, window)
    if by_counter is not None and by_counter.joules is not None:
        return Part(**{**by_counter.__dict__, "integral": by_power.joules if by_power else None,
                       "swing_w": by_power.swing_w if by_power else 0.0})  # fmt: skip
    if by_power is not None and by_power.joules is not None and how != COUNTER:
        resets = by_counter.resets if by_counter else 0
        return Part(**{**by_power.__dict__, "resets": resets, "why": by_counter.why if by_counter else ""})
    return by_counter or by_power or Part(m.name, m.scope, "", None, None, None, why="no reading in the window")


def _counted(m: Meter, window: tuple[int, int]) -> Part | None:
    s = m.counter
    d = None if s is None else delta_of(s, window)
    if s is None or d is None:
        return None
    covered = (d.end_ns - d.start_ns) / max(window[1] - window[0], 1)
    spread = _spread(s, window)
    if d.resets:
        why = f"its counter fell inside the window ({d.resets} ×: reset or wrap); it grew by {d.value:.0f} J at least"
        return Part(m.name, m.scope, COUNTER, None, d.low, None, None, covered, *spread, d.resets, 0.0, why)
    if covered < COVERED:
        why = f"it was read for {covered:.0%} of the window only"
        return Part(m.name, m.scope, COUNTER, None, d.low, None, None, covered, *spread, 0, 0.0, why)
    if d.value <= 0:
        return Part(m.name, m.scope, COUNTER, None, None, None, None, covered, *spread, why="its counter did not move")
    stale = d.value * _stale_s(s, window) / ((d.end_ns - d.start_ns) / NS_PER_S)
    low, high = max(min(d.low, d.value) - stale, 0.0), max(d.high, d.value) + stale
    return Part(m.name, m.scope, COUNTER, d.value / covered, low / covered, high / covered, None, covered, *spread)


def _stale_s(s: Series, window: tuple[int, int]) -> float:
    """How much older than its reading a counter's value may be (s): the longest it took to renew itself in the window,
    beyond the time between readings."""
    t, v = s.t_ns, s.values
    changed = t[1:][np.diff(v) != 0]
    changed = changed[(changed >= window[0]) & (changed <= window[1])]
    if len(changed) < 2:
        return 0.0
    return float(max(np.diff(changed).max() - np.diff(t).max(), 0.0)) / NS_PER_S


def _integrated(m: Meter, window: tuple[int, int]) -> Part | None:
    """The trapezoid of power; its bounds take the lesser, or the greater, of each two samples for the time between."""
    s = m.power
    if s is None or len(s.values) < 2:
        return None
    t = s.t_ns
    start, end = max(float(window[0]), float(t[0])), min(float(window[1]), float(t[-1]))
    covered = (end - start) / max(window[1] - window[0], 1)
    spread = _spread(s, window)
    if covered < COVERED or end <= start:
        return Part(m.name, m.scope, POWER, None, None, None, None, max(covered, 0.0), *spread,
                    why=f"it was read for {max(covered, 0.0):.0%} of the window only")  # fmt: skip
    grid = np.unique(np.concatenate(([start], t[(t > start) & (t < end)], [end])))
    watts, wide = np.interp(grid, t, s.values), np.diff(grid) / NS_PER_S
    sums = [float((w * wide).sum()) / covered for w in ((watts[1:] + watts[:-1]) / 2,
            np.minimum(watts[1:], watts[:-1]), np.maximum(watts[1:], watts[:-1]))]  # fmt: skip
    swing = float(watts.max() - watts.min())
    return Part(m.name, m.scope, POWER, sums[0], sums[1], sums[2], sums[0], covered, *spread, 0, swing)


def _spread(s: Series, window: tuple[int, int]) -> tuple[float | None, float, int]:
    """Longest time without a sample, longest a reading took (s), and how many samples lie inside."""
    t = s.t_ns
    inside = (t >= window[0]) & (t <= window[1])
    near = np.clip(t, window[0], window[1])
    stops: Floats = np.unique(np.concatenate(([window[0]], near, [window[1]])).astype(np.float64))
    late = float((s.answered_ns - s.asked_ns)[inside].max(initial=0.0)) / NS_PER_S
    return float(np.diff(stops).max(initial=0.0)) / NS_PER_S, late, int(inside.sum())


def _modelled(run: Run, window: tuple[int, int], scope: str, by: tuple[PowerModel, int | None]) -> Part:
    value, low, high = modelled(run, window, scope, *by)
    name = "all devices, by the stated power" if scope == DEVICES else "host, by the stated power"
    why = "" if value is not None else "how many devices serve is not known"
    return Part(name, scope, MODEL, value, low, high, covered=1.0, why=why)


def _sum(values: list[float | None]) -> float | None:
    return None if any(v is None for v in values) else sum(v or 0.0 for v in values)
