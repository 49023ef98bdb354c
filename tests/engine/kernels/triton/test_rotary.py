from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import reference
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, numbers_and_scales
from penstock.engine.kernels.reference import TokenPlaces, write_kv
from penstock.engine.kernels.triton import rotary
from penstock.engine.kernels.triton.rotary import kv_places, rotate_and_write
from penstock.engine.quant.rotation import block_size, rotated
from tests.engine.kernels.random_inputs import EPS, Layer, RotationInput
from tests.engine.kernels.test_reference import BLOCK_SIZE, SEQUENCES, make_batch
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what Triton's kernels take")

NUM_BLOCKS = 9


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    num_kv_heads = draw(st.integers(1, 5))
    return Layer(
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 6, 16, 20, 32])),
        block_size=draw(st.sampled_from([1, 3, 16])),
        norms=draw(st.booleans()),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@given(layer=layers(), num_tokens=st.integers(0, 9), seed=st.integers(0, 1000))
@settings(max_examples=examples(25), deadline=None)
def test_it_is_the_reference(
    dtype: torch.dtype, layer: Layer, num_tokens: int, seed: int, device: torch.device
) -> None:
    num_tokens = min(num_tokens, NUM_BLOCKS * layer.block_size)
    step = RotationInput(layer, num_tokens, dtype, device, seed)
    for function in (rotate_and_write, reference.rotate_and_write):
        step.check(function, dtype)


def test_the_cache_may_be_of_another_dtype(device: torch.device) -> None:
    step = RotationInput(Layer(4, 2, 16, 4, norms=True), 7, torch.float32, device, seed=2)
    for function in (rotate_and_write, reference.rotate_and_write):
        step.check(function, torch.float16)


def test_values_may_be_normed_and_queries_may_be_alone(device: torch.device) -> None:
    layer = Layer(4, 2, 24, 4, norms=True)
    step = RotationInput(layer, 7, torch.float32, device, seed=2)
    stored, found = step.places.in_cache >= 0, []
    for function in (rotate_and_write, reference.rotate_and_write):
        kv, rest = step.kv(torch.float32), (EPS, step.places)
        queries = function(step.qkv, step.q_norm, step.k_norm, *rest, kv, layer.shape, norms_values=True)
        alone = step.qkv[:, : layer.num_heads * layer.head_dim].contiguous()
        again = function(alone, step.q_norm, None, *rest, None, layer.shape)
        assert torch.equal(queries[stored], again[stored])
        found.append((queries[stored], kv))
    torch.testing.assert_close(found[0], found[1])
    plain = step.kv(torch.float32)
    step.run(rotate_and_write, plain)
    assert torch.equal(found[0][1][0], plain[0])
    assert not torch.equal(found[0][1][1], plain[1]), "values"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is infinite or no number
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_dtype", "head_dim"), [(torch.int8, 48), (torch.uint8, 96), (torch.uint8, 64)])
def test_a_quantized_cache_has_the_bits_of_the_specification(
    kv_dtype: torch.dtype, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Quantized heads are those of the unquantized kernel, with zeros, large heads and lost ones among them; keys are
    spread before, and so are queries, and values of 4 bits."""
    layer = Layer(6, 3, head_dim, 4, norms=False)
    step = RotationInput(layer, 30, dtype, device, seed=4)
    step.places.in_cache.copy_(torch.randperm(NUM_BLOCKS * 4)[:30])
    step.places.in_cache[3] = -1
    heads = step.qkv.view(30, 12, head_dim)
    heads[0, 9:] = 0.0
    heads[1, 9:] = -0.0
    heads[2, 9, 5], heads[4, 7, 2], heads[5, 10, 1] = torch.nan, torch.nan, torch.inf
    heads[6:9] *= 1000
    heads[9:12] *= 1e-6
    plain, found, expected = step.kv(dtype), *(quantized_kv(step, kv_dtype) for _ in range(2))
    queries, spread = step.run(rotate_and_write, plain), step.run(rotate_and_write, found, spreads=True)
    block = block_size(head_dim // 2)
    assert torch.equal(spread, (rotated(queries.float(), block) / block).to(dtype))
    stored = plain.view(2, NUM_BLOCKS, 3, 4, head_dim).transpose(2, 3).flatten(1, 2)
    slots = step.places.in_cache.clamp(min=0)
    keys = rotated(stored[0, slots].float(), block)
    values = stored[1, slots]
    if kv_dtype == torch.uint8:
        values = rotated(values.float(), block)
    write_kv(expected, keys, values, step.places.in_cache)
    assert not torch.equal(expected, quantized_kv(step, kv_dtype))
    (_, found_scales), (_, scales) = map(numbers_and_scales, (found, expected))
    assert found_scales is not None
    assert scales is not None
    unit = torch.int32 if kv_dtype == torch.int8 else torch.int16
    same = found.view(unit) == expected.view(unit)
    both_nan = found_scales.isnan() & scales.isnan()
    assert (same | both_nan).all()


def quantized_kv(step: RotationInput, dtype: torch.dtype) -> Tensor:
    """One layer's cache, full of what others wrote."""
    data = KVCache(KVLayout.even(step.layer.shape, 1), NUM_BLOCKS, dtype, step.qkv.device).data
    data.fill_(77)
    return data[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 96])
