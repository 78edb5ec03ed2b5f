"""The Python API: the verbs as functions, by the flags' names, in a thread, inside a running loop."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import threading
import time
import typing

import pytest

import whywait
from tests.imported_files import DATA
from tests.scoring_engines import VLLM_PAGES, served, vllm, whole
from whywait import calling, cli, keywords
from whywait.core.schedule import Workload
from whywait.errors import UsageError, WhywaitError
from whywait.load.stub import Options, Plan, StubThread


@pytest.fixture(scope="module")
def service():
    with StubThread(Options(plan=Plan(ttft_ms=2.0, gap_ms=1.0, tokens=8))) as stub:
        yield stub


@pytest.fixture
def stub_url(service):
    return service.url


#: Flags that say what is printed, written beside, or which exit code there is: a caller has the object itself.
OF_THE_TERMINAL = {"help", "json", "strict", "fail_if", "html", "report", "calibration", "list"}
#: By verb: what is a parameter of the function, printed only, or makes something else; and what its object tells of.
NOT_OF = {"run": {"format"}, "sweep": {"format"}, "resume": {"format"}, "watch": {"for", "once"}, "doctor": {"require"},
          "history": {"csv"}, "ab": {"a", "b", "vary", "quality"}, "try": {"vary", "quality"},
          "compare": {"save_baseline"}, "import": {"out"}, "export": {"to", "out"}}  # fmt: skip
BESIDE = {"compare": {"fail_if"}}


def flags(verb):
    parser = argparse.ArgumentParser()
    cli.flags_of(verb)(parser)
    return {calling.keyword_of(a) for a in parser._actions if a.option_strings} - OF_THE_TERMINAL


@pytest.mark.parametrize("verb", keywords.OF)
def test_the_typed_keywords_are_the_flags(verb):
    typed = set(keywords.OF[verb].__optional_keys__)
    assert typed == flags(verb) - NOT_OF.get(verb, set()) | BESIDE.get(verb, set())
    assert all(word in cli.VERBS for word in (verb, *NOT_OF))


def test_values_become_the_words_of_flags(tmp_path):
    args = calling.arguments(
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
    assert calling.arguments("sweep", ["u"], {"concurrency": [1, 4]}).concurrency == [1.0, 4.0]
    assert calling.arguments("ab", [], {"aa": True}, a="x").aa == "only"


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"concurency": 1}, "no keyword 'concurency'"), ({"concurrency": 0}, "not a whole number of at least 1"),
     ({"dialect": "x"}, "invalid choice"), ({"strict": True}, "no keyword 'strict'")],
)  # fmt: skip
def test_what_no_flag_takes_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        calling.arguments("run", ["http://127.0.0.1:1"], flags)


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


def test_a_page_is_made_once_in_a_notebook(monkeypatch):
    """rich shows what any console prints when it believes to be in a kernel, besides what is handed back."""
    from rich import console as rich_console

    from whywait.report.notebook import as_html
    from whywait.report.text import console

    monkeypatch.setattr(rich_console, "_is_jupyter", lambda: True)
    shown = []
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    assert "here" in as_html(lambda out: out.print("here"))
    console(io.StringIO()).print("there")
    assert shown == []


def test_each_object_shows_once_in_a_real_kernel(stub_url, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    whywait.run(stub_url, concurrency=2, requests=6, floor=False, out=tmp_path / "run")
    book = nbformat.v4.new_notebook()
    say = f"import sys; sys.path[:0] = {sys.path!r}\nimport whywait\nr = whywait.show({str(tmp_path / 'run')!r})"
    book.cells = [nbformat.v4.new_code_cell(t) for t in (say + "; r", "whywait.compare(r, r)")]
    nbclient.NotebookClient(book, timeout=60, kernel_name="python3").execute()
    for cell in book.cells:
        assert [o.output_type for o in cell.outputs] == ["execute_result"]
        assert cell.outputs[0].data["text/html"].startswith("<pre")


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


LOAD = {"prompt_tokens": 128, "output_tokens": 32}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    out = tmp_path_factory.mktemp("simulated") / "s"
    return whywait.simulate(machine="h100", model="llama-3.1-8b", concurrency=[1, 4, 16], requests=24, draws=2, jobs=1,
                            out=out, **LOAD)  # fmt: skip


def test_simulated_and_changed(simulated):
    assert "SIMULATED" in simulated.result._repr_html_()
    assert "H100" in simulated._repr_html_()
    answer = whywait.what_if(simulated.result, machine="h200", seeds=2)
    assert answer.as_dict()["claims"]
    assert "H200" in answer._repr_html_()


def test_a_bill_and_a_comparison_of_saved_runs(simulated, tmp_path, capfd):
    rows = tmp_path / "rows.csv"
    bill = whywait.bill(simulated.result, price_per_hour=2.5, currency="EUR", requests=rows)
    assert bill.found["points"][0]["money"]
    assert "EUR" in bill.headline
    assert bill.headline[:40] in bill._repr_html_()
    assert rows.read_text().count("\n") == 1 + 3 * 24
    folder = simulated.result.directory
    other = whywait.simulate(machine="h200", model="llama-3.1-8b", concurrency=[1, 4, 16], requests=24, draws=2, jobs=1,
                             out=tmp_path / "o", **LOAD)  # fmt: skip
    both = whywait.compare(folder, other.result, other.result.run, fail_if="tpot_ms.p50<-5%", at="concurrency 4")
    assert [len(c["points"]) for c in both.found["comparisons"]] == [1, 1]
    assert {g["state"] for g in both.found["gates"]} == {"fails"}, "it became quicker, and that was the condition"
    assert "concurrency 4" in both._repr_html_()
    with pytest.raises(UsageError, match="compared with what"):
        whywait.compare(folder)
    with pytest.raises(UsageError, match="no keyword 'save_baseline'"):
        whywait.compare(folder, other.result, save_baseline=tmp_path / "b.json")
    assert capfd.readouterr() == ("", "")


def test_results_of_another_tool_and_a_run_for_another_tool(simulated, tmp_path, capfd):
    file = DATA / "vllm-0.32-c4.json"
    found = whywait.import_results(file, tmp_path / "run", engine="vllm", slo={"ttft": 500})
    assert found.checked
    assert found.result.run.manifest.slo == {"ttft_ms": 500.0}
    assert found._repr_html_() == found.result._repr_html_()
    with pytest.raises(UsageError, match="holds something already"):
        whywait.import_results([file], tmp_path / "run")
    told = whywait.export(found.result, "csv", tmp_path / "csv", table=["requests"], requests=[0, 2])
    assert told["rows"]["requests"] == 2
    assert all(str(tmp_path) in f["path"] for f in told["files"])
    with pytest.raises(UsageError, match="stdout"):
        whywait.export(simulated.result, "perfetto", "-")
    with pytest.raises(UsageError, match="invalid choice"):
        whywait.export(simulated.result, "cobol")
    for form in ("csv", "otlp"):
        with pytest.raises(UsageError, match="cannot write"):
            whywait.export(simulated.result, form, "/proc/no-such-place")
    assert capfd.readouterr() == ("", "")


def test_a_plan_is_kept_and_made_again(tmp_path, capfd):
    ask = {"model": "llama-3.1-8b", "machines": ["h100", "l40s"], "layouts": "tp=1", "apply": "", "rate": 4,
           "slo": {"ttft": 1000, "tpot": 50}, "price_per_hour": {"h100": 2.5, "l40s": 0.9}, "currency": "EUR",
           "budget": "20/h", "draws": 2, "jobs": 1}  # fmt: skip
    found = whywait.plan(out=tmp_path / "p", **ask, **LOAD)
    assert found.directory == tmp_path / "p"
    assert "EUR" in found.headline
    page = found._repr_html_()
    assert "The five questions" in page
    assert str(tmp_path / "p") in page
    again = asyncio.run(whywait.aio.plan(again=tmp_path / "p", out=tmp_path / "q", jobs=1))
    assert again.headline == found.headline
    with pytest.raises(UsageError, match="is not empty"):
        whywait.plan(out=tmp_path / "p", **ask, **LOAD)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "cases.jsonl"
    rows = [{"id": f"c{i}", "category": "sums", "prompt": f"{i} and nothing:", "grader": "numeric", "answer": i}
            for i in range(12)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def answering(says):
    return served(whole(vllm(), says, VLLM_PAGES), "vllm")


def test_quality_of_two_services(tmp_path, cases, capfd):
    with answering(lambda q: q.split(" ")[0]) as (a, _), answering(lambda _q: "17") as (b, _):
        urls = [f"http://127.0.0.1:{t.endpoint.port}" for t in (a, b)]
        found = whywait.quality(*urls, tasks=cases, only="tasks", out=tmp_path / "q")
        with pytest.raises(UsageError, match="which is the other arm"):
            whywait.quality(urls[0], only="tasks")
    assert found.error is None
    assert {c["state"] for c in found.result()["claims"]} == {"fails"}
    assert found.result()["headline"][:40] in found._repr_html_()
    assert found.directory == tmp_path / "q"
    assert capfd.readouterr() == ("", "")


def test_a_cancelled_comparison_of_answers_ends_and_is_kept(tmp_path, cases):
    asked = threading.Event()

    def slow(_question):
        asked.set()
        time.sleep(0.2)
        return "1"

    async def cut(url):
        task = asyncio.create_task(whywait.aio.quality(url, aa=True, tasks=cases, at_once=1, only="tasks",
                                                       out=tmp_path / "q"))  # fmt: skip
        while not asked.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with answering(slow) as (a, _):
        asyncio.run(asyncio.wait_for(cut(f"http://127.0.0.1:{a.endpoint.port}"), 60))
    kept = json.loads((tmp_path / "q" / "quality.json").read_text())
    assert kept["partial_reason"] == "interrupted"


def test_the_names_that_the_package_gives_are_typed_and_there():
    stub = (__import__("pathlib").Path(whywait.__file__).with_suffix(".pyi")).read_text()
    for name in whywait.__all__:
        assert getattr(whywait, name) is not None
        assert name in stub
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        whywait.nothing_of_this_name  # noqa: B018
    assert not typing.TYPE_CHECKING
    assert issubclass(UsageError, WhywaitError)
