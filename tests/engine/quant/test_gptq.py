"""GPTQ against the procedure that it is a faster form of, and what it is for: the error of the outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.quant.gptq import Gptq, inverse_factor
from penstock.engine.quant.grid import Grid, Levels, group_blocks, round_to_nearest

IN = 160  # more than one block of columns, and no multiple of one


def hessian_of(num_inputs: int = IN, samples: int = 600) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(samples, num_inputs, generator=generator) @ torch.randn(
        num_inputs, num_inputs, generator=generator
    )
    mixed = mixed * torch.rand(num_inputs, generator=generator).add(0.1)
    return mixed.T @ mixed / samples


def random_weight(rows: int = 5) -> Tensor:
    return torch.randn(rows, IN, generator=torch.Generator().manual_seed(4))


def one_by_one(
    weight: Tensor, hessian: Tensor, damping: float, order: list[int], levels: Levels, grid: Grid
) -> Tensor:
    """Optimal Brain Quantization in a given order (equations 2 and 3 of the paper), with a new inverse every time."""
    hessian = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    weight, size = weight.double().clone(), grid.group_size_of(weight.shape[1])
    integers = torch.zeros_like(weight)
    left = list(order)
    while left:
        i = left[0]
        inverse = torch.linalg.inv(hessian[left][:, left])
        scale, zero = levels.scale[:, i // size].double(), levels.zero[:, i // size].double()
        integers[:, i] = (torch.round(weight[:, i] / scale) + zero).clamp(grid.lowest, grid.highest)
        wrong = weight[:, i] - (integers[:, i] - zero) * scale
        weight[:, left] -= torch.outer(wrong / inverse[0, 0], inverse[0])
        left = left[1:]
    return integers


@pytest.mark.parametrize("by_activation", [False, True], ids=["in order", "by activation"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_it_is_the_slow_procedure(by_activation: bool, symmetric: bool) -> None:
    grid = Grid(4, 32, symmetric, torch.float16)
    weight, hessian = random_weight(), hessian_of()
    gptq = Gptq(by_activation=by_activation)
    found = gptq(weight.clone(), hessian, grid)
    order = list(range(IN))
    if by_activation:
        order.sort(key=lambda i: -float(hessian[i, i]))
    expected = one_by_one(weight, hessian, gptq.damping, order, found.levels, grid)
    different = (found.integers.double() != expected).float().mean()
    assert different <= 0.005  # rounding errors may tip a weight that lies between two levels


@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_nearer_than_by_rounding_to_nearest(bits: int) -> None:
    grid = Grid(bits, 32, True, torch.float16)
    weight, hessian = random_weight(24), hessian_of()

    def error(found: Tensor) -> Tensor:
        wrong = found - weight
        return ((wrong @ hessian) * wrong).sum()

    gptq = error(Gptq()(weight, hessian, grid).weight())
    assert gptq < 0.6 * error(round_to_nearest(weight, hessian, grid).weight())


def test_the_weight_that_is_given_stays_as_it_is() -> None:
    weight = random_weight()
    before = weight.clone()
    Gptq()(weight, hessian_of(), Grid(4, 32, True, torch.float16))
    assert torch.equal(weight, before)


def test_independent_inputs_are_rounded_to_nearest() -> None:
    """Without correlations no weight can make good for another's error."""
    grid = Grid(4, 32, False, torch.float32)
    squares = torch.rand(IN, generator=torch.Generator().manual_seed(5)) + 0.1
    found = Gptq()(random_weight(), torch.diag(squares), grid)
    assert torch.equal(found.integers, grid.nearest(random_weight(), found.levels).integers)


@pytest.mark.parametrize("samples", [0, 20])
def test_too_few_samples_for_an_inverse(samples: int) -> None:
    weight, grid = random_weight(), Grid(4, 32, True, torch.float16)
    hessian = hessian_of(samples=samples) if samples else torch.zeros(IN, IN)
    found = Gptq()(weight, hessian, grid).weight()
    assert found.isfinite().all()
    assert (found - weight).abs().max() < weight.abs().max()


def test_more_damping_where_there_is_no_factor() -> None:
    hessian = (
        torch.eye(8) - 0.02
    )  # not positive definite with the damping asked for: an eigenvalue of 0.84 - ...
    hessian[0, 0] = -0.005
    upper = inverse_factor(hessian, 1e-4)
    assert upper.isfinite().all()
    assert torch.equal(upper, upper.triu())


def test_the_factor_is_that_of_the_inverse() -> None:
    hessian = hessian_of(24)
    upper = inverse_factor(hessian, 0.01).double()
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(24)
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(24).double(), rtol=0, atol=1e-3)


def test_blocks_are_used_for_levels() -> None:
    assert group_blocks(hessian_of(), 32).shape == (5, 32, 32)
