"""The exam of the verdict: record cases with known bottlenecks on real engines, and score today's verdicts on them.

Part of the application layer. A case is measured by ``app.measure``, the journey behind ``whywait sweep``, with what a
user would have given it; the exam adds nothing to the Run that the judge could read. Only the scoring knows the truth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whywait import __version__, app
from whywait.core import bounded
from whywait.core.run import Run, write_json
from whywait.errors import UsageError, WhywaitError
from whywait.lab import faults, places
from whywait.lab.cpus import Cpus, cpu_split
from whywait.lab.exam import Case
from whywait.lab.exam_model import CONTEXT, write_model
from whywait.lab.launch import launched, start_command, start_embedded
from whywait.lab.models import cached_synthetic
from whywait.lab.settings import Settings
from whywait.lab.state import Engine
from whywait.load.recipe import Load
from whywait.session import Options, Say, stderr

NOTE = "case.json"
QUIET, QUIET_WAIT_S = 0.25, 120.0  # of the CPUs' time before a case; a neighbour we do not know would be a true answer
THIN = 2  # of the readings one in so many goes with the source code


def record(chosen: Sequence[Case], out: Path, vllm: str | None = None, say: Say = stderr) -> list[str]:
    """Measure those of ``chosen`` that ``out`` does not hold yet; returns the names of what could not be recorded.

    ``vllm`` is the Python of an environment that has vLLM.

    Raises:
        UsageError: vLLM is needed and not given.
    """
    todo = [c for c in chosen if not (out / c.name / NOTE).exists()]
    say(f"{len(chosen) - len(todo)} of {len(chosen)} cases are there already")
    if vllm is None and any(c.engine == "vllm" for c in todo):
        raise UsageError("cases on vLLM need vLLM", "--vllm PYTHON of an environment that has it, or --engine embedded")
    failed: list[str] = []
    engine_cpus, client_cpus = cpu_split()
    for _, group in itertools.groupby(sorted(todo, key=lambda c: c.engine_key), key=lambda c: c.engine_key):
        together = list(group)
        try:
            with _engine(together[0], engine_cpus, vllm, say) as engine, app._pinned(client_cpus):
                site = faults.Site(engine.url, engine.pid, engine_cpus, client_cpus)
                failed += [c.name for c in together if not _recorded(c, engine, site, out, say)]
        except WhywaitError as exc:
            say(f"{together[0].engine} with {dict(together[0].settings)} does not start: {exc.message}")
            failed += [c.name for c in together]
    return failed


def _recorded(case: Case, engine: Engine, site: faults.Site, out: Path, say: Say) -> bool:
    busy = _quiet_machine(site, say)
    say(f"recording {case.name}")
    began, before = time.monotonic(), faults.calibration_ms(site.engine_cpus)
    with tempfile.TemporaryDirectory(prefix="whywait-exam-") as folder:
        try:
            with faults.FAULTS[case.put](site, **case.args) as put:
                result = app.measure(_options(case, put.url, folder), _loads(case), _quiet,
                                     engine=engine if case.by == "launch" else None)  # fmt: skip
        except WhywaitError as exc:
            say(f"  {case.name}: {exc.message}")
            return False
        if result.interrupted:
            raise KeyboardInterrupt
        note = {
            "name": case.name,
            "put": put.label,
            "seconds": round(time.monotonic() - began, 1),
            "recorded": time.strftime("%Y-%m-%d", time.gmtime()),
            "whywait_version": __version__,
            "busy_before": busy,
            "calibration_ms": [before, faults.calibration_ms(site.engine_cpus)],
        }
        save(result.run, out / case.name, note)
    say(f"  {note['seconds']:.0f} s: {result.headline}")
    return True


def save(run: Run, folder: Path, note: dict[str, Any]) -> None:
    """Save a case. ``note`` goes last: it marks the case as there."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    run.save(part)
    write_json(part / NOTE, note)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)


