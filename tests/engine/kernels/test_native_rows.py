"""Native products of many rows, as a prompt brings them, at every level: each row has the bits that it has alone."""

from __future__ import annotations

import weakref

import pytest
import torch

from penstock.engine.kernels.cpu import library as module
from penstock.engine.kernels.cpu.native import NativeLinear, Team
from penstock.engine.kernels.linear import IntegerLinear
from penstock.engine.quant.integers import Integers

IN, OUT = 96, 88
"""Columns of one group of integers, and rows of a weight: not whole panels, neither together nor in halves."""
DEEP = 1225
"""Columns that tiles take in several blocks, of different lengths, where there are many rows."""
ROWS = (1, 7, 16, 17, 31, 32, 33, 64, 97, 256, 257, 530)
"""Numbers of rows at the edges of tiles, of pairs of tiles, and of what one thread takes up at once."""


def made(
    team: Team, kept: torch.dtype | int, gated: bool, biased: bool, in_features: int = IN
) -> NativeLinear:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(OUT, in_features, generator=generator), torch.randn(OUT, generator=generator)
    if isinstance(kept, torch.dtype):
        return NativeLinear(team, weight, bias if biased else None, kept, gated)
    format = Integers(8, kept)
    return NativeLinear.of(team, format.quantize(weight), format, bias if biased else None, gated)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, IN, IN // 3], ids=str)
@pytest.mark.parametrize(("gated", "biased"), [(False, True), (True, False), (True, True)])
def test_a_row_has_the_same_bits_alone_and_among_many(
    team: Team, kept: torch.dtype | int, gated: bool, biased: bool
) -> None:
    linear = made(team, kept, gated, biased)
    x = torch.randn(max(ROWS), IN, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kept", [torch.bfloat16, DEEP], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_so_has_a_row_of_many_columns(team: Team, kept: torch.dtype | int, gated: bool) -> None:
    linear = made(team, kept, gated, biased=True, in_features=DEEP)
    x = torch.randn(max(ROWS), DEEP, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (33, 257, max(ROWS)):
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_many_rows_of_integers_are_what_the_arithmetic_says(team: Team) -> None:
    generator = torch.Generator().manual_seed(3)
    format = Integers(8, IN)
    tensors, bias = (
        format.quantize(torch.randn(OUT, IN, generator=generator)),
        torch.randn(OUT, generator=generator),
    )
    x = torch.randn(max(ROWS), IN, generator=generator)
    linear = NativeLinear.of(team, tensors, format, bias)
    assert torch.equal(linear(x), IntegerLinear(tensors, format, bias)(x))


def test_large_results_lie_where_one_lay_that_nobody_has(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a result is enough to keep all of it as it is."""
    monkeypatch.setattr(module, "_MAPPED_BYTES", 4 * OUT)
    linear = made(team, torch.bfloat16, gated=False, biased=False)
    x = torch.randn(7, IN, generator=torch.Generator().manual_seed(4))
    expected = linear(x).clone()
    first = weakref.ref(team._kept)
    part = linear(x)[3:]
    assert team._kept is first()
    assert torch.equal(linear(-x), -expected)
    assert team._kept is not first()
    assert torch.equal(part, expected[3:])
