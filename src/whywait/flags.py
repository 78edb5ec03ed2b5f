"""The flags of the verbs that measure, each verb's in a function of its name; no logic. What several have in common is
in groups below."""

from __future__ import annotations

import argparse


def run(p: argparse.ArgumentParser) -> None:
    _service(p)
    one_point(p)
    shape(p)


def one_point(p: argparse.ArgumentParser) -> None:
    load = p.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=positive, metavar="N", help="requests in flight (default 1; ab: 4)")
    load.add_argument("--rate", type=rate, metavar="R", help="requests per second, whatever comes back")
    _load(p)
    output(p)


def sweep(p: argparse.ArgumentParser) -> None:
    _service(p)
    load = p.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=positives, metavar="A,B,…", help="default 1,4,16,32")
    load.add_argument("--rate", type=rates, metavar="A,B,…", help="requests per second")
    _load(p)
    output(p)
    shape(p)


def resume(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of the run that was cut off; it stays as it is")
    p.add_argument("--url", metavar="URL", help="where the service is now (default: as before)")
    p.add_argument("--ray", metavar="ADDRESS", help="where the Ray cluster is now; 'none': one process here instead")
    p.add_argument("--anyway", action="store_true", help="join the halves even if service, model or engine differ")
    p.add_argument("--api-key-file", metavar="FILE", help="else WHYWAIT_API_KEY or OPENAI_API_KEY")
    p.add_argument("--load", action="store_true", help="allow load on a service that is not on this machine")
    _reach(p)
    output(p)
    shape(p)


def diagnose(p: argparse.ArgumentParser) -> None:
    _service(p)
    p.add_argument("--budget", default="180s", metavar="TIME", help="measure for about this long (default 3m)")
    workload_flags(p)
    output(p)
    p.add_argument(
        "--slots", type=positive, metavar="N", help="embedded engine: requests it works on at once (default 4)"
    )
    p.add_argument("--last", metavar="TIME", help="with --prometheus: judge this much of the past, send no load")
    p.add_argument("--report", metavar="FILE", help="where the HTML report goes (default: report.html in the run)")


def show(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of a saved run")
    p.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    p.add_argument("--html", metavar="FILE", help="write the report there")
    p.add_argument("--fail-if", action="append", default=[], metavar="COND", help="exit 1 if so: 'ttft_ms.p95>500'")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")
    shape(p)
    priced(p, "cost in the report of --html (default: the shipped offers for the run's machine; docs/bill.md)")


def bill(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of a saved run: measured, simulated or imported")
    priced(p, "prices (default: the shipped offers for the run's machine; docs/bill.md)")
    p.add_argument("--slo", metavar="LIST", help="'ttft=500ms,tpot=50ms' (default: the run's)")
    p.add_argument("--share-by", default="device time", metavar="RULE",
                   help="'device time' (default), 'output tokens' or 'all tokens'")  # fmt: skip
    p.add_argument("--requests", metavar="FILE", help="CSV: the share of every request in the energy, by that rule")
    p.add_argument("--html", metavar="FILE", help="write the bill there as a page")
    p.add_argument("--json", action="store_true", help="the bill as JSON on stdout")
    p.add_argument("--strict", action="store_true", help="exit 3 when a figure of energy is not sure")


def priced(p: argparse.ArgumentParser, title: str) -> None:
    """What a run is billed by, for ``verbs.bill.ask_of``."""
    g = p.add_argument_group(title)
    g.add_argument("--price", metavar="FILE", help="a price book of your own (TOML)")
    g.add_argument("--price-per-hour", type=rate, metavar="X", help="of one device, all in; with --currency")
    g.add_argument("--owned", metavar="LIST", help="capex=250000,devices=8,years=4,power_price=0.12,pue=1.3,"
                   "hosting=900,utilisation=0.6; with --currency")  # fmt: skip
    g.add_argument("--currency", metavar="CODE", help="of what is given here: USD, EUR, … (nothing is converted)")
    g.add_argument("--price-date", metavar="DATE", help="of what is given here (default: today)")
    g.add_argument("--devices", type=positive, metavar="N", help="devices that serve, where the run does not tell")
    g.add_argument(
        "--power-model", metavar="LIST", help="watts where none were metered: idle_w=70,busy_w=600,host_w=350"
    )


def watch(p: argparse.ArgumentParser) -> None:
    p.add_argument("url", nargs="?", metavar="URL", help="base URL of the service (or give --prometheus)")
    p.add_argument("--model", help="model name (default: the first the service lists)")
    p.add_argument("--api-key-file", metavar="FILE", help="else WHYWAIT_API_KEY or OPENAI_API_KEY")
    p.add_argument("--window", default="30s", metavar="TIME", help="judge this much of the past (default 30s)")
    p.add_argument("--for", dest="length", metavar="TIME", help="end after this long (default: Ctrl-C)")
    p.add_argument("--hz", type=rate, default=1.0, metavar="N", help="looks per second (default 1; costs the service)")
    p.add_argument("--once", action="store_true", help="one window, then end")
    p.add_argument("--json", action="store_true", help="a JSON document per window on stdout, no live view")
    p.add_argument("--out", metavar="DIR", help="keep it as a run in this folder")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")
    p.add_argument("--slo", metavar="LIST", help="'ttft=500ms,tpot=50ms,e2e=10s'")
    _reading(p)
    _reach(p)
    _probes(p)


def find(p: argparse.ArgumentParser) -> None:
    _service(p)
    p.add_argument("--budget", default="10m", metavar="TIME", help="search for about this long (default 10m)")
    p.add_argument("--share", type=float, default=0.95, metavar="S", help="of requests, where --slo has no @pNN (0.95)")
    p.add_argument("--max-rate", type=rate, metavar="R", help="never more requests per second than this")
    workload_flags(p)
    output(p)


def probe(p: argparse.ArgumentParser) -> None:
    _service(p)
    p.add_argument("--budget", default="60s", metavar="TIME", help="probe for about this long (default 1m)")
    p.add_argument("--longest", type=positive, default=4096, metavar="N", help="prompt tokens at most (default 4096)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of texts and order (default 1)")
    # Its requests are its own.
    p.set_defaults(
        workload=None, prompt_tokens=None, output_tokens=None, language=None, temperature=None, slo=None, tokenizer=None
    )
    _kept(p)


def agent(p: argparse.ArgumentParser) -> None:
    p.add_argument("--listen", default="127.0.0.1:9465", metavar="[HOST:]PORT", help="default 127.0.0.1:9465")
    p.add_argument("--token-file", metavar="FILE", help="token that readers must send; needed beyond this machine")
    p.add_argument("--engine-port", type=positive, metavar="PORT", help="watch what listens there")
    p.add_argument("--pid", type=positive, action="append", default=[], metavar="N", help="or these, with children")
    p.add_argument("--json", action="store_true", help="its URL as JSON on stdout, once it answers")


def engine(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=["start", "stop", "status", "list"], help="it runs on after start, until stop")
    p.add_argument("name", nargs="?", help="name of the engine (default: default)")
    p.add_argument("--model", default="", metavar="FILE", help="a GGUF file (default: SmolLM2-135M, fetched once)")
    p.add_argument("--port", type=int, default=0, help="default: any free one")
    p.add_argument("--slots", type=positive, default=4, help="requests worked on at once (default 4)")
    p.add_argument("--ctx", type=positive, default=2048, help="context per slot, tokens (default 2048)")
    p.add_argument("--threads", type=int, default=0, help="default: 1 on two cores, else half of them")
    p.add_argument("--synthetic", choices=["tiny", "small"], help="a random model made on the spot")
    p.add_argument("--json", action="store_true", help="JSON on stdout")


def workload(p: argparse.ArgumentParser) -> None:
    p.add_argument("action", choices=["fit", "show"], help="fit: learn a workload from them; show: what they are like")
    p.add_argument("files", nargs="+", metavar="FILE", help="logs or traces of one format; show also takes TOML")
    p.add_argument("--format", default="auto", choices=["auto", "openai", "recording", "azure", "burstgpt", "mooncake",
                   "llmservingsim", "schedule", "servegen"], help="default: told by the first line")  # fmt: skip
    p.add_argument("--out", metavar="FILE", help="fit: the workload (default workload.toml; the replay file beside it)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of what is drawn (default 1)")
    p.add_argument("--json", action="store_true", help="JSON on stdout")


def record(p: argparse.ArgumentParser) -> None:
    p.add_argument("--upstream", required=True, metavar="URL", help="the service that answers")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: a free port of this machine")
    p.add_argument("--out", metavar="DIR", help="folder of the recording (default: whywait-recordings/…)")
    p.add_argument("--token-env", metavar="NAME", help="environment variable with the token that clients must send")
    p.add_argument("--json", action="store_true", help="the counts as JSON on stdout at the end")


def _service(p: argparse.ArgumentParser) -> None:
    p.add_argument("url", nargs="?", metavar="URL", help="base URL of an OpenAI-compatible service")
    p.add_argument("--launch", metavar="COMMAND", help="start this engine, measure it, stop it: 'vllm serve …'")
    endpoint(p)


def endpoint(p: argparse.ArgumentParser) -> None:
    """How a service is asked and read, wherever it is."""
    asking(p)
    p.add_argument("--no-stream", dest="stream", action="store_false", help="whole answers; no TTFT")
    _reading(p)
    _probes(p)


def asking(p: argparse.ArgumentParser) -> None:
    """How a service is asked, without what is read beside it."""
    p.add_argument("--model", help="model name (default: the first the service lists)")
    p.add_argument(
        "--dialect",
        choices=["chat", "completions", "responses"],
        default="chat",
        help="endpoint that is asked (default chat; a URL that ends in one chooses it)",
    )
    p.add_argument("--api-key-file", metavar="FILE", help="else WHYWAIT_API_KEY or OPENAI_API_KEY")
    p.add_argument("--timeout", metavar="TIME", help="per request (default 300s)")
    p.add_argument("--load", action="store_true", help="allow load on a service that is not on this machine")
    _reach(p)


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


def workload_flags(p: argparse.ArgumentParser) -> None:
    asked(p)
    p.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json or its folder: exact lengths without /tokenize")
    p.add_argument("--temperature", type=float, metavar="T", help="of the sampling (default 0)")
    p.add_argument("--language", metavar="LIST", help="of the prompts: en, zh, es, de, ar, code (default en)")


def asked(p: argparse.ArgumentParser) -> None:
    p.add_argument("--prompt-tokens", metavar="LEN", help="128, uniform(64,512), lognormal(256,0.6), …")
    p.add_argument("--output-tokens", metavar="LEN", help="likewise, of the answers")
    p.add_argument("--workload", metavar="FILE", help="TOML: classes, lengths, arrivals, SLO")
    p.add_argument("--slo", metavar="LIST", help="'ttft=500ms,tpot=50ms,e2e=10s'")
    p.add_argument("--cache", choices=["cold", "warm", "natural"], help="prefix cache (default cold: salted prompts)")
    p.add_argument("--seed", type=int, metavar="N", help="of lengths, arrivals and texts (default 1, or the file's)")


def _load(p: argparse.ArgumentParser) -> None:
    p.add_argument("--processes", type=positive, metavar="N", help="drive the load from N processes (default 1)")
    p.add_argument(
        "--ray", metavar="ADDRESS", help="from the workers of this Ray cluster, one process each (docs/ray.md)"
    )
    points(p)
    workload_flags(p)


def points(p: argparse.ArgumentParser) -> None:
    p.add_argument("--requests", type=positive, metavar="N", help="per point (default 10 per place in flight)")
    p.add_argument("--duration", metavar="TIME", help="per point: what is due after this long is not sent")
    p.add_argument(
        "--arrivals", choices=["poisson", "constant", "gamma", "burst"], help="with --rate (default poisson)"
    )
    p.add_argument("--cv", type=rate, metavar="CV", help="of gamma gaps: above 1 burstier than poisson (default 2)")
    p.add_argument("--burst", type=positive, metavar="N", help="requests that come at once with burst (default 8)")
    p.add_argument("--stages", metavar="LIST", help="rates one after another: '5:30s,5-20:60s' (the second a ramp)")
    p.add_argument("--trace", metavar="FILE", help="replay its requests: JSON Lines or Parquet, see docs/workloads.md")
    p.add_argument("--speed", type=rate, metavar="X", help="replay X times as fast (default 1)")
    p.add_argument("--max-in-flight", type=positive, metavar="N", help="with --rate: more wait here, and it counts")
    p.add_argument("--ramp", metavar="TIME", help="with --concurrency: spread the first requests over this")


def output(p: argparse.ArgumentParser) -> None:
    _kept(p)
    p.add_argument("--fail-if", action="append", default=[], metavar="COND", help="exit 1 if so: 'ttft_ms.p95>500'")


def _kept(p: argparse.ArgumentParser) -> None:
    p.add_argument("--out", metavar="DIR", help="folder for the run (default: whywait-runs/…)")
    p.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    p.add_argument("--strict", action="store_true", help="exit 3 when no verdict is supported")
    p.add_argument("--no-floor", dest="floor", action="store_false", help="do not measure the client's own error first")


def shape(p: argparse.ArgumentParser) -> None:
    p.add_argument("--format", choices=["text", "bench"], default="text",
                   help="bench: the text block of 'vllm bench serve' (docs/terminal.md)")  # fmt: skip


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below a million")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1")
    return value


def positives(text: str) -> list[float]:
    return [float(positive(part.strip())) for part in text.split(",")]


def rates(text: str) -> list[float]:
    return [rate(part.strip()) for part in text.split(",")]
