"""What a service lets us measure, found out by its pages and two single streams of a few tokens. No load.

Each line is an :class:`~whywait.core.ability.Ability`. Metrics are read elsewhere (``probe/abilities_engine.py``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from whywait.core.ability import Ability
from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.core.schedule import Workload
from whywait.errors import WhywaitError
from whywait.load.preflight import Target
from whywait.load.tokens import text_counter
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.endpoint import Endpoint, get
from whywait.units import NS_PER_MS, NS_PER_S, ms, plain

TOKENS = 16  # of each of the two answers
#: Response headers that only something between the service and us writes.
BETWEEN = ("via", "x-served-by", "x-cache", "cf-ray", "x-envoy-upstream-service-time", "x-kong-proxy-latency",
           "x-amz-cf-id", "x-amzn-requestid", "x-amzn-trace-id", "x-litellm-version", "x-forwarded-server",
           "x-azure-ref", "fly-request-id")  # fmt: skip
FRONTS = (
    "nginx",
    "envoy",
    "istio-envoy",
    "cloudflare",
    "haproxy",
    "traefik",
    "caddy",
    "apache",
    "awselb",
    "kong",
    "openresty",
)
STAGES = ("engine_queue_ms", "engine_prefill_ms", "engine_decode_ms", "engine_ttft_ms")
ASK_TOKENS: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True,
}  # fmt: skip
LATE_MS = 1.0  # of our reads after the kernel's stamps: beyond it, chunks may have met in our own queue
CLOCK_S = 1.0  # a Date header counts whole seconds, and some servers make it only once a second


@dataclass
class Seen:
    """One stream: ``facts`` as in the requests table, ``chunks`` (kind bits, tokens) and what the client noted."""

    facts: dict[str, Any] = field(default_factory=dict)
    times: list[int] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        if isinstance(e, Sent):
            self.facts["sent_ns"] = e.t_ns
        elif isinstance(e, (Finished, Failed)):
            self.facts.update(e.facts, end_ns=e.t_ns)

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:  # noqa: ARG002
        self.times.append(t_ns)

    @property
    def ok(self) -> bool:
        return self.facts.get("outcome") == "ok"


def stream(target: Target, workload: Workload, more: Mapping[str, Any] | None = None) -> Seen:
    """One stream of a few tokens, by the measuring client; with body fields on top of the usual ones."""
    options = {**target.options(workload, True), **(more or {})}
    body = target.body("Count from one to ten in words.", TOKENS, options)
    seen, clock = Seen(), Clock()
    client = Client(target.endpoint, seen, clock)
    try:
        client.send(Call(0, 0, clock.now(), body, True, round(workload.timeout_s * NS_PER_S)))
        while client.in_flight:
            client.poll(100 * NS_PER_MS)
        seen.client = client.facts()
    finally:
        client.close()
    return seen


def of_service(target: Target, first: Seen) -> Iterator[Ability]:
    """Who answers, and how it is reached; ``first`` is the stream that was sent."""
    e = target.endpoint
    f = first.facts
    if not first.ok:
        why = f"a stream of {TOKENS} tokens ended as {f.get('outcome')} ({f.get('detail') or f.get('status')})"
        yield Ability(
            "stream", "cannot", why, "everything", "see the service's log; --model, --api-key-file, --dialect"
        )
        return
    ttft = (f["first_ns"] - f["sent_ns"]) / NS_PER_MS if f.get("first_ns") is not None else None
    yield Ability(
        "stream",
        "can" if f.get("content_chunks") else "cannot",
        f"{f.get('content_chunks') or 0} content chunks of model {target.model}, first token after {ms(ttft)}",
        "TTFT, TPOT, ITL, end to end",
    )
    yield _load_allowed(e)
    yield _limits(target)
    yield from _tokens(target, first)
    yield _stages(target, f)
    yield _cached(f)
    yield _lengths(target, f)
    yield _path(target, first)
    yield _buffering(first)
    yield _clock_offset(e)


def engine(target: Target) -> Ability:
    """Which engine, in which version."""
    t, serves = target.engine, "which metrics, flags and fields are known by name"
    if t is None:
        hint = "--metrics-url URL of the engine's own page, or --engine-file FILE for another engine (docs/engines.md)"
        return Ability(
            "engine", "unknown", "neither metrics, headers nor model list tell which engine it is", serves, hint
        )
    version = version_of(target)
    what = f"{t.title} {version}" if version else f"{t.title}, version not told"
    if target.simulated:
        return Ability("engine", "partly", f"{what}, simulated by whywait: its times are modelled", serves)
    note = "" if t.driven else " (its table follows the documentation and was not tried on the real engine)"
    return Ability("engine", "can", what + note, serves)


def version_of(target: Target) -> str:
    """The engine's version by its own page; '' where it has none."""
    for path, key in target.engine.version_pages if target.engine else ():
        try:
            status, _, body = get(target.endpoint, target.endpoint.root + path)
            found = orjson.loads(body).get(key) if status == 200 else None
        except (WhywaitError, orjson.JSONDecodeError, AttributeError):
            continue
        if isinstance(found, (str, int, float)) and str(found):
            return plain(str(found))[:60]
    return ""


