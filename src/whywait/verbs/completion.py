"""``whywait completion bash|zsh|fish``: a script for the shell, written from the very flags that the parser knows.

What is completed: verbs, their flags, the values of flags and arguments that have a closed list, and files or folders
where one is asked for. The script runs nothing: completing costs no start of Python.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from whywait.errors import EXIT_OK

FILES = {"FILE", "PATH", "PLAN", "LOG"}
FOLDERS = {"DIR", "RUN", "RUNS"}


@dataclass(frozen=True)
class Flag:
    """An option or an argument of a verb. ``takes``: whether a word follows it; ``many``: whether it may come again."""

    names: tuple[str, ...]  # of an option; () of an argument
    help: str
    takes: bool
    choices: tuple[str, ...]
    kind: str  # file, folder or ''
    many: bool


def completion(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell](verbs_of(args.parser)), end="")
    return EXIT_OK


def verbs_of(top: argparse.ArgumentParser) -> dict[str, tuple[str, list[Flag]]]:
    """Of each verb what it says in ``--help``, and its flags."""
    (subs,) = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    helps = {a.dest: a.help or "" for a in subs._choices_actions}
    return {name: (_plain(helps.get(name, "")), [_flag(a) for a in p._actions]) for name, p in subs.choices.items()}


def _flag(a: argparse.Action) -> Flag:
    metavar = a.metavar if isinstance(a.metavar, str) else a.dest.upper()
    kind = "file" if metavar in FILES else "folder" if metavar in FOLDERS else ""
    choices = tuple(str(c) for c in a.choices or ())
    many = isinstance(a, argparse._AppendAction) or a.nargs in ("*", "+")
    return Flag(tuple(a.option_strings), _plain(a.help or ""), a.nargs != 0, choices, kind, many)


def _plain(text: str) -> str:
    """A help text without what means something to a shell, or to ``argparse`` (``%%``)."""
    text = text.replace("%%", "%").replace("'", "’").replace(":", ",")
    return " ".join(re.sub(r"[^\w %.,;=<>()/+’-]", " ", text).split())[:90]


def _bash(verbs: dict[str, tuple[str, list[Flag]]]) -> str:
    cases, values = [], []
    for verb, (_, flags) in verbs.items():
        words = [n for f in flags for n in f.names]
        arguments = [f for f in flags if not f.names]
        cases.append(f"    {verb}) flags='{' '.join(words)}'; words='{' '.join(_words(arguments))}'; "
                     f"files='{_files(arguments)}' ;;")  # fmt: skip
        for f in flags:
            if f.names and f.takes:
                pattern = "|".join(f"{verb}:{n}" for n in f.names)
                what = f"_whywait_words '{' '.join(f.choices)}'" if f.choices else _BASH_FILES[f.kind]
                values.append(f"    {pattern}) {what}; return ;;")
    return _BASH.format(verbs=" ".join(verbs), cases="\n".join(cases), values="\n".join(values))


def _words(arguments: list[Flag]) -> Iterator[str]:
    for f in arguments:
        yield from f.choices


def _files(arguments: list[Flag]) -> str:
    return next((f.kind for f in arguments if f.kind), "")


_BASH_FILES = {"file": "_whywait_files", "folder": "_whywait_folders", "": "COMPREPLY=()"}
_BASH = """# bash completion of whywait. Use it now:    source <(whywait completion bash)
# and always:    whywait completion bash > ~/.local/share/bash-completion/completions/whywait
_whywait_words() {{
  local IFS=$' \\t\\n'
  COMPREPLY=($(compgen -W "$1" -- "$cur"))
}}
_whywait_files() {{
  compopt -o filenames 2>/dev/null
  local IFS=$'\\n'
  COMPREPLY=($(compgen -f -- "$cur"))
}}
_whywait_folders() {{
  compopt -o filenames 2>/dev/null
  local IFS=$'\\n'
  COMPREPLY=($(compgen -d -- "$cur"))
}}
_whywait() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="" verb="" flags="" words="" files="" i
  if ((COMP_CWORD > 0)); then prev="${{COMP_WORDS[COMP_CWORD - 1]}}"; fi
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${{COMP_WORDS[i]}}" in
      -*) ;;
      *) verb="${{COMP_WORDS[i]}}"; break ;;
    esac
  done
  if [[ -z "$verb" ]]; then
    _whywait_words '{verbs} --help --version'
    return
  fi
  case "$verb:$prev" in
{values}
  esac
  case "$verb" in
{cases}
    *) return ;;
  esac
  if [[ "$cur" == -* ]]; then
    _whywait_words "$flags"
  elif [[ -n "$words" ]]; then
    _whywait_words "$words"
  elif [[ "$files" == folder ]]; then
    _whywait_folders
  elif [[ "$files" == file ]]; then
    _whywait_files
  fi
}}
complete -F _whywait whywait
"""


def _zsh(verbs: dict[str, tuple[str, list[Flag]]]) -> str:
    cases = []
    for verb, (_, flags) in verbs.items():
        lines = " \\\n        ".join([*_zsh_flags(flags)])
        cases.append(f"    {verb})\n      _arguments -S \\\n        {lines}\n      ;;")
    named = "\n".join(f"    '{verb}:{text}'" for verb, (text, _) in verbs.items())
    return _ZSH.format(verbs=named, cases="\n".join(cases))


def _zsh_flags(flags: list[Flag]) -> Iterator[str]:
    place = 0
    for f in flags:
        value = f"({' '.join(f.choices)})" if f.choices else _ZSH_FILES[f.kind]
        if f.names:
            tail = f":value:{value}" if f.takes else ""
            text = f.help.replace("[", "(").replace("]", ")")
            for name in f.names:
                again = "*" if f.many else f"({' '.join(f.names)})"
                yield f"'{again}{name}[{text}]{tail}'"
        else:
            place += 1
            yield f"'*:argument:{value}'" if f.many else f"'{place}::argument:{value}'"


_ZSH_FILES = {"file": "_files", "folder": "_files -/", "": " "}
_ZSH = """#compdef whywait
# zsh completion of whywait. Use it now:    source <(whywait completion zsh)
# and always:    whywait completion zsh > a folder of your $fpath, as _whywait
_whywait() {{
  local -a verbs
  verbs=(
{verbs}
  )
  if ((CURRENT == 2)); then
    _describe 'verb' verbs
    return
  fi
  local verb="$words[2]"
  shift words
  ((CURRENT--))
  case "$verb" in
{cases}
  esac
}}
if [[ "$funcstack[1]" == _whywait ]]; then
  _whywait "$@"
