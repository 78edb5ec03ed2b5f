"""The Python API: the verbs as functions, by the flags' names, in a thread, inside a running loop."""

from __future__ import annotations

import argparse
import asyncio
import json
import typing

import pytest

import whywait
from whywait import api, cli, keywords
from whywait.core.schedule import Workload
from whywait.errors import UsageError, WhywaitError
from whywait.load.stub import Options, Plan, StubThread

VERBS = {"run": keywords.Run, "sweep": keywords.Sweep, "diagnose": keywords.Diagnose, "find": keywords.Find,
         "simulate": keywords.Simulate, "what-if": keywords.WhatIf, "ab": keywords.Ab, "try": keywords.Try}  # fmt: skip


@pytest.fixture(scope="module")
def service():
    with StubThread(Options(plan=Plan(ttft_ms=2.0, gap_ms=1.0, tokens=8))) as stub:
        yield stub


@pytest.fixture
def stub_url(service):
    return service.url


#: Flags that say what is printed, written beside, or which exit code there is: a caller has the object itself.
OF_THE_TERMINAL = {"help", "json", "strict", "fail_if", "html", "report", "calibration", "list"}
#: Of a trial, and not offered: they make other things than one trial.
OF_TRIALS = {"vary", "quality"}


def flags(verb):
    parser = argparse.ArgumentParser()
    cli.flags_of(verb)(parser)
    return {api._keyword(a) for a in parser._actions if a.option_strings} - OF_THE_TERMINAL


@pytest.mark.parametrize("verb", VERBS)
def test_the_typed_keywords_are_the_flags(verb):
    typed = set(VERBS[verb].__annotations__)
    for base in VERBS[verb].__mro__:
        typed |= set(getattr(base, "__annotations__", {}))
    wanted = flags(verb) - (OF_TRIALS | {"a", "b"} if verb in ("ab", "try") else set())
    assert typed == wanted


def test_values_become_the_words_of_flags(tmp_path):
    args = api.arguments(
        "run",
        ["http://127.0.0.1:1"],
        {"slo": {"ttft": 500, "tpot_ms": 50.5}, "duration": 1.5, "stream": False, "header": ["A: b", "C: d"],
         "body": {"top_k": 5}, "prompt_tokens": 32, "load": True, "insecure": False, "out": tmp_path},
    )  # fmt: skip
    assert args.url == "http://127.0.0.1:1"
    assert args.slo == "ttft=500ms,tpot=50.5ms"
    assert (args.duration, args.prompt_tokens, args.out) == ("1.5s", "32", str(tmp_path))
    assert (args.stream, args.load, args.insecure, args.header) == (False, True, False, ["A: b", "C: d"])
    assert json.loads(args.body) == {"top_k": 5}
    assert api.arguments("sweep", ["u"], {"concurrency": [1, 4]}).concurrency == [1.0, 4.0]
    assert api.arguments("ab", [], {"a": "x", "aa": True}).aa == "only"


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"concurency": 1}, "no keyword 'concurency'"), ({"concurrency": 0}, "not a whole number of at least 1"),
     ({"dialect": "x"}, "invalid choice")],
)  # fmt: skip
def test_what_no_flag_takes_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        api.arguments("run", ["http://127.0.0.1:1"], flags)


def test_a_run_from_python_is_quiet_and_shows_itself(stub_url, tmp_path, capfd):
    w = Workload(seed=7)
    result = whywait.run(stub_url, concurrency=2, requests=6, floor=False, out=tmp_path / "run", workload=w)
    assert capfd.readouterr() == ("", "")
    assert result.summary["points"][0]["counts"]["ok"] == 6
    assert result.run.manifest.seed == 7
    page = result._repr_html_()
    assert page.startswith("<pre")
    assert "6 / 6" in page
    assert str(tmp_path) in page
    assert whywait.show(tmp_path / "run").summary["points"] == result.summary["points"]


def test_hostile_names_stay_text():
    from rich.text import Text

    from whywait.report.notebook import as_html

    page = as_html(lambda out: out.print(Text("<script>alert(1)</script>\x1b[31m")))
    assert "<script" not in page
    assert "\x1b" not in page


def test_a_sync_call_and_an_awaited_one_inside_a_running_loop(stub_url, tmp_path):
    async def both():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        first = whywait.run(stub_url, requests=2, floor=False, out=tmp_path / "sync")
        blocked = ticks
        second = await whywait.aio.sweep(stub_url, concurrency=[1, 2], requests=4, floor=False, out=tmp_path / "a")
        ticking.cancel()
        return first, second, blocked, ticks

    first, second, blocked, ticks = asyncio.run(both())
    assert first.summary["points"][0]["counts"]["ok"] == 2
    assert [p["counts"]["ok"] for p in second.summary["points"]] == [4, 4]
    assert blocked == 0
    assert ticks > 0


def test_cancelling_keeps_what_was_measured(service, tmp_path):
    before = service.stub.truth()["finished"]

    async def cut():
        task = asyncio.create_task(
            whywait.aio.run(service.url, concurrency=1, requests=20_000, floor=False, out=tmp_path / "r")
        )
        while service.stub.truth()["finished"] < before + 40:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cut(), 60))
    kept = whywait.show(tmp_path / "r")
    assert kept.summary["partial"]
    assert kept.run.manifest.partial_reason == "interrupted"
    assert kept.summary["points"][0]["counts"]["ok"] > 0


def test_errors_are_raised_with_their_exit_code(tmp_path):
    with pytest.raises(whywait.WhywaitError) as seen:
        whywait.run("http://127.0.0.1:9", requests=1, out=tmp_path / "r")
    assert seen.value.exit_code == 4
    with pytest.raises(UsageError, match="which service"):
        whywait.run(requests=1)


def test_simulated_and_changed(tmp_path):
    load = {"prompt_tokens": 128, "output_tokens": 32}
    found = whywait.simulate(machine="h100", model="llama-3.1-8b", concurrency=[1, 4, 16], requests=24, draws=2, jobs=1,
                             out=tmp_path / "s", **load)  # fmt: skip
    assert "SIMULATED" in found.result._repr_html_()
    assert "H100" in found._repr_html_()
    answer = whywait.what_if(tmp_path / "s", machine="h200", seeds=2)
    assert answer.as_dict()["claims"]
    assert "H200" in answer._repr_html_()


def test_the_names_that_the_package_gives_are_typed_and_there():
    stub = (__import__("pathlib").Path(whywait.__file__).with_suffix(".pyi")).read_text()
    for name in whywait.__all__:
        assert getattr(whywait, name) is not None
        assert name in stub
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        whywait.nothing_of_this_name  # noqa: B018
    assert not typing.TYPE_CHECKING
    assert issubclass(UsageError, WhywaitError)
