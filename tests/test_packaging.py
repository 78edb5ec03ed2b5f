"""What is shipped: the wheel's data, the lock, the container, and that nothing needs Linux to be imported."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from whywait.load.stub import StubProcess
from whywait.probe import abilities

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
APPLE = Path(__file__).resolve().parent / "apple"
PUBLIC = {"https://pypi.org", "https://files.pythonhosted.org"}
IMPORT_ALL = """
import importlib, pkgutil, sys, whywait
bad = []
for module in pkgutil.walk_packages(whywait.__path__, "whywait."):
    if module.name == "whywait.__main__":
        continue
    try:
        importlib.import_module(module.name)
    except Exception as exc:
        if getattr(exc, "name", "") != "grpc":  # an extra, and only that module needs it
            bad.append(f"{module.name}: {exc!r}")
print(sys.platform, len([m for m in sys.modules if m.startswith("whywait.")]))
print("\\n".join(bad))
"""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def asked(project: dict[str, Any]) -> set[str]:
    extras = [r for rs in project["project"]["optional-dependencies"].values() for r in rs]
    return {name_of(r) for r in [*project["project"]["dependencies"], *extras]} - {"whywait"}


# macOS


def apple(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python with all taken away that macOS does not have, in itself and in what it starts."""
    path = os.pathsep.join([str(APPLE), str(ROOT / "src")])
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path, "WHYWAIT_SIM": "python", **env})  # fmt: skip


@pytest.mark.parametrize("bare", ["", "1"])
def test_every_module_is_imported_where_linux_is_not(bare: str) -> None:
    """``bare`` hides resource and fcntl as well, which even macOS has."""
    done = apple("-c", IMPORT_ALL, WHYWAIT_TEST_BARE=bare)
    head, _, bad = done.stdout.partition("\n")
    assert done.returncode == 0, done.stderr
    assert head.split()[0] == "darwin"
    assert int(head.split()[1]) > 300
    assert not bad.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="the real thing needs no imitation")
def test_the_imitation_takes_something_away() -> None:
    code = "import os, select; print(hasattr(select, 'epoll'), hasattr(os, 'sched_getaffinity'))"
    assert apple("-c", code).stdout.split() == ["False", "False"]


def test_a_run_by_the_user_clock_says_so(tmp_path: Path) -> None:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5") as stub:
        done = apple("-m", "whywait", "run", stub.url, "--requests", "6", "--no-floor", "--prompt-tokens", "16",
                     "--output-tokens", "6", "--out", str(tmp_path / "run"), "--json")  # fmt: skip
    assert done.returncode in (0, 6), done.stderr  # 6: a busy machine made the client late
    found = json.loads(done.stdout)
    assert found["points"][0]["counts"]["ok"] == 6
    assert found["points"][0]["ttft_ms"]["p50"] >= 9
    assert any("clock" in d["what"] + d["why"] for d in found["doubts"])


def test_doctor_there_knows_what_is_missing() -> None:
    done = apple("-m", "whywait", "doctor", "--json", "--no-floor")
    assert done.returncode == 0, done.stderr
    states = {a["name"]: a["state"] for s in json.loads(done.stdout)["sections"] for a in s["abilities"]}
    assert states["kernel-stamps"] == "cannot"
    assert states["epoll"] == "partly"


# the lock


def test_the_lock_holds_what_the_project_asks(project: dict[str, Any], lock: dict[str, Any]) -> None:
    packages = {p["name"]: p for p in lock["package"]}
    assert asked(project) <= packages.keys()
    ours = {name_of(d["name"]) for d in packages["whywait"]["metadata"]["requires-dist"]}
    assert ours - {"whywait"} == asked(project), "run: uv lock"
    assert lock["requires-python"] == project["project"]["requires-python"]


def test_the_lock_is_of_the_public_index_with_hashes(lock: dict[str, Any]) -> None:
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^/\"]+", text)) <= PUBLIC
    assert "file:" not in text
    for package in lock["package"]:
        if package["name"] == "whywait":
            assert package["source"] == {"editable": "."}
            continue
        assert package["source"] == {"registry": "https://pypi.org/simple"}
        files = [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]
        assert files
        assert all(f["hash"].startswith("sha256:") for f in files)


def test_constraints_are_those_of_the_lock(project: dict[str, Any], lock: dict[str, Any]) -> None:
    pinned: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition(";")[0].strip().partition("==")
            assert version, line
            pinned.setdefault(name, set()).add(version)
    locked: dict[str, set[str]] = {}
    for package in lock["package"]:
        if package["name"] != "whywait":
            locked.setdefault(package["name"], set()).add(package["version"])
    assert pinned == locked, "write constraints.txt anew: docs/packaging.md"
    assert asked(project) <= pinned.keys()


