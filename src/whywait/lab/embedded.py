"""The engine's process: ``python -m whywait.lab.embedded --config JSON`` runs llama.cpp's server until told to stop.

It speaks to whoever started it in one line on standard output (``{"url": …}`` when it serves), then writes only to
standard error, its log. It ends on SIGTERM, and — with ``follow_parent`` — when its parent does, however that died:
standard input is a pipe whose other end the parent holds. (Not ``PR_SET_PDEATHSIG``: that fires when the *thread* that
started it ends.)
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from whywait.lab.cpus import pin
from whywait.lab.settings import Settings

LOOPBACK = "127.0.0.1"


def main(argv: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m whywait.lab.embedded")
    parser.add_argument("--config", required=True, help="settings as JSON")
    config = json.loads(parser.parse_args(argv).config)
    answer = _claim_stdout()
    settings = Settings.from_dict(config)
    pin(settings.cpus)
    try:
        server = _serve(settings)
    except Exception as err:  # xllamacpp raises RuntimeError with no reason; the reason is in the log above this line
        _log(f"the engine could not start: {err}")
        _leave(1)
    os.write(answer, (json.dumps({"url": server.listening_address}) + "\n").encode())
    os.close(answer)
    # Only now: during loading the default action (die at once) is the right one.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    _wait(config.get("parent_pid") if config.get("follow_parent") else None)
    _leave(0)


def _claim_stdout() -> int:
    """Keep standard output for the one line and send everything native code prints there to the log."""
    answer = os.dup(1)
    os.dup2(2, 1)
    return answer


def _serve(settings: Settings) -> Any:
    import xllamacpp

    return xllamacpp.Server(common_params(xllamacpp, settings))


def common_params(xllamacpp: Any, settings: Settings) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = settings.model
    if settings.name:
        params.model_alias = {settings.name}
    params.hostnames = [LOOPBACK]
    params.port = settings.port
    params.n_parallel = settings.slots
    params.n_ctx = settings.total_ctx
    params.kv_unified = settings.kv_unified
    params.cont_batching = settings.cont_batching
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    params.n_threads_http = settings.http_thread_count
    params.n_batch, params.n_ubatch = settings.batch, settings.ubatch
    params.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings.cache_type_k.upper()}")
    params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings.cache_type_v.upper()}")
    params.cache_prompt = settings.cache_prompt
    params.cache_ram_mib = settings.cache_ram_mib
    # The server joins folder and file name as text.
    params.slot_save_path = os.path.join(settings.slot_save_path, "") if settings.slot_save_path else ""
    params.warmup = settings.warmup
    if not settings.mmap:
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.ui = False
    params.fit_params = False  # we said what we want; fitting would load the model twice to say the same
    for dotted, value in settings.extra.items():
        *path, last = dotted.split(".")
        target = params
        for part in path:
            target = getattr(target, part)
        getattr(target, last)  # an unknown name must fail, not become a new attribute
        setattr(target, last, value)
    return params


def _wait(parent_pid: int | None) -> None:
    """Until the parent is gone; for ever when there is none to follow."""
    while True:
        if parent_pid is None:
            time.sleep(3600)
            continue
        # The pipe tells at once; the parent's id is the backstop, for when a fork of the parent still holds the pipe.
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if (readable and not os.read(0, 4096)) or os.getppid() != parent_pid:
            _log("the process that started this engine is gone; ending")
            return


def _end(signum: int, _frame: FrameType | None) -> None:
    _log(f"ending on {signal.Signals(signum).name}")
    _leave(0)


def _leave(code: int) -> NoReturn:
    # Tearing the server down politely takes a second while streams run, and there is nothing to save.
    sys.stderr.flush()
    os._exit(code)


def _log(line: str) -> None:
    print(f"whywait: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
