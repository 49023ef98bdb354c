"""Repairs of bodies: what a strict reading refuses although nobody could mean anything else by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

EMPTY: tuple[object, ...] = (None, "", [], {})
"""The values with which a field that is not here asks for nothing."""

_EXACT = 2**53
"""From here on a float is not the number that was written."""
_WANT_INTEGERS = ("int_type", "int_from_float", "literal_error")


def repaired(values: dict[str, Any], error: ValidationError) -> bool:
    """Mends values in place, and returns whether something was mended.

    Empty members that there is no field for are left out, and whole numbers become integers where one is wanted, as
    JSON Schema has it. Lists are mended as a whole, for they are read up to their first mistake.
    """
    is_mended = False
    for each in error.errors(include_url=False, include_context=False):
        steps = list(steps_in(values, each["loc"]))
        if not steps:
            continue
        holder, name = steps[-1]
        if each["type"] == "extra_forbidden" and name == each["loc"][-1] and _is_empty(holder[name]):
            del holder[name]
            is_mended = True
        elif each["type"] in _WANT_INTEGERS:
            holder, name = next(step for step in reversed(steps) if isinstance(step[0], dict))
            if _has_whole(holder[name]):
                holder[name] = _integers(holder[name])
                is_mended = True
    return is_mended


def steps_in(values: object, location: tuple[int | str, ...]) -> Iterator[tuple[Any, int | str]]:
    """Yields the objects and lists on the way to a place, each with the name or number of the next step.

    pydantic's location also has its own names for the branches of unions, which are no steps.
    """
    for number, part in enumerate(location):
        if isinstance(values, dict):
            is_there = part in values and not _is_tag(part, values, location[number + 1 :])
        else:
            is_there = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if is_there:
            yield values, part
            values = values[part]  # type: ignore[index]


def _is_tag(part: int | str, value: Mapping[Any, object], rest: Sequence[int | str]) -> bool:
    """Returns whether a part of a location repeats the value's type, and is not the member of that name."""
    if not rest or value.get("type") != part:
        return False
    return not isinstance(value[part], list if isinstance(rest[0], int) else Mapping)


def _is_empty(value: object) -> bool:
    return any(value == empty and type(value) is type(empty) for empty in EMPTY)


def _has_whole(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_has_whole, value))
    return isinstance(value, float) and value.is_integer() and abs(value) < _EXACT


def _integers(value: Any) -> Any:
    if isinstance(value, list):
        return [_integers(item) for item in value]
    return int(value) if _has_whole(value) else value
