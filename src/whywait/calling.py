"""How a call of the Python API becomes what the command line would make of it: keywords as flags, by their names."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from whywait import app, cli, keywords
from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.options import QUIET


def arguments(verb: str, positional: Sequence[Any], flags: Mapping[str, Any], **own: Any) -> argparse.Namespace:
    """What the command line would make of these; ``own`` are flags that a function has as parameters.

    Raises:
        UsageError: a keyword that is no flag of the verb, or a value that the flag does not take.
    """
    parser = _parser(verb)
    known, typed = {keyword_of(a): a for a in parser._actions if a.option_strings}, keywords.OF[verb].__optional_keys__
    if wrong := sorted(flags.keys() - typed):
        raise UsageError(f"{verb} has no keyword {wrong[0]!r}", f"there are: {', '.join(sorted(typed))}")
    words, objects = [], {}
    for name, value in {**own, **flags}.items():
        if isinstance(value, Workload):
            objects[name] = value
        elif value is not None:
            words += _words(known[name], value)
    given = [path_of(p) for p in positional if p is not None]
    words += ["--", *given] if given else []
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(words)
    except SystemExit:
        text = said.getvalue().strip().splitlines()
        raise UsageError(text[-1].partition(": error: ")[2] or text[-1] if text else f"{verb}: {words}") from None
    for name, value in objects.items():
        setattr(args, name, value)
    return args


def path_of(given: Any) -> str:
    """
    Raises:
        UsageError: it is no path and no URL.
    """
    try:
        path: str = fspath(given.directory if isinstance(given, app.Result) else given)
    except TypeError:
        raise UsageError(f"{given!r:.60} is no path and no URL", "give text, a path, or a result") from None
    return path


@functools.cache
def _parser(verb: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=verb, allow_abbrev=False)
    cli.flags_of(verb)(made)
    return made


def keyword_of(action: argparse.Action) -> str:
    """``--prompt-tokens`` → ``prompt_tokens``; ``--no-stream``, which turns something off, by what it turns off."""
    if isinstance(action, argparse._StoreFalseAction):
        return action.dest
    return action.option_strings[-1].lstrip("-").replace("-", "_")


def _words(action: argparse.Action, value: Any) -> list[str]:
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return [flag] if bool(value) == bool(action.const) else []
    if action.nargs == "?" and isinstance(value, bool):
        return [flag] if value else []
    if isinstance(action, argparse._AppendAction):
        many = [value] if isinstance(value, (str, PathLike)) else list(value)
        return [word for v in many for word in (f"{flag}={fspath(v)}",)]
    return [f"{flag}={_text(action, value)}"]


def _text(action: argparse.Action, value: Any) -> str:
    if isinstance(value, Mapping):
        if action.dest == "body":
            import json

            return json.dumps(value)
        unit = "ms" if action.dest == "slo" else ""
        return ",".join(f"{k.removesuffix('_ms') if unit else k}={_number(v, unit)}" for k, v in value.items())
    if isinstance(value, (str, PathLike)):
        return fspath(value)
    if isinstance(value, (list, tuple, range)):
        return ",".join(map(_number, value))
    return _number(value, "s" if action.metavar == "TIME" else "")


def _number(value: Any, unit: str = "") -> str:
    return f"{value}{unit}" if isinstance(value, (int, float)) else str(value)


@contextlib.contextmanager
def talk(verbose: bool) -> Iterator[None]:
    """What a journey says on stderr is for the terminal. A full disk is the caller's error, as there."""
    before = QUIET.set(not verbose)
    try:
        yield
    except OSError as exc:
        if (wrong := cli.of_the_machine(exc)) is None:
            raise
        raise wrong from None
    finally:
        QUIET.reset(before)
