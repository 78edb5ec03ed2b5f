"""Ways to what the kernel keeps: one function per kind of record. All tables are flat."""

from __future__ import annotations

from whywait.sim.jit import jit, viewer
from whywait.sim.kernel_state import (
    Engine,
    Event,
    Level,
    Link,
    Node,
    Real,
    Request,
    Row,
    Slot,
    Tier,
    Whole,
    World,
    dtype_of,
)

_engine = viewer(dtype_of(Engine))
_slot = viewer(dtype_of(Slot))
_whole = viewer(dtype_of(Whole))
_real = viewer(dtype_of(Real))
_link = viewer(dtype_of(Link))
_node = viewer(dtype_of(Node))
_tier = viewer(dtype_of(Tier))
_request = viewer(dtype_of(Request))
_level = viewer(dtype_of(Level))
_event = viewer(dtype_of(Event))
_row = viewer(dtype_of(Row))


@jit
def engine(w: World, e: int) -> Engine:
    return _engine(w.at_engines, e)  # type: ignore[no-any-return]


@jit
def seat(w: World, e: int, place: int) -> Slot:
    """A place for a sequence, taken or empty."""
    return _slot(w.at_slots, e * w.seats + place)  # type: ignore[no-any-return]


@jit
def order(w: World, e: int, k: int) -> Whole:
    """Places of the running sequences in order of admission, then the empty places."""
    return _whole(w.at_order, e * w.seats + k)  # type: ignore[no-any-return]


@jit
def running(w: World, eng: Engine, k: int) -> Slot:
    """The k-th sequence in order of admission."""
    return _slot(w.at_slots, eng.id * w.seats + order(w, eng.id, k).n)  # type: ignore[no-any-return]


@jit
def phase(w: World, e: int, at: int) -> Whole:
    """Decoders by where in a block they are."""
    return _whole(w.at_phase, e * w.block + at)  # type: ignore[no-any-return]


@jit
def linear_at(w: World, kind: int, tokens: int) -> Real:
    """Cost of a step's tokens; past the table its slope."""
    return _real(w.at_linear, kind * w.tokens + tokens)  # type: ignore[no-any-return]


@jit
def accept(w: World, kind: int, k: int) -> Real:
    return _real(w.at_accept, kind * w.drafts + k)  # type: ignore[no-any-return]


@jit
def link_at(w: World, at: int) -> Link:
    return _link(w.at_links, at)  # type: ignore[no-any-return]


@jit
def node_at(w: World, e: int, node: int) -> Node:
    return _node(w.at_nodes, e * w.nodes + node)  # type: ignore[no-any-return]


@jit
def heap_at(w: World, e: int, place: int) -> Whole:
    """Idle shared blocks by key, where eviction does not go by age."""
    return _whole(w.at_heap, e * w.ids + place)  # type: ignore[no-any-return]


@jit
def tier_at(w: World, e: int, level: int) -> Tier:
    return _tier(w.at_tiers, e * w.tiers + level)  # type: ignore[no-any-return]


@jit
def request(w: World, row: int) -> Request:
    return _request(w.at_requests, row)  # type: ignore[no-any-return]


@jit
def level_at(w: World, e: int, level: int) -> Level:
    """Waiting requests of one priority; then those that were loaded, and those handed over (or parked)."""
    return _level(w.at_levels, e * w.levels + level)  # type: ignore[no-any-return]


@jit
def due_at(w: World, k: int) -> Event:
    """The k-th row that comes by itself."""
    return _event(w.at_due, k)  # type: ignore[no-any-return]


@jit
def event_at(w: World, place: int) -> Event:
    return _event(w.at_events, place)  # type: ignore[no-any-return]


@jit
def row_at(w: World, k: int) -> Row:
    return _row(w.at_rows, k)  # type: ignore[no-any-return]
