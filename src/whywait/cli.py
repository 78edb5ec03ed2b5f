"""Verbs, flags and exit codes; no logic. A verb's module is imported only when it is called, so ``--help`` is quick."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from whywait import __version__, flags, flags_lab, flags_out, flags_sim
from whywait.encodings import STAND_INS
from whywait.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, UsageError, WhywaitError, said_by, scrub

VERBS: dict[str, tuple[str, str]] = {
    "diagnose": ("whywait.verbs.measure:diagnose", "find out what a service waits on (no URL: the embedded engine)"),
    "run": ("whywait.verbs.measure:run", "measure one load point"),
    "sweep": ("whywait.verbs.measure:sweep", "measure several load points; one table"),
    "resume": ("whywait.verbs.resume:resume", "finish a run or sweep that was cut off, into a new run"),
    "watch": ("whywait.verbs.watch:watch", "what a service in production waits on; sends no load"),
    "show": ("whywait.verbs.measure:show", "read a saved run again"),
    "import": ("whywait.verbs.importing:import_", "results of other load tools (vLLM, SGLang, AIPerf, …) as a run"),
    "bill": ("whywait.verbs.bill:bill", "what a good request of a saved run costs, in joules and money"),
    "compare": ("whywait.verbs.compare:compare", "what changed between runs: figures, waits, gates; also baselines"),
    "history": ("whywait.verbs.history:history", "the runs of a folder: list, headline figures, one plotted over time"),
    "export": (
        "whywait.verbs.export:export",
        "a saved run for Perfetto, OTLP, Prometheus, Grafana, llm-d, vllm bench, CSV, Parquet",
    ),
    "find": ("whywait.verbs.find:find", "the highest request rate that keeps an SLO, as an interval"),
    "ab": ("whywait.verbs.ab:ab", "two arms of an engine in alternating rounds, paired, until it is decided"),
    "try": ("whywait.verbs.ab:try_technique", "a technique for real, against not having it: gain and price"),
    "quality": ("whywait.verbs.quality:quality", "do two arms still answer alike: distributions, tasks, degeneration"),
    "probe": ("whywait.verbs.probe:probe", "what one stream costs, by single streams alone (no URL: as diagnose)"),
    "simulate": ("whywait.verbs.simulate:simulate", "what a GPU, a model and a layout would do under a load; modelled"),
    "what-if": ("whywait.verbs.whatif:what_if", "what a change would do to the service of a saved run; modelled"),
    "plan": (
        "whywait.verbs.plan:plan",
        "which hardware, how much of it, and why: five questions, each with its evidence",
    ),
    "serve-sim": ("whywait.verbs.serve_sim:serve_sim", "the OpenAI API answered by the simulator, at true pace"),
    "catalog": ("whywait.verbs.catalog:catalog", "machines, models, techniques, engines, and what each wait is"),
    "workload": ("whywait.verbs.workload:workload", "learn a workload from logs (fit), or look at one (show)"),
    "record": ("whywait.verbs.record:record", "a proxy that notes lengths, times and shared prefixes, never text"),
    "exam": ("whywait.verbs.exam:exam", "known bottlenecks on real engines: record them, score the verdicts"),
    "agent": ("whywait.verbs.agent:agent", "serve this machine's readings to a whywait on another machine"),
    "engine": ("whywait.verbs.engine:engine", "start, stop and list the embedded engine"),
    "doctor": ("whywait.verbs.doctor:doctor", "what this machine and a service can and cannot measure, and what helps"),
    "completion": ("whywait.verbs.completion:completion", "a script that completes verbs and flags in your shell"),
}
#: The end of each verb's help: the shortest command that does something, and the page that tells the rest.
EXAMPLES: dict[str, tuple[str, str]] = {
    "diagnose": ("http://127.0.0.1:8000 --slo ttft=500ms,tpot=50ms", "verdicts.md"),
    "run": ("http://127.0.0.1:8000 --concurrency 8 --requests 64", "metrics.md"),
    "sweep": ("http://127.0.0.1:8000 --concurrency 1,4,16 --duration 30s", "metrics.md"),
    "resume": ("whywait-runs/20261130-101500", "nothing-lost.md"),
    "watch": ("http://127.0.0.1:8000 --window 60s", "watch.md"),
    "show": ("whywait-runs/20261130-101500 --html report.html", "accounts.md"),
    "import": ("profile_export.jsonl --out imported --engine vllm --machine h100", "import.md"),
    "bill": ("whywait-runs/20261130-101500 --price-per-hour 2.5 --currency EUR", "bill.md"),
    "compare": ("whywait-runs/monday whywait-runs/tuesday --fail-if 'goodput<-5%'", "compare.md"),
    "history": ("whywait-runs --figure ttft_ms.p95", "compare.md"),
    "export": ("whywait-runs/20261130-101500 --to perfetto", "export.md"),
    "find": ("http://127.0.0.1:8000 --slo ttft=500ms@p95,tpot=50ms@p95", "find.md"),
    "ab": ("--a embedded:slots=2 --b embedded:slots=8 --concurrency 8 --promise queue", "ab.md"),
    "try": ("continuous-batching", "ab.md"),
    "quality": ("embedded embedded:cache_type_k=q4_0 --only agreement", "quality.md"),
    "probe": ("http://127.0.0.1:8000 --budget 2m", "probe.md"),
    "simulate": ("--machine h200 --model llama-3.1-70b --layout tp=2 --concurrency 1,8,32", "simulate.md"),
    "what-if": ("whywait-runs/20261130-101500 --machine h200 --apply fp8-kv", "what-if.md"),
    "plan": ("--model llama-3.1-70b --machines h100,h200,mi300x --rate 8 --slo ttft=1s,tpot=40ms", "plan.md"),
    "serve-sim": ("--machine h200 --model llama-3.1-70b --layout tp=4", "serve-sim.md"),
    "catalog": ("techniques", "simulate.md"),
    "workload": ("fit requests.jsonl --out workload.toml", "workloads.md"),
    "record": ("--listen 127.0.0.1:9000 --upstream http://127.0.0.1:8000", "recording.md"),
    "exam": ("score", "exam.md"),
    "agent": ("--listen 0.0.0.0:9465 --token-file token --engine-port 8000", "probes.md"),
    "engine": ("start --slots 8", "engines.md"),
    "doctor": ("http://127.0.0.1:8000", "doctor.md"),
    "completion": ("bash", "terminal.md"),
}


SPACES = "\n\t\u00a0\u2009\u202f"  # that are not printable by Python's word
UNKNOWN = "unrecognized arguments: "


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # '-3s' is a value that is wrong, not a flag that is missing: who reads the value says why.
        self._negative_number_matcher = re.compile(r"^-\.?\d\S*$")

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"{self.prog}: {message}\n  → {_meant(message, self)}{self.prog} --help shows the flags", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def _meant(message: str, at: argparse.ArgumentParser) -> str:
    """Of a choice or a flag of ``at`` that is none, what was probably meant."""
    if message.startswith(UNKNOWN):
        wrongs = [w.partition("=")[0] for w in message.removeprefix(UNKNOWN).split() if w.startswith("--")]
        likely = [c[0] for w in wrongs if (c := difflib.get_close_matches(w, _known(at), n=1))]
        return f"did you mean {', '.join(likely)}? " if likely else ""
    wrong, _, known = message.partition("(choose from ")
    word = re.search(r"invalid choice: '(.*?)'", wrong)
    close = difflib.get_close_matches(word[1], re.findall(r"[\w.-]+", known), n=1) if word else []
    return f"did you mean {close[0]}? " if close else ""


def _known(at: argparse.ArgumentParser) -> list[str]:
    """The flags of ``at`` and of the verbs below it."""
    below = [sub for a in at._actions if isinstance(a, argparse._SubParsersAction) for sub in a.choices.values()]
    return [*at._option_string_actions, *(flag for sub in below for flag in _known(sub))]


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """As ``parse_args``; what is no flag is told by the verb's parser, whose help lists its flags."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest:
        verbs = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
        verbs.choices[args.verb].error(f"{UNKNOWN}{' '.join(rest)}")
    return args


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
        flags_of(name)(sub)
        if name == "completion":
            sub.set_defaults(parser=top)
    return top


