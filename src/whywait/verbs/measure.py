"""The verbs that measure: flags in, a journey of ``app`` run, text or JSON out, an exit code back."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whywait import app, observing
from whywait.core.schedule import SLO_KEYS, Lengths, Workload, parse_stages
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SERVICE, EXIT_UNDECIDED, GateFailed, Invalid, UsageError
from whywait.judge.diagnose import failures, tally
from whywait.judge.gates import Gate, failed_gates, parse_gates
from whywait.lab.settings import Settings
from whywait.lab.state import Engine
from whywait.load.recipe import mean_rate, schedule_of
from whywait.net.reach import Reach, parse_header
from whywait.report import bench, live, told
from whywait.session import stderr
from whywait.units import NS_PER_MS, NS_PER_S, parse_duration
from whywait.verbs import reading
from whywait.verbs.probes import probes_of

#: Prompt and output tokens of diagnose: short enough on the embedded engine that three minutes hold many requests.
DIAGNOSE_LENGTHS = {"embedded": ("64", "32"), "other": ("256", "64")}

#: Requests of one load point: their plan lies in memory.
MOST_ROWS = 5_000_000

INVALID_HINT = "free a core for the client, or use more processes; the run is kept, and its sends are in its tables"

#: Flags of ``flags.priced``, by where argparse puts them.
PRICED = ("price", "price_per_hour", "owned", "currency", "price_date", "devices", "power_model")

#: Body fields that are the measurement's own, and the flag for each.
OWN_FIELDS = {"model": "--model", "stream": "--no-stream", "messages": "--workload", "prompt": "--workload",
              "input": "--workload"}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    return _measure(args, point_of(args))


def point_of(args: argparse.Namespace) -> list[app.Load]:
    """The one load point that the flags of ``run`` say."""
    mode, target = "concurrency", float(args.concurrency or 1)
    if args.rate:
        mode, target = "rate", args.rate
    elif args.concurrency is None and (own := mean_rate(base := workload_of(args))):
        mode, target = "rate" if base.stages else "trace", own
    return [load_of(args, mode, target)]


def sweep(args: argparse.Namespace) -> int:
    return _measure(args, points_of(args))


def points_of(args: argparse.Namespace) -> list[app.Load]:
    """Those of ``sweep``."""
    mode, targets = ("rate", args.rate) if args.rate else ("concurrency", args.concurrency or [1.0, 4.0, 16.0, 32.0])
    return [load_of(args, mode, t) for t in targets]


def diagnose(args: argparse.Namespace) -> int:
    gates = parse_gates(args.fail_if)
    _writable(args.report)
    if args.last:
        return _finish_with_report(args, past(args), gates, judged_only=True)
    result = diagnosed(args, live.watcher(budget_s=duration(args.budget, "--budget")))
    live.done()
    return _finish_with_report(args, result, gates)


def diagnosed(args: argparse.Namespace, watch: app.Watch | None = None) -> app.Result:
    """The journey of ``diagnose`` by its flags, nothing printed of what it found."""
    budget = duration(args.budget, "--budget")
    if args.slots and (args.url or args.launch):
        raise UsageError("--slots is for the embedded engine", "leave it out: the service has its own limit")
    with _service(args, embedded_slots=args.slots or 4) as engine:
        lengths = DIAGNOSE_LENGTHS["embedded" if engine is not None and engine.kind == "embedded" else "other"]
        if not args.workload:
            args.prompt_tokens = args.prompt_tokens or lengths[0]
            args.output_tokens = args.output_tokens or lengths[1]
        options = _options(args, engine)
        stderr(f"diagnosing {options.url} for about {budget:.0f} s")
        return app.diagnose(options, budget, watch=watch, engine=engine)


def past(args: argparse.Namespace) -> app.Result:
    """``diagnose --prometheus URL --last 1h``: nothing is sent."""
    reading.engine_file(args)
    source = reading.prometheus(args, _reach(args))
    if source is None or args.url or args.launch:
        raise UsageError("--last reads the past from --prometheus, and from nothing else", "leave the URL out")
    seconds = duration(args.last, "--last")
    return observing.past(source, seconds, slo(args.slo), args.out, _command(args))


def _finish_with_report(
    args: argparse.Namespace, result: app.Result, gates: list[Gate], judged_only: bool = False
) -> int:
    report = Path(args.report) if args.report else result.directory / "report.html"
    try:
        return _finish(args, result, gates, judged_only)
    finally:  # also when a gate failed
        app.write_report(result, report)
        stderr(f"report: {report}")


def show(args: argparse.Namespace) -> int:
    of_many = [n for n in ("trial", "quality", "plan", "vary") if (Path(args.run_dir) / f"{n}.json").exists()]
    if as_bench(args) and of_many:
        raise UsageError("--format bench is for one run", f"whywait show of a run inside {args.run_dir}")
    given = [f"--{name.replace('_', '-')}" for name in PRICED if getattr(args, name) is not None]
    if given and (of_many or not args.html):
        what = f"{args.run_dir} is no single run" if of_many else "the text of show has no cost"
        raise UsageError(f"{given[0]}: {what}", "add --html FILE for the report of a run; or whywait bill RUN")
    if (Path(args.run_dir) / "trial.json").exists():
        from whywait.verbs import ab

        return ab.show(args)
    if (Path(args.run_dir) / "quality.json").exists():
        from whywait.verbs import quality

        return quality.show(args)
    if (Path(args.run_dir) / "plan.json").exists():
        from whywait.verbs import plan

        return plan.show(args)
    if (Path(args.run_dir) / "vary.json").exists():
        from whywait.verbs import vary

        return vary.show(args)
    gates = parse_gates(args.fail_if)
    _writable(args.html)
    result = app.show(args.run_dir)
    if args.html:
        from whywait.verbs.bill import ask_of

        app.write_report(result, Path(args.html), ask_of(args, result.run))
        stderr(f"report: {args.html}")
    return _finish(args, result, gates, judged_only=True)


def _writable(path: str | None) -> None:
    """Better said before three minutes of measuring than after.

    Raises:
        UsageError: a report cannot be written there.
    """
    if path and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise UsageError(f"cannot write a report to {path}", "give a file in a folder that exists")


def _measure(args: argparse.Namespace, loads: list[app.Load]) -> int:
    as_bench(args)
    gates = parse_gates(args.fail_if)
    result = measured(args, loads, live.watcher([load.duration_s for load in loads]))
    live.done()
    return _finish(args, result, gates)


def measured(args: argparse.Namespace, loads: list[app.Load], watch: app.Watch | None = None) -> app.Result:
    """The journey of ``run`` and ``sweep`` by their flags, nothing printed of what it found."""
    with _service(args) as engine:
        options = _options(args, engine)
        options = dataclasses.replace(options, max_requests=_ceiling(loads, options.workload))
        return app.measure(options, loads, watch=watch, engine=engine)


@contextlib.contextmanager
def _service(args: argparse.Namespace, embedded_slots: int | None = None) -> Iterator[Engine | None]:
    """The service to measure: a URL as it is, or an engine started for this and stopped after it."""
    reading.engine_file(args)
    if args.launch:
        with app.command(args.launch, url=args.url) as e:
            yield e
    elif args.url:
        yield None
    elif embedded_slots is not None:
        with app.embedded(Settings(slots=embedded_slots)) as e:
            yield e
    else:
        raise UsageError(
            "which service?", "give a URL, or --launch 'vllm serve …'; diagnose starts an engine by itself"
        )


def _options(args: argparse.Namespace, engine: Engine | None) -> app.Options:
    workload = workload_of(args)
    return app.Options(
        url=args.url or (engine.url if engine else ""),
        model=args.model,
        dialect=args.dialect,
        api_key_file=args.api_key_file,
        workload=workload,
        stream=args.stream,
        load_ok=args.load,
        out=args.out,
        slo=slo(args.slo) or common_slo(workload),
        seed=workload.seed,
        floor=args.floor,
        processes=getattr(args, "processes", None) or (0 if getattr(args, "ray", None) else 1),
        ray=getattr(args, "ray", None) or "",
        command=_command(args),
        reach=_reach(args),
        metrics_urls=tuple(args.metrics_url),
        prometheus=reading.prometheus(args, _reach(args)),
        body=_body(args.body),
        probes=probes_of(args),
        tokenizer=args.tokenizer or "",
    )


def common_slo(workload: Workload) -> dict[str, float]:
    """What all classes ask; where they differ, each is held to its own and none to another's."""
    first = workload.classes[0].slo
    return dict(first) if all(c.slo == first for c in workload.classes) else {}


