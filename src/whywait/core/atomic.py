"""A file that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of ``path`` when the block ends well and goes when it does not: whoever
    reads sees the old one, or the whole new one. It is made anew: nothing is written through a link that lies there.

    Raises:
        OSError: it cannot be made, or cannot take the place.
    """
    tmp = path.with_name(path.name + ".tmp")
    tmp.unlink(missing_ok=True)
    tmp.touch(exist_ok=False)
    try:
        yield tmp
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
