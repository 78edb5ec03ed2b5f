"""The flags of the verbs about the terminal and about what can be measured, each verb's in a function of its name;
no logic."""

from __future__ import annotations

import argparse

from whywait.flags import endpoint, positive

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
