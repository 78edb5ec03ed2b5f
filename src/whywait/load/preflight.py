"""Before any load: is it there, is it an OpenAI-compatible stream, which model and engine, what can be read beside it.

Everything here is single requests. Each thing that can be wrong ends in one error that says whose fault it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import orjson

from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.core.run import SIMULATED_SERVICE
from whywait.core.schedule import Workload
from whywait.core.secrets import clean
from whywait.engines import EngineTable, detect, metrics_paths
from whywait.errors import NotAnEndpoint, ServiceError, Unauthorized, Unreachable, UsageError, WhywaitError, WrongModel
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.dialect import request_body
from whywait.net.endpoint import Endpoint, get, post, raise_for
from whywait.net.outcome import REDIRECTS
from whywait.physics.models import describe
from whywait.units import NS_PER_S

MAX_REDIRECTS = 5
UNREAD = "engine metrics are not readable"
SIMULATED = "whywait_sim_info{"  # on the metrics page of whywait serve-sim


@dataclass(frozen=True)
class Target:
    """A service that was found to answer. ``limits``: slots, ctx_per_slot, … where it says; absent means unknown."""

    endpoint: Endpoint
    model: str
    models: tuple[str, ...] = ()
    engine: EngineTable | None = None
    metrics_urls: tuple[str, ...] = ()
    slots_url: str | None = None
    limits: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # the user's own body fields
    tokenizer: str = ""  # a file or folder of the user's, for lengths that the service does not count itself
    notes: tuple[dict[str, str], ...] = ()
    simulated: bool = False  # it says so itself: this machine's cores and devices are not what it works with

    def options(
        self, workload: Workload, stream: bool, unique: str = "whywait", shares: bool = False
    ) -> dict[str, Any]:
        """Body fields of a request under this workload; ``unique`` keeps a cold one apart from all others. One that
        ``shares`` its beginning with others of the run keeps the cache, under the name they have in common."""
        out: dict[str, Any] = {"stream": stream, "temperature": workload.temperature}
        if stream:
            out["stream_options"] = {"include_usage": True}
        if self.engine is not None:
            out.update(self.engine.extra_body)
            if workload.cache == "cold":
                switches = {k: unique if v == "{unique}" else v for k, v in self.engine.no_cache_body.items()}
                out.update({k: v for k, v in switches.items() if v == unique or not shares})
            if workload.ignore_eos and self.engine.ignore_eos:
                out["ignore_eos"] = True
        return {**out, **self.extra}

    def body(self, prompt: str, max_tokens: int, options: dict[str, Any]) -> bytes:
        return request_body(self.endpoint.dialect, self.model, prompt, max_tokens, options)


def find(endpoint: Endpoint, model: str | None) -> Target:
    """Ask the service what it is; passive pages only.

    Raises:
        Unreachable, Unauthorized, NotAnEndpoint, WrongModel: see ``whywait.errors``.
    """
    endpoint, (status, headers, body) = _listing(endpoint)
    raise_for_auth(status, endpoint)
    models, listing = _models(body) if status == 200 else ((), None)
    if status == 200 and listing is None and b"<html" in body[:2000].lower():
        raise NotAnEndpoint(
            f"{endpoint.url} answers a web page, not an API", "give the API's base URL, such as http://host:8000"
        )
    at, text = metrics_page(endpoint)
    engine = detect(text, headers, listing)
    target = Target(endpoint, _choose(model, models, endpoint), models, engine)
    if text and detect(metrics_text=text) is not None:
        target = dataclasses.replace(target, metrics_urls=(endpoint.page(endpoint.root + at),))
    else:
        why, next_ = "no /metrics page answers", "give the page with --metrics-url, if there is one"
        if text:
            why, next_ = "its /metrics page is of no engine whywait knows", "describe the engine: --engine-file"
        what = engine.flags.get("metrics", "") if engine else ""
        target = _note(target, UNREAD, why, f"start it with {what}" if what else next_)
    if text and SIMULATED in text:
        target = _note(dataclasses.replace(target, simulated=True), SIMULATED_SERVICE,
                       "all its times are modelled, not measured", "whywait simulate states their error")  # fmt: skip
    return _limits(target, listing)


def metrics_page(endpoint: Endpoint) -> tuple[str, str | None]:
    """Path and text of the engine's metrics; where no page is an engine's, the first that is there."""
    first: tuple[str, str | None] = ("", None)
    for path in metrics_paths():
        page = _page(endpoint, path)
        text = page.decode("utf-8", "replace") if page else None
        if text and detect(metrics_text=text) is not None:
            return path, text
        first = first if first[1] else (path, text)
    return first


def _listing(endpoint: Endpoint) -> tuple[Endpoint, tuple[int, dict[str, str], bytes]]:
    """The list of models, and the endpoint whose it is: a redirect to another path of the same server is followed.

    Raises:
        NotAnEndpoint: the redirect leads elsewhere. It is named and not followed: the key is not for others.
    """
    for _ in range(MAX_REDIRECTS):
        answer = get(endpoint, f"{endpoint.base}/models", timeout_s=10)
        if answer[0] not in REDIRECTS:
            return endpoint, answer
        to = urljoin(endpoint.page(f"{endpoint.base}/models"), answer[1].get("location", ""))
        parts = urlsplit(to)
        same = to.startswith(endpoint.page("/")) and not endpoint.unix
        path = parts.path.rstrip("/")
        if not same or not path.endswith("/models") or path == f"{endpoint.base}/models":
            where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.removesuffix('/models')}"
            raise NotAnEndpoint(f"{endpoint.url} redirects to {where}", f"give that URL if it is the service: {where}")
        endpoint = dataclasses.replace(endpoint, base=path.removesuffix("/models"))
    raise NotAnEndpoint(f"{endpoint.url} redirects without end", "give the API's base URL")


def aloud(endpoint: Endpoint) -> list[dict[str, str]]:
    """What about the way to the service makes the figures, or the user, less safe: said before anything is sent."""
    reach, found = endpoint.reach, []
    if reach.insecure and endpoint.scheme == "https":
        what = "the service's certificate is not checked (--insecure)"
        found.append((what, "whoever answers gets the key and the prompts", "give its authority with --ca"))
    if endpoint.unix:
        why = "a Unix socket has no kernel receive stamps"
        found.append(("times are by the client's own clock", why, "measure over TCP"))
    if endpoint.proxy:
        why = f"{endpoint.proxy.name} is between us and the service, and its delays are in the times"
        found.append(("everything goes through a proxy", why, "give --proxy none if there is a way around it"))
    if reach.lenient_eof:
        why = "an answer cut short cannot be told from a whole one"
        found.append(("streams that just end count as ok (--lenient-eof)", why, "leave --lenient-eof out"))
    return [{"what": what, "why": why, "next": next_} for what, why, next_ in found]


def raise_for_auth(status: int, endpoint: Endpoint) -> None:
    if status in (401, 403):
        raise_for(status, endpoint.netloc)


def fit_context(target: Target, workload: Workload) -> None:
    """Better said now than by every request failing, or ending short.

    Raises:
        UsageError: the fixed lengths of a class cannot fit the context the service says it has.
    """
    most = target.limits.get("ctx_per_slot")
    for c in workload.classes:
        fixed = c.prompt_tokens.kind == c.output_tokens.kind == "fixed"
        if most and fixed and c.prompt_tokens.a + c.output_tokens.a > most:
            raise UsageError(
                f"prompt {c.prompt_tokens.a:g} + output {c.output_tokens.a:g} tokens do not fit the context of {most}",
                "shorten them: --prompt-tokens, --output-tokens",
            )


def first_request(target: Target, workload: Workload, stream: bool, tokens: int = 8) -> dict[str, Any]:
    """One short request, to see that tokens come; its facts as in the requests table.

    Raises:
        Unauthorized, WrongModel, NotAnEndpoint, ServiceError: it did not work, by whose fault.
    """
    options = target.options(workload, stream)
    body = target.body("Say something about rivers.", tokens, options)
    facts = ask_once(target, body, stream, workload.timeout_s)
    outcome, status = facts["outcome"], facts.get("status")
    where = target.endpoint.netloc
    if outcome == "ok":
        count = facts.get("output_tokens")
        if not facts.get("content_chunks") and not count:
            raise NotAnEndpoint(
                f"{where} answers, but no tokens come", "does the model produce text for a plain prompt?"
            )
        return facts
    detail = facts.get("detail") or outcome
    if outcome == "refused":
        raise Unreachable(f"{where} refuses connections ({detail})", "is the service running on that port?")
    if status in (401, 403):
        raise Unauthorized(f"{where} answers {status}", "set WHYWAIT_API_KEY or give --api-key-file")
    if status in REDIRECTS:
        to = detail.partition("redirects to ")[2]
        raise NotAnEndpoint(
            f"{where} answers {status} to {target.endpoint.path}: a redirect" + (f" to {to}" if to else ""),
            "give the URL it leads to; a redirected POST is not followed, the key and the prompts are not for others",
        )
    if status == 404:
        known = f"it serves {', '.join(target.models[:5])}" if target.models else "check the URL's path and --model"
        raise WrongModel(
            f"{where} knows neither {target.endpoint.path} nor the model {target.model!r} ({detail})", known
        )
    if outcome == "protocol":
        raise NotAnEndpoint(f"{where} sends {detail}", "is this an OpenAI-compatible endpoint? try --no-stream")
    if outcome == "truncated":
        raise NotAnEndpoint(f"{where}: the stream {detail}", "a proxy may cut it; --no-stream avoids streaming")
    said = _words_of(target, body, workload.timeout_s) if outcome == "http_error" else ""
    raise ServiceError(f"{where}: the first request failed: {outcome} ({detail}){said}", "see the service's log")


def _words_of(target: Target, body: bytes, timeout_s: float) -> str:
    """The service's own words for refusing ``body``. Only for a prompt of ours: such messages may echo it."""
    try:
        _, _, answer = post(target.endpoint, target.endpoint.path, body, timeout_s)
        error = orjson.loads(answer)
        error = error.get("error", error)
        said = str(error["message"] if isinstance(error, dict) else error)
    except (WhywaitError, orjson.JSONDecodeError, AttributeError, KeyError):
        return ""
    return ": " + "".join(c if c.isprintable() else " " for c in clean(said)[:300])


