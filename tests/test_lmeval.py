"""lm-eval's bridge with a stand-in program that takes its flags and writes its log of samples, as lm-eval 0.4 does."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from whywait.errors import MissingExtra, ServiceError, UsageError
from whywait.load import lmeval
from whywait.load.preflight import Target
from whywait.net.endpoint import parse_url
from whywait.net.reach import Reach

FAKE = """
import json, os, pathlib, sys
argv = sys.argv[1:]
said = dict(zip(argv, argv[1:]))
args = dict(a.split("=", 1) for a in said["--model_args"].split(","))
print("asking", args["base_url"])
if args["model"] == "broken":
    sys.exit("no such data set")
out = pathlib.Path(said["--output_path"]) / args["model"]
out.mkdir(parents=True)
for task in said["--tasks"].split(","):
    with (out / f"samples_{task}_2026-11-30T14-44-36.638155.jsonl").open("w") as f:
        for i in range(int(said.get("--limit", 3))):
            for name in ("strict-match", "flexible-extract"):
                row = {"doc_id": i, "doc": {}, "target": "5", "resps": [["<think>hm</think>It is 5"]], "filter": name,
                       "filtered_resps": ["5"], "metrics": ["exact_match"], "doc_hash": f"h{i}",
                       "exact_match": float(name == "flexible-extract" and i % 2 == 0)}
                f.write(json.dumps(row) + "\\n")
(out / "key.txt").write_text(os.environ["OPENAI_API_KEY"])
(out / "argv.json").write_text(json.dumps(argv))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(lmeval, "program", lambda: [sys.executable, str(script)])


def target(model: str = "m", url: str = "http://127.0.0.1:9/v1", **more: Any) -> Target:
    return Target(parse_url(url, **more), model)


def test_samples_come_back_one_per_document(fake: None, tmp_path: Path) -> None:
    found = lmeval.run(target(api_key="sk-1"), lmeval.suites_of("gsm8k,own_task", limit=4), tmp_path / "a")
    assert [(s.task, s.score) for s in found[:4]] == [("gsm8k", 1.0), ("gsm8k", 0.0), ("gsm8k", 1.0), ("gsm8k", 0.0)]
    assert {s.task for s in found} == {"gsm8k", "own_task"}
    assert len({(s.task, s.key) for s in found}) == len(found) == 8
    assert (found[0].answered.text, found[0].answered.thinking) == ("It is 5", "hm")
    assert found[0].answered.generated
    written = tmp_path / "a" / "out" / "m"
    argv = json.loads((written / "argv.json").read_text())
    assert (written / "key.txt").read_text() == "sk-1"
    assert not any("sk-1" in a for a in argv)  # the key is in nobody's list of processes
    args = argv[argv.index("--model_args") + 1]
    assert "base_url=http://127.0.0.1:9/v1/chat/completions" in args
    assert argv[argv.index("--model") + 1] == "local-chat-completions"
    assert "--apply_chat_template" in argv


def test_flags_follow_the_endpoint() -> None:
    suites = lmeval.Suites(("t",), include="tasks", shots=2)
    argv = lmeval.arguments(target(dialect="completions"), suites, Path("o"))
    assert argv[argv.index("--model") + 1] == "local-completions"
    assert "--apply_chat_template" not in argv
    assert argv[-4:] == ["--include_path", "tasks", "--num_fewshot", "2"]
    insecure = dataclasses.replace(target(), endpoint=parse_url("https://127.0.0.1:9", reach=Reach(insecure=True)))
    assert "verify_certificate=False" in lmeval.arguments(insecure, suites, Path("o"))[3]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"url": "unix:///tmp/x.sock"}, "a Unix socket"),
        ({"reach": Reach(headers=(("X-A", "b"),))}, "own headers"),
        ({"dialect": "responses"}, "the responses dialect"),
        ({"model": "a,b"}, "no comma"),
    ],
)
def test_what_lm_eval_cannot_be_told_is_said_before(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        lmeval.arguments(target(**more), lmeval.Suites(("t",)), Path("o"))


def test_its_last_lines_are_in_the_error(fake: None, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="lm-eval ended with 1") as found:
        lmeval.run(target("broken"), lmeval.Suites(("t",)), tmp_path / "a")
    assert "no such data set" in found.value.message
    assert str(tmp_path / "a" / "lm_eval.log") in found.value.hint


def test_what_is_no_log_is_said(tmp_path: Path) -> None:
    (tmp_path / "samples_x_2026-11-30T14-44-36.1.jsonl").write_text("[1]\n")
    with pytest.raises(ServiceError, match="no log of samples"):
        list(lmeval.read(tmp_path))


def test_a_task_of_likelihoods_has_no_text(tmp_path: Path) -> None:
    row = {"doc_id": 0, "resps": [[["-1.5", "False"]], [["-0.5", "True"]]], "filter": "none",
           "metrics": ["acc", "acc_norm"], "doc_hash": "h", "acc": 0.0, "acc_norm": 1.0}  # fmt: skip
    (tmp_path / "samples_arc_easy_2026-11-30T14-44-36.1.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = lmeval.read(tmp_path)
    assert (found.task, found.metric, found.score) == ("arc_easy", "acc_norm", 1.0)
    assert not found.answered.generated


def test_it_is_missing_in_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(MissingExtra, match="--suite needs the extra 'lm-eval'"):
        lmeval.suites_of("gsm8k")


def test_names_and_folders_are_checked_first(fake: None) -> None:
    for text in ("", "a b", "x;rm"):
        with pytest.raises(UsageError, match="--suite"):
            lmeval.suites_of(text)
    with pytest.raises(UsageError, match="no folder"):
        lmeval.suites_of("gsm8k", include="/nosuch")
