from __future__ import annotations

import pytest
import torch

from engine.kernels.kv_cache import QUANTIZED, KVCache, KVLayout, KVShape

LAYOUT = KVLayout.even(KVShape(num_kv_heads=2, head_dim=8, block_size=4), 3)


def test_a_block_has_the_bytes_that_are_planned_for_it() -> None:
    kv = KVCache(LAYOUT, 10, torch.float16, torch.device("cpu"))
    assert kv.data.shape == (3, 2, 10, 2 * 4 * 8)
    assert kv.data.nbytes == 10 * LAYOUT.block_bytes(torch.float16)
    assert (kv.num_blocks, kv.block_size) == (10, 4)


def test_a_layer_is_a_view() -> None:
    kv = KVCache(LAYOUT, 4, torch.float32, torch.device("cpu"))
    kv.layer(1)[0, 2] = 7.0
    assert kv.data.sum() == 7 * 64


def test_copies_happen_in_all_layers_and_as_if_at_once() -> None:
    kv = KVCache(LAYOUT, 6, torch.float32, torch.device("cpu"))
    kv.data.normal_()
    before = kv.data.clone()
    kv.copy_blocks(torch.tensor([1, 2, 1]), torch.tensor([2, 3, 5]))
    for source, target in [(1, 2), (2, 3), (1, 5), (4, 4), (0, 0), (1, 1)]:
        assert torch.equal(kv.data[:, :, target], before[:, :, source])


@pytest.mark.parametrize("dtype", QUANTIZED.values(), ids=QUANTIZED)
def test_copies_of_quantized_blocks_have_their_scales(dtype: torch.dtype) -> None:
    kv = KVCache(LAYOUT, 6, dtype, torch.device("cpu"))
    data = kv.data.view(torch.int8)
    data.random_()
    before = data.clone()
    kv.copy_blocks(torch.tensor([1, 2]), torch.tensor([2, 3]))
    for source, target in [(1, 2), (2, 3), (1, 1)]:
        assert torch.equal(data[:, :, target], before[:, :, source])


def test_no_copies_change_nothing() -> None:
    kv = KVCache(LAYOUT, 2, torch.float32, torch.device("cpu"))
    kv.copy_blocks(torch.tensor([], dtype=torch.int32), torch.tensor([], dtype=torch.int32))
    assert not kv.data.any()


@pytest.mark.parametrize("dtype", QUANTIZED.values(), ids=QUANTIZED)
def test_a_quantized_block_ends_with_a_scale_for_each_head_of_each_token(dtype: torch.dtype) -> None:
    kv = KVCache(LAYOUT, 10, dtype, torch.device("cpu"))
    assert kv.data.shape == (3, 2, 10, 2 * 4 * 8 + 4 * 2 * 4)
    assert kv.data.nbytes == 10 * LAYOUT.block_bytes(dtype)
