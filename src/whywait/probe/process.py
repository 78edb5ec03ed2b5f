"""Groups of processes (the engine's, the client's) with their children: CPU, waiting for a core, memory, throttling.

The one figure no dashboard shows is the run-queue wait: time a thread was ready and had no core. A starved engine and a
starved client both look busy; only this tells that they were not allowed to be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from whywait.probe import Row
from whywait.probe.host import TICKS_PER_S, read, read_int
from whywait.probe.prometheus import label_json
from whywait.probe.threads import BusyThreads, Spent, cpu_list, cpu_text

SLOW_S = 1.0  # memory and context switches cost a file per thread: once a second is enough
PSS_LIMIT_S = 0.002  # smaps_rollup walks every page table entry; on a big process that is milliseconds


class _Stat(NamedTuple):
    comm: str
    parent: int
    major_faults: int
    cpu_s: float
    threads: int
    started: int


def stat_of(proc: str, pid: int) -> _Stat | None:
    """``/proc/PID/stat``; None when the process has ended."""
    raw = read(f"{proc}/{pid}/stat")
    if not raw:
        return None
    head, _, tail = raw.rpartition(b")")  # the name may hold anything, brackets too
    f = tail.split()
    if len(f) < 20:
        return None
    cpu = (int(f[11]) + int(f[12])) / TICKS_PER_S
    return _Stat(head.partition(b"(")[2].decode(errors="replace"), int(f[1]), int(f[9]), cpu, int(f[17]), int(f[19]))


class Group:
    """Processes ``pids`` and all their descendants, followed as they come and go.

    ``strangers`` (a set that may grow) are not counted, nor their descendants, even when they are our descendants: a
    client that started the engine and the sampler must not be charged for them.

    Counters never fall: what a process had when last seen stays counted after it ended. What a process did between the
    last look and its end, or a child that lived shorter than the time between two looks, is not seen.
    """

    def __init__(self, pids: Iterable[int], root: str = "/", strangers: Collection[int] = ()) -> None:
        self.proc = os.path.join(root, "proc")
        self.cgroups = Cgroups(root)
        self._roots = set(pids)
        self._strangers = strangers
        self._strangers_seen = 0
        self._parents: dict[int, int] = {}
        self._members: dict[int, int] = {}  # pid -> start time
        self._cpu: dict[tuple[int, int], float] = {}
        self._faults: dict[tuple[int, int], int] = {}
        self._threads: dict[tuple[int, int], Spent] = {}
        self._busy = BusyThreads(self.proc)
        self.cpus: frozenset[int] = frozenset()  # cores that any of its threads may run on
        self._switches: dict[tuple[int, int], tuple[int, int]] = {}
        self._waited: dict[int, int] = {}
        self._gone_cpu_s, self._gone_faults, self._gone_waited = 0.0, 0, 0  # of processes that have ended
        self._switched = [0, 0]
        self._last_s: float | None = None
        self._slow_at = float("-inf")
        self._pss = True

    def add(self, pids: Iterable[int]) -> None:
        self._roots |= set(pids)

    def pids(self) -> frozenset[int]:
        """Its processes when it was last sampled (from any thread)."""
        return frozenset(dict(self._members))

    def cpu_now(self) -> dict[tuple[int, int], float]:
        """CPU seconds of each of its processes (number, start time) until this moment (from any thread)."""
        stats = {pid: (started, stat_of(self.proc, pid)) for pid, started in dict(self._members).items()}
        return {(pid, at): s.cpu_s for pid, (at, s) in stats.items() if s is not None and s.started == at}

    def sample(self, now_s: float) -> list[Row]:
        """Rows at ``now_s`` (any steady clock, in seconds); none when no process of the group is alive."""
        slow = now_s - self._slow_at >= SLOW_S
        if slow:
            self._scan()
            self._slow_at = now_s
        stats = {pid: s for pid in self._roots.union(self._members) if (s := stat_of(self.proc, pid)) is not None}
        stats = {p: s for p, s in stats.items() if self._members.get(p, s.started) == s.started}
        stats = {p: s for p, s in stats.items() if p in self._roots or p not in self._strangers}
        self._roots -= self._members.keys() - stats.keys()  # the number of one that ended may come back as a stranger
        if not stats:
            return []
        self._members = {pid: s.started for pid, s in stats.items()}
        busiest = self._look_at_threads(stats, now_s)
        rows = self._totals(stats)
        if busiest is not None:
            rows.append(("busiest_thread_share", None, busiest))
        if slow:
            rows += self._switch_rows(stats) + self._memory(stats)
            rows += self._busy.rows(now_s, self._threads, lambda pid: stats[pid].comm)
        return rows + self.cgroups.sample(*stats, again=slow)

    def _scan(self) -> None:
        """Find new descendants. Only processes never seen before cost a read."""
        try:
            pids = {int(name) for name in os.listdir(self.proc) if name.isdigit()}
        except OSError:
            return
        self._parents = {p: parent for p, parent in self._parents.items() if p in pids}
        self._add_up_the_ended(pids)
        for pid in pids - self._parents.keys():
            stat = stat_of(self.proc, pid)
            if stat is not None:
                self._parents[pid] = stat.parent
        if len(self._strangers) != self._strangers_seen:  # what we took for ours may be a newly named process's
            self._strangers_seen = len(self._strangers)
            self._members = {p: s for p, s in self._members.items() if p in self._roots}
        family = self._roots | set(self._members)  # members stay members when their parent has gone
        closed = family.union(self._strangers)
        grown = True
        while grown:
            new = {p for p, parent in self._parents.items() if parent in family and p not in closed}
            closed |= new
            family |= new
            grown = bool(new)
        for pid in family - self._members.keys():
            stat = stat_of(self.proc, pid)
            if stat is not None:
                self._members[pid] = stat.started

    def _add_up_the_ended(self, alive: set[int]) -> None:
        """Children may come and go for weeks: of those that ended only the sums are kept."""
        for key in [k for k in self._cpu if k[0] not in alive]:
            self._gone_cpu_s += self._cpu.pop(key)
            self._gone_faults += self._faults.pop(key)
        for pid in [p for p in self._waited if p not in alive]:
            self._gone_waited += self._waited.pop(pid)

    def _look_at_threads(self, stats: dict[int, _Stat], now_s: float) -> float | None:
        """Add up run-queue wait; the share of a core that the busiest thread has used since the last look."""
        seen: dict[tuple[int, int], Spent] = {}
        most = 0
        for pid in stats:
            for tid in self._tids(pid):
                raw = (read(f"{self.proc}/{pid}/task/{tid}/schedstat") or b"").split()
                if len(raw) < 2:
                    continue
                now = Spent(int(raw[0]), int(raw[1]))
                before = self._threads.get((pid, tid), Spent(0, 0))
                if now.run < before.run:  # a new thread got the number of an old one
                    before = Spent(0, 0)
                self._waited[pid] = self._waited.get(pid, 0) + max(0, now.wait - before.wait)
                if (pid, tid) in self._threads:
                    most = max(most, now.run - before.run)
                seen[pid, tid] = now
        first, self._threads = not self._threads, seen
        before_s, self._last_s = self._last_s, now_s
        if first or not seen or before_s is None or now_s <= before_s:
            return None
        return min(1.0, most / 1e9 / (now_s - before_s))

    def _tids(self, pid: int) -> list[int]:
        try:
            return [int(t) for t in os.listdir(f"{self.proc}/{pid}/task")]
        except OSError:
            return []

    def _totals(self, stats: dict[int, _Stat]) -> list[Row]:
        for pid, s in stats.items():
            self._cpu[pid, s.started] = s.cpu_s
            self._faults[pid, s.started] = s.major_faults
        rows: list[Row] = [
            ("cpu_seconds_total", None, self._gone_cpu_s + sum(self._cpu.values())),
            ("major_faults_total", None, float(self._gone_faults + sum(self._faults.values()))),
            ("processes", None, float(len(stats))),
            ("threads", None, float(sum(s.threads for s in stats.values()))),
        ]
        if self._waited or self._gone_waited:
            waited = self._gone_waited + sum(self._waited.values())
            rows.append(("run_queue_wait_seconds_total", None, waited / 1e9))
        for pid, s in stats.items():
            labels = label_json({"pid": str(pid), "process": s.comm})
            rows.append(("process_cpu_seconds_total", labels, s.cpu_s))
            if pid in self._waited:
                rows.append(("process_run_queue_wait_seconds_total", labels, self._waited[pid] / 1e9))
        return rows

    def _switch_rows(self, stats: dict[int, _Stat]) -> list[Row]:
        seen: dict[tuple[int, int], tuple[int, int]] = {}
        cpus: set[int] = set()
        for pid in stats:
            for tid in self._tids(pid):
                raw = read(f"{self.proc}/{pid}/task/{tid}/status") or b""
                allowed = raw.partition(b"\nCpus_allowed_list:")[2].partition(b"\n")[0]
                cpus |= cpu_list(allowed.decode())
                at = raw.rfind(b"voluntary_ctxt_switches:", 0, raw.rfind(b"nonvoluntary_ctxt_switches:"))
                words = raw[at:].split() if at >= 0 else []
                if len(words) < 4:
                    continue
                now = (int(words[1]), int(words[3]))
                before = self._switches.get((pid, tid), (0, 0))
                for i in (0, 1):
                    self._switched[i] += now[i] - before[i] if now[i] >= before[i] else now[i]
                seen[pid, tid] = now
        self._switches, self.cpus = seen, frozenset(cpus)
        if not seen:
            return []
        rows: list[Row] = [
            ("voluntary_switches_total", None, float(self._switched[0])),
            ("involuntary_switches_total", None, float(self._switched[1])),
        ]
        if cpus:  # the cores that any thread of the group may run on (affinity and cpuset)
            rows.append(("cores_allowed", label_json({"cpus": cpu_text(self.cpus)}), float(len(cpus))))
        return rows

    def _memory(self, stats: dict[int, _Stat]) -> list[Row]:
        page = os.sysconf("SC_PAGE_SIZE")
        resident = [int(raw.split()[1]) * page for p in stats if (raw := read(f"{self.proc}/{p}/statm"))]
        rows: list[Row] = [("rss_bytes", None, float(sum(resident)))] if resident else []
        if self._pss:
            start = time.thread_time()
            kilobytes = [_pss(read(f"{self.proc}/{p}/smaps_rollup")) for p in stats]
            self._pss = time.thread_time() - start <= PSS_LIMIT_S
            known = [k for k in kilobytes if k is not None]
            if known and len(known) == len(kilobytes):
                rows.append(("pss_bytes", None, sum(known) * 1024.0))
        return rows


def _pss(raw: bytes | None) -> int | None:
    at = (raw or b"").find(b"\nPss:")
    return int(raw[at:].split()[1]) if raw and at >= 0 else None


class Cgroups:
    """CPU quota and throttling of the cgroups processes live in and of all those above them, v1 or v2.

    Containers inside containers are cgroups inside cgroups: every level that can be seen from here is read once,
    however many of the processes are in it. Throttled time is summed over the levels, the quota is the smallest.
    """

    def __init__(self, root: str = "/") -> None:
        self.root, self.proc = root, os.path.join(root, "proc")
        self._mounts = self._find_mounts()
        self._pids: tuple[int, ...] = ()
        self._levels: list[str] = []

    def sample(self, *pids: int, again: bool = True) -> list[Row]:
        if again or pids != self._pids:  # a process can be moved while it runs
            own = self._paths("self")
            levels = [level for pid in pids for level in self._directories(pid, own)]
            self._pids, self._levels = pids, list(dict.fromkeys(levels))
        totals = [0.0, 0.0, 0.0]
        found = False
        quota: float | None = None
        for directory in self._levels:
            got = _cpu_stat(read(f"{directory}/cpu.stat"))
            if got is not None:
                found = True
                totals = [a + b for a, b in zip(totals, got, strict=True)]
            cores = _quota(directory)
            if cores is not None:
                quota = cores if quota is None else min(quota, cores)
        names = ("cgroup_periods_total", "cgroup_throttled_periods_total", "cgroup_throttled_seconds_total")
        rows: list[Row] = [(n, None, v) for n, v in zip(names, totals, strict=True)] if found else []
        return rows + ([("cgroup_quota_cores", None, quota)] if quota is not None else [])

    def _find_mounts(self) -> list[tuple[bool, str, str]]:
        """(is v2, root inside the hierarchy, mount point) of every hierarchy that may hold the CPU controller."""
        out = []
        for line in (read(f"{self.proc}/self/mountinfo") or b"").decode(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            a, b = left.split(), right.split()
            if len(a) < 5 or len(b) < 3:
                continue
            if b[0] == "cgroup2" or (b[0] == "cgroup" and "cpu" in b[2].split(",")):
                out.append((b[0] == "cgroup2", a[3], a[4]))
        return out

    def _paths(self, pid: int | str) -> dict[tuple[bool, str], str]:
        """(is v2, controllers) → path of the cgroup, of every hierarchy that holds the CPU controller."""
        out = {}
        for line in (read(f"{self.proc}/{pid}/cgroup") or b"").decode(errors="replace").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "cpu" in controllers.split(","):
                out[number == "0", controllers] = path
        return out

    def _directories(self, pid: int, own: dict[tuple[bool, str], str]) -> list[str]:
        out = []
        for key, path in self._paths(pid).items():
            for is_v2, mount_root, point in self._mounts:
                if is_v2 == key[0]:
                    out += self._up(mount_root, point, path, own.get(key))
        return out

    def _up(self, mount_root: str, point: str, path: str, own: str | None) -> list[str]:
        """The directory of ``path`` and those above it, as far as the mount shows them.

        Inside a container the paths in /proc may be those of the host, and lie outside the mount; what is mounted is
        then the container's own cgroup, ``own``, and whatever is below it. A cgroup beside ours is not visible: [].
        """
        top = os.path.join(self.root, point.lstrip("/"))
        inside = path[len(mount_root) :] if mount_root != "/" and path.startswith(mount_root) else path
        parts: Sequence[str] = [p for p in inside.split("/") if p]
        if ".." in parts:
            return []
        if not os.path.isdir(os.path.join(top, *parts)):
            if own is None or not (path + "/").startswith(own.rstrip("/") + "/"):
                return []
            parts = [p for p in path[len(own) :].split("/") if p]
            if not os.path.isdir(os.path.join(top, *parts)):
                parts = []
        return [os.path.join(top, *parts[:n]) for n in range(len(parts), -1, -1)]


def _cpu_stat(raw: bytes | None) -> list[float] | None:
    """Periods, throttled periods, throttled seconds; None where the kernel does not keep them (no quota possible)."""
    words = (raw or b"").split()
    got = dict(zip(words[::2], words[1::2], strict=False))
    if b"nr_throttled" not in got:
        return None
    seconds = int(got[b"throttled_usec"]) / 1e6 if b"throttled_usec" in got else int(got[b"throttled_time"]) / 1e9
    return [float(got[b"nr_periods"]), float(got[b"nr_throttled"]), seconds]


def _quota(directory: str) -> float | None:
    words = (read(f"{directory}/cpu.max") or b"").split()
    if len(words) == 2:
        return None if words[0] == b"max" else int(words[0]) / int(words[1])
    quota, period = read_int(f"{directory}/cpu.cfs_quota_us"), read_int(f"{directory}/cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None
