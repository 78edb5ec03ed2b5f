"""The flags of the verbs that bring results in and out, each verb's in a function of its name; no logic."""

from __future__ import annotations

import argparse

from whywait.flags import positive


def import_(p: argparse.ArgumentParser) -> None:
    p.add_argument("files", nargs="+", metavar="FILE", help="result files, or the folder of a run; gzip is read too")
    p.add_argument("--out", required=True, metavar="DIR", help="where the run goes; the folder must not hold one yet")
    p.add_argument("--format", default="auto", choices=["auto", "vllm", "sglang", "aiperf", "guidellm",
                   "inference-perf"], help="default: told by what is in the file")  # fmt: skip
    g = p.add_argument_group("what the files do not say")
    g.add_argument("--engine", metavar="NAME", help="vllm, sglang, llama.cpp, tensorrt-llm, …")
    g.add_argument("--model", metavar="NAME", help="of the catalogue where it is to be simulated")
    g.add_argument("--machine", metavar="NAME", help="h100, mi300x, …; 'whywait catalog machines' lists them")
    g.add_argument("--devices", type=positive, metavar="N", help="of that machine (default 1)")
    g.add_argument("--slots", type=positive, metavar="N", help="requests that the engine works on at once")
    g.add_argument("--slo", metavar="LIST", help="'ttft=500ms,tpot=50ms,e2e=10s'")
    p.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    p.add_argument("--report", metavar="FILE", help="write the HTML report there")
    p.add_argument("--fail-if", action="append", default=[], metavar="COND", help="exit 1 if so: 'ttft_ms.p95>500'")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")