def _reach(args: argparse.Namespace) -> Reach:
    headers = tuple(parse_header(text) for text in args.header)
    return Reach(args.ca, args.cert, args.key, args.insecure, args.proxy, headers, args.lenient_eof)


def _body(text: str | None) -> dict[str, object]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as exc:
        raise UsageError(f"--body is not JSON: {exc}", """use --body '{"top_k": 5}'""") from None
    if not isinstance(fields, dict):
        raise UsageError("--body is not a JSON object", """use --body '{"top_k": 5}'""")
    for name, flag in OWN_FIELDS.items():
        if name in fields:
            raise UsageError(f"--body must not hold {name!r}", f"use {flag}")
    return fields


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    """The command line for the manifest, without the values of headers and without a proxy's password."""
    out = list(sys.argv[1:])
    secret = [value for text in args.header if (value := text.partition(":")[2].strip())]
    if args.proxy and "@" in args.proxy:
        secret.append(args.proxy.partition("://")[2].rpartition("@")[0] or args.proxy.rpartition("@")[0])
    for value in secret:
        out = [word.replace(value, "…") for word in out]
    return tuple(out)


def workload_of(args: argparse.Namespace, base: Workload | None = None) -> Workload:
    if isinstance(args.workload, Workload):  # of the Python API
        base = args.workload
    else:
        base = Workload.from_toml(Path(args.workload)) if args.workload else base or Workload()
    changes: dict[str, object] = {}
    if args.timeout is not None:
        changes["timeout_s"] = duration(args.timeout, "--timeout")
    for flag in ("cache", "temperature", "arrivals", "cv", "burst", "trace", "speed", "max_in_flight"):
        if getattr(args, flag, None) is not None:
            changes[flag] = getattr(args, flag)
    if getattr(args, "ramp", None):
        changes["ramp_s"] = duration(args.ramp, "--ramp")
    if getattr(args, "stages", None):
        changes["stages"] = parse_stages(args.stages)
    if args.seed is not None:
        changes["seed"] = args.seed
    lengths = {k: Lengths.parse(getattr(args, k)) for k in ("prompt_tokens", "output_tokens") if getattr(args, k)}
    if lengths and len(base.classes) > 1:
        raise UsageError("--prompt-tokens and --output-tokens do not go with a workload of several classes")
    classes = base.classes
    if lengths:
        classes = (dataclasses.replace(classes[0], **lengths),)  # type: ignore[arg-type]
    if args.language:
        languages = tuple(args.language.replace(",", " ").split())
        classes = tuple(dataclasses.replace(c, language=languages) for c in classes)
    if args.slo:  # what is asked on the command line is asked of every class
        classes = tuple(dataclasses.replace(c, slo={}) for c in classes)
    changes["classes"] = classes
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def load_of(args: argparse.Namespace, mode: str, target: float) -> app.Load:
    if mode == "concurrency" and args.arrivals:
        raise UsageError("--arrivals is for an open loop", "give --rate, or leave it out")
    seconds = duration(args.duration, "--duration") if args.duration else None
    most = args.requests or target * (seconds or 30)
    if most > MOST_ROWS or target > MOST_ROWS:
        raise UsageError(f"{most:,.0f} requests are more than one run holds", f"at most {MOST_ROWS:,} a point")
    return app.Load(mode, float(target), args.requests, seconds)


