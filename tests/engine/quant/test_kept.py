"""What the cache stores comes back, whatever the integers are."""

from __future__ import annotations

import pytest
import torch

from engine.quant.integers import Integers
from engine.quant.kept import Kept

ROWS, COLUMNS = 5, 96


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
    kept = Kept(format)
    stored = kept.store(tensors)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        tensor.suffix: tensor.shape for tensor in kept.tensors(ROWS, COLUMNS)
    }
    assert stored["weight"].nbytes == ROWS * COLUMNS * bits // 8
    assert kept.format(ROWS, COLUMNS) == format
    found = kept.repack(stored)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
