"""Where the time of a simulated load goes, and whether a technique cuts the wait that it promises to cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from whywait.physics.kernels import RESOURCES
from whywait.sim import service, techniques
from whywait.sim.power import WORDS, drawn
from whywait.twin.asked import Asked
from whywait.twin.model import Twin

#: What shows that a cause was cut, by the judge's name of the cause: of the requests' own time or of the device's.
SHOWS: Mapping[str, str] = {
    "slot limit": "queue", "kv space": "queue", "rate beyond capacity": "queue", "long requests": "queue",
    "neighbour's prefill": "stalled by prompts", "prefix cache off": "prefill", "prefix-cache thrash": "prefill",
    "weight-read-bound decode": "weight reads", "KV-read-bound decode": "KV reads", "compute-bound decode": "compute",
    "compute-bound prefill": "compute", "interconnect": "interconnect", "host CPU": "host CPU",
}  # fmt: skip
CUT = 0.95  # of what it was: less is cut
SMALL = 0.02  # of the time: less is nothing to cut


@dataclass(frozen=True)
class Waiting:
    """Of one load, ms per request before and after, at the medians of the parameters. ``request`` adds up to end to
    end but for frontend and reply (``stalled by prompts`` is part of decode); ``device`` is engine time by resource."""

    load: str
    request: Mapping[str, tuple[float, float]]
    device: Mapping[str, tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        return {"load": self.load, **{
            name: {k: {"before_ms": a, "after_ms": b} for k, (a, b) in part.items()}
            for name, part in (("request", self.request), ("device", self.device))
        }}  # fmt: skip


@dataclass(frozen=True)
class Promise:
    """A technique: the wait it promises to cut, its price and source, and what the simulated account shows of that
    wait at the load where there is most of it (ms per request). ``state``: cut, not cut, grown, nothing to cut, or
    unseen."""

    technique: str
    cuts: str
    price: str
    source: str
    shows: str
    load: str
    before_ms: float | None
    after_ms: float | None
    state: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def waiting(before: Twin, after: Twin, multipliers: Mapping[str, float], a: Asked) -> Waiting:
    """Both accounts of one load, of the same requests."""
    old, new = _account(before, multipliers, a), _account(after, multipliers, a)
    return Waiting(a.name, *({k: (x[k], y[k]) for k in x} for x, y in zip(old, new, strict=True)))


def promises(text: str, waits: Sequence[Waiting]) -> tuple[Promise, ...]:
    """One per technique of ``text``; where several are applied, the account shows what all of them do together."""
    return tuple(_promise(t, args.text, waits) for t, args in techniques.parse(text))


def _promise(t: techniques.Technique, text: str, waits: Sequence[Waiting]) -> Promise:
    shows = SHOWS.get(t.cuts, "")
    if not shows or not waits:
        return Promise(text, t.cuts, t.price, t.source, "", "", None, None, "unseen")

    def of(w: Waiting) -> tuple[float, float]:
        return w.request[shows] if shows in w.request else w.device[shows]

    most = max(waits, key=lambda w: of(w)[0])
    before, after = of(most)
    part = most.request if shows in most.request else most.device
    whole = sum(v[0] for k, v in part.items() if k != "stalled by prompts")
    if before < SMALL * whole:
        state = "nothing to cut"
    else:
        state = "cut" if after < CUT * before else "grown" if after > before / CUT else "not cut"
    return Promise(text, t.cuts, t.price, t.source, shows, most.load, before, after, state)


def _account(twin: Twin, multipliers: Mapping[str, float], a: Asked) -> tuple[dict[str, float], dict[str, float]]:
    d = twin.at(multipliers)
    prepared, found, t = service.run_point(d, a.schedule, a.mode, a.target, 0, options=twin.options(a, "steps"))
    parts, s, ok = drawn(d, prepared, found).parts, found.steps, t.ok & a.counted
    if not ok.any():
        ok = t.ok
    per = 1e3 / max(int(t.ok.sum()), 1)
    request = {"queue": _mean(t.scheduled - t.accepted, ok), "prefill": _mean(t.first - t.scheduled, ok),
               "decode": _mean(t.last - t.first, ok), "stalled by prompts": _stalled(parts, s) * per}  # fmt: skip
    device = {WORDS[r]: float(parts[i].sum()) * per * found.steps_stride for i, r in enumerate(RESOURCES)}
    return request, device


def _stalled(parts: Any, s: Any) -> float:
    """Seconds that decoding requests spent in steps for the sake of others' prompts: in each step with both, the
    prompts' share of the tokens in its compute."""
    mixed = (s.prefill_tokens > 0) & (s.decode_seqs > 0)
    share = s.prefill_tokens[mixed] / np.maximum(s.prefill_tokens[mixed] + s.decode_seqs[mixed], 1)
    compute = parts[RESOURCES.index("compute")][mixed]
    return float((compute * share * s.decode_seqs[mixed]).sum())


def _mean(x: Any, which: Any) -> float:
    known = x[which & np.isfinite(x)]
    return float(known.mean()) * 1e3 if len(known) else 0.0
