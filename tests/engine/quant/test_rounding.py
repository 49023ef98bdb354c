"""Rounding groups of weights: no worse than simpler ways, and the same bits in native code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kernels.cpu.library import load_library
from penstock.engine.kernels.cpu.rounding import native_rounding
from penstock.engine.quant.integers import Factors, Integers
from penstock.engine.quant.rounding import Floats, column_squares, column_units, importance, round_groups
from tests.few import examples


def random_groups(rows: int, groups: int, n: int, scale: float, seed: int) -> Floats:
    """Weights that are 0, all alike or far from 0 here and there."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((rows, groups, n)) + generator.standard_normal((rows, groups, 1))
    weight[generator.random(weight.shape) < 0.1] = 0
    weight[generator.random((rows, groups)) < 0.1] = generator.choice([0.0, -0.0, 1.0, -3.0])
    return (weight * scale).astype(np.float32)


def unpacked(made: dict[str, np.ndarray], n: int) -> Floats:
    scale, offset = (
        torch.from_numpy(made[name].view(np.int16)).view(torch.bfloat16).float().numpy()[..., None]
        for name in ("scale", "offset")
    )
    found: Floats = made["weight"].reshape(*scale.shape[:2], n).astype(np.float32) * scale + offset
    return found


@settings(max_examples=examples(40))
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([16, 32, 48, 64, 128]),
    st.integers(2, 6),
    st.sampled_from([1e-38, 1e-20, 0.02, 1.0, 3e4]),
    st.integers(0, 1000),
)
def test_native_rounding_gives_the_same_bits(
    rows: int, groups: int, n: int, bits: int, scale: float, seed: int
) -> None:
    weight = random_groups(rows, groups, n, scale, seed)
    columns = weight.reshape(rows, -1)
    units = column_units(np.abs(columns).max(0))
    counted = importance(column_squares(columns, units)).reshape(groups, n)
    assert_same(weight, bits, counted)
    assert_same(weight, 8, None)
    assert_same(weight, 8, None, rotation=min(n & -n, 128))


@pytest.mark.parametrize("n", [1, 7, 255, 577])
def test_native_rounding_takes_rows_of_any_size(n: int) -> None:
    assert_same(random_groups(5, 1, n, 0.02, 0), 8, None)


def assert_same(weight: Floats, bits: int, counted: Floats | None, rotation: int = 0) -> None:
    wanted = round_groups(weight, bits, counted, rotation)
    found = native_rounding(load_library(print))(weight, bits, counted, rotation)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name].view(np.uint8), np.ascontiguousarray(array).view(np.uint8)), name


@settings(max_examples=examples(40))
@given(st.sampled_from([32, 64, 128]), st.booleans(), st.integers(0, 1000))
def test_the_error_is_less_than_that_of_even_steps_and_of_clipped_ones(
    n: int, equal: bool, seed: int
) -> None:
    weight = np.random.default_rng(seed).standard_normal((4, 6, n)).astype(np.float32)
    counted = np.ones((6, n), np.float32) if equal else np.exp2(weight[0] * 2)
    found = error(unpacked(round_groups(weight, 4, counted), n), weight, counted)
    assert found < min(error(clipped(weight, share), weight, counted) for share in (1, 0.95, 0.9, 0.85, 0.8))


def clipped(weight: Floats, share: float) -> Floats:
    """Weights rounded to 16 steps that span a share of each group's range, 0 among them."""
    low = np.minimum(weight.min(-1, keepdims=True), 0)
    step = (np.maximum(weight.max(-1, keepdims=True), 0) - low) * share / 15
    zero = np.rint(-low * share / step)
    found: Floats = np.clip(np.rint(weight / step), -zero, 15 - zero) * step
    return found


def error(found: Floats, weight: Floats, counted: Floats) -> float:
    return float((np.square(found - weight, dtype=np.float64) * counted).sum())


def test_columns_of_small_weights_are_rounded_with_more_care() -> None:
    """They multiply the largest inputs."""
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    weight[:, 5] *= 0.05
    format = Integers(4, 64, has_offset=True, factors=Factors.HALF)
    squares = (format.unpack(format.quantize(weight)) - weight).square().mean(0)
    assert squares[5] < squares.mean() / 4


def test_columns_of_small_weights_count_more_whatever_the_unit() -> None:
    squares = np.array([4.0, 1.0, 0.25, 0.0, 1.0])
    counted = [1, 1, 4, 4096, 1]
    assert importance(squares).tolist() == importance(squares * 1e-9).tolist() == counted
    assert np.ptp(importance(np.zeros(3))) == 0


def test_the_order_of_rows_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, order = torch.randn(300, 64, generator=generator), torch.randperm(300, generator=generator)
    format = Integers(4, 32, has_offset=True, factors=Factors.HALF)
    one, other = format.quantize(weight), format.quantize(weight[order])
    for name, tensor in one.items():
        assert torch.equal(tensor[order], other[name])
