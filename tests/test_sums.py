"""A saved Run that a disk or a copy changed: told in one line, never other figures, never the end of the process."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis_runs import MS, S, make_run, stream
from whywait.core import footer, sums
from whywait.core.run import Run
from whywait.errors import UsageError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    times = [[S + i * 40 * MS + k * 13 * MS + k * k for k in range(30)] for i in range(40)]
    rows = [{"sent_ns": t[0] - 9 * MS, "first_ns": t[0], "last_ns": t[-1], "end_ns": t[-1]} for t in times]
    return make_run(rows, [c for i, t in enumerate(times) for c in stream(i, t)]).save(tmp_path / "run")


def test_no_bit_of_a_table_changes_without_a_word(saved: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(60):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        file = copy / rng.choice(["points.parquet", "requests.parquet", "chunks.parquet", "readings.parquet"])
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        with pytest.raises(UsageError, match=f"{file.name} is damaged: it is not what was written"):
            Run.load(copy)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\0" * 40])
def test_checksums_that_are_none_are_said(saved: Path, text: str) -> None:
    (saved / sums.FILE).write_text(text)
    with pytest.raises(UsageError, match=r"checksums\.json is damaged"):
        Run.load(saved)


def test_a_run_without_checksums_is_read_and_one_saved_anew_has_its_own(saved: Path) -> None:
    run = Run.load(saved)
    (saved / sums.FILE).unlink()
    assert Run.load(saved) == run
    other = make_run([{"sent_ns": 1, "end_ns": 5}])
    other.save(saved)
    assert Run.load(saved) == other
    assert set(json.loads((saved / sums.FILE).read_text())) == {p.name for p in saved.glob("*.parquet")}


def test_a_save_that_was_cut_off_leaves_no_checksums_of_what_was_there(saved: Path, monkeypatch) -> None:
    monkeypatch.setattr("whywait.core.run.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    other = make_run([{"sent_ns": 1, "end_ns": 5}])
    with pytest.raises(KeyboardInterrupt):
        other.save(saved)
    assert len(Run.load(saved).requests) == 1


def _footer(file: Path) -> tuple[bytes, bytes]:
    data = file.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - size], data[-8 - size : -8]


def test_a_footer_is_taken_whole_and_no_part_of_it(saved: Path) -> None:
    for file in saved.glob("*.parquet"):
        _, foot = _footer(file)
        footer.check(foot)
        for n in range(0, len(foot), 7):
            with pytest.raises(ValueError, match="footer"):
                footer.check(foot[:n])


@pytest.mark.parametrize(
    ("foot", "why"),
    [
        (b"\x16\x01\x00", "below zero"),  # field 1, i64: -1
        (b"\x18\x7fx", "cut short"),  # text of 127 bytes
        (b"\x1d\x00", "that is none"),  # kind 13
        (b"\x1c" * 50, "too deep"),
        (b"\x16" + b"\xff" * 12 + b"\x00", "no end"),
        (b"\x19\xf8" + b"\xff" * 8 + b"\x01", "cut short"),  # a list of quintillions
    ],
)
def test_what_is_no_footer_is_refused(foot: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        footer.check(foot)


def test_damaged_footers_never_end_the_process_nor_write_a_trace(saved: Path) -> None:
    """In a process of its own: the reader's panics go past Python, to the descriptor of stderr."""
    (saved / sums.FILE).unlink()
    code = """
import random, sys
from pathlib import Path
from whywait.core.run import Run
from whywait.errors import UsageError
folder = Path(sys.argv[1]); file = folder / "requests.parquet"; whole = file.read_bytes(); rng = random.Random(11)
begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"); told = 0
for _ in range(400):
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 3))):
        data[rng.randrange(begin, len(data) - 8)] = rng.randrange(256)
    file.write_bytes(data)
    try:
        Run.load(folder)
    except UsageError:
        told += 1
print(told)
"""
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 200