def _ceiling(loads: list[app.Load], workload: Workload) -> int | None:
    counts = []
    for load in loads:
        if load.mode != "concurrency" and mean_rate(workload):
            counts.append(len(schedule_of(load, workload, 0, 0)[0]))
        elif load.requests is not None:
            counts.append(load.requests)
        elif load.mode == "rate":
            counts.append(round(load.target * (load.duration_s or 30)))
        elif load.duration_s is None:
            counts.append(max(10, round(load.target) * 10))
        else:
            return None
    return sum(counts)


def _finish(args: argparse.Namespace, result: app.Result, gates: list[Gate], judged_only: bool = False) -> int:
    tell(args, result)
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.run.manifest.partial and not judged_only:
        stderr(f"whywait: cut short: {result.run.manifest.partial_reason}")
        return EXIT_SERVICE
    failed = failed_gates(gates, result.summary)
    if failed:
        raise GateFailed("; ".join(failed))
    if not judged_only and (failed_most := _mostly_failed(result.summary)):
        stderr(f"whywait: {failed_most}")
        return EXIT_SERVICE
    if not judged_only:
        raise_invalid(result.summary["invalid"])
    if args.strict and not any(v.state == "holds" for v in result.verdicts):
        return EXIT_UNDECIDED
    return EXIT_OK


