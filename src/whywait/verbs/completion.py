"""``whywait completion bash|zsh|fish``: a script for the shell, by shtab, from the very flags that the parser knows.

What is completed: verbs, their flags, the values of flags and arguments that have a closed list, and files or folders
where one is asked for. The script runs nothing: completing costs no start of Python.
"""

from __future__ import annotations

import argparse

import shtab

from whywait.errors import EXIT_OK
from whywait.lab.techniques import TECHNIQUES

FILES = {"FILE", "PATH", "PLAN", "LOG"}
FOLDERS = {"DIR", "RUN", "RUNS"}


def completion(args: argparse.Namespace) -> int:
    print(script(args.parser, args.shell))
    return EXIT_OK


def script(top: argparse.ArgumentParser, shell: str) -> str:
    """``shell``: bash, zsh or fish."""
    (subs,) = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    tried = next(a for a in subs.choices["try"]._actions if a.dest == "technique")
    tried.choices = sorted(TECHNIQUES)
    for sub in subs.choices.values():
        for action in sub._actions:
            name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if not action.choices and name in FILES | FOLDERS:
                action.complete = shtab.FILE if name in FILES else shtab.DIRECTORY
    text: str = shtab.complete(top, shell)
    return text
