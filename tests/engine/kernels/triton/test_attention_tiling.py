"""Tiles of attention fit the card that they are chosen for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.kernels.triton import attention_tiling as tilings
from penstock.engine.kernels.triton.attention_tiling import (
    Chip,
    KVHead,
    TensorCores,
    decode_tiling,
    prefill_tiling,
    shared_bytes,
)

CARDS = {
    "A100": (8, 0, 163 << 10),
    "RTX 3090": (8, 6, 99 << 10),
    "L4": (8, 9, 99 << 10),
    "H100": (9, 0, 227 << 10),
    "B200": (10, 0, 227 << 10),
    "RTX 5090": (12, 0, 99 << 10),
}
"""Compute capability, and shared memory that a block may ask for."""
KINDS = {9: TensorCores.WGMMA, 10: TensorCores.TCGEN05}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_chip_has_what_its_capability_says(
    card: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumer Blackwell comes after the others, and has neither of their large instructions."""
    major, minor, shared = card
    properties = SimpleNamespace(
        multi_processor_count=84, major=major, minor=minor, shared_memory_per_block_optin=shared
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = Chip.of(torch.device("cuda", 0))
    assert found == Chip(84, KINDS.get(major, TensorCores.MMA_SYNC), shared)


HEADS = st.builds(
    KVHead,
    group=st.integers(1, 16),
    block_d=st.sampled_from([16, 32, 64, 128, 256]),
    itemsize=st.sampled_from([1, 2, 4]),
)
CHIPS = st.sampled_from(
    [Chip(132, TensorCores.of_capability(major), size) for major, _, size in CARDS.values()]
)


@given(HEADS, CHIPS, st.integers(1, 16), st.sampled_from([1, 100, 512, 8192]))
def test_tiles_fit_the_shared_memory_of_their_card(
    head: KVHead, chip: Chip, num_queries: int, num_tokens: int
) -> None:
    decode, prefill = decode_tiling(head, num_queries, chip), prefill_tiling(head, num_tokens, chip)
    for tiling in (decode, prefill):
        assert shared_bytes(head, tiling.block_m, tiling.tile, chip.tensor_cores) <= chip.shared_bytes
        assert tiling.block_m >= max(16, head.group)
        assert tiling.tile in (16, 32, 64, 128)
    assert decode.block_m <= max(16, triton.next_power_of_2(head.group * num_queries))


@given(HEADS, CHIPS)
def test_two_decode_programs_fit_beside_each_other(head: KVHead, chip: Chip) -> None:
    """For tokens without drafts, in half precision."""
    if head.row_bytes > 512:
        return
    tiling = decode_tiling(head, 1, chip)
    each = shared_bytes(head, tiling.block_m, tiling.tile, chip.tensor_cores) + tilings.RESERVED_SHARED_BYTES
    assert 2 * each <= chip.shared_bytes + tilings.RESERVED_SHARED_BYTES


def test_a_tile_is_as_large_as_the_card_allows() -> None:
    llama, gemma = KVHead(4, 128, 2), KVHead(2, 256, 2)
    hopper, ada = Chip(132, TensorCores.WGMMA, 227 << 10), Chip(84)
    blackwell = Chip(148, TensorCores.TCGEN05, 227 << 10)
    assert [decode_tiling(llama, 1, chip).tile for chip in (hopper, ada)] == [64, 32]
    assert [prefill_tiling(llama, 8192, chip).tile for chip in (hopper, blackwell, ada)] == [128, 64, 32]
    assert prefill_tiling(replace(llama, is_quantized=True), 8192, hopper).tile == 64
    assert prefill_tiling(llama, 8192, hopper, is_windowed=True).tile == 64
    assert prefill_tiling(replace(llama, group=5), 8192, hopper).tile == 64
    assert [prefill_tiling(gemma, 8192, chip).tile for chip in (hopper, ada)] == [32, 16]


def test_rows_give_way_where_not_even_the_smallest_tile_fits() -> None:
    exact_gemma = KVHead(2, 256, 4)
    tiling = prefill_tiling(exact_gemma, 8192, Chip(84))
    assert (tiling.block_m, tiling.tile, tiling.num_warps) == (16, 16, 4)
