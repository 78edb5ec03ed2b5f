"""``whywait agent``: serve this machine's readings to a whywait on another machine, until stopped."""

from __future__ import annotations

import argparse
import json
import signal
from types import FrameType

from whywait.errors import EXIT_OK
from whywait.net.reach import address
from whywait.probe.agent import Agent, serve
from whywait.probe.options import listen_on, read_token
from whywait.probe.web import url_of
from whywait.session import stderr


def agent(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    token = read_token(args.token_file) if args.token_file else None
    listening = listen_on(*address(args.listen, "--listen", token is not None))
    looks = Agent(args.pid, args.engine_port)
    server = serve(looks, listening, token)
    where = url_of(listening)
    if args.json:
        print(json.dumps({"url": where}), flush=True)
    stderr(f"this machine's readings are at {where}; give --agent {where} to run, sweep, diagnose or watch")

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        server.serve_forever(poll_interval=0.5)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        looks.close()
    return EXIT_OK
