"""What ``embedded:weights=…`` can be, and what each of it really is. Plain data, read before numpy is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Weights(NamedTuple):
    """``says``: what was really done, for people. ``bits``: of a value; ``stored``: of its share of the file, scales
    included. ``part`` is what the file's name ends in."""

    says: str
    bits: int
    stored: float
    part: str


_SAME: Final = "holds the source's 4-bit values to within 1/18 of a step: no quality is gained by it"
WEIGHTS: Final[Mapping[str, Weights]] = {
    "f16": Weights("half precision; holds the source's 4-bit values: no quality is gained by it", 16, 16.0, "F16"),
    "q8_0": Weights(f"8 bits, blocks of 32; {_SAME}", 8, 8.5, "Q8_0"),
    "q5_0": Weights("5 bits, blocks of 32, of the source's 4-bit values", 5, 5.5, "Q5_0"),
    "q4_1": Weights("4 bits with an offset, blocks of 32: the default model as it is published", 4, 5.0, "Q4_1"),
    "q4_0": Weights("4 bits, blocks of 32", 4, 4.5, "Q4_0"),
    "q3": Weights("3-bit values in blocks of 4 bits: the loss of 3 bits, the size and speed of 4", 3, 4.5, "Q3inQ4_0"),
    "q2": Weights("2 bits, blocks of 64 (Q2_0)", 2, 2.25, "Q2_0"),
}
