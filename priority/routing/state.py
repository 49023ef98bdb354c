"""What a replica says of itself to a router: a snapshot when the stream opens, then changes.

A replica numbers what it pushes, so that a router sees a gap; then the stream is opened again. Each form has
`as_wire`, a dict for a JSON encoder, and a strict parser. Block hashes are those of `engine.planning.prefix_index`,
tenants' salts included; on the wire they are one hexadecimal string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf, isfinite
from typing import Any, TypeVar

from priority.lanes import Lane, LanePolicy
from priority.room import Held
from priority.steptime import NAMES

HASH_BYTES = 16
MAX_BLOCKS = 4_000_000
"""Block hashes in one message."""
MAX_TENANTS = 64
"""Of a lane that are told apart; what the others have waiting counts as that of one more, named OTHERS."""
OTHERS = ""
MAX_TICKETS = 65_536
"""Tickets in one message."""
MAX_NAME = 256
_MOST = 2**53
_Parsed = TypeVar("_Parsed")


class StateError(ValueError):
    """A message that is not what a replica says; names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneWork:
    """What waits and runs in a lane."""

    queued: Mapping[str, int] = field(default_factory=dict)
    """Uncached prompt tokens that wait, by tenant; see `with_largest`."""
    num_waiting: int = 0
    """Requests that wait."""
    num_running: int = 0
    num_prefill_left: int = 0
    """Prompt tokens that running requests still have to compute."""
    is_lively: bool = False
    """Requests came lately, and more are to be expected."""
    factor: float = 1.0
    """Learnt: with it, 19 in 20 forecasts come true."""

    def as_wire(self) -> dict[str, object]:
        return _as_wire(self) | {"queued": dict(self.queued)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All that changes from step to step, as one picture."""

    lanes: Mapping[Lane, LaneWork]
    """All three."""
    coefficients: tuple[float, float, float, float]
    """Of the fitted step time (`priority.steptime`); all 0 while too little was measured."""
    num_free_kv: int
    """Tokens that there is room for in the KV pool, evictable blocks included."""
    held: Held
    context_each: float = 0.0
    """Tokens of KV of a running stream."""
    step_s: float = 0.0
    """What the last step took; 0 if none runs."""
    is_draining: bool = False
    """New requests are refused."""

    def as_wire(self) -> dict[str, object]:
        lanes = {lane.label: work.as_wire() for lane, work in self.lanes.items()}
        return _as_wire(self) | {"lanes": lanes, "held": _as_wire(self.held)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All there is to know of a replica: the first message of a stream."""

    replica: str
    """Its name, the same after every reconnection."""
    epoch: str
    """Another for every process: a restarted replica has forgotten all."""
    model: str
    """Of all replicas behind one router the same."""
    block_size: int
    num_kv_tokens: int
    max_batch_tokens: int
    max_num_seqs: int
    policies: Mapping[Lane, LanePolicy]
    """All three; of each, what is promised and its weight are sent."""
    load: Load
    blocks: Sequence[bytes] = ()
    """Hashes of the resident blocks."""

    def as_wire(self) -> dict[str, object]:
        return _as_wire(self) | {
            "policies": {
                lane.label: {
                    "ttft_s": _finite(policy.ttft_s),
                    "tpot_s": _finite(policy.tpot_s),
                    "weight": policy.weight,
                }
                for lane, policy in self.policies.items()
            },
            "load": self.load.as_wire(),
            "blocks": _joined(self.blocks),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is new since the message before it; one without anything new says that the replica is alive."""

    epoch: str
    number: int
    """1 for the first after a snapshot, and so on."""
    load: Load | None = None
    """None: as it was."""
    stored: Sequence[bytes] = ()
    """Hashes of blocks that became resident."""
    removed: Sequence[bytes] = ()
    """Of blocks that were evicted. A block is never in both."""
    counted: Sequence[int] = ()
    """Tickets of this router whose requests `load` counts from now on, or that are over."""

    def as_wire(self) -> dict[str, object]:
        return _as_wire(self) | {
            "load": self.load and self.load.as_wire(),
            "stored": _joined(self.stored),
            "removed": _joined(self.removed),
        }


def with_largest(queued: Mapping[str, int]) -> dict[str, int]:
    """The tenants that have most waiting, and the sum of the others as OTHERS."""
    if len(queued) <= MAX_TENANTS:
        return dict(queued)
    ranked = sorted(queued, key=lambda tenant: (-queued[tenant], tenant))
    kept = {tenant: queued[tenant] for tenant in ranked[:MAX_TENANTS]}
    kept[OTHERS] = kept.get(OTHERS, 0) + sum(queued[tenant] for tenant in ranked[MAX_TENANTS:])
    return kept


# Parsing


def parse_snapshot(message: object) -> Snapshot:
    """Raises StateError."""
    given = _Fields(message, Snapshot, "snapshot")
    return Snapshot(
        replica=given.name("replica"),
        epoch=given.name("epoch"),
        model=given.name("model"),
        block_size=given.count("block_size", least=1),
        num_kv_tokens=given.count("num_kv_tokens", least=1),
        max_batch_tokens=given.count("max_batch_tokens", least=1),
        max_num_seqs=given.count("max_num_seqs", least=1),
        policies=given.lanes("policies", _policy),
        load=_load(given.value("load"), "load"),
        blocks=given.hashes("blocks"),
    )


def parse_change(message: object) -> Change:
    """Raises StateError."""
    given = _Fields(message, Change, "change")
    load = given.value("load")
    return Change(
        epoch=given.name("epoch"),
        number=given.count("number", least=1),
        load=None if load is None else _load(load, "load"),
        stored=given.hashes("stored"),
        removed=given.hashes("removed"),
        counted=given.counts("counted", MAX_TICKETS),
    )


def _load(value: object, where: str) -> Load:
    given = _Fields(value, Load, where)
    held = _Fields(given.value("held"), Held, f"{where}.held")
    coefficients = given.items("coefficients", len(NAMES))
    if len(coefficients) != len(NAMES):
        raise StateError(f"{where}.coefficients must be {len(NAMES)} numbers")
    alpha, beta, gamma, delta = (_number(one, f"{where}.coefficients") for one in coefficients)
    return Load(
        lanes=given.lanes("lanes", _lane_work),
        coefficients=(alpha, beta, gamma, delta),
        num_free_kv=given.count("num_free_kv"),
        held=Held(
            num_running=held.count("num_running"),
            num_tokens=held.count("num_tokens"),
            ends_s=held.number("ends_s"),
            finished_per_s=held.number("finished_per_s"),
            freed_per_s=held.number("freed_per_s"),
        ),
        context_each=given.number("context_each"),
        step_s=given.number("step_s"),
        is_draining=given.flag("is_draining"),
    )


def _lane_work(value: object, where: str) -> LaneWork:
    given = _Fields(value, LaneWork, where)
    queued = given.value("queued")
    if not isinstance(queued, dict) or len(queued) > MAX_TENANTS + 1:
        raise StateError(f"{where}.queued must be an object of at most {MAX_TENANTS + 1} tenants")
    for tenant, num_tokens in queued.items():
        _count(num_tokens, f"{where}.queued[{tenant[:40]!r}]")
        if len(tenant) > MAX_NAME:
            raise StateError(f"{where}.queued has a name of more than {MAX_NAME} characters")
    return LaneWork(
        queued=queued,
        num_waiting=given.count("num_waiting"),
        num_running=given.count("num_running"),
        num_prefill_left=given.count("num_prefill_left"),
        is_lively=given.flag("is_lively"),
        factor=given.number("factor"),
    )


def _policy(value: object, where: str) -> LanePolicy:
    if not isinstance(value, dict) or value.keys() != {"ttft_s", "tpot_s", "weight"}:
        raise StateError(f"{where} must be an object of ttft_s, tpot_s and weight")
    ttft_s, tpot_s = (
        inf if value[name] is None else _number(value[name], f"{where}.{name}")
        for name in ("ttft_s", "tpot_s")
    )
    weight = _count(value["weight"], f"{where}.weight")
    try:
        return LanePolicy(ttft_s=ttft_s, tpot_s=tpot_s, weight=weight)
    except ValueError as error:
        raise StateError(f"{where}: {error}") from None


class _Fields:
    """The fields of an object that has exactly those of a dataclass."""

    def __init__(self, value: object, form: type, where: str) -> None:
        if not isinstance(value, dict):
            raise StateError(f"{where} must be an object")
        names = _names(form)
        for name in value.keys() ^ names:
            raise StateError(f"{where}.{str(name)[:40]} is {'missing' if name in names else 'unknown'}")
        self._values: dict[str, object] = value
        self._where = where

    def value(self, name: str) -> object:
        return self._values[name]

    def count(self, name: str, least: int = 0) -> int:
        return _count(self._values[name], f"{self._where}.{name}", least)

    def number(self, name: str) -> float:
        return _number(self._values[name], f"{self._where}.{name}")

    def flag(self, name: str) -> bool:
        value = self._values[name]
        if not isinstance(value, bool):
            raise StateError(f"{self._where}.{name} must be true or false")
        return value

    def name(self, name: str) -> str:
        value = self._values[name]
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
            raise StateError(f"{self._where}.{name} must be a text of 1 to {MAX_NAME} characters")
        return value

    def items(self, name: str, most: int) -> list[object]:
        value = self._values[name]
        if not isinstance(value, list | tuple) or len(value) > most:
            raise StateError(f"{self._where}.{name} must be a list of at most {most}")
        return list(value)

    def counts(self, name: str, most: int) -> list[int]:
        return [_count(one, f"{self._where}.{name}") for one in self.items(name, most)]

    def hashes(self, name: str) -> list[bytes]:
        value = self._values[name]
        size = 2 * HASH_BYTES
        if not isinstance(value, str) or len(value) % size or len(value) > MAX_BLOCKS * size:
            raise StateError(
                f"{self._where}.{name} must be up to {MAX_BLOCKS} hashes of {size} hexadecimal digits"
            )
        try:
            joined = bytes.fromhex(value)
        except ValueError:
            joined = b""
        if 2 * len(joined) != len(value):
            raise StateError(f"{self._where}.{name} must be hexadecimal")
        return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]

    def lanes(self, name: str, parse: Callable[[object, str], _Parsed]) -> dict[Lane, _Parsed]:
        value = self._values[name]
        if not isinstance(value, dict) or value.keys() != {lane.label for lane in Lane}:
            raise StateError(f"{self._where}.{name} must have all lanes and no other")
        return {lane: parse(value[lane.label], f"{self._where}.{name}.{lane.label}") for lane in Lane}


@cache
def _names(form: type) -> frozenset[str]:
    return frozenset(one.name for one in fields(form))


def _count(value: object, where: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise StateError(f"{where} must be a whole number of at least {least}")
    return value


def _number(value: object, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST:  # type: ignore[operator]
        raise StateError(f"{where} must be a number of at least 0")
    return float(value)  # type: ignore[arg-type]


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _joined(hashes: Iterable[bytes]) -> str:
    return b"".join(hashes).hex()


def _as_wire(one: Any) -> dict[str, object]:
    """The fields as they are; those of objects are replaced by their owners."""
    return {each.name: getattr(one, each.name) for each in fields(one)}
