"""How the process that leads a run speaks with a shard: by the two pipes of a process of this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import whywait
from whywait.load.preflight import Target
from whywait.units import NS_PER_MS

COMMAND = (sys.executable, "-m", "whywait.load.shards")
TELL_S = 30.0  # for a piece of what it is told


@dataclass(frozen=True)
class Job:
    """What a shard is told first. ``zero_mono_ns``: the run's zero on CLOCK_MONOTONIC, which all processes of a machine
    share. ``passing``: the folder is only where its spool waits to be fetched, and goes with it."""

    shard: int
    directory: Path
    zero_mono_ns: int
    target: Target
    hidden: tuple[str, ...] = ()
    passing: bool = False


class Link:
    """A shard's process. ``out`` is a descriptor that can be read when it said something, and is at its end when it
    ended; ``lead_ns`` is how long a word may take to reach it. Another kind of link: ``load/relay.py``."""

    where = ""  # the machine it is on; '' for this one
    complaint = ""  # what the disk here says when it does not take what a shard elsewhere recorded
    lead_ns = 5 * NS_PER_MS

    def __init__(self) -> None:
        here = str(Path(whywait.__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
        self._process = subprocess.Popen(COMMAND, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.out = self._out.fileno()
        os.set_blocking(self._in.fileno(), False)  # one that stands still takes no more than its pipe holds

    @property
    def pid(self) -> int | None:
        """Of the process, where it is one of this machine's."""
        return self._process.pid

    @property
    def process(self) -> str:
        """How a user finds the process; '' where it is on another machine."""
        return f"(process {self._process.pid})"

    def begin(self, job: Job) -> None:
        """The first word."""
        self.tell(pickle.dumps(job))

    def tell(self, data: bytes) -> None:
        """
        Raises:
            TimeoutError: it took no more of it for TELL_S.
        """
        left = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # it is dead; its end of the other pipe says so too
            while left:
                if not select.select([], [self._in], [], TELL_S)[1]:
                    raise TimeoutError(f"took nothing for {TELL_S:g} s")
                left = left[os.write(self._in.fileno(), left) :]

    def fate(self) -> str:
        """How it came to its end; waits for it."""
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.process} {how}"

    def kill(self) -> None:
        """End it, whatever it does; its end is seen at ``out``."""
        self._process.kill()

    def close(self, kill: bool) -> None:
        self.hang_up(kill)
        self._out.close()

    def hang_up(self, kill: bool) -> None:
        """Tell it no more and wait for its end; what it said can still be read."""
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        if kill:
            self._process.kill()
        self._process.wait()

    def zero(self) -> int | None:
        """The run's zero on the shard's own clock, where that clock is another one and went astray; asked while it
        drives nothing."""
        return None

    def clock(self) -> dict[str, Any]:
        """What is known of its clock against ours, for the manifest; nothing where both are one."""
        return {}
