"""What the cache stores comes back, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.model.safetensors import DTYPES
from penstock.engine.quant.codebook import NF4, Codebook
from penstock.engine.quant.float8 import Float8, Scaling
from penstock.engine.quant.formats import NamedTensors, Rounding
from penstock.engine.quant.integers import Integers
from penstock.engine.quant.kept import KeptTensors

ROWS, COLUMNS = 5, 96


def assert_comes_back(format: Rounding, tensors: NamedTensors) -> NamedTensors:
    """Returns what is stored."""
    kept = KeptTensors(format)
    stored = kept.store(tensors)
    announced = {
        tensor.suffix: (tensor.shape, DTYPES[tensor.dtypes[0]]) for tensor in kept.tensors(ROWS, COLUMNS)
    }
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == announced
    assert kept.format(ROWS, COLUMNS) == format
    found = kept.repack(stored)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    return stored


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_all_integers_come_back(bits: int, has_offset: bool, is_permuted: bool) -> None:
    format = Integers(bits, 32, has_offset, is_permuted)
    of_type = {"weight": torch.int8, "permutation": torch.int32}
    tensors = {
        name: torch.arange(torch.Size(shape).numel()).view(shape).to(of_type.get(name, torch.float32))
        for name, shape in format.shapes(ROWS, COLUMNS)
    }
    integers = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % (1 << bits)
    tensors["weight"] = (integers + format.lowest).to(torch.int8)
    assert assert_comes_back(format, tensors)["weight"].nbytes == ROWS * COLUMNS * bits // 8


def test_all_places_of_a_codebook_come_back() -> None:
    places = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS) % 16
    tensors = {"weight": places.to(torch.uint8), "scale": torch.rand(ROWS, COLUMNS // 32)}
    assert assert_comes_back(Codebook("nf4", NF4, 32), tensors)["weight"].nbytes == ROWS * COLUMNS // 2


@pytest.mark.parametrize("scaling", Scaling)
def test_all_numbers_of_e4m3_come_back(scaling: Scaling) -> None:
    format = Float8(scaling)
    tensors = format.quantize(torch.randn(ROWS, COLUMNS))
    assert assert_comes_back(format, tensors)["weight"].nbytes == ROWS * COLUMNS