class _Collect:
    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        if isinstance(e, Sent):
            self.facts["sent_ns"] = e.t_ns
        elif isinstance(e, Accepted):
            self.facts["accepted_ns"] = e.t_ns
        else:
            self.facts.update(e.facts, end_ns=e.t_ns)

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:
        pass


def ask_once(target: Target, body: bytes, stream: bool, timeout_s: float) -> dict[str, Any]:
    """One request by the measuring client; its facts, whatever the outcome."""
    clock, sink = Clock(), _Collect()
    client = Client(target.endpoint, sink, clock)
    try:
        client.send(Call(0, 0, clock.now(), body, stream, round(timeout_s * NS_PER_S)))
        while client.in_flight:
            client.poll(100_000_000)
    finally:
        client.close()
    return sink.facts


def _models(body: bytes) -> tuple[tuple[str, ...], Any]:
    try:
        listing = orjson.loads(body)
        data = listing["data"]
        return tuple(str(m["id"]) for m in data if isinstance(m, dict) and "id" in m), listing
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return (), None


def _choose(model: str | None, models: tuple[str, ...], endpoint: Endpoint) -> str:
    if model is None:
        if not models:
            raise WrongModel(f"{endpoint.netloc} does not list its models", "name one with --model")
        return models[0]
    if models and model not in models:
        # llama.cpp answers any name with the one model it has; measuring under a wrong name would mislead.
        served = ", ".join(models[:5]) + (", …" if len(models) > 5 else "")
        raise WrongModel(f"{endpoint.netloc} does not serve the model {model!r}", f"it serves {served}")
    return model


