"""A Ray cluster as far as it is used here: reached by its address, its nodes, and whether they run what we run.

Ray carries bytes and starts processes; no clock of a measurement and no figure is Ray's. A cluster that we did not
connect to stays connected; the connection ends with this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whywait import __version__
from whywait.errors import MissingExtra, UsageError

CONNECT_S = 5.0  # for the address to take a connection
START_S = 60.0  # for a node to start a process of ours
START_HINT = "ray start --head; then --ray HOST:6379 on one of its nodes, or ray://HOST:10001 from anywhere"
PINGS = 60

Ping = Callable[[], int]


@dataclass(frozen=True)
class Node:
    """``name`` is for people: unlike any other of the cluster."""

    id: str
    name: str
    address: str
    cpus: int


@dataclass(frozen=True)
class Offset:
    """How far a clock is ahead of ours: surely between ``low`` and ``high`` ns."""

    low: int
    high: int

    @property
    def ns(self) -> int:
        return (self.low + self.high) // 2

    @property
    def error_ns(self) -> int:
        return (self.high - self.low + 1) // 2

    def narrowed(self, other: Offset) -> Offset | None:
        """What both say of a clock that kept its pace; None where they cannot both be true: it went astray."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Offset(low, high) if low <= high else None


def offset(ping: Ping, n: int = PINGS, now: Ping = time.monotonic_ns) -> Offset:
    """Of the clock that ``ping`` reads ``n`` times. It is read between our two looks, whatever the way there and back
    took, so every look bounds it on both sides, and all of them together (Cristian, *Probabilistic clock
    synchronization*, Distributed Computing 3 (1989))."""
    found = Offset(-(1 << 62), 1 << 62)
    for _ in range(n):
        before = now()
        there = ping()
        one = Offset(there - now(), there - before)
        found = found.narrowed(one) or one  # it was set meanwhile
    return found


def ray_of(address: str) -> Any:
    """The module ``ray``, connected to the cluster at ``address``: ``auto``, HOST:PORT or ``ray://HOST:PORT``.

    Raises:
        MissingExtra: Ray is not installed here.
        UsageError: no cluster answers there, or it runs another version of Ray or of Python.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtra("--ray", "ray") from None
    if ray.is_initialized():
        return ray
    _answers(address)
    with _own_signals(), _quiet():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except Exception as exc:  # what it raises differs from version to version
            said = str(exc).strip().splitlines() or [type(exc).__name__]
            if "ersion mismatch" in str(exc):
                why = " ".join(said)[:300]
                raise UsageError(f"the cluster at {address} runs another Ray or Python: {why}",
                                 "the same versions here and there") from None  # fmt: skip
            raise UsageError(f"no Ray cluster at {address}: {said[0][:200]}", START_HINT) from None
    _hushed()
    return ray


def _hushed() -> None:
    """What raylets publish of their fate, Ray prints on the standard output whatever it is told: there is our result.
    A worker that is lost is told by whoever misses it."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _answers(address: str) -> None:
    """
    Raises:
        UsageError: that is no address, or nothing takes a connection there.
    """
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError(f"--ray: {address!r} is not an address", START_HINT)
    try:  # what Ray itself does where nothing answers takes minutes, and may end the process
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        raise UsageError(f"no Ray cluster at {address}: {exc}", START_HINT) from None


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; who leads a run has its own way to end."""
    main = threading.current_thread() is threading.main_thread()
    old = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Its advice on connecting is for those who write Ray programs."""
    import warnings

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning about GPUs we do not ask for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def nodes_of(ray: Any) -> list[Node]:
    """The nodes that have a CPU to give, by address; a head that KubeRay keeps free of work (``num-cpus: 0``) is none.

    Raises:
        UsageError: there is none.
    """
    alive = [n for n in ray.nodes() if n.get("Alive") and n.get("Resources", {}).get("CPU", 0) >= 1]
    alive.sort(key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
    if not alive:
        raise UsageError("no node of the Ray cluster has a CPU to give", "ray status; ray start --address=HOST:6379")
    where = [n["NodeManagerAddress"] for n in alive]
    return [Node(n["NodeID"], n["NodeManagerAddress"] if where.count(n["NodeManagerAddress"]) == 1 else
                 f"{n['NodeManagerAddress']}#{n['NodeID'][:6]}", n["NodeManagerAddress"], int(n["Resources"]["CPU"]))
            for n in alive]  # fmt: skip


def there(node: Node) -> Any:
    """Ray's word for: on this node and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)


def looked_at(
    ray: Any, nodes: Sequence[Node], files: Sequence[str] = (), all_of_them: bool = True
) -> list[dict[str, Any]]:
    """What each node is: see :func:`_looker`. ``files`` are those that must be there under the same name. Where not
    ``all_of_them`` are needed, one that does not answer is passed over.

    Raises:
        UsageError: one does not answer, or runs another whywait, or lacks a file; each is named.
    """
    look = ray.remote(num_cpus=0, max_retries=0)(_looker())
    asked = [look.options(scheduling_strategy=there(n)).remote(tuple(files)) for n in nodes]
    out: list[dict[str, Any]] = []
    wrong: list[str] = []
    for node, future in zip(nodes, asked, strict=True):
        try:
            found = ray.get(future, timeout=START_S)
        except Exception as exc:
            if not all_of_them and (out or node is not nodes[-1]):
                continue
            raise UsageError(f"{node.name} does not answer: {first_line(exc)}", "ray status") from None
        if found["whywait"] != __version__:
            has = f"whywait {found['whywait']}" if found["whywait"] else f"no whywait ({found['why']})"
            wrong.append(f"{node.name} has {has}, not {__version__}")
        elif found["missing"]:
            wrong.append(f"{node.name} has no {', '.join(found['missing'])}")
        out.append(found)
    if wrong:
        raise UsageError("; ".join(wrong[:4]), "the same on every node: an image with 'whywait[ray]' (docs/ray.md)")
    return out


def here() -> dict[str, str]:
    """What tells one network from another: the kernel's boot, and the network namespace."""
    out = {"boot": "", "net": "", "host": platform.node()}
    with contextlib.suppress(OSError):
        out["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        out["net"] = os.readlink("/proc/self/ns/net")
    return out


def _looker() -> Callable[[tuple[str, ...]], dict[str, Any]]:
    """The function that is run there. It goes by value (a function inside another does): that no whywait is there must
    be found out, not run into."""

    def look(files: tuple[str, ...]) -> dict[str, Any]:
        import os

        out: dict[str, Any] = {"whywait": "", "why": "", "missing": [f for f in files if not os.path.exists(f)]}
        try:
            import whywait
            from whywait.net.cluster import here as mine

            out.update(mine(), whywait=whywait.__version__)
        except ImportError as exc:
            out["why"] = str(exc)
        return out

    return look


def first_line(exc: BaseException) -> str:
    """What an exception of Ray's comes to, in a line: its own begin with headings."""
    lines = [x.strip() for x in str(exc).splitlines() if x.strip()]
    telling = [x for x in lines if "died" in x or "because" in x or "Error" in x]
    return (telling or lines or [type(exc).__name__])[-1].partition(" lease_id=")[0][:200]
