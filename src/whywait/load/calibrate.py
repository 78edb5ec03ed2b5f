"""Prompt lengths by the service's own count: learnt before the load, made exact where it counts for us, refined by
what the run itself shows. Everything here is single requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whywait.core.schedule import Schedule, Workload
from whywait.load.preflight import Target, ask_once
from whywait.load.prompts import LEAST_TOKENS_PER_UNIT, Fit, Prompter
from whywait.load.tokens import TOKENIZE, Counter, FileCounter, ServiceCounter
from whywait.load.turns import Message, Turns, languages_of

Seen = list[tuple[int, int]]
EXACT_S, EXACT_CALLS = 2.0, 4000  # before a point no longer and no more than this; the rest follows the fitted line
EXACT_CALLS_ELSEWHERE = 200  # on a service that is not on this machine
MOST_UNKNOWN = 3  # prompts in a row that nobody could count
TRIMS = 5  # tries to meet a count by cutting characters
SHORT = 60  # units of the longest probe, where longer ones are refused
PROBE = 10_000_000  # numbers of calibrating prompts, far from those of requests


def calibrate(target: Target, workload: Workload, prompter: Prompter) -> tuple[Prompter, list[dict[str, str]]]:
    """Learn from six one-token requests per language how many tokens the service counts per unit.

    They are about as long as the workload's own prompts, and half as long. Where there will be histories, two
    more tell what a further message adds.
    """
    fits: dict[str, Fit] = {}
    languages = sorted({x for c in workload.classes for x in c.language})
    for language in languages:
        seen, refused = _probe(target, workload, prompter, language)
        if len(seen) < 6:
            why = refused or "the service does not report prompt tokens"
            doubt = {"what": "prompt lengths are guessed", "why": why,
                     "next": "compare with the service's own logs"}  # fmt: skip
            return prompter, [doubt]
        fits[language] = prompter.fit(language).refit(seen)
    prompter = dataclasses.replace(prompter, fits=fits)
    if workload.has_sessions or workload.trace:
        prompter = _with_messages(target, workload, prompter, languages[0])
    return prompter, []


def _probe(target: Target, workload: Workload, prompter: Prompter, language: str) -> tuple[Seen, str]:
    """(Units, tokens) of the probes that went well, and why one did not."""
    refused, usual = "", _usual(workload, prompter, language)
    # A tokenizer that needs many tokens per word makes the first guess too long for the context: then short ones tell.
    for longest in dict.fromkeys((usual, min(usual, SHORT))):
        seen, why = _probe_of(target, workload, prompter, (language, longest))
        refused = refused or why
        if len(seen) == 6 or not why:
            break
    return seen, refused


def _usual(workload: Workload, prompter: Prompter, language: str) -> int:
    lengths = [c.prompt_tokens.a for c in workload.classes if language in c.language]
    return max(24, min(2000, round(sum(lengths) / len(lengths) / prompter.fit(language).per_unit)))


def _probe_of(target: Target, workload: Workload, prompter: Prompter, at: tuple[str, int]) -> tuple[Seen, str]:
    language, usual = at
    seen: Seen = []
    refused = ""
    for n in (usual // 2, usual // 2 + 1, usual, usual + 1, usual + 2, usual + 3):
        facts = _asked(target, workload, [Message("user", prompter.turn(PROBE + n, 0, n, language))])
        if facts.get("prompt_tokens"):
            seen.append((n, facts["prompt_tokens"]))
        elif facts["outcome"] != "ok":
            refused = f"a calibrating prompt of such a length failed: {facts['outcome']} ({facts.get('detail')})"
    return seen, refused


def _asked(target: Target, workload: Workload, messages: Sequence[Message]) -> dict[str, Any]:
    """What became of a one-token request; its usage counts the prompt."""
    body = body_of(target, messages, 1, target.options(workload, stream=False))
    return ask_once(target, body, False, workload.timeout_s)


def _with_messages(target: Target, workload: Workload, prompter: Prompter, language: str) -> Prompter:
    """What a further message adds: the same text sent as three messages and as one."""
    said = [prompter.turn(PROBE, turn, 30, language) for turn in range(3)]
    three = [Message(role, text) for role, text in zip(("user", "assistant", "user"), said, strict=True)]
    both = (three, [Message("user", "\n\n".join(said))])
    counts = [_asked(target, workload, m).get("prompt_tokens") for m in both]
    if counts[0] is None or counts[1] is None:
        return prompter
    return dataclasses.replace(prompter, per_message=min(max((counts[0] - counts[1]) / 2, 0.0), 40.0))


def body_of(target: Target, messages: Sequence[Message], max_tokens: int, options: Mapping[str, Any]) -> bytes:
    """The request's body in the endpoint's dialect. Where that takes plain text, the messages follow one another."""
    if len(messages) == 1:
        return target.body(messages[0].content, max_tokens, dict(options))
    if target.endpoint.dialect == "completions":
        return target.body("\n\n".join(m.content for m in messages), max_tokens, dict(options))
    key = "messages" if target.endpoint.dialect == "chat" else "input"
    # The dialect merges options last, so these stand in the place of the single message.
    return target.body("", max_tokens, {**options, key: [m._asdict() for m in messages]})


def counter(target: Target, workload: Workload, prompter: Prompter) -> Counter | None:
    """A counter that agrees with the service's usage: its own /tokenize, else the tokenizer file that was named."""
    language = workload.classes[0].language[0]
    if target.engine is not None and target.engine.name in TOKENIZE:
        found = ServiceCounter(target)
        offset = _offset(found, target, workload, prompter, language)
        if offset is not None:
            found.offset = offset
            return found
    if not target.tokenizer:
        return None
    local = FileCounter(target.tokenizer, plain=target.endpoint.dialect == "completions")
    offset = _offset(local, target, workload, prompter, language)
    if offset is None:
        return None
    local.offset = offset
    if not local.plain:
        _learn_template(local, target, workload, prompter, language)
    return local


