"""Prompt prefixes as chains of block hashes: what two prompts share can be counted without keeping either.

A block is 64 words. Its hash covers the block *and* all before it, so equal hashes mean equal prefixes; it is keyed
with a secret that is thrown away, so nobody can test a guess against a stored hash.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_WORDS = 64
PIECE_CHARS = 1 << 14  # hashed at a time, in about 0.2 ms: on an event loop others go first in between
HASH_BYTES = 8  # 2^64: one false match in 10 million blocks is expected once in 370,000 recordings


def new_secret() -> bytes:
    """A key for one recording or one fit. It is never stored."""
    return secrets.token_bytes(32)


def keyed(secret: bytes, text: str) -> str:
    """A short name for ``text`` (a user, a session) that only who holds the secret can make again."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), key=secret, digest_size=HASH_BYTES).hexdigest()


class Chain:
    """The chain of one prompt. ``feed`` works piece by piece; ``words`` and ``hashes`` grow with it."""

    def __init__(self, secret: bytes) -> None:
        self.hashes: list[str] = []
        self.words = 0
        self._secret, self._link = secret, b""

    def feed(self, texts: Iterable[str]) -> Iterator[None]:
        """Take the prompt, yielding after every piece. A last block that is not full is left out."""
        pending: list[str] = []
        for text in texts:
            rest = ""
            for at in range(0, len(text), PIECE_CHARS):
                piece = rest + text[at : at + PIECE_CHARS]
                words = piece.split()
                # A word may go on in the next piece.
                rest = words.pop() if words and not piece[-1].isspace() else ""
                pending += words
                pending = self._blocks(pending)
                yield
            if rest:
                pending.append(rest)
        self._blocks(pending)
        self.words = len(self.hashes) * BLOCK_WORDS + len(pending) % BLOCK_WORDS

    def _blocks(self, words: list[str]) -> list[str]:
        whole = len(words) - len(words) % BLOCK_WORDS
        for at in range(0, whole, BLOCK_WORDS):
            data = "\0".join(words[at : at + BLOCK_WORDS]).encode("utf-8", "replace")
            self._link = hashlib.blake2b(self._link + data, key=self._secret, digest_size=HASH_BYTES).digest()
            self.hashes.append(self._link.hex())
        return words[whole:]


def chain(secret: bytes, texts: Iterable[str]) -> Chain:
    """The whole chain at once."""
    out = Chain(secret)
    for _ in out.feed(texts):
        pass
    return out


def prompt_texts(body: dict[str, Any]) -> Iterator[str]:
    """The texts of an OpenAI-style request, in the order a chat template would put them; other content as its JSON."""
    if body.get("tools"):
        yield str(body["tools"])
    for key in ("instructions", "prompt", "input", "messages"):
        value = body.get(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                yield item
            elif isinstance(item, dict):
                yield str(item.get("role", ""))
                yield from _content(item)
            elif item is not None:
                yield str(item)  # token ids


def _content(message: dict[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict):
            text = part.get("text")
            yield text if isinstance(text, str) else str(part)
        elif part is not None:
            yield str(part)
    if message.get("tool_calls"):
        yield str(message["tool_calls"])


def hits(chains: Sequence[Sequence[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per request: how many of its leading blocks an unlimited cache would hold, and how many requests ago the deepest
    of them was last used (0 where there is none)."""
    last: dict[Any, int] = {}
    hit, ago = np.zeros(len(chains), np.int64), np.zeros(len(chains), np.int64)
    for i, blocks in enumerate(chains):
        n = 0
        for block in blocks:
            if block not in last:
                break
            n += 1
        hit[i] = n
        if n:
            ago[i] = i - last[blocks[n - 1]]
        for block in blocks:
            last[block] = i
    return hit, ago
