"""Flags of the verbs on engines of our own (``ab``, ``try``, ``exam``). Part of the command line: nothing heavy."""

from __future__ import annotations

import argparse

from whywait.flags import asking, endpoint, one_point, output, positive, whole, workload_flags

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
    g.add_argument("--quality", nargs="?", const="all", choices=["all", "agreement", "tasks"],
                   help="afterwards: do both arms answer alike, as whywait quality tells")  # fmt: skip


def quality(p: argparse.ArgumentParser) -> None:
    arm = "a command line ({port}: a free one), embedded[:cache_type_k=q4_0,…], or the URL of a service that runs"
    p.add_argument("a", metavar="A", help=f"what it is held against: {arm}")
    p.add_argument("b", nargs="?", metavar="B", help="what was changed, likewise; left out with --aa")
    p.add_argument("--aa", action="store_true", help="A against itself: what is found there is noise")
    p.add_argument("--only", choices=["agreement", "tasks"], help="only distributions over given text, or only tasks")
    g = p.add_argument_group("agreement of distributions (docs/quality.md)")
    g.add_argument("--text", action="append", default=[], metavar="FILE",
                   help="score this text (.jsonl: one per line); repeatable (default: 25 of our own)")  # fmt: skip
    g.add_argument("--positions", type=positive, metavar="N",
                   help="scored in all (default 400 where each is a request of its own, else 4000)")  # fmt: skip
    g.add_argument("--context", type=positive, default=512, metavar="N", help="tokens of a text at most (default 512)")
    g.add_argument("--top", type=positive, default=50, metavar="K", help="length of the lists (default 50)")
    g = p.add_argument_group("tasks")
    g.add_argument("--tasks", metavar="LIST",
                   help="built-in sets and JSONL files of your own, with commas between (default all; none beside "
                   "--suite)")  # fmt: skip
    g.add_argument("--suite", metavar="LIST", help="tasks of lm-eval (extra lm-eval), such as gsm8k")
    g.add_argument("--suite-path", metavar="DIR", default="", help="folder with task files of your own for lm-eval")
    g.add_argument("--cases", type=whole, metavar="N",
                   help="of each category, 0: all (default 40 of the built-in sets, 6 on the embedded engine; of a "
                   "suite or a file of your own all)")  # fmt: skip
    g.add_argument("--at-once", type=positive, default=4, metavar="N", help="tasks in flight (default 4)")
    g.add_argument("--keep-text", action="store_true", help="keep the answers themselves, in answers.jsonl")
    g = p.add_argument_group("what counts as not worse")
    g.add_argument("--margin", type=float, default=2.0, metavar="POINTS", help="of accuracy (default 2)")
    g.add_argument("--margin-ppl", type=float, default=2.0, metavar="PERCENT", help="more perplexity (default 2)")
    g.add_argument("--margin-top1", type=float, default=5.0, metavar="PERCENT",
                   help="of positions with another most probable token (default 5)")  # fmt: skip
    asking(p)
    p.add_argument("--engine-file", metavar="FILE", help="TOML: the metrics, flags and fields of another engine")
    p.add_argument("--seed", type=whole, default=1, metavar="N", help="of tasks that are made up (default 1)")
    p.add_argument("--out", metavar="DIR", help="folder for the comparison (default: whywait-runs/…)")
    p.add_argument("--html", metavar="FILE", help="where the page goes (default: report.html in the folder)")
    p.add_argument("--json", action="store_true", help="all of it as JSON on stdout")
    p.add_argument("--strict", action="store_true", help="exit 3 when a claim is undecided, or --aa finds something")
    p.add_argument("--fail-if", action="append", default=[], metavar="COND",
                   help="exit 1 if so: 'worse', 'accuracy.drop_high>2', 'agreement.top1_low<0.9'")  # fmt: skip


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
    p.add_argument("--json", action="store_true", help="as JSON on stdout")
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
