"""Reads request bodies: strictly typed, counted first, and refused for the first mistake.

A field is either honoured, or known to be harmless and named in the reply's header, or refused by name: none is
silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.gateway.http.errors import ApiError, invalid, unsupported
from penstock.gateway.http.limits import Limits
from penstock.gateway.wire.mistakes import explained

SHOWN = re.compile(r"[\w.:\[\]-]{1,100}", re.ASCII)
MOST_SHOWN = 16
"""Names of members that a reply's header tells."""

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
    NOT_SUPPORTED: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's that are refused by name unless they are null."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Places of fields that are accepted and ignored, because they could hardly change the answer."""
    NEUTRAL: ClassVar[Mapping[str, object]] = {}
    """The values of some of these fields that only ask for the default behaviour."""


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
    for place in sorted(kind.IGNORED):
        for name, value in _at(values, steps_to(place)):
            if value and value != kind.NEUTRAL.get(place):
                ignore(name)
    for name in sorted(kind.NOT_SUPPORTED & values.keys()):
        if values[name] is not None:
            raise unsupported(name)
    for place, most in kind.MOST.items():
        number = getattr(limits, most) if isinstance(most, str) else most
        for name, found in _at(values, steps_to(place)):
            _at_most(name, found, number)
    for name in _extras(kind, values):
        ignore(name)
    unread = kind.NOT_SUPPORTED | (kind.IGNORED - kind.model_fields.keys())
    return validated(kind, {name: value for name, value in values.items() if name not in unread})


def validated(kind: type[Body], values: Mapping[str, object]) -> Body:
    """Returns the checked values; raises 400 that names the first field that is wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise explained(error) from None


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


def _extras(kind: type[StrictBody], values: Mapping[str, object]) -> list[str]:
    """Names some members that ask for something and are not read, such as `messages[].cache_control`."""
    found: set[str] = set()
    for place, types in kind.TOLERANT_AT.items():
        known = frozenset[str]().union(*(one.__annotations__ for one in types))
        for _, item in _at(values, steps_to(place)):
            if isinstance(item, dict) and not item.keys() <= known:
                found |= {f"{place}.{name}" for name in item.keys() - known if item[name]}
    return sorted(filter(SHOWN.fullmatch, found))[:MOST_SHOWN]


def unsupported_value(param: str, value: object) -> ApiError:
    shown = f" '{value}'" if isinstance(value, str) and len(value) <= 64 and value.isprintable() else ""
    message = f"The value{shown} of '{param}' is not supported by this server."
    return invalid(message, param, "unsupported_value")


def _at_most(name: str, found: object, most: int) -> None:
    number = len(found) if isinstance(found, list | dict) else found
    if isinstance(number, int) and number > most:
        raise invalid(f"'{name}' is {number}, but this server takes at most {most}.", name)
