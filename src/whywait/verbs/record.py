"""``whywait record``: a proxy between clients and a service that notes what passes, without its text."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from whywait.errors import UsageError
from whywait.net.endpoint import parse_url
from whywait.net.proxy import TOKEN_HEADER, Proxy
from whywait.net.reach import LEAST_TOKEN, Reach, address
from whywait.net.record import Book, Recorder
from whywait.session import stderr
from whywait.verbs.signals import stopped_by_signals


def record(args: argparse.Namespace) -> int:
    token = _token(args.token_env)
    host, port = address(args.listen, "--listen", token is not None)
    # Straight to the service: a proxy of the environment would be one more party that sees everything.
    endpoint = parse_url(args.upstream, reach=Reach(proxy="none"))
    folder = Path(args.out or time.strftime("whywait-recordings/%Y%m%d-%H%M%S"))
    try:
        proxy = Proxy(endpoint, (host, port), token)
    except (OSError, UnicodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise UsageError(
            f"cannot listen on {args.listen}: {why}", "another port, or an address of this machine"
        ) from exc
    try:
        if endpoint.loopback and endpoint.port == proxy.server.port:
            raise UsageError("the upstream is this proxy itself", "give the service's own port by --upstream")
        book = Book(folder, endpoint.url)
        recorder = Recorder(book, proxy.loop)
        proxy.watch = recorder.watch
        stderr(f"recording {proxy.server.url} → {endpoint.url} into {book.path}")
        if token is not None:
            stderr(f"clients must send the token as {TOKEN_HEADER}")
        with stopped_by_signals(proxy.loop.stop):
            proxy.run()
    finally:
        proxy.close()  # what is in flight ends, and is noted
    recorder.finish()
    book.close()
    _report(args, {**recorder.facts(), "unwatched": proxy.counts.unwatched, "recording": str(book.path)})
    return 0


def _report(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    if args.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
        return
    told = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(facts["outcomes"].items())) or "none"
    print(f"{facts['requests']:,} requests recorded ({told}), {facts['other_requests']:,} others passed on")
    if facts["without_usage"]:
        print(f"{facts['without_usage']:,} answers said no usage: ask for it by stream_options.include_usage")
    if facts["lines_lost"]:
        print(f"{facts['lines_lost']:,} lines could not be written (disk full?)")
    if facts["unwatched"]:
        print(f"{facts['unwatched']:,} requests passed but could not be read: a fault of ours, please report it")
    print(f"next: whywait workload fit {facts['recording']}")


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    token = os.environ.get(name, "")
    if len(token) < LEAST_TOKEN or not (token.isascii() and token.isprintable()):
        raise UsageError(f"{name} holds no token", f"set it to at least {LEAST_TOKEN} printable ASCII characters")
    return token