def flags_of(verb: str) -> Callable[[argparse.ArgumentParser], None]:
    """What adds the flags of a verb: the function of its name in one of the modules of flags."""
    name = {"try": "try_", "import": "import_"}.get(verb, verb.replace("-", "_"))
    found: Callable[[argparse.ArgumentParser], None] = next(
        getattr(module, name) for module in (flags_out, flags_sim, flags_lab, flags) if hasattr(module, name)
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. No traceback reaches a user unless WHYWAIT_DEBUG is set."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=STAND_INS)  # a terminal that knows only ASCII gets something like it
    args = _parsed(argv)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - closed by the caller of this process
    module, function = VERBS[args.verb][0].split(":")
    try:
        code: int = getattr(importlib.import_module(module), function)(args)
    except WhywaitError as exc:
        _say(f"whywait: {exc.message}" + (f"\n  → {exc.hint}" if exc.hint else ""))
        return exc.exit_code
    except KeyboardInterrupt:
        print(f"whywait: interrupted{_kept()}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as exc:
        if (wrong := of_the_machine(exc)) is None:
            return _ours(exc)
        print(f"whywait: {wrong.message}\n  → {wrong.hint}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as exc:
        return _ours(exc)
    return code


def _kept() -> str:
    """Where what had been measured by then lies."""
    options = sys.modules.get("whywait.options")  # not loaded: nothing was measured
    made = options.LAST_DIRECTORY.get() if options else None
    if made is None or not any(made.rglob("manifest*")):
        return ""
    return f"; what was measured is kept in {made}\n  → whywait show {made}"


def of_the_machine(exc: OSError) -> UsageError | None:
    """What the machine does not allow or have room for, as an error of the user's; None: it is a fault of ours."""
    if exc.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EMFILE):
        return None
    where = f" ({exc.filename})" if exc.filename else ""
    hint = "allow more open files: ulimit -n" if exc.errno == errno.EMFILE else "make room, or write elsewhere"
    return UsageError(f"{exc.strerror}{where}", hint)


def _ours(exc: Exception) -> int:
    scrub(exc)
    if os.environ.get("WHYWAIT_DEBUG"):
        raise exc
    where = exc.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    at = f" at {os.path.basename(where.tb_frame.f_code.co_filename)}:{where.tb_lineno}" if where else ""
    what = f"{type(exc).__name__}: {said_by(exc)}{at}"
    _say(f"whywait: a fault of our own: {what}\n  → please report it; WHYWAIT_DEBUG=1 shows the traceback")
    return EXIT_INTERNAL


def _say(text: str) -> None:
    """It may hold what a service said: nothing in it moves the cursor or colours (as ``units.plain``)."""
    print("".join(c for c in text if c.isprintable() or c in SPACES), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