# the project


def test_pythons_are_those_that_ci_runs(project: dict[str, Any]) -> None:
    classifiers = project["project"]["classifiers"]
    said = [c.rpartition(":: ")[2] for c in classifiers if re.fullmatch(r".* :: 3\.\d+", c)]
    assert said == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert project["project"]["requires-python"] == f">={said[0]}"
    ci = ROOT / ".github" / "workflows" / "ci.yml"
    assert not ci.exists() or f"[{', '.join(json.dumps(v) for v in said)}]" in ci.read_text("utf-8")


def test_the_sdist_holds_what_its_tests_read(project: dict[str, Any]) -> None:
    held = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for name in ("SECURITY.md", "Dockerfile", ".dockerignore", "uv.lock", "constraints.txt", "docs", "tests"):
        assert name in held
        assert (ROOT / name).exists()


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as z:
        packed = {n for n in z.namelist() if n.startswith("whywait/")}
        assert any(n.endswith("licenses/LICENSE") for n in z.namelist())
        entry = next(n for n in z.namelist() if n.endswith("entry_points.txt"))
        assert "whywait = whywait.cli:main" in z.read(entry).decode()
    source = ROOT / "src"
    there = {str(p.relative_to(source)) for p in (source / "whywait").rglob("*")
             if p.is_file() and "__pycache__" not in p.parts}  # fmt: skip
    assert packed == there
    assert {"whywait/py.typed", "whywait/physics/machines.toml", "whywait/load/corpus/en.txt"} <= packed


# the container: it is not built here, its structure is looked at


@pytest.fixture(scope="module")
def stages() -> list[list[tuple[str, str]]]:
    """The Dockerfile's stages, each a list of (instruction, the rest)."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip() and not line.startswith("#")]
    out: list[list[tuple[str, str]]] = [[]]
    for line in lines:
        word, _, rest = line.partition(" ")
        assert word in {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}, line
        if word == "FROM":
            out.append([])
        out[-1].append((word, rest.strip()))
    return out


def test_the_image_is_small_and_not_roots(stages: list[list[tuple[str, str]]]) -> None:
    _, build, last = stages
    assert build[0] == ("FROM", "python:${PYTHON}-slim AS build")
    assert last[0] == ("FROM", "python:${PYTHON}-slim")
    words = [word for word, _ in last]
    assert ("USER", "10001") in last
    assert words.index("USER") > max(i for i, w in enumerate(words) if w == "RUN")  # nothing is run as root after it
    assert dict(last)["ENTRYPOINT"] == '["whywait"]'
    (run,) = [rest for word, rest in last if word == "RUN"]
    assert "--no-cache-dir" in run
    assert "-c /dist/constraints.txt" in run
    assert "useradd" in run
    assert "--uid 10001" in run
    assert "rm -rf /dist" in run
    assert any("pip wheel" in rest and "--no-deps" in rest for word, rest in build if word == "RUN")
    assert not [
        rest for stage in stages for word, rest in stage if word == "ENV" and re.search("KEY|TOKEN|SECRET", rest)
    ]


def test_all_that_is_copied_is_there_and_let_through(stages: list[list[tuple[str, str]]]) -> None:
    let = {x[1:] for x in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if x.startswith("!")}
    copied = set()
    for stage in stages:
        for word, rest in stage:
            if word == "COPY" and not rest.startswith("--from"):
                copied |= set(rest.split()[:-1])
    assert copied == let
    assert all((ROOT / name).exists() for name in copied)


def test_the_shell_steps_are_shell(stages: list[list[tuple[str, str]]]) -> None:
    for stage in stages:
        for word, rest in stage:
            if word == "RUN":
                done = subprocess.run(["sh", "-n", "-c", rest], capture_output=True, text=True, check=False)
                assert (done.returncode, done.stderr) == (0, "")


def test_no_file_names_a_machine() -> None:
    for name in ("Dockerfile", ".dockerignore", "constraints.txt", "pyproject.toml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"/opt/|/work/|/home/\w|index-url|find-links", text), name


def test_doctor_knows_every_extra_that_adds_to_what_can_be_done(project: dict[str, Any]) -> None:
    offered = project["project"]["optional-dependencies"].keys()
    assert abilities.EXTRAS.keys() == offered - {"bench", "docs", "test", "dev"}
