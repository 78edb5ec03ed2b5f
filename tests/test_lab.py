"""The lab's files, logs, command lines and settings: everything that needs no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from whywait.errors import MissingExtra, UsageError
from whywait.lab import control, cpus, launch, places, state
from whywait.lab.capacity import Capacity, first_error, kv_capacity, last_lines
from whywait.lab.command import plan
from whywait.lab.settings import Settings

SRC = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WHYWAIT_CACHE", str(tmp_path / "cache"))


def some_engine(name="one", **changes) -> state.Engine:
    engine = state.Engine(
        name=name, kind="embedded", url="http://127.0.0.1:1", pid=os.getpid(), model="m", log="/nowhere",
        command=("a", "b"), start_mark=state.start_mark(os.getpid()),
    )  # fmt: skip
    return replace(engine, **changes)


# --- what logs say -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "(EngineCore pid=7) INFO 11-29 [kv_cache_utils.py:2327] CPU KV cache size: 25,088 tokens, "
            "Maximum concurrency for 2,048 tokens per request: 12.25x",
            Capacity(25088, 2048),
        ),
        ("GPU + host KV cache size: 1,000 tokens, Maximum concurrency for 500 tokens", Capacity(1000)),
        (
            "INFO GPU KV cache size: 43,088 tokens\nINFO Maximum concurrency for 8,192 tokens per request: 5.26x\n",
            Capacity(43088, 8192),
        ),
        (
            "(EngineCore_DP0 pid=1) GPU KV cache size: 100 tokens\n(EngineCore_DP1 pid=2) GPU KV cache size: 90 tokens",
            Capacity(190),
        ),
        ("(Worker_TP0) GPU KV cache size: 100 tokens\n(Worker_TP1) GPU KV cache size: 90 tokens", Capacity(90)),
        ("Maximum concurrency for 131072 tokens per request: 1.50x", Capacity(196608, 131072)),
        (
            "[t] max_total_num_tokens=171008, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            "max_running_requests=48, context_len=32768, available_gpu_mem=8.27 GB",
            Capacity(171008, 32768, 48),
        ),
        ("Allocated 12.25 GiB for max tokens in paged KV cache (100352).", Capacity(100352)),
        ("I srv load_model: n_slots = 4, n_ctx_slot = 2048, kv_unified = 'false'", Capacity(8192, 2048, 4)),
        ("I srv load_model: n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'", Capacity(8192, 8192, 4)),
        ("\x1b[36mGPU KV cache size:\x1b[0m 7 tokens", Capacity(7)),
        ("INFO: Uvicorn running", Capacity()),
        ("", Capacity()),
    ],
)  # fmt: skip
def test_kv_capacity_is_read_from_every_wording(log, expected):
    assert kv_capacity(log) == expected


def test_last_lines_are_the_last_that_say_anything(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n\n" % n for n in range(100)) + b"\x1b[31m\xffred\x1b[0m" + b"x" * 1000)
    lines = last_lines(log, 3).splitlines()
    assert lines[:2] == ["line 98", "line 99"]
    assert lines[2].startswith("�red")
    assert len(lines[2]) == 240
    assert last_lines(tmp_path / "none") == ""


VLLM_DEATH = """\
(EngineCore pid=9) WARNING 11-30 02:32:25 [system_utils.py:255] errors like `OSError: [Errno 24] Too many open files`
(EngineCore pid=9) ERROR 11-30 02:32:46 [core.py:1510]     raise ValueError(
(EngineCore pid=9) ERROR 11-30 02:32:46 [core.py:1510] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "/x/core_client.py", line 682, in __init__
    with launch_core_engines(
         ^^^^^^^^^^^^^^^^^^^^
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_first_error_is_the_cause_and_frames_are_left_out(tmp_path):
    log = tmp_path / "log"
    log.write_text(VLLM_DEATH)
    assert first_error(log) == "ValueError: No available memory for the cache blocks."
    assert [line[-12:] for line in last_lines(log, 2).splitlines()] == ["ache blocks.", "cause above."]
    assert "first error" not in launch._its_words(log)  # it is among the last lines, and twice is once too often
    log.write_text(VLLM_DEATH + "shutting down\n" * 20)
    assert launch._its_words(log).startswith("; its first error:\nValueError: No")
    assert first_error(tmp_path / "none") is None


# --- command lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("serve m", "http://127.0.0.1:8000"),
        ("serve m --port 9001 --max-num-seqs 32", "http://127.0.0.1:9001"),
        ("serve m --host 0.0.0.0 --port=9001", "http://127.0.0.1:9001"),
        ("serve m --host 10.0.0.5 --port=9001", "http://10.0.0.5:9001"),
        ("serve m --host ::1", "http://[::1]:8000"),
        ("-m sglang.launch_server --model m", "http://127.0.0.1:30000"),
        ("serve m --port nonsense", "http://127.0.0.1:8000"),
    ],
)
def test_the_port_is_read_from_the_command(words, url):
    assert plan(f"{sys.executable} {words}").url == url


def test_a_command_may_begin_with_its_environment():
    order = plan(f"A=1 B='x y' {sys.executable} serve --max_num_seqs=32", url="localhost:7/v1/")
    assert order.env == {"A": "1", "B": "x y"}
    assert (order.argv[0], order.url, order.max_num_seqs) == (sys.executable, "http://localhost:7", 32)
    assert order.program.endswith(" serve")


@pytest.mark.parametrize("cmdline", ["", "A=1", "'unclosed", "no-such-program-here serve"])
def test_a_command_that_cannot_run_is_a_usage_error(cmdline):
    with pytest.raises(UsageError) as err:
        launch.start_command(cmdline)
    assert err.value.hint


