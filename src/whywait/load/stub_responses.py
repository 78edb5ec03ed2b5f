"""The stub's answers in the dialect of /v1/responses: typed events, usage in the last of them."""

from __future__ import annotations

from typing import Any

import orjson

from whywait.load.stub_plan import STAMP, Writer


class ResponsesWriter(Writer):
    """The same timetable in other words. There are no token counts per event in this dialect."""

    @property
    def _id(self) -> str:
        return f"resp_{self.serial}"

    def content(self, tokens: int, reasoning: bool, chunked: bool) -> bytes:
        kind = "response.reasoning_text.delta" if reasoning else "response.output_text.delta"
        event = {"type": kind, "item_id": "msg", "output_index": 0, "content_index": 0, "delta": " tok" * tokens}
        text = orjson.dumps(event)[:-1].replace(b"%", b"%%")
        out = b'event: %b\ndata: %b,"stub_ns":%%d,"due_ns":%%d,"stub_n":%%9d}\n\n' % (kind.encode(), text)
        return b"%x\r\n%b\r\n" % (len(out % (STAMP, STAMP, 0)), out) if chunked else out

    def role(self, accepted_ns: int) -> bytes:
        opening = typed("response.created", response=self._response("in_progress"), accepted_ns=accepted_ns)
        return opening + typed("response.output_item.added", output_index=0, item={"type": "message"})

    def finish(self) -> bytes:
        return typed("response.output_text.done", text="")

    def trailer(self) -> bytes:
        done = self._response("incomplete" if self.ask.finish == "length" else "completed")
        return b"" if self.ask.fault == "no_done" else typed(f"response.{done['status']}", response=done)

    def whole(self, stub_ns: int, due_ns: int) -> bytes:
        done = self._response("incomplete" if self.ask.finish == "length" else "completed")
        text = [{"type": "output_text", "text": " tok" * self.ask.tokens}]
        done["output"] = [{"type": "message", "role": "assistant", "content": text}]
        return orjson.dumps({**done, "stub_ns": stub_ns, "due_ns": due_ns})

    def _response(self, status: str) -> dict[str, Any]:
        out: dict[str, Any] = {"id": self._id, "object": "response", "status": status, "model": self.ask.model,
                               "output": [], "error": None, "incomplete_details": None}  # fmt: skip
        if status == "incomplete":
            out["incomplete_details"] = {"reason": "max_output_tokens"}
        if status != "in_progress" and self.ask.fault != "no_usage":
            said = self.usage()
            out["usage"] = {
                "input_tokens": said["prompt_tokens"],
                "output_tokens": said["completion_tokens"],
                "total_tokens": said["total_tokens"],
                "input_tokens_details": said["prompt_tokens_details"],
                "output_tokens_details": said["completion_tokens_details"],
            }
        return out


def typed(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **more}))
