"""The keywords of schemas that no grammar can hold an answer to, and that only narrow a string: they are left out.

Their names are for the reply's header. Other keywords that cannot be enforced are refused with the grammar.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.gateway.wire.strict import MOST_SHOWN, SHOWN
from penstock.gateway.wire.structured import Form
from penstock.gateway.wire.tools.use import ToolUse

_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""The formats that llguidance knows."""
_NOT_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bBk])")
"""Matches what regular expressions cannot say: looking ahead or behind, references back, and ends of words."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with a schema for each name."""
_VALUES = frozenset({"const", "enum", "default", "examples"})


def enforced_form(form: Form) -> tuple[Form, list[str]]:
    """Returns a form without the keywords that are left out of its schema, and their names."""
    grammar = form.grammar
    may_have_any = '"pattern"' in grammar.text or '"format"' in grammar.text
    if grammar.kind is not GrammarKind.JSON_SCHEMA or not may_have_any:
        return form, []
    left_out: list[str] = []
    try:
        schema = _kept(json.loads(grammar.text), form.field, left_out)
    except ValueError:
        return form, []
    text = json.dumps(schema) if left_out else grammar.text
    return Form(form.field, Grammar(grammar.kind, text)), _shown(left_out, form.field)


def enforced_tools(use: ToolUse) -> tuple[ToolUse, list[str]]:
    """Returns tools without the keywords that are left out of their schemas, and their names in those that hold."""
    held = use.required or use.strict
    left_out: list[str] = []
    tools = []
    for i, tool in enumerate(use.tools):
        function, names = tool["function"], list[str]()
        parameters = _kept(function.get("parameters") or {}, f"tools[{i}].parameters", names)
        tools.append({**tool, "function": {**function, "parameters": parameters}} if names else tool)
        left_out += names if function["name"] in held else []
    return replace(use, tools=tools), _shown(left_out, "tools")


def _shown(names: list[str], field: str) -> list[str]:
    """Returns names as a header may have them."""
    return sorted({name if SHOWN.fullmatch(name) else field for name in names})[:MOST_SHOWN]


def _kept(schema: Any, path: str, left_out: list[str]) -> Any:
    """Returns a schema without the keywords that are left out, whose places are added to `left_out`."""
    if isinstance(schema, list):
        return [_kept(part, f"{path}[{i}]", left_out) for i, part in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        at = f"{path}.{key}"
        if _is_beyond(key, value, schema.get("type")):
            left_out.append(at)
        elif key in _BY_NAME and isinstance(value, dict):
            kept[key] = {name: _kept(part, f"{at}.{name}", left_out) for name, part in value.items()}
        else:
            kept[key] = value if key in _VALUES else _kept(value, at, left_out)
    return kept


def _is_beyond(key: str, value: object, kind: object) -> bool:
    """Returns whether no grammar can hold strings to a keyword's value."""
    if not isinstance(value, str) or (
        kind is not None and "string" not in (kind if isinstance(kind, list) else [kind])
    ):
        return False
    return (key == "format" and value not in _FORMATS) or (
        key == "pattern" and bool(_NOT_REGULAR.search(value))
    )
