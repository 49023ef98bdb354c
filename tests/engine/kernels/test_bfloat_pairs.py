"""Products of bfloat16 by AVX-512 BF16 are, bit for bit, what Intel's manual says of VDPBF16PS."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.kernels.cpu.levels import AVX512BF16
from penstock.engine.kernels.cpu.native import NativeLinear, Team
from tests.engine.kernels.levels import LEVELS

pytestmark = pytest.mark.skipif(AVX512BF16 not in LEVELS, reason="needs a processor with AVX-512 BF16")

EXPONENTS = {
    "any": (0, 255),
    "ordinary": (120, 134),
    "denormal operands": (0, 130),
    "denormal sums": (60, 66),
    "infinite sums": (187, 193),
}
"""The exponents of the operands, as they are stored."""


@pytest.fixture(scope="module", params=[AVX512BF16])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def in_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """The products of rows [M, K] and weights [N, K], both bfloat16, in float32 [M, N].

    Neighbours in k are a pair: the second one enters the sum by a fused multiply-add, and then the first. Denormal
    numbers become zeros, whether they are operands or sums. K is padded to a multiple of 32, which takes the sign from
    a sum of -0.
    """
    rows, columns = (F.pad(rounded(t.double()), (0, -t.shape[1] % 32)) for t in (x, weight))
    total = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    for first in range(0, rows.shape[1], 2):
        for k in reversed(range(first, min(first + 2, rows.shape[1]))):
            # Exact enough: beside one of 24 bits, a product of 16 bits is never so small that float64 loses what
            # decides how float32 rounds.
            total = rounded(total + rows[:, k, None] * columns[:, k])
    return total.float()


def rounded(x: Tensor) -> Tensor:
    """The nearest float32; zero for a number that is below the normal ones when it has 24 bits."""
    is_denormal = (x * 2.0**100).float().abs() < 2.0 ** (100 - 126)
    return torch.where(is_denormal, 0 * x, x.float().double())


def numbers(shape: tuple[int, int], exponents: tuple[int, int], seed: int) -> Tensor:
    """Any bits of bfloat16, but exponents in a range."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
    exponent = torch.randint(exponents[0], exponents[1] + 1, shape, generator=generator, dtype=torch.int16)
    return (bits & ~(255 << 7) | exponent << 7).view(torch.bfloat16)


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """NaNs are all alike."""
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("exponents", EXPONENTS.values(), ids=EXPONENTS.keys())
def test_a_product_is_that_of_the_manual(team: Team, exponents: tuple[int, int]) -> None:
    """Two million numbers of every kind."""
    x, weight = numbers((600, 7), exponents, 0), numbers((500, 7), exponents, 1)
    linear = NativeLinear(team, weight.float(), None, torch.bfloat16)
    assert_same_bits(linear(x.float()), in_pairs(x, weight))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 2), (33, 37), (100, 1100)])
def test_every_block_of_rows_and_panels_adds_in_the_same_order(team: Team, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(n, k, generator=generator).bfloat16()
    linear = NativeLinear(team, weight.float(), None, torch.bfloat16)
    x = torch.randn(200, k, generator=generator)
    wanted = in_pairs(x.bfloat16(), weight)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 97, 200):
        assert_same_bits(linear(x[:rows]), wanted[:rows])
