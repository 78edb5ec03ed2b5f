"""Other people's result files as bytes, lines and JSON values: gzip or not, torn or not, and never more memory than a
bound. What is wrong with a file is one line that names it and says what to do."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import orjson

from whywait.core import bounded
from whywait.errors import UsageError

MIB = 1 << 20
#: A JSON document is parsed in one piece, at ten times its size in memory; files of lines are read line by line.
DOCUMENT_BYTES = 256 * MIB
UNFOLDS = 200
MOST_PARSED = 4096 * MIB
MOST_NODES = 1 << 26
HEAD_BYTES = 1 << 16
GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
_MOST = 1 << 40  # a count of tokens beyond this is no count
_READ = MIB


class Bad(Exception):
    """A value that cannot be what its field says; ``str`` of it names the field and what was found."""


def opened(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed where it is gzip (told by its first bytes, not its name).

    Raises:
        UsageError: it cannot be opened.
    """
    try:
        with path.open("rb") as raw:
            zipped, size = raw.read(2) == GZIP, path.stat().st_size
        return cast(IO[bytes], io.BufferedReader(_Unfolding(path, size)) if zipped else path.open("rb"))
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}", "give a result file of a benchmark tool") from None


class _Unfolding(io.RawIOBase):
    """gzip that is no bomb: text shrinks to a tenth, and the dullest of results hardly to a hundredth."""

    def __init__(self, path: Path, size: int) -> None:
        self._file = gzip.open(path)  # noqa: SIM115 - closed by close
        self._room = max(DOCUMENT_BYTES, UNFOLDS * size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._file.readinto(buffer)
        self._room -= n
        if self._room < 0:
            raise OSError(f"it unfolds to more than {UNFOLDS} times its size")
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def head(path: Path) -> bytes:
    """The first bytes of what the file holds."""
    with opened(path) as file:
        return _read(file, HEAD_BYTES, path).removeprefix(BOM)


def digest(path: Path) -> tuple[str, int]:
    """SHA-256 (hex) and size of the file as it lies there, compressed or not."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ):
            found.update(block)
            size += len(block)
    return found.hexdigest(), size


def document(path: Path) -> bytes:
    """The whole of a file that is one document.

    Raises:
        UsageError: more than ``DOCUMENT_BYTES`` after decompression, or damaged.
    """
    with opened(path) as file:
        parts, size = [], 0
        while block := _read(file, _READ, path):
            size += len(block)
            if size > DOCUMENT_BYTES:
                too_long(path, f"it holds more than {DOCUMENT_BYTES // MIB} MiB in one JSON document")
            parts.append(block)
    return b"".join(parts).removeprefix(BOM)


def too_long(path: Path, what: str) -> NoReturn:
    raise UsageError(f"{path}: {what}, which would not fit in memory",
                     "take out texts and prompts (jq 'del(.generated_texts)'), or split the run")  # fmt: skip


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1; one line is in memory at a time.

    Raises:
        UsageError: a line of more than ``DOCUMENT_BYTES``, or damaged gzip.
    """
    with opened(path) as file:
        number = 0
        while True:
            try:
                line = file.readline(DOCUMENT_BYTES + 1)
            except (OSError, EOFError, zlib.error) as exc:
                raise _damaged(path, exc) from None
            if not line:
                return
            if len(line) > DOCUMENT_BYTES:
                too_long(path, f"line {number + 1} is longer than {DOCUMENT_BYTES // MIB} MiB")
            number += 1
            if line := line.removeprefix(BOM).strip():
                yield number, line


def value(raw: bytes) -> Any:
    """A JSON value; NaN and Infinity, which Python's own writer leaves in files, and text that is not UTF-8 are read.

    Raises:
        Bad: it is no JSON, or nested too deep.
    """
    try:
        return bounded.loads(raw, MOST_PARSED)
    except bounded.TooHeavy as exc:
        raise Bad(str(exc)) from None
    except orjson.JSONDecodeError as exc:
        said = str(exc)
    try:
        return json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as exc:
        raise Bad(f"no JSON: {'nested too deep' if isinstance(exc, RecursionError) else said}"[:200]) from None


def parsed(path: Path) -> Any:
    """The JSON document in ``path``.

    Raises:
        UsageError: too large, damaged, or no JSON.
    """
    try:
        return value(document(path))
    except Bad as exc:
        raise UsageError(f"{path}: {exc}", "was it copied whole? a run that was cut off leaves half a file") from None


def yaml(path: Path) -> Any:
    """The YAML document in ``path``, with PyYAML where it is installed.

    Raises:
        UsageError: no PyYAML, too large, or no YAML.
    """
    try:
        pyyaml = importlib.import_module("yaml")
    except ImportError:
        raise UsageError(f"{path} is YAML, which needs PyYAML", "pip install pyyaml, or write JSON: "
                         "guidellm … --output kind=json,path=benchmarks.json") from None  # fmt: skip
    raw = document(path)
    if len(raw) > DOCUMENT_BYTES // 8:  # its parser takes a hundred bytes and more for each of these
        too_long(path, f"it holds more than {DOCUMENT_BYTES // 8 // MIB} MiB of YAML")
    try:
        loader = getattr(pyyaml, "CSafeLoader", pyyaml.SafeLoader)  # both are safe: plain values, no objects
        found = pyyaml.load(raw, Loader=loader)
        if _nodes(found) > MOST_NODES:
            raise ValueError("its aliases unfold beyond all measure")
        return found
    except (pyyaml.YAMLError, ValueError, RecursionError) as exc:
        said = " ".join(str(exc).split())[:150]
        raise UsageError(f"{path}: no YAML: {said}", "was it copied whole? JSON is read too") from None


def _nodes(found: Any) -> int:
    """Values that are met by whoever goes through ``found``: what is there once, and named often, counts as often."""
    known: dict[int, int] = {}

    def count(value: Any) -> int:
        if not isinstance(value, (dict, list)):
            return 1
        if id(value) not in known:
            known[id(value)] = MOST_NODES + 1  # one that holds itself has no end
            known[id(value)] = 1 + sum(map(count, value.values() if isinstance(value, dict) else value))
        return known[id(value)]

    return count(found)


def _read(file: IO[bytes], size: int, path: Path) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError, zlib.error) as exc:
        raise _damaged(path, exc) from None


