"""Techniques of speculative decoding: a small model or earlier text proposes, one step of the large model checks.

Each is tried at 1, 2, 4 and 8 in flight: a step that checks k tokens does k + 1 times the arithmetic and reads the
weights once. Alone, a stream leaves arithmetic idle; beside others it does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from whywait.core.workload import Workload
from whywait.lab.technique import Point, Show, Technique, one_class

#: At temperature 0 a model of this size soon says the same again, and often repeats its prompt: text for n-grams.
REPEATS: Final = Workload(classes=one_class(64, 64))
#: Drawn at temperature 1 it wanders: hardly any three tokens come a second time.
WANDERS: Final = replace(REPEATS, temperature=1.0)
SLOTS: Final[dict[str, Any]] = {"slots": 8, "ctx_per_slot": 256}
AXIS: Final = (Point(1, 2), Point(2, 4, "2 in flight"), Point(4, 4, "4 in flight"), Point(8, 8, "8 in flight"))
FRESH: Final = Point(1, 2, "1 in flight, text that wanders", workload=WANDERS)
COST: Final = "every proposal is checked, and those rejected for nothing: the wider the batch, the dearer"
SHOWS: Final = (
    Show("output_tokens_per_s", True),
    Show("tpot_ms.mean", False),
    Show("output_tokens_per_s", False, "8 in flight", price=True),
)
_NGRAM: Final = '--speculative-config \'{"method":"ngram","num_speculative_tokens":8,"prompt_lookup_max":3}\''
_DRAFT: Final = '--speculative-config \'{"method":"draft_model","model":"DRAFT","num_speculative_tokens":4}\''

TECHNIQUES: Final[dict[str, Technique]] = {
    "speculation-ngram": Technique(
        says="what followed the last three tokens when they came before is proposed, and checked in one step",
        a=SLOTS,
        b={**SLOTS, "draft": "ngram", "drafts": 8},
        workload=REPEATS,
        points=(*AXIS, FRESH),
        promise="weight-read-bound decode",
        shows=SHOWS,
        cost=f"{COST}; no gain where text does not repeat",
        flags={
            "vllm": ("", _NGRAM),
            "sglang": ("", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8"),
            "llama-server": ("", "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8"),
        },
    ),
    "speculation-draft": Technique(
        says="the same model with fewer layers proposes two tokens, checked in one step",
        a=SLOTS,
        b={**SLOTS, "draft": "pruned", "drafts": 2},
        workload=REPEATS,
        points=AXIS,
        promise="weight-read-bound decode",
        shows=SHOWS,
        cost=f"{COST}; the draft's own time and memory",
        flags={
            "vllm": ("", _DRAFT),
            "sglang": (
                "",
                "--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT "
                "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5",
            ),
            "llama-server": ("", "--spec-type draft-simple --spec-draft-model DRAFT --spec-draft-n-max 4"),
        },
    ),
    "speculation-self": Technique(
        says="the model is its own draft: all it proposes is accepted, and still it costs what it saves",
        a=SLOTS,
        b={**SLOTS, "draft": "self", "drafts": 4},
        workload=REPEATS,
        points=AXIS,
        promise="weight-read-bound decode",
        shows=(
            Show("output_tokens_per_s", False, price=True),
            Show("output_tokens_per_s", False, "8 in flight", price=True),
        ),
        cost="as many draft steps as there are tokens, and the checking on top: acceptance alone is no gain",
    ),
}
