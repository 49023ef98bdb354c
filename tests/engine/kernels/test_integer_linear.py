"""The product of integers: exact sums, a fixed order of roundings, and the same bits from the native kernels."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import linear as module
from engine.kernels.cpu.native import PackedLinear, Team
from engine.kernels.linear import IntegerLinear, quantize_rows
from engine.quant.formats import NamedTensors
from engine.quant.integers import Integers
from tests.engine import ranges
from tests.engine.ranges import assert_within


@st.composite
def formats(draw: st.DrawFn) -> tuple[Integers, int]:
    """A format, and a number of inputs for it."""
    if draw(st.booleans()):
        group_size = draw(st.sampled_from([32, 64, 128]))
        return Integers(draw(st.sampled_from([4, 8])), group_size), group_size * draw(st.integers(1, 6))
    in_features = draw(st.integers(1, 1100))
    return Integers(8, in_features), in_features


def product_by_hand(x: Tensor, tensors: NamedTensors, format: Integers, bias: Tensor | None) -> np.ndarray:
    """One multiplication and one addition at a time, in numpy's float32."""
    weight, scale = tensors["weight"].long().numpy(), tensors["scale"].numpy()
    zero = tensors["zero"].long().numpy() if format.bits == 4 else np.zeros(scale.shape, np.int64)
    out = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for row, values in enumerate(x.numpy()):
        largest = np.abs(values).max()
        factor = np.float32(127) / largest if largest else np.float32(0)
        integers = np.clip(np.rint(values * factor), -127, 127).astype(np.int64)
        for output in range(weight.shape[0]):
            total = np.float32(0)
            for group in range(scale.shape[1]):
                part = slice(group * format.group_size, (group + 1) * format.group_size)
                exact = int(integers[part] @ (weight[output, part] - zero[output, group]))
                total = total + np.float32(exact) * scale[output, group]
            out[row, output] = total * (largest / np.float32(127))
    return out if bias is None else out + bias.numpy()


@settings(max_examples=25)
@given(formats(), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_the_product_is_what_the_arithmetic_says(
    chosen: tuple[Integers, int], rows: int, num_tokens: int, biased: bool, seed: int
) -> None:
    format, in_features = chosen
    generator = torch.Generator().manual_seed(seed)
    tensors = format.quantize(torch.randn(rows, in_features, generator=generator))
    bias = torch.randn(rows, generator=generator) if biased else None
    x = torch.randn(num_tokens, in_features, generator=generator)
    found = IntegerLinear(tensors, format, bias)(x)
    assert np.array_equal(found.numpy(), product_by_hand(x, tensors, format, bias))


def test_sums_beyond_float32_are_exact() -> None:
    """4097 products of 127 * 127, and one of 1: in float32, the one would be lost on the way."""
    weight = torch.full((1, 4098), 127, dtype=torch.int8)
    weight[0, 0] = 1
    format = Integers(8, 4098)
    x = torch.full((1, 4098), 127.0)
    x[0, 0] = 1.0
    found = IntegerLinear({"weight": weight, "scale": torch.ones(1, 1)}, format, None)(x)
    assert float(found) == float(np.float32(4097 * 127 * 127 + 1))


def test_no_sum_that_is_taken_at_once_can_be_rounded() -> None:
    assert module._EXACT_INPUTS * 127 * 127 < 1 << 24


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9))
def test_rows_are_rounded_half_to_even_after_one_rounding_of_the_factor(values: list[float]) -> None:
    integers, scale = quantize_rows(torch.tensor([values]))
    largest = np.float32(max(abs(value) for value in values))
    assert float(scale) == float(largest / np.float32(127))
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(127) / largest
    if not math.isfinite(factor):
        assert not integers.any()
        return
    for value, integer in zip(values, integers[0].tolist(), strict=True):
        wanted = round(Fraction(float(np.float32(value) * factor)))
        assert integer == max(-127, min(127, wanted))


def test_a_row_that_is_not_a_number_stays_one_and_harms_no_other() -> None:
    format = Integers(8, 8)
    linear = IntegerLinear(format.quantize(torch.randn(3, 8)), format, None)
    x = torch.randn(3, 8)
    expected = linear(x)
    x[1, 4] = torch.nan
    assert bool(linear(x)[1].isnan().all())
    assert torch.equal(linear(x)[[0, 2]], expected[[0, 2]])


def test_leading_dimensions_are_kept() -> None:
    format = Integers(4, 32)
    linear = IntegerLinear(format.quantize(torch.randn(5, 64)), format, torch.randn(5))
    x = torch.randn(2, 3, 64)
    assert torch.equal(linear(x), linear(x.view(6, 64)).view(2, 3, 5))
    assert linear.num_bytes == 5 * 64 + 5 * 2 * 5


# ---- native, at every level ----


@settings(max_examples=60)
@given(formats(), st.integers(1, 70), st.integers(1, 40), st.booleans(), st.integers(0, 1000))
def test_the_native_product_has_the_same_bits(
    team: Team, chosen: tuple[Integers, int], rows: int, num_tokens: int, biased: bool, seed: int
) -> None:
    format, in_features = chosen
    generator = torch.Generator().manual_seed(seed)
    tensors = format.quantize(torch.randn(rows, in_features, generator=generator))
    bias = torch.randn(rows, generator=generator) if biased else None
    x = torch.randn(num_tokens, in_features, generator=generator)
    x[0, 0] = 0
    packed = PackedLinear.of_integers(team, tensors, format, bias)
    assert torch.equal(packed(x), IntegerLinear(tensors, format, bias)(x))
    assert packed.activation_dtype == torch.int8
    assert torch.equal(packed.dense(), format.unpack(tensors))


@pytest.mark.parametrize("format", [Integers(8, 96), Integers(4, 32)])
def test_a_gated_native_linear_gates_the_same_products(team: Team, format: Integers) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = format.quantize(torch.randn(2 * 21, 96, generator=generator))
    x = torch.randn(9, 96, generator=generator)
    found = PackedLinear.of_integers(team, tensors, format, None, gated=True)(x)
    gate, up = IntegerLinear(tensors, format, None)(x).chunk(2, dim=-1)
    assert_within(found, ranges.silu_mul(ranges.exactly(gate), ranges.exactly(up)))


def test_native_rows_that_cannot_be_scaled_are_zeros_or_not_numbers(team: Team) -> None:
    format = Integers(8, 24)
    tensors = format.quantize(torch.randn(5, 24, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(4, 24)
    x[0], x[1], x[2, 3] = 0, 1e-40, torch.nan
    found = PackedLinear.of_integers(team, tensors, format, None)(x)
    assert not found[:2].any()
    assert bool(found[2].isnan().all())
    assert torch.equal(found[3:], IntegerLinear(tensors, format, None)(x)[3:])