def tokenizer_doubt(path: str) -> dict[str, str]:
    """What to say where the file that was named counts otherwise than the service."""
    why = f"{path} and usage differ by another number of tokens at another length, or there is no usage"
    next_ = "give the tokenizer of the model that is served"
    return {"what": "the tokenizer given does not count as the service does", "why": why, "next": next_}


def _offset(found: Counter, target: Target, workload: Workload, prompter: Prompter, language: str) -> int | None:
    """What usage counts beyond ``found``, where two prompts of different length agree on that."""
    offsets = set()
    for n in (40, 90):
        messages = [Message("user", prompter.turn(PROBE, 0, n, language))]
        counted = found.count(messages)
        used = None if counted is None else _asked(target, workload, messages).get("prompt_tokens")
        if counted is None or used is None:
            return None
        offsets.add(used - counted)
    return offsets.pop() if len(offsets) == 1 else None


def _learn_template(found: FileCounter, target: Target, workload: Workload, prompter: Prompter, language: str) -> None:
    """What a system prompt and an earlier turn add; the latter only if two turns add twice as much as one."""
    if not (workload.has_sessions or workload.trace or workload.fitted or any(c.shared for c in workload.classes)):
        return
    said = [prompter.turn(PROBE, turn, 30, language) for turn in range(6)]

    def beyond(*roles: str) -> int | None:
        messages = [Message(role, text) for role, text in zip(roles, said, strict=False)]
        used = _asked(target, workload, messages).get("prompt_tokens")
        return None if used is None else used - found.offset - sum(found.text(m.content) for m in messages)

    found.system = beyond("system", "user")
    one, two = (beyond(*("user", "assistant") * n, "user") for n in (1, 2))
    found.turn = one if one is not None and two == 2 * one else None