def tell(args: argparse.Namespace, result: app.Result) -> None:
    """The result on stdout: JSON, the block of serving benchmarks, the answer of a search, or verdicts and table."""
    if as_bench(args):
        bench.print_bench(app.as_benchmark(result), result.summary, str(result.directory))
    elif args.json:
        json.dump({**result.summary, "run": str(result.directory)}, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        told.print_told(result.summary, result.verdicts, str(result.directory))


def as_bench(args: argparse.Namespace) -> bool:
    """
    Raises:
        UsageError: two forms are asked for at once.
    """
    asked = getattr(args, "format", "text") == "bench"
    if asked and args.json:
        raise UsageError("--format bench and --json are two forms of one result", "choose one")
    return asked


def raise_invalid(invalid: list[str]) -> None:
    """
    Raises:
        Invalid: the client was late, or did not keep the rate.
    """
    if invalid:
        raise Invalid(f"the measurement is invalid: {'; '.join(invalid)}", INVALID_HINT)


def _mostly_failed(summary: dict[str, Any]) -> str:
    """What to say when more requests failed than succeeded, else ''."""
    ok, by_outcome = tally(summary["points"])
    if sum(by_outcome.values()) <= ok and (ok or not summary["points"]):
        return ""
    return failures(summary["points"]) or "no request succeeded"


def duration(value: str, flag: str) -> float:
    """Seconds, by ``units.parse_duration``; its complaint names the flag."""
    try:
        seconds = parse_duration(value) / NS_PER_S
    except ValueError as exc:
        raise UsageError(f"{flag}: {exc}") from None
    if seconds <= 0:
        raise UsageError(f"{flag} must be longer than nothing")
    return seconds


def slo(value: str | None) -> dict[str, float]:
    """``'ttft=500ms,tpot=50ms'`` → ``{"ttft_ms": 500.0, "tpot_ms": 50.0}``."""
    out: dict[str, float] = {}
    for part in (value or "").split(","):
        if not part.strip():
            continue
        name, _, limit = (x.strip() for x in part.partition("="))
        key = f"{name.removesuffix('_ms')}_ms"
        if key not in SLO_KEYS or not limit:
            known = ", ".join(k.removesuffix("_ms") for k in SLO_KEYS)
            raise UsageError(f"--slo: {part.strip()!r} is not METRIC=TIME", f"metrics: {known}; such as ttft=500ms")
        try:
            out[key] = parse_duration(limit, "ms") / NS_PER_MS
        except ValueError as exc:
            raise UsageError(f"--slo: {exc}") from None
    return out
