"""The flags that say where the engine's own metrics are read, and by which table."""

from __future__ import annotations

import argparse
import dataclasses
import os

from whywait.core import secrets
from whywait.engines import use_file
from whywait.errors import UsageError
from whywait.net.endpoint import no_folder, read_key
from whywait.net.reach import Reach, page_url
from whywait.probe.promql import Prometheus, parse_match


def engine_file(args: argparse.Namespace) -> None:
    """``--engine-file``: from here on the user's table is one of ours. Before anything is said or started.

    Raises:
        UsageError: it is not a table, or the URL is a path.
    """
    if getattr(args, "url", None):
        no_folder(args.url)
    if args.engine_file:
        use_file(args.engine_file)


def prometheus(args: argparse.Namespace, reach: Reach) -> Prometheus | None:
    """``--prometheus`` and what belongs to it; None when it is not given. ``reach``: its TLS and proxy hold here too.

    Raises:
        UsageError: not a URL, not a selector, or no token where one is said to be.
    """
    if not args.prometheus:
        given = args.prometheus_match or args.prometheus_token_env or args.prometheus_token_file
        if given:
            raise UsageError("--prometheus-match and its token need --prometheus", "--prometheus http://host:9090")
        return None
    page_url(args.prometheus, "--prometheus", "such as http://host:9090")
    own = dataclasses.replace(reach, headers=())  # those are the service's
    return Prometheus(args.prometheus, parse_match(args.prometheus_match), _token(args), own)


def _token(args: argparse.Namespace) -> str | None:
    if args.prometheus_token_env and args.prometheus_token_file:
        raise UsageError("--prometheus-token-env and --prometheus-token-file exclude each other")
    found = None
    if args.prometheus_token_file:
        found = read_key(args.prometheus_token_file)
    elif args.prometheus_token_env:
        found = os.environ.get(args.prometheus_token_env)
        if not found:
            raise UsageError(f"{args.prometheus_token_env} holds no token", "set it, or leave the flag out")
    if found and not (found.isascii() and found.isprintable()):
        raise UsageError("the Prometheus token holds characters that cannot be sent")
    secrets.hide(found)
    return found
