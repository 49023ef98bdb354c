"""The bytes of a block outside of a server: what was packed comes back, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.tiers.block_file import (
    HEADER_BYTES,
    MAX_TABLE,
    BadBlock,
    BlockKey,
    digest_of,
    pack,
    parse_key,
    unpack,
)

DIGEST = digest_of(["weights", 16])
KEYS = st.builds(BlockKey, st.binary(min_size=16, max_size=16), st.integers(0, MAX_TABLE))
KEY, PAYLOAD = BlockKey(bytes(range(16)), 3), bytes(range(200))


@given(key=KEYS, payload=st.binary(max_size=100))
def test_what_was_packed_comes_back(key: BlockKey, payload: bytes) -> None:
    packed = pack(key, payload, DIGEST)
    assert len(packed) == HEADER_BYTES + len(payload)
    assert bytes(unpack(packed, key, DIGEST)) == payload


@given(place=st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1), change=st.integers(1, 255))
def test_a_byte_that_changed_is_found(place: int, change: int) -> None:
    packed = bytearray(pack(KEY, PAYLOAD, DIGEST))
    packed[place] ^= change
    with pytest.raises(BadBlock):
        unpack(packed, KEY, DIGEST)


@given(length=st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1))
def test_a_torn_block_is_found(length: int) -> None:
    packed = pack(KEY, PAYLOAD, DIGEST)
    for torn in (packed[:length], packed[:length].ljust(len(packed), b"\0"), packed + bytes(1 + length)):
        if torn != packed:
            with pytest.raises(BadBlock):
                unpack(torn, KEY, DIGEST)


def test_another_block_or_layout_is_no_answer() -> None:
    packed = pack(KEY, PAYLOAD, DIGEST)
    for key, digest in (
        (BlockKey(KEY.hash, 2), DIGEST),
        (BlockKey(bytes(16), 3), DIGEST),
        (KEY, digest_of(["weights", 32])),
    ):
        with pytest.raises(BadBlock):
            unpack(packed, key, digest)


@given(key=KEYS)
def test_the_text_of_a_key_is_that_key(key: BlockKey) -> None:
    assert parse_key(key.text) == key


@pytest.mark.parametrize(
    "text", ["", "-", "00-0", f"{bytes(16).hex()}", f"{bytes(16).hex()}-x", f"{bytes(16).hex()}-+1", "../x-1"]
)
def test_other_text_is_no_key(text: str) -> None:
    assert parse_key(text) is None
