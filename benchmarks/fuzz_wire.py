"""Fuzzes what reads a service's bytes: no crash but WireError, no hang, the same reading at any split, right counts.

    python benchmarks/fuzz_wire.py --inputs 1000000 --seed 1          plain: seeded mutations of real streams
    python benchmarks/fuzz_wire.py --atheris -max_total_time=600      coverage-guided (pip install atheris)
    python benchmarks/fuzz_wire.py --replay FILE                      one input that failed

An input is one byte string. Its first byte chooses between bytes from outside (mutated at will; read whole and in
pieces, which must agree) and a valid stream composed from the rest (whose kinds and token counts are known). Exit code
1 and the input in ``fuzz-failed-*.bin`` when something is wrong.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
if SRC.is_dir():
    sys.path.insert(0, str(SRC))

from whywait.net.dialect import ANSWER, REASONING, ROLE, TOOL  # noqa: E402
from whywait.net.outcome import facts_of  # noqa: E402
from whywait.net.wire import OURS, Response, WireError  # noqa: E402

DIALECTS = ("chat", "completions", "responses")
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PREFIXES = (
    b"",
    SSE + b"\r\n",
    SSE + b"Transfer-Encoding: chunked\r\n\r\n",
    SSE + b"Content-Encoding: gzip\r\n\r\n",
    SSE + b"Content-Encoding: deflate\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n",
    b"HTTP/1.1 500 Oops\r\nContent-Type: application/json\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SSE + b"\r\n",
)
HANG_S = 5


class Wrong(AssertionError):
    """The reader read it wrong."""


def read(data: bytes, cuts: list[int], dialect: str, stream: bool) -> tuple[Any, ...]:
    """Events and facts of ``data`` fed in pieces; ends with what the close of the connection adds."""
    r = Response(stream, None, dialect)
    edges = [0, *cuts, len(data)]
    failed = False
    try:
        for i in range(len(edges) - 1):
            if edges[i] != edges[i + 1]:
                r.feed(data[edges[i] : edges[i + 1]])
        r.eof()
    except WireError as exc:
        if OURS in str(exc):
            raise Wrong(str(exc)) from exc
        failed = True
    content = [e for e in r.events if e[0] != ROLE]
    for _, tokens in content:
        if tokens is not None and not 0 <= tokens < 1 << 40:
            raise Wrong(f"{tokens} tokens")
    facts = facts_of(r, len(content))
    return failed, list(r.events), facts, r.complete, r.answer.saw_done


def positions(seed: bytes, size: int) -> list[int]:
    return sorted((seed[i] << 8 | seed[i + 1]) % (size + 1) for i in range(0, len(seed) - 1, 2))


def check(data: bytes) -> None:
    """The whole test of one input.

    Raises:
        Wrong, or whatever the reader should not have raised.
    """
    if len(data) < 3:
        return
    mode, n = data[0], data[1] % 8
    seed, rest = data[2 : 2 + 2 * n], data[2 + 2 * n :]
    if mode & 0x80:
        composed(mode, rest, seed)
        return
    dialect, stream = DIALECTS[(mode >> 3) % 3], not mode & 0x20
    raw = PREFIXES[mode & 7] + rest
    whole = read(raw, [], dialect, stream)
    if seed:
        pieces = read(raw, positions(seed, len(raw)), dialect, stream)
        # Of bytes that break, how far they were read may differ: a broken piece is refused as a whole.
        if pieces[0] != whole[0] or (pieces != whole and not whole[0]):
            raise Wrong(f"whole {whole}\npieces {pieces}")


SAID: tuple[tuple[dict[str, Any], int], ...] = (
    ({"content": "é雨"}, ANSWER),
    ({"reasoning": "hm"}, REASONING),
    ({"reasoning_content": "h"}, REASONING),
    ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, TOOL),
    ({"content": ""}, ROLE),
    ({"role": "assistant"}, ROLE),
)
DELTAS = [([json.dumps(d, ensure_ascii=a).encode() for a in (False, True)], kind) for d, kind in SAID]
ENDS = (b"\n", b"\r\n", b"\r")


def composed(mode: int, recipe: bytes, seed: bytes) -> None:
    """A valid chat stream with known tokens, in any line ends and splits: the reader must find exactly those."""
    end, space = ENDS[mode % 3], b" " if mode & 4 else b""
    counted, zipped, chunked = bool(mode & 8), bool(mode & 16), bool(mode & 32)
    body, want, total = b"\xef\xbb\xbf" if mode & 64 else b"", [], 0
    for b in recipe[:16]:
        text, kind = DELTAS[b % len(DELTAS)]
        tokens = 1 + (b >> 5) if kind != ROLE else 0
        total += tokens
        lines = [b'{"choices":', b'[{"index":0,"delta":' + text[b >> 4 & 1] + b"}]"]
        lines.append(b',"usage":{"completion_tokens":%d}}' % total if counted else b"}")
        if not b & 8:
            lines = [b"".join(lines)]
        if b & 4:
            body += b": comment" + end + b"id: 3" + end
        body += b"".join(b"data:" + space + line + end for line in lines) + end
        want.append((kind, tokens if counted and kind != ROLE else None))
    tail = {"choices": None, "usage": {"prompt_tokens": 3, "completion_tokens": total}}
    body += b"data:" + space + json.dumps(tail).encode() + end + end + b"data: [DONE]" + end + end
    head = SSE
    if zipped:
        body, head = gzip.compress(body, 1), head + b"Content-Encoding: gzip\r\n"
    if chunked:
        step = 16 + (seed[0] if seed else 50)
        parts = [body[i : i + step] for i in range(0, len(body), step)]
        body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\nX-T: 1\r\n\r\n"
        head += b"Transfer-Encoding: chunked\r\n"
    raw = head + b"\r\n" + body
    failed, events, facts, complete, _ = read(raw, positions(seed, len(raw)), "chat", True)
    got = (failed, events, facts["outcome"], facts["output_tokens"], complete)
    if got != (False, want, "ok", total, True):
        raise Wrong(f"wanted {want} and {total}, got {got}")


def corpus() -> list[bytes]:
    """Real streams of each dialect, to mutate."""
    sse = b"".join
    chat = [
        b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"},"token_ids":[1,2]}]}\n\n',
        'data: {"choices":[{"index":1,"delta":{"content":"é雨"}}],"usage":{"completion_tokens":3}}\r\n\r\n'.encode(),
        b'event: x\ndata: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}],\n'
        b'data: "timings":{"predicted_n":4}}\n\n',
        b'data:{"choices":[{"delta":{},"finish_reason":"stop"}],"metrics":{"queue_time_ms":1.5}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":9,'
        b'"completion_tokens_details":{"reasoning_tokens":3}}}\n\n',
        b": ping\n\ndata: [DONE]\n\n",
        b'event: error\ndata: {"error":{"type":"x","code":500,"message":"m"}}\n\n',
    ]  # fmt: skip
    text = [b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n', chat[4], chat[6]]
    typed = [
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n',
        b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
        b'data: {"type":"response.reasoning_text.delta","delta":"a"}\n\n',
        b'data: {"type":"response.completed","response":{"status":"completed",'
        b'"usage":{"input_tokens":1,"output_tokens":2}}}\n\n',
        b'data: {"type":"response.failed","response":{"status":"failed","error":{"code":"x"}}}\n\n',
    ]  # fmt: skip
    out = []
    for dialect, events in enumerate((chat, text, typed)):
        body = sse(events)
        framed = sse(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"
        whole = {1: body, 2: framed, 3: gzip.compress(body), 7: body}
        whole[0] = PREFIXES[2] + framed + PREFIXES[2]
        whole[5] = b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
        whole[6] = b'{"error":{"type":"x","code":1}}'
        for prefix, raw in whole.items():
            for calm in (0, 0x20) if prefix >= 5 else (0,):
                out.append(bytes([prefix | dialect << 3 | calm, 4, 0, 9, 1, 7, 0, 99, 2, 50]) + raw)
    out += [bytes([0x80 | i, 3, 0, 40, 0, 90, 1, 9]) + bytes(range(i, 240, 23)) for i in range(0, 128, 5)]
    return out


TOKENS = (
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"data:",
    b"data: ",
    b":",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b"null",
    b"true",
    b"-1",
    b"1e400",
    b"99999999999999999999",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\xe9",
    b"\\ud800",
    b'"choices"',
    b'"usage"',
    b'"error"',
    b'"delta"',
    b'"text"',
    b'"index"',
    b"[DONE]",
    b"event: error",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"ffffffffffffffff\r\n",
    b"",
    b"\0",
)


def mutate(rnd: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    out[1:10] = bytes([rnd.getrandbits(3)]) + rnd.randbytes(8)
    for _ in range(1 + rnd.getrandbits(2)):
        at = 2 + int(rnd.random() * (len(out) - 2))
        how = rnd.getrandbits(3)
        if how == 0:
            out[at] = rnd.getrandbits(8)
        elif how == 1:
            out[at] ^= 1 << rnd.getrandbits(3)
        elif how <= 3:
            out[at:at] = TOKENS[int(rnd.random() * len(TOKENS))]
        elif how == 4:
            del out[at : at + 1 + rnd.getrandbits(5)]
        elif how == 5:
            out[at : at + rnd.getrandbits(4)] = TOKENS[int(rnd.random() * len(TOKENS))]
        elif how == 6:
            other = others[int(rnd.random() * len(others))]
            out[at:] = other[int(rnd.random() * len(other)) :]
        else:
            out[at:at] = out[at : at + rnd.getrandbits(6)]
        if len(out) < 4:
            break
    return bytes(out)


def _hang(_signal: int, _frame: FrameType | None) -> None:
    raise Wrong(f"no end within {HANG_S} s of CPU")


def plain(inputs: int, seed: int) -> int:
    rnd, known = random.Random(seed), corpus()
    size = len(known)
    signal.signal(signal.SIGPROF, _hang)
    began, done = time.monotonic(), 0
    for data in known:
        check(data)
    while done < inputs:
        data = known[int(rnd.random() * len(known))]
        if not data[0] & 0x80 or rnd.random() < 0.5:
            data = mutate(rnd, data, known)
        if done % 1000 == 0:
            # CPU time, for a thousand inputs: they take a twentieth of it, and the machine may be busy.
            signal.setitimer(signal.ITIMER_PROF, HANG_S)
        try:
            check(data)
        except Exception:
            name = Path(f"fuzz-failed-{hashlib.sha256(data).hexdigest()[:12]}.bin")
            name.write_bytes(data)
            traceback.print_exc()
            print(f"input {done} of seed {seed} is in {name}", flush=True)
            return 1
        done += 1
        if done % 64 == 0 and len(known) < 4 * size:  # mutants of mutants, a few
            known.append(data)
        elif done % 64 == 0:
            known[size + int(rnd.random() * 3 * size)] = data
        if done % 100_000 == 0:
            print(f"{done:,} inputs, {done / (time.monotonic() - began):,.0f} a second, seed {seed}", flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(f"{done:,} inputs, all right")
    return 0


def guided(argv: list[str]) -> None:
    import tempfile

    import atheris

    atheris.instrument_all()  # everything imported above too
    folder = tempfile.mkdtemp(prefix="fuzz-wire-")
    for i, data in enumerate(corpus()):
        (Path(folder) / f"{i}").write_bytes(data)
    atheris.Setup([sys.argv[0], *argv, folder], check)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz whywait's stream reader.")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", action="store_true", help="coverage-guided; further flags go to libFuzzer")
    parser.add_argument("--replay", metavar="FILE")
    args, more = parser.parse_known_args()
    if args.replay:
        check(Path(args.replay).read_bytes())
        return 0
    if args.atheris:
        guided(more)
        return 0
    return plain(args.inputs, args.seed)


if __name__ == "__main__":
    sys.exit(main())
