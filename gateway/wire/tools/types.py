"""The types that a schema admits: a tagged format writes arguments without saying what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Types = frozenset[str]

TEXT = "string"
_ALL: Types = frozenset({TEXT, "number", "boolean", "object", "array", "null"})
_OF_PYTHON = {str: TEXT, bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
_MOST_REFERENCES = 8
"""References to references that are followed."""
_MOST_PARTS = 256
"""The parts of a schema, and what they refer to, that are looked at; further ones may admit anything."""


def type_of(value: object) -> str:
    return _OF_PYTHON.get(type(value), "null")


def property_schema(schema: Any, key: str) -> Any:
    """Returns the schema of one member of an object; None if it says nothing of it."""
    return next(_said_of(key, schema, schema, set()), None)


def _said_of(key: str, schema: Any, root: Any, seen: set[int]) -> Iterator[Any]:
    """Returns the schemas of a member in a schema, in those that it refers to, and in its alternatives."""
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) > _MOST_PARTS:
        return
    seen.add(id(schema))
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, dict) and key in properties:
        yield properties[key]
    for parts in (*_all_of(schema, root), *_any_of(schema)):
        for part in parts if isinstance(parts, list) else [parts]:
            yield from _said_of(key, part, root, seen)
    if isinstance(others, dict):
        yield others


def types(schema: Any, root: Any, seen: dict[int, Types] | None = None) -> Types:
    """Returns the types of the values that a schema, a part of `root`, admits; an integer's is "number"."""
    seen = {} if seen is None else seen
    if not isinstance(schema, dict) or len(seen) > _MOST_PARTS:
        return frozenset() if schema is False else _ALL
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = admitted = _ALL
    if (kind := schema.get("type")) is not None:
        names = kind if isinstance(kind, list) else [kind]
        admitted &= {"number" if name == "integer" else str(name) for name in names}
    if (values := _values(schema)) is not None:
        admitted &= set(map(type_of, values))
    for part in _all_of(schema, root):
        admitted &= types(part, root, seen)
    for choices in _any_of(schema):
        admitted &= frozenset().union(*(types(part, root, seen) for part in choices))
    seen[id(schema)] = admitted
    return admitted


def words(schema: Any, root: Any, seen: dict[int, list[str] | None] | None = None) -> list[str] | None:
    """Returns the strings that a schema, a part of `root`, admits if it lists them; None if it does not."""
    seen = {} if seen is None else seen
    if not isinstance(schema, dict) or len(seen) > _MOST_PARTS:
        return [] if schema is False else None
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = None
    if (kind := schema.get("type")) is not None and TEXT not in (kind if isinstance(kind, list) else [kind]):
        return []
    lists = [words(part, root, seen) for part in _all_of(schema, root)]
    for choices in _any_of(schema):
        each = [words(part, root, seen) for part in choices]
        lists.append(None if None in each else [word for some in each for word in some or ()])
    values = _values(schema)
    listed = [[value for value in values if isinstance(value, str)]] if values is not None else []
    listed += [some for some in lists if some is not None]
    admitted = [word for word in listed[0] if all(word in some for some in listed)] if listed else None
    seen[id(schema)] = admitted
    return admitted


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _all_of(schema: dict[str, Any], root: Any) -> list[Any]:
    """Returns the schemas that a value has to match, too."""
    parts = schema.get("allOf")
    referred = [_at(root, schema["$ref"])] if "$ref" in schema else []
    return referred + (parts if isinstance(parts, list) else [])


def _any_of(schema: dict[str, Any]) -> list[list[Any]]:
    """Returns the lists of schemas of which a value has to match one."""
    return [parts for key in ("anyOf", "oneOf") if isinstance(parts := schema.get(key), list)]


def referred(schema: Any, root: Any) -> Any:
    """Returns a schema, a part of `root`, or the one to which it refers."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = _at(root, schema["$ref"])
    return schema


def _at(root: Any, reference: object) -> Any:
    """Returns the part of a schema that a reference names; None if it is not there."""
    for name in str(reference).removeprefix("#").split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
