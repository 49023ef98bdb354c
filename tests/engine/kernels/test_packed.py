"""Quantized weights as a GPU keeps them: they stand for what their formats stand for, in no more bytes than planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels.packed import PACKED_FORMATS, UNIT, Code, UnpackedLinear, pack
from penstock.engine.quant.float8 import Float8, Scaling
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Factors, Integers
from penstock.engine.quant.storages.mxfp4 import MXFP4
from tests.engine.integers import any_integers

CPU = torch.device("cpu")


def integers(format: Integers, out_features: int, in_features: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(out_features)
    return any_integers(format, out_features, in_features, generator)


def unpacked(tensors: NamedTensors, format: Integers | Float8) -> Tensor:
    """The weight in the order of x."""
    weight = pack(tensors, format, CPU)
    full = weight.unpack(torch.float32)
    if weight.permutation is None:
        return full
    return torch.empty_like(full).index_copy_(1, weight.permutation.long(), full)


@pytest.mark.parametrize(
    ("format", "in_features"),
    [
        (Integers(8, 75), 75),
        (Integers(8, 32), 96),
        (Integers(8, 16, has_offset=True), 48),
        (Integers(4, 50), 50),
        (Integers(4, 128), 256),
        (Integers(4, 48, has_offset=True, is_permuted=True), 144),
        (Integers(4, 32, has_offset=True, factors=Factors.ZEROS), 96),
        (Integers(5, 32, has_offset=True, factors=Factors.COUNTS), 256),
        (Integers(6, 16, factors=Factors.COUNTS), 512),
        (Integers(2, 16, has_offset=True, factors=Factors.COUNTS), 256),
        (Integers(3, 16, factors=Factors.COUNTS), 256),
        (Integers(8, 32, factors=Factors.HALF, table=tuple(range(-80, 80, 10))), 96),
        (MXFP4, 96),
    ],
)
def test_it_stands_for_what_the_integers_stand_for(format: Integers, in_features: int) -> None:
    tensors = integers(format, 9, in_features)
    assert torch.equal(unpacked(tensors, format), format.unpack(tensors))


@pytest.mark.parametrize("bits", [4, 8])
def test_offsets_that_are_zeros_become_integers(bits: int) -> None:
    """A product with integers is quicker than one with offsets, and rounds less."""
    format = Integers(bits, 32, has_offset=True)
    tensors = integers(format, 9, 64)
    zero = torch.randint(0, 16, (9, 2))
    tensors["offset"] = -zero * tensors["scale"]
    weight = pack(tensors, format, CPU)
    assert weight.offset is None
    assert weight.zero is not None
    assert torch.equal(weight.zero.T, zero.to(torch.int8))
    steps = tensors["weight"].double() - zero.repeat_interleave(32, 1)
    exact = steps * tensors["scale"].double().repeat_interleave(32, 1)
    assert torch.equal(weight.unpack(torch.float32), exact.float())
    tensors["offset"][3, 1] += 0.01
    assert pack(tensors, format, CPU).zero is None


@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("size", [(9, 40), (300, 200)])
def test_it_stands_for_what_floats_of_8_bits_stand_for(scaling: Scaling, size: tuple[int, int]) -> None:
    format = Float8(scaling)
    tensors = format.quantize(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    weight = pack(tensors, format, CPU)
    assert weight.code is Code.FLOAT8
    assert torch.equal(weight.unpack(torch.float32), format.unpack(tensors))
    assert weight.is_per_row == (scaling is not Scaling.BLOCK or size[1] <= 128)


def test_scales_have_the_narrowest_type_that_holds_them() -> None:
    format = Integers(8, 32)
    tensors = integers(format, 5, 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensors["scale"] = (torch.rand(5, 2) * 1e-6 + 1).to(dtype).float() * (
            1e30 if dtype != torch.float16 else 1
        )
        tensors["scale"] = tensors["scale"].to(dtype).float()
        assert pack(tensors, format, CPU).scale.dtype == dtype


def test_scales_of_floats_of_4_bits_have_the_type_that_multiplies_them() -> None:
    """Powers of two, for which float16 would do, too."""
    tensors = integers(MXFP4, 5, 64) | {"scale": torch.full((5, 2), 0.25)}
    assert pack(tensors, MXFP4, CPU).scale.dtype == torch.bfloat16
    tensors["scale"][0] = 1 + 2**-9
    assert pack(tensors, MXFP4, CPU).scale.dtype == torch.float16


@pytest.mark.parametrize(
    "format", [Integers(8, 64), Integers(4, 64), Integers(4, 64, has_offset=True), MXFP4, Float8()]
)
def test_it_takes_no_more_bytes_than_its_format_says(format: Integers | Float8) -> None:
    weight = torch.randn(8, 2 * UNIT)
    tensors = format.quantize(weight) if isinstance(format, Float8) else integers(format, 8, 2 * UNIT)
    assert pack(tensors, format, CPU).num_bytes <= format.num_bytes(8, 2 * UNIT, torch.float32)


def test_a_map_of_unpacked_weights_takes_x_in_the_order_that_it_has() -> None:
    format = Integers(8, 32, is_permuted=True)
    tensors = integers(format, 9, 64)
    x, bias = torch.randn(2, 3, 64), torch.randn(9)
    linear = UnpackedLinear(pack(tensors, format, CPU), bias)
    expected = x.double() @ format.unpack(tensors).double().T + bias.double()
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-3)
    assert isinstance(format, PACKED_FORMATS)
