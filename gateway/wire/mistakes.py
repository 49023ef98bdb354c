"""Describes pydantic's errors in words for clients that know JSON and not Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from penstock.gateway.http.errors import ApiError, invalid

# Refused for their value, not for their type: clients are told that the feature is missing.
_MISSING_FEATURES = frozenset(
    {
        "add_special_tokens",
        "modalities",
        "priority",
        "response_format",
        "spaces_between_special_tokens",
    }
)

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


def explained(error: ValidationError, values: Mapping[str, object]) -> ApiError:
    """Makes the 400 that names the first field of `values` that is wrong, and says what it could be."""
    found = error.errors(include_url=False)
    details = max(found, key=lambda each: len(each["loc"]))
    path = _path(details["loc"], values)
    field = str(details["loc"][0]) if details["loc"] else None
    if details["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {path}.", path, "unknown_parameter")
    if details["type"] == "missing":
        return invalid(f"You must provide the parameter '{path}'.", path, "missing_required_parameter")
    if _MISSING_FEATURES & {field, path.rpartition(".")[2]} and details["type"] == "literal_error":
        return invalid(f"This value of '{path}' is not supported by this server.", path, "unsupported_value")
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        known = details["ctx"]
        path += f".{known['discriminator'].strip(_QUOTE)}"
        if "tag" not in known:
            return invalid(f"You must provide the parameter '{path}'.", path, "missing_required_parameter")
        wanted, tag = _listed(known["expected_tags"]), known["tag"][:_MOST_SHOWN]
        return invalid(f"Invalid '{path}': Input should be {wanted}, not '{tag}'.", path)
    # What may be of several types has an error for each: one of its own type says more than that it is not of another.
    here = [each for each in found if _path(each["loc"], values) == path]
    closest = next((each["msg"] for each in here if each["type"] not in _WANTED), None)
    wanted = " or ".join(dict.fromkeys(_WANTED.get(each["type"], "") for each in here))
    message = f"Input should be {wanted}" if closest is None else _SUBJECT.sub("Input", closest)
    return invalid(f"Invalid '{path}': {message.replace(' after validation', '')}.", path)


def _listed(expected: str) -> str:
    """Writes pydantic's "'a', 'b', 'c'" as it writes the values of a literal: "'a', 'b' or 'c'"."""
    others, _, last = expected.rpartition(", ")
    return f"{others} or {last}" if others else last


def _path(location: tuple[int | str, ...], value: object) -> str:
    """Writes pydantic's location in `value` as `messages[0].content`, without its names for the branches of a union."""
    path = ""
    for number, part in enumerate(location):
        if _is_tag(part, value, location[number + 1 :]):
            continue
        value = _inside(value, part)
        if isinstance(part, int):
            path += f"[{part}]"
        elif number == 0 or not (
            part.startswith(("list[", "dict[", "literal[", "constrained", "function-"))
            or part[:1].isupper()
            or part in ("str", "int", "bool", "none")
        ):
            path += f".{part}" if path else part
    return path


def _is_tag(part: int | str, value: object, rest: Sequence[int | str]) -> bool:
    """Returns whether a part of a location repeats the value's type, and is not the member of that name."""
    if not (rest and isinstance(value, Mapping) and value.get("type") == part):
        return False
    return not isinstance(value.get(part), list if isinstance(rest[0], int) else Mapping)


def _inside(value: object, part: int | str) -> object:
    """Returns what is at one part of a location; the value itself where the part names a branch of a union."""
    if isinstance(value, list) and isinstance(part, int):
        return value[part] if part < len(value) else None
    if isinstance(value, Mapping) and part in value:
        return value[part]
    return value
