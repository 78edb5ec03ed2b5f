"""Logs of every known format → the same requests, without their text; and one clear line for what is no log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait.cli import main
from whywait.convert.clock import seconds
from whywait.convert.fit import hit_rate
from whywait.convert.read import FORMATS, read, sniff
from whywait.convert.traces import Bad, write_schedule
from whywait.core.timetable import read_schedule
from whywait.errors import UsageError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n"
)
BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,9,1.2,ChatGPT,472,18,490,Conversation log\n45,9,3.1,ChatGPT,1087,230,1317,Conversation log\n"
    "118,,1,GPT-4,417,0,417,API log\n"
)
MOON = "".join(
    json.dumps({"timestamp": t, "input_length": n, "output_length": 5, "hash_ids": ids}) + "\n"
    for t, n, ids in ((0, 1000, [0, 1]), (500, 1500, [0, 1, 2]), (1500, 700, [0, 3]))
)
SIM = '{"input_toks": 20, "output_toks": 5, "arrival_time_ns": 46926808, "input_tok_ids": [1, 2]}\n' * 2
OURS = (
    '{"at_s": 0, "prompt_tokens": 10, "output_tokens": 2, "class": "chat", "session_id": 4, "turn": 0}\n'
    '{"timestamp_ms": 250.5, "prompt_tokens": 20, "output_tokens": 3, "class": "api"}\n'
)


def put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def openai(text: str, at: Any, usage: dict[str, Any] | None, **more: Any) -> str:
    request = {"model": "m", "messages": [{"role": "user", "content": text}]}
    response: dict[str, Any] = {"choices": [], **({"usage": usage} if usage else {})}
    return json.dumps({"timestamp": at, "request": request, "response": response, **more}) + "\n"


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output}


@pytest.mark.parametrize(
    ("name", "text", "kind", "wanted"),
    [
        ("a.csv", AZURE, "azure", ([0, 0.052], [4808, 3180], [10, 8])),
        ("a.csv", "\ufeff" + AZURE.replace("\n", "\r\n"), "azure", ([0, 0.052], [4808, 3180], [10, 8])),
        ("b.csv", BURST, "burstgpt", ([0, 40], [472, 1087], [18, 230])),
        ("m.jsonl", MOON, "mooncake", ([0, 0.5, 1.5], [1000, 1500, 700], [5, 5, 5])),
        ("s.jsonl", SIM, "llmservingsim", ([0, 0], [20, 20], [5, 5])),
        ("o.jsonl", OURS, "schedule", ([0, 0.2505], [10, 20], [2, 3])),
        (
            "l.jsonl",
            openai("x", "2026-01-01T00:00:00Z", usage(7, 3)) + openai("x", "2026-01-01T01:00:00.25+01:00", usage(8, 4)),
            "openai", ([0, 0.25], [7, 8], [3, 4]),
        ),
    ],
)  # fmt: skip
def test_each_format(tmp_path: Path, name: str, text: str, kind: str, wanted: tuple[list[float], ...]) -> None:
    path = put(tmp_path, name, text)
    assert sniff(path) == kind
    for form in ("auto", kind):
        trace = read([path], form)
        assert trace.at_s == pytest.approx(wanted[0], abs=1e-6)
        assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == wanted[1:]


def test_what_formats_tell_beyond_lengths(tmp_path: Path) -> None:
    burst = read([put(tmp_path, "b.csv", BURST)])
    assert burst.session.tolist() == [0, 0]
    assert burst.turn.tolist() == [0, 1]
    assert burst.class_names == ("conversation log",)
    assert burst.notes == ["b.csv: 1 left out: requests without an answer (0 output tokens)"]
    moon = read([put(tmp_path, "m.jsonl", MOON)])
    assert moon.chains == [[0, 1], [0, 1, 2], [0, 3]]
    assert moon.block_tokens == 512
    assert hit_rate(moon.chains) == pytest.approx((0 + 2 + 1) / 7)
    ours = read([put(tmp_path, "o.jsonl", OURS)])
    assert ours.class_names == ("api", "chat")
    assert ours.session.tolist() == [0, -1]


def test_openai_logs_of_many_makes(tmp_path: Path) -> None:
    u = usage(7, 3)
    lines = [
        {"ts": 1767225600.5, "usage": {"input_tokens": 1, "output_tokens": 2}},
        {"ts": 1767225601500, "prompt_tokens": 2, "completion_tokens": 3, "session_id": "abc"},
        {"response": {"body": {"created": 1767225602, "usage": u}}, "custom_id": "r"},
        {"start_time": "2026-01-01 00:00:03", "response": [{"choices": []}, {"choices": [], "usage": u}]},
        {"ts": 1767225604, "request": {"metadata": {"session_id": "abc"}}, "response": {"usage": u}},
    ]
    trace = read([put(tmp_path, "l.jsonl", "".join(json.dumps(x) + "\n" for x in lines))])
    assert trace.prompt_tokens.tolist() == [1, 2, 7, 7, 7]
    assert trace.at_s == pytest.approx([0, 1, 1.5, 2.5, 3.5])
    assert trace.session.tolist() == [-1, 0, -1, -1, 0]


def test_failures_and_answers_without_usage_are_left_out_and_told(tmp_path: Path) -> None:
    text = (
        openai("x", 1, usage(7, 3)) + openai("x", 2, None) + openai("x", 3, usage(1, 1), status_code=500)
        + openai("x", 4, usage(7, 0)) + openai("x", 5, usage(2, 2), error={"message": "no"})
    )  # fmt: skip
    trace = read([put(tmp_path, "l.jsonl", text)])
    assert len(trace) == 1
    assert sorted(n.split(": ", 1)[1] for n in trace.notes) == [
        "1 left out: requests without an answer (0 output tokens)",
        "1 left out: requests without usage (streams need stream_options.include_usage)",
        "2 left out: requests that failed",
    ]


def test_prompts_of_a_log_are_hashed_and_leave_nothing_behind(tmp_path: Path) -> None:
    system = " ".join(f"system{i}" for i in range(256))
    text = "".join(
        openai(f"{system} " + " ".join(f"private{n}-{i}" for i in range(256)), n, usage(700, 5), session_id="walrus")
        for n in range(3)
    )
    a, b = put(tmp_path, "1.jsonl", text), put(tmp_path, "2.jsonl", text.replace("private2", "other"))
    trace = read([a, b])
    assert trace.chains is not None
    # 1 + 256 + 256 words: 8 whole blocks; of those of system words the first three and most of the fourth are equal.
    assert [len(c) for c in trace.chains] == [8] * 6
    assert trace.block_tokens == 88
    seen = sum(len({tuple(c[: k + 1]) for c in trace.chains}) for k in range(8))
    assert hit_rate(trace.chains) == pytest.approx(1 - seen / 48)
    assert main(["workload", "fit", str(a), "--out", str(tmp_path / "out" / "w.toml")]) == 0
    written = b"".join(p.read_bytes() for p in (tmp_path / "out").iterdir())
    assert not any(word in written for word in (b"private", b"walrus", b"system1"))


def test_files_of_one_log_share_an_axis_and_their_own_numbers_do_not_mix(tmp_path: Path) -> None:
    a, b = put(tmp_path, "a.csv", AZURE), put(tmp_path, "b.csv", AZURE.replace("18:17", "18:18"))
    assert read([b, a]).at_s == pytest.approx([0, 0.052, 60, 60.052], abs=1e-6)
    trace = read([put(tmp_path, "1.jsonl", MOON), put(tmp_path, "2.jsonl", MOON)])
    assert hit_rate(trace.chains) == pytest.approx(3 / 7)  # block 0 of one file is not block 0 of the other
    with pytest.raises(UsageError, match=r"a\.csv is azure.*1\.jsonl is mooncake"):
        read([a, tmp_path / "1.jsonl"])


SERVE = "0,0,0,,0,0\n600,0.5,2.0,Gamma,0.25,8\n1200,0.25,1.5,Weibull,0.7,3.1\n"
SERVE_LENGTHS = json.dumps({
    "0": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},
    "600": {"input_tokens": "{10: 0.75, 20: 0.25}", "output_tokens": "{5: 1.0}", "reason_ratio": "{}"},
})  # fmt: skip


def test_servegen_is_drawn_by_its_rates_and_frequencies(tmp_path: Path) -> None:
    put(tmp_path, "chunk-1-trace.csv", SERVE)
    put(tmp_path, "chunk-1-dataset.json", SERVE_LENGTHS)
    for name in ("chunk-1-trace.csv", "chunk-1-dataset.json"):
        trace = read([tmp_path / name])
        assert len(trace) == 300 + 150
        assert set(trace.prompt_tokens.tolist()) == {10, 20}
        assert (trace.prompt_tokens == 20).mean() == pytest.approx(0.25, abs=0.06)
        assert set(trace.output_tokens.tolist()) == {5}
        assert 600 < trace.at_s[-1] < 1200
        assert "were drawn" in trace.notes[0]
    assert read([tmp_path / "chunk-1-trace.csv"]).at_s.tolist() == trace.at_s.tolist()  # the same seed
    gaps = np.diff(trace.at_s)[:299]
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, abs=0.6)  # a gamma of shape 1/4


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.csv", AZURE.replace("3180", "x").replace("4808", "-3"), "line 2: expected a whole number of at least"),
        ("x.csv", AZURE.replace("2023-11-16 18", "yesterday-"), "line 2: expected a date in TIMESTAMP such as"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2: expected 3 columns"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in the log"),
        ("x.csv", "a,b,c\n1,2,3\n", "x.csv: line 1: expected a header of Azure or BurstGPT"),
        ("x.jsonl", "", "line 1: expected"),
        ("x.jsonl", "\x00\x01\xff garbage", "line 1: expected"),
        ("x.jsonl", "[1, 2]\n", "line 1: expected"),
        ("x.jsonl", '{"timestamp": 1, "input_length": 5}\n', "whole number in output_length, found nothing"),
        ("x.jsonl", '{"timestamp": 1, "input_length": "secret", "output_length": 1}\n', "in input_length, found str"),
        ("x.jsonl", MOON.replace("[0, 1, 2]", "7").replace("[0, 3]", "[null]"), "line 2: expected a list of block"),
        ("x.jsonl", openai("x", None, usage(1, 1)), "line 1: expected a time in one of"),
        ("x.jsonl", openai("x", "soon", usage(1, 1)), "line 1: expected a time"),
        ("x.jsonl", openai("x", 1, {"prompt_tokens": 1.5, "completion_tokens": 1}), "usage.prompt_tokens, found 1.5"),
        ("x.jsonl", openai("x", 1, None), "no request in the log"),
        ("x.jsonl", '{"whywait_recording": 99}\n', "line 1: expected version 1 of a recording"),
        ("chunk-1-trace.csv", SERVE, "chunk-1-dataset.json is not beside it"),
        ("missing", None, "cannot read"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, said: str
) -> None:
    path = tmp_path / name
    if text is not None:
        put(tmp_path, name, text)
    assert main(["workload", "fit", str(path), "--out", str(tmp_path / "w.toml")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert "secret" not in err
    assert len([line for line in err.splitlines() if line.startswith("whywait")]) == 1
    assert not (tmp_path / "w.toml").exists()


@pytest.mark.parametrize(
    ("trace", "dataset", "said"),
    [
        (SERVE + "a,b\n", SERVE_LENGTHS, "chunk-1-trace.csv: line 4: expected start, rate, cv"),
        (SERVE.replace("Gamma", "Pareto"), SERVE_LENGTHS, "line 2: expected Gamma or Weibull"),
        (SERVE, "{", "chunk-1-dataset.json: expected windows"),
        (SERVE, SERVE_LENGTHS.replace("{10: 0.75, 20: 0.25}", "__import__('os')"), "expected windows"),
        (SERVE, "{}", "no window has"),
    ],
)
def test_servegen_files_that_are_not_so(tmp_path: Path, trace: str, dataset: str, said: str) -> None:
    path = put(tmp_path, "chunk-1-trace.csv", trace)
    put(tmp_path, "chunk-1-dataset.json", dataset)
    with pytest.raises(UsageError) as caught:
        read([path], "servegen")
    assert said in caught.value.message


def test_some_garbage_is_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, "m.jsonl", MOON + "garbage\n\n" + '{"timestamp": 1}\n')
    assert main(["workload", "fit", str(path), "--out", str(tmp_path / "w.toml"), "--json"]) == 0
    out, err = capsys.readouterr()
    note = "m.jsonl: 2 of 5 lines left out; line 4: expected a JSON object on a line of its own"
    assert note in err
    assert json.loads(out)["notes"] == [note]
    assert json.loads(out)["requests"] == 3
    with pytest.raises(UsageError, match="line 4"):
        read([put(tmp_path, "n.jsonl", MOON + "garbage\n" * 4)])  # more bad than good: another kind of file


def test_a_torn_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    assert len(read([put(tmp_path, "m.jsonl", '{"timestamp": 0, "input_length": 7, "outp\n' + MOON)])) == 3


def test_the_replay_file_holds_every_request_and_is_read_by_both_sides(tmp_path: Path) -> None:
    for text, name in ((MOON, "m.jsonl"), (OURS, "o.jsonl"), (BURST, "b.csv")):
        trace = read([put(tmp_path, name, text)])
        path = tmp_path / "replay.jsonl"
        write_schedule(trace, path)
        again, schedule = read([path]), read_schedule(path)
        assert again.at_s.tolist() == pytest.approx(trace.at_s.tolist(), abs=1e-9)
        assert schedule.due_ns.tolist() == np.rint(trace.at_s * 1e9).astype(int).tolist()
        for column in ("prompt_tokens", "output_tokens"):
            wanted = getattr(trace, column).tolist()
            assert getattr(again, column).tolist() == getattr(schedule, column).tolist() == wanted
        assert again.chains == trace.chains
        assert again.block_tokens == trace.block_tokens
        assert [list(b) for b in schedule.blocks] == (trace.chains or [])
        assert again.session.tolist() == trace.session.tolist()
        assert [schedule.class_names[k] for k in schedule.klass] == [trace.class_names[k] for k in trace.klass]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("2023-11-16 18:17:03.9799600", 1700158623.97996), ("2023-11-16T18:17:03Z", 1700158623),
        ("2023-11-16T19:17:03+0100", 1700158623), ("2023-11-16T13:47:03,5-04:30", 1700158623.5),
        (1700158623, 1700158623), ("1700158623.25", 1700158623.25), (1700158623250, 1700158623.25),
        (1700158623250000, 1700158623.25), (1700158623250000000, 1700158623.25), (0, 0), (12.5, 12.5),
    ],
)  # fmt: skip
def test_times(value: Any, wanted: float) -> None:
    assert seconds(value) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("value", ["", "now", -1, True, None, [], "2023-13-45 00:00:00", float("nan"), "inf", "1-2"])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(Bad):
        seconds(value)


def test_the_command_line_knows_every_format() -> None:
    from whywait.cli import parser

    for form in FORMATS:
        assert parser().parse_args(["workload", "fit", "x", "--format", form]).format == form
