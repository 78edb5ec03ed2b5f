"""Which scheduler decides."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_state import Engine, World
from whywait.sim.policies_mixed import plan_vllm


@jit
def plan(w: World, eng: Engine) -> None:
    plan_vllm(w, eng)
