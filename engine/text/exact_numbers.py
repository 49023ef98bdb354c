"""Rules in Lark for JSON Schemas with integers beyond 2^53, which llguidance would round to doubles.

The rules accept only what the schema does, though not all of it: objects have no members beside their properties, and
numbers no exponent. All parts of a schema without such integers are left to llguidance.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_EXACT = 2**53
_MANY_DIGITS = re.compile(r"[0-9]{16}")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_NO_CONSTRAINTS = frozenset(
    ["$defs", "definitions", "$schema", "$id", "title", "description", "default", "examples", "x-guidance"]
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"})
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""The keywords that there are rules for, by the type to which they apply."""


class TooComplex(ValueError):
    """A schema has integers beyond 2^53 among keywords for which there are no rules; the message is for the client."""


def exact_rules(schema: Any, name: str, style: Mapping[str, object]) -> list[str]:
    """Returns rules in Lark, of which one of this name is for the values of a schema; none if it needs none.

    Args:
        style: llguidance's options for JSON.

    Raises:
        TooComplex: there are no rules for it.
    """
    if not isinstance(schema, dict) or not _MANY_DIGITS.search(json.dumps(schema)):
        return []
    rules = _Rules(schema, name, style)
    return rules.of_root() if rules.is_large(schema) else []


def referred(schema: Any, reference: object) -> Any:
    """Returns the part of a schema that a reference names; None if it is not there."""
    for key in str(reference).removeprefix("#").split("/")[1:]:
        schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema


class _Rules:
    """The rules of one schema, as they are added."""

    def __init__(self, root: dict[str, Any], name: str, style: Mapping[str, object]) -> None:
        self._root = root
        self._name = name
        self._style = style
        self._rules: dict[str, str] = {}
        self._referred: dict[str, str] = {}
        """The names of rules, by the reference to what they are for."""
        self._large: dict[int, bool] = {}
        """Whether it has an integer beyond 2^53, by the id of a part of the schema."""
        self._large_references: set[object] = set()
        self._mark_large()

    def of_root(self) -> list[str]:
        self._rules[self._name] = self._value(self._root)
        return [f"{name}: {expression}" for name, expression in self._rules.items()]

    def _mark_large(self) -> None:
        """Notes which parts of the schema, or what they refer to, have an integer beyond 2^53."""
        more = True
        while more:
            before = len(self._large_references)
            self._large.clear()
            for reference in self._mark(self._root):
                if self.is_large(self._at(reference)):
                    self._large_references.add(reference)
            more = len(self._large_references) > before

    def _mark(self, part: Any) -> set[str]:
        """Returns the references in a part of the schema."""
        if not isinstance(part, dict | list):
            return set()
        references = {part["$ref"]} if isinstance(part, dict) and isinstance(part.get("$ref"), str) else set()
        for child in _children(part):
            references |= self._mark(child)
        self._large[id(part)] = self._has_large(part)
        return references

    def is_large(self, part: Any) -> bool:
        if not isinstance(part, dict | list):
            return isinstance(part, int) and abs(part) > _MOST_EXACT
        known = self._large.get(
            id(part)
        )  # as long as the schema is there, no other object has the id of a part
        return self._has_large(part) if known is None else known

    def _has_large(self, part: dict[str, Any] | list[Any]) -> bool:
        refers = isinstance(part, dict) and part.get("$ref") in self._large_references
        return refers or any(map(self.is_large, _children(part)))

    def _add(self, expression: str) -> str:
        name = f"{self._name}_{len(self._rules)}"
        self._rules[name] = expression
        return name

    def _at(self, reference: object) -> Any:
        return referred(self._root, reference)

    def _json(self, schema: Any) -> str:
        defined = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        given = {**defined, **schema, "x-guidance": self._style} if isinstance(schema, dict) else schema
        return self._add(f"%json {json.dumps(given)}")

    def _value(self, schema: Any) -> str:
        """An expression for the values of a part of the schema."""
        if not isinstance(schema, dict) or not self.is_large(schema):
            return self._json(schema)
        rest = {key: value for key, value in schema.items() if key not in _NO_CONSTRAINTS}
        if "$ref" in rest:
            return self._reference(str(rest.pop("$ref")), rest)
        if "allOf" in rest:
            for part in rest.pop("allOf"):
                rest = self._both(rest, part)
            return self._value(rest)
        for key in ("anyOf", "oneOf"):
            if key in rest:
                choices = rest.pop(key)
                return self._any_of([self._value(self._both(rest, choice)) for choice in choices])
        kinds = rest.pop("type", [kind for kind in _TYPES if kind != "integer"])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "const" in rest or "enum" in rest:
            values = [rest["const"]] if "const" in rest else rest["enum"]
            return self._any_of([_quoted(json.dumps(value)) for value in values if _is_of(value, kinds)])
        return self._any_of([self._of_type(kind, rest) for kind in kinds])

    def _reference(self, reference: str, rest: dict[str, Any]) -> str:
        if rest:
            return self._value(self._both(rest, self._at(reference)))
        if reference not in self._referred:
            self._referred[reference] = name = self._add("")
            self._rules[name] = self._value(self._at(reference))
        return self._referred[reference]

    def _both(self, schema: dict[str, Any], other: Any) -> dict[str, Any]:
        """Returns the schema of the values that match both."""
        if isinstance(other, dict) and "$ref" in other and schema:
            other = self._at(str(other["$ref"]))
        if not isinstance(other, dict):
            return schema if other is not False else {"enum": []}
        both = dict(schema)
        for key, value in other.items():
            if key in _NO_CONSTRAINTS or both.setdefault(key, value) == value:
                continue
            if key == "properties":
                both[key] = {**both[key], **value}
            elif key == "required":
                both[key] = list(dict.fromkeys([*both[key], *value]))
            if key not in ("properties", "required") or both["properties"].keys() & value.keys():
                raise TooComplex(f"integers beyond 2^53 together with several '{key}' are too complex")
        return both

    def _of_type(self, kind: str, schema: dict[str, Any]) -> str:
        if kind not in _OF_TYPE:
            return self._json({**schema, "type": kind})
        others = set().union(*(keys for key, keys in _OF_TYPE.items() if key != kind))
        unknown = schema.keys() - _OF_TYPE[kind] - others
        if unknown:
            raise TooComplex(f"integers beyond 2^53 together with '{min(unknown)}' are too complex")
        of_kind = {"array": self._array, "object": self._object, "integer": _integer, "number": _number}
        return of_kind[kind](schema)

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._add(self._value(schema.get("items", True)))
        others = f'(", " {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" ({item} {others}){"" if least else "?"} "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties and not required and schema.get("additionalProperties") is not False:
            member = f'{self._json({"type": "string"})} ": " {self._value(schema.get("additionalProperties", True))}'
            member = self._add(member)
            return f'"{{" ({member} (", " {member})*)? "}}"'
        first, rest = '""', '""'
        for key in reversed([*properties, *(key for key in required if key not in properties)]):
            member = self._add(f"{_quoted(json.dumps(key) + ': ')} {self._value(properties.get(key, True))}")
            alone, after = f"{member} {rest}", f'", " {member}'
            first = self._add(alone if key in required else f"{alone} | {first}")
            rest = self._add(f"{after if key in required else f'({after})?'} {rest}")
        return f'"{{" {first} "}}"'

    def _any_of(self, choices: Sequence[str]) -> str:
        if not choices:
            raise TooComplex("no value matches the schema")
        return f"({' | '.join(choices)})"


