"""What pydantic finds wrong with a body, in words for clients who know JSON and not Python."""

from __future__ import annotations

import re

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
"""What a value has to be, by the error that it is not."""


def explained(error: ValidationError) -> ApiError:
    """Makes the 400 that names the first field that is wrong, and says what it could be."""
    found = error.errors(include_url=False, include_context=False)
    details = max(found, key=lambda each: len(each["loc"]))
    path = _path(details["loc"])
    field = str(details["loc"][0]) if details["loc"] else None
    if details["type"] == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {path}.", path, "unknown_parameter")
    if details["type"] == "missing":
        return invalid(f"You must provide the parameter '{path}'.", path, "missing_required_parameter")
    if _MISSING_FEATURES & {field, path.rpartition(".")[2]} and details["type"] == "literal_error":
        return invalid(f"This value of '{path}' is not supported by this server.", path, "unsupported_value")
    # What may be of several types has an error for each: one of its own type says more than that it is not of another.
    here = [each for each in found if _path(each["loc"]) == path]
    closest = next((each["msg"] for each in here if each["type"] not in _WANTED), None)
    wanted = " or ".join(dict.fromkeys(_WANTED.get(each["type"], "") for each in here))
    message = f"Input should be {wanted}" if closest is None else _SUBJECT.sub("Input", closest)
    return invalid(f"Invalid '{path}': {message.replace(' after validation', '')}.", path)


def _path(location: tuple[int | str, ...]) -> str:
    """Writes pydantic's location as `messages[0].content`, without its names for the branches of a union."""
    path = ""
    for number, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif number == 0 or not (
            part.startswith(("list[", "dict[", "literal[", "constrained", "function-"))
            or part[:1].isupper()
            or part in ("str", "int", "bool", "none")
        ):
            path += f".{part}" if path else part
    return path
