"""Reads request bodies: strictly typed, counted first, and refused for the first mistake.

A field is either honoured, or known to be harmless and named in the reply's header, or refused by name: none is
silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.gateway.errors import invalid, unsupported
from penstock.gateway.limits import Limits
from penstock.gateway.wire.mistakes import explained
from penstock.gateway.wire.repairs import repaired

SHOWN = re.compile(r"[\w.:\[\]-]{1,100}", re.ASCII)
MOST_SHOWN = 16
"""Names of members that a reply's header tells."""
_MOST_REPAIRS = 8
_SAME: Mapping[str, str] = MappingProxyType({})

STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
TOLERANT = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
"""For messages and their parts, which clients send back as another server gave them."""

Entry = TypeVar("Entry")
Many = Annotated[list[Entry], Field(fail_fast=True)]
"""A list that is looked at up to its first mistake."""


class StrictBody(BaseModel):
    model_config = STRICT

    MOST: ClassVar[Mapping[str, str | int]] = {}
    """How large numbers may be and how many entries lists and maps may have, by their place in the body: a number, or
    the name of one of Limits.

    They are counted before anything is made of them.
    """
    TOLERANT_AT: ClassVar[Mapping[str, tuple[type, ...]]] = {}
    """The types that may stand at places whose other members are taken although nothing comes of them."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other servers' names of fields."""
    UNSET: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Values of fields that ask for nothing, as null does."""
    NOT_SUPPORTED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are refused by name unless they are null, false or empty."""
    OFF: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """More such fields, by the values that leave off what they ask for; -1 is any number below 0."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Places of fields that are accepted and ignored, because they could hardly change the answer."""
    NEUTRAL: ClassVar[Mapping[str, object]] = {}
    """The values of some of these fields that only ask for the default behaviour."""

    KINDS: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Lists whose entries of other kinds are left out and named: the model can do without them."""

    @classmethod
    def prepared(cls, values: Mapping[str, object]) -> Mapping[str, object]:
        """Returns the values of a body as they are to be checked."""
        return values


class TolerantBody(StrictBody):
    model_config = TOLERANT


Body = TypeVar("Body", bound=StrictBody)


def read(
    kind: type[Body],
    values: Mapping[str, object],
    limits: Limits,
    ignore: Callable[[str], None] = lambda _: None,
) -> Body:
    """Returns a checked request body.

    Args:
        ignore: is told of each field that asks for something and of which nothing comes.

    Raises:
        ApiError: 400 that names the first field that is wrong.
    """
    places = _places(kind)
    values, sent = _renamed(kind, values)
    values = kind.prepared(values)
    values, others = _of_kinds(kind, values)
    for name in sorted((*_ignored(kind, values, places), *others)):
        ignore(name)
    for name in sorted(places.refused & values.keys()):
        if not _is_off(values[name], kind.OFF.get(name)):
            raise unsupported(name)
    for steps, most in places.most:
        number = getattr(limits, most) if isinstance(most, str) else most
        for name, found in _at(values, steps):
            _at_most(sent.get(name, name), found, number)
    for name in _extras(values, places):
        ignore(name)
    return validated(kind, {n: value for n, value in values.items() if n not in places.unread}, sent)


def validated(
    kind: type[Body],
    values: Mapping[str, object],
    sent: Mapping[str, str] = _SAME,
    repairs: int = _MOST_REPAIRS,
) -> Body:
    """Returns the checked values; raises 400 that names the first field that is wrong."""
    checked = dict(values)
    try:
        return kind.model_validate(checked)
    except ValidationError as error:
        if not (repairs and repaired(checked, error)):
            raise explained(error, checked, sent) from None
    return validated(kind, checked, sent, repairs - 1)


class _Places(NamedTuple):
    """The places in bodies of one kind that are looked at before its fields are."""

    ignored: frozenset[str]
    """Fields of the body itself."""
    ignored_below: Sequence[tuple[str, Sequence[str]]]
    refused: frozenset[str]
    unread: frozenset[str]
    most: Sequence[tuple[Sequence[str], str | int]]
    tolerant: Sequence[tuple[str, Sequence[str], frozenset[str]]]
    """With the members that are read there."""


@cache
def _places(kind: type[StrictBody]) -> _Places:
    flat = frozenset(place for place in kind.IGNORED if "." not in place)
    refused = kind.NOT_SUPPORTED | kind.OFF.keys() - kind.model_fields.keys()
    return _Places(
        ignored=flat,
        ignored_below=[(place, steps_to(place)) for place in sorted(kind.IGNORED - flat)],
        refused=refused,
        unread=refused | (kind.IGNORED - kind.model_fields.keys()),
        most=[(steps_to(place), most) for place, most in kind.MOST.items()],
        tolerant=[
            (place, steps_to(place), frozenset[str]().union(*(one.__annotations__ for one in types)))
            for place, types in kind.TOLERANT_AT.items()
        ],
    )


def _renamed(
    kind: type[StrictBody], values: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, str]]:
    """Returns the values under this server's names, and the names by which they were sent.

    Raises:
        ApiError: 400 for a field that is there under two names.
    """
    found, sent = dict(values), dict[str, str]()
    for name in sorted(kind.ALIASES.keys() & values.keys()):
        value, field = found.pop(name), kind.ALIASES[name]
        if value is None:
            continue
        if found.get(field) is not None:
            raise invalid(f"Give '{field}' or '{name}', not both.", name)
        found[field], sent[field] = value, name
    for name in kind.UNSET.keys() & found.keys():
        if found[name] in kind.UNSET[name]:
            del found[name]
    return found, sent


def _of_kinds(
    kind: type[StrictBody], values: Mapping[str, object]
) -> tuple[Mapping[str, object], Sequence[str]]:
    """Returns the values without entries of lists that are of unknown kinds, and the names of these kinds."""
    others: set[str] = set()
    for field, known in kind.KINDS.items():
        entries = values.get(field)
        if isinstance(entries, list):
            kinds = [_kind_of(entry, known) for entry in entries]
            others |= {f"{field}[].{other}" for other in kinds if other not in known}
            kept = [entry for entry, of in zip(entries, kinds, strict=True) if of in known]
            values = {**values, field: kept}
    return values, sorted(filter(SHOWN.fullmatch, others))[:MOST_SHOWN]


def _kind_of(entry: object, known: frozenset[str]) -> str:
    """Returns the kind of an entry; a known one, if it has none, for then it is refused."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    return kind if isinstance(kind, str) else next(iter(known))


