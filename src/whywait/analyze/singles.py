"""What single streams tell of a service from outside: fixed, per-token and per-context cost, caching, the network.

Reads a Run of ``whywait probe``; its request classes say which experiment each request belongs to (``CLASSES``). Every
figure carries its number of values, its 95 % interval and a state; what the data do not bear out is ``undecided``.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from whywait.analyze import pairs
from whywait.analyze.fits import Curve, curve, lengths_of, ratio, scaled
from whywait.analyze.stats import Estimate, percentile
from whywait.analyze.trust import foreign
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array, Table
from whywait.units import NS_PER_MS

PILOT = "pilot"
HOW = "inferred from outside"
OK = OUTCOMES.index("ok")
SAVES = 0.1  # a cache that saves less than this of TTFT is called none
SEEN_SHARE = 0.25  # prefill must be this much of TTFT before a cache could be seen at all
DRIFT = 0.1
SMALL = "too small to be told from noise"
FOREIGN = 0.05  # growth of the engine's counters beyond what was sent, as a share of it


def is_probe(run: Run) -> bool:
    """Whether the Run is of ``whywait probe``, whole or cut off."""
    return bool(run.manifest.journey.get("probe")) or bool(pairs.points_of(run, pairs.SINGLES, PILOT))


def figures(run: Run) -> dict[str, Any]:
    """All that the Run tells, as plain JSON values; times in ms, costs per token in µs (squared: ns).

    Keys: ``how, rounds, requests, failed, prefill, cache, decode, second_stream, long_neighbour, network, bandwidth,
    engine_says, doubts``.
    """
    rng = np.random.default_rng(run.manifest.seed)
    named = {name: of_class(run, name) for name in ("prompt", "first", "again", "later", "decode", "decode deep")}
    decodes = Table.concat([named["decode"], named["decode deep"]])
    tokens, by_service = prompt_lengths(named["prompt"])
    line = curve(tokens, ttft_ms(named["prompt"]), named["prompt"]["sent_ns"], rng, (1, 2))
    steps = curve(context_of(decodes), step_ms(decodes), decodes["sent_ns"], rng)
    out = {
        "how": HOW,
        "rounds": len({p for p in run.points["label"].tolist() if p and p.endswith(pairs.SINGLES)}),
        "requests": len(run.requests),
        "failed": int((run.requests["outcome"] != OK).sum()),
        "prefill": _prefill(line, tokens, by_service),
        "decode": _decode(steps, context_of(decodes)),
        "cache": _cache(named, line),
        "second_stream": pairs.second_stream(run),
        "long_neighbour": pairs.long_neighbour(run, named["prompt"]),
        "network": _network(run),
        "engine_says": _engine_says(named["prompt"], decodes, line, steps, rng),
    }
    out["bandwidth"] = _bandwidth(run, out["decode"])
    out["doubts"] = _doubts(run, line, steps, by_service)
    return out


def of_class(run: Run, name: str) -> Table:
    """The requests of one experiment that went well, in the order they were sent."""
    found = run.requests.where((run.requests["class"] == name) & (run.requests["outcome"] == OK))
    return found.where(np.argsort(found["sent_ns"], kind="stable"))


def ttft_ms(requests: Table) -> Array:
    """Sent to first token, without the time to open a connection."""
    late = np.nan_to_num(requests["connect_ns"])
    out: Array = (pairs.first_or_end_ns(requests) - requests["sent_ns"] - late) / NS_PER_MS
    return out


def step_ms(requests: Table) -> Array:
    """Mean time per token after the first chunk; where the service counts no tokens, per chunk. NaN below 4 chunks.

    Where tokens come several to a chunk and nobody says how many, the first chunk is taken to hold as many as the rest.
    """
    chunks = requests["content_chunks"]
    n = np.where(np.isnan(requests["output_tokens"]), chunks, requests["output_tokens"])
    told = requests["first_chunk_tokens"]
    first = np.where(np.isnan(told), np.maximum(1.0, n / np.maximum(chunks, 1)), told)
    after = np.where((chunks >= 4) & (n > first), n - first, np.nan)
    out: Array = (requests["last_ns"] - requests["first_ns"]) / NS_PER_MS / after
    return out


def prompt_lengths(requests: Table) -> tuple[Array, bool]:
    """Prompt tokens to compute (cached ones left out), and whether the service itself counted them."""
    counted = requests["prompt_tokens"]
    if len(counted) and not np.isnan(counted).any():
        return counted - np.nan_to_num(requests["cached_tokens"]), True
    return requests["asked_prompt_tokens"], False


def context_of(requests: Table) -> Array:
    """Tokens in the KV cache half way through the answer: prompt and half of the output."""
    prompt = np.where(np.isnan(requests["prompt_tokens"]), requests["asked_prompt_tokens"], requests["prompt_tokens"])
    out: Array = prompt + np.nan_to_num(requests["content_chunks"]) / 2
    return out


def estimate(e: Estimate, scale: float = 1.0, known: bool | None = None, why: str = "") -> dict[str, Any]:
    """An estimate for JSON. ``known``: whether it may be relied on; by default when its interval excludes 0."""
    value, lo, hi, _ = scaled(e, scale)
    if known is None:
        known = lo is not None and lo > 0
    state = "holds" if known else "undecided"
    return {"value": value, "lo": lo, "hi": hi, "n": e.n, "state": state, "why": "" if known else why}


def _prefill(line: Curve | None, tokens: Array, by_service: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"n": len(tokens), "lengths": [float(np.median(tokens[g])) for g in lengths_of(tokens)],
                           "counted_by": "service" if by_service else "whywait"}  # fmt: skip
    if line is None:
        return {**out, "state": "undecided", "why": "too few prompts of different lengths were answered"}
    straight = not (line.bent and line.misfit > 0.1)
    why = f"TTFT does not follow a curve in the prompt's length (off by up to {line.misfit:.0%})"
    fixed, per_token, *square = line.coef
    kept = [("fixed_ms", fixed, 1.0), ("per_token_us", per_token, 1e3), *(("per_token2_ns", s, 1e6) for s in square)]
    for name, e, scale in kept:
        positive = e.lo is not None and e.lo > 0
        out[name] = estimate(e, scale, straight and positive, SMALL if straight else why)
    rate = _inverse(per_token, 1e3)
    out["tokens_per_s"] = {**rate, "state": out["per_token_us"]["state"], "why": out["per_token_us"]["why"]}
    return {**out, "noise": line.noise, "misfit": line.misfit, "drift": line.drift._asdict(), "state":
            out["per_token_us"]["state"], "why": out["per_token_us"]["why"]}  # fmt: skip


def _inverse(e: Estimate, scale: float) -> dict[str, Any]:
    value, lo, hi = (scale / v if v is not None and v > 0 else None for v in (e.value, e.hi, e.lo))
    return {"value": value, "lo": lo, "hi": hi, "n": e.n}


def _decode(steps: Curve | None, contexts: Array) -> dict[str, Any]:
    out: dict[str, Any] = {
        "n": len(contexts),
        "contexts": [float(np.median(contexts[g])) for g in lengths_of(contexts)],
    }
    if steps is None:
        return {**out, "state": "undecided", "why": "too few answers at different context lengths"}
    straight = not (steps.bent and steps.misfit > 0.1)
    why = f"a step does not follow a line in the context's length (off by up to {steps.misfit:.0%})"
    fixed, per_token = steps.coef
    out["fixed_ms"] = estimate(fixed, 1.0, straight and (fixed.lo or 0) > 0, why if not straight else SMALL)
    small = f"not told from 0: at most {max(per_token.hi or 0.0, 0.0) * 1e3:.3g} µs"
    clear = per_token.lo is not None and per_token.lo > 0
    out["per_context_token_us"] = estimate(per_token, 1e3, straight and clear, why if not straight else small)
    return {**out, "noise": steps.noise, "misfit": steps.misfit, "drift": steps.drift._asdict(),
            "state": out["fixed_ms"]["state"], "why": out["fixed_ms"]["why"]}  # fmt: skip


def _cache(named: dict[str, Table], line: Curve | None) -> dict[str, Any]:
    """The same prompt again, at once and at the end of its round, against the first time."""
    first = named["first"]
    tokens, _ = prompt_lengths(first)
    out: dict[str, Any] = {"n": len(first), "prompt_tokens": float(np.median(tokens)) if len(tokens) else None}
    for name in ("again", "later"):
        kept = 1 - np.array([v for _, v in _repeats(first, named[name])], dtype=float)
        left = ratio(1 - kept)
        value, lo, hi = (None if v is None else 1 - v for v in (left.value, left.hi, left.lo))
        saved = Estimate(value, lo, hi, left.n)
        out[f"saved_{name}"] = saved._asdict()
    cached = np.concatenate([named[n]["cached_tokens"] for n in ("again", "later")])
    cached = cached[~np.isnan(cached)]
    out["reported_cached_tokens"] = float(np.median(cached)) if len(cached) else None
    out["block_tokens"] = _block(named)
    state, why = _cached_state(out["saved_again"], cached, tokens, line)
    return {**out, "state": state, "why": why}


def _repeats(first: Table, again: Table) -> list[tuple[int, float]]:
    """(Point, TTFT of the repeat / that of the first) of each repeat whose first is known: same point and length."""
    before = {(int(p), float(a)): t for p, a, t in zip(first["point"], first["asked_prompt_tokens"], ttft_ms(first),
                                                       strict=True)}  # fmt: skip
    rows = zip(again["point"], again["asked_prompt_tokens"], ttft_ms(again), strict=True)
    return [(int(p), t / before[int(p), float(a)]) for p, a, t in rows if (int(p), float(a)) in before]


def _cached_state(saved: dict[str, Any], cached: Array, tokens: Array, line: Curve | None) -> tuple[str, str]:
    if saved["lo"] is not None and saved["lo"] > SAVES:
        return "holds", f"a repeated prompt needs {saved['value']:.0%} less time to its first token"
    if len(cached) and float(np.median(cached)) > 0.5 * float(np.median(tokens)):
        return "holds", "the service reports cached tokens, though little time is saved"
    if saved["lo"] is None or line is None:
        return "undecided", "too few repeated prompts were answered"
    x = float(np.median(tokens))
    share = 1 - (line.coef[0].value or 0.0) / max(line.at(x), 1e-300)
    if share < SEEN_SHARE:
        return "undecided", f"prefill is only {max(share, 0):.0%} of TTFT at this length: a cache could not be seen"
    if saved["hi"] < max(SAVES, share / 3):
        return "fails", "a repeated prompt takes as long as a new one"
    return "undecided", "what a repeated prompt saves is not clear of the noise"


def _block(named: dict[str, Table]) -> int | None:
    """Tokens in a block of the prefix cache: the greatest common divisor of the cached counts that the service reports.

    None where it reports none, or too few different counts to tell.
    """
    counts = {int(c) for n in ("again", "later") for c in named[n]["cached_tokens"] if c > 0}
    return reduce(math.gcd, counts) if len(counts) >= 4 else None


def _network(run: Run) -> dict[str, Any]:
    told = run.manifest.journey.get("probe", {})
    ok = run.requests.where(run.requests["outcome"] == OK)
    single = ok.where(~np.isin(ok["point"], pairs.points_of(run, pairs.PAIR, pairs.BESIDE)))
    headers = (single["accepted_ns"] - single["sent_ns"] - np.nan_to_num(single["connect_ns"])) / NS_PER_MS
    rtt, ttft = single["rtt_ns"][~np.isnan(single["rtt_ns"])] / NS_PER_MS, ttft_ms(single)
    ttft = ttft[np.isfinite(ttft)]
    early = (single["first_ns"] - single["accepted_ns"]) / NS_PER_MS
    return {
        "connect_ms": percentile(np.array(told.get("connect_ms", []), dtype=float), 0.5)._asdict(),
        "tls_ms": percentile(np.array(told.get("tls_ms", []), dtype=float), 0.5)._asdict(),
        "rtt_ms": float(rtt.min()) if len(rtt) else None,
        "headers_ms": percentile(headers, 0.5)._asdict(),
        "headers_come_with_the_first_token": bool(np.nanmedian(early) < 0.2 * np.nanmedian(headers))
        if len(ttft)
        else None,
        "least_ttft_ms": float(ttft.min()) if len(ttft) else None,
        "n": len(single),
    }


def _engine_says(
    prompts: Table, decodes: Table, line: Curve | None, steps: Curve | None, rng: np.random.Generator
) -> Any:
    """The same fits to what the engine itself reports with its answers, beside ours; None where it reports nothing."""
    out: dict[str, Any] = {}
    tokens, _ = prompt_lengths(prompts)
    theirs = curve(
        tokens, prompts["engine_prefill_ms"], prompts["sent_ns"], rng, (len(line.coef) - 1,) if line else (1,)
    )
    if theirs is not None:
        out["per_token_us"] = estimate(theirs.coef[1], 1e3)
        out["fixed_ms"] = estimate(theirs.coef[0])
    after = np.where(decodes["output_tokens"] > 1, decodes["output_tokens"] - 1, np.nan)
    own = curve(context_of(decodes), decodes["engine_decode_ms"] / after, decodes["sent_ns"], rng)
    if own is not None and steps is not None:
        out["step_fixed_ms"] = estimate(own.coef[0])
        out["per_context_token_us"] = estimate(own.coef[1], 1e3)
    return out or None


def _bandwidth(run: Run, decode: dict[str, Any]) -> dict[str, Any] | None:
    """Weights read per second if a step reads all of them once; modelled. None where the model's size is not known."""
    size, fixed = run.manifest.engine.get("model_bytes"), decode.get("fixed_ms")
    if not size or not fixed or fixed["state"] != "holds":
        return None
    rate = _inverse(Estimate(fixed["value"], fixed["lo"], fixed["hi"], fixed["n"]), size * 1e3)
    return {**rate, "model_bytes": size, "unit": "B/s", "how": "modelled: each step reads all weights once"}


def _doubts(run: Run, line: Curve | None, steps: Curve | None, by_service: bool) -> list[dict[str, str]]:
    out = list(run.manifest.doubts)
    for what, found in (("TTFT", line), ("the decode step", steps)):
        drift = found.drift if found is not None else Estimate(None, None, None, 0)
        clear = drift.lo is not None and drift.hi is not None and drift.lo * drift.hi > 0
        if clear and abs(drift.value or 0.0) > DRIFT:
            why = f"by {drift.value:+.0%} from the first round to the last"
            out.append(
                {"what": f"{what} drifted while it was probed", "why": why, "next": "probe again when it is quiet"}
            )
    if not by_service:
        out.append({"what": "costs per token are per token as whywait guessed them",
                    "why": "the service does not report prompt tokens", "next": "compare with its own"})  # fmt: skip
    others = [f for f in foreign(run) if f.excess > FOREIGN * f.sent_high]
    if others:
        why = f"{others[0].name} grew by {others[0].excess:.0f} more than was sent: the times hold somebody else's work"
        out.append({"what": "the service had other traffic", "why": why, "next": "probe again when it is quiet"})
    return out
