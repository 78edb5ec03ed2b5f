"""Which devices a local service's processes have open: whether it computes on GPUs, on how many, or on the processors.

CUDA opens the device files of all the GPUs it may see, so that files alone say how many at most; the driver (NVML) says
where a process has a context. In a container the driver's process numbers may be those of the host: then one open
device is told by its file, and more are not told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from whywait.probe.gpu import LIBRARY, Nvml
from whywait.probe.host import read
from whywait.probe.process import stat_of

CPU, GPU = "cpu", "gpu"
_NVIDIA = re.compile(r"/dev/nvidia\d+")
#: Device files of accelerators that are not counted here: AMD, then others. ``/dev/dri`` is a display's, too.
_OTHERS = re.compile(r"/dev/(kfd|accel\d*|accel/.+|davinci\d+|habanalabs.*|vfio/\d+)")
#: Words of a command line that is an inference engine's: a tunnel or a proxy that listens for one computes nowhere.
_ENGINES = re.compile(
    r"vllm|sglang|llama|trtllm|tensorrt_llm|text-generation|ollama|lmdeploy|mlx_lm|whywait\.lab|transformers", re.I
)


@dataclass(frozen=True)
class Opened:
    """What the processes compute on: ``kind`` (None: cannot be told), the ``count`` of GPUs (None: not known), their
    numbers by NVML where those are known, and ``how`` it is known."""

    kind: str | None = None
    count: int | None = None
    ids: tuple[int, ...] = ()
    how: str = ""


def family_of(pids: Iterable[int], root: str = "/") -> frozenset[int]:
    """``pids`` and all their descendants, and before that their parents as far up as those run the same program in the
    same process group: workers beside a listening one are found by what started both. This process and what started it
    are never among them."""
    proc = str(Path(root, "proc"))
    parents = {}
    for name in os.listdir(proc) if os.path.isdir(proc) else ():
        stat = stat_of(proc, int(name)) if name.isdigit() else None
        if stat is not None:
            parents[int(name)] = stat.parent
    ours, at = {os.getpid()}, os.getpid()
    while (at := parents.get(at, 0)) > 0 and at not in ours:
        ours.add(at)
    family = set(pids) - {os.getpid()}
    for pid in tuple(family):
        at, own = pid, _program(proc, pid)
        while own is not None and (up := parents.get(at, 0)) > 1 and up not in ours and _program(proc, up) == own:
            at = up
        family.add(at)
    grown = True
    while grown:
        new = {p for p, parent in parents.items() if parent in family} - family - ours
        family |= new
        grown = bool(new)
    return frozenset(family & parents.keys())


def opened(pids: Iterable[int], root: str = "/", library: str = LIBRARY) -> Opened:
    """What the service of these processes (see :func:`family_of`) computes on."""
    family = family_of(pids, root)
    if not family:
        return Opened()
    nvml = Nvml.open(library)
    try:
        here = nvml is not None or _any_device(root)
        files = _files(family, root)
        if not here:
            return Opened(CPU, 1, (), "this machine has no GPU") if _is_engine(family, root) else Opened()
        using = {} if nvml is None else nvml.processes()
    finally:
        if nvml is not None:
            nvml.close()
    ids = tuple(i for i, found in sorted(using.items()) if found & family)
    if ids:
        return Opened(GPU, len(ids), ids, f"its processes have {_gpus(len(ids))} in use (NVML)")
    if files is None:
        return Opened()
    nvidia = {f for f in files if _NVIDIA.fullmatch(f)}
    if any(_OTHERS.fullmatch(f) for f in files):
        return Opened(GPU)
    if len(nvidia) == 1:
        return Opened(GPU, 1, (), f"its processes have one GPU open ({min(nvidia)})")
    if nvidia:
        return Opened(GPU)
    if _is_engine(family, root):
        return Opened(CPU, 1, (), "its processes have no GPU open")
    return Opened()


def _gpus(n: int) -> str:
    return f"{n} GPU{'' if n == 1 else 's'}"


def _program(proc: str, pid: int) -> tuple[str, int] | None:
    """Its program file and process group; None where they may not be looked at."""
    try:
        return os.readlink(f"{proc}/{pid}/exe"), int((read(f"{proc}/{pid}/stat") or b"").rpartition(b")")[2].split()[2])
    except (OSError, ValueError, IndexError):
        return None


def _any_device(root: str) -> bool:
    """Whether the machine has a device file of an accelerator."""
    try:
        names = os.listdir(Path(root, "dev"))
    except OSError:
        return True  # cannot be told: nothing is claimed
    return any(_NVIDIA.fullmatch(f"/dev/{n}") or _OTHERS.fullmatch(f"/dev/{n}") for n in names)


def _files(family: Iterable[int], root: str) -> set[str] | None:
    """The open files of all the processes; None where those of one may not be looked at."""
    out: set[str] = set()
    for pid in family:
        folder = Path(root, "proc", str(pid), "fd")
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue  # ended meanwhile
        except OSError:
            return None
        for name in names:
            try:
                out.add(os.readlink(folder / name))
            except OSError:
                continue
    return out


def _is_engine(family: Iterable[int], root: str) -> bool:
    said = (read(f"{Path(root, 'proc')}/{pid}/cmdline") or b"" for pid in family)
    return any(_ENGINES.search(line.replace(b"\0", b" ").decode(errors="replace")) for line in said)
