"""Record batches handed to Arrow one at a time, by its C stream interface.

arro3 0.8, the last for Python 3.10, wants the batches of a reader all at once; later ones take an iterator. A table
that comes in pieces must not be in memory whole, so there the pieces go by the interface every Arrow library speaks:
https://arrow.apache.org/docs/format/CStreamInterface.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

_POINTER = ctypes.sizeof(ctypes.c_void_p)
# struct ArrowSchema and struct ArrowArray: their size, and where each has its release callback.
_SCHEMA = (2 * _POINTER + _POINTER + 8 + 8 + 4 * _POINTER, 2 * _POINTER + _POINTER + 8 + 8 + 2 * _POINTER)
_ARRAY = (5 * 8 + 5 * _POINTER, 5 * 8 + 3 * _POINTER)
_FAILED = 5  # EIO; what happened is kept by whoever makes the batches

_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ERROR = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Stream(ctypes.Structure):
    _fields_ = (("schema", _GET), ("next", _GET), ("error", _ERROR), ("release", _RELEASE), ("own", ctypes.c_void_p))


class Batches:
    """What ``arro3.io.write_parquet`` takes for a stream of ``batches``. Keep it until the writing is done."""

    def __init__(self, schema: Any, batches: Iterator[Any]) -> None:
        self._schema, self._batches = schema, batches
        self._said = ctypes.create_string_buffer(b"no further batch could be made")
        error = _ERROR(lambda _stream: ctypes.addressof(self._said))
        self._stream = _Stream(_GET(self._get_schema), _GET(self._get_next), error, _RELEASE(self._release), None)

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._stream), b"arrow_array_stream", None)

    def _get_schema(self, _stream: int, out: int) -> int:
        _move(self._schema.__arrow_c_schema__(), b"arrow_schema", out, _SCHEMA)
        return 0

    def _get_next(self, _stream: int, out: int) -> int:
        try:
            batch = next(self._batches)
        except StopIteration:
            ctypes.memset(out, 0, _ARRAY[0])  # released: the end
            return 0
        except Exception:
            return _FAILED
        _move(batch.__arrow_c_array__()[1], b"arrow_array", out, _ARRAY)
        return 0

    def _release(self, stream: int) -> None:
        ctypes.memset(stream + 3 * _POINTER, 0, _POINTER)


def _move(capsule: Any, name: bytes, out: int, layout: tuple[int, int]) -> None:
    """Hand over what a capsule holds: a copy of the struct there, and no release of it here."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = get(capsule, name)
    size, release = layout
    ctypes.memmove(out, address, size)
    ctypes.memset(address + release, 0, _POINTER)
