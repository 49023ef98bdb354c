"""Rounding weights to integers: what each bit and group size may cost, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.quant import integers as module
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Factors, Inputs, Integers, common_format, widen
from penstock.engine.quant.rotation import block_size, rotated, rotated_back
from penstock.engine.quant.rounding import SMALLEST
from tests.engine.integers import any_integers
from tests.few import examples

FORMATS = st.sampled_from(
    [Integers(8, 7), Integers(8, 64), Integers(8, 1), *(Integers(4, size, True) for size in (32, 64, 128))]
)
SCALES = st.sampled_from([1e-38, 1e-20, 0.02, 1.0, 3e4])


def random_weight(rows: int, columns: int, scale: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * scale
    weight[torch.rand(rows, columns, generator=generator) < 0.1] = 0
    return weight + scale * torch.randn(rows, 1, generator=generator)


def assert_within_format(format: Integers, tensors: NamedTensors, rows: int, columns: int) -> None:
    assert {name: tensor.shape for name, tensor in tensors.items()} == dict(format.shapes(rows, columns))
    low, high = (0, 15) if format.bits == 4 else (-127, 127)
    weight = tensors["weight"]
    assert weight.dtype == torch.int8
    assert low <= int(weight.min()) <= int(weight.max()) <= high
    for name in ("scale", "offset") if format.has_offset else ("scale",):
        assert tensors[name].dtype == torch.float32
        assert bool(tensors[name].isfinite().all())


@settings(max_examples=examples(60))
@given(FORMATS, st.integers(1, 9), st.integers(1, 5), SCALES, st.integers(0, 1000))
def test_a_weight_is_rounded_to_one_that_is_near(
    format: Integers, rows: int, num_groups: int, scale: float, seed: int
) -> None:
    columns = num_groups * format.group_size
    weight = random_weight(rows, columns, scale, seed)
    tensors = format.quantize(weight)
    assert_within_format(format, tensors, rows, columns)
    groups = weight.view(rows, num_groups, -1)
    if format.bits == 8:
        step = groups.abs().amax(-1, keepdim=True) / 127
        bound = step * 0.50001
    else:  # a weight that counts little may be clipped
        bound = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True) + groups.abs() * 2**-8
    error = (format.unpack(tensors).view_as(groups) - groups).abs()
    assert bool((error <= bound + float(SMALLEST)).all())


@pytest.mark.parametrize("in_features", [6, 64, 384])
def test_rotated_weights_are_rounded_by_as_little(in_features: int) -> None:
    """An outlier is spread over its block, so that it widens the steps of its row less."""
    weight = random_weight(4, in_features, 1.0, 3)
    weight[:, 5] *= 50
    plain = Integers(8, in_features)
    format = replace(plain, rotation=block_size(in_features))
    error, before = (
        (some.unpack(some.quantize(weight)) - weight).square().mean() for some in (format, plain)
    )
    assert float(error) < (0.6 if in_features > 6 else 1.1) * float(before)


@pytest.mark.parametrize("block", [1, 2, 32, 64, 128])
def test_a_rotation_keeps_products_and_spreads_what_is_even(block: int) -> None:
    x, weight = (random_weight(3, 256, 1.0, seed) for seed in (1, 2))
    assert torch.allclose(rotated(x, block) @ rotated(weight, block).T / block, x @ weight.T, atol=1e-3)
    assert torch.allclose(rotated_back(rotated(x, block), block) / block, x, atol=1e-5)
    alike = rotated(torch.ones(block), block).abs()
    assert float(alike.max()) <= (2 * block) ** 0.5


def test_values_that_integers_can_stand_for_come_back() -> None:
    grid = torch.arange(-127, 128).float().repeat(2, 1) * torch.tensor([[0.5], [4.0]])
    eight = Integers(8, 255)
    assert torch.equal(eight.unpack(eight.quantize(grid)), grid)
    four = Integers(4, 32, has_offset=True)
    steps = (torch.arange(32) % 16 - 5).float().repeat(2, 1) * torch.tensor([[0.5], [4.0]])
    assert torch.equal(four.unpack(four.quantize(steps)), steps)


@pytest.mark.parametrize("format", [Integers(8, 64), Integers(4, 64, has_offset=True)])
def test_zeros_stay_zeros(format: Integers) -> None:
    assert not format.unpack(format.quantize(torch.zeros(3, 128))).any()


def test_a_row_of_8_bits_is_rounded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    format = Integers(8, 64)
    weight = random_weight(11, 64, 1.0, 0)
    whole = format.quantize(weight)
    monkeypatch.setattr(module, "_ELEMENTS_AT_A_TIME", 130)
    in_pieces = format.quantize(weight)
    joined = format.join([format.quantize(weight[:3]), format.quantize(weight[3:])])
    for name, tensor in whole.items():
        assert torch.equal(in_pieces[name], tensor)
        assert torch.equal(joined[name], tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_of_16_bits_is_rounded_as_if_it_were_float32(dtype: torch.dtype) -> None:
    weight = random_weight(5, 64, 0.02, 0).to(dtype)
    format = Integers(4, 64, has_offset=True)
    for name, tensor in format.quantize(weight).items():
        assert torch.equal(tensor, format.quantize(weight.float())[name])


def test_the_bytes_of_a_packed_weight() -> None:
    assert Integers(8, 256).num_bytes(10, 256) == 10 * 256 + 10 * 4
    assert Integers(4, 64).num_bytes(10, 256) == 10 * 128 + 10 * 4 * 4
    assert Integers(4, 64, has_offset=True).num_bytes(10, 256) == 10 * 128 + 10 * 4 * 8
    assert Integers(8, 64, is_permuted=True).num_bytes(10, 256) == 10 * 256 + 10 * 4 * 4 + 256 * 4
    assert Integers(4, 32, factors=Factors.HALF).num_bytes(10, 256) == 10 * 128 + 10 * 8 * 2
    assert Integers(4, 32, True, factors=Factors.ZEROS).num_bytes(10, 256) == 10 * 128 + 10 * 8 * 3
    assert Integers(6, 16, factors=Factors.COUNTS).num_bytes(10, 256) == 10 * (192 + 16 + 2)
    assert Integers(5, 32, True, factors=Factors.COUNTS).num_bytes(10, 512) == 10 * (320 + 2 * (16 + 4))
    assert Integers(8, 256, factors=Factors.HALF).num_bytes(10, 256) == 10 * 256 + 10 * 4


@pytest.mark.parametrize(
    ("format", "in_features"),
    [
        (Integers(8, 100), 100),
        (Integers(4, 16), 48),
        (Integers(8, 2048), 4096),
        (Integers(4, 1 << 17), 1 << 17),
    ],
)
def test_groups_that_the_kernels_have_are_accepted(format: Integers, in_features: int) -> None:
    format.check(in_features)


@pytest.mark.parametrize(
    ("format", "in_features", "said"),
    [
        (Integers(7, 32), 64, "integers of 7 bits: there are kernels for 2, 3, 4, 5, 6 and 8 only"),
        (Integers(6, 64), 64, "integers of 6 bits: rows of more than one group of 64 are needed"),
        (Integers(8, 2048, factors=Factors.HALF), 4096, "groups of 2048 inputs: with 8 bits"),
        (Integers(4, 32, factors=Factors.COUNTS), 320, "units of 256 inputs do not divide 320"),
        (Integers(4, 32), 100, "groups of 32 do not divide 100 inputs"),
        (Integers(4, 0), 100, "groups of 0 do not divide 100 inputs"),
        (Integers(8, 24), 96, "groups of 24 inputs: a whole row or a multiple of 16 is needed"),
        (
            Integers(4, 2048),
            4096,
            "groups of 2048 inputs: with 4 bits, a whole row or at most 1024 is needed",
        ),
        (Integers(8, 16), (1 << 17) + 16, "131088 inputs are more than the 131072 that integers can have"),
    ],
)
def test_groups_that_the_kernels_lack_are_one_line(format: Integers, in_features: int, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        format.check(in_features)


# ---- formats that are multiplied together ----


def random_tensors(format: Integers, rows: int, columns: int, generator: torch.Generator) -> NamedTensors:
    """Any integers of the format. The scales have so few bits that all their products are exact."""
    tensors = any_integers(format, rows, columns, generator)
    if format.factors is Factors.FLOAT32:
        tensors |= {name: tensors[name].half().float() for name in ("scale", "offset") if name in tensors}
    if format.is_permuted:
        tensors["permutation"] = torch.randperm(columns, generator=torch.Generator().manual_seed(0)).int()
    return tensors


COLUMNS = 768


@st.composite
def formats_of(draw: st.DrawFn, is_permuted: bool) -> Integers:
    bits, factors = draw(st.sampled_from([4, 5, 6, 8])), draw(st.sampled_from(Factors))
    size = draw(st.sampled_from([16, 32, 64] if factors is Factors.COUNTS else [16, 32, 48, 64, COLUMNS]))
    has_zeros = factors is Factors.ZEROS
    return Integers(4 if has_zeros else bits, size, has_zeros or draw(st.booleans()), is_permuted, factors)


@settings(max_examples=examples(60))
@given(
    st.booleans().flatmap(lambda is_permuted: st.lists(formats_of(is_permuted), min_size=1, max_size=3)),
    st.integers(0, 1000),
)
def test_weights_of_a_common_format_are_the_same_and_can_be_joined(
    formats: list[Integers], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [random_tensors(format, 2 + index, COLUMNS, generator) for index, format in enumerate(formats)]
    common = common_format(formats)
    widened = [widen(part, format, common) for part, format in zip(parts, formats, strict=True)]
    for index, part in enumerate(widened):
        assert {name: tensor.shape for name, tensor in part.items()} == dict(
            common.shapes(2 + index, COLUMNS)
        )
        assert part["weight"].dtype == torch.int8
        assert common.lowest <= int(part["weight"].min())
        assert int(part["weight"].max()) < common.lowest + (1 << common.bits)
    expected = torch.cat([format.unpack(part) for part, format in zip(parts, formats, strict=True)])
    assert torch.equal(common.unpack(common.join(widened)), expected)


def test_a_common_format_has_the_finest_groups_the_most_bits_and_offsets_if_one_has() -> None:
    formats = [Integers(4, 48), Integers(4, 32, has_offset=True)]
    assert common_format(formats) == Integers(4, 16, has_offset=True)
    assert common_format([Integers(4, 64), Integers(8, 128)]) == Integers(8, 64)
    assert common_format([Integers(8, 100)]) == Integers(8, 100)


def test_a_common_format_keeps_scales_narrow_where_all_are_kept_alike() -> None:
    of_k = [Integers(4, 32, True, factors=Factors.COUNTS), Integers(6, 16, factors=Factors.COUNTS)]
    assert common_format(of_k) == Integers(6, 16, True, factors=Factors.COUNTS)
    assert common_format([*of_k, Integers(8, 32, factors=Factors.HALF)]) == Integers(8, 16, True)
    with_zeros = [Integers(4, 32, True, factors=Factors.ZEROS), Integers(4, 64, factors=Factors.HALF)]
    assert common_format(with_zeros) == with_zeros[0]
    assert common_format([*with_zeros, Integers(8, 64)]) == Integers(8, 32, True)


def test_the_finest_rounding_of_inputs_serves_all() -> None:
    row, groups, fine = (
        Integers(8, 64, inputs=inputs) for inputs in (Inputs.ROW, Inputs.GROUPS, Inputs.FINE)
    )
    assert common_format([row, groups]) == groups
    assert common_format([groups, fine, row]) == fine
    with pytest.raises(CheckpointError, match="rotated"):
        common_format([row, replace(row, rotation=64)])


def test_inputs_in_different_orders_cannot_be_multiplied_together() -> None:
    format = Integers(4, 32, is_permuted=True)
    with pytest.raises(CheckpointError, match="only some of the weights"):
        common_format([format, Integers(4, 32)])
    part = random_tensors(format, 1, 64, torch.Generator())
    with pytest.raises(CheckpointError, match="permuted in different ways"):
        format.join([part, {**part, "permutation": part["permutation"].flip(0)}])


def test_a_permuted_weight_comes_back_in_the_order_of_its_inputs() -> None:
    format = Integers(8, 3, is_permuted=True)
    tensors = {
        "weight": torch.tensor([[1, 2, 3]], dtype=torch.int8),
        "scale": torch.tensor([[2.0]]),
        "permutation": torch.tensor([2, 0, 1], dtype=torch.int32),
    }
    assert format.unpack(tensors).tolist() == [[4.0, 6.0, 2.0]]
