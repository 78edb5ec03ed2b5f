"""Content codings of a body: gzip and deflate, in any pieces, bounded. No I/O."""

from __future__ import annotations

import zlib
from typing import Any

MAX_PIECE = 16 << 20  # what one read (at most 256 KB) may unfold to; a bomb unfolds to a thousand times
MAX_MEMBERS = 64


class CodingError(Exception):
    """The body is not in the coding it says, or unfolds beyond all measure."""


class Inflater:
    """``gzip`` (several members too) or ``deflate``, by which some mean zlib and some the bare stream."""

    def __init__(self, coding: str) -> None:
        self._gzip = coding != "deflate"
        self._z: Any = zlib.decompressobj(31) if self._gzip else None
        self._held = b""
        self.room = MAX_PIECE  # left for what this read unfolds to; whoever reads fills it up again

    def feed(self, data: bytes) -> bytes:
        """The plain bytes of ``data``.

        Raises:
            CodingError: broken, or a bomb.
        """
        if self._z is None:  # deflate: the first two bytes tell whether a zlib header is there
            self._held += data
            if len(self._held) < 2:
                return b""
            data, self._held = self._held, b""
            zlib_header = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._z = zlib.decompressobj(15 if zlib_header else -15)
        out = []
        members = 0
        try:
            while data and self.room > 0 and members < MAX_MEMBERS:
                members += 1
                piece = self._z.decompress(data, self.room)
                out.append(piece)
                self.room -= len(piece)
                if not self._z.eof:
                    break
                data = self._z.unused_data
                if not self._gzip or not data.strip(b"\0"):  # padding after the last member is legal
                    break
                self._z = zlib.decompressobj(31)
        except zlib.error as exc:
            raise CodingError(f"broken compression: {exc}") from None
        if self.room <= 0 or members >= MAX_MEMBERS:
            raise CodingError(f"a compressed piece unfolds to more than {MAX_PIECE} bytes or {MAX_MEMBERS} members")
        return b"".join(out)


def inflater(content_encoding: str) -> Inflater | None:
    """For a Content-Encoding header; None when there is nothing to undo.

    Raises:
        CodingError: a coding that was not asked for and cannot be read.
    """
    names = [n for part in content_encoding.split(",") if (n := part.strip().lower()) not in ("", "identity")]
    if not names:
        return None
    if len(names) == 1 and names[0] in ("gzip", "x-gzip", "deflate"):
        return Inflater(names[0])
    raise CodingError(f"content coding {content_encoding[:40]!r} is not one that was asked for")