def _load_allowed(e: Endpoint) -> Ability:
    serves = "concurrency above one: queue, batching, throughput, knee"
    if e.loopback:
        return Ability("load", "can", "the service is on this machine: it may be loaded", serves)
    return Ability(
        "load",
        "cannot",
        f"{e.netloc} is not this machine: single streams only",
        serves,
        "--load, if you may load that service; whywait watch and probe need none",
    )


def _limits(target: Target) -> Ability:
    """What the engine says of its own limits."""
    serves = "slot limit: whether requests queue behind a limit that a flag would raise"
    slots, context = target.limits.get("slots"), target.limits.get("ctx_per_slot")
    told = [f"{slots} requests at once" if slots else "", f"context of {context:,} tokens" if context else ""]
    seen = ", ".join(filter(None, told))
    if slots:
        return Ability("limits", "can", seen, serves)
    flag = target.engine.flags.get("slots", "") if target.engine else ""
    hint = f"--launch COMMAND with {flag}: then the limit is known" if flag else ""
    return Ability(
        "limits",
        "partly" if seen else "cannot",
        f"{seen or 'none told'}; not how many it works on at once",
        serves,
        hint,
    )


def _tokens(target: Target, first: Seen) -> Iterator[Ability]:
    """Whether the service counts its tokens: of the answer, and of each chunk (which may have to be asked for)."""
    f = first.facts
    n, chunks = f.get("output_tokens"), f.get("content_chunks")
    serves = "tokens/s, TPOT, goodput in tokens; a chunk is not a token"
    if n:
        yield Ability("usage", "can", f"the answer says its tokens: {f.get('prompt_tokens')} in, {n} out", serves)
    else:
        yield Ability(
            "usage",
            "cannot",
            "the answer does not say its tokens (no usage, though include_usage was asked)",
            serves,
            "a gateway may drop it: ask the engine directly; or --no-stream",
        )
    serves = "TPOT as one figure and not an interval; ITL"
    if f.get("first_chunk_tokens") is not None:
        yield Ability("tokens-per-chunk", "can", "the service says the tokens of each chunk unasked", serves)
        return
    fields, after = _asked(target)
    told = after is not None and after.ok and after.facts.get("first_chunk_tokens") is not None
    ask = f"--body '{json.dumps(fields)}' (it costs the engine a little)"
    if n and n == chunks:
        extra = "; asked for, it says them" if told else ""
        yield Ability(
            "tokens-per-chunk",
            "can",
            f"inferred, one each: {n} tokens in {chunks} chunks{extra}",
            serves,
            ask if told else "",
        )
    elif told:
        yield Ability(
            "tokens-per-chunk",
            "partly",
            f"{n} tokens came in {chunks} chunks; it says them only when asked",
            serves,
            ask,
        )
    else:
        why = "it refuses the question" if after is not None and not after.ok else "it does not say them when asked"
        yield Ability("tokens-per-chunk", "cannot", f"{n or 'unknown'} tokens came in {chunks} chunks; {why}", serves)


def _asked(target: Target) -> tuple[dict[str, Any], Seen | None]:
    """The second stream, with every way of asking for token counts that the engine is known to have."""
    if target.endpoint.dialect == "responses":
        return {}, None
    fields = dict(target.engine.per_token_body) if target.engine and target.engine.per_token_body else ASK_TOKENS
    return fields, stream(target, Workload(), fields)


def _stages(target: Target, f: dict[str, Any]) -> Ability:
    serves = "queue, prefill and decode of each request, measured by the engine itself"
    there = [name.removeprefix("engine_").removesuffix("_ms") for name in STAGES if f.get(name) is not None]
    flags = target.engine.flags if target.engine else {}
    hint = flags.get("request_metrics", "")
    spans = target.engine is None or "traces" in flags
    enable = "; or ".join(filter(None, (f"start it with {hint}" if hint else "", "its spans: see traces" * spans)))
    if there:
        state = "can" if {"queue", "prefill"} <= set(there) else "partly"
        return Ability(
            "request-stages", state, f"with each answer: {', '.join(there)}", serves, "" if state == "can" else enable
        )
    return Ability(
        "request-stages",
        "cannot",
        "the answer says nothing of its stages; they are inferred or unknown",
        serves,
        enable,
    )


