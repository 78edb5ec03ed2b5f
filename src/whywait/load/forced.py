"""Teacher-forced scoring: what an engine's model thinks of each token of a text that it is given.

Each engine has its own way, and which one was used is said (``Way.says``):

- vLLM returns ``prompt_logprobs`` for all positions of a prompt in one request (its documentation, *Sampling
  Parameters*); that is its prefill at work.
- llama.cpp has no such thing. Each position is a request of its own for one token after the true beginning
  (``n_probs``, probabilities before sampling; the prefix cache makes it one decode step), with a bias on the sampler
  towards the true token, which its list then holds with its unbiased probability. That is its decode at work. It tells
  no probabilities where the token is a part of a character: those positions are asked again with the bias on a whole
  one and a longer list; a true token that is not even there is untold.
- SGLang's ``/generate`` has ``return_logprob`` from ``logprob_start_len`` on (its documentation, *Sampling
  Parameters*); never run here.
- Others: OpenAI's old ``echo`` with ``logprobs`` on completions, where a service still takes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from whywait.core.scored import Scored, scored
from whywait.errors import NotAnEndpoint, ServiceError
from whywait.load.given import Given
from whywait.load.preflight import Target
from whywait.net.endpoint import post, raise_for

FIRST = 8  # tokens at the start of a text that are only context: there every model guesses
BIAS = 100.0  # on the true token's logit: more than any difference between two
LONGER = 1000  # tokens of the list in which a true token is looked for that cannot be biased to
FEWER = (20, 5, 1)  # lists that services allow when they refuse longer ones
PATIENCE_S = 5.0
WIDTH = 4  # requests at once where the engine does not say how many it works on
_TRIAL = "The quick brown fox jumps over the lazy dog."


class Untold(Exception):
    """The service does not tell distributions over given text; the message says what it did instead."""


@dataclass(frozen=True)
class Row:
    """One position: natural logarithms of probabilities, of the true token (None: untold) and of the list."""

    at: int
    own: float | None
    top: dict[int, float]


@dataclass(frozen=True)
class Way:
    """How distributions are had from one service. ``k``: how long its lists are; ``each``: whether each position takes
    a request of its own, else each text does."""

    name: str
    says: str
    k: int
    each: bool = False
    slots: int | None = None
    whole: int = -1  # a token that is whole characters, by its number


@dataclass(frozen=True)
class Score:
    """A text scored: how many tokens it has, a hash of them (two tokenizers agree when it does), and the rows."""

    tokens: int
    digest: str
    scored: Scored


SAYS: Final[Mapping[str, str]] = {
    "decode": "llama.cpp: a request for one token at each position (n_probs), so its decode is what was compared",
    "prompt_logprobs": "vLLM: prompt_logprobs of a whole text in a request, so its prefill is what was compared",
    "generate": "SGLang: /generate with return_logprob over the prompt, so its prefill is what was compared",
    "echo": "completions with echo and logprobs, a whole text in a request",
}
_BY_ENGINE: Final = {"llama.cpp": "decode", "vllm": "prompt_logprobs", "sglang": "generate"}


def way_of(target: Target, k: int) -> Way:
    """The way that works on this service, found by scoring a short sentence.

    Raises:
        Untold: there is none.
    """
    name = _BY_ENGINE.get(target.engine.name if target.engine is not None else "", "echo")
    if target.simulated:
        raise Untold("it is a simulator: its answers mean nothing")
    slots = target.limits.get("slots")
    reasons = []
    for asked in [k, *(f for f in FEWER if f < k)]:
        way = Way(name, SAYS[name], asked, each=name == "decode", slots=slots)
        try:
            ids = _ids(target, way, _TRIAL)
            way = dataclasses.replace(way, whole=ids[-2] if len(ids) > 1 else -1)
            if any(row.top for row in _rows(target, way, (_TRIAL, ids), [2], (0, threading.Event()))):
                return way
            reasons.append("its answer has no probabilities")
        except (Untold, ServiceError, NotAnEndpoint) as exc:
            reasons.append(str(exc))
    raise Untold(f"{name}: {reasons[0]}")


def score(
    target: Target, way: Way, texts: Sequence[Given], each: int, context: int
) -> Generator[tuple[int, Score], None, None]:
    """(index of the text, its score) as they come; ``each`` positions a text at most, of its first ``context`` tokens.

    Closing the iterator sends nothing further.

    Raises:
        ServiceError: a request failed. Untold: an answer has not what the first one had.
    """
    stop = threading.Event()
    todo, done = queue.SimpleQueue[int](), queue.SimpleQueue[tuple[int, Score | Exception | None]]()
    for i in range(len(texts)):
        todo.put(i)

    def work(slot: int) -> None:
        with contextlib.suppress(queue.Empty):
            while not stop.is_set():
                i = todo.get_nowait()
                try:
                    done.put((i, _score(target, way, texts[i].text, (each, context, slot), stop)))
                except Exception as exc:
                    done.put((i, exc))

    # Threads of our own, that no exit waits for; and this queue, whose get a signal may interrupt at any point.
    width = min(way.slots or WIDTH, 16, max(len(texts), 1))
    threads = [threading.Thread(target=work, args=(slot,), daemon=True) for slot in range(width)]
    for thread in threads:
        thread.start()
    try:
        for _ in texts:
            i, found = done.get()
            if isinstance(found, Exception):
                raise found
            if found is not None:
                yield i, found
    finally:
        stop.set()
        until = time.monotonic() + PATIENCE_S  # for requests that are under way; a service that hangs does not hold us
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def places(tokens: int, each: int) -> list[int]:
    """Which tokens of a text are scored: evenly spread behind its beginning, at most ``each``."""
    first = min(FIRST, max(tokens // 2, 1))
    n = min(each, tokens - first)
    return sorted({first + int(i * (tokens - first) / n) for i in range(n)}) if n > 0 else []


def requests_at_most(way: Way, texts: int, each: int) -> int:
    return texts * (each + 1 if way.each else 2)


def _score(target: Target, way: Way, text: str, said: tuple[int, int, int], stop: threading.Event) -> Score | None:
    each, context, slot = said
    ids = _ids(target, way, text)
    if way.name in ("decode", "prompt_logprobs"):
        ids = ids[:context]
        rows = _rows(target, way, (text, ids), places(len(ids), each), (slot, stop))
    else:  # it counts the tokens itself, in its answer
        seen: list[int] = []
        rows = _rows(target, way, (text, seen), None, (slot, stop))
        ids = seen[:context]
        chosen = set(places(len(ids), each))
        rows = [r for r in rows if r.at in chosen]
    if stop.is_set():
        return None
    digest = hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()
    return Score(len(ids), digest, scored([(r.at, r.own, r.top) for r in rows]))


def _ids(target: Target, way: Way, text: str) -> list[int]:
    """The text's tokens by the service's own tokenizer, with what it puts at the start; [] where the answer to the
    scoring itself will tell them."""
    if way.name == "decode":
        body: dict[str, Any] = {"content": text, "add_special": True, "parse_special": False}
    elif way.name == "prompt_logprobs":
        body = {"model": target.model, "prompt": text, "add_special_tokens": True}
    else:
        return []
    found = _ask(target, target.endpoint.root + "/tokenize", body).get("tokens")
    if not isinstance(found, list) or not all(isinstance(t, int) for t in found):
        raise Untold("/tokenize does not answer with tokens")
    return found


def _rows(
    target: Target, way: Way, said: tuple[str, list[int]], at: Sequence[int] | None, run: tuple[int, threading.Event]
) -> list[Row]:
    """Rows of the positions ``at`` (None: all) of (text, tokens). A way that counts the tokens itself puts them into
    the list; ``run``: the slot to use, and what stops it."""
    text, ids = said
    if way.name == "decode":
        return list(_decoded(target, way, ids, (at or [], *run)))
    rows = _WHOLE[way.name](target, way, text, ids)
    return rows if at is None else [r for r in rows if r.at in set(at)]


def _decoded(
    target: Target, way: Way, ids: Sequence[int], said: tuple[Sequence[int], int, threading.Event]
) -> Iterator[Row]:
    at, slot, stop = said
    for i in at:
        if stop.is_set():
            return
        top = _step(target, way, ids[: i + 1], way.k, slot)
        if not top and way.whole >= 0:
            wide = _step(target, way, [*ids[:i], way.whole], LONGER, slot)
            del wide[way.whole]  # it is there by the bias, if not by itself
            top = dict(sorted(wide.items(), key=lambda t: -t[1])[: way.k])
            top |= {ids[i]: wide[ids[i]]} if ids[i] in wide else {}
        if not top:
            raise Untold("/completion answers without completion_probabilities")
        yield Row(i, top.get(ids[i]), top)


def _step(target: Target, way: Way, ids: Sequence[int], k: int, slot: int) -> dict[int, float]:
    """The list at the last of ``ids``, given those before it, and that token itself; {} where the engine tells none."""
    body: dict[str, Any] = {
        "prompt": list(ids[:-1]), "n_predict": 1, "n_probs": k, "post_sampling_probs": False, "temperature": 0,
        "cache_prompt": True, "logit_bias": [[ids[-1], BIAS]], "stream": False,
    }  # fmt: skip
    if way.slots:
        body["id_slot"] = slot
    answer = _ask(target, target.endpoint.root + "/completion", body)
    try:
        first = next(iter(answer.get("completion_probabilities") or ()), None)
        if first is None:
            return {}
        top = {int(t["id"]): float(t["logprob"]) for t in first["top_logprobs"]}
        return top | ({ids[-1]: float(first["logprob"])} if first["id"] == ids[-1] else {})
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Untold("/completion answers without completion_probabilities") from None


def _prompt_logprobs(target: Target, way: Way, _text: str, ids: list[int]) -> list[Row]:
    body = {"model": target.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": way.k}
    answer = _ask(target, f"{target.endpoint.base}/completions", body)
    try:
        told = answer["choices"][0]["prompt_logprobs"]
        tops = [{int(t): float(v["logprob"]) for t, v in (row or {}).items()} for row in told]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise Untold("it answers without prompt_logprobs") from None
    if len(tops) != len(ids):
        raise Untold(f"prompt_logprobs of {len(tops)} positions for {len(ids)} tokens")
    return [Row(i, top.get(ids[i]), top) for i, top in enumerate(tops) if top]


def _generated(target: Target, way: Way, text: str, ids: list[int]) -> list[Row]:
    body = {
        "text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True,
        "logprob_start_len": 0, "top_logprobs_num": way.k,
    }  # fmt: skip
    answer = _ask(target, target.endpoint.root + "/generate", body)
    rows = []
    try:
        meta = answer["meta_info"]
        own, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
        for i, ((logp, token, *_), top) in enumerate(zip(own, tops, strict=True)):
            ids.append(int(token))
            listed = {int(t): float(v) for v, t, *_ in top or ()}
            if logp is not None:
                rows.append(Row(i, float(logp), {**listed, int(token): float(logp)}))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Untold("/generate answers without input_token_logprobs") from None
    return rows


def _echoed(target: Target, way: Way, text: str, ids: list[int]) -> list[Row]:
    """Tokens have only their text here; a hash of it stands for a number. Two tokens of one text are one then."""
    body = {"model": target.model, "prompt": text, "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": way.k}
    answer = _ask(target, f"{target.endpoint.base}/completions", body)
    rows = []
    try:
        told = answer["choices"][0]["logprobs"]
        tokens, own, tops = told["tokens"], told["token_logprobs"], told["top_logprobs"]
        for i, (token, logp, top) in enumerate(zip(tokens, own, tops, strict=True)):
            ids.append(_number(token))
            listed = {_number(t): float(v) for t, v in (top or {}).items()}
            if logp is not None:
                rows.append(Row(i, float(logp), {**listed, _number(token): float(logp)}))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise Untold("completions do not echo the prompt with logprobs") from None
    if text == _TRIAL and _TRIAL[-8:] not in "".join(tokens):
        raise Untold("completions answer with other tokens than the prompt's")
    return rows


_WHOLE: Final[Mapping[str, Callable[[Target, Way, str, list[int]], list[Row]]]] = {
    "prompt_logprobs": _prompt_logprobs,
    "generate": _generated,
    "echo": _echoed,
}


def _number(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=7).digest(), "big")


def _ask(target: Target, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ServiceError: an HTTP error. Unreachable, NotAnEndpoint: see ``net.endpoint.post``.
    """
    e = target.endpoint
    status, _, data = post(e, path, orjson.dumps({**body, **target.extra}), e.timeout_s)
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        answer = None
    if status >= 400:
        raise_for(status, path, _message(answer))
    if not isinstance(answer, dict):
        why = "an answer larger than 8 MB was cut: lower --top or --context" if len(data) >= 8 << 20 else "not JSON"
        raise ServiceError(f"{path}: {why}", "see the service's log")
    return answer


def _message(answer: Any) -> str:
    """What a service says of its error, cut: it may quote the prompt."""
    found = answer.get("error", answer) if isinstance(answer, dict) else None
    found = found.get("message") if isinstance(found, dict) else found
    return found[:200] if isinstance(found, str) else ""