def test_what_is_attended_to_values_is_spread_back(
    head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    heads = torch.randn(5, 7, head_dim, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected, attended = reference.spread_back(heads), heads.flatten(1).clone()
    rotary.spread_back(attended, head_dim)
    assert torch.equal(attended, expected.flatten(1))
    block = block_size(head_dim // 2)
    back = rotated(expected.float(), block)
    torch.testing.assert_close(
        back, heads.float(), rtol=0, atol=8 * 2.0 ** (-11 if dtype == torch.float16 else -7)
    )


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # they are rotated, for nothing
def test_values_are_stored_as_they_are(device: torch.device) -> None:
    layer = Layer(1, 1, 4, 4, norms=True)
    step = RotationInput(layer, 1, torch.float16, device, seed=0)
    values = torch.tensor([torch.inf, -torch.inf, 6e-8, -0.0], dtype=torch.float16, device=device)
    step.qkv[0, 8:] = values
    kv = step.kv(torch.float16)
    step.places.in_cache[0], step.places.positions[0] = 5, 0
    step.run(rotate_and_write, kv)
    assert torch.equal(kv[1].view(NUM_BLOCKS, 4, 4)[1, 1].view(torch.int16), values.view(torch.int16))


def test_rows_without_a_slot_write_nothing(device: torch.device) -> None:
    step = RotationInput(Layer(4, 2, 16, 4, norms=False), 5, torch.float32, device, seed=1)
    step.places.in_cache.fill_(-1)
    kv = step.kv(torch.float32)
    step.run(rotate_and_write, kv)
    assert torch.equal(kv, step.kv(torch.float32))


def test_a_row_does_not_depend_on_its_company(device: torch.device) -> None:
    step = RotationInput(Layer(6, 3, 16, 4, norms=True), 8, torch.float16, device, seed=3)
    step.places.in_cache.copy_(torch.arange(8))
    step.places.positions.copy_(torch.arange(8))
    together, alone = step.kv(torch.float16), step.kv(torch.float16)
    queries = step.run(rotate_and_write, together)
    for row in range(8):
        places = TokenPlaces(
            step.places.positions[row : row + 1],
            step.places.in_cache[row : row + 1],
            step.places.cos,
            step.places.sin,
        )
        query = rotate_and_write(
            step.qkv[row : row + 1], step.q_norm, step.k_norm, EPS, places, alone, step.layer.shape
        )
        assert torch.equal(query[0], queries[row])
    assert torch.equal(alone, together)


@given(SEQUENCES, st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=examples(25), deadline=None)
def test_slots_are_those_of_the_reference(
    device: torch.device, sequences: list[tuple[int, int]], num_padding_rows: int, num_padding_sequences: int
) -> None:
    batch = padded(make_batch(sequences), num_padding_rows, num_padding_sequences).to(device)
    found = kv_places(batch, BLOCK_SIZE)
    assert found.dtype == torch.int64
    assert found.tolist() == reference.kv_places(batch, BLOCK_SIZE).tolist()
    assert found[: len(found) - num_padding_rows].ge(0).all()
    assert found[len(found) - num_padding_rows :].eq(-1).all()


def padded(batch: Batch, num_rows: int, num_sequences: int) -> Batch:
    """With rows of no sequence, and sequences of no rows, behind the others."""
    batch.positions = torch.cat((batch.positions, torch.full((num_rows,), 7, dtype=torch.int32)))
    ends = batch.query_starts[-1:].expand(num_sequences)
    batch.query_starts = torch.cat((batch.query_starts, ends))
    tables = batch.block_tables
    batch.block_tables = torch.cat((tables, tables.new_zeros(num_sequences, tables.shape[1])))
    return batch


def test_a_negative_position_has_no_slot(device: torch.device) -> None:
    batch = make_batch([(3, 1), (0, 2), (6, 1)]).to(device)
    batch.positions[1] = -1
    expected = reference.kv_places(batch, BLOCK_SIZE).tolist()
    assert expected[1] == -1
    assert kv_places(batch, BLOCK_SIZE).tolist() == expected


def test_slots_of_more_rows_than_one_program_has(device: torch.device) -> None:
    batch = make_batch([(5, 2 * rotary.ROWS_PER_PROGRAM), (0, 3), (17, 90)]).to(device)
    assert kv_places(batch, BLOCK_SIZE).tolist() == reference.kv_places(batch, BLOCK_SIZE).tolist()