def _damaged(path: Path, exc: Exception) -> UsageError:
    return UsageError(f"{path} is damaged: {' '.join(str(exc).split())[:150]}", "was it copied whole?")


# --- values of fields


def got(found: Any, *keys: str) -> Any:
    """What lies at a path of keys; None where anything on the way is missing or no object."""
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def number(found: Any, field: str) -> float | None:
    """A finite number; None for null and NaN, which say that there is none.

    Raises:
        Bad: of another type, infinite, or too large for a float.
    """
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise Bad(f"{field}: a number was expected, found {type(found).__name__}")
    try:
        out = float(found)
    except OverflowError:
        raise Bad(f"{field}: a number of hundreds of digits") from None
    if math.isnan(out):
        return None
    if math.isinf(out):
        raise Bad(f"{field}: infinite")
    return out


def span(found: Any, field: str, unit_ns: float = 1e9) -> int | None:
    """A length of time as whole ns; ``unit_ns`` is its unit in ns.

    Raises:
        Bad: no number, negative, or longer than a hundred days.
    """
    out = number(found, field)
    if out is None:
        return None
    if out < 0:
        raise Bad(f"{field}: a negative time")
    if out * unit_ns > 8.64e15:
        raise Bad(f"{field}: longer than a hundred days; in another unit?")
    return round(out * unit_ns)


def instant(found: Any, field: str, unit_ns: float = 1e9) -> int | None:
    """A time on any axis as whole ns.

    Raises:
        Bad: no number, negative, or beyond what 64 bits of ns can say.
    """
    out = number(found, field)
    if out is None:
        return None
    if not 0 <= out * unit_ns < 4e18:
        raise Bad(f"{field}: no time that can be")
    return found * round(unit_ns) if isinstance(found, int) else round(out * unit_ns)


def count(found: Any, field: str) -> int | None:
    """A count of at least 0.

    Raises:
        Bad: no whole number, negative, or absurd.
    """
    out = number(found, field)
    if out is None:
        return None
    if not out.is_integer() or not 0 <= out < _MOST:
        raise Bad(f"{field}: no count that can be")
    return int(out)


def positive(found: Any, most: float = 1e9) -> float | None:
    """A load: a number above 0 and up to ``most``; None for anything else."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 1e-6 <= found <= most:
        return None
    return float(found)


def whole(found: Any) -> int | None:
    """A whole number from 1 to a billion; None for anything else."""
    return found if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= 10**9 else None


def text(found: Any, most: int = 120) -> str | None:
    """A short name; None for anything else."""
    return found[:most] if isinstance(found, str) and found else None
