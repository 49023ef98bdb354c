"""The values that a schema admits: a tagged format writes arguments without saying of which type they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.engine.text.exact_numbers import referred

TEXT = "string"
_TYPES = frozenset({TEXT, "number", "boolean", "object", "array", "null"})
_OF_PYTHON = {str: TEXT, bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
_MOST_REFERENCES = 8
"""References to references that are followed."""
_MOST_PARTS = 256
"""The parts of a schema, and of what they refer to, that are looked at; further ones may admit anything."""


class Admitted(NamedTuple):
    """The values that a schema admits."""

    types: frozenset[str]
    """Their types; an integer's is "number"."""
    words: frozenset[str] | None
    """The strings among them, if they are listed."""

    def __and__(self, other: Admitted) -> Admitted:
        if self.words is None or other.words is None:
            words = other.words if self.words is None else self.words
        else:
            words = self.words & other.words
        return Admitted(self.types & other.types, words)

    def __or__(self, other: Admitted) -> Admitted:
        words = None if self.words is None or other.words is None else self.words | other.words
        return Admitted(self.types | other.types, words)


_ANYTHING = Admitted(_TYPES, None)
_NOTHING = Admitted(frozenset(), frozenset())


def type_of(value: object) -> str:
    return _OF_PYTHON.get(type(value), "null")


def admitted(schema: Any, root: Any, seen: dict[int, Admitted] | None = None) -> Admitted:
    """Returns what a schema, a part of `root`, admits."""
    seen = {} if seen is None else seen
    if not isinstance(schema, dict) or len(seen) > _MOST_PARTS:
        return _NOTHING if schema is False else _ANYTHING
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = values = _ANYTHING
    if (kind := schema.get("type")) is not None:
        names = map(str, kind if isinstance(kind, list) else [kind])
        types = {"number" if name == "integer" else name for name in names}
        values &= Admitted(frozenset(types), None if TEXT in types else frozenset())
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        words = frozenset(value for value in listed if isinstance(value, str))
        values &= Admitted(frozenset(map(type_of, listed)), words)
    for part in _all_of(schema, root):
        values &= admitted(part, root, seen)
    for parts in _any_of(schema):
        either = _NOTHING
        for part in parts:
            either |= admitted(part, root, seen)
        values &= either
    seen[id(schema)] = values
    return values


def property_schema(schema: Any, key: str) -> Any:
    """Returns the schema of one member of an object; None if it says nothing of it."""
    part = next(_said_of(key, schema, schema, set()), None)
    for _ in range(_MOST_REFERENCES):
        if isinstance(part, dict) and "$ref" in part:
            part = referred(schema, part["$ref"])
    return part


def _said_of(key: str, schema: Any, root: Any, seen: set[int]) -> Iterator[Any]:
    """Returns the schemas of a member in a schema, in those that it refers to, and in its alternatives."""
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) > _MOST_PARTS:
        return
    seen.add(id(schema))
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, dict) and key in properties:
        yield properties[key]
    for parts in (_all_of(schema, root), *_any_of(schema)):
        for part in parts:
            yield from _said_of(key, part, root, seen)
    if isinstance(others, dict):
        yield others


def _all_of(schema: dict[str, Any], root: Any) -> list[Any]:
    """Returns the schemas that a value has to match, too."""
    parts = schema.get("allOf")
    named = [referred(root, schema["$ref"])] if "$ref" in schema else []
    return named + (parts if isinstance(parts, list) else [])


def _any_of(schema: dict[str, Any]) -> list[list[Any]]:
    """Returns the lists of schemas of which a value has to match one."""
    return [parts for key in ("anyOf", "oneOf") if isinstance(parts := schema.get(key), list)]
