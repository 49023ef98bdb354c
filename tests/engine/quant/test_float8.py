"""Weights in e4m3: what they are rounded to, and how parts with different scales become one weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.quant.float8 import BLOCK, FLOAT8, LARGEST, Float8, Scaling

SIZES = [(1, 1), (5, 7), (128, 128), (129, 300), (300, 129)]


def random(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scaling", Scaling)
def test_weights_are_rounded_to_the_nearest(scaling: Scaling, size: tuple[int, int]) -> None:
    """By half a step of 3 bits, or of the smallest numbers, which are multiples of 2^-9."""
    format, weight = Float8(scaling), random(*size)
    tensors = format.quantize(weight)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == dict(format.shapes(*size))
    assert tensors["weight"].dtype == FLOAT8
    scale = format.unpack({**tensors, "weight": torch.ones(size).to(FLOAT8)})
    allowed = torch.maximum(weight.abs() / 16, scale / 1024) * (1 + 1e-6)
    assert bool(((format.unpack(tensors) - weight).abs() <= allowed).all())
    assert float(tensors["weight"].float().abs().max()) == LARGEST


@pytest.mark.parametrize("scaling", Scaling)
def test_zeros_stay_zeros(scaling: Scaling) -> None:
    format = Float8(scaling)
    assert not format.unpack(format.quantize(torch.zeros(3, 200))).any()


def test_a_block_has_the_scale_of_its_largest_weight() -> None:
    weight = torch.full((2 * BLOCK, 2 * BLOCK), 0.5)
    weight[BLOCK, 0] = -7
    scale = Float8(Scaling.BLOCK).quantize(weight)["scale"] * LARGEST
    torch.testing.assert_close(scale, torch.tensor([[0.5, 0.5], [7.0, 0.5]]))


@pytest.mark.parametrize("scaling", Scaling)
def test_joined_parts_stand_for_what_they_stood_for(scaling: Scaling) -> None:
    """Also where the rows of a part are no whole blocks."""
    format = Float8(scaling)
    parts = [format.quantize(random(rows, 200) * rows) for rows in (130, 7, 128)]
    joined = format.join(parts)
    assert torch.equal(format.unpack(joined), torch.cat([format.unpack(part) for part in parts]))
    assert torch.equal(format.unpack(format.join([joined])), format.unpack(joined))
    assert joined["weight"].nbytes + joined["scale"].nbytes == format.num_bytes(265, 200)
