"""Text of others (a service, a file of cases) as a terminal may have it: nothing in it moves the cursor or colours."""

from __future__ import annotations

import re
from typing import Final

#: C0 and C1 controls but tab and newline, and the marks that turn the direction of what follows.
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Without control characters; what they would have coloured stays as text."""
    return _CONTROLS.sub("", text)
