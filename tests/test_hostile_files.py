"""Files that mean harm, given to every verb and flag that reads one: bounded memory, one clear line, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whywait.convert import results_file
from whywait.core import bounded
from whywait.core.parquet import MOST_ROWS
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.core.workload import Workload
from whywait.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/zero and RLIMIT_AS")
ROOT = Path(__file__).resolve().parents[1]
RUN = sorted(p for p in (ROOT / "exam").iterdir() if (p / "manifest.json").exists())[0]
MOST_MB = 2500

CONTENT: dict[str, bytes] = {
    "binary": bytes(range(256)) * 16,
    "nul": b"\0" * 1000,
    "deep.json": b"[" * 1_000_000,
    "deep-objects.json": b'{"a":' * 500_000,
    "deep.toml": b"a = " + b"[" * 100_000,
    "long-key.toml": b"a." * 100_000 + b"b = 1",
    "long-table.toml": b"[" + b"a." * 100_000 + b"b]\n",
    "number.json": b"1" * (1 << 20),
    "list.json": b"[1,2,3]",
    "null.json": b"null",
    "infinite.json": b'{"a":1e999,"b":NaN,"kind":"plan","inputs":{}}',
    "long-line.txt": b"x" * (20 << 20),
}
#: What reads a file, with F in its place. A link to F stands in a run of its own where that is what is read.
READERS = {
    "workload": "workload show F",
    "workload of a simulation": "simulate --machine h100 --model llama-3.1-8b --workload F",
    "trace": "simulate --machine h100 --model llama-3.1-8b --trace F",
    "log": "workload fit F --out OUT/w.toml",
    "import": "import F --out OUT/imported",
    "compare": "compare F F",
    "show": "show F",
    "plan kept": "show F",
    "prices": f"bill {RUN} --price F",
    "cells": "simulate --machine h100 --model llama-3.1-8b --concurrency 1 --cells F --out OUT/cells",
    "catalogue": "simulate --machine h100 --model llama-3.1-8b --concurrency 1 --catalog F",
    "candidates": "plan --model llama-3.1-8b --rate 1 --slo ttft=1s --candidates F",
    "calibration": "serve-sim --machine h100 --model llama-3.1-8b --calibration F",
    "engine": "doctor http://127.0.0.1:9 --engine-file F",
    "key": "doctor http://127.0.0.1:9 --api-key-file F",
    "authorities": "doctor https://127.0.0.1:9 --ca F",
    "tasks": "quality embedded embedded --tasks F",
    "texts": "quality embedded embedded --text F",
    "model": "simulate --machine h100 --model F --concurrency 1",
    **{f"run: {name}": f"show RUN:{name}" for name in ("manifest.json", "points.parquet", "requests.parquet",
                                                       "chunks.parquet", "readings.parquet")},
    "run: summary.json": "history RUN:summary.json",
    "spool": "show SPOOL:log.jsonl",
    "readings of a spool": "show SPOOL:readings.jsonl",
}  # fmt: skip
#: Any text may be scored or be a key, and a manifest may hold facts of a later version.
MAY_BE = {
    *((reader, file) for reader in ("texts", "key") for file in CONTENT if file != "binary"),
    ("run: manifest.json", "infinite.json"),
}
CODE = """
import contextlib, io, json, resource, sys, traceback
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]) << 20,) * 2)
from whywait.cli import main
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    argv = json.loads(line)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    except SystemExit as exc:
        code = exc.code
    except BaseException:
        code = traceback.format_exc()[-300:]
    print(json.dumps([argv, code, err.getvalue()[-2000:]]), flush=True)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)
    with (folder / "sparse.json").open("wb") as file:
        file.write(b'{"a":1')
        file.truncate(64 << 30)
    return {**{p.name: p for p in sorted(folder.iterdir())}, "zero": Path("/dev/zero")}


