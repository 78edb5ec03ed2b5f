"""Whether the footer of a Parquet file can be given to its reader, which ends the whole process on some damage.

Thrift's compact protocol (its specification: thrift/doc/specs/thrift-compact-protocol.md), gone through and not kept:
every field within the bytes there are, and no number below zero, since in a footer all are counts, sizes and places.
"""

from __future__ import annotations

_DEEPEST = 32
_BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = 3, (4, 5, 6), 7, 8, (9, 10), 12


def check(data: bytes) -> None:
    """
    Raises:
        ValueError: no such structure.
    """
    try:
        end = _struct(data, 0, 0)
    except IndexError:
        raise ValueError("its footer is cut short") from None
    if end > len(data):
        raise ValueError("its footer is cut short")


def _struct(data: bytes, at: int, depth: int) -> int:
    if depth > _DEEPEST:
        raise ValueError("its footer is nested too deep")
    while head := data[at]:
        at += 1
        if not head >> 4:  # the field's number stands for itself
            _, at = _varint(data, at)
        kind = head & 15
        at = at if kind in (1, 2) else _value(data, at, kind, depth)  # a boolean is in the head
    return at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> int:
    if kind in (1, 2, _BYTE):
        return at + 1
    if kind in _INTEGERS:
        number, at = _varint(data, at)
        if number & 1:  # zigzag
            raise ValueError("a number below zero in its footer")
        return at
    if kind == _DOUBLE:
        return at + 8
    if kind == _BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind in _LISTS:
        size, inner, at = data[at] >> 4, data[at] & 15, at + 1
        if size == 15:
            size, at = _varint(data, at)
        for _ in range(size):
            at = _value(data, at, inner, depth + 1)
        return at
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    raise ValueError(f"a kind of field in its footer that is none ({kind})")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number in its footer that has no end")
