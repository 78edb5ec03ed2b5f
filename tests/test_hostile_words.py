"""Words of a service that mean harm: nested, endless, echoing a key; and tables that are unusual and whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from tests.analysis_runs import make_run
from tests.hostile import DONE, EVENT, SSE, Peer, Service
from whywait.app import options_of
from whywait.core import parquet, secrets
from whywait.core.columns import TABLES
from whywait.core.table import Table
from whywait.errors import WhywaitError
from whywait.net import outcome
from whywait.net.dialect import ChatAnswer, ResponsesAnswer
from whywait.probe import promql
from whywait.session import KEPT

KEY = "sk-" + "k" * 60


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(secrets, "_forms", [])
    secrets.hide(KEY)
    return KEY


@pytest.mark.parametrize("answer", [ChatAnswer, ResponsesAnswer])
def test_reasons_nested_beyond_measure_have_a_name(answer: type[ChatAnswer] | type[ResponsesAnswer]) -> None:
    deep = orjson.loads(b"[" * 900 + b"]" * 900)
    a = answer()
    if isinstance(a, ChatAnswer):
        a.read({"choices": [{"index": 0, "delta": {}, "finish_reason": deep}]})
        assert a.finish_reason == "list"
        a.whole(b'{"error":' + b"[" * 900 + b"]" * 900 + b"}")
    else:
        a.read({"type": "response.failed", "response": {"status": "failed", "error": deep}})
    assert a.error == {"message": "list"}


def test_a_key_is_cut_out_before_its_end_is_cut_off(key: str) -> None:
    a = ChatAnswer()
    a.read({"choices": [{"index": 0, "delta": {}, "finish_reason": f"no: {key}"}]})
    assert a.finish_reason == f"no: {secrets.MASK}"
    where = "https://other/" + "a" * 160 + key
    r = SimpleNamespace(headers={"location": where})
    assert "kkk" not in outcome._leads_to(r)  # type: ignore[arg-type]


def test_token_ids_of_many_choices_are_read_in_one_go() -> None:
    """Each is appended, not all of them copied for each: sixty thousand took half a minute."""
    a = ChatAnswer()
    choices = [{"index": i, "delta": {"content": "x"}, "token_ids": [i, i]} for i in range(60_000)]
    a.read({"choices": choices})
    assert a.events == [(2, 120_000)]


def test_what_came_while_we_stood_still_is_no_timeout() -> None:
    """In a process of its own, stopped until the deadline of what it asked is long over."""
    code = """
import sys
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.endpoint import parse_url
class Sink:
    def event(self, e):
        if hasattr(e, "facts"): print(e.facts["outcome"], flush=True)
    def chunk(self, *a): pass
clock = Clock(); client = Client(parse_url(sys.argv[1]), Sink(), clock)
client.send(Call(0, 0, clock.now(), b"{}", timeout_ns=1_000_000_000))
print("sent", flush=True)
while not client.poll(5_000_000_000): pass
"""
    asked, answer_now = threading.Event(), threading.Event()

    def answer(peer: Peer) -> None:
        asked.set()
        answer_now.wait(20)
        data = EVENT + DONE
        peer.say(SSE + b"Content-Length: %d\r\n\r\n" % len(data) + data)

    with Service({"/v1/chat/completions": answer}) as service:
        p = subprocess.Popen([sys.executable, "-c", code, service.url + "/v1"], stdout=subprocess.PIPE, text=True)
        assert p.stdout is not None
        assert p.stdout.readline() == "sent\n"
        assert asked.wait(10)
        os.kill(p.pid, signal.SIGSTOP)
        answer_now.set()
        time.sleep(1.5)
        os.kill(p.pid, signal.SIGCONT)
        assert p.stdout.read() == "ok\n"
        p.wait(10)
        p.stdout.close()


def test_a_resumed_run_takes_from_the_first_what_is_kept_and_no_leave_to_load(tmp_path: Path) -> None:
    said = {"url": "http://192.0.2.1:8000", "model": "m", "single_stream_ok": True, "load_ok": True, "nonsense": 1}
    journey = {"options": said, "loads": [{"mode": "concurrency", "target": 1, "requests": 1}]}
    make_run([{"sent_ns": 0}], journey=journey, workload={}).save(tmp_path / "run")
    options = options_of(tmp_path / "run")
    assert (options.url, options.model) == ("http://192.0.2.1:8000", "m")
    assert (options.single_stream_ok, options.load_ok) == (False, False)
    assert not {"single_stream_ok", "load_ok", "reach", "command"} & set(KEPT)


def test_a_token_that_a_prometheus_echoes_is_cut_out_whole(key: str) -> None:
    said = orjson.dumps({"status": "error", "error": "x" * 280 + key})
    with pytest.raises(WhywaitError) as told:
        promql._data(said, 400, "http://p")
    assert "kkk" not in told.value.message
    assert "xxx" in told.value.message


def test_a_table_that_shrinks_beyond_measure_and_is_ours_is_read(tmp_path: Path) -> None:
    """Thousands of chunks of one read are alike."""
    n = 3 << 20
    t = np.repeat(np.arange(n // 4096, dtype=np.int64) * 1_000_000, 4096)
    columns = {"id": np.zeros(n, np.int64), "t_ns": t, "t_low_ns": t - 5.0, "kind": np.full(n, 2, np.int8),
               "tokens": np.ones(n), "clock": np.zeros(n, np.int8)}  # fmt: skip
    table = Table("chunks", columns)
    table.save(tmp_path / "chunks.parquet")
    assert n > 40 * (tmp_path / "chunks.parquet").stat().st_size
    assert Table.load("chunks", tmp_path / "chunks.parquet") == table


@pytest.mark.parametrize(
    ("values", "why"),
    [([1.0, 2.0], ""), ([1.5, 2.0], "holds no whole numbers"), ([1.0, None], "may not be null|null"),
     ([True, False], "holds no numbers")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "bool"])
def test_whole_numbers_of_other_writers(values: list[float], why: str, kind: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("arro3.core")
    aio = pytest.importorskip("arro3.io")
    if (kind == "bool") != isinstance(values[0], bool) or (kind == "int8" and why):
        pytest.skip("no such values")
    types = {"float32": arrow.DataType.float32, "float64": arrow.DataType.float64, "int8": arrow.DataType.int8,
             "bool": arrow.DataType.bool}  # fmt: skip
    made = [int(v) for v in values] if kind == "int8" else values
    column = arrow.Array(made, types[kind]())
    aio.write_parquet(arrow.Table.from_pydict({"id": column}), str(tmp_path / "t.parquet"))
    spec = [c for c in TABLES["chunks"] if c.name == "id"]
    for packs in (False, True):
        if why:
            with pytest.raises(ValueError, match=why):
                parquet.read(tmp_path / "t.parquet", spec, packs)
        else:
            found = parquet.read(tmp_path / "t.parquet", spec, packs)["id"]
            assert (found.dtype, np.asarray(found).tolist()) == (np.int64, [1, 2])
