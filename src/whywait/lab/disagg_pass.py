"""One request on its way through a split: prefill there, KV saved, carried, restored here, decode from here.

The decode engine makes the first token. The prefill engine is asked for one token, which is thrown away: what is
saved is the KV of the prompt alone; the decode engine finds all of it but the prompt's last token, which it computes
again (it needs that token's output), and goes on. So time to first token holds the whole hand-over. What the answer
says of itself is put right: ``timings`` tell prefill, queue and hand-over of the request as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns
from typing import Any, Final, Protocol

import orjson

from whywait.lab.disagg_call import Backend, Call, as_object, ask
from whywait.lab.disagg_counts import Counts
from whywait.lab.disagg_store import Link, Store
from whywait.net.loop import Loop
from whywait.net.reply import SSE, Reply, Request, error
from whywait.units import NS_PER_S

QUEUE, PREFILL, SAVE, LINK, PLACE, RESTORE, DECODE, OVER = range(8)
#: What is asked of the decode engine only.
ANSWER: Final = frozenset({
    "stream", "stream_options", "max_tokens", "max_completion_tokens", "n_predict", "timings_per_token", "n", "stop",
    "return_progress", "return_tokens", "logprobs", "top_logprobs", "n_probs", "id_slot", "ignore_eos",
})  # fmt: skip
HIGH, LOW, LOOK_NS = 1 << 20, 1 << 18, 5_000_000  # bytes a slow client may be behind; then the engine is not read


class Desk(Protocol):
    """The front, as far as a passage needs it."""

    loop: Loop
    store: Store
    counts: Counts

    def link_of(self, engine: Backend) -> Link: ...

    def changed(self, passage: Passage) -> None:
        """It came to another step, or gave something back."""
        ...

    def restored(self, engine: Backend) -> None:
        """An engine has just read KV in: the streams there stood still meanwhile."""
        ...


class Passage:
    """Steps are called by the front when their turn comes: ``prefill``, ``save``, ``restore``; the rest follows.
    Whatever ends it, ``_end`` gives back slots and file."""

    def __init__(self, desk: Desk, request: Request, reply: Reply, body: dict[str, Any]) -> None:
        self._desk, self._request, self._reply, self._body = desk, request, reply, body
        self.step, self.tokens = QUEUE, 0
        self.source: Backend | None = None
        self.target: Backend | None = None
        self.touched = False
        self._slot = self._place = -1
        self._file, self._size = "", 0
        self._call: Call | None = None
        self._gone = False
        self._at = {"arrived": monotonic_ns()}
        self._said: dict[str, Any] = {}  # of the prefill, as its engine tells
        self._status, self._stream, self._rest, self._last_ns = 0, False, b"", 0
        reply.on_gone = self.leave

    # --- steps

    def prefill(self, engine: Backend) -> None:
        self.source, self._slot = engine, engine.free.pop(0)
        self._to(PREFILL, "prefill")
        asked = {k: v for k, v in self._body.items() if k not in ANSWER}
        asked.update(max_tokens=1, stream=False, id_slot=self._slot)
        self._call = ask(self._desk.loop, engine, self._request.path, orjson.dumps(asked), self._prefilled)

    def _prefilled(self, status: int, body: bytes, reason: str) -> None:
        self._call = None
        if reason or status != 200:
            self._fail("the prefill engine", status, body, reason)
            return
        found = as_object(body)
        self._said = found.get("timings") or {}
        self.tokens = int((found.get("usage") or {}).get("prompt_tokens") or 0)
        self._to(SAVE, "prefilled")

    @property
    def unsaved(self) -> bool:
        """Its KV waits for room outside the engine."""
        return self.step == SAVE and not self._file

    def save(self) -> None:
        assert self.source is not None
        if self._desk.store.too_large(self.tokens):
            self._fail("no room for the KV of this prompt between the engines", 507, b"", "")
            return
        self._file = self._desk.store.reserve(self.tokens)
        self._slots(self.source, f"/slots/{self._slot}?action=save", self._saved)

    def _saved(self, status: int, body: bytes, reason: str) -> None:
        source = self.source
        assert source is not None
        if self._gone:
            self._end()
            return
        found = as_object(body)
        if reason or status != 200 or not isinstance(found.get("n_written"), int):
            self._lost("saved at the prefill engine", status, body, reason)
            return
        self._size = found["n_written"]
        self._desk.store.written(self._file, self.tokens, self._size)
        self._leave_source()
        self._to(LINK, "saved")
        self._desk.link_of(source).carry(self._size, self._carried)

    def _carried(self) -> None:
        if self.step == LINK:  # else the client left meanwhile
            self._to(PLACE, "carried")

    def restore(self, engine: Backend) -> None:
        self.target, self._place = engine, engine.free.pop(0)
        engine.load += 1
        self._to(RESTORE, "placed")
        self._slots(engine, f"/slots/{self._place}?action=restore", self._restored)

    def _restored(self, status: int, body: bytes, reason: str) -> None:
        desk, target = self._desk, self.target
        assert target is not None
        desk.store.remove(self._file)
        self._file = ""
        if self._gone:
            self._end()
            return
        found = as_object(body)
        if reason or status != 200 or not found.get("n_restored"):
            self._lost("restored at the decode engine", status, body, reason)
            return
        self._to(DECODE, "restored")
        parts = {"save": self._took("prefilled", "saved"), "link": self._took("saved", "carried"),
                 "wait": self._took("carried", "placed"), "restore": self._took("placed", "restored")}  # fmt: skip
        desk.counts.handed(self._took("prefilled", "restored"), self._size, parts)
        own = (found.get("timings") or {}).get("restore_ms")
        desk.counts.add("handover_blocked_seconds_total", float(own or 0) / 1e3)
        desk.restored(target)
        asked = {**self._body, "id_slot": self._place, "cache_prompt": True}
        self._call = Call(desk.loop, target, self._request.path, orjson.dumps(asked), self)

    # --- the decode engine's answer

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._stream = status == 200 and headers.get("content-type", "").startswith("text/event-stream")
        if self._stream:
            self._reply.start(200, SSE)

    def data(self, data: bytes) -> None:
        self._rest += data
        if not self._stream:
            return
        *events, self._rest = self._rest.split(b"\n\n")
        out = b"".join(self._put_right(e) + b"\n\n" for e in events)
        self._reply.write(out)
        self._gap(out)
        if self._request.conn.pending > HIGH and self._call:
            self._call.pause()
            self._desk.loop.call_at(monotonic_ns() + LOOK_NS, self._look)

    def end(self, reason: str) -> None:
        self._call = None
        if not self._stream:
            if reason or self._status != 200:
                self._fail("the decode engine", self._status, self._rest, reason)
                return
            self._reply.send(200, orjson.dumps(self._corrected(as_object(self._rest))))
        elif reason:
            said = error(f"the decode engine broke off the stream ({reason})", "upstream_error", 502)
            self._reply.end(b"data: %b\n\n" % orjson.dumps(said))
        else:
            self._reply.end(self._rest)
        self._end()

    def _look(self) -> int | None:
        if self._call is None:
            return None
        if self._request.conn.pending > LOW:
            return monotonic_ns() + LOOK_NS
        self._call.resume()
        return None

    def _gap(self, out: bytes) -> None:
        """The time since this stream's last token, if what came is one."""
        if b'"finish_reason":null' not in out:
            return
        now, before = monotonic_ns(), self._last_ns
        self._last_ns = now
        self._at.setdefault("first", now)
        if before:
            self._desk.counts.gap((now - before) / NS_PER_S, self.touched)
        self.touched = False

    def _put_right(self, event: bytes) -> bytes:
        if b'"timings"' not in event and b'"usage"' not in event:
            return event
        found = as_object(event.removeprefix(b"data:"))
        return b"data: " + orjson.dumps(self._corrected(found)) if found else event

    def _corrected(self, found: dict[str, Any]) -> dict[str, Any]:
        """What the decode engine says of the prompt is of the one token it computed again."""
        timings, usage = found.get("timings"), found.get("usage")
        said = self._said
        if isinstance(timings, dict):
            again = float(timings.get("prompt_ms") or 0)
            timings["recomputed_n"] = timings.get("prompt_n")
            timings.update({k: said[k] for k in ("prompt_n", "cache_n") if k in said})
            timings["recomputed_ms"] = again
            if "prompt_ms" in said:
                timings["prompt_ms"] = said["prompt_ms"] + again
            timings.pop("prompt_per_token_ms", None)
            timings.pop("prompt_per_second", None)
            timings["split_queue_ms"] = self._took("arrived", "prefill") * 1e3
            if "first" in self._at:
                timings["split_ttft_ms"] = self._took("arrived", "first") * 1e3
            timings["handover_ms"] = self._took("prefilled", "restored") * 1e3
            timings["handover_bytes"] = self._size
        if isinstance(usage, dict) and "cache_n" in said and isinstance(usage.get("prompt_tokens_details"), dict):
            usage["prompt_tokens_details"]["cached_tokens"] = said["cache_n"]
        return found

    # --- the ends

    def leave(self) -> None:
        """The client has gone. Work for it stops; a file that is being written or read is waited for, then removed."""
        self._gone = True
        self._desk.counts.add("cancelled_total")
        if not (self.step == RESTORE or (self.step == SAVE and self._file)):
            self._end()

    def _lost(self, where: str, status: int, body: bytes, reason: str) -> None:
        self._desk.counts.add("handover_failures_total")
        said = as_object(body).get("error")
        why = said.get("message") if isinstance(said, dict) else None
        self._fail(f"the KV could not be {where}: {why or reason or f'HTTP {status}'}", 502, b"", "")

    def _fail(self, what: str, status: int, body: bytes, reason: str) -> None:
        """Nothing of the answer was sent yet: an engine's refusal goes through as it is, the rest is ours to say."""
        if reason or not 400 <= status < 600 or not body:
            code = status if 400 <= status < 600 and not reason else 502
            said = what if not reason else f"{what} does not answer ({reason})"
            status, body = code, orjson.dumps(error(said, "upstream_error", code))
        self._reply.send(status, body)
        self._end()

    def _end(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._leave_source()
        if self._file:
            self._desk.store.remove(self._file)
            self._file = ""
        if self.target is not None and self._place >= 0:
            self.target.free.append(self._place)
            self.target.load -= 1
            self._place = -1
        self._to(OVER, "over")

    def _leave_source(self) -> None:
        if self.source is not None and self._slot >= 0:
            self.source.free.append(self._slot)
            self._slot = -1

    def _slots(self, engine: Backend, path: str, then: Any) -> None:
        ask(self._desk.loop, engine, path, orjson.dumps({"filename": self._file}), then)

    def _to(self, step: int, name: str) -> None:
        self.step = step
        self._at[name] = monotonic_ns()
        self._desk.changed(self)

    def _took(self, a: str, b: str) -> float:
        """Seconds from one mark to another."""
        return (self._at[b] - self._at[a]) / NS_PER_S


__all__ = ["DECODE", "OVER", "PLACE", "QUEUE", "SAVE", "Desk", "Passage"]
