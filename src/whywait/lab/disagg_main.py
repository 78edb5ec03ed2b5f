"""The process of a fleet: ``python -m whywait.lab.disagg_main --config JSON`` starts the engines, then is their front.

It speaks to whoever started it as ``lab.embedded`` does: one line on standard output when it serves, then its log on
standard error. It ends on SIGTERM and with its parent (standard input closes), and takes its engines and files along;
after ``kill -9`` the engines end by themselves, and the next fleet removes the files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whywait.errors import WhywaitError
from whywait.lab import launch
from whywait.lab.disagg import Fleet
from whywait.lab.disagg_call import Backend
from whywait.lab.disagg_front import Pages, Replicas, Split
from whywait.lab.disagg_store import Store, make_folder
from whywait.lab.embedded import LOOPBACK, _claim_stdout
from whywait.lab.settings import Settings
from whywait.lab.state import Engine

NICE = 5  # of the engines: front and client, which need little, come first where they share a CPU


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m whywait.lab.disagg_main")
    parser.add_argument("--config", required=True, help="fleet as JSON")
    config = json.loads(parser.parse_args(argv).config)
    answer = _claim_stdout()
    own = config.pop("engine")
    fleet = Fleet.from_dict({**{k: v for k, v in config.items() if k not in ("cpus", "name")}, **own})
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    try:
        with contextlib.ExitStack() as stack:
            folder = None if fleet.replicas else stack.enter_context(_folder(fleet.folder))
            engines = [stack.enter_context(_engine(s, f"{config['name']}-{role}"))
                       for role, s in roles(fleet, config["cpus"], folder)]  # fmt: skip
            front = front_of(fleet, engines, folder)
            stack.callback(front.close)
            os.write(answer, (json.dumps({"url": front.server.url}) + "\n").encode())
            os.close(answer)
            _serve(front)
    except WhywaitError as exc:
        print(f"whywait: {exc.message}\n{exc.hint or ''}", file=sys.stderr, flush=True)
        return 1
    return 0


def roles(fleet: Fleet, cpus: list[list[int]], folder: Path | None) -> Iterator[tuple[str, Settings]]:
    """Each engine's part in the fleet and its settings."""
    base = replace(fleet.engine, slot_save_path=str(folder) if folder else "", port=0)
    for i in range(fleet.engines):
        first = not fleet.replicas and i < fleet.prefill
        part = "replica" if fleet.replicas else "prefill" if first else "decode"
        yield f"{part}-{i}", replace(base, cpus=tuple(cpus[i]))


def front_of(fleet: Fleet, engines: list[Engine], folder: Path | None) -> Pages:
    if folder is None:
        return Replicas([Backend(e.url, e.slots or 1) for e in engines], LOOPBACK)
    store = Store(folder, round(fleet.space_mb * 1e6))
    # A prefill engine computes one prompt at a time: two at once would both be late. It has as many slots all the
    # same: llama.cpp reads in only what an engine with as many wrote.
    both = ([Backend(e.url, 1) for e in engines[: fleet.prefill]],
            [Backend(e.url, e.slots or 1) for e in engines[fleet.prefill :]])  # fmt: skip
    return Split(both, store, (fleet.delay_ms / 1e3, fleet.rate_mb_s * 1e6), LOOPBACK)


def _serve(front: Pages) -> None:
    """Until told to end, or until the parent is gone. SIGTERM raises out of the loop's wait."""
    fd = sys.stdin.fileno()
    front.loop.watch(fd, _when_closed(fd, front.loop.stop))
    front.run()


def _when_closed(fd: int, then: Callable[[], None]) -> Callable[[int], None]:
    def ready(_mask: int) -> None:
        if not os.read(fd, 4096):
            then()

    return ready


@contextlib.contextmanager
def _folder(wanted: str) -> Iterator[Path]:
    made = make_folder(wanted)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _engine(settings: Settings, name: str) -> Iterator[Engine]:
    engine = launch.start_embedded(settings, name=name)
    with contextlib.suppress(OSError):
        # Threads it has already: each has its own priority on Linux.
        for task in os.listdir(f"/proc/{engine.pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(task), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    try:
        yield engine
    finally:
        launch.stop(engine, grace_s=3.0)


def _leave(_signum: int, _frame: Any) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
