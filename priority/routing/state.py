"""What a replica says of itself to a router: a snapshot when the stream opens, then changes.

A replica numbers what it pushes, so that a router sees a gap; then the stream is opened again. On the wire a message is
a JSON object of its fields, with lanes by number, hashes as hexadecimal digits and null for infinity. `parse_snapshot`
and `parse_change` read it strictly, by the types of the fields, so that a new field or lane needs nothing here. Block
hashes are those of `engine.planning.prefix_index`, tenants' salts included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, partial
from math import inf
from typing import Annotated, Any, get_args, get_type_hints

from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.room import MAX_ENDINGS, Ending, Held
from penstock.priority.steptime import NAMES

HASH_BYTES = 16
MAX_BLOCKS = 4_000_000
"""Block hashes in one message."""
MAX_TENANTS = 64
"""The number of a lane's tenants that are listed; the waiting work of the others counts as that of OTHERS."""
OTHERS = ""
MAX_TICKETS = 65_536
"""Tickets in one message."""
MAX_NAME = 256
_MOST = 2**53
Coefficients = tuple[float, ...]
PositiveInt = Annotated[int, "at least 1"]
_Unbounded = Annotated[float, "or infinite"]


class Role(StrEnum):
    """The part of a request that a replica is for, while there are others for the rest."""

    PREFILL = "prefill"
    """It computes long prompts, whose KV others take from it."""
    DECODE = "decode"
    """It computes the tokens after them, and short prompts."""
    BOTH = "both"


class StateError(ValueError):
    """A message is not one that a replica sends; the text names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneWork:
    """The requests that wait and run in a lane."""

    queued: Mapping[str, int] = field(default_factory=dict)
    """Work that waits, in prompt tokens, by tenant; see `with_largest`."""
    num_waiting: int = 0
    """Requests that wait."""
    num_running: int = 0
    num_prefill_left: int = 0
    """Work that running requests still have with their prompts, in prompt tokens."""
    is_lively: bool = False
    """Requests came lately, and more are to be expected."""
    factor: float = 1.0
    """A learnt factor: a forecast times this is compared with the promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All that changes from step to step, as one picture."""

    lanes: Mapping[Lane, LaneWork]
    """Every lane; one that a message does not name is idle."""
    coefficients: Coefficients
    """The fitted step time (`priority.steptime`); all 0 while too little was measured."""
    num_free_kv: int
    """Tokens that there is room for in the KV pool, evictable blocks included."""
    held: Held
    context_each: float = 0.0
    """Tokens of KV of a running stream, on average."""
    step_s: float = 0.0
    """Seconds that the last step took; 0 if none runs."""
    is_draining: bool = False
    """New requests are refused."""
    experts_s: float = 0.0
    """Seconds that a step takes in addition to the coefficients if its tokens choose every expert."""
    chosen_share: float = 0.0
    """The share of a layer's experts that each token chooses; 0 if the model has none."""
    pull_rate: float = 0.0
    """The tokens a second whose KV it takes from another replica, as measured; 0 if it takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All there is to know of a replica: the first message of a stream."""

    replica: str
    """The replica's name, the same after every reconnection."""
    epoch: str
    """A name of the process: a restarted replica has another one, and has forgotten all."""
    model: str
    """All replicas behind one router serve the same."""
    block_size: PositiveInt
    num_kv_tokens: PositiveInt
    max_batch_tokens: PositiveInt
    max_num_seqs: PositiveInt
    policies: Mapping[Lane, LanePolicy]
    """Every lane; one that a message does not name is promised nothing."""
    load: Load
    role: Role = Role.BOTH
    blocks: Sequence[bytes] = ()
    """Hashes of the resident blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is new since the message before it; one without anything new says that the replica is alive."""

    epoch: str
    number: PositiveInt
    """1 for the first after a snapshot, and so on."""
    load: Load | None = None
    """None if it is as it was."""
    stored: Sequence[bytes] = ()
    """Hashes of blocks that became resident."""
    removed: Sequence[bytes] = ()
    """Hashes of blocks that were evicted. A block is never in both."""
    counted: Sequence[int] = ()
    """Tickets of this router whose requests `load` counts from now on, or that are over."""


def with_largest(queued: Mapping[str, int]) -> dict[str, int]:
    """Returns the tenants that have most waiting, and the sum of the others as OTHERS."""
    if len(queued) <= MAX_TENANTS:
        return dict(queued)
    ranked = sorted(queued, key=lambda tenant: (-queued[tenant], tenant))
    kept = {tenant: queued[tenant] for tenant in ranked[:MAX_TENANTS]}
    kept[OTHERS] = kept.get(OTHERS, 0) + sum(queued[tenant] for tenant in ranked[MAX_TENANTS:])
    return kept


