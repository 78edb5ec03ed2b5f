"""Standard suites by lm-eval (EleutherAI's evaluation harness; the extra ``lm-eval``, or ``lm_eval`` on the PATH).

It is run as a program of its own, once per arm, against the arm's URL, and its log of samples is read back: a score per
document, so that both arms are compared in pairs like any other task. What it cannot be told (proxies, Unix sockets,
headers) is said before it is started. Data sets come from where lm-eval gets them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from whywait.core.secrets import clean
from whywait.core.tasks import Answered
from whywait.errors import MissingExtra, ServiceError, UsageError
from whywait.load.asking import split_thinking
from whywait.load.preflight import Target

#: A sample's score: the first of these that its task has. All are shares, more is better.
SCORES: Final = ("exact_match", "acc_norm", "acc", "pass@1", "pass_at_1", "f1", "prompt_level_strict_acc", "em", "mcc")
FILTERS: Final = ("flexible-extract", "strict-match", "none")  # of a task that reads its answers in several ways
NAME: Final = re.compile(r"[A-Za-z0-9_.,+-]+")
TAIL: Final = 15  # lines of its log in a message


@dataclass(frozen=True)
class Suites:
    """What to run. ``limit``: documents per task, 0 all; ``include``: a folder of task files of the user's own;
    ``shots``: examples in front, None: as the task has it."""

    names: tuple[str, ...]
    limit: int = 0
    include: str = ""
    shots: int | None = None
    at_once: int = 4
    timeout_s: float = 300.0  # of one request
    most_s: float = 24 * 3600.0  # of the whole


@dataclass(frozen=True)
class Sample:
    """One document of a task as an arm did it. ``score``: 0 … 1, None where lm-eval says none. ``key`` is the same for
    both arms when they were asked the same document."""

    task: str
    key: str
    score: float | None
    metric: str
    answered: Answered


def suites_of(text: str, **more: Any) -> Suites:
    """``gsm8k,mmlu`` → Suites.

    Raises:
        UsageError: a name is none that a task can have.
        MissingExtra: lm-eval is not there.
    """
    names = tuple(n.strip() for n in text.split(",") if n.strip())
    if not names or not all(NAME.fullmatch(n) for n in names):
        raise UsageError(f"--suite: {text!r} names no task of lm-eval", "such as gsm8k; lm_eval ls tasks lists them")
    include = str(more.get("include") or "")
    if include and not Path(include).is_dir():
        raise UsageError(f"there is no folder {include}", "the folder that holds the task files (YAML)")
    program()
    return Suites(names, **more)


def program() -> list[str]:
    """How lm-eval is started.

    Raises:
        MissingExtra: it is neither installed beside whywait nor on the PATH.
    """
    if importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-m", "lm_eval"]
    found = shutil.which("lm_eval")
    if found is None:
        raise MissingExtra("--suite", "lm-eval")
    return [found]


def run(target: Target, suites: Suites, directory: Path) -> list[Sample]:
    """The suites against one arm; what lm-eval writes is kept in ``directory``.

    Raises:
        UsageError: the arm cannot be reached by lm-eval as it is.
        MissingExtra: lm-eval is not there.
        ServiceError: it ended without results; the last lines of its log are in the message.
    """
    directory.mkdir(parents=True, exist_ok=True)
    out, log = directory / "out", directory / "lm_eval.log"
    shutil.rmtree(out, ignore_errors=True)
    argv = [*program(), *arguments(target, suites, out)]
    with log.open("wb") as sink:
        # A process group of its own, so that all of it ends with us; the key is in its environment, never in its words.
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
                                 env=environment(target))  # fmt: skip
        try:
            code = child.wait(suites.most_s)
        except subprocess.TimeoutExpired:
            raise ServiceError(
                f"lm-eval did not end within {suites.most_s:g} s", "fewer documents: --cases N"
            ) from None
        finally:
            _end(child)
    found = list(read(out))
    if code or not found:
        said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
        what = f"lm-eval ended with {code}" if code else "lm-eval wrote no samples"
        raise ServiceError(f"{what}:\n{clean(said)}", f"its whole log is {log}")
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        for sign, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait_s)
                return


def arguments(target: Target, suites: Suites, out: Path) -> list[str]:
    """lm-eval's flags for this arm.

    Raises:
        UsageError: the arm is one that lm-eval cannot reach.
    """
    endpoint = target.endpoint
    reasons = {"a Unix socket": endpoint.unix, "a proxy": endpoint.proxy, "own headers": endpoint.reach.headers,
               "the responses dialect": endpoint.dialect == "responses"}  # fmt: skip
    what = next((name for name, there in reasons.items() if there), "")
    if what:
        raise UsageError(f"lm-eval cannot be told of {what}", "leave --suite out, or give a plain http(s):// URL")
    chat = endpoint.dialect == "chat"
    model = {
        "model": target.model, "base_url": endpoint.page(endpoint.path), "num_concurrent": suites.at_once,
        "max_retries": 3, "timeout": round(suites.timeout_s), "tokenized_requests": False,
    }  # fmt: skip
    if chat:
        model["tokenizer_backend"] = None  # texts go out as they are; nothing is counted on this side
    elif target.tokenizer:
        model["tokenizer"] = target.tokenizer
    if endpoint.reach.insecure:
        model["verify_certificate"] = False
    if any("," in str(v) for v in model.values()):
        raise UsageError("lm-eval takes no comma in a model's name or URL", "serve it under another name")
    argv = ["--model", "local-chat-completions" if chat else "local-completions",
            "--model_args", ",".join(f"{k}={v}" for k, v in model.items()),
            "--tasks", ",".join(suites.names), "--log_samples", "--output_path", str(out)]  # fmt: skip
    argv += ["--apply_chat_template"] if chat else []
    argv += ["--limit", str(suites.limit)] if suites.limit else []
    argv += ["--include_path", suites.include] if suites.include else []
    return argv + (["--num_fewshot", str(suites.shots)] if suites.shots is not None else [])


def environment(target: Target) -> dict[str, str]:
    """Ours, and the arm's key. lm-eval wants one even where the service asks for none."""
    ca = target.endpoint.reach.ca
    more = {"REQUESTS_CA_BUNDLE": str(ca), "SSL_CERT_FILE": str(ca)} if ca else {}
    return {
        **os.environ,
        **more,
        "OPENAI_API_KEY": target.endpoint.api_key or "none",
        "TOKENIZERS_PARALLELISM": "false",
    }