def exact(found: Counter, prompter: Prompter, schedule: Schedule, workload: Workload) -> Prompter:
    """``prompter`` with the units each request of ``schedule`` needs to have its tokens by the service's count.

    Within a budget of time and calls, in the order they will be sent; what was counted also refines the line that the
    others follow.
    """
    units, trims, seen = dict(prompter.exact), dict(prompter.trims), dict[str, Seen]()
    turns = Turns(dataclasses.replace(prompter, exact=units, trims=trims), schedule, languages_of(workload))
    unknown = 0
    until = time.monotonic() + EXACT_S
    most = found.calls + (EXACT_CALLS_ELSEWHERE if found.far else EXACT_CALLS)
    for row in range(len(schedule)):
        if time.monotonic() > until or found.calls >= most:
            break
        language = turns.language(row)
        best = _converge(found, turns, row, prompter.fit(language).per_unit)
        if best is None:
            unknown += 1
            if unknown >= MOST_UNKNOWN:
                break
            continue
        unknown, (units[int(schedule.id[row])], off) = 0, best
        if single(schedule, row):
            seen.setdefault(language, []).append((best[0], int(schedule.prompt_tokens[row]) + off))
        if off and (cut := _trimmed(found, turns, row, best)):
            units[int(schedule.id[row])], trims[int(schedule.id[row])] = cut
    fits = {**prompter.fits, **{k: prompter.fit(k).refit(v) for k, v in seen.items() if len(v) >= 6}}
    return dataclasses.replace(prompter, exact=units, trims=trims, fits=fits)


def _converge(found: Counter, turns: Turns, row: int, per_unit: float) -> tuple[int, int] | None:
    """Units of this row's text that come nearest to its tokens, and how many tokens they are off; in a few tries."""
    wanted, n = int(turns.schedule.prompt_tokens[row]), turns.units(row)
    best: tuple[int, int] | None = None
    low, high = 0, 1 << 40  # too short, too long
    for _ in range(6):
        counted = found.count(turns.messages(row, n))
        if counted is None:
            return best
        off = counted - wanted
        if best is None or abs(off) < abs(best[1]):
            best = n, off
        low, high = (n, high) if off < 0 else (low, n)
        if off == 0 or high - low <= 1:
            break
        n = min(max(n - (round(off / per_unit) or (1 if off > 0 else -1)), low + 1), high - 1)
    return best


def _trimmed(found: Counter, turns: Turns, row: int, best: tuple[int, int]) -> tuple[int, int] | None:
    """Units and characters to cut from the end, so that the tokens are met where whole words miss them; None: none do.

    A character is a token at most, so as many as are too much is the least to cut.
    """
    wanted, n = int(turns.schedule.prompt_tokens[row]), best[0] + (best[1] < 0)
    over = best[1]
    if over < 0:
        counted = found.count(turns.messages(row, n))
        over = 0 if counted is None else counted - wanted
    cut = over
    for _ in range(TRIMS):
        if over <= 0:
            break
        counted = found.count(turns.messages(row, n, cut))
        if counted is None:
            break
        over = counted - wanted
        if over == 0:
            return n, cut
        cut += over
    return None


def single(schedule: Schedule, row: int) -> bool:
    """Whether the whole prompt is one text of ours, so that its length tells how the service counts."""
    return bool(schedule.session_id[row] < 0 and schedule.prefix_group[row] < 0 and not schedule.blocks)


def refined(prompter: Prompter, schedule: Schedule, workload: Workload, counts: Iterable[tuple[int, int]]) -> Prompter:
    """With lines refitted to what the service counted of the run's own requests: (id, prompt tokens) pairs.

    So the next point comes out as asked even where six requests told too little.
    """
    turns = Turns(prompter, schedule, languages_of(workload))
    at = {int(i): row for row, i in enumerate(schedule.id)}
    seen: dict[str, Seen] = {}
    for id_, tokens in counts:
        row = at.get(id_)
        if row is not None and single(schedule, row):
            seen.setdefault(turns.language(row), []).append((turns.units(row), tokens))
    fits = {**prompter.fits}
    for language, pairs in seen.items():
        if len(pairs) >= 6:
            fits[language] = _follow(prompter.fit(language), pairs)
    return dataclasses.replace(prompter, fits=fits)


def _follow(fit: Fit, pairs: Seen) -> Fit:
    """Prompts all of one length do not tell overhead from slope; the overhead is then taken as it was."""
    lengths = [n for n, _ in pairs]
    if max(lengths) >= 1.2 * min(lengths):
        return fit.refit(pairs)
    slope = sum((tokens - fit.overhead) / n for n, tokens in pairs) / len(pairs)
    return Fit(fit.overhead, slope) if slope >= LEAST_TOKENS_PER_UNIT else fit
