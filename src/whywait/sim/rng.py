"""Random numbers by counter: the same for a seed and a row whatever happened before, in either form of the kernel.

Two multiplicative generators combined (L'Ecuyer, 1988); all products stay below 2⁵³.
"""

from __future__ import annotations

from whywait.sim.jit import jit

M1, A1 = 2147483563, 40014
M2, A2 = 2147483399, 40692


@jit
def seeded(seed: int, row: int, life: int) -> tuple[int, int]:
    """A state for one life of one row."""
    one = 1 + (seed % 1000003 * 7919 + row % 1000003 * 104729 + life * 31) % (M1 - 1)
    two = 1 + (row % 2097143 * 15485863 % (M2 - 1) + seed % 65521 * 32452843 % (M2 - 1) + life) % (M2 - 1)
    for _ in range(4):
        one, two = A1 * one % M1, A2 * two % M2
    return one, two


@jit
def draw(one: int, two: int) -> tuple[float, int, int]:
    """Uniform in (0, 1), and the next state."""
    one, two = A1 * one % M1, A2 * two % M2
    value = one - two
    if value < 1:
        value += M1 - 1
    return value / M1, one, two
