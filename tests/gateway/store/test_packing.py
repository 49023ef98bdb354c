"""What is packed is unpacked as it was; what was not made by packing is refused."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from penstock.gateway.store.packing import (
    COMPRESS_BYTES,
    Base64,
    Tokens,
    pack,
    pack_tokens,
    unpack,
    unpack_tokens,
)

BYTES, TOKENS = TypeAdapter[bytes](Base64), TypeAdapter[tuple[int, ...]](Tokens)


@given(st.binary(max_size=40), st.sampled_from([0, COMPRESS_BYTES - 41, COMPRESS_BYTES]))
def test_a_value_is_unpacked_as_it_was(value: bytes, num_zeros: int) -> None:
    value += bytes(num_zeros)
    packed = pack(value)
    assert unpack(packed) == value
    assert (len(packed) > len(value)) == (len(value) < COMPRESS_BYTES)


@pytest.mark.parametrize(
    "packed", [b"", b"z", b"x" + zlib.compress(b"a"), b"z" + zlib.compress(b"abc")[:-1]], ids=str
)
def test_what_was_not_packed_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"packed|Error"):
        unpack(packed)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_token_ids_and_bytes_are_fields_of_records(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert unpack_tokens(packed) == tuple(token_ids)
    assert TOKENS.validate_json(TOKENS.dump_json(tuple(token_ids))) == tuple(token_ids)
    assert BYTES.validate_json(BYTES.dump_json(packed)) == packed


@pytest.mark.parametrize("text", [7, "AAA", "AA!AA===", "AAAA\n", "ä"])
def test_a_field_that_is_no_base64_is_refused(text: object) -> None:
    with pytest.raises(ValidationError):
        BYTES.validate_python(text)


def test_a_field_that_ends_within_a_token_is_refused() -> None:
    with pytest.raises(ValidationError, match="four bytes"):
        TOKENS.validate_python("AAAA")
