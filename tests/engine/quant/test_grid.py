"""Rounding to a grid: against all of its levels, one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.quant.grid import SHARES, Grid, group_blocks, round_to_nearest

GRIDS = [
    Grid(bits, group_size, symmetric, dtype)
    for bits, symmetric in ((4, True), (4, False), (8, True))
    for group_size, dtype in ((16, torch.float16), (None, torch.bfloat16), (32, torch.float32))
]


def random_weight(rows: int = 6, columns: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator) + 0.05


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_weight_becomes_the_nearest_level(grid: Grid) -> None:
    weight = random_weight()
    levels = grid.fitted(weight)
    found = grid.nearest(weight, levels)
    every = torch.arange(grid.lowest, grid.highest + 1).float()
    groups = torch.unflatten(weight, 1, (levels.scale.shape[1], -1))
    stood_for = (every - levels.zero.unsqueeze(-1)) * levels.scale.float().unsqueeze(
        -1
    )  # [out, groups, levels]
    nearest = (groups.unsqueeze(-1) - stood_for.unsqueeze(2)).abs().amin(-1)
    error = torch.unflatten(found.weight() - weight, 1, nearest.shape[1:]).abs()
    torch.testing.assert_close(error, nearest, rtol=1e-5, atol=1e-6)
    assert levels.scale.dtype == grid.scale_dtype
    assert found.integers.dtype == torch.int8
    assert int(found.integers.min()) >= grid.lowest
    assert int(found.integers.max()) <= grid.highest


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_zero_is_a_level(grid: Grid) -> None:
    weight = random_weight().abs() + 1  # all of one sign: the range of a group does not reach 0 by itself
    weight[:, ::7] = 0
    assert (grid.nearest(weight).weight()[:, ::7] == 0).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-9, 3e4])
def test_groups_without_a_range(grid: Grid, value: float) -> None:
    weight = torch.full((2, 64), value)
    found = round_to_nearest(weight, torch.empty(0), grid).weight()
    torch.testing.assert_close(found, weight, rtol=0.01, atol=1e-6)


def test_clipping_lowers_the_error_that_it_is_meant_to_lower() -> None:
    grid = Grid(4, 16, False, torch.float16)
    weight = random_weight(40)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(500, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    hessian = inputs.T @ inputs / 500
    blocks = group_blocks(hessian, 16)

    def plain(weights: Tensor) -> Tensor:
        return torch.unflatten((weights - weight).square(), 1, (-1, 16)).sum(-1)

    def of_outputs(weights: Tensor) -> Tensor:
        wrong = torch.unflatten(weights - weight, 1, (-1, 16))
        return torch.stack([((wrong[:, g] @ blocks[g]) * wrong[:, g]).sum(-1) for g in range(4)], 1)

    spanning = grid.nearest(weight).weight()
    fitted = grid.nearest(weight, grid.fitted(weight)).weight()
    weighed = grid.nearest(weight, grid.fitted(weight, blocks, SHARES)).weight()
    assert plain(fitted).sum() < plain(spanning).sum()
    assert of_outputs(weighed).sum() < of_outputs(fitted).sum()


def test_the_blocks_of_a_hessian_lie_on_its_diagonal() -> None:
    hessian = torch.arange(36.0).view(6, 6)
    expected = torch.stack([hessian[:2, :2], hessian[2:4, 2:4], hessian[4:, 4:]])
    assert torch.equal(group_blocks(hessian, 2), expected)