def _children(part: dict[str, Any] | list[Any]) -> list[Any]:
    if isinstance(part, list):
        return part
    return [
        child for key, child in part.items() if key not in _NO_CONSTRAINTS or key in ("$defs", "definitions")
    ]


def _quoted(text: str) -> str:
    return json.dumps(text)


def _is_of(value: object, kinds: Sequence[str]) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null") in kinds


def _limits(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """Returns the least and the greatest integer that a schema admits."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(lows, default=None), min(highs, default=None)


def _integer(schema: dict[str, Any]) -> str:
    parts = _between(*_limits(schema))
    if not parts:
        raise TooComplex("no integer matches the schema")
    return f"/{'|'.join(parts)}/"


def _number(schema: dict[str, Any]) -> str:
    low, high = _limits(schema)
    whole = _between(low, high)
    # A fraction leads away from 0.
    above = _between(0 if low is None else max(0, low), None if high is None else high - 1)
    below = _between(None if low is None else low + 1, -1 if high is None else min(-1, high))
    parts = [*whole, *(f"(?:{part})\\.[0-9]+" for part in (*above, *below))]
    if not parts:
        raise TooComplex("no whole number matches the schema")
    return f"/{'|'.join(parts)}/"


def _between(low: int | None, high: int | None) -> list[str]:
    """Returns regular expressions for the integers from `low` to `high`."""
    parts: list[str] = []
    if low is None or low < 0:
        most = -low if low is not None else None
        parts += [f"-(?:{part})" for part in _digits(max(1, -high if high is not None else 1), most)]
    if high is None or high >= 0:
        parts += _digits(max(0, low or 0), high)
    return parts


def _digits(low: int, high: int | None) -> list[str]:
    """Returns regular expressions for the integers from `low`, which is not negative, to `high`."""
    if high is None:
        longer = f"[1-9][0-9]{{{len(str(low))},}}"
        return [*_digits(low, 10 ** len(str(low)) - 1), longer]
    parts: list[str] = []
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        parts += _of_one_length(str(low), str(end))
        low = end + 1
    return parts


def _of_one_length(low: str, high: str) -> list[str]:
    """Returns regular expressions for the numbers between two of the same number of digits."""
    if low == high:
        return [low]
    digits = len(low) - 1
    if not digits:
        return [f"[{low}-{high}]"]
    first, last = low[0], high[0]
    if first == last:
        return [first + part for part in _of_one_length(low[1:], high[1:])]
    parts: list[str] = []
    if low[1:].strip("0"):
        parts += [first + part for part in _of_one_length(low[1:], "9" * digits)]
        first = chr(ord(first) + 1)
    above: list[str] = []
    if high[1:].strip("9"):
        above = [last + part for part in _of_one_length("0" * digits, high[1:])]
        last = chr(ord(last) - 1)
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{digits}}}")
    return parts + above
