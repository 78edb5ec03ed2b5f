"""Prefill and decode on engines of their own, against as many engines that do both. See ``technique``."""

from __future__ import annotations

from typing import Final

from whywait.core.lengths import Lengths
from whywait.core.workload import RequestClass, Workload
from whywait.lab.technique import Point, Show, Technique

#: Answers in progress beside long prompts: each long prompt holds up whoever decodes in the same engine. Long enough
#: answers that one engine of the two is not short of prompts' work while the other drowns in it.
_MIX: Final = (
    RequestClass("chat", 0.8, Lengths("fixed", 24), Lengths("fixed", 64)),
    RequestClass("long prompt", 0.2, Lengths("fixed", 256), Lengths("fixed", 8)),
)

TECHNIQUES: Final[dict[str, Technique]] = {
    "pd-disaggregation": Technique(
        says="prompts are computed in one engine, answers decoded in another, the KV handed over between them",
        a="replicas:2,slots=4,ctx_per_slot=512",
        b="split:prefill=1,decode=1,slots=4,ctx_per_slot=512",
        workload=Workload(classes=_MIX),
        points=(Point(4, 16),),
        promise="neighbour's prefill",
        shows=(
            Show("itl_ms.p99", False),
            Show("tpot_ms.mean", False),
            Show("e2e_ms.mean", False),
            Show("ttft_ms.mean", True, price=True),
        ),
        cost="time to first token: the hand-over, and only some of the engines compute prompts; KV copied and sent",
    ),
}
