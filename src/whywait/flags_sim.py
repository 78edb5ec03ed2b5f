"""The flags of the verbs about the simulator, each verb's in a function of its name; no logic."""

from __future__ import annotations

import argparse

from whywait.flags import asked, points, positive, positives, rate, rates, share, whole


def simulate(p: argparse.ArgumentParser) -> None:
    _deployment(p)
    load = p.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=positives, metavar="A,B,…", help="default 1,4,16,64")
    load.add_argument("--rate", type=rates, metavar="A,B,…", help="requests per second")
    _shape(p)
    p.add_argument("--draws", type=positive, metavar="N", help="of what is not known, for the intervals (default 60)")
    _somewhere(p)
    p.add_argument("--out", metavar="DIR", help="folder for the run (default: whywait-runs/…)")
    p.add_argument("--json", action="store_true", help="figures, intervals and the summary as JSON on stdout")
    p.add_argument("--fail-if", action="append", default=[], metavar="COND", help="exit 1 if so: 'ttft_ms.p95>500'")
    # Of a live client only: nothing is sent here.
    p.set_defaults(tokenizer=None, language=None, temperature=None)


def _deployment(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("what is simulated (docs/simulate.md)")
    g.add_argument("--machine", metavar="NAME", help="h100, h200, b200, mi300x, … ('whywait catalog machines')")
    g.add_argument("--model", metavar="NAME", help="llama-3.1-70b, …; or a folder with config.json, or a .gguf file")
    g.add_argument("--engine", default="vllm", metavar="NAME", help="vllm, sglang, trtllm, llama.cpp, static")
    g.add_argument("--precision", metavar="TYPE", help="fp8; or weights=fp8,kv=fp8 (default: as published)")
    g.add_argument(
        "--kernels", choices=("fitted", "aic"), default="fitted", help="times of operations: aic needs [aic]"
    )
    g.add_argument("--count", type=positive, metavar="N", help="devices in all (default: what the layout uses)")
    g.add_argument("--layout", metavar="LIST", help="tp=2,replicas=2; pd=2:6; pp, dp, ep, routing")
    g.add_argument(
        "--apply", metavar="LIST", help="techniques: fp8-kv,spec-mtp:drafts=3 ('whywait catalog techniques')"
    )
    g.add_argument(
        "--max-seqs", type=positive, metavar="N", help="sequences at once per engine (default: the engine's)"
    )
    g.add_argument("--token-budget", type=positive, metavar="N", help="tokens of a step (default: the engine's)")
    g.add_argument("--memory-share", type=share, metavar="F", help="of device memory, for weights and KV (0.9)")
    g.add_argument(
        "--kv-blocks", type=positive, metavar="N", help="KV blocks, as the engine's log says (else computed)"
    )
    g.add_argument("--catalog", metavar="FILE", help="TOML with machines and models of your own")


def what_if(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of a saved run, of two load points or more (sweep, diagnose)")
    g = p.add_argument_group("what is changed (docs/what-if.md)")
    g.add_argument("--apply", metavar="LIST", help="techniques: fp8-kv,prefix-cache ('whywait catalog techniques')")
    g.add_argument("--machine", metavar="NAME", help="another machine: h200, … ('whywait catalog machines')")
    g.add_argument("--model", metavar="NAME", help="another model, a folder with config.json, or a .gguf file")
    g.add_argument("--layout", metavar="LIST", help="tp=4; pd=2:6; replicas=2; pp, dp, ep, routing")
    g.add_argument("--load", metavar="LOAD", help="concurrency=64 or rate=8 (default: the run's own load points)")
    p.add_argument(
        "--baseline", metavar="LIST", help="what the run does not tell: model=…,machine=h100,engine=vllm,tp=4"
    )
    p.add_argument("--slo", metavar="LIST", help="'ttft=500ms,tpot=50ms' (default: the run's), for goodput")
    p.add_argument(
        "--bound", metavar="LIST", help="error allowed on a load left out (tpot=20%%,ttft=30%%,throughput=20%%)"
    )
    p.add_argument(
        "--seeds", type=positive, metavar="N", help="draws of what is not known (default 24, fewer for long runs)"
    )
    p.add_argument("--calibration", metavar="FILE", help="keep the calibration there, as JSON")
    _somewhere(p)
    p.add_argument("--catalog", metavar="FILE", help="TOML with machines and models of your own")
    p.add_argument("--html", metavar="FILE", help="write a report there")
    p.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    p.add_argument("--strict", action="store_true", help="exit 3 when nothing is decided")


def plan(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("candidates (docs/plan.md)")
    g.add_argument("--model", metavar="NAME", help="llama-3.1-70b, …; or a folder with config.json, or a .gguf file")
    g.add_argument("--machines", metavar="LIST", help="h100,h200,mi300x ('whywait catalog machines')")
    g.add_argument("--candidates", metavar="FILE", help="TOML: machines, engines, layouts, apply, counts, single ones")
    g.add_argument("--engines", metavar="LIST", help="vllm,sglang,trtllm (default vllm)")
    g.add_argument(
        "--layouts", metavar="LIST", help="'tp=4;tp=8;tp=4,pd=1:2' (default: what fits in a node, and splits)"
    )
    g.add_argument("--apply", metavar="LIST", help="sets of techniques: ';fp8-kv;fp8-weights,fp8-kv' (first: none)")
    g.add_argument("--counts", type=positives, metavar="A,B,…", help="devices (default: what the rate needs)")
    g.add_argument("--precision", metavar="TYPE", help="of all candidates (default: as published)")
    g.add_argument(
        "--run", action="append", default=[], metavar="RUN",
        help="a measured run: calibrates the candidates it speaks of, and is one; repeatable",
    )  # fmt: skip
    g.add_argument("--baseline", default="", metavar="LIST",
                   help="what the runs do not tell of their service: machine=h100,engine=vllm,tp=4")  # fmt: skip
    g.add_argument("--no-calibrate", dest="calibrate", action="store_false",
                   help="runs are candidates only; all others keep the prior")  # fmt: skip
    g.add_argument("--catalog", metavar="FILE", help="TOML with machines and models of your own")
    g = p.add_argument_group("what is asked of them")
    g.add_argument("--rate", type=rate, metavar="R", help="requests per second (default: the workload's own)")
    asked(p)
    g.add_argument("--share", type=share, default=0.95, metavar="S", help="of requests that must keep the SLO (0.95)")
    g.add_argument(
        "--growth", type=rate, default=0.0, metavar="F", help="is the first enough for it? 0.5: half as much again"
    )
    g.add_argument("--quality", action="append", default=[], metavar="[NAMES=]DIR",
                   help="a comparison by 'whywait quality': fp8-weights+fp8-kv=DIR; repeatable")  # fmt: skip
    g = p.add_argument_group("money (docs/bill.md)")
    g.add_argument("--price", metavar="FILE", help="a price book of your own (TOML)")
    g.add_argument("--price-per-hour", metavar="LIST", help="of a device, all in: h100=2.5,h200=3.1; with --currency")
    g.add_argument("--owned", metavar="LIST", help="capex=250000,devices=8,years=4,power_price=0.12,…; with --currency")
    g.add_argument("--currency", metavar="CODE", help="USD, EUR, …: only offers in it count (nothing is converted)")
    g.add_argument("--price-date", metavar="DATE", help="of what is given here (default: today)")
    g.add_argument("--terms", metavar="TERMS", help="'on demand', reserved or owned (default: what most machines have)")
    g.add_argument("--budget", metavar="AMOUNT", help="paid at most, used or not: 20/h, in that currency")
    p.add_argument("--draws", type=positive, default=12, metavar="N", help="of what is not known (default 12)")
    _somewhere(p)
    p.add_argument("--again", metavar="PLAN", help="make a kept plan again from its inputs alone")
    p.add_argument("--out", metavar="DIR", help="folder of plan.json, plan.csv, plan.html (default: whywait-runs/…)")
    p.add_argument("--json", action="store_true", help="the plan as JSON on stdout")
    p.add_argument("--strict", action="store_true", help="exit 3 unless one candidate is first beyond the error")
    p.set_defaults(tokenizer=None, language=None, temperature=None, timeout=None)


def _somewhere(p: argparse.ArgumentParser) -> None:
    """Where a grid is simulated."""
    p.add_argument("--jobs", type=whole, default=0, metavar="N", help="processes at most (default: one per core)")
    p.add_argument("--ray", metavar="ADDRESS", help="on the workers of this Ray cluster (docs/ray.md)")
    p.add_argument("--cells", metavar="FILE", help="keep what is simulated there; what it holds is not simulated again")


def serve_sim(p: argparse.ArgumentParser) -> None:
    _deployment(p)
    p.add_argument("--run", metavar="RUN", help="the service of this run, calibrated on it, with --apply and the like")
    p.add_argument("--baseline", metavar="LIST", help="with --run: what it does not tell: model=…,machine=h100,tp=4")
    p.add_argument("--calibration", metavar="FILE", help="efficiencies that what-if --calibration kept")
    p.add_argument("--port", type=int, default=0, metavar="N", help="default: any free one")
    p.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="of this machine only (default 127.0.0.1)")
    p.add_argument("--speed", type=rate, default=1.0, metavar="X", help="simulated seconds per second (default 1)")
    p.add_argument("--max-model-len", type=positive, metavar="N", help="tokens of a request (default: what fits)")
    p.add_argument("--output-tokens", default="lognormal(256,0.6)", metavar="LEN", help="where no max_tokens is given")
    p.add_argument("--served-name", default="", metavar="NAME", help="of the model (default: the catalogue's)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of what is drawn (default 1)")
    p.add_argument("--json", action="store_true", help="URL and model as JSON on stdout, once it answers")


def catalog(p: argparse.ArgumentParser) -> None:
    p.add_argument("what", nargs="?", metavar="KIND", help="machines, models, techniques, engines or waits")
    p.add_argument("name", nargs="?", metavar="NAME", help="one of them in full, with its source")
    p.add_argument("--catalog", metavar="FILE", help="TOML with machines and models of your own; they go first")
    p.add_argument("--json", action="store_true", help="JSON on stdout")


def _shape(p: argparse.ArgumentParser) -> None:
    """The load of a simulation: as of a measurement, less what only a live client needs."""
    points(p)
    asked(p)
    p.add_argument("--timeout", metavar="TIME", help="per request (default 300s)")
