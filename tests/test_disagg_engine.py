"""A real split: the same answer as one engine gives, from KV that was handed over. Half a minute."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="needs the 'engine' extra: pip install 'whywait[engine]'")

from whywait.lab import disagg, state
from whywait.lab.disagg_store import STEM, TMPFS
from whywait.lab.launch import launched, start_embedded
from whywait.lab.settings import Settings

pytestmark = pytest.mark.engine
PROMPTS = [f"Name {n} rivers and say where each of them ends." for n in (3, 7, 40)]


def ask(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 16, **more}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def test_the_answer_is_that_of_one_engine() -> None:
    """The decode engine computes the prompt's last token again, as one does that has the prompt in its cache: that is
    what it must equal to the last bit. (One that computes the prompt in one go may differ by rounding.)"""
    settings = Settings(slots=2, ctx_per_slot=256, threads=1)
    with launched(lambda: start_embedded(settings)) as one, launched(lambda: disagg.start(disagg.Fleet(engine=settings))
    ) as two:  # fmt: skip
        assert (two.kind, two.slots) == ("split", 2)
        for prompt in PROMPTS:
            ask(one.url, prompt, id_slot=0, max_tokens=1)
            want, got = ask(one.url, prompt, id_slot=0), ask(two.url, prompt, cache_prompt=False)
            assert want["timings"]["prompt_n"] == 1
            assert got["choices"][0]["message"] == want["choices"][0]["message"]
            usage = got["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # nothing of it was cached by the user's doing
            # The KV of the whole prompt came over: 30 layers, 3 KV heads of 64, keys and values, 2 bytes, and a head.
            assert got["timings"]["handover_bytes"] >= usage["prompt_tokens"] * 30 * 3 * 64 * 2 * 2
            assert got["timings"]["prompt_n"] == usage["prompt_tokens"]
            assert got["timings"]["handover_ms"] > 0
            assert got["timings"]["recomputed_n"] == 1  # the decode engine found all the rest
        page = urllib.request.urlopen(f"{two.url}/metrics", timeout=20).read().decode()
        found = dict(line.split() for line in page.splitlines() if line.startswith(("llamacpp:", "whywait_split:h")))
        # What the decode engine did not find it would have computed: nothing but one token each.
        assert float(found["whywait_split:handover_seconds_count"]) == len(PROMPTS)
        assert float(found["llamacpp:tokens_predicted_total"]) == 16 * len(PROMPTS)
        slots = json.loads(urllib.request.urlopen(f"{two.url}/slots", timeout=20).read())
        assert len(slots) == 2
        (folder,) = TMPFS.glob(f"{STEM}{two.pid}-*") if TMPFS.is_dir() else [None]
        assert folder is None or not list(folder.iterdir())
    assert folder is None or not folder.exists()
    assert not [e for e in state.running() if e.name.startswith(two.name)]