def _cached(f: dict[str, Any]) -> Ability:
    serves = "which prompt tokens were read from the prefix cache"
    if f.get("cached_tokens") is not None:
        return Ability("cached-tokens", "can", "the answer says them", serves)
    return Ability(
        "cached-tokens",
        "cannot",
        "the answer does not say them",
        serves,
        "vLLM: --enable-prompt-tokens-details; else by the engine's counters",
    )


def _lengths(target: Target, f: dict[str, Any]) -> Ability:
    serves = "prompts of exactly the length asked for"
    try:
        counter = text_counter(target)
    except WhywaitError as exc:
        return Ability("prompt-lengths", "partly", exc.message, serves, exc.hint)
    if counter is not None:
        how = "the tokenizer given" if target.tokenizer else "the service's own /tokenize"
        return Ability("prompt-lengths", "can", f"counted by {how}", serves)
    if f.get("prompt_tokens"):
        return Ability(
            "prompt-lengths",
            "partly",
            "learnt from the usage of a few short requests: some percent off",
            serves,
            "--tokenizer PATH (extra tokenizer)",
        )
    return Ability(
        "prompt-lengths", "cannot", "guessed: nobody counts the prompt", serves, "--tokenizer PATH (extra tokenizer)"
    )


def _path(target: Target, first: Seen) -> Ability:
    """Who stands between, by what only go-betweens write; one that writes nothing is not seen."""
    e, serves = target.endpoint, "whether times are the service's own, or also a go-between's"
    rtt = first.facts.get("rtt_ns")
    far = f"round trip {ms(rtt / NS_PER_MS)}" if rtt else "round trip not told"
    if e.proxy:
        return Ability(
            "path", "partly", f"{e.proxy.name} is between; {far}", serves, "--proxy none, if there is a way around"
        )
    try:
        _, headers, _ = get(e, f"{e.base}/models")
    except WhywaitError:
        headers = {}
    server = headers.get("server", "").lower()
    found = [name for name in BETWEEN if name in headers]
    found += [f"server: {plain(server)[:40]}" for front in FRONTS if server.startswith(front)][:1]
    if found:
        return Ability(
            "path",
            "partly",
            f"a go-between answers ({', '.join(found)}); {far}",
            serves,
            "measure the engine's own port too, and compare: what differs is the go-between's",
        )
    return Ability("path", "can", f"no go-between shows itself; {far}", serves)


def _buffering(first: Seen) -> Ability:
    serves = "gaps between tokens: chunks that come together have no gap of their own"
    chunks, together = first.client.get("chunks") or 0, first.client.get("coalesced_chunks") or 0
    if chunks < 4:
        return Ability("chunks-apart", "unknown", f"only {chunks} chunks were seen", serves)
    if together * 2 > chunks:
        seen = f"{together} of {chunks} chunks came several at once"
        lag = (first.client.get("read_lag_ms") or {}).get("p99")
        if lag is not None and lag > LATE_MS:
            why = f"{seen}, but this client was late itself ({ms(lag)} after the kernel)"
            return Ability("chunks-apart", "unknown", why, serves, "look again when this machine is quiet")
        hint = "proxy_buffering off (nginx), X-Accel-Buffering: no; or measure the engine's own port"
        return Ability("chunks-apart", "cannot", f"{seen}: something buffers", serves, hint)
    return Ability("chunks-apart", "can", f"{chunks - together} of {chunks} chunks came one by one", serves)


def _clock_offset(e: Endpoint) -> Ability:
    """By the Date header: the time there lies between what it says and two seconds later."""
    name, serves = "clock-offset", "nothing: no figure uses the difference of two machines' clocks"
    if e.loopback:
        return Ability(name, "can", "the service is on this machine: one clock", serves)
    before = time.time()
    try:
        _, headers, _ = get(e, f"{e.base}/models")
        there = parsedate_to_datetime(headers["date"]).timestamp() + CLOCK_S
    except (WhywaitError, KeyError, ValueError, TypeError):
        return Ability(name, "unknown", "the service does not say its time (no Date header)", serves)
    after = time.time()
    offset, error = there - (before + after) / 2, CLOCK_S + (after - before) / 2
    if abs(offset) <= error:
        return Ability(name, "can", f"its clock agrees with ours to within {error:.1f} s (by its Date header)", serves)
    return Ability(
        name,
        "partly",
        f"its clock is {offset:+.1f} ± {error:.1f} s from ours (by its Date header)",
        serves,
        "chronyc tracking on both machines, before you lay logs side by side",
    )
