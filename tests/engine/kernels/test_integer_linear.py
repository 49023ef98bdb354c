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

from penstock.engine.errors import CheckpointError
from penstock.engine.kernels import linear as module
from penstock.engine.kernels.cpu.native import NativeLinear, Team
from penstock.engine.kernels.linear import IntegerLinear, fused_multiply_add, quantize_rows, round_inputs
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Factors, Inputs, Integers
from penstock.engine.quant.rotation import block_size, rotated
from tests.engine import ranges
from tests.engine.integers import any_integers
from tests.engine.ranges import assert_within
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")


TABLES = (tuple(range(-128, 128, 16)), (*range(-8, 7), 127), (5, -5) * 8)


@st.composite
def formats(draw: st.DrawFn) -> tuple[Integers, int]:
    """A format, and a number of inputs for it."""
    bits, factors = draw(st.sampled_from([2, 3, 4, 5, 6, 8])), draw(st.sampled_from(Factors))
    if factors is Factors.COUNTS:
        group_size = draw(st.sampled_from([16, 32, 64, 128]))
        in_features = 256 * draw(st.integers(1, 3))
    elif bits not in (4, 8) or draw(st.booleans()):
        group_size = draw(st.sampled_from([16, 32, 48, 64, 128, 192]))
        in_features = group_size * draw(st.integers(2, 6))
    else:
        in_features = group_size = draw(st.integers(1, 1024))
    if factors is Factors.ZEROS:
        bits = 4
    has_offset = factors is Factors.ZEROS or draw(st.booleans())
    table = draw(st.sampled_from([(), *TABLES])) if bits == 8 else ()
    is_permuted, is_rotated = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    rotation = block_size(in_features) if is_rotated else 0
    inputs = draw(st.sampled_from(Inputs))
    return Integers(bits, group_size, has_offset, is_permuted, factors, table, inputs, rotation), in_features


HALVES = st.sampled_from([torch.float16, torch.bfloat16])


def nearest_float32(number: Fraction) -> np.float32:
    """The float32 next to a number; of two, the one whose last bit is 0."""
    guess = np.float32(float(number))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - number), int(x.view(np.int32)) & 1))


def product_by_hand(x: Tensor, tensors: NamedTensors, format: Integers, bias: Tensor | None) -> np.ndarray:
    """One operation at a time: integers and fractions, rounded where the specification rounds."""
    weight, scale = tensors["weight"].long().numpy(), format.scale(tensors).numpy()
    offset = None if (found := format.offset(tensors)) is None else found.numpy()
    order = tensors["permutation"].numpy() if format.is_permuted else np.arange(x.shape[1])
    x = rotated(x, format.rotation) if format.rotation else x[:, order]
    out = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for row, values in enumerate(x.numpy()):
        size = x.shape[1] if format.inputs is Inputs.ROW else format.group_size
        parts = integers_by_hand(values.reshape(-1, size))
        for integers, scales in parts if format.inputs is Inputs.FINE else parts[:1]:
            made = np.zeros(weight.shape[0], np.float32)
            for output in range(weight.shape[0]):
                total = np.float32(0)
                for group in range(scale.shape[1]):
                    part = slice(group * format.group_size, (group + 1) * format.group_size)
                    terms = [(int(integers[part] @ weight[output, part]), scale[output, group])]
                    if offset is not None:
                        terms.append((int(integers[part].sum()), offset[output, group]))
                    for exact, by in terms:
                        of_group = np.float32(1) if format.inputs is Inputs.ROW else scales[group]
                        rounded = Fraction(float(np.float32(exact) * of_group))
                        total = nearest_float32(rounded * Fraction(float(by)) + Fraction(float(total)))
                made[output] = total * scales[0] if format.inputs is Inputs.ROW else total
            out[row] += made
    return out if bias is None else out + bias.numpy()