def _ignored(kind: type[StrictBody], values: Mapping[str, object], places: _Places) -> set[str]:
    """Returns the places of fields that ask for something and are ignored."""
    found = [(name, values[name]) for name in places.ignored & values.keys()]
    found += [(place, value) for place, steps in places.ignored_below for _, value in _at(values, steps)]
    return {place for place, value in found if value and value != kind.NEUTRAL.get(place)}


def _is_off(value: object, off: tuple[object, ...] | None) -> bool:
    """Returns whether a value of a field that is not supported asks for nothing."""
    if value is None or value in ("", []):
        return True
    if off is None:
        return value is False
    is_below = -1 in off and isinstance(value, int | float) and value < 0
    return is_below or value in off or value == {}


def steps_to(place: str) -> list[str]:
    """Splits a place like `messages[].content` into names of fields, and `[]` for every entry of a list."""
    return place.replace("[]", ".[]").split(".")


def _at(value: object, steps: Sequence[str], name: str = "") -> Iterator[tuple[str, object]]:
    """Finds all values at a place, each with its own name, such as `messages[3].content`."""
    if not steps:
        yield name, value
    elif steps[0] != "[]":
        if isinstance(value, Mapping) and steps[0] in value:
            step = f"{name}.{steps[0]}" if name else steps[0]
            yield from _at(value[steps[0]], steps[1:], step)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _at(item, steps[1:], f"{name}[{i}]")


def _extras(values: Mapping[str, object], places: _Places) -> list[str]:
    """Names some members that ask for something and are not read, such as `messages[].cache_control`."""
    found: set[str] = set()
    for place, steps, known in places.tolerant:
        for _, item in _at(values, steps):
            if isinstance(item, dict) and not item.keys() <= known:
                found |= {f"{place}.{name}" for name in item.keys() - known if item[name]}
    return sorted(filter(SHOWN.fullmatch, found))[:MOST_SHOWN]


def _at_most(name: str, found: object, most: int) -> None:
    number = len(found) if isinstance(found, list | dict) else found
    if isinstance(number, int | float) and number > most:
        raise invalid(f"'{name}' is {number}, but this server takes at most {most}.", name)
