"""The native kernels pack ggml's blocks to what they make of the tensors that torch makes of them, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.cpu.native import NativeLinear, Team
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Integers, common_format, widen
from penstock.engine.quant.storages.gguf import TYPES, BlockRows, StoredBlocks
from tests.engine.ggml_blocks import random_rows

UNIT = 256


def part_of(name: str, num_rows: int, in_features: int, seed: int = 0) -> BlockRows:
    return BlockRows(name, TYPES[name], random_rows(name, num_rows, in_features // TYPES[name].block, seed))


def by_torch(parts: Sequence[BlockRows], format: Integers) -> NamedTensors:
    """What the reader of checkpoints makes of them for other kernels."""
    repacked = [
        widen(part.blocks.repack({"weight": part.rows}), part.blocks.groups, format) for part in parts
    ]
    ordered = [
        tensors if part.order is None else {name: tensor[part.order] for name, tensor in tensors.items()}
        for part, tensors in zip(parts, repacked, strict=True)
    ]
    return format.join(ordered)


def assert_packed_alike(
    team: Team, parts: Sequence[BlockRows], bias: Tensor | None = None, *, gated: bool = False
) -> None:
    format = common_format([part.blocks.groups for part in parts])
    tensors = by_torch(parts, format)
    expected = NativeLinear.of(team, tensors, format, bias, gated)
    packed = NativeLinear.of(team, StoredBlocks(parts, lambda: tensors), format, bias, gated)
    assert packed.num_bytes == expected.num_bytes
    assert packed.dense().view(torch.int32).equal(expected.dense().view(torch.int32))
    x = torch.randn(3, packed.in_features, generator=torch.Generator().manual_seed(1))
    assert packed(x).view(torch.int32).equal(expected(x).view(torch.int32))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_a_type(team: Team, name: str, num_rows: int) -> None:
    assert_packed_alike(team, [part_of(name, num_rows, 3 * UNIT)], torch.randn(num_rows))


@pytest.mark.parametrize("name", TYPES)
def test_gates_and_ups(team: Team, name: str) -> None:
    assert_packed_alike(
        team, [part_of(name, 19, UNIT, 1), part_of(name, 19, UNIT, 2)], torch.randn(38), gated=True
    )


@pytest.mark.parametrize("first", TYPES)
def test_types_that_are_multiplied_as_one(team: Team, first: str) -> None:
    for second in TYPES:
        assert_packed_alike(
            team, [part_of(first, 21, 2 * UNIT), part_of(second, 5, 2 * UNIT), part_of(first, 7, 2 * UNIT)]
        )


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "IQ4_NL"])
def test_rows_of_several_blocks_and_no_unit(team: Team, name: str) -> None:
    assert_packed_alike(team, [part_of(name, 20, 96)])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_rows_of_one_block(team: Team, name: str) -> None:
    assert_packed_alike(team, [part_of(name, 20, 32)])


def test_rows_in_another_order_and_apart_in_memory(team: Team) -> None:
    order = torch.arange(32).view(2, 8, 2).mT.flatten()
    wide, every = part_of("Q4_K", 32, 4 * UNIT), part_of("Q6_K", 20, 2 * UNIT)
    size = TYPES["Q4_K"].num_bytes
    assert_packed_alike(
        team,
        [
            BlockRows("q", wide.blocks, wide.rows[:, size : 3 * size], order),
            BlockRows("k", every.blocks, every.rows[::2]),
        ],
    )


@pytest.mark.parametrize("outlier", [1.0, 50.0])
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_products_are_nearer_than_those_of_ggml(team: Team, name: str, outlier: float) -> None:
    """ggml rounds 256 activations at a time beside these types (its Q8_K), to multiples of a 127th of the largest."""
    for in_features in (UNIT, 2 * UNIT, 6 * UNIT):
        part = part_of(name, 48, in_features, seed=in_features)
        format = part.blocks.groups
        packed = NativeLinear.of(team, StoredBlocks([part], partial(by_torch, [part], format)), format, None)
        x = torch.randn(16, in_features, generator=torch.Generator().manual_seed(in_features))
        x[:, 7::UNIT] *= outlier
        blocks = torch.unflatten(x, 1, (-1, UNIT))
        unit = blocks.abs().amax(-1, keepdim=True) / 127
        weight = packed.dense().double()
        exact, of_ggml = (
            F.linear(each.double(), weight) for each in (x, ((blocks / unit).round() * unit).flatten(1))
        )
        assert (packed(x) - exact).square().mean() < (of_ggml - exact).square().mean()


@pytest.mark.parametrize(("name", "start", "fault"), [("Q4_1", 0, "scales"), ("Q4_K", 2, "offsets")])
def test_the_part_that_is_not_finite_is_named(team: Team, name: str, start: int, fault: str) -> None:
    parts = [part_of("Q8_0", 3, UNIT), part_of(name, 3, UNIT)]
    parts[1].rows[2, start : start + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    format = common_format([part.blocks.groups for part in parts])
    with pytest.raises(CheckpointError, match=f"^{name} has {fault} that are not finite$"):
        NativeLinear.of(team, StoredBlocks(parts, dict), format, None)
