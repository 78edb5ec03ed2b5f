"""Performance as a test: ``whywait.testing`` and the fixture of the pytest plugin, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.comparable_runs import noisy
from whywait import testing
from whywait.errors import UsageError

ROOT = Path(__file__).parents[1]
STEADY = "8 in flight, steady"


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("baseline") / "b.json"
    return testing.save_baseline(path, noisy(STEADY, 1))


def test_what_is_no_worse_passes(baseline):
    gates, figures = ["tpot_ms.p50>+10%", "worse"], ("tpot_ms.p50", "ttft_ms.p50")
    result = testing.assert_no_worse(noisy(STEADY, 2), baseline, gates, metrics=figures)
    assert result["state"] == "passes"
    with pytest.warns(testing.UndecidedWarning, match="not known well enough: .*requests/s"):
        testing.assert_no_worse(noisy(STEADY, 2), baseline, gates)  # of all figures, one may be worse


def test_what_is_worse_is_an_assertion_that_says_why(baseline):
    with pytest.raises(AssertionError) as caught:
        testing.assert_no_worse(noisy(STEADY, 2, 0.2), baseline, ["tpot_ms.p50>+10%"])
    assert "tpot_ms.p50>+10% fails at concurrency 8" in str(caught.value)
    assert caught.value.result["comparisons"]


def test_undecided_warns_or_fails_where_strict(baseline):
    run = noisy(STEADY, 2, 0.2)
    with pytest.warns(testing.UndecidedWarning, match=r"tpot_ms.p50>\+20% undecided"):
        testing.assert_no_worse(run, baseline, ["tpot_ms.p50>+20%"])
    with pytest.raises(testing.Worse, match="undecided"):
        testing.assert_no_worse(run, baseline, ["tpot_ms.p50>+20%"], strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testing.assert_no_worse(run, baseline, ["tpot_ms.p50>+40%"])


def test_what_cannot_be_compared_is_no_failed_assertion(baseline):
    with pytest.raises(UsageError):
        testing.assert_no_worse("nowhere", baseline)
    with pytest.raises(UsageError):
        testing.assert_no_worse(noisy(STEADY, 2), baseline, ["speed<5"])


SUITE = """
from tests.comparable_runs import noisy
import os, pytest

SLOWER = float(os.environ.get("SLOWER", "0"))

def test_gate(whywait_gate):
    whywait_gate.ready()
    print("measuring")
    run = noisy("8 in flight, steady", 2 if SLOWER else 1, SLOWER)
    result = whywait_gate(run, noisy("8 in flight, steady", 3), fail_if=["tpot_ms.p50>+10%"])
    assert result is None or result["state"] == "passes"

@pytest.mark.parametrize("x", ["../a/b"])
def test_names(whywait_gate, x):
    whywait_gate(noisy("8 in flight, steady", 1), fail_if=["tpot_ms.p50>+50%"])
"""


def suite(folder: Path, *argv: str, slower: float = 0.0) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "SLOWER": str(slower),
           "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}  # fmt: skip
    (folder / "test_performance.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "whywait.pytest_plugin", "-p", "no:cacheprovider",
               "--rootdir", str(folder), str(folder), *argv]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_fixture_from_the_first_baseline_to_a_failure(tmp_path):
    code, out = suite(tmp_path)
    assert code == 1
    assert "there is no baseline" in out
    assert "--whywait-save" in out
    assert "measuring" not in out.partition("test_names")[0]  # ready() fails before
    assert suite(tmp_path, "--whywait-save")[0] == 0
    kept = sorted(p.name for p in (tmp_path / "whywait-baselines").iterdir())
    assert kept == ["test_gate.json", "test_names-..-a-b.json"]
    assert suite(tmp_path)[0] == 0
    code, out = suite(tmp_path, slower=0.5)
    assert code == 1
    assert "tpot_ms.p50>+10% fails" in out
    assert "Traceback" not in out
    assert "1 failed, 1 passed" in out


def test_the_plugin_is_registered_and_light():
    """Whoever has whywait installed pays for it in every pytest: it loads nothing before a test asks."""
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nwhywait = "whywait.pytest_plugin"' in text
    code = "import sys, whywait.pytest_plugin; print([m for m in sys.modules if m.startswith(('whywait.', 'numpy'))])"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "['whywait.pytest_plugin']"


FAKE = """#!/bin/bash
verb=$1
if [ "$verb" = run ]; then
  while [ "$1" != --out ]; do shift; done
  mkdir -p "$(dirname "$2")"
  exec cp -r "$FAKE" "$2"
fi
exec "$PYTHON" -m whywait "$@"
"""


def test_the_gate_of_the_examples(tmp_path):
    """The script that people copy, with runs that were made before: a baseline of three, one like it, a slower one."""
    wrapper = tmp_path / "whywait"
    wrapper.write_text(FAKE)
    wrapper.chmod(0o755)
    gate = ROOT / "examples" / "03_performance_gate" / "gate.sh"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WHYWAIT": str(wrapper), "PYTHON": sys.executable,
           "BASELINE": str(tmp_path / "baseline.json"), "URL": "http://127.0.0.1:9"}  # fmt: skip

    def run(name: str, slower: float, *argv: str) -> subprocess.CompletedProcess[str]:
        kept = noisy(STEADY, 1 + len(name), slower).save(tmp_path / f"run-{name}")
        more = {"FAKE": str(kept), "OUT": str(tmp_path / name)}
        return subprocess.run([str(gate), *argv], env={**env, **more}, capture_output=True, text=True, check=False)

    saved = run("save", 0.0, "--save")
    assert saved.returncode == 0, saved.stderr
    assert "baseline of 3 runs" in saved.stderr
    again = run("again", 0.0)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "again" / "compare.html").exists()
    slower = run("slower", 0.5)
    assert slower.returncode == 1, slower.stdout + slower.stderr
    assert "tpot_ms.p50>+20% fails" in slower.stderr


def test_the_table_of_the_page_can_be_made_again():
    code = "import sys; sys.path[:0] = ['benchmarks']; import compare_error as c; print(c.drifting(1, 3))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    assert done.stdout.split()[0] == "(1,"