def _page(endpoint: Endpoint, path: str) -> bytes | None:
    try:
        status, _, body = get(endpoint, endpoint.root + path)
    except WhywaitError:
        return None
    return body if status == 200 else None


def _limits(target: Target, listing: Any) -> Target:
    """What the engine says of itself. llama.cpp: slots and context from /props, the model's size from /v1/models."""
    limits: dict[str, Any] = {}
    for entry in (listing or {}).get("data", ()):
        if not isinstance(entry, dict):
            continue
        if entry.get("id") == target.model and isinstance(entry.get("max_model_len"), int):  # vLLM, SGLang
            limits["ctx_per_slot"] = entry["max_model_len"]
        meta = entry.get("meta")
        if isinstance(meta, dict) and entry.get("id") == target.model:
            sizes = {"model_bytes": meta.get("size"), "model_params": meta.get("n_params")}
            limits.update({k: v for k, v in sizes.items() if isinstance(v, int) and v > 0})
        if entry.get("id") == target.model:
            limits.update(_shape(target.endpoint, entry.get("root")))
    if target.engine is not None and target.engine.slots_path:
        page = _page(target.endpoint, "/props")
        try:
            props = orjson.loads(page or b"{}")
            limits.update(_shape(target.endpoint, props.get("model_path")))
            limits["slots"] = int(props["total_slots"])
            limits["ctx_per_slot"] = int(props["default_generation_settings"]["n_ctx"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
        if _page(target.endpoint, target.engine.slots_path):
            at = target.endpoint
            target = dataclasses.replace(target, slots_url=at.page(at.root + target.engine.slots_path))
    return dataclasses.replace(target, limits=limits)


def _shape(endpoint: Endpoint, model: Any) -> dict[str, Any]:
    """``model_shape`` of a model that lies on this machine, where the engine names its file or folder; else nothing."""
    found = describe(model) if endpoint.loopback and isinstance(model, str) and model else None
    return {"model_shape": found.as_dict()} if found else {}


def _note(target: Target, what: str, why: str, next_: str) -> Target:
    return dataclasses.replace(target, notes=(*target.notes, {"what": what, "why": why, "next": next_}))