def _argv(command: str, file: Path, out: Path) -> list[str]:
    words = []
    for word in command.split():
        kind, _, name = word.partition(":")
        if kind in ("RUN", "SPOOL") and name:
            folder = out / f"{kind}-{name}-{file.name}"
            if kind == "RUN":
                shutil.copytree(RUN, folder)
            else:
                (folder / "spool").mkdir(parents=True)
                (folder / "spool" / "log.jsonl").touch()
                name = f"spool/{name}"
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(file)
            words.append(str(folder))
        else:
            words.append(str(file) if word == "F" else word.replace("OUT", str(out)))
    return words


def test_every_reader_bears_every_file(files: dict[str, Path], tmp_path: Path) -> None:
    """In one process that may take no more memory than MOST_MB: what would take more fails there, and is seen."""
    asked = [
        (r, f, _argv(command, file, tmp_path))
        for r, command in READERS.items()
        for f, file in files.items()
        if (r, f) not in MAY_BE
    ]
    text = "".join(json.dumps(argv) + "\n" for _, _, argv in asked)
    done = subprocess.run([sys.executable, "-c", CODE, "-", str(MOST_MB)], input=text, capture_output=True, text=True,
                          check=False)  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asked), (asked[len(answers)], done.stderr[-2000:])
    wrong = []
    for (reader, file, _), (_, code, said) in zip(asked, answers, strict=True):
        lines = [line for line in said.splitlines() if line.startswith("whywait:")]
        # history passes over what is no run, and says so in its table; readings that are none are left out of a spool
        # a spool is read up to where it is torn; a text may be anything, and a key all but lines
        lenient = reader in ("run: summary.json", "readings of a spool", "spool")
        fine = code == 0 if lenient else code == 2 and len(lines) == 1
        if not fine or "Traceback" in said:
            wrong.append((reader, file, code, said[-300:]))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_table_that_unfolds_beyond_measure_is_refused(tmp_path: Path) -> None:
    import numpy as np

    n = 3 << 20
    rows = {"asked_ns": np.zeros(n, np.int64), "answered_ns": np.zeros(n, np.int64), "value": np.zeros(n)}
    text = np.full(n, "x", dtype=object)
    Table("readings", {**rows, "source": text, "name": text, "labels": text}).save(tmp_path / "readings.parquet")
    assert n > MOST_ROWS * (tmp_path / "readings.parquet").stat().st_size
    with pytest.raises(UsageError, match="unfolds to more than"):
        Table.load("readings", tmp_path / "readings.parquet")


def test_yaml_whose_aliases_unfold_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
    )
    (tmp_path / "b.yaml").write_text(bomb)
    with pytest.raises(UsageError, match="aliases unfold"):
        results_file.yaml(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(UsageError, match="aliases unfold"):
        results_file.yaml(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text("a: &a [1, 2]\nb: *a\n")
    assert results_file.yaml(tmp_path / "d.yaml") == {"a": [1, 2], "b": [1, 2]}


def test_gzip_that_unfolds_beyond_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    monkeypatch.setattr(results_file, "DOCUMENT_BYTES", 1 << 20)
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(b'{"a":1}\n' * (1 << 20), 9))
    with pytest.raises(UsageError, match="unfolds to more than"):
        list(results_file.lines(tmp_path / "r.jsonl.gz"))


def test_a_pipe_is_a_file_too() -> None:
    """As of a shell's <(…): no size, no seeking."""
    ours, theirs = os.pipe()
    os.write(theirs, b"prompt_tokens = 64")
    os.close(theirs)
    try:
        assert Workload.from_toml(Path(f"/dev/fd/{ours}")).classes[0].prompt_tokens.a == 64
    finally:
        os.close(ours)


def test_what_is_bounded_is_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert bounded.read_text(tmp_path / "t") == "a\nb"
    (tmp_path / "j").write_bytes(b'{"a": NaN, "b": 1}')
    assert bounded.read_json(tmp_path / "j")["b"] == 1
    assert list(bounded.lines(tmp_path / "t")) == [b"\xef\xbb\xbfa\r\n", b"b"]
    with pytest.raises(bounded.TooHeavy):
        bounded.loads(b"[" + b"[]," * 100_000 + b"0]", 1 << 20)
    assert Run.load(RUN).manifest.made_by