def read(out: Path) -> Iterator[Sample]:
    """Samples from lm-eval's output folder: of each task one metric and one way to read its answers.

    Raises:
        ServiceError: a line of a log is not what lm-eval writes.
    """
    for path in sorted(out.rglob("samples_*.jsonl")):
        task = re.sub(r"_\d{4}-\d\d-\d\dT[\d.-]+$", "", path.stem.removeprefix("samples_"))
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
            yield from _samples(task, rows)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as exc:
            raise ServiceError(f"{path} is no log of samples of lm-eval: {exc!r}", "which version wrote it?") from None


def _samples(task: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
    kinds = [str(r.get("filter", "none")) for r in rows]
    chosen = next((f for f in FILTERS if f in kinds), kinds[0] if kinds else "")
    for row, kind in zip(rows, kinds, strict=True):
        if kind != chosen:
            continue
        metric = next((m for m in SCORES if m in row.get("metrics", ())), "")
        value = row.get(metric)
        score = float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else None
        key = f"{row.get('doc_hash') or ''}/{row['doc_id']}"
        text = _text(row.get("resps"))
        thinking, answer, unclosed = split_thinking(text or "")
        yield Sample(task, key, score, metric,
                     Answered(f"{task}-{row['doc_id']}", answer, thinking, "ok", unclosed=unclosed,
                              generated=isinstance(text, str)))  # fmt: skip


def _text(resps: Any) -> str | None:
    """The first generated text; None of a task that only compares likelihoods."""
    for _ in range(2):  # a list by request of lists by repeat
        if isinstance(resps, list) and len(resps) > 0:
            resps = resps[0]
    return resps if isinstance(resps, str) else None
