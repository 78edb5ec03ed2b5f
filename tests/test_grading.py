"""Grading in bounded time, and what no grader may do: hang, fetch, or lose the answers of both arms."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.scoring_engines import VLLM_PAGES, served, vllm, whole
from whywait.cli import main
from whywait.core.tasks import UNGRADABLE, Answered, Case, Grader
from whywait.errors import UsageError, scrub
from whywait.grading import MOST_SLOW, SLOW, Grading
from whywait.load.cases import case_of

FOR_EVER = r"^(a+)+$b"
LONG = "a" * 40


def case(grader: Grader, name: str = "c") -> Case:
    return Case(name, "x", (("user", "?"),), grader)


def test_a_pattern_that_never_ends_is_ended_and_the_next_is_graded() -> None:
    g = Grading(limit_s=0.5)
    try:
        slow = case(Grader("regex", pattern=FOR_EVER))
        a, b = Answered("c", "b", outcome="ok"), Answered("c", LONG, outcome="ok")
        assert g.both(slow, a, b) == ((False, "", SLOW),) * 2  # on neither arm: it is no difference between them
        assert g.grade(case(Grader("regex", pattern="a.")), Answered("c", "xab", outcome="ok")) == (True, "ab", "")
        pytest.importorskip("jsonschema")
        schema = Grader("json_schema", schema={"type": "object", "properties": {"x": {"pattern": FOR_EVER}}})
        assert g.grade(case(schema), Answered("c", json.dumps({"x": LONG}), outcome="ok")).why == SLOW
        assert g.grade(case(schema), Answered("c", '{"x": 1}', outcome="ok")).right
    finally:
        g.close()


def test_not_every_slow_case_is_waited_for() -> None:
    g = Grading(limit_s=0.01)
    try:
        for i in range(MOST_SLOW + 5):
            assert g.grade(case(Grader("regex", pattern=FOR_EVER)), Answered(str(i), LONG, outcome="ok")).why == SLOW
        assert g._child is None  # none was begun for the last ones
        assert g.grade(case(Grader("exact", ("a",))), Answered("c", "a", outcome="ok")).right
    finally:
        g.close()


def test_the_process_of_a_dead_caller_ends_itself() -> None:
    """Its input ends only after the question; the limit on its own CPU time ends it."""
    g = Grading(limit_s=0.1)
    assert g._begin()
    assert g._child is not None
    assert g._child.stdin is not None
    g._child.stdin.write(json.dumps([{"kind": "regex", "answers": [], "pattern": FOR_EVER}, LONG, False]).encode())
    g._child.stdin.close()
    assert g._child.wait(60) < 0  # by a signal
    assert g._child.stdout is not None
    g._child.stdout.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grader": "json_schema", "schema": {"$ref": "http://127.0.0.1:39999/x.json"}}, "nothing is fetched"),
        ({"grader": "json_schema", "schema": {"$ref": "#/definitions/none"}}, "which it does not have"),
        ({"grader": "json_schema", "schema": {"properties": {"a": {"$ref": "#/$defs/b"}}}}, "which it does not have"),
        ({"grader": "json_schema", "schema": {"$ref": "#"}}, "itself without end"),
        ({"grader": "json_schema", "schema": None}, "not an object"),
        ({"grader": "json_schema", "schema": {"pattern": "("}}, "no regular expression"),
        ({"grader": "json_schema", "schema": {"patternProperties": {"(": {}}}}, "no regular expression"),
        ({"grader": "checks", "checks": {"nosuch": 1}}, "no check 'nosuch'"),
        ({"grader": "checks", "checks": {"times": 3}}, "value of 'times'"),
        ({"grader": "checks", "checks": {"numbered": "x"}}, "value of 'numbered'"),
        ({"grader": "checks", "checks": {"full": "("}}, "value of 'full'"),
        ({"grader": "numeric", "answer": "nan"}, "not a number"),
    ],
)
def test_what_no_answer_could_be_graded_by_is_refused(fields: dict[str, Any], said: str) -> None:
    if fields["grader"] == "json_schema":
        pytest.importorskip("jsonschema")
    with pytest.raises(UsageError, match=r"own\.jsonl, line 1, field") as found:
        case_of(json.dumps({"prompt": "q", **fields}), 1, "own.jsonl")
    assert said in found.value.message


def test_references_inside_a_schema_are_well() -> None:
    pytest.importorskip("jsonschema")
    n = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
    schema = {"$id": "https://example.com/s", "$defs": {"n": n}, "$ref": "#/$defs/n"}
    found = case_of(json.dumps({"prompt": "q", "grader": "json_schema", "schema": schema}), 1, "own.jsonl")
    g = Grading()
    try:
        assert g.grade(found, Answered("c", '{"n": {"n": {}}}', outcome="ok")).right
        assert not g.grade(found, Answered("c", '{"n": 1}', outcome="ok")).right
    finally:
        g.close()


def test_a_remote_reference_is_never_fetched_even_if_it_gets_past_the_loader() -> None:
    pytest.importorskip("jsonschema")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        schema = {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/x.json"}
        g = Grading()
        try:
            found = g.grade(case(Grader("json_schema", schema=schema)), Answered("c", "{}", outcome="ok"))
        finally:
            g.close()
        with pytest.raises(TimeoutError):
            server.accept()
    assert found.why.startswith(UNGRADABLE)


def test_an_error_of_a_grader_is_one_wrong_case_and_a_doubt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the whole command: a schema that recurs only on some values, and a pattern that never ends."""
    pytest.importorskip("jsonschema")
    endless = {"properties": {"zed": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}
    rows = [{"prompt": f"case {i}: ?", "grader": "exact", "answer": '{"b": 1}'} for i in range(8)]
    rows += [{"prompt": "case 8: ?", "grader": "json_schema", "schema": endless, "id": "endless"}]
    rows += [{"prompt": "case 9: ?", "grader": "regex", "pattern": FOR_EVER, "id": "slow"}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def says(question: str) -> str:
        return '{"zed": 1}' if "case 8" in question else LONG if "case 9" in question else '{"b": 1}'

    out = tmp_path / "q"
    with served(whole(vllm(most=60), says, VLLM_PAGES), "vllm") as (a, _):
        argv = ["quality", a.endpoint.url, "--aa", "--tasks", str(tmp_path / "own.jsonl"), "--only", "tasks"]
        assert main([*argv, "--out", str(out)]) == 0
    found = json.loads((out / "quality.json").read_text())
    assert [r["a"]["right"] for r in found["cases"]] == [True] * 8 + [False] * 2
    whys = {r["id"]: r["b"]["why"] for r in found["cases"][8:]}
    assert "RecursionError" in whys["endless"]
    assert whys["slow"] == SLOW
    assert "2 of 10 tasks could not be graded" in capsys.readouterr().out


def test_ctrl_c_while_grading_keeps_what_was_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Grading.grade

    def interrupted(self: Grading, c: Case, answered: Answered) -> Any:
        if c.id.endswith("-6"):
            raise KeyboardInterrupt
        return real(self, c, answered)

    rows = [{"prompt": f"case {i}: ?", "grader": "exact", "answer": "x"} for i in range(8)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "q"
    monkeypatch.setattr(Grading, "grade", interrupted)
    with served(whole(vllm(most=60), lambda _: "x", VLLM_PAGES), "vllm") as (a, _):
        argv = ["quality", a.endpoint.url, "--aa", "--tasks", str(tmp_path / "own.jsonl"), "--only", "tasks"]
        assert main([*argv, "--out", str(out)]) == 130
    found = json.loads((out / "quality.json").read_text())
    assert (found["partial_reason"], len(found["cases"])) == ("interrupted", 5)


def test_an_exception_that_is_frozen_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

        def __str__(self) -> str:
            raise ValueError

    scrub(Frozen("x"))

    def fails(_args: Any) -> int:
        raise Frozen("x")

    monkeypatch.setattr("whywait.verbs.quality.quality", fails)
    assert main(["quality", "embedded", "--aa"]) == 5
    said = capsys.readouterr().err
    assert "a fault of our own: Frozen" in said
    assert "Traceback" not in said


def test_grading_leaves_no_process() -> None:
    g = Grading()
    assert g.grade(case(Grader("regex", pattern="a")), Answered("c", "a", outcome="ok")).right
    child = g._child
    assert child is not None
    g.close()
    assert child.poll() is not None
