"""What the flags ask to read beside the load, for the verbs that measure or watch."""

from __future__ import annotations

import argparse

from whywait.probe.options import Probes


def probes_of(args: argparse.Namespace) -> Probes:
    """Of ``cli._probes``."""
    return Probes(
        otlp_listen=args.otlp_listen,
        otlp_grpc=args.otlp_grpc_listen,
        otlp_token_file=args.otlp_token_file,
        gpu_urls=tuple(args.gpu_metrics_url),
        agents=tuple(args.agent),
        agent_token_file=args.agent_token_file,
    )
