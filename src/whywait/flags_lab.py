"""Flags of the verbs on engines of our own (``ab``, ``try``, ``exam``). Part of the command line: nothing heavy."""

from __future__ import annotations

import argparse

from whywait.flags import endpoint, one_point, output, workload_flags

EXCLUDE = ("client", "neighbours", "foreign")


def ab(p: argparse.ArgumentParser) -> None:
    arm = "a command line ({port}: a free one), embedded[:slots=8,…], or the URL of a service that runs"
    p.add_argument("--a", required=True, metavar="ARM", help=arm)
    p.add_argument("--b", metavar="ARM", help="likewise; left out with --aa")
    p.add_argument("--metric", action="append", default=[], metavar="FIGURE",
                   help="what is claimed, named beforehand; repeatable, and the fewer the quicker decided (default: "
                   "throughput or goodput, ttft_ms.p50, tpot_ms.p50; docs/ab.md has all)")  # fmt: skip
    p.add_argument("--promise", default="", metavar="WAIT", help="the wait that B is to cut: queue, 'slot limit', …")
    _both(p)
    endpoint(p)
    one_point(p)


def try_(p: argparse.ArgumentParser) -> None:
    p.add_argument("technique", nargs="?", metavar="TECHNIQUE", help="one of --list")
    p.add_argument("--list", action="store_true", help="the techniques, with their promise and price")
    p.add_argument("--engine", default="embedded", metavar="COMMAND", help="'vllm serve MODEL' (default: embedded)")
    _both(p)
    endpoint(p)
    workload_flags(p)
    output(p)


def _both(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("the trial (docs/ab.md)")
    g.add_argument(
        "--rounds", default="4..12", metavar="N..M", help="of each arm, at least and at most (default 4..12)"
    )
    g.add_argument("--margin", default="5%", metavar="SHARE", help="a change below this is none (default 5%%)")
    g.add_argument("--exclude", action="append", default=[], choices=EXCLUDE,
                   help="leave out pairs in which: the client was late, others used the engine's cores, the service "
                   "had other traffic; said now, not afterwards")  # fmt: skip
    g.add_argument("--aa", nargs="?", const="only", choices=["only", "first"],
                   help="A against itself: what a trial finds there is noise (first: then A against B)")  # fmt: skip
    g.add_argument("--warm-up", type=int, metavar="N", help="requests before each round, in no figure (default: width)")
    g.add_argument("--vary", metavar="NAME=V1,V2,…", help="a trial per value of this setting of B, and one table: "
                   "where gain turns to loss (in a command line the value goes where {NAME} stands)")  # fmt: skip
    g.add_argument("--html", metavar="FILE", help="where the page goes (default: report.html in the folder)")


def exam(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=["record", "keep", "score", "simulate"],
                   help="record: put the bottlenecks in and measure (half an hour or more; resumable); score: what "
                   "today's verdicts make of recorded cases; keep: thin them; simulate: score simulated services "
                   "whose bottleneck is built in")  # fmt: skip
    p.add_argument("runs", nargs="?", default="exam", metavar="RUNS", help="folder of recorded cases (default: exam)")
    p.add_argument("--engine", choices=["embedded", "vllm"], help="only cases of this engine")
    p.add_argument("--cases", default="*", metavar="GLOB", help="only cases of such names: 'llama-quota-*'")
    p.add_argument("--out", metavar="DIR", help="record: the same as RUNS; keep: thinned copies of RUNS go there")
    p.add_argument("--vllm", metavar="PYTHON", help="record: Python of an environment that has vLLM")
    p.add_argument("--list", action="store_true", help="score, simulate: list the cases instead")
    p.add_argument("--json", action="store_true", help="score, simulate: as JSON on stdout")
    p.add_argument("--rounds", type=int, default=16, metavar="N",
                   help="simulate: each bottleneck so many times, on other services (default 16)")  # fmt: skip
    p.add_argument("--seed", type=int, default=5, metavar="N", help="simulate: of their lengths and loads (default 5)")
    p.add_argument("--jobs", type=int, default=0, metavar="N", help="simulate: processes (default: all cores)")
    p.add_argument(
        "--blind",
        metavar="WHAT",
        help="score: without metrics, host, slots, stages, reference, half (several: a,b); each: a table",
    )
    p.add_argument("--page", metavar="FILE", help="score, simulate: also write it into this page, between its markers")
