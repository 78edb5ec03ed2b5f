"""The lab with the real embedded engine: on random weights always, on the real model where it is in the cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.processes import gone
from whywait.errors import EngineDied, UsageError
from whywait.lab import ask, control, cpus, launch, models, places, state
from whywait.lab.settings import Settings

pytestmark = pytest.mark.engine
pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")

SRC = Path(__file__).resolve().parents[1] / "src"
USERS_CACHE = places.cache_dir()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.cached_synthetic("tiny", tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WHYWAIT_CACHE", str(tmp_path / "cache"))


def post(engine: state.Engine, path: str, **body) -> dict:
    request = urllib.request.Request(engine.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def chat(engine: state.Engine, **body) -> dict:
    messages = [{"role": "user", "content": "Tell me about the sea and the land."}]
    return post(engine, "/v1/chat/completions", messages=messages, temperature=0, **body)


def test_an_engine_starts_answers_and_leaves_nothing(tiny):
    engine_cpus, _ = cpus.cpu_split()
    settings = Settings(model=str(tiny), slots=3, ctx_per_slot=500, cpus=engine_cpus, threads=1)
    with launch.launched(lambda: launch.start_embedded(settings)) as engine:
        assert engine.url.startswith("http://127.0.0.1:")
        assert (engine.model, engine.model_path) == ("synthetic-tiny-1", str(tiny))
        assert (engine.slots, engine.max_num_seqs, engine.threads) == (3, 3, 1)
        assert (engine.ctx_per_slot, engine.kv_tokens) == (512, 3 * 512)  # rounded up, and said so
        if engine_cpus:
            assert os.sched_getaffinity(engine.pid) == set(engine_cpus)
        answer = chat(engine, max_tokens=40)
        assert answer["usage"]["completion_tokens"] == 40
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"].isascii()
        slots = ask.get_json(engine.url, "/slots")
        assert [s["n_ctx"] for s in slots] == [512] * 3
        assert not any(s["is_processing"] for s in slots)
        status, metrics = ask.get(engine.url, "/metrics")
        assert status == 200
        assert b"llamacpp:tokens_predicted_total 40" in metrics
        assert ask.first_model(engine.url).name == engine.model
        assert state.running() == [engine]
    assert gone(engine.pid, 0)
    assert state.running() == []
    assert "ending on SIGTERM" in Path(engine.log).read_text()


def test_settings_reach_the_engine(tiny, tmp_path):
    settings = Settings(
        model=str(tiny), name="my-model", slots=2, ctx_per_slot=256, kv_unified=True, cache_type_k="q8_0",
        cache_type_v="q8_0", slot_save_path=str(tmp_path), extra={"n_predict": 7},
    )  # fmt: skip
    with launch.launched(lambda: launch.start_embedded(settings)) as engine:
        assert engine.model == "my-model"
        assert (engine.ctx_per_slot, engine.kv_tokens) == (512, 512)  # one pool, which any slot may fill
        assert chat(engine, id_slot=0)["usage"]["completion_tokens"] == 7
        assert post(engine, "/slots/0?action=save", filename="kv")["n_saved"] > 0
        assert (tmp_path / "kv").stat().st_size > 0


def test_every_stream_is_seen_by_the_queue_gauge(tiny):
    """llama.cpp's default pool of HTTP threads would hide most of the waiting ones, and keep /metrics waiting too."""
    import http.client

    with launch.launched(
        lambda: launch.start_embedded(Settings(model=str(tiny), slots=1, ctx_per_slot=8192))
    ) as engine:
        host = engine.url.removeprefix("http://")
        body = json.dumps({"prompt": "the sea", "max_tokens": 8000, "stream": True, "temperature": 0})
        connections = []
        for _ in range(60):
            connection = http.client.HTTPConnection(host, timeout=30)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            connections.append(connection)
        time.sleep(0.3)
        began = time.monotonic()
        metrics = ask.get(engine.url, "/metrics")[1].decode()
        assert time.monotonic() - began < 2
        waiting = next(
            int(line.split()[1]) for line in metrics.splitlines() if line.startswith("llamacpp:requests_deferred ")
        )
        assert waiting >= 50
        for connection in connections:
            connection.close()


def test_a_broken_model_is_an_engine_that_died(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(EngineDied) as err:
        launch.start_embedded(Settings(model=str(broken)))
    assert "failed to load model" in err.value.message
    assert "Traceback" not in err.value.message
    assert state.running() == []


def test_an_unknown_engine_setting_or_a_taken_port_is_an_engine_that_died(tiny):
    with pytest.raises(EngineDied, match="no_such_field"):
        launch.start_embedded(Settings(model=str(tiny), extra={"no_such_field": 1}))
    with launch.launched(lambda: launch.start_embedded(Settings(model=str(tiny)))) as engine:
        taken = int(engine.url.rsplit(":", 1)[1])
        with pytest.raises((EngineDied, UsageError)):
            launch.start_embedded(Settings(model=str(tiny), port=taken))
        assert ask.ready(engine.url)


PARENT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
from whywait.lab import launch
from whywait.lab.settings import Settings
with launch.launched(lambda: launch.start_embedded(Settings(model=sys.argv[1]))) as engine:
    print(engine.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_engine_ends_whatever_ends_us(tiny, signum):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny)],
        env={**os.environ, "PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signum)
    parent.wait(15)
    parent.stdout.close()
    assert gone(pid)
    assert state.running() == []


def test_a_detached_engine_outlives_its_starter_until_it_is_stopped(tiny):
    code = "import sys; from whywait.lab import control; from whywait.lab.settings import Settings;" \
           "print(control.engine_start('kept', Settings(model=sys.argv[1]))['pid'])"  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code, str(tiny)], env=env, capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    try:
        time.sleep(1.2)  # longer than the engine looks for its parent
        status = control.engine_status("kept")
        assert (status["pid"], status["running"], status["healthy"]) == (pid, True, True)
        assert [e["name"] for e in control.engine_list()] == ["kept"]
        with pytest.raises(UsageError, match="runs already"):
            control.engine_start("kept", Settings(model=str(tiny)))
    finally:
        stopped = control.engine_stop("kept")
    assert not stopped["running"]
    assert gone(pid, 2)
    assert control.engine_list() == []


def test_the_real_model_speaks(tmp_path, monkeypatch):
    files = [USERS_CACHE / "models" / name for name in (models.FAST_NAME, models.GGUF_NAME)]
    path = next((p for p in files if p.is_file()), None)
    if path is None:
        pytest.skip("the model is not in the cache; `whywait engine start` puts it there")
    settings = Settings(model=str(path), cpus=cpus.cpu_split()[0])
    with launch.launched(lambda: launch.start_embedded(settings)) as engine:
        assert engine.kv_tokens == 4 * 2048
        answer = chat(engine, max_tokens=24)
        assert answer["usage"]["completion_tokens"] == 24
        assert len(answer["choices"][0]["message"]["content"].split()) > 8
        cut = chat(engine, max_tokens=60, ignore_eos=True)
        assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (60, "length")
    assert gone(engine.pid, 0)
