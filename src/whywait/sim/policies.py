"""Which scheduler decides."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_state import Engine, World
from whywait.sim.policies_mixed import plan_mixed
from whywait.sim.policies_sglang import plan_sglang
from whywait.sim.policies_static import plan_static
from whywait.sim.state import SGLANG, STATIC


@jit
def plan(w: World, eng: Engine) -> None:
    """Fills in what the next step of an engine does: ``take`` of every prompt, whether the decoders take part, and whether
    the waiting can hope before something ends."""
    if eng.policy == SGLANG:
        plan_sglang(w, eng)
    elif eng.policy == STATIC:
        plan_static(w, eng)
    else:
        plan_mixed(w, eng)
