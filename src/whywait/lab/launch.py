"""Starts engines, knows when they are ready, and ends them whatever ends us.

An engine never outlives the process that started it, unless started detached: a normal end, Ctrl-C and ``kill`` pass
through :func:`launched`; ``kill -9`` is noticed by the engine's side (see ``embedded`` and ``guard``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from whywait.errors import EngineDied, MissingExtra, UsageError
from whywait.lab import ask, models, state
from whywait.lab.capacity import first_error, kv_capacity, last_lines, read_log
from whywait.lab.command import Plan, plan
from whywait.lab.cpus import default_threads
from whywait.lab.settings import Settings, check_model_file
from whywait.lab.state import Engine

Say = Callable[[str], None]

_POLL_S: Final = 0.2
_EMBEDDED_READY_S: Final = 300.0
#: Our own children, for waiting on them; the pipe in each is what ties the engine's life to ours.
_children: dict[int, subprocess.Popen[bytes]] = {}


def start_embedded(
    settings: Settings | None = None, *, name: str = "", detached: bool = False, say: Say | None = None
) -> Engine:
    """Start the embedded llama.cpp server and return once it serves (about a second)."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtra("the embedded engine", "engine")
    settings = _complete(settings or Settings(), say)
    name = state.check_name(name or _free_name("embedded"))
    log = state.log_path(name)
    config = {**asdict(settings), "follow_parent": not detached, "parent_pid": os.getpid()}
    argv = [sys.executable, "-m", "whywait.lab.embedded", "--config", json.dumps(config)]
    child = _spawn(argv, log, env=_import_env(), detached=detached)
    with _ended_on_failure(child):
        answer = _first_line(child, _EMBEDDED_READY_S)
        if answer is None:
            raise _died("the embedded engine", child, log, "check the model file, the port and the context size")
        engine = Engine(
            name=name,
            kind="embedded",
            url=answer["url"],
            pid=child.pid,
            model=settings.name,
            log=str(log),
            command=tuple(argv),
            model_path=settings.model,
            threads=settings.threads,
            cpus=settings.cpus,
            detached=detached,
            started_at=time.time(),
            start_mark=state.start_mark(child.pid),
        )
        engine = _embedded_facts(engine, settings)
        state.save(engine)
    return engine


def start_command(
    cmdline: str,
    *,
    ready_timeout_s: float = 900.0,
    url: str | None = None,
    name: str = "",
    cpus: tuple[int, ...] = (),
    say: Say | None = None,
) -> Engine:
    """Start an engine by its command line, as one would type it, and return once it answers."""
    order = plan(cmdline, url)
    if ask.listening(order.url):
        raise UsageError(
            f"something already listens at {order.url}",
            "stop it, or give the command another --port; or measure it as it is, by its URL",
        )
    name = state.check_name(name or _free_name("launched"))
    log = state.log_path(name)
    config = {"argv": list(order.argv), "cpus": cpus, "follow_parent": True, "parent_pid": os.getpid()}
    guard = Path(__file__).with_name("guard.py")
    argv = [sys.executable, "-I", "-S", str(guard), json.dumps(config)]
    child = _spawn(argv, log, env={**os.environ, **order.env}, detached=False)
    with _ended_on_failure(child):
        answer = _first_line(child, 30.0)
        if answer is None or "pid" not in answer:
            raise UsageError(f"cannot start {(answer or {}).get('error', order.argv[0])}", "check the command line")
        engine = Engine(
            name=name,
            kind="command",
            url=order.url,
            pid=answer["pid"],
            model="",
            log=str(log),
            command=order.argv,
            cpus=cpus,
            guard_pid=child.pid,
            guard_mark=state.start_mark(child.pid),
            started_at=time.time(),
            start_mark=state.start_mark(answer["pid"]),
        )
        state.save(engine)  # before it is ready: loading takes minutes, and `engine list` should show it
        _until_ready(order, child, log, ready_timeout_s, say)
        engine = _command_facts(engine, order)
        state.save(engine)
    return engine


def stop(engine: Engine, grace_s: float = 10.0) -> None:
    """End the engine and everything it started: ask, wait, kill. Does nothing to an engine that is gone already."""
    leader = engine.guard_pid or engine.pid
    try:
        if state.alive(engine):
            state.signal_group(engine.pid, signal.SIGTERM)
            _await_end(engine, grace_s)
        if state.alive(engine):
            state.signal_group(engine.pid, signal.SIGKILL)
        if engine.guard_pid is not None:
            _await_guard(engine.guard_pid, engine.guard_mark)
        _await_end(engine, 5.0)
    finally:
        _release(leader)
        state.forget(engine)


@contextlib.contextmanager
def launched(start: Callable[[], Engine]) -> Iterator[Engine]:
    """``with launched(lambda: start_embedded(settings)) as engine``: stopped at the end, on Ctrl-C, SIGTERM, SIGHUP."""
    owner = os.getpid()
    with _terminating_signals_raise():
        engine = start()
        try:
            yield engine
        finally:
            if os.getpid() == owner:  # a fork that unwinds through here must not end its parent's engine
                stop(engine)


