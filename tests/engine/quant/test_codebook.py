"""Weights as places in a table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quant import codebook
from engine.quant.codebook import Codebook

TABLE = tuple(x / 8 - 1 for x in range(16))


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from([1, 7, 16]), st.integers(1, 99))
def test_a_weight_is_its_number_in_the_table_times_the_scale_of_its_group(
    rows: int, groups: int, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    format = Codebook("test", TABLE, size)
    weight = torch.randint(16, (rows, groups * size), dtype=torch.uint8, generator=generator)
    scale = torch.rand(rows, groups, generator=generator)
    found = format.unpack({"weight": weight, "scale": scale})
    row, column = rows // 2, groups * size - 1
    assert found.shape == weight.shape
    assert found[row, column] == torch.tensor(TABLE[int(weight[row, column])]) * scale[row, column // size]


def test_rows_are_looked_up_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    format = Codebook("test", TABLE, 16)
    tensors = {"weight": torch.randint(16, (33, 32), dtype=torch.uint8), "scale": torch.rand(33, 2)}
    whole = format.unpack(tensors)
    monkeypatch.setattr(codebook, "_ELEMENTS_AT_A_TIME", 64)
    assert torch.equal(format.unpack(tensors), whole)


def test_parts_are_joined_row_by_row() -> None:
    format = Codebook("test", TABLE, 8)
    parts = [
        {"weight": torch.randint(16, (rows, 24), dtype=torch.uint8), "scale": torch.rand(rows, 3)}
        for rows in (4, 5)
    ]
    joined = format.join(parts)
    assert {name: tuple(tensor.shape) for name, tensor in joined.items()} == dict(format.shapes(9, 24))
    assert torch.equal(format.unpack(joined), torch.cat([format.unpack(part) for part in parts]))
    assert sum(tensor.nbytes for tensor in joined.values()) == format.num_bytes(9, 24, torch.float32)
