from __future__ import annotations

import pytest
import torch

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.kv_cache import MAX_TABLES, KVCache, KVFormat, KVLayout, KVShape
from penstock.engine.spec import Attention, Layer, Mlp, ModelSpec, Norm

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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_copies_of_quantized_blocks_have_their_scales(dtype: torch.dtype) -> None:
    layout = KVLayout.even(KVShape(num_kv_heads=2, head_dim=32, block_size=4), 3)
    kv = KVCache(layout, 6, dtype, torch.device("cpu"))
    kv.data.random_()
    before = kv.data.clone()
    kv.copy_blocks(torch.tensor([1, 2]), torch.tensor([2, 3]))
    for source, target in [(1, 2), (2, 3), (1, 1)]:
        assert torch.equal(kv.data[:, :, target], before[:, :, source])


def test_no_copies_change_nothing() -> None:
    kv = KVCache(LAYOUT, 2, torch.float32, torch.device("cpu"))
    kv.copy_blocks(torch.tensor([], dtype=torch.int32), torch.tensor([], dtype=torch.int32))
    assert not kv.data.any()


def test_a_quantized_block_ends_with_a_scale_for_each_head_of_each_token() -> None:
    kv = KVCache(LAYOUT, 10, torch.int8, torch.device("cpu"))
    assert kv.data.shape == (3, 2, 10, 2 * 4 * 8 + 4 * 2 * 4)
    assert kv.data.nbytes == 10 * LAYOUT.block_bytes(torch.int8)


def test_two_numbers_of_4_bits_are_a_byte_and_groups_have_a_scale_of_16_bits() -> None:
    sizes = {64: 32 + 2 * 2, 96: 48 + 6 * 2, 128: 64 + 4 * 2, 256: 128 + 8 * 2}
    for head_dim, num_bytes in sizes.items():
        layout = KVLayout.even(KVShape(num_kv_heads=2, head_dim=head_dim, block_size=4), 3)
        kv = KVCache(layout, 10, torch.uint8, torch.device("cpu"))
        assert kv.data.shape == (3, 2, 10, 2 * 4 * num_bytes)
        assert kv.data.nbytes == 10 * layout.block_bytes(torch.uint8)


def test_heads_that_no_group_divides_have_no_4_bits() -> None:
    taken = [head_dim for head_dim in range(2, 300, 2) if KVFormat.of(torch.uint8).takes(head_dim)]
    assert taken == list(range(32, 300, 32))
    assert all(KVFormat.of(dtype).takes(6) for dtype in (torch.int8, torch.float16))


def heads(*, head_dim: int = 8, window: int = 0, shares: int | None = None) -> Layer:
    attention = Attention(
        hidden_size=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        scale=1.0,
        window=window,
        shares=shares,
    )
    return Layer(mixer=attention, feed_forward=Mlp(hidden_size=8, inner_size=8))


def layout(*layers: Layer, beside: KVLayout | None = None) -> KVLayout:
    spec = ModelSpec(hidden_size=8, layers=layers, norm_eps=1e-5, final_norm=Norm(name="norm", size=8))
    config = ModelConfig(architecture="LlamaForCausalLM", vocab_size=8, max_position=64, spec=spec)
    return KVLayout.of(config, 4, beside=beside)


def test_layers_that_see_equally_many_tokens_fill_the_blocks_of_their_tables() -> None:
    wide, narrow = heads(), heads(window=20)
    found = layout(*5 * [wide])
    assert (found.windows, found.num_planes) == ((0,), 5)
    found = layout(narrow, narrow, narrow, narrow, narrow, wide, narrow, narrow, wide)
    assert (found.windows, found.num_planes) == ((0, 20, 20, 20, 20), 2)
    places = [(place.table, place.plane) for place in found.places.values()]
    assert places == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0), (3, 1), (4, 0), (0, 1)]
    assert layout(*3 * [narrow]).windows == (20,)
    assert len(layout(*60 * [narrow], wide).windows) <= MAX_TABLES


def test_narrow_layers_share_a_slot_and_a_layer_may_read_the_cache_of_another() -> None:
    found = layout(heads(window=20), heads(head_dim=16), heads(window=20), heads(window=20, shares=2))
    assert (found.windows, found.num_planes) == ((0, 20), 1)
    assert found.places[3] == found.places[2]
    kv = KVCache(found, 10, torch.float32, torch.device("cpu"))
    assert [kv.layer(i).shape for i in range(4)] == [(2, 10, n * 2 * 4) for n in (8, 16, 8, 8)]
    for i in (0, 1, 2):
        kv.layer(i)[:, 1 + (i == 1)] = i + 1
    assert [kv.layer(i)[0, 1 + (i == 1), -1].item() for i in range(4)] == [1, 2, 3, 3]
    assert kv.data.count_nonzero() == 4 * 2 * 64


def test_a_draft_keeps_everything_in_the_blocks_of_the_first_table() -> None:
    beside = layout(heads(), heads(window=20), heads(window=20))
    found = layout(heads(window=20), heads(), beside=beside)
    assert (found.windows, found.num_planes) == ((0, 20, 20), 2)
    assert [place.table for place in found.places.values()] == [0, 0]
