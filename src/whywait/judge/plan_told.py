"""What a plan says of the runs that calibrate its candidates. Pure: plain JSON values in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USED, REFUSED, ELSEWHERE, CANNOT = "used", "refused", "of nothing here", "not possible"
MEASURED, CALIBRATED, OTHER, PRIOR = "measured", "calibrated", "calibrated elsewhere", "prior"
_NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "output_tokens_per_s": "tokens/s"}


def said(story: Mapping[str, Any]) -> str:
    """One run's part in a plan, in a sentence."""
    own, other = story["own"], story["other_machine"]
    if story["state"] == REFUSED:
        return f"{story['run']} calibrates nothing, the prior is kept: {story['why']}"
    if story["state"] != USED:
        return f"{story['run']} calibrates nothing: {story['why']}"
    whom = ", ".join(own) + ("; less surely " if own else "less surely, from another machine: ") * bool(other)
    whom += ", ".join(other)
    error = ", ".join(f"{_NAMES[k]} {v:+.0%}".replace("-", "−").replace("%", " %") for k, v in story["worst"].items())
    out = (f"calibrated on {story['run']} ({len(story['points'])} loads): {whom}; left out, its loads are missed by "
           f"{error} at worst")  # fmt: skip
    if story["covered"] is not None:
        n, most = story["outside"], story["figures"]
        out += f", {most - n} of {most} figures inside their 80 % intervals"
    return out + ("; a simulated run: that check is circular" if story["circular"] else "")
