"""The kernel compiled and as plain Python: the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.sim_kernel_cases import cost, plain_load
from whywait.sim.kernel import run
from whywait.sim.rng import draw, seeded
from whywait.sim.state import Pool, Settings

ROOT = Path(__file__).parents[1]
PROGRAM = """
import hashlib
from tests.sim_kernel_cases import POLICIES, scenario, tight
from whywait.sim.jit import COMPILED
from whywait.sim.kernel import run
print(COMPILED)
for policy in POLICIES.values():
    for seed in range(20, 26):
        for case in (scenario(seed, policy), tight(seed, policy, policy != POLICIES["static"])):
            result = run(*case)
            digest = hashlib.sha256()
            for column in (*result[:11], *result.steps):
                digest.update(column.tobytes())
            print(policy, seed, digest.hexdigest(), result.drafted, result.accepted, result.end_s.hex())
"""


def digests(form: str) -> list[str]:
    environ = {**os.environ, "WHYWAIT_SIM": form, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_compiled_and_plain_give_the_same_bits():
    pytest.importorskip("numba", reason="the compiled form needs the extra 'sim'")
    compiled, plain = digests("compiled"), digests("python")
    assert (compiled[0], plain[0]) == ("True", "False")
    assert len(plain) == 61
    assert compiled[1:] == plain[1:]


def test_draws_are_uniform_and_differ_by_seed_and_row():
    def some(seed: int, row: int) -> list[float]:
        one, two = seeded(seed, row, 3)
        out = []
        for _ in range(200):
            u, one, two = draw(one, two)
            out.append(u)
        return out

    if not hasattr(draw, "py_func"):
        values = np.array([some(seed, row) for seed in range(5) for row in range(20)])
        assert values.mean() == pytest.approx(0.5, abs=0.01)
        assert values.var() == pytest.approx(1 / 12, rel=0.03)
        assert len({tuple(row) for row in values[:, :3].tolist()}) == 100
        assert abs(np.corrcoef(values[:, 0], np.arange(100))[0, 1]) < 0.25


def test_seeds_change_what_is_drawn():
    load = plain_load([0.0] * 4, [8] * 4, [100] * 4)
    pool = Pool(drafts=2, acceptance=(0.5, 0.5))
    runs = [run(load, [pool], [cost()], Settings(seed=seed)).accepted for seed in range(4)]
    assert len(set(runs)) > 1
