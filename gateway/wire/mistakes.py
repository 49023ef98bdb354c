"""Mistakes in bodies: those that are repaired, and words for the others, for clients that know JSON and not Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.gateway.errors import ApiError, invalid

# Refused for their value, not for their type: clients are told that the feature is missing.
_MISSING_FEATURES = frozenset(
    {
        "add_special_tokens",
        "disable_additional_properties",
        "disable_any_whitespace",
        "disable_fallback",
        "modalities",
        "reasoning_format",
        "response_format",
        "spaces_between_special_tokens",
        "structural_tag",
        "whitespace_pattern",
    }
)
_OF_VALUE = ("literal_error", "none_required")

_QUOTE = "'"
_MOST_SHOWN = 64
"""The characters of an unknown type that are shown."""
_SUBJECT = re.compile(r"^\w+(?= should )")
"""List, Dictionary, String, Value: what pydantic calls the input."""

_WANTED = {
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "an array",
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
}
"""The required kind of value, by type of error."""

_EMPTY: tuple[object, ...] = (None, "", [], {})
"""The values with which a field that is not here asks for nothing."""

_EXACT = 2**53
"""From here on a float is not the number that was written."""
_WANT_INTEGERS = ("int_type", "int_from_float", "literal_error")


def explained(error: ValidationError, values: object, sent: Mapping[str, str]) -> ApiError:
    """Makes the 400 that names the first field of `values` that is wrong, and says what it could be.

    Args:
        sent: the names by which clients sent fields, where these are other ones.
    """
    errors = error.errors(include_url=False)
    details = max(errors, key=lambda each: len(each["loc"]))
    path = _path(details, values, sent)
    field = str(details["loc"][0]) if details["loc"] else None
    if details["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {path}.", path, "unknown_parameter")
    if details["type"] == "missing":
        return missing(path)
    if _MISSING_FEATURES & {field, path.rpartition(".")[2]} and details["type"] in _OF_VALUE:
        return invalid(f"This value of '{path}' is not supported by this server.", path, "unsupported_value")
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = details["ctx"]
        path += f".{context['discriminator'].strip(_QUOTE)}"
        if "tag" not in context:
            return missing(path)
        wanted, tag = _listed(context["expected_tags"]), context["tag"][:_MOST_SHOWN]
        return invalid(f"Invalid '{path}': Input should be {wanted}, not '{tag}'.", path)
    # What may be of several types has an error for each: one of its own type says more than that it is not of another.
    here = [each for each in errors if _path(each, values, sent) == path]
    closest = next((each["msg"] for each in here if each["type"] not in _WANTED), None)
    wanted = " or ".join(dict.fromkeys(_WANTED.get(each["type"], "") for each in here))
    message = f"Input should be {wanted}" if closest is None else _SUBJECT.sub("Input", closest)
    return invalid(f"Invalid '{path}': {message.replace(' after validation', '')}.", path)


def _listed(expected: str) -> str:
    """Writes pydantic's "'a', 'b', 'c'" as it writes the values of a literal: "'a', 'b' or 'c'"."""
    others, _, last = expected.rpartition(", ")
    return f"{others} or {last}" if others else last


def missing(field: str) -> ApiError:
    return invalid(f"You must provide the parameter '{field}'.", field, "missing_required_parameter")


def unsupported_value(param: str, value: object) -> ApiError:
    shown = f" '{value}'" if isinstance(value, str) and len(value) <= 64 and value.isprintable() else ""
    message = f"The value{shown} of '{param}' is not supported by this server."
    return invalid(message, param, "unsupported_value")


def _path(details: ErrorDetails, values: object, sent: Mapping[str, str]) -> str:
    """Writes pydantic's location as `messages[0].content`, without its names for the branches of a union."""
    location = details["loc"]
    parts = [part for _, part in steps_in(values, location)]
    if details["type"] == "missing":
        parts.append(location[-1])
    return path_of(parts, sent)


def path_of(parts: Sequence[str | int], sent: Mapping[str, str]) -> str:
    """Writes the way to a value as `messages[0].content`, with its field under the name by which it was sent."""
    path = ""
    for number, part in enumerate(parts):
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if number else sent.get(part, part)
    return path


# Repairs


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
    return any(value == empty and type(value) is type(empty) for empty in _EMPTY)


def _has_whole(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_has_whole, value))
    return isinstance(value, float) and value.is_integer() and abs(value) < _EXACT


def _integers(value: Any) -> Any:
    if isinstance(value, list):
        return [_integers(item) for item in value]
    return int(value) if _has_whole(value) else value
