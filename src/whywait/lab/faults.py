"""Known bottlenecks, put into a running engine from outside. Each is a context manager that undoes itself, whatever
happens inside it, and says in one line what it did.

Bottlenecks that are settings of an engine (one slot, little KV space, no prefix cache, speculation) or a kind of load
(long prompts, a rate beyond capacity) need nothing here: the exam's cases start the engine, or offer the load, so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whywait.errors import UsageError
from whywait.lab.cpus import Cpus
from whywait.lab.faults_line import Shape, line

PERIOD_US: Final = 100_000  # the kernel's own default
GROUP: Final = "whywait-fault-"
_numbers = itertools.count(1)

#: Ends by itself when its parent is gone, however that died; a block of work takes some 10 ms.
_HOG: Final = """
import os, sys
os.sched_setaffinity(0, [int(c) for c in sys.argv[1].split(",")])
parent = int(sys.argv[2])
print(flush=True)
while os.getppid() == parent:
    for _ in range(400_000):
        pass
"""


class NotPossible(UsageError):
    """This fault cannot be put in on this system; the message says why."""


@dataclass(frozen=True)
class Site:
    """Where a fault acts: the engine's address and leading process, and the CPUs that engine and client are pinned to
    (empty where they are not)."""

    url: str
    pid: int
    engine_cpus: Cpus = ()
    client_cpus: Cpus = ()


@dataclass(frozen=True)
class Put:
    """What was done, and the address at which the service is reached while it lasts."""

    label: str
    url: str


@contextlib.contextmanager
def nothing(site: Site) -> Iterator[Put]:
    yield Put("nothing", site.url)


@contextlib.contextmanager
def hog(site: Site, count: float = 1) -> Iterator[Put]:
    """``count`` busy loops on the CPUs of the engine: a noisy neighbour.

    Raises:
        NotPossible: processes cannot be pinned here.
    """
    with _hogs(int(count), site.engine_cpus):
        yield Put(f"{count:g} busy loops on the engine's CPUs {_names(site.engine_cpus)}", site.url)


@contextlib.contextmanager
def starved_client(site: Site, count: float = 4) -> Iterator[Put]:
    """``count`` busy loops on the CPUs of the client.

    Raises:
        NotPossible: processes cannot be pinned here, or engine and client share their CPUs.
    """
    if set(site.client_cpus) & set(site.engine_cpus):
        raise NotPossible("engine and client share their CPUs", "a machine with two CPUs at least")
    with _hogs(int(count), site.client_cpus):
        yield Put(f"{count:g} busy loops on the client's CPUs {_names(site.client_cpus)}", site.url)


@contextlib.contextmanager
def quota(site: Site, cpus: float = 0.5) -> Iterator[Put]:
    """The engine, with all it started, in a control group of its own that gets ``cpus`` CPUs' worth of time.

    Raises:
        NotPossible: no control group may be made here.
    """
    parent, v2 = _cpu_group(site.pid)
    _clear_stale(parent)
    group = parent / f"{GROUP}{os.getpid()}-{next(_numbers)}"
    try:
        if v2 and "cpu" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
    except OSError as exc:
        raise NotPossible(f"no control group can be made in {parent}: {exc.strerror}", "run as root") from None
    try:
        _limit(group, v2, cpus)
        for _ in range(3):  # what it starts meanwhile is born into the old group
            for pid in family(site.pid):
                _move(pid, group)
        yield Put(f"control group {'v2' if v2 else 'v1'}: {cpus:g} CPUs per {PERIOD_US / 1000:g} ms", site.url)
    finally:
        _dissolve(group, parent)


@contextlib.contextmanager
def delay(site: Site, ms: float = 50.0, jitter_ms: float = 0.0) -> Iterator[Put]:
    """Every piece of bytes comes ``ms`` later, each way, and up to ``jitter_ms`` more (order is kept)."""
    with line(Shape(site.url, delay_ms=ms, jitter_ms=jitter_ms), site.client_cpus) as url:
        yield Put(f"{ms:g} ms (+ 0–{jitter_ms:g} ms) each way", url)


@contextlib.contextmanager
def buffering(site: Site, size: float = 16384) -> Iterator[Put]:
    """A proxy that hands an answer on in pieces of ``size`` bytes, the rest at its end."""
    with line(Shape(site.url, hold_bytes=int(size)), site.client_cpus) as url:
        yield Put(f"a proxy that buffers {size:g} bytes", url)


@contextlib.contextmanager
def shedding(site: Site, most: float = 4) -> Iterator[Put]:
    """A gateway that answers 429 to what comes while ``most`` requests are in flight."""
    with line(Shape(site.url, most=int(most)), site.client_cpus) as url:
        yield Put(f"a gateway that lets {most:g} requests in flight and answers 429 to the rest", url)


FAULTS: Final[dict[str, Callable[..., AbstractContextManager[Put]]]] = {
    "nothing": nothing,
    "hog": hog,
    "starved client": starved_client,
    "quota": quota,
    "delay": delay,
    "buffering": buffering,
    "shedding": shedding,
}


def calibration_ms(cpus: Cpus, rounds: int = 5) -> float | None:
    """The best time of a fixed piece of work on ``cpus``, in ms: tells two runs apart that the host itself made differ.

    None where it could not be run.
    """
    work = "import os,sys,time\nc=[int(x) for x in sys.argv[1].split(',') if x]\nc and os.sched_setaffinity(0,c)\n"
    work += "b=9e9\nfor _ in range(int(sys.argv[2])):\n t=time.perf_counter()\n for _ in range(1_000_000):\n  pass\n"
    work += " b=min(b,time.perf_counter()-t)\nprint(b*1e3)"
    argv = [sys.executable, "-I", "-S", "-c", work, ",".join(map(str, cpus)), str(rounds)]
    try:
        return float(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def busy_share(cpus: Cpus, seconds: float = 1.0) -> float | None:
    """The part of ``cpus``' time (of all, where none are named) that anybody used in the next ``seconds``, 0..1.

    None where the system does not say.
    """
    before = _jiffies(cpus)
    time.sleep(seconds)
    after = _jiffies(cpus)
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def _jiffies(cpus: Cpus) -> tuple[int, int] | None:
    """(Busy, all) ticks since boot; waiting for a disk is idle, and what the hypervisor took counts as busy."""
    wanted = {f"cpu{c}" for c in cpus} or {"cpu"}
    busy = total = 0
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for name, *counts in (x.split() for x in lines):
        if name in wanted:
            ticks = [int(c) for c in counts[:8]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]
    return busy, total


def family(pid: int) -> list[int]:
    """``pid`` and all that it started and that live; only ``pid`` where there is no /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        parents.setdefault(int(text[text.rindex(")") + 2 :].split()[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found.extend(parents.get(one, []))
    return found


@contextlib.contextmanager
def _hogs(count: int, cpus: Cpus) -> Iterator[None]:
    if not cpus or not hasattr(os, "sched_setaffinity"):
        raise NotPossible("processes are not pinned here, so nothing can be put beside them", "use Linux, no CPU quota")
    argv = [sys.executable, "-I", "-S", "-c", _HOG, ",".join(map(str, cpus)), str(os.getpid())]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))
        for one in running:
            assert one.stdout is not None
            one.stdout.readline()  # it is pinned and turns
        yield
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.wait()
            if one.stdout is not None:
                one.stdout.close()


def _cpu_group(pid: int) -> tuple[Path, bool]:
    """The control group that rules ``pid``'s CPU time, and whether it is of version 2.

    Raises:
        NotPossible: there is none to be seen.
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise NotPossible(f"the control group of the engine is not visible: {exc.strerror}") from None
    root = Path("/sys/fs/cgroup")
    for entry in lines:
        _, controllers, path = entry.split(":", 2)
        if "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu"):
                if (found := mount / path.lstrip("/")).is_dir():
                    return found, False
    for entry in lines:
        _, controllers, path = entry.split(":", 2)
        here = root / path.lstrip("/")
        with contextlib.suppress(OSError):
            if not controllers and "cpu" in (here / "cgroup.controllers").read_text().split():
                return here, True
    raise NotPossible("no control group of this system rules CPU time")


def _limit(group: Path, v2: bool, cpus: float) -> None:
    if v2:
        (group / "cpu.max").write_text(f"{round(cpus * PERIOD_US)} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(cpus * PERIOD_US)))


def _move(pid: int, group: Path) -> None:
    with contextlib.suppress(OSError):  # it has ended
        (group / "cgroup.procs").write_text(str(pid))


def _dissolve(group: Path, parent: Path) -> None:
    """Let what is in the group go where it came from, then remove the group; killed processes need a moment to go."""
    until = time.monotonic() + 5
    while True:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                _move(int(pid), parent)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _clear_stale(parent: Path) -> None:
    """Remove groups whose maker was killed; one that holds a process cannot be removed and stays."""
    for old in parent.glob(f"{GROUP}*"):
        with contextlib.suppress(OSError):
            old.rmdir()


def _names(cpus: Cpus) -> str:
    return ", ".join(map(str, cpus))
