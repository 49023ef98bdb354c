"""Reads request bodies: strictly typed, counted first, and refused for the first mistake.

A field is either honoured, or known to be harmless and named in the reply's header, or refused by name: none is
silently ignored. What there is to say of a field stands in its type, as pydantic's bounds do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, NotRequired, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import get_type_hints, is_typeddict

from penstock.gateway.errors import ApiError, invalid, unsupported
from penstock.gateway.limits import Limits
from penstock.gateway.wire.mistakes import explained, path_of, repaired, unsupported_value

SHOWN = re.compile(r"[\w.:\[\]-]{1,100}", re.ASCII)
MOST_SHOWN = 16
"""Names of members that a reply's header tells."""
_MOST_REPAIRS = 8
_SAME: Mapping[str, str] = MappingProxyType({})

STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
TOLERANT = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
"""For messages and their parts, which clients send back as another server gave them."""

_Entry = TypeVar("_Entry")
Many = Annotated[list[_Entry], Field(fail_fast=True)]
"""A list that is looked at up to its first mistake."""


@dataclass(frozen=True, slots=True)
class Most:
    """How large a number may be, or how many entries a list or map may have: a number, or the name of one of Limits.

    They are counted before anything is made of them.
    """

    bound: str | int


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that is accepted and ignored, because it could hardly change the answer."""

    unless: object = None
    """The value that only asks for the default behaviour."""


@dataclass(frozen=True, slots=True)
class KnownKinds:
    """The types that an object may have: others are refused by name."""

    names: tuple[str, ...]


class StrictBody(BaseModel):
    model_config = STRICT

    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other servers' names of fields."""
    UNSET: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Values of fields that ask for nothing, as null does."""
    NOT_SUPPORTED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are refused by name unless they are null, false or empty."""
    OFF: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """More such fields, by the values that leave off what they ask for; -1 is any number below 0."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Places without a field of their own that are ignored, too."""
    NEUTRAL: ClassVar[Mapping[str, object]] = {}
    """The values of some of these that only ask for the default behaviour."""

    KINDS: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Lists whose entries of other kinds are left out and named: the model can do without them."""

    @classmethod
    def prepared(cls, values: Mapping[str, object]) -> Mapping[str, object]:
        """Returns the values of a body as they are to be checked."""
        return values


class TolerantBody(StrictBody):
    model_config = TOLERANT


BodyT = TypeVar("BodyT", bound=StrictBody)


def read(
    kind: type[BodyT],
    values: Mapping[str, object],
    limits: Limits,
    ignore: Callable[[str], None] = lambda _: None,
) -> BodyT:
    """Returns a checked request body.

    Args:
        ignore: is told of each field that asks for something and of which nothing comes.

    Raises:
        ApiError: 400 that names the first field that is wrong.
    """
    root, refused, unread = _rules(kind)
    values, sent = _renamed(kind, values)
    values = kind.prepared(values)
    values, others = _of_kinds(kind, values) if kind.KINDS else (values, ())
    look = _Look(limits, sent)
    look.at(root, values, ())
    for name in sorted((*look.ignored, *others)):
        ignore(name)
    for name in sorted(refused & values.keys()):
        if not _is_off(values[name], kind.OFF.get(name)):
            raise unsupported(name)
    if look.too_large is not None:
        raise look.too_large
    for name in _shown(look.unread):
        ignore(name)
    if look.unknown is not None:
        raise look.unknown
    return validated(kind, {n: value for n, value in values.items() if n not in unread}, sent)


def validated(
    kind: type[BodyT],
    values: Mapping[str, object],
    sent: Mapping[str, str] = _SAME,
    repairs: int = _MOST_REPAIRS,
) -> BodyT:
    """Returns the checked values; raises 400 that names the first field that is wrong."""
    checked = dict(values)
    try:
        return kind.model_validate(checked)
    except ValidationError as error:
        if not (repairs and repaired(checked, error)):
            raise explained(error, checked, sent) from None
    return validated(kind, checked, sent, repairs - 1)


@dataclass(slots=True)
class _FieldRules:
    """What the types that may stand at a place in a body say of it."""

    most: str | int | None = None
    ignored: Ignored | None = None
    kinds: tuple[str, ...] = ()
    members: frozenset[str] = frozenset()
    """The members that are read of an object whose other members are taken although nothing comes of them."""
    below: dict[str, _FieldRules] = field(default_factory=dict)
    """The places of its members, or as `[]` that of its entries, as far as anything is said of them."""

    def add(self, hint: Any) -> None:
        """Adds what one more type says."""
        origin, args = get_origin(hint), get_args(hint)
        if isinstance(hint, Most):
            self.most = hint.bound
        elif isinstance(hint, Ignored):
            self.ignored = hint
        elif isinstance(hint, KnownKinds):
            self.kinds = hint.names
        elif origin in (Annotated, Union, UnionType, NotRequired):
            for each in args:
                self.add(each)
        elif origin is list:
            self._add_below("[]", args)
        elif is_typeddict(hint):
            hints = get_type_hints(hint, include_extras=True)
            self._add_members(getattr(hint, "__pydantic_config__", {}), {n: (of,) for n, of in hints.items()})
        elif isinstance(hint, type) and issubclass(hint, BaseModel):
            members = {name: (of.annotation, *of.metadata) for name, of in hint.model_fields.items()}
            self._add_members(hint.model_config, members)

    def _add_members(self, config: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> None:
        if config.get("extra") == "ignore":
            self.members |= members.keys()
        for name, hints in members.items():
            self._add_below(name, hints)

    def _add_below(self, name: str, hints: Sequence[Any]) -> None:
        rules = self.below.get(name, _FieldRules())
        for each in hints:
            rules.add(each)
        if rules != _FieldRules():
            self.below[name] = rules

    def bounds(self, steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str | int]]:
        """Yields the steps to each place with a bound, and the bound."""
        if self.most is not None:
            yield steps, self.most
        for name, rules in self.below.items():
            yield from rules.bounds((*steps, name))


@cache
def _rules(kind: type[StrictBody]) -> tuple[_FieldRules, frozenset[str], frozenset[str]]:
    """Returns what is said of a kind of bodies, the fields that are refused, and those that are not validated."""
    root, fields = rules_of(kind), kind.model_fields.keys()
    for name in kind.IGNORED:
        rules = root
        for step in name.replace("[]", ".[]").split("."):
            rules = rules.below.setdefault(step, _FieldRules())
        rules.ignored = Ignored(kind.NEUTRAL.get(name))
    refused = kind.NOT_SUPPORTED | kind.OFF.keys() - fields
    return root, refused, refused | (kind.IGNORED - fields)


def rules_of(kind: Any) -> _FieldRules:
    """Returns what a type says of a value and of what stands below it."""
    rules = _FieldRules()
    rules.add(kind)
    return rules


class _Look:
    """A look at the values of a body before they are validated."""

    def __init__(self, limits: Limits, sent: Mapping[str, str]) -> None:
        self.ignored: set[str] = set()
        """The places of fields that ask for something and are ignored."""
        self.unread: set[str] = set()
        """Some members that ask for something and are not read, such as `messages[].cache_control`."""
        self.too_large: ApiError | None = None
        """The 400 for the first value that is."""
        self.unknown: ApiError | None = None
        """The 400 for the first object of a kind that is."""
        self._limits = limits
        self._sent = sent

    def at(self, rules: _FieldRules, value: object, steps: tuple[str | int, ...]) -> None:
        if rules.ignored is not None and value and value != rules.ignored.unless:
            self.ignored.add(_place_name(steps))
        if rules.most is not None and self.too_large is None:
            self._count(rules.most, value, steps)
        if isinstance(value, dict):
            kind = _kind_of(value) if rules.kinds and self.unknown is None else None
            if kind is not None and kind not in rules.kinds:
                self.unknown = unsupported_value(path_of((*steps, "type"), self._sent), kind)
            if rules.members and not value.keys() <= rules.members:
                others = (name for name in value.keys() - rules.members if value[name])
                self.unread |= {_place_name((*steps, name)) for name in others}
            for name, member in value.items():
                if (below := rules.below.get(name)) is not None:
                    self.at(below, member, (*steps, name))
        elif isinstance(value, list) and (entries := rules.below.get("[]")) is not None:
            for i, entry in enumerate(value):
                self.at(entries, entry, (*steps, i))

    def _count(self, bound: str | int, value: object, steps: tuple[str | int, ...]) -> None:
        most = getattr(self._limits, bound) if isinstance(bound, str) else bound
        number = len(value) if isinstance(value, list | dict) else value
        if isinstance(number, int | float) and number > most:
            name = path_of(steps, self._sent)
            self.too_large = invalid(f"'{name}' is {number}, but this server takes at most {most}.", name)


def _place_name(steps: Sequence[str | int]) -> str:
    """Writes the way to a place as `messages[].content`, for all entries of a list."""
    return "".join("[]" if isinstance(step, int) else f".{step}" for step in steps)[1:]


def _shown(names: set[str]) -> list[str]:
    return sorted(filter(SHOWN.fullmatch, names))[:MOST_SHOWN]


def _renamed(
    kind: type[StrictBody], values: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, str]]:
    """Returns the values under this server's names, and the names by which they were sent.

    Raises:
        ApiError: 400 for a field that is there under two names.
    """
    renamed, sent = dict(values), dict[str, str]()
    for name in sorted(kind.ALIASES.keys() & values.keys()):
        value, field = renamed.pop(name), kind.ALIASES[name]
        if value is None:
            continue
        if renamed.get(field) is not None:
            raise invalid(f"Give '{field}' or '{name}', not both.", name)
        renamed[field], sent[field] = value, name
    for name in kind.UNSET.keys() & renamed.keys():
        if renamed[name] in kind.UNSET[name]:
            del renamed[name]
    return renamed, sent


def _of_kinds(
    kind: type[StrictBody], values: Mapping[str, object]
) -> tuple[Mapping[str, object], Sequence[str]]:
    """Returns the values without entries of lists that are of unknown kinds, and the names of these kinds."""
    others: set[str] = set()
    for name, known in kind.KINDS.items():
        entries = values.get(name)
        if isinstance(entries, list):
            strange = {
                i: of for i, entry in enumerate(entries) if (of := _kind_of(entry)) and of not in known
            }
            others |= {f"{name}[].{of}" for of in strange.values()}
            values = {**values, name: [entry for i, entry in enumerate(entries) if i not in strange]}
    return values, _shown(others)


def _kind_of(entry: object) -> str | None:
    kind = entry.get("type") if isinstance(entry, dict) else None
    return kind if isinstance(kind, str) else None


def _is_off(value: object, off: tuple[object, ...] | None) -> bool:
    """Returns whether a value of a field that is not supported asks for nothing."""
    if value is None or value in ("", []):
        return True
    if off is None:
        return value is False
    is_below = -1 in off and isinstance(value, int | float) and value < 0
    return is_below or value in off or value == {}
