"""Replies against the types that clients' packages read them with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter


def check(kind: Any, *replies: str, adds: frozenset[str] = frozenset()) -> None:
    """Reads replies strictly: each has all that the type requires.

    Args:
        adds: the paths of all members that the type lacks and one of the replies has, like "choices[].token_ids".
    """
    assert replies
    added: set[str] = set()
    for reply in replies:
        added.update(_unknown(_adapter(kind).validate_json(reply, strict=True), json.loads(reply)))
    assert added == adds, added ^ adds


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(found: Any, value: Any, path: str = "") -> Iterator[str]:
    if isinstance(found, BaseModel) and isinstance(value, dict):
        known = {field.alias or name: name for name, field in type(found).model_fields.items()}
        for name, member in value.items():
            below = f"{path}.{name}" if path else name
            if name in known:
                yield from _unknown(getattr(found, known[name]), member, below)
            else:
                yield below
    elif isinstance(found, list):
        for one, member in zip(found, value, strict=True):
            yield from _unknown(one, member, f"{path}[]")