# --- CPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "siblings", "engine", "client"),
    [
        ((3,), [{3}], (3,), (3,)),
        ((0, 1), [{0}, {1}], (0,), (1,)),
        ((0, 1), [{0, 1}, {0, 1}], (0,), (1,)),
        ((0, 1, 2, 3), [{0, 2}, {1, 3}, {0, 2}, {1, 3}], (0, 2), (1, 3)),
        (tuple(range(16)), [{n} for n in range(16)], tuple(range(14)), (14, 15)),
        ((1, 5), [{0, 1}, {4, 5}], (1,), (5,)),
    ],
)
def test_engine_and_client_get_cpus_apart(allowed, siblings, engine, client):
    assert cpus.split(allowed, map(frozenset, siblings)) == (engine, client)


def test_no_pinning_where_it_cannot_help(monkeypatch):
    monkeypatch.setattr(cpus, "usable_count", lambda: 2)
    monkeypatch.setattr(cpus, "allowed_cpus", lambda: tuple(range(64)))  # a container's quota on a large host
    assert cpus.cpu_split() == ((), ())
    monkeypatch.setattr(cpus, "allowed_cpus", lambda: ())  # macOS
    assert cpus.cpu_split() == ((), ())
    assert cpus.pin(()) is False


def test_quota_and_threads(tmp_path, monkeypatch):
    assert cpus._quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert cpus._quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpus._quota(tmp_path) is None
    assert cpus.parse_cpu_list("0-2,8\n") == [0, 1, 2, 8]
    for count, threads in ((1, 1), (2, 1), (3, 1), (4, 2), (16, 8)):
        monkeypatch.setattr(cpus, "usable_count", lambda count=count: count)
        assert cpus.default_threads() == threads
    assert cpus.default_threads((0, 1, 2)) == 3


# --- state files ---------------------------------------------------------------------------------------------------


def test_running_engines_are_found_and_dead_ones_forgotten(tmp_path):
    state.save(some_engine("alive"))
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    state.save(some_engine("dead", pid=dead.pid, start_mark="123"))
    state.save(some_engine("reused", start_mark="123"))  # our own id, but another process by its start
    state.state_path("garbage").write_text('{"name": 1')
    state.state_path("foreign").write_text('["not", "ours"]')
    assert [e.name for e in state.running()] == ["alive"]
    assert state.find("alive") == some_engine("alive")
    assert [p.name for p in places.engines_dir().glob("*.json")] == ["alive.json"]


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    mark = state.start_mark(child.pid)
    until = time.monotonic() + 5
    while state.process_alive(child.pid, mark) and time.monotonic() < until:
        time.sleep(0.01)  # ended, not yet waited for
    assert not state.process_alive(child.pid, mark)
    child.wait()


def test_forgetting_one_leaves_the_next_of_the_same_name():
    state.save(some_engine("x"))
    state.forget(some_engine("x", start_mark="other"))
    assert state.find("x") is not None
    state.forget(some_engine("x"))
    assert state.find("x") is None


def test_old_logs_go_and_newer_fields_are_ignored(tmp_path):
    old = state.log_path("old")
    old.write_text("")
    os.utime(old, (1, 1))
    assert state.log_path("new").parent == old.parent
    assert not old.exists()
    state.save(some_engine("x"))
    raw = json.loads(state.state_path("x").read_text())
    state.state_path("x").write_text(json.dumps({**raw, "field_of_a_later_version": 1}))
    assert state.find("x") == some_engine("x")


@pytest.mark.parametrize("name", ["", "../x", "a b", ".x", "x" * 65])
def test_names_become_file_names(name):
    with pytest.raises(UsageError):
        state.check_name(name)


def test_moving_into_place_is_all_or_nothing(tmp_path):
    target = tmp_path / "a" / "b"
    with pytest.raises(ZeroDivisionError), places.moved_into(target) as part:
        part.write_text("half" * (1 // 0))
    assert list(target.parent.iterdir()) == []
    with places.moved_into(target) as part:
        part.write_text("whole")
    assert target.read_text() == "whole"
    assert len(list(target.parent.iterdir())) == 1


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"), places.locked(tmp_path / "file" / "x"):
        pass


# --- settings ------------------------------------------------------------------------------------------------------


def test_settings_survive_the_way_to_the_engine():
    settings = Settings(model="m", cpus=(0, 1), ctx_per_slot=300, extra={"n_predict": 5})
    assert Settings.from_dict(json.loads(settings.to_json())) == settings
    assert settings.total_ctx == 4 * 512
    assert settings.http_thread_count >= 256


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"slots": 999}, {"port": -1}, {"ctx_per_slot": 1}, {"cache_type_k": "q9"}]
)
def test_settings_out_of_range_are_usage_errors(wrong):
    with pytest.raises(UsageError):
        Settings(**wrong)


def test_what_is_missing_or_wrong_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="engine"):
        launch.start_embedded(Settings())
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UsageError, match="cannot read the model"):
        launch.start_embedded(Settings(model=str(tmp_path / "none.gguf")))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(UsageError, match="not a GGUF"):
        launch.start_embedded(Settings(model=str(tmp_path / "text.gguf")))


# --- whywait engine ------------------------------------------------------------------------------------------------


def test_asking_for_an_engine_that_is_not_there():
    for verb in (control.engine_stop, control.engine_status):
        with pytest.raises(UsageError, match="no engine 'ghost'"):
            verb("ghost")
    assert control.engine_list() == []


def test_status_of_an_engine_that_does_not_answer():
    state.save(some_engine("hung", started_at=time.time() - 5))
    status = control.engine_status("hung")
    assert (status["running"], status["healthy"]) == (True, False)
    assert 4 < status["uptime_s"] < 60
    with pytest.raises(UsageError, match="runs already"):
        control.engine_start("hung", Settings())
    json.dumps(status)
