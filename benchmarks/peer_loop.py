"""A plain aiohttp loop, as ``peers.py`` runs it in a virtual environment with aiohttp and nothing else:
``peer_loop.py URL STREAMS TOKENS GAP_MS OUT``. It stamps each event when it has been read, and starts the streams
evenly over one gap. It leaves a list of streams, each ``[sent, first chunk, second chunk, …]`` in seconds, Unix time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp


async def read(session: Any, url: str, tokens: int, delay: float, zero: float) -> list[float]:
    await asyncio.sleep(delay)
    body = {"model": "stub", "messages": [{"role": "user", "content": "calibration"}], "stream": True,
            "max_tokens": tokens}  # fmt: skip
    t = [zero + time.monotonic()]
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        rest = b""
        async for piece in response.content.iter_any():
            now = zero + time.monotonic()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: ") and event != b"data: [DONE]":
                    choices = json.loads(event[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        t.append(now)
    return t


async def drive(url: str, streams: int, tokens: int, gap_s: float) -> list[list[float]]:
    zero = time.time() - time.monotonic()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        jobs = (read(session, url, tokens, gap_s * i / streams, zero) for i in range(streams))
        return await asyncio.gather(*jobs)


if __name__ == "__main__":
    url, streams, tokens, gap_ms, out = sys.argv[1:]
    seen = asyncio.run(drive(url, int(streams), int(tokens), float(gap_ms) / 1e3))
    with open(out, "w") as f:
        json.dump(seen, f)
