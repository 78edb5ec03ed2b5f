"""Stands between us and an engine started by a command line, so that the engine never outlives us.

``python guard.py CONFIG`` starts the command in a session of its own, reports its process id in one line on standard
output, and waits. When the command ends, or the parent does (standard input, a pipe from it, closes), or SIGTERM comes,
it ends everything the command started — its process group, and any descendant that left the group (on Linux those
become the guard's children) — first with SIGTERM, then with SIGKILL. Standard library only, and run by its path: it
starts quickly, stays small, and leaves the command's environment alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(argv: list[str]) -> int:
    config: dict[str, Any] = json.loads(argv[0])
    answer = os.dup(1)
    os.dup2(2, 1)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if config.get("cpus") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, config["cpus"])  # inherited by the command
    wake = _wake_on(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    try:
        child = subprocess.Popen(
            config["argv"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_guard if sys.platform == "linux" else None,  # noqa: PLW1509  one thread: safe
        )
    except OSError as err:
        os.write(answer, (json.dumps({"error": f"{config['argv'][0]}: {err.strerror or err}"}) + "\n").encode())
        return 127
    os.write(answer, (json.dumps({"pid": child.pid}) + "\n").encode())
    os.close(answer)
    code = _watch(child, wake, config.get("parent_pid") if config.get("follow_parent") else None)
    _end_all(child, float(config.get("grace_s", 10.0)))
    final = child.poll() if code is None else code
    return 128 - final if final is not None and final < 0 else final or 0


def _watch(child: subprocess.Popen[bytes], wake: int, parent_pid: int | None) -> int | None:
    """Until the command ends (its code), or we are told to end it (None)."""
    watched = [wake] if parent_pid is None else [wake, 0]
    while True:
        code = child.poll()
        if code is not None:
            return code
        readable, _, _ = select.select(watched, [], [], 1.0)
        if wake in readable and set(os.read(wake, 64)) - {signal.SIGCHLD}:
            return None
        if parent_pid is not None and ((0 in readable and not os.read(0, 4096)) or os.getppid() != parent_pid):
            return None


def _end_all(child: subprocess.Popen[bytes], grace_s: float) -> None:
    _signal(child.pid, signal.SIGTERM)
    until = time.monotonic() + grace_s
    while time.monotonic() < until and (child.poll() is None or _group_alive(child.pid)):
        _reap(child)  # a dead member that nobody waited for would keep its group alive
        time.sleep(0.02)
    for _ in range(50):  # killed parents hand us their children, so look again until there are none
        _signal(child.pid, signal.SIGKILL)
        strays = _children()
        for pid in strays:
            _kill(pid)
        _reap(child)
        if child.poll() is not None and not strays:
            break
        time.sleep(0.02)


def _reap(child: subprocess.Popen[bytes]) -> None:
    child.poll()  # before waitpid(-1) below, which would take the command's code from it
    try:
        while child.returncode is not None and os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _children() -> list[int]:
    """Our children, strays included (Linux; elsewhere strays are not handed to us)."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(pid) for pid in text.split()]


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _signal(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except OSError:  # gone already
        return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def _wake_on(*signums: int) -> int:
    """A descriptor that becomes readable when one of the signals comes, holding its number."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for signum in signums:
        signal.signal(signum, lambda *_: None)
    return reader


def _die_with_guard() -> None:
    """Even if the guard itself is killed with SIGKILL, the command is told to end."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: the pipe and the process group remain
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
