"""Random JSON Schemas of the kinds that the published test suite has, as far as answers can be held to them."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

_WORDS = ["red", "green", "a b", 'q"uote', "é☃", "line\nbreak", "", "0", "null"]
_PATTERNS = ["^[a-z]{2,4}$", "^(ab|cd)+$", "^\\d{3}-\\d{2}$", "^x[0-9]?y?$"]
_FORMATS = ["date", "uuid", "ipv4", "ipv6"]
_DEPTH = 3


def random_schema(seed: int) -> Schema:
    """The kinds take turns, so that each is there as often as the others."""
    pace = Random(seed)
    return _KINDS[seed % len(_KINDS)](pace, _DEPTH)


def _any(pace: Random, depth: int) -> Schema:
    return pace.choice(_KINDS if depth > 0 else _SCALARS)(pace, depth)


def _string(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    least = pace.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + pace.randint(0, 6)}


def _pattern(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    return {"type": "string", "pattern": pace.choice(_PATTERNS)}


def _format(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    return {"type": "string", "format": pace.choice(_FORMATS)}


def _integer(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    least = pace.randint(-1000, 1000)
    names = pace.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    return {"type": "integer", names[0]: least, names[1]: least + pace.choice([2, 7, 40, 5000])}


def _multiple(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    return {"type": "integer", "multipleOf": pace.choice([2, 5, 10, 12]), "minimum": 0, "maximum": 500}


def _number(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    least = round(pace.uniform(-10, 10), pace.randint(0, 3))
    most = round(least + pace.uniform(0.5, 20), 2)
    return {"type": "number", "minimum": least, "exclusiveMaximum": most}


def _boolean(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    return {"type": pace.choice(["boolean", "null", ["boolean", "null"]])}


def _enum(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    values = [*pace.sample(_WORDS, 3), pace.randint(-5, 5), None, True, [1, "a"], {"k": [0.5]}]
    return {"enum": pace.sample(values, pace.randint(1, 5))}


def _const(pace: Random, depth: int) -> Schema:  # noqa: ARG001
    return {"const": pace.choice([*_WORDS, 0, -1.5, False, [], {"a": {"b": None}}])}


def _array(pace: Random, depth: int) -> Schema:
    least = pace.randint(0, 2)
    most = least + pace.randint(0, 2)
    return {"type": "array", "items": _any(pace, depth - 1), "minItems": least, "maxItems": most}


def _tuple(pace: Random, depth: int) -> Schema:
    parts = [_any(pace, depth - 1) for _ in range(pace.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _object(pace: Random, depth: int) -> Schema:
    names = pace.sample(["a", "b", "long name", "é", 'x"y', "_"], pace.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(pace, depth - 1) for name in names},
        "required": pace.sample(names, pace.randint(0, len(names))),
        "additionalProperties": False,
    }


def _map(pace: Random, depth: int) -> Schema:
    others = pace.choice([_integer, _boolean, _enum])(pace, depth - 1)
    return {
        "type": "object",
        "properties": {"first": _any(pace, depth - 1)},
        "additionalProperties": others,
        "required": ["first"],
    }


def _named(pace: Random, depth: int) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": _any(pace, depth - 1)},
        "additionalProperties": False,
    }


def _any_of(pace: Random, depth: int) -> Schema:
    return {"anyOf": [_any(pace, depth - 1) for _ in range(pace.randint(2, 3))]}


def _all_of(pace: Random, depth: int) -> Schema:
    first, second = pace.sample(["a", "b", "c"], 2)
    parts = [{"properties": {name: _any(pace, depth - 1)}, "required": [name]} for name in (first, second)]
    return {"type": "object", "allOf": parts}


def _reference(pace: Random, depth: int) -> Schema:
    """Definitions have to stand at the root: what is referred to has none of its own."""
    kinds = {"one": pace.choice(_SCALARS)(pace, 0), "two": pace.choice(_SCALARS)(pace, 0)}
    if depth < _DEPTH:
        return pace.choice(_SCALARS)(pace, 0)
    return {
        "$defs": kinds,
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]},
        "minItems": 1,
        "maxItems": 3,
    }


def _tree(pace: Random, depth: int) -> Schema:
    if depth < _DEPTH:
        return _boolean(pace, depth)
    node = {
        "type": "object",
        "properties": {"value": pace.choice(_SCALARS)(pace, 0), "below": {"$ref": "#/$defs/nodes"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    nodes = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    return {"$defs": {"node": node, "nodes": nodes}, "$ref": "#/$defs/node"}


_SCALARS = [_string, _pattern, _format, _integer, _multiple, _number, _boolean, _enum, _const]
_KINDS = [*_SCALARS, _array, _tuple, _object, _map, _named, _any_of, _all_of, _reference, _tree]