@contextlib.contextmanager
def _terminating_signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does; a handler somebody else has set stays theirs."""
    taken: list[signal.Signals] = []

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, leave)
                taken.append(signum)
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)


def _complete(settings: Settings, say: Say | None) -> Settings:
    """Fill in what was left to us, so that what is written down is what was run."""
    if settings.model:
        path = Path(settings.model).expanduser().resolve()
        check_model_file(path)
        path = models.with_weights(path, settings.weights, say=say) if settings.weights else path
    else:
        path = models.default_model(say=say, weights=settings.weights)
    check_model_file(path)
    return replace(
        settings,
        model=str(path),
        name=settings.name or models.served_name(path),
        threads=settings.threads or default_threads(settings.cpus),
    )


def _free_name(stem: str) -> str:
    taken = {engine.name for engine in state.running()}
    numbered = (f"{stem}-{os.getpid()}-{n}" for n in itertools.count(1))
    return next(name for name in numbered if name not in taken)


def _import_env() -> dict[str, str]:
    """Our environment, in which the child can import whywait even when run from a source tree."""
    root = Path(__file__).resolve().parents[2]
    env = dict(os.environ)
    if root.name not in ("site-packages", "dist-packages"):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    return env


def _spawn(argv: list[str], log: Path, *, env: dict[str, str], detached: bool) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            env=env,
            start_new_session=True,  # Ctrl-C in the terminal is ours to handle, not the engine's
        )
    _children[child.pid] = child
    return child


def _first_line(child: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
    """The child's answer on its standard output; None when it ends, or says nothing in time."""
    assert child.stdout is not None
    text, until = b"", time.monotonic() + timeout_s
    while b"\n" not in text:
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
        piece = os.read(child.stdout.fileno(), 65536) if ready else b""
        if not piece:
            return None
        text += piece
    child.stdout.close()
    answer: dict[str, Any] = json.loads(text)
    return answer


def _until_ready(order: Plan, child: subprocess.Popen[bytes], log: Path, timeout_s: float, say: Say | None) -> None:
    began, told = time.monotonic(), 0.0
    while not ask.ready(order.url):
        if child.poll() is not None:
            raise _died(f"`{order.program}`", child, log, "run the command by itself to see all of its output")
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise EngineDied(
                f"`{order.program}` did not answer at {order.url} within {timeout_s:.0f} s{_its_words(log)}",
                f"give the URL it listens at, or more time; log: {log}",
            )
        if say is not None and waited - told >= 15:
            told = waited
            say(f"waiting for `{order.program}` at {order.url} ({waited:.0f} s)")
        time.sleep(_POLL_S)


def _died(who: str, child: subprocess.Popen[bytes], log: Path, hint: str) -> EngineDied:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)
    code = child.returncode
    how = "said nothing" if code is None else f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
    return EngineDied(f"{who} {how} before it was ready{_its_words(log)}", f"{hint}; log: {log}")


def _its_words(log: Path) -> str:
    """The last lines of the log, led by the first error where that has scrolled out of them."""
    lines, error = last_lines(log) or "(none)", first_error(log)
    cause = f"; its first error:\n{error}\nand" if error is not None and error not in lines else ";"
    return f"{cause} its last lines:\n{lines}"


def _embedded_facts(engine: Engine, settings: Settings) -> Engine:
    got = ask.llama_slots(engine.url)
    per_pool = 1 if settings.kv_unified else got.count
    known = got.ctx_per_slot is not None and per_pool is not None
    return replace(
        engine,
        slots=got.count,
        max_num_seqs=got.count,
        ctx_per_slot=got.ctx_per_slot,
        kv_tokens=(got.ctx_per_slot or 0) * (per_pool or 0) if known else None,
    )


def _command_facts(engine: Engine, order: Plan) -> Engine:
    said, served = kv_capacity(read_log(engine.log)), ask.first_model(engine.url)
    return replace(
        engine,
        model=served.name,
        ctx_per_slot=said.per_request or served.max_len,
        kv_tokens=said.kv_tokens,
        max_num_seqs=said.max_num_seqs or order.max_num_seqs,
    )


@contextlib.contextmanager
def _ended_on_failure(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever goes wrong between start and ready — Ctrl-C included — leaves no process behind."""
    try:
        yield
    except BaseException:
        child.terminate()  # an embedded engine that loads dies of it; a guard ends its command
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(15)
        state.signal_group(child.pid, signal.SIGKILL)
        _release(child.pid)
        raise


def _release(pid: int) -> None:
    child = _children.pop(pid, None)
    if child is None:
        return
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)


def _await_end(engine: Engine, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while state.alive(engine) and time.monotonic() < until:
        for child in _children.values():
            child.poll()  # reaps it, if it was ours
        time.sleep(0.02)


def _await_guard(pid: int, mark: str | None) -> None:
    """The guard ends by itself once it has cleared up after its command."""
    until = time.monotonic() + 15
    while state.process_alive(pid, mark):
        if (child := _children.get(pid)) is not None and child.poll() is not None:
            return
        if time.monotonic() > until:
            state.signal_group(pid, signal.SIGKILL)
            return
        time.sleep(0.02)
