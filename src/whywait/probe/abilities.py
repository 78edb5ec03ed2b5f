"""What this machine lets us measure, tried and not guessed: read only, nothing is changed and nothing leaves it.

Each function gives one :class:`~whywait.core.ability.Ability`; ``root`` is another / to look in.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from whywait.core.ability import Ability
from whywait.net import stamps
from whywait.net.clock import bracket
from whywait.probe.amd import RocmSmi
from whywait.probe.gpu import Nvml
from whywait.probe.host import Energy, System, read, read_int
from whywait.probe.process import Cgroups
from whywait.units import number, percent

LOOK_S = 0.5  # how long the machine's load is looked at
TRIES = 20  # packets over loopback
SPARE_FILES = 64  # descriptors that are not sockets of requests
FEW_STREAMS = 1000
#: extra -> (a module it brings, what is lost without it)
EXTRAS = {
    "engine": ("xllamacpp", "the embedded engine: diagnose without a URL, try, exam"),
    "sim": ("numba", "the simulator compiled; without it the same results, slower"),
    "tokenizer": ("tokenizers", "exact prompt lengths where the service has no /tokenize"),
    "otlp-grpc": ("grpc", "spans over gRPC (--otlp-grpc-listen); over HTTP they need no extra"),
    "perfetto": ("perfetto", "export --to perfetto"),
    "yaml": ("yaml", "import of GuideLLM's YAML"),
    "quality": ("jsonschema", "JSON schemas in tasks of quality"),
    "lm-eval": ("lm_eval", "--suite of quality"),
    "ray": ("ray", "--ray: load and grids on the workers of a Ray cluster"),
    "aic": ("aiconfigurator_core", "simulate --kernels aic"),
}


def machine(root: str = "/", dcgm: bool = False) -> Iterator[Ability]:
    """All of this machine, in the order in which they are told. ``dcgm``: an exporter's page was given, and answers."""
    yield kernel_stamps()
    yield tcp_info()
    yield event_loop()
    yield clock(root)
    yield from cores(root)
    yield box_load(root)
    yield open_files()
    yield processes(root)
    yield pressure(root)
    yield rapl(root)
    yield from gpus()
    yield gpu_counters(dcgm)
    yield profiler(root)
    yield from extras()


def kernel_stamps() -> Ability:
    """Bytes over loopback, and whether the kernel says when they came."""
    name, serves = "kernel-stamps", "times of chunks that do not move when this machine is busy"
    late = []
    try:
        for stamp, sent in _over_loopback():
            if stamp:
                late.append(stamp - sent)
    except OSError as exc:
        return Ability(name, "unknown", f"loopback does not work: {exc.strerror}", serves)
    if late:
        seen = f"stamps of the kernel, {sorted(late)[len(late) // 2] / 1000:.0f} µs after sending (loopback, median)"
        return Ability(name, "can", seen, serves)
    why = "the kernel gives no receive stamps (SO_TIMESTAMPING)" if stamps.LINUX else f"{sys.platform} has none"
    return Ability(
        name,
        "cannot",
        f"{why}: times are by the client's own clock",
        serves,
        "run the client on Linux; in a sandbox (gVisor, some containers) run it outside",
    )