# Reading


def parse_snapshot(message: object) -> Snapshot:
    """Raises StateError."""
    snapshot: Snapshot = _reader(Snapshot)(message, "snapshot")
    return snapshot


def parse_change(message: object) -> Change:
    """Raises StateError."""
    change: Change = _reader(Change)(message, "change")
    return change


_Read = Callable[[Any, str], Any]
"""A function that reads a value of one type; a complaint, a StateError, names the place where it stands."""


@cache
def _reader(kind: Any) -> _Read:
    if kind in _READERS:
        return _READERS[kind]
    *_, last = get_args(kind) or (kind,)
    if last is type(None):
        read = _reader(get_args(kind)[0])
        return lambda value, where: None if value is None else read(value, where)
    return partial(_read_fields if kind is last else _read_lanes, last)


def _read_fields(kind: Any, value: object, where: str) -> Any:
    given, readers = _object(value, where), _field_readers(kind)
    for name in given.keys() ^ readers.keys():
        raise StateError(f"{where}.{str(name)[:40]} is {'missing' if name in readers else 'unknown'}")
    values = {name: read(given[name], f"{where}.{name}") for name, read in readers.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise StateError(f"{where}: {error}") from None


def _read_lanes(kind: Any, value: object, where: str) -> dict[Lane, Any]:
    """Reads the values of each lane, with defaults for lanes that are missing."""
    given, read = _object(value, where), _reader(kind)
    for name in given.keys() - _LANES.keys():
        raise StateError(f"{where}.{str(name)[:40]} is no lane here")
    return {
        lane: read(given[name], f"{where}.{lane.label}") if name in given else kind()
        for name, lane in _LANES.items()
    }


@cache
def _field_readers(kind: Any) -> dict[str, _Read]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: _reader(_Unbounded if each.default == inf else hints[each.name]) for each in fields(kind)
    }


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StateError(f"{where} must be an object")
    return value


def _checked(
    is_right: Callable[[Any], bool], text: str, convert: Callable[[Any], Any] = lambda value: value
) -> _Read:
    def read(value: object, where: str) -> Any:
        if not is_right(value):
            raise StateError(f"{where} must be {text}")
        return convert(value)

    return read


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST  # type: ignore[operator]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME


def _is_list(value: object, most: int, is_right: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and len(value) <= most and all(map(is_right, value))


def _is_ending(value: object) -> bool:
    return _is_list(value, 3, _is_number) and len(value) == 3  # type: ignore[arg-type]


def _are_tenants(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > MAX_TENANTS + 1:
        return False
    return all(map(_is_name, value)) and all(map(_is_count, value.values()))


def _read_hashes(value: object, where: str) -> list[bytes]:
    if isinstance(value, list) and len(value) <= MAX_BLOCKS:
        with suppress(TypeError, ValueError):
            hashes = list(map(bytes.fromhex, value))
            if all(len(each) == HASH_BYTES for each in hashes):
                return hashes
    raise StateError(f"{where} must be up to {MAX_BLOCKS} hashes of {2 * HASH_BYTES} hexadecimal digits")


_LANES = {str(lane.value): lane for lane in Lane}
_READERS: dict[Any, _Read] = {
    int: _checked(_is_count, "a whole number of at least 0"),
    PositiveInt: _checked(lambda value: _is_count(value) and value > 0, "a whole number of at least 1"),
    float: _checked(_is_number, "a number of at least 0"),
    _Unbounded: _checked(
        lambda value: value is None or _is_number(value),
        "a number of at least 0, or null",
        lambda value: inf if value is None else value,
    ),
    bool: _checked(lambda value: isinstance(value, bool), "true or false"),
    Role: _checked(lambda value: value in [*Role], f"one of {', '.join(Role)}", Role),
    str: _checked(lambda value: _is_name(value) and value, f"a text of 1 to {MAX_NAME} characters"),
    Mapping[str, int]: _checked(
        _are_tenants,
        f"an object of whole numbers by at most {MAX_TENANTS + 1} names of at most {MAX_NAME} characters",
    ),
    Sequence[int]: _checked(
        lambda value: _is_list(value, MAX_TICKETS, _is_count),
        f"a list of at most {MAX_TICKETS} whole numbers",
    ),
    Coefficients: _checked(
        lambda value: _is_list(value, len(NAMES), _is_number) and len(value) == len(NAMES),
        f"a list of {len(NAMES)} numbers",
        tuple,
    ),
    Sequence[bytes]: _read_hashes,
    Sequence[Ending]: _checked(
        lambda value: _is_list(value, MAX_ENDINGS, _is_ending),
        f"a list of at most {MAX_ENDINGS} lists of three numbers",
        lambda value: list(map(tuple, value)),
    ),
}
