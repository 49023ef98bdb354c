"""Weights as places in a table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.quant import formats
from penstock.engine.quant.codebook import NF4, Codebook
from penstock.engine.quant.storages.bitsandbytes import TABLES
from tests.few import examples

TABLE = tuple(x / 8 - 1 for x in range(16))


@settings(max_examples=examples(30))
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
    monkeypatch.setattr(formats, "ELEMENTS_AT_A_TIME", 64)
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
    assert joined["weight"].nbytes // 2 + joined["scale"].nbytes == format.num_bytes(9, 24, torch.float32)


@pytest.mark.parametrize("table", [NF4, TABLE, TABLES["fp4"]], ids=["nf4", "even", "fp4"])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_every_weight_becomes_the_nearest_number(table: tuple[float, ...], size: int) -> None:
    format = Codebook("test", table, size)
    weight = torch.randn(70, 3 * size, generator=torch.Generator().manual_seed(size))
    tensors = format.quantize(weight)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == dict(
        format.shapes(70, 3 * size)
    )
    groups = weight.view(70, 3, size, 1)
    largest = max(map(abs, table))
    numbers = torch.tensor(table) * (groups.abs().amax((2, 3), keepdim=True) / largest)
    nearest = (groups - numbers).abs().amin(-1)
    error = (format.unpack(tensors).view(70, 3, size) - groups[..., 0]).abs()
    assert bool((error <= nearest + 1e-6 * groups.abs().amax()).all())


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(33, 128, generator=torch.Generator().manual_seed(5))
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    theirs = functional.dequantize_4bit(packed, state)
    format = Codebook("nf4", NF4, 64)
    assert torch.equal(format.unpack(format.quantize(weight)), theirs)


def test_groups_of_zeros_stay_zeros() -> None:
    format = Codebook("nf4", NF4, 32)
    assert not format.unpack(format.quantize(torch.zeros(3, 64))).any()