def integers_by_hand(groups: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The integers [in] and scales [groups] of groups [groups, size], and those of what they lack."""
    largest = np.abs(groups).max(1)
    factor = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    scaled, scale = groups * factor[:, None], largest / np.float32(127)
    integers = np.clip(np.rint(scaled), -127, 127)
    rest = np.rint((scaled - integers) * np.float32(254))
    return [
        (integers.astype(np.int64).ravel(), scale),
        (rest.astype(np.int64).ravel(), scale / np.float32(254)),
    ]


@settings(max_examples=examples(25))
@given(formats(), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_the_product_is_what_the_arithmetic_says(
    chosen: tuple[Integers, int], rows: int, num_tokens: int, biased: bool, seed: int
) -> None:
    format, in_features = chosen
    generator = torch.Generator().manual_seed(seed)
    tensors = any_integers(format, rows, in_features, generator)
    bias = torch.randn(rows, generator=generator) if biased else None
    x = torch.randn(num_tokens, in_features, generator=generator)
    found = IntegerLinear(tensors, format, bias)(x)
    assert np.array_equal(found.numpy(), product_by_hand(x, tensors, format, bias))


@settings(max_examples=examples(25))
@given(formats(), st.integers(0, 1000))
def test_the_product_is_near_that_of_the_weight_it_stands_for(
    chosen: tuple[Integers, int], seed: int
) -> None:
    format, in_features = chosen
    generator = torch.Generator().manual_seed(seed)
    tensors = any_integers(format, 5, in_features, generator)
    x = torch.randn(3, in_features, generator=generator)
    weight = format.unpack(tensors)
    ready = rotated(x, format.rotation) if format.rotation else x
    if format.rotation:
        weight = rotated(weight, format.rotation) / format.rotation
    if format.is_permuted:
        ready, weight = (each[:, tensors["permutation"].long()] for each in (x, weight))
    parts = (
        integers.view(3, scale.shape[1], -1).double() * scale.double()[..., None]
        for integers, scale in round_inputs(ready, format)
    )
    rounded, weight = sum(parts, torch.zeros(())).flatten(1), weight.double()
    error = (IntegerLinear(tensors, format, None)(x) - rounded @ weight.T).abs()
    largest = tensors["weight"].double().abs().max() * format.scale(tensors).double().abs().max()
    if (offset := format.offset(tensors)) is not None:
        largest += offset.double().abs().max()
    assert bool((error <= 1e-6 * rounded.abs().sum(-1, keepdim=True) * largest).all())


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=3, max_size=3))
def test_a_fused_multiply_add_is_rounded_once(values: list[float]) -> None:
    a, b, c = (Fraction(value) for value in values)
    assert float(fused_multiply_add(*torch.tensor(values).unbind())) == float(nearest_float32(a * b + c))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_just_beside_a_tie_is_not_taken_for_one(sign: int) -> None:
    """(1 + 2^-23) * (1 - 2^-23) lacks 2^-46 of 1: a float64 that holds the sum does not show it."""
    a, b = torch.tensor(1 + 2.0**-23), torch.tensor(2.0**-24 * (1 - 2.0**-23))
    middle = torch.tensor(1 + 2.0**-23)
    assert float((a.double() * b.double() + middle).float()) != float(middle)
    assert float(fused_multiply_add(a * sign, b, middle)) == float(middle)
    assert float(fused_multiply_add(a * sign, b, -middle)) == -float(middle)


def test_what_is_infinite_stays_so() -> None:
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(fused_multiply_add(torch.ones(2), torch.ones(2), infinite), infinite)


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
    format = Integers(4, 32, has_offset=True)
    linear = IntegerLinear(format.quantize(torch.randn(5, 64)), format, torch.randn(5))
    x = torch.randn(2, 3, 64)
    assert torch.equal(linear(x), linear(x.view(6, 64)).view(2, 3, 5))


# ---- native, at every level ----


@settings(max_examples=examples(100))
@given(formats(), HALVES, st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(0, 1000))
def test_the_native_product_has_the_same_bits(
    team: Team,
    chosen: tuple[Integers, int],
    half: torch.dtype,
    rows: int,
    num_tokens: int,
    biased: bool,
    seed: int,
) -> None:
    format, in_features = chosen
    generator = torch.Generator().manual_seed(seed)
    tensors = any_integers(format, rows, in_features, generator, half)
    bias = torch.randn(rows, generator=generator) if biased else None
    x = torch.randn(num_tokens, in_features, generator=generator)
    x[0, 0] = 0
    packed = NativeLinear.of(team, tensors, format, bias)
    assert torch.equal(packed(x), IntegerLinear(tensors, format, bias)(x))
    assert packed.activation_dtype == torch.int8
    assert torch.equal(packed.dense(), format.unpack(tensors))


@pytest.mark.parametrize(
    "format",
    [
        *(Integers(8, size, offset) for size in (2304, 64) for offset in (False, True)),
        *(Integers(4, size, offset) for size in (2304, 128, 32, 16) for offset in (False, True)),
        Integers(4, 128, True, factors=Factors.ZEROS),
        Integers(4, 768, factors=Factors.HALF),
        Integers(8, 32, factors=Factors.HALF),
        Integers(4, 32, True, factors=Factors.COUNTS),
        Integers(5, 32, True, factors=Factors.COUNTS),
        Integers(6, 16, factors=Factors.COUNTS),
        Integers(2, 16, True, factors=Factors.COUNTS),
        Integers(3, 16, factors=Factors.COUNTS),
        Integers(8, 32, factors=Factors.COUNTS, table=TABLES[0]),
        Integers(8, 2304, inputs=Inputs.ROW, rotation=128),
        Integers(8, 64, inputs=Inputs.ROW),
        Integers(8, 2304, True, inputs=Inputs.FINE),
        Integers(4, 128, True, factors=Factors.ZEROS, inputs=Inputs.FINE),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_a_long_native_product_has_the_same_bits(team: Team, format: Integers, num_tokens: int) -> None:
    """More inputs than are unpacked at a time, more rows and panels than are multiplied at a time."""
    generator = torch.Generator().manual_seed(0)
    tensors = any_integers(format, 200, 2304, generator)
    x = torch.randn(num_tokens, 2304, generator=generator)
    packed = NativeLinear.of(team, tensors, format, None)
    assert torch.equal(packed(x), IntegerLinear(tensors, format, None)(x))
    assert torch.equal(packed.dense(), format.unpack(tensors))


@pytest.mark.parametrize("format", [Integers(8, 96), Integers(4, 32, has_offset=True)])
def test_a_gated_native_linear_gates_the_same_products(team: Team, format: Integers) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = any_integers(format, 2 * 21, 96, generator)
    x = torch.randn(9, 96, generator=generator)
    found = NativeLinear.of(team, tensors, format, None, gated=True)(x)
    gate, up = IntegerLinear(tensors, format, None)(x).chunk(2, dim=-1)
    assert_within(found, ranges.silu_mul(ranges.exactly(gate), ranges.exactly(up)))


def test_native_groups_that_no_kernel_has_are_refused(team: Team) -> None:
    format = Integers(8, 24)
    with pytest.raises(CheckpointError, match="groups of 24 inputs"):
        NativeLinear.of(team, any_integers(format, 5, 96, torch.Generator()), format, None)


def test_native_rows_that_cannot_be_scaled_are_zeros_or_not_numbers(team: Team) -> None:
    format = Integers(8, 24)
    tensors = format.quantize(torch.randn(5, 24, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(4, 24)
    x[0], x[1], x[2, 3] = 0, 1e-40, torch.nan
    found = NativeLinear.of(team, tensors, format, None)(x)
    assert not found[:2].any()
    assert bool(found[2].isnan().all())
    assert torch.equal(found[3:], IntegerLinear(tensors, format, None)(x)[3:])
