"""Record runs that test what-ifs on real engines: ``python tools/record_here.py OUT [--vllm PYTHON]``.

The embedded llama.cpp and, with ``--vllm``, vLLM on the CPU are driven at several concurrencies, with few and with many
places, with the prefix cache off and on. Each is measured twice (``-a``, ``-b``): what two measurements of the same
thing differ by is the noise that a prediction may have. ``--keep FOLDER`` copies what a test needs of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from whywait import exam
from whywait.core.run import Run
from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.core.table import Table
from whywait.lab.exam import Case, Point

REPEATS: Final = ("a", "b")
#: Lengths vary, so that requests neither begin nor end in step.
CHAT: Final = RequestClass("default", 1.0, Lengths("uniform", 96, 224), Lengths("uniform", 32, 64))
#: 512 of a prompt's tokens are the same in all.
SHARED: Final = RequestClass("default", 1.0, Lengths("fixed", 576), Lengths("uniform", 16, 32), shared=512 / 576)
LLAMA_S: Final = {1: 15.0, 4: 25.0, 16: 45.0, 32: 60.0}
VLLM_S: Final = {1: 20.0, 4: 20.0, 16: 20.0, 32: 25.0}


def _case(name: str, engine: str, kind: RequestClass, seconds: dict[int, float], settings: dict[str, Any]) -> Case:
    points = tuple(Point("concurrency", float(n), s) for n, s in seconds.items())
    return Case(name, engine, "", (), Workload((kind,), timeout_s=180.0), points, settings)


def cases() -> Iterator[Case]:
    llama16 = {n: s for n, s in LLAMA_S.items() if n < 32}
    vllm16 = {1: 12.0, 4: 12.0, 16: 15.0}
    for repeat in REPEATS:
        for places in (2, 8):
            yield _case(f"llama-slots-{places}-{repeat}", "embedded", CHAT, LLAMA_S, {"slots": places})
            yield _case(f"vllm-seqs-{places}-{repeat}", "vllm", CHAT, VLLM_S, {"--max-num-seqs": places})
        for name, on in (("on", True), ("off", False)):
            yield _case(f"llama-prefix-{name}-{repeat}", "embedded", SHARED, llama16, {"slots": 4, "cache_prompt": on})
            flags = {"--max-num-seqs": 8, **({} if on else {"--no-enable-prefix-caching": ""})}
            yield _case(f"vllm-prefix-{name}-{repeat}", "vllm", SHARED, vllm16, flags)


def keep(folder: Path, out: Path) -> None:
    """Copy the recorded cases without chunks and readings: what calibration and comparison read."""
    for case in cases():
        if not (folder / case.name / exam.NOTE).exists():
            continue
        run = Run.load(folder / case.name)
        requests = run.requests.replace(trace_id=np.full(len(run.requests), None, dtype=object))
        bare = dataclasses.replace(
            run, requests=requests, chunks=Table.empty("chunks"), readings=Table.empty("readings")
        )
        note = json.loads((folder / case.name / exam.NOTE).read_text(encoding="utf-8"))
        exam.save(bare, out / case.name, {**note, "settings": dict(case.settings)})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the recordings")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment that has vLLM")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of cases")
    parser.add_argument(
        "--wait", type=float, default=exam.QUIET_WAIT_S, metavar="S", help="for a quiet machine, at most"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy what there is, thinned; record nothing")
    args = parser.parse_args(argv)
    if args.keep:
        keep(args.out, args.keep)
        return 0
    chosen = [c for c in cases() if fnmatch.fnmatchcase(c.name, args.only) and (args.vllm or c.engine == "embedded")]
    exam.QUIET_WAIT_S = args.wait
    failed = exam.record(chosen, args.out, args.vllm)
    for name in failed:
        print(f"not recorded: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
