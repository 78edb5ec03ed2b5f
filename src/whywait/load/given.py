"""Texts that engines score token by token: 25 of our own writing in nine kinds, or a user's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whywait.core import bounded
from whywait.errors import UsageError

BYTES_PER_TOKEN = 4  # of English; other scripts have more tokens in as many bytes, and what is too long is not scored
LEAST_CHARS = 40
MOST_FILE = 64 << 20
_BUILT_IN = Path(__file__).parent / "corpus" / "scored.txt"


@dataclass(frozen=True)
class Given:
    """A text to be scored. ``name`` is unique; ``kind`` is what it is reported under."""

    name: str
    kind: str
    text: str


def built_in() -> list[Given]:
    out: list[Given] = []
    for part in _BUILT_IN.read_text(encoding="utf-8").split("%%% ")[1:]:
        kind, _, text = part.partition("\n")
        number = 1 + sum(g.kind == kind for g in out)
        out.append(Given(f"{kind}-{number}", kind, text.strip()))
    return out


def texts_of(paths: Sequence[str], context: int, most: int) -> list[Given]:
    """The user's texts, each file under its own name: a ``.jsonl`` has one per line (``text``, and ``kind`` if there is
    one), any other file is cut where it gets longer than about ``context`` tokens. Without files those built in.

    At most ``most``, evenly from all there are.

    Raises:
        UsageError: a file cannot be read, or holds no text long enough to be scored.
    """
    if not paths:
        return _evenly(built_in(), most)
    out: list[Given] = []
    for path in paths:
        found = [g for g in _read(Path(path), context) if len(g.text) >= LEAST_CHARS]
        if not found:
            raise UsageError(f"--text {path}: no text of {LEAST_CHARS} characters or more", "give a longer text")
        out += found
    if len({g.name for g in out}) < len(out):
        raise UsageError("--text: two files of one name", "give each file once")
    return _evenly(out, most)


def _evenly(texts: list[Given], most: int) -> list[Given]:
    step = max(1.0, len(texts) / most)
    return [texts[int(i * step)] for i in range(min(len(texts), most))]


def _read(path: Path, context: int) -> list[Given]:
    try:
        whole = bounded.read_text(path, MOST_FILE, "give a part of it")
    except OSError as exc:
        raise UsageError(f"--text: cannot read {path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--text: {path} is not UTF-8 text") from None
    if path.suffix == ".jsonl":
        return _lines(path, whole, context)
    return [Given(f"{path.name}:{i + 1}", path.stem, t) for i, t in enumerate(_pieces(whole.strip(), context))]


def _lines(path: Path, whole: str, context: int) -> list[Given]:
    out = []
    for i, line in enumerate(whole.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text, kind = row["text"], row.get("kind", path.stem)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = kind = None
        if not isinstance(text, str) or not isinstance(kind, str):
            raise UsageError(f"--text {path}, line {i}: not a JSON object with a 'text'", '{"text": "…", "kind": "…"}')
        out.append(Given(f"{path.name}:{i}", kind, _pieces(text.strip(), context)[0] if text.strip() else ""))
    return out


def _pieces(text: str, context: int) -> list[str]:
    """Cut at the end of a paragraph or sentence, else anywhere, into pieces of at most so many bytes."""
    most, out = context * BYTES_PER_TOKEN, []
    while text:
        raw = text.encode()
        head = raw[:most].decode(errors="ignore")
        if len(raw) > most:
            for mark in ("\n\n", "\n", ". ", "。", " "):
                at = head.rfind(mark)
                if at > len(head) // 2:
                    head = head[: at + len(mark)]
                    break
        out.append(head.strip())
        text = text[len(head) :].lstrip()
    return out or [""]
