"""Limits of a body: entries are counted before it is parsed, nesting afterwards."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits, parse_object


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(item) for item in value), default=0)
    return 0


def containers_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers_in, value.values()))
    return 1 + sum(map(containers_in, value)) if isinstance(value, list) else 0


def strings_in(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(strings_in, value.values()))
    return sum(map(strings_in, value)) if isinstance(value, list) else isinstance(value, str)


def commas_in(value: Any) -> int:
    inside = list(value.values()) if isinstance(value, dict) else value
    return max(0, len(inside) - 1) + sum(map(commas_in, inside)) if isinstance(inside, list) else 0


HOSTILE_TEXT = st.text('[]{}"\\a\n,é', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | HOSTILE_TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(HOSTILE_TEXT, children, max_size=4),
    max_leaves=30,
)


def refusal(body: bytes, limits: Limits) -> str | None:
    try:
        parse_object(body, limits)
    except ApiError as error:
        return error.code
    return None


@given(VALUES, st.booleans())
def test_a_body_is_taken_up_to_each_limit_and_refused_beyond_it(value: Any, ascii_only: bool) -> None:
    """Counts and depth are those of the value, whatever its strings say."""
    whole = {"a": value}
    body = json.dumps(whole, ensure_ascii=ascii_only).encode()
    counts = {
        "max_json_containers": containers_in(whole),
        "max_json_values": commas_in(whole),
        "max_json_strings": strings_in(whole),
        "max_json_depth": depth_of(whole),
    }
    assert parse_object(body, Limits(**counts)) == whole
    for name, number in counts.items():
        code = "json_too_deep" if name == "max_json_depth" else "json_too_large"
        assert refusal(body, Limits(**{**counts, name: number - 1})) == code


def test_the_pieces_that_are_searched_have_no_seams() -> None:
    """Strings and escapes lie across every place where the body is cut."""
    for padding in range(16):
        value = {"a" * padding: ['[{"\\,' * 40_000, [], "]" * 70_000, {"b": "\\" * 66_000}]}
        body = json.dumps(value).encode()
        most = {"max_json_containers": 4, "max_json_strings": 5}
        assert parse_object(body, Limits(**most)) == value
        assert refusal(body, Limits(**{**most, "max_json_containers": 3})) == "json_too_large"
        assert refusal(body, Limits(**{**most, "max_json_strings": 4})) == "json_too_large"


def test_an_object_has_so_many_members_at_most() -> None:
    limits = Limits(max_json_members=3)
    assert refusal(b'{"a":[{"1":1,"2":2,"3":3}]}', limits) is None
    assert refusal(b'{"a":[{"1":1,"2":2,"3":3,"4":4}]}', limits) == "json_too_large"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"1," * 2_000_000,
        b'"' + b'\\"' * 2_000_000,
        b"[" * 4_000_000,
        b'"' * 4_000_001,
        b'""' * 2_000_000,
        b"\\" * 4_000_000,
    ],
)
def test_hostile_bodies_take_linear_time(body: bytes) -> None:
    started = time.process_time()
    assert refusal(body, Limits()) is not None
    assert time.process_time() - started < 5.0


def test_half_a_character_is_no_json() -> None:
    """JSON can spell it; no tokenizer can take it, and nothing can write it down."""
    assert refusal(rb'{"user":"\ud800"}', Limits()) == "invalid_json"
    assert parse_object(rb'{"user":"\ud83d\ude00"}', Limits()) == {"user": "😀"}
