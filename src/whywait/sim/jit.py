"""One source, two ways of running it: compiled by numba where the extra ``[sim]`` is installed, else as plain Python.

``WHYWAIT_SIM=python`` forces the plain form. No fast-math anywhere, so both give the same bits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

try:
    if os.environ.get("WHYWAIT_SIM") == "python":
        raise ImportError
    import numba
    from numba.core import caching, types
    from numba.extending import intrinsic

    COMPILED = True
except ImportError:
    COMPILED = False


def _sources() -> str:
    """A digest of everything that may be compiled: a function's stored form is stale when one it calls has changed,
    which numba, looking at its own file only, would not notice."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_bytes()
        if b"\n@jit" in text or b"\n@entry" in text or path.stem in ("state", "kernel_state", "jit"):
            digest.update(text)
    return digest.hexdigest()


_STAMP = _sources() if COMPILED else ""


def jit(function: F) -> F:
    """``function``, compiled at its first call (the result is kept on disk) where numba is there; to be called by
    compiled functions only, so that no way in from Python has to be made."""
    return _compiled(function, inner=True) if COMPILED else function


def entry(function: F) -> F:
    """The same, to be called from Python."""
    return _compiled(function, inner=False) if COMPILED else function


def _compiled(function: F, inner: bool) -> F:
    # Nothing here allocates, and without reference counts calls are several times cheaper.
    options: dict[str, Any] = {
        "error_model": "numpy",
        "_nrt": False,
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": inner,
    }
    try:
        compiled: Any = numba.njit(cache=True, **options)(function)
        cache = compiled._cache
        name = f"{cache._impl.filename_base}-{_STAMP[:12]}"
        cache._cache_file = caching.IndexDataCacheFile(cache._cache_path, name, _STAMP)
    except (RuntimeError, AttributeError):  # no folder to keep it in, or another numba: compile each time
        compiled = numba.njit(**options)(function)
    return compiled  # type: ignore[no-any-return]


def viewer(dtype: np.dtype[np.void]) -> Callable[[Any, int], Any]:
    """A function that gives record ``index`` of a table: of records at an address when compiled, else of the array."""
    if not COMPILED:
        return _item
    record = numba.from_dtype(dtype)
    size = dtype.itemsize

    @intrinsic  # type: ignore[untyped-decorator]
    def view(_typing: Any, _table: Any, _index: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            offset = builder.mul(values[1], context.get_constant(types.int64, size))
            return builder.inttoptr(builder.add(values[0], offset), context.get_value_type(record))

        return record(types.int64, types.int64), code

    return view  # type: ignore[no-any-return]


def _item(table: Any, index: int) -> Any:
    return table[index]
