"""Verbs, flags and exit codes; no logic. A verb's module is imported only when it is called, so ``--help`` is quick."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from whywait import __version__, flags_lab
from whywait.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, WhywaitError, scrub

VERBS: dict[str, tuple[str, str]] = {
    "diagnose": ("whywait.verbs.measure:diagnose", "find out what a service waits on (no URL: the embedded engine)"),
    "run": ("whywait.verbs.measure:run", "measure one load point"),
    "sweep": ("whywait.verbs.measure:sweep", "measure several load points; one table"),
    "resume": ("whywait.verbs.resume:resume", "finish a run or sweep that was cut off, into a new run"),
    "watch": ("whywait.verbs.watch:watch", "what a service in production waits on; sends no load"),
    "show": ("whywait.verbs.measure:show", "read a saved run again"),
    "find": ("whywait.verbs.find:find", "the highest request rate that keeps an SLO, as an interval"),
    "ab": ("whywait.verbs.ab:ab", "two arms of an engine in alternating rounds, paired, until it is decided"),
    "try": ("whywait.verbs.ab:try_technique", "a technique for real, against not having it: gain and price"),
    "probe": ("whywait.verbs.probe:probe", "what one stream costs, by single streams alone (no URL: as diagnose)"),
    "workload": ("whywait.verbs.workload:workload", "learn a workload from logs (fit), or look at one (show)"),
    "record": ("whywait.verbs.record:record", "a proxy that notes lengths, times and shared prefixes, never text"),
    "exam": ("whywait.verbs.exam:exam", "known bottlenecks on real engines: record them, score the verdicts"),
    "agent": ("whywait.verbs.agent:agent", "serve this machine's readings to a whywait on another machine"),
    "engine": ("whywait.verbs.engine:engine", "start, stop and list the embedded engine"),
}
#: The end of each verb's help: the shortest command that does something, and the page that tells the rest.
EXAMPLES: dict[str, tuple[str, str]] = {
    "diagnose": ("http://127.0.0.1:8000 --slo ttft=500ms,tpot=50ms", "verdicts.md"),
    "run": ("http://127.0.0.1:8000 --concurrency 8 --requests 64", "metrics.md"),
    "sweep": ("http://127.0.0.1:8000 --concurrency 1,4,16 --duration 30s", "metrics.md"),
    "resume": ("whywait-runs/20261130-101500", "nothing-lost.md"),
    "watch": ("http://127.0.0.1:8000 --window 60s", "watch.md"),
    "show": ("whywait-runs/20261130-101500 --html report.html", "accounts.md"),
    "find": ("http://127.0.0.1:8000 --slo ttft=500ms@p95,tpot=50ms@p95", "find.md"),
    "ab": ("--a embedded:slots=2 --b embedded:slots=8 --concurrency 8 --promise queue", "ab.md"),
    "try": ("continuous-batching", "ab.md"),
    "probe": ("http://127.0.0.1:8000 --budget 2m", "probe.md"),
    "workload": ("fit requests.jsonl --out workload.toml", "workloads.md"),
    "record": ("--listen 127.0.0.1:9000 --upstream http://127.0.0.1:8000", "recording.md"),
    "exam": ("score", "exam.md"),
    "agent": ("--listen 0.0.0.0:9465 --token-file token --engine-port 8000", "probes.md"),
    "engine": ("start --slots 8", "engines.md"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"{self.prog}: {message}\n  → {self.prog} --help shows the flags", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="whywait",
        description="What is your LLM service actually waiting on, and what would fix it?",
        epilog="exit codes: 0 done, 1 a --fail-if gate failed, 2 usage, 3 undecided (--strict), 4 the service failed, "
        "5 whywait's own fault, 6 the measurement is invalid (client late), 7 an arm of ab did not start, 130 Ctrl-C",
    )
    top.add_argument("--version", action="version", version=f"whywait {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, (_, text) in VERBS.items():
        example, page = EXAMPLES[name]
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".",
                               epilog=f"example: whywait {name} {example} (more in docs/{page})")  # fmt: skip
        globals()[f"_flags_{name}"](sub)
    return top


def _flags_run(p: argparse.ArgumentParser) -> None:
    _service(p)
    _one_point(p)


def _flags_sweep(p: argparse.ArgumentParser) -> None:
    _service(p)
    load = p.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_positives, metavar="A,B,…", help="default 1,4,16,32")
    load.add_argument("--rate", type=_rates, metavar="A,B,…", help="requests per second")
    _load(p)
    _output(p)


def _flags_resume(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of the run that was cut off; it stays as it is")
    p.add_argument("--url", metavar="URL", help="where the service is now (default: as before)")
    p.add_argument("--anyway", action="store_true", help="join the halves even if service, model or engine differ")
    p.add_argument("--api-key-file", metavar="FILE", help="else WHYWAIT_API_KEY or OPENAI_API_KEY")
    p.add_argument("--load", action="store_true", help="allow load on a service that is not on this machine")
    _reach(p)
    _output(p)


def _flags_diagnose(p: argparse.ArgumentParser) -> None:
    _service(p)
    p.add_argument("--budget", default="180s", metavar="TIME", help="measure for about this long (default 3m)")
    _workload(p)
    _output(p)
    p.add_argument(
        "--slots", type=_positive, metavar="N", help="embedded engine: requests it works on at once (default 4)"
    )
    p.add_argument("--last", metavar="TIME", help="with --prometheus: judge this much of the past, send no load")
    p.add_argument("--report", metavar="FILE", help="where the HTML report goes (default: report.html in the run)")


def _flags_show(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of a saved run")
    p.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    p.add_argument("--html", metavar="FILE", help="write the report there")
    p.add_argument("--fail-if", action="append", default=[], metavar="COND", help="exit 1 if so: 'ttft_ms.p95>500'")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")


def _flags_watch(p: argparse.ArgumentParser) -> None:
    p.add_argument("url", nargs="?", metavar="URL", help="base URL of the service (or give --prometheus)")
    p.add_argument("--model", help="model name (default: the first the service lists)")
    p.add_argument("--api-key-file", metavar="FILE", help="else WHYWAIT_API_KEY or OPENAI_API_KEY")
    p.add_argument("--window", default="30s", metavar="TIME", help="judge this much of the past (default 30s)")
    p.add_argument("--for", dest="length", metavar="TIME", help="end after this long (default: Ctrl-C)")
    p.add_argument("--hz", type=_rate, default=1.0, metavar="N", help="looks per second (default 1; costs the service)")
    p.add_argument("--once", action="store_true", help="one window, then end")
    p.add_argument("--json", action="store_true", help="a JSON document per window on stdout, no live view")
    p.add_argument("--out", metavar="DIR", help="keep it as a run in this folder")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")
    p.add_argument("--slo", metavar="LIST", help="'ttft=500ms,tpot=50ms,e2e=10s'")
    _reading(p)
    _reach(p)
    _probes(p)


def _flags_find(p: argparse.ArgumentParser) -> None:
    _service(p)
    p.add_argument("--budget", default="10m", metavar="TIME", help="search for about this long (default 10m)")
    p.add_argument("--share", type=float, default=0.95, metavar="S", help="of requests, where --slo has no @pNN (0.95)")
    p.add_argument("--max-rate", type=_rate, metavar="R", help="never more requests per second than this")
    _workload(p)
    _output(p)


def _flags_ab(p: argparse.ArgumentParser) -> None:
    flags_lab.ab(p)
    _asked(p)
    _one_point(p)


def _flags_try(p: argparse.ArgumentParser) -> None:
    flags_lab.try_(p)
    _asked(p)
    _workload(p)
    _output(p)


def _flags_probe(p: argparse.ArgumentParser) -> None:
    _service(p)
    p.add_argument("--budget", default="60s", metavar="TIME", help="probe for about this long (default 1m)")
    p.add_argument("--longest", type=_positive, default=4096, metavar="N", help="prompt tokens at most (default 4096)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of texts and order (default 1)")
    # Its requests are its own.
    p.set_defaults(
        workload=None, prompt_tokens=None, output_tokens=None, language=None, temperature=None, slo=None, tokenizer=None
    )
    _kept(p)


_flags_exam = flags_lab.exam


def _flags_agent(p: argparse.ArgumentParser) -> None:
    p.add_argument("--listen", default="127.0.0.1:9465", metavar="[HOST:]PORT", help="default 127.0.0.1:9465")
    p.add_argument("--token-file", metavar="FILE", help="token that readers must send; needed beyond this machine")
    p.add_argument("--engine-port", type=_positive, metavar="PORT", help="watch what listens there")
    p.add_argument("--pid", type=_positive, action="append", default=[], metavar="N", help="or these, with children")


def _flags_engine(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=["start", "stop", "status", "list"], help="it runs on after start, until stop")
    p.add_argument("name", nargs="?", help="name of the engine (default: default)")
    p.add_argument("--model", default="", metavar="FILE", help="a GGUF file (default: SmolLM2-135M, fetched once)")
    p.add_argument("--port", type=int, default=0, help="default: any free one")
    p.add_argument("--slots", type=_positive, default=4, help="requests worked on at once (default 4)")
    p.add_argument("--ctx", type=_positive, default=2048, help="context per slot, tokens (default 2048)")
    p.add_argument("--threads", type=int, default=0, help="default: 1 on two cores, else half of them")
    p.add_argument("--synthetic", choices=["tiny", "small"], help="a random model made on the spot")
    p.add_argument("--json", action="store_true", help="JSON on stdout")


def _flags_workload(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=["fit", "show"], help="fit: learn a workload from them; show: what they are like")
    p.add_argument("files", nargs="+", metavar="FILE", help="logs or traces of one format; show also takes TOML")
    p.add_argument("--format", default="auto", choices=["auto", "openai", "recording", "azure", "burstgpt", "mooncake",
                   "llmservingsim", "schedule", "servegen"], help="default: told by the first line")  # fmt: skip
    p.add_argument("--out", metavar="FILE", help="fit: the workload (default workload.toml; the replay file beside it)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of what is drawn (default 1)")
    p.add_argument("--json", action="store_true", help="JSON on stdout")


def _flags_record(p: argparse.ArgumentParser) -> None:
    p.add_argument("--upstream", required=True, metavar="URL", help="the service that answers")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: a free port of this machine")
    p.add_argument("--out", metavar="DIR", help="folder of the recording (default: whywait-recordings/…)")
    p.add_argument("--token-env", metavar="NAME", help="environment variable with the token that clients must send")
    p.add_argument("--json", action="store_true", help="the counts as JSON on stdout at the end")


def _service(p: argparse.ArgumentParser) -> None:
    p.add_argument("url", nargs="?", metavar="URL", help="base URL of an OpenAI-compatible service")
    p.add_argument("--launch", metavar="COMMAND", help="start this engine, measure it, stop it: 'vllm serve …'")
    _asked(p)


def _asked(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", help="model name (default: the first the service lists)")
    p.add_argument(
        "--dialect",
        choices=["chat", "completions", "responses"],
        default="chat",
        help="endpoint that is asked (default chat; a URL that ends in one chooses it)",
    )
    p.add_argument("--api-key-file", metavar="FILE", help="else WHYWAIT_API_KEY or OPENAI_API_KEY")
    p.add_argument("--timeout", metavar="TIME", help="per request (default 300s)")
    p.add_argument("--no-stream", dest="stream", action="store_false", help="whole answers; no TTFT")
    p.add_argument("--load", action="store_true", help="allow load on a service that is not on this machine")
    _reading(p)
    _reach(p)
    _probes(p)


def _reading(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("where the engine's metrics are read (docs/engines.md)")
    g.add_argument("--metrics-url", action="append", default=[], metavar="URL", help="page of a replica; repeatable")
    g.add_argument("--engine-file", metavar="FILE", help="TOML: the metrics, flags and fields of another engine")
    g.add_argument("--prometheus", metavar="URL", help="read them from this Prometheus instead")
    g.add_argument("--prometheus-match", metavar="SELECTOR", help="which of its targets: 'job=\"vllm\"'")
    g.add_argument("--prometheus-token-env", metavar="NAME", help="environment variable with its bearer token")
    g.add_argument("--prometheus-token-file", metavar="FILE", help="file with it")


def _reach(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("how the service is reached and read (docs/streams.md)")
    g.add_argument("--header", action="append", default=[], metavar="'K: V'", help="sent with each request; repeatable")
    g.add_argument("--body", metavar="JSON", help="fields merged into every request: '{\"top_k\":5}'")
    g.add_argument("--ca", metavar="FILE", help="PEM file of the authorities to trust, instead of the system's")
    g.add_argument("--cert", metavar="FILE", help="client certificate, PEM")
    g.add_argument("--key", metavar="FILE", help="its key, when it is not in the same file")
    g.add_argument("--insecure", action="store_true", help="do not check the service's certificate")
    g.add_argument("--proxy", metavar="URL", help="HTTP proxy, or 'none' (default: http_proxy, https_proxy, no_proxy)")
    g.add_argument("--lenient-eof", action="store_true", help="a stream that just ends is ok, not truncated")


def _probes(p: argparse.ArgumentParser) -> None:
    g, where = p.add_argument_group("what is read beside the load (docs/probes.md)"), "[HOST:]PORT"
    g.add_argument("--otlp-listen", metavar=where, help="take the engine's spans there (OTLP over HTTP, /v1/traces)")
    g.add_argument("--otlp-grpc-listen", metavar=where, help="the same over gRPC (extra otlp-grpc)")
    g.add_argument("--otlp-token-file", metavar="FILE", help="token the engine must send; needed beyond this machine")
    g.add_argument("--gpu-metrics-url", action="append", default=[], metavar="URL", help="of a DCGM exporter")
    g.add_argument("--agent", action="append", default=[], metavar="URL", help="of a 'whywait agent'; repeatable")
    g.add_argument("--agent-token-file", metavar="FILE", help="token of the agents")


def _workload(p: argparse.ArgumentParser) -> None:
    p.add_argument("--prompt-tokens", metavar="LEN", help="128, uniform(64,512), lognormal(256,0.6), …")
    p.add_argument("--output-tokens", metavar="LEN", help="likewise, of the answers")
    p.add_argument("--workload", metavar="FILE", help="TOML: classes, lengths, arrivals, SLO")
    p.add_argument("--slo", metavar="LIST", help="'ttft=500ms,tpot=50ms,e2e=10s'")
    p.add_argument("--cache", choices=["cold", "warm", "natural"], help="prefix cache (default cold: salted prompts)")
    p.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json or its folder: exact lengths without /tokenize")
    p.add_argument("--temperature", type=float, metavar="T", help="of the sampling (default 0)")
    p.add_argument("--language", metavar="LIST", help="of the prompts: en, zh, es, de, ar, code (default en)")
    p.add_argument("--seed", type=int, metavar="N", help="of lengths, arrivals and texts (default 1, or the file's)")


def _one_point(p: argparse.ArgumentParser) -> None:
    load = p.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_positive, metavar="N", help="requests in flight (default 1; ab: 4)")
    load.add_argument("--rate", type=_rate, metavar="R", help="requests per second, whatever comes back")
    _load(p)
    _output(p)


def _load(p: argparse.ArgumentParser) -> None:
    p.add_argument("--requests", type=_positive, metavar="N", help="per point (default 10 per place in flight)")
    p.add_argument("--duration", metavar="TIME", help="per point: what is due after this long is not sent")
    p.add_argument("--processes", type=_positive, default=1, metavar="N", help="drive the load from N processes")
    p.add_argument(
        "--arrivals", choices=["poisson", "constant", "gamma", "burst"], help="with --rate (default poisson)"
    )
    p.add_argument("--cv", type=_rate, metavar="CV", help="of gamma gaps: above 1 burstier than poisson (default 2)")
    p.add_argument("--burst", type=_positive, metavar="N", help="requests that come at once with burst (default 8)")
    p.add_argument("--stages", metavar="LIST", help="rates one after another: '5:30s,5-20:60s' (the second a ramp)")
    p.add_argument("--trace", metavar="FILE", help="replay its requests: JSON Lines or Parquet, see docs/workloads.md")
    p.add_argument("--speed", type=_rate, metavar="X", help="replay X times as fast (default 1)")
    p.add_argument("--max-in-flight", type=_positive, metavar="N", help="with --rate: more wait here, and it counts")
    p.add_argument("--ramp", metavar="TIME", help="with --concurrency: spread the first requests over this")
    _workload(p)


def _output(p: argparse.ArgumentParser) -> None:
    _kept(p)
    p.add_argument("--fail-if", action="append", default=[], metavar="COND", help="exit 1 if so: 'ttft_ms.p95>500'")


def _kept(p: argparse.ArgumentParser) -> None:
    p.add_argument("--out", metavar="DIR", help="folder for the run (default: whywait-runs/…)")
    p.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")
    p.add_argument("--no-floor", dest="floor", action="store_false", help="do not measure the client's own error first")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate in requests per second")
    return value


def _positives(text: str) -> list[float]:
    return [float(_positive(part.strip())) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return [_rate(part.strip()) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. No traceback reaches a user unless WHYWAIT_DEBUG is set."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows only ASCII gets ? for what it cannot show
    args = parser().parse_args(argv)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - closed by the caller of this process
    module, function = VERBS[args.verb][0].split(":")
    try:
        code: int = getattr(importlib.import_module(module), function)(args)
    except WhywaitError as exc:
        print(f"whywait: {exc.message}" + (f"\n  → {exc.hint}" if exc.hint else ""), file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        print("whywait: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EMFILE):
            return _ours(exc)
        where = f" ({exc.filename})" if exc.filename else ""
        hint = "allow more open files: ulimit -n" if exc.errno == errno.EMFILE else "make room, or write elsewhere"
        print(f"whywait: {exc.strerror}{where}\n  → {hint}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as exc:
        return _ours(exc)
    return code


def _ours(exc: Exception) -> int:
    scrub(exc)
    if os.environ.get("WHYWAIT_DEBUG"):
        raise exc
    where = exc.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    at = f" at {os.path.basename(where.tb_frame.f_code.co_filename)}:{where.tb_lineno}" if where else ""
    print(
        f"whywait: a fault of our own: {type(exc).__name__}: {exc}{at}\n"
        "  → please report it; WHYWAIT_DEBUG=1 shows the traceback",
        file=sys.stderr,
    )
    return EXIT_INTERNAL


if __name__ == "__main__":
    sys.exit(main())
