"""The flags of the verbs about the terminal, about what can be measured, and of those that take results further, each
verb's in a function of its name; no logic."""

from __future__ import annotations

import argparse

from whywait.flags import endpoint, positive, rate, whole

# doctor and completion


def doctor(p: argparse.ArgumentParser) -> None:
    p.add_argument("url", nargs="?", metavar="URL", help="base URL of a service; without it, only this machine")
    endpoint(p)
    p.add_argument("--engine-port", type=positive, metavar="PORT", help="no URL: who listens there")
    p.add_argument("--require", action="append", default=[], metavar="NAME",
                   help="exit 1 unless this can be measured (the name of a line); repeatable, or a,b")  # fmt: skip
    p.add_argument("--json", action="store_true", help="all of it as JSON on stdout")
    p.add_argument("--no-floor", dest="floor", action="store_false", help="do not measure the client's own error")
    # Its requests are its own.
    p.set_defaults(
        launch=None, out=None, workload=None, prompt_tokens=None, output_tokens=None, language=None, temperature=None,
        slo=None, tokenizer=None, cache=None, seed=None,
    )  # fmt: skip


def completion(p: argparse.ArgumentParser) -> None:
    p.add_argument("shell", choices=["bash", "zsh", "fish"], help="whose script goes to stdout")


# compare and history


def compare(p: argparse.ArgumentParser) -> None:
    p.add_argument("runs", nargs="+", metavar="RUN", help="A, then every B: run folders, summary.json, baselines")
    p.add_argument("--repeat", action="append", default=[], metavar="RUN", help="one more run of A (repeatable)")
    p.add_argument(
        "--save-baseline", metavar="FILE", help="keep RUN … (runs of the same) as a small JSON; no comparison"
    )
    p.add_argument("--allow", action="append", default=[], metavar="LIST",
                   help="compare in spite of unlike: definitions,workload,model,slo,load")  # fmt: skip
    p.add_argument(
        "--at", action="append", default=[], metavar="LOAD", help="only this one: 'concurrency 8' (repeatable)"
    )
    p.add_argument("--metric", action="append", default=[], metavar="FIGURE", help="what to look at (repeatable)")
    p.add_argument("--threshold", metavar="SHARE", default="5%", help="the least change that counts (default 5%%)")
    p.add_argument("--run-noise", metavar="SHARE", help="how much a figure differs from run to run (sd): 2%%")
    p.add_argument("--slo", metavar="LIST", help="judge both by 'ttft=500ms,tpot=50ms' (default: the runs' own)")
    p.add_argument("--fail-if", action="append", default=[], metavar="COND",
                   help="exit 1 if so: 'goodput<-5%%', 'ttft_ms.p95>+20ms', 'worse' (repeatable)")  # fmt: skip
    p.add_argument("--strict", action="store_true", help="exit 3 when a gate (without gates: any figure) is undecided")
    p.add_argument("--json", action="store_true", help="the comparison as JSON on stdout")
    p.add_argument("--html", metavar="FILE", help="write the page there")
    g = p.add_argument_group("cost and energy per good request (docs/bill.md)")
    g.add_argument("--price", metavar="FILE", help="a price book of your own (TOML)")
    g.add_argument("--price-per-hour", type=rate, metavar="X", help="of one device, all in; with --currency")
    g.add_argument("--currency", metavar="CODE", help="of what is given here: USD, EUR, …")
    g.add_argument("--devices", type=int, metavar="N", help="devices that serve, where the runs do not tell")
    p.set_defaults(owned=None, price_date=None)


def history(p: argparse.ArgumentParser) -> None:
    p.add_argument("directory", nargs="?", default="whywait-runs", metavar="DIR", help="default: whywait-runs")
    p.add_argument("--figure", default="output_tokens_per_s", metavar="FIGURE", help="plotted: ttft_ms.p95, goodput, …")
    p.add_argument("--at", metavar="LOAD", help="of this load point: 'concurrency 8' (default: the knee, or most load)")
    p.add_argument("--model", metavar="NAME", help="only runs of this model")
    p.add_argument("--engine", metavar="NAME", help="only runs of this engine")
    p.add_argument("--last", type=int, metavar="N", help="only the last N")
    p.add_argument("--json", action="store_true", help="every run as JSON on stdout")
    p.add_argument("--csv", metavar="FILE", help="a row per run and load point ('-': stdout)")
    p.add_argument("--html", metavar="FILE", help="write the page there")


# import


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
    p.add_argument("--chunks", type=positive, default=2_000_000, metavar="N",
                   help="keep times of chunks, if there are no more: 0.35 GB a million (default 2000000)")  # fmt: skip
    p.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    p.add_argument("--report", metavar="FILE", help="write the HTML report there")
    p.add_argument("--fail-if", action="append", default=[], metavar="COND", help="exit 1 if so: 'ttft_ms.p95>500'")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")


# export

FORMS = ("perfetto", "otlp", "openmetrics", "grafana", "llm-d", "vllm-bench", "csv", "parquet")
TABLES = ("points", "requests", "chunks", "steps", "readings")


def export(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of a saved run: measured, simulated or imported")
    p.add_argument("--to", required=True, choices=FORMS, help="the form")
    p.add_argument(
        "--out", default="", metavar="PATH", help="file or folder; - is stdout (default: in the run's folder)"
    )
    p.add_argument("--point", type=whole, metavar="N", help="only this load point (default: all)")
    p.add_argument("--requests", metavar="IDS", help="only these: '3,7-12' (perfetto, otlp, csv, parquet)")
    p.add_argument("--limit", type=positive, metavar="N", help="only the first N requests (the same forms)")
    p.add_argument("--no-chunks", dest="chunks", action="store_false", help="perfetto: without the chunks")
    p.add_argument("--table", action="append", choices=TABLES, help="csv, parquet: only this table; repeatable")
    p.add_argument("--step", metavar="TIME", help="openmetrics: between samples (default: 1s, at most 240 a point)")
    p.add_argument(
        "--at-end", action="store_true", help="openmetrics: last values, no times, for textfile or Pushgateway"
    )
    p.add_argument("--start", metavar="TIME", help="time of day of a run that has none: now, or 2026-11-30T12:00:00Z")
    g = p.add_argument_group("otlp, sent to a collector instead of a file")
    g.add_argument("--endpoint", default="", metavar="URL", help="OTLP over HTTP, such as http://127.0.0.1:4318")
    g.add_argument("--remote", action="store_true", help="allow an endpoint that is not on this machine")
    g.add_argument("--header", action="append", default=[], metavar="'K: V'", help="sent with each export; repeatable")
    p.add_argument("--json", action="store_true", help="what was written, as JSON on stdout")
