"""AWQ: inputs that matter are scaled up, and that pays."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.quant.awq import input_scales, round_clipped
from penstock.engine.quant.grid import Grid

GRID = Grid(4, 32, True, torch.float16)
IN = 64


def inputs() -> Tensor:
    """Returns inputs [samples, in], with a few channels that are much larger than the rest."""
    x = torch.randn(800, IN, generator=torch.Generator().manual_seed(1))
    x[:, [3, 40]] *= 30
    return x


def hessian() -> Tensor:
    return inputs().T @ inputs() / 800


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(rows, IN, generator=generator) for rows in (48, 16)]


def error(scales: Tensor) -> float:
    """The mean square of the difference of the outputs, from the inputs themselves."""
    total = 0.0
    for weight in weights():
        seen = hessian() / torch.outer(scales, scales)
        found = round_clipped(weight * scales, seen, GRID).weight() / scales
        total += float((inputs() @ (found - weight).T).square().mean(0).sum())
    return total


def test_large_inputs_are_scaled_up_and_that_pays() -> None:
    scales = input_scales(weights(), hessian(), GRID)
    others = [i for i in range(IN) if i not in (3, 40)]
    assert scales[[3, 40]].min() > 1.5 * scales[others].max()
    assert error(scales) < 0.7 * error(torch.ones(IN))


def test_equal_inputs_are_left_alone() -> None:
    scales = input_scales(weights(), torch.eye(IN), GRID)
    torch.testing.assert_close(scales, torch.ones(IN))


def test_shared_scales_are_the_same() -> None:
    scales = input_scales(weights(), hessian(), GRID, (2, 4, 8)).view(2, 4, 8)
    assert torch.equal(scales, scales[:, :1].expand(2, 4, 8))
    assert scales[0, 0, 3] > 1.5 * scales[0, 0, 4]  # channel 3, and 40 in the other part
    assert scales[1, 0, 0] > 1.5 * scales[1, 0, 1]


def test_inputs_that_are_always_zero() -> None:
    dead = hessian()
    dead[5] = dead[:, 5] = 0
    assert input_scales(weights(), dead, GRID).isfinite().all()
    assert input_scales(weights(), torch.zeros(IN, IN), GRID).isfinite().all()