def _over_loopback() -> Iterator[tuple[int, int]]:
    """(the kernel's stamp or 0, when it was sent), Unix ns."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        with socket.create_connection(listening.getsockname(), timeout=2) as a:
            b, _ = listening.accept()
            with b:
                a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                b.settimeout(2)
                stamps.enable(b)
                for _ in range(TRIES):
                    sent = time.time_ns()
                    a.sendall(b"x")
                    _, ancillary, _, _ = b.recvmsg(64, stamps.ANCILLARY)
                    yield stamps.unix_ns(ancillary), sent


def tcp_info() -> Ability:
    serves = "the network phase: round trip and segments sent again"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        with socket.create_connection(listening.getsockname(), timeout=2) as s:
            rtt, retrans = stamps.tcp_info(s)
    if rtt is None and retrans is None:
        return Ability("tcp-info", "cannot", "the kernel does not tell (TCP_INFO)", serves, "run the client on Linux")
    state = "can" if rtt is not None and retrans is not None else "partly"
    return Ability("tcp-info", state, "round trip and retransmits of each connection", serves)


def event_loop() -> Ability:
    serves = "many streams at once from one process"
    if hasattr(select, "epoll"):
        return Ability("epoll", "can", "one look costs the same at any number of streams", serves)
    return Ability(
        "epoll",
        "partly",
        f"{sys.platform} has no epoll: another poller is used",
        serves,
        "run the client on Linux for thousands of streams",
    )


def clock(root: str = "/") -> Ability:
    """How finely the clocks are read; what is slow to read is late."""
    source = (
        read(os.path.join(root, "sys/devices/system/clocksource/clocksource0/current_clocksource")) or b""
    ).decode()
    _, error = bracket()
    began = time.perf_counter_ns()
    for _ in range(1000):
        time.monotonic_ns()
    cost = (time.perf_counter_ns() - began) / 1000
    named = source.strip() or "not told"
    seen = f"source {named}; a reading costs {cost:.0f} ns; the two clocks are matched to {error} ns"
    state = "can" if cost < 1000 and error < 20_000 else "partly"
    enable = "" if state == "can" else "a slow clock source: 'tsc' where the machine allows it (clocksource=tsc)"
    return Ability("clock", state, seen, "every time; stamps brought onto one time line", enable)


def cores(root: str = "/") -> Iterator[Ability]:
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    enough = allowed >= 2
    yield Ability(
        "cores",
        "can" if enough else "partly",
        f"{allowed} of {total} cores may be used by this process",
        "sends that are on time; the engine and the client on cores of their own",
        "" if enough else "give the client a second core (taskset, cpuset, docker --cpuset-cpus)",
    )
    quota = next((v for n, _, v in Cgroups(root).sample(os.getpid()) if n == "cgroup_quota_cores"), None)
    serves = "whether this process is stopped for using too much CPU"
    if quota is None:
        yield Ability("cpu-quota", "can", "no quota on this process that can be seen from here", serves)
        return
    short = quota < 2
    yield Ability(
        "cpu-quota",
        "partly" if short else "can",
        f"a control group allows {quota:.2g} cores",
        serves,
        "raise it (docker --cpus, Kubernetes limits.cpu): a client that is stopped sends late" if short else "",
    )


def box_load(root: str = "/") -> Ability:
    """Busy cores over half a second, ourselves left out."""
    serves = "whether others on this machine disturb client and engine"
    system, total = System(root), os.cpu_count() or 1
    before, own, began = _busy(system), time.process_time(), time.monotonic()
    time.sleep(LOOK_S)
    after, span = _busy(system), time.monotonic() - began
    if before is None or after is None:
        return Ability("other-load", "unknown", "this system does not tell its CPU time (/proc/stat)", serves)
    busy = max(0.0, (after - before - (time.process_time() - own)) / span)
    free = total - busy
    seen = f"others use {busy:.1f} of {total} cores just now"
    if free >= 1:
        return Ability("other-load", "can", seen, serves)
    return Ability(
        "other-load",
        "partly",
        f"{seen}: no whole core is free for the client",
        serves,
        "stop the others, or measure from another machine; kernel stamps stay right, sends may be late",
    )


def _busy(system: System) -> float | None:
    return next((v for n, _, v in system.sample(0.0) if n == "cpu_busy_seconds_total"), None)


def open_files() -> Ability:
    serves = "how many requests can be in flight"
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):
        return Ability("open-files", "unknown", "this system does not tell its limit", serves)
    if hard == resource.RLIM_INFINITY:
        return Ability("open-files", "can", "no limit of open files", serves)
    streams = max(0, hard - SPARE_FILES)
    few = streams < FEW_STREAMS
    return Ability(
        "open-files",
        "partly" if few else "can",
        f"{streams:,} streams at most in one process (hard limit {hard:,}, soft {soft:,}, raised by itself)",
        serves,
        "ulimit -Hn 65536 before starting, or LimitNOFILE= of its unit; --processes N" if few else "",
    )


def processes(root: str = "/") -> Ability:
    """The one figure no dashboard shows is the time a thread waited for a core."""
    serves = "the engine's CPU time, and its waits for a core (host CPU, noisy neighbours)"
    if read(os.path.join(root, "proc/self/schedstat")):
        return Ability("process-times", "can", "CPU time and waits for a core, by thread (/proc/PID/schedstat)", serves)
    if read(os.path.join(root, "proc/self/stat")):
        return Ability(
            "process-times",
            "partly",
            "CPU time, but no waits for a core (no schedstat)",
            serves,
            "a kernel with CONFIG_SCHED_INFO",
        )
    return Ability("process-times", "cannot", "this system has no /proc", serves, "whywait agent on a Linux machine")


def pressure(root: str = "/") -> Ability:
    serves = "shares of time in which the whole machine waited for CPU, memory or disk"
    if read(os.path.join(root, "proc/pressure/cpu")):
        return Ability("pressure", "can", "pressure stall figures (/proc/pressure)", serves)
    return Ability("pressure", "cannot", "no /proc/pressure", serves, "boot the kernel with psi=1")


def rapl(root: str = "/") -> Ability:
    name, serves = "cpu-energy", "energy of the CPU packages: joules per request where no GPU is"
    zones = sorted(Path(root, "sys/class/powercap").glob("intel-rapl:*"))
    if not zones:
        return Ability(
            name,
            "cannot",
            "no RAPL counters here (virtual machines and containers hide them)",
            serves,
            "run on the host itself; or give watts by whywait bill --power-model",
        )
    found = Energy(root).sample()
    if found:
        return Ability(name, "can", f"{len(found)} RAPL counters", serves)
    hint = "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj (until reboot), or run whywait agent as root"
    denied = any(read_int(str(z / "energy_uj")) is None for z in zones)
    why = "RAPL counters are there, and may not be read" if denied else "RAPL counters name no package"
    return Ability(name, "cannot", why, serves, hint if denied else "")


GPU_FIGURES = {
    "power": "power_watts",
    "energy": "energy_joules_total",
    "use": "busy_share",
    "memory": "memory_used_bytes",
    "clocks": "sm_clock_hz",
    "throttling": "throttle_power",
    "NVLink": "nvlink_tx_bytes_total",
}


def gpus(
    nvml: Callable[[], Nvml | None] = Nvml.open, rocm: Callable[[], RocmSmi | None] = RocmSmi.open
) -> Iterator[Ability]:
    serves = "power, energy, clocks and throttling of the devices; the device account"
    for name, driver, opened in (("nvidia", "NVML (libnvidia-ml.so.1)", nvml()), ("amd", "ROCm SMI", rocm())):
        if opened is None:
            hint = {
                "nvidia": "in a container: docker --gpus all (NVIDIA container toolkit)",
                "amd": "in a container: --device /dev/kfd --device /dev/dri, and the ROCm libraries",
            }[name]
            yield Ability(
                f"gpu-{name}",
                "cannot",
                f"{driver} shows no device on this machine",
                serves,
                f"{hint}; on another machine: whywait agent there, --agent here",
            )
            continue
        with contextlib.closing(opened) as devices:
            names = {row[0] for row in devices.sample(0.0)}
            called = devices.names() if isinstance(devices, Nvml) else []
        there = [k for k, v in GPU_FIGURES.items() if v in names]
        lost = [k for k in GPU_FIGURES if k not in there]
        seen = f"{', '.join(dict.fromkeys(called)) or driver}: {', '.join(there) or 'no figure'}"
        state = "can" if {"power", "use"} <= set(there) else "partly" if there else "cannot"
        yield Ability(f"gpu-{name}", state, seen + (f"; not {', '.join(lost)}" if lost else ""), serves)


def gpu_counters(dcgm: bool) -> Ability:
    serves = "MBU and MFU by the device's own counters"
    if dcgm:
        return Ability("gpu-counters", "can", "the DCGM exporter answers", serves)
    return Ability(
        "gpu-counters",
        "unknown",
        "memory and matrix units at work are read from a DCGM exporter only",
        serves,
        "--gpu-metrics-url http://HOST:9400/metrics",
    )


def profiler(root: str = "/") -> Ability:
    """whywait itself needs none of it; the tests that a verdict proposes may."""
    name, serves = "perf", "nothing of whywait's own; the profile (perf, py-spy) that a verdict may ask for"
    level = read_int(os.path.join(root, "proc/sys/kernel/perf_event_paranoid"))
    if level is None:
        return Ability(name, "unknown", "the kernel does not tell (perf_event_paranoid)", serves)
    if level <= 1 or (hasattr(os, "geteuid") and os.geteuid() == 0):
        return Ability(
            name, "can", f"perf_event_paranoid is {level}{' (root may all the same)' if level > 1 else ''}", serves
        )
    return Ability(
        name,
        "partly",
        f"perf_event_paranoid is {level}: own processes, without the kernel",
        serves,
        "sudo sysctl kernel.perf_event_paranoid=1",
    )


def extras() -> Iterator[Ability]:
    for extra, (module, what) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        yield Ability(
            f"extra-{extra}",
            "can" if there else "cannot",
            "installed" if there else "not installed",
            what,
            "" if there else f"pip install 'whywait[{extra}]'",
        )


def floor(found: dict[str, object]) -> Ability:
    """The client's own error as ``load.floor`` measured it; ``found`` is empty where it did not."""
    serves = "below what size a figure is the client's own"
    error = found.get("stamp_error_ms")
    if not isinstance(error, dict) or error.get("p99") is None:
        return Ability("client-floor", "unknown", "not measured", serves)
    share = float(str(found.get("coalesced_share") or 0.0))
    seen = (
        f"{found['streams']} streams of a stub service here: chunks stamped {error['p50'] * 1000:.0f} µs (p50), "
        f"{error['p99'] * 1000:.0f} µs (p99) after they were sent; "
        f"{number(float(str(found.get('cpu_us_per_chunk') or 0)))} µs of CPU a chunk, "
        f"{percent(share)} of the chunks came together"
    )
    good = error["p99"] < 1.0
    return Ability(
        "client-floor",
        "can" if good else "partly",
        seen,
        serves,
        "" if good else "free a core for the client; this is what it is off by here and now",
    )
