"""Values that models write, in JSON or as Python does, as the text of JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Sequence

from penstock.gateway.wire.tools.scanning import Malformed
from penstock.gateway.wire.tools.types import TEXT, type_of

_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""Matches the numbers of JSON."""
_IN_TEXT = re.compile(r'\\[^\n\r]|[\\"\n\r]')
_AS_WRITTEN = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
_NO_ESCAPE = re.compile(r"\\(?=[^\\'\"abfnrtvxuUN0\n])|(\\.)", re.DOTALL)
"""Matches a backslash before what it does not escape, or an escape."""
_WORDS = ("true", "false", "null")


def string_of(text: str) -> str:
    """Returns the text of a JSON string; raises Malformed if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        raise Malformed from None
    if not isinstance(value, str):
        raise Malformed
    return value


def object_text(arguments: str | None) -> str:
    """Arguments as the text of an object: some models leave them out, say null, or put the object into a string."""
    if arguments is None or arguments == "null":
        return "{}"
    text = string_of(arguments) if arguments.startswith('"') else arguments
    if not text.startswith("{"):
        raise Malformed
    return text


def json_text(text: str, types: Collection[str] = frozenset(), listed: Collection[str] | None = None) -> str:
    """Returns the value of a text, in JSON or as Python writes it; the text itself if it is neither.

    Args:
        types: those that it may have; if text is one, only others make it more than text.
        listed: the strings that it may be, if they are listed.
    """
    stripped = text.strip()
    try:
        written = _json_or_python(stripped)
    except Malformed:
        return json.dumps(text if TEXT in types else stripped, ensure_ascii=False)
    value = json.loads(written)
    if TEXT in types and (type_of(value) not in set(types) - {TEXT} or stripped in (listed or ())):
        return json.dumps(text, ensure_ascii=False)
    if types and TEXT not in types and isinstance(value, str):
        return json_text(value, types)
    return written


def _json_or_python(text: str) -> str:
    try:
        json.loads(text, parse_constant=string_of)
    except (ValueError, RecursionError, Malformed):
        return json_of(text)
    return text


def json_of_text(literal: str) -> str:
    """Returns a string between marks of Python's as JSON; lines and marks in it are its text."""
    length = 3 if len(literal) > 5 and literal[:3] == literal[-3:] == literal[0] * 3 else 1
    text = _IN_TEXT.sub(lambda match: _AS_WRITTEN.get(match[0], match[0]), literal[length:-length])
    return json_of(f'"{text}"')


def json_of(literal: str) -> str:
    """Returns a literal of Python as JSON; raises Malformed for what is no literal, or none that JSON has."""
    source = _NO_ESCAPE.sub(lambda match: match[1] or r"\\", literal.strip())
    try:
        return _json(ast.parse(source, mode="eval").body, source.encode().splitlines(keepends=True))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _json(node: ast.expr, lines: Sequence[bytes]) -> str:
    """Returns a literal as JSON, numbers as they are written; JSON's true, false and null are understood, too."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return node.id
    if isinstance(node, ast.List | ast.Tuple):
        return f"[{', '.join(_json(item, lines) for item in node.elts)}]"
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return f"{{{', '.join(f'{_key(key)}: {_json(value, lines)}' for key, value in pairs if key)}}}"
    text = json.dumps(ast.literal_eval(node), ensure_ascii=False, allow_nan=False)
    written = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
    return written.decode() if _NUMBER.fullmatch(written) else text


def _key(node: ast.expr) -> str:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return json.dumps(node.id)
    return json.dumps(str(ast.literal_eval(node)), ensure_ascii=False)