def keep(chosen: Sequence[Case], folder: Path, out: Path) -> int:
    """Copy recorded cases into ``out``, thinned where that changes no verdict; says how many there were."""
    there = [c for c in chosen if (folder / c.name / NOTE).exists()]
    for case in there:
        run = Run.load(folder / case.name)
        thin = thinned(run)
        same = _claims(thin) == _claims(run)
        note = bounded.read_json(folder / case.name / NOTE)
        note["readings"] = f"one in {THIN} kept" if same else "all kept"
        save(thin if same else run, out / case.name, note)
    return len(there)


def thinned(run: Run) -> Run:
    """With one in ``THIN`` of what each source was asked, but for the askings around the ends of the points."""
    r = run.readings
    asked, source = r["asked_ns"], r["source"]
    edges = np.sort(np.concatenate([run.points["start_ns"], run.points["end_ns"]]))
    kept = np.zeros(len(r), dtype=bool)
    for one in set(source):
        mine = source == one
        times = np.unique(asked[mine])
        after = np.searchsorted(times, edges)
        near = np.unique(np.clip(np.concatenate([after - 1, after]), 0, len(times) - 1))
        kept |= mine & np.isin(asked, np.concatenate([times[::THIN], times[near], times[-1:]]))
    return dataclasses.replace(run, readings=r.where(kept))


def _claims(run: Run) -> list[tuple[str, str]]:
    return [(v.cause, v.state) for v in app.analysed(run, Path()).verdicts]


def _quiet_machine(site: faults.Site, say: Say) -> float | None:
    """Wait, but not for ever, until nobody else uses the CPUs of engine and client; returns their use then, 0..1."""
    cpus = (*site.engine_cpus, *site.client_cpus)
    until = time.monotonic() + QUIET_WAIT_S
    busy = faults.busy_share(cpus)
    while busy is not None and busy > QUIET and time.monotonic() < until:
        say(f"waiting for a quiet machine: its CPUs are {busy:.0%} busy")
        time.sleep(5)
        busy = faults.busy_share(cpus)
    return None if busy is None else round(busy, 3)


def _options(case: Case, url: str, folder: str) -> Options:
    return Options(url=url, workload=case.workload, out=str(Path(folder) / "run"), seed=case.workload.seed,
                   command=("exam", "record"))  # fmt: skip


def _loads(case: Case) -> list[Load]:
    return [Load(p.mode, p.target, duration_s=p.seconds) for p in case.points]


def _quiet(_line: str) -> None:
    pass


@contextlib.contextmanager
def _engine(case: Case, cpus: Cpus, vllm: str | None, say: Say) -> Iterator[Engine]:
    """The engine of a case, pinned to ``cpus``."""
    settings = dict(case.settings)
    start: Callable[[], Engine]
    if case.engine == "embedded":
        if synthetic := settings.pop("synthetic", ""):
            settings["model"] = str(cached_synthetic(synthetic))
        if most := settings.pop("draft", 0):  # of the same vocabulary, with other weights: it never agrees
            settings["model"] = str(cached_synthetic("small"))
            draft = {"types": [1], "draft.mparams.path": str(cached_synthetic("draft")), "draft.n_max": most}
            settings["extra"] = {f"speculative.{k}": v for k, v in draft.items()}
        own = Settings(cpus=cpus, **settings)
        start = lambda: start_embedded(own, say=say)  # noqa: E731
    else:
        assert vllm is not None
        line = vllm_command(vllm, settings, cpus)
        start = lambda: start_command(line, cpus=cpus, say=say)  # noqa: E731
    with launched(start) as engine:
        yield engine


def vllm_command(python: str, settings: dict[str, Any], cpus: Cpus) -> str:
    """The command line of a vLLM server on a free port; ``settings`` are its flags, ``model`` apart."""
    size = settings.pop("model", "tiny")
    folder = write_model(places.cache_dir() / "models" / f"exam-llama-{size}", size)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if cpus:
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    flags: dict[str, Any] = {
        "--model": folder, "--served-model-name": size, "--load-format": "dummy", "--dtype": "float32",
        "--max-model-len": CONTEXT, "--max-num-batched-tokens": 512, "--block-size": 32, "--enforce-eager": "",
        "--host": "127.0.0.1", "--port": port, **settings,
    }  # fmt: skip
    words = [f"{k}={v}" for k, v in env.items()] + [python, "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in flags.items():
        words.append(flag)
        if value != "":
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return shlex.join(words)
