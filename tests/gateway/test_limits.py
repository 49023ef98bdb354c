"""The scanner that measures nesting without parsing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import json_depth


def depth_of(value: Any) -> int:
    """What the scanner must find in a value written as JSON."""
    if isinstance(value, dict):
        return 1 + max((depth_of(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(item) for item in value), default=0)
    return 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text('[]{}"\\a\n'),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text('[]{}"\\'), children, max_size=4)
    ),
    max_leaves=30,
)


@given(VALUES, st.booleans())
def test_depth_of_any_json_is_exact(value: Any, ascii_only: bool) -> None:
    assert json_depth(json.dumps(value, ensure_ascii=ascii_only).encode()) == depth_of(value)


def parser_depth(text: bytes) -> int:
    """Open brackets outside of strings, one byte at a time, until the text ends."""
    depth = deepest = 0
    in_string = escaped = False
    for byte in text:
        if in_string:
            in_string = escaped or byte != ord('"')
            escaped = byte == ord("\\") and not escaped
        elif byte == ord('"'):
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


@given(st.text('[]{}"\\x', max_size=60))
def test_depth_of_anything_is_that_of_a_scan_by_hand(text: str) -> None:
    assert json_depth(text.encode()) == parser_depth(text.encode())


@pytest.mark.parametrize(
    "body",
    [b'"' + b'\\"' * 2_000_000, b"[" * 4_000_000, b'"' * 4_000_001, b'""' * 2_000_000, b"\\" * 4_000_000],
)
def test_hostile_bodies_take_linear_time(body: bytes) -> None:
    started = time.process_time()
    json_depth(body)
    assert time.process_time() - started < 5.0