else
  compdef _whywait whywait
fi
"""


def _fish(verbs: dict[str, tuple[str, list[Flag]]]) -> str:
    lines = [
        "# fish completion of whywait. Use it now:    whywait completion fish | source",
        "# and always:    whywait completion fish > ~/.config/fish/completions/whywait.fish",
        "complete -c whywait -f",
        "complete -c whywait -n __fish_use_subcommand -l version -d 'show the version'",
    ]
    for verb, (text, flags) in verbs.items():
        lines.append(f"complete -c whywait -n __fish_use_subcommand -a {verb} -d '{text}'")
        seen = f"-n '__fish_seen_subcommand_from {verb}'"
        for f in flags:
            value = f" -a '{' '.join(f.choices)}'" if f.choices else _FISH_FILES[f.kind]
            if f.names:
                needs = f" -r{value}" if f.kind and not f.choices else f" -x{value}"
                names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in f.names)
                lines.append(f"complete -c whywait {seen} {names}{needs if f.takes else ''} -d '{f.help}'")
            elif value:
                lines.append(f"complete -c whywait {seen}{value}")
    return "\n".join(lines) + "\n"


_FISH_FILES = {"file": " -F", "folder": " -xa '(__fish_complete_directories)'", "": ""}

SCRIPTS: dict[str, Callable[[dict[str, tuple[str, list[Flag]]]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
